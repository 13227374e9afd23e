//! The forward kernel: one task, and the reduction of split tasks.

#![allow(unsafe_code)]

use super::Context;
use super::codes::{self, CodeRows, Operands as Operands16};
use super::gemm::{Operands, Source, gemm};
use super::mask::Class;
use super::pack::{self, HeadRows, Run};
use super::softmax::{self, Fold, Modifiers};
use super::{stream, tiles};
use crate::cpu::simd::{Elem, Simd, TILE, store_row, with_elem};
use crate::plan::{Reduction, Rows, Target, Task, sequence_of, spans, visible_union};
use crate::problem::Sequence;
use crate::tensor::MaskRow;
use crate::{BlockTables, KvView};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Bytes of values that a streaming task uses at a time: while one part of their columns is read, the others stay in the
/// first-level cache.
const STREAM_BYTES: usize = 16 << 10;

/// Most runs of values that are multiplied at once. More of them take several products, which go on with the same sums.
const MAX_RUNS: usize = 16;

/// Rows, and the memory of the thread that computes them.
struct Work<'a> {
    cx: &'a Context<'a>,
    of: Rows,
    /// The first row's.
    sequence: &'a Sequence,
    q: *mut f32,
    k: *mut f32,
    packed_v: *mut f32,
    scores: *mut f32,
    values: *mut f32,
    acc: *mut f32,
    /// Running statistics of every row, each padded to whole vectors.
    max: *mut f32,
    sum: *mut f32,
    /// Statistics of the block for the rows of a tile.
    block_max: *mut f32,
    block_sum: *mut f32,
    stride: usize,
    block_k: usize,
    group: usize,
    /// Of each row, what the mean of quantized keys adds to its scores.
    offsets: *mut f32,
    /// Memory for codes.
    codes: *mut f32,
    /// How keys and values are read.
    k_path: Path,
    v_path: Path,
}

/// How the keys or values of a task are read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Path {
    /// A block at a time is packed.
    Packed,
    /// Elements, from where they lie.
    Stream,
    /// Codes in integers, from where they lie.
    Integers,
    /// Codes of a byte in f32, from where they lie.
    Numbers,
}

/// Keys or values of the head of a task.
#[derive(Clone, Copy)]
enum Stored<'a> {
    Elements(HeadRows<'a>),
    Codes(CodeRows<'a>),
}

/// A row of q.
struct Query<'a> {
    index: usize,
    sequence: &'a Sequence,
    position: usize,
    head: usize,
}

/// A tile: rows of the task, and the columns of the block that some of them see.
struct Tile {
    rows: Range<usize>,
    block: usize,
    columns: Range<usize>,
    /// Whether every row sees every column as far as causality, window and length go.
    full: bool,
    mask: Class,
}

impl<'a> Work<'a> {
    /// # Safety
    /// `scratch` is valid for the plan's scratch layout.
    #[inline(always)]
    unsafe fn new<S: Simd>(cx: &'a Context<'a>, of: Rows, scratch: *mut f32) -> Self {
        let layout = cx.plan.scratch();
        let sequence = &cx.plan.problem().sequences()[of.sequence];
        let (tile, rows) = (layout.tile_stats, layout.row_stats);
        // SAFETY: regions of the layout.
        unsafe {
            let stats = scratch.add(layout.stats);
            Self {
                cx,
                of,
                sequence,
                q: scratch.add(layout.q),
                k: scratch.add(layout.k),
                packed_v: scratch.add(layout.v),
                scores: scratch.add(layout.scores),
                values: scratch.add(layout.partial),
                acc: scratch.add(layout.acc),
                max: stats,
                sum: stats.add(rows),
                block_max: stats.add(2 * rows),
                block_sum: stats.add(2 * rows + tile),
                stride: cx.plan.value_stride(),
                block_k: cx.plan.block_k(),
                group: cx.plan.problem().dims().group(),
                offsets: scratch.add(layout.codes),
                codes: scratch.add(layout.codes + rows),
                k_path: Path::Packed,
                v_path: Path::Packed,
            }
            .with_paths::<S>()
        }
    }

    /// Few rows are computed without packing. Whether codes are depends on the sequence alone, not on how its rows are cut into
    /// tasks: the bits differ.
    fn with_paths<S: Simd>(mut self) -> Self {
        let plan = self.cx.plan;
        let few = self.sequence.q_len * self.group <= stream::MAX_ROWS && plan.prefixes().is_empty();
        let integers = S::INTEGERS && plan.multiplies_integers() && few;
        let path = |stored| match stored {
            Stored::Elements(_) if self.of.count <= stream::MAX_ROWS => Path::Stream,
            Stored::Codes(rows) if integers && rows.can_be_integers() => Path::Integers,
            Stored::Codes(rows) if S::NUMBERS && few && rows.can_be_numbers() => Path::Numbers,
            _ => Path::Packed,
        };
        (self.k_path, self.v_path) = (path(self.keys()), path(self.values_of_head()));
        self
    }

    /// Row of q, counted from the first row's sequence, and query head of a row of the task.
    #[inline(always)]
    fn place(&self, row: usize) -> (usize, usize) {
        let at = self.of.first + row;
        (at / self.group, self.of.kv_head * self.group + at % self.group)
    }

    /// Sequence, its index, position in it, and query head of a row of the task.
    #[inline(always)]
    fn query(&self, row: usize) -> Query<'a> {
        let (i, head) = self.place(row);
        let problem = self.cx.plan.problem();
        let index = sequence_of(problem, self.of.sequence, self.sequence.q_start + i);
        let sequence = &problem.sequences()[index];
        Query { index, sequence, position: self.sequence.q_start + i - sequence.q_start, head }
    }

    /// Sequences that have some rows of the task, and their positions.
    fn spans(&self, rows: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + use<'a> {
        let first = self.of.first;
        spans(self.cx.plan.problem(), self.of.sequence, first + rows.start..first + rows.end)
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
            self.spans(rows).map(|(s, positions)| visible_union(plan.problem(), &sequences[s], positions));
        let seen = seen.map(clip).filter(|columns| !columns.is_empty());
        seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }

    /// The tile of some rows in a block, `None` where no row sees a key.
    #[inline(always)]
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
                let first = self.of.kv_head * self.group;
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
    #[inline(always)]
    fn visible_columns(&self, sequence: &Sequence, i: usize, block: usize) -> Range<usize> {
        clip(&self.cx.plan.problem().visible(sequence, i), block * self.block_k, self.block_k)
    }

    /// Rows of k or v.
    #[inline(always)]
    fn stored(&self, of: &'a KvView<'a>) -> Stored<'a> {
        let (s, head) = (self.sequence, self.of.kv_head);
        match (of, self.cx.inputs.tables) {
            (KvView::Elements(tensor), None) => {
                Stored::Elements(HeadRows::of_tensor(tensor, [s.batch, head, s.kv_start]))
            }
            (KvView::Elements(tensor), Some(tables)) => {
                Stored::Elements(HeadRows::of_pages(tensor, head, tables, self.of.sequence))
            }
            (KvView::Codes(codes), Some(tables)) => {
                Stored::Codes(CodeRows::new(codes, head, tables, self.of.sequence))
            }
            (KvView::Codes(_), None) => {
                unreachable!("codes are of cached sequences: the inputs were checked")
            }
        }
    }

    #[inline(always)]
    fn keys(&self) -> Stored<'a> {
        self.stored(&self.cx.inputs.k)
    }

    #[inline(always)]
    fn values_of_head(&self) -> Stored<'a> {
        self.stored(&self.cx.inputs.v)
    }

    #[inline(always)]
    fn operands(&self) -> Operands16 {
        Operands16::new(self.codes, self.cx.plan.problem().dims().head_dim)
    }

    /// Columns of the tile that a tree mask decides on, and the tree's column for the first of them. Tiles of several
    /// sequences have none.
    #[inline(always)]
    fn tree_columns(&self, tile: &Tile) -> (Range<usize>, usize) {
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
    #[inline(always)]
    fn tree_row(&self, query: &Query<'_>) -> Option<MaskRow> {
        Some(self.cx.inputs.tree.as_ref()?.row(0, 0, query.sequence.q_start + query.position))
    }

    /// What brings `q . k` to units of log2, or of the softcap. Folded into the queries, but for pairs of bf16, which would
    /// be rounded again.
    fn score_scale(&self) -> f32 {
        let problem = self.cx.plan.problem();
        match problem.desc().softcap {
            Some(cap) => problem.scale() / cap,
            None => problem.scale() * LOG2_E,
        }
    }

    /// # Safety
    /// As [`Simd`].
    #[inline(always)]
    unsafe fn pack_queries<S: Simd>(&self) {
        let head_dim = self.cx.plan.problem().dims().head_dim;
        let (scale, depth) = (self.score_scale(), depth::<S>(head_dim));
        let q = &self.cx.inputs.q;
        for row in 0..self.of.count {
            let (i, h) = self.place(row);
            let src = q.row(self.sequence.batch, h, self.sequence.q_start + i);
            // SAFETY: the row exists, and the region holds task_rows rows.
            unsafe { pack::query::<S>(q.dtype(), src, head_dim, scale, self.q.add(row * depth)) }
        }
        let KvView::Codes(codes) = &self.cx.inputs.k else { return };
        let mean = codes.mean(self.of.kv_head);
        for row in 0..self.of.count {
            // SAFETY: the packed query, and the offset of each row.
            unsafe {
                let query = std::slice::from_raw_parts_mut(self.q.add(row * depth), head_dim);
                if let Some(mean) = mean {
                    let products = query.iter().zip(mean).map(|(q, mean)| f64::from(*q) * f64::from(*mean));
                    *self.offsets.add(row) = products.sum::<f64>() as f32;
                }
                if let Some(rotation) = codes.coder().rotation() {
                    crate::codec::rotate(rotation, query);
                }
            }
        }
        if self.k_path == Path::Integers {
            // SAFETY: the queries are packed.
            unsafe { self.operands().set_queries(self.q, depth, self.of.count) }
        }
    }

    /// What the mean of quantized keys adds to the scores of each row of the task, where there is one.
    #[inline(always)]
    fn added(&self) -> Option<*const f32> {
        match &self.cx.inputs.k {
            KvView::Codes(codes) if codes.mean(self.of.kv_head).is_some() => Some(self.offsets),
            _ => None,
        }
    }

    /// Clears the running state.
    ///
    /// # Safety
    /// As [`Simd`].
    #[inline(always)]
    unsafe fn clear<S: Simd>(&self, rows: usize) {
        // SAFETY: the regions hold task_rows rows, statistics rounded up to whole vectors.
        unsafe {
            for c in (0..rows * self.stride).step_by(S::LANES) {
                S::store(self.acc.add(c), S::splat(0.0));
            }
            for r in (0..rows).step_by(S::LANES) {
                S::store(self.max.add(r), S::splat(f32::NEG_INFINITY));
                S::store(self.sum.add(r), S::splat(0.0));
            }
        }
    }

    /// Packs the panels of a block's keys that hold `columns`.
    ///
    /// # Safety
    /// As [`Simd`]; the keys `columns` of the block exist.
    #[inline(always)]
    unsafe fn pack_keys<S: Simd>(&self, block: usize, columns: &Range<usize>) {
        let width = S::VECTORS * S::LANES;
        let depth = depth::<S>(self.cx.plan.problem().dims().head_dim);
        for panel in panels::<S>(columns) {
            // SAFETY: the caller's promise; the region holds every panel of a block.
            unsafe {
                let (dst, first) = (self.k.add(panel * width * depth), block * self.block_k);
                match self.keys() {
                    Stored::Elements(k) => pack::key_panel::<S>(k, first, panel, columns, dst),
                    Stored::Codes(k) => codes::key_panel::<S>(k, (first, panel), columns, self.codes, dst),
                }
            }
        }
    }

    /// Scores of a tile, in units of log2 (or of the softcap).
    ///
    /// # Safety
    /// As [`Simd`]; queries are packed, and the block's keys too unless the task reads them where they lie.
    #[inline(always)]
    unsafe fn scores<S: Simd>(&self, tile: &Tile) {
        let depth = depth::<S>(self.cx.plan.problem().dims().head_dim);
        let width = S::VECTORS * S::LANES;
        // SAFETY: rows of the task; the score tile holds block_k columns of each row.
        unsafe {
            let a = self.q.add(tile.rows.start * depth).cast_const();
            let first = tile.block * self.block_k;
            if let (Path::Integers, Stored::Codes(k)) = (self.k_path, self.keys()) {
                let c = (self.scores, self.block_k);
                return self.operands().scores::<S>(k, (first, &tile.columns), self.k, tile.rows.len(), c);
            }
            if let (Path::Numbers, Stored::Codes(k)) = (self.k_path, self.keys()) {
                let (q, c) = ((a, depth, tile.rows.len()), (self.scores, self.block_k));
                return codes::number_scores::<S>(k, (first, &tile.columns), self.k, q, c);
            }
            if let (Path::Stream, Stored::Elements(k)) = (self.k_path, self.keys()) {
                let (c, rows) = (self.scores, tile.rows.len());
                let scores = stream::Scores { q: a, ldq: depth, rows, c, ldc: self.block_k };
                if S::TILES {
                    tiles::Stream::new(self.k, depth).scores::<S>(k, first, &tile.columns, scores);
                } else {
                    stream::scores::<S>(k, first, &tile.columns, scores);
                }
                return;
            }
            for panel in panels::<S>(&tile.columns) {
                let operands = Operands {
                    a,
                    lda: depth,
                    b: Source::Packed(self.k.add(panel * width * depth).cast_const()),
                    ldb: width,
                    c: self.scores.add(panel * width),
                    ldc: self.block_k,
                    resume: false,
                };
                gemm::<S, f32>((tile.rows.len(), S::VECTORS), depth, operands);
            }
        }
    }

    /// Weights of a tile, and the statistics of its rows.
    ///
    /// # Safety
    /// As [`Simd`]; the scores are there.
    #[inline(always)]
    unsafe fn weights<S: Simd>(&self, tile: &Tile) {
        let step = unit::<S>() * S::LANES;
        let vectors = tile.columns.start / step * step..tile.columns.end.next_multiple_of(step);
        let rows = tile.rows.len();
        let whole = tile.full && vectors == tile.columns;
        let modifies = self.modifies::<S>(tile);
        let (tree, tree_from) = self.tree_columns(tile);
        let added = self.added();
        // SAFETY: the score tile holds block_k columns, a multiple of the lanes, of each row; statistics are padded; a row of
        // the tree has a column for each query of the sequence.
        unsafe {
            for r in 0..rows {
                if whole && !modifies && tree.is_empty() {
                    break;
                }
                let scores = self.scores.add(r * self.block_k);
                let query = self.query(tile.rows.start + r);
                if modifies {
                    let mut modifiers = self.modifiers::<S>(tile, &query);
                    if let (Some(offsets), Some(_)) = (added, modifiers.softcap) {
                        modifiers.offset = *offsets.add(tile.rows.start + r);
                    }
                    softmax::modify::<S>(scores, vectors.clone(), &modifiers);
                }
                let seen = self.visible_columns(query.sequence, query.position, tile.block);
                softmax::hide(
                    scores,
                    vectors.clone(),
                    seen.start.max(tile.columns.start)..seen.end.min(tile.columns.end),
                );
                if let Some(row) = self.tree_row(&query).filter(|_| !tree.is_empty()) {
                    softmax::prune(scores, tree.clone(), row, tree_from);
                }
            }
            let scale = if S::PAIRS && !modifies { self.score_scale() } else { 1.0 };
            let statistics = (self.block_max, self.block_sum);
            softmax::softmax::<S>((self.scores, self.block_k), rows, vectors, statistics, scale);
            // A constant of the row's scores changes no weight; a softcap has it already.
            if let (Some(offsets), None) = (added, self.cx.plan.problem().desc().softcap) {
                for r in 0..rows {
                    *self.block_max.add(r) += *offsets.add(tile.rows.start + r);
                }
            }
            for r in rows..rows.next_multiple_of(S::LANES) {
                *self.block_max.add(r) = f32::NEG_INFINITY;
                *self.block_sum.add(r) = 0.0;
            }
        }
    }

    /// Whether scores of the tile are changed before the softmax, other than by hiding keys.
    #[inline(always)]
    fn modifies<S: Simd>(&self, tile: &Tile) -> bool {
        let desc = self.cx.plan.problem().desc();
        // The largest score is taken before it is scaled, which a scale that is not positive does not allow.
        let scale = S::PAIRS && self.score_scale() <= 0.0;
        desc.softcap.is_some() || desc.alibi || tile.mask != Class::Neutral || scale
    }

    /// What changes the scores of a query.
    #[inline(always)]
    fn modifiers<S: Simd>(&self, tile: &Tile, query: &Query<'_>) -> Modifiers {
        let first = tile.block * self.block_k;
        let mask = match &self.cx.mask {
            Some(table) if tile.mask != Class::Neutral => {
                let row = table.view.row(query.index, query.head, query.position);
                Some((row, first, table.view.shape()[3]))
            }
            _ => None,
        };
        let position = (query.position as i64 + query.sequence.q_offset - first as i64) as f32;
        Modifiers {
            scale: if S::PAIRS { self.score_scale() } else { 1.0 },
            offset: 0.0,
            softcap: self.cx.plan.problem().desc().softcap,
            alibi: self.cx.inputs.alibi_slopes.map(|slopes| (slopes[query.head], position)),
            mask,
        }
    }

    /// Packs the block's values of `columns` to where a whole packed block has them.
    ///
    /// # Safety
    /// As [`Simd`]; the keys `columns` of the block exist.
    #[inline(always)]
    unsafe fn pack_values<S: Simd>(&self, block: usize, columns: Range<usize>) {
        let at = product_columns::<S>(&columns).start / unit::<S>() * self.stride;
        // SAFETY: the caller's promise; the region holds every row of a block.
        unsafe {
            let (first, dst) = (block * self.block_k, self.packed_v.add(at));
            match self.values_of_head() {
                Stored::Elements(v) => pack::values::<S>(v, first, columns, dst),
                Stored::Codes(v) => codes::values::<S>(v, first, columns, dst),
            }
        }
    }

    /// Weighted values of a tile. Where the tile is the only one of its task, values are converted as they are loaded, if
    /// they come in whole vectors; else a few rows at a time are packed and used while they are in the first-level cache.
    ///
    /// # Safety
    /// As [`Simd`]; the weights are there, and the block's values are packed unless the task reads them where they lie.
    #[inline(always)]
    unsafe fn weighted_values<S: Simd>(&self, tile: &Tile) {
        let columns = &product_columns::<S>(&tile.columns);
        let first = tile.block * self.block_k;
        // SAFETY: the caller's promise; rows `columns` of the values exist.
        unsafe {
            match self.values_of_head() {
                Stored::Codes(v) if self.v_path == Path::Integers => {
                    // A weight of 0 leaves out whatever the value is: there is nothing to repair.
                    let weights = (self.scores.cast_const(), self.block_k, tile.rows.len());
                    let c = (self.values, self.stride);
                    return self.operands().values::<S>(v, (first, &tile.columns), self.packed_v, weights, c);
                }
                Stored::Codes(v) if self.v_path == Path::Numbers => {
                    // As of integers.
                    let weights = (self.scores, self.block_k, tile.rows.len());
                    let c = (self.values, self.stride);
                    return codes::number_values::<S>(v, (first, &tile.columns), self.packed_v, weights, c);
                }
                Stored::Elements(v) if self.v_path == Path::Stream => {
                    self.stream_values::<S>(tile, v, columns)
                }
                _ => {
                    let rows = self.packed_v.cast_const().add(columns.start / unit::<S>() * self.stride);
                    self.accumulate::<S, f32>(tile, columns.clone(), Source::Packed(rows), self.stride);
                }
            }
        }
        // The rest of a pair or step that the columns cut has weight 0, as a hidden key has.
        let cut = *columns != tile.columns;
        let prunes = !self.tree_columns(tile).0.is_empty();
        if cut || !tile.full || prunes || tile.mask != Class::Neutral {
            for r in 0..tile.rows.len() {
                // SAFETY: as above.
                unsafe { self.keep_hidden_out::<S>(tile, r) }
            }
        }
    }

    /// Weighted values of elements that are read where they lie.
    ///
    /// # Safety
    /// As [`Work::weighted_values`].
    #[inline(always)]
    unsafe fn stream_values<S: Simd>(&self, tile: &Tile, v: HeadRows<'_>, columns: &Range<usize>) {
        let keys_at_once = (STREAM_BYTES / v.row_bytes()).clamp(16, 64).next_multiple_of(product_keys::<S>());
        let first = tile.block * self.block_k;
        // SAFETY: the caller's promise.
        unsafe {
            if !S::PAIRS && v.tensor.shape()[3] == self.stride && !v.scattered() {
                with_elem!(v.tensor.dtype(), E => {
                    for keys in steps(columns, keys_at_once) {
                        let mut from = keys.start;
                        while from < keys.end {
                            let mut memory = [Run::NONE; MAX_RUNS];
                            let runs = v.runs(first + from, keys.end - from, &mut memory);
                            let to = from + runs.iter().map(|run| run.rows).sum::<usize>();
                            let ldb = v.tensor.strides()[2];
                            self.accumulate::<S, E>(tile, from..to, Source::Stream(runs, 0), ldb);
                            from = to;
                        }
                    }
                });
            } else {
                for keys in steps(columns, keys_at_once) {
                    let seen = keys.start.max(tile.columns.start)..keys.end.min(tile.columns.end);
                    pack::values::<S>(v, first, seen, self.packed_v);
                    let rows = Source::Packed(self.packed_v.cast_const());
                    self.accumulate::<S, f32>(tile, keys, rows, self.stride);
                }
            }
        }
    }

    /// Adds the weighted values of some columns of the tile, of which the first start anew. `rows` are those of the columns,
    /// `ldb` elements from one to the next.
    ///
    /// # Safety
    /// As [`Simd`]; the weights are there, and the values of the columns in whole vectors.
    #[inline(always)]
    unsafe fn accumulate<S: Simd, E: Elem>(
        &self,
        tile: &Tile,
        columns: Range<usize>,
        rows: Source<'_, E>,
        ldb: usize,
    ) {
        let unit = unit::<S>();
        // More rows of a stream than a register tile has share the conversion of its values two vectors at a time; the tile
        // has room for the last group of eight.
        let (rows_of_tile, vectors) = match tile.rows.len() {
            n if n > S::ROWS && S::REGISTERS == 32 && matches!(rows, Source::Stream(..)) => {
                (n.next_multiple_of(8), 2)
            }
            n => (n, S::VECTORS),
        };
        let width = vectors * S::LANES;
        for column in (0..self.stride).step_by(width) {
            let vectors = (self.stride - column).min(width) / S::LANES;
            // SAFETY: the caller's promise; the tile of values holds `stride` columns of each row.
            unsafe {
                let operands = Operands {
                    a: self.scores.add(columns.start / unit),
                    lda: self.block_k,
                    b: match rows {
                        Source::Packed(rows) => Source::Packed(rows.add(column)),
                        Source::Stream(runs, _) => Source::Stream(runs, column),
                    },
                    ldb,
                    c: self.values.add(column),
                    ldc: self.stride,
                    resume: columns.start > tile.columns.start,
                };
                let depth = columns.end.div_ceil(unit) - columns.start / unit;
                gemm::<S, E>((rows_of_tile, vectors), depth, operands);
            }
        }
    }

    /// A hidden key has weight 0, and 0 times a NaN or infinite value is NaN. Where a row that hides keys came out not
    /// finite, sums it again over the keys that it sees, in the same order.
    ///
    /// # Safety
    /// As [`Simd`]; the row's weights and the block's values are there.
    #[inline(always)]
    unsafe fn keep_hidden_out<S: Simd>(&self, tile: &Tile, r: usize) {
        // SAFETY: the row of values holds `stride` elements; value rows and mask elements of visible keys exist.
        unsafe {
            let values = self.values.add(r * self.stride);
            let mut probe = S::splat(0.0);
            for c in (0..self.stride).step_by(S::LANES) {
                probe = S::fma(S::load(values.add(c)), S::splat(0.0), probe);
            }
            if S::reduce_add(probe) == 0.0 {
                return;
            }
            let query = self.query(tile.rows.start + r);
            if self.v_path != Path::Packed {
                self.pack_values::<S>(tile.block, tile.columns.clone());
            }
            let mask = self.modifiers::<S>(tile, &query).mask;
            let seen = self.visible_columns(query.sequence, query.position, tile.block);
            let ((tree, tree_from), tree_row) = (self.tree_columns(tile), self.tree_row(&query));
            for c in (0..self.stride).step_by(S::LANES) {
                let mut sum = S::splat(0.0);
                let (weights, unit) = (self.scores.add(r * self.block_k), unit::<S>());
                let sees = |j: usize| {
                    let hides =
                        |(row, first, _): (MaskRow, usize, usize)| row.bias(first + j) == f32::NEG_INFINITY;
                    let pruned = |row: MaskRow| {
                        tree.contains(&j) && row.bias(tree_from + j - tree.start) == f32::NEG_INFINITY
                    };
                    seen.contains(&j) && !mask.is_some_and(hides) && !tree_row.is_some_and(pruned)
                };
                let mut chains = [S::splat(0.0); 2];
                let columns = product_columns::<S>(&tile.columns);
                for at in columns.start / unit..columns.end / unit {
                    let mut keep = 0u32;
                    for half in 0..unit {
                        if sees(at * unit + half) {
                            keep |= if unit == 2 { 0xffff << (16 * half) } else { u32::MAX };
                        }
                    }
                    let weight = S::splat(*weights.add(at));
                    let value = S::and(S::load(self.packed_v.add(at * self.stride + c)), keep);
                    if !S::TILES {
                        sum = S::mac(weight, value, sum);
                        continue;
                    }
                    tiles::add_pair::<S>(&mut chains, weight, value);
                    if (at + 1) % TILE == 0 {
                        sum = S::add(sum, S::add(chains[0], chains[1]));
                        chains = [S::splat(0.0); 2];
                    }
                }
                S::store(values.add(c), sum);
            }
        }
    }

    /// Result of one tile in one block: folded into the running state, or stored in slots from `partials` on.
    ///
    /// # Safety
    /// As [`Simd`]; queries are packed, and the block too unless the task reads it where it lies.
    #[inline(always)]
    unsafe fn attend<S: Simd>(&self, tile: &Tile, partials: Option<usize>) {
        // SAFETY: the caller's promise.
        unsafe {
            self.scores::<S>(tile);
            self.weights::<S>(tile);
            self.weighted_values::<S>(tile);
            match partials {
                None => softmax::fold::<S>(tile.rows.len(), &self.fold_at(tile.rows.start)),
                Some(slot) => {
                    let statistics = (self.block_max, self.block_sum);
                    self.cx.slots.store(slot + tile.rows.start, tile.rows.len(), self.values, statistics);
                }
            }
        }
    }

    /// Sets the running state of the first `rows` rows to nothing, or to what slots from `from` on hold.
    ///
    /// # Safety
    /// As [`Simd`]; the slots were stored.
    #[inline(always)]
    unsafe fn start<S: Simd>(&self, rows: usize, from: Option<usize>) {
        // SAFETY: the regions hold task_rows rows.
        unsafe {
            match from {
                None => self.clear::<S>(rows),
                Some(slot) => {
                    // Statistics up to a whole vector.
                    for r in rows / S::LANES * S::LANES..rows.next_multiple_of(S::LANES) {
                        (*self.max.add(r), *self.sum.add(r)) = (f32::NEG_INFINITY, 0.0);
                    }
                    self.cx.slots.load(slot, rows, self.acc, (self.max, self.sum));
                }
            }
        }
    }

    /// Writes the running state of the first `rows` rows, those from row `first` of the task on, to where it goes. Partial
    /// results of blocks were stored one by one.
    ///
    /// # Safety
    /// As [`Simd`]; no other thread writes these rows or slots.
    #[inline(always)]
    unsafe fn end<S: Simd>(&self, first: usize, rows: usize, target: Target) {
        // SAFETY: the caller's promise.
        unsafe {
            match target {
                Target::Out => self.finish::<S>(first, rows),
                Target::State(slot) => {
                    self.cx.slots.store(slot + first, rows, self.acc, (self.max, self.sum));
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
    #[inline(always)]
    unsafe fn fold_at(&self, row: usize) -> Fold {
        // SAFETY: the caller's promise.
        unsafe {
            Fold {
                acc: self.acc.add(row * self.stride),
                max: self.max.add(row),
                sum: self.sum.add(row),
                values: self.values,
                block_max: self.block_max,
                block_sum: self.block_sum,
                stride: self.stride,
            }
        }
    }

    /// Writes out and lse of rows `first..first + rows` of the task from the running state of the first `rows` rows.
    ///
    /// # Safety
    /// As [`Simd`]; no other thread writes these rows.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, first: usize, rows: usize) {
        let dims = self.cx.plan.problem().dims();
        let out = self.cx.out;
        for r in 0..rows {
            let (i, h) = self.place(first + r);
            // SAFETY: the state of `rows` rows is there; the row exists in out and lse.
            unsafe {
                let (max, sum) = (f64::from(*self.max.add(r)), f64::from(*self.sum.add(r)));
                let sink = self.cx.inputs.sinks.map_or(f64::NEG_INFINITY, |s| f64::from(s[h]) * LN2_INVERSE);
                let (scale, lse) = finish(max, sum, sink);
                let row = self.sequence.q_start + i;
                let dst = out.row(self.sequence.batch, h, row);
                if let KvView::Codes(codes) = &self.cx.inputs.v
                    && let Some(rotation) = codes.coder().rotation()
                {
                    let values =
                        std::slice::from_raw_parts_mut(self.acc.add(r * self.stride), dims.value_dim);
                    crate::codec::unrotate(rotation, values);
                }
                store_row::<S>(out.dtype(), dst, self.acc.add(r * self.stride), scale, dims.value_dim);
                if !self.cx.lse.is_null() {
                    *self.cx.lse.add((self.sequence.batch * dims.q_heads + h) * dims.q_len + row) = lse;
                }
            }
        }
    }
}

const LN2_INVERSE: f64 = std::f64::consts::LOG2_E;

/// What the accumulated values are multiplied by, and the logsumexp, from statistics in units of log2 and the sink's logit
/// in the same unit (`-inf` without one).
fn finish(max: f64, sum: f64, sink: f64) -> (f32, f32) {
    if sum == 0.0 {
        return (0.0, (sink * std::f64::consts::LN_2) as f32);
    }
    let top = max.max(sink);
    let weight = (max - top).exp2();
    let total = sum * weight + (sink - top).exp2();
    ((weight / total) as f32, (top * std::f64::consts::LN_2 + total.ln()) as f32)
}

/// Elements along a product's depth that take the place of one f32.
#[inline(always)]
fn unit<S: Simd>() -> usize {
    if S::PAIRS { 2 } else { 1 }
}

/// Elements, or pairs of elements, of a row of packed queries or keys: whole steps of them with tiles.
#[inline(always)]
fn depth<S: Simd>(head_dim: usize) -> usize {
    head_dim.div_ceil(unit::<S>()).next_multiple_of(if S::TILES { TILE } else { 1 })
}

/// Keys that a product takes at once: columns in whole multiples of it, those outside with weight and value 0.
#[inline(always)]
fn product_keys<S: Simd>() -> usize {
    if S::TILES { tiles::KEYS } else { unit::<S>() }
}

/// Columns in whole multiples of [`product_keys`].
#[inline(always)]
fn product_columns<S: Simd>(columns: &Range<usize>) -> Range<usize> {
    let whole = product_keys::<S>();
    columns.start / whole * whole..columns.end.next_multiple_of(whole)
}

/// Panels that hold some columns of a block.
#[inline(always)]
fn panels<S: Simd>(columns: &Range<usize>) -> Range<usize> {
    let width = S::VECTORS * S::LANES;
    columns.start / width..columns.end.div_ceil(width)
}

/// Cuts a range at the multiples of `step`.
#[inline(always)]
fn steps(range: &Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let Range { start, end } = *range;
    (start / step..end.div_ceil(step)).map(move |n| start.max(n * step)..end.min((n + 1) * step))
}

/// The part of `keys` inside the block of `len` keys from `first`, counted from `first`.
#[inline(always)]
fn clip(keys: &Range<usize>, first: usize, len: usize) -> Range<usize> {
    let start = keys.start.max(first).min(first + len) - first;
    let end = keys.end.max(first).min(first + len) - first;
    start..end
}

/// Computes one task.
///
/// # Safety
/// As [`Simd`]; the context was checked against its plan, `scratch` is valid for the plan's layout, and no other thread uses
/// it or runs the same task. The phases before that of the task have ended.
#[inline(always)]
pub(in crate::cpu) unsafe fn task<S: Simd>(cx: &Context<'_>, task: &Task, scratch: *mut f32) {
    // SAFETY: the caller's promise; every region is used within its size in the layout.
    unsafe {
        let work = Work::new::<S>(cx, task.rows, scratch);
        let count = task.rows.count;
        S::begin_tiles();
        work.pack_queries::<S>();
        work.start::<S>(count, task.from);
        let tile_rows = cx.plan.tile_rows();
        let packs = [work.k_path, work.v_path].contains(&Path::Packed);
        if S::TILES && work.k_path == Path::Stream {
            let depth = depth::<S>(cx.plan.problem().dims().head_dim);
            tiles::Stream::new(work.k, depth).set_queries::<S>(work.q);
        }
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
                // Only now is it known that some tile needs the block.
                if !packed {
                    let columns = work.columns(&(0..count), block);
                    if work.k_path == Path::Packed {
                        work.pack_keys::<S>(block, &columns);
                    }
                    if work.v_path == Path::Packed {
                        work.pack_values::<S>(block, columns);
                    }
                    packed = true;
                }
                work.attend::<S>(&tile, partials);
            }
        }
        S::end_tiles();
        work.end::<S>(0, count, task.target);
    }
}

/// Folds the partial results of a task that was cut into the state of its rows, in key order.
///
/// # Safety
/// As [`task`], once every task of the phase has run.
#[inline(always)]
pub(in crate::cpu) unsafe fn reduce<S: Simd>(cx: &Context<'_>, task: &Reduction, scratch: *mut f32) {
    // SAFETY: the caller's promise; the state and the partials of all blocks are there.
    unsafe {
        let work = Work::new::<S>(cx, task.rows, scratch);
        let tile_rows = cx.plan.tile_rows();
        for row in (0..task.rows.count).step_by(tile_rows) {
            let rows = tile_rows.min(task.rows.count - row);
            work.start::<S>(rows, Some(task.from + row));
            for r in rows / S::LANES * S::LANES..rows.next_multiple_of(S::LANES) {
                (*work.block_max.add(r), *work.block_sum.add(r)) = (f32::NEG_INFINITY, 0.0);
            }
            for block in 0..task.blocks {
                let at = task.partials + block * task.rows.count + row;
                let values = cx.slots.statistics(at, rows, (work.block_max, work.block_sum));
                softmax::fold::<S>(rows, &Fold { values, ..work.fold_at(0) });
            }
            work.end::<S>(row, rows, task.target);
        }
    }
}
