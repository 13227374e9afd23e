//! Why a cache operation is refused, with the values that caused it.

use super::keep_error::KeepError;
use super::key_error::KeyTransformError;
use super::seq_id::SeqId;
use crate::codec::{Codec, EncodeError};
use crate::problem::KeyColumnsError;
use std::fmt;

/// Why an operation on a cache was refused. The cache is unchanged.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheError {
    /// A field of the description is 0 or above the maximum.
    Dimension {
        /// Field of [`CacheDesc`](super::CacheDesc) or [`CacheLayout`](super::CacheLayout).
        name: &'static str,
        /// Its value.
        got: usize,
        /// The largest supported.
        max: usize,
    },
    /// A codec does not support the dimension of its rows.
    CodecDim {
        /// `k` or `v`.
        tensor: &'static str,
        /// The codec.
        codec: Codec,
        /// Elements of a row.
        dim: usize,
    },
    /// Values cannot be columns of the keys.
    KeyColumns(KeyColumnsError),
    /// Values are columns of the keys, and those given are not [`first_columns`](crate::codec::KvView::first_columns) of the keys given.
    NotKeyColumns,
    /// Values are columns of the keys: there are no rows of their own to give.
    NoValueRows,
    /// Tokens cannot be kept in 16 bits as asked.
    Keep(KeepError),
    /// The pools of the cache are too large to be addressed.
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
    /// Every slot is taken, or the number of sequences is at its maximum.
    OutOfSlots {
        /// Slots of the cache, or the largest number of sequences.
        slots: usize,
    },
    /// The operation needs more pages than are free.
    OutOfPages {
        /// Pages needed by the whole operation.
        needed: usize,
        /// Pages that are free.
        free: usize,
    },
    /// The sequence would become longer than the layout allows.
    Capacity {
        /// The length it would have.
        len: usize,
        /// The largest length.
        capacity: usize,
    },
    /// The sequence belongs to another cache.
    ForeignSequence {
        /// The sequence.
        seq: SeqId,
    },
    /// The sequence was removed.
    RemovedSequence {
        /// The sequence.
        seq: SeqId,
    },
    /// A batch lists a sequence twice.
    DuplicateSequence {
        /// The sequence.
        seq: SeqId,
    },
    /// The cache has no such layer.
    Layer {
        /// The layer asked for.
        got: usize,
        /// Layers of the cache.
        layers: usize,
    },
    /// A step ends, and this layer has no rows of its tokens.
    LayerNotWritten {
        /// The first such layer.
        layer: usize,
    },
    /// Pages were asked for as tensors, but their rows are not plain elements.
    NotElements {
        /// `k` or `v`.
        tensor: &'static str,
        /// The codec.
        codec: Codec,
    },
    /// Quantized rows were asked for, but the rows are plain elements.
    NotCodes {
        /// `k` or `v`.
        tensor: &'static str,
        /// The codec.
        codec: Codec,
    },
    /// Rows to be loaded have another codec than the cache.
    Codec {
        /// `k` or `v`.
        tensor: &'static str,
        /// The codec of this cache.
        expected: Codec,
        /// The codec of the rows.
        got: Codec,
    },
    /// Mean or factors of keys are refused, or differ from the cache's.
    KeyTransform(KeyTransformError),
    /// A row cannot be stored in a quantizing codec.
    Row {
        /// The layer.
        layer: usize,
        /// `k` or `v`.
        tensor: &'static str,
        /// Its key/value head.
        head: usize,
        /// The row of the tensor.
        row: usize,
        /// The reason.
        why: EncodeError,
    },
    /// The bytes are not a snapshot that this version can read.
    SnapshotHeader {
        /// The field of the header that is not recognised.
        field: &'static str,
    },
    /// The length of a snapshot differs from the length in its header.
    SnapshotLength {
        /// Bytes according to the header, or the size of a header.
        expected: usize,
        /// Bytes found.
        got: usize,
    },
    /// The range of kept tokens of a snapshot is impossible.
    SnapshotRange {
        /// First kept token.
        first: usize,
        /// Length of the sequence.
        end: usize,
        /// The largest length.
        max: usize,
    },
    /// The number of pairs of tensors is not the number of layers.
    LayerCount {
        /// Pairs found.
        got: usize,
        /// Layers of the cache.
        layers: usize,
    },
    /// A tensor does not have the shape that the operation needs.
    Shape {
        /// Name of the tensor.
        tensor: &'static str,
        /// The shape needed.
        expected: [usize; 4],
        /// The shape of the tensor.
        got: [usize; 4],
    },
    /// A write of more tokens than the sequence keeps.
    Tokens {
        /// The sequence.
        seq: SeqId,
        /// Tokens to be written.
        got: usize,
        /// Length of the sequence.
        len: usize,
    },
    /// The sequence cannot be cut at this position.
    Position {
        /// The sequence.
        seq: SeqId,
        /// The position asked for.
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
        /// The value of this cache.
        expected: usize,
        /// The value of the snapshot.
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
    /// The snapshot and the cache differ in their [`KvStorage`](crate::problem::KvStorage).
    SnapshotStorage,
}

impl CacheError {
    /// The error with the layer that it names, if it names one, replaced by another.
    pub(super) fn map_layer(mut self, map: impl FnOnce(usize) -> usize) -> Self {
        if let Self::Row { layer, .. }
        | Self::KeyTransform(
            KeyTransformError::Rows { layer, .. } | KeyTransformError::Fixed { layer },
        ) = &mut self
        {
            *layer = map(*layer);
        }
        self
    }
}

impl fmt::Display for CacheError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dimension { name, got, max } => write!(f, "{name} {got} is outside 1..={max}"),
            Self::CodecDim { tensor, codec, dim } => {
                write!(f, "{tensor} is {codec} with {dim} elements a row, expected {}", codec.dims())
            }
            Self::KeyColumns(error) => error.fmt(f),
            Self::NotKeyColumns => f.write_str("v is not the first columns of k, as the cache stores it"),
            Self::Keep(error) => error.fmt(f),
            Self::NoValueRows => f.write_str("values are columns of the keys: v has no rows of its own"),
            Self::SizeOverflow { layers, pool } => {
                write!(f, "a cache of {layers} layers with pools {pool:?} is not addressable")
            }
            Self::Memory { bytes } => write!(f, "no memory for {bytes} bytes"),
            Self::OutOfSlots { slots } => write!(f, "all {slots} slots are taken"),
            Self::OutOfPages { needed, free } => {
                let pages = if *needed == 1 { "page is" } else { "pages are" };
                let are = if *free == 1 { "is" } else { "are" };
                write!(f, "{needed} {pages} needed, {free} {are} free")
            }
            Self::Capacity { len, capacity } => {
                write!(f, "the sequence would have {len} tokens, expected at most {capacity}")
            }
            Self::ForeignSequence { seq } => write!(f, "{seq} belongs to another cache"),
            Self::RemovedSequence { seq } => write!(f, "{seq} was removed"),
            Self::DuplicateSequence { seq } => write!(f, "{seq} is listed twice"),
            Self::Layer { got, layers } => write!(f, "layer {got} asked for, the cache has {layers}"),
            Self::LayerNotWritten { layer } => write!(f, "layer {layer} has no rows of this step's tokens"),
            Self::NotElements { tensor, codec } => {
                write!(f, "{tensor} is stored as {codec}, which is not a tensor of elements")
            }
            Self::NotCodes { tensor, codec } => {
                write!(f, "{tensor} is stored as {codec}, which is not codes")
            }
            Self::Codec { tensor, expected, got } => write!(f, "{tensor} is {got}, expected {expected}"),
            Self::KeyTransform(error) => error.fmt(f),
            Self::Row { layer, tensor, head, row, why } => {
                write!(f, "layer {layer}: row {row} of head {head} of {tensor} {why}")
            }
            Self::SnapshotHeader { field } => {
                write!(f, "snapshot has another {field} than this version reads")
            }
            Self::SnapshotLength { expected, got } => {
                write!(f, "snapshot has {got} bytes, expected {expected}")
            }
            Self::SnapshotRange { first, end, max } => {
                write!(f, "snapshot keeps tokens {first}..{end}, expected a range that ends by {max}")
            }
            Self::LayerCount { got, layers } => {
                write!(f, "{got} pairs of k and v, expected one for each of {layers} layers")
            }
            Self::Shape { tensor, expected, got } => {
                write!(f, "{tensor} has shape {got:?}, expected {expected:?}")
            }
            Self::Tokens { seq, got, len } => write!(f, "write of {got} tokens to {seq}, which has {len}"),
            Self::Position { seq, got, min, max } => {
                write!(f, "position {got} of {seq} is outside {min}..={max}")
            }
            Self::SnapshotDimension { name, expected, got } => {
                write!(f, "snapshot has {name} {got}, expected {expected}")
            }
            Self::SnapshotStorage => f.write_str("snapshot stores values in another way than the cache"),
            Self::SnapshotCodec { tensor, expected, got } => {
                write!(f, "snapshot has {tensor} as {got}, expected {expected}")
            }
        }
    }
}

impl std::error::Error for CacheError {}

impl From<KeyTransformError> for CacheError {
    fn from(error: KeyTransformError) -> Self {
        Self::KeyTransform(error)
    }
}

impl From<KeepError> for CacheError {
    fn from(error: KeepError) -> Self {
        Self::Keep(error)
    }
}
