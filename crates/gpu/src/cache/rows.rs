//! Rows that a store takes and gives: views of device memory with strides.

use crate::tensors::{GpuTensor, GpuTensorMut};

/// Rows `[1, kv_heads, tokens, dim]` in the memory of a device.
pub type GpuRows<'a, M> = GpuTensor<'a, M>;

/// Rows `[1, kv_heads, tokens, dim]` to fill.
pub type GpuRowsMut<'a, M> = GpuTensorMut<'a, M>;
