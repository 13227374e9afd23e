//! Refusals of cache operations, with the numbers that caused them.

use super::seq_id::SeqId;
use crate::codec::{Codec, EncodeError};
use std::fmt;

/// Why an operation on a cache was refused. The cache is as it was before.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheError {
    /// A number of the description is 0 or above the maximum.
    Dimension {
        /// Field of [`CacheDesc`](super::CacheDesc) or [`CacheLayout`](super::CacheLayout).
        name: &'static str,
        /// The number given.
        got: usize,
        /// The largest supported.
        max: usize,
    },
    /// A codec has no rows of this length.
    CodecDim {
        /// `k` or `v`.
        tensor: &'static str,
        /// The codec given.
        codec: Codec,
        /// Elements of a row.
        dim: usize,
    },
    /// The pools of a cache of this description are not addressable.
    SizeOverflow {
        /// Number of layers.
        layers: usize,
        /// Shape of the larger pool of a layer.
        pool: [usize; 4],
    },
    /// An allocation failed.
    Memory {
        /// Bytes asked for.
        bytes: usize,
    },
    /// Every slot has a sequence, or the number of sequences is at its maximum.
    OutOfSlots {
        /// Slots of the cache, or the largest number of sequences.
        slots: usize,
    },
    /// The operation needs more pages than are free.
    OutOfPages {
        /// Pages that the whole operation needs.
        needed: usize,
        /// Pages that are free.
        free: usize,
    },
    /// The sequence would become longer than the cache allows.
    Capacity {
        /// The length it would have.
        len: usize,
        /// The largest length.
        capacity: usize,
    },
    /// The sequence belongs to another cache.
    ForeignSequence {
        /// The sequence given.
        seq: SeqId,
    },
    /// The sequence was removed.
    RemovedSequence {
        /// The sequence given.
        seq: SeqId,
    },
    /// A batch lists a sequence twice.
    DuplicateSequence {
        /// The sequence.
        seq: SeqId,
    },
    /// The cache has no such layer.
    Layer {
        /// The layer given.
        got: usize,
        /// Layers of the cache.
        layers: usize,
    },
    /// Pages were asked for as tensors, and their rows are not plain elements.
    NotElements {
        /// `k` or `v`.
        tensor: &'static str,
        /// How the rows are stored.
        codec: Codec,
    },
    /// Stored rows were asked for, and they are plain elements.
    NotCodes {
        /// `k` or `v`.
        tensor: &'static str,
        /// How the rows are stored.
        codec: Codec,
    },
    /// Rows to be loaded are stored otherwise than those of the cache.
    Codec {
        /// `k` or `v`.
        tensor: &'static str,
        /// The codec of this cache.
        expected: Codec,
        /// The codec given.
        got: Codec,
    },
    /// Rows to be loaded were stored with another mean than those of the cache.
    Mean {
        /// The layer.
        layer: usize,
    },
    /// A row cannot be stored in a quantizing codec.
    Row {
        /// `k` or `v`.
        tensor: &'static str,
        /// Its key/value head.
        head: usize,
        /// Its row of the tensor.
        row: usize,
        /// Why.
        why: EncodeError,
    },
    /// A mean that has not an element for each of a head's.
    MeanLength {
        /// Elements given.
        got: usize,
        /// `kv_heads * head_dim`.
        expected: usize,
    },
    /// A mean that holds a NaN or an infinity.
    MeanNotFinite,
    /// A mean for a layer that has rows.
    MeanFixed {
        /// The layer.
        layer: usize,
    },
    /// A mean for keys that are plain elements.
    MeanOfElements {
        /// How keys are stored.
        codec: Codec,
    },
    /// Bytes that are no snapshot that this version reads.
    SnapshotHeader {
        /// What is not known.
        field: &'static str,
    },
    /// Bytes of a snapshot of another number than its header says.
    SnapshotLength {
        /// Bytes that the header says, or of a header.
        expected: usize,
        /// Bytes given.
        got: usize,
    },
    /// A snapshot of tokens that no sequence keeps.
    SnapshotRange {
        /// First token.
        first: usize,
        /// Length of the sequence.
        end: usize,
        /// The largest length.
        max: usize,
    },
    /// A snapshot whose keys have another mean than those of the cache.
    SnapshotMean {
        /// The first layer of which that is so.
        layer: usize,
    },
    /// Tensors were not given for every layer.
    LayerCount {
        /// Pairs given.
        got: usize,
        /// Layers of the cache.
        layers: usize,
    },
    /// A tensor's shape is not the one that the operation needs.
    Shape {
        /// Name of the tensor.
        tensor: &'static str,
        /// The shape needed.
        expected: [usize; 4],
        /// The tensor's shape.
        got: [usize; 4],
    },
    /// A write of more tokens than the sequence has.
    Tokens {
        /// The sequence.
        seq: SeqId,
        /// Tokens to be written.
        got: usize,
        /// Length of the sequence.
        len: usize,
    },
    /// A position to which the sequence cannot be cut.
    Position {
        /// The sequence.
        seq: SeqId,
        /// The position given.
        got: usize,
        /// The smallest position.
        min: usize,
        /// The largest position.
        max: usize,
    },
    /// A snapshot of a cache with other dimensions.
    SnapshotDimension {
        /// Field of [`CacheDesc`](super::CacheDesc).
        name: &'static str,
        /// The number of this cache.
        expected: usize,
        /// The number of the snapshot.
        got: usize,
    },
    /// A snapshot of a cache with another codec.
    SnapshotCodec {
        /// `k` or `v`.
        tensor: &'static str,
        /// The codec of this cache.
        expected: Codec,
        /// The codec of the snapshot.
        got: Codec,
    },
}

impl fmt::Display for CacheError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dimension { name, got, max } => write!(f, "{name} {got} is outside 1..={max}"),
            Self::CodecDim { tensor, codec, dim } => {
                write!(f, "{tensor} is {codec} with {dim} elements a row, expected {}", codec.dims())
            }
            Self::SizeOverflow { layers, pool } => {
                write!(f, "a cache of {layers} layers with pools {pool:?} is not addressable")
            }
            Self::Memory { bytes } => write!(f, "no memory for {bytes} bytes"),
            Self::OutOfSlots { slots } => write!(f, "all {slots} slots have a sequence"),
            Self::OutOfPages { needed, free } => write!(f, "{needed} pages are needed, {free} are free"),
            Self::Capacity { len, capacity } => {
                write!(f, "the sequence would have {len} tokens, expected at most {capacity}")
            }
            Self::ForeignSequence { seq } => write!(f, "{seq} belongs to another cache"),
            Self::RemovedSequence { seq } => write!(f, "{seq} was removed"),
            Self::DuplicateSequence { seq } => write!(f, "{seq} is listed twice"),
            Self::Layer { got, layers } => write!(f, "layer {got} asked for, the cache has {layers}"),
            Self::NotElements { tensor, codec } => {
                write!(f, "{tensor} is stored as {codec}, which is not a tensor of elements")
            }
            Self::NotCodes { tensor, codec } => {
                write!(f, "{tensor} is stored as {codec}, which is not codes")
            }
            Self::Codec { tensor, expected, got } => write!(f, "{tensor} is {got}, expected {expected}"),
            Self::Mean { layer } => {
                write!(f, "rows for layer {layer} were stored with another mean than those of this cache")
            }
            Self::Row { tensor, head, row, why } => write!(f, "row {row} of head {head} of {tensor} {why}"),
            Self::MeanLength { got, expected } => {
                write!(f, "mean has {got} elements, expected {expected}: kv_heads * head_dim")
            }
            Self::MeanNotFinite => f.write_str("mean holds a NaN or an infinity"),
            Self::MeanFixed { layer } => write!(f, "layer {layer} has rows: the mean of its keys is fixed"),
            Self::MeanOfElements { codec } => {
                write!(f, "keys are stored as {codec}, expected a quantizing codec for a mean")
            }
            Self::SnapshotHeader { field } => {
                write!(f, "snapshot has another {field} than this version reads")
            }
            Self::SnapshotLength { expected, got } => {
                write!(f, "snapshot has {got} bytes, expected {expected}")
            }
            Self::SnapshotRange { first, end, max } => {
                write!(
                    f,
                    "snapshot keeps tokens {first}..{end}, expected a range that ends at {max} or before"
                )
            }
            Self::SnapshotMean { layer } => {
                write!(f, "snapshot has keys of layer {layer} with another mean than this cache")
            }
            Self::LayerCount { got, layers } => {
                write!(f, "{got} pairs of k and v, expected one for each of {layers} layers")
            }
            Self::Shape { tensor, expected, got } => {
                write!(f, "{tensor} has shape {got:?}, expected {expected:?}")
            }
            Self::Tokens { seq, got, len } => {
                write!(f, "write of {got} tokens to {seq}, which has {len}")
            }
            Self::Position { seq, got, min, max } => {
                write!(f, "position {got} of {seq} is outside {min}..={max}")
            }
            Self::SnapshotDimension { name, expected, got } => {
                write!(f, "snapshot has {name} {got}, expected {expected}")
            }
            Self::SnapshotCodec { tensor, expected, got } => {
                write!(f, "snapshot has {tensor} as {got}, expected {expected}")
            }
        }
    }
}

impl std::error::Error for CacheError {}
