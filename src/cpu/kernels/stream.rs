//! Both products for few rows: each key and value is read once, from where it lies, and used at once.
//!
//! Every score and every weighted value is the same chain of multiply-adds as in [`gemm`](super::gemm), so its bits are those
//! of a task with many rows.

#![allow(unsafe_code)]

use super::super::simd::{LINES, Rows, Simd};
use super::pack::{HeadRows, KeyVector, steps_in};
use std::ops::Range;

pub(super) use crate::plan::STREAM_ROWS as MAX_ROWS;

/// Packed queries `[rows, lda]` and scores `[rows, ldc]`, the first column's first.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    pub(super) q: *const f32,
    pub(super) ldq: usize,
    pub(super) rows: usize,
    pub(super) c: *mut f32,
    pub(super) ldc: usize,
}

/// Scores of `s.rows <= MAX_ROWS` rows and keys `first + columns`, in whole vectors (with pairs, two of them) that cover the
/// columns.
///
/// # Safety
/// As [`Simd`]; the keys exist, the queries are packed, and `c` holds the vectors of each row. Queries and `c` have
/// [`MAX_ROWS`] rows, whatever those past `s.rows` hold.
#[inline(always)]
pub(super) unsafe fn scores<S: Simd, R: Rows>(
    src: HeadRows<'_>,
    first: usize,
    columns: &Range<usize>,
    s: Scores,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if S::REGISTERS == 32 {
            match s.rows {
                1 => vectors::<S, R, 1>(src, first, columns, s),
                2 => vectors::<S, R, 2>(src, first, columns, s),
                3 | 4 => vectors::<S, R, 4>(src, first, columns, s),
                5 | 6 => vectors::<S, R, 6>(src, first, columns, s),
                7 | 8 => vectors::<S, R, 8>(src, first, columns, s),
                9..=12 => vectors::<S, R, 12>(src, first, columns, s),
                _ => vectors::<S, R, 16>(src, first, columns, s),
            }
        } else {
            // With half as many registers, two groups of rows share them with the keys in turn.
            for r in (0..s.rows).step_by(4) {
                let s = Scores { q: s.q.add(r * s.ldq), c: s.c.add(r * s.ldc), ..s };
                match s.rows - r {
                    1 => vectors::<S, R, 1>(src, first, columns, s),
                    2 => vectors::<S, R, 2>(src, first, columns, s),
                    _ => vectors::<S, R, 4>(src, first, columns, s),
                }
            }
        }
    }
}

/// [`scores`] of `N` rows.
#[inline(always)]
unsafe fn vectors<S: Simd, R: Rows, const N: usize>(
    src: HeadRows<'_>,
    first: usize,
    columns: &Range<usize>,
    s: Scores,
) {
    let whole = if S::PAIRS { 2 * S::LANES } else { S::LANES };
    let row_bytes = src.row_bytes();
    let (block, steps) = (LINES * size_of::<R::Lane>(), LINES * R::STEPS);
    let blocks = row_bytes / block;
    for column in (columns.start / whole * whole..columns.end.next_multiple_of(whole)).step_by(S::LANES) {
        // SAFETY: the promise of `scores`.
        unsafe {
            let keys = KeyVector::new::<S>(src, first, column, columns);
            let mut acc = [S::splat(0.0); N];
            for n in 0..blocks {
                let lines = keys.lines::<S, R>(n * block);
                multiply::<S, R, N>(&lines, s.q.add(n * steps), s.ldq, &mut acc);
            }
            if blocks * block < row_bytes {
                let lines = keys.last_lines::<S, R>(blocks * block);
                let rest = steps_in::<R>(row_bytes) - blocks * steps;
                multiply_some::<S, R, N>(&lines, rest, s.q.add(blocks * steps), s.ldq, &mut acc);
            }
            for r in 0..N {
                S::store(s.c.add(r * s.ldc + column), acc[r]);
            }
        }
    }
}

/// Goes on with the chains of `N` rows over all steps of some lines.
#[inline(always)]
unsafe fn multiply<S: Simd, R: Rows, const N: usize>(
    lines: &[S::V; LINES],
    q: *const f32,
    ldq: usize,
    acc: &mut [S::V; N],
) {
    // Written out: as a loop, the lines would go through memory.
    macro_rules! each {
        ($($c:literal)*) => {{ $(
            for i in 0..R::STEPS {
                let key = R::step::<S>(lines[$c], i);
                for r in 0..N {
                    acc[r] = S::mac(S::splat(*q.add(r * ldq + $c * R::STEPS + i)), key, acc[r]);
                }
            }
        )* }};
    }
    const { assert!(LINES == 8) };
    // SAFETY: the promise of `scores`: the queries have these steps.
    unsafe { each!(0 1 2 3 4 5 6 7) }
}

/// Goes on with the chains of `N` rows over the first `steps` steps of some lines.
#[inline(always)]
unsafe fn multiply_some<S: Simd, R: Rows, const N: usize>(
    lines: &[S::V; LINES],
    steps: usize,
    q: *const f32,
    ldq: usize,
    acc: &mut [S::V; N],
) {
    // SAFETY: the promise of `scores`: the queries have these steps.
    unsafe {
        for n in 0..steps {
            let key = R::step::<S>(lines[n / R::STEPS], n % R::STEPS);
            for r in 0..N {
                acc[r] = S::mac(S::splat(*q.add(r * ldq + n)), key, acc[r]);
            }
        }
    }
}
