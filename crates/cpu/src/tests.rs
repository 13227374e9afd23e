//! Kernels of bf16 pairs and of tiles of them, emulated so that they run on every machine.

use crate::cpu::Cpu;
use crate::isa;
use crate::plan::CpuFacts;
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::isa::Isa;
use flashtile_core::plan::PlanOptions;
use flashtile_core::problem::{Dims, Problem, ProblemDesc, QOffset, Visibility};
use flashtile_core::quality::Accumulation;
use flashtile_core::tensor::{MaskView, TensorView, TensorViewMut};
use flashtile_testkit::{
    BackwardCase, Rng, RunReport, Runner, RunnerError, catalogue, conformance, seeded_case,
};
use half::bf16;

/// Instruction sets whose products are emulated.
const PAIRS: [Isa; 2] = [Isa::Avx512Bf16, Isa::Amx];

fn cpu(isa: Isa) -> Cpu {
    Cpu { facts: CpuFacts { isa, threads: 2, ..isa::facts() } }
}

/// A runner of an instruction set. The test kit's runner takes the `Cpu` that other crates see, which is without emulation.
struct Emulated(Isa);

impl Runner for Emulated {
    fn name(&self) -> String {
        format!("emulated {}", self.0)
    }

    fn run(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<RunReport, RunnerError> {
        let plan = cpu(self.0)
            .plan(problem, PlanOptions::default())
            .map_err(|refused| RunnerError::Unsupported(refused.to_string()))?;
        let mut workspace = plan.workspace();
        workspace.bytes_mut().fill(0xFF);
        cpu(self.0)
            .run(&plan, inputs, outputs, &mut workspace)
            .map_err(|error| RunnerError::Error(error.to_string()))?;
        let mut ran = RunReport::new(plan.to_string());
        ran.accumulation = Accumulation::Half;
        Ok(ran)
    }
}

#[test]
fn pairs_of_bf16_pass_every_case() {
    let cases: Vec<_> = catalogue().into_iter().filter(|case| case.desc.dtype == Dtype::BF16).collect();
    assert!(cases.len() > 100);
    let runners = PAIRS.map(Emulated);
    let runners = runners.each_ref().map(|runner| runner as &dyn Runner);
    conformance(&cases, &runners, |result| assert!(result.result.is_ok(), "{result}"));
}

#[test]
fn gradients_by_pairs_of_bf16_match_the_oracle() {
    let mut cases: Vec<_> = catalogue().into_iter().filter(|case| case.desc.dtype == Dtype::BF16).collect();
    cases.extend((0..40).map(seeded_case).filter(|case| case.desc.dtype == Dtype::BF16));
    let mut count = 0;
    for case in cases {
        let prepared = BackwardCase::new(&case);
        // Cached sequences have no gradients.
        let Ok(prepared) = prepared else { continue };
        for isa in PAIRS {
            let plan = cpu(isa).plan_backward(prepared.problem(), PlanOptions::default()).unwrap();
            let mut workspace = plan.workspace();
            workspace.bytes_mut().fill(0xFF);
            let answer = prepared.run_by(&plan.to_string(), |inputs, gradients| {
                cpu(isa).run_backward(&plan, inputs, gradients, &mut workspace).map_err(|e| e.to_string())
            });
            let checked = answer.and_then(|answer| prepared.check(&answer));
            checked.unwrap_or_else(|failure| panic!("{} on emulated {isa}: {failure}", case.name));
            count += 1;
        }
    }
    assert!(count > 100, "{count}");
}

/// Output bits. If asked, a row of v is NaN, there is a mask, or tiles are not skipped.
fn bits(
    isa: Isa,
    desc: &ProblemDesc,
    v_nan: Option<usize>,
    mask: Option<&[bool]>,
    skip_tiles: bool,
) -> Vec<u16> {
    let dims = desc.dims;
    let data = |shape: [usize; 4], seed: u64| {
        let mut rng = Rng::new(seed);
        let n = shape.iter().product();
        (0..n).map(|_| bf16::from_f32(rng.normal())).collect::<Vec<_>>()
    };
    let (q, k, mut v) = (data(dims.q_shape(), 1), data(dims.k_shape(), 2), data(dims.v_shape(), 3));
    if let Some(row) = v_nan {
        v[row * dims.value_dim..][..dims.value_dim].fill(bf16::NAN);
    }
    let mut options = PlanOptions::default();
    options.skip_tiles = skip_tiles;
    let plan = cpu(isa).plan(&desc.clone().validate().unwrap(), options).unwrap();
    let mut out = vec![bf16::NAN; dims.out_shape().iter().product()];
    let view = |data, shape| TensorView::bhsd::<bf16>(data, shape).unwrap();
    let mut inputs =
        Inputs::new(view(&q, dims.q_shape()), view(&k, dims.k_shape()), view(&v, dims.v_shape()));
    inputs.mask = mask.map(|mask| MaskView::dense_bool(mask, [1, 1, dims.q_len, dims.kv_len]).unwrap());
    let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, dims.out_shape()).unwrap());
    cpu(isa).run(&plan, &inputs, &mut outputs, &mut plan.workspace()).unwrap();
    out.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn a_row_has_the_same_bits_among_any_number_of_rows() {
    for (head_dim, value_dim, kv_len) in
        [(16, 16, 40), (72, 64, 300), (64, 40, 257), (128, 128, 33), (40, 80, 1)]
    {
        let rows = |q_len: usize, causal: bool| {
            let dims = Dims { batch: 1, q_heads: 1, kv_heads: 1, q_len, kv_len, head_dim, value_dim };
            let mut desc = ProblemDesc::new(dims, Dtype::BF16);
            if causal {
                (desc.visibility, desc.q_offset) =
                    (Visibility::causal(), Some(QOffset::At(kv_len as i64 / 2)));
            }
            desc
        };
        for (isa, causal) in PAIRS.into_iter().flat_map(|isa| [(isa, false), (isa, true)]) {
            let many = bits(isa, &rows(40, causal), None, None, true);
            for count in [1, 2, 3, 5, 16, 17] {
                let few = bits(isa, &rows(count, causal), None, None, true);
                assert_eq!(few, many[..few.len()], "{isa}, {count} rows, D {head_dim}, causal {causal}");
            }
        }
    }
}

fn desc(q_heads: usize, q_len: usize, kv_len: usize, offset: i64) -> ProblemDesc {
    let dims = Dims { batch: 1, q_heads, kv_heads: 1, q_len, kv_len, head_dim: 16, value_dim: 16 };
    let mut desc = ProblemDesc::new(dims, Dtype::BF16);
    desc.q_offset = Some(QOffset::At(offset));
    desc
}

#[test]
fn a_pair_cut_by_visibility_leaks_no_nan() {
    let mut causal = desc(48, 4, 24, 20);
    causal.visibility = Visibility::causal();
    let mut window = desc(1, 25, 47, 22);
    window.visibility = Visibility::window(Some(5), Some(0));
    for (isa, (desc, row)) in PAIRS.into_iter().flat_map(|isa| [(isa, (&causal, 21)), (isa, (&window, 40))]) {
        let problem = desc.clone().validate().unwrap();
        let (clean, poisoned) = (bits(isa, desc, None, None, true), bits(isa, desc, Some(row), None, true));
        assert_eq!(poisoned, bits(isa, desc, Some(row), None, false));
        let value_dim = desc.dims.value_dim;
        for (at, (clean, poisoned)) in clean.chunks(value_dim).zip(poisoned.chunks(value_dim)).enumerate() {
            let sees = problem.visible(&problem.sequences()[0], at % desc.dims.q_len).contains(&row);
            assert_eq!(clean == poisoned, !sees, "{isa}, row {at}, key {row}");
        }
    }
}

#[test]
fn pairs_have_the_same_bits_whatever_the_class_of_a_tile() {
    let mut masked = desc(2, 40, 600, 0);
    masked.mask = Some(MaskKind::Bool);
    // Tiles of every kind: full, skipped and partial.
    let mask: Vec<bool> = (0..40 * 600).map(|at| at / 600 < 16 || (at % 600 >= 256 && at % 7 != 0)).collect();
    for isa in PAIRS {
        let skipped = bits(isa, &masked, None, Some(&mask), true);
        assert_eq!(skipped, bits(isa, &masked, None, Some(&mask), false), "{isa}");
    }
}
