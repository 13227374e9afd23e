//! Device memory that belongs to no stream.

#![allow(unsafe_code)]

use super::cudarc::driver::sys::CUstreamCaptureStatus;
use super::cudarc::driver::{CudaContext, CudaStream, result};
use super::error::{CudaError, DeviceError};
use std::sync::Arc;

/// Device memory that is freed when the device has ended all work: on whatever stream it was used, and whether that still exists.
#[derive(Debug)]
pub(super) struct Buffer {
    context: Arc<CudaContext>,
    at: u64,
    bytes: usize,
}

impl Buffer {
    /// Memory of at least this many bytes: `old`, where that is enough, or new. What a stream did with `old` before is on it
    /// before whatever follows, so that it has to be the same stream.
    pub(super) fn recycled(old: Option<Self>, stream: &CudaStream, bytes: usize) -> Result<Self, CudaError> {
        if let Some(old) = old.filter(|old| old.bytes >= bytes) {
            return Ok(old);
        }
        // Sizes that grow from step to step do not each get memory of their own.
        Self::exact(stream, bytes.max(256).next_power_of_two())
    }

    /// New memory of at least this many bytes, and of no more than one driver's unit beyond.
    pub(super) fn exact(stream: &CudaStream, bytes: usize) -> Result<Self, CudaError> {
        let bytes = bytes.max(1);
        let context = Arc::clone(stream.context());
        let failed = || CudaError::driver(format!("{bytes} bytes of device memory"));
        context.bind_to_thread().map_err(failed())?;
        // SAFETY: the context is the thread's. What is read of the memory is written before.
        let at = unsafe { result::malloc_sync(bytes) }.map_err(failed())?;
        Ok(Self { context, at, bytes })
    }

    /// The address, a multiple of 256.
    pub(super) const fn at(&self) -> u64 {
        self.at
    }

    /// The size.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies bytes to the beginning, on the stream.
    ///
    /// # Safety
    /// Nothing but earlier and later work on the stream accesses the memory.
    pub(super) unsafe fn write(&self, stream: &CudaStream, bytes: &[u8]) -> Result<(), CudaError> {
        let failed = || CudaError::driver("copy to the device");
        assert!(bytes.len() <= self.bytes, "{} bytes into {}", bytes.len(), self.bytes);
        if bytes.is_empty() {
            return Ok(());
        }
        self.context.bind_to_thread().map_err(failed())?;
        // A graph would copy again from memory that is gone by then.
        let status = stream.capture_status().map_err(failed())?;
        if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            let error = "the stream captures a graph, which cannot hold it".to_owned();
            return Err(DeviceError::Driver { what: "copy to the device".to_owned(), error }.into());
        }
        // SAFETY: the memory has room, as asserted, and the rest is the caller's; the driver has read pageable memory when it returns.
        unsafe { result::memcpy_htod_async(self.at, bytes, stream.cu_stream()) }.map_err(failed())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // A process that ends may have no driver any longer, which frees the memory itself.
        if self.context.bind_to_thread().is_ok() {
            // An error here belongs to earlier work, and is reported to whoever waits for that work.
            let _ = self.context.synchronize();
            // SAFETY: the memory is this buffer's, and no work is left that accesses it.
            let _ = unsafe { result::free_sync(self.at) };
        }
    }
}
