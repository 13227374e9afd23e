//! Backends: whatever plans attention and runs it over tensors of the host.

use crate::error::Result;
use flashtile_core::dtype::Dtype;
use flashtile_core::gradients::{self, BackwardInputs, Gradients};
use flashtile_core::inputs::{Inputs, Outputs, RunError};
use flashtile_core::plan::{AnyBackwardPlan, AnyFacts, AnyPlan, PlanOptions, Unsupported};
use flashtile_core::problem::{Problem, ProblemDesc};
use std::fmt;
use std::time::Instant;

/// A device of this machine that plans attention and runs it: a processor, a CUDA or Metal device, the reference, the simulator.
///
/// The tensors are in host memory; backends with memory of their own copy them there and back. Where tensors stay on a device, use the
/// session of its own module, such as [`cuda`](https://docs.rs/flashtile/latest/flashtile/cuda).
///
/// ```
/// use flashtile::{BackendName, Dims, Dtype, Inputs, Outputs, ProblemDesc, TensorView, TensorViewMut};
/// let dims = Dims { batch: 1, q_heads: 2, kv_heads: 1, q_len: 4, kv_len: 4, head_dim: 8, value_dim: 8 };
/// let (q, kv, mut out) = ([0.1f32; 2 * 4 * 8], [0.2f32; 4 * 8], [0f32; 2 * 4 * 8]);
/// let kv = TensorView::bhsd(&kv, dims.k_shape())?;
/// let inputs = Inputs::new(TensorView::bhsd(&q, dims.q_shape())?, kv, kv);
/// let desc = ProblemDesc::new(dims, Dtype::F32);
/// for name in ["cpu", "reference"] {
///     let backend = name.parse::<BackendName>()?.open()?;
///     let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, dims.out_shape())?);
///     backend.compute(&desc, &inputs, &mut outputs)?;
///     assert!((out[0] - 0.2).abs() < 1e-6);
/// }
/// # Ok::<(), flashtile::Error>(())
/// ```
pub trait Backend: fmt::Debug + Send + Sync {
    /// The name that users write: `cpu`, `cuda:1`.
    fn name(&self) -> String;

    /// The device's own name, as its vendor gives it: `NVIDIA H100 80GB HBM3`; `this machine` for its processor.
    fn device(&self) -> String {
        "this machine".to_owned()
    }

    /// The device in one line, for a list of backends.
    fn describe(&self) -> String {
        self.device()
    }

    /// Facts of the device, for its planner.
    fn facts(&self) -> AnyFacts;

    /// Plans a problem.
    ///
    /// # Errors
    /// [`Unsupported`] where the backend has no kernels for the problem.
    fn plan(&self, problem: &Problem, options: PlanOptions) -> std::result::Result<AnyPlan, Unsupported> {
        self.facts().plan(problem, options)
    }

    /// Plans the backward pass of a problem.
    ///
    /// # Errors
    /// [`Unsupported`] where the backend has no backward kernels, or none for the problem.
    fn plan_backward(
        &self,
        problem: &Problem,
        options: PlanOptions,
    ) -> std::result::Result<AnyBackwardPlan, Unsupported> {
        self.facts().plan_backward(problem, options)
    }

    /// Compiles and loads the kernels of a plan, which its first run would do otherwise. Does nothing where kernels are part of the program.
    ///
    /// # Errors
    /// The error of the compiler or the device.
    fn prepare(&self, plan: &AnyPlan) -> Result<()> {
        let _ = plan;
        Ok(())
    }

    /// A session, which keeps plans and memory from call to call.
    ///
    /// # Errors
    /// The error of the device.
    fn session(&self, options: PlanOptions) -> Result<Box<dyn HostSession>>;

    /// A plan of this backend with its tensors where the kernels read them, to be measured. The CPU's runs take the inputs in turn, so that
    /// its caches do not hold what the run before has read. Other backends take the first only.
    ///
    /// # Errors
    /// [`Error::Run`](crate::Error::Run) where the tensors do not fit the plan's problem, there are no inputs, or the plan is another backend's; the
    /// errors of the device.
    fn timed<'t>(
        &'t self,
        plan: &'t AnyPlan,
        inputs: &[Inputs<'t>],
        outputs: &Outputs<'_>,
    ) -> Result<Box<dyn TimedRun + 't>>;

    /// The backward pass of a plan's problem with its tensors where the kernels read them, to be measured.
    ///
    /// # Errors
    /// [`Error::Run`](crate::Error::Run) where the tensors do not fit the plan's problem, or the plan is another backend's; the errors of the
    /// device. Without a definition of its own, a backend measures its session over tensors of the host.
    fn timed_backward<'t>(
        &'t self,
        plan: &'t AnyBackwardPlan,
        inputs: &BackwardInputs<'t>,
        gradients: &Gradients<'_>,
    ) -> Result<Box<dyn TimedBackward + 't>> {
        let kernel = plan.kernel();
        if !kernel.starts_with(self.facts().backend()) {
            return Err(RunError::OtherBackend { kernel }.into());
        }
        gradients::check(plan.problem(), inputs, gradients)?;
        let session = self.session(plan.options())?;
        Ok(Box::new(SessionBackward { session, desc: plan.problem().desc(), inputs: *inputs }))
    }

    /// Number of copies of inputs of `bytes` bytes that exceed the caches together: as many should be passed to [`Backend::timed`].
    fn cold_copies(&self, bytes: f64) -> usize {
        let _ = bytes;
        1
    }

    /// The unit that computes the products of a plan. `None` for backends whose time is not compared with the hardware, and for plans of
    /// other backends.
    fn unit(&self, plan: &AnyPlan) -> Option<Unit> {
        let _ = plan;
        None
    }

    /// The unit that computes the products of a backward plan, as [`Backend::unit`].
    fn backward_unit(&self, plan: &AnyBackwardPlan) -> Option<Unit> {
        let _ = plan;
        None
    }

    /// Measures a limit of one of this backend's units. Takes up to a second.
    ///
    /// # Errors
    /// The error of the device. Backends without a [`Backend::unit`] refuse.
    fn limit(&self, rate: Rate, unit: &Unit) -> Result<Limit> {
        let _ = rate;
        let why = format!("the time of {} is not compared with a limit of the hardware", unit.name);
        Err(Unsupported::Instance { why }.into())
    }

    /// Runs a plan once.
    ///
    /// # Errors
    /// As [`Backend::timed`].
    fn run(&self, plan: &AnyPlan, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>) -> Result<()> {
        self.timed(plan, std::slice::from_ref(inputs), outputs)?.compute(outputs)
    }

    /// Plans a description and runs it once. Callers with several problems keep a [`Backend::session`].
    ///
    /// # Errors
    /// As [`HostSession::compute`].
    fn compute(&self, desc: &ProblemDesc, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>) -> Result<()> {
        self.session(PlanOptions::default())?.compute(desc, inputs, outputs)
    }

    /// Plans the backward pass of a description and runs it once.
    ///
    /// # Errors
    /// As [`HostSession::backward`].
    fn backward(
        &self,
        desc: &ProblemDesc,
        inputs: &BackwardInputs<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result<()> {
        self.session(PlanOptions::default())?.backward(desc, inputs, gradients)
    }
}

/// Attention over tensors of the host, with plans and memory that are kept from call to call.
pub trait HostSession: fmt::Debug + Send {
    /// Computes a description, and returns when the results are in `outputs`.
    ///
    /// # Errors
    /// [`Error::Problem`](crate::Error::Problem), [`Error::Unsupported`](crate::Error::Unsupported),
    /// [`Error::Run`](crate::Error::Run), [`Error::Memory`](crate::Error::Memory), and the errors of the device.
    fn compute(&mut self, desc: &ProblemDesc, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>) -> Result<()>;

    /// Computes the gradients of a description, and returns when they are in `gradients`.
    ///
    /// # Errors
    /// As [`HostSession::compute`]; [`Unsupported::Backward`] where the backend has no backward kernels.
    fn backward(
        &mut self,
        desc: &ProblemDesc,
        inputs: &BackwardInputs<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result<()> {
        let _ = (desc, inputs, gradients);
        Err(Unsupported::Backward { why: "the backend has no backward kernels" }.into())
    }
}

/// A plan with its tensors, to be run again and again. Outputs are of the shapes that [`Backend::timed`] was given.
pub trait TimedRun {
    /// Runs once. Where the backend computes in host memory, the results are in `outputs` then; elsewhere [`TimedRun::download`]
    /// copies them.
    ///
    /// # Errors
    /// The errors of the run.
    fn launch(&mut self, outputs: &mut Outputs<'_>) -> Result<()>;

    /// Seconds of one run by the clock of the device, without copies between host and device. Results are where [`TimedRun::launch`] leaves
    /// them.
    ///
    /// # Errors
    /// The errors of the run.
    fn seconds(&mut self, outputs: &mut Outputs<'_>) -> Result<f64> {
        let started = Instant::now();
        self.launch(outputs)?;
        Ok(started.elapsed().as_secs_f64())
    }

    /// Copies the results of the last run to `outputs`, unless they are there.
    ///
    /// # Errors
    /// The errors of the copy and of the run.
    fn download(&mut self, outputs: &mut Outputs<'_>) -> Result<()> {
        let _ = outputs;
        Ok(())
    }

    /// Seconds of the host for one launch, where launches return before they have ended. Makes a hundred launches.
    ///
    /// # Errors
    /// The errors of the runs.
    fn host_seconds(&mut self) -> Result<Option<f64>> {
        Ok(None)
    }

    /// Runs once, with the results in `outputs`.
    ///
    /// # Errors
    /// The errors of the run and of the copy.
    fn compute(&mut self, outputs: &mut Outputs<'_>) -> Result<()> {
        self.launch(outputs)?;
        self.download(outputs)
    }
}

/// A backward pass with its tensors, to be run again and again. Gradients are of the shapes and lists that [`Backend::timed_backward`] was
/// given.
pub trait TimedBackward {
    /// Runs once. Where the backend computes in host memory, the results are in `gradients` then; elsewhere [`TimedBackward::download`]
    /// copies them.
    ///
    /// # Errors
    /// The errors of the run.
    fn launch(&mut self, gradients: &mut Gradients<'_>) -> Result<()>;

    /// Seconds of one run by the clock of the device, without copies between host and device. Results are where
    /// [`TimedBackward::launch`] leaves them.
    ///
    /// # Errors
    /// The errors of the run.
    fn seconds(&mut self, gradients: &mut Gradients<'_>) -> Result<f64> {
        let started = Instant::now();
        self.launch(gradients)?;
        Ok(started.elapsed().as_secs_f64())
    }

    /// Copies the results of the last run to `gradients`, unless they are there.
    ///
    /// # Errors
    /// The errors of the copy and of the run.
    fn download(&mut self, gradients: &mut Gradients<'_>) -> Result<()> {
        let _ = gradients;
        Ok(())
    }
}

/// The backward pass of a session over tensors of the host.
struct SessionBackward<'t> {
    session: Box<dyn HostSession>,
    desc: &'t ProblemDesc,
    inputs: BackwardInputs<'t>,
}

impl TimedBackward for SessionBackward<'_> {
    fn launch(&mut self, gradients: &mut Gradients<'_>) -> Result<()> {
        self.session.backward(self.desc, &self.inputs, gradients)
    }
}

/// The part of a device whose limits apply to a kernel. Kernels of equal units have the same limits.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::exhaustive_structs)]
pub struct Unit {
    /// Name of the instruction set or the device.
    pub name: String,
    /// Threads of a processor, whose runs are timed by the clock of the host.
    pub threads: Option<usize>,
    /// The dtype of the products, where their rate depends on it.
    pub dtype: Option<Dtype>,
    /// Operations per byte of keys and values from which the bandwidth of the memory cannot be the limit.
    pub max_intensity: f64,
}

/// A rate of the hardware that bounds the time of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)]
pub enum Rate {
    /// Floating-point operations per second, two for each multiply-add.
    Arithmetic,
    /// Bytes per second that are read from memory.
    Bandwidth,
}

/// A rate that was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(clippy::exhaustive_structs)]
pub struct Limit {
    /// Operations or bytes per second.
    pub per_second: f64,
    /// The instructions that multiply, or how memory is accessed: `FMA`, `wgmma`, `read`.
    pub by: &'static str,
}
