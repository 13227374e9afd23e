//! The kernels, written once over [`Simd`](super::simd::Simd).

mod codes;
mod epilogue;
mod gemm;
mod geometry;
pub(crate) mod loops;
pub(crate) mod mask;
pub(crate) mod mat;
pub(crate) mod matrix_unit;
mod operands;
mod overflow;
mod pack;
mod probs;
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "other targets have no instructions for most products")
)]
pub(crate) mod products;
mod scale;
mod scores;
mod scoring;
mod softmax;
pub(crate) mod state;
mod stream;
pub(crate) mod task;
mod values;

/// The phases of a task, which the ISA files instantiate.
pub(crate) mod phases {
    pub(crate) use super::epilogue::finish;
    pub(crate) use super::probs::probs;
    pub(crate) use super::scores::{pack_key_codes, pack_keys, pack_queries, packed_scores, stream_scores};
    pub(crate) use super::softmax::fold;
    pub(crate) use super::values::{pack_value_codes, pack_values, packed_values, repair_nonfinite};
}
