//! The transform of keys before they are encoded: a mean that is subtracted, and a factor for each channel.

use super::convert;
use super::mean::head_rows;
use crate::isa::FloatEnv;
use crate::tensor::TensorView;
use std::ops::RangeInclusive;

/// Magnitudes of key factors: a factor and its inverse keep the products of ordinary queries and keys in the range of f32.
pub const KEY_FACTOR_RANGE: RangeInclusive<f32> = 1.0 / (1u64 << 32) as f32..=(1u64 << 32) as f32;

/// The smallest deviation of a channel that [`key_factors`] distinguishes, relative to the root mean square over the head's channels: a
/// channel that is constant in the keys measured has this deviation.
const MIN_DEVIATION: f64 = 1.0 / 256.0;

/// Mean and factors of the keys of a layer, `[kv_heads, head_dim]` each. Keys are centered and divided before they are rotated and encoded:
///
/// ```text
/// stored key = encode(R ((k - mean) / factors)),    decoded key = factors * R^T decode(stored key) + mean
/// ```
///
/// Attention keeps the scores: `q . k = (R (q * factors)) . decode(stored key) + q . mean`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct KeyTransform {
    mean: Option<Vec<f32>>,
    factors: Option<Vec<f32>>,
    /// One over each factor; empty without factors.
    inverses: Vec<f32>,
}

/// The transform of a layer without one.
pub(crate) static IDENTITY: KeyTransform = KeyTransform { mean: None, factors: None, inverses: Vec::new() };

impl KeyTransform {
    /// A transform with this mean and these factors, if there are any. The caller has checked the factors, whose magnitudes are in
    /// [`KEY_FACTOR_RANGE`].
    #[must_use]
    pub fn new(mean: Option<Vec<f32>>, factors: Option<Vec<f32>>) -> Self {
        let inverses = factors.iter().flatten().map(|factor| 1.0 / factor).collect();
        Self { mean, factors, inverses }
    }

    /// The transform with another mean.
    #[must_use]
    pub fn with_mean(self, mean: Vec<f32>) -> Self {
        Self { mean: Some(mean), ..self }
    }

    /// The transform with other factors.
    #[must_use]
    pub fn with_factors(self, factors: Vec<f32>) -> Self {
        Self::new(self.mean, Some(factors))
    }

    /// The mean that is subtracted from keys.
    #[must_use]
    pub fn mean(&self) -> Option<&[f32]> {
        self.mean.as_deref()
    }

    /// The factors that keys are divided by.
    #[must_use]
    pub fn factors(&self) -> Option<&[f32]> {
        self.factors.as_deref()
    }

    /// One over each factor, rounded: what the encoder multiplies by.
    #[must_use]
    pub fn inverses(&self) -> Option<&[f32]> {
        self.factors.as_ref().map(|_| &self.inverses[..])
    }

    /// Returns true if keys are encoded as they are.
    #[must_use]
    pub const fn is_identity(&self) -> bool {
        self.mean.is_none() && self.factors.is_none()
    }

    /// The name of the part, `mean` or `factors`, in which two transforms differ.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Option<&'static str> {
        if self.mean != other.mean {
            Some("mean")
        } else if self.factors != other.factors {
            Some("factors")
        } else {
            None
        }
    }

    /// The slices of the transform, of all heads.
    pub(crate) fn view(&self) -> ChannelTransform<'_> {
        ChannelTransform { mean: self.mean(), factors: self.factors(), inverses: self.inverses() }
    }
}

/// Slices of a [`KeyTransform`], of all heads or of one.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ChannelTransform<'a> {
    pub(crate) mean: Option<&'a [f32]>,
    pub(crate) factors: Option<&'a [f32]>,
    pub(crate) inverses: Option<&'a [f32]>,
}

impl<'a> ChannelTransform<'a> {
    /// The part of a head.
    #[inline(always)]
    pub(crate) fn head(self, head: usize, dim: usize) -> Self {
        let of = |all: &'a [f32]| &all[head * dim..][..dim];
        Self { mean: self.mean.map(of), factors: self.factors.map(of), inverses: self.inverses.map(of) }
    }
}

/// Factors `[heads, dim]` of keys `[batch, heads, rows, dim]` of any dtype, for
/// [`KvCache::set_key_factors`](crate::cache::KvCache::set_key_factors): a power of each channel's standard deviation around the mean
/// `[heads, dim]`, over batch and rows.
///
/// ```text
/// deviation[c] = max(sqrt(average((k[c] - mean[c])^2)), rms / 256)      rms: of the deviations of the head's channels
/// factor[c]    = deviation[c]^power / g                                 g: the geometric mean of deviation^power over the head
/// ```
///
/// All factors of a head without deviations are 1. A power of 0.5 moves half of the difference between channels to the queries, as in
/// SmoothQuant (Xiao et al. 2023); 1 gives all channels the same deviation. Measure them with the keys of a representative prompt, as
/// [`key_mean`](super::key_mean). The factors of no rows, or of keys that are not finite, are NaN. Sums are in f64, in the order of the rows.
///
/// ```
/// use flashtile::{TensorView, codec::{key_factors, key_mean}};
/// let keys = [9.0f32, 1.0, 7.0, -1.0]; // 2 tokens of 1 head: the deviations are 1 and 1
/// let keys = TensorView::packed(&keys, [2, 1, 2])?;
/// assert_eq!(key_factors(&keys, &key_mean(&keys), 0.5), [1.0, 1.0]);
/// let keys = [1.0f32, 16.0, -1.0, -16.0]; // deviations of 1 and 16
/// let keys = TensorView::packed(&keys, [2, 1, 2])?;
/// assert_eq!(key_factors(&keys, &key_mean(&keys), 0.5), [0.5, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Panics
/// If the mean has another length.
#[must_use]
pub fn key_factors(keys: &TensorView<'_>, mean: &[f32], power: f32) -> Vec<f32> {
    let _env = FloatEnv::ieee();
    let [_, heads, _, dim] = keys.shape();
    assert!(mean.len() == heads * dim, "a mean of {} elements for {heads} heads of {dim}", mean.len());
    let mut factors = Vec::with_capacity(heads * dim);
    let mut key = vec![0.0f32; dim];
    for head in 0..heads {
        let mean = &mean[head * dim..][..dim];
        let (mut squares, mut count) = (vec![0.0f64; dim], 0.0);
        for row in head_rows(keys, head) {
            convert::to_f32(keys.dtype(), row, &mut key);
            for (square, (x, mean)) in squares.iter_mut().zip(key.iter().zip(mean)) {
                *square += (f64::from(*x) - f64::from(*mean)).powi(2);
            }
            count += 1.0;
        }
        let floor = MIN_DEVIATION.powi(2) * (squares.iter().sum::<f64>() / dim as f64);
        // Logarithms of deviation^power, up to a constant, which the geometric mean removes. A NaN stays.
        let log = |square: f64| {
            let square = if square < floor { floor } else { square };
            0.5 * f64::from(power) * (square / count).ln()
        };
        let logs: Vec<f64> =
            if floor == 0.0 && count > 0.0 { vec![0.0; dim] } else { squares.into_iter().map(log).collect() };
        let average = logs.iter().sum::<f64>() / dim as f64;
        factors.extend(logs.into_iter().map(|log| (log - average).exp() as f32));
    }
    factors
}
