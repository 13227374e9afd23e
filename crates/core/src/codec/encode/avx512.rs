//! An encoder that keeps a row in registers from its elements to its planes, for rows of 64, 128, 256 and 512
//! elements.
//!
//! A register has 16 f32 coordinates, 32 integers of 16 bits or 64 bytes. Packing leaves bytes in runs of four from
//! each of four registers; planes are permuted once they are complete.

#![allow(unsafe_code)]

use super::{EncodeJob, EncodeRows, MAX_ENERGY, PageRows, SourceRows};
use crate::codec::coder::Scheme;
use crate::codec::fp8;
use crate::codec::key_transform::ChannelTransform;
use crate::codec::ops::avx512::{Avx512, Vbmi, add_up, load_table, look_up, short_butterflies};
use crate::codec::planes::planes as planes_of;
use crate::codec::quantizer::{
    MIN_MAGNITUDE, ONE, Quantizer, ROUNDER, ScaleRule, TRIAL_SCALES, scale_of, unit,
};
use crate::codec::row_layout::FP8_SCALE_UNIT;
use crate::codec::tq::codebook::{Codebook, TRIALS};
use crate::dtype::Dtype;
use std::arch::x86_64::*;

/// f32 lanes of a register.
const LANES: usize = 16;

/// An energy up to this is below the limit in any order of summation: sums of 512 squares differ by at most 4e-5.
const SHORT: f32 = 0.99 * MAX_ENERGY;

impl EncodeRows for Avx512 {
    #[inline(always)]
    fn is_short(rows: &SourceRows<'_>, head: usize, row: usize) -> bool {
        let (bytes, ChannelTransform { mean, inverses, .. }) = (rows.row(head, row), rows.of_head(head));
        let dtype = rows.tensor.dtype();
        let dim = bytes.len() / dtype.bytes();
        if !dim.is_multiple_of(LANES) {
            return false;
        }
        // SAFETY: the caller is compiled for these instructions and passes as many elements as the loads read.
        unsafe {
            let mut sums = _mm512_setzero_ps();
            let p = bytes.as_ptr();
            for at in (0..dim).step_by(LANES) {
                let p = p.add(at * dtype.bytes());
                let mut x = match dtype {
                    Dtype::F32 => _mm512_loadu_ps(p.cast()),
                    Dtype::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())),
                    Dtype::BF16 => {
                        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
                        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
                    }
                };
                if let Some(mean) = mean {
                    x = _mm512_sub_ps(x, _mm512_loadu_ps(mean[at..at + LANES].as_ptr()));
                }
                if let Some(inverses) = inverses {
                    x = _mm512_mul_ps(x, _mm512_loadu_ps(inverses[at..at + LANES].as_ptr()));
                }
                sums = _mm512_fmadd_ps(x, x, sums);
            }
            _mm512_reduce_add_ps(sums) <= SHORT
        }
    }
}

impl EncodeRows for Vbmi {
    #[inline(always)]
    fn store(job: &mut EncodeJob<'_>) -> bool {
        // SAFETY: the caller is compiled for these instructions.
        unsafe { store(job) }
    }

    #[inline(always)]
    fn is_short(rows: &SourceRows<'_>, head: usize, row: usize) -> bool {
        Avx512::is_short(rows, head, row)
    }
}

/// Stores the rows; does nothing and returns false if this encoder does not support them.
///
/// # Safety
/// The machine has the instruction set.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn store(job: &mut EncodeJob<'_>) -> bool {
    let dim = job.coder.dim;
    // SAFETY: the caller guarantees the instruction set; the dimension is that of `V` registers.
    unsafe {
        match &job.coder.scheme {
            Scheme::Fp8 => match dim {
                64 => store_rows::<4, _>(job, &Fp8Rows),
                128 => store_rows::<8, _>(job, &Fp8Rows),
                256 => store_rows::<16, _>(job, &Fp8Rows),
                512 => store_rows::<32, _>(job, &Fp8Rows),
                _ => return false,
            },
            Scheme::Integers(quantizer) => {
                let of = (quantizer, job.rule);
                match (dim, quantizer.levels) {
                    (64, None) => store_rows::<4, _>(job, &Integers(of)),
                    (128, None) => store_rows::<8, _>(job, &Integers(of)),
                    (256, None) => store_rows::<16, _>(job, &Integers(of)),
                    (512, None) => store_rows::<32, _>(job, &Integers(of)),
                    (64, Some(levels)) => store_rows::<4, _>(job, &Table(of, levels)),
                    (128, Some(levels)) => store_rows::<8, _>(job, &Table(of, levels)),
                    (256, Some(levels)) => store_rows::<16, _>(job, &Table(of, levels)),
                    (512, Some(levels)) => store_rows::<32, _>(job, &Table(of, levels)),
                    _ => return false,
                }
            }
            Scheme::RotatedHalves(_) | Scheme::Mlx(_) => return false,
        }
    }
    true
}

/// Stores rows of `V` registers.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn store_rows<const V: usize, E: Encoder>(job: &mut EncodeJob<'_>, encoder: &E) {
    let EncodeJob { coder, rows, from, pages, .. } = job;
    let PageRows { bytes, tokens, rows: to } = pages;
    let [_, heads, _, dim] = rows.tensor.shape();
    let format = coder.format();
    let page_bytes = *tokens * format.row_bytes();
    assert!(dim == V * LANES && bytes.len() == heads * page_bytes && to.end <= *tokens);
    let widths = [0, 1].map(|n| format.planes().get(n).map_or(0, |plane| plane.bytes));
    // Tokens are the outer loop, as in most tensors, where the rows of one head are far apart.
    for row in to.clone() {
        for head in 0..heads {
            // SAFETY: the assertion above puts every plane of the row inside the bytes; the caller guarantees the
            // instruction set.
            unsafe {
                let page = bytes.as_mut_ptr().add(head * page_bytes);
                let upper = *tokens * widths[0];
                let scale = upper + *tokens * widths[1];
                let planes = [page.add(row * widths[0]), page.add(upper + row * widths[1])];
                let x = load::<V>(rows, head, *from + row - to.start);
                page.add(scale + 2 * row).cast::<u16>().write_unaligned(encoder.encode(x, planes).to_le());
            }
        }
    }
}

/// Stores a row of `V` registers in planes and returns the bits of its scale.
trait Encoder {
    unsafe fn encode<const V: usize>(&self, x: [__m512; V], planes: [*mut u8; 2]) -> u16;
}

/// Loads a row of elements as f32, transformed as its head is.
#[inline(always)]
unsafe fn load<const V: usize>(rows: &SourceRows<'_>, head: usize, row: usize) -> [__m512; V] {
    let (bytes, ChannelTransform { mean, inverses, .. }) = (rows.row(head, row), rows.of_head(head));
    assert!(bytes.len() == V * LANES * rows.tensor.dtype().bytes());
    let p = bytes.as_ptr();
    // SAFETY: the assertions check the lengths of row, mean and inverses.
    unsafe {
        let mut x = [_mm512_setzero_ps(); V];
        match rows.tensor.dtype() {
            Dtype::F32 => {
                for n in 0..V {
                    x[n] = _mm512_loadu_ps(p.add(64 * n).cast());
                }
            }
            Dtype::F16 => {
                for n in 0..V {
                    x[n] = _mm512_cvtph_ps(_mm256_loadu_si256(p.add(32 * n).cast()));
                }
            }
            Dtype::BF16 => {
                for n in 0..V {
                    let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.add(32 * n).cast()));
                    x[n] = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide));
                }
            }
        }
        if let Some(mean) = mean {
            assert!(mean.len() == V * LANES);
            for n in 0..V {
                x[n] = _mm512_sub_ps(x[n], _mm512_loadu_ps(mean.as_ptr().add(LANES * n)));
            }
        }
        if let Some(inverses) = inverses {
            assert!(inverses.len() == V * LANES);
            for n in 0..V {
                x[n] = _mm512_mul_ps(x[n], _mm512_loadu_ps(inverses.as_ptr().add(LANES * n)));
            }
        }
        x
    }
}

/// e4m3 codes.
struct Fp8Rows;

impl Encoder for Fp8Rows {
    #[inline(always)]
    unsafe fn encode<const V: usize>(&self, x: [__m512; V], [codes, _]: [*mut u8; 2]) -> u16 {
        // SAFETY: the caller guarantees the instruction set, and a plane with one byte per coordinate.
        unsafe {
            let amax = greatest(&x);
            let scale = to_f16(amax * (FP8_SCALE_UNIT / fp8::MAX));
            if scale == 0 {
                codes.write_bytes(0, V * LANES);
                return scale;
            }
            let inverse =
                _mm512_set1_ps(FP8_SCALE_UNIT / _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(scale.into()))));
            for n in (0..V).step_by(4) {
                let mut four = [_mm512_setzero_si512(); 4];
                for i in 0..4 {
                    four[i] = e4m3(_mm512_mul_ps(x[n + i], inverse));
                }
                let [a, b, c, d] = four;
                let bytes = _mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d));
                _mm512_storeu_si512(codes.add(LANES * n).cast(), in_order(bytes));
            }
            scale
        }
    }
}

/// [`fp8::from_f32`] of 16 elements.
#[inline(always)]
unsafe fn e4m3(x: __m512) -> __m512i {
    /// Exponent of subnormal values, and offset from an exponent to the value whose addition rounds, both as bits of f32.
    const MIN_EXPONENT: i32 = (127 - 6) << 23;
    const ABOVE: i32 = (20 << 23) | 1 << 22;
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        let bits = _mm512_castps_si512(x);
        let magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(i32::MAX));
        let magnitude = _mm512_min_epu32(magnitude, _mm512_set1_epi32(fp8::MAX.to_bits().cast_signed()));
        let exponent = _mm512_and_si512(magnitude, _mm512_set1_epi32(0xff << 23));
        let exponent = _mm512_max_epu32(exponent, _mm512_set1_epi32(MIN_EXPONENT));
        let rounder = _mm512_add_epi32(exponent, _mm512_set1_epi32(ABOVE));
        let sum = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_castsi512_ps(rounder));
        let steps = _mm512_sub_epi32(_mm512_castps_si512(sum), rounder);
        let above = _mm512_srli_epi32::<20>(_mm512_sub_epi32(exponent, _mm512_set1_epi32(MIN_EXPONENT)));
        let sign = _mm512_and_si512(_mm512_srli_epi32::<24>(bits), _mm512_set1_epi32(0x80));
        _mm512_or_si512(_mm512_add_epi32(steps, above), sign)
    }
}

/// Integers of 8 bits.
struct Integers<'a>((&'a Quantizer, ScaleRule));

impl Encoder for Integers<'_> {
    #[inline(always)]
    unsafe fn encode<const V: usize>(&self, x: [__m512; V], [codes, _]: [*mut u8; 2]) -> u16 {
        let Self((quantizer, rule)) = *self;
        // SAFETY: the caller guarantees the instruction set, and a plane with one byte per coordinate.
        unsafe {
            let x = rotate(quantizer, x);
            let amax = greatest(&x);
            if amax < MIN_MAGNITUDE {
                codes.write_bytes(0, V * LANES);
                return 0;
            }
            let fixed = fixed(&x, amax);
            let words = words(&fixed);
            let (mut products, mut squares) = (_mm512_setzero_si512(), _mm512_setzero_si512());
            let step = _mm512_set1_ps(127.0 / ONE);
            for n in (0..V).step_by(4) {
                let mut four = [_mm512_setzero_si512(); 4];
                for i in 0..4 {
                    four[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_cvtepi32_ps(fixed[n + i]), step));
                }
                let [a, b, c, d] = four;
                let pair = [_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d)];
                for i in 0..2 {
                    // Sums wrap past 31 bits; read as unsigned, they are exact up to 32.
                    products = _mm512_dpwssd_epi32(products, pair[i], words[n / 2 + i]);
                    squares = _mm512_dpwssd_epi32(squares, pair[i], pair[i]);
                }
                let bytes = _mm512_packs_epi16(pair[0], pair[1]);
                _mm512_storeu_si512(codes.add(LANES * n).cast(), in_order(bytes));
            }
            let energy = energy::<V>(&words);
            let sum = |x| f64::from(_mm512_reduce_add_epi32(x).cast_unsigned());
            let scale = match rule {
                ScaleRule::Unbiased => energy as f64 / sum(products),
                ScaleRule::LeastSquares => sum(products) / sum(squares),
            };
            to_f16(scale_of(scale, amax))
        }
    }
}

/// Indices into a codebook.
struct Table<'a>((&'a Quantizer, ScaleRule), &'a Codebook);

impl Encoder for Table<'_> {
    #[inline(always)]
    unsafe fn encode<const V: usize>(&self, x: [__m512; V], planes: [*mut u8; 2]) -> u16 {
        let Self((quantizer, rule), levels) = *self;
        // SAFETY: the caller guarantees the instruction set, and planes that hold all coordinates.
        unsafe {
            let x = rotate(quantizer, x);
            let amax = greatest(&x);
            if amax < MIN_MAGNITUDE {
                put::<V>(&[_mm512_setzero_si512(); V], levels.bits, planes);
                return 0;
            }
            let words = words(&fixed(&x, amax));
            let energy = energy::<V>(&words);
            let rms = (energy as f64 / (V * LANES) as f64).sqrt();
            let factors = factors(levels, rms);
            // Magnitudes, and their bytes.
            let zero = _mm512_setzero_si512();
            let (mut magnitudes, mut low, mut high) = ([zero; V], [zero; V], [zero; V]);
            for n in 0..V / 2 {
                magnitudes[n] = _mm512_abs_epi16(words[n]);
            }
            for q in 0..V / 4 {
                let (a, b) = (magnitudes[2 * q], magnitudes[2 * q + 1]);
                let byte = _mm512_set1_epi16(0xff);
                low[q] = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
                high[q] = _mm512_packus_epi16(_mm512_srli_epi16::<8>(a), _mm512_srli_epi16::<8>(b));
            }
            let table = load_table(&levels.nearest_of);
            // Products, then squares.
            let mut sums = [zero; 2 * TRIALS];
            for t in 0..TRIALS {
                let factor = _mm512_set1_epi32(factors[t] as i32);
                let (mut below, mut above, mut squares) = (zero, zero, zero);
                for q in 0..V / 4 {
                    let nearest = look_up(&table, halves([magnitudes[2 * q], magnitudes[2 * q + 1]], factor));
                    below = _mm512_dpbusd_epi32(below, low[q], nearest);
                    above = _mm512_dpbusd_epi32(above, high[q], nearest);
                    squares = _mm512_dpbusd_epi32(squares, nearest, nearest);
                }
                // Sums wrap past 31 bits; read as unsigned, they are exact up to 32.
                sums[t] = _mm512_add_epi32(below, _mm512_slli_epi32::<8>(above));
                sums[TRIALS + t] = squares;
            }
            let sums = add_up(&sums);
            let products = _mm512_cvtepu32_pd(_mm512_castsi512_si256(sums));
            let squares = _mm512_cvtepu32_pd(_mm512_extracti64x4_epi64::<1>(sums));
            let explained = _mm512_div_pd(_mm512_mul_pd(products, products), squares);
            // The first trial with the largest value.
            let best = _mm512_set1_pd(_mm512_reduce_max_pd(explained));
            let chosen = _mm512_cmp_pd_mask::<_CMP_EQ_OQ>(explained, best).trailing_zeros();
            let of = |x| _mm512_cvtsd_f64(_mm512_permutexvar_pd(_mm512_set1_epi64(chosen.into()), x));
            let (xc, cc) = (of(products), of(squares));
            let scale = match rule {
                ScaleRule::Unbiased => energy as f64 / xc,
                ScaleRule::LeastSquares => xc / cc,
            };
            let factor = _mm512_set1_epi32(factors[chosen as usize % TRIALS] as i32);
            let table = load_table(&levels.index_of);
            let sign = _mm512_set1_epi8(1 << (levels.bits - 1));
            let mut codes = [zero; V];
            for q in 0..V / 4 {
                let index = look_up(&table, halves([magnitudes[2 * q], magnitudes[2 * q + 1]], factor));
                let negative = _mm512_movepi8_mask(_mm512_packs_epi16(words[2 * q], words[2 * q + 1]));
                codes[q] = _mm512_mask_add_epi8(index, negative, index, sign);
            }
            put::<V>(&codes, levels.bits, planes);
            to_f16(scale_of(scale, amax))
        }
    }
}

/// Applies random signs, butterflies and the normalisation.
#[inline(always)]
unsafe fn rotate<const V: usize>(quantizer: &Quantizer, mut x: [__m512; V]) -> [__m512; V] {
    let (signs, root) = quantizer.rotation.power_of_two();
    assert!(signs.len() == V * LANES);
    // SAFETY: there are as many signs as elements; the caller guarantees the instruction set.
    unsafe {
        for n in 0..V {
            x[n] = short_butterflies(_mm512_mul_ps(x[n], _mm512_loadu_ps(signs.as_ptr().add(LANES * n))));
        }
        let mut distance = 1;
        while distance < V {
            for n in 0..V {
                if n & distance == 0 {
                    let (a, b) = (x[n], x[n + distance]);
                    (x[n], x[n + distance]) = (_mm512_add_ps(a, b), _mm512_sub_ps(a, b));
                }
            }
            distance *= 2;
        }
        for x in &mut x {
            *x = _mm512_mul_ps(*x, _mm512_set1_ps(root));
        }
    }
    x
}

/// The largest magnitude.
#[inline(always)]
unsafe fn greatest<const V: usize>(x: &[__m512; V]) -> f32 {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        let mut amax = [_mm512_setzero_ps(); 2];
        for n in 0..V {
            amax[n % 2] = _mm512_max_ps(amax[n % 2], _mm512_abs_ps(x[n]));
        }
        _mm512_reduce_max_ps(_mm512_max_ps(amax[0], amax[1]))
    }
}

/// The elements in fixed point.
#[inline(always)]
unsafe fn fixed<const V: usize>(x: &[__m512; V], amax: f32) -> [__m512i; V] {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        let factor = _mm512_set1_ps(ONE / amax);
        let mut fixed = [_mm512_setzero_si512(); V];
        for n in 0..V {
            fixed[n] = _mm512_cvtps_epi32(_mm512_mul_ps(x[n], factor));
        }
        fixed
    }
}

/// Packs fixed-point elements to 16 bits, in runs of four from each of two registers, into the first half of the registers.
#[inline(always)]
unsafe fn words<const V: usize>(fixed: &[__m512i; V]) -> [__m512i; V] {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        let mut words = [_mm512_setzero_si512(); V];
        for n in 0..V / 2 {
            words[n] = _mm512_packs_epi32(fixed[2 * n], fixed[2 * n + 1]);
        }
        words
    }
}

/// The sum of squares.
#[inline(always)]
unsafe fn energy<const V: usize>(words: &[__m512i; V]) -> u64 {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        let mut sum = _mm512_setzero_si512();
        for n in (0..V / 2).step_by(2) {
            // The sum of four squares of magnitudes below 2^15 is below 2^32.
            let (a, b) = (words[n], words[n + 1]);
            let fours = _mm512_add_epi32(_mm512_madd_epi16(a, a), _mm512_madd_epi16(b, b));
            sum = _mm512_add_epi64(sum, _mm512_and_si512(fours, _mm512_set1_epi64(u32::MAX.into())));
            sum = _mm512_add_epi64(sum, _mm512_srli_epi64::<32>(fours));
        }
        _mm512_reduce_add_epi64(sum).cast_unsigned()
    }
}

/// The factor of each trial scale, twice in the lower 32 bits.
#[inline(always)]
unsafe fn factors(levels: &Codebook, rms: f64) -> [u64; TRIALS] {
    let mut factors = [0u64; TRIALS];
    // SAFETY: eight values; the caller guarantees the instruction set.
    unsafe {
        let roots = _mm512_mul_pd(_mm512_set1_pd(rms), _mm512_loadu_pd(TRIAL_SCALES.as_ptr()));
        let x = _mm512_div_pd(_mm512_set1_pd(unit(levels)), roots);
        let bits = _mm512_castpd_si512(_mm512_add_pd(x, _mm512_set1_pd(ROUNDER)));
        let low = _mm512_and_si512(bits, _mm512_set1_epi64(0xffff));
        let twice = _mm512_or_si512(low, _mm512_slli_epi64::<16>(low));
        _mm512_storeu_si512(factors.as_mut_ptr().cast(), twice);
    }
    factors
}

/// Half-levels of 64 magnitudes.
#[inline(always)]
unsafe fn halves([a, b]: [__m512i; 2], factor: __m512i) -> __m512i {
    // SAFETY: the caller guarantees the instruction set.
    unsafe { _mm512_packus_epi16(_mm512_mulhi_epu16(a, factor), _mm512_mulhi_epu16(b, factor)) }
}

/// Bytes in coordinate order, from the runs of four that packing leaves.
#[inline(always)]
unsafe fn in_order(bytes: __m512i) -> __m512i {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        _mm512_permutexvar_epi32(order, bytes)
    }
}

/// Stores the planes of codes, 64 per register.
#[inline(always)]
unsafe fn put<const V: usize>(codes: &[__m512i; V], bits: usize, planes: [*mut u8; 2]) {
    let mut from = 0;
    for (plane, &width) in planes.into_iter().zip(planes_of(bits)) {
        // SAFETY: the caller guarantees the instruction set, and planes that hold all coordinates.
        unsafe {
            match width {
                4 => put_plane::<V, 4>(codes, from, plane),
                2 => put_plane::<V, 2>(codes, from, plane),
                _ => put_plane::<V, 1>(codes, from, plane),
            }
        }
        from += width;
    }
}

/// Stores a plane of `WIDTH` bits of codes from bit `from` on. Combines the halves of a block, then the halves of the
/// result, until bytes are full.
#[inline(always)]
unsafe fn put_plane<const V: usize, const WIDTH: usize>(codes: &[__m512i; V], from: usize, plane: *mut u8) {
    // SAFETY: the caller guarantees the instruction set, and a plane that holds all coordinates.
    unsafe {
        let bits = |n: usize| {
            let code = _mm512_srl_epi16(codes[n], _mm_cvtsi32_si128(from as i32));
            _mm512_and_si512(code, _mm512_set1_epi8((1 << WIDTH) - 1))
        };
        if V == 4 {
            // A block of 64.
            let x = in_order(bits(0));
            let high = _mm512_extracti64x4_epi64::<1>(x);
            let x = _mm256_or_si256(_mm512_castsi512_si256(x), _mm256_slli_epi16::<4>(high));
            if WIDTH == 4 {
                return _mm256_storeu_si256(plane.cast(), x);
            }
            let high = _mm256_extracti128_si256::<1>(x);
            let x = _mm_or_si128(_mm256_castsi256_si128(x), _mm_slli_epi16::<2>(high));
            if WIDTH == 2 {
                return _mm_storeu_si128(plane.cast(), x);
            }
            let x = _mm_or_si128(x, _mm_slli_epi16::<1>(_mm_srli_si128::<8>(x)));
            return _mm_storel_epi64(plane.cast(), x);
        }
        for block in 0..V / 8 {
            let plane = plane.add(16 * WIDTH * block);
            let x = _mm512_or_si512(bits(2 * block), _mm512_slli_epi16::<4>(bits(2 * block + 1)));
            let x = in_order(x);
            if WIDTH == 4 {
                _mm512_storeu_si512(plane.cast(), x);
                continue;
            }
            let high = _mm512_extracti64x4_epi64::<1>(x);
            let x = _mm256_or_si256(_mm512_castsi512_si256(x), _mm256_slli_epi16::<2>(high));
            if WIDTH == 2 {
                _mm256_storeu_si256(plane.cast(), x);
                continue;
            }
            let high = _mm256_extracti128_si256::<1>(x);
            let x = _mm_or_si128(_mm256_castsi256_si128(x), _mm_slli_epi16::<1>(high));
            _mm_storeu_si128(plane.cast(), x);
        }
    }
}

/// The bits of the nearest f16.
#[inline(always)]
unsafe fn to_f16(x: f32) -> u16 {
    // SAFETY: the caller guarantees the instruction set.
    unsafe { _mm_cvtsi128_si32(_mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm_set_ss(x))) as u16 }
}
