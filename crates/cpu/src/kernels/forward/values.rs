//! Values of a tile: `p . v`, and rows that it makes non-finite.

#![allow(unsafe_code)]

use super::state::{Path, TaskState};
use crate::kernels::shared::mask::MaskTile;
use crate::kernels::shared::mat::Mat;
use crate::kernels::shared::operands::Operands;
use crate::kernels::shared::products::{Products, key_steps};
use crate::kernels::shared::score_task::Tile;
use crate::simd::{Simd, all_finite};
use std::ops::Range;

impl TaskState<'_> {
    /// `p . v` of a tile. Tasks of few rows convert values as they load them, if values come in whole vectors; otherwise they pack a few
    /// keys at a time and use them while they are in the first-level cache.
    ///
    /// # Safety
    /// The probabilities are computed, and the block's values are packed unless the task reads them in place.
    pub(crate) unsafe fn weighted_values(&self, tile: &Tile) {
        let columns = &self.kernels.key_steps.whole(&tile.columns);
        // SAFETY: the caller's contract; rows `columns` of the values exist.
        unsafe {
            match self.v_path {
                Path::Packed => {
                    let row = columns.start / self.kernels.key_steps.keys_per_f32;
                    (self.kernels.packed_values)(self, tile, columns, self.packed_v.from(row, 0).as_mat());
                }
                Path::Stream => (self.kernels.stream_values)(self, tile, columns),
                // Products with codes leave out keys of probability 0, whatever their values, so there is nothing to repair.
                Path::Codes(phases) => return (phases.values)(self, tile),
            }
        }
        // A step may go beyond the columns. Its keys there have probability 0, like hidden keys.
        let cut = *columns != tile.columns;
        let prunes = !self.task.tree_columns(tile).0.is_empty();
        if cut || !tile.full || prunes || tile.mask != MaskTile::Full {
            // SAFETY: the values of the tile are computed.
            unsafe { (self.kernels.repair_nonfinite)(self, tile) }
        }
    }
}

/// Multiplies the probabilities of the keys `columns` by their packed values `packed_v`. The call with the tile's first key starts the sums in
/// `block_out`; later calls add to them.
///
/// # Safety
/// The contract of [`Simd`] holds; the probabilities are computed, and the values of the columns are packed in whole steps ([`key_steps`]).
#[inline(always)]
pub(crate) unsafe fn packed_values<S: Simd, P: Products<S>>(
    work: &TaskState<'_>,
    tile: &Tile,
    columns: &Range<usize>,
    packed_v: Mat,
) {
    let width = S::VECTORS * S::LANES;
    let depth = columns.end.div_ceil(P::PER_F32) - columns.start / P::PER_F32;
    for column in (0..work.stride).step_by(width) {
        let cols = (work.stride - column).min(width);
        // SAFETY: the caller's contract.
        unsafe {
            let probs = work.task.memory.scores.from(0, columns.start / P::PER_F32).as_mat();
            P::multiply(Operands {
                a: probs.first(probs.rows(), depth),
                b: packed_v.from(0, column).first(depth, cols),
                c: work.block_out.from(0, column).first(tile.rows.len(), cols),
                resume: columns.start > tile.columns.start,
            });
        }
    }
}

/// Recomputes rows that hide keys and came out non-finite, over the keys that they see, in the same order. A hidden key has probability 0,
/// but 0 times a NaN or infinite value is NaN.
///
/// # Safety
/// The contract of [`Simd`] holds; the tile's probabilities and values are computed.
#[inline(always)]
pub(crate) unsafe fn repair_nonfinite<S: Simd, P: Products<S>>(work: &TaskState<'_>, tile: &Tile) {
    for r in 0..tile.rows.len() {
        // SAFETY: the row of values holds `stride` elements.
        unsafe {
            if !all_finite::<S>(work.block_out.at(r, 0), work.stride) {
                repair_row::<S, P>(work, tile, r);
            }
        }
    }
}

/// Sums a row over the keys that it sees.
///
/// # Safety
/// As [`repair_nonfinite`].
#[inline(always)]
unsafe fn repair_row<S: Simd, P: Products<S>>(work: &TaskState<'_>, tile: &Tile, r: usize) {
    let unit = P::PER_F32;
    // SAFETY: the row of values holds `stride` elements; value rows of visible keys exist.
    unsafe {
        let values = work.block_out.at(r, 0);
        let query = work.task.query(tile.rows.start + r);
        if !work.v_path.is_packed() {
            work.pack_values(tile.block, &tile.columns);
        }
        let (seen, first) = (query.seen_keys(work.task.run), tile.block * work.task.run.block_k);
        let sees = |column: usize| tile.columns.contains(&column) && seen.contains(first + column);
        let probs = work.task.memory.scores.at(r, 0);
        let columns = key_steps::<S, P>().whole(&tile.columns);
        for c in (0..work.stride).step_by(S::LANES) {
            let mut chain = P::chain_from(S::splat(0.0));
            for at in columns.start / unit..columns.end / unit {
                let mut keep = 0u32;
                for half in 0..unit {
                    if sees(at * unit + half) {
                        keep |= if unit == 2 { 0xffff << (16 * half) } else { u32::MAX };
                    }
                }
                let p = S::splat(*probs.add(at));
                let value = S::and(S::load(work.packed_v.at(at, c)), keep);
                P::add_to_chain(&mut chain, at, p, value);
            }
            S::store(values.add(c), P::chain_sum(chain));
        }
    }
}
