//! Why rows and pages are refused.

use super::kind::Codec;

/// The largest Euclidean norm of a quantized vector, so that its scale fits an f16, and so do the coordinates of the rotated vector.
pub const MAX_NORM: f32 = 8192.0;

/// Why pages cannot be made, or converted from or to buffers.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum PagesError {
    /// The codec does not quantize: it stores plain elements.
    Elements {
        /// The codec.
        codec: Codec,
    },
    /// A dimension other than the number of pages is 0.
    Shape {
        /// The shape.
        shape: [usize; 4],
    },
    /// The codec does not support the dimension of the rows.
    Dim {
        /// The codec.
        codec: Codec,
        /// Elements of a row.
        dim: usize,
    },
    /// An allocation failed.
    Memory {
        /// Bytes asked for; `usize::MAX` if their number overflows.
        bytes: usize,
    },
    /// The codec is not one of mlx-native's.
    Format {
        /// The codec.
        codec: Codec,
    },
    /// A buffer does not have the length that the shape requires.
    Length {
        /// `codes` or `norms`.
        buffer: &'static str,
        /// Elements found.
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
        /// The norm.
        norm: f32,
    },
    /// The rows are of transformed keys, which the buffers' format cannot express.
    KeyTransform,
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
            Self::KeyTransform => f.write_str("rows have a mean subtracted, which mlx-native cannot store"),
        }
    }
}

impl std::error::Error for PagesError {}

/// Why a row cannot be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EncodeError {
    /// The codec does not support the dimension of the row.
    Dim {
        /// The codec.
        codec: Codec,
        /// Elements of the row.
        dim: usize,
    },
    /// The row contains a NaN or an infinity.
    NotFinite,
    /// The norm of the row, with the mean subtracted and divided by the factors of its channels, is above [`MAX_NORM`].
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
