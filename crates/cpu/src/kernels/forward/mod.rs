//! The forward pass.

mod epilogue;
mod overflow;
mod probs;
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "other targets have no instructions for most products")
)]
pub(crate) mod products;
mod softmax;
pub(crate) mod state;
pub(crate) mod task;
mod values;

/// The phases of a task, which the ISA files instantiate.
pub(crate) mod phases {
    pub(crate) use super::epilogue::finish;
    pub(crate) use super::probs::probs;
    pub(crate) use super::softmax::fold;
    pub(crate) use super::values::{packed_values, repair_nonfinite};
    pub(crate) use crate::kernels::shared::scores::{
        pack_key_codes, pack_keys, pack_queries, packed_scores, stream_scores,
    };
    pub(crate) use crate::kernels::shared::values::{pack_value_codes, pack_values};
}
