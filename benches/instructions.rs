//! One attention call on one thread, for counting its instructions; `benches/instructions.sh` runs it under callgrind.
//!
//! ```text
//! instructions             every case, one a line: instruction set, name, visible pairs of all heads
//! instructions ISA CASE    runs a case once
//! ```
//!
//! Plans are for fixed cache sizes, not for this machine's, so that any machine with the instruction set counts the
//! same.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a program for one script")]

use flashtile::plan::{CpuFacts, Isa, machines};
use flashtile::{
    Cpu, CpuPlan, Dims, Dtype, Element, Inputs, MaskKind, MaskView, Outputs, PlanOptions, Problem,
    ProblemDesc, QOffset, TensorView, TensorViewMut, Visibility, Workspace,
};
use flashtile_testkit::Rng;
use half::{bf16, f16};

/// The call that is counted. Callgrind's collection is switched on and off by its name.
#[inline(never)]
fn counted_attention_call(
    cpu: &Cpu,
    plan: &CpuPlan,
    inputs: &Inputs<'_>,
    outputs: &mut Outputs<'_>,
    workspace: &mut Workspace,
) {
    cpu.run(plan, inputs, outputs, workspace).unwrap();
}

fn desc(dims: [usize; 7], dtype: Dtype) -> ProblemDesc {
    let [batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim] = dims;
    ProblemDesc::new(Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim }, dtype)
}

/// The fixed list of cases.
fn cases() -> Vec<(String, ProblemDesc)> {
    let dtypes = [Dtype::F32, Dtype::F16, Dtype::BF16];
    let mut cases = Vec::new();
    for d in [64, 128] {
        for dtype in dtypes {
            let full = desc([1, 2, 2, 512, 512, d, d], dtype);
            let mut causal = full.clone();
            causal.visibility = Visibility::causal();
            cases.push((format!("prefill_d{d}_{dtype}"), full));
            cases.push((format!("prefill_d{d}_causal_{dtype}"), causal));
        }
    }
    for (h, hkv, d) in [(32, 8, 128), (16, 2, 256)] {
        for dtype in dtypes {
            let mut step = desc([1, h, hkv, 1, 4096, d, d], dtype);
            step.visibility = Visibility::causal();
            step.q_offset = Some(QOffset::BottomRight);
            cases.push((format!("decode_{h}_{hkv}_d{d}_{dtype}"), step));
        }
    }
    for dtype in dtypes {
        cases.push((format!("small_b4_h12_d64_{dtype}"), desc([4, 12, 12, 128, 128, 64, 64], dtype)));
    }
    let mut masked = desc([1, 2, 2, 512, 512, 64, 64], Dtype::F32);
    masked.mask = Some(MaskKind::Bool);
    cases.push(("masked_d64_f32".to_owned(), masked));
    cases
}

/// The machine that an instruction set is planned for.
fn facts(isa: Isa) -> CpuFacts {
    let device = if isa == Isa::Portable { machines::PORTABLE_4 } else { machines::AVX2_8 };
    CpuFacts { isa, threads: 1, ..device }
}

/// A tensor's elements: one short run of values, repeated with a period that no dimension divides. Under a simulator,
/// drawing each value would take longer than attention.
fn data<T: Element>(shape: [usize; 4], seed: u64, of: fn(f32) -> T) -> Vec<T> {
    let mut rng = Rng::new(seed);
    let run: Vec<T> = (0..4099).map(|_| of(rng.normal())).collect();
    let len = shape.iter().product();
    let mut data = run.repeat(usize::div_ceil(len, run.len()));
    data.truncate(len);
    data
}

fn run<T: Element>(isa: Isa, problem: &Problem, of: fn(f32) -> T) {
    let dims = *problem.dims();
    let (q, k) = (data(dims.q_shape(), 1, of), data(dims.k_shape(), 2, of));
    let (v, mut out) = (data(dims.v_shape(), 3, of), data(dims.out_shape(), 4, of));
    // One key in four is hidden.
    let mut rng = Rng::new(5);
    let mask: Vec<bool> = match problem.desc().mask {
        Some(_) => (0..dims.q_len * dims.kv_len).map(|_| rng.below(4) > 0).collect(),
        None => Vec::new(),
    };

    let mut inputs = Inputs::new(
        TensorView::bhsd(&q, dims.q_shape()).unwrap(),
        TensorView::bhsd(&k, dims.k_shape()).unwrap(),
        TensorView::bhsd(&v, dims.v_shape()).unwrap(),
    );
    if problem.desc().mask.is_some() {
        inputs.mask = Some(MaskView::dense_bool(&mask, [1, 1, dims.q_len, dims.kv_len]).unwrap());
    }
    let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, dims.out_shape()).unwrap());
    let cpu = Cpu::with_isa(isa).unwrap_or_else(|e| panic!("{e}"));
    let plan = CpuPlan::new(problem, &facts(isa), PlanOptions::default()).unwrap();
    let mut workspace = plan.workspace();
    counted_attention_call(&cpu, &plan, &inputs, &mut outputs, &mut workspace);
}

fn main() {
    // The pool uses this thread only.
    rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global().unwrap();
    // Cargo passes options that are not meant for this program.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let isas = [Isa::Avx2, Isa::Portable];
    let [isa, name] = &args[..] else {
        for isa in isas {
            for (name, desc) in cases() {
                let heads = desc.dims.q_heads as u64;
                let problem = desc.validate().unwrap();
                println!("{isa} {name} {}", problem.visible_pairs() * heads);
            }
        }
        return;
    };
    let isa = isas.into_iter().find(|known| known.name() == isa);
    let isa = isa.unwrap_or_else(|| panic!("expected avx2 or portable"));
    let case = cases().into_iter().find(|(known, _)| known == name);
    let (_, desc) = case.unwrap_or_else(|| panic!("no case {name}"));
    let problem = desc.validate().unwrap();
    match problem.dtype() {
        Dtype::F32 => run(isa, &problem, |x| x),
        Dtype::F16 => run(isa, &problem, f16::from_f32),
        Dtype::BF16 => run(isa, &problem, bf16::from_f32),
    }
}
