//! Products in f32: elements are converted as they are packed or loaded, and multiplied by fused multiply-adds if the machine has them.

#![allow(unsafe_code)]

use super::Products;
use crate::kernels::shared::gemm::{MulAdd, gemm, gemm_transposed};
use crate::kernels::shared::loops;
use crate::kernels::shared::mat::{Mat, MatMut};
use crate::kernels::shared::matrix_unit::MatrixUnitGuard;
use crate::kernels::shared::operands::Operands;
use crate::kernels::shared::pack::{self, HeadRows};
use crate::kernels::shared::stream::{self, Scores};
use crate::simd::{Elem, LaneFormat, Simd, exp2};
use flashtile_core::dtype::Dtype;
use std::ops::Range;

/// f32 on any vectors.
#[derive(Clone, Copy)]
pub(crate) struct F32;

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
    unsafe fn chain_from(start: S::V) -> S::V {
        start
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
