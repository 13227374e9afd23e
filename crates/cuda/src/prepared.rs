//! Plans in device memory, and their runs.

use super::device::Cuda;
use super::error::CudaError;
use super::native::{NativeFunctions, NativeRun, schedule_bytes};
use super::portable;
use crate::plan::{CudaPlan, NativePlan, PlannedKernels};
use flashtile_gpu::plan::USUAL_PAGE_SIZE;
use flashtile_gpu::run::Runs;
use flashtile_gpu::session::check;
use flashtile_gpu::tensors::{GpuInputs, GpuOutputs};
use flashtile_kernel::cuda::cudarc::driver::CudaStream;
use flashtile_kernel::cuda::{Gpu, Memory};
use flashtile_kernel::{HostAccess, ScalarType};
use std::sync::Arc;

/// A plan in device memory, and the stream on which it runs: runs and updates follow each other there without waiting, and
/// share its memory. It must outlive graphs that have captured its runs.
#[derive(Debug)]
pub struct Prepared {
    cuda: Cuda,
    /// The device, on the stream of the runs.
    gpu: Gpu,
    plan: CudaPlan,
    /// Functions of native kernels; none of a portable plan.
    functions: NativeFunctions,
    /// Runs of a portable plan, from the first one on.
    runs: Option<Runs<Memory>>,
    /// The memory that every run needs beside its tensors.
    scratch: Memory,
}

impl Cuda {
    /// Prepares a plan for its runs: loads its kernels (of native ones the fastest form, see [`Prepared::run`]), copies its schedule to
    /// the device on the stream, and allocates [`CudaPlan::workspace_bytes`] there, partial results included.
    ///
    /// # Errors
    /// [`CudaError::OtherDevice`] or [`CudaError::Device`].
    pub fn prepare(&self, plan: &CudaPlan, stream: &Arc<CudaStream>) -> Result<Prepared, CudaError> {
        let scratch = Memory::uninit(stream.context(), ScalarType::U8, plan.workspace_bytes())?;
        self.prepare_in(plan, stream, scratch)
    }

    /// [`Cuda::prepare`] in memory of the caller's, which [`Gpu::borrow`] lends: [`CudaPlan::workspace_bytes`] at least, at a multiple of 256.
    ///
    /// # Errors
    /// The errors of [`Cuda::prepare`], [`CudaError::Scratch`] or [`CudaError::ScratchAlignment`].
    pub fn prepare_in(
        &self,
        plan: &CudaPlan,
        stream: &Arc<CudaStream>,
        scratch: Memory,
    ) -> Result<Prepared, CudaError> {
        Prepared::new(self, plan.clone(), self.gpu().on(stream), scratch)
    }
}

impl Prepared {
    fn new(cuda: &Cuda, plan: CudaPlan, gpu: Gpu, scratch: Memory) -> Result<Self, CudaError> {
        if !plan.kernels().all(|kernel| cuda.facts().runs(kernel)) {
            return Err(CudaError::OtherDevice { kernel: plan.kernel() });
        }
        let (needed, got) = (plan.workspace_bytes(), scratch.bytes());
        let at = gpu.address("forward", "scratch", &scratch, scratch.view().span())?;
        if got < needed {
            return Err(CudaError::Scratch { needed, got });
        }
        if !at.is_multiple_of(256) {
            return Err(CudaError::ScratchAlignment { at });
        }
        let functions = match plan.planned_kernels() {
            PlannedKernels::Native(native) => NativeFunctions::new(cuda, native)?,
            PlannedKernels::Portable(portable) => {
                for (instance, constants) in portable.plan.loads(16, USUAL_PAGE_SIZE)? {
                    gpu.function(&instance, &constants)?;
                }
                NativeFunctions::default()
            }
        };
        let mut prepared = Self { cuda: cuda.clone(), gpu, plan, functions, runs: None, scratch };
        prepared.write(false)?;
        Ok(prepared)
    }

    /// A plan in the memory of another one, whose runs are on the stream before, where that is enough.
    pub(super) fn after(
        cuda: &Cuda,
        gpu: &Gpu,
        plan: CudaPlan,
        old: Option<Self>,
    ) -> Result<Self, CudaError> {
        let needed = plan.workspace_bytes();
        let scratch = match old.map(|old| old.scratch).filter(|scratch| scratch.bytes() >= needed) {
            Some(scratch) => scratch,
            // Sizes that grow from step to step do not each get memory of their own.
            None => Memory::uninit(gpu.context(), ScalarType::U8, needed.max(256).next_power_of_two())?,
        };
        Self::new(cuda, plan, gpu.clone(), scratch)
    }

    /// Sends later runs and updates to another stream of the device, which the caller orders with the one before.
    pub(super) fn move_to(&mut self, gpu: &Gpu) {
        if self.gpu.stream().cu_stream() != gpu.stream().cu_stream() {
            self.gpu = gpu.clone();
        }
    }

    /// The stream of the runs.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        self.gpu.stream()
    }

    /// The plan that runs compute.
    #[must_use]
    pub const fn plan(&self) -> &CudaPlan {
        &self.plan
    }

    /// Writes another plan over this one, on the stream: that of the same problem with other numbers of keys (`kv_lens`), at the
    /// next step of decoding, say. Kernels, launches and addresses stay, so that a graph that has captured runs computes the new
    /// plan when it is launched after this; the tensors, and the width of the tables, are those that it has captured.
    ///
    /// # Errors
    /// [`CudaError::Update`] where the problem differs in anything else, or where kernels or reserved sizes
    /// differ; steps of decoding of the same sequences agree. [`CudaError::Device`], also while the stream
    /// captures.
    pub fn update(&mut self, plan: &CudaPlan) -> Result<(), CudaError> {
        match self.difference(plan) {
            Some(what) => Err(CudaError::Update { what }),
            None => self.replace(plan.clone()),
        }
    }

    /// Replaces the plan by one without a [`difference`](Self::difference).
    pub(super) fn replace(&mut self, plan: CudaPlan) -> Result<(), CudaError> {
        debug_assert_eq!(self.difference(&plan), None);
        self.plan = plan;
        self.write(true)
    }

    /// Why a plan cannot be written over this one, if it cannot.
    pub(super) fn difference(&self, plan: &CudaPlan) -> Option<String> {
        if !self.plan.problem().is_step_of(plan.problem()) || self.plan.options() != plan.options() {
            return Some("the problems differ in more than their numbers of keys".to_owned());
        }
        if !self.plan.kernels().eq(plan.kernels()) || self.plan.portable() != plan.portable() {
            return Some(format!("launches are of {}, not {plan}", self.plan));
        }
        let (old, new) = (self.plan.native()?, plan.native()?);
        if old.regions() != new.regions() {
            let (old, new) = (self.plan.workspace_bytes(), plan.workspace_bytes());
            return Some(format!("scratch memory is laid out for other sizes ({old} and {new} bytes)"));
        }
        let sizes = |plan: &NativePlan| {
            plan.launches().iter().map(|l| (l.kernel.tile, l.capacity)).collect::<Vec<_>>()
        };
        (sizes(old) != sizes(new)).then(|| "launches are of other tiles or sizes".to_owned())
    }

    /// Copies the plan's data to the device: all that runs read, or, if `again`, at least the part that an
    /// update changes.
    fn write(&mut self, again: bool) -> Result<(), CudaError> {
        let bytes = match self.plan.planned_kernels() {
            PlannedKernels::Native(native) => schedule_bytes(native),
            PlannedKernels::Portable(portable) if again => portable.plan.updated(),
            PlannedKernels::Portable(portable) => portable.plan.written(),
        };
        Ok(self.gpu.write(&mut self.scratch, 0, &bytes)?)
    }

    /// Launches the computation of `out` and, where given, `lse` on the stream. Returns before it has ended; allocates and waits for
    /// nothing, except that a first run loads a form of its kernels that [`Cuda::prepare`] did not load, and compiles it unless
    /// [`Cuda::prewarm`] did: where rows do not start on 16 bytes, and, for prefill in 16 bits on compute capability 9.0, also where
    /// they do but TMA cannot copy `k` and `v`: pages that are not of a multiple of 16 tokens, batch entries or pages that are not
    /// whole rows apart, rows that overlap, heads that share memory, or tensors too large for its coordinates.
    ///
    /// # Errors
    /// [`CudaError::Inputs`] where the tensors do not fit the plan's problem, and [`CudaError::Device`].
    pub fn run(
        &mut self,
        inputs: &GpuInputs<'_, Memory>,
        outputs: &mut GpuOutputs<'_, Memory>,
    ) -> Result<(), CudaError> {
        let page_size = inputs.tables.map(|tables| tables.page_size);
        check(self.plan.problem(), inputs, page_size, outputs)?;
        self.launch(inputs, outputs)
    }

    /// [`Prepared::run`] over tensors that were checked.
    pub(super) fn launch(
        &mut self,
        inputs: &GpuInputs<'_, Memory>,
        outputs: &mut GpuOutputs<'_, Memory>,
    ) -> Result<(), CudaError> {
        let Self { cuda, gpu, plan, functions, runs, scratch } = self;
        let scratch = scratch.address();
        match plan.planned_kernels() {
            PlannedKernels::Native(native) => {
                NativeRun { cuda, gpu, plan, native, functions, scratch }.run(inputs, outputs)
            }
            PlannedKernels::Portable(portable) => {
                let workspace = || portable::workspace(gpu, &portable.plan, scratch);
                let runs = runs.get_or_insert_with(|| Runs::new(workspace()));
                Ok(runs.run(gpu, portable.plan.launches(), inputs, outputs)?)
            }
        }
    }
}
