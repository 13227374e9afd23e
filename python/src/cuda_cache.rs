//! Caches in the memory of a CUDA device, whose work is ordered with the streams of the caller.

use crate::cuda::{ContextBefore, borrowed};
use crate::failure::{layouts, refused, step_refused};
use crate::memory::Stream;
use flashtile::cuda::cudarc::driver::sys::CUstreamCaptureStatus;
use flashtile::cuda::cudarc::driver::{CudaEvent, CudaStream, DriverError};
use flashtile::cuda::{CudaError, CudaStore, DeviceError, Gpu, GpuOutputs, GpuTensor, Memory, StoreError};
use flashtile::gpu::GpuAttention;
use flashtile::{CacheDesc, HybridCache, KvCacheExt, SeqId, StepTensors};
use pyo3::exceptions::PyRuntimeError;
use pyo3::{PyErr, PyResult};
use std::sync::Arc;

/// A cache in the memory of a device. Its work is on the stream that is current to the caller of each operation, after all of its work before.
pub(crate) struct CudaCache {
    /// Operations of it that move rows are called by `work` and by steps alone.
    pub(crate) cache: HybridCache<CudaStore>,
    gpu: Gpu,
    /// The end of the work so far, on whatever stream.
    ended: CudaEvent,
    /// Dropped last.
    context: ContextBefore,
}

impl CudaCache {
    /// An empty cache on the device of a stream.
    pub(crate) fn new(layers: &[CacheDesc], stream: Stream) -> PyResult<Self> {
        let (cuda, on) = borrowed(stream).map_err(refused)?;
        refuse_capture(&on)?;
        let gpu = cuda.gpu().on(&on);
        let ended = cuda.context().new_event(None).map_err(failed("an event"))?;
        let cache =
            HybridCache::with_stores(layers, |desc| CudaStore::new(gpu.clone(), desc)).map_err(refused)?;
        record(&ended, &on)?;
        Ok(Self { cache, gpu, ended, context: ContextBefore::default() })
    }

    /// Lets the next operation of the cache be on a stream.
    fn begin(&mut self, stream: Stream) -> PyResult<Arc<CudaStream>> {
        let (_, on) = borrowed(stream).map_err(refused)?;
        refuse_capture(&on)?;
        wait(&on, &self.ended)?;
        for store in self.cache.stores_mut() {
            store.replace_device(self.gpu.on(&on));
        }
        Ok(on)
    }

    /// Runs an operation that moves rows, on a stream.
    pub(crate) fn work<T>(
        &mut self,
        stream: Stream,
        run: impl FnOnce(&mut HybridCache<CudaStore>) -> Result<T, StoreError<DeviceError>>,
    ) -> PyResult<T> {
        let on = self.begin(stream)?;
        let done = run(&mut self.cache);
        // Also where it was refused after a part of its work.
        record(&self.ended, &on)?;
        done.map_err(refused)
    }

    /// Begins a step, whose work is on a stream.
    pub(crate) fn step(&mut self, batch: &[(SeqId, usize)], stream: Stream) -> PyResult<CudaStep<'_>> {
        let on = self.begin(stream)?;
        let layouts = layouts(&self.cache);
        let step = self.cache.step(batch);
        record(&self.ended, &on)?;
        let step = step.map_err(|error| step_refused(error, &layouts))?;
        Ok(CudaStep { step, ended: &self.ended, on })
    }
}

impl Drop for CudaCache {
    fn drop(&mut self) {
        self.context.keep();
    }
}

/// A step over a [`CudaCache`].
pub(crate) struct CudaStep<'c> {
    pub(crate) step: flashtile::Step<'c, CudaStore>,
    ended: &'c CudaEvent,
    on: Arc<CudaStream>,
}

impl CudaStep<'_> {
    /// Attends in a layer, after the work that is on the caller's stream, which then waits for the result.
    pub(crate) fn attend<'a>(
        &mut self,
        layer: usize,
        tensors: StepTensors<GpuTensor<'a, Memory>>,
        options: &GpuAttention<'a, Memory>,
        outputs: &mut GpuOutputs<'_, Memory>,
        caller: &CudaStream,
    ) -> PyResult<()> {
        refuse_capture(caller)?;
        let is_other = caller.cu_stream() != self.on.cu_stream();
        if is_other {
            refuse_capture(&self.on)?;
            self.on.join(caller).map_err(failed("order of two streams"))?;
        }
        let done = self.step.attend_with(layer, tensors, options, outputs);
        // Also where it was refused after its rows were written.
        record(self.ended, &self.on)?;
        if is_other {
            wait(caller, self.ended)?;
        }
        done.map_err(refused)
    }
}

/// Refuses a stream that captures a graph, before anything on it spoils the capture.
fn refuse_capture(stream: &CudaStream) -> PyResult<()> {
    match stream.capture_status().map_err(failed("state of the stream"))? {
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
        _ => Err(PyRuntimeError::new_err(
            "the stream captures a CUDA graph, which a KvCache cannot be a part of, as its pages and lengths change: call it outside of the capture, or capture attention_with_cache over a cache of your own",
        )),
    }
}

/// Exceptions of calls of the driver.
fn failed(what: &str) -> impl FnOnce(DriverError) -> PyErr {
    let error = CudaError::driver(what);
    |of| refused(error(of))
}

fn record(event: &CudaEvent, stream: &CudaStream) -> PyResult<()> {
    event.record(stream).map_err(failed("an event of a stream"))
}

fn wait(stream: &CudaStream, event: &CudaEvent) -> PyResult<()> {
    stream.wait(event).map_err(failed("order of two streams"))
}
