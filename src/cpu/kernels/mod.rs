//! The kernels, written once over [`Simd`](super::simd::Simd).

pub(super) mod forward;
mod gemm;
mod mask;
mod pack;
mod softmax;
mod stream;
mod tiles;

pub(super) use mask::{MaskTable, classify};

use crate::plan::CpuPlan;
use crate::{Inputs, TensorViewMut};

/// What every task of a run shares. Checked against the plan's problem before it is made.
pub(super) struct Context<'a> {
    pub(super) plan: &'a CpuPlan,
    pub(super) inputs: &'a Inputs<'a>,
    pub(super) out: &'a TensorViewMut<'a>,
    /// `[batch, q_heads, q_len]`, or null.
    pub(super) lse: *mut f32,
    /// Values, maxima and sums of the partials of split tasks.
    pub(super) partials: Partials,
    pub(super) mask: Option<MaskTable<'a>>,
}

// SAFETY: tasks read the inputs and write disjoint rows of the outputs and disjoint partials.
#[allow(unsafe_code)]
unsafe impl Sync for Context<'_> {}

/// Partial results of (block, row) slots: `values [slots, value_stride]`, `max [slots]`, `sum [slots]`.
#[derive(Clone, Copy)]
pub(super) struct Partials {
    pub(super) values: *mut f32,
    pub(super) max: *mut f32,
    pub(super) sum: *mut f32,
}
