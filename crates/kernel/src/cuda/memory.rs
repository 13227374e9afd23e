//! Memory of a device.

#![allow(unsafe_code)]

use super::error::Error;
use crate::device::{DeviceMemory, Span, View, ViewMut};
use crate::scalar::{Scalar, ScalarType};
use cudarc::driver::sys::CUstreamCaptureStatus;
use cudarc::driver::{CudaContext, CudaStream, result};
use std::sync::Arc;

/// Memory of a device: scalars of one type, allocated by [`Gpu::buffer_from`](super::Gpu::buffer_from),
/// [`Gpu::uninit`](super::Gpu::uninit) or [`Memory::uninit`], or borrowed by [`Gpu::borrow`](super::Gpu::borrow).
///
/// Allocated memory starts at a multiple of 256 bytes. It belongs to no stream: it is freed when the value is dropped and all work of the
/// device has ended, on whatever stream it was used.
#[derive(Debug)]
pub struct Memory {
    context: Arc<CudaContext>,
    at: u64,
    element: ScalarType,
    len: usize,
    owned: bool,
}

impl Memory {
    /// Memory of a context's device for `len` uninitialised elements: reading them gives any values.
    ///
    /// # Errors
    /// [`Error::Driver`], also where there is not enough.
    pub fn uninit(context: &Arc<CudaContext>, element: ScalarType, len: usize) -> Result<Self, Error> {
        let bytes = len.saturating_mul(element.bytes());
        let failed = || Error::driver(format!("{bytes} bytes of memory"));
        context.bind_to_thread().map_err(failed())?;
        // Every memory has an address, also one without elements.
        // SAFETY: the context is current; the memory is freed once, by `drop`.
        let at = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(failed())?;
        Ok(Self { context: context.clone(), at, element, len, owned: true })
    }

    /// # Safety
    /// As [`Gpu::borrow`](super::Gpu::borrow).
    pub(super) unsafe fn borrow(
        context: &Arc<CudaContext>,
        element: ScalarType,
        at: u64,
        len: usize,
    ) -> Self {
        Self { context: context.clone(), at, element, len, owned: false }
    }

    pub(super) fn is_of(&self, context: &CudaContext) -> bool {
        self.context.cu_ctx() == context.cu_ctx()
    }

    /// Its address on the device.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.at
    }

    /// The type of its elements.
    #[must_use]
    pub fn element(&self) -> ScalarType {
        self.element
    }

    /// Its elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of its elements.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len * self.element.bytes()
    }

    /// All of it, to be read.
    #[must_use]
    pub fn view(&self) -> View<'_, Self> {
        View::new(self, self.span())
    }

    /// All of it, to be read and written.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_, Self> {
        let span = self.span();
        ViewMut::new(self, span)
    }

    fn span(&self) -> Span {
        Span { element: self.element, offset: 0, len: self.len }
    }

    /// The elements, once all work of the device has ended.
    ///
    /// # Errors
    /// [`Error::Element`], or [`Error::Driver`], also of work that failed.
    pub fn to_vec<T: Scalar>(&self) -> Result<Vec<T>, Error> {
        self.check::<T>()?;
        let failed = || Error::driver("copy from the device");
        let mut bytes = vec![0u8; self.bytes()];
        self.context.synchronize().map_err(Error::driver("work of the device"))?;
        if !bytes.is_empty() {
            // SAFETY: the memory has `bytes()` bytes, and no work is left that writes them.
            unsafe { result::memcpy_dtoh_sync(&mut bytes, self.at) }.map_err(failed())?;
        }
        let value = |bytes: &[u8]| {
            let mut raw = [0; 8];
            raw[..bytes.len()].copy_from_slice(bytes);
            T::from_raw(u64::from_le_bytes(raw))
        };
        Ok(bytes.chunks_exact(T::TYPE.bytes()).map(value).collect())
    }

    /// Writes all elements, once all work of the device has ended; later launches see them.
    ///
    /// # Errors
    /// [`Error::Element`], [`Error::Length`] or [`Error::Driver`], also of work that failed.
    pub fn copy_from<T: Scalar>(&mut self, values: &[T]) -> Result<(), Error> {
        self.check::<T>()?;
        if values.len() != self.len {
            return Err(Error::Length { expected: values.len(), found: self.len });
        }
        let failed = || Error::driver("copy to the device");
        self.context.synchronize().map_err(Error::driver("work of the device"))?;
        if !values.is_empty() {
            // SAFETY: the memory has the bytes of `len` elements, as `values` has, and no work is left that accesses them.
            unsafe { result::memcpy_htod_sync(self.at, bytes_of(values)) }.map_err(failed())?;
            // The driver may still be moving them, on a stream that others do not wait for.
            self.context.synchronize().map_err(failed())?;
        }
        Ok(())
    }

    /// Fills the memory with zeros, on a stream: whoever launches work over the memory does so on the same.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn fill_zero(&mut self, stream: &CudaStream) -> Result<(), Error> {
        let failed = || Error::driver("zeros on the device");
        self.context.bind_to_thread().map_err(failed())?;
        if self.bytes() == 0 {
            return Ok(());
        }
        // SAFETY: the memory has `bytes()` bytes, and work that accesses them follows on the stream.
        unsafe { result::memset_d8_async(self.at, 0, self.bytes(), stream.cu_stream()) }.map_err(failed())
    }

    /// Copies bytes to those from byte `at` on, on a stream: whoever launches work over the memory does so on the same. The bytes have
    /// been read when this returns.
    ///
    /// # Errors
    /// [`Error::Driver`], also where the stream captures a graph.
    ///
    /// # Panics
    /// If the bytes do not lie inside.
    pub fn write_on(&mut self, stream: &CudaStream, at: usize, bytes: &[u8]) -> Result<(), Error> {
        self.assert_inside(at, bytes.len());
        let failed = || Error::driver("copy to the device");
        self.context.bind_to_thread().map_err(failed())?;
        if bytes.is_empty() {
            return Ok(());
        }
        // A graph would copy again from memory that is gone by then.
        if stream.capture_status().map_err(failed())? != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
        {
            let error = "the stream captures a graph, which cannot hold it".to_owned();
            return Err(Error::Driver { what: "copy to the device".to_owned(), error });
        }
        // SAFETY: the bytes are inside, as asserted; the driver has read pageable memory when it returns.
        unsafe { result::memcpy_htod_async(self.at + at as u64, bytes, stream.cu_stream()) }.map_err(failed())
    }

    /// Copies bytes from byte `at` on, when the work that writes them has ended.
    ///
    /// # Errors
    /// [`Error::Driver`], also of work that failed.
    ///
    /// # Panics
    /// If the bytes do not lie inside.
    pub fn read_after(&self, at: usize, bytes: &mut [u8]) -> Result<(), Error> {
        self.assert_inside(at, bytes.len());
        let failed = || Error::driver("copy from the device");
        self.context.bind_to_thread().map_err(failed())?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the bytes are inside, as asserted.
        unsafe { result::memcpy_dtoh_sync(bytes, self.at + at as u64) }.map_err(failed())
    }

    fn assert_inside(&self, at: usize, count: usize) {
        let end = at.checked_add(count);
        assert!(end.is_some_and(|end| end <= self.bytes()), "{count} bytes at {at} of {}", self.bytes());
    }

    fn check<T: Scalar>(&self) -> Result<(), Error> {
        if T::TYPE == self.element {
            return Ok(());
        }
        Err(Error::Element { expected: T::TYPE, found: self.element })
    }
}

impl DeviceMemory for Memory {
    fn view(&self) -> View<'_, Self> {
        self.view()
    }

    fn view_mut(&mut self) -> ViewMut<'_, Self> {
        self.view_mut()
    }

    fn address(&self) -> u64 {
        self.at
    }
}

/// The bytes of scalars.
fn bytes_of<T: Scalar>(values: &[T]) -> &[u8] {
    // SAFETY: scalars are sealed: integers, floats and bool, which have no padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // A process that ends may have no driver any longer, which frees the memory itself.
        if self.owned && self.context.bind_to_thread().is_ok() {
            // An error here belongs to earlier work, and is reported to whoever waits for that work.
            let _ = self.context.synchronize();
            // SAFETY: allocated by `uninit`; no work is left that accesses it.
            let _ = unsafe { result::free_sync(self.at) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn bytes_are_little_endian<T: Scalar>() {
        let values = [1, 0, 0x0123_4567_89ab_cdef].map(T::from_raw);
        let raw = values.iter().flat_map(|x| x.to_raw().to_le_bytes().into_iter().take(T::TYPE.bytes()));
        assert_eq!(bytes_of(&values), raw.collect::<Vec<u8>>());
        assert!(bytes_of::<T>(&[]).is_empty());
    }

    #[test]
    fn scalars_are_their_bytes() {
        bytes_are_little_endian::<bool>();
        bytes_are_little_endian::<u8>();
        bytes_are_little_endian::<i8>();
        bytes_are_little_endian::<u16>();
        bytes_are_little_endian::<i16>();
        bytes_are_little_endian::<u32>();
        bytes_are_little_endian::<i32>();
        bytes_are_little_endian::<u64>();
        bytes_are_little_endian::<i64>();
        bytes_are_little_endian::<usize>();
        bytes_are_little_endian::<f32>();
        bytes_are_little_endian::<f16>();
        bytes_are_little_endian::<bf16>();
    }
}
