//! The softmax of rows of scores, without a task: maximum and exponential of one block, and the fold of a block's result into the running
//! state.

#![allow(unsafe_code)]

use super::mat::{Mat, MatMut, RowMaxSum};
use super::products::Products;
use super::state::Fold;
use crate::simd::{Simd, exp2};
use std::ops::Range;

/// Largest score of `R` rows over whole vectors `columns`; NaN scores are ignored.
///
/// # Safety
/// As [`softmax`], for R rows.
#[inline(always)]
unsafe fn maxima<S: Simd, const R: usize>(scores: Mat, columns: &Range<usize>, out: *mut f32) {
    // SAFETY: the contract of `softmax`, for R rows.
    unsafe {
        let mut max = [S::splat(f32::NEG_INFINITY); R];
        let mut c = columns.start;
        while c < columns.end {
            for r in 0..R {
                max[r] = S::max(S::load(scores.at(r, c)), max[r]);
            }
            c += S::LANES;
        }
        for r in 0..R {
            *out.add(r) = S::reduce_max(max[r]);
        }
    }
}

/// Replaces the scores of rows in whole vectors `columns` by `exp2(scale * score - max)`, as `p . v` takes it
/// ([`Products::exp_row`]), with `max` the row's largest `scale * score`; `scale` is positive. Stores the maximum
/// (`-inf` where every key is hidden; NaN scores are ignored) and the sum of the probabilities (NaN where a score is NaN or
/// `+inf`).
///
/// The sum is taken lane by lane counted from column 0, so it does not depend on hidden columns at either end.
///
/// # Safety
/// As [`Simd`], with the contracts of `scores` and `max_sum`, which has as many rows.
#[inline(always)]
pub(super) unsafe fn softmax<S: Simd, P: Products<S>>(
    scores: MatMut,
    columns: Range<usize>,
    max_sum: RowMaxSum,
    scale: f32,
) {
    let rows = scores.rows();
    // SAFETY: the caller's contract.
    unsafe {
        // Several rows at once: one row's maximum is a single chain of dependent operations.
        let mut r = 0;
        while r + 4 <= rows {
            maxima::<S, 4>(scores.from(r, 0).as_mat(), &columns, max_sum.max.add(r));
            r += 4;
        }
        while r < rows {
            maxima::<S, 1>(scores.from(r, 0).as_mat(), &columns, max_sum.max.add(r));
            r += 1;
        }
        for r in 0..rows {
            let row = scores.at(r, 0);
            let max = *max_sum.max.add(r) * scale;
            *max_sum.max.add(r) = max;
            let shift = S::splat(if max == f32::NEG_INFINITY { 0.0 } else { -max });
            let sum = P::exp_row(row, columns.clone(), scale, shift);
            *max_sum.sum.add(r) = S::reduce_add(sum);
        }
    }
}

/// Folds the result of one block into the running state of `rows` rows:
/// `m' = max(m, mb)`, `l' = l * 2^(m - m') + lb * 2^(mb - m')`, and likewise the values. A row to which the block gave
/// nothing keeps its state, bit for bit; of a row that saw nothing before, the running values are not read.
///
/// # Safety
/// As [`Simd`]; the matrices of [`Fold`] have `rows` rows.
#[inline(always)]
pub(crate) unsafe fn fold<S: Simd>(rows: usize, f: &Fold) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut first = 0;
        while first < rows {
            let (m, l) = (S::load(f.max_sum.max.add(first)), S::load(f.max_sum.sum.add(first)));
            let (mb, lb) = (S::load(f.block.max.add(first)), S::load(f.block.sum.add(first)));
            let new = S::max(m, mb);
            let none = S::splat(f32::NEG_INFINITY);
            let shift = S::select_eq(new, none, S::splat(0.0), new);
            let (old, add) = (exp2::<S>(S::sub(m, shift)), exp2::<S>(S::sub(mb, shift)));
            let sum = S::fma(l, old, S::mul(lb, add));
            let (mut before, mut gave) = ([0.0f32; 16], [0.0f32; 16]);
            let mut factors = [[0.0f32; 16]; 2];
            S::store(before.as_mut_ptr(), l);
            S::store(gave.as_mut_ptr(), lb);
            S::store(factors[0].as_mut_ptr(), old);
            S::store(factors[1].as_mut_ptr(), add);
            let nothing = S::splat(0.0);
            S::store(f.max_sum.max.add(first), S::select_eq(lb, nothing, m, new));
            S::store(f.max_sum.sum.add(first), S::select_eq(lb, nothing, l, sum));
            for r in 0..S::LANES.min(rows - first) {
                if gave[r] == 0.0 {
                    continue;
                }
                let (old, add) = (S::splat(factors[0][r]), S::splat(factors[1][r]));
                let (acc, values) = (f.acc.at(first + r, 0), f.values.at(first + r, 0));
                let mut c = 0;
                // The factor of the block is 1. The sum with 0 is what a fold into zeros gives, for a value of -0 too.
                while before[r] == 0.0 && c < f.acc.cols() {
                    S::store(acc.add(c), S::add(S::load(values.add(c)), nothing));
                    c += S::LANES;
                }
                while c < f.acc.cols() {
                    let scaled = S::mul(S::load(values.add(c)), add);
                    S::store(acc.add(c), S::fma(S::load(acc.add(c)), old, scaled));
                    c += S::LANES;
                }
            }
            first += S::LANES;
        }
    }
}
