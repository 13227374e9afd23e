//! Probabilities of a tile: the score formula and the softmax of each row over one block.

#![allow(unsafe_code)]

use super::softmax;
use super::state::TaskState;
use crate::kernels::shared::products::Products;
use crate::kernels::shared::score_task::Tile;
use crate::kernels::shared::scores::{modify_scores, whole_columns};
use crate::simd::Simd;

/// Replaces the scores of a tile by probabilities `2^(score - block_max)`, and stores maximum and sum of each row.
///
/// # Safety
/// The contract of [`Simd`] holds, and the scores are computed.
#[inline(always)]
pub(crate) unsafe fn probs<S: Simd, P: Products<S>>(work: &TaskState<'_>, tile: &Tile) {
    let (rows, task) = (tile.rows.len(), &work.task);
    // SAFETY: the caller's contract; maxima and sums are padded.
    unsafe {
        let scale = modify_scores::<S, P>(task, tile);
        let scores = task.memory.scores.first(rows, task.run.block_k);
        softmax::softmax::<S, P>(scores, whole_columns::<S, P>(tile), work.block_max_sum, scale);
        // A constant of the row's scores changes no probability; under a softcap it is part of the score already.
        if let (Some(mean_scores), None) = (task.mean_scores(), task.run.scoring.softcap) {
            for r in 0..rows {
                *work.block_max_sum.max.add(r) += *mean_scores.add(tile.rows.start + r);
            }
        }
        work.pad_block_max_sum(rows);
    }
}
