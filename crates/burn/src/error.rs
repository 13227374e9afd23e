//! Errors: each names the tensor that is refused.

use burn::tensor::DType;
use std::fmt;

/// The result of the functions of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call is refused. Nothing was computed.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Error {
    /// A tensor is not one of the flex backend, or a gradient is to be tracked through it.
    Backend {
        /// Name of the tensor.
        tensor: &'static str,
        /// The reason, in burn's words.
        found: String,
    },
    /// The elements of a tensor are neither F32 nor F16 nor BF16, or a mask has elements of more than a byte.
    Dtype {
        /// Name of the tensor.
        tensor: &'static str,
        /// Its dtype.
        got: DType,
    },
    /// A mask is given as a tensor, and another in the options of flashtile.
    TwoMasks,
    /// flashtile refuses the problem, or the shapes of its tensors.
    Flashtile(flashtile::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Backend { tensor, found } => {
                write!(f, "{tensor}: expected a tensor of the flex backend without a gradient: {found}")
            }
            Self::Dtype { tensor, got } if *tensor == "mask" => {
                write!(f, "mask is {got:?}, expected elements of a byte")
            }
            Self::Dtype { tensor, got } => write!(f, "{tensor} is {got:?}, expected F32, F16 or BF16"),
            Self::TwoMasks => f.write_str("expected hidden and bias, or attention.mask, not both"),
            Self::Flashtile(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Flashtile(error) => error.source(),
            Self::Backend { .. } | Self::Dtype { .. } | Self::TwoMasks => None,
        }
    }
}

impl<E: Into<flashtile::Error>> From<E> for Error {
    fn from(error: E) -> Self {
        Self::Flashtile(error.into())
    }
}
