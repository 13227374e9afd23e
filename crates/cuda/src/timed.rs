//! Runs on a CUDA device that are timed.

#![allow(unsafe_code)]

use super::device::Cuda;
use super::error::CudaError;
use super::session::CudaEngine;
use super::timer::Timer;
use crate::plan::{CudaBackwardPlan, CudaPlan};
use flashtile_core::gradients::{BackwardInputs, Gradients};
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_gpu::uploaded_backward::UploadedBackwardRun;
use flashtile_gpu::uploaded_run::{Repeated, UploadedRun};
use std::sync::Arc;

/// A plan on a stream of its own, with copies of its tensors on the device, to be measured.
///
/// ```no_run
/// # fn measured(inputs: &flashtile::Inputs<'_>, outputs: &mut flashtile::Outputs<'_>, problem: &flashtile::Problem) -> flashtile::Result<()> {
/// use flashtile::cuda::{Cuda, TimedRun};
/// use flashtile::{CudaPlan, PlanOptions};
/// let cuda = Cuda::new(0)?;
/// let plan = CudaPlan::new(problem, cuda.facts(), PlanOptions::default())?;
/// let mut run = TimedRun::new(&cuda, &plan, inputs, outputs)?;
/// run.compute(outputs)?;
/// println!("{:.1} us", 1e6 * run.seconds()?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TimedRun<R = UploadedRun<CudaEngine>> {
    // Dropped before `run`, whose memory it refers to.
    timer: Option<Timer>,
    run: R,
}

/// A [`TimedRun`] of the backward pass.
pub type TimedBackwardRun = TimedRun<UploadedBackwardRun<CudaEngine>>;

impl TimedRun {
    /// Copies the inputs to the device, and takes memory there for the outputs.
    ///
    /// # Errors
    /// [`CudaError`] of preparing the plan and of copying.
    pub fn new(
        cuda: &Cuda,
        plan: &CudaPlan,
        inputs: &Inputs<'_>,
        outputs: &Outputs<'_>,
    ) -> Result<Self, CudaError> {
        let run = UploadedRun::new(cuda.open_session()?, plan.clone(), inputs, outputs)?;
        Ok(Self { timer: None, run })
    }

    /// Runs once and copies the results to outputs of the shapes that [`TimedRun::new`] was given.
    ///
    /// # Errors
    /// [`CudaError`] of the run and of copying.
    pub fn compute(&mut self, outputs: &mut Outputs<'_>) -> Result<(), CudaError> {
        self.run.compute(outputs)
    }

    /// Copies the results of the last run to outputs of the shapes that [`TimedRun::new`] was given, after it has ended.
    ///
    /// # Errors
    /// [`CudaError`] of the run and of copying.
    pub fn download(&self, outputs: &mut Outputs<'_>) -> Result<(), CudaError> {
        self.run.download(outputs)
    }
}

impl TimedBackwardRun {
    /// Copies the inputs to the device, and takes memory there for the gradients.
    ///
    /// # Errors
    /// [`CudaError`] of preparing the plan and of copying.
    pub fn backward(
        cuda: &Cuda,
        plan: &CudaBackwardPlan,
        inputs: &BackwardInputs<'_>,
        gradients: &Gradients<'_>,
    ) -> Result<Self, CudaError> {
        let run = UploadedBackwardRun::new(cuda.open_session()?, plan.clone(), inputs, gradients)?;
        Ok(Self { timer: None, run })
    }

    /// Copies the gradients of the last run to gradients of the shapes that [`TimedBackwardRun::backward`] was given, after it has
    /// ended.
    ///
    /// # Errors
    /// [`CudaError`] of the run and of copying.
    pub fn download(&self, gradients: &mut Gradients<'_>) -> Result<(), CudaError> {
        self.run.download(gradients)
    }
}

impl<R: Repeated<Engine = CudaEngine>> TimedRun<R> {
    /// Launches a run.
    ///
    /// # Errors
    /// [`CudaError`] of the launch.
    pub fn launch(&mut self) -> Result<(), CudaError> {
        self.run.launch()
    }

    /// Waits for everything that has been launched.
    ///
    /// # Errors
    /// [`CudaError::Device`] where a run failed.
    pub fn wait(&self) -> Result<(), CudaError> {
        Ok(self.run.device().synchronize()?)
    }

    /// Seconds of a run, launched as a graph, with a flushed second-level cache: see [`Timer`].
    ///
    /// # Errors
    /// [`CudaError`] of the launch, [`CudaError::Device`] of the measurement.
    pub fn seconds(&mut self) -> Result<f64, CudaError> {
        let Self { timer, run } = self;
        let timer = match timer {
            Some(timer) => timer,
            None => {
                // Kernels are loaded, and a table of one page a sequence is copied, before the capture.
                run.launch()?;
                let stream = Arc::clone(run.device().stream());
                // SAFETY: the timer is dropped first, and nothing replaces the memory of the run.
                timer.insert(unsafe { Timer::capture(&stream, || run.launch())? })
            }
        };
        timer.seconds()
    }
}
