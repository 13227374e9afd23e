//! The softmax of rows of scores, without a task: maximum and exponential of one block, and the fold of a block's result into the running
//! state.

#![allow(unsafe_code)]

use super::state::Fold;
use crate::kernels::shared::mat::{Mat, MatMut, RowMaxSum};
use crate::kernels::shared::products::Products;
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
/// The contract of [`Simd`] holds, with the contracts of `scores` and `max_sum`, which has as many rows.
#[inline(always)]
pub(crate) unsafe fn softmax<S: Simd, P: Products<S>>(
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
            let neg_max = S::splat(if max == f32::NEG_INFINITY { 0.0 } else { -max });
            let sum = P::exp_row(row, columns.clone(), scale, neg_max);
            *max_sum.sum.add(r) = S::reduce_add(sum);
        }
    }
}

/// Folds the result of one block into the running state of `rows` rows:
/// `m' = max(m, mb)`, `l' = l * alpha + lb * beta` with `alpha = 2^(m - m')` and `beta = 2^(mb - m')`, and likewise the outputs. A row whose
/// sum in the block is 0 keeps its state, bit for bit; of a row whose running sum is 0, the running output is not read.
///
/// # Safety
/// The contract of [`Simd`] holds; the matrices of [`Fold`] have `rows` rows.
#[inline(always)]
pub(crate) unsafe fn fold<S: Simd>(rows: usize, f: &Fold) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut first = 0;
        while first < rows {
            let (m, l) = (S::load(f.max_sum.max.add(first)), S::load(f.max_sum.sum.add(first)));
            let (mb, lb) = (S::load(f.block.max.add(first)), S::load(f.block.sum.add(first)));
            let new_max = S::max(m, mb);
            let (zero, neg_infinity) = (S::splat(0.0), S::splat(f32::NEG_INFINITY));
            let finite_max = S::select_eq(new_max, neg_infinity, zero, new_max);
            let (alpha, beta) = (exp2::<S>(S::sub(m, finite_max)), exp2::<S>(S::sub(mb, finite_max)));
            let new_sum = S::fma(l, alpha, S::mul(lb, beta));
            let (mut sums, mut block_sums) = ([0.0f32; 16], [0.0f32; 16]);
            let (mut alphas, mut betas) = ([0.0f32; 16], [0.0f32; 16]);
            S::store(sums.as_mut_ptr(), l);
            S::store(block_sums.as_mut_ptr(), lb);
            S::store(alphas.as_mut_ptr(), alpha);
            S::store(betas.as_mut_ptr(), beta);
            S::store(f.max_sum.max.add(first), S::select_eq(lb, zero, m, new_max));
            S::store(f.max_sum.sum.add(first), S::select_eq(lb, zero, l, new_sum));
            for r in 0..S::LANES.min(rows - first) {
                if block_sums[r] == 0.0 {
                    continue;
                }
                let (alpha, beta) = (S::splat(alphas[r]), S::splat(betas[r]));
                let (acc, partial_out) = (f.acc.at(first + r, 0), f.partial_out.at(first + r, 0));
                let mut c = 0;
                if sums[r] == 0.0 {
                    // `beta` is 1. The sum with 0 is what a fold into zeros gives, for an output of -0 too.
                    while c < f.acc.cols() {
                        S::store(acc.add(c), S::add(S::load(partial_out.add(c)), zero));
                        c += S::LANES;
                    }
                    continue;
                }
                while c < f.acc.cols() {
                    let scaled = S::mul(S::load(partial_out.add(c)), beta);
                    S::store(acc.add(c), S::fma(S::load(acc.add(c)), alpha, scaled));
                    c += S::LANES;
                }
            }
            first += S::LANES;
        }
    }
}
