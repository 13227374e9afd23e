//! Refusals of measurements.

use crate::codec::EncodeError;
use crate::limits::MAX_HEAD_DIM;
use std::fmt;
use std::ops::Range;

/// Why quality is not measured.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum QualityError {
    /// A dimension is 0 or above [`MAX_HEAD_DIM`].
    Dimension {
        /// `head_dim` or `value_dim`.
        name: &'static str,
        /// Its size.
        got: usize,
    },
    /// A list of elements is no whole number of rows.
    Rows {
        /// `k`, `v`, `q` or `key_mean`.
        tensor: &'static str,
        /// Elements given.
        len: usize,
        /// Elements of a row.
        dim: usize,
    },
    /// Keys and values have different numbers of rows, or there are none.
    Tokens {
        /// Rows of k.
        k: usize,
        /// Rows of v.
        v: usize,
    },
    /// Not one range of visible keys for each query.
    Queries {
        /// Ranges given.
        got: usize,
        /// Queries.
        expected: usize,
    },
    /// A range of visible keys ends past the keys.
    Visible {
        /// The query.
        query: usize,
        /// Its range.
        range: Range<usize>,
        /// Keys.
        tokens: usize,
    },
    /// A row cannot be stored.
    Encode {
        /// `k` or `v`.
        tensor: &'static str,
        /// The row.
        row: usize,
        /// Why.
        why: EncodeError,
    },
}

impl fmt::Display for QualityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dimension { name, got } => write!(f, "{name} is {got}, expected 1 to {MAX_HEAD_DIM}"),
            Self::Rows { tensor, len, dim } => {
                write!(f, "{tensor} has {len} elements, expected whole rows of {dim}")
            }
            Self::Tokens { k, v } => write!(f, "k has {k} rows and v {v}, expected as many, at least 1"),
            Self::Queries { got, expected } => {
                write!(f, "{got} ranges of visible keys, expected {expected}, one for each query")
            }
            Self::Visible { query, range, tokens } => {
                write!(f, "query {query} sees keys {range:?}, there are {tokens}")
            }
            Self::Encode { tensor, row, why } => write!(f, "row {row} of {tensor} {why}"),
        }
    }
}

impl std::error::Error for QualityError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Encode { why, .. } => Some(why),
            _ => None,
        }
    }
}
