//! Functions that every instruction set must compute with the same bits.

/// The largest magnitude; NaN and infinity are larger than all others. Magnitudes compare like their bits, so vector code takes the maximum
/// of integers.
#[must_use]
#[inline(always)]
pub fn greatest(x: &[f32]) -> f32 {
    let mut amax = 0u32;
    for x in x {
        amax = amax.max(x.to_bits() & i32::MAX as u32);
    }
    f32::from_bits(amax)
}

/// Rounds a value below 2^22 in magnitude to the nearest integer, ties to even: the sum with 3 * 2^22 has no fraction bits.
#[inline(always)]
pub fn round(x: f32) -> i32 {
    const ROUNDER: f32 = 12_582_912.0;
    (x + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits()) as i32
}

/// The sum of squares, in an order that vector code can follow.
#[inline(always)]
pub(super) fn energy(x: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    for x in x.chunks(16) {
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum += x * x;
        }
    }
    sums.iter().sum()
}
