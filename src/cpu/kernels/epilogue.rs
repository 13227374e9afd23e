//! The end of a row: the division by its sum, the rotation back, and its logsumexp.

#![allow(unsafe_code)]

use super::task::TaskState;
use crate::KvView;
use crate::cpu::simd::{Simd, store_row};
use std::f64::consts::{LN_2, LOG2_E};

/// Writes out and lse of rows `first..first + rows` of the task from the running state of the first `rows` rows.
///
/// # Safety
/// As [`Simd`]; no other thread writes these rows.
#[inline(always)]
pub(in crate::cpu) unsafe fn finish<S: Simd>(work: &TaskState<'_>, first: usize, rows: usize) {
    let dims = work.cx.plan.problem().dims();
    let out = work.cx.out;
    for r in 0..rows {
        let (i, h) = work.place(first + r);
        // SAFETY: the state of `rows` rows is there; the row exists in out and lse.
        unsafe {
            let (max, sum) = (f64::from(*work.row_max.add(r)), f64::from(*work.row_sum.add(r)));
            let sink = work.cx.inputs.sinks.map_or(f64::NEG_INFINITY, |s| f64::from(s[h]) * LOG2_E);
            let (scale, lse) = normalizer(max, sum, sink);
            let row = work.sequence.q_start + i;
            let dst = out.row(work.sequence.batch, h, row);
            let acc = work.acc.add(r * work.stride);
            if let KvView::Codes(codes) = &work.cx.inputs.v
                && let Some(rotation) = codes.coder().rotation()
            {
                crate::codec::unrotate(rotation, std::slice::from_raw_parts_mut(acc, dims.value_dim));
            }
            store_row::<S>(out.dtype(), dst, acc, scale, dims.value_dim);
            if !work.cx.lse.is_null() {
                *work.cx.lse.add((work.sequence.batch * dims.q_heads + h) * dims.q_len + row) = lse;
            }
        }
    }
}

/// Factor of the accumulated values, and the logsumexp, from a row's maximum and sum in units of log2 and the sink's logit in
/// the same unit (`-inf` without one).
fn normalizer(max: f64, sum: f64, sink: f64) -> (f32, f32) {
    if sum == 0.0 {
        return (0.0, (sink * LN_2) as f32);
    }
    let top = max.max(sink);
    let weight = (max - top).exp2();
    let total = sum * weight + (sink - top).exp2();
    ((weight / total) as f32, (top * LN_2 + total.ln()) as f32)
}
