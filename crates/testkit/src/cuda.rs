//! Cases on a CUDA device: copies of their tensors there, surrounded by memory that must not be touched.

#![allow(unsafe_code)]

use super::banded::{Banded, FILL};
use super::run::{RunReport, Runner, RunnerError, accumulation_of_portable};
use flashtile_core::block_tables::BlockTables;
use flashtile_core::inputs;
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::plan::{KernelChoice, PlanOptions};
use flashtile_core::problem::Problem;
use flashtile_core::quality::Accumulation;
use flashtile_cuda::plan::{CudaFacts, CudaPlan, CudaTile};
use flashtile_cuda::{Cuda, CudaError, DeviceError, Gpu, Memory, Prepared, Timer};
use flashtile_gpu::upload::{Placement, Results, Uploaded};
use std::sync::Arc;

/// How tensors are placed in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DevicePlacement {
    /// True if tensors start at an odd element, so that they are copied element by element; otherwise they
    /// start at a multiple of 256 bytes.
    pub odd: bool,
    /// True if allocations end where the tensors do, for memory checkers; otherwise NaN follow.
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

/// A plan on a device in poisoned scratch memory, with copies of its tensors between guard bands, which can be run, updated and timed.
pub struct GuardedRun {
    // Dropped before the other fields, whose memory it refers to.
    timer: Option<Timer>,
    prepared: Prepared,
    uploaded: Uploaded<Memory>,
    results: Results<Memory>,
    device: Banded<Gpu>,
}

impl std::fmt::Debug for GuardedRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuardedRun").field("plan", self.prepared.plan()).finish_non_exhaustive()
    }
}

impl GuardedRun {
    /// Copies the tensors to the device, with the strides that they have, and takes memory of NaN for the outputs.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn new(
        cuda: &Cuda,
        plan: &CudaPlan,
        inputs: &Inputs<'_>,
        outputs: &Outputs<'_>,
        placement: DevicePlacement,
    ) -> Result<Self, CudaError> {
        let DevicePlacement { odd, exact } = placement;
        // The device cannot check that tables describe pages of the pool.
        inputs::check(plan.problem(), inputs, outputs)?;
        let stream = cuda.context().new_stream().map_err(CudaError::driver("stream"))?;
        let gpu = cuda.gpu().on(&stream);
        let scratch = gpu.buffer_from(&vec![FILL; plan.workspace_bytes().max(1)])?;
        let prepared = cuda.prepare_in(plan, &stream, scratch)?;
        let device = Banded::new(gpu, inputs, odd, exact);
        let placement = Placement {
            page_align: if odd { 1 } else { Placement::default().page_align },
            own_strides: true,
        };
        let mut uploaded = Uploaded::placed(&device, inputs, placement)?;
        if let Some(tables) = inputs.tables {
            uploaded.upload_tables(&device, tables)?;
        }
        if let Some(kept) = &inputs.kept {
            uploaded.upload_kept_tables(&device, kept)?;
        }
        let results = Results::placed(&device, outputs, placement)?;
        Ok(Self { timer: None, prepared, uploaded, results, device })
    }

    /// Runs once and copies the results to outputs of the shapes of [`GuardedRun::new`].
    ///
    /// # Errors
    /// The errors of [`GuardedRun::launch`] and [`GuardedRun::read`].
    pub fn compute(&mut self, outputs: &mut Outputs<'_>) -> Result<(), CudaError> {
        self.launch()?;
        self.read(outputs)
    }

    /// Launches a run.
    ///
    /// # Errors
    /// The errors of [`Prepared::run`].
    pub fn launch(&mut self) -> Result<(), CudaError> {
        self.prepared.run(&self.uploaded.inputs(), &mut self.results.outputs())
    }

    /// Updates the run to another plan and other tables at the same device addresses.
    ///
    /// # Errors
    /// The errors of [`Prepared::update`], and of copying the tables.
    pub fn update(&mut self, plan: &CudaPlan, tables: &BlockTables) -> Result<(), CudaError> {
        let entries = self.uploaded.inputs().tables.map(|tables| tables.table.len());
        if entries != Some(tables.table.len()) {
            return Err(CudaError::Update { what: "tables have another size".to_owned() });
        }
        self.prepared.update(plan)?;
        Ok(self.uploaded.upload_tables(&self.device, tables)?)
    }

    /// Seconds of a run, as a [`Timer`] measures them.
    ///
    /// # Errors
    /// The errors of [`GuardedRun::launch`] and [`Timer::seconds`].
    pub fn seconds(&mut self) -> Result<f64, CudaError> {
        let timer = match self.timer.take() {
            Some(timer) => timer,
            None => {
                let stream = Arc::clone(self.prepared.stream());
                // SAFETY: the timer is dropped before the memory of the run, which stays where it is.
                unsafe { Timer::capture(&stream, || self.launch())? }
            }
        };
        self.timer.insert(timer).seconds()
    }

    /// Copies the results to outputs of the shapes of [`GuardedRun::new`], after the work has ended.
    ///
    /// # Errors
    /// [`CudaError::Device`], also if memory outside of a tensor was written.
    pub fn read(&self, outputs: &mut Outputs<'_>) -> Result<(), CudaError> {
        self.results.download(&self.device, outputs)?;
        let touched = match self.device.touched()? {
            Some(at) => Some(format!("byte {at} of a buffer, outside of its tensor")),
            None => {
                self.device.touched_gap(&self.results)?.map(|at| format!("byte {at} of out, between rows"))
            }
        };
        match touched {
            None => Ok(()),
            Some(place) => {
                let error = format!("memory that is of no element was written: {place}");
                Err(DeviceError::Driver { what: "run".to_owned(), error }.into())
            }
        }
    }
}

impl Runner for CudaRunner {
    fn name(&self) -> String {
        let odd = if self.placement.odd { ", odd addresses" } else { "" };
        let narrow = if self.facts == *self.cuda.facts() { "" } else { ", as one multiprocessor" };
        let tile = self.tile.map_or_else(String::new, |tile| format!(", {tile:?}"));
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
            let mut run = GuardedRun::new(&self.cuda, &plan, inputs, outputs, self.placement)?;
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
