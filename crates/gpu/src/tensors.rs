//! Tensors of a run in the memory of a device: the one vocabulary of every GPU backend.
//!
//! `M` is the memory of the device. It is allocated by the device, or lent by another library: `Gpu::borrow` of CUDA and of Metal makes
//! one of a raw address or buffer.

use crate::codecs::head_factors_len;
use flashtile_core::codec::Codec;
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::inputs::RunError;
use flashtile_core::problem::{KeyPart, Problem};
use flashtile_core::tensor::{self, ViewError};
use flashtile_kernel::{DeviceMemory, ScalarType, Span, View, ViewMut};

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
    /// Means `[heads, dim]` of centered keys, f32.
    pub means: Option<View<'a, M>>,
    /// [`head_factors`](crate::codecs::head_factors) of equalized keys, f32.
    pub factors: Option<View<'a, M>>,
}

/// A mask: every axis is 1 or the problem's.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuMask<'a, M> {
    /// The bytes, u8.
    pub bytes: View<'a, M>,
    /// The type of an element.
    pub kind: MaskKind,
    /// `[sequences, heads, queries, keys]`.
    pub shape: [usize; 4],
    /// Strides in elements; 0 where an axis is broadcast.
    pub strides: [usize; 4],
}

/// Which page holds which token: a block table on the device. Each token that a query row sees has an entry, which is one of the pages of the
/// pool: kernels read the entries, and nobody checks them. [`Session::run_paged`](crate::session::Session::run_paged) checks tables of the
/// host.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuTables<'a, M> {
    /// Pages `[sequences, width]`, u32.
    pub table: View<'a, M>,
    /// Entries of a sequence.
    pub width: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// True if a sequence's entries are a ring, so that block numbers wrap around.
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
    /// Pages of the tokens that are kept in 16 bits, where the problem has such tokens.
    pub kept: GpuKeptInputs<'a, M>,
    /// Boolean, of the shape [`Problem::tree_shape`](flashtile_core::problem::Problem::tree_shape).
    pub tree: Option<GpuMask<'a, M>>,
    /// Broadcastable to [`Problem::mask_shape`](flashtile_core::problem::Problem::mask_shape).
    pub mask: Option<GpuMask<'a, M>>,
    /// `[q_heads]`, f32.
    pub alibi_slopes: Option<View<'a, M>>,
    /// `[q_heads]` logits, f32.
    pub sinks: Option<View<'a, M>>,
}

/// Pages of the tokens that a cache keeps in 16 bits beside its codes, as [`KeptInputs`](flashtile_core::inputs::KeptInputs) in the
/// memory of a device.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuKeptInputs<'a, M> {
    /// The first tokens.
    pub first: Option<GpuKeptPages<'a, M>>,
    /// The last tokens.
    pub last: Option<GpuKeptPages<'a, M>>,
}

/// Pages of keys and values of kept tokens.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuKeptPages<'a, M> {
    /// `[pages, kv_heads, page_size, head_dim]`.
    pub k: GpuKv<'a, M>,
    /// `[pages, kv_heads, page_size, value_dim]`.
    pub v: GpuKv<'a, M>,
    /// Where the tokens lie; not read where a session is given tables of the host.
    pub tables: Option<GpuTables<'a, M>>,
}

impl<M> Default for GpuKeptInputs<'_, M> {
    fn default() -> Self {
        Self { first: None, last: None }
    }
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
        let kept = GpuKeptInputs { first: None, last: None };
        Self { q, k, v, tables: None, kept, tree: None, mask: None, alibi_slopes: None, sinks: None }
    }

    /// The inputs of a [part](flashtile_core::problem::Problem::part) of the problem; `None` where the part has no pages.
    #[must_use]
    pub fn part(&self, part: KeyPart) -> Option<Self> {
        let pages = match part {
            KeyPart::All => return Some(*self),
            KeyPart::Codes => return Some(Self { kept: GpuKeptInputs::default(), ..*self }),
            KeyPart::First => self.kept.first,
            KeyPart::Last => self.kept.last,
        };
        let GpuKeptPages { k, v, tables } = pages?;
        Some(Self { k, v, tables, kept: GpuKeptInputs::default(), ..*self })
    }
}

impl<'a, M> GpuOutputs<'a, M> {
    /// Outputs without logsumexp; add it through the field.
    #[must_use]
    pub const fn new(out: GpuTensorMut<'a, M>) -> Self {
        Self { out, lse: None }
    }
}

impl<'a, M> GpuTensor<'a, M> {
    /// A tensor whose first element is the view's, with strides in elements, of which the last is 1.
    ///
    /// # Errors
    /// The errors of [`GpuTensor::check`].
    pub fn new(view: View<'a, M>, shape: [usize; 4], strides: [usize; 4]) -> Result<Self, ViewError> {
        let tensor = Self { view, shape, strides };
        tensor.check().map(|()| tensor)
    }

    /// Checks that the view has the elements that shape and strides reach.
    ///
    /// # Errors
    /// [`ViewError::TooSmall`], [`ViewError::Overflow`] or [`ViewError::InnerStride`].
    pub fn check(&self) -> Result<(), ViewError> {
        tensor::check(self.shape, self.strides, self.view.len())
    }
}

impl<'a, M> GpuTensorMut<'a, M> {
    /// A tensor to fill, like [`GpuTensor::new`].
    ///
    /// # Errors
    /// The errors of [`GpuTensorMut::check`].
    pub fn new(view: ViewMut<'a, M>, shape: [usize; 4], strides: [usize; 4]) -> Result<Self, ViewError> {
        let tensor = Self { view, shape, strides };
        tensor.check().map(|()| tensor)
    }

    /// Checks the same as [`GpuTensor::check`], and that no two elements share memory.
    ///
    /// # Errors
    /// The errors of [`GpuTensor::check`], and [`ViewError::Overlap`].
    pub fn check(&self) -> Result<(), ViewError> {
        tensor::check(self.shape, self.strides, self.view.len())?;
        tensor::check_disjoint(self.shape, self.strides)
    }
}

impl<'a, M> GpuKv<'a, M> {
    /// Keys or values of elements `[batch, heads, rows, dim]`; of a cache of the caller's `[pages, heads, page_size, dim]`.
    ///
    /// # Errors
    /// [`ViewError::Element`] where the elements are no f32, f16 or bf16.
    pub fn elements(tensor: GpuTensor<'a, M>) -> Result<Self, ViewError> {
        let (Span { element, offset, len }, shape) = (tensor.view.span(), tensor.shape);
        let dtype = dtype_of(element).ok_or(ViewError::Element)?;
        let bytes = |n: usize| n.saturating_mul(dtype.bytes());
        let span = Span { element: ScalarType::U8, offset: bytes(offset), len: bytes(len) };
        // The stride of an axis of a single index may be anything.
        let [batch, head, row, _] = tensor.strides.map(bytes);
        let view = View::new(tensor.view.memory(), span);
        Ok(Self {
            bytes: view,
            codec: dtype.into(),
            shape,
            strides: [batch, head, row],
            means: None,
            factors: None,
        })
    }

    /// Pages of codes `[pages, heads, page_size, dim]`, as [`CodePages`](flashtile_core::codec::CodePages) has them in main memory: a page of
    /// a head has `page_size` times [`Codec::row_bytes`] bytes. `strides` are bytes from page to page and from head to head. They and the
    /// address are multiples of the size of a scale: 2, or 4 of the codecs of mlx-native; multiples of 16 are read in vectors.
    #[must_use]
    pub const fn codes(
        codec: Codec,
        bytes: View<'a, M>,
        shape: [usize; 4],
        [page, head]: [usize; 2],
    ) -> Self {
        Self { bytes, codec, shape, strides: [page, head, 0], means: None, factors: None }
    }

    /// Sets the means of centered keys, `[heads, dim]`, f32, which are added to every row.
    #[must_use]
    pub const fn centered(mut self, means: View<'a, M>) -> Self {
        self.means = Some(means);
        self
    }

    /// Sets the factors of equalized keys, f32, as [`head_factors`](crate::codecs::head_factors) gives them for the factors `[heads, dim]`
    /// that keys were divided by before they were rotated and encoded, without their mean.
    #[must_use]
    pub const fn equalized(mut self, factors: View<'a, M>) -> Self {
        self.factors = Some(factors);
        self
    }

    /// Sizes and strides, in bytes, of the axes along which rows of elements, or pages of codes, follow one another.
    fn axes(&self) -> [(usize, usize); 3] {
        let ([batch, heads, rows, _], [b, h, row]) = (self.shape, self.strides);
        let is_elements = self.codec.dtype().is_some();
        [(batch, b), (heads, h), if is_elements { (rows, row) } else { (1, 0) }]
    }
}

impl<M: DeviceMemory> GpuKv<'_, M> {
    /// The distances of rows of elements, or of pages of codes, from an aligned address.
    fn offsets(&self) -> impl Iterator<Item = usize> {
        let used = self.axes().into_iter().filter(|(n, _)| *n > 1).map(|(_, stride)| stride);
        let start = self.bytes.memory().address().wrapping_add(self.bytes.span().offset as u64);
        used.chain([start as usize])
    }

    /// The largest power of two, at most 16, that the addresses of all rows of elements, or of all pages of codes, are multiples of.
    #[must_use]
    pub fn alignment(&self) -> usize {
        alignment(self.offsets())
    }

    /// Checks that the view has the bytes that shape and strides reach, that elements and scales are aligned, and that there are a mean and
    /// factors for each head.
    pub(crate) fn check(&self, name: &'static str) -> Result<(), RunError> {
        let Self { codec, shape: [batch, heads, rows, dim], strides: [b, h, row], .. } = *self;
        let row_bytes = codec.row_bytes(dim);
        let (shape, strides) = match codec.dtype() {
            Some(_) => ([batch, heads, rows, row_bytes], [b, h, row, 1]),
            // Rows of a page follow one another.
            None => ([batch, heads, 1, rows.saturating_mul(row_bytes)], [b, h, 0, 1]),
        };
        let fits = tensor::check(shape, strides, self.bytes.len());
        fits.map_err(|error| RunError::Memory { tensor: name, error })?;
        let aligned = codec.alignment();
        if let Some(got) = self.offsets().find(|at| !at.is_multiple_of(aligned)) {
            return Err(RunError::Alignment { tensor: name, aligned, got });
        }
        let (expected, got) = (heads.saturating_mul(dim), self.means.map_or(usize::MAX, |means| means.len()));
        if got < expected {
            return Err(RunError::Length { tensor: "k.means", expected, got });
        }
        let Some(factors) = self.factors else { return Ok(()) };
        let of_head = if codec.supports_key_factors() { head_factors_len(codec, dim) } else { 0 };
        let (expected, got) = (heads.saturating_mul(of_head), factors.len());
        // A codec that takes no factors has none, not even superfluous ones.
        let fits = if of_head == 0 { got == 0 } else { got >= expected };
        if fits { Ok(()) } else { Err(RunError::Length { tensor: "k.factors", expected, got }) }
    }
}

impl<M: DeviceMemory> GpuTensor<'_, M> {
    /// The largest power of two, at most 16, that the addresses of all rows are multiples of.
    #[must_use]
    pub fn alignment(&self) -> usize {
        row_alignment(self.view.memory(), self.view.span(), self.shape, self.strides)
    }
}

impl<M: DeviceMemory> GpuTensorMut<'_, M> {
    /// The alignment of all rows, as [`GpuTensor::alignment`] counts it.
    #[must_use]
    pub fn alignment(&self) -> usize {
        row_alignment(self.view.memory(), self.view.span(), self.shape, self.strides)
    }
}

fn row_alignment(
    memory: &impl DeviceMemory,
    Span { element, offset, .. }: Span,
    shape: [usize; 4],
    strides: [usize; 4],
) -> usize {
    let used = shape.into_iter().zip(strides).take(3).filter(|(n, _)| *n > 1).map(|(_, stride)| stride);
    let offsets = used.chain([offset]).map(|elements| elements.wrapping_mul(element.bytes()));
    alignment(offsets.chain([memory.address() as usize]))
}

impl<'a, M> GpuMask<'a, M> {
    /// A mask whose first element is at the first of `bytes`, u8. Strides are in elements; the last one is 1, or 0 where all keys of a query
    /// have the same element.
    ///
    /// # Errors
    /// [`ViewError::TooSmall`], [`ViewError::Overflow`] or [`ViewError::InnerStride`].
    pub fn new(
        kind: MaskKind,
        bytes: View<'a, M>,
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self, ViewError> {
        tensor::check_mask_strides(shape, strides)?;
        let mask = Self { bytes, kind, shape, strides };
        mask.check_reach().map(|()| mask)
    }

    fn check_reach(&self) -> Result<(), ViewError> {
        let (needed, got) = (tensor::reach(self.shape, self.strides)?, self.bytes.len() / self.kind.bytes());
        if needed > got { Err(ViewError::TooSmall { needed, got }) } else { Ok(()) }
    }

    /// Elements between neighbours along each axis, 0 where the axis is broadcast.
    #[must_use]
    pub fn steps(&self) -> [usize; 4] {
        std::array::from_fn(|axis| if self.shape[axis] == 1 { 0 } else { self.strides[axis] })
    }
}

impl<M: DeviceMemory> GpuMask<'_, M> {
    /// Checks that the view has the bytes of the elements that shape and strides reach, and that they are aligned.
    pub(crate) fn check(&self, name: &'static str) -> Result<(), RunError> {
        let refused = |error| RunError::Memory { tensor: name, error };
        self.check_reach().map_err(refused)?;
        let aligned = self.kind.bytes();
        let got = (self.bytes.memory().address() as usize).wrapping_add(self.bytes.span().offset);
        if got.is_multiple_of(aligned) {
            Ok(())
        } else {
            Err(RunError::Alignment { tensor: name, aligned, got })
        }
    }
}

impl<M> GpuTables<'_, M> {
    /// Checks that the table has a line for each sequence, and an entry for each of its tokens.
    pub(crate) fn check(&self, problem: &Problem) -> Result<(), RunError> {
        let of_width = |width: usize| problem.sequences().len().saturating_mul(width);
        let ends = problem.sequences().iter().map(|sequence| problem.stored(sequence).end);
        let longest = ends.max().unwrap_or(0);
        let needed = if self.wraps { 0 } else { longest.div_ceil(self.page_size.max(1)) };
        let (expected, got) = match self.width < needed {
            true => (of_width(needed), of_width(self.width)),
            false => (of_width(self.width), self.table.len()),
        };
        if got < expected { Err(RunError::Length { tensor: "tables.table", expected, got }) } else { Ok(()) }
    }
}

impl<M: DeviceMemory> GpuInputs<'_, M> {
    /// Checks that the memory of every tensor holds all elements of its shape and strides: kernels do not
    /// check them.
    pub(crate) fn check(&self, problem: &Problem) -> Result<(), RunError> {
        self.q.check().map_err(|error| RunError::Memory { tensor: "q", error })?;
        self.k.check("k")?;
        self.v.check("v")?;
        self.tables.map_or(Ok(()), |tables| tables.check(problem))?;
        self.tree.map_or(Ok(()), |tree| tree.check("tree"))?;
        self.mask.map_or(Ok(()), |mask| mask.check("mask"))
    }
}

/// Makes structs of views `Copy`, whatever the memory is.
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
pub(crate) use copies;

copies!(GpuTensor GpuKv GpuMask GpuTables GpuKeptPages GpuKeptInputs GpuInputs);

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

/// The type of a mask's elements, as kernels know it.
pub(crate) const fn mask_kind(kind: MaskKind) -> u32 {
    match kind {
        MaskKind::Additive(Dtype::F32) => 0,
        MaskKind::Additive(Dtype::F16) => 1,
        MaskKind::Additive(Dtype::BF16) => 2,
        MaskKind::Bool => 3,
    }
}

/// The largest power of two, at most 16, that divides all numbers.
fn alignment(numbers: impl IntoIterator<Item = usize>) -> usize {
    1 << numbers.into_iter().fold(16, |bits, n| bits | n).trailing_zeros()
}
