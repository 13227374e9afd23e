//! Cases on a CUDA device: copies of their tensors there, surrounded by memory that must not be touched.

#![allow(unsafe_code)]

use super::run::{RunReport, Runner, RunnerError, accumulation_of_portable};
use flashtile_core::block_tables::BlockTables;
use flashtile_core::codec::{Codec, KvView, RowKind};
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::inputs;
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::plan::{KernelChoice, PlanOptions};
use flashtile_core::problem::Problem;
use flashtile_core::quality::Accumulation;
use flashtile_core::tensor::{MaskView, TensorView, ViewError};
use flashtile_cuda::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use flashtile_cuda::plan::{CudaFacts, CudaPlan, CudaTile};
use flashtile_cuda::{
    Cuda, CudaError, DeviceCodes, DeviceError, DeviceInputs, DeviceKv, DeviceList, DeviceListMut, DeviceMask,
    DeviceMemory, DeviceOutputs, DeviceTables, DeviceTensor, DeviceTensorMut, Prepared, Timer,
};
use std::sync::Arc;

/// How tensors are placed in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DevicePlacement {
    /// Whether tensors start at an odd element, which is copied element by element; otherwise at a multiple of 256
    /// bytes.
    pub odd: bool,
    /// Whether allocations end where the tensors do, for memory checkers; otherwise NaN follow.
    pub exact: bool,
}

/// The CUDA backend with plan options. Scratch memory and outputs start as NaN.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CudaRunner {
    /// The device.
    pub cuda: Cuda,
    /// Options of every plan.
    pub options: PlanOptions,
    /// How tensors lie in its memory.
    pub placement: DevicePlacement,
    /// The device that plans are made for: this one, or one that it can stand in for.
    pub facts: CudaFacts,
    /// The tile of every plan, if it is not the planner's choice.
    pub tile: Option<CudaTile>,
}

impl CudaRunner {
    /// A runner with default options.
    #[must_use]
    pub fn new(cuda: Cuda) -> Self {
        let facts = *cuda.facts();
        Self {
            cuda,
            options: PlanOptions::default(),
            placement: DevicePlacement::default(),
            facts,
            tile: None,
        }
    }

    /// Like [`CudaRunner::new`], with other plan options.
    #[must_use]
    pub fn with(mut self, options: PlanOptions) -> Self {
        self.options = options;
        self
    }

    /// With plans for a device of one multiprocessor, so that each thread block computes many work tiles.
    #[must_use]
    pub fn narrow(mut self) -> Self {
        self.facts.multiprocessors = 1;
        self
    }

    /// With a given tile.
    #[must_use]
    pub fn tiled(mut self, tile: impl Into<CudaTile>) -> Self {
        self.tile = Some(tile.into());
        self
    }

    /// With tensors at odd elements.
    #[must_use]
    pub fn odd(mut self) -> Self {
        self.placement.odd = true;
        self
    }

    /// With allocations that end where their tensors do.
    #[must_use]
    pub fn exact(mut self, exact: bool) -> Self {
        self.placement.exact = exact;
        self
    }
}

/// The alignment of pages that are read in vectors, in bytes.
const ALIGNED: usize = 16;

/// Guard bytes before and after a tensor.
const BAND: usize = 256;

/// A plan on a device with copies of its tensors, which can be run and timed.
pub struct DeviceRun {
    // Dropped before what it refers to.
    timer: Option<Timer>,
    stream: Arc<CudaStream>,
    prepared: Prepared,
    q: Copied,
    k: CopiedKv,
    v: CopiedKv,
    out: Copied,
    lse: Option<Copied>,
    table: Option<Copied>,
    tables: Option<BlockTables>,
    tree: Option<Copied>,
    mask: Option<Copied>,
    slopes: Option<Copied>,
    sinks: Option<Copied>,
    _scratch: CudaSlice<u8>,
}

impl std::fmt::Debug for DeviceRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceRun").field("plan", self.prepared.plan()).finish_non_exhaustive()
    }
}

impl DeviceRun {
    /// Copies the tensors to the device, including outputs, so that elements that no run writes keep their value.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn new(
        cuda: &Cuda,
        plan: &CudaPlan,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
        placement: DevicePlacement,
    ) -> Result<Self, CudaError> {
        // The device cannot check that tables describe pages of the pool.
        inputs::check(plan.problem(), inputs, outputs)?;
        let stream = cuda.context().new_stream().map_err(CudaError::driver("stream"))?;
        let scratch = vec![0xFFu8; plan.workspace_bytes().max(1)];
        let scratch = stream.clone_htod(&scratch).map_err(CudaError::driver("scratch memory"))?;
        // SAFETY: the memory has this size and outlives everything prepared in it.
        let memory =
            unsafe { DeviceMemory::from_raw_parts(scratch.device_ptr(&stream).0, plan.workspace_bytes()) };
        let prepared = cuda.prepare_in(plan, &stream, memory)?;
        let to = Destination { stream: &stream, placement };
        let table = |tables: &BlockTables| {
            let bytes: Vec<u8> = tables.table.iter().flat_map(|page| page.to_ne_bytes()).collect();
            to.copy(&bytes, Kind::Bytes(4))
        };
        let (shape, strides) = (outputs.out.shape(), outputs.out.strides());
        // SAFETY: the gaps between the rows of an output belong to the owner of the mutable view.
        let span = unsafe { outputs.out.span_mut() };
        Ok(Self {
            timer: None,
            q: to.tensor(&inputs.q)?,
            k: to.kv(&inputs.k)?,
            v: to.kv(&inputs.v)?,
            out: to.copy(span, Kind::Tensor(plan.problem().dtype(), shape, strides))?,
            lse: outputs.lse.as_ref().map(|lse| to.list(lse)).transpose()?,
            table: inputs.tables.map(table).transpose()?,
            tables: inputs.tables.cloned(),
            tree: inputs.tree.map(|mask| to.mask(&mask)).transpose()?,
            mask: inputs.mask.map(|mask| to.mask(&mask)).transpose()?,
            slopes: inputs.alibi_slopes.map(|list| to.list(list)).transpose()?,
            sinks: inputs.sinks.map(|list| to.list(list)).transpose()?,
            prepared,
            _scratch: scratch,
            stream,
        })
    }

    /// Runs once and copies the results to the outputs given to [`DeviceRun::new`].
    ///
    /// # Errors
    /// Those of [`DeviceRun::launch`], [`DeviceRun::wait`] and [`DeviceRun::read`].
    pub fn compute(&mut self, outputs: &mut Outputs<'_>) -> Result<(), CudaError> {
        self.launch()?;
        self.wait()?;
        self.read(outputs)
    }

    /// Launches a run.
    ///
    /// # Errors
    /// Those of [`Prepared::run`].
    pub fn launch(&mut self) -> Result<(), CudaError> {
        let mut inputs = DeviceInputs::new(self.q.view()?, self.k.view()?, self.v.view()?);
        inputs.tree = self.tree.as_ref().map(Copied::mask).transpose()?;
        inputs.mask = self.mask.as_ref().map(Copied::mask).transpose()?;
        inputs.alibi_slopes = self.slopes.as_ref().map(Copied::list).transpose()?;
        inputs.sinks = self.sinks.as_ref().map(Copied::list).transpose()?;
        if let (Some(copy), Some(tables)) = (&self.table, &self.tables) {
            // SAFETY: the copy lives until the stream has been waited for, and the tables have been checked against
            // the pool.
            inputs.tables = Some(unsafe { DeviceTables::from_raw_parts(copy.at, tables) }?);
        }
        let mut outputs = DeviceOutputs::new(self.out.view_mut()?);
        outputs.lse = self.lse.as_ref().map(Copied::list_mut).transpose()?;
        self.prepared.run(&inputs, &mut outputs)
    }

    /// Updates the run to another plan and other tables at the same device addresses.
    ///
    /// # Errors
    /// Those of [`Prepared::update`], and an error if the tables have another size.
    pub fn update(&mut self, plan: &CudaPlan, tables: &BlockTables) -> Result<(), CudaError> {
        self.prepared.update(plan)?;
        let bytes: Vec<u8> = tables.table.iter().flat_map(|page| page.to_ne_bytes()).collect();
        match &mut self.table {
            Some(copy) if copy.len == bytes.len() => {
                let (lead, end) = (copy.lead, copy.lead + copy.len);
                let mut part = copy.memory.slice_mut(lead..end);
                self.stream
                    .memcpy_htod(&bytes, &mut part)
                    .map_err(CudaError::driver("copy of the tables"))?;
            }
            _ => return Err(CudaError::Update { what: "tables have another size".to_owned() }),
        }
        self.tables = Some(tables.clone());
        Ok(())
    }

    /// Waits for everything that has been launched.
    ///
    /// # Errors
    /// [`CudaError::Device`], also if a run failed.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.stream.synchronize().map_err(CudaError::driver("run"))
    }

    /// Seconds of a run, as a [`Timer`] measures them.
    ///
    /// # Errors
    /// Those of [`DeviceRun::launch`] and [`Timer::seconds`].
    pub fn seconds(&mut self) -> Result<f64, CudaError> {
        let timer = match self.timer.take() {
            Some(timer) => timer,
            // SAFETY: the timer is dropped before the memory of the run, which stays where it is.
            None => unsafe { Timer::capture(&self.stream.clone(), || self.launch())? },
        };
        self.timer.insert(timer).seconds()
    }

    /// Copies the results to the outputs given to [`DeviceRun::new`].
    ///
    /// # Errors
    /// [`CudaError::Device`], also if memory outside an output was written.
    pub fn read(&self, outputs: &mut Outputs<'_>) -> Result<(), CudaError> {
        let bytes = self.out.back(&self.stream)?;
        // SAFETY: as in `new`.
        unsafe { outputs.out.span_mut() }.copy_from_slice(&bytes);
        if let (Some(copy), Some(lse)) = (&self.lse, &mut outputs.lse) {
            for (x, bytes) in lse.iter_mut().zip(copy.back(&self.stream)?.as_chunks().0) {
                *x = f32::from_ne_bytes(*bytes);
            }
        }
        Ok(())
    }
}

/// Types of bytes that are copied.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Tensor(Dtype, [usize; 4], [usize; 4]),
    Bool([usize; 4], [usize; 4]),
    /// Elements of this many bytes.
    Bytes(usize),
}

/// Destinations of copies.
struct Destination<'a> {
    stream: &'a Arc<CudaStream>,
    placement: DevicePlacement,
}

impl Destination<'_> {
    fn copy(&self, bytes: &[u8], kind: Kind) -> Result<Copied, CudaError> {
        let element = match kind {
            Kind::Tensor(dtype, ..) => dtype.bytes(),
            Kind::Bool(..) => 1,
            Kind::Bytes(n) => n,
        };
        let lead = BAND + if self.placement.odd { element } else { 0 };
        let trail = if self.placement.exact { 0 } else { BAND };
        let failed = || CudaError::driver("copy to the device");
        // SAFETY: all of it is written below.
        let memory = unsafe { self.stream.alloc::<u8>(lead + bytes.len() + trail) };
        let mut memory = memory.map_err(failed())?;
        let band = vec![0xFFu8; lead.max(trail)];
        let end = lead + bytes.len();
        self.stream.memcpy_htod(&band[..lead], &mut memory.slice_mut(..lead)).map_err(failed())?;
        if !bytes.is_empty() {
            self.stream.memcpy_htod(bytes, &mut memory.slice_mut(lead..end)).map_err(failed())?;
        }
        if trail > 0 {
            self.stream.memcpy_htod(&band[..trail], &mut memory.slice_mut(end..)).map_err(failed())?;
        }
        let at = memory.device_ptr(self.stream).0 + lead as u64;
        Ok(Copied { memory, at, lead, len: bytes.len(), kind })
    }

    fn tensor(&self, view: &TensorView<'_>) -> Result<Copied, CudaError> {
        // SAFETY: tensors of cases, files and measurements lie in memory that is written before it is viewed.
        self.copy(unsafe { view.span() }, Kind::Tensor(view.dtype(), view.shape(), view.strides()))
    }

    fn kv(&self, view: &KvView<'_>) -> Result<CopiedKv, CudaError> {
        let codes = match view {
            KvView::Elements(view) => return Ok(CopiedKv { rows: self.tensor(view)?, codes: None }),
            KvView::Codes(codes) => codes,
        };
        let [pages, heads, ..] = codes.shape();
        let bytes = if pages * heads > 0 { codes.page(0, 0).len() } else { 0 };
        // Pages that start at multiples of 16 bytes, with gaps between them; or one right after another.
        let page = if self.placement.odd { bytes } else { bytes.next_multiple_of(ALIGNED) };
        let mut all = vec![0xFFu8; pages * heads * page];
        for (n, to) in all.chunks_exact_mut(page.max(1)).enumerate() {
            to[..bytes].copy_from_slice(codes.page(n / heads, n % heads));
        }
        let stored = Codes {
            codec: codes.codec(),
            shape: codes.shape(),
            strides: [heads * page, page],
            means: codes.means().map(|means| self.list(means)).transpose()?,
        };
        // An odd address is one of the codec's scales.
        let scale = if matches!(codes.codec().row_kind(), RowKind::Mlx { .. }) { 4 } else { 2 };
        Ok(CopiedKv { rows: self.copy(&all, Kind::Bytes(scale))?, codes: Some(stored) })
    }

    fn list(&self, list: &[f32]) -> Result<Copied, CudaError> {
        let bytes: Vec<u8> = list.iter().flat_map(|x| x.to_ne_bytes()).collect();
        self.copy(&bytes, Kind::Bytes(4))
    }

    fn mask(&self, mask: &MaskView<'_>) -> Result<Copied, CudaError> {
        let (shape, strides) = (mask.shape(), mask.strides());
        let kind = match mask.kind() {
            MaskKind::Bool => Kind::Bool(shape, strides),
            MaskKind::Additive(dtype) => Kind::Tensor(dtype, shape, strides),
        };
        // SAFETY: as for tensors.
        self.copy(unsafe { mask.span() }, kind)
    }
}

/// Bytes on the device between bands of 0xFF.
#[derive(Debug)]
struct Copied {
    memory: CudaSlice<u8>,
    at: u64,
    lead: usize,
    len: usize,
    kind: Kind,
}

/// Keys or values on the device.
#[derive(Debug)]
struct CopiedKv {
    rows: Copied,
    /// What codes are, where rows are codes.
    codes: Option<Codes>,
}

#[derive(Debug)]
struct Codes {
    codec: Codec,
    shape: [usize; 4],
    strides: [usize; 2],
    means: Option<Copied>,
}

impl CopiedKv {
    fn view(&self) -> Result<DeviceKv<'_>, ViewError> {
        let Some(Codes { codec, shape, strides, means }) = &self.codes else {
            return Ok(self.rows.view()?.into());
        };
        // SAFETY: the copy holds all pages, and lives until the stream has been waited for.
        let codes = unsafe { DeviceCodes::from_raw_parts(*codec, self.rows.at, *shape, *strides)? };
        Ok(match means {
            Some(means) => codes.centered(means.list()?)?.into(),
            None => codes.into(),
        })
    }
}

impl Copied {
    fn layout(&self) -> (Dtype, [usize; 4], [usize; 4]) {
        match self.kind {
            Kind::Tensor(dtype, shape, strides) => (dtype, shape, strides),
            Kind::Bool(..) | Kind::Bytes(_) => (Dtype::F32, [0; 4], [0, 0, 0, 1]),
        }
    }

    fn view(&self) -> Result<DeviceTensor<'_>, ViewError> {
        let (dtype, shape, strides) = self.layout();
        // SAFETY: the copy covers all that the view reaches, and lives until the stream has been waited for.
        unsafe { DeviceTensor::from_raw_parts(dtype, self.at, shape, strides) }
    }

    fn view_mut(&self) -> Result<DeviceTensorMut<'_>, ViewError> {
        let (dtype, shape, strides) = self.layout();
        // SAFETY: as above; nothing else accesses the copy while a run writes it.
        unsafe { DeviceTensorMut::from_raw_parts(dtype, self.at, shape, strides) }
    }

    fn list(&self) -> Result<DeviceList<'_>, ViewError> {
        // SAFETY: as above.
        unsafe { DeviceList::from_raw_parts(self.at, self.len / 4) }
    }

    fn list_mut(&self) -> Result<DeviceListMut<'_>, ViewError> {
        // SAFETY: as above; nothing else accesses the copy while a run writes it.
        unsafe { DeviceListMut::from_raw_parts(self.at, self.len / 4) }
    }

    fn mask(&self) -> Result<DeviceMask<'_>, ViewError> {
        match self.kind {
            Kind::Bool(shape, strides) => {
                // SAFETY: as above.
                unsafe { DeviceMask::bool(self.at, shape, strides) }
            }
            Kind::Tensor(dtype, shape, strides) => {
                // SAFETY: as above.
                unsafe { DeviceMask::additive_strided(dtype, self.at, shape, strides) }
            }
            Kind::Bytes(_) => Ok(DeviceMask::additive(self.view()?)),
        }
    }

    /// The bytes as they are now; an error if a guard byte around them was written.
    fn back(&self, stream: &Arc<CudaStream>) -> Result<Vec<u8>, CudaError> {
        let all = stream.clone_dtoh(&self.memory).map_err(CudaError::driver("copy from the device"))?;
        let (lead, rest) = all.split_at(self.lead);
        let (bytes, trail) = rest.split_at(self.len);
        if lead.iter().chain(trail).any(|&byte| byte != 0xFF) {
            let error = "memory outside an output was written".to_owned();
            return Err(DeviceError::Driver { what: "run".to_owned(), error }.into());
        }
        Ok(bytes.to_vec())
    }
}

impl Runner for CudaRunner {
    fn name(&self) -> String {
        let odd = if self.placement.odd { ", odd addresses" } else { "" };
        let narrow = if self.facts == *self.cuda.facts() { "" } else { ", as one multiprocessor" };
        let tile = self.tile.map_or_else(String::new, |tile| format!(", {}x{}", tile.rows(), tile.keys()));
        let kernels = match self.options.kernels {
            KernelChoice::Auto => String::new(),
            kernels => format!(", {kernels} kernels"),
        };
        format!("cuda {}{odd}{narrow}{tile}{kernels}", self.cuda.name())
    }

    fn run(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<RunReport, RunnerError> {
        let mut compute = || {
            let plan = match self.tile {
                Some(tile) => CudaPlan::with_tile(problem, &self.facts, self.options, tile)?,
                None => CudaPlan::new(problem, &self.facts, self.options)?,
            };
            let mut run = DeviceRun::new(&self.cuda, &plan, inputs, outputs, self.placement)?;
            run.compute(outputs)?;
            Ok(plan.to_string())
        };
        match compute() {
            Ok(plan) => {
                let accumulation = match problem.is_quantized() {
                    true => accumulation_of_portable(problem),
                    false => Accumulation::of_cuda(problem.dtype()),
                };
                Ok(RunReport::new(plan).accumulated(accumulation))
            }
            Err(CudaError::Unsupported(why)) => Err(RunnerError::Unsupported(why.to_string())),
            Err(error) => Err(RunnerError::Error(error.to_string())),
        }
    }
}
