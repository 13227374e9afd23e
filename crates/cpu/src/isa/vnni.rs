//! Products with codes by VNNI. Codes become levels, which are signed bytes, by the table look-ups of VBMI.
//!
//! `vpdpbusd` adds the products of the four bytes of a lane. With keys, a lane is one key and its bytes are four coordinates of it; with
//! values, a lane is one coordinate and its bytes are four values.

#![allow(unsafe_code)]

use crate::kernels::forward::products::code_block::{CODE_KEYS, CodeGroup, GROUP};
use crate::kernels::forward::products::vnni::{IntegerScores, IntegerValues};
use flashtile_core::codec::SCALE_UNIT;
use flashtile_core::limits::MAX_HEAD_DIM;
use std::arch::x86_64::*;

/// Coordinates of a block of planes.
const BLOCK: usize = 128;

/// Prefetches go to the second-level cache: a block of keys and one of values, which alternate, are larger than the first-level cache.
const HINT: i32 = _MM_HINT_T1;

/// The integer of a row's largest product of probability and scale.
const P_ONE: f32 = 65535.0;

/// The truth table of `c ? a : b`, bit by bit.
const CHOOSE: i32 = 0xe4;

/// Calls a function that is generic over the bits of a code in the first plane, and in the second or 0.
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

/// Bytes from one half of a row's integers to the other: for a query, and for its probabilities.
const Q_HALF: usize = MAX_HEAD_DIM;
const P_HALF: usize = CODE_KEYS;

/// Writes the body out for each constant, so that arrays which it indexes by the constant stay in registers.
macro_rules! each {
    ($n:ident in [$($value:literal)*] $body:block) => {{ $({ const $n: usize = $value; $body })* }};
}

/// The level of each of 64 indices. Codes of fewer bits repeat their levels, so that the bits above them do not matter.
#[inline(always)]
unsafe fn table(levels: Option<&[i8; 64]>) -> __m512i {
    // SAFETY: 64 bytes.
    levels.map_or_else(
        || unsafe { _mm512_setzero_si512() },
        |levels| unsafe { _mm512_loadu_si512(levels.as_ptr().cast()) },
    )
}

/// An index table in a register.
#[inline(always)]
unsafe fn index_table<T, const N: usize>(table: &'static [T; N]) -> __m512i {
    const { assert!(size_of::<[T; N]>() == 64) };
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512(table.as_ptr().cast()) }
}

/// The scales of a group, divided by [`SCALE_UNIT`].
#[inline(always)]
unsafe fn factors(scales: *const u8) -> __m512 {
    // SAFETY: the caller has 16 scales of two bytes and the instruction set.
    unsafe {
        // The sign bit of a scale is ignored.
        let scales = _mm256_and_si256(_mm256_loadu_si256(scales.cast()), _mm256_set1_epi16(i16::MAX));
        _mm512_mul_ps(_mm512_cvtph_ps(scales), _mm512_set1_ps(1.0 / SCALE_UNIT))
    }
}

/// Bytes `at..at + BYTES`, 16 or 8, of 16 rows that are `stride` bytes apart: register `c` has bytes `4 c..4 c + 4` of
/// each row, zeros past the end.
#[inline(always)]
pub(super) unsafe fn transpose<const BYTES: usize>(
    rows: *const u8,
    stride: usize,
    at: usize,
) -> [__m512i; 4] {
    // SAFETY: the caller's rows have these bytes.
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

/// The permutation that takes columns of four bytes, from column `first` on, of all rows of `width` bytes in two registers. It takes as
/// many columns as fill one register.
const fn column_table(width: usize, first: usize) -> [i32; 16] {
    let (columns, rows) = (width / 4, 128 / width);
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = (first + i / rows + i % rows * columns) as i32;
        i += 1;
    }
    table
}

/// [`transpose`] of rows of `WIDTH` bytes, 8, 16 or 32, without a gap between them, from byte `AT` on: memory is read in whole
/// registers.
#[inline(always)]
unsafe fn transpose_dense<const WIDTH: usize, const AT: usize>(rows: *const u8) -> [__m512i; 4] {
    // SAFETY: the caller has 16 rows.
    unsafe {
        let line = |n: usize| _mm512_loadu_si512(rows.add(64 * n).cast());
        let columns = |n: usize, index: __m512i| _mm512_permutex2var_epi32(line(n), index, line(n + 1));
        let first = index_table(const { &column_table(WIDTH, AT / 4) });
        match WIDTH {
            8 => {
                let second = index_table(const { &column_table(WIDTH, 1) });
                let [even, odd] = [columns(0, first), columns(0, second)];
                [even, odd, even, odd]
            }
            16 => {
                let third = index_table(const { &column_table(WIDTH, 2) });
                let [a, b, c, d] =
                    [columns(0, first), columns(2, first), columns(0, third), columns(2, third)];
                [
                    _mm512_shuffle_i64x2::<0x44>(a, b),
                    _mm512_shuffle_i64x2::<0xee>(a, b),
                    _mm512_shuffle_i64x2::<0x44>(c, d),
                    _mm512_shuffle_i64x2::<0xee>(c, d),
                ]
            }
            _ => {
                let [a, b, c, d] =
                    [columns(0, first), columns(2, first), columns(4, first), columns(6, first)];
                let (even, odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
                let (even2, odd2) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
                [
                    _mm512_shuffle_i32x4::<0x88>(even, even2),
                    _mm512_shuffle_i32x4::<0x88>(odd, odd2),
                    _mm512_shuffle_i32x4::<0xdd>(even, even2),
                    _mm512_shuffle_i32x4::<0xdd>(odd, odd2),
                ]
            }
        }
    }
}

/// The second plane's bits of part `part`, moved to where indices have them, from bytes in which the bits of part 0 are `shift` bits up.
///
/// Shifts are used, not rotations, because they take an execution port that products leave free.
#[inline(always)]
unsafe fn above_bits<const LOW: usize>(bytes: __m512i, shift: usize, part: usize) -> __m512i {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let by = (shift + LOW * part) as i32 - LOW as i32;
        match by {
            0 => bytes,
            1.. => _mm512_srl_epi16(bytes, _mm_cvtsi32_si128(by)),
            _ => _mm512_sll_epi16(bytes, _mm_cvtsi32_si128(-by)),
        }
    }
}

/// Indices of part `part` of bytes of the first plane, completed by `above`, the bits of the second plane, which are in place.
#[inline(always)]
unsafe fn indices<const LOW: usize, const HIGH: usize>(
    bytes: __m512i,
    part: usize,
    above: __m512i,
) -> __m512i {
    // SAFETY: the caller has the instruction set.
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
/// As [`IntegerScores`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) unsafe fn scores(job: &IntegerScores<'_>) {
    // SAFETY: the contract of the job.
    unsafe { with_planes!(job.keys.format, scores_of(job)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn scores_of<const LOW: usize, const HIGH: usize>(job: &IntegerScores<'_>) {
    // SAFETY: as [`scores`]; queries and scores have memory for 16 rows.
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

/// Scores of `N` rows: two groups of keys at a time if the sums of both fit the registers.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn scores_of_rows<const LOW: usize, const HIGH: usize, const N: usize>(
    job: &IntegerScores<'_>,
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
    job: &IntegerScores<'_>,
    row: usize,
    group: usize,
) {
    let keys = &job.keys;
    let dim = keys.format.dim();
    // The first rows prefetch for all rows.
    let next = if row == 0 { keys.next } else { keys.groups };
    // SAFETY: as [`scores`].
    unsafe {
        // The product takes unsigned bytes, so 128 is added to the levels, and the sums start with -128 times the sum of the query.
        let table = _mm512_xor_si512(table(keys.levels), _mm512_set1_epi8(-128));
        let mut sums =
            HalfSums { high: [[_mm512_setzero_si512(); G]; N], low: [[_mm512_setzero_si512(); G]; N] };
        for r in 0..N {
            sums.low[r] = [_mm512_set1_epi32(*job.start.add(row + r)); G];
        }
        let mut at = 0;
        while at < dim {
            let keys = Keys::<G> {
                groups: plane_rows::<LOW, HIGH, G>(&keys.groups[group..], at, 1),
                // Rows of a group follow one another. The bytes that are prefetched are as many as this part of all rows, but contiguous.
                next: plane_rows::<LOW, HIGH, G>(&next[group..], at, GROUP),
                strides: PlaneStrides::new::<LOW, HIGH>(dim),
            };
            let q = job.q.add(row * (2 * Q_HALF) + at);
            let sums = &mut sums;
            // The second plane of dense rows is read in another way.
            match (dim - at >= BLOCK, if HIGH > 0 { dim } else { 0 }) {
                (true, BLOCK) => add_scores::<LOW, HIGH, N, G, BLOCK, true>(&keys, q, table, sums),
                (true, _) => add_scores::<LOW, HIGH, N, G, BLOCK, false>(&keys, q, table, sums),
                (false, 64) => add_scores::<LOW, HIGH, N, G, 64, true>(&keys, q, table, sums),
                (false, _) => add_scores::<LOW, HIGH, N, G, 64, false>(&keys, q, table, sums),
            }
            at += BLOCK;
        }
        for g in 0..G {
            let column = GROUP * (group + g);
            let factors = factors(keys.groups[group + g].scales);
            prefetch(next[group + g].scales, 0);
            for r in 0..N {
                // Partial sums may wrap at 32 bits, but the whole sum fits.
                let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(sums.high[r][g]), sums.low[r][g]);
                let factors = _mm512_mul_ps(factors, _mm512_set1_ps(*job.q_factors.add(row + r)));
                let c = job.c.at(row + r, column);
                _mm512_storeu_ps(c, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), factors));
            }
        }
    }
}

/// Some coordinates of groups of keys.
struct Keys<const G: usize> {
    groups: [PlaneRows; G],
    /// The rows that are read next, for prefetches.
    next: [PlaneRows; G],
    strides: PlaneStrides,
}

/// Some bytes of the first row of a group, in each plane.
#[derive(Clone, Copy)]
struct PlaneRows {
    lower: *const u8,
    upper: *const u8,
}

/// Bytes from a row to the next in each plane.
#[derive(Clone, Copy)]
struct PlaneStrides {
    lower: usize,
    upper: usize,
}

impl PlaneStrides {
    /// The strides of rows of `dim` codes.
    #[inline(always)]
    fn new<const LOW: usize, const HIGH: usize>(dim: usize) -> Self {
        Self { lower: dim * LOW / 8, upper: dim * HIGH / 8 }
    }
}

/// The start of coordinate `at` of `rows` rows, in each plane of each group.
#[inline(always)]
fn plane_rows<const LOW: usize, const HIGH: usize, const G: usize>(
    groups: &[CodeGroup],
    at: usize,
    rows: usize,
) -> [PlaneRows; G] {
    let mut starts = [PlaneRows { lower: std::ptr::null(), upper: std::ptr::null() }; G];
    for g in 0..G {
        let CodeGroup { lower, upper, .. } = groups[g];
        starts[g] = PlaneRows {
            lower: lower.wrapping_add(rows * at * LOW / 8),
            upper: upper.wrapping_add(rows * at * HIGH / 8),
        };
    }
    starts
}

/// Prefetches cache line `line` from `p` on.
#[inline(always)]
pub(super) unsafe fn prefetch(p: *const u8, line: usize) {
    // SAFETY: a prefetch may name any address.
    unsafe { _mm_prefetch::<HINT>(p.wrapping_add(64 * line).cast()) }
}

/// Sums of the upper and of the lower halves of integers of `N` rows, of `G` registers each.
struct HalfSums<const N: usize, const G: usize> {
    high: [[__m512i; G]; N],
    low: [[__m512i; G]; N],
}

/// The second plane of `B` coordinates of a group, in the order of the first: four registers for each chunk of 16 bytes of the first plane
/// that these bits belong to.
///
/// # Safety
/// As [`IntegerScores`]; with `DENSE`, rows have `B` coordinates.
#[inline(always)]
unsafe fn upper_lines<const HIGH: usize, const B: usize, const DENSE: bool>(
    rows: *const u8,
    stride: usize,
) -> [__m512i; 8] {
    // SAFETY: the caller's contract.
    unsafe {
        let bytes = B * HIGH / 8;
        let (first, second) = match (bytes, DENSE) {
            (8, true) => (transpose_dense::<8, 0>(rows), None),
            (8, false) => (transpose::<8>(rows, stride, 0), None),
            (16, true) => (transpose_dense::<16, 0>(rows), None),
            (16, false) => (transpose::<16>(rows, stride, 0), None),
            (_, true) => (transpose_dense::<32, 0>(rows), Some(transpose_dense::<32, 16>(rows))),
            (_, false) => (transpose::<16>(rows, stride, 0), Some(transpose::<16>(rows, stride, 16))),
        };
        let second = second.unwrap_or(first);
        let mut lines = [_mm512_setzero_si512(); 8];
        for c in 0..4 {
            (lines[c], lines[4 + c]) = (first[c], second[c]);
        }
        if bytes == 8 {
            // The second half of the chunk has the next bits of the same bytes.
            for c in 0..2 {
                lines[c + 2] = _mm512_srli_epi16::<1>(lines[c]);
            }
        }
        lines
    }
}

/// Adds the products of `B` coordinates. With `DENSE`, keys have no other coordinates.
///
/// # Safety
/// As [`IntegerScores`].
#[inline(always)]
unsafe fn add_scores<
    const LOW: usize,
    const HIGH: usize,
    const N: usize,
    const G: usize,
    const B: usize,
    const DENSE: bool,
>(
    keys: &Keys<G>,
    q: *const i8,
    table: __m512i,
    sums: &mut HalfSums<N, G>,
) {
    // Bytes of a row in each plane.
    let (below, above) = (B * LOW / 8, B * HIGH / 8);
    // SAFETY: the caller's contract.
    unsafe {
        let mut upper = [[_mm512_setzero_si512(); 8]; G];
        for g in 0..G {
            for line in 0..GROUP * above / 64 {
                prefetch(keys.next[g].upper, line);
            }
            if above > 0 {
                upper[g] = upper_lines::<HIGH, B, DENSE>(keys.groups[g].upper, keys.strides.upper);
            }
        }
        // Chunks whose second-plane bits are in registers are written out, so that these registers have fixed names.
        let steps = if above == 32 { 2 } else { 1 };
        let mut begin = 0;
        while begin < below {
            each!(STEP in [0 1] {
                if STEP < steps {
                    let chunk = begin + 16 * STEP;
                    let mut lines = [[_mm512_setzero_si512(); 4]; G];
                    for g in 0..G {
                        for line in 0..4 {
                            prefetch(keys.next[g].lower, chunk / 4 + line);
                        }
                        lines[g] = transpose::<16>(keys.groups[g].lower, keys.strides.lower, chunk);
                    }
                    for c in 0..4 {
                        for part in 0..8 / LOW {
                            let d = chunk + 4 * c + below * part;
                            let mut levels = [_mm512_setzero_si512(); G];
                            for g in 0..G {
                                levels[g] = if LOW == 8 {
                                    _mm512_xor_si512(lines[g][c], _mm512_set1_epi8(-128))
                                } else {
                                    let above = above_bits::<LOW>(upper[g][4 * STEP + c], 0, part);
                                    _mm512_permutexvar_epi8(indices::<LOW, HIGH>(lines[g][c], part, above), table)
                                };
                            }
                            for r in 0..N {
                                let four = |p: *const i8| _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
                                let q = q.add(r * (2 * Q_HALF) + d);
                                let (high, low) = (four(q), four(q.add(Q_HALF)));
                                for g in 0..G {
                                    sums.high[r][g] = _mm512_dpbusd_epi32(sums.high[r][g], levels[g], high);
                                    sums.low[r][g] = _mm512_dpbusd_epi32(sums.low[r][g], levels[g], low);
                                }
                            }
                        }
                    }
                }
            });
            begin += 16 * steps;
            if HIGH > 0 {
                // The bits of the next chunks replace these.
                let by = _mm_cvtsi32_si128(if above == 8 { 2 } else { HIGH as i32 });
                for g in 0..G {
                    each!(LINE in [0 1 2 3 4 5 6 7] {
                        if LINE < 4 * steps {
                            upper[g][LINE] = _mm512_srl_epi16(upper[g][LINE], by);
                        }
                    });
                }
            }
        }
    }
}

/// # Safety
/// As [`IntegerValues`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) unsafe fn values(job: &IntegerValues<'_>) {
    // SAFETY: the contract of the job.
    unsafe {
        let groups = job.values.groups;
        let mut memory = [_mm512_setzero_ps(); CODE_KEYS / GROUP];
        let of_groups = &mut memory[..groups.len()];
        for n in 0..groups.len() {
            of_groups[n] = factors(groups[n].scales);
        }
        for row in (0..job.probs.rows()).step_by(4) {
            match job.probs.rows() - row {
                1 => set_probs::<1>(job, row, of_groups),
                2 => set_probs::<2>(job, row, of_groups),
                3 => set_probs::<3>(job, row, of_groups),
                _ => set_probs::<4>(job, row, of_groups),
            }
        }
        for group in job.values.next {
            prefetch(group.scales, 0);
        }
        with_planes!(job.values.format, values_of(job));
    }
}

/// Converts the probabilities of `N` rows, each times the scale of its value, to integers.
#[inline(always)]
unsafe fn set_probs<const N: usize>(job: &IntegerValues<'_>, row: usize, factors: &[__m512]) {
    // SAFETY: as [`values`]; there are as many probabilities as values.
    unsafe {
        // A value that the row does not see has probability 0, and any factor, even NaN.
        let product = |r: usize, group: usize, factor: __m512| {
            let prob = _mm512_loadu_ps(job.probs.at(row + r, GROUP * group));
            let seen = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(prob, _mm512_setzero_ps());
            _mm512_maskz_mul_ps(seen, prob, factor)
        };
        // Bits of non-negative f32 are ordered as their values, with infinity and NaN above all.
        let mut max = [_mm512_setzero_si512(); N];
        for group in 0..factors.len() {
            let factor = factors[group];
            for r in 0..N {
                max[r] = _mm512_max_epu32(max[r], _mm512_castps_si512(product(r, group, factor)));
            }
        }
        let mut inverses = [_mm512_setzero_ps(); N];
        for r in 0..N {
            let max = f32::from_bits(_mm512_reduce_max_epu32(max[r]));
            if max > 0.0 && max < f32::INFINITY {
                inverses[r] = _mm512_set1_ps(P_ONE / max);
            }
            *job.p_factors.add(row + r) = if max < f32::INFINITY { max / P_ONE } else { f32::NAN };
        }
        // Lower bytes of two registers, then their upper ones.
        let bytes = index_table(const { &half_table() });
        for group in (0..factors.len()).step_by(2) {
            // If there is no second group, the integers that are stored for it are not read.
            let second = (group + 1).min(factors.len() - 1);
            for r in 0..N {
                let integers = |group: usize| {
                    _mm512_cvtps_epi32(_mm512_mul_ps(product(r, group, factors[group]), inverses[r]))
                };
                let both = _mm512_permutex2var_epi8(integers(group), bytes, integers(second));
                let high = job.integers.add((row + r) * (2 * P_HALF) + GROUP * group);
                _mm256_storeu_si256(high.add(P_HALF).cast(), _mm512_castsi512_si256(both));
                _mm256_storeu_si256(high.cast(), _mm512_extracti64x4_epi64::<1>(both));
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn values_of<const LOW: usize, const HIGH: usize>(job: &IntegerValues<'_>) {
    // SAFETY: as [`values`]; probabilities and sums have memory for 16 rows.
    unsafe {
        for first in (0..job.probs.rows()).step_by(4) {
            match job.probs.rows() - first {
                1 => values_of_rows::<LOW, HIGH, 1>(job, first),
                2 => values_of_rows::<LOW, HIGH, 2>(job, first),
                _ => values_of_rows::<LOW, HIGH, 4>(job, first),
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn values_of_rows<const LOW: usize, const HIGH: usize, const N: usize>(
    job: &IntegerValues<'_>,
    row: usize,
) {
    let dim = job.values.format.dim();
    // SAFETY: as [`values`].
    unsafe {
        for at in (0..dim).step_by(BLOCK) {
            match (dim - at >= BLOCK, dim) {
                (true, BLOCK) => block_values::<LOW, HIGH, N, BLOCK, true>(job, row, at),
                (true, _) => block_values::<LOW, HIGH, N, BLOCK, false>(job, row, at),
                (false, 64) => block_values::<LOW, HIGH, N, 64, true>(job, row, at),
                (false, _) => block_values::<LOW, HIGH, N, 64, false>(job, row, at),
            }
        }
    }
}

/// Tables in registers, by which the bytes of values become levels.
#[derive(Clone, Copy)]
struct LevelTables {
    /// Levels of indices.
    levels: __m512i,
    /// Order of the bytes of four rows of the first plane, and of the second.
    order: __m512i,
    upper_order: __m512i,
}

/// 32 coordinates of values that are summed together: two parts of 16 bytes of the first plane, or two chunks of whole bytes.
#[derive(Clone, Copy)]
struct Chunk {
    /// First byte of the chunk, among the bytes of the `B` coordinates in the first plane.
    byte: usize,
    /// The first of its two parts.
    part: usize,
    /// Offset of its bytes in a row of each plane.
    at: usize,
    upper_at: usize,
}

/// Levels of a chunk of four values.
///
/// # Safety
/// As [`IntegerValues`]; with `DENSE`, rows have `B` coordinates.
#[inline(always)]
unsafe fn chunk_levels<const LOW: usize, const HIGH: usize, const B: usize, const DENSE: bool>(
    rows: PlaneRows,
    strides: PlaneStrides,
    chunk: Chunk,
    tables: LevelTables,
) -> [__m512i; 2] {
    let (below, above) = (B * LOW / 8, B * HIGH / 8);
    let width = if DENSE { below } else { 0 };
    // SAFETY: the caller's contract.
    unsafe {
        let mut levels = [_mm512_setzero_si512(); 2];
        let chunks = if LOW == 8 { 2 } else { 1 };
        for n in 0..chunks {
            levels[n] = quad::<16>(rows.lower, strides.lower, chunk.at + 16 * n, width, tables.order);
        }
        if LOW == 8 {
            return levels;
        }
        let bytes = levels[0];
        let mut bits = bytes;
        if HIGH > 0 {
            let width = if DENSE { above } else { 0 };
            if above == 8 {
                bits = quad::<8>(rows.upper, strides.upper, chunk.upper_at, width, tables.upper_order);
                // The second half of the chunk has the next bits of the same bytes.
                bits = _mm512_mask_srli_epi16::<1>(bits, 0xffff_0000, bits);
            } else {
                bits = quad::<16>(rows.upper, strides.upper, chunk.upper_at, width, tables.upper_order);
            }
        }
        for n in 0..2 {
            let part = chunk.part + n;
            let bits = above_bits::<LOW>(bits, HIGH * (chunk.byte / above.max(1)), part);
            levels[n] = _mm512_permutexvar_epi8(indices::<LOW, HIGH>(bytes, part, bits), tables.levels);
        }
        levels
    }
}

/// Adds the products of probabilities and levels: `N` rows of four probabilities each, from `p` on.
///
/// # Safety
/// As [`IntegerValues`].
#[inline(always)]
unsafe fn add_values<const N: usize>(p: *const u8, levels: [__m512i; 2], sums: &mut HalfSums<2, N>) {
    // SAFETY: the caller's contract.
    unsafe {
        for r in 0..N {
            let p = p.add(r * (2 * P_HALF));
            let four = |p: *const u8| _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
            let (high, low) = (four(p), four(p.add(P_HALF)));
            for n in 0..2 {
                sums.high[n][r] = _mm512_dpbusd_epi32(sums.high[n][r], high, levels[n]);
                sums.low[n][r] = _mm512_dpbusd_epi32(sums.low[n][r], low, levels[n]);
            }
        }
    }
}

/// Stores the sums of `N` rows from `row` on: of 16 coordinates from `column` on, and of 16 more at `distance` from them.
///
/// # Safety
/// As [`IntegerValues`].
#[inline(always)]
unsafe fn store_values<const N: usize>(
    job: &IntegerValues<'_>,
    row: usize,
    column: usize,
    distance: usize,
    sums: &HalfSums<2, N>,
) {
    // SAFETY: the caller's contract.
    unsafe {
        for n in 0..2 {
            for r in 0..N {
                let high = _mm512_slli_epi32::<8>(sums.high[n][r]);
                let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(high, sums.low[n][r]));
                let factor = _mm512_set1_ps(*job.p_factors.add(row + r));
                _mm512_storeu_ps(job.c.at(row + r, column + n * distance), _mm512_mul_ps(sum, factor));
            }
        }
    }
}

/// Sums of `B` coordinates from `first` on. With `DENSE`, values have no other coordinates.
///
/// # Safety
/// As [`IntegerValues`].
#[inline(always)]
unsafe fn block_values<
    const LOW: usize,
    const HIGH: usize,
    const N: usize,
    const B: usize,
    const DENSE: bool,
>(
    job: &IntegerValues<'_>,
    row: usize,
    first: usize,
) {
    let (below, above) = (B * LOW / 8, B * HIGH / 8);
    let values = &job.values;
    let strides = PlaneStrides::new::<LOW, HIGH>(if DENSE { B } else { values.format.dim() });
    // The first rows prefetch for all rows.
    let next = if row == 0 { values.next } else { values.groups };
    // The registers hold the sums of two parts of a byte of the first plane, or of two chunks of whole bytes.
    let chunks = if LOW == 8 { 2 } else { 1 };
    let passes = if LOW == 2 { 2 } else { 1 };
    // SAFETY: the caller's contract.
    unsafe {
        let tables = LevelTables {
            levels: table(values.levels),
            order: index_table(const { &order_table(16, 16) }),
            upper_order: index_table(
                const { &order_table(16, if B * HIGH < 128 { B * HIGH / 8 } else { 16 }) },
            ),
        };
        // Chunks are written out so that shifts of the second plane's bits are constants.
        let steps = if HIGH > 0 { below / 16 } else { 1 };
        let mut begin = 0;
        while begin < below {
            each!(STEP in [0 1 2 3] {
                each!(PASS in [0 1] {
                    if STEP < steps && PASS < passes {
                        let byte = if HIGH > 0 { 16 * STEP } else { begin };
                        let chunk = Chunk {
                            byte,
                            part: 2 * PASS,
                            at: first * LOW / 8 + byte,
                            upper_at: first * HIGH / 8 + byte % above.max(1),
                        };
                        let mut sums = HalfSums { high: [[_mm512_setzero_si512(); N]; 2], low: [[_mm512_setzero_si512(); N]; 2] };
                        for group in 0..values.groups.len() {
                            let (CodeGroup { lower, upper, .. }, next) = (values.groups[group], next[group]);
                            let p = job.integers.add(row * (2 * P_HALF) + GROUP * group).cast_const();
                            for quarter in 0..4 {
                                // Four rows of a chunk are a cache line; for each, a line of the next rows is prefetched.
                                let asked = if PASS == 0 { chunks } else { 0 };
                                for n in 0..asked {
                                    let line = byte / 4 + 4 * n + quarter;
                                    prefetch(next.lower.wrapping_add(GROUP * first * LOW / 8), line);
                                    if line < GROUP * above / 64 {
                                        prefetch(next.upper.wrapping_add(GROUP * first * HIGH / 8), line);
                                    }
                                }
                                let rows = PlaneRows {
                                    lower: lower.add(4 * quarter * strides.lower),
                                    upper: upper.wrapping_add(4 * quarter * strides.upper),
                                };
                                let levels = chunk_levels::<LOW, HIGH, B, DENSE>(rows, strides, chunk, tables);
                                add_values::<N>(p.add(4 * quarter), levels, &mut sums);
                            }
                        }
                        let distance = if LOW == 8 { 16 } else { below };
                        store_values::<N>(job, row, first + byte + 2 * PASS * distance, distance, &sums);
                    }
                })
            });
            begin += 16 * steps * chunks;
        }
    }
}

/// The permutation that takes byte 0, then byte 1 of every i32 of two registers: the lower, then the upper halves of integers of 16 bits.
const fn half_table() -> [u8; 64] {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        table[i] = (i % 32 * 4 + i / 32) as u8;
        i += 1;
    }
    table
}

/// The permutation that puts byte `x` of row `t` at byte `4 x + t` of a register, for four rows of `width` bytes that
/// begin `stride` bytes apart.
const fn order_table(stride: usize, width: usize) -> [u8; 64] {
    let width = if width == 0 { 1 } else { width };
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        table[i] = (stride * (i % 4) + i / 4 % width) as u8;
        i += 1;
    }
    table
}

/// Bytes `at..at + BYTES` of four rows that are `stride` bytes apart: byte `4 x + t` is byte `x` of row `t`. A `width` of 16 or 32 says
/// that rows have that many bytes and no gap between them.
#[inline(always)]
unsafe fn quad<const BYTES: usize>(
    rows: *const u8,
    stride: usize,
    at: usize,
    width: usize,
    order: __m512i,
) -> __m512i {
    // SAFETY: the caller's rows have these bytes.
    unsafe {
        match width {
            16 => _mm512_permutexvar_epi8(order, _mm512_loadu_si512(rows.cast())),
            32 => {
                let order = index_table(const { &order_table(32, 16) });
                let order = _mm512_add_epi8(order, _mm512_set1_epi8(at as i8));
                let line = |n: usize| _mm512_loadu_si512(rows.add(64 * n).cast());
                _mm512_permutex2var_epi8(line(0), order, line(1))
            }
            _ => {
                let load = |t: usize| {
                    let p = rows.add(at + t * stride);
                    if BYTES == 8 { _mm_loadl_epi64(p.cast()) } else { _mm_loadu_si128(p.cast()) }
                };
                _mm512_permutexvar_epi8(order, four_rows([load(0), load(1), load(2), load(3)]))
            }
        }
    }
}

/// Four rows of 16 bytes, one after another.
#[inline(always)]
unsafe fn four_rows([a, b, c, d]: [__m128i; 4]) -> __m512i {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let low = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(a), b);
        _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(low, c), d)
    }
}
