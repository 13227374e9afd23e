//! Rows that a store takes and gives: views of device memory with strides.

use flashtile_core::dtype::Dtype;
use flashtile_kernel::{ScalarType, View, ViewMut, bf16, f16};

/// Rows `[1, kv_heads, tokens, dim]` in the memory of a device, from the first element of the view on.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuRows<'a, M> {
    /// The elements, of f32, f16 or bf16: at least as many as shape and strides reach.
    pub view: View<'a, M>,
    /// `[1, kv_heads, tokens, dim]`.
    pub shape: [usize; 4],
    /// Strides in elements; the last is 1.
    pub strides: [usize; 4],
}

/// Rows to fill, like [`GpuRows`]. No two elements share memory.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuRowsMut<'a, M> {
    /// The elements.
    pub view: ViewMut<'a, M>,
    /// `[1, kv_heads, tokens, dim]`.
    pub shape: [usize; 4],
    /// Strides in elements; the last is 1.
    pub strides: [usize; 4],
}

/// The dtype of elements, if tensors have it.
pub(super) const fn dtype_of(element: ScalarType) -> Option<Dtype> {
    match element {
        ScalarType::F32 => Some(Dtype::F32),
        ScalarType::F16 => Some(Dtype::F16),
        ScalarType::Bf16 => Some(Dtype::BF16),
        _ => None,
    }
}

/// The values of elements, given as bytes.
pub(super) fn to_f32(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|x| f32::from_ne_bytes(*x)).collect(),
        Dtype::F16 => bytes.as_chunks().0.iter().map(|x| f16::from_ne_bytes(*x).to_f32()).collect(),
        Dtype::BF16 => bytes.as_chunks().0.iter().map(|x| bf16::from_ne_bytes(*x).to_f32()).collect(),
    }
}
