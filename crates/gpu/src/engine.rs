//! Engines: how a device computes attention.
//!
//! A [`Session`](crate::session::Session) checks inputs, keeps plans and copies block tables. Its engine chooses kernels, owns the
//! scratch memory of a plan and launches. [`PortableEngine`] has the kernels of this crate; a backend with kernels of its own has an engine
//! of its own.

use crate::backward;
use crate::backward::plan::PortableBackwardPlan;
use crate::backward::run::BackwardWorkspace;
use crate::backward::tensors::{GpuBackwardInputs, GpuGradients};
use crate::backward::tile::small_tile;
use crate::error::SessionError;
use crate::facts::GpuFacts;
use crate::plan::Plan;
use crate::run::{Runs, Workspace};
use crate::tensors::{GpuInputs, GpuOutputs};
use crate::tile::Tiling;
use flashtile_core::block_tables::BlockTables;
use flashtile_core::plan::{PlanOptions, Unsupported};
use flashtile_core::problem::Problem;
use flashtile_kernel::{Device, DeviceMemory, HostAccess, Instance, LaunchError};
use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;

/// The memory of an engine's device.
pub type MemoryOf<E> = <<E as Engine>::Device as Device>::Memory;

/// How a device computes attention.
pub trait Engine {
    /// The device.
    type Device: HostAccess;
    /// Kernels, tiles, splits and sizes of one problem.
    type Plan;
    /// A plan on the device: loaded kernels, and the memory that its runs need beside their tensors.
    type Prepared;
    /// Kernels, tiles and memory sizes of the backward pass of one problem.
    type BackwardPlan;
    /// A backward plan on the device: the memory that its runs need beside their tensors.
    type PreparedBackward;
    /// Why a call failed.
    type Error: From<SessionError<<Self::Device as Device>::Error>>;

    /// Plans a problem.
    ///
    /// # Errors
    /// [`Unsupported`].
    fn plan(&self, problem: &Problem) -> Result<Self::Plan, Unsupported>;

    /// Loads the kernels of a plan and takes memory for its runs, which may be that of `old`: runs of both follow each other.
    ///
    /// # Errors
    /// The error that the device reports.
    fn prepare(
        &self,
        device: &Self::Device,
        plan: Self::Plan,
        old: Option<Self::Prepared>,
    ) -> Result<Self::Prepared, Self::Error>;

    /// Replaces a prepared plan by the plan of another step of the same sequences, which differ only in their numbers
    /// of keys. `None` if it did. `Some(plan)` hands the new plan back: its launches or sizes differ, `prepared` is
    /// still the old plan, and the caller has to prepare the new one.
    ///
    /// # Errors
    /// The error that the device reports.
    fn update(
        &self,
        device: &Self::Device,
        prepared: &mut Self::Prepared,
        plan: Self::Plan,
    ) -> Result<Option<Self::Plan>, Self::Error>;

    /// The plan that was prepared.
    fn planned(prepared: &Self::Prepared) -> &Self::Plan;

    /// The problem that a plan computes.
    fn problem(plan: &Self::Plan) -> &Problem;

    /// Writes the numbers of the sequences, and what the engine keeps of `tables`, to the device where they changed since the last run. With
    /// `tables`, returns true if the kernels also read a block table, which the caller then copies to the device and passes to
    /// [`Engine::run`]; without, the result has no meaning.
    ///
    /// # Errors
    /// The error that the device reports.
    fn write_sequences(
        &self,
        device: &Self::Device,
        prepared: &mut Self::Prepared,
        tables: Option<&BlockTables>,
    ) -> Result<bool, Self::Error>;

    /// Launches a run over tensors that were checked against the problem.
    ///
    /// # Errors
    /// The error that the device reports.
    fn run(
        &self,
        device: &Self::Device,
        prepared: &mut Self::Prepared,
        inputs: &GpuInputs<'_, MemoryOf<Self>>,
        outputs: &mut GpuOutputs<'_, MemoryOf<Self>>,
    ) -> Result<(), Self::Error>;

    /// Plans the backward pass of a problem.
    ///
    /// # Errors
    /// [`Unsupported`].
    fn plan_backward(&self, problem: &Problem) -> Result<Self::BackwardPlan, Unsupported>;

    /// Takes memory for the runs of a backward plan.
    ///
    /// # Errors
    /// The error that the device reports.
    fn prepare_backward(
        &self,
        device: &Self::Device,
        plan: Self::BackwardPlan,
    ) -> Result<Self::PreparedBackward, Self::Error>;

    /// The backward plan that was prepared.
    fn planned_backward(prepared: &Self::PreparedBackward) -> &Self::BackwardPlan;

    /// The problem whose gradients a plan computes.
    fn backward_problem(plan: &Self::BackwardPlan) -> &Problem;

    /// Launches the backward pass over tensors that were checked against the problem.
    ///
    /// # Errors
    /// The error that the device reports.
    fn run_backward(
        &self,
        device: &Self::Device,
        prepared: &mut Self::PreparedBackward,
        inputs: &GpuBackwardInputs<'_, MemoryOf<Self>>,
        gradients: &mut GpuGradients<'_, MemoryOf<Self>>,
    ) -> Result<(), Self::Error>;

    /// Returns true if the engine has learned from an error of a run, so that the problem, planned anew, may
    /// run.
    fn learn(&mut self, _plan: &Self::Plan, _error: &Self::Error) -> bool {
        false
    }

    /// [`Engine::learn`] of a run of the backward pass.
    fn learn_backward(&mut self, _plan: &Self::BackwardPlan, _error: &Self::Error) -> bool {
        false
    }

    /// Forgets the sequences that were written to the device, as they may not have arrived there.
    fn forget_written(_prepared: &mut Self::Prepared) {}

    /// [`Engine::forget_written`] of a backward plan.
    fn forget_written_backward(_prepared: &mut Self::PreparedBackward) {}
}

/// The native code of a device that runs nothing else.
#[derive(Debug, Clone, Copy)]
struct Native {
    /// The instance with native code.
    find: fn(&Instance) -> Option<Instance>,
    /// Why a problem has none.
    missing: fn(&Problem) -> String,
}

/// How problems are planned.
#[derive(Debug, Clone, Copy)]
enum Planner {
    /// For the limits of a device.
    Device(GpuFacts, PlanOptions),
    /// All with the same tile.
    Tiling(Tiling),
}

/// The portable kernels on any device.
pub struct PortableEngine<D> {
    planner: Planner,
    native: Option<Native>,
    /// Threads that a threadgroup of a kernel, by its entry point, may have, where that is known to be less than its plan has.
    thread_limits: HashMap<String, usize>,
    device: PhantomData<fn(&D)>,
}

impl<D> fmt::Debug for PortableEngine<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortableEngine").field("planner", &self.planner).finish_non_exhaustive()
    }
}

impl<D> PortableEngine<D> {
    /// The kernels that suit a device with these facts.
    #[must_use]
    pub fn new(facts: GpuFacts) -> Self {
        Self::with_options(facts, PlanOptions::default())
    }

    /// [`PortableEngine::new`] with options of the planner.
    #[must_use]
    pub fn with_options(facts: GpuFacts, options: PlanOptions) -> Self {
        Self::with_planner(Planner::Device(facts, options))
    }

    /// Kernels of one tile for every problem, whatever the device can hold.
    #[must_use]
    pub fn with_tiling(tiling: impl Into<Tiling>) -> Self {
        Self::with_planner(Planner::Tiling(tiling.into()))
    }

    fn with_planner(planner: Planner) -> Self {
        Self { planner, native: None, thread_limits: HashMap::new(), device: PhantomData }
    }

    /// For a device that runs native code only: `find` knows it, and `missing` says why a problem has none.
    #[must_use]
    pub fn with_native(
        mut self,
        find: fn(&Instance) -> Option<Instance>,
        missing: fn(&Problem) -> String,
    ) -> Self {
        self.native = Some(Native { find, missing });
        self
    }

    /// The facts for a plan of these kernels, if some of them are known to take fewer threads than the facts say.
    fn lowered<'a>(
        &self,
        facts: GpuFacts,
        instances: impl IntoIterator<Item = &'a Instance>,
    ) -> Option<GpuFacts> {
        let limit = |instance: &Instance| self.thread_limits.get(&instance.entry()).copied();
        let least = instances.into_iter().filter_map(limit).min()?;
        (least < facts.threads_per_group).then(|| facts.with_threads_per_group(least))
    }

    /// Records the thread limit of the kernel that a launch refused. Returns false if the kernel is not one of these, or its limit was known.
    fn note_limit<'a>(
        &mut self,
        refused: Option<(&'static str, u32)>,
        instances: impl IntoIterator<Item = &'a Instance>,
    ) -> bool {
        let Some((kernel, limit)) = refused else { return false };
        let found = instances.into_iter().find(|instance| instance.kernel().name == kernel);
        let Some(entry) = found.map(Instance::entry) else { return false };
        if self.thread_limits.contains_key(&entry) {
            return false;
        }
        self.thread_limits.insert(entry, limit as usize);
        true
    }

    /// The plan for threadgroups as large as its kernels are known to take.
    fn within_limits(&self, problem: &Problem) -> Result<Plan, Unsupported> {
        let (mut facts, options) = match self.planner {
            Planner::Device(facts, options) => (facts, options),
            Planner::Tiling(tiling) => return Plan::with_tiling(problem, tiling),
        };
        loop {
            let plan = Plan::new(problem, &facts, options, None)?;
            match self.lowered(facts, [plan.launches().first()]) {
                Some(lower) => facts = lower,
                None => return Ok(plan),
            }
        }
    }

    /// [`PortableEngine::within_limits`] of the backward pass.
    fn backward_within_limits(&self, problem: &Problem) -> Result<PortableBackwardPlan, Unsupported> {
        let (mut facts, options) = match self.planner {
            Planner::Device(facts, options) => (facts, options),
            Planner::Tiling(_) => {
                let dims = problem.dims();
                let tile = small_tile(dims.head_dim.max(dims.value_dim));
                return PortableBackwardPlan::with_tile(problem, tile);
            }
        };
        loop {
            let plan = PortableBackwardPlan::new(problem, &facts, options)?;
            match self.lowered(facts, plan.tiled()) {
                Some(lower) => facts = lower,
                None => return Ok(plan),
            }
        }
    }
}

/// A plan of portable kernels and the memory of its runs.
#[derive(Debug)]
pub struct PreparedPortable<M> {
    plan: Plan,
    runs: Runs<M>,
    /// The pages of sequences that have one each, with which the numbers of the sequences were written; `None` before they are.
    pages: Option<Vec<u32>>,
}

/// A backward plan of portable kernels and the memory of its runs.
#[derive(Debug)]
pub struct PreparedPortableBackward<M> {
    plan: PortableBackwardPlan,
    workspace: BackwardWorkspace<M>,
    /// True if the numbers in the workspace have reached the device, as far as is known.
    is_written: bool,
}

impl<M: DeviceMemory> PreparedPortableBackward<M> {
    /// Takes memory for the runs of a plan.
    ///
    /// # Errors
    /// The error that the device reports.
    pub fn new<D: HostAccess<Memory = M>>(device: &D, plan: PortableBackwardPlan) -> Result<Self, D::Error> {
        Ok(Self { workspace: BackwardWorkspace::new(device, &plan)?, plan, is_written: true })
    }

    /// The plan.
    #[must_use]
    pub const fn plan(&self) -> &PortableBackwardPlan {
        &self.plan
    }

    /// Writes the numbers in the workspace, unless they are there.
    fn write<D: HostAccess<Memory = M>>(&mut self, device: &D) -> Result<(), SessionError<D::Error>> {
        if !self.is_written {
            self.workspace.write(device, &self.plan).map_err(SessionError::device)?;
            self.is_written = true;
        }
        Ok(())
    }

    /// Launches the kernels over tensors that were checked against the problem.
    ///
    /// # Errors
    /// The errors of [`backward::run::run`], and the error that the device reports.
    pub fn run<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
        inputs: &GpuBackwardInputs<'_, M>,
        gradients: &mut GpuGradients<'_, M>,
    ) -> Result<(), SessionError<D::Error>> {
        self.write(device)?;
        backward::run::run(device, &self.plan, inputs, gradients, &mut self.workspace)
    }

    /// Forgets the numbers that were written to the device, as they may not have arrived there.
    pub const fn forget_written(&mut self) {
        self.is_written = false;
    }
}

impl<D: HostAccess> Engine for PortableEngine<D> {
    type Device = D;
    type Plan = Plan;
    type Prepared = PreparedPortable<D::Memory>;
    type BackwardPlan = PortableBackwardPlan;
    type PreparedBackward = PreparedPortableBackward<D::Memory>;
    type Error = SessionError<D::Error>;

    fn plan(&self, problem: &Problem) -> Result<Plan, Unsupported> {
        let plan = self.within_limits(problem)?;
        match self.native {
            None => Ok(plan),
            Some(Native { find, missing }) => {
                plan.with_native(find).ok_or_else(|| Unsupported::Instance { why: missing(problem) })
            }
        }
    }

    fn prepare(
        &self,
        device: &D,
        plan: Plan,
        old: Option<Self::Prepared>,
    ) -> Result<Self::Prepared, Self::Error> {
        drop(old);
        let workspace = Workspace::allocate(device, &plan).map_err(SessionError::device)?;
        Ok(PreparedPortable { plan, runs: Runs::new(workspace), pages: None })
    }

    fn update(&self, _: &D, prepared: &mut Self::Prepared, plan: Plan) -> Result<Option<Plan>, Self::Error> {
        if prepared.plan != plan {
            return Ok(Some(plan));
        }
        (prepared.plan, prepared.pages) = (plan, None);
        Ok(None)
    }

    fn planned(prepared: &Self::Prepared) -> &Plan {
        &prepared.plan
    }

    fn problem(plan: &Plan) -> &Problem {
        plan.problem()
    }

    /// Where each sequence has one page that is no ring, its page is written with its numbers, and kernels read no block table.
    fn write_sequences(
        &self,
        device: &D,
        prepared: &mut Self::Prepared,
        tables: Option<&BlockTables>,
    ) -> Result<bool, Self::Error> {
        let single = tables.filter(|tables| tables.width == 1 && !tables.wraps);
        let pages = single.map_or(&[][..], |tables| &tables.table);
        if prepared.pages.as_deref() != Some(pages) {
            prepared.pages = None;
            let numbers = prepared.plan.sequences(pages);
            prepared.runs.write_sequences(device, &numbers).map_err(SessionError::device)?;
            prepared.pages = Some(pages.to_vec());
        }
        Ok(single.is_none())
    }

    fn run(
        &self,
        device: &D,
        prepared: &mut Self::Prepared,
        inputs: &GpuInputs<'_, D::Memory>,
        outputs: &mut GpuOutputs<'_, D::Memory>,
    ) -> Result<(), Self::Error> {
        prepared.runs.run(device, prepared.plan.launches(), inputs, outputs)
    }

    /// A compiled kernel may take fewer threads than its plan has.
    fn learn(&mut self, plan: &Plan, error: &Self::Error) -> bool {
        self.note_limit(refused::<D>(error), [plan.launches().first()])
    }

    fn learn_backward(&mut self, plan: &PortableBackwardPlan, error: &Self::Error) -> bool {
        self.note_limit(refused::<D>(error), plan.tiled())
    }

    fn forget_written(prepared: &mut Self::Prepared) {
        prepared.pages = None;
    }

    fn prepare_backward(
        &self,
        device: &D,
        plan: PortableBackwardPlan,
    ) -> Result<Self::PreparedBackward, Self::Error> {
        PreparedPortableBackward::new(device, plan).map_err(SessionError::device)
    }

    fn planned_backward(prepared: &Self::PreparedBackward) -> &PortableBackwardPlan {
        prepared.plan()
    }

    fn backward_problem(plan: &PortableBackwardPlan) -> &Problem {
        plan.problem()
    }

    fn run_backward(
        &self,
        device: &D,
        prepared: &mut Self::PreparedBackward,
        inputs: &GpuBackwardInputs<'_, D::Memory>,
        gradients: &mut GpuGradients<'_, D::Memory>,
    ) -> Result<(), Self::Error> {
        prepared.run(device, inputs, gradients)
    }

    fn forget_written_backward(prepared: &mut Self::PreparedBackward) {
        prepared.forget_written();
    }

    fn plan_backward(&self, problem: &Problem) -> Result<PortableBackwardPlan, Unsupported> {
        let plan = self.backward_within_limits(problem)?;
        match self.native {
            None => Ok(plan),
            Some(Native { find, missing }) => {
                plan.with_native(find).ok_or_else(|| Unsupported::Instance { why: missing(problem) })
            }
        }
    }
}

/// The kernel that an error of a launch refused for its threads, and how many it takes.
fn refused<D: Device>(error: &SessionError<D::Error>) -> Option<(&'static str, u32)> {
    match error {
        SessionError::Launch(LaunchError::Device(error)) => D::thread_limit(error),
        _ => None,
    }
}
