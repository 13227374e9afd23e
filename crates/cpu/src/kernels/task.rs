//! One task: its geometry, and the order in which its phases run.
//!
//! A task computes some query rows of one key/value head over some blocks of keys. For each block and each tile of rows that
//! sees it, four phases follow each other: scores (`q . k`), probabilities (bias, mask and softmax numerator of the block),
//! values (`p . v`), and the fold into the running state of the rows (online softmax). The phases are functions of an
//! instruction set ([`Kernels`]), called once a tile or block; everything here is compiled once, for any machine.

#![allow(unsafe_code)]

use super::Context;
use super::codes::{CodeRows, IntegerOperands};
use super::mask::Class;
use super::pack::HeadRows;
use super::softmax::Fold;
use super::stream::MAX_ROWS;
use crate::isa::{CodeProducts, Kernels};
use crate::plan::{Reduction, Rows, Target, Task, sequence_of, spans};
use flashtile_core::block_tables::BlockTables;
use flashtile_core::codec::KvView;
use flashtile_core::problem::{Problem, Sequence};
use flashtile_core::tensor::MaskRow;
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Rows of statistics are padded to a multiple of this, the lanes of the widest vector.
const STAT_LANES: usize = 16;

/// The rows of a task, and the scratch memory of the thread that computes them.
pub(crate) struct TaskState<'a> {
    pub(super) cx: &'a Context<'a>,
    pub(super) kernels: &'a Kernels,
    pub(super) rows: Rows,
    /// Sequence of the first row.
    pub(super) sequence: &'a Sequence,
    /// Packed queries `[task rows, depth]`.
    pub(super) packed_q: *mut f32,
    /// Packed keys of a block, `[panels][depth][panel width]`; or the memory of a streaming task.
    pub(super) packed_k: *mut f32,
    /// Packed values of a block, `[keys, stride]`.
    pub(super) packed_v: *mut f32,
    /// Scores of a tile, later probabilities: `[tile rows, block_k]`.
    pub(super) scores: *mut f32,
    /// Unnormalised output of a tile in one block: `[tile rows, stride]`.
    pub(super) block_out: *mut f32,
    /// Running unnormalised output: `[task rows, stride]`.
    pub(super) acc: *mut f32,
    /// Running maximum and sum of every row, padded by a vector.
    pub(super) row_max: *mut f32,
    pub(super) row_sum: *mut f32,
    /// Maximum and sum of the block for the rows of a tile.
    pub(super) block_max: *mut f32,
    pub(super) block_sum: *mut f32,
    /// Elements of a row of values: value_dim in whole vectors.
    pub(super) stride: usize,
    pub(super) block_k: usize,
    /// Query heads of a key/value head.
    pub(super) group: usize,
    /// `q . k_mean` of each row, in units of the scores: the part that keys are stored without. Empty unless quantized.
    pub(super) mean_scores: *mut f32,
    /// Memory for decoded rows and integer operands. Empty unless keys or values are quantized.
    pub(super) codes: *mut f32,
    /// How keys and values are read.
    pub(super) k_path: Path,
    pub(super) v_path: Path,
}

/// How the keys or values of a task are read.
#[derive(Clone, Copy)]
pub(super) enum Path {
    /// A block at a time is packed.
    Packed,
    /// Elements, from where they lie.
    Stream,
    /// Codes in integers, from where they lie.
    Integers(CodeProducts),
    /// Codes of a byte in f32, from where they lie.
    Numbers(CodeProducts),
}

impl Path {
    pub(super) fn is_packed(&self) -> bool {
        matches!(self, Self::Packed)
    }
}

/// Keys or values of the head of a task.
#[derive(Clone, Copy)]
enum Stored<'a> {
    Elements(HeadRows<'a>),
    Codes(CodeRows<'a>),
}

impl<'a> Stored<'a> {
    fn elements(self) -> HeadRows<'a> {
        match self {
            Self::Elements(rows) => rows,
            Self::Codes(_) => unreachable!("kernels are chosen by how keys and values are stored"),
        }
    }

    fn codes(self) -> CodeRows<'a> {
        match self {
            Self::Codes(rows) => rows,
            Self::Elements(_) => unreachable!("kernels are chosen by how keys and values are stored"),
        }
    }
}

/// A row of q.
pub(super) struct Query<'a> {
    /// Index of its sequence.
    pub(super) index: usize,
    pub(super) sequence: &'a Sequence,
    /// Position in its sequence.
    pub(super) position: usize,
    pub(super) head: usize,
}

impl Query<'_> {
    /// The position from which ALiBi counts distances: that of the nearest key that the row sees. The distance to it is the
    /// same for all keys and changes no probability, but would leave f32 no digits for what does.
    pub(super) fn nearest(&self, problem: &Problem) -> i64 {
        let own = self.position as i64 + self.sequence.q_offset;
        let seen = problem.visible(self.sequence, self.position);
        if seen.is_empty() { own } else { own.clamp(seen.start as i64, seen.end as i64 - 1) }
    }

    /// What its scores lack because distances are counted from [`Query::nearest`].
    pub(super) fn alibi_shift(&self, problem: &Problem, slope: f32) -> f64 {
        let own = self.position as i64 + self.sequence.q_offset;
        -f64::from(slope) * own.abs_diff(self.nearest(problem)) as f64
    }
}

/// Rows of the task, and the columns of a block that some of them see.
pub(crate) struct Tile {
    pub(super) rows: Range<usize>,
    pub(super) block: usize,
    pub(super) columns: Range<usize>,
    /// Whether every row sees every column as far as causality, window and length go.
    pub(super) full: bool,
    pub(super) mask: Class,
}

impl<'a> TaskState<'a> {
    /// # Safety
    /// `scratch` is valid for the plan's scratch layout.
    unsafe fn new(cx: &'a Context<'a>, rows: Rows, scratch: *mut f32) -> Self {
        let layout = cx.plan.scratch();
        let sequence = &cx.plan.problem().sequences()[rows.sequence];
        let (tile_stats, row_stats) = (layout.tile_stats, layout.row_stats);
        // SAFETY: every offset is that of a region of the layout, or its end where the region is empty.
        unsafe {
            let stats = scratch.add(layout.stats);
            Self {
                cx,
                kernels: &cx.kernels,
                rows,
                sequence,
                packed_q: scratch.add(layout.q),
                packed_k: scratch.add(layout.k),
                packed_v: scratch.add(layout.v),
                scores: scratch.add(layout.scores),
                block_out: scratch.add(layout.partial),
                acc: scratch.add(layout.acc),
                row_max: stats,
                row_sum: stats.add(row_stats),
                block_max: stats.add(2 * row_stats),
                block_sum: stats.add(2 * row_stats + tile_stats),
                stride: cx.plan.value_stride(),
                block_k: cx.plan.block_k(),
                group: cx.plan.problem().dims().group(),
                mean_scores: scratch.add(layout.mean_scores),
                codes: scratch.add(layout.codes),
                k_path: Path::Packed,
                v_path: Path::Packed,
            }
            .with_paths()
        }
    }

    /// Few rows are computed without packing. Whether codes are depends on the sequence alone, not on how its rows are cut into
    /// tasks: the bits differ.
    fn with_paths(mut self) -> Self {
        let plan = self.cx.plan;
        let few = self.sequence.q_len * self.group <= MAX_ROWS && plan.prefixes().is_empty();
        let integers = self.kernels.integer_products.filter(|_| few && plan.multiplies_integers());
        let bytes = self.kernels.byte_products.filter(|_| few);
        let path_of_codes = |rows: CodeRows<'_>| {
            let integers = integers.filter(|_| rows.can_be_integers()).map(Path::Integers);
            let numbers = bytes.filter(|_| rows.can_be_numbers()).map(Path::Numbers);
            integers.or(numbers).unwrap_or(Path::Packed)
        };
        let path = |stored| match stored {
            Stored::Elements(_) if self.rows.count <= MAX_ROWS => Path::Stream,
            Stored::Elements(_) => Path::Packed,
            Stored::Codes(rows) => path_of_codes(rows),
        };
        (self.k_path, self.v_path) = (path(self.keys()), path(self.values()));
        self
    }

    /// Row of q, counted from the first row's sequence, and query head of a row of the task.
    #[inline]
    pub(super) fn place(&self, row: usize) -> (usize, usize) {
        let at = self.rows.first + row;
        (at / self.group, self.rows.kv_head * self.group + at % self.group)
    }

    /// The query of a row of the task.
    #[inline]
    pub(super) fn query(&self, row: usize) -> Query<'a> {
        let (i, head) = self.place(row);
        let problem = self.cx.plan.problem();
        let index = sequence_of(problem, self.rows.sequence, self.sequence.q_start + i);
        let sequence = &problem.sequences()[index];
        Query { index, sequence, position: self.sequence.q_start + i - sequence.q_start, head }
    }

    /// Sequences that have some rows of the task, and their positions.
    fn spans(&self, rows: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + use<'a> {
        let first = self.rows.first;
        spans(self.cx.plan.problem(), self.rows.sequence, first + rows.start..first + rows.end)
    }

    /// Columns of a block that some of the rows see, or all that are kept where tiles are not skipped.
    fn columns(&self, rows: &Range<usize>, block: usize) -> Range<usize> {
        let plan = self.cx.plan;
        let clip = |keys: Range<usize>| clip(&keys, block * self.block_k, self.block_k);
        if !plan.options().skip_tiles {
            // Of a page that several sequences share, one may keep more than another.
            let kept = |tables: &BlockTables| self.spans(rows).map(|(s, _)| tables.first[s]).min();
            let first = self.cx.inputs.tables.and_then(kept).unwrap_or(0);
            return clip(first..self.sequence.kv_len);
        }
        let sequences = plan.problem().sequences();
        let seen =
            self.spans(rows).map(|(s, positions)| plan.problem().visible_union(&sequences[s], positions));
        let seen = seen.map(clip).filter(|columns| !columns.is_empty());
        seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }

    /// The tile of some rows in a block, `None` where no row sees a key.
    fn tile(&self, rows: Range<usize>, block: usize) -> Option<Tile> {
        let columns = self.columns(&rows, block);
        if columns.is_empty() {
            return None;
        }
        let skip = self.cx.plan.options().skip_tiles;
        let mask = match &self.cx.mask {
            None => Class::Neutral,
            Some(_) if !skip => Class::Mixed,
            Some(table) => {
                let first = self.rows.kv_head * self.group;
                let classes = self.spans(&rows);
                let classes = classes.map(|(s, i)| table.class(s, first..first + self.group, i, block));
                classes.reduce(Class::and).unwrap_or(Class::Mixed)
            }
        };
        if skip && mask == Class::Hidden {
            return None;
        }
        let full = self.spans(&rows).all(|(s, positions)| {
            // Both ends of what a row sees grow with its position.
            let sees = |i: usize| self.visible_columns(&self.cx.plan.problem().sequences()[s], i, block);
            sees(positions.start).end >= columns.end && sees(positions.end - 1).start <= columns.start
        });
        Some(Tile { rows, block, columns, full, mask })
    }

    /// Columns of a block that a position of a sequence sees.
    #[inline]
    pub(super) fn visible_columns(&self, sequence: &Sequence, i: usize, block: usize) -> Range<usize> {
        clip(&self.cx.plan.problem().visible(sequence, i), block * self.block_k, self.block_k)
    }

    fn stored(&self, of: &'a KvView<'a>) -> Stored<'a> {
        let (s, head) = (self.sequence, self.rows.kv_head);
        match (of, self.cx.inputs.tables) {
            (KvView::Elements(tensor), None) => {
                Stored::Elements(HeadRows::of_tensor(tensor, [s.batch, head, s.kv_start]))
            }
            (KvView::Elements(tensor), Some(tables)) => {
                Stored::Elements(HeadRows::of_pages(tensor, head, tables, self.rows.sequence))
            }
            (KvView::Codes(codes), Some(tables)) => {
                Stored::Codes(CodeRows::new(codes, head, tables, self.rows.sequence))
            }
            (KvView::Codes(_), None) => {
                unreachable!("codes are of cached sequences: the inputs were checked")
            }
        }
    }

    /// Keys of the task's head.
    fn keys(&self) -> Stored<'a> {
        self.stored(&self.cx.inputs.k)
    }

    /// Values of the task's head.
    fn values(&self) -> Stored<'a> {
        self.stored(&self.cx.inputs.v)
    }

    /// Keys of the task's head, in a phase of keys that are elements.
    pub(super) fn key_elements(&self) -> HeadRows<'a> {
        self.keys().elements()
    }

    /// Keys of the task's head, in a phase of keys that are codes.
    pub(super) fn key_codes(&self) -> CodeRows<'a> {
        self.keys().codes()
    }

    /// Values of the task's head, in a phase of values that are elements.
    pub(super) fn value_elements(&self) -> HeadRows<'a> {
        self.values().elements()
    }

    /// Values of the task's head, in a phase of values that are codes.
    pub(super) fn value_codes(&self) -> CodeRows<'a> {
        self.values().codes()
    }

    pub(super) fn integer_operands(&self) -> IntegerOperands {
        IntegerOperands::new(self.codes, self.cx.plan.problem().dims().head_dim)
    }

    /// Columns of the tile that a tree mask decides on, and the tree's column for the first of them. Tiles of several
    /// sequences have none.
    #[inline]
    pub(super) fn tree_columns(&self, tile: &Tile) -> (Range<usize>, usize) {
        if self.cx.inputs.tree.is_none() {
            return (0..0, 0);
        }
        let first = tile.block * self.block_k;
        let tree = self.sequence.kv_len - self.sequence.q_len;
        let columns = clip(&(tree..self.sequence.kv_len), first, self.block_k);
        let columns = columns.start.max(tile.columns.start)..columns.end.min(tile.columns.end);
        if columns.is_empty() { (0..0, 0) } else { (columns.clone(), first + columns.start - tree) }
    }

    /// The row of the tree mask of a query.
    #[inline]
    pub(super) fn tree_row(&self, query: &Query<'_>) -> Option<MaskRow> {
        Some(self.cx.inputs.tree.as_ref()?.row(0, 0, query.sequence.q_start + query.position))
    }

    /// Factor from `q . k` to units of log2, or of the softcap. Folded into the queries, except where they are pairs of bf16,
    /// which would be rounded again.
    pub(super) fn score_scale(&self) -> f32 {
        let problem = self.cx.plan.problem();
        match problem.desc().softcap {
            Some(cap) => problem.scale() / cap,
            None => problem.scale() * LOG2_E,
        }
    }

    /// `q . k_mean` of each row of the task, where keys are stored without their mean.
    pub(super) fn mean_scores(&self) -> Option<*const f32> {
        match &self.cx.inputs.k {
            KvView::Codes(codes) if codes.mean(self.rows.kv_head).is_some() => Some(self.mean_scores),
            _ => None,
        }
    }

    /// Packs the values `columns` of a block to where a whole packed block has them.
    ///
    /// # Safety
    /// The keys `columns` of the block exist.
    pub(super) unsafe fn pack_values(&self, block: usize, columns: &Range<usize>) {
        let products = self.kernels.products;
        let at = products.whole(columns).start / products.keys_per_f32 * self.stride;
        // SAFETY: the caller's promise; the region holds every row of a block.
        unsafe {
            (self.kernels.pack_values)(self, block * self.block_k, columns, self.packed_v.add(at));
        }
    }

    /// Computes a tile in one block: folds it into the running state, or stores it in slots from `partials` on.
    ///
    /// # Safety
    /// Queries are packed, and the block too unless the task reads it where it lies.
    unsafe fn attend(&self, tile: &Tile, partials: Option<usize>) {
        // SAFETY: the caller's promise.
        unsafe {
            self.scores(tile);
            (self.kernels.probs)(self, tile);
            self.weighted_values(tile);
            match partials {
                None => (self.kernels.fold)(tile.rows.len(), &self.fold_at(tile.rows.start)),
                Some(slot) => {
                    let statistics = (self.block_max, self.block_sum);
                    self.cx.slots.store(slot + tile.rows.start, tile.rows.len(), self.block_out, statistics);
                }
            }
        }
    }

    /// Sets the running state of the first `rows` rows to that of no keys, or to what slots from `from` on hold.
    ///
    /// # Safety
    /// The slots were stored.
    unsafe fn start(&self, rows: usize, from: Option<usize>) {
        // SAFETY: the regions hold task_rows rows, statistics rounded up to whole vectors.
        unsafe {
            for r in 0..rows.next_multiple_of(STAT_LANES) {
                (*self.row_max.add(r), *self.row_sum.add(r)) = (f32::NEG_INFINITY, 0.0);
            }
            match from {
                None => std::ptr::write_bytes(self.acc, 0, rows * self.stride),
                Some(slot) => self.cx.slots.load(slot, rows, self.acc, (self.row_max, self.row_sum)),
            }
        }
    }

    /// Writes the running state of the first `rows` rows, which are those from row `first` of the task on, to where it goes.
    /// Partial results of blocks were stored one by one.
    ///
    /// # Safety
    /// No other thread writes these rows or slots.
    unsafe fn end(&self, first: usize, rows: usize, target: Target) {
        // SAFETY: the caller's promise.
        unsafe {
            match target {
                Target::Out => (self.kernels.finish)(self, first, rows),
                Target::State(slot) => {
                    let statistics = (self.row_max, self.row_sum);
                    self.cx.slots.store(slot + first, rows, self.acc, statistics);
                }
                Target::Blocks(_) => {}
            }
        }
    }

    /// The running state from a row on, and the tile's result.
    ///
    /// # Safety
    /// The row is the first of a tile. Statistics are read and written back in whole vectors of rows: rows past the tile have
    /// a block sum of 0, which leaves them as they are, and the regions are padded by a vector.
    unsafe fn fold_at(&self, row: usize) -> Fold {
        // SAFETY: the caller's promise.
        unsafe {
            Fold {
                acc: self.acc.add(row * self.stride),
                max: self.row_max.add(row),
                sum: self.row_sum.add(row),
                values: self.block_out,
                block_max: self.block_max,
                block_sum: self.block_sum,
                stride: self.stride,
            }
        }
    }

    /// Fills the block's statistics from the last tile row up to a whole vector: rows without keys.
    ///
    /// # Safety
    /// The region holds the rows, rounded up.
    pub(super) unsafe fn pad_block_statistics(&self, rows: usize) {
        for r in rows..rows.next_multiple_of(STAT_LANES) {
            // SAFETY: the caller's promise.
            unsafe { (*self.block_max.add(r), *self.block_sum.add(r)) = (f32::NEG_INFINITY, 0.0) }
        }
    }
}

/// The part of `keys` inside the block of `len` keys from `first`, counted from `first`.
#[inline]
fn clip(keys: &Range<usize>, first: usize, len: usize) -> Range<usize> {
    let start = keys.start.max(first).min(first + len) - first;
    let end = keys.end.max(first).min(first + len) - first;
    start..end
}

/// The matrix unit, configured for this thread until it is dropped.
struct TileUnit<'a>(&'a Kernels);

impl<'a> TileUnit<'a> {
    /// # Safety
    /// The machine has the instruction set of the kernels.
    unsafe fn configure(kernels: &'a Kernels) -> Self {
        // SAFETY: the caller's promise.
        unsafe { (kernels.begin_tiles)() }
        Self(kernels)
    }
}

impl Drop for TileUnit<'_> {
    fn drop(&mut self) {
        // SAFETY: the promise of `configure`, which ran on this thread: the value is neither sent nor shared.
        unsafe { (self.0.end_tiles)() }
    }
}

/// Computes one task.
///
/// # Safety
/// - The machine has the instruction set of the context's kernels.
/// - The context was checked against its plan, and `scratch` is valid for the plan's layout.
/// - No other thread uses `scratch` or runs the same task, and the phases before that of the task have ended.
pub(crate) unsafe fn task(cx: &Context<'_>, task: &Task, scratch: *mut f32) {
    // SAFETY: the caller's promise; every region is used within its size in the layout.
    unsafe {
        let work = TaskState::new(cx, task.rows, scratch);
        let count = task.rows.count;
        let _unit = TileUnit::configure(work.kernels);
        work.pack_queries();
        work.start(count, task.from);
        let tile_rows = cx.plan.tile_rows();
        let packs = work.k_path.is_packed() || work.v_path.is_packed();
        for block in task.blocks.0..task.blocks.1 {
            let partials = match task.target {
                Target::Blocks(base) => {
                    let slot = base + (block - task.blocks.0) * count;
                    cx.slots.clear(slot, count);
                    Some(slot)
                }
                Target::Out | Target::State(_) => None,
            };
            let mut packed = !packs;
            for row in (0..count).step_by(tile_rows) {
                let Some(tile) = work.tile(row..(row + tile_rows).min(count), block) else { continue };
                // Only here is it known that some tile needs the block.
                if !packed {
                    let columns = work.columns(&(0..count), block);
                    if work.k_path.is_packed() {
                        (work.kernels.pack_keys)(&work, block, &columns);
                    }
                    if work.v_path.is_packed() {
                        work.pack_values(block, &columns);
                    }
                    packed = true;
                }
                work.attend(&tile, partials);
            }
        }
        work.end(0, count, task.target);
    }
}

/// Folds the partial results of a task that was cut into the state of its rows, in key order.
///
/// # Safety
/// As [`task`], once every task of the phase has run.
pub(crate) unsafe fn reduce(cx: &Context<'_>, task: &Reduction, scratch: *mut f32) {
    // SAFETY: the caller's promise; the state and the partials of all blocks are there.
    unsafe {
        let work = TaskState::new(cx, task.rows, scratch);
        let tile_rows = cx.plan.tile_rows();
        for row in (0..task.rows.count).step_by(tile_rows) {
            let rows = tile_rows.min(task.rows.count - row);
            work.start(rows, Some(task.from + row));
            work.pad_block_statistics(rows);
            for block in 0..task.blocks {
                let at = task.partials + block * task.rows.count + row;
                let values = cx.slots.statistics(at, rows, (work.block_max, work.block_sum));
                (work.kernels.fold)(rows, &Fold { values, ..work.fold_at(0) });
            }
            work.end(row, rows, task.target);
        }
    }
}
