//! Terms of each row (`-lse` and `delta`), and stores of finished rows.

#![allow(unsafe_code)]

use super::state::Context;
use crate::kernels::shared::mat::MatMut;
use crate::kernels::shared::score_task::{ScoreMemory, ScoreTask};
use crate::kernels::shared::scoring::to_log2;
use crate::plan::Rows;
use crate::simd::{Elem, Simd, load_head, store_row, with_elem};
use flashtile_core::tensor::TensorViewMut;

/// Fills [`RowTerms`](super::state::RowTerms) of some rows.
///
/// # Safety
/// The contract of [`Simd`] holds, and no other thread uses these rows.
#[inline(always)]
pub(crate) unsafe fn row_terms<S: Simd>(cx: &Context<'_>, rows: Rows) {
    let (problem, inputs) = (cx.run.problem, cx.inputs);
    let task = ScoreTask::new(&cx.run, rows, ScoreMemory::none());
    for r in 0..rows.count {
        let query = task.query(r);
        let (index, s) = (cx.row_index(&query), query.sequence);
        let at = [s.batch, query.head, s.q_start + query.position];
        let slope = cx.run.scoring.alibi_slope(query.index, query.head);
        let shift = slope.map_or(0.0, |slope| query.alibi_shift(problem, slope));
        let d_lse = inputs.d_lse.map_or(0.0, |d_lse| d_lse[index]);
        // SAFETY: the rows exist.
        unsafe {
            let (out, d_out) = (inputs.out.row(at[0], at[1], at[2]), inputs.d_out.row(at[0], at[1], at[2]));
            let product = with_elem!(problem.dtype(), E => dot::<S, E>(out.cast(), d_out.cast(), problem.dims().value_dim));
            *cx.rows.delta.add(index) = product - d_lse;
            *cx.rows.neg_lse.add(index) = -to_log2(f64::from(inputs.lse[index]) - shift) as f32;
        }
    }
}

/// # Safety
/// The contract of [`Simd`] holds; the rows have `len` elements.
#[inline(always)]
unsafe fn dot<S: Simd, E: Elem>(a: *const E, b: *const E, len: usize) -> f32 {
    // SAFETY: the caller's contract.
    unsafe {
        let mut sum = S::splat(0.0);
        let mut c = 0;
        while c + S::LANES <= len {
            sum = S::fma(E::load::<S>(a.add(c)), E::load::<S>(b.add(c)), sum);
            c += S::LANES;
        }
        if c < len {
            let (a, b) = (load_head::<S, E>(a.add(c), len - c), load_head::<S, E>(b.add(c), len - c));
            sum = S::fma(a, b, sum);
        }
        S::reduce_add(sum)
    }
}

/// Stores row `[batch, head, row]` of a gradient from f32 in whole vectors, times `scale`.
///
/// # Safety
/// The contract of [`Simd`] holds; the row exists, and no other thread uses it.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd>(
    to: &TensorViewMut<'_>,
    [batch, head, row]: [usize; 3],
    src: *const f32,
    scale: f32,
) {
    // SAFETY: the caller's contract.
    unsafe { store_row::<S>(to.dtype(), to.row(batch, head, row), src, (0.0, scale), to.shape()[3]) };
}

impl ScoreMemory {
    /// The memory of a task whose scores are not computed.
    fn none() -> Self {
        let none = std::ptr::null_mut();
        // SAFETY: a matrix without rows has no element.
        let scores = unsafe { MatMut::new(none, 0, 0, 0) };
        Self { packed_q: none, packed_rows: 0, packed_k: none, scores, mean_scores: none, codes: none }
    }
}
