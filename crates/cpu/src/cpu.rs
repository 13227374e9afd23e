//! The machine as a backend.

use crate::plan::{CpuBackwardPlan, CpuFacts, CpuPlan};
use crate::workspace::Workspace;
use crate::{backward, forward, isa, pool};
use flashtile_core::gradients::{self, BackwardInputs, Gradients};
use flashtile_core::inputs::{self, Inputs, Outputs, RunError};
use flashtile_core::isa::Isa;
use flashtile_core::plan::{PlanOptions, Unsupported};
use flashtile_core::problem::Problem;

/// The CPU of this machine: proof that an instruction set is present, and how many threads to use.
///
/// Work runs on the rayon pool in which [`Cpu::run`] is called (the global one, or that of an enclosing
/// `ThreadPool::install`).
#[derive(Debug, Clone, Copy)]
pub struct Cpu {
    pub(crate) facts: CpuFacts,
}

impl Cpu {
    /// This machine with its fastest instruction set and the threads of the current rayon pool. If these cannot start, plans are for as
    /// many threads as the machine runs at a time, and [`Cpu::run`] refuses plans that need more than one.
    #[must_use]
    pub fn new() -> Self {
        Self { facts: isa::facts() }
    }

    /// This machine restricted to an instruction set.
    ///
    /// # Errors
    /// [`Unsupported::Isa`] if the machine lacks it.
    pub fn with_isa(isa: Isa) -> Result<Self, Unsupported> {
        if !isa::best().contains(isa) {
            return Err(Unsupported::Isa { asked: isa, best: isa::best() });
        }
        Ok(Self { facts: CpuFacts { isa, ..isa::facts() } })
    }

    /// Number of threads of the rayon pool in which the caller runs. The first call starts the global pool, unless the program did.
    ///
    /// # Errors
    /// [`RunError::Threads`] if the system starts no more threads. rayon does not retry a global pool that could not start: every later
    /// call outside of another pool is refused as well.
    pub fn pool_threads() -> Result<usize, RunError> {
        pool::threads().map_err(|reason| RunError::Threads { reason: reason.to_owned() })
    }

    /// This machine with plans for at most `threads` threads (at least 1).
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
        Isa::ALL.into_iter().rev().filter(|&isa| best.contains(isa)).collect()
    }

    /// Facts of this machine, for the planner.
    #[must_use]
    pub const fn facts(&self) -> &CpuFacts {
        &self.facts
    }

    /// Plans a problem for this machine.
    ///
    /// # Errors
    /// The errors of [`CpuPlan::new`].
    pub fn plan(&self, problem: &Problem, options: PlanOptions) -> Result<CpuPlan, Unsupported> {
        CpuPlan::new(problem, &self.facts, options)
    }

    /// Computes `out` and, if given, `lse`. Uses no memory beyond the workspace, except for what the thread pool may queue. The contents of
    /// outputs and workspace are not read.
    ///
    /// Equal inputs give equal bits, for any thread count and any options of the plan.
    ///
    /// # Errors
    /// [`RunError`] if the tensors do not fit the plan's problem, the workspace is too small, the plan needs instructions that this `Cpu`
    /// lacks, or it needs threads that cannot start. Nothing is written then.
    pub fn run(
        &self,
        plan: &CpuPlan,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), RunError> {
        if !self.facts.isa.contains(plan.isa()) {
            return Err(RunError::Machine { kernel: plan.kernel() });
        }
        inputs::check(plan.problem(), inputs, outputs)?;
        if workspace.len() < plan.workspace_bytes() {
            return Err(RunError::Workspace { needed: plan.workspace_bytes(), got: workspace.len() });
        }
        if plan.workers() > 1 {
            Self::pool_threads()?;
        }
        forward::run(plan, inputs, outputs, workspace);
        Ok(())
    }
}

impl Cpu {
    /// Plans the backward pass of a problem for this machine.
    ///
    /// # Errors
    /// The errors of [`CpuBackwardPlan::new`].
    pub fn plan_backward(
        &self,
        problem: &Problem,
        options: PlanOptions,
    ) -> Result<CpuBackwardPlan, Unsupported> {
        CpuBackwardPlan::new(problem, &self.facts, options)
    }

    /// Computes the gradients of a loss with respect to the inputs of attention, as [`flashtile_core::gradients`] defines them. Uses no memory
    /// beyond the workspace, except for lists of tasks and what the thread pool may queue. The contents of gradients and workspace are not
    /// read.
    ///
    /// Equal inputs give equal bits, for any thread count and any options of the plan.
    ///
    /// # Errors
    /// As [`Cpu::run`]. Nothing is written then.
    pub fn run_backward(
        &self,
        plan: &CpuBackwardPlan,
        inputs: &BackwardInputs<'_>,
        gradients: &mut Gradients<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), RunError> {
        if !self.facts.isa.contains(plan.isa()) {
            return Err(RunError::Machine { kernel: plan.kernel() });
        }
        gradients::check(plan.problem(), inputs, gradients)?;
        if workspace.len() < plan.workspace_bytes() {
            return Err(RunError::Workspace { needed: plan.workspace_bytes(), got: workspace.len() });
        }
        if plan.threads() > 1 {
            Self::pool_threads()?;
        }
        backward::run(plan, inputs, gradients, workspace);
        Ok(())
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}
