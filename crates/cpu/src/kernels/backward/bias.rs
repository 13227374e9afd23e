//! The gradient of an additive mask: a pass of its own over the scores, because the axes that a mask broadcasts are summed in a fixed order.

#![allow(unsafe_code)]

use super::state::{Context, KeyState, TileState};
use super::task::score_gradients;
use crate::kernels::shared::score_task::Tile;
use crate::plan::{BiasTask, Rows};

/// The gradient of a mask, `[batches, heads, queries, keys]`.
#[derive(Clone, Copy)]
pub(crate) struct BiasGradient {
    pub(crate) data: *mut f32,
    pub(crate) shape: [usize; 4],
}

// SAFETY: tasks write disjoint elements.
unsafe impl Sync for BiasGradient {}

/// Adds what the queries and keys of a task give to the elements of the mask that it owns.
///
/// # Safety
/// As [`task`](super::task::task), and the elements are 0.
pub(crate) unsafe fn bias(cx: &Context<'_>, to: BiasGradient, task: &BiasTask, scratch: *mut f32) {
    let (problem, plan) = (cx.run.problem, cx.plan);
    let gqa_group = problem.dims().gqa_group();
    for sequence in task.sequences.clone() {
        let s = &problem.sequences()[sequence];
        let positions = task.positions.start.min(s.q_len)..task.positions.end.min(s.q_len);
        for (kv_head, chunk) in
            task.kv_heads.clone().flat_map(|head| task.chunks.clone().map(move |chunk| (head, chunk)))
        {
            if positions.is_empty() || chunk >= plan.num_chunks(s) {
                continue;
            }
            let rows = Rows {
                sequence,
                kv_head,
                first: positions.start * gqa_group,
                count: positions.len() * gqa_group,
            };
            // SAFETY: the caller's contract.
            unsafe { chunk_bias(cx, to, rows, chunk, scratch) }
        }
    }
}

/// # Safety
/// As [`bias`].
unsafe fn chunk_bias(cx: &Context<'_>, to: BiasGradient, rows: Rows, chunk: usize, scratch: *mut f32) {
    let blocks = cx.plan.chunk_blocks(&cx.run.problem.sequences()[rows.sequence], chunk);
    let tile_rows = cx.plan.layout().tile_rows;
    // SAFETY: the caller's contract.
    unsafe {
        let keys = KeyState::new(cx, rows, blocks.start, scratch);
        keys.pack(blocks.clone());
        for first in (0..rows.count).step_by(tile_rows) {
            let count = tile_rows.min(rows.count - first);
            let mut work = TileState::new(&keys, Rows { first: rows.first + first, count, ..rows }, scratch);
            work.applies_softcap_slope = false;
            let mut is_packed = false;
            for block in blocks.clone() {
                let Some(tile) = work.task.tile(0..count, block) else { continue };
                score_gradients(&mut work, &tile, is_packed);
                is_packed = true;
                add_tile(&work, &tile, to);
            }
        }
    }
}

/// Adds the gradients of the scores of a tile.
///
/// # Safety
/// As [`bias`]; the gradients of the scores are computed.
unsafe fn add_tile(work: &TileState<'_>, tile: &Tile, to: BiasGradient) {
    let [batches, heads, queries, keys] = to.shape;
    let first_key = tile.block * work.task.run.block_k + tile.columns.start;
    // Rows of a tile that share their elements are added up first, so that sums over many rows are of few terms.
    let distinct = match (queries, heads) {
        (1, 1) => 1,
        (1, _) => work.task.gqa_group,
        _ => tile.rows.len(),
    };
    for r in distinct..tile.rows.len() {
        // SAFETY: the caller's contract; the rows are distinct.
        unsafe {
            let row = |r: usize| work.memory.d_probs.at(r, tile.columns.start);
            let from = std::slice::from_raw_parts(row(r).cast_const(), tile.columns.len());
            let sums = std::slice::from_raw_parts_mut(row(r % distinct), tile.columns.len());
            sums.iter_mut().zip(from).for_each(|(to, x)| *to += x);
        }
    }
    for r in tile.rows.start..distinct.min(tile.rows.len()) {
        let query = work.task.query(r);
        let at = |n: usize, index: usize| if n == 1 { 0 } else { index };
        let row = (at(batches, query.index) * heads + at(heads, query.head)) * queries
            + at(queries, query.position);
        // SAFETY: the caller's contract; a mask has an element for every key, or one for all.
        unsafe {
            let d_scores = work.memory.d_probs.at(r, tile.columns.start).cast_const();
            let d_scores = std::slice::from_raw_parts(d_scores, tile.columns.len());
            let elements = to.data.add(row * keys + at(keys, first_key));
            if keys == 1 {
                *elements += d_scores.iter().copied().map(f64::from).sum::<f64>() as f32;
            } else {
                let elements = std::slice::from_raw_parts_mut(elements, d_scores.len());
                elements.iter_mut().zip(d_scores).for_each(|(to, x)| *to += x);
            }
        }
    }
}
