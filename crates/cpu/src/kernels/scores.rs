//! Scores of a tile: packing of queries and keys, and `q . k`.

#![allow(unsafe_code)]

use super::codes;
use super::mat::{Mat, MatMut};
use super::operands::Operands;
use super::pack;
use super::products::Products;
use super::products::f32_fma::F32;
use super::scale::is_scaled;
use super::state::{Path, TaskState, Tile};
use super::stream::Scores;
use crate::plan::STREAM_ROWS;
use crate::simd::{LaneFormat, Simd};
use flashtile_core::codec::KvView;
use std::ops::Range;

/// f32 in a row of packed queries or keys.
#[inline(always)]
fn depth<S: Simd, P: Products<S>>(head_dim: usize) -> usize {
    head_dim.div_ceil(P::PER_F32).next_multiple_of(P::DEPTH_STEP)
}

/// Panels of keys that hold some columns of a block.
#[inline(always)]
fn panels<S: Simd>(columns: &Range<usize>) -> Range<usize> {
    let width = S::VECTORS * S::LANES;
    columns.start / width..columns.end.div_ceil(width)
}

impl TaskState<'_> {
    fn head_dim(&self) -> usize {
        self.cx.plan.problem().dims().head_dim
    }

    /// Memory of the packed queries, of rows of `depth` f32.
    ///
    /// # Safety
    /// `depth` is [`depth`] of the plan's products.
    #[inline(always)]
    unsafe fn queries(&self, depth: usize) -> MatMut {
        let rows = self.cx.plan.task_rows().max(STREAM_ROWS);
        // SAFETY: the caller's contract: the region of the scratch layout.
        unsafe { MatMut::new(self.packed_q, depth, rows, depth) }
    }

    /// Packs the queries, with all that depends on them alone.
    ///
    /// # Safety
    /// The machine has the instruction set of the kernels.
    pub(super) unsafe fn pack_queries(&self) {
        // SAFETY: the caller's contract.
        unsafe { (self.kernels.pack_queries)(self) }
        let KvView::Codes(codes) = &self.cx.inputs.k else { return };
        // Quantized keys are not multiplied as pairs: a packed query has head_dim elements.
        let (head_dim, mean) = (self.head_dim(), codes.mean(self.rows.kv_head));
        for row in 0..self.rows.count {
            // SAFETY: the packed query, and the product of each row.
            unsafe {
                let query = std::slice::from_raw_parts_mut(self.packed_q.add(row * head_dim), head_dim);
                if let Some(mean) = mean {
                    let products = query.iter().zip(mean).map(|(q, mean)| f64::from(*q) * f64::from(*mean));
                    let factor = f64::from(self.factor_of_scores(&self.query(row)).unwrap_or(1.0));
                    *self.mean_scores.add(row) = (products.sum::<f64>() * factor) as f32;
                }
                if let Some(rotation) = codes.coder().rotation() {
                    flashtile_core::codec::rotate(self.cx.token, rotation, query);
                }
            }
        }
        if let Path::Codes(phases) = &self.k_path {
            // SAFETY: the queries are packed, in the domain of the keys.
            unsafe { (phases.set_queries)(self) }
        }
    }

    /// Scores of a tile, in units of log2 (or of the softcap).
    ///
    /// # Safety
    /// Queries are packed, and the block's keys too unless the task reads them where they lie.
    pub(super) unsafe fn scores(&self, tile: &Tile) {
        let phase = match self.k_path {
            Path::Packed => self.kernels.packed_scores,
            Path::Stream => self.kernels.stream_scores,
            Path::Codes(phases) => phases.scores,
        };
        // SAFETY: the caller's contract; the score tile holds block_k columns of each row.
        unsafe { phase(self, tile) }
    }
}

/// Packs the queries of the task, scaled to units of the scores where their products take f32 and the scaled query is one ([`scale`](super::scale)).
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
pub(crate) unsafe fn pack_queries<S: Simd, P: Products<S>>(work: &TaskState<'_>) {
    let head_dim = work.head_dim();
    let (scale, depth) = (work.score_scale(), depth::<S, P>(head_dim));
    let q = &work.cx.inputs.q;
    for row in 0..work.rows.count {
        let (i, h) = work.place(row);
        let src = q.row(work.sequence.batch, h, work.sequence.q_start + i);
        // SAFETY: the row exists, and the region holds task_rows rows.
        unsafe {
            let dst = work.packed_q.add(row * depth);
            P::pack_query(q.dtype(), src, head_dim, scale, dst);
            if P::SCALES_QUERIES && !is_scaled::<S>(dst, head_dim) {
                let factors = work.scale_factors(&work.query(row));
                P::pack_query(q.dtype(), src, head_dim, factors.query, dst);
                work.has_score_factors.set(work.has_score_factors.get() || factors.scores != 1.0);
            }
        }
    }
    if matches!(work.k_path, Path::Stream) {
        // SAFETY: the queries are packed, and the memory of packed keys is free in a task that packs none.
        unsafe { P::set_stream_queries(work.queries(depth).as_mat(), work.packed_k) }
    }
}

/// Packs the panels of a block's keys that hold `columns`.
///
/// # Safety
/// As [`Simd`]; the keys `columns` of the block exist and are elements of `R`.
#[inline(always)]
pub(crate) unsafe fn pack_keys<S: Simd, P: Products<S>, R: LaneFormat>(
    work: &TaskState<'_>,
    block: usize,
    columns: &Range<usize>,
) {
    let k = work.key_elements();
    let panel_len = S::VECTORS * S::LANES * depth::<S, P>(work.head_dim());
    for panel in panels::<S>(columns) {
        // SAFETY: the caller's contract; the region holds every panel of a block.
        unsafe {
            let dst = work.packed_k.add(panel * panel_len);
            pack::key_panel::<S, R>(k, block * work.block_k, panel, columns, P::DEPTH_STEP, dst);
        }
    }
}

/// As [`pack_keys`], of quantized keys, which are multiplied in f32.
///
/// # Safety
/// As there.
#[inline(always)]
pub(crate) unsafe fn pack_key_codes<S: Simd>(work: &TaskState<'_>, block: usize, columns: &Range<usize>) {
    let k = work.key_codes();
    let panel_len = S::VECTORS * S::LANES * depth::<S, F32>(work.head_dim());
    for panel in panels::<S>(columns) {
        // SAFETY: the caller's contract; the region holds every panel of a block.
        unsafe {
            let dst = work.packed_k.add(panel * panel_len);
            codes::key_panel::<S>(k, block * work.block_k, panel, columns, work.codes, dst);
        }
    }
}

/// Scores of a tile with packed keys.
///
/// # Safety
/// As [`Simd`]; queries and keys are packed.
#[inline(always)]
pub(crate) unsafe fn packed_scores<S: Simd, P: Products<S>>(work: &TaskState<'_>, tile: &Tile) {
    let depth = depth::<S, P>(work.head_dim());
    let (width, step) = (S::VECTORS * S::LANES, P::PER_F32 * S::LANES);
    for panel in panels::<S>(&tile.columns) {
        // Only the vectors of the panel that the tile has columns in.
        let first = panel * width;
        let start = (tile.columns.start.max(first) - first) / step * step;
        let end = (tile.columns.end.min(first + width) - first).next_multiple_of(step);
        // SAFETY: rows of the task; the score tile holds block_k columns of each row.
        unsafe {
            let keys = Mat::new(work.packed_k.add(first * depth), width, depth, width);
            let operands = Operands {
                a: work.queries(depth).from(tile.rows.start, 0).as_mat(),
                b: keys.from(0, start).first(depth, end - start),
                c: work.scores.from(0, first + start).first(tile.rows.len(), end - start),
                resume: false,
            };
            P::multiply(operands);
        }
    }
}

/// Scores of a tile of few rows, with keys read from where they lie.
///
/// # Safety
/// As [`Simd`]; queries are packed, keys are elements of `R`.
#[inline(always)]
pub(crate) unsafe fn stream_scores<S: Simd, P: Products<S>, R: LaneFormat>(
    work: &TaskState<'_>,
    tile: &Tile,
) {
    let k = work.key_elements();
    let (depth, first) = (depth::<S, P>(work.head_dim()), tile.block * work.block_k);
    // SAFETY: the caller's contract; the score tile holds block_k columns of each row, and the memory of packed keys is that of
    // `set_stream_queries`.
    unsafe {
        let q = work.queries(depth).from(tile.rows.start, 0).as_mat();
        let scores = Scores { q, c: work.scores, rows: tile.rows.len() };
        P::stream_scores::<R>(k, first, &tile.columns, scores, work.packed_k);
    }
}
