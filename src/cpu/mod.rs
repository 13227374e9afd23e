//! The CPU backend.

mod exec;
mod isa;
mod kernels;
pub mod limits;
mod simd;
mod workspace;

pub use workspace::{Workspace, WorkspaceError};

use crate::bind;
use crate::plan::{CpuFacts, CpuPlan, Isa, PlanOptions, Unsupported};
use crate::{Inputs, Outputs, Problem, RunError};

/// The CPU of this machine: proof that an instruction set is present, and how many threads to use.
///
/// Work runs on the rayon pool in which [`Cpu::run`] is called (the global one, or that of an enclosing
/// `ThreadPool::install`).
#[derive(Debug, Clone, Copy)]
pub struct Cpu {
    facts: CpuFacts,
}

impl Cpu {
    /// This machine with its fastest instruction set and as many threads as the current rayon pool has.
    #[must_use]
    pub fn new() -> Self {
        Self { facts: isa::facts() }
    }

    /// This machine restricted to an instruction set.
    ///
    /// # Errors
    /// [`Unsupported::Isa`] where the machine lacks it.
    pub fn with_isa(isa: Isa) -> Result<Self, Unsupported> {
        if isa > isa::best() {
            return Err(Unsupported::Isa { asked: isa, best: isa::best() });
        }
        Ok(Self { facts: CpuFacts { isa, ..isa::facts() } })
    }

    /// The same machine with plans for at most this many threads (at least 1).
    #[must_use]
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.facts.threads = threads.max(1);
        self
    }

    /// Instruction sets that this machine runs, most capable first. [`Cpu::new`] uses the fastest, which need not be the
    /// first.
    #[must_use]
    pub fn isas() -> Vec<Isa> {
        let best = isa::best();
        Isa::ALL.into_iter().rev().filter(|&isa| isa <= best).collect()
    }

    /// Facts of this machine, for the planner.
    #[must_use]
    pub const fn facts(&self) -> &CpuFacts {
        &self.facts
    }

    /// Plans a problem for this machine.
    ///
    /// # Errors
    /// As [`CpuPlan::new`].
    pub fn plan(&self, problem: &Problem, options: PlanOptions) -> Result<CpuPlan, Unsupported> {
        CpuPlan::new(problem, &self.facts, options)
    }

    /// Computes `out` and, where given, `lse`. Uses no memory beyond the workspace, but for what the thread pool may queue;
    /// contents of outputs and workspace are not read.
    ///
    /// The same inputs give the same bits, whatever the thread count and the options of the plan.
    ///
    /// # Errors
    /// [`RunError`] where the tensors are not those of the plan's problem, the workspace is too small, or the plan was made
    /// for instructions beyond those of this `Cpu`. Nothing is written then.
    pub fn run(
        &self,
        plan: &CpuPlan,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), RunError> {
        if plan.isa() > self.facts.isa {
            return Err(RunError::Machine { kernel: plan.kernel() });
        }
        bind::check(plan.problem(), inputs, outputs)?;
        if workspace.len() < plan.workspace_bytes() {
            return Err(RunError::Workspace { needed: plan.workspace_bytes(), got: workspace.len() });
        }
        exec::run(plan, inputs, outputs, workspace);
        Ok(())
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::PlanOptions;
    use crate::testkit::{self, CpuRunner};
    use crate::{Dims, Dtype, MaskView, ProblemDesc, QOffset, TensorView, TensorViewMut, Visibility};
    use half::bf16;

    /// Kernels of pairs or of tiles of them, in software where the machine lacks them.
    const PAIRS: [Isa; 2] = [Isa::Avx512Bf16, Isa::Amx];

    fn cpu(isa: Isa) -> Cpu {
        Cpu { facts: CpuFacts { isa, threads: 2, ..isa::facts() } }
    }

    #[test]
    fn pairs_of_bf16_pass_every_case() {
        let cases: Vec<_> =
            testkit::catalogue().into_iter().filter(|case| case.desc.dtype == Dtype::BF16).collect();
        assert!(cases.len() > 100);
        let runners = PAIRS.map(|isa| CpuRunner { cpu: cpu(isa), options: PlanOptions::default() });
        let runners = runners.each_ref().map(|runner| runner as &dyn testkit::Runner);
        testkit::conformance(&cases, &runners, |result| assert!(result.result.is_ok(), "{result}"));
    }

    /// Output bits, with a row of v NaN, a mask and without skipping where asked.
    fn bits(
        isa: Isa,
        desc: &ProblemDesc,
        v_nan: Option<usize>,
        mask: Option<&[bool]>,
        skip_tiles: bool,
    ) -> Vec<u16> {
        let dims = desc.dims;
        let data = |shape: [usize; 4], seed: u64| {
            let mut rng = testkit::Rng::new(seed);
            let n = shape.iter().product();
            (0..n).map(|_| bf16::from_f32(rng.normal())).collect::<Vec<_>>()
        };
        let (q, k, mut v) = (data(dims.q_shape(), 1), data(dims.k_shape(), 2), data(dims.v_shape(), 3));
        if let Some(row) = v_nan {
            v[row * dims.value_dim..][..dims.value_dim].fill(bf16::NAN);
        }
        let options = PlanOptions { skip_tiles, ..PlanOptions::default() };
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
        for (isa, (desc, row)) in
            PAIRS.into_iter().flat_map(|isa| [(isa, (&causal, 21)), (isa, (&window, 40))])
        {
            let problem = desc.clone().validate().unwrap();
            let (clean, poisoned) =
                (bits(isa, desc, None, None, true), bits(isa, desc, Some(row), None, true));
            assert_eq!(poisoned, bits(isa, desc, Some(row), None, false));
            let value_dim = desc.dims.value_dim;
            for (at, (clean, poisoned)) in clean.chunks(value_dim).zip(poisoned.chunks(value_dim)).enumerate()
            {
                let sees = problem.visible(&problem.sequences()[0], at % desc.dims.q_len).contains(&row);
                assert_eq!(clean == poisoned, !sees, "{isa}, row {at}, key {row}");
            }
        }
    }

    #[test]
    fn pairs_have_the_same_bits_whatever_the_class_of_a_tile() {
        let mut masked = desc(2, 40, 600, 0);
        masked.mask = Some(crate::MaskKind::Bool);
        // Tiles of every class: all visible, all hidden, and both.
        let mask: Vec<bool> =
            (0..40 * 600).map(|at| at / 600 < 16 || (at % 600 >= 256 && at % 7 != 0)).collect();
        for isa in PAIRS {
            let skipped = bits(isa, &masked, None, Some(&mask), true);
            assert_eq!(skipped, bits(isa, &masked, None, Some(&mask), false), "{isa}");
        }
    }
}
