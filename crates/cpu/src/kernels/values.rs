//! Values of a tile: packing of values, and `p . v`.

#![allow(unsafe_code)]

use super::codes;
#[cfg(target_arch = "x86_64")]
use super::codes::{ResultRows, ValueRows};
use super::gemm::gemm;
use super::mask::MaskTile;
use super::operands::Run;
use super::operands::{Operands, Source};
use super::pack;
use super::probs::modifiers;
use super::state::{Path, Products, TaskState, Tile};
use super::tiles;
#[cfg(target_arch = "x86_64")]
use crate::simd::{CodeValues, ByteValues};
use crate::simd::{Elem, Simd, TILE, all_finite};
use flashtile_core::tensor::MaskRow;
use std::ops::Range;

/// Bytes of values that a streaming task uses at a time: while one part of their columns is read, the others stay in the
/// first-level cache.
const STREAM_BYTES: usize = 16 << 10;

/// Most runs of values that are multiplied at once. More of them take several products, which go on with the same sums.
const MAX_RUNS: usize = 16;

/// Cuts a range at the multiples of `step`.
#[inline]
fn steps(range: &Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let Range { start, end } = *range;
    (start / step..end.div_ceil(step)).map(move |n| start.max(n * step)..end.min((n + 1) * step))
}

impl TaskState<'_> {
    /// `p . v` of a tile. Few rows convert values as they are loaded, if they come in whole vectors; else a few keys at a time
    /// are packed and used while they are in the first-level cache.
    ///
    /// # Safety
    /// The probabilities are there, and the block's values are packed unless the task reads them where they lie.
    pub(super) unsafe fn weighted_values(&self, tile: &Tile) {
        let columns = &self.kernels.products.whole(&tile.columns);
        // SAFETY: the caller's promise; rows `columns` of the values exist.
        unsafe {
            match self.v_path {
                Path::Packed => {
                    let at = columns.start / self.kernels.products.keys_per_f32 * self.stride;
                    (self.kernels.packed_values)(self, tile, columns, self.packed_v.add(at));
                }
                Path::Stream => (self.kernels.stream_values)(self, tile, columns),
                // Products of codes leave out keys of probability 0, whatever their values: there is nothing to repair.
                Path::Integers(products) | Path::Bytes(products) => return (products.values)(self, tile),
            }
        }
        // The rest of a step that the columns cut has probability 0, as a hidden key has.
        let cut = *columns != tile.columns;
        let prunes = !self.tree_columns(tile).0.is_empty();
        if cut || !tile.full || prunes || tile.mask != MaskTile::Full {
            // SAFETY: the values of the tile are there.
            unsafe { (self.kernels.repair_nonfinite)(self, tile) }
        }
    }
}

/// `p . v` of a tile of few rows, with codes of values multiplied in integers by `product`.
///
/// # Safety
/// The machine has the instructions of `product`; the probabilities are there.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) unsafe fn integer_values(work: &TaskState<'_>, tile: &Tile, product: unsafe fn(&CodeValues<'_>)) {
    let v = work.value_codes();
    let keys = (tile.block * work.block_k, &tile.columns);
    // SAFETY: the caller's promise.
    unsafe { work.integer_operands().values(product, v, keys, work.packed_v, value_rows(work, tile)) }
}

/// As [`integer_values`], with codes of a byte multiplied in f32. Changes the probabilities.
///
/// # Safety
/// As there.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) unsafe fn byte_values(work: &TaskState<'_>, tile: &Tile, product: unsafe fn(&ByteValues<'_>)) {
    let v = work.value_codes();
    let keys = (tile.block * work.block_k, &tile.columns);
    // SAFETY: the caller's promise.
    unsafe { codes::byte_values(product, v, keys, work.packed_v, value_rows(work, tile)) }
}

/// Probabilities of a tile, and its unnormalised output.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn value_rows(work: &TaskState<'_>, tile: &Tile) -> ValueRows {
    let out = ResultRows { count: tile.rows.len(), c: work.block_out, ldc: work.stride };
    ValueRows { probs: work.scores, ldp: work.block_k, out }
}

/// `p . v` of a tile with values in memory of the task: rows of the keys `columns`, from `rows` on.
///
/// # Safety
/// As [`Simd`]; the probabilities are there.
#[inline(always)]
pub(crate) unsafe fn packed_values<S: Simd>(
    work: &TaskState<'_>,
    tile: &Tile,
    columns: &Range<usize>,
    rows: *const f32,
) {
    // SAFETY: the caller's promise.
    unsafe { accumulate::<S, f32>(work, tile, columns.clone(), Source::Packed(rows), work.stride) }
}

/// `p . v` of a tile with elements that are read where they lie.
///
/// # Safety
/// As [`Simd`]; the probabilities are there, values are elements of `E`.
#[inline(always)]
pub(crate) unsafe fn stream_values<S: Simd, E: Elem>(
    work: &TaskState<'_>,
    tile: &Tile,
    columns: &Range<usize>,
) {
    let v = work.value_elements();
    let keys_at_once = (STREAM_BYTES / v.row_bytes()).clamp(16, 64);
    let keys_at_once = keys_at_once.next_multiple_of(Products::of::<S>().step);
    let first = tile.block * work.block_k;
    // SAFETY: the caller's promise.
    unsafe {
        if !S::PAIRS && v.tensor.shape()[3] == work.stride && !v.scattered() {
            for keys in steps(columns, keys_at_once) {
                let mut from = keys.start;
                while from < keys.end {
                    let mut memory = [Run::NONE; MAX_RUNS];
                    let runs = v.runs(first + from, keys.end - from, &mut memory);
                    let to = from + runs.iter().map(|run| run.rows).sum::<usize>();
                    let ldb = v.tensor.strides()[2];
                    accumulate::<S, E>(work, tile, from..to, Source::Stream(runs, 0), ldb);
                    from = to;
                }
            }
        } else {
            for keys in steps(columns, keys_at_once) {
                let seen = keys.start.max(tile.columns.start)..keys.end.min(tile.columns.end);
                (work.kernels.pack_values)(work, first, &seen, work.packed_v);
                (work.kernels.packed_values)(work, tile, &keys, work.packed_v);
            }
        }
    }
}

/// Packs the values `first + rows` to `dst`.
///
/// # Safety
/// As [`Simd`]; the values exist and are elements of `E`, `dst` is valid for the rows in whole steps of a product.
#[inline(always)]
pub(crate) unsafe fn pack_values<S: Simd, E: Elem>(
    work: &TaskState<'_>,
    first: usize,
    rows: &Range<usize>,
    dst: *mut f32,
) {
    let v = work.value_elements();
    // SAFETY: the caller's promise.
    unsafe { pack::values::<S, E>(v, first, rows.clone(), dst) }
}

/// As [`pack_values`], of quantized values.
///
/// # Safety
/// As there.
pub(crate) unsafe fn pack_value_codes(
    work: &TaskState<'_>,
    first: usize,
    rows: &Range<usize>,
    dst: *mut f32,
) {
    let v = work.value_codes();
    // SAFETY: the caller's promise.
    unsafe { codes::values(v, first, rows.clone(), (dst, work.stride)) }
}

/// Adds `p . v` over some columns of the tile, of which the first start anew. `rows` are the values of the columns, `ldb`
/// elements from one to the next.
///
/// # Safety
/// As [`Simd`]; the probabilities are there, and the values of the columns in whole vectors.
#[inline(always)]
unsafe fn accumulate<S: Simd, E: Elem>(
    work: &TaskState<'_>,
    tile: &Tile,
    columns: Range<usize>,
    rows: Source<'_, E>,
    ldb: usize,
) {
    let unit = Products::of::<S>().keys_per_f32;
    // More rows of a stream than a register tile has share the conversion of its values two vectors at a time; the tile
    // has room for the last group of eight.
    let (rows_of_tile, vectors) = match tile.rows.len() {
        n if n > S::ROWS && S::REGISTERS == 32 && matches!(rows, Source::Stream(..)) => {
            (n.next_multiple_of(8), 2)
        }
        n => (n, S::VECTORS),
    };
    let width = vectors * S::LANES;
    for column in (0..work.stride).step_by(width) {
        let vectors = (work.stride - column).min(width) / S::LANES;
        // SAFETY: the caller's promise; the tile of values holds `stride` columns of each row.
        unsafe {
            let operands = Operands {
                a: work.scores.add(columns.start / unit),
                lda: work.block_k,
                b: match rows {
                    Source::Packed(rows) => Source::Packed(rows.add(column)),
                    Source::Stream(runs, _) => Source::Stream(runs, column),
                },
                ldb,
                c: work.block_out.add(column),
                ldc: work.stride,
                resume: columns.start > tile.columns.start,
            };
            let depth = columns.end.div_ceil(unit) - columns.start / unit;
            gemm::<S, E>((rows_of_tile, vectors), depth, operands);
        }
    }
}

/// A hidden key has probability 0, and 0 times a NaN or infinite value is NaN. Sums rows that hide keys and came out not
/// finite again, over the keys that they see, in the same order.
///
/// # Safety
/// As [`Simd`]; the tile's probabilities and values are there.
#[inline(always)]
pub(crate) unsafe fn repair_nonfinite<S: Simd>(work: &TaskState<'_>, tile: &Tile) {
    for r in 0..tile.rows.len() {
        // SAFETY: the row of values holds `stride` elements.
        unsafe {
            if !all_finite::<S>(work.block_out.add(r * work.stride), work.stride) {
                repair_row::<S>(work, tile, r);
            }
        }
    }
}

/// Sums a row over the keys that it sees.
///
/// # Safety
/// As [`repair_nonfinite`].
#[inline(always)]
unsafe fn repair_row<S: Simd>(work: &TaskState<'_>, tile: &Tile, r: usize) {
    let products = Products::of::<S>();
    let unit = products.keys_per_f32;
    // SAFETY: the row of values holds `stride` elements; value rows and mask elements of visible keys exist.
    unsafe {
        let values = work.block_out.add(r * work.stride);
        let query = work.query(tile.rows.start + r);
        if !work.v_path.is_packed() {
            work.pack_values(tile.block, &tile.columns);
        }
        let mask = modifiers::<S>(work, tile, &query).mask;
        let seen = work.visible_columns(query.sequence, query.position, tile.block);
        let ((tree, tree_from), tree_row) = (work.tree_columns(tile), work.tree_row(&query));
        let sees = |j: usize| {
            let hides = |(row, first, _): (MaskRow, usize, usize)| row.bias(first + j) == f32::NEG_INFINITY;
            let pruned =
                |row: MaskRow| tree.contains(&j) && row.bias(tree_from + j - tree.start) == f32::NEG_INFINITY;
            seen.contains(&j) && !mask.is_some_and(hides) && !tree_row.is_some_and(pruned)
        };
        let probs = work.scores.add(r * work.block_k);
        let columns = products.whole(&tile.columns);
        for c in (0..work.stride).step_by(S::LANES) {
            let mut sum = S::splat(0.0);
            let mut chains = [S::splat(0.0); 2];
            for at in columns.start / unit..columns.end / unit {
                let mut keep = 0u32;
                for half in 0..unit {
                    if sees(at * unit + half) {
                        keep |= if unit == 2 { 0xffff << (16 * half) } else { u32::MAX };
                    }
                }
                let p = S::splat(*probs.add(at));
                let value = S::and(S::load(work.packed_v.add(at * work.stride + c)), keep);
                if !S::TILES {
                    sum = S::mac(p, value, sum);
                    continue;
                }
                tiles::add_pair::<S>(&mut chains, p, value);
                if (at + 1) % TILE == 0 {
                    sum = S::add(sum, S::add(chains[0], chains[1]));
                    chains = [S::splat(0.0); 2];
                }
            }
            S::store(values.add(c), sum);
        }
    }
}
