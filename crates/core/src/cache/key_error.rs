//! Why mean or factors of keys are refused.

use crate::codec::{Codec, KEY_FACTOR_RANGE};
use std::fmt;

/// Why mean or factors of keys are refused, or do not fit a cache. `part` is `mean` or `factors`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyTransformError {
    /// Rows to be loaded were stored with another mean or other factors than the layer's.
    Rows {
        /// The layer.
        layer: usize,
        /// The part that differs.
        part: &'static str,
    },
    /// The keys of a snapshot have another mean or other factors than the cache has, or one of the two has none:
    /// [`KvCache::set_key_mean`](super::KvCache::set_key_mean) takes the mean of [`Snapshot::key_mean`](super::Snapshot::key_mean),
    /// [`KvCache::set_key_factors`](super::KvCache::set_key_factors) the factors of
    /// [`Snapshot::key_factors`](super::Snapshot::key_factors).
    Snapshot {
        /// The first layer that differs.
        layer: usize,
        /// The part that differs.
        part: &'static str,
    },
    /// The length is not that of a row of all heads.
    Length {
        /// The part.
        part: &'static str,
        /// Its elements.
        got: usize,
        /// `kv_heads * head_dim`.
        expected: usize,
    },
    /// The layer already has rows, so that mean and factors of its keys cannot change.
    Fixed {
        /// The layer.
        layer: usize,
    },
    /// A mean has a NaN or an infinity.
    MeanNotFinite,
    /// A mean for keys that are not quantized.
    MeanOfElements {
        /// The codec of the keys.
        codec: Codec,
    },
    /// A factor is NaN, or its magnitude is outside [`KEY_FACTOR_RANGE`].
    FactorRange {
        /// The first such key/value head.
        head: usize,
        /// The element of its keys.
        channel: usize,
    },
    /// Factors for keys that are not rotated, or are in another library's format.
    FactorsOfCodec {
        /// The codec of the keys.
        codec: Codec,
    },
}

impl fmt::Display for KeyTransformError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rows { layer, part } => {
                write!(f, "rows for layer {layer} and this cache differ in the {part} of their keys")
            }
            Self::Snapshot { layer, part } => {
                write!(f, "snapshot and this cache differ in the {part} of the keys of layer {layer}")
            }
            Self::Length { part, got, expected } => {
                write!(f, "{part} of {got} elements, expected {expected}: kv_heads * head_dim")
            }
            Self::Fixed { layer } => {
                write!(f, "layer {layer} has rows: mean and factors of its keys are fixed")
            }
            Self::MeanNotFinite => f.write_str("mean holds a NaN or an infinity"),
            Self::MeanOfElements { codec } => {
                write!(f, "keys are stored as {codec}, expected a quantizing codec for a mean")
            }
            Self::FactorRange { head, channel } => {
                let (min, max) = (KEY_FACTOR_RANGE.start(), KEY_FACTOR_RANGE.end());
                write!(
                    f,
                    "factor of channel {channel} of head {head}: expected a magnitude from {min:e} to {max:e}"
                )
            }
            Self::FactorsOfCodec { codec } => {
                let known = Codec::ALL.into_iter().filter(|codec| codec.supports_key_factors());
                let known = known.map(Codec::name).collect::<Vec<_>>().join(", ");
                write!(f, "keys are stored as {codec}, expected one of {known} for factors")
            }
        }
    }
}

impl std::error::Error for KeyTransformError {}
