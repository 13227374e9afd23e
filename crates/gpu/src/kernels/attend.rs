//! Launch parameters of [`decode`](super::decode::decode()) and [`prefill`](super::prefill::prefill()): strides, sizes and sequences.

use flashtile_kernel::prelude::*;

/// Strides, sizes and scoring of a problem. Strides of q, mask and tree mask are in elements, strides of keys and
/// values in bytes.
#[params]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Attend {
    /// Strides of q over batch entry, head and row, in elements.
    pub q: [u64; 3],
    /// Strides of keys over batch entry or page, head and row, in bytes; the last is not read for codes.
    pub k: [u64; 3],
    /// Strides of values, in the units of the strides of keys.
    pub v: [u64; 3],
    /// Strides of the mask over sequence, head and query, in elements.
    pub mask: [u64; 3],
    /// Stride of the tree mask over queries, in elements.
    pub tree: u64,
    /// Elements of the factors of the keys' rotation from one key/value head to the next, where keys are equalized: a head has signs times
    /// factors, then roots. 0 where all heads share signs and roots.
    pub k_factor_stride: u64,
    /// Stride of the mask over keys, in elements; 0 where it is broadcast.
    pub mask_step: u32,
    /// Stride of the tree mask over keys, in elements.
    pub tree_step: u32,
    /// Type of the mask's elements: 0 f32, 1 f16, 2 bf16, 3 bool.
    pub mask_kind: u32,
    /// Query heads.
    pub q_heads: u32,
    /// Query heads of a key/value head: the size of a GQA group.
    pub group: u32,
    /// Tokens a page.
    pub page: u32,
    /// Multiplier and shift that divide a key by the tokens of a page: [`divisor`].
    pub page_divisor: [u32; 2],
    /// Multiplier and shift that divide a block by the entries of a sequence's line of the block table, where
    /// the line is a ring; otherwise the multiplier is 0.
    pub ring_divisor: [u32; 2],
    /// Entries of a sequence's line of the block table.
    pub width: u32,
    /// Tiles of query rows a key/value head.
    pub tiles: u32,
    /// Query rows of a batch entry.
    pub queries: u32,
    /// Batch entries.
    pub batches: u32,
    /// Keys to the left of a query's position that its window shows; `i32::MAX` where it has no left bound.
    pub left: i32,
    /// Keys to the right of it that its window shows; `i32::MAX` where it has no right bound.
    pub right: i32,
    /// Keys of a chunk, of which a query sees its own; 0 where there are none.
    pub chunk: u32,
    /// ALiBi slopes from one sequence to the next; 0 where all sequences share them.
    pub alibi_stride: u32,
    /// The storage of the keys of the launch: [`ALL_KEYS`], [`CODE_KEYS`], [`FIRST_KEYS`] or [`LAST_KEYS`].
    pub part: u32,
    /// Tokens up to a query's own that it reads in 16 bits, where some are kept.
    pub keep_last: i32,
    /// The first partial result of a row that the launch stores; other launches store those before.
    pub first_split: u32,
    /// Partial results of a row that other launches store.
    pub other_splits: u32,
    /// Factor of `q . k`: `scale log2 e`, or `scale / softcap` where there is a softcap.
    pub scale: f32,
    /// `softcap log2 e`; 0 where there is none.
    pub cap: f32,
    /// First entries of the codebooks of mlx-native for keys and for values: 256 values, then the 256 differences from their f16.
    pub codebooks: [u32; 2],
    /// Magnitudes of the levels of keys, as in [`Levels`](super::rows::Levels).
    pub k_levels: [u32; 16],
    /// Magnitudes of the levels of values.
    pub v_levels: [u32; 16],
}

/// All keys of a sequence lie in one storage.
#[constant]
pub const ALL_KEYS: u32 = 0;
/// Keys that are read as codes, where other ones are kept in 16 bits.
#[constant]
pub const CODE_KEYS: u32 = 1;
/// Keys that are kept in 16 bits as the first of their sequence.
#[constant]
pub const FIRST_KEYS: u32 = 2;
/// Keys that are kept in 16 bits as the last of their sequence.
#[constant]
pub const LAST_KEYS: u32 = 3;

/// Words of a sequence in `sequences`.
#[constant]
pub const SEQUENCE_WORDS: u32 = 9;

/// The multiplier and the shift with which `x / value` is `x * multiplier >> shift`, for every `x` below 2^31 and a value
/// from 1 to 2^31 - 1.
///
/// With `s` bits for `value - 1`, the multiplier `ceil(2^(31 + s) / value)` has at most 32 bits and is too large by a
/// fraction of less than `2^-31`, which no `x` below 2^31 carries to the next quotient.
#[must_use]
pub fn divisor(value: usize) -> [u32; 2] {
    let value = value.clamp(1, (1 << 31) - 1) as u64;
    let bits = u64::BITS - (value - 1).leading_zeros();
    let shift = 31 + bits;
    [(1u64 << shift).div_ceil(value) as u32, shift]
}

impl Attend {
    /// Elements of the factors of all key/value heads, for `len` of a head.
    #[must_use]
    pub const fn k_factors(&self, len: usize) -> usize {
        let heads = match self.q_heads.checked_div(self.group) {
            Some(heads) => heads as usize,
            None => 0,
        };
        (self.k_factor_stride as usize).saturating_mul(heads.saturating_sub(1)).saturating_add(len)
    }

    /// Rows of all heads.
    pub fn rows(&self) -> u64 {
        [self.batches, self.queries, self.q_heads].into_iter().map(u64::from).fold(1, u64::saturating_mul)
    }

    /// Partial results of all rows: one a row and split, of this launch and of others.
    pub fn results(&self, splits: u32) -> u64 {
        self.rows().saturating_mul(u64::from(splits) + u64::from(self.other_splits))
    }
}

/// The partial results of a row of all launches.
#[device]
pub fn num_splits(params: &Attend) -> u32 {
    groups_y() + params.other_splits
}

/// The partial result of a row that this threadgroup stores.
#[device]
pub fn split_index(params: &Attend) -> u32 {
    params.first_split + group_y()
}

/// A sequence of the problem. `sequences` has [`SEQUENCE_WORDS`] words of each: these, in order.
#[device]
pub struct Sequence {
    /// Batch entry of the queries.
    pub batch: u32,
    /// First query row.
    pub q_start: u32,
    /// Query rows.
    pub q_len: u32,
    /// Batch entry of the keys, or, without a block table, their only page.
    pub page: u32,
    /// First key row.
    pub kv_start: u32,
    /// Keys.
    pub kv_len: i32,
    /// Key position of the first query row.
    pub offset: i32,
    /// First keys that are kept in 16 bits.
    pub first_len: i32,
    /// The first key that is kept in 16 bits as one of the last.
    pub last_from: i32,
}

/// Reads sequence `index`.
#[device]
pub fn sequence_of(sequences: &Buffer<i32>, index: u32) -> Sequence {
    let at = SEQUENCE_WORDS * index;
    let sequence = Sequence {
        batch: sequences[at] as u32,
        q_start: sequences[at + 1] as u32,
        q_len: sequences[at + 2] as u32,
        page: sequences[at + 3] as u32,
        kv_start: sequences[at + 4] as u32,
        kv_len: sequences[at + 5],
        offset: sequences[at + 6],
        first_len: sequences[at + 7],
        last_from: sequences[at + 8],
    };
    sequence
}
