//! How tensors divide into sequences.

/// How batch entries divide into sequences.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Sequences {
    /// Each batch entry is one sequence of `q_len` queries and `kv_len` keys.
    #[default]
    Dense,
    /// Each batch entry is one sequence of `q_len` queries with its own number of keys. Rows past it are padding and
    /// never read.
    Padded {
        /// Keys of each batch entry, `[batch]`, each at most `kv_len`.
        kv_lens: Vec<usize>,
    },
    /// Sequences lie one after another in a single batch entry: q `[q_len, q_heads, head_dim]`, where `q_len` is the
    /// total.
    Packed {
        /// First query row of each sequence, then the total: `[sequences + 1]`, from 0, never decreasing.
        cu_seqlens_q: Vec<usize>,
        /// First key row of each sequence, then the total: `[sequences + 1]`, from 0, never decreasing.
        cu_seqlens_k: Vec<usize>,
    },
    /// Keys and values lie in the pages of a cache, found through [`BlockTables`](crate::block_tables::BlockTables);
    /// queries are packed as in [`Sequences::Packed`]. Each sequence has its own numbers of queries and keys, so that
    /// prefill chunks and decode steps share a batch.
    Cached {
        /// First query row of each sequence, then the total: `[sequences + 1]`, from 0, never decreasing.
        cu_seqlens_q: Vec<usize>,
        /// Length of each sequence in tokens, `[sequences]`, each at most `kv_len`. Tokens of this step and tokens that the cache
        /// no longer keeps count.
        kv_lens: Vec<usize>,
    },
}

impl Sequences {
    /// [`Sequences::Cached`] with these lengths. Sums saturate; the last entry of `cu_seqlens_q` is the problem's `q_len`.
    #[must_use]
    pub fn cached(lens: &[SeqLens]) -> Self {
        let ends = lens.iter().scan(0usize, |total, lens| {
            *total = total.saturating_add(lens.q_len);
            Some(*total)
        });
        Self::Cached {
            cu_seqlens_q: std::iter::once(0).chain(ends).collect(),
            kv_lens: lens.iter().map(|lens| lens.kv_len).collect(),
        }
    }
}

/// Lengths of one cached sequence in a step, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[allow(clippy::exhaustive_structs)]
pub struct SeqLens {
    /// Queries of this step: the last tokens of the sequence, which the cache already holds.
    pub q_len: usize,
    /// All tokens of the sequence, including the tokens of this step and the ones that the cache no longer keeps.
    pub kv_len: usize,
}

impl SeqLens {
    /// A step of decoding: one query, at the end of `kv_len` tokens.
    #[must_use]
    pub const fn decode(kv_len: usize) -> Self {
        Self { q_len: 1, kv_len }
    }
}

/// One sequence of a validated problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sequence {
    /// Batch entry of its tensors.
    pub batch: usize,
    /// Row of its first query in that entry.
    pub q_start: usize,
    /// Query rows.
    pub q_len: usize,
    /// Row of its first key in that entry; 0 if keys lie in pages.
    pub kv_start: usize,
    /// Keys, without padding.
    pub kv_len: usize,
    /// Key position of the first query, counted from the sequence's first key.
    pub q_offset: i64,
    /// First tokens that are kept in 16 bits ([`KeptTokens`](super::KeptTokens)).
    pub first_len: usize,
    /// First token that is kept in 16 bits as one of the last.
    pub last_from: usize,
}
