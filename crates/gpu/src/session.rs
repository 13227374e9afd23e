//! Sessions: attention on a device, with plans and their memory kept from call to call.

use crate::error::SessionError;
use crate::facts::GpuFacts;
use crate::launches::sequences;
use crate::plan::Plan;
use crate::run::{Runs, Workspace};
use crate::tensors::{GpuInputs, GpuKv, GpuMask, GpuOutputs, GpuTables, dtype_of};
use crate::tile::Tiling;
use crate::upload::{Results, Uploaded};
use flashtile_core::block_tables::BlockTables;
use flashtile_core::inputs::{self, InputShapes, Inputs, Outputs, RunError, check_tables};
use flashtile_core::plan::{PlanOptions, Unsupported};
use flashtile_core::problem::{Problem, ProblemDesc};
#[cfg(doc)]
use flashtile_kernel::Device;
use flashtile_kernel::{DeviceMemory, HostAccess, Instance, LaunchError, ScalarType};
use std::collections::HashMap;
use std::fmt;

/// Plans that a session keeps.
const MAX_PLANS: usize = 16;

/// The native code of a device that runs nothing else.
#[derive(Debug, Clone, Copy)]
struct Native {
    /// The instance with native code.
    find: fn(&Instance) -> Option<Instance>,
    /// Why there is none of a problem.
    missing: fn(&Problem) -> String,
}

/// Computes attention on a device by the portable kernels, and keeps what a next call needs again: plans and the memory of their runs.
///
/// After the first call of a description, a call of the same, or of one that differs in nothing but larger numbers of keys (the
/// next step of decoding), launches kernels and writes the numbers of the sequences and the block table where they changed: it
/// allocates no memory of the device and does not wait for it. Only a block table that outgrows its memory, which holds twice the
/// first one's entries or more, gets new memory.
pub struct Session<D: HostAccess> {
    device: D,
    planner: Planner,
    native: Option<Native>,
    /// Threads that a threadgroup of a kernel, by its entry point, may have, where that is known to be less than its plan has.
    thread_limits: HashMap<String, usize>,
    /// [`Device::failures`] when the memory of plans was last known to hold what was written.
    failures: u64,
    /// Most recently used first.
    plans: Vec<Kept<D::Memory>>,
}

/// How problems are planned.
#[derive(Debug, Clone, Copy)]
enum Planner {
    /// For what a device can hold.
    Device(GpuFacts, PlanOptions),
    /// All are cut the same way.
    Tiling(Tiling),
}

/// A plan and the memory of its runs.
#[derive(Debug)]
struct Kept<M> {
    problem: Problem,
    plan: Plan,
    runs: Runs<M>,
    /// The pages of sequences that have one each, with which the numbers of the sequences were written; `None` before they are.
    pages: Option<Vec<u32>>,
    /// The entries of the last block table, and the memory that holds them.
    table: Option<(Vec<u32>, M)>,
}

impl<D: HostAccess> fmt::Debug for Session<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plans: Vec<_> = self.plans.iter().map(|kept| kept.plan.launches().entry()).collect();
        f.debug_struct("Session")
            .field("planner", &self.planner)
            .field("plans", &plans)
            .finish_non_exhaustive()
    }
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

impl<M: DeviceMemory> Kept<M> {
    fn new<D: HostAccess<Memory = M>>(device: &D, problem: Problem, plan: Plan) -> Result<Self, D::Error> {
        let runs = Runs::new(Workspace::allocate(device, &plan)?);
        Ok(Self { problem, plan, runs, pages: None, table: None })
    }

    fn forget_written(&mut self) {
        self.pages = None;
        if let Some((entries, _)) = &mut self.table {
            entries.clear();
        }
    }

    /// Writes the numbers of the sequences, unless they are there. Sequences of a cache have one page each, or `pages` is empty.
    fn write_sequences<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
        pages: &[u32],
    ) -> Result<(), D::Error> {
        if self.pages.as_deref() == Some(pages) {
            return Ok(());
        }
        let problem = &self.problem;
        let page = |n: usize| pages.get(n).map_or(problem.sequences()[n].batch, |page| *page as usize);
        self.pages = None;
        self.runs.write_sequences(device, &sequences(problem, page))?;
        self.pages = Some(pages.to_vec());
        Ok(())
    }

    /// Writes the entries of a table, unless they are there. Sequences have at most `pages` entries each.
    fn write_table<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
        tables: &BlockTables,
        pages: usize,
    ) -> Result<(), D::Error> {
        let entries = &tables.table;
        let mut memory = match self.table.take() {
            Some(held) if held.0 == *entries => {
                self.table = Some(held);
                return Ok(());
            }
            Some((_, memory)) if memory.view().len() >= entries.len() => memory,
            _ => {
                let all = tables.lens.len().saturating_mul(pages);
                let room = entries.len().next_power_of_two().saturating_mul(2).min(all).max(entries.len());
                device.uninit(ScalarType::U32, room.max(64))?
            }
        };
        device.write(&mut memory, 0, &bytes_of(entries))?;
        self.table = Some((entries.clone(), memory));
        Ok(())
    }
}

impl<D: HostAccess> Session<D> {
    /// A session on a device that can hold so much.
    #[must_use]
    pub fn new(device: D, facts: GpuFacts) -> Self {
        Self::with_options(device, facts, PlanOptions::default())
    }

    /// [`Session::new`] with options of the planner.
    #[must_use]
    pub fn with_options(device: D, facts: GpuFacts, options: PlanOptions) -> Self {
        Self::with_planner(device, Planner::Device(facts, options))
    }

    /// A session that cuts the work of every problem so, whatever its device can hold.
    #[must_use]
    pub fn with_tiling(device: D, tiling: impl Into<Tiling>) -> Self {
        Self::with_planner(device, Planner::Tiling(tiling.into()))
    }

    fn with_planner(device: D, planner: Planner) -> Self {
        let failures = device.failures();
        Self { device, planner, native: None, thread_limits: HashMap::new(), failures, plans: Vec::new() }
    }

    /// The same on a device that runs native code only: `find` knows it, and `missing` says why there is none of a problem.
    #[must_use]
    pub fn with_native(
        mut self,
        find: fn(&Instance) -> Option<Instance>,
        missing: fn(&Problem) -> String,
    ) -> Self {
        self.native = Some(Native { find, missing });
        self
    }

    /// The device.
    #[must_use]
    pub const fn device(&self) -> &D {
        &self.device
    }

    /// Replaces the device by another with the same memory, such as the same one with another place for its launches, and returns the one
    /// before. Plans and memory are kept: launches of both must follow each other.
    pub const fn replace_device(&mut self, device: D) -> D {
        std::mem::replace(&mut self.device, device)
    }

    /// Plans a description and allocates the memory of its runs, or finds what an earlier call has planned.
    ///
    /// # Errors
    /// [`SessionError::Problem`], [`SessionError::Unsupported`] or [`SessionError::Launch`].
    pub fn plan(&mut self, desc: &ProblemDesc) -> Result<&Plan, SessionError<D::Error>> {
        self.select(desc)?;
        Ok(&self.plans[0].plan)
    }

    /// Launches what a description says over tensors on the device.
    ///
    /// # Errors
    /// As [`Session::plan`], and [`SessionError::Inputs`] where the tensors do not fit the description. Nothing was launched then.
    pub fn run(
        &mut self,
        desc: &ProblemDesc,
        inputs: &GpuInputs<'_, D::Memory>,
        outputs: &mut GpuOutputs<'_, D::Memory>,
    ) -> Result<(), SessionError<D::Error>> {
        self.select(desc)?;
        self.run_selected(|device, kept| {
            let page_size = inputs.tables.map(|tables| tables.page_size);
            check(&kept.problem, inputs, page_size, outputs)?;
            kept.write_sequences(device, &[]).map_err(SessionError::device)?;
            kept.runs.run(device, kept.plan.launches(), inputs, outputs)
        })
    }

    /// [`Session::run`] over pages, with tables in the memory of the host; `inputs.tables` is not read. They are copied to the device
    /// unless the last call of the description had the same. Where each sequence has one page that is no ring, kernels look up no table.
    ///
    /// # Errors
    /// As [`Session::run`]; also where the tables do not fit the pool of `inputs.k`.
    pub fn run_paged(
        &mut self,
        desc: &ProblemDesc,
        inputs: &GpuInputs<'_, D::Memory>,
        tables: &BlockTables,
        outputs: &mut GpuOutputs<'_, D::Memory>,
    ) -> Result<(), SessionError<D::Error>> {
        self.select(desc)?;
        self.run_selected(|device, kept| {
            let (mut inputs, &BlockTables { width, page_size, wraps, .. }) = (*inputs, tables);
            inputs.tables = None;
            check(&kept.problem, &inputs, Some(page_size), outputs)?;
            let pages = inputs.k.shape[0];
            check_tables(&kept.problem, tables, pages)?;
            if width == 1 && !wraps {
                kept.write_sequences(device, &tables.table).map_err(SessionError::device)?;
            } else {
                kept.write_sequences(device, &[]).map_err(SessionError::device)?;
                kept.write_table(device, tables, pages).map_err(SessionError::device)?;
                let table = kept.table.as_ref().map(|(_, memory)| memory.view());
                inputs.tables = table.map(|table| GpuTables { table, width, page_size, wraps });
            }
            kept.runs.run(device, kept.plan.launches(), &inputs, outputs)
        })
    }

    /// Computes what a description says over tensors in host memory: copies them to the device, runs, waits, and copies the results
    /// back. Where tensors stay on the device, [`Session::run`] has no copies.
    ///
    /// # Errors
    /// As [`Session::run`]; [`SessionError::Inputs`] also where block tables do not describe pages of the pool.
    pub fn compute(
        &mut self,
        desc: &ProblemDesc,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<(), SessionError<D::Error>> {
        let problem = desc.clone().validate()?;
        inputs::check(&problem, inputs, outputs)?;
        self.select(desc)?;
        let uploaded = Uploaded::new(&self.device, inputs).map_err(SessionError::device)?;
        let mut results = Results::new(&self.device, outputs).map_err(SessionError::device)?;
        match inputs.tables {
            Some(tables) => self.run_paged(desc, &uploaded.inputs(), tables, &mut results.outputs())?,
            None => self.run(desc, &uploaded.inputs(), &mut results.outputs())?,
        }
        results.download(&self.device, outputs).map_err(SessionError::device)
    }

    /// Gives back the memory of all plans.
    pub fn clear(&mut self) {
        self.plans.clear();
    }

    /// Makes what is kept of a description the first of the plans.
    fn select(&mut self, desc: &ProblemDesc) -> Result<(), SessionError<D::Error>> {
        let failures = self.device.failures();
        if failures != self.failures {
            // Numbers and tables may not have reached the device.
            self.plans.iter_mut().for_each(Kept::forget_written);
            self.failures = failures;
        }
        let at = match self.plans.iter().position(|kept| kept.problem.desc() == desc) {
            Some(at) => at,
            None => self.keep(desc.clone().validate()?)?,
        };
        self.plans[..=at].rotate_right(1);
        Ok(())
    }

    /// Runs the first of the plans. Where a compiled kernel takes fewer threads than its plan has, the problem is planned anew.
    fn run_selected(
        &mut self,
        mut run: impl FnMut(&D, &mut Kept<D::Memory>) -> Result<(), SessionError<D::Error>>,
    ) -> Result<(), SessionError<D::Error>> {
        loop {
            let kept = &mut self.plans[0];
            let error = match run(&self.device, kept) {
                Err(SessionError::Launch(LaunchError::Device(error))) => error,
                other => return other,
            };
            let (entry, kernel) = (kept.plan.launches().entry(), kept.plan.launches().kernel());
            let limit = D::thread_limit(&error).filter(|(of, _)| *of == kernel);
            let limit = limit.filter(|_| !self.thread_limits.contains_key(&entry));
            let Some((_, limit)) = limit else { return Err(SessionError::device(error)) };
            self.thread_limits.insert(entry, limit as usize);
            let problem = self.plans[0].problem.clone();
            let plan = self.planned(&problem)?;
            self.plans[0] = Kept::new(&self.device, problem, plan).map_err(SessionError::device)?;
        }
    }

    /// The plan of a problem, for threadgroups as large as its kernels are known to take.
    fn planned(&self, problem: &Problem) -> Result<Plan, SessionError<D::Error>> {
        let (mut facts, options) = match self.planner {
            Planner::Device(facts, options) => (facts, options),
            Planner::Tiling(tiling) => return Ok(Plan::with_tiling(problem, tiling)?),
        };
        loop {
            let plan = Plan::new(problem, &facts, options, None)?;
            match self.thread_limits.get(&plan.launches().entry()) {
                Some(&limit) if limit < facts.threads_per_group => {
                    facts = facts.with_threads_per_group(limit);
                }
                _ => return Ok(plan),
            }
        }
    }

    /// The place of a problem that was not planned: that of the step before it, whose memory it takes over, or a new one.
    fn keep(&mut self, problem: Problem) -> Result<usize, SessionError<D::Error>> {
        let plan = self.planned(&problem)?;
        let plan = match self.native {
            None => plan,
            Some(Native { find, missing }) => {
                plan.with_native(find).ok_or_else(|| Unsupported::Instance { why: missing(&problem) })?
            }
        };
        let growth =
            |kept: &Kept<D::Memory>| problem.growth_since(&kept.problem).filter(|_| kept.plan == plan);
        let steps = self.plans.iter().enumerate().filter_map(|(at, kept)| Some((growth(kept)?, at)));
        if let Some((_, at)) = steps.min() {
            let kept = &mut self.plans[at];
            (kept.problem, kept.plan, kept.pages) = (problem, plan, None);
            return Ok(at);
        }
        let kept = Kept::new(&self.device, problem, plan).map_err(SessionError::device)?;
        self.plans.truncate(MAX_PLANS - 1);
        self.plans.push(kept);
        Ok(self.plans.len() - 1)
    }
}

/// Checks that tensors are the problem's and inside of their memory; tokens of a page, where there are pages.
fn check<M, E>(
    problem: &Problem,
    inputs: &GpuInputs<'_, M>,
    page: Option<usize>,
    outputs: &GpuOutputs<'_, M>,
) -> Result<(), SessionError<E>> {
    let dtype = |element| dtype_of(element).ok_or(SessionError::Element { element });
    let kv = |kv: &GpuKv<'_, M>| (kv.codec, kv.shape);
    let mask = |mask: GpuMask<'_, M>| (mask.kind, mask.shape);
    let shapes = InputShapes {
        q: (dtype(inputs.q.view.element())?, inputs.q.shape),
        k: kv(&inputs.k),
        v: kv(&inputs.v),
        page,
        tree: inputs.tree.map(mask),
        mask: inputs.mask.map(mask),
        alibi_slopes: inputs.alibi_slopes.map(|list| list.len()),
        sinks: inputs.sinks.map(|list| list.len()),
    };
    shapes.check(problem)?;
    if let Some(means) = &inputs.v.means {
        return Err(RunError::Length { tensor: "v.means", expected: 0, got: means.len() }.into());
    }
    let out = (dtype(outputs.out.view.element())?, outputs.out.shape);
    inputs::check_outputs(problem, out, outputs.lse.as_ref().map(|lse| lse.len()))?;
    inputs.check(problem.sequences().len())?;
    Ok(outputs.out.check().map_err(|error| RunError::Memory { tensor: "out", error })?)
}
