//! The end of a row: the division by its sum, the rotation back, and its logsumexp.

#![allow(unsafe_code)]

use super::overflow;
use super::state::{RowState, TaskState};
use crate::kernels::shared::scoring;
use crate::simd::{Simd, store_row};
use flashtile_core::codec::KvView;

/// Writes out and lse of rows `first..first + rows` of the task from the first `rows` rows of a state.
///
/// # Safety
/// The contract of [`Simd`] holds, `state` has `rows` rows, and no other thread writes these rows of out and lse.
#[inline(always)]
pub(crate) unsafe fn finish<S: Simd>(work: &TaskState<'_>, first: usize, rows: usize, state: &RowState) {
    let problem = work.task.run.problem;
    let dims = problem.dims();
    let out = work.cx.out;
    for r in 0..rows {
        let (i, h) = work.task.place(first + r);
        // SAFETY: the state has `rows` rows; the row exists in out and lse.
        unsafe {
            let (max, sum) = (f64::from(*state.max_sum.max.add(r)), f64::from(*state.max_sum.sum.add(r)));
            let sink = work.task.run.inputs.sinks.map_or(f64::NEG_INFINITY, |s| f64::from(s[h]));
            let query = work.task.query(first + r);
            let slope = work.task.run.scoring.alibi_slope(query.index, h);
            let shift = slope.map_or(0.0, |slope| query.alibi_shift(problem, slope));
            let (scale, lse) = normalizer(max, sum, sink, shift, !work.cx.lse.is_null());
            let row = work.task.sequence.q_start + i;
            let dst = out.row(work.task.sequence.batch, h, row);
            let acc = state.acc.at(r, 0);
            let mut zero = state.zero;
            if sum == 0.0 {
                std::ptr::write_bytes(acc, 0, work.stride);
            }
            if let KvView::Codes(codes) = &work.task.run.inputs.v
                && let Some(rotation) = codes.coder().rotation()
            {
                let values = std::slice::from_raw_parts_mut(acc, dims.value_dim);
                values.iter_mut().for_each(|value| *value += state.zero);
                flashtile_core::codec::unrotate(work.task.run.token, rotation, values);
                zero = -0.0;
            }
            let finite = store_row::<S>(out.dtype(), dst, acc, (zero, scale), dims.value_dim);
            if !finite && sum.is_finite() {
                let sums = std::slice::from_raw_parts(acc, dims.value_dim);
                let row = overflow::Row::new(work.cx.parts, work.task.query(first + r));
                row.means(sums, |c, mean| overflow::store(out.dtype(), dst, c, mean));
            }
            if !work.cx.lse.is_null() {
                *work.cx.lse.add((work.task.sequence.batch * dims.q_heads + h) * dims.q_len + row) = lse;
            }
        }
    }
}

/// The factor of the accumulated values and, if it `has_lse`, the logsumexp of a row: from its maximum and sum in units of log2, the sink's
/// logit (`-inf` without a sink), and the shift, a constant that the row's scores leave out.
#[inline]
fn normalizer(max: f64, sum: f64, sink: f64, shift: f64, has_lse: bool) -> (f32, f32) {
    if sum == 0.0 {
        return (0.0, sink as f32);
    }
    if sink == f64::NEG_INFINITY {
        // A logarithm takes as long as a short row, so it is computed only if it is needed.
        let lse = if has_lse { (scoring::from_log2(max) + shift + sum.ln()) as f32 } else { 0.0 };
        return ((1.0 / sum) as f32, lse);
    }
    let sink_log2 = scoring::to_log2(sink - shift);
    let row_max = max.max(sink_log2);
    let rescale = (max - row_max).exp2();
    let total = sum * rescale + (sink_log2 - row_max).exp2();
    // A sink above all scores would lose digits if the shift were subtracted and added again.
    let lse = if shift != 0.0 && sink_log2 >= max { sink } else { scoring::from_log2(row_max) + shift };
    ((rescale / total) as f32, (lse + total.ln()) as f32)
}
