//! The order of the phases of a task.

#![allow(unsafe_code)]

use super::state::{Context, KeyState, TileState};
use crate::kernels::shared::score_task::Tile;
use crate::plan::{BackwardReduction, BackwardTask, DqTarget, Rows};
use std::ops::Range;

/// Computes one task: the gradients of the keys and values of some chunks, and their partial `d_q`.
///
/// # Safety
/// - The machine has the instruction set of the context's kernels, and their matrix unit is configured on this thread.
/// - The context was checked against its plan, `scratch` is valid for the plan's layout, and the row terms are filled.
/// - No other thread uses `scratch` or runs the same task, and the levels before its own have ended.
pub(crate) unsafe fn task(cx: &Context<'_>, task: &BackwardTask, scratch: *mut f32) {
    let layout = cx.plan.layout();
    let d_q = match task.d_q {
        // SAFETY: the region of the layout.
        DqTarget::Out => unsafe { scratch.add(layout.acc) },
        // SAFETY: the workspace has the partial sum.
        DqTarget::Partial(index) => unsafe { cx.partials.add(index * layout.partial) },
    };
    let is_summed = task.d_q != DqTarget::Out || task.chunks.len() > 1;
    // SAFETY: the caller's contract.
    unsafe {
        if is_summed {
            d_q.write_bytes(0, task.rows.count * layout.q_stride);
        }
        for chunk in task.chunks.clone() {
            chunk_gradients(cx, task.rows, chunk, is_summed.then_some(d_q), scratch);
        }
        if is_summed && task.d_q == DqTarget::Out {
            store_d_q(cx, task.rows, d_q);
        }
    }
}

/// Computes the gradients of the keys of a chunk and stores them. Adds their partial `d_q` to `sums`, or stores it as the whole.
///
/// # Safety
/// As [`task`].
unsafe fn chunk_gradients(
    cx: &Context<'_>,
    rows: Rows,
    chunk: usize,
    sums: Option<*mut f32>,
    scratch: *mut f32,
) {
    let plan = cx.plan;
    let layout = plan.layout();
    let blocks = plan.chunk_blocks(&cx.run.problem.sequences()[rows.sequence], chunk);
    // SAFETY: the caller's contract.
    unsafe {
        let keys = KeyState::new(cx, rows, blocks.start, scratch);
        clear(&keys, blocks.len());
        keys.pack(blocks.clone());
        for first in (0..rows.count).step_by(layout.tile_rows) {
            let tile_rows = Rows { first, count: layout.tile_rows.min(rows.count - first), ..rows };
            let mut tile = TileState::new(&keys, tile_rows, scratch);
            if !cx.rows.slope_sums.is_null() {
                tile.slope_sums = Some(cx.rows.slope_sums.add(chunk * plan.row_count()));
            }
            let is_empty = !tile_gradients(&mut tile, blocks.clone());
            match sums {
                Some(sums) if !is_empty => add(
                    sums.add(first * layout.q_stride),
                    tile.memory.d_q.at(0, 0),
                    tile_rows.count * layout.q_stride,
                ),
                Some(_) => {}
                None => {
                    let d_q = tile.memory.d_q.at(0, 0);
                    if is_empty {
                        d_q.write_bytes(0, tile_rows.count * layout.q_stride);
                    }
                    store_d_q(cx, tile_rows, d_q);
                }
            }
        }
        store_keys(&keys, chunk, blocks);
    }
}

/// Adds the gradients of a tile over the blocks of a chunk. Returns false if no row sees a key of them: `d_q` of the tile is not set then.
///
/// # Safety
/// The contract of [`task`] holds, and the keys are packed.
unsafe fn tile_gradients(work: &mut TileState<'_>, blocks: Range<usize>) -> bool {
    let mut has_keys = false;
    for block in blocks {
        let Some(tile) = work.task.tile(0..work.task.rows.count, block) else { continue };
        // SAFETY: the caller's contract.
        unsafe {
            score_gradients(work, &tile, has_keys);
            (work.cx.kernels.add_products)(work, &tile, has_keys);
        }
        has_keys = true;
    }
    has_keys
}

/// Computes the gradients of the scores of a tile. Packs the rows first, unless they are packed.
///
/// # Safety
/// The contract of [`task`] holds, and the keys are packed.
pub(super) unsafe fn score_gradients(work: &mut TileState<'_>, tile: &Tile, is_packed: bool) {
    let kernels = &work.cx.kernels;
    // SAFETY: the caller's contract.
    unsafe {
        if !is_packed {
            (kernels.scores.pack_queries)(&work.task);
            (kernels.pack_rows)(work);
        }
        work.task.memory.packed_k = work.keys.key_panels(tile.block);
        (kernels.scores.packed_scores)(&work.task, tile);
        (kernels.d_scores)(work, tile);
    }
}

/// Sets the gradients of the keys of a chunk to 0.
///
/// # Safety
/// The memory has the blocks.
unsafe fn clear(keys: &KeyState<'_>, blocks: usize) {
    let rows = blocks * keys.cx.plan.block_k();
    for of in [keys.memory.d_k, keys.memory.d_v] {
        // SAFETY: the caller's contract.
        unsafe { of.at(0, 0).write_bytes(0, rows * of.cols()) }
    }
}

/// `to += from`.
///
/// # Safety
/// Both have `len` elements and do not overlap.
unsafe fn add(to: *mut f32, from: *const f32, len: usize) {
    // SAFETY: the caller's contract.
    let (to, from) =
        unsafe { (std::slice::from_raw_parts_mut(to, len), std::slice::from_raw_parts(from, len)) };
    to.iter_mut().zip(from).for_each(|(to, x)| *to += x);
}

/// Stores `d_q` of some rows from sums `[rows, q_stride]`.
///
/// # Safety
/// As [`task`], and the sums are whole.
unsafe fn store_d_q(cx: &Context<'_>, rows: Rows, sums: *const f32) {
    let (problem, stride) = (cx.run.problem, cx.plan.layout().q_stride);
    let sequence = &problem.sequences()[rows.sequence];
    let gqa_group = problem.dims().gqa_group();
    for r in 0..rows.count {
        let at = rows.first + r;
        let (i, head) = (at / gqa_group, rows.kv_head * gqa_group + at % gqa_group);
        // SAFETY: the caller's contract.
        unsafe {
            let row = [sequence.batch, head, sequence.q_start + i];
            (cx.kernels.store)(cx.d_q, row, sums.add(r * stride), problem.scale());
        }
    }
}

/// Stores `d_k` and `d_v` of the keys of a chunk, and zeros for the rows of padding after the last one.
///
/// # Safety
/// As [`task`].
unsafe fn store_keys(keys: &KeyState<'_>, chunk: usize, blocks: Range<usize>) {
    let (cx, problem) = (keys.cx, keys.cx.run.problem);
    let (s, kv_head) = (keys.task.sequence, keys.task.rows.kv_head);
    let factor = (cx.kernels.d_k_factor)(problem.scale(), problem.desc().softcap);
    let (first, end) = (blocks.start * cx.plan.block_k(), (blocks.end * cx.plan.block_k()).min(s.kv_len));
    // SAFETY: the caller's contract; rows of padding belong to the last chunk, and gradients before it are stored when they are
    // overwritten.
    unsafe {
        for j in first..end {
            let row = [s.batch, kv_head, s.kv_start + j];
            (cx.kernels.store)(cx.d_k, row, keys.memory.d_k.at(j - first, 0), factor);
            (cx.kernels.store)(cx.d_v, row, keys.memory.d_v.at(j - first, 0), 1.0);
        }
        if chunk + 1 == cx.plan.num_chunks(s) {
            for j in s.kv_len..cx.plan.stored_rows(s) {
                for of in [cx.d_k, cx.d_v] {
                    let row = of.row(s.batch, kv_head, s.kv_start + j);
                    row.write_bytes(0, of.shape()[3] * of.dtype().bytes());
                }
            }
        }
    }
}

/// Adds up partial `d_q` in the order of their chunks.
///
/// # Safety
/// As [`task`], once every task of the level has run.
pub(crate) unsafe fn reduce(cx: &Context<'_>, reduction: &BackwardReduction) {
    let stride = cx.plan.layout().q_stride;
    let BackwardReduction { rows, partials, from, to } = reduction;
    // SAFETY: the caller's contract.
    unsafe {
        let at = |index: usize| cx.partials.add(index * cx.plan.layout().partial + rows.first * stride);
        let len = rows.count * stride;
        let (sum, rest) = match from {
            Some(from) => (at(*from), partials.clone()),
            None => (at(partials.start), partials.start + 1..partials.end),
        };
        for index in rest {
            add(sum, at(index), len);
        }
        match to {
            Some(to) => at(*to).copy_from_nonoverlapping(sum, len),
            None => store_d_q(cx, *rows, sum),
        }
    }
}
