//! Products in f32: elements are converted as they are packed or loaded, and multiplied by fused multiply-adds if the machine has them.

#![allow(unsafe_code)]

use super::{Products, keys_at_once, pack_few_values, steps};
use crate::kernels::gemm::{MulAdd, gemm};
use crate::kernels::loops;
use crate::kernels::mat::{Mat, MatMut};
use crate::kernels::matrix_unit::MatrixUnitGuard;
use crate::kernels::operands::{Operands, Run, Stream};
use crate::kernels::pack::{self, HeadRows};
use crate::kernels::state::{TaskState, Tile};
use crate::kernels::stream::{self, Scores};
use crate::simd::{Elem, LaneFormat, Simd, exp2};
use flashtile_core::dtype::Dtype;
use std::marker::PhantomData;
use std::ops::Range;

/// f32 on any vectors.
#[derive(Clone, Copy)]
pub(crate) struct F32;

/// Number of runs of values that are multiplied at once. More runs take several products, which continue the same sums.
const MAX_RUNS: usize = 16;

impl<S: Simd> MulAdd<S> for F32 {
    const PER_F32: usize = 1;
    #[inline(always)]
    unsafe fn mul_add(a: S::V, b: S::V, c: S::V) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { S::fma(a, b, c) }
    }
    #[inline(always)]
    unsafe fn measured_step(chain: S::V, a: S::V, b: S::V) -> S::V {
        // The chain is a factor: with an addend, `a * b` could be hoisted on machines where the multiplication is a separate operation.
        // SAFETY: the caller's contract.
        unsafe { S::fma(chain, a, b) }
    }
}

impl<S: Simd> Products<S> for F32 {
    const PER_F32: usize = <Self as MulAdd<S>>::PER_F32;
    const DEPTH_STEP: usize = 1;
    const KEY_STEP: usize = 1;
    const SCALES_QUERIES: bool = true;
    const PEAK_ROUND: usize = loops::CHAINS * S::LANES;
    type Chain = S::V;

    #[inline(always)]
    unsafe fn configure() -> MatrixUnitGuard {
        MatrixUnitGuard::none()
    }
    #[inline(always)]
    fn scale_of_scores(_: f32) -> f32 {
        1.0
    }
    #[inline(always)]
    unsafe fn pack_query(dtype: Dtype, src: *const u8, head_dim: usize, scale: f32, dst: *mut f32) {
        // SAFETY: the caller's contract.
        unsafe { pack::query::<S>(dtype, src, head_dim, scale, dst) }
    }
    #[inline(always)]
    unsafe fn set_stream_queries(_: Mat, _: *mut f32) {}
    #[inline(always)]
    unsafe fn multiply(operands: Operands<Mat>) {
        // SAFETY: the caller's contract.
        unsafe { gemm::<S, Self, Mat>(operands) }
    }
    #[inline(always)]
    unsafe fn stream_scores<R: LaneFormat>(
        keys: HeadRows<'_>,
        first: usize,
        columns: &Range<usize>,
        scores: Scores,
        _: *mut f32,
    ) {
        // SAFETY: the caller's contract.
        unsafe { stream::scores::<S, Self, R>(keys, first, columns, scores) }
    }
    #[inline(always)]
    unsafe fn stream_values<E: Elem>(work: &TaskState<'_>, tile: &Tile, columns: &Range<usize>) {
        let v = work.value_elements();
        let whole_vectors = v.tensor.shape()[3] == work.stride;
        // SAFETY: the caller's contract.
        unsafe {
            if !whole_vectors || v.scattered() {
                return pack_few_values::<S, Self>(work, tile, columns);
            }
            let first = tile.block * work.block_k;
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
    #[inline(always)]
    unsafe fn pack_values<E: Elem>(src: HeadRows<'_>, first: usize, keys: Range<usize>, dst: MatMut) {
        // SAFETY: the caller's contract.
        unsafe { pack::values::<S, E>(src, first, keys, dst) }
    }
    #[inline(always)]
    unsafe fn exp_row(row: *mut f32, columns: Range<usize>, _: f32, neg_max: S::V) -> S::V {
        // SAFETY: the caller's contract. Scores have their scale already.
        unsafe {
            let mut sum = S::splat(0.0);
            let mut c = columns.start;
            while c < columns.end {
                let p = exp2::<S>(S::add(S::load(row.add(c)), neg_max));
                S::store(row.add(c), p);
                sum = S::add(sum, p);
                c += S::LANES;
            }
            sum
        }
    }
    #[inline(always)]
    unsafe fn chain() -> S::V {
        // SAFETY: the caller's contract.
        unsafe { S::splat(0.0) }
    }
    #[inline(always)]
    unsafe fn add_to_chain(chain: &mut S::V, _: usize, probs: S::V, values: S::V) {
        // SAFETY: the caller's contract.
        *chain = unsafe { S::fma(probs, values, *chain) };
    }
    #[inline(always)]
    unsafe fn chain_sum(chain: S::V) -> S::V {
        chain
    }
    #[inline(always)]
    unsafe fn peak_loop(rounds: u64) -> f32 {
        // SAFETY: the caller's contract.
        unsafe { loops::mul_add_loop::<S, Self>(rounds) }
    }
}

/// Adds `p . v` over some columns of the tile. The tile's first columns start the sums.
///
/// # Safety
/// As [`Simd`]; the probabilities are computed, and `values` has the values of the columns, in whole vectors.
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
            let probs = work.scores.from(0, columns.start).as_mat();
            gemm::<S, F32, Stream<'_, E>>(Operands {
                a: probs.first(probs.rows(), columns.len()),
                b: Stream { column, ..values },
                c: work.block_out.from(0, column).first(rows_of_tile, cols),
                resume: columns.start > tile.columns.start,
            });
        }
    }
}
