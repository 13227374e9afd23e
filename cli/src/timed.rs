//! Runs on a CUDA device that are timed.

use crate::failure::Result;
use flashtile::cuda::cudarc::driver::{CudaGraph, CudaSlice, CudaStream, sys};
use flashtile::cuda::{Cuda, CudaError, DeviceTensors, Prepared};
use flashtile::{CudaPlan, Inputs, Outputs};
use std::sync::Arc;

/// Bytes that are written to flush the second-level cache.
const FLUSH: usize = 256 << 20;

/// A plan on a device with copies of its tensors there.
pub(crate) struct TimedRun {
    // Dropped before what it refers to.
    graph: Option<CudaGraph>,
    stream: Arc<CudaStream>,
    prepared: Prepared,
    tensors: DeviceTensors,
    flush: Option<CudaSlice<u8>>,
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
        Ok(Self { graph: None, stream, prepared, tensors, flush: None })
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
        Ok(self.stream.synchronize().map_err(CudaError::driver("run"))?)
    }

    /// Seconds of a run, launched as a graph, with a flushed second-level cache.
    pub(crate) fn seconds(&mut self) -> Result<f64> {
        let failed = || CudaError::driver("measurement");
        if self.graph.is_none() {
            let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
            self.stream.begin_capture(mode).map_err(failed())?;
            let launched = self.launch();
            let flags = sys::CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            self.graph = self.stream.end_capture(flags).map_err(failed())?;
            launched?;
        }
        if self.flush.is_none() {
            self.flush = Some(self.stream.alloc_zeros::<u8>(FLUSH).map_err(failed())?);
        }
        if let Some(flush) = &mut self.flush {
            self.stream.memset_zeros(flush).map_err(failed())?;
        }
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let event = || self.stream.context().new_event(flags).map_err(failed());
        let (start, end) = (event()?, event()?);
        start.record(&self.stream).map_err(failed())?;
        if let Some(graph) = &self.graph {
            graph.launch().map_err(failed())?;
        }
        end.record(&self.stream).map_err(failed())?;
        Ok(f64::from(start.elapsed_ms(&end).map_err(failed())?) / 1e3)
    }
}
