//! Tensors of a run in the memory of a device.

use flashtile_core::codec::Codec;
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::inputs::RunError;
use flashtile_core::tensor::{self, ViewError};
use flashtile_kernel::{ScalarType, View, ViewMut};

/// A strided tensor `[batch, heads, rows, dim]`, from the first element of the view on.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuTensor<'a, M> {
    /// The elements, of f32, f16 or bf16: at least as many as shape and strides reach.
    pub view: View<'a, M>,
    /// `[batch, heads, rows, dim]`.
    pub shape: [usize; 4],
    /// Strides in elements; the last is 1.
    pub strides: [usize; 4],
}

/// A strided tensor to fill, like [`GpuTensor`]. No two elements share memory.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuTensorMut<'a, M> {
    /// The elements.
    pub view: ViewMut<'a, M>,
    /// `[batch, heads, rows, dim]`.
    pub shape: [usize; 4],
    /// Strides in elements; the last is 1.
    pub strides: [usize; 4],
}

/// Keys or values, elements or codes, as bytes.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuKv<'a, M> {
    /// The bytes, u8: at least as many as shape and strides reach.
    pub bytes: View<'a, M>,
    /// How a row is stored. The codecs f32, f16 and bf16 are elements.
    pub codec: Codec,
    /// `[batch, heads, rows, dim]`; of a cache `[pages, heads, page_size, dim]`.
    pub shape: [usize; 4],
    /// Bytes from batch entry or page to the next, from head to head, and from row to row; the last is not read for codes.
    pub strides: [usize; 3],
    /// A power of two, at most 16, that the addresses of all rows of elements, or of all pages of codes, are multiples of.
    pub aligned: usize,
    /// Means `[heads, dim]` of centered keys, f32.
    pub means: Option<View<'a, M>>,
}

/// A mask: every axis is 1 or the problem's.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuMask<'a, M> {
    /// The bytes, u8.
    pub bytes: View<'a, M>,
    /// What an element is.
    pub kind: MaskKind,
    /// `[sequences, heads, queries, keys]`.
    pub shape: [usize; 4],
    /// Strides in elements; 0 where an axis is broadcast.
    pub strides: [usize; 4],
}

/// Which page holds which token: a block table on the device.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuTables<'a, M> {
    /// Pages `[sequences, width]`, u32.
    pub table: View<'a, M>,
    /// Entries of a sequence.
    pub width: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Whether a sequence's entries are a ring, so that block numbers wrap around.
    pub wraps: bool,
}

/// Tensors that a run reads, as [`Inputs`](flashtile_core::inputs::Inputs) in the memory of a device.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuInputs<'a, M> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: GpuTensor<'a, M>,
    /// `[batch, kv_heads, kv_len, head_dim]`; of cached sequences the pages.
    pub k: GpuKv<'a, M>,
    /// `[batch, kv_heads, kv_len, value_dim]`; of cached sequences the pages.
    pub v: GpuKv<'a, M>,
    /// Where the tokens of cached sequences lie.
    pub tables: Option<GpuTables<'a, M>>,
    /// Boolean, of the shape [`Problem::tree_shape`](flashtile_core::problem::Problem::tree_shape).
    pub tree: Option<GpuMask<'a, M>>,
    /// Broadcastable to [`Problem::mask_shape`](flashtile_core::problem::Problem::mask_shape).
    pub mask: Option<GpuMask<'a, M>>,
    /// `[q_heads]`, f32.
    pub alibi_slopes: Option<View<'a, M>>,
    /// `[q_heads]` logits, f32.
    pub sinks: Option<View<'a, M>>,
}

/// Tensors that a run writes.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuOutputs<'a, M> {
    /// `[batch, q_heads, q_len, value_dim]`.
    pub out: GpuTensorMut<'a, M>,
    /// Logsumexp, dense `[batch, q_heads, q_len]`, f32, where wanted.
    pub lse: Option<ViewMut<'a, M>>,
}

impl<'a, M> GpuInputs<'a, M> {
    /// Inputs without tables, masks, ALiBi slopes or sinks; add them through the fields.
    #[must_use]
    pub const fn new(q: GpuTensor<'a, M>, k: GpuKv<'a, M>, v: GpuKv<'a, M>) -> Self {
        Self { q, k, v, tables: None, tree: None, mask: None, alibi_slopes: None, sinks: None }
    }
}

impl<'a, M> GpuOutputs<'a, M> {
    /// Outputs without logsumexp; add it through the field.
    #[must_use]
    pub const fn new(out: GpuTensorMut<'a, M>) -> Self {
        Self { out, lse: None }
    }
}

impl<M> GpuTensor<'_, M> {
    /// Checks that the view has the elements that shape and strides reach.
    ///
    /// # Errors
    /// [`ViewError::TooSmall`], [`ViewError::Overflow`] or [`ViewError::InnerStride`].
    pub fn check(&self) -> Result<(), ViewError> {
        tensor::check(self.shape, self.strides, self.view.len())
    }
}

impl<M> GpuTensorMut<'_, M> {
    /// As [`GpuTensor::check`], and that no two elements share memory.
    ///
    /// # Errors
    /// As [`GpuTensor::check`], and [`ViewError::Overlap`].
    pub fn check(&self) -> Result<(), ViewError> {
        tensor::check(self.shape, self.strides, self.view.len())?;
        tensor::check_disjoint(self.shape, self.strides)
    }
}

impl<M> GpuKv<'_, M> {
    /// Checks that the view has the bytes that shape and strides reach, that rows are aligned as `aligned` says, and that there is a mean
    /// for each head.
    pub(crate) fn check(&self, name: &'static str) -> Result<(), RunError> {
        let Self { codec, shape: [batch, heads, rows, dim], strides: [b, h, row], aligned, .. } = *self;
        let row_bytes = codec.row_bytes(dim);
        let (shape, strides) = match codec.dtype() {
            Some(_) => ([batch, heads, rows, row_bytes], [b, h, row, 1]),
            // Rows of a page follow one another.
            None => ([batch, heads, 1, rows.saturating_mul(row_bytes)], [b, h, 0, 1]),
        };
        let fits = tensor::check(shape, strides, self.bytes.len());
        fits.map_err(|error| RunError::Memory { tensor: name, error })?;
        let aligned = codec.dtype().map_or(1, Dtype::bytes).max(aligned);
        let steps = shape.into_iter().zip(strides).take(3).filter(|(n, _)| *n > 1).map(|(_, stride)| stride);
        if let Some(got) = steps.chain([self.bytes.span().offset]).find(|at| !at.is_multiple_of(aligned)) {
            return Err(RunError::Alignment { tensor: name, aligned, got });
        }
        let (expected, got) = (heads.saturating_mul(dim), self.means.map_or(usize::MAX, |means| means.len()));
        if got < expected { Err(RunError::Length { tensor: "k.means", expected, got }) } else { Ok(()) }
    }
}

impl<M> GpuMask<'_, M> {
    /// Checks that the view has the bytes of the elements that shape and strides reach.
    pub(crate) fn check(&self, name: &'static str) -> Result<(), RunError> {
        let size = match self.kind {
            MaskKind::Bool => 1,
            MaskKind::Additive(dtype) => dtype.bytes(),
        };
        let refused = |error| RunError::Memory { tensor: name, error };
        let (needed, got) =
            (tensor::reach(self.shape, self.strides).map_err(refused)?, self.bytes.len() / size);
        if needed > got { Err(refused(ViewError::TooSmall { needed, got })) } else { Ok(()) }
    }
}

impl<M> GpuTables<'_, M> {
    /// Checks that the table has a line for each sequence.
    pub(crate) fn check(&self, sequences: usize) -> Result<(), RunError> {
        let (expected, got) = (sequences.saturating_mul(self.width), self.table.len());
        if got < expected { Err(RunError::Length { tensor: "tables.table", expected, got }) } else { Ok(()) }
    }
}

impl<M> GpuInputs<'_, M> {
    /// Checks that the memory of every tensor holds what its shape and strides reach: kernels read there whatever they are told.
    pub(crate) fn check(&self, sequences: usize) -> Result<(), RunError> {
        self.q.check().map_err(|error| RunError::Memory { tensor: "q", error })?;
        self.k.check("k")?;
        self.v.check("v")?;
        self.tables.map_or(Ok(()), |tables| tables.check(sequences))?;
        self.tree.map_or(Ok(()), |tree| tree.check("tree"))?;
        self.mask.map_or(Ok(()), |mask| mask.check("mask"))
    }
}

macro_rules! copies {
    ($($Of:ident)*) => {$(
        impl<M> Clone for $Of<'_, M> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<M> Copy for $Of<'_, M> {}
    )*};
}
copies!(GpuTensor GpuKv GpuMask GpuTables GpuInputs);

/// The dtype of elements, if tensors have it.
#[must_use]
pub const fn dtype_of(element: ScalarType) -> Option<Dtype> {
    match element {
        ScalarType::F32 => Some(Dtype::F32),
        ScalarType::F16 => Some(Dtype::F16),
        ScalarType::Bf16 => Some(Dtype::BF16),
        _ => None,
    }
}

/// The largest power of two, at most 16, that divides all numbers.
#[must_use]
pub fn alignment(numbers: impl IntoIterator<Item = usize>) -> usize {
    1 << numbers.into_iter().fold(16, |bits, n| bits | n).trailing_zeros()
}
