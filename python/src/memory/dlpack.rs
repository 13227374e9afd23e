//! DLPack: tensors of any library.

#![allow(unsafe_code)]

use super::{Kind, Stream, wrong_dtype};
use flashtile::Dtype;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};
use std::ffi::c_void;

pub(super) const CPU: i32 = 1;
pub(super) const CUDA: i32 = 2;
pub(super) const CUDA_HOST: i32 = 3;

/// The number by which `__dlpack__` is told a stream: the default stream, which is 0 to the driver, is 1.
pub(super) fn stream(stream: Stream) -> usize {
    stream.handle.max(1)
}

pub(super) fn device_name(device: i32, id: i32) -> String {
    let name = match device {
        CPU | CUDA_HOST => return "cpu".to_owned(),
        CUDA => "cuda",
        4 => "opencl",
        7 => "vulkan",
        8 => "metal",
        10 => "rocm",
        13 => "cuda_managed",
        14 => "oneapi",
        _ => return format!("a device of DLPack type {device}"),
    };
    format!("{name}:{id}")
}

/// `DLTensor` of DLPack.
#[repr(C)]
pub(super) struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned` of DLPack.
#[repr(C)]
struct DlVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: DlTensor,
}

impl DlTensor {
    pub(super) fn kind(&self, name: &str) -> PyResult<Kind> {
        match (self.code, self.bits, self.lanes) {
            (2, 32, 1) => Ok(Kind::Element(Dtype::F32)),
            (2, 16, 1) => Ok(Kind::Element(Dtype::F16)),
            (4, 16, 1) => Ok(Kind::Element(Dtype::BF16)),
            (6, 8, 1) => Ok(Kind::Bool),
            (code, bits, lanes) => {
                let base = match code {
                    0 => "int",
                    1 => "uint",
                    2 => "float",
                    4 => "bfloat",
                    5 => "complex",
                    6 => "bool",
                    _ => "an unknown type of bits ",
                };
                let lanes = if lanes == 1 { String::new() } else { format!("x{lanes}") };
                Err(wrong_dtype(name, &format!("{base}{bits}{lanes}")))
            }
        }
    }

    /// Its type and number.
    pub(super) const fn device(&self) -> (i32, i32) {
        (self.device_type, self.device_id)
    }

    /// The address of the first element.
    pub(super) fn start(&self) -> PyResult<*mut u8> {
        Ok(self.data.cast::<u8>().wrapping_add(usize::try_from(self.byte_offset)?))
    }

    fn rank(&self) -> usize {
        usize::try_from(self.ndim).unwrap_or(0)
    }

    pub(super) fn shape(&self, name: &str) -> PyResult<Vec<usize>> {
        let sizes = match self.rank() {
            0 => &[],
            // SAFETY: DLPack promises `ndim` sizes while the capsule lives, which this borrow does not outlive ([`tensor`]).
            rank => unsafe { std::slice::from_raw_parts(self.shape, rank) },
        };
        let wrong = |_| PyBufferError::new_err(format!("{name} has shape {sizes:?}"));
        sizes.iter().map(|&n| usize::try_from(n)).collect::<Result<_, _>>().map_err(wrong)
    }

    /// `None` is dense.
    pub(super) fn strides(&self) -> Option<Vec<isize>> {
        if self.strides.is_null() || self.rank() == 0 {
            return None;
        }
        // SAFETY: as for `shape`: strides that are not null are `ndim` numbers.
        let strides = unsafe { std::slice::from_raw_parts(self.strides, self.rank()) };
        Some(strides.iter().map(|&stride| stride as isize).collect())
    }
}

/// The tensor in a capsule, and whether it may not be written. The capsule is not renamed: it stays the owner, and frees the tensor when
/// it is dropped.
pub(super) fn tensor<'a>(capsule: &'a Bound<'_, PyCapsule>) -> PyResult<(&'a DlTensor, bool)> {
    let versioned = c"dltensor_versioned";
    if capsule.is_valid_checked(Some(versioned)) {
        let pointer = capsule.pointer_checked(Some(versioned))?.cast::<DlVersioned>();
        // SAFETY: a capsule of this name holds a pointer to `DLManagedTensorVersioned`, whose first field is the version in every version.
        // It is valid until the capsule's destructor, hence while the capsule is borrowed.
        let major = unsafe { (*pointer.as_ptr()).major };
        if major != 1 {
            return Err(PyBufferError::new_err(format!("DLPack has version {major}, expected 1")));
        }
        // SAFETY: the same, and version 1 has the fields of `DlVersioned`.
        let of = unsafe { pointer.as_ref() };
        return Ok((&of.tensor, of.flags & 1 != 0));
    }
    let pointer = capsule.pointer_checked(Some(c"dltensor"))?.cast::<DlTensor>();
    // SAFETY: a capsule of this name holds a pointer to `DLManagedTensor`, whose first field is a `DLTensor`; valid as above.
    Ok((unsafe { pointer.as_ref() }, false))
}
