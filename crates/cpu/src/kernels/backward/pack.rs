//! Copies of operands in the order in which products read them.

#![allow(unsafe_code)]

use super::operands::BackwardProducts;
use super::state::{KeyState, TileState};
use crate::kernels::shared::mat::{Mat, MatMut};
use crate::kernels::shared::pack::{self, HeadRows};
use crate::kernels::shared::products::{Products, key_steps};
use crate::kernels::shared::score_task::ScoreTask;
use crate::kernels::shared::scores::{depth, panels};
use crate::simd::{Elem, LaneFormat, Simd, load_head};
use std::ops::Range;

/// Packs the keys and values `columns` of a block.
///
/// # Safety
/// The contract of [`Simd`] holds; the keys exist, keys and values are elements of `E`, which `R` moves.
#[inline(always)]
pub(crate) unsafe fn pack_block<S: Simd, P: Products<S>, E: Elem, R: LaneFormat>(
    keys: &KeyState<'_>,
    block: usize,
    columns: &Range<usize>,
) {
    let (task, first) = (&keys.task, block * keys.task.run.block_k);
    let (k, v) = (task.key_elements(), task.value_elements());
    let whole = key_steps::<S, P>().whole(columns);
    let row = (keys.first_row(block) + whole.start) / P::PER_F32;
    // SAFETY: the caller's contract; the regions hold every panel and row of a block.
    unsafe {
        pack_panels::<S, P, R>(k, first, columns, keys.key_panels(block));
        pack_panels::<S, P, R>(v, first, columns, keys.value_panels(block));
        P::pack_values::<E>(k, first, columns.clone(), keys.memory.key_rows.from(row, 0));
        // Plain loops: a closure would be a function without the instruction set.
        let (s, mut is_finite) = (task.sequence, keys.is_finite.get());
        for src in [k, v] {
            for column in columns.clone() {
                let row = src.tensor.row(s.batch, task.rows.kv_head, s.kv_start + first + column);
                is_finite = is_finite && is_row_finite::<S, E>(row.cast(), src.tensor.shape()[3]);
            }
        }
        keys.is_finite.set(is_finite);
    }
}

/// Packs the panels of a block's rows that hold `columns`.
///
/// # Safety
/// As [`pack_block`].
#[inline(always)]
unsafe fn pack_panels<S: Simd, P: Products<S>, R: LaneFormat>(
    src: HeadRows<'_>,
    first: usize,
    columns: &Range<usize>,
    dst: *mut f32,
) {
    let panel_len = S::VECTORS * S::LANES * depth::<S, P>(src.tensor.shape()[3]);
    for panel in panels::<S>(columns) {
        // SAFETY: the caller's contract.
        unsafe {
            pack::key_panel::<S, R>(src, first, panel, columns, P::DEPTH_STEP, dst.add(panel * panel_len));
        }
    }
}

/// Packs the rows of d_out of a tile, whose queries are packed, and both as the depth of products.
///
/// # Safety
/// The contract of [`Simd`] holds; q and d_out are elements of `E`.
#[inline(always)]
pub(crate) unsafe fn pack_rows<S: Simd, P: BackwardProducts<S>, E: Elem>(tile: &TileState<'_>) {
    let (task, dims) = (&tile.task, tile.task.run.problem.dims());
    let (q, d_out) = (&task.run.inputs.q, &tile.cx.inputs.d_out);
    let count = task.rows.count;
    let row_of = |r: usize| {
        let (i, h) = task.place(r);
        (task.sequence.batch, h, task.sequence.q_start + i)
    };
    let (depth_q, depth_v) = (depth::<S, P>(dims.head_dim), depth::<S, P>(dims.value_dim));
    // SAFETY: the caller's contract: the rows exist, and the regions hold the rows of a tile in whole steps of a product.
    unsafe {
        let mut is_finite = true;
        for r in 0..count {
            let (batch, head, row) = row_of(r);
            let (q, d_out_row) = (q.row(batch, head, row), d_out.row(batch, head, row));
            P::pack_query(
                d_out.dtype(),
                d_out_row,
                dims.value_dim,
                1.0,
                tile.memory.packed_d_out.add(r * depth_v),
            );
            is_finite = is_finite
                && is_row_finite::<S, E>(q.cast(), dims.head_dim)
                && is_row_finite::<S, E>(d_out_row.cast(), dims.value_dim);
        }
        tile.is_finite.set(is_finite);
        if P::PER_F32 == 1 {
            let packed = |src: *const f32, dim: usize, memory| {
                padded_rows::<S>(Mat::new(src, dim, count, dim), memory)
            };
            tile.row_q.set(packed(task.memory.packed_q, depth_q, tile.memory.row_q));
            tile.row_d_out.set(packed(tile.memory.packed_d_out, depth_v, tile.memory.row_d_out));
            return;
        }
        for r in (0..count).step_by(2) {
            let (batch, head, row) = row_of(r);
            let odd = (r + 1 < count).then(|| row_of(r + 1));
            for (of, dst) in [(q, tile.memory.row_q), (d_out, tile.memory.row_d_out)] {
                let odd = odd.map_or(std::ptr::null(), |(batch, head, row)| of.row(batch, head, row));
                P::pair_rows(of.row(batch, head, row), odd, of.shape()[3], dst.at(r / 2, 0));
            }
        }
        let steps = count.next_multiple_of(P::KEY_STEP) / 2;
        for dst in [tile.memory.row_q, tile.memory.row_d_out] {
            for row in count.div_ceil(2)..steps {
                std::ptr::write_bytes(dst.at(row, 0), 0, dst.cols());
            }
        }
        tile.row_q.set(tile.memory.row_q.as_mat());
        tile.row_d_out.set(tile.memory.row_d_out.as_mat());
    }
}

/// Rows in whole vectors: as they are, or copied to `memory` with zeros after each.
///
/// # Safety
/// The contract of [`Simd`] holds, and `memory` has the rows.
#[inline(always)]
unsafe fn padded_rows<S: Simd>(rows: Mat, memory: MatMut) -> Mat {
    let dim = rows.cols();
    if dim == memory.cols() {
        return rows;
    }
    for r in 0..rows.rows() {
        // SAFETY: the caller's contract.
        unsafe {
            std::ptr::copy_nonoverlapping(rows.at(r, 0), memory.at(r, 0), dim);
            std::ptr::write_bytes(memory.at(r, dim), 0, memory.cols() - dim);
        }
    }
    memory.as_mat()
}

/// Returns true if every element of a row is finite.
///
/// # Safety
/// The contract of [`Simd`] holds; the row has `len` elements.
#[inline(always)]
unsafe fn is_row_finite<S: Simd, E: Elem>(row: *const E, len: usize) -> bool {
    // SAFETY: the caller's contract.
    unsafe {
        let (zero, mut probe) = (S::splat(0.0), S::splat(0.0));
        let mut c = 0;
        while c + S::LANES <= len {
            probe = S::fma(E::load::<S>(row.add(c)), zero, probe);
            c += S::LANES;
        }
        if c < len {
            probe = S::fma(load_head::<S, E>(row.add(c), len - c), zero, probe);
        }
        S::reduce_add(probe) == 0.0
    }
}

impl ScoreTask<'_> {
    /// Memory of the packed queries as a matrix of rows of `depth`.
    ///
    /// # Safety
    /// `depth` is that of the plan's products.
    pub(crate) unsafe fn packed_rows(&self, src: *mut f32, depth: usize) -> Mat {
        // SAFETY: the caller's contract.
        unsafe { Mat::new(src, depth, self.memory.packed_rows, depth) }
    }
}
