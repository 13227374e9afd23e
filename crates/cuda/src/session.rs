//! Attention on a stream, with plans kept from call to call.

#![allow(unsafe_code)]

use super::cudarc::driver::CudaStream;
use super::cudarc::driver::sys::CUstreamCaptureStatus;
use super::device::Cuda;
use super::error::{CudaError, DeviceError};
use super::prepared::{DeviceMemory, Prepared};
use super::tensor::{DeviceInputs, DeviceOutputs, DeviceTables};
use crate::plan::CudaPlan;
use flashtile_core::block_tables::BlockTables;
use flashtile_core::inputs::check_tables;
use flashtile_core::plan::PlanOptions;
use flashtile_core::problem::ProblemDesc;
use flashtile_kernel::ScalarType;
use flashtile_kernel::cuda::Memory;
use std::cell::Cell;
use std::sync::Arc;

/// Plans that a session keeps, beside those that graphs have captured.
const MAX_PLANS: usize = 16;

/// Sessions that a thread keeps.
const MAX_SESSIONS: usize = 8;

/// Computes attention on one stream of a device, and keeps what a next call of the same description needs again: its plan, its
/// kernels, and the plan's schedule and scratch memory on the device. Such a call allocates nothing and waits for nothing. Nor does
/// a call whose description differs in nothing but larger numbers of keys, the next step of decoding: it writes its schedule over
/// the one before, as long as that has the size (see [`Prepared::update`]). Only a block table that outgrows its memory gets new
/// memory, of twice the size.
///
/// Calls may be captured in a CUDA graph, after one call of the same description that was not, and no other step since. A session
/// keeps what was captured as long as it lives, and must live as long as the graph.
///
/// ```no_run
/// use flashtile::cuda::{Cuda, DeviceInputs, DeviceOutputs, Session};
/// use flashtile::{Dims, Dtype, ProblemDesc};
/// let cuda = Cuda::new(0)?;
/// let mut session = Session::new(&cuda, &cuda.context().new_stream()?);
/// let dims = Dims { batch: 1, q_heads: 32, kv_heads: 8, q_len: 1, kv_len: 4096, head_dim: 128, value_dim: 128 };
/// # fn tensors<'a>() -> (DeviceInputs<'a>, DeviceOutputs<'a>) { unimplemented!() }
/// for _layer in 0..32 {
///     let (inputs, mut outputs) = tensors();
///     session.run(&ProblemDesc::new(dims, Dtype::BF16), &inputs, &mut outputs)?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Session {
    cuda: Cuda,
    stream: Arc<CudaStream>,
    options: PlanOptions,
    /// Most recently used first.
    plans: Vec<Kept>,
}

/// A plan on the stream. Runs of it follow each other there, so that they share its memory.
#[derive(Debug)]
struct Kept {
    // Dropped before the memory that it was given.
    prepared: Prepared,
    memory: Memory,
    /// The block table of the last call that had one on the host.
    tables: Option<Tables>,
    /// Block tables before that one to which graphs refer.
    captured_tables: Vec<Tables>,
    /// Whether a graph refers to the memory.
    captured: bool,
}

/// A block table on the device.
#[derive(Debug)]
struct Tables {
    tables: BlockTables,
    memory: Memory,
    captured: bool,
}

impl Kept {
    /// A block table on the device, which is copied there unless it is the last one.
    fn tables(
        &mut self,
        tables: &BlockTables,
        stream: &CudaStream,
        captures: bool,
    ) -> Result<&mut Tables, CudaError> {
        let old = match self.tables.take() {
            Some(kept) if kept.tables == *tables => return Ok(self.tables.insert(kept)),
            old if captures => {
                self.tables = old;
                return Err(captured("copy of the block table"));
            }
            Some(kept) if kept.captured => {
                self.captured_tables.push(kept);
                None
            }
            old => old.map(|kept| kept.memory),
        };
        let bytes: Vec<u8> = tables.table.iter().flat_map(|page| page.to_ne_bytes()).collect();
        let mut memory = match old.filter(|old| old.len() >= bytes.len()) {
            Some(old) => old,
            // Tables widen as sequences grow.
            None => recycled(None, stream, 2 * bytes.len())?,
        };
        memory.write_on(stream, 0, &bytes)?;
        Ok(self.tables.insert(Tables { tables: tables.clone(), memory, captured: false }))
    }
}

impl Session {
    /// A session on a stream of the device.
    #[must_use]
    pub fn new(cuda: &Cuda, stream: &Arc<CudaStream>) -> Self {
        let (cuda, stream) = (cuda.clone(), Arc::clone(stream));
        Self { cuda, stream, options: PlanOptions::default(), plans: Vec::new() }
    }

    /// The same with options of the planner.
    #[must_use]
    pub fn with_options(mut self, options: PlanOptions) -> Self {
        self.options = options;
        self
    }

    /// Calls a function with the session that the calling thread keeps for a stream. A call inside a call, as a thread makes it that
    /// waits for rayon and is given another task, gets sessions of its own. Kernels that one thread has loaded serve all threads.
    ///
    /// A thread keeps the sessions of the streams that it used last. The stream's owner keeps it alive, or destroys it after its work has
    /// ended.
    ///
    /// # Errors
    /// As [`Cuda::with_context`].
    pub fn with_current<T>(stream: &Arc<CudaStream>, f: impl FnOnce(&mut Self) -> T) -> Result<T, CudaError> {
        thread_local! {
            static SESSIONS: Cell<Vec<Session>> = const { Cell::new(Vec::new()) };
        }
        // While a thread ends, its values are gone.
        let mut sessions = SESSIONS.try_with(Cell::take).unwrap_or_default();
        let found = Self::find(&mut sessions, stream);
        let result = found.map(f);
        let _ = SESSIONS.try_with(|place| place.set(sessions));
        result
    }

    /// The session of a stream, as the first of `sessions`.
    fn find<'s>(sessions: &'s mut Vec<Self>, stream: &Arc<CudaStream>) -> Result<&'s mut Self, CudaError> {
        let same = |of: &CudaStream| {
            of.cu_stream() == stream.cu_stream() && of.context().cu_ctx() == stream.context().cu_ctx()
        };
        match sessions.iter().position(|session| same(&session.stream)) {
            Some(at) => sessions[..=at].rotate_right(1),
            None => {
                let session = Self::new(&Cuda::shared(stream.context())?, stream);
                sessions.insert(0, session);
                let mut kept = 0;
                sessions.retain(|session| {
                    kept += 1;
                    kept <= MAX_SESSIONS || session.plans.iter().any(|plan| plan.captured)
                });
            }
        }
        Ok(&mut sessions[0])
    }

    /// The stream of the runs.
    #[must_use]
    pub const fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Plans a description and prepares its runs, or finds what an earlier call has prepared.
    ///
    /// # Errors
    /// [`CudaError::Problem`], [`CudaError::Unsupported`] or [`CudaError::Device`], also where there is no plan yet and the stream captures.
    pub fn plan(&mut self, desc: &ProblemDesc) -> Result<&CudaPlan, CudaError> {
        Ok(self.find_plan(desc)?.prepared.plan())
    }

    /// Launches what a description says on the stream, and returns before it has ended.
    ///
    /// # Errors
    /// As [`Session::plan`], and [`CudaError::Inputs`] where the tensors do not fit the description. Nothing was launched then.
    pub fn run(
        &mut self,
        desc: &ProblemDesc,
        inputs: &DeviceInputs<'_>,
        outputs: &mut DeviceOutputs<'_>,
    ) -> Result<(), CudaError> {
        let captures = self.captures()?;
        let kept = self.find_plan(desc)?;
        kept.captured |= captures;
        kept.prepared.run(inputs, outputs)
    }

    /// [`Session::run`] over pages, with tables in the memory of the host. They are copied to the device unless the last call of the
    /// description had the same.
    ///
    /// # Errors
    /// As [`Session::run`]; also where the tables do not fit the pool of `inputs.k`, and where others are given while the stream captures.
    pub fn run_paged(
        &mut self,
        desc: &ProblemDesc,
        inputs: &DeviceInputs<'_>,
        tables: &BlockTables,
        outputs: &mut DeviceOutputs<'_>,
    ) -> Result<(), CudaError> {
        let (captures, stream) = (self.captures()?, Arc::clone(&self.stream));
        let kept = self.find_plan(desc)?;
        let pages = inputs.k.shape()[0];
        check_tables(kept.prepared.plan().problem(), tables, pages)?;
        let on_device = kept.tables(tables, &stream, captures)?;
        on_device.captured |= captures;
        let mut inputs = *inputs;
        // SAFETY: the memory has the entries, which `check_tables` has seen, and later calls write to it on the stream.
        inputs.tables = Some(unsafe { DeviceTables::from_raw_parts(on_device.memory.address(), tables)? });
        kept.captured |= captures;
        kept.prepared.run(&inputs, outputs)
    }

    /// Gives back the memory of all plans but those that graphs have captured.
    pub fn clear(&mut self) {
        self.plans.retain(|kept| kept.captured);
    }

    fn captures(&self) -> Result<bool, CudaError> {
        let status = self.stream.capture_status().map_err(CudaError::driver("state of the stream"))?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// The runs of a description.
    pub(super) fn prepared(&mut self, desc: &ProblemDesc) -> Result<&mut Prepared, CudaError> {
        Ok(&mut self.find_plan(desc)?.prepared)
    }

    /// What is kept of a description, as the first of the plans.
    fn find_plan(&mut self, desc: &ProblemDesc) -> Result<&mut Kept, CudaError> {
        let at = match self.plans.iter().position(|kept| kept.prepared.plan().problem().desc() == desc) {
            Some(at) => at,
            None => self.keep(desc)?,
        };
        self.plans[..=at].rotate_right(1);
        Ok(&mut self.plans[0])
    }

    /// The place of a description that was not planned: that of the step before it, which takes another schedule, or a new one.
    fn keep(&mut self, desc: &ProblemDesc) -> Result<usize, CudaError> {
        let problem = desc.clone().validate()?;
        let plan = self.cuda.plan(&problem, self.options)?;
        if self.captures()? {
            return Err(captured("preparation of a plan"));
        }
        let growth =
            |kept: &Kept| problem.growth_since(kept.prepared.plan().problem()).filter(|_| !kept.captured);
        let steps = self.plans.iter().enumerate().filter_map(|(at, kept)| Some((growth(kept)?, at)));
        let (old, tables) = match steps.min() {
            None => (self.evict(), None),
            Some((_, at)) => {
                let mut kept = self.plans.remove(at);
                match kept.prepared.update(&plan) {
                    Ok(()) => {
                        self.plans.insert(at, kept);
                        return Ok(at);
                    }
                    // Its schedule has another size: its memory and its table are taken over.
                    Err(CudaError::Update { .. }) => (Some(kept.memory), kept.tables),
                    Err(error) => return Err(error),
                }
            }
        };
        let memory = recycled(old, &self.stream, plan.workspace_bytes())?;
        // SAFETY: the memory is the plan's until it is dropped; what another plan did with it is on the stream before.
        let given = unsafe { DeviceMemory::from_raw_parts(memory.address(), memory.len()) };
        let prepared = self.cuda.prepare_in(&plan, &self.stream, given)?;
        self.plans.push(Kept { prepared, memory, tables, captured_tables: Vec::new(), captured: false });
        Ok(self.plans.len() - 1)
    }

    /// The memory of the plan that was used longest ago, where there are as many as a session keeps.
    fn evict(&mut self) -> Option<Memory> {
        let free = self.plans.iter().filter(|kept| !kept.captured).count();
        let last = self.plans.iter().rposition(|kept| !kept.captured).filter(|_| free >= MAX_PLANS)?;
        Some(self.plans.remove(last).memory)
    }
}

/// Memory of at least this many bytes: `old`, where that is enough, or new. What the stream did with `old` before is on it before
/// whatever follows.
fn recycled(old: Option<Memory>, stream: &CudaStream, bytes: usize) -> Result<Memory, CudaError> {
    if let Some(old) = old.filter(|old| old.len() >= bytes) {
        return Ok(old);
    }
    // Sizes that grow from step to step do not each get memory of their own.
    Ok(Memory::uninit(stream.context(), ScalarType::U8, bytes.max(256).next_power_of_two())?)
}

fn captured(what: &str) -> CudaError {
    let error = "the stream captures a graph: call it once on this stream before the capture".to_owned();
    DeviceError::Driver { what: what.to_owned(), error }.into()
}
