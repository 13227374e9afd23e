//! Scores in units of log2, so that their softmax needs `exp2` alone: a bias `x` becomes `x log2 e`.

use flashtile_kernel::prelude::*;

/// `log2 e`.
#[constant]
pub const LOG2E: f32 = std::f32::consts::LOG2_E;
/// `ln 2`.
#[constant]
pub const LN2: f32 = std::f32::consts::LN_2;

/// The part of a bias whose magnitude is above this, `2^126`, is multiplied by [`HUGE_RATE`] instead of `log2 e`: the
/// largest f32 in units of log2 would be infinite. Where biases are that large, neighbouring f32 are so far apart that
/// their order alone decides the softmax.
#[constant]
pub const HUGE_BIAS: f32 = 8.507_059e37;
/// The factor of the part of a bias beyond [`HUGE_BIAS`], in place of `log2 e`.
#[constant]
pub const HUGE_RATE: f32 = 0.5;
/// `HUGE_BIAS` in units of log2.
#[constant]
pub const HUGE_SCORE: f32 = 1.227_309_2e38;

/// A score in units of log2.
#[device]
pub fn to_log2(score: f32) -> f32 {
    let core = score.max(-HUGE_BIAS).min(HUGE_BIAS);
    // The difference carries infinities and NaN.
    core * LOG2E + (score - core) * HUGE_RATE
}

/// The inverse of [`to_log2`].
#[device]
pub fn from_log2(x: f32) -> f32 {
    if x.abs() <= HUGE_SCORE || x.abs() == f32::INFINITY {
        return x * LN2;
    }
    // `x` was rounded, so the result could exceed the largest f32, which the score did not.
    let magnitude = (HUGE_BIAS + (x.abs() - HUGE_SCORE) / HUGE_RATE).min(3.402_823_5e38);
    select(x < 0.0, -magnitude, magnitude)
}

/// Element `element` of an additive or boolean mask, as a bias in its own units; `kind` is 0 for f32, 1 f16, 2 bf16, 3 bool.
#[device]
pub fn bias_at(mask: &Buffer<u8>, kind: u32, element: u64) -> f32 {
    if kind == 0 {
        let bias = mask.load_as::<f32, 1>(4 * element);
        return bias[0];
    }
    if kind == 3 {
        return select(mask[element] as u32 != 0, 0.0, f32::NEG_INFINITY);
    }
    let bits = mask.load_as::<u16, 1>(2 * element);
    let mut bias = pair_f16(bits[0] as u32);
    if kind == 2 {
        bias = pair_bf16(bits[0] as u32);
    }
    bias[0]
}
