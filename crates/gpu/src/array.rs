//! Tensors that own device memory, and their way there and back.

use crate::codecs::scalar_type;
use crate::error::SessionError;
use crate::tensors::{GpuTensor, GpuTensorMut};
use flashtile_core::dtype::Dtype;
use flashtile_core::tensor::{TensorView, TensorViewMut, ViewError, dense};
use flashtile_kernel::{DeviceMemory, HostAccess};

/// A dense tensor `[batch, heads, rows, dim]` that owns its memory on a device. Calls name the device, [`Session::device`] for one: on CUDA that
/// is a device with a stream, and calls and runs on one stream see the contents in order. The caller orders work of other streams.
///
/// [`Session::device`]: crate::session::Session::device
///
/// ```
/// use flashtile_core::{owned::OwnedTensor, tensor::TensorView};
/// use flashtile_gpu::array::GpuArray;
/// use flashtile_kernel::simulator::Simulator;
/// let (device, numbers) = (Simulator::new(), [1.0f32, 2.0, 3.0, 4.0]);
/// let array = GpuArray::upload(&device, &TensorView::bhsd(&numbers, [1, 1, 2, 2])?)?;
/// let mut back = OwnedTensor::zeros(array.dtype(), array.shape())?;
/// array.download(&device, &mut back.view_mut())?;
/// assert_eq!(back.view().get([0, 0, 1, 0]), 3.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct GpuArray<M> {
    memory: M,
    dtype: Dtype,
    shape: [usize; 4],
}

impl<M: DeviceMemory> GpuArray<M> {
    /// Zeros.
    ///
    /// # Errors
    /// [`SessionError::View`] where the size is not addressable, and the errors of the device.
    pub fn zeros<D: HostAccess<Memory = M>>(
        device: &D,
        dtype: Dtype,
        shape: [usize; 4],
    ) -> Result<Self, SessionError<D::Error>> {
        let memory = device.zeroed(scalar_type(dtype), elements(dtype, shape)?);
        Ok(Self { memory: memory.map_err(SessionError::device)?, dtype, shape })
    }

    /// Memory whose elements may be any, until something writes them.
    ///
    /// # Errors
    /// The errors of [`GpuArray::zeros`].
    pub fn uninit<D: HostAccess<Memory = M>>(
        device: &D,
        dtype: Dtype,
        shape: [usize; 4],
    ) -> Result<Self, SessionError<D::Error>> {
        let memory = device.uninit(scalar_type(dtype), elements(dtype, shape)?);
        Ok(Self { memory: memory.map_err(SessionError::device)?, dtype, shape })
    }

    /// A copy of a tensor in host memory, of any strides. The tensor has been read when this returns.
    ///
    /// # Errors
    /// The error that the device reports.
    pub fn upload<D: HostAccess<Memory = M>>(
        device: &D,
        tensor: &TensorView<'_>,
    ) -> Result<Self, SessionError<D::Error>> {
        let mut array = Self::uninit(device, tensor.dtype(), tensor.shape())?;
        array.refill(device, tensor)?;
        Ok(array)
    }

    /// Copies a tensor in host memory, of the same dtype and shape and of any strides, over this one: work that was launched before has
    /// read the old elements. Neither allocates device memory nor waits for that work to end. The tensor has been read when this returns.
    ///
    /// # Errors
    /// [`SessionError::Array`] where dtype or shape differ, and the errors of the device, also while it
    /// captures a graph, which would copy from memory that is gone.
    pub fn refill<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
        tensor: &TensorView<'_>,
    ) -> Result<(), SessionError<D::Error>> {
        self.check((tensor.dtype(), tensor.shape()))?;
        let mut bytes = Vec::with_capacity(self.memory.view().len() * self.dtype.bytes());
        rows(self.shape).for_each(|row| bytes.extend_from_slice(tensor.row_bytes(row)));
        device.write(&mut self.memory, 0, &bytes).map_err(SessionError::device)
    }

    /// Copies the elements to a tensor of the same dtype and shape, of any strides, after all work of the device before has ended.
    ///
    /// # Errors
    /// [`SessionError::Array`] where dtype or shape differ, and the errors of the device, also of earlier
    /// work that failed.
    pub fn download<D: HostAccess<Memory = M>>(
        &self,
        device: &D,
        tensor: &mut TensorViewMut<'_>,
    ) -> Result<(), SessionError<D::Error>> {
        self.check((tensor.dtype(), tensor.shape()))?;
        let mut bytes = vec![0u8; self.memory.view().len() * self.dtype.bytes()];
        device.read(&self.memory, 0, &mut bytes).map_err(SessionError::device)?;
        let row_bytes = self.shape[3] * self.dtype.bytes();
        for (row, bytes) in rows(self.shape).zip(bytes.chunks_exact(row_bytes.max(1))) {
            tensor.row_bytes_mut(row).copy_from_slice(bytes);
        }
        Ok(())
    }

    /// Refuses a tensor of another dtype or shape.
    fn check<E>(&self, got: (Dtype, [usize; 4])) -> Result<(), SessionError<E>> {
        let expected = (self.dtype, self.shape);
        if expected == got { Ok(()) } else { Err(SessionError::Array { expected, got }) }
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
    pub fn view(&self) -> GpuTensor<'_, M> {
        GpuTensor { view: self.memory.view(), shape: self.shape, strides: dense(self.shape) }
    }

    /// The tensor, to be written.
    pub fn view_mut(&mut self) -> GpuTensorMut<'_, M> {
        GpuTensorMut { view: self.memory.view_mut(), shape: self.shape, strides: dense(self.shape) }
    }
}

/// The elements of a dense tensor whose bytes are addressable.
fn elements(dtype: Dtype, shape: [usize; 4]) -> Result<usize, ViewError> {
    let bytes = shape.into_iter().try_fold(dtype.bytes(), usize::checked_mul);
    let bytes = bytes.filter(|&bytes| isize::try_from(bytes).is_ok()).ok_or(ViewError::Overflow)?;
    Ok(bytes / dtype.bytes())
}

/// Batch entry, head and row of every row, in dense order.
pub(crate) fn rows([batch, heads, rows, _]: [usize; 4]) -> impl Iterator<Item = [usize; 3]> {
    (0..batch).flat_map(move |b| (0..heads).flat_map(move |h| (0..rows).map(move |row| [b, h, row])))
}
