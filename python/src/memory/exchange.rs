//! DLPack's exchange API: a library's functions in C, found by the type of its tensors. They need no capsule for each tensor.

#![allow(unsafe_code)]

use super::dlpack::DlTensor;
use pyo3::exceptions::PyBufferError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::NonNull;

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
    current_stream: *const c_void,
}

/// The description of the object's memory, where the library of its type has the exchange API, else `None`.
///
/// It is valid while the object lives and nobody changes its shape, strides or storage. Work on the stream that is current in the library
/// may access the memory, and no other stream waits for it.
///
/// # Errors
/// `BufferError` where the library refuses, as for a tensor without memory.
pub(super) fn borrow(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Option<DlTensor>> {
    let py = object.py();
    let Some(table) = object.get_type().getattr_opt(intern!(py, "__dlpack_c_exchange_api__"))? else {
        return Ok(None);
    };
    let table: NonNull<Exchange> =
        table.cast::<PyCapsule>()?.pointer_checked(Some(c"dlpack_exchange_api"))?.cast();
    let mut table = Some(table);
    let borrow = loop {
        let Some(of) = table else {
            return Ok(None);
        };
        // SAFETY: a capsule of the name holds a table that lives as long as the process does. In every version it begins with the version
        // and the address of an older table.
        let (major, older) = unsafe { ((*of.as_ptr()).major, (*of.as_ptr()).older) };
        if major == 1 {
            // SAFETY: as above; version 1 has the fields of `Exchange`.
            break unsafe { (*of.as_ptr()).borrow };
        }
        table = NonNull::new(older);
    };
    let Some(borrow) = borrow else {
        return Ok(None);
    };
    let mut tensor = MaybeUninit::uninit();
    // SAFETY: the object is alive and this thread holds the interpreter, as the table demands.
    let status = unsafe { borrow(object.as_ptr(), tensor.as_mut_ptr()) };
    if status != 0 {
        let reason = PyErr::take(py).map(|error| format!(": {error}")).unwrap_or_default();
        return Err(PyBufferError::new_err(format!("{name} has no memory that DLPack describes{reason}")));
    }
    // SAFETY: the function wrote it.
    Ok(Some(unsafe { tensor.assume_init() }))
}
