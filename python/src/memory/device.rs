//! Memory of a CUDA device, as flashtile reads and writes it.

#![allow(unsafe_code)]

use super::block::{Axes, Kind};
use super::{Memory, Place, Stream, blocks};
use flashtile::cuda::{self, Gpu, GpuMask, GpuTensor, GpuTensorMut, ScalarType, View, ViewMut};
use flashtile::gpu::scalar_type;
use flashtile::tensor::{ViewError, reach};
use flashtile::{Dtype, MaskKind};
use pyo3::prelude::*;
use std::marker::PhantomData;

/// A device and the stream of a call.
#[derive(Clone, Copy)]
pub(crate) struct OnDevice<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) stream: Stream,
}

/// A tensor `[batch, heads, rows, dim]` in device memory that `'a` keeps.
pub(crate) struct DeviceTensor<'a> {
    memory: cuda::Memory,
    pub(crate) dtype: Dtype,
    pub(crate) shape: [usize; 4],
    strides: [usize; 4],
    owner: PhantomData<&'a Memory>,
}

impl DeviceTensor<'_> {
    pub(crate) fn view(&self) -> Result<GpuTensor<'_, cuda::Memory>, ViewError> {
        GpuTensor::new(self.memory.view(), self.shape, self.strides)
    }

    pub(crate) fn view_mut(&mut self) -> Result<GpuTensorMut<'_, cuda::Memory>, ViewError> {
        GpuTensorMut::new(self.memory.view_mut(), self.shape, self.strides)
    }
}

/// A list of f32 in device memory that `'a` keeps.
pub(crate) struct DeviceList<'a> {
    memory: cuda::Memory,
    owner: PhantomData<&'a Memory>,
}

impl DeviceList<'_> {
    pub(crate) fn view(&self) -> View<'_, cuda::Memory> {
        self.memory.view()
    }

    pub(crate) fn view_mut(&mut self) -> ViewMut<'_, cuda::Memory> {
        self.memory.view_mut()
    }
}

/// A mask in device memory that `'a` keeps.
pub(crate) struct DeviceMask<'a> {
    memory: cuda::Memory,
    pub(crate) kind: MaskKind,
    shape: [usize; 4],
    strides: [usize; 4],
    owner: PhantomData<&'a Memory>,
}

impl DeviceMask<'_> {
    pub(crate) fn view(&self) -> Result<GpuMask<'_, cuda::Memory>, ViewError> {
        GpuMask::new(self.kind, self.memory.view(), self.shape, self.strides)
    }
}

impl Memory {
    /// The first `len` elements. They are in one allocation of the device and are readable by work on the stream while their owner lives.
    fn borrow(&self, on: OnDevice<'_>, element: ScalarType, len: usize) -> PyResult<cuda::Memory> {
        self.check_place(Place::Cuda(on.stream.device))?;
        if let Kind::Element(dtype) = self.block.kind
            && !(self.block.ptr as usize).is_multiple_of(dtype.bytes())
        {
            return Err(self.block.refuse(ViewError::Misaligned { dtype }).into());
        }
        // SAFETY: by the invariant of `Memory` the elements that its shape and strides reach, which callers ask for, lie in one allocation
        // of the device, at an address that is a multiple of their size, while their owner lives. Libraries free and reuse device memory in the order of their streams, after this work.
        // Who writes has shown by `check_exclusive` that no other argument of the call has an address in common with it.
        Ok(unsafe { on.gpu.borrow(element, self.block.ptr as u64, len) })
    }

    fn tensor(&self, axes: Axes, on: OnDevice<'_>) -> PyResult<DeviceTensor<'_>> {
        let (dtype, shape, strides) = self.block.logical(axes)?;
        let len = reach(shape, strides).map_err(|error| self.block.refuse(error))?;
        let memory = self.borrow(on, scalar_type(dtype), len)?;
        Ok(DeviceTensor { memory, dtype, shape, strides, owner: PhantomData })
    }

    /// The memory as a tensor that work on the stream reads.
    pub(crate) fn device_tensor(&self, axes: Axes, on: OnDevice<'_>) -> PyResult<DeviceTensor<'_>> {
        let tensor = self.tensor(axes, on)?;
        tensor.view().map_err(|error| self.block.refuse(error))?;
        Ok(tensor)
    }

    /// The memory as a tensor that work on the stream writes, and that has no memory in common with `others`.
    pub(crate) fn device_tensor_mut(
        &mut self,
        axes: Axes,
        others: &[&Self],
        on: OnDevice<'_>,
    ) -> PyResult<DeviceTensor<'_>> {
        self.block.check_exclusive(&blocks(others))?;
        let mut tensor = self.tensor(axes, on)?;
        tensor.view_mut().map_err(|error| self.block.refuse(error))?;
        Ok(tensor)
    }

    /// Memory of a shape, dense and in the order of its axes, as a list of f32 that work on the stream reads.
    pub(crate) fn device_list_of(&self, shape: &[usize], on: OnDevice<'_>) -> PyResult<DeviceList<'_>> {
        self.block.check_order(shape)?;
        self.device_list(on)
    }

    /// Dense memory as a list of f32 that work on the stream reads.
    pub(crate) fn device_list(&self, on: OnDevice<'_>) -> PyResult<DeviceList<'_>> {
        let memory = self.borrow(on, ScalarType::F32, self.block.check_list()?)?;
        Ok(DeviceList { memory, owner: PhantomData })
    }

    /// Dense memory as a list of f32 that work on the stream writes.
    pub(crate) fn device_list_mut(&mut self, others: &[&Self], on: OnDevice<'_>) -> PyResult<DeviceList<'_>> {
        self.block.check_exclusive(&blocks(others))?;
        self.device_list(on)
    }

    /// The memory as a mask of one, two or four axes that work on the stream reads.
    pub(crate) fn device_mask(&self, on: OnDevice<'_>) -> PyResult<DeviceMask<'_>> {
        let (shape, strides) = self.block.mask_axes()?;
        let kind = self.mask_kind();
        let bytes = reach(shape, strides).map(|elements| elements.saturating_mul(kind.bytes()));
        let bytes = bytes.map_err(|error| self.block.refuse(error))?;
        let memory = self.borrow(on, ScalarType::U8, bytes)?;
        let mask = DeviceMask { memory, kind, shape, strides, owner: PhantomData };
        mask.view().map_err(|error| self.block.refuse(error))?;
        Ok(mask)
    }
}
