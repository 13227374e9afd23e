//! DLPack: tensors of any library.

#![allow(unsafe_code)]

use super::block::{Described, Kind, MAX_RANK, Refusal, wrong_dtype};
use flashtile::Dtype;
use std::ffi::c_void;
use std::ptr::NonNull;

pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;
pub(crate) const CUDA_HOST: i32 = 3;

pub(crate) fn device_name(device: i32, id: i32) -> String {
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
#[derive(Debug)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device_type: i32,
    pub(crate) device_id: i32,
    pub(crate) ndim: i32,
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
    pub(crate) shape: *const i64,
    pub(crate) strides: *const i64,
    pub(crate) byte_offset: u64,
}

/// `DLManagedTensorVersioned` of DLPack.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct DlVersioned {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) context: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut Self)>,
    pub(crate) flags: u64,
    pub(crate) tensor: DlTensor,
}

/// The pointer in a capsule, by the capsule's name.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Managed {
    /// `dltensor`: a `DLManagedTensor`, whose first field is its `DLTensor`.
    Plain(NonNull<DlTensor>),
    /// `dltensor_versioned`.
    Versioned(NonNull<DlVersioned>),
}

impl Managed {
    /// The tensor, and whether it may not be written.
    ///
    /// # Safety
    /// - The pointer is valid for reads while `'a` lasts, and nobody writes there; of a versioned tensor that is not of version 1, its first
    ///   eight bytes alone.
    pub(crate) unsafe fn tensor<'a>(self) -> Result<(&'a DlTensor, bool), Refusal> {
        match self {
            // SAFETY: the caller's contract.
            Self::Plain(tensor) => Ok((unsafe { tensor.as_ref() }, false)),
            Self::Versioned(of) => {
                // SAFETY: the caller's contract; the version is the first field in every version.
                let major = unsafe { (*of.as_ptr()).major };
                if major != 1 {
                    return Err(Refusal::Buffer(format!("DLPack has version {major}, expected 1")));
                }
                // SAFETY: the caller's contract; version 1 has the fields of `DlVersioned`.
                let of = unsafe { of.as_ref() };
                Ok((&of.tensor, of.flags & 1 != 0))
            }
        }
    }
}

impl DlTensor {
    /// Its type and number.
    pub(crate) const fn device(&self) -> (i32, i32) {
        (self.device_type, self.device_id)
    }

    /// The memory of the argument with this name.
    ///
    /// # Safety
    /// `shape` and `strides` are null, or valid for reads of `ndim` numbers.
    pub(crate) unsafe fn described(&self, name: &str, readonly: bool) -> Result<Described, Refusal> {
        let rank = usize::try_from(self.ndim).ok().filter(|&rank| rank <= MAX_RANK).ok_or_else(|| {
            Refusal::Buffer(format!("{name} has {} axes, expected 0 to {MAX_RANK}", self.ndim))
        })?;
        // SAFETY: the caller's contract.
        let (sizes, strides) = unsafe { (numbers(self.shape, rank), numbers(self.strides, rank)) };
        let sizes = sizes.ok_or_else(|| Refusal::Buffer(format!("{name} has {rank} axes, and no shape")))?;
        let wrong = |_| Refusal::Buffer(format!("{name} has shape {sizes:?}"));
        let shape = sizes.iter().map(|&n| usize::try_from(n)).collect::<Result<_, _>>().map_err(wrong)?;
        let strides = strides.map(|strides| strides.iter().map(|&stride| stride as isize).collect());
        Ok(Described { ptr: self.start(name)?, kind: self.kind(name)?, shape, strides, readonly })
    }

    fn kind(&self, name: &str) -> Result<Kind, Refusal> {
        match (self.code, self.bits, self.lanes) {
            (2, 32, 1) => Ok(Kind::Element(Dtype::F32)),
            (2, 16, 1) => Ok(Kind::Element(Dtype::F16)),
            (4, 16, 1) => Ok(Kind::Element(Dtype::BF16)),
            (6, 8, 1) => Ok(Kind::Bool),
            (code @ 7..=13, 8, 1) => {
                let formats = ["e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"];
                Err(wrong_dtype(name, &format!("float8_{}", formats[usize::from(code) - 7])))
            }
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

    /// The address of the first element; null where there is no memory, whatever the offset.
    fn start(&self, name: &str) -> Result<*mut u8, Refusal> {
        let data: *mut u8 = self.data.cast();
        let fits = |&offset: &usize| (data as usize).checked_add(offset).is_some();
        let offset = usize::try_from(self.byte_offset).ok().filter(fits).ok_or_else(|| {
            Refusal::Buffer(format!("{name} has offset {}, which is not addressable", self.byte_offset))
        })?;
        Ok(if data.is_null() { data } else { data.wrapping_add(offset) })
    }
}

/// `rank` numbers; `None` where there are some, and no address.
///
/// # Safety
/// `at` is null, or valid for reads of `rank` numbers while `'a` lasts.
unsafe fn numbers<'a>(at: *const i64, rank: usize) -> Option<&'a [i64]> {
    match (rank, at.is_null()) {
        (0, _) => Some(&[]),
        (_, true) => None,
        // SAFETY: the caller's contract.
        (_, false) => Some(unsafe { std::slice::from_raw_parts(at, rank) }),
    }
}
