//! Quantization of one vector to codes and a scale, and back.
//!
//! Rotations are f32 additions in a fixed order. All steps after them use integers, apart from a few f64 values per
//! vector, so that every instruction set gives the same bytes.

use super::kind::{Codec, RowKind};
use super::numeric::{greatest, round};
use super::ops::Ops;
use super::rotation::{Rotate, Rotation};
use super::row_layout::SCALE_UNIT;
use super::tq::codebook::{Codebook, FACTORS, TRIALS};
use crate::limits::MAX_HEAD_DIM;
use half::f16;

/// The criterion for a scale: unbiased inner products for keys, the mean square error for values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScaleRule {
    /// `<x, x> / <x, c>`: the inner product with the vector itself is exact.
    Unbiased,
    /// `<x, c> / <c, c>`: least squares.
    LeastSquares,
}

/// The encoder tries scales of `(72 + 5 t) / 100` times the root mean square. A vector whose largest coordinate is small needs a smaller
/// scale than its norm suggests; trying several gains 0.7 dB at 4 bits and 0.9 dB at 5 and 6.
pub(super) const TRIAL_SCALES: [f64; TRIALS] = {
    let (mut scales, mut t) = ([0.0; TRIALS], 0);
    while t < TRIALS {
        scales[t] = (72 + 5 * t) as f64 / 100.0;
        t += 1;
    }
    scales
};

/// A vector whose largest magnitude is below this is stored as zeros: its scale would be 0 in f16.
pub(super) const MIN_MAGNITUDE: f32 = 1e-12;

/// Adding 2^52 rounds to an integer: the sum has no fraction bits.
pub(super) const ROUNDER: f64 = (1u64 << 52) as f64;

/// The largest magnitude in fixed point.
pub(super) const ONE: f32 = 32767.0;

/// The elements of one vector, in fixed point.
struct Fixed {
    signed: [i16; MAX_HEAD_DIM],
    magnitudes: [u16; MAX_HEAD_DIM],
}

/// A rotated codec of one dimension.
#[derive(Debug, Clone)]
pub(super) struct Quantizer {
    dim: usize,
    pub(super) rotation: Rotation,
    /// `None` for 8-bit integers.
    pub(super) levels: Option<&'static Codebook>,
}

impl Quantizer {
    /// For codes of 2 to 6 bits, or 8 for integers.
    pub(super) fn new(dim: usize, bits: usize) -> Self {
        Self { dim, rotation: Rotation::new(dim), levels: (bits < 8).then(|| Codebook::of(bits)) }
    }

    /// Encodes a vector whose elements are finite and whose norm is at most [`MAX_NORM`](super::error::MAX_NORM), and returns its scale.
    /// Leaves the vector rotated. A vector of zeros has codes of 0 and a scale of 0.
    #[inline(always)]
    pub(super) fn encode<O: Ops + Rotate>(&self, x: &mut [f32], rule: ScaleRule, codes: &mut [u8]) -> f16 {
        O::rotate(&self.rotation, x);
        let dim = self.dim;
        let (x, codes) = (&x[..dim], &mut codes[..dim]);
        let amax = greatest(x);
        if amax < MIN_MAGNITUDE {
            codes.fill(0);
            return f16::ZERO;
        }
        let mut fixed = Fixed { signed: [0; MAX_HEAD_DIM], magnitudes: [0; MAX_HEAD_DIM] };
        O::fixed(x, ONE / amax, &mut fixed.signed, &mut fixed.magnitudes);
        let energy = O::energy(&fixed.magnitudes[..dim]);
        let (xc, cc) = match self.levels {
            None => integers(&fixed, codes),
            Some(levels) => {
                let rms = (energy as f64 / dim as f64).sqrt();
                search::<O>(&fixed, levels, rms, codes)
            }
        };
        let scale = match rule {
            ScaleRule::Unbiased => energy as f64 / xc as f64,
            ScaleRule::LeastSquares => xc as f64 / cc as f64,
        };
        f16::from_f32(scale_of(scale, amax))
    }

    /// The value of each code, `[64]`; `None` for 8-bit integers, which are their own values.
    pub(super) fn table(&self) -> Option<&'static [i8; 64]> {
        self.levels.map(|levels| &levels.signed)
    }
}

/// The stored scale for a scale in fixed-point units, where `amax` is the vector's largest magnitude.
#[inline(always)]
pub(super) fn scale_of(scale: f64, amax: f32) -> f32 {
    (scale * f64::from(amax / ONE) * f64::from(SCALE_UNIT)) as f32
}

/// Half-levels per fixed-point unit, times 2^16: the edges between levels are multiples of half-levels.
#[inline(always)]
pub(super) fn unit(levels: &Codebook) -> f64 {
    f64::from(2 << 16) * FACTORS[levels.bits - 2]
}

/// Half-levels per fixed-point unit, times 2^16, for one trial scale of a vector with this root mean square.
#[inline(always)]
fn trial_factor(unit: f64, rms: f64, trial: f64) -> u16 {
    // The factor is below 2^15: the largest magnitude is ONE, so the root mean square is at least ONE / sqrt(dim). The sum with ROUNDER
    // rounds to nearest even; vector instructions have no conversion to 16 bits.
    let x = unit / (rms * trial);
    (x + ROUNDER).to_bits() as u16
}

/// The factor of a trial scale, for a vector that in fixed point has this energy and a largest magnitude of 32767; `None` for codecs
/// without levels, and for trials that do not exist.
pub fn level_factor(codec: Codec, dim: usize, energy: u64, trial: usize) -> Option<u16> {
    let RowKind::Integers { bits: bits @ 2..=6 } = codec.row_kind() else { return None };
    let rms = (energy as f64 / dim as f64).sqrt();
    Some(trial_factor(unit(Codebook::of(bits)), rms, *TRIAL_SCALES.get(trial)?))
}

/// Writes codes of 8 bits; returns the sum of their products with the vector, and the sum of their squares.
#[inline(always)]
fn integers(fixed: &Fixed, codes: &mut [u8]) -> (u64, u64) {
    let (mut xc, mut cc) = (0i64, 0u32);
    for (code, x) in codes.iter_mut().zip(&fixed.signed) {
        let c = round(f32::from(*x) * (127.0 / ONE)) as i8;
        xc += i64::from(i32::from(*x) * i32::from(c));
        cc += u32::from(c.unsigned_abs()) * u32::from(c.unsigned_abs());
        *code = c as u8;
    }
    (xc as u64, u64::from(cc))
}

/// Writes the codes of the trial scale with which least squares explains most of the energy. Returns the same sums as [`integers`].
#[inline(always)]
fn search<O: Ops>(fixed: &Fixed, levels: &Codebook, rms: f64, codes: &mut [u8]) -> (u64, u64) {
    let magnitudes = &fixed.magnitudes[..codes.len()];
    let unit = unit(levels);
    let mut factors = [0u16; TRIALS];
    for (factor, trial) in factors.iter_mut().zip(TRIAL_SCALES) {
        *factor = trial_factor(unit, rms, trial);
    }
    let (products, squares) = O::sums(levels, magnitudes, &factors);
    let (mut best, mut chosen) = (-1.0f64, 0);
    for t in 0..TRIALS {
        let explained = f64::from(products[t]) * f64::from(products[t]) / f64::from(squares[t]);
        if explained > best {
            (best, chosen) = (explained, t);
        }
    }
    O::indices(levels, magnitudes, factors[chosen], codes);
    for (code, x) in codes.iter_mut().zip(&fixed.signed) {
        *code |= u8::from(*x < 0) << (levels.bits - 1);
    }
    (u64::from(products[chosen]), u64::from(squares[chosen]))
}
