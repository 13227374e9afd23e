//! Why quality cannot be measured.

use crate::codec::{EncodeError, KEY_FACTOR_RANGE};
use crate::limits::MAX_HEAD_DIM;
use std::fmt;
use std::ops::Range;

/// Why quality cannot be measured.
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
    /// The length of a list is not a multiple of the row length.
    Rows {
        /// `k`, `v`, `q`, `key_mean` or `key_factors`.
        tensor: &'static str,
        /// Elements found.
        len: usize,
        /// Elements of a row.
        dim: usize,
    },
    /// Keys and values have different numbers of rows, or no rows.
    Tokens {
        /// Rows of k.
        k: usize,
        /// Rows of v.
        v: usize,
    },
    /// The number of ranges of visible keys is not that of queries.
    Queries {
        /// Ranges found.
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
    /// A key factor is NaN, or its magnitude is outside [`KEY_FACTOR_RANGE`].
    Factor {
        /// The first such element.
        channel: usize,
    },
    /// A row cannot be stored.
    Encode {
        /// `k` or `v`.
        tensor: &'static str,
        /// The row.
        row: usize,
        /// The reason.
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
            Self::Tokens { k, v } => {
                write!(f, "k has {k} rows and v has {v}, expected the same number, at least 1")
            }
            Self::Queries { got, expected } => {
                write!(f, "{got} ranges of visible keys, expected {expected}, one for each query")
            }
            Self::Visible { query, range, tokens } => {
                write!(f, "query {query} sees keys {range:?}, there are {tokens}")
            }
            Self::Factor { channel } => {
                let (min, max) = (KEY_FACTOR_RANGE.start(), KEY_FACTOR_RANGE.end());
                write!(f, "key_factors has channel {channel} outside {min:e} to {max:e} in magnitude")
            }
            Self::Encode { tensor, row, why } => write!(f, "row {row} of {tensor} {why}"),
        }
    }
}

impl std::error::Error for QualityError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        if let Self::Encode { why, .. } = self { Some(why) } else { None }
    }
}
