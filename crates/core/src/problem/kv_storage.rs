//! Where values lie.

use crate::codec::{Codec, KvView};
use std::fmt;

/// Where the values of a problem or a cache lie: in rows of their own, or in the rows of the keys.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum KvStorage {
    /// Keys and values have rows of their own.
    #[default]
    Separate,
    /// A value is the first `value_dim` elements of its key, as in multi-head latent attention with absorbed projections: DeepSeek-V3 has
    /// a `head_dim` of 576 and a `value_dim` of 512, which is above [`MAX_HEAD_DIM`](crate::limits::MAX_HEAD_DIM) yet. A cache stores
    /// the row once. Values are given as a view of the keys ([`KvView::first_columns`](crate::codec::KvView::first_columns)).
    KeyColumns,
}

/// Why values cannot be columns of the keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyColumnsError {
    /// Values have more elements than keys.
    Width {
        /// Elements of a value.
        value_dim: usize,
        /// Elements of a key.
        head_dim: usize,
    },
    /// Values have another codec than the keys.
    Codec {
        /// Codec of the keys.
        k: Codec,
        /// Codec of the values.
        v: Codec,
    },
}

impl KvStorage {
    /// Names, codecs and dimensions of the rows that are stored, for keys and values of these codecs and dimensions.
    pub(crate) fn rows(
        self,
        (k, head_dim): (Codec, usize),
        (v, value_dim): (Codec, usize),
    ) -> Result<impl Iterator<Item = (&'static str, Codec, usize)>, KeyColumnsError> {
        let stored = match self {
            Self::Separate => 2,
            Self::KeyColumns if value_dim > head_dim => {
                return Err(KeyColumnsError::Width { value_dim, head_dim });
            }
            Self::KeyColumns if v != k => return Err(KeyColumnsError::Codec { k, v }),
            Self::KeyColumns => 1,
        };
        Ok([("k", k, head_dim), ("v", v, value_dim)].into_iter().take(stored))
    }

    /// Shapes of keys and values as kernels decode them: the columns of keys that are values, and otherwise whole rows, of which a view
    /// may show fewer columns.
    pub(crate) const fn shapes(self, [k, v]: [&KvView<'_>; 2]) -> [[usize; 4]; 2] {
        [k.stored_shape(), if matches!(self, Self::KeyColumns) { v.shape() } else { v.stored_shape() }]
    }
}

impl fmt::Display for KeyColumnsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("values are columns of the keys, but ")?;
        match self {
            Self::Width { value_dim, head_dim } => {
                write!(f, "value_dim {value_dim} is above head_dim {head_dim}")
            }
            Self::Codec { k, v } => write!(f, "v is {v} and k is {k}"),
        }
    }
}

impl std::error::Error for KeyColumnsError {}
