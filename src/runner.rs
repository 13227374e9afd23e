//! Plans and workspace, kept from call to call.

use crate::error::{Error, Result};
use flashtile_core::gradients::{self, BackwardInputs, Gradients};
use flashtile_core::inputs::{self, Inputs, Outputs};
use flashtile_core::plan::PlanOptions;
use flashtile_core::problem::ProblemDesc;
use flashtile_cpu::cpu::Cpu;
use flashtile_cpu::plan::{CpuBackwardPlan, CpuPlan};
use flashtile_cpu::workspace::Workspace;
use std::cell::Cell;

/// Plans that a runner keeps.
const MAX_PLANS: usize = 16;

/// Computes attention on the CPU, and keeps the plans of descriptions for later calls, and the workspace of
/// the largest problem. A later call of a description allocates nothing, except for jobs that the thread pool
/// may queue.
///
/// ```
/// use flashtile::{Attention, Outputs, Runner, TensorView, TensorViewMut};
/// let mut runner = Runner::new();
/// let x = vec![0.5f32; 4 * 32 * 64];
/// let x = TensorView::bhsd(&x, [1, 4, 32, 64])?;
/// let (mut out, mut lse) = (vec![0.0f32; 4 * 32 * 64], vec![0.0f32; 4 * 32]);
/// for _layer in 0..2 {
///     runner.attention(x, x, x, &mut TensorViewMut::bhsd(&mut out, [1, 4, 32, 64])?, &Attention::causal())?;
/// }
/// // With the logsumexp.
/// let (desc, inputs) = (Attention::full().desc(&x, &x, &x), Attention::full().inputs(x, x, x));
/// let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, [1, 4, 32, 64])?);
/// outputs.lse = Some(&mut lse);
/// runner.run(&desc, &inputs, &mut outputs)?;
/// assert!((lse[0] - (0.25 * 8.0 + 32f32.ln())).abs() < 1e-5);
/// # Ok::<(), flashtile::Error>(())
/// ```
pub struct Runner {
    cpu: Cpu,
    follows_pool: bool,
    options: PlanOptions,
    /// Most recently used first.
    plans: Vec<CpuPlan>,
    /// Likewise.
    backward_plans: Vec<CpuBackwardPlan>,
    workspace: Workspace,
}

impl Runner {
    /// A runner with the fastest instruction set of this machine and as many threads as the rayon pool of each call has.
    #[must_use]
    pub fn new() -> Self {
        Self { follows_pool: true, ..Self::with_cpu(Cpu::new()) }
    }

    /// A runner with this instruction set and number of threads, whatever the pool of a call.
    #[must_use]
    pub fn with_cpu(cpu: Cpu) -> Self {
        Self {
            cpu,
            follows_pool: false,
            options: PlanOptions::default(),
            plans: Vec::new(),
            backward_plans: Vec::new(),
            workspace: Workspace::new(0),
        }
    }

    /// Sets the options of the planner, and drops the plans that were made with others.
    #[must_use]
    pub fn with_options(mut self, options: PlanOptions) -> Self {
        self.options = options;
        self.forget_plans();
        self
    }

    /// Plans a description, or finds the plan of an earlier call.
    ///
    /// # Errors
    /// [`Error::Problem`] or [`Error::Unsupported`].
    pub fn plan(&mut self, desc: &ProblemDesc) -> Result<&CpuPlan> {
        self.find(|kept| kept == desc, || desc.clone())
    }

    /// Computes a description. `inputs` and `outputs` are as for [`Cpu::run`].
    ///
    /// # Errors
    /// [`Error::Problem`], [`Error::Unsupported`], [`Error::Run`] or [`Error::Memory`]. Nothing is written then.
    pub fn run(&mut self, desc: &ProblemDesc, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>) -> Result<()> {
        self.plan(desc)?;
        self.run_found(inputs, outputs)
    }

    /// Plans the backward pass of a description, or finds the plan of an earlier call.
    ///
    /// # Errors
    /// [`Error::Problem`] or [`Error::Unsupported`].
    pub fn plan_backward(&mut self, desc: &ProblemDesc) -> Result<&CpuBackwardPlan> {
        self.follow_pool();
        let (cpu, options) = (&self.cpu, self.options);
        let is = |plan: &CpuBackwardPlan| plan.problem().desc() == desc;
        put_first(&mut self.backward_plans, is, || {
            Ok(cpu.plan_backward(&desc.clone().validate()?, options)?)
        })?;
        Ok(&self.backward_plans[0])
    }

    /// Computes the gradients of a description. `inputs` and `gradients` are as for [`Cpu::run_backward`].
    ///
    /// # Errors
    /// As [`Runner::run`]. Nothing is written then.
    pub fn run_backward(
        &mut self,
        desc: &ProblemDesc,
        inputs: &BackwardInputs<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result<()> {
        let bytes = self.plan_backward(desc)?.workspace_bytes();
        let plan = &self.backward_plans[0];
        if self.workspace.len() < bytes {
            // Tensors that are refused cost no memory.
            gradients::check(plan.problem(), inputs, gradients)?;
            self.workspace = Workspace::new(0);
            self.workspace = plan.try_workspace()?;
        }
        self.cpu.run_backward(plan, inputs, gradients, &mut self.workspace).map_err(Error::Run)
    }

    /// Checks everything that [`Runner::run`] would refuse, and allocates what it needs, without computing: a caller that writes new rows to
    /// its own pages does so after this call, and no error of the run that follows leaves them behind.
    ///
    /// # Errors
    /// As [`Runner::run`].
    pub fn prepare(&mut self, desc: &ProblemDesc, inputs: &Inputs<'_>, outputs: &Outputs<'_>) -> Result<()> {
        self.plan(desc)?;
        inputs::check(self.plans[0].problem(), inputs, outputs)?;
        if self.plans[0].workers() > 1 {
            Cpu::pool_threads()?;
        }
        self.reserve()
    }

    /// Calls a function with the runner that the calling thread keeps: the runner of
    /// [`attention`](crate::attention()), and of each [`Step`](crate::Step) without a runner of its own. A
    /// nested call, which a thread makes when it waits for rayon and takes up another task, gets a new
    /// runner.
    ///
    /// ```
    /// // Frees what this thread keeps.
    /// flashtile::Runner::with_current(flashtile::Runner::clear);
    /// ```
    pub fn with_current<T>(f: impl FnOnce(&mut Self) -> T) -> T {
        thread_local! {
            static RUNNER: Cell<Option<Runner>> = const { Cell::new(None) };
        }
        // While a thread ends, its values are gone.
        let mut runner = RUNNER.try_with(Cell::take).ok().flatten().unwrap_or_default();
        let result = f(&mut runner);
        let _ = RUNNER.try_with(|place| place.set(Some(runner)));
        result
    }

    /// Gives back the memory of plans and workspace.
    pub fn clear(&mut self) {
        self.forget_plans();
        self.workspace = Workspace::new(0);
    }

    fn forget_plans(&mut self) {
        (self.plans, self.backward_plans) = (Vec::new(), Vec::new());
    }

    /// Adapts to the pool of the call, if its number of threads is another.
    fn follow_pool(&mut self) {
        if self.follows_pool {
            let cpu = Cpu::new();
            if cpu.facts() != self.cpu.facts() {
                self.forget_plans();
                self.cpu = cpu;
            }
        }
    }

    /// Puts the plan of a description first: a kept one for which `is` holds, or a new one.
    pub(crate) fn find(
        &mut self,
        is: impl Fn(&ProblemDesc) -> bool,
        desc: impl FnOnce() -> ProblemDesc,
    ) -> Result<&CpuPlan> {
        self.follow_pool();
        let (cpu, options) = (&self.cpu, self.options);
        put_first(
            &mut self.plans,
            |plan| is(plan.problem().desc()),
            || Ok(cpu.plan(&desc().validate()?, options)?),
        )?;
        Ok(&self.plans[0])
    }

    /// Runs the plan that [`Runner::find`] put first.
    pub(crate) fn run_found(&mut self, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>) -> Result<()> {
        let plan = &self.plans[0];
        if self.workspace.len() < plan.workspace_bytes() {
            // Tensors that are refused cost no memory.
            inputs::check(plan.problem(), inputs, outputs)?;
        }
        self.reserve()?;
        self.cpu.run(&self.plans[0], inputs, outputs, &mut self.workspace).map_err(Error::Run)
    }

    /// Makes the workspace as large as the first plan needs.
    fn reserve(&mut self) -> Result<()> {
        let plan = &self.plans[0];
        if self.workspace.len() < plan.workspace_bytes() {
            // The old workspace makes room for the new one.
            self.workspace = Workspace::new(0);
            self.workspace = plan.try_workspace()?;
        }
        Ok(())
    }
}

/// Puts a kept plan for which `is` holds first, or a new one, in place of the one that was used least recently.
fn put_first<P>(plans: &mut Vec<P>, is: impl Fn(&P) -> bool, make: impl FnOnce() -> Result<P>) -> Result<()> {
    let last = match plans.iter().position(is) {
        Some(at) => at,
        None => {
            let plan = make()?;
            plans.truncate(MAX_PLANS - 1);
            plans.push(plan);
            plans.len() - 1
        }
    };
    plans[..=last].rotate_right(1);
    Ok(())
}

impl std::fmt::Debug for Runner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (plans, workspace) = (self.plans.len(), self.workspace.len());
        let mut runner = f.debug_struct("Runner");
        runner
            .field("cpu", &self.cpu)
            .field("plans", &plans)
            .field("workspace_bytes", &workspace)
            .finish_non_exhaustive()
    }
}

impl Default for Runner {
    fn default() -> Self {
        Self::new()
    }
}
