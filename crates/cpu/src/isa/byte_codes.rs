//! Products of f32 rows with codes of one byte, read in place: e4m3 (fp8), and 8-bit integers whose head dimension is
//! not a multiple of VNNI's step.
//!
//! The bits of an e4m3 code, with its sign at bit 31 and its exponent and mantissa from bit 20 on, are an f32 that is 2^-120 times the
//! value of the code, so that one multiplication dequantizes it, subnormals included. The two NaN codes would come out finite: kernels keep
//! the largest magnitude of the codes that they read, and write NaN to the results that a NaN code belongs to.

#![allow(unsafe_code)]

use super::vnni::{prefetch, transpose};
use crate::kernels::forward::products::byte_codes::{ByteScores, ByteValues};
use crate::kernels::forward::products::code_block::GROUP;
use flashtile_core::codec::{FP8_SCALE_UNIT, SCALE_UNIT};
use std::arch::x86_64::*;

/// The factor from an f32 that has the bits of an e4m3 code in place to the value of the code: 2^120.
const E4M3_FACTOR: f32 = f32::from_bits((127 + 127 - 7) << 23);

/// Bits of an f32 that sign, exponent and mantissa of an e4m3 code take.
const E4M3_BITS: i32 = 0x87f0_0000_u32.cast_signed();

/// The magnitude of an e4m3 NaN.
const E4M3_NAN: i8 = 0x7f;

/// The values of 16 codes, without their scales: e4m3 with `E4M3`, else signed integers. A code is the high byte of its lane; the bytes
/// below it may hold anything.
#[inline(always)]
unsafe fn dequant_f32<const E4M3: bool>(high_bytes: __m512i) -> __m512 {
    // SAFETY: the caller has the instruction set.
    unsafe {
        if !E4M3 {
            return _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(high_bytes));
        }
        let bits = _mm512_and_si512(_mm512_srai_epi32::<4>(high_bytes), _mm512_set1_epi32(E4M3_BITS));
        _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(E4M3_FACTOR))
    }
}

/// [`dequant_f32`] of 16 codes in memory.
#[inline(always)]
unsafe fn load_dequant_f32<const E4M3: bool>(codes: *const u8) -> __m512 {
    // SAFETY: the caller has 16 bytes and the instruction set.
    unsafe {
        let wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(codes.cast()));
        if !E4M3 {
            return _mm512_cvtepi32_ps(wide);
        }
        // The conversion has copied the sign to every bit above the code.
        let bits = _mm512_and_si512(_mm512_slli_epi32::<20>(wide), _mm512_set1_epi32(E4M3_BITS));
        _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(E4M3_FACTOR))
    }
}

/// The larger of each byte of `max` and the magnitude of the e4m3 code in its place.
#[inline(always)]
unsafe fn max_magnitude(max: __m512i, codes: __m512i) -> __m512i {
    // SAFETY: the caller has the instruction set.
    unsafe { _mm512_max_epu8(max, _mm512_and_si512(codes, _mm512_set1_epi8(E4M3_NAN))) }
}

/// The 16 scales of a group, in units of the codes.
#[inline(always)]
unsafe fn factors<const E4M3: bool>(scales: *const u8) -> __m512 {
    let unit = if E4M3 { FP8_SCALE_UNIT } else { SCALE_UNIT };
    // SAFETY: the caller has 16 scales of two bytes and the instruction set.
    unsafe {
        // The sign bit of a scale is ignored.
        let scales = _mm256_and_si256(_mm256_loadu_si256(scales.cast()), _mm256_set1_epi16(i16::MAX));
        _mm512_mul_ps(_mm512_cvtph_ps(scales), _mm512_set1_ps(1.0 / unit))
    }
}

/// # Safety
/// As [`ByteScores`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn scores(job: &ByteScores<'_>) {
    // SAFETY: the contract of the job.
    unsafe { if job.keys.is_fp8 { scores_of::<true>(job) } else { scores_of::<false>(job) } }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn scores_of<const E4M3: bool>(job: &ByteScores<'_>) {
    // SAFETY: as [`scores`]; queries and scores have memory for sixteen rows.
    unsafe {
        for first in (0..job.count).step_by(8) {
            match job.count - first {
                1 => scores_of_rows::<E4M3, 1>(job, first),
                2 => scores_of_rows::<E4M3, 2>(job, first),
                3 | 4 => scores_of_rows::<E4M3, 4>(job, first),
                _ => scores_of_rows::<E4M3, 8>(job, first),
            }
        }
    }
}

/// Scores of `N` rows: two groups of keys at a time if the sums of both fit the registers.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn scores_of_rows<const E4M3: bool, const N: usize>(job: &ByteScores<'_>, row: usize) {
    let groups = job.keys.groups.len();
    let mut group = 0;
    // SAFETY: as [`scores`].
    unsafe {
        while N <= 4 && group + 2 <= groups {
            scores_of_groups::<E4M3, N, 2>(job, row, group);
            group += 2;
        }
        while group < groups {
            scores_of_groups::<E4M3, N, 1>(job, row, group);
            group += 1;
        }
    }
}

#[inline(always)]
unsafe fn scores_of_groups<const E4M3: bool, const N: usize, const G: usize>(
    job: &ByteScores<'_>,
    row: usize,
    group: usize,
) {
    let dim = job.keys.format.dim();
    let keys = &job.keys.groups[group..group + G];
    // The first rows prefetch for all rows.
    let next = &(if row == 0 { job.keys.next } else { job.keys.groups })[group..group + G];
    // SAFETY: as [`scores`].
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); G]; N];
        let mut max_codes = [_mm512_setzero_si512(); G];
        for at in (0..dim).step_by(16) {
            let mut lines = [[_mm512_setzero_si512(); 4]; G];
            for g in 0..G {
                for line in 0..4 {
                    prefetch(next[g].lower, at / 4 + line);
                }
                lines[g] = transpose::<16>(keys[g].lower, dim, at);
            }
            for c in 0..4 {
                for g in 0..G {
                    if E4M3 {
                        max_codes[g] = max_magnitude(max_codes[g], lines[g][c]);
                    }
                }
                for byte in 0..4 {
                    let mut x = [_mm512_setzero_ps(); G];
                    for g in 0..G {
                        let line = lines[g][c];
                        let high_bytes = match byte {
                            0 => _mm512_slli_epi32::<24>(line),
                            1 => _mm512_slli_epi32::<16>(line),
                            2 => _mm512_slli_epi32::<8>(line),
                            _ => line,
                        };
                        x[g] = dequant_f32::<E4M3>(high_bytes);
                    }
                    for r in 0..N {
                        let q = _mm512_set1_ps(*job.q.at(row + r, at + 4 * c + byte));
                        for g in 0..G {
                            sums[r][g] = _mm512_fmadd_ps(q, x[g], sums[r][g]);
                        }
                    }
                }
            }
        }
        for g in 0..G {
            prefetch(next[g].scales, 0);
            let nan = _mm512_movm_epi8(_mm512_cmpeq_epi8_mask(max_codes[g], _mm512_set1_epi8(E4M3_NAN)));
            let nan = _mm512_test_epi32_mask(nan, nan);
            let factors = _mm512_mask_mov_ps(factors::<E4M3>(keys[g].scales), nan, _mm512_set1_ps(f32::NAN));
            for r in 0..N {
                let c = job.c.at(row + r, GROUP * (group + g));
                _mm512_storeu_ps(c, _mm512_mul_ps(sums[r][g], factors));
            }
        }
    }
}

/// # Safety
/// As [`ByteValues`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn values(job: &ByteValues<'_>) {
    // SAFETY: the contract of the job.
    unsafe { if job.values.is_fp8 { values_of::<true>(job) } else { values_of::<false>(job) } }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn values_of<const E4M3: bool>(job: &ByteValues<'_>) {
    // SAFETY: as [`values`].
    unsafe {
        for row in 0..job.probs.rows() {
            let probs = job.probs.at(row, 0);
            for (n, group) in job.values.groups.iter().enumerate() {
                let probs = probs.add(GROUP * n);
                let prob = _mm512_loadu_ps(probs);
                // A value that the row does not see has probability 0, and any scale, even NaN.
                let seen = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(prob, _mm512_setzero_ps());
                _mm512_storeu_ps(probs, _mm512_maskz_mul_ps(seen, prob, factors::<E4M3>(group.scales)));
            }
        }
        for group in job.values.next {
            prefetch(group.scales, 0);
        }
        let mut row = 0;
        while row < job.probs.rows() {
            match job.probs.rows() - row {
                1 => row += values_of_rows::<E4M3, 1>(job, row),
                2 | 3 => row += values_of_rows::<E4M3, 2>(job, row),
                _ => row += values_of_rows::<E4M3, 4>(job, row),
            }
        }
    }
}

/// Sums of `N` rows: 64 coordinates at a time, then 16. Returns `N`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn values_of_rows<const E4M3: bool, const N: usize>(job: &ByteValues<'_>, row: usize) -> usize {
    let dim = job.values.format.dim();
    let mut at = 0;
    // SAFETY: as [`values`].
    unsafe {
        while at + 64 <= dim {
            values_of_columns::<E4M3, N, 4>(job, row, at);
            at += 64;
        }
        while at < dim {
            values_of_columns::<E4M3, N, 1>(job, row, at);
            at += 16;
        }
    }
    N
}

#[inline(always)]
unsafe fn values_of_columns<const E4M3: bool, const N: usize, const V: usize>(
    job: &ByteValues<'_>,
    row: usize,
    at: usize,
) {
    let values = &job.values;
    let dim = values.format.dim();
    // The first rows prefetch for all rows.
    let next = if row == 0 { values.next } else { values.groups };
    // SAFETY: as [`values`].
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); N]; V];
        let mut max_codes = _mm512_setzero_si512();
        for n in 0..values.groups.len() {
            let (group, next) = (values.groups[n], next[n]);
            let probs = job.probs.from(row, GROUP * n).as_mat();
            for value in 0..GROUP {
                let codes = group.lower.add(value * dim + at);
                prefetch(next.lower.wrapping_add(GROUP * at), value * V / 4);
                if E4M3 {
                    let here = if V == 4 {
                        _mm512_loadu_si512(codes.cast())
                    } else {
                        _mm512_castsi128_si512(_mm_loadu_si128(codes.cast()))
                    };
                    max_codes = max_magnitude(max_codes, here);
                }
                let mut x = [_mm512_setzero_ps(); V];
                for v in 0..V {
                    x[v] = load_dequant_f32::<E4M3>(codes.add(16 * v));
                }
                for r in 0..N {
                    let prob = _mm512_set1_ps(*probs.at(r, value));
                    for v in 0..V {
                        sums[v][r] = _mm512_fmadd_ps(prob, x[v], sums[v][r]);
                    }
                }
            }
        }
        for v in 0..V {
            for r in 0..N {
                _mm512_storeu_ps(job.c.at(row + r, at + 16 * v), sums[v][r]);
            }
        }
        if _mm512_mask_cmpeq_epi8_mask(u64::MAX >> (64 - 16 * V), max_codes, _mm512_set1_epi8(E4M3_NAN)) != 0
        {
            propagate_nan(job, row..row + N, at..at + 16 * V);
        }
    }
}

/// Writes NaN to the sums of `rows` and `columns` that include a NaN code.
#[cold]
unsafe fn propagate_nan(job: &ByteValues<'_>, rows: std::ops::Range<usize>, columns: std::ops::Range<usize>) {
    let dim = job.values.format.dim();
    // SAFETY: as [`values`].
    unsafe {
        for (n, group) in job.values.groups.iter().enumerate() {
            for value in 0..GROUP {
                for column in columns.clone() {
                    if (*group.lower.add(value * dim + column)).cast_signed() & E4M3_NAN != E4M3_NAN {
                        continue;
                    }
                    for row in rows.clone() {
                        // A value that the row does not see has probability 0.
                        if *job.probs.at(row, GROUP * n + value) != 0.0 {
                            *job.c.at(row, column) = f32::NAN;
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::forward::products::code_block::{CodeBlock, CodeGroup};
    use crate::kernels::shared::mat::{Mat, MatMut};
    use crate::plan::STREAM_ROWS;
    use flashtile_core::codec::RowLayout;
    use flashtile_testkit::Rng;
    use half::f16;

    /// The value of an e4m3 code.
    fn e4m3_value(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let sign = if code < 0x80 { 1.0 } else { -1.0 };
        match code & 0x7f {
            0x7f => f64::NAN,
            0..8 => sign * mantissa * 2f64.powi(-9),
            _ => sign * (8.0 + mantissa) * 2f64.powi(exponent - 10),
        }
    }

    fn assert_near(got: f32, want: f64, size: f64, what: &str) {
        let near = (f64::from(got) - want).abs() <= 1e-6 * size || got.is_nan() && want.is_nan();
        assert!(near, "{what}: {got}, not {want}");
    }

    #[test]
    fn products_equal_f64_sums_of_dequantized_codes() {
        let found = [
            is_x86_feature_detected!("avx512f"),
            is_x86_feature_detected!("avx512bw"),
            is_x86_feature_detected!("avx512dq"),
            is_x86_feature_detected!("avx512vl"),
        ];
        if found.contains(&false) {
            return;
        }
        let mut rng = Rng::new(9);
        for (index, dim) in [16, 32, 48, 64, 80, 96, 128, 256, 512].into_iter().enumerate() {
            for count in [1, 2, 3, 4, 5, 7, 8, 11, 16] {
                for e4m3 in [true, false] {
                    products(&mut rng, (dim, count, 1 + (index + count) % 5), e4m3);
                }
            }
        }
    }

    /// Both products of `count` rows of `dim` coordinates with `groups` groups of codes; an odd `count` plants two NaN codes.
    fn products(rng: &mut Rng, (dim, count, groups): (usize, usize, usize), e4m3: bool) {
        let rows = GROUP * groups;
        let mut page: Vec<u8> =
            (0..rows * dim).map(|_| rng.below(127) as u8 | (rng.below(2) << 7) as u8).collect();
        if count % 2 == 1 {
            page[3 * dim + 5] = 0x7f;
            page[(rows - 1) * dim + dim - 1] = 0xff;
        }
        let scales: Vec<f16> = (0..rows).map(|_| f16::from_f32(rng.uniform(0.01, 3.0))).collect();
        let scales: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let scale =
            |row: usize| f64::from(f16::from_le_bytes([scales[2 * row], scales[2 * row + 1]]).to_f32());
        let value = |row: usize, d: usize| {
            let code = page[row * dim + d];
            let of = if e4m3 { e4m3_value(code) / 256.0 } else { f64::from(code.cast_signed()) / 128.0 };
            of * scale(row)
        };
        let at = |n: usize| CodeGroup {
            lower: page[n * GROUP * dim..].as_ptr(),
            upper: std::ptr::null(),
            scales: scales[n * GROUP * 2..].as_ptr(),
        };
        let starts: Vec<CodeGroup> = (0..groups).map(at).collect();
        let format = RowLayout::new(dim, 8);
        let block = CodeBlock { format: &format, levels: None, is_fp8: e4m3, groups: &starts, next: &starts };

        let q: Vec<f32> = (0..STREAM_ROWS * dim).map(|_| rng.normal()).collect();
        let mut c = vec![f32::NAN; STREAM_ROWS * rows];
        // SAFETY: the machine has the instruction set; groups, queries and scores have the sizes that the job says.
        unsafe {
            let q = Mat::new(q.as_ptr(), dim, STREAM_ROWS, dim);
            let c = MatMut::new(c.as_mut_ptr(), rows, STREAM_ROWS, rows);
            scores(&ByteScores { keys: block, q, count, c });
        }
        for (r, row) in (0..count).flat_map(|r| (0..rows).map(move |row| (r, row))) {
            let product = |d: usize| f64::from(q[r * dim + d]) * value(row, d);
            let (want, size) =
                (0..dim).map(product).fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
            assert_near(c[r * rows + row], want, size, &format!("score {r} {row} of {dim}, {count}"));
        }

        let mut probs: Vec<f32> = (0..count * rows).map(|_| rng.uniform(0.0, 1.0)).collect();
        for prob in probs.iter_mut().skip(3).step_by(7) {
            *prob = 0.0;
        }
        let given = probs.clone();
        let mut c = vec![f32::NAN; STREAM_ROWS * dim];
        // SAFETY: as above.
        unsafe {
            let probs = MatMut::new(probs.as_mut_ptr(), rows, count, rows);
            let c = MatMut::new(c.as_mut_ptr(), dim, STREAM_ROWS, dim);
            values(&ByteValues { values: block, probs, c });
        }
        for (r, d) in (0..count).flat_map(|r| (0..dim).map(move |d| (r, d))) {
            let seen = (0..rows).filter(|row| given[r * rows + row] != 0.0);
            let terms = seen.map(|row| f64::from(given[r * rows + row]) * value(row, d));
            let (want, size) = terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
            assert_near(c[r * dim + d], want, size, &format!("sum {r} {d} of {dim}, {count}"));
        }
    }
}
