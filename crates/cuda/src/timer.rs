//! Times of captured launches.

#![allow(unsafe_code)]

use super::error::{CudaError, DeviceError};
use flashtile_kernel::cuda::cudarc::driver::{CudaGraph, CudaSlice, CudaStream, sys};
use std::sync::Arc;

/// Bytes that are written before each measurement: more than the second-level cache of any device.
const FLUSH: usize = 256 << 20;

/// The time of launches on a stream, without the host's part in them: they are captured in a CUDA graph once, and each measurement
/// launches the graph, after the second-level cache was flushed.
///
/// [`TimedRun`](super::TimedRun) has the memory of its launches with it.
pub struct Timer {
    graph: CudaGraph,
    flush: CudaSlice<u8>,
    stream: Arc<CudaStream>,
}

impl std::fmt::Debug for Timer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Timer").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Timer {
    /// Captures what `launch` launches on the stream, which does not run it, and takes 256 MiB of device memory for the flush.
    ///
    /// # Errors
    /// [`CudaError::Device`] where the work cannot be captured or memory is short; the error of `launch`.
    ///
    /// # Safety
    /// The memory that the launches refer to stays allocated as long as the timer.
    pub unsafe fn capture(
        stream: &Arc<CudaStream>,
        launch: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Self, CudaError> {
        let failed = || CudaError::driver("measurement");
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
        stream.begin_capture(mode).map_err(failed())?;
        let launched = launch();
        let flags = sys::CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        // Also after a failed launch: a stream that captures runs nothing.
        let graph = stream.end_capture(flags);
        launched?;
        let Some(graph) = graph.map_err(failed())? else {
            let error = "the stream captured nothing".to_owned();
            return Err(DeviceError::Driver { what: "measurement".to_owned(), error }.into());
        };
        let flush = stream.alloc_zeros(FLUSH).map_err(failed())?;
        Ok(Self { graph, flush, stream: stream.clone() })
    }

    /// Seconds of one run of the captured launches on the device, between events before and after it. Waits until it has ended.
    ///
    /// # Errors
    /// [`CudaError::Device`], also if the work failed.
    pub fn seconds(&mut self) -> Result<f64, CudaError> {
        let failed = || CudaError::driver("measurement");
        self.stream.memset_zeros(&mut self.flush).map_err(failed())?;
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let event = || self.stream.context().new_event(flags).map_err(failed());
        let (start, end) = (event()?, event()?);
        start.record(&self.stream).map_err(failed())?;
        self.graph.launch().map_err(failed())?;
        end.record(&self.stream).map_err(failed())?;
        Ok(f64::from(start.elapsed_ms(&end).map_err(failed())?) / 1e3)
    }
}
