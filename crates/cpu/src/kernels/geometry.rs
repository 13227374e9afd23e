//! The geometry of a task: which queries its rows are, and which keys they see.

#![allow(unsafe_code)]

use super::codes::CodeRows;
use super::mask::MaskTile;
use super::mat::{MatMut, RowMaxSum};
use super::pack::HeadRows;
use super::state::{CodePhases, Context, Path, Query, TaskState, Tile};
use crate::plan::{Rows, STREAM_ROWS, sequence_of, spans};
use flashtile_core::block_tables::BlockTables;
use flashtile_core::codec::KvView;
use flashtile_core::problem::{Problem, Sequence};
use flashtile_core::scoring::alibi_rate;
use flashtile_core::tensor::MaskRow;
use std::cell::Cell;
use std::ops::Range;

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

impl Query<'_> {
    /// The position from which ALiBi counts distances: the nearest key that the row sees. Its own distance is common to all keys and changes
    /// no probability, but could use up the digits of f32.
    pub(super) fn nearest(&self, problem: &Problem) -> i64 {
        let own = self.own_key();
        let seen = problem.visible(self.sequence, self.position);
        if seen.is_empty() { own } else { own.clamp(seen.start as i64, seen.end as i64 - 1) }
    }

    /// The bias of [`Query::nearest`], which all scores lack.
    pub(super) fn alibi_shift(&self, problem: &Problem, slope: f32) -> f64 {
        alibi_rate::<f64>(slope) * self.own_key().abs_diff(self.nearest(problem)) as f64
    }

    /// Its position, counted in keys.
    #[inline]
    pub(super) fn own_key(&self) -> i64 {
        self.position as i64 + self.sequence.q_offset
    }

    /// Keys that it sees.
    pub(super) fn seen_keys<'a>(&self, cx: &Context<'a>) -> SeenKeys<'a> {
        let Sequence { q_start, q_len, kv_len, .. } = *self.sequence;
        SeenKeys {
            band: cx.plan.problem().visible(self.sequence, self.position),
            mask: cx.scoring.mask.map(|mask| mask.row(self.index, self.head, self.position)),
            tree: cx.scoring.tree.map(|tree| tree.row(0, 0, q_start + self.position)),
            q_len,
            kv_len,
        }
    }
}

/// Keys that a query sees.
pub(super) struct SeenKeys<'a> {
    /// Keys that it sees by causality, window and length.
    band: Range<usize>,
    mask: Option<MaskRow<'a>>,
    tree: Option<MaskRow<'a>>,
    q_len: usize,
    kv_len: usize,
}

impl SeenKeys<'_> {
    /// True if the query sees a key.
    #[inline]
    pub(super) fn contains(&self, j: usize) -> bool {
        self.band.contains(&j) && !self.is_masked(j)
    }

    /// The keys, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        self.band.clone().filter(|&j| !self.is_masked(j))
    }

    /// True if the mask or the tree mask hides a key of the band.
    fn is_masked(&self, j: usize) -> bool {
        debug_assert!(j < self.kv_len);
        // SAFETY: the inputs were checked against the problem: masks have an element for every key of a sequence, tree masks for every
        // key of its step. `j` is in the band, which ends at `kv_len`, so that `column` is below `q_len`.
        let hides = |row: MaskRow<'_>, j: usize| unsafe { row.bias(j) == f32::NEG_INFINITY };
        let column = (j + self.q_len).checked_sub(self.kv_len);
        self.mask.is_some_and(|mask| hides(mask, j))
            || self.tree.zip(column).is_some_and(|(tree, column)| hides(tree, column))
    }
}

impl<'a> TaskState<'a> {
    /// # Safety
    /// `scratch` is valid for the plan's scratch layout.
    pub(super) unsafe fn new(cx: &'a Context<'a>, rows: Rows, scratch: *mut f32) -> Self {
        let layout = cx.plan.scratch();
        let sequence = &cx.plan.problem().sequences()[rows.sequence];
        let (tile_stats, row_stats) = (layout.tile_stats, layout.row_stats);
        let (stride, block_k, tile_rows) = (cx.plan.value_stride(), cx.plan.block_k(), cx.plan.tile_rows());
        // SAFETY: every offset is the start of a region of the layout, which has the rows and columns.
        unsafe {
            let stats = scratch.add(layout.stats);
            let block_stats = stats.add(2 * row_stats);
            Self {
                cx,
                kernels: &cx.kernels,
                rows,
                sequence,
                packed_q: scratch.add(layout.q),
                packed_k: scratch.add(layout.k),
                packed_v: MatMut::new(scratch.add(layout.v), stride, block_k, stride),
                scores: MatMut::new(scratch.add(layout.scores), block_k, tile_rows, block_k),
                block_out: MatMut::new(scratch.add(layout.partial), stride, tile_rows, stride),
                acc: MatMut::new(scratch.add(layout.acc), stride, cx.plan.task_rows(), stride),
                max_sum: RowMaxSum { max: stats, sum: stats.add(row_stats) },
                block_max_sum: RowMaxSum { max: block_stats, sum: block_stats.add(tile_stats) },
                stride,
                block_k,
                gqa_group: cx.plan.problem().dims().gqa_group(),
                mean_scores: scratch.add(layout.mean_scores),
                codes: scratch.add(layout.codes),
                k_path: Path::Packed,
                v_path: Path::Packed,
                has_score_factors: Cell::new(false),
            }
            .with_paths()
        }
    }

    /// Chooses how keys and values are read.
    ///
    /// Elements: a task of at most [`STREAM_ROWS`] rows streams, with the bits of packing. Codes: their products round differently from products of
    /// decoded rows, so the choice must not depend on how rows are cut into tasks. Integer products take any number of rows, of shared
    /// prefixes too. For other products in place, the rows of the whole sequence decide, and a plan with shared prefixes decodes and packs
    /// instead. Codes that no products take are packed however few the rows are.
    fn with_paths(mut self) -> Self {
        let few_rows = self.cx.plan.has_few_rows(self.sequence);
        let path_of_codes = |rows: CodeRows<'_>| {
            let takes = |phases: &&CodePhases| {
                (few_rows || phases.takes_any_rows) && (phases.takes)(rows.coder(), rows.dim())
            };
            self.kernels.code_phases.iter().find(takes).map_or(Path::Packed, |phases| Path::Codes(*phases))
        };
        let path = |stored| match stored {
            Stored::Elements(_) if self.rows.count <= STREAM_ROWS => Path::Stream,
            Stored::Elements(_) => Path::Packed,
            Stored::Codes(rows) => path_of_codes(rows),
        };
        (self.k_path, self.v_path) = (path(self.keys()), path(self.values()));
        self
    }

    /// Query row, counted from the first of the task's first sequence, and query head of row `row` of the task.
    #[inline]
    pub(super) fn place(&self, row: usize) -> (usize, usize) {
        let at = self.rows.first + row;
        // Divisions take as long as a short row.
        if self.gqa_group == 1 {
            return (at, self.rows.kv_head);
        }
        (at / self.gqa_group, self.rows.kv_head * self.gqa_group + at % self.gqa_group)
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
    pub(super) fn columns(&self, rows: &Range<usize>, block: usize) -> Range<usize> {
        let plan = self.cx.plan;
        let clip = |keys: Range<usize>| clip(&keys, block * self.block_k, self.block_k);
        if !plan.options().skip_tiles {
            // Sequences that share a page may keep different tokens of it.
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
    pub(super) fn tile(&self, rows: Range<usize>, block: usize) -> Option<Tile> {
        let columns = self.columns(&rows, block);
        if columns.is_empty() {
            return None;
        }
        let skip = self.cx.plan.options().skip_tiles;
        let mask = match &self.cx.mask {
            None => MaskTile::Full,
            Some(_) if !skip => MaskTile::Partial,
            Some(table) => {
                let first = self.rows.kv_head * self.gqa_group;
                let mask_tiles = self.spans(&rows);
                let mask_tiles =
                    mask_tiles.map(|(s, i)| table.tile(s, first..first + self.gqa_group, i, block));
                mask_tiles.reduce(MaskTile::and).unwrap_or(MaskTile::Partial)
            }
        };
        if skip && mask == MaskTile::Skip {
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
                Stored::Elements(HeadRows::of_tensor(tensor, s.batch, head, s.kv_start))
            }
            (KvView::Elements(tensor), Some(tables)) => {
                Stored::Elements(HeadRows::of_pages(tensor, head, tables, self.rows.sequence))
            }
            (KvView::Codes(codes), Some(tables)) => {
                Stored::Codes(CodeRows::new(self.cx.token, codes, head, tables, self.rows.sequence))
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

    /// Columns of the tile that a tree mask decides on, and the tree's column for the first of them. Tiles of several
    /// sequences have none.
    #[inline]
    pub(super) fn tree_columns(&self, tile: &Tile) -> (Range<usize>, usize) {
        if self.cx.scoring.tree.is_none() {
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
    pub(super) fn tree_row(&self, query: &Query<'_>) -> Option<MaskRow<'_>> {
        Some(self.cx.scoring.tree.as_ref()?.row(0, 0, query.sequence.q_start + query.position))
    }

    /// Factor from `q . k` to units of log2, or of the softcap. Folded into the queries, except where they are pairs of bf16,
    /// which would be rounded again.
    pub(super) fn score_scale(&self) -> f32 {
        self.cx.scoring.log2_factors().scale
    }

    /// `q . k_mean` of each row of the task, where keys are stored without their mean.
    pub(super) fn mean_scores(&self) -> Option<*const f32> {
        match &self.cx.inputs.k {
            KvView::Codes(codes) => codes.mean(self.rows.kv_head).map(|_| self.mean_scores.cast_const()),
            KvView::Elements(_) => None,
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
