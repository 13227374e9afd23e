//! The products of a tile with the gradients of its scores.

#![allow(unsafe_code)]

use super::nonfinite;
use super::operands::BackwardProducts;
use super::state::TileState;
use crate::kernels::shared::mask::MaskTile;
use crate::kernels::shared::mat::{Mat, MatMut};
use crate::kernels::shared::operands::Operands;
use crate::kernels::shared::products::key_steps;
use crate::kernels::shared::score_task::Tile;
use crate::kernels::shared::scores::whole_columns;
use crate::simd::Simd;

/// Adds `p^T d_out` and `d_score^T q` to the gradients of the keys, and `d_score k` to `d_q` of the tile, which it overwrites unless it resumes. The tile has all rows of its state.
///
/// # Safety
/// The contract of [`Simd`] holds; gradients of the scores are computed.
#[inline(always)]
pub(crate) unsafe fn add_products<S: Simd, P: BackwardProducts<S>>(
    work: &TileState<'_>,
    tile: &Tile,
    resumes_d_q: bool,
) {
    let (task, keys, rows) = (&work.task, work.keys, tile.rows.len());
    debug_assert!(tile.rows.start == 0);
    let columns = whole_columns::<S, P>(tile);
    let block = keys.first_row(tile.block);
    let steps = rows.next_multiple_of(P::KEY_STEP) / P::PER_F32;
    let width = S::VECTORS * S::LANES;
    // Rows that hide keys: whole vectors may reach past the keys that any row sees.
    let hides = !tile.full || tile.mask != MaskTile::Full || columns != tile.columns;
    let leaves_out_hidden = hides && !(work.is_finite.get() && keys.is_finite.get());
    // SAFETY: the caller's contract; every region holds the rows and columns of a tile.
    unsafe {
        let (probs, d_scores) = (task.memory.scores, work.memory.d_probs);
        // Depth of `d_score k`: keys in whole steps.
        let depth = key_steps::<S, P>().whole(&tile.columns);
        let depth = depth.start / P::PER_F32..depth.end / P::PER_F32;
        let pairs =
            P::to_key_pairs(d_scores.first(rows, columns.end).as_mat(), &columns, work.memory.key_pairs);
        let to_rows = Operands {
            a: pairs.from(0, depth.start).first(pairs.rows(), depth.len()),
            b: keys
                .memory
                .key_rows
                .from(block / P::PER_F32 + depth.start, 0)
                .first(depth.len(), work.memory.d_q.cols())
                .as_mat(),
            c: work.memory.d_q.first(rows, work.memory.d_q.cols()),
            resume: resumes_d_q,
        };
        let of_keys = |a: MatMut, b: Mat, c: MatMut| Operands {
            a: a.from(0, columns.start).first(steps, columns.len()).as_mat(),
            b: b.first(steps, c.cols()),
            c: c.from(block + columns.start, 0).first(columns.len(), c.cols()),
            resume: true,
        };
        if leaves_out_hidden {
            nonfinite::d_q_product::<S, P>(work, tile, to_rows);
        } else {
            for column in (0..to_rows.c.cols()).step_by(width) {
                P::multiply(to_rows.columns(column, width));
            }
        }
        if task.has_score_factors.get() {
            scale_rows::<S>(work, tile, d_scores);
        }
        P::to_row_pairs(probs, rows, &columns);
        P::to_row_pairs(d_scores, rows, &columns);
        for operands in [
            of_keys(probs, work.row_d_out.get(), keys.memory.d_v),
            of_keys(d_scores, work.row_q.get(), keys.memory.d_k),
        ] {
            if leaves_out_hidden {
                nonfinite::d_kv_product::<S, P>(work, tile, operands);
            } else {
                P::multiply_transposed(operands);
            }
        }
    }
}

/// Multiplies gradients of scores by the part of the scale that packed queries lack.
///
/// # Safety
/// The contract of [`Simd`] holds.
#[cold]
unsafe fn scale_rows<S: Simd>(work: &TileState<'_>, tile: &Tile, d_scores: MatMut) {
    for r in tile.rows.clone() {
        let factor = work.task.factor_of_scores(&work.task.query(r)).unwrap_or(1.0);
        for c in tile.columns.clone() {
            // SAFETY: the tile has the row and columns.
            unsafe { *d_scores.at(r, c) *= factor }
        }
    }
}
