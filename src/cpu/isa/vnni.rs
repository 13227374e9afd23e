//! Products with codes by VNNI, codes to levels by VBMI.
//!
//! A level is a signed byte. Of keys a lane of a register is one key and holds four of its coordinates; of values a lane is one
//! coordinate and holds it of four values: in both, a product adds up what lies in a lane.

#![allow(unsafe_code)]

use super::super::simd::{CodeScores, CodeValues, TILE};
use std::arch::x86_64::*;

/// Coordinates of a block of planes.
const BLOCK: usize = 128;

/// The greatest of a row's weights.
const W_ONE: f32 = 65535.0;

/// Which bits come from the first of three operands, chosen by the third: `c ? a : b`.
const CHOOSE: i32 = 0xe4;

/// A function of the planes of codes: bits of the first, and of the second or 0.
macro_rules! with_planes {
    ($format:expr, $f:ident($($arguments:expr),*)) => {{
        let planes = $format.planes();
        match (planes[0].bits, planes.get(1).map_or(0, |plane| plane.bits)) {
            (8, _) => $f::<8, 0>($($arguments),*),
            (4, 0) => $f::<4, 0>($($arguments),*),
            (4, 1) => $f::<4, 1>($($arguments),*),
            (4, _) => $f::<4, 2>($($arguments),*),
            (_, 0) => $f::<2, 0>($($arguments),*),
            _ => $f::<2, 1>($($arguments),*),
        }
    }};
}

/// Blocks of a dimension: first coordinate, and how many.
#[inline(always)]
fn blocks(dim: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..dim).step_by(BLOCK).map(move |first| (first, BLOCK.min(dim - first)))
}

/// What codes stand for, for each of 64 indices: bits of an index past those of a code do not matter.
#[inline(always)]
unsafe fn table(levels: Option<&[i8; 64]>) -> __m512i {
    // SAFETY: 64 bytes.
    levels.map_or_else(
        || unsafe { _mm512_setzero_si512() },
        |levels| unsafe { _mm512_loadu_si512(levels.as_ptr().cast()) },
    )
}

/// Bytes `at..at + 16` of sixteen rows (or 8, then zeros), as registers of four bytes a row.
#[inline(always)]
unsafe fn transpose<const BYTES: usize>(rows: &[*const u8; TILE], at: usize) -> [__m512i; 4] {
    // SAFETY: the caller's: the rows have these bytes.
    unsafe {
        let mut quarters = [_mm512_setzero_si512(); 4];
        for i in 0..4 {
            let load = |r: usize| {
                let p = rows[r].add(at);
                if BYTES == 8 { _mm_loadl_epi64(p.cast()) } else { _mm_loadu_si128(p.cast()) }
            };
            let mut q = _mm512_castsi128_si512(load(i));
            q = _mm512_inserti32x4::<1>(q, load(i + 4));
            q = _mm512_inserti32x4::<2>(q, load(i + 8));
            quarters[i] = _mm512_inserti32x4::<3>(q, load(i + 12));
        }
        let [a, b, c, d] = quarters;
        let (low, high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (low2, high2) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        [
            _mm512_unpacklo_epi64(low, low2),
            _mm512_unpackhi_epi64(low, low2),
            _mm512_unpacklo_epi64(high, high2),
            _mm512_unpackhi_epi64(high, high2),
        ]
    }
}

/// Indices of part `part` of bytes of the first plane, with bits of the second that were turned into place.
#[inline(always)]
unsafe fn indices<const LOW: usize, const HIGH: usize>(
    bytes: __m512i,
    part: usize,
    above: __m512i,
) -> __m512i {
    // SAFETY: the caller's: the instruction set.
    unsafe {
        let bytes =
            if part == 0 { bytes } else { _mm512_srl_epi16(bytes, _mm_cvtsi32_si128((LOW * part) as i32)) };
        if HIGH == 0 {
            return bytes;
        }
        let own = _mm512_set1_epi8((1 << LOW) - 1);
        _mm512_ternarylogic_epi32::<CHOOSE>(bytes, above, own)
    }
}

/// # Safety
/// As [`Simd::code_scores`](super::super::simd::Simd::code_scores).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) unsafe fn scores(job: &CodeScores<'_>) {
    // SAFETY: the caller's promise.
    unsafe { with_planes!(job.format, scores_of(job)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn scores_of<const LOW: usize, const HIGH: usize>(job: &CodeScores<'_>) {
    // SAFETY: as [`scores`]; queries and scores have memory for sixteen rows.
    unsafe {
        for first in (0..job.count).step_by(8) {
            for key in (0..job.k_factors.len()).step_by(TILE) {
                match job.count - first {
                    1 => scores_of_rows::<LOW, HIGH, 1>(job, first, key),
                    2 => scores_of_rows::<LOW, HIGH, 2>(job, first, key),
                    3 | 4 => scores_of_rows::<LOW, HIGH, 4>(job, first, key),
                    _ => scores_of_rows::<LOW, HIGH, 8>(job, first, key),
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn scores_of_rows<const LOW: usize, const HIGH: usize, const N: usize>(
    job: &CodeScores<'_>,
    row: usize,
    key: usize,
) {
    let dim = job.format.dim();
    let mut rows = [[std::ptr::null(); TILE]; 2];
    rows[0].copy_from_slice(&job.rows[0][key..key + TILE]);
    if HIGH > 0 {
        rows[1].copy_from_slice(&job.rows[1][key..key + TILE]);
    }
    // SAFETY: as [`scores`].
    unsafe {
        // Unsigned, 128 more than the level, as the product has it; the sums start without what that adds.
        let table = _mm512_xor_si512(table(job.levels), _mm512_set1_epi8(-128));
        let mut high_sums = [_mm512_setzero_si512(); N];
        let mut low_sums = [_mm512_setzero_si512(); N];
        for r in 0..N {
            low_sums[r] = _mm512_set1_epi32(*job.start.add(row + r));
        }
        for (first, n) in blocks(dim) {
            let (below, above) = (n * LOW / 8, n * HIGH / 8);
            let mut upper = [_mm512_setzero_si512(); 8];
            if HIGH > 0 {
                let at = first * HIGH / 8;
                if above == 8 {
                    upper[..4].copy_from_slice(&transpose::<8>(&rows[1], at));
                } else {
                    for line in (0..above / 4).step_by(4) {
                        upper[line..line + 4].copy_from_slice(&transpose::<16>(&rows[1], at + 4 * line));
                    }
                }
            }
            for chunk in (0..below).step_by(16) {
                let lines = transpose::<16>(&rows[0], first * LOW / 8 + chunk);
                for c in 0..4 {
                    for part in 0..8 / LOW {
                        let d = chunk + 4 * c + below * part;
                        let levels = if LOW == 8 {
                            _mm512_xor_si512(lines[c], _mm512_set1_epi8(-128))
                        } else {
                            let mut turned = _mm512_setzero_si512();
                            if HIGH > 0 {
                                let by = (HIGH * (d / above)) as i32 - LOW as i32;
                                turned = _mm512_rorv_epi32(upper[d % above / 4], _mm512_set1_epi32(by));
                            }
                            _mm512_permutexvar_epi8(indices::<LOW, HIGH>(lines[c], part, turned), table)
                        };
                        for r in 0..N {
                            let q = job.q.add(2 * (row + r) * dim + first + d);
                            let four = |p: *const i8| _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
                            high_sums[r] = _mm512_dpbusd_epi32(high_sums[r], levels, four(q));
                            low_sums[r] = _mm512_dpbusd_epi32(low_sums[r], levels, four(q.add(dim)));
                        }
                    }
                }
            }
        }
        let keys = _mm512_loadu_ps(job.k_factors.as_ptr().add(key));
        for r in 0..N {
            // Sums past 32 bits come back: the whole fits.
            let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(high_sums[r]), low_sums[r]);
            let factors = _mm512_mul_ps(keys, _mm512_set1_ps(*job.q_factors.add(row + r)));
            _mm512_storeu_ps(
                job.c.add((row + r) * job.ldc + key),
                _mm512_mul_ps(_mm512_cvtepi32_ps(sum), factors),
            );
        }
    }
}

/// # Safety
/// As [`Simd::code_values`](super::super::simd::Simd::code_values).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) unsafe fn values(job: &CodeValues<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        for row in 0..job.count {
            set_weights(job, row);
        }
        with_planes!(job.format, values_of(job));
    }
}

/// Makes integers of a row's weights, each times the factor of its value.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn set_weights(job: &CodeValues<'_>, row: usize) {
    let len = job.v_factors.len();
    // SAFETY: as [`values`]; factors are whole vectors, weights as many.
    unsafe {
        let weights = job.weights.add(row * job.ldw);
        // A weight of 0 is that of a value that is not seen, whatever its factor.
        let product = |at: usize| {
            let weight = _mm512_loadu_ps(weights.add(at));
            let seen = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(weight, _mm512_setzero_ps());
            _mm512_maskz_mul_ps(seen, weight, _mm512_loadu_ps(job.v_factors.as_ptr().add(at)))
        };
        let (mut most, mut rest) = (_mm512_setzero_ps(), _mm512_setzero_ps());
        for at in (0..len).step_by(TILE) {
            let x = product(at);
            most = _mm512_max_ps(x, most);
            // What is not finite becomes a NaN here.
            rest = _mm512_fmadd_ps(x, _mm512_setzero_ps(), rest);
        }
        let (most, rest) = (_mm512_reduce_max_ps(most), _mm512_reduce_add_ps(rest));
        let finite = rest == 0.0;
        let inverse = _mm512_set1_ps(if most > 0.0 && finite { W_ONE / most } else { 0.0 });
        let high = job.integers.add(2 * row * len);
        for at in (0..len).step_by(TILE) {
            let x = _mm512_cvtps_epi32(_mm512_mul_ps(product(at), inverse));
            _mm_storeu_si128(high.add(at).cast(), _mm512_cvtepi32_epi8(_mm512_srli_epi32::<8>(x)));
            _mm_storeu_si128(high.add(len + at).cast(), _mm512_cvtepi32_epi8(x));
        }
        *job.w_factors.add(row) = if finite { most / W_ONE } else { f32::NAN };
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn values_of<const LOW: usize, const HIGH: usize>(job: &CodeValues<'_>) {
    // SAFETY: as [`values`]; weights and sums have memory for sixteen rows.
    unsafe {
        // As many sums as registers hold.
        let step = if LOW == 2 { 2 } else { 4 };
        for first in (0..job.count).step_by(step) {
            match job.count - first {
                1 => values_of_rows::<LOW, HIGH, 1>(job, first),
                2 => values_of_rows::<LOW, HIGH, 2>(job, first),
                _ if LOW == 2 => values_of_rows::<LOW, HIGH, 2>(job, first),
                _ => values_of_rows::<LOW, HIGH, 4>(job, first),
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn values_of_rows<const LOW: usize, const HIGH: usize, const N: usize>(
    job: &CodeValues<'_>,
    row: usize,
) {
    let len = job.v_factors.len();
    // Of 4 parts at most, those of a byte of the first plane: loops over them are written out.
    let parts = 8 / LOW;
    // SAFETY: as [`values`].
    unsafe {
        let table = table(job.levels);
        // Byte `4 x + t` of a register is byte x of row t, which is byte `16 t + x` of the rows one after another.
        let mut order = [0u8; 64];
        let mut doubled = [0u8; 64];
        for i in 0..64 {
            order[i] = (16 * (i % 4) + i / 4) as u8;
            doubled[i] = (16 * (i % 4) + i / 4 % 8) as u8;
        }
        let order = _mm512_loadu_si512(order.as_ptr().cast());
        let doubled = _mm512_loadu_si512(doubled.as_ptr().cast());
        let second_half =
            _mm512_mask_blend_epi32(0xff00, _mm512_setzero_si512(), _mm512_set1_epi32(HIGH as i32));
        for (first, n) in blocks(job.format.dim()) {
            let (below, above) = (n * LOW / 8, n * HIGH / 8);
            for chunk in (0..below).step_by(16) {
                let mut high_sums = [[_mm512_setzero_si512(); N]; 4];
                let mut low_sums = [[_mm512_setzero_si512(); N]; 4];
                let mut turns = [_mm512_setzero_si512(); 4];
                let (mut above_at, mut above_order) = (0, order);
                if HIGH > 0 {
                    above_at = first * HIGH / 8 + if above == 8 { 0 } else { chunk % above };
                    for part in 0..parts {
                        let by = (HIGH * ((chunk + below * part) / above)) as i32 - LOW as i32;
                        turns[part] = _mm512_set1_epi32(by);
                        if above == 8 {
                            turns[part] = _mm512_add_epi32(turns[part], second_half);
                        }
                    }
                    if above == 8 {
                        above_order = doubled;
                    }
                }
                let below_at = first * LOW / 8 + chunk;
                let (lower_rows, upper_rows) = (job.rows[0].as_ptr(), job.rows[1].as_ptr());
                for group in 0..job.rows[0].len() / 4 {
                    let load =
                        |t: usize| _mm_loadu_si128((*lower_rows.add(4 * group + t)).add(below_at).cast());
                    let bytes =
                        _mm512_permutexvar_epi8(order, four_rows([load(0), load(1), load(2), load(3)]));
                    let mut upper = bytes;
                    if HIGH > 0 {
                        let load = |t: usize| {
                            let p = (*upper_rows.add(4 * group + t)).add(above_at);
                            if above == 8 { _mm_loadl_epi64(p.cast()) } else { _mm_loadu_si128(p.cast()) }
                        };
                        let loaded = four_rows([load(0), load(1), load(2), load(3)]);
                        upper = _mm512_permutexvar_epi8(above_order, loaded);
                    }
                    let mut levels = [bytes; 4];
                    if LOW < 8 {
                        for part in 0..parts {
                            let turned = if HIGH > 0 { _mm512_rorv_epi32(upper, turns[part]) } else { upper };
                            levels[part] =
                                _mm512_permutexvar_epi8(indices::<LOW, HIGH>(bytes, part, turned), table);
                        }
                    }
                    for r in 0..N {
                        let w = job.integers.add(2 * (row + r) * len + 4 * group).cast_const();
                        let four = |p: *const u8| _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
                        let (high, low) = (four(w), four(w.add(len)));
                        for part in 0..parts {
                            high_sums[part][r] = _mm512_dpbusd_epi32(high_sums[part][r], high, levels[part]);
                            low_sums[part][r] = _mm512_dpbusd_epi32(low_sums[part][r], low, levels[part]);
                        }
                    }
                }
                for part in 0..parts {
                    for r in 0..N {
                        let high = _mm512_slli_epi32::<8>(high_sums[part][r]);
                        let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(high, low_sums[part][r]));
                        let c = job.c.add((row + r) * job.ldc + first + chunk + below * part);
                        _mm512_storeu_ps(c, _mm512_mul_ps(sum, _mm512_set1_ps(*job.w_factors.add(row + r))));
                    }
                }
            }
        }
    }
}

/// Four rows of 16 bytes, one after another.
#[inline(always)]
unsafe fn four_rows([a, b, c, d]: [__m128i; 4]) -> __m512i {
    // SAFETY: the caller's: the instruction set.
    unsafe {
        let low = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(a), b);
        _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(low, c), d)
    }
}
