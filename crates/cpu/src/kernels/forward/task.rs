//! One task: the order in which its phases run.
//!
//! A task computes some query rows of one key/value head over some blocks of keys. For each block and each tile of rows that
//! sees it, four phases follow each other: scores (`q . k`), probabilities (bias, mask and softmax numerator of the block),
//! values (`p . v`), and the fold into the running state of the rows (online softmax). Rows of a single block need no fold. The
//! phases are functions of an instruction set ([`Kernels`](super::state::Kernels)), called once per tile or block; everything here
//! is compiled once, for any machine.

#![allow(unsafe_code)]

use super::state::{Context, Fold, Path, RowState, TaskState};
use crate::kernels::shared::mask::{self, MaskTile};
use crate::kernels::shared::score_task::Tile;
use crate::plan::{Reduction, Target, Task};
use std::ops::Range;

/// Destination of a tile's products with the values of a block.
#[derive(Clone, Copy)]
enum TileResult {
    /// They are the result of the tile's rows, which see no other block.
    Rows,
    /// They are folded into the running state.
    State,
    /// They are stored in partials from this one on.
    Partials(usize),
}

/// Maxima and sums are padded to a multiple of this many rows, the lanes of the widest vector.
const MAX_LANES: usize = 16;

impl TaskState<'_> {
    /// Packs the queries, with all that depends on them alone.
    ///
    /// # Safety
    /// The machine has the instruction set of the kernels.
    unsafe fn pack_queries(&self) {
        // SAFETY: the caller's contract.
        unsafe {
            (self.kernels.scores.pack_queries)(&self.task);
            self.task.rotate_queries();
            if let Path::Codes(phases) = &self.k_path {
                (phases.set_queries)(self);
            }
        }
    }

    /// Scores of a tile, in units of log2 (or of the softcap).
    ///
    /// # Safety
    /// Queries are packed, and the block's keys too unless the task reads them where they lie.
    unsafe fn scores(&self, tile: &Tile) {
        // SAFETY: the caller's contract; the score tile holds block_k columns of each row.
        unsafe {
            match self.k_path {
                Path::Packed => (self.kernels.scores.packed_scores)(&self.task, tile),
                Path::Stream => (self.kernels.scores.stream_scores)(&self.task, tile),
                Path::Codes(phases) => (phases.scores)(self, tile),
            }
        }
    }

    /// Packs the values `columns` of a block to where a whole packed block has them.
    ///
    /// # Safety
    /// The keys `columns` of the block exist.
    pub(crate) unsafe fn pack_values(&self, block: usize, columns: &Range<usize>) {
        let steps = self.kernels.key_steps;
        let row = steps.whole(columns).start / steps.keys_per_f32;
        // SAFETY: the caller's contract; the region holds every row of a block.
        unsafe {
            (self.kernels.pack_values)(
                &self.task,
                block * self.task.run.block_k,
                columns,
                self.packed_v.from(row, 0),
            );
        }
    }

    /// Computes a tile in one block.
    ///
    /// # Safety
    /// Queries are packed, and the block too unless the task reads it in place.
    unsafe fn attend(&self, tile: &Tile, result: TileResult) {
        // SAFETY: the caller's contract.
        unsafe {
            self.prefetch_mask(tile);
            self.scores(tile);
            (self.kernels.probs)(self, tile);
            self.weighted_values(tile);
            match result {
                TileResult::Rows => {
                    let (first, rows) = (tile.rows.start, tile.rows.len());
                    let state = RowState { acc: self.block_out, max_sum: self.block_max_sum, zero: 0.0 };
                    (self.kernels.finish)(self, first, rows, &state);
                }
                TileResult::State => (self.kernels.fold)(tile.rows.len(), &self.fold_at(tile.rows.start)),
                TileResult::Partials(index) => {
                    let partial_out = self.block_out.first(tile.rows.len(), self.stride).as_mat();
                    self.cx.partials.store(index + tile.rows.start, partial_out, self.block_max_sum);
                }
            }
        }
    }

    /// Prefetches the mask of a tile, which arrives while its scores are computed.
    fn prefetch_mask(&self, tile: &Tile) {
        let Some(table) = self.task.run.mask.as_ref().filter(|_| tile.mask == MaskTile::Partial) else {
            return;
        };
        let first = tile.block * self.task.run.block_k;
        for row in tile.rows.clone() {
            let query = self.task.query(row);
            let row = table.view.row(query.index, query.head, query.position);
            mask::prefetch(row, first + tile.columns.start..first + tile.columns.end);
        }
    }

    /// Sets the running state of the first `rows` rows to the state before any key, or to the partials from `from` on.
    ///
    /// # Safety
    /// The partials were stored.
    unsafe fn start(&self, rows: usize, from: Option<usize>) {
        // SAFETY: the regions hold task_rows rows, maxima and sums rounded up to whole vectors.
        unsafe {
            self.max_sum.clear(0..rows.next_multiple_of(MAX_LANES));
            // Outputs of rows that have seen no key are not read.
            if let Some(index) = from {
                self.cx.partials.load(index, self.acc.first(rows, self.stride), self.max_sum);
            }
        }
    }

    /// Writes the running state of the first `rows` rows, which are rows `first..first + rows` of the task, to the target.
    /// Partial results of blocks were stored one by one.
    ///
    /// # Safety
    /// No other thread writes these rows or partials.
    unsafe fn end(&self, first: usize, rows: usize, target: Target) {
        // SAFETY: the caller's contract.
        unsafe {
            match target {
                Target::Out => {
                    let state = RowState { acc: self.acc, max_sum: self.max_sum, zero: -0.0 };
                    (self.kernels.finish)(self, first, rows, &state);
                }
                Target::State(index) => {
                    let partial_out = self.acc.first(rows, self.stride).as_mat();
                    self.cx.partials.store(index + first, partial_out, self.max_sum);
                }
                Target::Blocks(_) => {}
            }
        }
    }

    /// Computes the rows of the task in some blocks, of which `results.first` come before these.
    ///
    /// # Safety
    /// As [`task`]; queries are packed, and unless rows are finished at once, the running state is set.
    unsafe fn attend_blocks(&self, blocks: Range<usize>, results: Results) {
        let (count, tile_rows) = (self.task.rows.count, self.cx.plan.tile_rows());
        let Results { in_one_block, target, first } = results;
        let packs = self.k_path.is_packed() || self.v_path.is_packed();
        for (place, block) in blocks.enumerate() {
            // SAFETY: the caller's contract.
            unsafe {
                let result = match target {
                    Target::Blocks(base) => {
                        let index = base + (first + place) * count;
                        self.cx.partials.clear(index, count);
                        TileResult::Partials(index)
                    }
                    Target::Out if in_one_block => TileResult::Rows,
                    Target::Out | Target::State(_) => TileResult::State,
                };
                let mut packed = !packs;
                for row in (0..count).step_by(tile_rows) {
                    let rows = row..(row + tile_rows).min(count);
                    let Some(tile) = self.task.tile(rows.clone(), block) else {
                        if in_one_block {
                            // Rows that see no key: out is 0, and lse `-inf` or the sink.
                            self.start(rows.len(), None);
                            self.end(row, rows.len(), target);
                        }
                        continue;
                    };
                    // The block is packed here: only now is it known that some tile needs it.
                    if !packed {
                        self.pack_block(block);
                        packed = true;
                    }
                    self.attend(&tile, result);
                }
            }
        }
    }

    /// Packs what the rows of the task see of a block.
    ///
    /// # Safety
    /// Queries are packed.
    unsafe fn pack_block(&self, block: usize) {
        let columns = self.task.columns(&(0..self.task.rows.count), block);
        // SAFETY: the caller's contract.
        unsafe {
            if self.k_path.is_packed() {
                (self.kernels.scores.pack_keys)(&self.task, block, &columns);
            }
            if self.v_path.is_packed() {
                self.pack_values(block, &columns);
            }
        }
    }

    /// The running state from a row on, and the tile's result.
    ///
    /// # Safety
    /// The row is the first of a tile. Maxima and sums are read and written back in whole vectors of rows: rows past the
    /// tile have a block sum of 0, which leaves them as they are, and the regions are padded by a vector.
    unsafe fn fold_at(&self, row: usize) -> Fold {
        // SAFETY: the caller's contract.
        unsafe {
            Fold {
                acc: self.acc.from(row, 0),
                max_sum: self.max_sum.from(row),
                partial_out: self.block_out.as_mat(),
                block: self.block_max_sum,
            }
        }
    }

    /// Fills the block's maxima and sums from the last tile row up to a whole vector: rows without keys.
    ///
    /// # Safety
    /// The region holds the rows, rounded up.
    pub(crate) unsafe fn pad_block_max_sum(&self, rows: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.block_max_sum.clear(rows..rows.next_multiple_of(MAX_LANES)) }
    }
}

/// Where the blocks of a task go.
#[derive(Clone, Copy)]
struct Results {
    /// True if rows of a single block are finished at once.
    in_one_block: bool,
    target: Target,
    /// Blocks of earlier parts.
    first: usize,
}

/// Computes one task.
///
/// # Safety
/// - The machine has the instruction set of the context's kernels, and their matrix unit is configured on this thread.
/// - The context was checked against its plan, and `scratch` is valid for the plan's layout.
/// - No other thread uses `scratch` or runs the same task, and the levels before its own have ended.
pub(crate) unsafe fn task(cx: &Context<'_>, task: &Task, scratch: *mut f32) {
    // SAFETY: the caller's contract; every region is used within its size in the layout.
    unsafe {
        let count = task.rows.count;
        let blocks = |part: usize| task.blocks.parts[part].start..task.blocks.parts[part].end;
        // Rows without blocks are computed as rows of the first part.
        let parts = 0..cx.parts.len();
        let with_blocks = |part: &usize| !blocks(*part).is_empty();
        let first = parts.clone().find(with_blocks).unwrap_or(0);
        let mut work = TaskState::new(cx, first, task.rows, scratch);
        work.pack_queries();
        // The constant of a row's scores (`q . k_mean`) may be infinite, which a fold turns into a sum of 0 or NaN: tasks with such constants
        // always fold.
        let in_one_block = task.blocks.len() == 1
            && task.from.is_none()
            && task.target == Target::Out
            && work.task.mean_scores().is_none();
        if !in_one_block {
            work.start(count, task.from);
        }
        let mut results = Results { in_one_block, target: task.target, first: 0 };
        work.attend_blocks(blocks(first), results);
        for part in parts.skip(first + 1).filter(with_blocks) {
            results.first = (0..part).map(|part| blocks(part).len()).sum();
            work = TaskState::new(cx, part, task.rows, scratch);
            work.pack_queries();
            work.attend_blocks(blocks(part), results);
        }
        if !in_one_block {
            work.end(0, count, task.target);
        }
    }
}

/// Folds the partial results of a split task into the state of its rows, in key order.
///
/// # Safety
/// As [`task`], once every task of the level has run.
pub(crate) unsafe fn reduce(cx: &Context<'_>, reduction: &Reduction, scratch: *mut f32) {
    // SAFETY: the caller's contract; the state and the partials of all blocks are stored.
    unsafe {
        let work = TaskState::new(cx, 0, reduction.rows, scratch);
        let tile_rows = cx.plan.tile_rows();
        for row in (0..reduction.rows.count).step_by(tile_rows) {
            let rows = tile_rows.min(reduction.rows.count - row);
            work.start(rows, Some(reduction.from + row));
            work.pad_block_max_sum(rows);
            for block in 0..reduction.blocks {
                let at = reduction.partials + block * reduction.rows.count + row;
                let partial_out = cx.partials.load_max_sum(at, rows, work.block_max_sum);
                (work.kernels.fold)(rows, &Fold { partial_out, ..work.fold_at(0) });
            }
            work.end(row, rows, reduction.target);
        }
    }
}
