//! Butterflies in registers of 16 lanes. With VBMI, nearest levels are looked up in 256-byte tables, each in four registers.

#![allow(unsafe_code)]

use super::{Ops, Portable, RotationOps};
use crate::codec::tq::codebook::{Codebook, TRIALS};
use crate::codec::walsh::butterflies;
use crate::dtype::Dtype;
use std::arch::x86_64::*;

/// AVX-512 with BW, DQ and VL.
pub(in crate::codec) struct Avx512;

impl RotationOps<f32> for Avx512 {
    #[inline(always)]
    fn walsh(x: &mut [f32]) {
        if x.len() < LANES {
            return butterflies(x, 1);
        }
        let (blocks, rest) = x.as_chunks_mut::<BLOCK>();
        for block in blocks {
            // SAFETY: the caller is compiled for these instructions.
            unsafe { walsh_block(block) }
        }
        for x in rest.as_chunks_mut::<LANES>().0 {
            // SAFETY: as above; 16 elements.
            unsafe { _mm512_storeu_ps(x.as_mut_ptr(), short_butterflies(_mm512_loadu_ps(x.as_ptr()))) }
        }
        let done = if rest.is_empty() { BLOCK } else { LANES };
        butterflies(x, done);
    }

    #[inline(always)]
    fn scale(x: &mut [f32], by: f32) {
        let (whole, rest) = x.as_chunks_mut::<LANES>();
        for x in whole {
            // SAFETY: the caller is compiled for these instructions; 16 elements.
            unsafe {
                _mm512_storeu_ps(
                    x.as_mut_ptr(),
                    _mm512_mul_ps(_mm512_loadu_ps(x.as_ptr()), _mm512_set1_ps(by)),
                );
            }
        }
        Portable::scale(rest, by);
    }

    #[inline(always)]
    fn flip(x: &mut [f32], signs: &[f32]) {
        let ((whole, rest), (signs, rest_signs)) = (x.as_chunks_mut::<LANES>(), signs.as_chunks::<LANES>());
        for (x, signs) in whole.iter_mut().zip(signs) {
            // SAFETY: as above.
            unsafe {
                let flipped = _mm512_mul_ps(_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(signs.as_ptr()));
                _mm512_storeu_ps(x.as_mut_ptr(), flipped);
            }
        }
        Portable::flip(rest, rest_signs);
    }
}

impl Ops for Avx512 {
    #[inline(always)]
    fn widen(from: Dtype, row: &[u8], into: &mut [f32]) {
        if from != Dtype::F16 {
            return Portable::widen(from, row, into);
        }
        let (row, rest) = row.as_chunks::<{ 2 * LANES }>();
        let (into, rest_into) = into.split_at_mut(LANES * row.len());
        for (row, into) in row.iter().zip(into.as_chunks_mut::<LANES>().0) {
            // SAFETY: the caller is compiled for these instructions; 16 elements.
            unsafe {
                let x = _mm512_cvtph_ps(_mm256_loadu_si256(row.as_ptr().cast()));
                _mm512_storeu_ps(into.as_mut_ptr(), x);
            }
        }
        Portable::widen(from, rest, rest_into);
    }

    #[inline(always)]
    fn fixed(x: &[f32], factor: f32, integers: &mut [i16], magnitudes: &mut [u16]) {
        const STEP: usize = 2 * LANES;
        let (whole, rest) = x.as_chunks::<STEP>();
        let (integers, rest_integers) = integers.split_at_mut(x.len() - rest.len());
        let (magnitudes, rest_magnitudes) = magnitudes.split_at_mut(x.len() - rest.len());
        let places = integers.as_chunks_mut::<STEP>().0.iter_mut().zip(magnitudes.as_chunks_mut::<STEP>().0);
        for (x, (integers, magnitudes)) in whole.iter().zip(places) {
            // SAFETY: the caller is compiled for these instructions; 32 elements each.
            unsafe {
                let half = |n: usize| {
                    let x = _mm512_loadu_ps(x.as_ptr().add(n * LANES));
                    _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(factor))))
                };
                let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(half(0)), half(1));
                _mm512_storeu_si512(integers.as_mut_ptr().cast(), both);
                _mm512_storeu_si512(magnitudes.as_mut_ptr().cast(), _mm512_abs_epi16(both));
            }
        }
        Portable::fixed(rest, factor, rest_integers, rest_magnitudes);
    }

    #[inline(always)]
    fn energy(magnitudes: &[u16]) -> u64 {
        // SAFETY: the caller is compiled for these instructions; loads are masked.
        unsafe {
            let mut sums = _mm512_setzero_si512();
            for part in magnitudes.chunks(32) {
                let x = _mm512_maskz_loadu_epi16(u32::MAX >> (32 - part.len()), part.as_ptr().cast());
                // The sum of two squares of magnitudes below 2^15 is below 2^31.
                let pairs = _mm512_madd_epi16(x, x);
                sums = _mm512_add_epi64(sums, _mm512_and_si512(pairs, _mm512_set1_epi64(u32::MAX.into())));
                sums = _mm512_add_epi64(sums, _mm512_srli_epi64::<32>(pairs));
            }
            _mm512_reduce_add_epi64(sums).cast_unsigned()
        }
    }

    #[inline(always)]
    fn look_up(levels: &[i8; 64], codes: &mut [u8]) {
        // SAFETY: the caller is compiled for these instructions; 16 bytes, loads and stores are masked.
        unsafe {
            let table = |n: usize| {
                _mm512_broadcast_i32x4(_mm_loadu_si128(levels.as_ptr().wrapping_add(16 * n).cast()))
            };
            let tables = [table(0), table(1), table(2), table(3)];
            for codes in codes.chunks_mut(STEP) {
                let there = u64::MAX >> (STEP - codes.len());
                let at = _mm512_maskz_loadu_epi8(there, codes.as_ptr().cast());
                let bit = |n: i8| _mm512_test_epi8_mask(at, _mm512_set1_epi8(1 << n));
                let index = _mm512_and_si512(at, _mm512_set1_epi8(15));
                let quarter = |n: usize| _mm512_shuffle_epi8(tables[n], index);
                let low = _mm512_mask_mov_epi8(quarter(0), bit(4), quarter(1));
                let high = _mm512_mask_mov_epi8(quarter(2), bit(4), quarter(3));
                let levels = _mm512_mask_mov_epi8(low, bit(5), high);
                _mm512_mask_storeu_epi8(codes.as_mut_ptr().cast(), there, levels);
            }
        }
    }
}

/// AVX-512 with VBMI and VNNI.
pub(in crate::codec) struct Vbmi;

/// f32 lanes of a register, and of eight registers.
const LANES: usize = 16;
const BLOCK: usize = 8 * LANES;

/// Magnitudes per step.
const STEP: usize = 64;

impl RotationOps<f32> for Vbmi {
    #[inline(always)]
    fn walsh(x: &mut [f32]) {
        Avx512::walsh(x);
    }

    #[inline(always)]
    fn scale(x: &mut [f32], by: f32) {
        Avx512::scale(x, by);
    }

    #[inline(always)]
    fn flip(x: &mut [f32], signs: &[f32]) {
        Avx512::flip(x, signs);
    }
}

impl Ops for Vbmi {
    #[inline(always)]
    fn widen(from: Dtype, row: &[u8], into: &mut [f32]) {
        Avx512::widen(from, row, into);
    }

    #[inline(always)]
    fn fixed(x: &[f32], factor: f32, integers: &mut [i16], magnitudes: &mut [u16]) {
        Avx512::fixed(x, factor, integers, magnitudes);
    }

    #[inline(always)]
    fn energy(magnitudes: &[u16]) -> u64 {
        Avx512::energy(magnitudes)
    }

    #[inline(always)]
    fn sums(
        codebook: &Codebook,
        magnitudes: &[u16],
        factors: &[u16; TRIALS],
    ) -> ([u32; TRIALS], [u32; TRIALS]) {
        // SAFETY: the caller is compiled for these instructions; loads are masked.
        unsafe {
            let table = load_table(&codebook.nearest_of);
            let zero = _mm512_setzero_si512();
            // Products, then squares.
            let mut sums = [zero; 2 * TRIALS];
            for part in magnitudes.chunks(STEP) {
                let masks = masks(part.len());
                let low = _mm512_maskz_loadu_epi16(masks[0], part.as_ptr().cast());
                let high = _mm512_maskz_loadu_epi16(masks[1], part.as_ptr().wrapping_add(32).cast());
                // Packing interleaves runs of eight from either register, and unpacking undoes it.
                let all = _mm512_set1_epi16(255);
                let there = _mm512_packus_epi16(
                    _mm512_maskz_mov_epi16(masks[0], all),
                    _mm512_maskz_mov_epi16(masks[1], all),
                );
                for t in 0..TRIALS {
                    let factor = _mm512_set1_epi16(factors[t].cast_signed());
                    let halves = _mm512_packus_epi16(
                        _mm512_mulhi_epu16(low, factor),
                        _mm512_mulhi_epu16(high, factor),
                    );
                    let nearest = _mm512_and_si512(look_up(&table, halves), there);
                    sums[t] = _mm512_dpwssd_epi32(sums[t], low, _mm512_unpacklo_epi8(nearest, zero));
                    sums[t] = _mm512_dpwssd_epi32(sums[t], high, _mm512_unpackhi_epi8(nearest, zero));
                    sums[TRIALS + t] = _mm512_dpbusd_epi32(sums[TRIALS + t], nearest, nearest);
                }
            }
            // Sums wrap past 31 bits; read as unsigned, they are exact up to 32.
            let mut both = [[0u32; TRIALS]; 2];
            _mm512_storeu_si512(both.as_mut_ptr().cast(), add_up(&sums));
            (both[0], both[1])
        }
    }

    #[inline(always)]
    fn indices(codebook: &Codebook, magnitudes: &[u16], factor: u16, indices: &mut [u8]) {
        // SAFETY: as above; stores are masked, and there are as many indices as magnitudes.
        unsafe {
            let table = load_table(&codebook.index_of);
            let factor = _mm512_set1_epi16(factor.cast_signed());
            for (part, indices) in magnitudes.chunks(STEP).zip(indices.chunks_mut(STEP)) {
                let halves = |n: usize| {
                    let p = part.as_ptr().wrapping_add(32 * n).cast();
                    let magnitudes = _mm512_maskz_loadu_epi16(masks(part.len())[n], p);
                    _mm512_cvtusepi16_epi8(_mm512_mulhi_epu16(magnitudes, factor))
                };
                let halves = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(halves(0)), halves(1));
                let there = u64::MAX >> (STEP - indices.len());
                _mm512_mask_storeu_epi8(indices.as_mut_ptr().cast(), there, look_up(&table, halves));
            }
        }
    }

    #[inline(always)]
    fn look_up(levels: &[i8; 64], codes: &mut [u8]) {
        // SAFETY: as above.
        unsafe {
            let table = _mm512_loadu_si512(levels.as_ptr().cast());
            for codes in codes.chunks_mut(STEP) {
                let there = u64::MAX >> (STEP - codes.len());
                let at = _mm512_maskz_loadu_epi8(there, codes.as_ptr().cast());
                let levels = _mm512_permutexvar_epi8(at, table);
                _mm512_mask_storeu_epi8(codes.as_mut_ptr().cast(), there, levels);
            }
        }
    }
}

/// The sums of the lanes of each register.
#[inline(always)]
pub(in crate::codec) unsafe fn add_up(x: &[__m512i; 16]) -> __m512i {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        // In each 128-bit lane, the lane's sums for four registers.
        let mut fours = [_mm512_setzero_si512(); 4];
        for (n, four) in fours.iter_mut().enumerate() {
            let pair = |at: usize| {
                let (a, b) = (x[4 * n + at], x[4 * n + at + 1]);
                _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b))
            };
            let (ab, cd) = (pair(0), pair(2));
            *four = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        }
        // Adds pairs of 128-bit lanes, then the two halves.
        let lanes = |a, b| {
            _mm512_add_epi32(
                _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b),
                _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b),
            )
        };
        lanes(lanes(fours[0], fours[1]), lanes(fours[2], fours[3]))
    }
}

/// Butterflies of distances 1 to 64, without stores between them.
#[inline(always)]
unsafe fn walsh_block(x: &mut [f32; BLOCK]) {
    // SAFETY: 16 elements each; the caller guarantees the instruction set.
    unsafe {
        let mut v = [_mm512_setzero_ps(); 8];
        for (n, v) in v.iter_mut().enumerate() {
            *v = short_butterflies(_mm512_loadu_ps(x.as_ptr().add(n * LANES)));
        }
        for distance in [1, 2, 4] {
            for low in (0..8).filter(|n| n & distance == 0) {
                let (a, b) = (v[low], v[low + distance]);
                (v[low], v[low + distance]) = (_mm512_add_ps(a, b), _mm512_sub_ps(a, b));
            }
        }
        for (n, v) in v.iter().enumerate() {
            _mm512_storeu_ps(x.as_mut_ptr().add(n * LANES), *v);
        }
    }
}

/// Butterflies of distances 1 to 8. Products with 1 and -1 are exact, so that a multiply-add rounds like an addition
/// or a subtraction.
#[inline(always)]
pub(in crate::codec) unsafe fn short_butterflies(mut x: __m512) -> __m512 {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        let signs = |minus| _mm512_mask_mov_ps(_mm512_set1_ps(1.0), minus, _mm512_set1_ps(-1.0));
        x = _mm512_fmadd_ps(x, signs(0xaaaa), _mm512_permute_ps::<0b10_11_00_01>(x));
        x = _mm512_fmadd_ps(x, signs(0xcccc), _mm512_permute_ps::<0b01_00_11_10>(x));
        x = _mm512_fmadd_ps(x, signs(0xf0f0), _mm512_shuffle_f32x4::<0b10_11_00_01>(x, x));
        _mm512_fmadd_ps(x, signs(0xff00), _mm512_shuffle_f32x4::<0b01_00_11_10>(x, x))
    }
}

/// The masks of the magnitudes that exist in a step, 1 to 64 of them.
#[inline(always)]
const fn masks(len: usize) -> [__mmask32; 2] {
    let there = u64::MAX >> (STEP - len);
    [there as u32, (there >> 32) as u32]
}

#[inline(always)]
pub(in crate::codec) unsafe fn load_table(table: &[u8; 256]) -> [__m512i; 4] {
    // SAFETY: 64 bytes each; the caller guarantees the instruction set.
    unsafe {
        let part = |n: usize| _mm512_loadu_si512(table.as_ptr().add(64 * n).cast());
        [part(0), part(1), part(2), part(3)]
    }
}

#[inline(always)]
pub(in crate::codec) unsafe fn look_up(table: &[__m512i; 4], at: __m512i) -> __m512i {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        let low = _mm512_permutex2var_epi8(table[0], at, table[1]);
        let high = _mm512_permutex2var_epi8(table[2], at, table[3]);
        _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(at), high)
    }
}
