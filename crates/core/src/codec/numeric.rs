//! Numbers that every instruction set must compute in the same way.

#[must_use]
/// The greatest magnitude; what is not finite is greater than all others. Their bits are ordered as they are, and vectors take the maximum of integers.
#[inline(always)]
pub fn greatest(x: &[f32]) -> f32 {
    let mut most = 0u32;
    for x in x {
        most = most.max(x.to_bits() & i32::MAX as u32);
    }
    f32::from_bits(most)
}

/// The integer nearest to a number below 2^22 in magnitude, ties to even: the sum with 3 * 2^22 has no place for fractions.
#[inline(always)]
pub fn round(x: f32) -> i32 {
    const ROUNDER: f32 = 12_582_912.0;
    (x + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits()) as i32
}

/// The sum of squares, in an order that vectors have too.
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
