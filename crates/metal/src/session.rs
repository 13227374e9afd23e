//! Attention on a queue, with plans kept from call to call.

#![allow(unsafe_code)]

use crate::error::MetalError;
use crate::facts::MetalFacts;
use flashtile_core::block_tables::BlockTables;
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::plan::PlanOptions;
use flashtile_core::problem::ProblemDesc;
use flashtile_gpu::SessionError;
use flashtile_gpu::plan::Plan;
use flashtile_gpu::tensors::{GpuInputs, GpuOutputs};
use flashtile_kernel::metal::{
    CommandBuffer, ComputeEncoder, DispatchType, Error, ForeignEncoder, Gpu, Memory,
};

/// Computes attention on the queue of a device, and keeps what a next call of the same description needs again: its plan, its
/// pipelines, and the memory of its runs. Such a call allocates no memory of the device and waits for nothing; nor does a call whose
/// description differs in nothing but larger numbers of keys, the next step of decoding.
///
/// Runs of a session follow each other in its memory: they must be on one queue. Where a pipeline takes fewer threads a threadgroup than
/// its plan has, as may be on devices of the families Apple7 and Apple8, the problem is planned anew for the pipeline's number.
///
/// ```no_run
/// # #[cfg(target_vendor = "apple")] {
/// use flashtile::metal::{DispatchType, Metal, MetalInputs, MetalOutputs, objc2_metal::MTLCommandQueue};
/// # use flashtile::metal::CommandQueue;
/// use flashtile::{Dims, Dtype, ProblemDesc};
/// # fn tensors<'a>() -> (MetalInputs<'a, flashtile::metal::Memory>, MetalOutputs<'a, flashtile::metal::Memory>) { unimplemented!() }
/// # fn queue() -> CommandQueue { unimplemented!() }
/// let queue = queue(); // of the engine
/// let metal = Metal::with_queue(queue.clone())?;
/// let mut session = metal.session();
/// let dims = Dims { batch: 1, q_heads: 32, kv_heads: 8, q_len: 1, kv_len: 4096, head_dim: 128, value_dim: 128 };
/// let desc = ProblemDesc::new(dims, Dtype::F16);
/// let commands = queue.commandBuffer().ok_or("no command buffer")?;
/// for _layer in 0..32 {
///     let (inputs, mut outputs) = tensors();
///     session.encode(&commands, DispatchType::Serial, |session| session.run(&desc, &inputs, &mut outputs))?;
/// }
/// // The engine commits.
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Session {
    inner: flashtile_gpu::session::Session<Gpu>,
}

impl Session {
    pub(crate) fn new(gpu: Gpu, facts: MetalFacts, options: PlanOptions) -> Self {
        Self { inner: flashtile_gpu::session::Session::with_options(gpu, facts, options) }
    }

    /// The device, and where launches go.
    #[must_use]
    pub const fn gpu(&self) -> &Gpu {
        self.inner.device()
    }

    /// Plans a description and allocates the memory of its runs, or finds what an earlier call has planned.
    ///
    /// # Errors
    /// [`SessionError::Problem`], [`SessionError::Unsupported`] or [`SessionError::Launch`].
    pub fn plan(&mut self, desc: &ProblemDesc) -> Result<&Plan, MetalError> {
        self.inner.plan(desc)
    }

    /// Launches what a description says over tensors on the device, and commits it: results are there when the queue has completed.
    ///
    /// # Errors
    /// As [`Session::plan`], and [`SessionError::Inputs`] where the tensors do not fit the description. Nothing was launched then.
    pub fn run(
        &mut self,
        desc: &ProblemDesc,
        inputs: &GpuInputs<'_, Memory>,
        outputs: &mut GpuOutputs<'_, Memory>,
    ) -> Result<(), MetalError> {
        self.inner.run(desc, inputs, outputs)?;
        self.gpu().commit();
        Ok(())
    }

    /// [`Session::run`] over pages, with tables in the memory of the host; `inputs.tables` is not read.
    ///
    /// # Errors
    /// As [`Session::run`]; also where the tables do not fit the pool of `inputs.k`.
    pub fn run_paged(
        &mut self,
        desc: &ProblemDesc,
        inputs: &GpuInputs<'_, Memory>,
        tables: &BlockTables,
        outputs: &mut GpuOutputs<'_, Memory>,
    ) -> Result<(), MetalError> {
        self.inner.run_paged(desc, inputs, tables, outputs)?;
        self.gpu().commit();
        Ok(())
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
    ) -> Result<(), MetalError> {
        self.inner.compute(desc, inputs, outputs)
    }

    /// Calls `work` with this session, whose runs go to a new encoder of a command buffer of the device's queue. The caller commits it, before
    /// a later run of this session that is on the queue, or gives it up and calls [`Session::clear`].
    ///
    /// # Errors
    /// The errors of `work`, [`Error::OtherQueue`] and [`Error::NoObject`].
    pub fn encode<T>(
        &mut self,
        commands: &CommandBuffer,
        dispatch: DispatchType,
        work: impl FnOnce(&mut Self) -> Result<T, MetalError>,
    ) -> Result<T, MetalError> {
        let gpu = self.gpu().clone();
        let worked = gpu.encode(commands, dispatch, |gpu| self.with_gpu(gpu.clone(), work));
        worked.map_err(|error: Error| SessionError::device(error))?
    }

    /// Calls `work` with this session, whose runs go to an encoder of the caller's, of a command buffer of the device's queue. In a concurrent
    /// encoder barriers lie between launches of this call that depend on each other; the caller orders
    /// them with its own commands, and calls of this function with each other where they use the same tensors or the same description.
    ///
    /// # Errors
    /// The errors of `work`.
    ///
    /// # Safety
    /// - The encoder is open, and no other thread uses it meanwhile.
    /// - Its command buffer retains what it uses; otherwise the session and all tensors live until it has completed.
    pub unsafe fn encode_in<T>(
        &mut self,
        encoder: &ComputeEncoder,
        work: impl FnOnce(&mut Self) -> Result<T, MetalError>,
    ) -> Result<T, MetalError> {
        self.gpu().commit();
        // SAFETY: the caller's contract; the device is replaced when `work` has ended.
        let gpu = unsafe { self.gpu().in_encoder(encoder.clone()) };
        self.with_gpu(gpu, work)
    }

    /// Calls `work` with this session, whose runs go to an encoder of the device that another library wraps, and that orders them.
    ///
    /// # Errors
    /// The errors of `work`.
    ///
    /// # Safety
    /// - The encoder is open, and no other thread uses it meanwhile.
    /// - Its command buffer retains what it uses; otherwise the session and all tensors live until it has completed.
    pub unsafe fn encode_in_foreign<T>(
        &mut self,
        encoder: Box<dyn ForeignEncoder>,
        work: impl FnOnce(&mut Self) -> Result<T, MetalError>,
    ) -> Result<T, MetalError> {
        self.gpu().commit();
        // SAFETY: as above.
        let gpu = unsafe { self.gpu().in_foreign_encoder(encoder) };
        self.with_gpu(gpu, work)
    }

    /// Calls `work` while launches go elsewhere.
    fn with_gpu<T>(&mut self, gpu: Gpu, work: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.inner.replace_device(gpu);
        let restoring = Restoring { session: self, before: Some(before) };
        work(&mut *restoring.session)
    }

    /// Gives back the memory of all plans.
    pub fn clear(&mut self) {
        self.inner.clear();
    }
}

/// Gives a session its device back, also where what is encoded panics.
struct Restoring<'a> {
    session: &'a mut Session,
    before: Option<Gpu>,
}

impl Drop for Restoring<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before.take() {
            self.session.inner.replace_device(before);
        }
    }
}
