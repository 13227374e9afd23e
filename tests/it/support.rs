//! Shared by several modules.

use flashtile::cuda::Cuda;
use flashtile::plan::Isa;
use flashtile::{Cpu, MaskKind, PlanOptions, Problem};
use flashtile_testkit::{
    Answer, Case, CaseData, CpuRunner, CudaRunner, Failure, Guarded, Runner, conformance,
};
use std::collections::BTreeSet;
use std::sync::OnceLock;

/// Every instruction set of this machine, single-threaded.
pub(crate) fn runners() -> Vec<CpuRunner> {
    threaded(1)
}

/// Every instruction set of this machine, with plans for `threads` threads. For plain elements: instruction sets that
/// only multiply codes differently are left out.
pub(crate) fn threaded(threads: usize) -> Vec<CpuRunner> {
    quantizing(threads).into_iter().filter(|runner| runner.cpu.facts().isa != Isa::Avx512Vnni).collect()
}

/// Every instruction set of this machine, with plans for `threads` threads.
pub(crate) fn quantizing(threads: usize) -> Vec<CpuRunner> {
    let cpu = |isa| Cpu::with_isa(isa).unwrap().with_threads(threads);
    Cpu::isas().into_iter().map(|isa| CpuRunner::new(cpu(isa))).collect()
}

/// Runs cases on every runner, on two threads, and fails if one is skipped or not within its limits.
pub(crate) fn all_pass(cases: &[Case], runners: &[CpuRunner]) {
    let runners: Vec<&dyn Runner> = runners.iter().map(|r| r as &dyn Runner).collect();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let (mut passed, mut failed, mut worst) = (0, Vec::new(), 0.0f64);
    pool.install(|| {
        conformance(cases, &runners, |result| match &result.result {
            Ok(outcome) => {
                passed += 1;
                worst = worst.max(outcome.out.worst).max(outcome.lse.worst);
            }
            Err(Failure::Skipped(_)) => println!("{result}"),
            Err(_) => failed.push(result.to_string()),
        });
    });
    println!("{passed} passed, the worst element at {worst:.3} of its limit");
    assert!(
        failed.is_empty(),
        "{} of {} failed:\n{}",
        failed.len(),
        passed + failed.len(),
        failed.join("\n")
    );
    assert_eq!(passed, cases.len() * runners.len());
}

/// The first CUDA device, if there is one; otherwise prints that there is none.
pub(crate) fn cuda() -> Option<Cuda> {
    static DEVICE: OnceLock<Option<Cuda>> = OnceLock::new();
    let find = || Cuda::new(0).map_err(|why| println!("SKIPPED, nothing ran on a GPU: {why}")).ok();
    DEVICE.get_or_init(find).clone()
}

/// The first CUDA device, if its kernels multiply by wgmma.
pub(crate) fn cuda_with_wgmma() -> Option<Cuda> {
    cuda().filter(|cuda| cuda.facts().wgmma)
}

/// The CUDA device with aligned tensors, with tensors at odd addresses, and as a device whose thread blocks compute
/// many work tiles.
pub(crate) fn cuda_runners() -> Vec<CudaRunner> {
    let of = |cuda| {
        let runner = CudaRunner::new(cuda);
        [runner.clone(), runner.clone().odd(), runner.narrow()]
    };
    cuda().into_iter().flat_map(of).collect()
}

/// Everything that computes on this machine, with these plan options.
pub(crate) fn all_runners(options: PlanOptions) -> Vec<Box<dyn Runner>> {
    let cpu = runners().into_iter().map(|runner| Box::new(runner.with(options)) as Box<dyn Runner>);
    cpu.chain(cuda_runners().into_iter().map(|runner| Box::new(runner.with(options)) as Box<dyn Runner>))
        .collect()
}

/// Plan options; with `None`, the planner chooses the number of splits.
pub(crate) fn options(splits: Option<usize>, skip_tiles: bool) -> PlanOptions {
    let mut options = PlanOptions::default();
    options.splits = splits;
    options.skip_tiles = skip_tiles;
    options
}

/// The answer of a runner, with memory checked and values not compared.
pub(crate) fn answer(built: &CaseData, runner: &dyn Runner) -> Answer {
    built.run(runner).unwrap_or_else(|failure| panic!("{}: {failure}", runner.name()))
}

pub(crate) fn build(case: &Case) -> CaseData {
    case.build().unwrap_or_else(|e| panic!("{}: {e}", case.name))
}

/// One query row: batch entry, query head, row of the tensor.
pub(crate) type Row = [usize; 3];

/// Query rows that see row `key` of batch entry `batch` and key/value head `kv_head`.
pub(crate) fn seers(built: &CaseData, [batch, kv_head, key]: [usize; 3]) -> BTreeSet<Row> {
    let sequences = built.problem.sequences().iter().enumerate();
    let holders =
        sequences.filter(|(_, s)| s.batch == batch && (s.kv_start..s.kv_start + s.kv_len).contains(&key));
    holders.flat_map(|(index, s)| seers_of(built, index, kv_head, key - s.kv_start)).collect()
}

/// Query rows that see key `j` of a sequence and key/value head `kv_head`, by the definition for a single pair.
pub(crate) fn seers_of(built: &CaseData, index: usize, kv_head: usize, j: usize) -> BTreeSet<Row> {
    let (problem, inputs) = (&built.problem, built.inputs());
    let s = problem.sequences()[index];
    let mut rows = BTreeSet::new();
    for h in (0..problem.dims().q_heads).filter(|h| h / problem.dims().gqa_group() == kv_head) {
        for i in 0..s.q_len {
            let distance = j as i64 - (i as i64 + s.q_offset);
            let visibility = problem.desc().visibility;
            let near = visibility.left().is_none_or(|left| -distance <= left as i64)
                && visibility.right().is_none_or(|right| distance <= right as i64);
            let open = inputs.mask.is_none_or(|mask| mask.bias([index, h, i, j]) != f32::NEG_INFINITY);
            let grows = match (inputs.tree, (j + s.q_len).checked_sub(s.kv_len)) {
                (Some(tree), Some(column)) => tree.bias([0, 0, s.q_start + i, column]) == 0.0,
                _ => true,
            };
            if near && open && grows {
                rows.insert([s.batch, h, s.q_start + i]);
            }
        }
    }
    rows
}

/// Bits of out and of the logsumexp of a row.
pub(crate) fn row_bits(problem: &Problem, answer: &Answer, [b, h, row]: Row) -> Vec<u32> {
    let dims = problem.dims();
    let element = |d: usize| answer.out.get([b, h, row, d]).to_bits();
    let mut bits: Vec<u32> = (0..dims.value_dim).map(element).collect();
    bits.push(answer.lse.slice()[(b * dims.q_heads + h) * dims.q_len + row].to_bits());
    bits
}

/// Every query row of a problem.
pub(crate) fn rows(problem: &Problem) -> impl Iterator<Item = Row> + use<> {
    let dims = *problem.dims();
    (0..dims.batch)
        .flat_map(move |b| (0..dims.q_heads).flat_map(move |h| (0..dims.q_len).map(move |row| [b, h, row])))
}

/// Copies each element of `to` from the element of `from` at the index that `place` gives.
pub(crate) fn copy(from: &Guarded, to: &mut Guarded, place: impl Fn([usize; 4]) -> [usize; 4]) {
    for index in to.indices() {
        to.set(index, from.get(place(index)));
    }
}

/// Sets every element.
pub(crate) fn fill(tensor: &mut Guarded, value: impl Fn([usize; 4]) -> f32) {
    for index in tensor.indices() {
        tensor.set(index, value(index));
    }
}

/// Kinds of masks; additive ones are f16.
pub(crate) const MASK_KINDS: [MaskKind; 2] = [MaskKind::Bool, MaskKind::Additive(flashtile::Dtype::F16)];
