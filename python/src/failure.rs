//! Errors of flashtile as exceptions of Python, with the library's words, and what to do in Python's.

use flashtile::cache::{CacheError, CacheLayout, HybridCache, PageStore};
use flashtile::codec::PagesError;
use flashtile::{Error, ProblemError, RunError};
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
        Error::Problem(ProblemError::OffsetUnsaid { .. } | ProblemError::OffsetUnsaidPadded { .. }) => {
            PyValueError::new_err(error.to_string().replace(OFFSETS, OFFSETS_OF_PYTHON))
        }
        Error::Device(_) | Error::Run(RunError::Threads { .. }) => PyRuntimeError::new_err(error.to_string()),
        _ => PyValueError::new_err(error.to_string()),
    }
}

/// The offsets, as the library's errors and as the options of Python call them.
const OFFSETS: &str = "top-left, bottom-right or a number";
const OFFSETS_OF_PYTHON: &str = "'top_left', 'bottom_right' or the key position of query 0";

/// Layouts of the layers of a cache, for [`step_refused`].
pub(crate) fn layouts<S: PageStore>(cache: &HybridCache<S>) -> Vec<CacheLayout> {
    cache.groups().iter().map(|group| group.desc().layout).collect()
}

/// [`refused`], of a step that adds tokens to a cache whose layers have these layouts.
pub(crate) fn step_refused(error: Error, layouts: &[CacheLayout]) -> PyErr {
    let holds = |layout: &&CacheLayout| match (&error, layout) {
        (
            Error::Cache(CacheError::Capacity { capacity: exceeded, .. }),
            CacheLayout::Ring { capacity, .. } | CacheLayout::Contiguous { capacity, .. },
        ) => capacity == exceeded,
        (Error::Cache(CacheError::OutOfPages { .. }), CacheLayout::Paged { .. }) => true,
        _ => false,
    };
    let remedy = match layouts.iter().find(holds) {
        Some(CacheLayout::Ring { .. }) => {
            "a step of a ring has at most its capacity: give the prompt in several steps"
        }
        Some(CacheLayout::Contiguous { .. }) => {
            "forget frees no room in a slot: make capacity larger, or take layout='ring' for windows, or 'paged'"
        }
        Some(CacheLayout::Paged { .. }) => "remove, truncate or forget frees pages, or make pages more",
        _ => return refused(error),
    };
    PyValueError::new_err(format!("{error}: {remedy}"))
}

/// An error of a description in JSON, which the callers of Python have not written.
pub(crate) fn described_wrong(error: &serde_json::Error) -> PyErr {
    let text = error.to_string();
    let text = text.rsplit_once(" at line ").map_or(text.as_str(), |(text, _)| text);
    PyValueError::new_err(text.to_owned())
}
