//! Attention over tensors in host memory, on a device.

use super::device::Cuda;
use super::error::CudaError;
use super::prepared::Prepared;
use super::session::Session;
use super::tensor::{DeviceInputs, DeviceOutputs};
use super::views;
use flashtile_core::block_tables::BlockTables;
use flashtile_core::inputs::{self, Inputs, Outputs};
use flashtile_core::problem::{Problem, ProblemDesc};
use flashtile_gpu::upload::{Results, Uploaded};
use flashtile_kernel::cuda::{Gpu, Memory};

/// All tensors of a run in device memory that they own: copies of inputs of the host, and outputs. Made by [`Prepared::upload`].
///
/// Tensors of any strides are taken; those without gaps between their elements keep their strides, others become dense. Block tables,
/// masks, ALiBi slopes and sinks are copied too. [`DeviceArray`](super::DeviceArray) owns a single tensor.
///
/// ```no_run
/// use flashtile::cuda::Cuda;
/// use flashtile::{Attention, Outputs, PlanOptions, TensorView, TensorViewMut};
/// let cuda = Cuda::new(0)?;
/// let stream = cuda.context().new_stream()?;
/// let (q, kv) = (vec![0.1f32; 32 * 128 * 64], vec![0.2f32; 8 * 128 * 64]);
/// let mut out = vec![0.0f32; 32 * 128 * 64];
/// let q = TensorView::bhsd(&q, [1, 32, 128, 64])?;
/// let kv = TensorView::bhsd(&kv, [1, 8, 128, 64])?;
/// let causal = Attention::causal();
/// let problem = causal.desc(&q, &kv, &kv).validate()?;
/// let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, [1, 32, 128, 64])?);
/// let mut prepared = cuda.prepare(&cuda.plan(&problem, PlanOptions::default())?, &stream)?;
/// let mut tensors = prepared.upload(&causal.inputs(q, kv, kv), &outputs)?;
/// for _again in 0..10 {
///     tensors.run(&mut prepared)?;
/// }
/// tensors.download(&mut outputs)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DeviceTensors {
    gpu: Gpu,
    /// The problem that the tensors were checked against.
    problem: Problem,
    inputs: Uploaded<Memory>,
    outputs: Results<Memory>,
    tables: Option<BlockTables>,
    /// Pages of the pool.
    pages: usize,
}

impl DeviceTensors {
    fn new(
        gpu: Gpu,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &Outputs<'_>,
    ) -> Result<Self, CudaError> {
        inputs::check(problem, inputs, outputs)?;
        let mut uploaded = Uploaded::new(&gpu, inputs)?;
        if let Some(tables) = inputs.tables {
            uploaded.upload_tables(&gpu, tables)?;
        }
        Ok(Self {
            outputs: Results::new(&gpu, outputs)?,
            inputs: uploaded,
            problem: problem.clone(),
            tables: inputs.tables.cloned(),
            pages: inputs.k.shape()[0],
            gpu,
        })
    }

    /// Launches a run over the tensors on the stream of `prepared`, whose plan may be that of another step of the same sequences.
    /// Returns before it has ended; as [`Prepared::run`], it allocates and waits for nothing, as long as the stream is that of the
    /// upload.
    ///
    /// # Errors
    /// As [`Prepared::run`]; [`CudaError::Inputs`] also where the tables do not fit the plan's problem.
    pub fn run(&mut self, prepared: &mut Prepared) -> Result<(), CudaError> {
        let problem = prepared.plan().problem();
        // Tables that fit a description fit it again.
        if let Some(tables) = self.tables.as_ref().filter(|_| problem.desc() != self.problem.desc()) {
            inputs::check_tables(problem, tables, self.pages)?;
        }
        if prepared.stream().cu_stream() != self.gpu.stream().cu_stream() {
            self.gpu.synchronize()?;
        }
        let of = self.inputs.inputs();
        let mut inputs = DeviceInputs::new(views::tensor(&of.q)?, views::kv(&of.k)?, views::kv(&of.v)?);
        if let (Some(of), Some(tables)) = (&of.tables, &self.tables) {
            inputs.tables = Some(views::tables(of, tables)?);
        }
        inputs.tree = of.tree.as_ref().map(views::mask).transpose()?;
        inputs.mask = of.mask.as_ref().map(views::mask).transpose()?;
        inputs.alibi_slopes = of.alibi_slopes.map(views::list).transpose()?;
        inputs.sinks = of.sinks.map(views::list).transpose()?;
        let mut of = self.outputs.outputs();
        let mut outputs = DeviceOutputs::new(views::tensor_mut(&mut of.out)?);
        outputs.lse = of.lse.as_mut().map(views::list_mut).transpose()?;
        prepared.run(&inputs, &mut outputs)
    }

    /// Copies what runs have written to outputs of the dtype, shapes and lists of the upload, after all work of the device has ended.
    ///
    /// # Errors
    /// [`CudaError::Inputs`] where they differ; [`CudaError::Device`], also of work that failed.
    pub fn download(&self, outputs: &mut Outputs<'_>) -> Result<(), CudaError> {
        let out = (outputs.out.dtype(), outputs.out.shape());
        inputs::check_outputs(&self.problem, out, outputs.lse.as_ref().map(|lse| lse.len()))?;
        // Runs may have been on another stream.
        self.gpu.context().synchronize().map_err(CudaError::driver("work of the device"))?;
        Ok(self.outputs.download(&self.gpu, outputs)?)
    }
}

impl Prepared {
    /// Copies the inputs of a run of the plan to the device, and takes memory there for its outputs, whose contents are not read.
    /// The inputs have been read when this returns.
    ///
    /// # Errors
    /// [`CudaError::Inputs`] where the tensors do not fit the plan's problem, also where block tables do not describe pages of the pool;
    /// [`CudaError::Device`], also while the stream captures.
    pub fn upload(&self, inputs: &Inputs<'_>, outputs: &Outputs<'_>) -> Result<DeviceTensors, CudaError> {
        let gpu = self.cuda().gpu().on(self.stream());
        DeviceTensors::new(gpu, self.plan().problem(), inputs, outputs)
    }
}

impl Session {
    /// Opens a session on a new stream of CUDA device `ordinal`.
    ///
    /// # Errors
    /// As [`Cuda::new`].
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        let cuda = Cuda::new(ordinal)?;
        let stream = cuda.context().new_stream().map_err(CudaError::driver("stream"))?;
        Ok(Self::new(&cuda, &stream))
    }

    /// Computes what a description says over tensors in host memory: copies them to the device, runs, waits, and copies the results
    /// back. Where tensors stay on the device, [`Session::run`] has no copies.
    ///
    /// ```no_run
    /// use flashtile::cuda::Session;
    /// use flashtile::{Attention, Outputs, TensorView, TensorViewMut};
    /// let (q, kv) = (vec![0.1f32; 32 * 128 * 64], vec![0.2f32; 8 * 128 * 64]);
    /// let mut out = vec![0.0f32; 32 * 128 * 64];
    /// let q = TensorView::bhsd(&q, [1, 32, 128, 64])?;
    /// let kv = TensorView::bhsd(&kv, [1, 8, 128, 64])?;
    /// let causal = Attention::causal();
    /// let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, [1, 32, 128, 64])?);
    /// Session::open(0)?.compute(&causal.desc(&q, &kv, &kv), &causal.inputs(q, kv, kv), &mut outputs)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Session::run`]; [`CudaError::Inputs`] also where block tables do not describe pages of the pool.
    pub fn compute(
        &mut self,
        desc: &ProblemDesc,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<(), CudaError> {
        inputs::check(&desc.clone().validate()?, inputs, outputs)?;
        let prepared = self.prepared(desc)?;
        let mut tensors = prepared.upload(inputs, outputs)?;
        tensors.run(prepared)?;
        tensors.download(outputs)
    }
}
