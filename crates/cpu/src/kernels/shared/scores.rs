//! Scores of a tile: packing of queries and keys, `q . k`, and the terms of the score formula that follow it.

#![allow(unsafe_code)]

use super::codes;
use super::mask::MaskTile;
use super::mat::{Mat, MatMut};
use super::operands::Operands;
use super::pack;
use super::products::Products;
use super::products::f32_fma::F32;
use super::scale::is_scaled;
use super::score_task::{Query, ScoreTask, Tile};
use super::scoring::{self, MaskColumns, Modifiers};
use super::stream::Scores;
use crate::simd::{LaneFormat, Simd};
use flashtile_core::codec::KvView;
use flashtile_core::scoring::{Alibi, RowIndex, ScoreRow};
use std::ops::Range;

/// Packs some columns of a block of keys.
pub(crate) type PackKeys = unsafe fn(&ScoreTask<'_>, usize, &Range<usize>);
/// Packs the values of some keys, counted from a first one, to memory.
pub(crate) type PackValues = unsafe fn(&ScoreTask<'_>, usize, &Range<usize>, MatMut);

/// The phases of scores for one instruction set and the storage of one problem.
///
/// Safety of each: the machine has the instruction set, and the contract of the function of the same name in this module holds.
#[derive(Clone, Copy)]
pub(crate) struct ScoreKernels {
    pub(crate) pack_queries: unsafe fn(&ScoreTask<'_>),
    pub(crate) pack_keys: PackKeys,
    pub(crate) packed_scores: unsafe fn(&ScoreTask<'_>, &Tile),
    pub(crate) stream_scores: unsafe fn(&ScoreTask<'_>, &Tile),
}

/// f32 in a row of packed queries or keys.
#[inline(always)]
pub(crate) fn depth<S: Simd, P: Products<S>>(head_dim: usize) -> usize {
    head_dim.div_ceil(P::PER_F32).next_multiple_of(P::DEPTH_STEP)
}

/// Panels of keys that hold some columns of a block.
#[inline(always)]
pub(crate) fn panels<S: Simd>(columns: &Range<usize>) -> Range<usize> {
    let width = S::VECTORS * S::LANES;
    columns.start / width..columns.end.div_ceil(width)
}

/// The columns of a panel, counted from its first, whose vectors hold some columns of a block.
#[inline(always)]
pub(crate) fn panel_columns<S: Simd, P: Products<S>>(columns: &Range<usize>, panel: usize) -> Range<usize> {
    let (width, step) = (S::VECTORS * S::LANES, P::PER_F32 * S::LANES);
    let first = panel * width;
    let start = (columns.start.max(first) - first) / step * step;
    start..(columns.end.min(first + width) - first).next_multiple_of(step)
}

impl ScoreTask<'_> {
    fn head_dim(&self) -> usize {
        self.run.problem.dims().head_dim
    }

    /// Memory of the packed queries, of rows of `depth` f32.
    ///
    /// # Safety
    /// `depth` is [`depth`] of the plan's products.
    #[inline(always)]
    unsafe fn queries(&self, depth: usize) -> MatMut {
        // SAFETY: the caller's contract: the region of the scratch layout.
        unsafe { MatMut::new(self.memory.packed_q, depth, self.memory.packed_rows, depth) }
    }

    /// Brings packed queries to the domain in which keys are stored: for codes, the products with the mean that keys lack, the
    /// factors that keys are divided by, and the rotation.
    ///
    /// # Safety
    /// The queries are packed.
    pub(crate) unsafe fn rotate_queries(&self) {
        let KvView::Codes(codes) = &self.run.inputs.k else { return };
        // Quantized keys are not multiplied as pairs: a packed query has head_dim elements.
        let (head_dim, kv_head) = (self.head_dim(), self.rows.kv_head);
        let (mean, factors) = (codes.mean(kv_head), codes.factors(kv_head));
        for row in 0..self.rows.count {
            // SAFETY: the packed query, and the product of each row.
            unsafe {
                let query =
                    std::slice::from_raw_parts_mut(self.memory.packed_q.add(row * head_dim), head_dim);
                if let Some(mean) = mean {
                    let products = query.iter().zip(mean).map(|(q, mean)| f64::from(*q) * f64::from(*mean));
                    let factor = f64::from(self.factor_of_scores(&self.query(row)).unwrap_or(1.0));
                    *self.memory.mean_scores.add(row) = (products.sum::<f64>() * factor) as f32;
                }
                if let Some(factors) = factors {
                    query.iter_mut().zip(factors).for_each(|(q, factor)| *q *= factor);
                }
                if let Some(rotation) = codes.coder().rotation() {
                    flashtile_core::codec::rotate(self.run.token, rotation, query);
                }
            }
        }
    }
}

/// Packs the queries of the task, scaled to units of the scores where their products take f32 and the scaled query is one ([`scale`](super::scale)).
///
/// # Safety
/// The contract of [`Simd`] holds.
#[inline(always)]
pub(crate) unsafe fn pack_queries<S: Simd, P: Products<S>>(task: &ScoreTask<'_>) {
    let head_dim = task.head_dim();
    let (scale, depth) = (task.score_scale(), depth::<S, P>(head_dim));
    let q = &task.run.inputs.q;
    for row in 0..task.rows.count {
        let (i, h) = task.place(row);
        let src = q.row(task.sequence.batch, h, task.sequence.q_start + i);
        // SAFETY: the row exists, and the region holds task_rows rows.
        unsafe {
            let dst = task.memory.packed_q.add(row * depth);
            P::pack_query(q.dtype(), src, head_dim, scale, dst);
            if P::SCALES_QUERIES && !is_scaled::<S>(dst, head_dim) {
                let factors = task.scale_factors(&task.query(row));
                P::pack_query(q.dtype(), src, head_dim, factors.query, dst);
                task.has_score_factors.set(task.has_score_factors.get() || factors.scores != 1.0);
            }
        }
    }
    if task.streams_keys {
        // SAFETY: the queries are packed, and the memory of packed keys is free in a task that packs none.
        unsafe { P::set_stream_queries(task.queries(depth).as_mat(), task.memory.packed_k) }
    }
}

/// Packs the panels of a block's keys that hold `columns`.
///
/// # Safety
/// The contract of [`Simd`] holds; the keys `columns` of the block exist and are elements of `R`.
#[inline(always)]
pub(crate) unsafe fn pack_keys<S: Simd, P: Products<S>, R: LaneFormat>(
    task: &ScoreTask<'_>,
    block: usize,
    columns: &Range<usize>,
) {
    let k = task.key_elements();
    let panel_len = S::VECTORS * S::LANES * depth::<S, P>(task.head_dim());
    for panel in panels::<S>(columns) {
        // SAFETY: the caller's contract; the region holds every panel of a block.
        unsafe {
            let dst = task.memory.packed_k.add(panel * panel_len);
            pack::key_panel::<S, R>(k, block * task.run.block_k, panel, columns, P::DEPTH_STEP, dst);
        }
    }
}

/// Packs quantized keys, decoded to f32, like [`pack_keys`].
///
/// # Safety
/// The contract of [`pack_keys`] holds, with codes in place of elements.
#[inline(always)]
pub(crate) unsafe fn pack_key_codes<S: Simd>(task: &ScoreTask<'_>, block: usize, columns: &Range<usize>) {
    let k = task.key_codes();
    let panel_len = S::VECTORS * S::LANES * depth::<S, F32>(task.head_dim());
    for panel in panels::<S>(columns) {
        // SAFETY: the caller's contract; the region holds every panel of a block.
        unsafe {
            let dst = task.memory.packed_k.add(panel * panel_len);
            codes::key_panel::<S>(k, block * task.run.block_k, panel, columns, task.memory.codes, dst);
        }
    }
}

/// Scores of a tile with packed keys.
///
/// # Safety
/// The contract of [`Simd`] holds; queries and keys are packed.
#[inline(always)]
pub(crate) unsafe fn packed_scores<S: Simd, P: Products<S>>(task: &ScoreTask<'_>, tile: &Tile) {
    let depth = depth::<S, P>(task.head_dim());
    let width = S::VECTORS * S::LANES;
    for panel in panels::<S>(&tile.columns) {
        let first = panel * width;
        let Range { start, end } = panel_columns::<S, P>(&tile.columns, panel);
        // SAFETY: rows of the task; the score tile holds block_k columns of each row.
        unsafe {
            let keys = Mat::new(task.memory.packed_k.add(first * depth), width, depth, width);
            let operands = Operands {
                a: task.queries(depth).from(tile.rows.start, 0).as_mat(),
                b: keys.from(0, start).first(depth, end - start),
                c: task.memory.scores.from(0, first + start).first(tile.rows.len(), end - start),
                resume: false,
            };
            P::multiply(operands);
        }
    }
}

/// Scores of a tile of few rows, with keys read from where they lie.
///
/// # Safety
/// The contract of [`Simd`] holds; queries are packed, keys are elements of `R`.
#[inline(always)]
pub(crate) unsafe fn stream_scores<S: Simd, P: Products<S>, R: LaneFormat>(
    task: &ScoreTask<'_>,
    tile: &Tile,
) {
    let k = task.key_elements();
    let (depth, first) = (depth::<S, P>(task.head_dim()), tile.block * task.run.block_k);
    // SAFETY: the caller's contract; the score tile holds block_k columns of each row, and the memory of packed keys is that of
    // `set_stream_queries`.
    unsafe {
        let q = task.queries(depth).from(tile.rows.start, 0).as_mat();
        let scores = Scores { q, c: task.memory.scores, rows: tile.rows.len() };
        P::stream_scores::<R>(k, first, &tile.columns, scores, task.memory.packed_k);
    }
}

/// The columns of a tile in whole vectors of f32, [`Products::PER_F32`] at a time.
#[inline(always)]
pub(crate) fn whole_columns<S: Simd, P: Products<S>>(tile: &Tile) -> Range<usize> {
    let step = P::PER_F32 * S::LANES;
    tile.columns.start / step * step..tile.columns.end.next_multiple_of(step)
}

/// Applies softcap, bias and masks to the scores of a tile, and hides the columns that a query does not see, up to [`whole_columns`]. Returns
/// the factor that brings the scores to units of log2. Without a softcap the scores lack [`ScoreTask::mean_scores`], a constant of each row,
/// which the caller adds.
///
/// # Safety
/// The contract of [`Simd`] holds, and the scores are computed.
#[inline(always)]
pub(crate) unsafe fn modify_scores<S: Simd, P: Products<S>>(task: &ScoreTask<'_>, tile: &Tile) -> f32 {
    let whole_columns = whole_columns::<S, P>(tile);
    let whole = tile.full && whole_columns == tile.columns;
    let modifies = modifies::<S, P>(task, tile);
    let (tree, tree_from) = task.tree_columns(tile);
    let mean_scores = task.mean_scores();
    // SAFETY: the score tile holds block_k columns, a multiple of the lanes, of each row; a row of the tree has a column for each query of
    // the sequence.
    unsafe {
        for r in 0..tile.rows.len() {
            let scores = task.memory.scores.at(r, 0);
            if tile.full && !modifies && tree.is_empty() {
                if whole {
                    break;
                }
                scoring::hide::<S>(scores, whole_columns.clone(), tile.columns.clone());
                continue;
            }
            let query = task.query(tile.rows.start + r);
            if modifies {
                let mut modifiers = modifiers::<S, P>(task, tile, &query);
                if let (Some(mean_scores), Some(_)) = (mean_scores, modifiers.terms.softcap) {
                    modifiers.terms.offset = *mean_scores.add(tile.rows.start + r);
                }
                scoring::modify::<S>(scores, whole_columns.clone(), &modifiers);
            }
            if !whole {
                let seen = task.visible_columns(query.sequence, query.position, tile.block);
                let seen = seen.start.max(tile.columns.start)..seen.end.min(tile.columns.end);
                scoring::hide::<S>(scores, whole_columns.clone(), seen);
            }
            if let Some(row) = task.tree_row(&query).filter(|_| !tree.is_empty()) {
                scoring::prune(scores, tree.clone(), row, tree_from);
            }
        }
    }
    if modifies { 1.0 } else { P::scale_of_scores(task.score_scale()) }
}

/// Returns true if scores of the tile are changed before the softmax, other than by hiding keys.
#[inline(always)]
fn modifies<S: Simd, P: Products<S>>(task: &ScoreTask<'_>, tile: &Tile) -> bool {
    let scoring = &task.run.scoring;
    // The largest score is taken before it is scaled, which a scale that is not positive does not allow.
    let has_nonpositive_scale = P::scale_of_scores(task.score_scale()) <= 0.0;
    scoring.softcap.is_some()
        || scoring.alibi_slopes.is_some()
        || tile.mask != MaskTile::Full
        || has_nonpositive_scale
        || task.has_score_factors.get()
}

/// The changes of the scores of a query before the softmax.
#[inline(always)]
fn modifiers<'a, S: Simd, P: Products<S>>(
    task: &ScoreTask<'a>,
    tile: &Tile,
    query: &Query<'_>,
) -> Modifiers<'a> {
    let problem = task.run.problem;
    let first = tile.block * task.run.block_k;
    let mask = match &task.run.mask {
        Some(table) if tile.mask != MaskTile::Full => {
            let row = table.view.row(query.index, query.head, query.position);
            Some(MaskColumns { row, keys: table.view.shape()[3] })
        }
        _ => None,
    };
    let scoring = &task.run.scoring;
    let alibi = |slope| Alibi { slope, origin: (query.nearest(problem) - first as i64) as f32 };
    let terms = ScoreRow {
        at: RowIndex { batch: query.index, head: query.head, query: query.own_key() },
        first_key: first,
        scale: task.factor_of_scores(query).unwrap_or_else(|| P::scale_of_scores(task.score_scale())),
        offset: 0.0,
        softcap: scoring.softcap,
        alibi: scoring.alibi_slope(query.index, query.head).map(alibi),
    };
    Modifiers { terms, mask }
}
