//! Attention on a stream, with plans kept from call to call.

use super::backward::PreparedCudaBackward;
use super::device::Cuda;
use super::error::CudaError;
use super::prepared::Prepared;
use crate::plan::{CudaBackwardPlan, CudaPlan};
use flashtile_core::block_tables::BlockTables;
use flashtile_core::plan::{PlanOptions, Unsupported};
use flashtile_core::problem::Problem;
use flashtile_gpu::backward::tensors::{GpuBackwardInputs, GpuGradients};
use flashtile_gpu::engine::Engine;
use flashtile_gpu::tensors::{GpuInputs, GpuOutputs};
use flashtile_kernel::cuda::cudarc::driver::CudaStream;
use flashtile_kernel::cuda::{Gpu, Memory};
use std::cell::Cell;
use std::sync::Arc;

/// Sessions that a thread keeps.
const MAX_SESSIONS: usize = 8;

/// Computes attention on one stream of a device, made by [`Cuda::session`], and keeps what a next call of the same description needs again:
/// see [`Session`](flashtile_gpu::session::Session). A step of decoding writes its schedule over the one before, as long as that has the
/// size ([`Prepared::update`]). Calls may be captured in a CUDA graph.
///
/// ```no_run
/// use flashtile::cuda::{Cuda, GpuInputs, GpuOutputs, Memory};
/// use flashtile::{Dims, Dtype, ProblemDesc};
/// let cuda = Cuda::new(0)?;
/// let mut session = cuda.session(&cuda.context().new_stream()?);
/// let dims = Dims { batch: 1, q_heads: 32, kv_heads: 8, q_len: 1, kv_len: 4096, head_dim: 128, value_dim: 128 };
/// # fn tensors<'a>() -> (GpuInputs<'a, Memory>, GpuOutputs<'a, Memory>) { unimplemented!() }
/// for _layer in 0..32 {
///     let (inputs, mut outputs) = tensors();
///     session.run(&ProblemDesc::new(dims, Dtype::BF16), &inputs, &mut outputs)?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Tensors in host memory are copied to the device and back:
///
/// ```no_run
/// use flashtile::cuda::Cuda;
/// use flashtile::{Attention, Outputs, TensorView, TensorViewMut};
/// let (q, kv) = (vec![0.1f32; 32 * 128 * 64], vec![0.2f32; 8 * 128 * 64]);
/// let mut out = vec![0.0f32; 32 * 128 * 64];
/// let q = TensorView::bhsd(&q, [1, 32, 128, 64])?;
/// let kv = TensorView::bhsd(&kv, [1, 8, 128, 64])?;
/// let causal = Attention::causal();
/// let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, [1, 32, 128, 64])?);
/// let mut session = Cuda::new(0)?.open_session()?;
/// session.compute(&causal.desc(&q, &kv, &kv), &causal.inputs(q, kv, kv), &mut outputs)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type Session = flashtile_gpu::session::Session<CudaEngine>;

/// Native kernels, and portable ones for problems that the native ones do not take.
#[derive(Debug, Clone)]
pub struct CudaEngine {
    cuda: Cuda,
    options: PlanOptions,
}

impl Engine for CudaEngine {
    type Device = Gpu;
    type Plan = CudaPlan;
    type Prepared = Prepared;
    type BackwardPlan = CudaBackwardPlan;
    type PreparedBackward = PreparedCudaBackward;
    type Error = CudaError;

    fn plan(&self, problem: &Problem) -> Result<CudaPlan, Unsupported> {
        self.cuda.plan(problem, self.options)
    }

    fn prepare(&self, gpu: &Gpu, plan: CudaPlan, old: Option<Prepared>) -> Result<Prepared, CudaError> {
        Prepared::after(&self.cuda, gpu, plan, old)
    }

    fn update(
        &self,
        gpu: &Gpu,
        prepared: &mut Prepared,
        plan: CudaPlan,
    ) -> Result<Option<CudaPlan>, CudaError> {
        prepared.move_to(gpu);
        match prepared.difference(&plan) {
            Some(_) => Ok(Some(plan)),
            None => prepared.replace(plan).map(|()| None),
        }
    }

    fn planned(prepared: &Prepared) -> &CudaPlan {
        prepared.plan()
    }

    fn problem(plan: &CudaPlan) -> &Problem {
        plan.problem()
    }

    /// Schedules were written with their plans.
    fn write_sequences(
        &self,
        _: &Gpu,
        _: &mut Prepared,
        tables: Option<&BlockTables>,
    ) -> Result<bool, CudaError> {
        Ok(tables.is_some())
    }

    fn run(
        &self,
        gpu: &Gpu,
        prepared: &mut Prepared,
        inputs: &GpuInputs<'_, Memory>,
        outputs: &mut GpuOutputs<'_, Memory>,
    ) -> Result<(), CudaError> {
        prepared.move_to(gpu);
        prepared.launch(inputs, outputs)
    }

    fn plan_backward(&self, problem: &Problem) -> Result<CudaBackwardPlan, Unsupported> {
        CudaBackwardPlan::new(problem, self.cuda.facts(), self.options)
    }

    fn prepare_backward(&self, gpu: &Gpu, plan: CudaBackwardPlan) -> Result<PreparedCudaBackward, CudaError> {
        PreparedCudaBackward::new(&self.cuda, gpu, plan)
    }

    fn planned_backward(prepared: &PreparedCudaBackward) -> &CudaBackwardPlan {
        prepared.plan()
    }

    fn backward_problem(plan: &CudaBackwardPlan) -> &Problem {
        plan.problem()
    }

    fn run_backward(
        &self,
        gpu: &Gpu,
        prepared: &mut PreparedCudaBackward,
        inputs: &GpuBackwardInputs<'_, Memory>,
        gradients: &mut GpuGradients<'_, Memory>,
    ) -> Result<(), CudaError> {
        prepared.run(gpu, inputs, gradients)
    }

    fn forget_written_backward(prepared: &mut PreparedCudaBackward) {
        prepared.forget_written();
    }
}

impl Cuda {
    /// A session on a stream of the device.
    #[must_use]
    pub fn session(&self, stream: &Arc<CudaStream>) -> Session {
        self.session_with(stream, PlanOptions::default())
    }

    /// [`Cuda::session`] with options of the planner.
    #[must_use]
    pub fn session_with(&self, stream: &Arc<CudaStream>, options: PlanOptions) -> Session {
        Session::new(self.gpu().on(stream), CudaEngine { cuda: self.clone(), options })
    }

    /// A session on a new stream.
    ///
    /// # Errors
    /// [`CudaError::Device`].
    pub fn open_session(&self) -> Result<Session, CudaError> {
        let stream = self.context().new_stream().map_err(CudaError::driver("stream"))?;
        Ok(self.session(&stream))
    }
}

/// Calls a function with the session that the calling thread keeps for a stream. A call inside a call, as a thread makes it that
/// waits for rayon and is given another task, gets sessions of its own. Kernels that one thread has loaded serve all threads.
///
/// A thread keeps the sessions of the streams that it used last. The stream's owner keeps it alive, or destroys it after its work has
/// ended.
///
/// # Errors
/// The errors of [`Cuda::with_context`].
pub fn with_session<T>(stream: &Arc<CudaStream>, f: impl FnOnce(&mut Session) -> T) -> Result<T, CudaError> {
    thread_local! {
        static SESSIONS: Cell<Vec<Session>> = const { Cell::new(Vec::new()) };
    }
    // While a thread ends, its values are gone.
    let mut sessions = SESSIONS.try_with(Cell::take).unwrap_or_default();
    let found = find(&mut sessions, stream);
    let result = found.map(f);
    let _ = SESSIONS.try_with(|place| place.set(sessions));
    result
}

/// The session of a stream, as the first of `sessions`.
fn find<'s>(sessions: &'s mut Vec<Session>, stream: &Arc<CudaStream>) -> Result<&'s mut Session, CudaError> {
    let same = |of: &CudaStream| {
        of.cu_stream() == stream.cu_stream() && of.context().cu_ctx() == stream.context().cu_ctx()
    };
    match sessions.iter().position(|session| same(session.device().stream())) {
        Some(at) => sessions[..=at].rotate_right(1),
        None => {
            sessions.insert(0, Cuda::shared(stream.context())?.session(stream));
            let mut kept = 0;
            sessions.retain(|session| {
                kept += 1;
                kept <= MAX_SESSIONS || session.is_captured()
            });
        }
    }
    Ok(&mut sessions[0])
}
