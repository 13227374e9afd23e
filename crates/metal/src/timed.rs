//! Runs on a device that are timed.

use crate::device::Metal;
use crate::error::MetalError;
use crate::plan::MetalPlan;
use flashtile_core::gradients::{BackwardInputs, Gradients};
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_gpu::SessionError;
use flashtile_gpu::backward::plan::PortableBackwardPlan;
use flashtile_gpu::engine::PortableEngine;
use flashtile_gpu::uploaded_backward::UploadedBackwardRun;
use flashtile_gpu::uploaded_run::{Repeated, UploadedRun};
use flashtile_kernel::metal::{Error, Gpu};

/// A plan with copies of its tensors in a device's memory, to be measured.
#[derive(Debug)]
pub struct TimedRun<R = UploadedRun<PortableEngine<Gpu>>> {
    run: R,
}

/// A [`TimedRun`] of the backward pass.
pub type TimedBackwardRun = TimedRun<UploadedBackwardRun<PortableEngine<Gpu>>>;

impl TimedRun {
    /// Copies the inputs to the device, and takes memory there for the outputs.
    ///
    /// # Errors
    /// [`MetalError`].
    pub fn new(
        metal: &Metal,
        plan: &MetalPlan,
        inputs: &Inputs<'_>,
        outputs: &Outputs<'_>,
    ) -> Result<Self, MetalError> {
        let session = metal.session_with(plan.options());
        Ok(Self { run: UploadedRun::new(session, plan.portable().clone(), inputs, outputs)? })
    }

    /// Runs once and copies the results to outputs of the shapes that [`TimedRun::new`] was given.
    ///
    /// # Errors
    /// [`MetalError`] of the run.
    pub fn compute(&mut self, outputs: &mut Outputs<'_>) -> Result<(), MetalError> {
        self.run.compute(outputs)
    }

    /// Copies the results of the last run to outputs of the shapes that [`TimedRun::new`] was given, after it has ended.
    ///
    /// # Errors
    /// [`MetalError`] of the run and of copying.
    pub fn download(&self, outputs: &mut Outputs<'_>) -> Result<(), MetalError> {
        self.run.download(outputs)
    }
}

impl TimedBackwardRun {
    /// Copies the inputs to the device, and takes memory there for the gradients.
    ///
    /// # Errors
    /// [`MetalError`].
    pub fn backward(
        metal: &Metal,
        plan: &PortableBackwardPlan,
        inputs: &BackwardInputs<'_>,
        gradients: &Gradients<'_>,
    ) -> Result<Self, MetalError> {
        Ok(Self { run: UploadedBackwardRun::new(metal.session(), plan.clone(), inputs, gradients)? })
    }

    /// Copies the gradients of the last run to gradients of the shapes that [`TimedBackwardRun::backward`] was given, after it has
    /// ended.
    ///
    /// # Errors
    /// [`MetalError`] of the run and of copying.
    pub fn download(&self, gradients: &mut Gradients<'_>) -> Result<(), MetalError> {
        self.run.download(gradients)
    }
}

impl<R: Repeated<Engine = PortableEngine<Gpu>>> TimedRun<R> {
    /// Launches a run.
    ///
    /// # Errors
    /// [`MetalError`] of the launch.
    pub fn launch(&mut self) -> Result<(), MetalError> {
        self.run.launch()
    }

    /// Waits for everything that was launched.
    ///
    /// # Errors
    /// [`Error::Execution`] where a run failed.
    pub fn wait(&self) -> Result<(), MetalError> {
        self.run.device().synchronize().map_err(SessionError::device)
    }

    /// Seconds of a run on the GPU. Caches keep their contents from the run before.
    ///
    /// # Errors
    /// [`MetalError`] of the launch and the run.
    pub fn seconds(&mut self) -> Result<f64, MetalError> {
        let (gpu, run) = (self.run.device().clone(), &mut self.run);
        let timed = gpu.time(1, || run.launch().map_err(Timed));
        timed.map(|timing| timing.least()).map_err(|Timed(error)| error)
    }
}

/// An error of a run that is timed, or of the timing.
struct Timed(MetalError);

impl From<Error> for Timed {
    fn from(error: Error) -> Self {
        Self(SessionError::device(error))
    }
}
