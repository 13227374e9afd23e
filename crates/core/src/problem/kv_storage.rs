//! Where values lie.

use crate::codec::Codec;
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
    /// A value is the first `value_dim` elements of its key, as in multi-head latent attention whose projections are absorbed
    /// (`head_dim` 576, `value_dim` 512). A cache stores the row once. Values are given as a view of the keys
    /// ([`KvView::first_columns`](crate::codec::KvView::first_columns)).
    KeyColumns,
}

/// Why values cannot be the columns of keys that they are said to be.
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
    /// The values given are not the [first columns](crate::codec::KvView::first_columns) of the keys given.
    OtherMemory,
    /// The operation needs values in rows of their own.
    NoRows,
    /// They are in one of a snapshot and a cache, and not in the other.
    Snapshot,
    /// The device has no kernels that store them.
    Device,
}

impl KvStorage {
    /// Checks dimensions and codecs.
    pub(crate) fn check(
        self,
        [head_dim, value_dim]: [usize; 2],
        [k, v]: [Codec; 2],
    ) -> Result<(), KeyColumnsError> {
        match self {
            Self::KeyColumns if value_dim > head_dim => Err(KeyColumnsError::Width { value_dim, head_dim }),
            Self::KeyColumns if v != k => Err(KeyColumnsError::Codec { k, v }),
            Self::KeyColumns | Self::Separate => Ok(()),
        }
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
            Self::OtherMemory => f.write_str("v is not a view of the first columns of k"),
            Self::NoRows => f.write_str("the operation needs values in rows of their own"),
            Self::Snapshot => f.write_str("only in one of the snapshot and the cache"),
            Self::Device => f.write_str("the device has no kernels that store them"),
        }
    }
}

impl std::error::Error for KeyColumnsError {}
