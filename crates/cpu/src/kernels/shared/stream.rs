//! `q . k` of few rows: each key is read once, in place, and multiplied at once.
//!
//! A score is the same chain of multiply-adds as in [`gemm`](super::gemm), so it has the bits that a task of many rows computes.

#![allow(unsafe_code)]

use super::gemm::MulAdd;
use super::mat::{Mat, MatMut};
use super::pack::{HeadRows, KeyVector, steps_in};
use crate::plan::STREAM_ROWS;
use crate::simd::{LINES, LaneFormat, Simd};
use std::ops::Range;

/// Packed queries and their scores.
#[derive(Clone, Copy)]
pub(crate) struct Scores {
    /// At least [`STREAM_ROWS`] rows; rows past `rows` may hold anything.
    pub(crate) q: Mat,
    /// Scores from the first column on; as many rows as queries.
    pub(crate) c: MatMut,
    /// Number of rows that are asked for.
    pub(crate) rows: usize,
}

/// Scores of `s.rows <= STREAM_ROWS` rows and keys `first + columns`, in whole vectors, [`MulAdd::PER_F32`] at a time.
///
/// # Safety
/// The contract of [`Simd`] holds; the keys exist, the queries are packed, and `c` holds the vectors of each row. Queries and `c` have [`STREAM_ROWS`] rows; rows
/// past `s.rows` may hold anything.
#[inline(always)]
pub(crate) unsafe fn scores<S: Simd, M: MulAdd<S>, R: LaneFormat>(
    src: HeadRows<'_>,
    first: usize,
    columns: &Range<usize>,
    s: Scores,
) {
    // SAFETY: the caller's contract.
    unsafe {
        if S::REGISTERS == 32 {
            return row_group::<S, M, R, STREAM_ROWS>(src, first, columns, s);
        }
        // With half as many registers, groups of rows use them in turn. Each group has its own loop over the keys: in one loop, compilers
        // mix up the vectors of plain Rust.
        for r in (0..s.rows).step_by(4) {
            let rows = (s.rows - r).min(4);
            let s = Scores { q: s.q.from(r, 0), c: s.c.from(r, 0), rows };
            match rows {
                1 => row_group::<S, M, R, 1>(src, first, columns, s),
                2 => row_group::<S, M, R, 2>(src, first, columns, s),
                _ => row_group::<S, M, R, 4>(src, first, columns, s),
            }
        }
    }
}

/// [`scores`] of rows whose sums fit the registers: `N` rows, or `s.rows` rows if `N` is [`STREAM_ROWS`].
#[inline(always)]
unsafe fn row_group<S: Simd, M: MulAdd<S>, R: LaneFormat, const N: usize>(
    src: HeadRows<'_>,
    first: usize,
    columns: &Range<usize>,
    s: Scores,
) {
    let whole = M::PER_F32 * S::LANES;
    let row_bytes = src.row_bytes();
    let blocks = row_bytes / (LINES * size_of::<R::Lane>());
    let tail = blocks * LINES * size_of::<R::Lane>();
    for column in (columns.start / whole * whole..columns.end.next_multiple_of(whole)).step_by(S::LANES) {
        // SAFETY: the contract of `scores`.
        unsafe {
            let keys = KeyVector::new::<S>(src, first, column, columns);
            let s = Scores { c: s.c.from(0, column), ..s };
            if N < STREAM_ROWS {
                multiply_blocks::<S, M, R, N>(&keys, blocks, s);
            } else {
                match s.rows {
                    1 => multiply_blocks::<S, M, R, 1>(&keys, blocks, s),
                    2 => multiply_blocks::<S, M, R, 2>(&keys, blocks, s),
                    3 | 4 => multiply_blocks::<S, M, R, 4>(&keys, blocks, s),
                    5 | 6 => multiply_blocks::<S, M, R, 6>(&keys, blocks, s),
                    7 | 8 => multiply_blocks::<S, M, R, 8>(&keys, blocks, s),
                    9..=12 => multiply_blocks::<S, M, R, 12>(&keys, blocks, s),
                    _ => multiply_blocks::<S, M, R, 16>(&keys, blocks, s),
                }
            }
            if tail < row_bytes {
                let lines = keys.last_lines::<S, R>(tail);
                multiply_tail::<S, M, R>(&lines, blocks * LINES * R::STEPS..steps_in::<R>(row_bytes), s);
            }
        }
    }
}

/// Scores of `N` rows with one vector of keys, over the whole blocks of lines of the keys.
///
/// # Safety
/// As [`scores`].
#[inline(always)]
unsafe fn multiply_blocks<S: Simd, M: MulAdd<S>, R: LaneFormat, const N: usize>(
    keys: &KeyVector,
    blocks: usize,
    s: Scores,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut acc = [S::splat(0.0); N];
        for n in 0..blocks {
            let lines = keys.lines::<S, R>(n * LINES * size_of::<R::Lane>());
            multiply::<S, M, R, N>(&lines, s.q.from(0, n * LINES * R::STEPS), &mut acc);
        }
        for r in 0..N {
            S::store(s.c.at(r, 0), acc[r]);
        }
    }
}

/// Continues the chains of all rows over the last steps of the head dimension, which fill no block of lines.
///
/// # Safety
/// As [`scores`].
#[inline(always)]
unsafe fn multiply_tail<S: Simd, M: MulAdd<S>, R: LaneFormat>(
    lines: &[S::V; LINES],
    steps: Range<usize>,
    s: Scores,
) {
    for r in 0..s.rows {
        // SAFETY: the caller's contract: the queries have these steps.
        unsafe {
            let mut acc = S::load(s.c.at(r, 0));
            for (n, step) in steps.clone().enumerate() {
                let key = R::step::<S>(lines[n / R::STEPS], n % R::STEPS);
                acc = M::mul_add(S::splat(*s.q.at(r, step)), key, acc);
            }
            S::store(s.c.at(r, 0), acc);
        }
    }
}

/// Continues the chains of `N` rows over all steps of some lines.
#[inline(always)]
unsafe fn multiply<S: Simd, M: MulAdd<S>, R: LaneFormat, const N: usize>(
    lines: &[S::V; LINES],
    q: Mat,
    acc: &mut [S::V; N],
) {
    // The steps are written out: in a loop, the lines would go through memory.
    macro_rules! each {
        ($($c:literal)*) => {{ $(
            for i in 0..R::STEPS {
                let key = R::step::<S>(lines[$c], i);
                for r in 0..N {
                    acc[r] = M::mul_add(S::splat(*q.at(r, $c * R::STEPS + i)), key, acc[r]);
                }
            }
        )* }};
    }
    const { assert!(LINES == 8) };
    // SAFETY: the contract of `scores`: the queries have these steps.
    unsafe { each!(0 1 2 3 4 5 6 7) }
}
