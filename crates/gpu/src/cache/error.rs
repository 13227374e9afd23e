//! Why a cache on a device refuses.

use crate::error::SessionError;
use flashtile_core::cache::CacheError;
use flashtile_core::inputs::RunError;
use flashtile_core::plan::Unsupported;
use flashtile_core::tensor::ViewError;
use flashtile_kernel::{LaunchError, ScalarType};
use std::fmt;

/// Why an operation on a cache in the memory of a device failed.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum StoreError<E> {
    /// The cache refused it, and is unchanged.
    Cache(CacheError),
    /// No kernel stores such rows.
    Unsupported(Unsupported),
    /// Rows are of another type than f32, f16 and bf16.
    Element {
        /// The type of the view.
        element: ScalarType,
    },
    /// The memory of rows is smaller than their shape and strides need. The cache is unchanged.
    Memory(ViewError),
    /// A launch failed. Contents of the cache are unspecified after an error of the device.
    Launch(LaunchError<E>),
}

impl<E> StoreError<E> {
    pub(super) const fn device(error: E) -> Self {
        Self::Launch(LaunchError::Device(error))
    }

    /// The error of a session for the same reason.
    ///
    /// # Errors
    /// The refusal of the cache, which sessions do not have.
    pub fn into_session(self) -> Result<SessionError<E>, CacheError> {
        match self {
            Self::Cache(error) => Err(error),
            Self::Unsupported(error) => Ok(SessionError::Unsupported(error)),
            Self::Element { element } => {
                let (tensor, expected) = ("a tensor of rows", "f32, f16 or bf16");
                Ok(SessionError::Element { tensor, expected, element })
            }
            Self::Memory(error) => Ok(SessionError::Inputs(RunError::Memory { tensor: "rows", error })),
            Self::Launch(error) => Ok(SessionError::Launch(error)),
        }
    }
}

impl<E> From<CacheError> for StoreError<E> {
    fn from(error: CacheError) -> Self {
        Self::Cache(error)
    }
}

impl<E> From<Unsupported> for StoreError<E> {
    fn from(error: Unsupported) -> Self {
        Self::Unsupported(error)
    }
}

impl<E: fmt::Display> fmt::Display for StoreError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cache(error) => error.fmt(f),
            Self::Unsupported(error) => error.fmt(f),
            Self::Element { element } => write!(f, "rows are of {element}, expected f32, f16 or bf16"),
            Self::Memory(error) => write!(f, "rows: {error}"),
            Self::Launch(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for StoreError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Cache(error) => Some(error),
            Self::Unsupported(error) => Some(error),
            Self::Element { .. } => None,
            Self::Memory(error) => Some(error),
            Self::Launch(error) => Some(error),
        }
    }
}
