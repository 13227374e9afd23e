//! Tensors in the memory of a device: ranges of buffers with shapes and strides.

use flashtile_core::codec::Codec;
use flashtile_core::dtype::Dtype;
use flashtile_core::tensor::{ViewError, check_disjoint, check_strides, reach};
use flashtile_gpu::tensors::{GpuKv, GpuTensor, GpuTensorMut, alignment, dtype_of};
use flashtile_kernel::metal::Memory;
use flashtile_kernel::{ScalarType, Span, View, ViewMut};

/// A tensor `[batch, heads, rows, dim]` whose first element is the memory's, with strides in elements, of which the last is 1:
/// `[heads * rows * dim, rows * dim, dim, 1]` where it is dense, `[rows * heads * dim, dim, heads * dim, 1]` where heads of a row lie side by
/// side.
///
/// # Errors
/// [`ViewError::TooSmall`], [`ViewError::Overflow`] or [`ViewError::InnerStride`].
pub fn tensor(
    memory: &Memory,
    shape: [usize; 4],
    strides: [usize; 4],
) -> Result<GpuTensor<'_, Memory>, ViewError> {
    check_strides(shape, strides)?;
    let view = View::new(memory, span(memory, shape, strides)?);
    Ok(GpuTensor { view, shape, strides })
}

/// A tensor to fill, like [`tensor`].
///
/// # Errors
/// As [`tensor`], and [`ViewError::Overlap`].
pub fn tensor_mut(
    memory: &mut Memory,
    shape: [usize; 4],
    strides: [usize; 4],
) -> Result<GpuTensorMut<'_, Memory>, ViewError> {
    check_disjoint(shape, strides)?;
    let span = span(memory, shape, strides)?;
    Ok(GpuTensorMut { view: ViewMut::new(memory, span), shape, strides })
}

/// Keys or values of elements `[batch, heads, rows, dim]`, like [`tensor`]; of a cache of the caller's `[pages, heads, page_size, dim]`. A
/// cache of flashtile's gives its own ([`MetalStore::kv`](crate::MetalStore::kv)).
///
/// # Errors
/// As [`tensor`]; [`ViewError::Misaligned`] where the memory's elements are no f32, f16 or bf16.
pub fn kv(memory: &Memory, shape: [usize; 4], strides: [usize; 4]) -> Result<GpuKv<'_, Memory>, ViewError> {
    check_strides(shape, strides)?;
    let size = memory.element().bytes();
    let len = span(memory, shape, strides)?.len * size;
    let dtype = dtype_of(memory.element()).ok_or(ViewError::Misaligned { dtype: Dtype::F32 })?;
    // The stride of an axis of a single index may be anything.
    let [batch, head, row, _] = strides.map(|stride| stride.saturating_mul(size));
    let used = shape.iter().zip([batch, head, row]).filter(|(n, _)| **n > 1).map(|(_, stride)| stride);
    Ok(GpuKv {
        bytes: View::new(memory, Span { element: ScalarType::U8, offset: 0, len }),
        codec: Codec::of(dtype),
        shape,
        strides: [batch, head, row],
        // Buffers start at pages.
        aligned: alignment(used.chain([memory.offset()])),
        means: None,
    })
}

/// The elements that a tensor reaches.
fn span(memory: &Memory, shape: [usize; 4], strides: [usize; 4]) -> Result<Span, ViewError> {
    let (needed, got) = (reach(shape, strides)?, memory.len());
    if needed > got {
        return Err(ViewError::TooSmall { needed, got });
    }
    Ok(Span { element: memory.element(), offset: 0, len: needed })
}
