//! Levels of codes by 16-byte shuffles.

#![allow(unsafe_code)]

use super::{Ops, Portable, RotationOps};
use std::arch::x86_64::*;

/// AVX2.
pub(in crate::codec) struct Avx2;

/// Codes per step.
const STEP: usize = 32;

impl RotationOps<f32> for Avx2 {}

impl Ops for Avx2 {
    #[inline(always)]
    fn look_up(levels: &[i8; 64], codes: &mut [u8]) {
        let (steps, rest) = codes.as_chunks_mut::<STEP>();
        // SAFETY: the caller is compiled for these instructions; loads of 16 and stores of 32 bytes are in bounds.
        unsafe {
            let table = |n: usize| {
                _mm256_broadcastsi128_si256(_mm_loadu_si128(levels.as_ptr().wrapping_add(16 * n).cast()))
            };
            let tables = [table(0), table(1), table(2), table(3)];
            for codes in steps {
                let at = _mm256_loadu_si256(codes.as_ptr().cast());
                // Blends select by the sign bit of a byte, so bits 4 and 5 are moved there. Bits shifted in from the byte below land
                // lower and have no effect.
                let (fourth, fifth) = (_mm256_slli_epi16::<3>(at), _mm256_slli_epi16::<2>(at));
                let index = _mm256_and_si256(at, _mm256_set1_epi8(15));
                let quarter = |n: usize| _mm256_shuffle_epi8(tables[n], index);
                let low = _mm256_blendv_epi8(quarter(0), quarter(1), fourth);
                let high = _mm256_blendv_epi8(quarter(2), quarter(3), fourth);
                _mm256_storeu_si256(codes.as_mut_ptr().cast(), _mm256_blendv_epi8(low, high, fifth));
            }
        }
        Portable::look_up(levels, rest);
    }
}
