//! DLPack's exchange API: a library's functions in C, found by the type of its tensors. They need no capsule for each tensor.

#![allow(unsafe_code)]

use super::block::Described;
use super::dlpack::{CUDA, DlTensor};
use super::{Place, Stream, place};
use pyo3::exceptions::PyBufferError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};

/// `DLPackExchangeAPI` of DLPack.
#[repr(C)]
struct Exchange {
    major: u32,
    minor: u32,
    /// A table of an older version, or null.
    older: *mut Self,
    allocate: *const c_void,
    share: *const c_void,
    to_python: *const c_void,
    /// Describes the memory of a Python object: 0, or -1 with an exception set. May be null.
    borrow: Option<unsafe extern "C" fn(*mut pyo3::ffi::PyObject, *mut DlTensor) -> c_int>,
    /// The stream on which the library works on a device now: 0, or -1 with an exception set.
    current_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

/// The memory of the argument with this name, where the library of its type has the exchange API, else `None`: also where the library works
/// on another stream than this one, for which the memory may not be ready.
///
/// The description is true while the tensor lives and nobody gives it another storage.
///
/// # Errors
/// `BufferError` where the library refuses, as for a tensor without memory.
pub(super) fn borrow(
    stream: Option<Stream>,
    name: &str,
    object: &Bound<'_, PyAny>,
) -> PyResult<Option<(Described, Place)>> {
    let py = object.py();
    let Some(table) = table(object)? else {
        return Ok(None);
    };
    // SAFETY: as `table` says, of version 1.
    let (borrow, current_stream) = unsafe { ((*table.as_ptr()).borrow, (*table.as_ptr()).current_stream) };
    let Some(borrow) = borrow else {
        return Ok(None);
    };
    if let Some(stream) = stream {
        let mut current = null_mut();
        // SAFETY: the place is valid for a write, and this thread holds the interpreter, as the table demands.
        let status = current_stream.map_or(-1, |of| unsafe { of(CUDA, stream.device, &raw mut current) });
        // An exception is of no use: the tensor is asked in another way.
        drop(PyErr::take(py));
        if status != 0 || current as usize != stream.handle {
            return Ok(None);
        }
    }
    let mut tensor = MaybeUninit::uninit();
    // SAFETY: the object is alive and this thread holds the interpreter, as the table demands.
    let status = unsafe { borrow(object.as_ptr(), tensor.as_mut_ptr()) };
    if status != 0 {
        let reason = PyErr::take(py).map(|error| format!(": {error}")).unwrap_or_default();
        return Err(PyBufferError::new_err(format!("{name} has no memory that DLPack describes{reason}")));
    }
    // SAFETY: the function wrote it.
    let tensor: DlTensor = unsafe { tensor.assume_init() };
    let place = place(name, tensor.device(), stream)?;
    // SAFETY: DLPack promises `ndim` sizes and strides until the library runs again, which needs the interpreter.
    let described = unsafe { tensor.described(name, false)? };
    Ok(Some((described, place)))
}

/// The table of an object's type, if it has one of version 1. It lives as long as the process does.
fn table(object: &Bound<'_, PyAny>) -> PyResult<Option<NonNull<Exchange>>> {
    let capsule = object.get_type().getattr_opt(intern!(object.py(), "__dlpack_c_exchange_api__"))?;
    let named = |capsule: Bound<'_, PyAny>| {
        let capsule = capsule.cast_into::<PyCapsule>().ok()?;
        capsule.pointer_checked(Some(c"dlpack_exchange_api")).ok()
    };
    let mut table: Option<NonNull<Exchange>> = capsule.and_then(named).map(NonNull::cast);
    while let Some(of) = table {
        // SAFETY: a capsule of the name holds a table, which in every version begins with the version and the address of an older table.
        let (major, older) = unsafe { ((*of.as_ptr()).major, (*of.as_ptr()).older) };
        if major == 1 {
            break;
        }
        table = NonNull::new(older);
    }
    Ok(table)
}
