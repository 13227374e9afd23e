//! AVX2 with FMA and F16C: 8 lanes, 16 registers, a 6 x 2 register tile.

#![allow(unsafe_code)]

use super::super::simd::{Elem, LINES, Simd};
use crate::kernels::shared::products::f32_fma::F32;
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(crate) struct Avx2;

// SAFETY of every block below: the trait's contract gives the instruction set and the memory.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx2 {
    const LANES: usize = 8;
    const REGISTERS: usize = 16;
    const ROWS: usize = crate::plan::register_tile(flashtile_core::isa::Isa::Avx2).rows;
    const VECTORS: usize = crate::plan::register_tile(flashtile_core::isa::Isa::Avx2).vectors;
    type V = __m256;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn abs(a: Self::V) -> Self::V {
        unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), a) }
    }
    #[inline(always)]
    unsafe fn select_lt(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        unsafe { _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
    }
    #[inline(always)]
    unsafe fn select_eq(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        unsafe { _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b)) }
    }
    #[inline(always)]
    unsafe fn and(a: Self::V, bits: u32) -> Self::V {
        unsafe { _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(bits.cast_signed()))) }
    }
    #[inline(always)]
    unsafe fn shift_up_16(a: Self::V) -> Self::V {
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(a))) }
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn scale2(a: Self::V, n: Self::V, x: Self::V) -> Self::V {
        unsafe {
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            let scaled = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)));
            _mm256_and_ps(scaled, _mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(-126.0)))
        }
    }
    #[inline(always)]
    unsafe fn reduce_add(a: Self::V) -> f32 {
        unsafe {
            let x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        }
    }
    #[inline(always)]
    unsafe fn reduce_max(a: Self::V) -> f32 {
        unsafe {
            let x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_bool(p: *const u8) -> Self::V {
        unsafe {
            let wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
            let hidden = _mm256_castsi256_ps(_mm256_cmpeq_epi32(wide, _mm256_setzero_si256()));
            _mm256_and_ps(hidden, _mm256_set1_ps(f32::NEG_INFINITY))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: Self::V) {
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: Self::V) {
        unsafe {
            let bits = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            // A NaN keeps its upper half, made quiet, because rounding could carry it into an infinity.
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let high = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256::<1>(high));
            _mm_storeu_si128(p.cast(), packed);
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn transpose<E: Elem>(rows: [*const E; 16]) -> [Self::V; LINES] {
        unsafe {
            // Pairs of rows are transposed first, then quads of rows inside 128-bit lanes, then the lanes themselves. These are plain loops
            // because a closure would be a function without the instruction set.
            let mut pairs = [_mm256_setzero_ps(); 8];
            for i in 0..4 {
                let (x, y) = (E::load::<Self>(rows[2 * i]), E::load::<Self>(rows[2 * i + 1]));
                pairs[2 * i] = _mm256_unpacklo_ps(x, y);
                pairs[2 * i + 1] = _mm256_unpackhi_ps(x, y);
            }
            let mut lines = [_mm256_setzero_ps(); 8];
            for i in 0..4 {
                let (a, c, e, g) = (pairs[i / 2], pairs[2 + i / 2], pairs[4 + i / 2], pairs[6 + i / 2]);
                let (x, y) = if i % 2 == 0 {
                    (_mm256_shuffle_ps::<0x44>(a, c), _mm256_shuffle_ps::<0x44>(e, g))
                } else {
                    (_mm256_shuffle_ps::<0xee>(a, c), _mm256_shuffle_ps::<0xee>(e, g))
                };
                lines[i] = _mm256_permute2f128_ps::<0x20>(x, y);
                lines[i + 4] = _mm256_permute2f128_ps::<0x31>(x, y);
            }
            lines
        }
    }
}

crate::isa::entry::entry_points!(any, Avx2, F32, "avx2,fma,f16c");
