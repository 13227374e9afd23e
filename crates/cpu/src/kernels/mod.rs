//! The kernels, written once over [`Simd`](super::simd::Simd).

#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "other targets decode codes before products")
)]
mod codes;
mod epilogue;
mod gemm;
mod mask;
mod overflow;
mod pack;
mod probs;
mod scores;
mod softmax;
mod stream;
mod task;
mod tiles;
mod values;

pub(super) use mask::{MaskTable, classify};
pub(super) use softmax::Fold;
pub(super) use task::{TaskState, Tile, reduce, task};
pub(super) use values::Products;

/// The phases of a task, which the ISA files instantiate.
pub(super) mod phases {
    pub(crate) use super::epilogue::finish;
    pub(crate) use super::probs::probs;
    #[cfg(target_arch = "x86_64")]
    pub(crate) use super::scores::{byte_scores, integer_scores};
    pub(crate) use super::scores::{pack_key_codes, pack_keys, pack_queries, packed_scores, stream_scores};
    pub(crate) use super::softmax::fold;
    #[cfg(target_arch = "x86_64")]
    pub(crate) use super::values::{byte_values, integer_values};
    pub(crate) use super::values::{
        pack_value_codes, pack_values, packed_values, repair_nonfinite, stream_values,
    };
}

use super::isa::Kernels;
use crate::plan::CpuPlan;
use flashtile_core::inputs::Inputs;
use flashtile_core::tensor::TensorViewMut;

/// What every task of a run shares. Checked against the plan's problem before it is made.
pub(super) struct Context<'a> {
    pub(super) plan: &'a CpuPlan,
    /// Those of the plan's instruction set.
    pub(super) kernels: Kernels,
    pub(super) inputs: &'a Inputs<'a>,
    pub(super) out: &'a TensorViewMut<'a>,
    /// `[batch, q_heads, q_len]`, or null.
    pub(super) lse: *mut f32,
    pub(super) slots: Slots,
    pub(super) mask: Option<MaskTable<'a>>,
}

// SAFETY: tasks read the inputs and write disjoint rows of the outputs and disjoint slots.
#[allow(unsafe_code)]
unsafe impl Sync for Context<'_> {}

/// Results of rows over some of their keys, kept in the workspace: values `[slots, stride]`, `max [slots]`, `sum [slots]`.
#[derive(Clone, Copy)]
pub(super) struct Slots {
    pub(super) values: *mut f32,
    pub(super) max: *mut f32,
    pub(super) sum: *mut f32,
    pub(super) stride: usize,
}

#[allow(unsafe_code)]
impl Slots {
    /// Stores values and statistics of `rows` rows.
    ///
    /// # Safety
    /// The slots and rows exist, and no other thread uses the slots.
    unsafe fn store(&self, slot: usize, rows: usize, values: *const f32, (max, sum): (*mut f32, *mut f32)) {
        // SAFETY: the caller's promise.
        unsafe {
            let stride = self.stride;
            std::ptr::copy_nonoverlapping(values, self.values.add(slot * stride), rows * stride);
            std::ptr::copy_nonoverlapping(max, self.max.add(slot), rows);
            std::ptr::copy_nonoverlapping(sum, self.sum.add(slot), rows);
        }
    }

    /// Stores that the rows have seen nothing. Their values are not read.
    ///
    /// # Safety
    /// As [`Slots::store`].
    unsafe fn clear(&self, slot: usize, rows: usize) {
        for row in slot..slot + rows {
            // SAFETY: the caller's promise.
            unsafe { (*self.max.add(row), *self.sum.add(row)) = (f32::NEG_INFINITY, 0.0) }
        }
    }

    /// Reads the statistics of `rows` rows, and says where their values are.
    ///
    /// # Safety
    /// The slots were stored, the rows exist.
    unsafe fn statistics(&self, slot: usize, rows: usize, (max, sum): (*mut f32, *mut f32)) -> *const f32 {
        // SAFETY: the caller's promise.
        unsafe {
            std::ptr::copy_nonoverlapping(self.max.add(slot), max, rows);
            std::ptr::copy_nonoverlapping(self.sum.add(slot), sum, rows);
            self.values.add(slot * self.stride)
        }
    }

    /// Reads values and statistics of `rows` rows.
    ///
    /// # Safety
    /// As [`Slots::statistics`].
    unsafe fn load(&self, slot: usize, rows: usize, values: *mut f32, statistics: (*mut f32, *mut f32)) {
        // SAFETY: the caller's promise.
        unsafe {
            let stored = self.statistics(slot, rows, statistics);
            std::ptr::copy_nonoverlapping(stored, values, rows * self.stride);
        }
    }
}
