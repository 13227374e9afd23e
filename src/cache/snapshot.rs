//! The content of a sequence, independent of the cache it came from.

use super::{CacheDesc, CacheError, Codec};
use std::ops::Range;

/// The kept tokens of a sequence in every layer, as owned bytes: stored rows as they are, without a conversion. It can be
/// restored into any cache with the same layers, heads, dimensions and codecs, whatever its layout; with quantized keys, the means of
/// its layers must be those of the snapshot, or not fixed yet.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Numbers of the rows; the layout is of no consequence.
    pub(super) desc: CacheDesc,
    pub(super) kept: Range<usize>,
    /// `[layers]` of K `[kv_heads, kept, row]` and V `[kv_heads, kept, row]`.
    pub(super) bytes: Vec<u8>,
    /// `[layers]`: means of the keys that are not part of their rows.
    pub(super) means: Vec<Option<Vec<f32>>>,
}

impl Snapshot {
    /// Length of the sequence, tokens that were no longer kept included.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.kept.end
    }

    /// Whether the sequence had no tokens.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.kept.end == 0
    }

    /// First token that was kept.
    #[must_use]
    pub const fn first(&self) -> usize {
        self.kept.start
    }

    /// Bytes of the kept tokens: their number times [`CacheDesc::token_bytes`].
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The kept rows: `[layers]` of K `[kv_heads, kept, row]` and V `[kv_heads, kept, row]`, each row as its codec has it.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Checks that the rows are those of a cache of this description.
    pub(super) fn check(&self, desc: &CacheDesc) -> Result<(), CacheError> {
        let numbers = |d: &CacheDesc| {
            [
                ("layers", d.layers),
                ("kv_heads", d.kv_heads),
                ("head_dim", d.head_dim),
                ("value_dim", d.value_dim),
            ]
        };
        for ((name, expected), (_, got)) in numbers(desc).into_iter().zip(numbers(&self.desc)) {
            if got != expected {
                return Err(CacheError::SnapshotDimension { name, expected, got });
            }
        }
        let codecs = |d: &CacheDesc| -> [(&'static str, Codec); 2] { [("k", d.k), ("v", d.v)] };
        for ((tensor, expected), (_, got)) in codecs(desc).into_iter().zip(codecs(&self.desc)) {
            if got != expected {
                return Err(CacheError::SnapshotCodec { tensor, expected, got });
            }
        }
        Ok(())
    }
}
