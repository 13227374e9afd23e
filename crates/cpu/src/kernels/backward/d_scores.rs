//! Gradients of the scores of a tile.

#![allow(unsafe_code)]

use super::state::TileState;
use crate::kernels::shared::mat::{Mat, MatMut};
use crate::kernels::shared::operands::Operands;
use crate::kernels::shared::products::Products;
use crate::kernels::shared::score_task::Tile;
use crate::kernels::shared::scores::{depth, modify_scores, panel_columns, panels, whole_columns};
use crate::kernels::shared::scoring::LANE_INDEX;
use crate::simd::{Simd, exp2};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Replaces the products `q . k` of a tile by `p = exp(score - lse)`, and fills `d_probs` with `d_score = p * (d_out . v - delta)`, times the
/// derivative of the softcap if it [applies](TileState::applies_softcap_slope). Both are 0 where the query does not see the
/// key, up to whole vectors.
///
/// # Safety
/// The contract of [`Simd`] holds; rows and keys are packed, and the products are computed.
#[inline(always)]
pub(crate) unsafe fn d_scores<S: Simd, P: Products<S>>(work: &TileState<'_>, tile: &Tile) {
    let (task, columns) = (&work.task, whole_columns::<S, P>(tile));
    let has_softcap = work.applies_softcap_slope && task.run.scoring.softcap.is_some();
    // SAFETY: the caller's contract; tiles hold every column of a block.
    unsafe {
        if has_softcap {
            softcap_slopes::<S, P>(work, tile, &columns);
        }
        let factor = modify_scores::<S, P>(task, tile);
        d_probs::<S, P>(work, tile);
        for r in tile.rows.clone() {
            let query = task.query(r);
            let index = work.cx.row_index(&query);
            let terms = &work.cx.rows;
            let row = Row {
                scores: task.memory.scores.at(r, 0),
                d_scores: work.memory.d_probs.at(r, 0),
                softcap_slopes: has_softcap.then(|| work.memory.softcap_slopes.at(r, 0).cast_const()),
                neg_lse: *terms.neg_lse.add(index),
                delta: *terms.delta.add(index),
            };
            if let Some(sums) = work.slope_sums {
                let origin = query.nearest(task.run.problem) - (tile.block * task.run.block_k) as i64;
                *sums.add(index) += row.d_scores::<S, true>(&columns, factor, origin as f32);
            } else {
                row.d_scores::<S, false>(&columns, factor, 0.0);
            }
        }
    }
}

/// Rows of a tile in whole vectors.
struct Row {
    scores: *mut f32,
    d_scores: *mut f32,
    softcap_slopes: Option<*const f32>,
    neg_lse: f32,
    delta: f32,
}

impl Row {
    /// Returns the sum of `d_score * |origin - column|` if `SUMS`, else 0.
    ///
    /// # Safety
    /// The contract of [`Simd`] holds; the rows have the columns.
    #[inline(always)]
    unsafe fn d_scores<S: Simd, const SUMS: bool>(
        &self,
        columns: &Range<usize>,
        factor: f32,
        origin: f32,
    ) -> f32 {
        // SAFETY: the caller's contract; the widest vector has as many indices.
        unsafe {
            let (factor, neg_lse, delta) = (S::splat(factor), S::splat(self.neg_lse), S::splat(self.delta));
            let (zero, hidden) = (S::splat(0.0), S::splat(f32::NEG_INFINITY));
            let mut sum = zero;
            let mut c = columns.start;
            while c < columns.end {
                let score = S::load(self.scores.add(c));
                // Two roundings, as of a score that bias or mask have changed. No p is above 1, but lse is rounded; a NaN passes.
                let exponent = S::add(S::mul(score, factor), neg_lse);
                let exponent = S::select_lt(zero, exponent, zero, exponent);
                // Where p is 0, no product: d_out . v and the softcap of a key that is not seen may be NaN, and so may lse.
                let p = S::select_eq(score, hidden, zero, exp2::<S>(exponent));
                let mut d_score = S::mul(p, S::sub(S::load(self.d_scores.add(c)), delta));
                if SUMS {
                    let distance = S::sub(S::splat(origin - c as f32), S::load(LANE_INDEX.as_ptr()));
                    let of_bias = S::select_eq(p, zero, zero, d_score);
                    sum = S::fma(of_bias, S::abs(distance), sum);
                }
                if let Some(slopes) = self.softcap_slopes {
                    d_score = S::mul(d_score, S::load(slopes.add(c)));
                }
                d_score = S::select_eq(p, zero, zero, d_score);
                S::store(self.scores.add(c), p);
                S::store(self.d_scores.add(c), d_score);
                c += S::LANES;
            }
            if SUMS { S::reduce_add(sum) } else { 0.0 }
        }
    }
}

/// `d_out . v` of a tile.
///
/// # Safety
/// The contract of [`Simd`] holds; rows and values are packed.
#[inline(always)]
unsafe fn d_probs<S: Simd, P: Products<S>>(work: &TileState<'_>, tile: &Tile) {
    let depth = depth::<S, P>(work.task.run.problem.dims().value_dim);
    let width = S::VECTORS * S::LANES;
    let values = work.keys.value_panels(tile.block);
    for panel in panels::<S>(&tile.columns) {
        let (first, columns) = (panel * width, panel_columns::<S, P>(&tile.columns, panel));
        // SAFETY: the caller's contract.
        unsafe {
            let d_out = work.task.packed_rows(work.memory.packed_d_out, depth);
            let values = Mat::new(values.add(first * depth), width, depth, width);
            P::multiply(Operands {
                a: d_out.from(tile.rows.start, 0),
                b: values.from(0, columns.start).first(depth, columns.len()),
                c: tile_columns(work.memory.d_probs, tile, first + columns.start..first + columns.end),
                resume: false,
            });
        }
    }
}

/// The rows of a tile, in some columns.
///
/// # Safety
/// The matrix has the rows and columns.
#[inline(always)]
unsafe fn tile_columns(of: MatMut, tile: &Tile, columns: Range<usize>) -> MatMut {
    // SAFETY: the caller's contract.
    unsafe { of.from(tile.rows.start, columns.start).first(tile.rows.len(), columns.len()) }
}

/// Fills the derivatives of the softcap, `1 - tanh(x)^2 = 4 e / (1 + e)^2` with `e = exp(-2 |x|)`, from the products of a tile.
///
/// # Safety
/// The contract of [`Simd`] holds; the products are computed.
#[inline(always)]
unsafe fn softcap_slopes<S: Simd, P: Products<S>>(work: &TileState<'_>, tile: &Tile, columns: &Range<usize>) {
    let task = &work.task;
    for r in tile.rows.clone() {
        let factor = task.factor_of_scores(&task.query(r));
        let factor = factor.unwrap_or_else(|| P::scale_of_scores(task.score_scale()));
        // SAFETY: the caller's contract.
        unsafe {
            let (products, slopes) = (task.memory.scores.at(r, 0), work.memory.softcap_slopes.at(r, 0));
            let (factor, one) = (S::splat(-2.0 * LOG2_E * factor.abs()), S::splat(1.0));
            let mut c = columns.start;
            while c < columns.end {
                let e = exp2::<S>(S::mul(S::abs(S::load(products.add(c))), factor));
                let sum = S::add(one, e);
                let slope = S::div(S::mul(S::splat(4.0), e), S::mul(sum, sum));
                S::store(slopes.add(c), slope);
                c += S::LANES;
            }
        }
    }
}
