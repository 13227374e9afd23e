//! Tensors that own device memory, and their way there and back.

#![allow(unsafe_code)]

use super::cudarc::driver::CudaStream;
use super::error::CudaError;
use super::tensor::{DeviceTensor, DeviceTensorMut};
use flashtile_core::dtype::Dtype;
use flashtile_core::tensor::{TensorView, TensorViewMut, ViewError, dense};
use flashtile_kernel::ScalarType;
use flashtile_kernel::cuda::Memory;
use std::sync::Arc;

/// A dense tensor `[batch, heads, rows, dim]` in device memory that it owns. Work on the stream that it was made with sees its contents in
/// order; work on other streams must be ordered with that one by the caller. Its memory is freed when it is dropped, after all work of the device
/// has ended; a graph that has captured its address must not be launched after that.
///
/// ```no_run
/// use flashtile::cuda::{Cuda, DeviceArray, DeviceInputs, DeviceOutputs, Session};
/// use flashtile::{Attention, Dtype, OwnedTensor, ProblemDesc, TensorView};
/// let cuda = Cuda::new(0)?;
/// let stream = cuda.context().new_stream()?;
/// let (q, kv) = (vec![0.1f32; 32 * 128 * 64], vec![0.2f32; 8 * 128 * 64]);
/// let q = TensorView::bhsd(&q, [1, 32, 128, 64])?;
/// let kv = TensorView::bhsd(&kv, [1, 8, 128, 64])?;
/// let desc = Attention::causal().desc(&q, &kv, &kv);
/// let (q, kv) = (DeviceArray::upload(&stream, &q)?, DeviceArray::upload(&stream, &kv)?);
/// let mut out = DeviceArray::zeros(&stream, Dtype::F32, [1, 32, 128, 64])?;
/// let inputs = DeviceInputs::new(q.view(), kv.view(), kv.view());
/// Session::new(&cuda, &stream).run(&desc, &inputs, &mut DeviceOutputs::new(out.view_mut()))?;
/// let mut result = OwnedTensor::zeros(Dtype::F32, [1, 32, 128, 64])?;
/// out.download(&mut result.view_mut())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DeviceArray {
    memory: Memory,
    stream: Arc<CudaStream>,
    dtype: Dtype,
    shape: [usize; 4],
}

impl DeviceArray {
    /// Zeros.
    ///
    /// # Errors
    /// [`CudaError::View`] where the size is not addressable, [`CudaError::Device`].
    pub fn zeros(stream: &Arc<CudaStream>, dtype: Dtype, shape: [usize; 4]) -> Result<Self, CudaError> {
        let mut array = Self::uninit(stream, dtype, shape)?;
        array.memory.fill_zero(stream)?;
        Ok(array)
    }

    /// A copy of a tensor in host memory, of any strides. The tensor has been read when this returns.
    ///
    /// # Errors
    /// [`CudaError::Device`].
    pub fn upload(stream: &Arc<CudaStream>, tensor: &TensorView<'_>) -> Result<Self, CudaError> {
        let mut array = Self::uninit(stream, tensor.dtype(), tensor.shape())?;
        array.refill(tensor)?;
        Ok(array)
    }

    /// Copies a tensor in host memory, of the same dtype and shape and of any strides, over this one, on the stream: work that was
    /// given to it before has read the old elements. Neither allocates device memory nor waits for that work to end. The tensor has
    /// been read when this returns.
    ///
    /// # Errors
    /// [`CudaError::Array`] where dtype or shape differ; [`CudaError::Device`], also while the stream captures a graph, which would
    /// copy from memory that is gone.
    pub fn refill(&mut self, tensor: &TensorView<'_>) -> Result<(), CudaError> {
        self.check((tensor.dtype(), tensor.shape()))?;
        let mut bytes = Vec::with_capacity(self.memory.len());
        rows(tensor.shape()).for_each(|row| bytes.extend_from_slice(tensor.row_bytes(row)));
        Ok(self.memory.write_on(&self.stream, 0, &bytes)?)
    }

    /// Refuses a tensor of another dtype or shape.
    fn check(&self, got: (Dtype, [usize; 4])) -> Result<(), CudaError> {
        let expected = (self.dtype, self.shape);
        if expected == got { Ok(()) } else { Err(CudaError::Array { expected, got }) }
    }

    fn uninit(stream: &Arc<CudaStream>, dtype: Dtype, shape: [usize; 4]) -> Result<Self, CudaError> {
        let elements = shape.into_iter().try_fold(dtype.bytes(), usize::checked_mul);
        let bytes = elements.filter(|&bytes| isize::try_from(bytes).is_ok()).ok_or(ViewError::Overflow)?;
        let memory = Memory::uninit(stream.context(), ScalarType::U8, bytes)?;
        Ok(Self { memory, stream: Arc::clone(stream), dtype, shape })
    }

    /// `[batch, heads, rows, dim]`.
    #[must_use]
    pub const fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// The dtype of the elements.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The tensor, to be read.
    #[must_use]
    pub fn view(&self) -> DeviceTensor<'_> {
        // SAFETY: the memory has the elements, and is freed when all work of the device has ended.
        let view = unsafe {
            DeviceTensor::from_raw_parts(self.dtype, self.memory.address(), self.shape, dense(self.shape))
        };
        view.unwrap_or_else(|_| unreachable!("a dense tensor of a checked size"))
    }

    /// The tensor, to be written.
    #[must_use]
    pub fn view_mut(&mut self) -> DeviceTensorMut<'_> {
        let (at, shape) = (self.memory.address(), self.shape);
        // SAFETY: as above; nothing else refers to the memory while this does.
        let view = unsafe { DeviceTensorMut::from_raw_parts(self.dtype, at, shape, dense(shape)) };
        view.unwrap_or_else(|_| unreachable!("a dense tensor of a checked size"))
    }

    /// Copies the elements to a tensor of the same dtype and shape, of any strides, after all work of the device has ended.
    ///
    /// # Errors
    /// [`CudaError::Array`] where dtype or shape differ; [`CudaError::Device`], also of work that failed.
    pub fn download(&self, tensor: &mut TensorViewMut<'_>) -> Result<(), CudaError> {
        self.check((tensor.dtype(), tensor.shape()))?;
        let bytes = self.read()?;
        let row_bytes = self.shape[3] * self.dtype.bytes();
        for (row, bytes) in rows(self.shape).zip(bytes.chunks_exact(row_bytes.max(1))) {
            tensor.row_bytes_mut(row).copy_from_slice(bytes);
        }
        Ok(())
    }

    /// The bytes, after all work of the device has ended.
    fn read(&self) -> Result<Vec<u8>, CudaError> {
        let mut bytes = vec![0u8; self.memory.len()];
        // Work may have been given to other streams too.
        self.stream.context().synchronize().map_err(CudaError::driver("work of the device"))?;
        self.memory.read_after(0, &mut bytes)?;
        Ok(bytes)
    }
}

/// Batch entry, head and row of every row, in dense order.
fn rows([batch, heads, rows, _]: [usize; 4]) -> impl Iterator<Item = [usize; 3]> {
    (0..batch).flat_map(move |b| (0..heads).flat_map(move |h| (0..rows).map(move |row| [b, h, row])))
}
