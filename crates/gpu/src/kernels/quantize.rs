//! Steps of the encoder, which is [`encode`](super::encode): numbers in fixed point, factors of the levels, and scales.
//!
//! The encoder of the host computes some of it in f64, which some GPUs do not have; here it is computed with integers:
//!
//! | of a vector | in f64 | here |
//! |---|---|---|
//! | eight factors | nearest integers to `2^17 F / (k / 100 sqrt(E / D))` | [`factor_of`]: compares squares, which are whole numbers |
//! | the best of eight trials | greatest `p^2 / s` | [`rounded`], [`quotient`]: the bits of that f64 |
//! | the scale | `E / p` or `p / s`, times two f32, to f32, to f16 | the same with [`product`] and [`narrowed`] |
//!
//! Comparing squares gives the factors without rounding, f64 gives them with some. Both are steps that fall as the
//! energy `E` grows, so they agree everywhere if they agree next to every step. The host looks for the few steps next to
//! which they do not ([`f64_steps`](crate::encoding::f64_steps)); a test goes through all steps of all formats and head
//! dimensions.

use super::formats::{FP8, ROT16, TQ2, TQ3, TQ4, TQ5};
use super::formats::{in_planes, is_mlx};
use flashtile_kernel::prelude::*;

/// A greatest coordinate below this is that of a vector of zeros.
#[constant]
pub const MIN_MAGNITUDE: f32 = 1e-12;

/// Coordinates in fixed point: the greatest magnitude is this.
#[constant]
pub const ONE: f32 = 32767.0;

/// The factor from coordinates in fixed point to integers of 8 bits.
#[constant]
pub const TO_INTEGER: f32 = 127.0 / 32767.0;

/// The scale of e4m3 numbers whose greatest is 448, in units of 2^-8.
#[constant]
pub const TO_E4M3: f32 = 256.0 / 448.0;

/// Codes are nearest integers.
#[constant]
pub const INTEGERS: u32 = 0;
/// Codes are indices of levels, of the best of eight scales.
#[constant]
pub const LEVELS: u32 = 1;
/// Codes are e4m3 numbers.
#[constant]
pub const FLOATS: u32 = 2;
/// Codes are indices into a codebook of mlx-native.
#[constant]
pub const CODEBOOK: u32 = 3;
/// Codes are f16 numbers.
#[constant]
pub const HALVES: u32 = 4;

/// How the codes of a format are found.
pub const fn scheme_of(format: u32) -> u32 {
    if is_mlx(format) {
        CODEBOOK
    } else if format == ROT16 {
        HALVES
    } else if format == FP8 {
        FLOATS
    } else if in_planes(format) {
        LEVELS
    } else {
        INTEGERS
    }
}

/// The bits of the f64 nearest to `x * 2^exponent`, ties to even. Not 0; `more` says that something is below the last
/// bit of x, which has 55 bits then.
#[device]
pub fn rounded(x: u64, more: bool, exponent: i32) -> u64 {
    let zeros = x.leading_zeros();
    let whole = x << zeros;
    let kept = whole >> 11u32;
    let rest = whole & 0x7ff;
    let up = rest > 0x400 || (rest == 0x400 && (more || kept & 1 == 1));
    // The exponent is one short: the first bit of `kept` adds it. So does a carry.
    (((1085 - zeros as i32 + exponent) as u64) << 52u32) + kept + select(up, 1u64, 0u64)
}

/// The 53 bits of an f64.
#[device]
fn mantissa(bits: u64) -> u64 {
    bits & 0x000f_ffff_ffff_ffff | 0x0010_0000_0000_0000
}

/// The bits of the f64 nearest to `a / b`; `a` is the bits of a positive normal f64.
#[device]
pub fn quotient(a: u64, b: u32) -> u64 {
    let zeros = b.leading_zeros();
    let under = (b << zeros) as u64;
    // 53 + 35 bits by 32: in two steps, of 10 and 25 bits more.
    let first = mantissa(a) << 10u32;
    let second = first % under << 25u32;
    let result = (first / under << 25u32) + second / under;
    rounded(result, second % under != 0, (a >> 52u32) as i32 - 1110 + zeros as i32)
}

/// The bits of the f64 nearest to a product; `a` and `b` are the bits of a positive normal f64 and f32.
#[device]
pub fn product(a: u64, b: u32) -> u64 {
    let factor = (b & 0x007f_ffff | 0x0080_0000) as u64;
    let low = (mantissa(a) & 0x03ff_ffff) * factor;
    let high = (mantissa(a) >> 26u32) * factor + (low >> 26u32);
    // 77 bits at most: 61 of them, and whether the others are 0.
    let result = high << 10u32 | (low & 0x03ff_ffff) >> 16u32;
    rounded(result, low & 0xffff != 0, (a >> 52u32) as i32 + (b >> 23u32) as i32 - 1209)
}

/// The f32 nearest to a positive f64 in its normal range.
#[device]
pub fn narrowed(bits: u64) -> f32 {
    let kept = (mantissa(bits) >> 29u32) as u32;
    let rest = bits as u32 & 0x1fff_ffff;
    let up = rest > 0x1000_0000 || (rest == 0x1000_0000 && kept & 1 == 1);
    let exponent = ((bits >> 52u32) as u32) - 897;
    f32::from_bits((exponent << 23u32) + kept + select(up, 1u32, 0u32))
}

/// `100 F`, where `F` is the factor of a format's table of levels: see [`factor_of`].
#[device]
pub fn hundredfold(format: u32) -> u32 {
    if format == TQ2 {
        return 8410;
    }
    if format == TQ3 {
        return 4530;
    }
    if format == TQ4 {
        return 4520;
    }
    select(format == TQ5, 2900, 2880)
}

/// The energy whose exact factor is the factor that f64 finds for `energy`: its neighbour, where a `step` of
/// [`f64_steps`](crate::encoding::f64_steps) says so, otherwise `other`.
#[device]
pub fn stepped(energy: u64, step: u64, other: u64) -> u64 {
    let neighbour = select(step & 1 == 1, energy + 1, energy - 1);
    select(step >> 1u32 == energy, neighbour, other)
}

/// Halves of levels in units of the fixed point, 2^16 times, for a scale of `(72 + 5 trial) / 100` of the root mean
/// square: the integer nearest to `x = 2^17 F / ((72 + 5 trial) / 100 sqrt(energy / DIM))`.
///
/// It is above n where `x > n + 1/2`, which is `(2 n + 1)^2 (72 + 5 trial)^2 energy < 2^36 (100 F)^2 DIM`. Where the sides
/// are equal it is n.
#[device]
pub fn factor_of<const FORMAT: u32, const DIM: usize>(energy: u64, trial: u32) -> u32 {
    let percent = 72 + 5 * trial;
    let factor = hundredfold(FORMAT);
    let root = (energy as f32 * (percent * percent) as f32).rsqrt();
    let near = 131072.0 * factor as f32 * (DIM as f32).sqrt() * root;
    // f32 is off by less than 1/4.
    let nearest = (near + 0.25) as u32;
    let limit = factor as u64 * factor as u64 * DIM as u64;
    let root = ((2 * nearest + 1) * percent) as u64;
    let square = root * root;
    // The product's bits from 36 on; the limit has none below.
    let left = (square * (energy >> 20u32) + (square * (energy & 0xf_ffff) >> 20u32)) >> 16u32;
    nearest + select(left < limit, 1u32, 0u32)
}

/// The f16 of a scale, as bits: of the energy and the sums of products and of squares of codes, all in fixed point, of
/// which ONE is `most`.
#[device]
pub fn scale_of(energy: u64, products: u32, squares: u32, most: f32, unbiased: bool) -> u32 {
    let over = select(unbiased, energy, products as u64);
    let under = select(unbiased, products, squares);
    let ratio = quotient(rounded(over, false, 0), under);
    let unit = most / ONE;
    // 7 more in the exponent: times 128.
    let scale = narrowed(product(ratio, unit.to_bits()) + (7u64 << 52u32));
    f16x2_from(scale, 0.0)
}

/// The e4m3 number nearest to a finite one, ties to even; beyond the largest, the largest.
#[device]
pub fn e4m3_of(x: f32) -> u32 {
    let bits = x.to_bits();
    let magnitude = (bits & 0x7fff_ffff).min(0x43e0_0000);
    // The exponent, from that of subnormal numbers on.
    let exponent = (magnitude >> 23u32).max(121);
    // A number whose last bit is a step of that exponent: a sum with it is rounded to steps, ties to even.
    let rounder = ((exponent + 20) << 23u32) | 0x0040_0000;
    let steps = (f32::from_bits(magnitude) + f32::from_bits(rounder)).to_bits() - rounder;
    (bits >> 24u32 & 0x80) | ((exponent - 121 << 3u32) + steps)
}
