//! Errors of flashtile as exceptions of Python, with the library's words.

use flashtile::cache::CacheError;
use flashtile::codec::PagesError;
use flashtile::{Error, RunError};
use pyo3::PyErr;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyTypeError, PyValueError};

/// `TypeError` where a dtype is wrong, `MemoryError` where there is no memory, `RuntimeError` where threads, a device, its driver or its
/// compiler failed, `ValueError` otherwise.
pub(crate) fn refused(error: impl Into<Error>) -> PyErr {
    let error = error.into();
    match error {
        Error::Memory { .. }
        | Error::Cache(CacheError::Memory { .. })
        | Error::Pages(PagesError::Memory { .. }) => PyMemoryError::new_err(error.to_string()),
        Error::Run(RunError::Dtype { .. } | RunError::Codec { .. } | RunError::MaskKind { .. }) => {
            PyTypeError::new_err(error.to_string())
        }
        Error::Device(_) | Error::Run(RunError::Threads { .. }) => PyRuntimeError::new_err(error.to_string()),
        _ => PyValueError::new_err(error.to_string()),
    }
}
