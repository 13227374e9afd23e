//! The rows of a task: which queries they are, which keys they see, and where their scores lie.

#![allow(unsafe_code)]

use super::codes::CodeRows;
use super::mask::{MaskTable, MaskTile};
use super::mat::MatMut;
use super::pack::HeadRows;
use crate::plan::{Rows, sequence_of, spans};
use flashtile_core::block_tables::BlockTables;
use flashtile_core::codec::KvView;
use flashtile_core::inputs::Inputs;
use flashtile_core::isa::IsaToken;
use flashtile_core::problem::{Problem, Sequence};
use flashtile_core::scoring::{Scoring, alibi_rate};
use flashtile_core::tensor::MaskRow;
use std::cell::Cell;
use std::ops::Range;

/// The inputs of a run, for all of its tasks, checked against the problem.
pub(crate) struct RunInputs<'a> {
    pub(crate) problem: &'a Problem,
    /// False if every tile is computed, those without visible keys too.
    pub(crate) skip_tiles: bool,
    /// Keys of a block.
    pub(crate) block_k: usize,
    /// Token of the instruction set that codecs use.
    pub(crate) token: IsaToken,
    pub(crate) inputs: &'a Inputs<'a>,
    /// Scoring of the problem over the inputs.
    pub(crate) scoring: Scoring<'a>,
    pub(crate) mask: Option<MaskTable<'a>>,
}

/// A row of q.
pub(crate) struct Query<'a> {
    /// Index of its sequence.
    pub(crate) index: usize,
    pub(crate) sequence: &'a Sequence,
    /// Position in its sequence.
    pub(crate) position: usize,
    pub(crate) head: usize,
}

/// Rows of the task, and the columns of a block that some of them see.
pub(crate) struct Tile {
    pub(crate) rows: Range<usize>,
    pub(crate) block: usize,
    pub(crate) columns: Range<usize>,
    /// True if causality, window and length let every row see every column.
    pub(crate) full: bool,
    pub(crate) mask: MaskTile,
}

/// The rows of a task, and the memory of their scores.
pub(crate) struct ScoreTask<'a> {
    pub(crate) run: &'a RunInputs<'a>,
    pub(crate) rows: Rows,
    /// Sequence of the first row.
    pub(crate) sequence: &'a Sequence,
    /// Query heads of a key/value head.
    pub(crate) gqa_group: usize,
    pub(crate) memory: ScoreMemory,
    /// True if keys are elements that are read in place.
    pub(crate) streams_keys: bool,
    /// Set once the packed query of some row has another factor than the scale of the scores
    /// ([`ScaleFactors`](super::scale::ScaleFactors)).
    pub(crate) has_score_factors: Cell<bool>,
}

/// Scratch memory of the scores of a task.
#[derive(Clone, Copy)]
pub(crate) struct ScoreMemory {
    /// Packed queries `[packed_rows, depth]`.
    pub(crate) packed_q: *mut f32,
    /// Rows that `packed_q` has memory for: a task's, and at least [`STREAM_ROWS`](crate::plan::STREAM_ROWS).
    pub(crate) packed_rows: usize,
    /// Packed keys of a block, `[panels][depth][panel width]`; or the memory of a task that reads keys in place.
    pub(crate) packed_k: *mut f32,
    /// Scores of a tile, later probabilities: `[tile rows, block_k]`. The probability of column `c` is in f32 `c / PER_F32` of its row
    /// ([`Products::PER_F32`](super::products::Products::PER_F32)).
    pub(crate) scores: MatMut,
    /// `q . k_mean` of each row, in units of the scores: stored keys lack this part. Empty unless quantized.
    pub(crate) mean_scores: *mut f32,
    /// Memory for decoded rows and integer operands. Empty unless keys or values are quantized.
    pub(crate) codes: *mut f32,
}

/// Keys or values of the head of a task.
#[derive(Clone, Copy)]
pub(crate) enum Stored<'a> {
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
    pub(crate) fn nearest(&self, problem: &Problem) -> i64 {
        let own = self.own_key();
        let seen = problem.seen(self.sequence, self.position);
        if seen.is_empty() { own } else { own.clamp(seen.start as i64, seen.end as i64 - 1) }
    }

    /// The bias of [`Query::nearest`], which all scores lack.
    pub(crate) fn alibi_shift(&self, problem: &Problem, slope: f32) -> f64 {
        alibi_rate::<f64>(slope) * self.own_key().abs_diff(self.nearest(problem)) as f64
    }

    /// Its position, counted in keys.
    #[inline]
    pub(crate) fn own_key(&self) -> i64 {
        self.position as i64 + self.sequence.q_offset
    }

    /// Keys that it sees.
    pub(crate) fn seen_keys<'a>(&self, run: &RunInputs<'a>) -> SeenKeys<'a> {
        let Sequence { q_start, q_len, kv_len, .. } = *self.sequence;
        SeenKeys {
            band: run.problem.seen(self.sequence, self.position),
            mask: run.scoring.mask.map(|mask| mask.row(self.index, self.head, self.position)),
            tree: run.scoring.tree.map(|tree| tree.row(0, 0, q_start + self.position)),
            q_len,
            kv_len,
        }
    }
}

/// Keys that a query sees.
pub(crate) struct SeenKeys<'a> {
    /// Keys that it sees by causality, window and length, in any storage.
    band: Range<usize>,
    mask: Option<MaskRow<'a>>,
    tree: Option<MaskRow<'a>>,
    q_len: usize,
    kv_len: usize,
}

impl SeenKeys<'_> {
    /// True if the query sees a key.
    #[inline]
    pub(crate) fn contains(&self, j: usize) -> bool {
        self.band.contains(&j) && !self.is_masked(j)
    }

    /// The keys, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> {
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

impl<'a> ScoreTask<'a> {
    /// The task of some rows, which does not stream its keys yet.
    pub(crate) fn new(run: &'a RunInputs<'a>, rows: Rows, memory: ScoreMemory) -> Self {
        Self {
            run,
            rows,
            sequence: &run.problem.sequences()[rows.sequence],
            gqa_group: run.problem.dims().gqa_group(),
            memory,
            streams_keys: false,
            has_score_factors: Cell::new(false),
        }
    }

    /// Query row, counted from the first of the task's first sequence, and query head of row `row` of the task.
    #[inline]
    pub(crate) fn place(&self, row: usize) -> (usize, usize) {
        let at = self.rows.first + row;
        // Divisions take as long as a short row.
        if self.gqa_group == 1 {
            return (at, self.rows.kv_head);
        }
        (at / self.gqa_group, self.rows.kv_head * self.gqa_group + at % self.gqa_group)
    }

    /// The query of a row of the task.
    #[inline]
    pub(crate) fn query(&self, row: usize) -> Query<'a> {
        let (i, head) = self.place(row);
        let problem = self.run.problem;
        let index = sequence_of(problem, self.rows.sequence, self.sequence.q_start + i);
        let sequence = &problem.sequences()[index];
        Query { index, sequence, position: self.sequence.q_start + i - sequence.q_start, head }
    }

    /// Sequences that have some rows of the task, and their positions.
    fn spans(&self, rows: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + use<'a> {
        let first = self.rows.first;
        spans(self.run.problem, self.rows.sequence, first + rows.start..first + rows.end)
    }

    /// Columns of a block that some of the rows see, or all that are kept where tiles are not skipped.
    pub(crate) fn columns(&self, rows: &Range<usize>, block: usize) -> Range<usize> {
        let (problem, block_k) = (self.run.problem, self.run.block_k);
        let clip = |keys: Range<usize>| clip(&keys, block * block_k, block_k);
        if !self.run.skip_tiles {
            // Sequences that share a page may keep different tokens of it.
            let kept = |tables: &BlockTables| self.spans(rows).map(|(s, _)| tables.first[s]).min();
            let first = self.run.inputs.tables.and_then(kept).unwrap_or(0);
            let stored = problem.stored(self.sequence);
            return clip(first.max(stored.start)..stored.end);
        }
        let sequences = problem.sequences();
        let seen = self.spans(rows).map(|(s, positions)| problem.visible_union(&sequences[s], positions));
        let seen = seen.map(clip).filter(|columns| !columns.is_empty());
        seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }

    /// The tile of some rows in a block, `None` where no row sees a key.
    pub(crate) fn tile(&self, rows: Range<usize>, block: usize) -> Option<Tile> {
        let columns = self.columns(&rows, block);
        if columns.is_empty() {
            return None;
        }
        let skip = self.run.skip_tiles;
        let mask = match &self.run.mask {
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
            let sees = |i: usize| self.visible_columns(&self.run.problem.sequences()[s], i, block);
            sees(positions.start).end >= columns.end && sees(positions.end - 1).start <= columns.start
        });
        Some(Tile { rows, block, columns, full, mask })
    }

    /// Columns of a block that a position of a sequence sees.
    #[inline]
    pub(crate) fn visible_columns(&self, sequence: &Sequence, i: usize, block: usize) -> Range<usize> {
        clip(&self.run.problem.visible(sequence, i), block * self.run.block_k, self.run.block_k)
    }

    fn stored(&self, of: &'a KvView<'a>) -> Stored<'a> {
        let (s, head) = (self.sequence, self.rows.kv_head);
        match (of, self.run.inputs.tables) {
            (KvView::Elements(tensor), None) => {
                Stored::Elements(HeadRows::of_tensor(tensor, s.batch, head, s.kv_start))
            }
            (KvView::Elements(tensor), Some(tables)) => {
                Stored::Elements(HeadRows::of_pages(tensor, head, tables, self.rows.sequence))
            }
            (KvView::Codes(codes), Some(tables)) => {
                Stored::Codes(CodeRows::new(self.run.token, codes, head, tables, self.rows.sequence))
            }
            (KvView::Codes(_), None) => {
                unreachable!("codes are of cached sequences: the inputs were checked")
            }
        }
    }

    /// Keys of the task's head.
    pub(crate) fn keys(&self) -> Stored<'a> {
        self.stored(&self.run.inputs.k)
    }

    /// Values of the task's head.
    pub(crate) fn values(&self) -> Stored<'a> {
        self.stored(&self.run.inputs.v)
    }

    /// Keys of the task's head, in a phase of keys that are elements.
    pub(crate) fn key_elements(&self) -> HeadRows<'a> {
        self.keys().elements()
    }

    /// Keys of the task's head, in a phase of keys that are codes.
    pub(crate) fn key_codes(&self) -> CodeRows<'a> {
        self.keys().codes()
    }

    /// Values of the task's head, in a phase of values that are elements.
    pub(crate) fn value_elements(&self) -> HeadRows<'a> {
        self.values().elements()
    }

    /// Values of the task's head, in a phase of values that are codes.
    pub(crate) fn value_codes(&self) -> CodeRows<'a> {
        self.values().codes()
    }

    /// Columns of the tile that a tree mask decides on, and the tree's column for the first of them. Tiles of several
    /// sequences have none.
    #[inline]
    pub(crate) fn tree_columns(&self, tile: &Tile) -> (Range<usize>, usize) {
        if self.run.scoring.tree.is_none() {
            return (0..0, 0);
        }
        let first = tile.block * self.run.block_k;
        let tree = self.sequence.kv_len - self.sequence.q_len;
        let columns = clip(&(tree..self.sequence.kv_len), first, self.run.block_k);
        let columns = columns.start.max(tile.columns.start)..columns.end.min(tile.columns.end);
        if columns.is_empty() { (0..0, 0) } else { (columns.clone(), first + columns.start - tree) }
    }

    /// The row of the tree mask of a query.
    #[inline]
    pub(crate) fn tree_row(&self, query: &Query<'_>) -> Option<MaskRow<'_>> {
        Some(self.run.scoring.tree.as_ref()?.row(0, 0, query.sequence.q_start + query.position))
    }

    /// Factor from `q . k` to units of log2, or of the softcap. Folded into the queries, except where they are pairs of bf16,
    /// which would be rounded again.
    pub(crate) fn score_scale(&self) -> f32 {
        self.run.scoring.log2_factors().scale
    }

    /// `q . k_mean` of each row of the task, where keys are stored without their mean.
    pub(crate) fn mean_scores(&self) -> Option<*const f32> {
        match &self.run.inputs.k {
            KvView::Codes(codes) => {
                codes.mean(self.rows.kv_head).map(|_| self.memory.mean_scores.cast_const())
            }
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
