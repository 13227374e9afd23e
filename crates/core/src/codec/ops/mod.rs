//! Steps of the codecs that have an implementation per instruction set, all with the same bits.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;

use super::convert::widen;
use super::numeric::round;
use super::tq::codebook::{Codebook, TRIALS};
use super::walsh::{Real, butterflies};
use crate::dtype::Dtype;
use crate::limits::MAX_HEAD_DIM;

/// Steps of a rotation. An implementation uses registers of one width, because a wide load stalls on narrow stores just before it.
pub(super) trait RotationOps<T: Real> {
    /// The Walsh-Hadamard transform of a slice whose length is a power of two, unscaled: butterflies of distance 1,
    /// 2, 4, ...
    #[inline(always)]
    fn walsh(x: &mut [T]) {
        butterflies(x, 1);
    }

    /// Multiplies by a scalar.
    #[inline(always)]
    fn scale(x: &mut [T], by: T) {
        for x in x {
            *x = *x * by;
        }
    }

    /// Multiplies elementwise by signs, 1 or -1.
    #[inline(always)]
    fn flip(x: &mut [T], signs: &[f32]) {
        for (x, sign) in x.iter_mut().zip(signs) {
            *x = *x * T::from(*sign);
        }
    }
}

/// Steps of encoder and decoder. They are only called by functions compiled for the instruction set; a default method
/// is a loop that the compiler vectorises.
pub(super) trait Ops: RotationOps<f32> {
    /// Widens a row of elements to f32.
    #[inline(always)]
    fn widen(from: Dtype, row: &[u8], into: &mut [f32]) {
        widen(from, row, into);
    }

    /// Rounds `x * factor` to integers below 2^15 in magnitude, ties to even; writes the integers and their magnitudes.
    #[inline(always)]
    fn fixed(x: &[f32], factor: f32, integers: &mut [i16], magnitudes: &mut [u16]) {
        for ((x, integer), magnitude) in x.iter().zip(integers).zip(magnitudes) {
            *integer = round(x * factor) as i16;
            *magnitude = integer.unsigned_abs();
        }
    }

    /// The sum of squares of magnitudes below 2^15.
    #[inline(always)]
    fn energy(magnitudes: &[u16]) -> u64 {
        let mut sum = 0;
        for x in magnitudes {
            sum += u64::from(u32::from(*x) * u32::from(*x));
        }
        sum
    }

    /// For each factor, the sum of products of magnitudes with their nearest levels, and the sum of squares of these levels. A magnitude
    /// `x` is `x * factor / 2^16` half-levels, rounded down, at most 255.
    #[inline(always)]
    fn sums(
        codebook: &Codebook,
        magnitudes: &[u16],
        factors: &[u16; TRIALS],
    ) -> ([u32; TRIALS], [u32; TRIALS]) {
        let (mut halves, mut nearest) = ([0u8; MAX_HEAD_DIM], [0u8; MAX_HEAD_DIM]);
        let (halves, nearest) = (&mut halves[..magnitudes.len()], &mut nearest[..magnitudes.len()]);
        let (mut products, mut squares) = ([0; TRIALS], [0; TRIALS]);
        for (factor, (xc, cc)) in factors.iter().zip(products.iter_mut().zip(&mut squares)) {
            in_halves(magnitudes, *factor, halves);
            codebook.nearest(halves, nearest);
            for (x, level) in magnitudes.iter().zip(&*nearest) {
                *xc += u32::from(*x) * u32::from(*level);
                *cc += u32::from(u16::from(*level) * u16::from(*level));
            }
        }
        (products, squares)
    }

    /// The indices of the nearest levels for one factor.
    #[inline(always)]
    fn indices(codebook: &Codebook, magnitudes: &[u16], factor: u16, indices: &mut [u8]) {
        let mut halves = [0u8; MAX_HEAD_DIM];
        let halves = &mut halves[..magnitudes.len()];
        in_halves(magnitudes, factor, halves);
        codebook.indices(halves, indices);
    }

    /// Replaces codes below 64 by their levels, as bytes.
    #[inline(always)]
    fn look_up(levels: &[i8; 64], codes: &mut [u8]) {
        for code in codes {
            *code = levels[usize::from(*code % 64)].cast_unsigned();
        }
    }
}

/// Portable loops.
pub(super) struct Portable;

impl<T: Real> RotationOps<T> for Portable {}
impl Ops for Portable {}

#[inline(always)]
fn in_halves(magnitudes: &[u16], factor: u16, halves: &mut [u8]) {
    for (half, x) in halves.iter_mut().zip(magnitudes) {
        *half = ((u32::from(*x) * u32::from(factor)) >> 16).min(255) as u8;
    }
}
