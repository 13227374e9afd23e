//! Views of memory that a value of the library owns, as tensors of a run.

#![allow(unsafe_code)]

use super::error::CudaError;
use super::tensor::{
    DeviceCodes, DeviceKv, DeviceList, DeviceListMut, DeviceMask, DeviceTables, DeviceTensor, DeviceTensorMut,
};
use flashtile_core::block_tables::BlockTables;
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::tensor::ViewError;
use flashtile_gpu::tensors::{GpuKv, GpuMask, GpuTables, GpuTensor, GpuTensorMut};
use flashtile_kernel::cuda::Memory;
use flashtile_kernel::{ScalarType, View, ViewMut};

/// The dtype of elements. Views of tensors have no others.
fn dtype(element: ScalarType) -> Result<Dtype, CudaError> {
    match element {
        ScalarType::F32 => Ok(Dtype::F32),
        ScalarType::F16 => Ok(Dtype::F16),
        ScalarType::Bf16 => Ok(Dtype::BF16),
        other => Err(CudaError::Contract { what: format!("a tensor of {other}, expected f32, f16 or bf16") }),
    }
}

pub(super) fn tensor<'a>(of: &GpuTensor<'a, Memory>) -> Result<DeviceTensor<'a>, CudaError> {
    let (dtype, at) = (dtype(of.view.element())?, of.view.memory().address());
    // SAFETY: the memory has the elements that shape and strides reach, and is borrowed meanwhile.
    Ok(unsafe { DeviceTensor::from_raw_parts(dtype, at, of.shape, of.strides)? })
}

pub(super) fn tensor_mut<'a>(of: &'a mut GpuTensorMut<'_, Memory>) -> Result<DeviceTensorMut<'a>, CudaError> {
    let (dtype, at) = (dtype(of.view.element())?, of.view.memory().address());
    // SAFETY: as above; the memory is borrowed exclusively.
    Ok(unsafe { DeviceTensorMut::from_raw_parts(dtype, at, of.shape, of.strides)? })
}

/// Keys or values. Bytes of codes are rows of their codec, or zeros.
pub(super) fn kv<'a>(of: &GpuKv<'a, Memory>) -> Result<DeviceKv<'a>, CudaError> {
    let (at, [entry, head, row]) = (of.bytes.memory().address(), of.strides);
    if let Some(dtype) = of.codec.dtype() {
        let strides = [entry, head, row].map(|bytes| bytes / dtype.bytes());
        let strides = [strides[0], strides[1], strides[2], 1];
        // SAFETY: the memory has the elements that shape and strides reach, and is borrowed meanwhile.
        return Ok(unsafe { DeviceTensor::from_raw_parts(dtype, at, of.shape, strides)? }.into());
    }
    // SAFETY: as above, with the bytes of pages.
    let codes = unsafe { DeviceCodes::from_raw_parts(of.codec, at, of.shape, [entry, head])? };
    Ok(match of.means {
        None => codes.into(),
        Some(means) => codes.centered(list(means)?)?.into(),
    })
}

pub(super) fn mask<'a>(of: &GpuMask<'a, Memory>) -> Result<DeviceMask<'a>, ViewError> {
    let (at, shape, strides) = (of.bytes.memory().address(), of.shape, of.strides);
    match of.kind {
        // SAFETY: the memory has the elements that shape and strides reach, and is borrowed meanwhile.
        MaskKind::Bool => unsafe { DeviceMask::bool(at, shape, strides) },
        // SAFETY: as above.
        MaskKind::Additive(dtype) => unsafe { DeviceMask::additive_strided(dtype, at, shape, strides) },
    }
}

pub(super) fn list(of: View<'_, Memory>) -> Result<DeviceList<'_>, ViewError> {
    // SAFETY: the memory has the list, and is borrowed meanwhile.
    unsafe { DeviceList::from_raw_parts(of.memory().address(), of.len()) }
}

pub(super) fn list_mut<'a>(of: &'a mut ViewMut<'_, Memory>) -> Result<DeviceListMut<'a>, ViewError> {
    // SAFETY: as above; the memory is borrowed exclusively.
    unsafe { DeviceListMut::from_raw_parts(of.memory().address(), of.len()) }
}

/// A block table, which was checked for the plan that it is used with.
pub(super) fn tables<'a>(
    of: &GpuTables<'a, Memory>,
    tables: &BlockTables,
) -> Result<DeviceTables<'a>, ViewError> {
    assert!(of.table.len() >= tables.table.len(), "{} entries of {}", of.table.len(), tables.table.len());
    // SAFETY: the memory has the entries, which the caller has checked.
    unsafe { DeviceTables::from_raw_parts(of.table.memory().address(), tables) }
}
