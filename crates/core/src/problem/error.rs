//! Why a description is refused, with the values that caused it.

use super::kept_error::KeptError;
use super::kv_storage::KeyColumnsError;
use crate::codec::Codec;
use crate::dtype::Dtype;
use std::fmt;

/// One of the two lists of cumulative lengths of a packed problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// `cu_seqlens_q`.
    Q,
    /// `cu_seqlens_k`.
    K,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Q => "cu_seqlens_q",
            Self::K => "cu_seqlens_k",
        })
    }
}

/// A feature that depends on the key positions of the queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Positional {
    /// Causal visibility.
    Causal,
    /// Window visibility.
    Window,
    /// Visibility within chunks.
    Chunks,
    /// ALiBi bias.
    Alibi,
}

impl fmt::Display for Positional {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Causal => "causal",
            Self::Window => "window",
            Self::Chunks => "chunked",
            Self::Alibi => "ALiBi",
        })
    }
}

/// Why a [`ProblemDesc`](super::ProblemDesc) is refused.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ProblemError {
    /// `q_heads` is not a positive multiple of `kv_heads`.
    HeadsNotDivisible {
        /// Query heads.
        q_heads: usize,
        /// Key/value heads.
        kv_heads: usize,
    },
    /// A head dimension is 0 or above the maximum.
    HeadDim {
        /// `head_dim` or `value_dim`.
        name: &'static str,
        /// The dimension.
        got: usize,
        /// The largest supported.
        max: usize,
    },
    /// Keys or values that are not cached have a codec other than the problem's dtype.
    Codec {
        /// `k` or `v`.
        tensor: &'static str,
        /// The codec given.
        codec: Codec,
        /// The problem's dtype.
        dtype: Dtype,
    },
    /// A codec does not support the dimension of its rows.
    CodecDim {
        /// `k` or `v`.
        tensor: &'static str,
        /// The codec given.
        codec: Codec,
        /// Elements of a row.
        dim: usize,
    },
    /// Values cannot be columns of the keys.
    KeyColumns(KeyColumnsError),
    /// A dimension is above the maximum.
    TooLong {
        /// Field of [`Dims`](super::Dims), or `sequences`.
        name: &'static str,
        /// The size given.
        got: usize,
        /// The largest supported.
        max: usize,
    },
    /// A tensor is too large to be addressed.
    SizeOverflow {
        /// Name of the tensor.
        tensor: &'static str,
        /// Its shape.
        shape: [usize; 4],
    },
    /// The scale is NaN or infinite.
    Scale {
        /// The scale given.
        scale: f32,
    },
    /// The magnitude of `scale`, or of `scale / softcap`, is above the maximum: scores would overflow f32.
    ScaleRange {
        /// The scale, or the default if none was given.
        scale: f32,
        /// The softcap, if any.
        softcap: Option<f32>,
        /// The largest magnitude supported.
        max: f32,
    },
    /// The softcap is above the maximum: `scale / softcap` would underflow f32.
    SoftcapRange {
        /// The softcap given.
        softcap: f32,
        /// The largest supported.
        max: f32,
    },
    /// The softcap is not a positive finite number.
    Softcap {
        /// The softcap given.
        softcap: f32,
    },
    /// A feature depends on positions and `q_len != kv_len`, but `q_offset` is `None`.
    OffsetUnsaid {
        /// The feature that depends on positions.
        feature: Positional,
        /// Query rows of the sequence.
        q_len: usize,
        /// Keys of the sequence.
        kv_len: usize,
    },
    /// A feature depends on positions and padded or cached sequences have their own `kv_lens`, but `q_offset` is `None`.
    OffsetUnsaidPadded {
        /// The feature that depends on positions.
        feature: Positional,
    },
    /// The magnitude of `q_offset` is above the maximum.
    OffsetRange {
        /// The offset given.
        got: i64,
        /// The largest magnitude supported.
        max: usize,
    },
    /// Prefixes of sequences that are not cached.
    PrefixNotCached,
    /// The sequences of a prefix are an empty range, or out of the problem's range.
    PrefixSequences {
        /// Index of the prefix.
        index: usize,
        /// Its sequences.
        got: std::ops::Range<usize>,
        /// Sequences of the problem.
        sequences: usize,
    },
    /// A prefix is longer than one of its sequences.
    PrefixLen {
        /// Index of the prefix.
        index: usize,
        /// Index of the sequence.
        sequence: usize,
        /// Tokens of the prefix.
        len: usize,
        /// Tokens of the sequence.
        kv_len: usize,
    },
    /// A prefix is neither inside nor after the one before it, or is shorter than a prefix that contains it.
    PrefixOrder {
        /// Index of the prefix.
        index: usize,
    },
    /// The number of entries of `kv_lens` is not the batch size.
    KvLensCount {
        /// Entries given.
        got: usize,
        /// Batch entries.
        batch: usize,
    },
    /// A `kv_lens` entry is larger than `kv_len`.
    KvLen {
        /// Batch entry.
        index: usize,
        /// The length given.
        got: usize,
        /// Rows that k and v hold.
        kv_len: usize,
    },
    /// The batch size of a packed problem is not 1.
    PackedBatch {
        /// Batch entries given.
        batch: usize,
    },
    /// `cu_seqlens_q` and `kv_lens` of cached sequences describe different numbers of sequences.
    CachedCount {
        /// Entries of `cu_seqlens_q`.
        q: usize,
        /// Entries of `kv_lens`.
        kv: usize,
    },
    /// A cached sequence is longer than `kv_len`.
    CachedLen {
        /// Sequence.
        index: usize,
        /// The length given.
        got: usize,
        /// The bound.
        kv_len: usize,
    },
    /// Kept tokens do not fit the sequences.
    Kept(KeptError),
    /// A sequence with a tree mask, whose columns are its last `q_len` keys, has fewer keys than queries.
    TreeLen {
        /// Sequence.
        index: usize,
        /// Its query rows.
        q_len: usize,
        /// Its keys.
        kv_len: usize,
    },
    /// A tree mask for sequences that are not cached.
    TreeNotCached,
    /// `cu_seqlens_q` and `cu_seqlens_k` describe different numbers of sequences.
    CuSeqlensCount {
        /// Entries of `cu_seqlens_q`.
        q: usize,
        /// Entries of `cu_seqlens_k`.
        k: usize,
    },
    /// A cumulative length list is empty or does not start at 0.
    CuSeqlensStart {
        /// Which list.
        side: Side,
        /// Its first entry, if any.
        got: Option<usize>,
    },
    /// A cumulative length list decreases.
    CuSeqlensDecrease {
        /// Which list.
        side: Side,
        /// Index of the smaller entry.
        index: usize,
        /// The entry before it.
        from: usize,
        /// The smaller entry.
        to: usize,
    },
    /// A cumulative length list does not end at the number of rows.
    CuSeqlensEnd {
        /// Which list.
        side: Side,
        /// Its last entry.
        got: usize,
        /// Rows of the tensor.
        total: usize,
    },
}

impl fmt::Display for ProblemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HeadsNotDivisible { q_heads, kv_heads } => {
                write!(f, "q_heads {q_heads} is not a positive multiple of kv_heads {kv_heads}")
            }
            Self::HeadDim { name, got, max } => write!(f, "{name} {got} is outside 1..={max}"),
            Self::Codec { tensor, codec, dtype } => {
                write!(f, "{tensor} is {codec}, expected {dtype}: only cached sequences have other codecs")
            }
            Self::CodecDim { tensor, codec, dim } => {
                write!(f, "{tensor} is {codec} with {dim} elements a row, expected {}", codec.dims())
            }
            Self::KeyColumns(error) => error.fmt(f),
            Self::TooLong { name, got, max } => write!(f, "{name} {got} is above {max}"),
            Self::SizeOverflow { tensor, shape } => write!(f, "{tensor} {shape:?} is not addressable"),
            Self::Scale { scale } => write!(f, "scale {scale} is not finite"),
            Self::ScaleRange { scale, softcap, max } => {
                let divisor = softcap.map_or(String::new(), |softcap| format!(" / softcap {softcap:e}"));
                write!(f, "scale {scale:e}{divisor} is outside -{max:e}..={max:e}: scores would overflow f32")
            }
            Self::SoftcapRange { softcap, max } => {
                write!(f, "softcap {softcap:e} is above {max:e}: scale / softcap would underflow f32")
            }
            Self::Softcap { softcap } => write!(f, "softcap {softcap} is not a positive finite number"),
            Self::OffsetUnsaid { feature, q_len, kv_len } => write!(
                f,
                "{feature} with q_len {q_len} and kv_len {kv_len} needs q_offset: top-left, bottom-right or a number"
            ),
            Self::OffsetUnsaidPadded { feature } => {
                write!(f, "{feature} with kv_lens needs q_offset: top-left, bottom-right or a number")
            }
            Self::OffsetRange { got, max } => write!(f, "q_offset {got} is outside -{max}..={max}"),
            Self::KvLensCount { got, batch } => {
                write!(f, "kv_lens has {got} entries, expected {batch}, one per batch entry")
            }
            Self::KvLen { index, got, kv_len } => {
                write!(f, "kv_lens[{index}] is {got}, expected at most the {kv_len} rows of k and v")
            }
            Self::PackedBatch { batch } => {
                write!(f, "packed sequences need tensors with 1 batch entry, got {batch}")
            }
            Self::CachedCount { q, kv } => {
                write!(f, "cu_seqlens_q has {q} entries and kv_lens has {kv}, expected one fewer")
            }
            Self::CachedLen { index, got, kv_len } => {
                write!(f, "kv_lens[{index}] is {got}, expected at most kv_len {kv_len}")
            }
            Self::Kept(error) => error.fmt(f),
            Self::TreeLen { index, q_len, kv_len } => {
                write!(f, "tree mask over sequence {index}: q_len {q_len} is above kv_len {kv_len}")
            }
            Self::TreeNotCached => f.write_str("a tree mask needs cached sequences"),
            Self::PrefixNotCached => f.write_str("shared prefixes need cached sequences"),
            Self::PrefixSequences { index, got, sequences } => {
                write!(f, "prefixes[{index}] is of sequences {got:?}, expected a range within 0..{sequences}")
            }
            Self::PrefixLen { index, sequence, len, kv_len } => {
                write!(f, "prefixes[{index}] has {len} tokens, sequence {sequence} has {kv_len}")
            }
            Self::PrefixOrder { index } => write!(
                f,
                "prefixes[{index}] is neither inside nor after the one before it, or is shorter than a prefix that contains it"
            ),
            Self::CuSeqlensCount { q, k } => {
                write!(f, "cu_seqlens_q has {q} entries and cu_seqlens_k has {k}, expected the same number")
            }
            Self::CuSeqlensStart { side, got: Some(got) } => {
                write!(f, "{side} starts at {got}, expected 0")
            }
            Self::CuSeqlensStart { side, got: None } => write!(f, "{side} is empty, expected at least [0]"),
            Self::CuSeqlensDecrease { side, index, from, to } => {
                write!(f, "{side}[{index}] is {to} after {from}, expected at least {from}")
            }
            Self::CuSeqlensEnd { side, got, total } => {
                write!(f, "{side} ends at {got}, expected the {total} rows of the tensor")
            }
        }
    }
}

impl std::error::Error for ProblemError {}
