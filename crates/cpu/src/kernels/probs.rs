//! Probabilities of a tile: applies the operations of `scoring.rs` and `softmax.rs` with the modifiers and the visible keys of each query.

#![allow(unsafe_code)]

use super::mask::MaskTile;
use super::products::Products;
use super::scoring::{self, MaskColumns, Modifiers};
use super::softmax;
use super::state::{Query, TaskState, Tile};
use crate::simd::Simd;
use flashtile_core::scoring::{Alibi, RowIndex, ScoreRow};

/// Replaces the scores of a tile by probabilities `2^(score - block_max)`, and stores maximum and sum of each row.
///
/// # Safety
/// As [`Simd`]; the scores are there.
#[inline(always)]
pub(crate) unsafe fn probs<S: Simd, P: Products<S>>(work: &TaskState<'_>, tile: &Tile) {
    let step = P::PER_F32 * S::LANES;
    let whole_columns = tile.columns.start / step * step..tile.columns.end.next_multiple_of(step);
    let rows = tile.rows.len();
    let whole = tile.full && whole_columns == tile.columns;
    let modifies = modifies::<S, P>(work, tile);
    let (tree, tree_from) = work.tree_columns(tile);
    let mean_scores = work.mean_scores();
    // SAFETY: the score tile holds block_k columns, a multiple of the lanes, of each row; maxima and sums are padded; a row of
    // the tree has a column for each query of the sequence.
    unsafe {
        for r in 0..rows {
            let scores = work.scores.at(r, 0);
            if tile.full && !modifies && tree.is_empty() {
                if whole {
                    break;
                }
                scoring::hide::<S>(scores, whole_columns.clone(), tile.columns.clone());
                continue;
            }
            let query = work.query(tile.rows.start + r);
            if modifies {
                let mut modifiers = modifiers::<S, P>(work, tile, &query);
                if let (Some(mean_scores), Some(_)) = (mean_scores, modifiers.terms.softcap) {
                    modifiers.terms.offset = *mean_scores.add(tile.rows.start + r);
                }
                scoring::modify::<S>(scores, whole_columns.clone(), &modifiers);
            }
            if !whole {
                let seen = work.visible_columns(query.sequence, query.position, tile.block);
                let seen = seen.start.max(tile.columns.start)..seen.end.min(tile.columns.end);
                scoring::hide::<S>(scores, whole_columns.clone(), seen);
            }
            if let Some(row) = work.tree_row(&query).filter(|_| !tree.is_empty()) {
                scoring::prune(scores, tree.clone(), row, tree_from);
            }
        }
        let scale = if modifies { 1.0 } else { P::scale_of_scores(work.score_scale()) };
        let scores = work.scores.first(rows, work.block_k);
        softmax::softmax::<S, P>(scores, whole_columns, work.block_max_sum, scale);
        // A constant of the row's scores changes no probability; under a softcap it is part of the score already.
        if let (Some(mean_scores), None) = (mean_scores, work.cx.scoring.softcap) {
            for r in 0..rows {
                *work.block_max_sum.max.add(r) += *mean_scores.add(tile.rows.start + r);
            }
        }
        work.pad_block_max_sum(rows);
    }
}

/// Returns true if scores of the tile are changed before the softmax, other than by hiding keys.
#[inline(always)]
fn modifies<S: Simd, P: Products<S>>(work: &TaskState<'_>, tile: &Tile) -> bool {
    let scoring = &work.cx.scoring;
    // The largest score is taken before it is scaled, which a scale that is not positive does not allow.
    let has_nonpositive_scale = P::scale_of_scores(work.score_scale()) <= 0.0;
    scoring.softcap.is_some()
        || scoring.alibi_slopes.is_some()
        || tile.mask != MaskTile::Full
        || has_nonpositive_scale
        || work.has_score_factors.get()
}

/// The changes of the scores of a query before the softmax.
#[inline(always)]
fn modifiers<'a, S: Simd, P: Products<S>>(
    work: &TaskState<'a>,
    tile: &Tile,
    query: &Query<'_>,
) -> Modifiers<'a> {
    let problem = work.cx.plan.problem();
    let first = tile.block * work.block_k;
    let mask = match &work.cx.mask {
        Some(table) if tile.mask != MaskTile::Full => {
            let row = table.view.row(query.index, query.head, query.position);
            Some(MaskColumns { row, keys: table.view.shape()[3] })
        }
        _ => None,
    };
    let scoring = &work.cx.scoring;
    let alibi = |slope| Alibi { slope, origin: (query.nearest(problem) - first as i64) as f32 };
    let terms = ScoreRow {
        at: RowIndex { batch: query.index, head: query.head, query: query.own_key() },
        first_key: first,
        scale: work.factor_of_scores(query).unwrap_or_else(|| P::scale_of_scores(work.score_scale())),
        offset: 0.0,
        softcap: scoring.softcap,
        alibi: scoring.alibi_slope(query.head).map(alibi),
    };
    Modifiers { terms, mask }
}
