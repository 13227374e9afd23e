//! Memory of a CUDA device, as flashtile reads and writes it.

#![allow(unsafe_code)]

use super::block::{Axes, Kind};
use super::{Memory, Place, Stream, blocks};
use flashtile::cuda::{DeviceList, DeviceListMut, DeviceMask, DeviceTensor, DeviceTensorMut};
use flashtile::{Dtype, MaskKind};
use pyo3::prelude::*;

/// A tensor of a device that is read.
pub(crate) struct DeviceView<'a> {
    pub(crate) tensor: DeviceTensor<'a>,
    pub(crate) dtype: Dtype,
    /// `[batch, heads, rows, dim]`
    pub(crate) shape: [usize; 4],
}

impl Memory {
    /// The memory as a tensor that work on the stream reads.
    pub(crate) fn device_view(&self, axes: Axes, stream: Stream) -> PyResult<DeviceView<'_>> {
        let (dtype, shape, strides) = self.block.logical(axes)?;
        self.check_place(Place::Cuda(stream.device))?;
        // SAFETY: by the invariant the elements lie in one allocation of the device and are readable by work on the stream while their
        // owner lives. Libraries free and reuse device memory in the order of their streams, after this work.
        let tensor = unsafe { DeviceTensor::from_raw_parts(dtype, self.block.ptr as u64, shape, strides) };
        Ok(DeviceView { tensor: tensor.map_err(|error| self.block.refuse(error))?, dtype, shape })
    }

    /// The memory as a tensor that work on the stream writes, and that has no memory in common with `others`.
    pub(crate) fn device_view_mut(
        &mut self,
        axes: Axes,
        others: &[&Self],
        stream: Stream,
    ) -> PyResult<DeviceTensorMut<'_>> {
        let (dtype, shape, strides) = self.block.logical(axes)?;
        self.check_place(Place::Cuda(stream.device))?;
        self.block.check_exclusive(&blocks(others))?;
        // SAFETY: as for `device_view`; the memory is not read-only, and `check_exclusive` showed that no other argument of the call has
        // an address in common with it. `self` is borrowed exclusively.
        unsafe { DeviceTensorMut::from_raw_parts(dtype, self.block.ptr as u64, shape, strides) }
            .map_err(|error| self.block.refuse(error).into())
    }

    /// Dense memory as a list of f32 that work on the stream reads.
    pub(crate) fn device_list(&self, stream: Stream) -> PyResult<DeviceList<'_>> {
        self.check_place(Place::Cuda(stream.device))?;
        let count = self.block.check_list()?;
        // SAFETY: the shape reaches `count` elements, one after another; otherwise as for `device_view`.
        unsafe { DeviceList::from_raw_parts(self.block.ptr as u64, count) }
            .map_err(|error| self.block.refuse(error).into())
    }

    /// Dense memory as a list of f32 that work on the stream writes.
    pub(crate) fn device_list_mut(
        &mut self,
        others: &[&Self],
        stream: Stream,
    ) -> PyResult<DeviceListMut<'_>> {
        self.check_place(Place::Cuda(stream.device))?;
        self.block.check_exclusive(&blocks(others))?;
        let count = self.block.check_list()?;
        // SAFETY: as for `device_list`, and exclusive as for `device_view_mut`.
        unsafe { DeviceListMut::from_raw_parts(self.block.ptr as u64, count) }
            .map_err(|error| self.block.refuse(error).into())
    }

    /// The memory as a mask of two or four axes that work on the stream reads.
    pub(crate) fn device_mask(&self, stream: Stream) -> PyResult<(DeviceMask<'_>, MaskKind)> {
        self.check_place(Place::Cuda(stream.device))?;
        let (shape, strides) = self.block.mask_axes()?;
        let at = self.block.ptr as u64;
        let (mask, kind) = match self.block.kind {
            // SAFETY: as for `device_view`.
            Kind::Bool => (unsafe { DeviceMask::bool(at, shape, strides) }, MaskKind::Bool),
            Kind::Element(dtype) => {
                // SAFETY: as for `device_view`.
                let mask = unsafe { DeviceMask::additive_strided(dtype, at, shape, strides) };
                (mask, MaskKind::Additive(dtype))
            }
        };
        Ok((mask.map_err(|error| self.block.refuse(error))?, kind))
    }
}
