//! The CUDA backend on this machine's device. Without one, the tests print so and pass.

mod gradients;
mod session;

use crate::support::{answer, build, cuda, cuda_runners, cuda_with_wgmma, options};
use flashtile::codec::key_mean;
use flashtile::cuda::{
    CudaError, DeviceError, Gpu, GpuInputs, GpuOutputs, GpuTensor, GpuTensorMut, Memory, Session, StoreError,
};
use flashtile::kernel::ScalarType;
use flashtile::plan::{CudaTile, Sm80Tile, Sm90Tile, machines};
use flashtile::quality::Accumulation;
use flashtile::{
    CacheDesc, CacheError, CacheLayout, CacheShape, Codec, CudaPlan, Dims, Dtype, Inputs, KvCache, Outputs,
    PlanOptions, Problem, ProblemDesc, QOffset, Runner, SeqLens, Sequences, TensorView, TensorViewMut,
    Visibility,
};
use flashtile_testkit::{
    CacheTwins, Case, CudaRunner, DevicePlacement, Failure, Guarded, GuardedRun, Keep, Prepared, Rng,
    RunReport, Runner as CaseRunner, RunnerError, catalogue, conformance, quantized, random_case,
};
use rayon::prelude::*;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn the_catalogue_and_random_cases_pass() {
    let runners = cuda_runners();
    let runners: Vec<&dyn CaseRunner> = runners.iter().map(|r| r as &dyn CaseRunner).collect();
    let random = (0..400).map(|seed| {
        let mut rng = Rng::new(seed);
        random_case(format!("seed {seed}"), &mut |n| rng.below(n))
    });
    let cases: Vec<Case> = catalogue().into_iter().chain(random).collect();
    let (mut passed, mut failed) = (0, Vec::new());
    if !runners.is_empty() {
        conformance(&cases, &runners, |result| match &result.result {
            Ok(_) => passed += 1,
            Err(Failure::Skipped(_)) => println!("{result}"),
            Err(_) => failed.push(result.to_string()),
        });
    }
    println!("{passed} passed");
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
}

/// Sessions of the library, over tensors that they copy to the device.
struct HostTensors(Mutex<Session>);

impl CaseRunner for HostTensors {
    fn name(&self) -> String {
        "cuda session".to_owned()
    }

    fn run(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<RunReport, RunnerError> {
        let accumulation = match problem.dtype() {
            _ if problem.is_quantized() => Accumulation::Operands,
            Dtype::F32 => Accumulation::F32,
            Dtype::F16 | Dtype::BF16 => Accumulation::Probs,
        };
        let computed = self.0.lock().unwrap().compute(problem.desc(), inputs, outputs);
        match computed {
            Ok(()) => Ok(RunReport::new("session".to_owned()).accumulated(accumulation)),
            Err(CudaError::Unsupported(why)) => Err(RunnerError::Unsupported(why.to_string())),
            Err(error) => Err(RunnerError::Error(error.to_string())),
        }
    }
}

#[test]
fn a_session_computes_over_tensors_of_the_host() {
    let Some(cuda) = cuda() else { return };
    let runner = HostTensors(Mutex::new(cuda.open_session().unwrap()));
    let cases: Vec<Case> =
        catalogue().into_iter().step_by(43).chain(quantized().into_iter().step_by(17)).collect();
    let (mut passed, mut failed) = (0, Vec::new());
    conformance(&cases, &[&runner], |result| match &result.result {
        Ok(_) => passed += 1,
        Err(Failure::Skipped(_)) => println!("{result}"),
        Err(_) => failed.push(result.to_string()),
    });
    println!("{passed} passed");
    assert!(failed.is_empty() && passed > 20, "{} failed:\n{}", failed.len(), failed.join("\n"));
}

/// Cases with several splits, and others; every dtype.
fn some_cases() -> Vec<Case> {
    catalogue().into_iter().step_by(3).collect()
}

#[test]
fn two_runs_have_the_same_bits() {
    for runner in cuda_runners() {
        for case in some_cases() {
            let built = build(&case);
            let (a, b) = (answer(&built, &runner), answer(&built, &runner));
            assert!(a.bits() == b.bits(), "{} on {}", case.name, runner.name());
        }
    }
}

#[test]
fn bits_do_not_depend_on_skipping_tiles_or_on_where_tensors_lie() {
    let Some(cuda) = cuda() else { return };
    for case in some_cases() {
        let built = build(&case);
        // One split per tile: where keys are cut depends on how many there are to compute.
        let runner = CudaRunner::new(cuda.clone()).with(options(Some(1), true));
        let want = answer(&built, &runner).bits();
        for other in [runner.clone().odd(), runner.clone().with(options(Some(1), false))] {
            assert!(answer(&built, &other).bits() == want, "{} on {}", case.name, other.name());
        }
    }
}

#[test]
fn any_number_of_splits_is_within_the_limits() {
    let Some(cuda) = cuda() else { return };
    for case in some_cases() {
        let prepared = Prepared::new(&case).unwrap();
        for splits in [1, 2, 3, 7] {
            let runner = CudaRunner::new(cuda.clone()).with(options(Some(splits), true));
            match prepared.run(&runner) {
                Ok(_) | Err(Failure::Skipped(_)) => {}
                Err(failure) => panic!("{} in {splits} splits: {failure}", case.name),
            }
        }
    }
}

#[test]
fn every_tile_is_within_the_limits() {
    let Some(cuda) = cuda() else { return };
    let mut tiles = vec![];
    for keys in [16, 32, 64, 128] {
        for (warps_q, fragments) in [(8, 2), (8, 1), (4, 2), (4, 1), (2, 1)] {
            tiles.push(Sm80Tile::new(warps_q, 1, fragments, keys, 2));
        }
        tiles.push(Sm80Tile::new(1, 4, 1, keys, 3));
    }
    tiles.extend([Sm80Tile::new(4, 1, 1, 32, 4), Sm80Tile::new(1, 8, 1, 16, 2)]);
    tiles.extend([Sm80Tile::new(4, 1, 1, 48, 2), Sm80Tile::new(8, 1, 1, 16, 2)]);
    tiles.push(Sm80Tile::new(4, 1, 1, 64, 2).with_q_in_registers(true));
    let mut tiles: Vec<CudaTile> = tiles.into_iter().map(CudaTile::from).collect();
    let wgmma =
        [(1, 64, 1), (1, 128, 2), (2, 16, 4), (2, 32, 3), (2, 48, 2), (2, 80, 2), (2, 96, 2), (3, 128, 2)];
    tiles.extend(
        wgmma.map(|(warpgroups, keys, stages)| CudaTile::from(Sm90Tile::new(warpgroups, keys, stages))),
    );
    tiles.push(Sm90Tile::new(2, 64, 2).with_ping_pong(false).into());
    let mut cases: Vec<Case> = catalogue().into_iter().step_by(40).collect();
    cases.push(Case::new("aligned".to_owned(), [1, 2, 1, 100, 300, 32, 32], Dtype::BF16));
    let passed = AtomicUsize::new(0);
    // For most cases each tile is another kernel: as many are compiled in parallel as there are cores.
    tiles.into_par_iter().for_each(|tile| {
        for case in &cases {
            let prepared = Prepared::new(case).unwrap();
            let runner = CudaRunner::new(cuda.clone()).tiled(tile);
            for runner in [runner.clone(), runner.narrow()] {
                match prepared.run(&runner) {
                    Ok(_) => _ = passed.fetch_add(1, Ordering::Relaxed),
                    Err(Failure::Skipped(_)) => {}
                    Err(failure) => panic!("{} in {tile:?}: {failure}", case.name),
                }
            }
        }
    });
    let passed = passed.into_inner();
    assert!(passed > 500, "{passed}");
}

/// The planner gives short sequences to other kernels: here the kernels for compute capability 9.0 compute all.
#[test]
fn the_catalogue_passes_with_tiles_of_wgmma() {
    let Some(cuda) = cuda_with_wgmma() else {
        return println!("SKIPPED, nothing ran on a GPU: no device with wgmma");
    };
    let mut cases = catalogue();
    // A process compiles one kernel at a time: several can share the catalogue. Cases of one kernel are neighbours.
    cases.sort_by_key(|case| {
        let desc = &case.desc;
        let modified = desc.softcap.is_some() || desc.alibi || desc.tree;
        let Dims { head_dim, value_dim, .. } = desc.dims;
        let cached = desc.sequences != Sequences::Dense;
        (
            desc.dtype == Dtype::F32,
            head_dim,
            value_dim,
            desc.dtype == Dtype::F16,
            desc.mask.is_some(),
            modified,
            cached,
        )
    });
    let [shard, shards] = shard();
    let cases = &cases[cases.len() * shard / shards..cases.len() * (shard + 1) / shards];
    let tiled = |tile: Sm90Tile| CudaRunner::new(cuda.clone()).tiled(tile);
    let of_16_bits = [
        tiled(Sm90Tile::new(2, 64, 2)),
        tiled(Sm90Tile::new(2, 128, 2)).odd(),
        tiled(Sm90Tile::new(3, 112, 2)),
        tiled(Sm90Tile::new(3, 96, 2).with_ping_pong(false)),
        tiled(Sm90Tile::new(4, 64, 4)),
        tiled(Sm90Tile::wide(1)),
        tiled(Sm90Tile::wide(2)).odd(),
    ];
    let of_f32 = [tiled(Sm90Tile::new(2, 64, 1)), tiled(Sm90Tile::new(1, 48, 1)).odd()];
    let (mut passed, mut failed) = (0, Vec::new());
    for (is_f32, runners) in [(false, &of_16_bits[..]), (true, &of_f32)] {
        let cases: Vec<Case> =
            cases.iter().filter(|case| (case.desc.dtype == Dtype::F32) == is_f32).cloned().collect();
        let runners: Vec<&dyn CaseRunner> = runners.iter().map(|runner| runner as &dyn CaseRunner).collect();
        conformance(&cases, &runners, |result| match &result.result {
            Ok(_) => passed += 1,
            Err(Failure::Skipped(_)) => {}
            Err(_) => failed.push(result.to_string()),
        });
    }
    println!("{passed} passed");
    assert!(
        failed.is_empty() && passed > 500 / shards,
        "{passed} passed, {} failed:\n{}",
        failed.len(),
        failed.join("\n")
    );
}

/// Splits that teams share the merge of, that one team merges, and that are merged in groups: more than a byte counts, and fewer than a
/// tile has rows.
#[test]
fn tiles_of_wgmma_have_any_number_of_splits() {
    let Some(cuda) = cuda_with_wgmma() else {
        return println!("SKIPPED, nothing ran on a GPU: no device with wgmma");
    };
    // A tile of 128 rows, and one of a single row.
    let many = Case::new("splits_many".to_owned(), [1, 1, 1, 129, 4800, 32, 32], Dtype::BF16);
    let wide = Case::new("splits_wide".to_owned(), [1, 2, 1, 70, 1024, 64, 300], Dtype::F16);
    let f32 = Case::new("splits_f32".to_owned(), [1, 2, 2, 100, 700, 64, 200], Dtype::F32);
    // Splits that some of three or four teams do not see, and rows for the first team only. Of 130 rows, the last of four teams has none.
    let teams = Case::new("splits_teams".to_owned(), [1, 2, 2, 200, 700, 64, 64], Dtype::BF16)
        .causal(QOffset::BottomRight);
    // Three teams whose products do not overlap.
    let teams_d128 = Case::new("splits_teams_d128".to_owned(), [1, 2, 2, 200, 700, 128, 128], Dtype::BF16)
        .causal(QOffset::BottomRight);
    let window_d128 = teams_d128.clone().seeing(Visibility::window(Some(60), Some(0)));
    let window = teams.clone().seeing(Visibility::window(Some(60), Some(0)));
    let three_of_four = Case::new("splits_three".to_owned(), [1, 2, 2, 130, 700, 64, 64], Dtype::F16)
        .causal(QOffset::BottomRight);
    let (narrow, three, four) = (Sm90Tile::new(2, 16, 2), Sm90Tile::new(3, 16, 2), Sm90Tile::new(4, 16, 2));
    for (case, tile, all_splits) in [
        (many, narrow, &[7, 16, 17, 300][..]),
        (wide, Sm90Tile::wide(2), &[5, 13]),
        (f32, narrow, &[3, 10]),
        (teams.clone(), three, &[3, 17]),
        (teams.clone(), three.with_ping_pong(false), &[1, 7]),
        (teams, four, &[4, 17]),
        (three_of_four, four, &[1, 20]),
        (window.clone(), three, &[2, 13]),
        (window.clone(), three.with_ping_pong(false), &[1, 5]),
        (window, four, &[2, 13]),
        (teams_d128.clone(), three, &[3, 17]),
        (teams_d128, three.with_ping_pong(false), &[1, 7]),
        (window_d128.clone(), three, &[1, 5]),
        (window_d128, three.with_ping_pong(false), &[2, 13]),
    ] {
        let prepared = Prepared::new(&case).unwrap();
        for &splits in all_splits {
            let runner = CudaRunner::new(cuda.clone()).tiled(tile).with(options(Some(splits), true));
            prepared.run(&runner).unwrap_or_else(|failure| panic!("{} in {splits}: {failure}", case.name));
        }
    }
}

#[test]
fn blocks_of_threads_take_work_tiles_from_a_queue() {
    let Some(cuda) = cuda_with_wgmma() else {
        return println!("SKIPPED, nothing ran on a GPU: no device with wgmma");
    };
    // A fourth more tiles than blocks of threads, of which the last are cut, and three of unequal length for each block.
    let room = cuda.facts().multiprocessors;
    let cut = Case::new("queue_cut", [1, room + room.div_ceil(4), 1, 128, 1280, 64, 64], Dtype::BF16);
    let causal =
        Case::new("queue_causal", [1, room, 1, 384, 500, 64, 64], Dtype::F16).causal(QOffset::BottomRight);
    for (case, is_cut) in [(cut, true), (causal, false)] {
        let built = build(&case);
        let tile = Sm90Tile::new(2, 64, 2);
        let runner = CudaRunner::new(cuda.clone()).tiled(tile);
        let plan =
            CudaPlan::with_tile(&built.problem, cuda.facts(), PlanOptions::default(), tile.into()).unwrap();
        assert_eq!(plan.splits() > 1, is_cut, "{plan}");
        let want = answer(&built, &runner).out.bits();
        // Every run begins with the whole queue again.
        let mut out = Guarded::new(case.desc.dtype, built.problem.dims().out_shape(), built.layout);
        let outputs = Outputs::new(out.view_mut());
        let mut run =
            GuardedRun::new(&cuda, &plan, &built.inputs(), &outputs, DevicePlacement::default()).unwrap();
        for _ in 0..3 {
            run.compute(&mut Outputs::new(out.view_mut())).unwrap();
            assert!(out.bits() == want, "{}", case.name);
        }
    }
}

/// `I/N` of the environment variable `FLASHTILE_SHARD`: which of how many parts of its cases a test runs; else all.
fn shard() -> [usize; 2] {
    let Ok(shard) = std::env::var("FLASHTILE_SHARD") else { return [0, 1] };
    let parts: Vec<usize> = shard.split('/').map(|part| part.parse().expect(&shard)).collect();
    parts.try_into().expect(&shard)
}

#[test]
fn splits_that_a_mask_hides_add_nothing() {
    let Some(cuda) = cuda() else { return };
    for case in catalogue().into_iter().filter(|case| case.name.ends_with("_late")) {
        let prepared = Prepared::new(&case).unwrap();
        for splits in [1, 2, 4, 16] {
            let runner = CudaRunner::new(cuda.clone()).with(options(Some(splits), true));
            for runner in [runner.clone(), runner.narrow()] {
                prepared
                    .run(&runner)
                    .unwrap_or_else(|failure| panic!("{} in {splits}: {failure}", case.name));
            }
        }
    }
}

/// The answer of a run made for a case, after another launch of it.
fn read(run: &GuardedRun, like: &Guarded) -> Vec<u32> {
    let mut out = like.clone();
    run.read(&mut Outputs::new(out.view_mut())).unwrap();
    out.bits()
}

#[test]
fn a_captured_graph_computes_the_plan_of_an_update() {
    let Some(cuda) = cuda() else { return };
    let case = |lens: &[usize]| {
        let steps: Vec<(usize, usize)> = lens.iter().map(|&len| (1, len)).collect();
        // An equal name gives equal queries.
        Case::new("update", [1, 8, 2, 0, 0, 64, 64], Dtype::F16)
            .cached(&steps, 4096, Keep::All)
            .causal(QOffset::BottomRight)
    };
    let plan = |built: &flashtile_testkit::CaseData| {
        CudaPlan::new(&built.problem, cuda.facts(), PlanOptions::default()).unwrap()
    };
    // All sequences in one page each, so that pools and tables have equal sizes.
    let (first, second) = (build(&case(&[900, 20, 4000, 1])), build(&case(&[3000, 1500, 7, 4096])));
    let mut out = Guarded::new(Dtype::F16, first.problem.dims().out_shape(), first.layout);
    let outputs = Outputs::new(out.view_mut());
    // The pools of the longer sequences; the first plan sees fewer of their keys.
    let mut inputs = second.inputs();
    inputs.tables = first.tables.as_ref();
    let placement = DevicePlacement::default();
    let mut run = GuardedRun::new(&cuda, &plan(&first), &inputs, &outputs, placement).unwrap();
    run.seconds().unwrap();
    run.update(&plan(&second), second.tables.as_ref().unwrap()).unwrap();
    run.seconds().unwrap();
    let got = read(&run, &out);
    let want = answer(&second, &CudaRunner::new(cuda.clone()));
    assert!(got == want.out.bits());
    // Twice, since counters must be reset.
    run.seconds().unwrap();
    assert!(read(&run, &out) == got);

    // A captured graph cannot change its launches.
    let mut window = second.problem.desc().clone();
    window.visibility = flashtile::Visibility::window(Some(9), Some(0));
    let window = cuda.plan(&window.validate().unwrap(), PlanOptions::default()).unwrap();
    let refusal = run.update(&window, second.tables.as_ref().unwrap()).unwrap_err();
    assert!(matches!(refusal, CudaError::Update { .. }), "{refusal}");
    let more = build(&case(&[5, 5, 5, 5, 5]));
    let refusal = run.update(&plan(&more), more.tables.as_ref().unwrap()).unwrap_err();
    assert!(matches!(refusal, CudaError::Update { .. }), "{refusal}");
}

#[test]
fn refusals_say_what_is_wrong() {
    let Some(cuda) = cuda() else {
        // The message on a machine without a device.
        let refusal = flashtile::cuda::Cuda::new(0).unwrap_err();
        let said = refusal.to_string();
        assert!(said.contains("NVIDIA") || said.contains("CUDA"), "{said}");
        return;
    };
    let count = flashtile::cuda::Cuda::count().unwrap();
    let refusal = flashtile::cuda::Cuda::new(count).unwrap_err();
    assert!(
        matches!(refusal, CudaError::Device(DeviceError::NoDevice { ordinal, .. }) if ordinal == count),
        "{refusal}"
    );
    let built = build(&Case::new("refused", [1, 2, 2, 5, 9, 64, 64], Dtype::F32));
    let other = build(&Case::new("other", [1, 2, 2, 5, 8, 64, 64], Dtype::F32));
    let plan = cuda.plan(&built.problem, PlanOptions::default()).unwrap();
    let mut out = Guarded::new(Dtype::F32, built.problem.dims().out_shape(), built.layout);
    let outputs = Outputs::new(out.view_mut());
    let refusal = GuardedRun::new(&cuda, &plan, &other.inputs(), &outputs, DevicePlacement::default());
    assert!(matches!(refusal.unwrap_err(), CudaError::Inputs(_)));
    // A plan for a device with more shared memory than this one has.
    let wide = build(&Case::new("wide", [1, 2, 2, 200, 900, 512, 512], Dtype::F32));
    let large = CudaPlan::new(&wide.problem, &machines::H200, PlanOptions::default()).unwrap();
    if cuda.facts().shared_per_block < machines::H200.shared_per_block {
        let stream = cuda.context().new_stream().unwrap();
        let refusal = cuda.prepare(&large, &stream).unwrap_err();
        assert!(matches!(refusal, CudaError::OtherDevice { .. }), "{refusal}");
    }
}

/// f32 rows `[tokens, heads, dim]` on the device.
struct Rows {
    memory: Memory,
    shape: [usize; 3],
}

impl Rows {
    fn new(gpu: &Gpu, data: &[f32], shape: [usize; 3]) -> Self {
        Self { memory: gpu.buffer_from(data).unwrap(), shape }
    }

    fn shape(&self) -> ([usize; 4], [usize; 4]) {
        let [tokens, heads, dim] = self.shape;
        ([1, heads, tokens, dim], [tokens * heads * dim, dim, heads * dim, 1])
    }

    fn view(&self) -> GpuTensor<'_, Memory> {
        let (shape, strides) = self.shape();
        GpuTensor::new(self.memory.view(), shape, strides).unwrap()
    }

    fn view_mut(&mut self) -> GpuTensorMut<'_, Memory> {
        let (shape, strides) = self.shape();
        GpuTensorMut::new(self.memory.view_mut(), shape, strides).unwrap()
    }

    fn read(&self) -> Vec<f32> {
        self.memory.to_vec().unwrap()
    }
}

const PAGED: CacheLayout = CacheLayout::Paged { pages: 60, page_size: 16 };
const ODD_PAGES: CacheLayout = CacheLayout::Paged { pages: 90, page_size: 7 };
const RING: CacheLayout = CacheLayout::Ring { slots: 6, capacity: 50 };
const CONTIGUOUS: CacheLayout = CacheLayout::Contiguous { slots: 6, capacity: 90 };

fn cache_desc(
    layout: CacheLayout,
    (k, head_dim): (Codec, usize),
    (v, value_dim): (Codec, usize),
) -> CacheDesc {
    let mut desc = CacheDesc::new(layout, CacheShape { layers: 2, kv_heads: 3, head_dim, value_dim }, k);
    desc.v = v;
    desc
}

#[test]
fn ten_thousand_operations_leave_the_bytes_of_a_cache_in_main_memory() {
    let Some(cuda) = cuda() else { return };
    let centered = cache_desc(PAGED, (Codec::Int8, 128), (Codec::Tq5, 128));
    let cases = [
        (centered, ScalarType::Bf16),
        (cache_desc(ODD_PAGES, (Codec::Int8, 64), (Codec::Int8, 64)), ScalarType::F32),
        (cache_desc(RING, (Codec::Tq3, 80), (Codec::Fp8, 48)), ScalarType::F32),
        (cache_desc(CONTIGUOUS, (Codec::Tq4, 128), (Codec::Tq2, 64)), ScalarType::Bf16),
        (cache_desc(PAGED, (Codec::Tq4, 128), (Codec::Tq4, 128)), ScalarType::Bf16),
        (cache_desc(ODD_PAGES, (Codec::MlxTq4, 256), (Codec::MlxTq8, 256)), ScalarType::F32),
        (cache_desc(RING, (Codec::MlxTq5Plain, 512), (Codec::Tq6, 160)), ScalarType::F32),
        (cache_desc(PAGED, (Codec::F32, 17), (Codec::F16, 40)), ScalarType::F32),
        (cache_desc(RING, (Codec::BF16, 40), (Codec::BF16, 17)), ScalarType::Bf16),
        (cache_desc(CONTIGUOUS, (Codec::F16, 1), (Codec::Fp8, 96)), ScalarType::F32),
    ];
    for (desc, element) in cases {
        let stream = cuda.context().new_stream().unwrap();
        let mut twins = CacheTwins::new(cuda.gpu().on(&stream), desc, element, None).unwrap();
        if desc == centered {
            twins.center().unwrap();
        }
        // With a mean and without.
        if [Codec::Int8, Codec::Tq3].contains(&desc.k) {
            twins.equalize().unwrap();
        }
        if let Err(why) = twins.run(1000, 50) {
            panic!("{desc:?}: {why}");
        }
    }
}

/// One sequence of 300 tokens in a host cache and in a device cache, and a query of 5 rows over both.
#[test]
fn attention_over_a_cache_on_the_device_is_that_over_one_in_main_memory() {
    let Some(cuda) = cuda() else { return };
    let (tokens, heads, dim) = (300, 3, 64);
    for (k, v) in [
        (Codec::Int8, Codec::Tq5),
        (Codec::Tq4, Codec::Tq4),
        (Codec::Fp8, Codec::Int8),
        (Codec::F32, Codec::F32),
    ] {
        let stream = cuda.context().new_stream().unwrap();
        let desc = cache_desc(PAGED, (k, dim), (v, dim));
        let (mut host, mut device) = (KvCache::new(desc).unwrap(), cuda.kv_cache(desc, &stream).unwrap());
        let mut rng = Rng::new(3);
        let mut data = |n: usize| (0..n).map(|_| rng.normal()).collect::<Vec<f32>>();
        let (q, keys, values) = (data(5 * 6 * dim), data(tokens * heads * dim), data(tokens * heads * dim));
        let view = |x| TensorView::packed::<f32>(x, [tokens, heads, dim]).unwrap();
        if k == Codec::Int8 {
            let mean = key_mean(&view(&keys));
            host.set_key_mean(1, &mean).unwrap();
            device.set_key_mean(1, &mean).unwrap();
        }
        if k.supports_key_factors() {
            let factors: Vec<f32> = data(heads * dim).iter().map(|x| -x.exp()).collect();
            host.set_key_factors(1, &factors).unwrap();
            device.set_key_factors(1, &factors).unwrap();
        }
        let [on_host, on_device] = [host.create().unwrap(), device.create().unwrap()];
        host.append(&[(on_host, tokens)], &[(view(&keys), view(&values)); 2]).unwrap();
        let gpu = cuda.gpu().on(&stream);
        let rows = |x: &[f32], tokens, heads| Rows::new(&gpu, x, [tokens, heads, dim]);
        let (keys, values) = (rows(&keys, tokens, heads), rows(&values, tokens, heads));
        let layer = || (keys.view(), values.view());
        device.append(&[(on_device, tokens)], &[layer(), layer()]).unwrap();
        device.check_stored().unwrap();

        let mut problem =
            ProblemDesc::over(host.desc(), 6, Dtype::F32, &[SeqLens { q_len: 5, kv_len: tokens }]);
        problem.visibility = Visibility::causal();
        let mut want = vec![0.0f32; 5 * 6 * dim];
        let tables = host.tables(&[on_host]).unwrap();
        let q_view = TensorView::packed::<f32>(&q, [5, 6, dim]).unwrap();
        let mut outputs = Outputs::new(TensorViewMut::packed::<f32>(&mut want, [5, 6, dim]).unwrap());
        Runner::new().run(&problem, &host.inputs(1, q_view, &tables).unwrap(), &mut outputs).unwrap();

        let (q, mut out) = (rows(&q, 5, 6), rows(&vec![f32::NAN; want.len()], 5, 6));
        let [k_pages, v_pages] = device.store().kv(1);
        let inputs = GpuInputs::new(q.view(), k_pages, v_pages);
        let tables = device.tables(&[on_device]).unwrap();
        let mut outputs = GpuOutputs::new(out.view_mut());
        cuda.session(&stream).run_paged(&problem, &inputs, &tables, &mut outputs).unwrap();
        let got = out.read();
        let square = |x: f64| x * x;
        let error: f64 = got.iter().zip(&want).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
        let norm: f64 = want.iter().map(|x| square(f64::from(*x))).sum();
        let nrmse = (error / norm).sqrt();
        let limit = if k == Codec::F32 { 2e-6 } else { 5e-3 };
        assert!(nrmse < limit, "{k} {v}: {nrmse:e}");
    }
}

#[test]
fn caches_that_no_kernel_serves_are_refused() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context().new_stream().unwrap();
    let none = cache_desc(CacheLayout::Paged { pages: 0, page_size: 7 }, (Codec::F32, 8), (Codec::F32, 8));
    let refusal = cuda.kv_cache(none, &stream).unwrap_err();
    assert!(matches!(refusal, StoreError::Cache(CacheError::Dimension { .. })), "{refusal}");
}
