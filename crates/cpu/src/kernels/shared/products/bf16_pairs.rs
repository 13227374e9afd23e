//! Products of pairs of bf16 along the depth, each pair in the place of one f32. Keys and values are bf16.
//!
//! Queries and keys are copied as they are, and two neighbouring rows of values are interleaved. Probabilities are rounded to bf16; queries
//! would be rounded again by the scale of the scores, which the softmax therefore applies.

#![allow(unsafe_code)]

use super::Products;
use crate::kernels::shared::gemm::{MulAdd, gemm, gemm_transposed};
use crate::kernels::shared::loops;
use crate::kernels::shared::mat::{Mat, MatMut};
use crate::kernels::shared::matrix_unit::MatrixUnitGuard;
use crate::kernels::shared::operands::Operands;
use crate::kernels::shared::pack::{HeadRows, zero_rows};
use crate::kernels::shared::stream::{self, Scores};
use crate::simd::{Elem, LaneFormat, Simd, exp2};
use flashtile_core::dtype::Dtype;
use std::ops::Range;

/// Vectors whose lanes hold pairs of bf16: the first of a pair in the lower half.
///
/// # Safety
/// For every method: as [`Simd`].
pub(crate) trait PairLanes: Simd {
    /// `a.0 * b.0 + a.1 * b.1 + c` in each lane; the machine determines the order and the roundings.
    unsafe fn dot(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `2 * LANES` f32 rounded to bf16, as pairs in order.
    unsafe fn to_pairs(low: Self::V, high: Self::V) -> Self::V;
    /// `LANES` pairs of an f32 of `even` and the same lane of `odd`, rounded to bf16.
    unsafe fn row_pairs(even: Self::V, odd: Self::V) -> Self::V;
    /// Stores pairs of the `LANES` bf16 at `even` and `odd`.
    unsafe fn interleave(even: *const u16, odd: *const u16, dst: *mut f32);
}

/// Pairs of bf16 in vectors.
#[derive(Clone, Copy)]
pub(crate) struct Bf16Pairs;

impl<S: PairLanes> MulAdd<S> for Bf16Pairs {
    const PER_F32: usize = 2;
    #[inline(always)]
    unsafe fn mul_add(a: S::V, b: S::V, c: S::V) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { S::dot(a, b, c) }
    }
    #[inline(always)]
    unsafe fn measured_step(chain: S::V, a: S::V, b: S::V) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { S::dot(a, b, chain) }
    }
}

impl<S: PairLanes> Products<S> for Bf16Pairs {
    const PER_F32: usize = <Self as MulAdd<S>>::PER_F32;
    const DEPTH_STEP: usize = 1;
    const KEY_STEP: usize = 2;
    const SCALES_QUERIES: bool = false;
    const PEAK_ROUND: usize = loops::CHAINS * S::LANES * 2;
    type Chain = S::V;

    #[inline(always)]
    unsafe fn configure() -> MatrixUnitGuard {
        MatrixUnitGuard::none()
    }
    #[inline(always)]
    fn scale_of_scores(scale: f32) -> f32 {
        scale
    }
    #[inline(always)]
    unsafe fn pack_query(_: Dtype, src: *const u8, head_dim: usize, _: f32, dst: *mut f32) {
        // SAFETY: the caller's contract.
        unsafe { copy_query(src, head_dim, 2, dst) }
    }
    #[inline(always)]
    unsafe fn set_stream_queries(_: Mat, _: *mut f32) {}
    #[inline(always)]
    unsafe fn multiply(operands: Operands<Mat>) {
        // SAFETY: the caller's contract.
        unsafe { gemm::<S, Self, Mat>(operands) }
    }
    #[inline(always)]
    unsafe fn multiply_transposed(operands: Operands<Mat>) {
        // SAFETY: the caller's contract.
        unsafe { gemm_transposed::<S, Self>(operands) }
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
    unsafe fn pack_values<E: Elem>(src: HeadRows<'_>, first: usize, keys: Range<usize>, dst: MatMut) {
        // SAFETY: the caller's contract.
        unsafe { interleave_values::<S>(src, first, keys, 2, dst) }
    }
    #[inline(always)]
    unsafe fn exp_row(row: *mut f32, columns: Range<usize>, scale: f32, neg_max: S::V) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { exp_row_to_pairs::<S>(row, columns, scale, neg_max) }
    }
    #[inline(always)]
    unsafe fn chain_from(start: S::V) -> S::V {
        start
    }
    #[inline(always)]
    unsafe fn add_to_chain(chain: &mut S::V, _: usize, probs: S::V, values: S::V) {
        // SAFETY: the caller's contract.
        *chain = unsafe { S::dot(probs, values, *chain) };
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

/// Copies a row of `len` bf16, filled up with zeros to a multiple of `step`.
///
/// # Safety
/// `src` holds `len` elements, `dst` as many, rounded up to steps.
#[inline(always)]
pub(super) unsafe fn copy_query(src: *const u8, len: usize, step: usize, dst: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe {
        let dst = dst.cast::<u16>();
        let whole = len.next_multiple_of(step);
        std::ptr::copy_nonoverlapping(src.cast(), dst, len);
        std::ptr::write_bytes(dst.add(len), 0, whole - len);
    }
}

/// Packs the values `first + keys`, bf16, to rows of pairs of an even value and the next one. The missing half of a pair at either end is
/// zero, and so are the missing pairs of a step of `step` values.
///
/// # Safety
/// The contract of [`Simd`] holds; the values exist, `dst` has the rows in whole steps, of value_dim in whole vectors.
#[inline(always)]
pub(super) unsafe fn interleave_values<S: PairLanes>(
    src: HeadRows<'_>,
    first: usize,
    keys: Range<usize>,
    step: usize,
    dst: MatMut,
) {
    let value_dim = src.tensor.shape()[3];
    let mut next = src.prefetching_walk(first + keys.start / step * step);
    for (n, pair) in (keys.start / step * step / 2..keys.end.next_multiple_of(step) / 2).enumerate() {
        // SAFETY: the caller's contract.
        unsafe {
            let (even, odd) = (next.next::<S>(), next.next::<S>());
            let half = |j: usize, row| if keys.contains(&j) { row } else { zero_rows()[0] };
            let (even, odd) = (half(2 * pair, even), half(2 * pair + 1, odd));
            interleave_row::<S>(even.cast(), odd.cast(), value_dim, dst.at(n, 0));
        }
    }
}

/// Interleaves two rows of bf16 into a row of pairs, zero up to whole vectors.
///
/// # Safety
/// The contract of [`Simd`] holds; the sources hold `len` elements, `dst` as many pairs, rounded up to vectors.
#[inline(always)]
pub(crate) unsafe fn interleave_row<S: PairLanes>(
    even: *const u16,
    odd: *const u16,
    len: usize,
    dst: *mut f32,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut c = 0;
        while c + S::LANES <= len {
            S::interleave(even.add(c), odd.add(c), dst.add(c));
            c += S::LANES;
        }
        if c < len {
            let mut tail = [[0u16; 16]; 2];
            std::ptr::copy_nonoverlapping(even.add(c), tail[0].as_mut_ptr(), len - c);
            std::ptr::copy_nonoverlapping(odd.add(c), tail[1].as_mut_ptr(), len - c);
            S::interleave(tail[0].as_ptr(), tail[1].as_ptr(), dst.add(c));
        }
    }
}

/// [`Products::exp_row`] to pairs of bf16: the pairs of two vectors of scores take the place of the first.
///
/// # Safety
/// The contract of [`Products::exp_row`] holds.
#[inline(always)]
pub(super) unsafe fn exp_row_to_pairs<S: PairLanes>(
    row: *mut f32,
    columns: Range<usize>,
    scale: f32,
    neg_max: S::V,
) -> S::V {
    // SAFETY: the caller's contract.
    unsafe {
        let mut sum = S::splat(0.0);
        let mut c = columns.start;
        // Scale and maximum are two roundings, because a score that bias or mask have changed is rounded before the maximum is subtracted.
        let factor = S::splat(scale);
        while c < columns.end {
            let low = exp2::<S>(S::add(S::mul(S::load(row.add(c)), factor), neg_max));
            let high = exp2::<S>(S::add(S::mul(S::load(row.add(c + S::LANES)), factor), neg_max));
            S::store(row.add(c / 2), S::to_pairs(low, high));
            sum = S::add(S::add(sum, low), high);
            c += 2 * S::LANES;
        }
        sum
    }
}
