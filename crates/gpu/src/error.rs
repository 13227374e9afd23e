//! Why a session refuses.

use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::RunError;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::ProblemError;
use flashtile_core::tensor::ViewError;
use flashtile_kernel::{LaunchError, ScalarType};
use std::fmt;

/// Why a call of a [`Session`](crate::session::Session) failed.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum SessionError<E> {
    /// The description is not well formed.
    Problem(ProblemError),
    /// A valid problem has no plan on the device.
    Unsupported(Unsupported),
    /// The tensors do not fit the description. Nothing was launched.
    Inputs(RunError),
    /// The size of a tensor is not addressable.
    View(ViewError),
    /// An array and the tensor that it is copied from or to differ in dtype or shape.
    Array {
        /// Dtype and shape of the array.
        expected: (Dtype, [usize; 4]),
        /// Dtype and shape of the tensor.
        got: (Dtype, [usize; 4]),
    },
    /// The elements of a tensor or list are of another type than kernels read there.
    Element {
        /// Name of the tensor.
        tensor: &'static str,
        /// The types that it may have.
        expected: &'static str,
        /// The type of its view.
        element: ScalarType,
    },
    /// The device captures a graph, which cannot hold an operation that the call needs.
    Captures {
        /// The step that the call needs.
        what: &'static str,
    },
    /// The device failed, or a launch does not keep its kernel's contract.
    Launch(LaunchError<E>),
}

impl<E> SessionError<E> {
    /// An error of the device.
    pub const fn device(error: E) -> Self {
        Self::Launch(LaunchError::Device(error))
    }
}

impl<E> From<ProblemError> for SessionError<E> {
    fn from(error: ProblemError) -> Self {
        Self::Problem(error)
    }
}

impl<E> From<Unsupported> for SessionError<E> {
    fn from(error: Unsupported) -> Self {
        Self::Unsupported(error)
    }
}

impl<E> From<RunError> for SessionError<E> {
    fn from(error: RunError) -> Self {
        Self::Inputs(error)
    }
}

impl<E> From<ViewError> for SessionError<E> {
    fn from(error: ViewError) -> Self {
        Self::View(error)
    }
}

impl<E> From<LaunchError<E>> for SessionError<E> {
    fn from(error: LaunchError<E>) -> Self {
        Self::Launch(error)
    }
}

impl<E: fmt::Display> fmt::Display for SessionError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Problem(error) => error.fmt(f),
            Self::Unsupported(error) => error.fmt(f),
            Self::Inputs(error) => error.fmt(f),
            Self::Element { tensor, expected, element } => {
                write!(f, "{tensor} has elements of {element}, expected {expected}")
            }
            Self::View(error) => error.fmt(f),
            Self::Array { expected, got } => {
                write!(f, "a tensor of {} {:?} for an array of {} {:?}", got.0, got.1, expected.0, expected.1)
            }
            Self::Captures { what } => {
                write!(f, "{what}: the device captures a graph; make the call once before the capture")
            }
            Self::Launch(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for SessionError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Problem(error) => Some(error),
            Self::Unsupported(error) => Some(error),
            Self::Inputs(error) => Some(error),
            Self::View(error) => Some(error),
            Self::Array { .. } | Self::Element { .. } | Self::Captures { .. } => None,
            Self::Launch(error) => Some(error),
        }
    }
}
