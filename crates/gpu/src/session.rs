//! Sessions: attention on a device, with plans and their memory kept from call to call.

use crate::backward;
use crate::backward::tensors::{GpuBackwardInputs, GpuGradients};
use crate::backward::upload::{BackwardResults, UploadedBackward};
use crate::engine::{Engine, MemoryOf};
use crate::error::SessionError;
use crate::shape::kept_parts;
use crate::tensors::{GpuInputs, GpuKv, GpuMask, GpuOutputs, GpuTables, dtype_of};
use crate::upload::{Results, Uploaded};
use flashtile_core::block_tables::BlockTables;
use flashtile_core::dtype::Dtype;
use flashtile_core::gradients::{self, BackwardInputs, Gradients};
use flashtile_core::inputs::{self, InputShapes, Inputs, Outputs, RunError, check_tables};
use flashtile_core::problem::{KeyPart, Problem, ProblemDesc};
use flashtile_kernel::{Device, DeviceMemory, HostAccess, ScalarType};
use std::fmt;

/// Plans that a session keeps, beside those that graphs have captured.
const MAX_PLANS: usize = 16;

/// Computes attention on a device, and keeps what a next call needs again: plans, kernels and the memory of their runs.
///
/// After the first call of a description, a call of the same, or of one that differs in nothing but larger numbers of keys (the
/// next step of decoding), launches kernels and writes the numbers of the sequences and the block table where they changed: it
/// allocates no memory of the device and does not wait for it. Only a block table that outgrows its memory, which holds twice the
/// first one's entries or more, gets new memory.
///
/// Calls may be captured in a graph, where the device has graphs, after one call of the same description that was not, and no other step
/// since. A session keeps what was captured as long as it lives, and must live as long as the graph.
pub struct Session<E: Engine> {
    device: E::Device,
    engine: E,
    /// [`Device::failures`] when the memory of plans was last known to hold all that was written to it.
    failures: u64,
    /// Most recently used first.
    plans: Vec<Kept<E>>,
    /// Most recently used first.
    backward: Vec<KeptBackward<E>>,
}

/// A backward plan and the memory of its runs.
struct KeptBackward<E: Engine> {
    prepared: E::PreparedBackward,
    /// True if a graph refers to the plan.
    captured: bool,
}

impl<E: Engine> KeptBackward<E> {
    fn problem(&self) -> &Problem {
        E::backward_problem(E::planned_backward(&self.prepared))
    }
}

/// A plan and its block tables. Runs follow each other on the device, so that they share memory.
struct Kept<E: Engine> {
    prepared: E::Prepared,
    tables: PlanTables<MemoryOf<E>>,
    /// True if a graph refers to the plan.
    captured: bool,
}

/// Block tables of a plan on the device.
#[derive(Debug)]
struct PlanTables<M> {
    all: Tables<M>,
    /// Of the first and of the last tokens that are kept in 16 bits.
    kept: [Tables<M>; 2],
}

impl<M> Default for PlanTables<M> {
    fn default() -> Self {
        Self { all: Tables::default(), kept: [Tables::default(), Tables::default()] }
    }
}

impl<M> PlanTables<M> {
    fn iter_mut(&mut self) -> impl Iterator<Item = &mut Tables<M>> {
        std::iter::once(&mut self.all).chain(&mut self.kept)
    }
}

impl<M: DeviceMemory> PlanTables<M> {
    /// Copies tables to the device where they are not the last ones, and gives them to the inputs: the tables of kept tokens, and the table
    /// of all tokens where kernels read it.
    fn write<'a, D: HostAccess<Memory = M>>(
        &'a mut self,
        device: &D,
        inputs: &mut GpuInputs<'a, M>,
        (tables, reads_table): (HostTables<'_>, bool),
        captures: bool,
    ) -> Result<(), SessionError<D::Error>> {
        if reads_table {
            inputs.tables = Some(self.all.write(device, tables.tables, inputs.k.shape[0], captures)?);
        }
        let pages = [&mut inputs.kept.first, &mut inputs.kept.last];
        for ((pages, of), tables) in pages.into_iter().zip(&mut self.kept).zip(tables.kept) {
            if let (Some(pages), Some(tables)) = (pages, tables) {
                pages.tables = Some(of.write(device, tables, pages.k.shape[0], captures)?);
            }
        }
        Ok(())
    }
}

/// Tables in the memory of the host, for a run over pages.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct HostTables<'a> {
    /// Tables of all tokens.
    pub tables: &'a BlockTables,
    /// Tables of the tokens that are kept in 16 bits, where the problem has such tokens; of a part whose tables lie on the device, `None`.
    pub kept: [Option<&'a BlockTables>; 2],
}

impl<'a> HostTables<'a> {
    /// The tables of inputs in the memory of the host, where keys lie in pages.
    #[must_use]
    pub fn of(inputs: &Inputs<'a>) -> Option<Self> {
        let kept = inputs.kept.unwrap_or_default();
        let kept = [kept.first, kept.last].map(|pages| pages.map(|pages| pages.tables));
        inputs.tables.map(|tables| Self { tables, kept })
    }
}

impl<'a> From<&'a BlockTables> for HostTables<'a> {
    fn from(tables: &'a BlockTables) -> Self {
        Self { tables, kept: [None, None] }
    }
}

/// Tables of one storage.
#[derive(Debug)]
struct Tables<M> {
    /// The table of the last call that had one on the host.
    last: Option<Table<M>>,
    /// Earlier tables to which graphs refer.
    captured: Vec<Table<M>>,
}

/// A block table on the device, and its entries.
#[derive(Debug)]
struct Table<M> {
    entries: Vec<u32>,
    memory: M,
    captured: bool,
}

impl<M> Default for Tables<M> {
    fn default() -> Self {
        Self { last: None, captured: Vec::new() }
    }
}

impl<M: DeviceMemory> Tables<M> {
    /// A table on the device, which is copied there unless it is the last one. Sequences have at most `pages` entries each.
    fn write<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
        tables: &BlockTables,
        pages: usize,
        captures: bool,
    ) -> Result<GpuTables<'_, M>, SessionError<D::Error>> {
        let entries = &tables.table;
        if self.last.as_ref().is_none_or(|last| last.entries != *entries) {
            if captures {
                return Err(SessionError::Captures { what: "copy of the block table" });
            }
            let old = match self.last.take() {
                Some(last) if last.captured => {
                    self.captured.push(last);
                    None
                }
                last => last.map(|last| last.memory),
            };
            let mut memory = match old.filter(|old| old.view().len() >= entries.len()) {
                Some(old) => old,
                None => {
                    let all = tables.lens.len().saturating_mul(pages);
                    let room = entries.len().next_power_of_two().saturating_mul(2);
                    let room = room.min(all).max(entries.len()).max(64);
                    device.uninit(ScalarType::U32, room).map_err(SessionError::device)?
                }
            };
            let bytes: Vec<u8> = entries.iter().flat_map(|page| page.to_ne_bytes()).collect();
            device.write(&mut memory, 0, &bytes).map_err(SessionError::device)?;
            self.last = Some(Table { entries: entries.clone(), memory, captured: false });
        }
        let last = self.last.as_mut().unwrap_or_else(|| unreachable!("a table was written"));
        last.captured |= captures;
        let BlockTables { width, page_size, wraps, .. } = *tables;
        Ok(GpuTables { table: last.memory.view(), width, page_size, wraps })
    }
}

impl<E: Engine> Kept<E> {
    fn problem(&self) -> &Problem {
        E::problem(E::planned(&self.prepared))
    }
}

impl<E: Engine + fmt::Debug> fmt::Debug for Session<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plans = self.plans.len();
        f.debug_struct("Session").field("engine", &self.engine).field("plans", &plans).finish_non_exhaustive()
    }
}

impl<E: Engine> Session<E> {
    /// A session on a device.
    #[must_use]
    pub fn new(device: E::Device, engine: E) -> Self {
        let failures = device.failures();
        Self { device, engine, failures, plans: Vec::new(), backward: Vec::new() }
    }

    /// The device.
    #[must_use]
    pub const fn device(&self) -> &E::Device {
        &self.device
    }

    /// The engine.
    #[must_use]
    pub const fn engine(&self) -> &E {
        &self.engine
    }

    /// Replaces the device by another with the same memory, such as the same one with another place for its launches, and returns the one
    /// before. Plans and memory are kept: launches of both must follow each other.
    pub const fn replace_device(&mut self, device: E::Device) -> E::Device {
        std::mem::replace(&mut self.device, device)
    }

    /// Plans a description and prepares its runs, or finds the plan and the runs of an earlier call.
    ///
    /// # Errors
    /// [`SessionError::Problem`], [`SessionError::Unsupported`] or [`SessionError::Launch`];
    /// [`SessionError::Captures`] where no plan is there yet and the device captures a graph.
    pub fn plan(&mut self, desc: &ProblemDesc) -> Result<&E::Plan, E::Error> {
        self.select(desc)?;
        Ok(E::planned(&self.plans[0].prepared))
    }

    /// Plans the backward pass of a description and takes memory for its runs, or finds the plan and the memory of an earlier call.
    ///
    /// # Errors
    /// The errors of [`Session::plan`]; [`SessionError::Unsupported`] also where the problem has no gradients.
    pub fn plan_backward(&mut self, desc: &ProblemDesc) -> Result<&E::BackwardPlan, E::Error> {
        self.select_backward(desc)?;
        Ok(E::planned_backward(&self.backward[0].prepared))
    }

    /// Prepares a plan of the caller's, with another tile say, which calls of its description then run.
    ///
    /// # Errors
    /// The error that the device reports.
    pub fn keep_plan(&mut self, plan: E::Plan) -> Result<(), E::Error> {
        if self.captures()? {
            return Err(SessionError::Captures { what: "preparation of a plan" }.into());
        }
        let desc = E::problem(&plan).desc().clone();
        self.plans.retain(|kept| kept.captured || *kept.problem().desc() != desc);
        let old = self.evict();
        self.insert(plan, old, PlanTables::default())
    }

    /// Launches the computation of a description over tensors on the device, and returns before it has ended.
    ///
    /// # Errors
    /// The errors of [`Session::plan`], and [`SessionError::Inputs`] where the tensors do not fit the description. Nothing was launched then.
    pub fn run(
        &mut self,
        desc: &ProblemDesc,
        inputs: &GpuInputs<'_, MemoryOf<E>>,
        outputs: &mut GpuOutputs<'_, MemoryOf<E>>,
    ) -> Result<(), E::Error> {
        self.select(desc)?;
        let captures = self.captures()?;
        self.run_selected(|device, engine, kept| {
            let page_size = inputs.tables.map(|tables| tables.page_size);
            check(kept.problem(), inputs, page_size, outputs)?;
            kept.captured |= captures;
            engine.write_sequences(device, &mut kept.prepared, None)?;
            engine.run(device, &mut kept.prepared, inputs, outputs)
        })
    }

    /// [`Session::run`] over pages, with tables in the memory of the host; `inputs.tables` is not read. They are copied to the device
    /// unless the last call of the description had the same.
    ///
    /// # Errors
    /// The errors of [`Session::run`]; also where the tables do not fit the pool of `inputs.k`, and where others are given while the device captures a
    /// graph.
    pub fn run_paged<'t>(
        &mut self,
        desc: &ProblemDesc,
        inputs: &GpuInputs<'_, MemoryOf<E>>,
        tables: impl Into<HostTables<'t>>,
        outputs: &mut GpuOutputs<'_, MemoryOf<E>>,
    ) -> Result<(), E::Error> {
        let tables = tables.into();
        self.select(desc)?;
        let captures = self.captures()?;
        self.run_selected(|device, engine, kept| {
            check_paged(kept.problem(), inputs, tables, outputs)?;
            kept.captured |= captures;
            let reads_table = engine.write_sequences(device, &mut kept.prepared, Some(tables.tables))?;
            let mut inputs = GpuInputs { tables: None, ..*inputs };
            kept.tables.write(device, &mut inputs, (tables, reads_table), captures)?;
            engine.run(device, &mut kept.prepared, &inputs, outputs)
        })
    }

    /// Checks everything that [`Session::run_paged`] would refuse, and copies the tables to the device, without computing: a caller that writes
    /// new rows to its own pages does so after this call.
    ///
    /// # Errors
    /// As [`Session::run_paged`].
    pub fn check_paged<'t>(
        &mut self,
        desc: &ProblemDesc,
        inputs: &GpuInputs<'_, MemoryOf<E>>,
        tables: impl Into<HostTables<'t>>,
        outputs: &GpuOutputs<'_, MemoryOf<E>>,
    ) -> Result<(), E::Error> {
        let tables = tables.into();
        self.select(desc)?;
        let captures = self.captures()?;
        self.run_selected(|device, engine, kept| {
            check_paged(kept.problem(), inputs, tables, outputs)?;
            let reads_table = engine.write_sequences(device, &mut kept.prepared, Some(tables.tables))?;
            kept.tables.write(device, &mut { *inputs }, (tables, reads_table), captures)?;
            Ok(())
        })
    }

    /// Computes a description over tensors in host memory: copies them to the device, runs, waits, and copies
    /// the results back. Where tensors stay on the device, [`Session::run`] has no copies.
    ///
    /// # Errors
    /// The errors of [`Session::run`]; [`SessionError::Inputs`] also where block tables do not describe pages of the pool.
    pub fn compute(
        &mut self,
        desc: &ProblemDesc,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<(), E::Error> {
        let problem = desc.clone().validate().map_err(SessionError::from)?;
        inputs::check(&problem, inputs, outputs).map_err(SessionError::from)?;
        self.select(desc)?;
        let uploaded = Uploaded::new(&self.device, inputs).map_err(SessionError::device)?;
        let mut results = Results::new(&self.device, outputs).map_err(SessionError::device)?;
        match HostTables::of(inputs) {
            Some(tables) => self.run_paged(desc, &uploaded.inputs(), tables, &mut results.outputs())?,
            None => self.run(desc, &uploaded.inputs(), &mut results.outputs())?,
        }
        Ok(results.download(&self.device, outputs).map_err(SessionError::device)?)
    }

    /// Launches the backward pass of a description over tensors on the device, and returns before it has ended.
    ///
    /// # Errors
    /// The errors of [`Session::run`], and [`SessionError::Unsupported`] where the problem has no gradients.
    pub fn run_backward(
        &mut self,
        desc: &ProblemDesc,
        inputs: &GpuBackwardInputs<'_, MemoryOf<E>>,
        gradients: &mut GpuGradients<'_, MemoryOf<E>>,
    ) -> Result<(), E::Error> {
        self.select_backward(desc)?;
        let captures = self.captures()?;
        loop {
            let kept = &mut self.backward[0];
            backward::tensors::check(kept.problem(), inputs, gradients)?;
            kept.captured |= captures;
            let result = self.engine.run_backward(&self.device, &mut kept.prepared, inputs, gradients);
            let plan = E::planned_backward(&kept.prepared);
            if !result.as_ref().is_err_and(|error| self.engine.learn_backward(plan, error)) {
                self.device.submit();
                return result;
            }
            let plan = self.engine.plan_backward(kept.problem()).map_err(SessionError::from)?;
            self.keep_backward_plan(plan)?;
        }
    }

    /// Computes the gradients of a description over tensors in host memory: copies them to the device, runs, waits, and copies the gradients
    /// back.
    ///
    /// # Errors
    /// The errors of [`Session::run_backward`].
    pub fn compute_backward(
        &mut self,
        desc: &ProblemDesc,
        inputs: &BackwardInputs<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result<(), E::Error> {
        let problem = desc.clone().validate().map_err(SessionError::from)?;
        gradients::check(&problem, inputs, gradients).map_err(SessionError::from)?;
        self.select_backward(desc)?;
        let uploaded = UploadedBackward::new(&self.device, inputs)?;
        let mut results = BackwardResults::new(&self.device, gradients)?;
        self.run_backward(desc, &uploaded.inputs(), &mut results.gradients())?;
        Ok(results.download(&self.device, gradients)?)
    }

    /// Keeps a backward plan of the caller's, with another tile say, which backward calls of its description then run.
    ///
    /// # Errors
    /// [`SessionError::Captures`] while the device captures a graph, and the error that the device reports.
    pub fn keep_backward_plan(&mut self, plan: E::BackwardPlan) -> Result<(), E::Error> {
        if self.captures()? {
            return Err(SessionError::Captures { what: "preparation of a plan" }.into());
        }
        let desc = E::backward_problem(&plan).desc();
        self.backward.retain(|kept| kept.captured || kept.problem().desc() != desc);
        self.insert_backward(plan)
    }

    /// Moves the backward plan of a description to the front, and makes it where there is none.
    fn select_backward(&mut self, desc: &ProblemDesc) -> Result<(), E::Error> {
        self.notice_failures();
        if let Some(at) = self.backward.iter().position(|kept| kept.problem().desc() == desc) {
            self.backward[..=at].rotate_right(1);
            return Ok(());
        }
        let problem = desc.clone().validate().map_err(SessionError::from)?;
        let plan = self.engine.plan_backward(&problem).map_err(SessionError::from)?;
        self.insert_backward(plan)
    }

    /// Prepares a backward plan, as the first of all.
    fn insert_backward(&mut self, plan: E::BackwardPlan) -> Result<(), E::Error> {
        if self.captures()? {
            return Err(SessionError::Captures { what: "preparation of a plan" }.into());
        }
        let free = self.backward.iter().filter(|kept| !kept.captured).count();
        if let Some(last) =
            self.backward.iter().rposition(|kept| !kept.captured).filter(|_| free >= MAX_PLANS)
        {
            self.backward.remove(last);
        }
        let prepared = self.engine.prepare_backward(&self.device, plan)?;
        self.backward.insert(0, KeptBackward { prepared, captured: false });
        Ok(())
    }

    /// Gives back the memory of all plans but those that graphs have captured.
    pub fn clear(&mut self) {
        self.plans.retain(|kept| kept.captured);
        self.backward.retain(|kept| kept.captured);
    }

    /// Returns true if a graph has captured a call of the session.
    #[must_use]
    pub fn is_captured(&self) -> bool {
        self.plans.iter().any(|kept| kept.captured) || self.backward.iter().any(|kept| kept.captured)
    }

    fn captures(&self) -> Result<bool, E::Error> {
        Ok(self.device.captures().map_err(SessionError::device)?)
    }

    /// After a failure of the device, forgets all that was written to the memory of plans: it may not have arrived.
    fn notice_failures(&mut self) {
        let failures = self.device.failures();
        if failures == self.failures {
            return;
        }
        for kept in &mut self.plans {
            E::forget_written(&mut kept.prepared);
            let tables = kept.tables.iter_mut().filter_map(|tables| tables.last.as_mut());
            tables.for_each(|table| table.entries.clear());
        }
        self.backward.iter_mut().for_each(|kept| E::forget_written_backward(&mut kept.prepared));
        self.failures = failures;
    }

    /// Moves the plan of a description to the front.
    fn select(&mut self, desc: &ProblemDesc) -> Result<(), E::Error> {
        self.notice_failures();
        match self.plans.iter().position(|kept| kept.problem().desc() == desc) {
            Some(at) => self.plans[..=at].rotate_right(1),
            None => self.add(desc)?,
        }
        Ok(())
    }

    /// Plans a description that was not planned, in the memory of the step before it where that is there.
    fn add(&mut self, desc: &ProblemDesc) -> Result<(), E::Error> {
        let problem = desc.clone().validate().map_err(SessionError::from)?;
        let plan = self.engine.plan(&problem).map_err(SessionError::from)?;
        if self.captures()? {
            return Err(SessionError::Captures { what: "preparation of a plan" }.into());
        }
        let growth = |kept: &Kept<E>| problem.growth_since(kept.problem()).filter(|_| !kept.captured);
        let steps = self.plans.iter().enumerate().filter_map(|(at, kept)| Some((growth(kept)?, at)));
        let Some((_, at)) = steps.min() else {
            let old = self.evict();
            return self.insert(plan, old, PlanTables::default());
        };
        let mut step = self.plans.remove(at);
        match self.engine.update(&self.device, &mut step.prepared, plan)? {
            None => self.plans.insert(0, step),
            // Its launches have other sizes: its memory and its table are taken over.
            Some(plan) => self.insert(plan, Some(step.prepared), step.tables)?,
        }
        Ok(())
    }

    /// Prepares a plan, as the first of all.
    fn insert(
        &mut self,
        plan: E::Plan,
        old: Option<E::Prepared>,
        tables: PlanTables<MemoryOf<E>>,
    ) -> Result<(), E::Error> {
        let prepared = self.engine.prepare(&self.device, plan, old)?;
        self.plans.insert(0, Kept { prepared, tables, captured: false });
        Ok(())
    }

    /// Removes the plan that was used longest ago, where there are as many as a session keeps.
    fn evict(&mut self) -> Option<E::Prepared> {
        let free = self.plans.iter().filter(|kept| !kept.captured).count();
        let last = self.plans.iter().rposition(|kept| !kept.captured).filter(|_| free >= MAX_PLANS)?;
        Some(self.plans.remove(last).prepared)
    }

    /// Runs the first of the plans. Where the engine learns from an error, the problem is planned anew.
    fn run_selected(
        &mut self,
        mut run: impl FnMut(&E::Device, &E, &mut Kept<E>) -> Result<(), E::Error>,
    ) -> Result<(), E::Error> {
        loop {
            let kept = &mut self.plans[0];
            let result = run(&self.device, &self.engine, kept);
            let learned =
                result.as_ref().is_err_and(|error| self.engine.learn(E::planned(&kept.prepared), error));
            if !learned {
                self.device.submit();
                return result;
            }
            let plan = self.engine.plan(self.plans[0].problem()).map_err(SessionError::from)?;
            let tables = self.plans.remove(0).tables;
            self.insert(plan, None, tables)?;
        }
    }
}

/// Checks that tensors are the problem's and inside of their memory; `page` is the tokens of a page, where there are pages.
///
/// # Errors
/// [`SessionError::Inputs`] or [`SessionError::Element`].
pub fn check<M: DeviceMemory, E>(
    problem: &Problem,
    inputs: &GpuInputs<'_, M>,
    page: Option<usize>,
    outputs: &GpuOutputs<'_, M>,
) -> Result<(), SessionError<E>> {
    let of_kept = |part| inputs.part(part)?.tables.map(|tables| tables.page_size);
    check_with(problem, inputs, page, [KeyPart::First, KeyPart::Last].map(of_kept), outputs)
}

/// [`check`] where the pages of kept tokens have these sizes, in tokens.
fn check_with<M: DeviceMemory, E>(
    problem: &Problem,
    inputs: &GpuInputs<'_, M>,
    page: Option<usize>,
    kept_pages: [Option<usize>; 2],
    outputs: &GpuOutputs<'_, M>,
) -> Result<(), SessionError<E>> {
    let dtype = |tensor, element| {
        let expected = "f32, f16 or bf16";
        dtype_of(element).ok_or(SessionError::Element { tensor, expected, element })
    };
    let q = dtype("q", inputs.q.view.element())?;
    shapes(q, inputs, page).check(problem)?;
    check_kept(problem, q, inputs, kept_pages)?;
    for (tensor, list) in [("v.means", inputs.v.means), ("v.factors", inputs.v.factors)] {
        if let Some(list) = list {
            return Err(RunError::Length { tensor, expected: 0, got: list.len() }.into());
        }
    }
    let out = (dtype("out", outputs.out.view.element())?, outputs.out.shape);
    inputs::check_outputs(problem, out, outputs.lse.as_ref().map(|lse| lse.len()))?;
    check_elements(inputs, outputs.lse.as_ref().map(|lse| lse.element()))?;
    inputs.check(problem)?;
    Ok(outputs.out.check().map_err(|error| RunError::Memory { tensor: "out", error })?)
}

/// Dtypes and shapes of inputs whose queries are of a dtype; `page` is the tokens of a page, where there are pages.
fn shapes<M>(q: Dtype, inputs: &GpuInputs<'_, M>, page: Option<usize>) -> InputShapes {
    let kv = |kv: &GpuKv<'_, M>| (kv.codec, kv.shape);
    let mask = |mask: GpuMask<'_, M>| (mask.kind, mask.shape);
    InputShapes {
        q: (q, inputs.q.shape),
        k: kv(&inputs.k),
        v: kv(&inputs.v),
        page,
        tree: inputs.tree.map(mask),
        mask: inputs.mask.map(mask),
        alibi_slopes: inputs.alibi_slopes.map(|list| list.len()),
        sinks: inputs.sinks.map(|list| list.len()),
    }
}

/// Checks that the tokens that a problem reads in 16 bits have pages that fit it.
fn check_kept<M: DeviceMemory, E>(
    problem: &Problem,
    q: Dtype,
    inputs: &GpuInputs<'_, M>,
    page_sizes: [Option<usize>; 2],
) -> Result<(), SessionError<E>> {
    let needed = kept_parts(problem);
    let kept = [("kept.first", KeyPart::First), ("kept.last", KeyPart::Last)];
    for ((tensor, part), page_size) in kept.into_iter().zip(page_sizes) {
        match (inputs.part(part), needed.contains(&part)) {
            (Some(pages), true) => {
                let problem = problem.part(part);
                // Kept tokens are found through tables.
                let page_size = page_size.ok_or(RunError::Missing { tensor: "tables of kept tokens" })?;
                shapes(q, &pages, Some(page_size)).check(&problem)?;
                check_elements(&pages, None)?;
                pages.check(&problem)?;
            }
            (None, true) => return Err(RunError::Missing { tensor }.into()),
            (Some(_), false) if problem.desc().kept.is_none() => {
                return Err(RunError::Unexpected { tensor }.into());
            }
            (Some(_) | None, false) => {}
        }
    }
    Ok(())
}

/// [`check`] of tensors over pages that tables of the host list, and of the tables.
fn check_paged<M: DeviceMemory, E>(
    problem: &Problem,
    inputs: &GpuInputs<'_, M>,
    HostTables { tables, kept }: HostTables<'_>,
    outputs: &GpuOutputs<'_, M>,
) -> Result<(), SessionError<E>> {
    let of_device = |part| inputs.part(part)?.tables.map(|tables| tables.page_size);
    let [first, last] = kept.map(|tables| tables.map(|tables| tables.page_size));
    let kept_pages = [first.or(of_device(KeyPart::First)), last.or(of_device(KeyPart::Last))];
    let inputs = &GpuInputs { tables: None, ..*inputs };
    check_with(problem, inputs, Some(tables.page_size), kept_pages, outputs)?;
    check_tables(problem, tables, inputs.k.shape[0])?;
    for (part, tables) in [KeyPart::First, KeyPart::Last].into_iter().zip(kept) {
        if let (Some(pages), Some(tables)) = (inputs.part(part), tables) {
            check_tables(&problem.part(part), tables, pages.k.shape[0])?;
        }
    }
    Ok(())
}

/// Checks that lists, tables and bytes are of the types that kernels read.
fn check_elements<M, E>(inputs: &GpuInputs<'_, M>, lse: Option<ScalarType>) -> Result<(), SessionError<E>> {
    let mask = |mask: GpuMask<'_, M>| mask.bytes.element();
    let all = [
        ("k", ScalarType::U8, Some(inputs.k.bytes.element())),
        ("v", ScalarType::U8, Some(inputs.v.bytes.element())),
        ("k.means", ScalarType::F32, inputs.k.means.map(|list| list.element())),
        ("k.factors", ScalarType::F32, inputs.k.factors.map(|list| list.element())),
        ("tables.table", ScalarType::U32, inputs.tables.map(|tables| tables.table.element())),
        ("tree", ScalarType::U8, inputs.tree.map(mask)),
        ("mask", ScalarType::U8, inputs.mask.map(mask)),
        ("alibi_slopes", ScalarType::F32, inputs.alibi_slopes.map(|list| list.element())),
        ("sinks", ScalarType::F32, inputs.sinks.map(|list| list.element())),
        ("lse", ScalarType::F32, lse),
    ];
    let wrong = all.into_iter().find_map(|(tensor, expected, element)| {
        let element = element.filter(|element| *element != expected)?;
        Some(SessionError::Element { tensor, expected: expected.name(), element })
    });
    wrong.map_or(Ok(()), Err)
}
