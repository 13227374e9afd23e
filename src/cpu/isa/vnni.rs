//! Products with codes by VNNI, codes to levels by VBMI.
//!
//! A level is a signed byte. Of keys a lane of a register is one key and holds four of its coordinates; of values a lane is one
//! coordinate and holds it of four values: in both, a product adds up what lies in a lane.

#![allow(unsafe_code)]

use super::super::simd::{CODE_KEYS, CodeScores, CodeValues, TILE};
use crate::codec::UNIT;
use crate::problem::MAX_HEAD_DIM;
use std::arch::x86_64::*;

/// Coordinates of a block of planes.
const BLOCK: usize = 128;

/// Where what is asked for goes: blocks of keys and of values take turns, and together they are more than the first-level cache.
const HINT: i32 = _MM_HINT_T1;

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

/// Bytes from one half of a query's integers to the other, and of the query's weights.
const Q_HALF: usize = MAX_HEAD_DIM;
const W_HALF: usize = CODE_KEYS;

/// The body for each constant, in order: registers that it names by the constant stay registers.
macro_rules! each {
    ($n:ident in [$($value:literal)*] $body:block) => { $({ const $n: usize = $value; $body })* };
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

/// The scales of a group, divided by [`UNIT`].
#[inline(always)]
unsafe fn factors(scales: *const u8) -> __m512 {
    // SAFETY: the caller's: a group has sixteen scales of two bytes.
    unsafe {
        // A scale has no sign.
        let scales = _mm256_and_si256(_mm256_loadu_si256(scales.cast()), _mm256_set1_epi16(i16::MAX));
        _mm512_mul_ps(_mm512_cvtph_ps(scales), _mm512_set1_ps(1.0 / UNIT))
    }
}

/// Bytes `at..at + 16` of sixteen rows (or 8, then zeros), `stride` bytes from one to the next, as registers of four bytes a row.
#[inline(always)]
pub(super) unsafe fn transpose<const BYTES: usize>(
    rows: *const u8,
    stride: usize,
    at: usize,
) -> [__m512i; 4] {
    // SAFETY: the caller's: the rows have these bytes.
    unsafe {
        let mut quarters = [_mm512_setzero_si512(); 4];
        for i in 0..4 {
            let row = rows.add(i * stride);
            let load = |n: usize| {
                let p = row.add(n * 4 * stride + at);
                if BYTES == 8 { _mm_loadl_epi64(p.cast()) } else { _mm_loadu_si128(p.cast()) }
            };
            quarters[i] = four_rows([load(0), load(1), load(2), load(3)]);
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
    unsafe { with_planes!(job.keys.format, scores_of(job)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn scores_of<const LOW: usize, const HIGH: usize>(job: &CodeScores<'_>) {
    // SAFETY: as [`scores`]; queries and scores have memory for sixteen rows.
    unsafe {
        for first in (0..job.count).step_by(8) {
            match job.count - first {
                1 => scores_of_rows::<LOW, HIGH, 1>(job, first),
                2 => scores_of_rows::<LOW, HIGH, 2>(job, first),
                3 | 4 => scores_of_rows::<LOW, HIGH, 4>(job, first),
                _ => scores_of_rows::<LOW, HIGH, 8>(job, first),
            }
        }
    }
}

/// Scores of `N` rows, of two groups of keys at a time where registers hold the sums.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn scores_of_rows<const LOW: usize, const HIGH: usize, const N: usize>(
    job: &CodeScores<'_>,
    row: usize,
) {
    let groups = job.keys.groups.len();
    let mut group = 0;
    // SAFETY: as [`scores`].
    unsafe {
        while N <= 4 && group + 2 <= groups {
            scores_of_groups::<LOW, HIGH, N, 2>(job, row, group);
            group += 2;
        }
        while group < groups {
            scores_of_groups::<LOW, HIGH, N, 1>(job, row, group);
            group += 1;
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn scores_of_groups<const LOW: usize, const HIGH: usize, const N: usize, const G: usize>(
    job: &CodeScores<'_>,
    row: usize,
    group: usize,
) {
    let keys = &job.keys;
    let dim = keys.format.dim();
    // Once is enough.
    let next = if row == 0 { keys.next } else { keys.groups };
    // SAFETY: as [`scores`].
    unsafe {
        // Unsigned, 128 more than the level, as the product has it; the sums start without what that adds.
        let table = _mm512_xor_si512(table(keys.levels), _mm512_set1_epi8(-128));
        let mut high_sums = [[_mm512_setzero_si512(); G]; N];
        let mut low_sums = [[_mm512_setzero_si512(); G]; N];
        for r in 0..N {
            low_sums[r] = [_mm512_set1_epi32(*job.start.add(row + r)); G];
        }
        let mut at = 0;
        while at < dim {
            let keys = Keys::<G> {
                rows: places::<LOW, HIGH, G>(&keys.groups[group..], at, 1),
                // Groups of rows lie one after another, so a part of each row is as much as that part of a group.
                next: places::<LOW, HIGH, G>(&next[group..], at, TILE),
                strides: [dim * LOW / 8, dim * HIGH / 8],
            };
            let q = job.q.add(row * (2 * Q_HALF) + at);
            if dim - at >= BLOCK {
                add_scores::<LOW, HIGH, N, G, BLOCK>(&keys, q, table, &mut high_sums, &mut low_sums);
            } else {
                add_scores::<LOW, HIGH, N, G, 64>(&keys, q, table, &mut high_sums, &mut low_sums);
            }
            at += BLOCK;
        }
        for g in 0..G {
            let column = TILE * (group + g);
            let factors = factors(keys.groups[group + g][2]);
            ask(next[group + g][2], 0);
            for r in 0..N {
                // Sums past 32 bits come back: the whole fits.
                let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(high_sums[r][g]), low_sums[r][g]);
                let factors = _mm512_mul_ps(factors, _mm512_set1_ps(*job.q_factors.add(row + r)));
                let c = job.c.add((row + r) * job.ldc + column);
                _mm512_storeu_ps(c, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), factors));
            }
        }
    }
}

/// Some coordinates of groups of keys: the first row of each in each plane, what is read next, and bytes from one row to the next.
struct Keys<const G: usize> {
    rows: [[*const u8; 2]; G],
    next: [[*const u8; 2]; G],
    strides: [usize; 2],
}

/// Where the bytes of coordinate `at` of `rows` rows begin.
#[inline(always)]
fn places<const LOW: usize, const HIGH: usize, const G: usize>(
    groups: &[[*const u8; 3]],
    at: usize,
    rows: usize,
) -> [[*const u8; 2]; G] {
    let mut places = [[std::ptr::null(); 2]; G];
    for (place, [lower, upper, _]) in places.iter_mut().zip(groups) {
        *place = [lower.wrapping_add(rows * at * LOW / 8), upper.wrapping_add(rows * at * HIGH / 8)];
    }
    places
}

/// Asks for a cache line.
#[inline(always)]
pub(super) unsafe fn ask(p: *const u8, line: usize) {
    // SAFETY: asking for memory that is not there does nothing.
    unsafe { _mm_prefetch::<HINT>(p.wrapping_add(64 * line).cast()) }
}

/// Adds the products of `B` coordinates.
#[inline(always)]
unsafe fn add_scores<const LOW: usize, const HIGH: usize, const N: usize, const G: usize, const B: usize>(
    keys: &Keys<G>,
    q: *const i8,
    table: __m512i,
    high_sums: &mut [[__m512i; G]; N],
    low_sums: &mut [[__m512i; G]; N],
) {
    // Bytes of a row in each plane.
    let (below, above) = (B * LOW / 8, B * HIGH / 8);
    let (rows, [stride, upper_stride]) = (&keys.rows, keys.strides);
    // SAFETY: as [`scores`].
    unsafe {
        let mut upper = [[_mm512_setzero_si512(); 8]; G];
        for g in 0..G {
            for line in 0..TILE * above / 64 {
                ask(keys.next[g][1], line);
            }
            if above == 8 {
                upper[g][..4].copy_from_slice(&transpose::<8>(rows[g][1], upper_stride, 0));
            } else if HIGH > 0 {
                for line in (0..above / 4).step_by(4) {
                    let lines = transpose::<16>(rows[g][1], upper_stride, 4 * line);
                    upper[g][line..line + 4].copy_from_slice(&lines);
                }
            }
        }
        // Chunks that bits of the second plane are of, so that their registers have fixed names.
        let steps = if above == 32 { 2 } else { 1 };
        let mut begin = 0;
        while begin < below {
            each!(STEP in [0 1] {
                if STEP < steps {
                    let chunk = begin + 16 * STEP;
                    let mut lines = [[_mm512_setzero_si512(); 4]; G];
                    for g in 0..G {
                        for line in 0..4 {
                            ask(keys.next[g][0], chunk / 4 + line);
                        }
                        lines[g] = transpose::<16>(rows[g][0], stride, chunk);
                    }
                    for c in 0..4 {
                        for part in 0..8 / LOW {
                            let d = chunk + 4 * c + below * part;
                            let mut levels = [_mm512_setzero_si512(); G];
                            for g in 0..G {
                                levels[g] = if LOW == 8 {
                                    _mm512_xor_si512(lines[g][c], _mm512_set1_epi8(-128))
                                } else {
                                    let mut turned = _mm512_setzero_si512();
                                    if HIGH > 0 {
                                        let by = _mm512_set1_epi32((HIGH * (d / above)) as i32 - LOW as i32);
                                        turned = _mm512_rorv_epi32(upper[g][4 * STEP + if above == 8 { c % 2 } else { c }], by);
                                    }
                                    _mm512_permutexvar_epi8(indices::<LOW, HIGH>(lines[g][c], part, turned), table)
                                };
                            }
                            for r in 0..N {
                                let four = |p: *const i8| _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
                                let q = q.add(r * (2 * Q_HALF) + d);
                                let (high, low) = (four(q), four(q.add(Q_HALF)));
                                for g in 0..G {
                                    high_sums[r][g] = _mm512_dpbusd_epi32(high_sums[r][g], levels[g], high);
                                    low_sums[r][g] = _mm512_dpbusd_epi32(low_sums[r][g], levels[g], low);
                                }
                            }
                        }
                    }
                }
            });
            begin += 16 * steps;
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
        for group in job.values.next {
            ask(group[2], 0);
        }
        with_planes!(job.values.format, values_of(job));
    }
}

/// Makes integers of a row's weights, each times the factor of its value.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn set_weights(job: &CodeValues<'_>, row: usize) {
    let groups = job.values.groups;
    // SAFETY: as [`values`]; weights are as many as values.
    unsafe {
        let weights = job.weights.add(row * job.ldw);
        // A weight of 0 is that of a value that is not seen, whatever its factor.
        let product = |at: usize| {
            let weight = _mm512_loadu_ps(weights.add(at));
            let seen = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(weight, _mm512_setzero_ps());
            _mm512_maskz_mul_ps(seen, weight, factors(groups[at / TILE][2]))
        };
        let (mut most, mut rest) = (_mm512_setzero_ps(), _mm512_setzero_ps());
        for at in (0..TILE * groups.len()).step_by(TILE) {
            let x = product(at);
            most = _mm512_max_ps(x, most);
            // What is not finite becomes a NaN here.
            rest = _mm512_fmadd_ps(x, _mm512_setzero_ps(), rest);
        }
        let (most, rest) = (_mm512_reduce_max_ps(most), _mm512_reduce_add_ps(rest));
        let finite = rest == 0.0;
        let inverse = _mm512_set1_ps(if most > 0.0 && finite { W_ONE / most } else { 0.0 });
        let high = job.integers.add(row * (2 * W_HALF));
        for at in (0..TILE * groups.len()).step_by(TILE) {
            let x = _mm512_cvtps_epi32(_mm512_mul_ps(product(at), inverse));
            _mm_storeu_si128(high.add(at).cast(), _mm512_cvtepi32_epi8(_mm512_srli_epi32::<8>(x)));
            _mm_storeu_si128(high.add(W_HALF + at).cast(), _mm512_cvtepi32_epi8(x));
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
    let dim = job.values.format.dim();
    // SAFETY: as [`values`].
    unsafe {
        for at in (0..dim).step_by(BLOCK) {
            if dim - at >= BLOCK {
                block_values::<LOW, HIGH, N, BLOCK>(job, row, at);
            } else {
                block_values::<LOW, HIGH, N, 64>(job, row, at);
            }
        }
    }
}

#[inline(always)]
unsafe fn block_values<const LOW: usize, const HIGH: usize, const N: usize, const B: usize>(
    job: &CodeValues<'_>,
    row: usize,
    first: usize,
) {
    // Of 4 parts at most, those of a byte of the first plane: loops over them are written out.
    let parts = 8 / LOW;
    let (below, above) = (B * LOW / 8, B * HIGH / 8);
    let values = &job.values;
    let dim = values.format.dim();
    let [stride, upper_stride] = [dim * LOW / 8, dim * HIGH / 8];
    // Once is enough.
    let next = if row == 0 { values.next } else { values.groups };
    // SAFETY: as [`values`].
    unsafe {
        let table = table(values.levels);
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
        // Turns of the second plane's bits are constants where chunks are written out.
        let steps = if HIGH > 0 { below / 16 } else { 1 };
        let mut begin = 0;
        while begin < below {
            each!(STEP in [0 1 2 3] {
                if STEP < steps {
                    let chunk = if HIGH > 0 { 16 * STEP } else { begin };
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
                    for (group, ([lower, upper, _], next)) in values.groups.iter().zip(next).enumerate() {
                        let weights = job.integers.add(row * (2 * W_HALF) + TILE * group).cast_const();
                        for quarter in 0..4 {
                            // Four rows of this chunk are a line, and so much of what comes next is asked for.
                            let line = chunk / 4 + quarter;
                            ask(next[0].wrapping_add(TILE * first * LOW / 8), line);
                            if line < TILE * above / 64 {
                                ask(next[1].wrapping_add(TILE * first * HIGH / 8), line);
                            }
                            let p = lower.add(below_at + 4 * quarter * stride);
                            let load = |t: usize| _mm_loadu_si128(p.add(t * stride).cast());
                            let bytes =
                                _mm512_permutexvar_epi8(order, four_rows([load(0), load(1), load(2), load(3)]));
                            let mut above_bytes = bytes;
                            if HIGH > 0 {
                                let p = upper.add(above_at + 4 * quarter * upper_stride);
                                let load = |t: usize| {
                                    let p = p.add(t * upper_stride);
                                    if above == 8 { _mm_loadl_epi64(p.cast()) } else { _mm_loadu_si128(p.cast()) }
                                };
                                let loaded = four_rows([load(0), load(1), load(2), load(3)]);
                                above_bytes = _mm512_permutexvar_epi8(above_order, loaded);
                            }
                            let mut levels = [bytes; 4];
                            if LOW < 8 {
                                for part in 0..parts {
                                    let turned =
                                        if HIGH > 0 { _mm512_rorv_epi32(above_bytes, turns[part]) } else { bytes };
                                    levels[part] =
                                        _mm512_permutexvar_epi8(indices::<LOW, HIGH>(bytes, part, turned), table);
                                }
                            }
                            for r in 0..N {
                                let w = weights.add(r * (2 * W_HALF) + 4 * quarter);
                                let four = |p: *const u8| _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
                                let (high, low) = (four(w), four(w.add(W_HALF)));
                                for part in 0..parts {
                                    high_sums[part][r] = _mm512_dpbusd_epi32(high_sums[part][r], high, levels[part]);
                                    low_sums[part][r] = _mm512_dpbusd_epi32(low_sums[part][r], low, levels[part]);
                                }
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
            });
            begin += 16 * steps;
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
