//! AVX-512 F, BW, DQ and VL, with or without BF16 and AMX: 16 lanes, 32 registers, a 6 x 4 register tile.

#![allow(unsafe_code)]

use super::super::simd::{Elem, LINES, Simd};
use super::{byte_codes, vnni};
use crate::kernels::forward::products::byte_codes::{ByteLanes, ByteScores, ByteValues};
use crate::kernels::forward::products::vnni::{IntegerLanes, IntegerScores, IntegerValues};
use crate::kernels::shared::products::bf16_pairs::PairLanes;
use std::arch::x86_64::*;

/// Vectors of 512 bits. Pairs of bf16 in them also need AVX-512 BF16.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

// SAFETY of every block below: the trait's contract gives the instruction set and the memory.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx512 {
    const LANES: usize = 16;
    const REGISTERS: usize = 32;
    const ROWS: usize = crate::plan::register_tile(flashtile_core::isa::Isa::Avx512).rows;
    const VECTORS: usize = crate::plan::register_tile(flashtile_core::isa::Isa::Avx512).vectors;
    type V = __m512;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn abs(a: Self::V) -> Self::V {
        unsafe { _mm512_abs_ps(a) }
    }
    #[inline(always)]
    unsafe fn select_lt(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x) }
    }
    #[inline(always)]
    unsafe fn select_eq(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b), y, x) }
    }
    #[inline(always)]
    unsafe fn and(a: Self::V, bits: u32) -> Self::V {
        unsafe { _mm512_and_ps(a, _mm512_castsi512_ps(_mm512_set1_epi32(bits.cast_signed()))) }
    }
    #[inline(always)]
    unsafe fn shift_up_16(a: Self::V) -> Self::V {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(a))) }
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        unsafe { _mm512_roundscale_ps::<0>(a) }
    }
    #[inline(always)]
    unsafe fn scale2(a: Self::V, n: Self::V, x: Self::V) -> Self::V {
        unsafe {
            let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
            _mm512_maskz_scalef_ps(normal, a, n)
        }
    }
    #[inline(always)]
    unsafe fn reduce_add(a: Self::V) -> f32 {
        unsafe { _mm512_reduce_add_ps(a) }
    }
    #[inline(always)]
    unsafe fn reduce_max(a: Self::V) -> f32 {
        unsafe { _mm512_reduce_max_ps(a) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_bool(p: *const u8) -> Self::V {
        unsafe {
            let bytes = _mm_loadu_si128(p.cast());
            let hidden = _mm_cmpeq_epi8_mask(bytes, _mm_setzero_si128());
            _mm512_maskz_mov_ps(hidden, _mm512_set1_ps(f32::NEG_INFINITY))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: Self::V) {
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: Self::V) {
        unsafe {
            let bits = _mm512_castps_si512(v);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            // A NaN keeps its upper half, made quiet, because rounding could carry it into an infinity.
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let high = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet));
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(high));
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn transpose<E: Elem>(rows: [*const E; 16]) -> [Self::V; LINES] {
        unsafe {
            // Loads, not shuffles, put two rows into a register, four rows apart. Pairs and quads of rows inside 128-bit lanes follow, then
            // the lanes themselves. These are plain loops because a closure would be a function without the instruction set.
            let zero = _mm512_setzero_ps();
            let mut halves = [zero; 8];
            for g in 0..2 {
                for i in 0..4 {
                    let (a, b) = (rows[8 * g + i], rows[8 * g + 4 + i]);
                    halves[4 * g + i] = if E::IS_F32 {
                        let low = _mm512_castps256_ps512(_mm256_loadu_ps(a.cast()));
                        _mm512_insertf32x8::<1>(low, _mm256_loadu_ps(b.cast()))
                    } else {
                        let mut both = [E::ZERO; 16];
                        std::ptr::copy_nonoverlapping(a, both.as_mut_ptr(), 8);
                        std::ptr::copy_nonoverlapping(b, both.as_mut_ptr().add(8), 8);
                        E::load::<Self>(both.as_ptr())
                    };
                }
            }
            let mut quads = [zero; 8];
            for g in 0..2 {
                let h = &halves[4 * g..][..4];
                let (low, high) = (_mm512_unpacklo_ps(h[0], h[1]), _mm512_unpackhi_ps(h[0], h[1]));
                let (low2, high2) = (_mm512_unpacklo_ps(h[2], h[3]), _mm512_unpackhi_ps(h[2], h[3]));
                quads[4 * g] = _mm512_shuffle_ps::<0x44>(low, low2);
                quads[4 * g + 1] = _mm512_shuffle_ps::<0xee>(low, low2);
                quads[4 * g + 2] = _mm512_shuffle_ps::<0x44>(high, high2);
                quads[4 * g + 3] = _mm512_shuffle_ps::<0xee>(high, high2);
            }
            let mut lines = [zero; 8];
            for c in 0..4 {
                lines[c] = _mm512_shuffle_f32x4::<0x88>(quads[c], quads[4 + c]);
                lines[4 + c] = _mm512_shuffle_f32x4::<0xdd>(quads[c], quads[4 + c]);
            }
            lines
        }
    }
}

// SAFETY of every block below: the trait's contract gives the instruction set and the memory.
#[allow(clippy::undocumented_unsafe_blocks)]
impl PairLanes for Avx512 {
    #[inline(always)]
    unsafe fn dot(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { _mm512_dpbf16_ps(c, bf16_pairs(a), bf16_pairs(b)) }
    }
    #[inline(always)]
    unsafe fn to_pairs(low: Self::V, high: Self::V) -> Self::V {
        // Both are 64 plain bytes.
        unsafe { std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(high, low)) }
    }
    #[inline(always)]
    unsafe fn row_pairs(even: Self::V, odd: Self::V) -> Self::V {
        unsafe {
            // Both are 64 plain bytes. `even` is in the lower half, `odd` in the upper.
            let both = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(odd, even));
            let (even, odd) = (_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64::<1>(both));
            let (low, high) = (_mm512_cvtepu16_epi32(even), _mm512_cvtepu16_epi32(odd));
            _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32::<16>(high)))
        }
    }
    #[inline(always)]
    unsafe fn interleave(even: *const u16, odd: *const u16, dst: *mut f32) {
        unsafe {
            let low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(even.cast()));
            let high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(odd.cast()));
            let pairs = _mm512_or_si512(low, _mm512_slli_epi32::<16>(high));
            Self::store(dst, _mm512_castsi512_ps(pairs));
        }
    }
}

#[inline(always)]
fn bf16_pairs(v: __m512) -> __m512bh {
    // SAFETY: both are 64 plain bytes.
    unsafe { std::mem::transmute(v) }
}

// SAFETY of every block below: the trait's contract gives the memory and the instruction set, except VNNI and VBMI,
// which `Isa::Avx512Vnni` has.
#[allow(clippy::undocumented_unsafe_blocks)]
impl IntegerLanes for Avx512 {
    #[inline(always)]
    unsafe fn integer_scores(job: &IntegerScores<'_>) {
        unsafe { vnni::scores(job) }
    }
    #[inline(always)]
    unsafe fn integer_values(job: &IntegerValues<'_>) {
        unsafe { vnni::values(job) }
    }
}

// SAFETY of every block below: the trait's contract gives the instruction set and the memory.
#[allow(clippy::undocumented_unsafe_blocks)]
impl ByteLanes for Avx512 {
    #[inline(always)]
    unsafe fn byte_scores(job: &ByteScores<'_>) {
        unsafe { byte_codes::scores(job) }
    }
    #[inline(always)]
    unsafe fn byte_values(job: &ByteValues<'_>) {
        unsafe { byte_codes::values(job) }
    }
}

/// AVX-512 F, BW, DQ and VL.
pub(super) mod f32_products {
    use super::Avx512;
    use crate::isa::entry::entry_imports::*;
    use crate::kernels::forward::products::byte_codes::ByteCodes;
    use crate::kernels::forward::products::code_block::CodeProducts;
    use crate::kernels::forward::products::vnni::Vnni;
    use crate::kernels::forward::state::CodePhases;

    mod elements {
        use super::super::Avx512;
        use crate::kernels::shared::products::f32_fma::F32;
        crate::isa::entry::entry_points!(any, Avx512, F32, "avx512f,avx512bw,avx512dq,avx512vl");
    }
    pub(in crate::isa) use elements::{LOOPS, backward_kernels};

    crate::isa::entry::code_entries!(byte_phases, Avx512, ByteCodes, "avx512f,avx512bw,avx512dq,avx512vl");
    crate::isa::entry::code_entries!(integer_phases, Avx512, Vnni, "avx512f,avx512bw,avx512dq,avx512vl");

    /// The kernels of elements, and products with codes of one byte in place.
    pub(in crate::isa) fn kernels(k: Storage, v: Storage) -> Kernels {
        Kernels { code_phases: &[byte_phases::PHASES], ..elements::kernels(k, v) }
    }

    /// [`kernels`], and products with codes as integers.
    pub(in crate::isa) fn vnni_kernels(k: Storage, v: Storage) -> Kernels {
        Kernels { code_phases: &[integer_phases::PHASES, byte_phases::PHASES], ..elements::kernels(k, v) }
    }
}

/// AVX-512 with VNNI and VBMI.
pub(super) mod vnni_products {
    pub(in crate::isa) use super::f32_products::{LOOPS, backward_kernels, vnni_kernels as kernels};
}

/// AVX-512 with BF16. The macro `entry_points!` of `entry.rs` writes `kernels` and `LOOPS`.
pub(super) mod bf16_products {
    use super::Avx512;
    use crate::kernels::shared::products::bf16_pairs::Bf16Pairs;
    crate::isa::entry::entry_points!(
        pairs,
        Avx512,
        Bf16Pairs,
        "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"
    );
}

/// AVX-512 with BF16 and AMX: `kernels` and `LOOPS` as above.
pub(super) mod amx_products {
    use super::Avx512;
    use crate::kernels::shared::products::amx::Amx;
    crate::isa::entry::entry_points!(pairs, Avx512, Amx, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16");
}
