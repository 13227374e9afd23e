//! Rows that a store takes and gives: views of device memory with strides.

use crate::tensors::{GpuTensor, GpuTensorMut};
use flashtile_core::dtype::Dtype;
use flashtile_kernel::{bf16, f16};

/// Rows `[1, kv_heads, tokens, dim]` in the memory of a device.
pub type GpuRows<'a, M> = GpuTensor<'a, M>;

/// Rows `[1, kv_heads, tokens, dim]` to fill.
pub type GpuRowsMut<'a, M> = GpuTensorMut<'a, M>;

/// The values of elements, given as bytes.
pub(super) fn to_f32(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|x| f32::from_ne_bytes(*x)).collect(),
        Dtype::F16 => bytes.as_chunks().0.iter().map(|x| f16::from_ne_bytes(*x).to_f32()).collect(),
        Dtype::BF16 => bytes.as_chunks().0.iter().map(|x| bf16::from_ne_bytes(*x).to_f32()).collect(),
    }
}
