//! Refusals of rows and of pages.

use super::kind::Codec;

/// The largest Euclidean norm of a vector that is quantized: its scale fits an f16.
pub const MAX_NORM: f32 = 8192.0;

/// Why pages are not made, or not read from or written to buffers.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum PagesError {
    /// The codec stores plain elements.
    Elements {
        /// The codec given.
        codec: Codec,
    },
    /// A dimension other than the number of pages is 0.
    Shape {
        /// The shape given.
        shape: [usize; 4],
    },
    /// The codec has no rows of this length.
    Dim {
        /// The codec given.
        codec: Codec,
        /// Elements of a row.
        dim: usize,
    },
    /// An allocation failed.
    Memory {
        /// Bytes asked for, or the largest number.
        bytes: usize,
    },
    /// The codec's rows are not those of the format of the buffers.
    Format {
        /// The codec given.
        codec: Codec,
    },
    /// A buffer has not the length that the shape demands.
    Length {
        /// `codes` or `norms`.
        buffer: &'static str,
        /// Elements given.
        got: usize,
        /// Elements expected.
        expected: usize,
    },
    /// A norm is negative or not finite.
    Norm {
        /// The slot.
        slot: usize,
        /// The key/value head.
        head: usize,
        /// The row of the slot.
        row: usize,
        /// The norm given.
        norm: f32,
    },
    /// A mean is not part of the rows, and the format has no place for it.
    Mean,
}

impl std::fmt::Display for PagesError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Elements { codec } => {
                write!(f, "{codec} stores plain elements, expected a quantizing codec")
            }
            Self::Shape { shape } => write!(f, "pages {shape:?} have no rows or no elements"),
            Self::Dim { codec, dim } => {
                write!(f, "rows have {dim} elements, expected {} for {codec}", codec.dims())
            }
            Self::Memory { bytes } => write!(f, "no memory for {bytes} bytes"),
            Self::Format { codec } => write!(f, "{codec} is not a format of mlx-native"),
            Self::Length { buffer, got, expected } => {
                write!(f, "{buffer} has {got} elements, expected {expected}")
            }
            Self::Norm { slot, head, row, norm } => {
                write!(f, "norm {norm} of row {row} of head {head} of slot {slot} is negative or not finite")
            }
            Self::Mean => f.write_str("rows are without a mean, which mlx-native has no place for"),
        }
    }
}

impl std::error::Error for PagesError {}

/// Why a row is not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EncodeError {
    /// The codec has no rows of this length.
    Dim {
        /// The codec.
        codec: Codec,
        /// Elements of the row.
        dim: usize,
    },
    /// It holds a NaN or an infinity.
    NotFinite,
    /// Its norm, without the mean, is above [`MAX_NORM`].
    Norm,
}

impl std::fmt::Display for EncodeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Dim { codec, dim } => {
                write!(f, "has {dim} elements, expected {} for {codec}", codec.dims())
            }
            Self::NotFinite => f.write_str("holds a NaN or an infinity"),
            Self::Norm => write!(f, "has a norm above {MAX_NORM}"),
        }
    }
}

impl std::error::Error for EncodeError {}
