//! Runs on a CUDA device that are timed.

use crate::failure::Result;
use flashtile::cuda::{Cuda, CudaError, DeviceTensors, Prepared, Timer};
use flashtile::{CudaPlan, Inputs, Outputs};

/// A plan on a device with copies of its tensors there.
pub(crate) struct TimedRun {
    // Dropped before what it refers to.
    timer: Option<Timer>,
    prepared: Prepared,
    tensors: DeviceTensors,
}

impl TimedRun {
    /// Copies the inputs to the device, and takes memory there for the outputs.
    pub(crate) fn new(
        cuda: &Cuda,
        plan: &CudaPlan,
        inputs: &Inputs<'_>,
        outputs: &Outputs<'_>,
    ) -> Result<Self> {
        let stream = cuda.context().new_stream().map_err(CudaError::driver("stream"))?;
        let prepared = cuda.prepare(plan, &stream)?;
        let tensors = prepared.upload(inputs, outputs)?;
        Ok(Self { timer: None, prepared, tensors })
    }

    /// Runs once and copies the results to outputs of the shapes that [`TimedRun::new`] was given.
    pub(crate) fn compute(&mut self, outputs: &mut Outputs<'_>) -> Result<()> {
        self.launch()?;
        Ok(self.tensors.download(outputs)?)
    }

    /// Launches a run.
    pub(crate) fn launch(&mut self) -> Result<()> {
        Ok(self.tensors.run(&mut self.prepared)?)
    }

    /// Waits for everything that has been launched.
    pub(crate) fn wait(&self) -> Result<()> {
        Ok(self.prepared.stream().synchronize().map_err(CudaError::driver("run"))?)
    }

    /// Seconds of a run, launched as a graph, with a flushed second-level cache.
    pub(crate) fn seconds(&mut self) -> Result<f64> {
        let Self { timer, prepared, tensors } = self;
        let timer = match timer {
            Some(timer) => timer,
            None => {
                let stream = prepared.stream().clone();
                timer.insert(Timer::capture(&stream, || tensors.run(prepared))?)
            }
        };
        Ok(timer.seconds()?)
    }
}
