//! `p . v` of few rows with values in place, or packed a few keys at a time.

#![allow(unsafe_code)]

use crate::kernels::forward::state::TaskState;
use crate::kernels::shared::gemm::gemm;
use crate::kernels::shared::mat::{Mat, MatMut};
use crate::kernels::shared::operands::{Operands, Run, Stream};
use crate::kernels::shared::pack::{HeadRows, zero_rows};
use crate::kernels::shared::products::Products;
use crate::kernels::shared::products::amx::{Amx, KEYS, MatrixUnit, TILE};
use crate::kernels::shared::products::bf16_pairs::{Bf16Pairs, PairLanes};
use crate::kernels::shared::products::f32_fma::F32;
use crate::kernels::shared::score_task::Tile;
use crate::simd::{Elem, Simd};
use std::marker::PhantomData;
use std::ops::Range;

/// Products of the probabilities of few rows with values, without packing a whole block: values are read in place, or packed a few keys
/// at a time.
///
/// # Safety
/// The contract of [`Products`] holds.
pub(crate) trait StreamValues<S: Simd>: Products<S> {
    /// `p . v` of a tile of few rows with the values `columns`, elements of `E`. `columns` are whole key steps.
    unsafe fn stream_values<E: Elem>(work: &TaskState<'_>, tile: &Tile, columns: &Range<usize>);
}

impl<S: Simd> StreamValues<S> for F32 {
    #[inline(always)]
    unsafe fn stream_values<E: Elem>(work: &TaskState<'_>, tile: &Tile, columns: &Range<usize>) {
        let v = work.task.value_elements();
        let whole_vectors = v.tensor.shape()[3] == work.stride;
        // SAFETY: the caller's contract.
        unsafe {
            if !whole_vectors || v.scattered() {
                return pack_few_values::<S, Self>(work, tile, columns);
            }
            let first = tile.block * work.task.run.block_k;
            for keys in steps(columns, keys_at_once::<S, Self>(&v)) {
                let mut from = keys.start;
                while from < keys.end {
                    let mut memory = [Run::NONE; MAX_RUNS];
                    let runs = v.runs(first + from, keys.end - from, &mut memory);
                    let to = from + runs.iter().map(|run| run.rows).sum::<usize>();
                    let ld = v.tensor.strides()[2];
                    let values = Stream::<E> { runs, column: 0, ld, elements: PhantomData };
                    accumulate::<S, E>(work, tile, from..to, values);
                    from = to;
                }
            }
        }
    }
}

impl<S: PairLanes> StreamValues<S> for Bf16Pairs {
    #[inline(always)]
    unsafe fn stream_values<E: Elem>(work: &TaskState<'_>, tile: &Tile, columns: &Range<usize>) {
        // SAFETY: the caller's contract.
        unsafe { pack_few_values::<S, Self>(work, tile, columns) }
    }
}

impl<S: MatrixUnit> StreamValues<S> for Amx {
    #[inline(always)]
    unsafe fn stream_values<E: Elem>(work: &TaskState<'_>, tile: &Tile, columns: &Range<usize>) {
        let whole_vectors = work.task.value_elements().tensor.shape()[3] == work.stride;
        // SAFETY: the caller's contract.
        unsafe {
            // The unit takes values in pairs of keys. For so few rows, interleaving them costs more than products by vectors.
            match tile.rows.len() {
                1 if whole_vectors => few_values::<S, 1, 4>(work, tile, columns),
                2 if whole_vectors => few_values::<S, 2, 4>(work, tile, columns),
                3 if whole_vectors => few_values::<S, 3, 2>(work, tile, columns),
                4 if whole_vectors => few_values::<S, 4, 2>(work, tile, columns),
                _ => pack_few_values::<S, Self>(work, tile, columns),
            }
        }
    }
}

/// Number of runs of values that are multiplied at once. More runs take several products, which continue the same sums.
const MAX_RUNS: usize = 16;

/// Bytes of values that a task of few rows uses at a time: while some of their columns are read, the others stay in the first-level cache.
const STREAM_BYTES: usize = 16 << 10;

/// Values that a task of few rows uses at a time.
#[inline(always)]
fn keys_at_once<S: Simd, P: Products<S>>(values: &HeadRows<'_>) -> usize {
    (STREAM_BYTES / values.row_bytes()).clamp(16, 64).next_multiple_of(P::KEY_STEP)
}

/// Cuts a range at the multiples of `step`.
#[inline]
fn steps(range: &Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let Range { start, end } = *range;
    (start / step..end.div_ceil(step)).map(move |n| start.max(n * step)..end.min((n + 1) * step))
}

/// [`StreamValues::stream_values`] of values that products cannot take in place: a few keys at a time are packed, and multiplied while they are
/// in the first-level cache.
///
/// # Safety
/// The contract of [`StreamValues::stream_values`] holds.
#[inline(always)]
unsafe fn pack_few_values<S: Simd, P: Products<S>>(
    work: &TaskState<'_>,
    tile: &Tile,
    columns: &Range<usize>,
) {
    let first = tile.block * work.task.run.block_k;
    for keys in steps(columns, keys_at_once::<S, P>(&work.task.value_elements())) {
        let seen = keys.start.max(tile.columns.start)..keys.end.min(tile.columns.end);
        // SAFETY: the caller's contract; the memory of a packed block is free in a task that packs no whole block.
        unsafe {
            (work.kernels.pack_values)(&work.task, first, &seen, work.packed_v);
            (work.kernels.packed_values)(work, tile, &keys, work.packed_v.as_mat());
        }
    }
}

/// Adds `p . v` over some columns of the tile. The tile's first columns start the sums.
///
/// # Safety
/// The contract of [`Simd`] holds; the probabilities are computed, and `values` has the values of the columns, in whole vectors.
#[inline(always)]
unsafe fn accumulate<S: Simd, E: Elem>(
    work: &TaskState<'_>,
    tile: &Tile,
    columns: Range<usize>,
    values: Stream<'_, E>,
) {
    // If a register tile has fewer rows, all rows share the conversion of their values, two vectors at a time. The tile has room
    // for the last group of eight.
    let (rows_of_tile, vectors) = match tile.rows.len() {
        n if n > S::ROWS && S::REGISTERS == 32 => (n.next_multiple_of(8), 2),
        n => (n, S::VECTORS),
    };
    let width = vectors * S::LANES;
    for column in (0..work.stride).step_by(width) {
        let cols = (work.stride - column).min(width);
        // SAFETY: the caller's contract.
        unsafe {
            let probs = work.task.memory.scores.from(0, columns.start).as_mat();
            gemm::<S, F32, Stream<'_, E>>(Operands {
                a: probs.first(probs.rows(), columns.len()),
                b: Stream { column, ..values },
                c: work.block_out.from(0, column).first(rows_of_tile, cols),
                resume: columns.start > tile.columns.start,
            });
        }
    }
}

/// `p . v` of `N` rows with the values `columns`, as [`StreamValues::stream_values`]: `C` vectors of each row at a time, in the order of
/// [`MatrixUnit::product`].
///
/// # Safety
/// The contract of [`StreamValues::stream_values`] holds, and values are bf16, in whole vectors.
#[inline(always)]
unsafe fn few_values<S: MatrixUnit, const N: usize, const C: usize>(
    work: &TaskState<'_>,
    tile: &Tile,
    columns: &Range<usize>,
) {
    let mut walk =
        work.task.value_elements().prefetching_walk(tile.block * work.task.run.block_k + columns.start);
    for step in columns.clone().step_by(KEYS) {
        // SAFETY: the caller's contract: a row of probabilities has a pair for each two keys of a step.
        unsafe {
            let mut rows = [zero_rows()[0].cast::<u16>(); KEYS];
            for key in 0..KEYS {
                let row = walk.next::<S>();
                if tile.columns.contains(&(step + key)) {
                    rows[key] = row.cast();
                }
            }
            let probs = work.task.memory.scores.from(0, step / 2).as_mat();
            let resume = step > columns.start;
            let mut column = 0;
            while column + C * S::LANES <= work.stride {
                few_columns::<S, N, C>(&rows, probs, column, work.block_out.from(0, column), resume);
                column += C * S::LANES;
            }
            while column < work.stride {
                few_columns::<S, N, 1>(&rows, probs, column, work.block_out.from(0, column), resume);
                column += S::LANES;
            }
        }
    }
}

/// Adds the products of `N` rows of probabilities and a step of values to `C` vectors of sums, which continue if they `resume`.
///
/// # Safety
/// The contract of [`few_values`] holds; `values` are the rows of a step, read from `column` on.
#[inline(always)]
unsafe fn few_columns<S: MatrixUnit, const N: usize, const C: usize>(
    values: &[*const u16; KEYS],
    probs: Mat,
    column: usize,
    sums: MatMut,
    resume: bool,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut halves = [[[S::splat(0.0); 2]; C]; N];
        for pair in 0..TILE {
            let (even, odd) = (values[2 * pair].add(column), values[2 * pair + 1].add(column));
            let mut v = [[S::splat(0.0); 2]; C];
            for c in 0..C {
                v[c] = [S::load_bf16(even.add(c * S::LANES)), S::load_bf16(odd.add(c * S::LANES))];
            }
            for r in 0..N {
                let p = S::splat(*probs.at(r, pair));
                let p = [S::shift_up_16(p), S::and(p, 0xffff_0000)];
                for c in 0..C {
                    halves[r][c][0] = S::fma(p[0], v[c][0], halves[r][c][0]);
                    halves[r][c][1] = S::fma(p[1], v[c][1], halves[r][c][1]);
                }
            }
        }
        for r in 0..N {
            for c in 0..C {
                let to = sums.at(r, c * S::LANES);
                let before = if resume { S::load(to) } else { S::splat(0.0) };
                S::store(to, S::add(before, S::add(halves[r][c][0], halves[r][c][1])));
            }
        }
    }
}
