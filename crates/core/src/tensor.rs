//! Strided views of borrowed memory, checked when they are made.
//!
//! Axes are in the logical order `[batch, heads, rows, dim]`; strides, in elements, give the order in memory, and the
//! innermost stride is 1. Head-major (`bhsd`), sequence-major (`bshd`) and packed tensors are views, never copies.

#![allow(unsafe_code)]

use crate::dtype::{Dtype, Element, MaskKind};
use half::{bf16, f16};
use std::marker::PhantomData;
use std::ops::Range;

/// Why memory cannot be viewed with a shape.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ViewError {
    /// The memory holds fewer elements than shape and strides reach.
    TooSmall {
        /// Elements the view reaches.
        needed: usize,
        /// Elements found.
        got: usize,
    },
    /// Offsets of elements overflow.
    Overflow,
    /// The innermost stride is not 1.
    InnerStride {
        /// The stride given, in elements.
        got: usize,
    },
    /// Two elements of a mutable view would share memory.
    Overlap {
        /// The strides, in elements.
        strides: [usize; 4],
    },
    /// There is no memory for the elements of an [`OwnedTensor`](crate::owned::OwnedTensor).
    Memory {
        /// Bytes that were needed.
        bytes: usize,
    },
    /// The address of bytes is not a multiple of the element size.
    Misaligned {
        /// Element type.
        dtype: Dtype,
    },
    /// Elements of device memory are neither f32 nor f16 nor bf16.
    Element,
}

impl std::fmt::Display for ViewError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooSmall { needed, got } => {
                write!(f, "view reaches {needed} elements, memory holds {got}")
            }
            Self::Overflow => f.write_str("shape times strides is not addressable"),
            Self::InnerStride { got } => write!(f, "innermost stride is {got}, expected 1"),
            Self::Overlap { strides } => write!(f, "elements overlap under strides {strides:?}"),
            Self::Memory { bytes } => write!(f, "no memory for {bytes} bytes"),
            Self::Misaligned { dtype } => {
                write!(f, "memory is not aligned to the {} bytes of {dtype}", dtype.bytes())
            }
            Self::Element => f.write_str("elements are neither f32 nor f16 nor bf16"),
        }
    }
}

impl std::error::Error for ViewError {}

/// Elements from the first to one past the last that `shape` reaches with `strides`; 0 for an empty shape.
pub fn reach(shape: [usize; 4], strides: [usize; 4]) -> Result<usize, ViewError> {
    if shape.contains(&0) {
        return Ok(0);
    }
    let mut last = 0usize;
    for (n, stride) in shape.into_iter().zip(strides) {
        let step = (n - 1).checked_mul(stride).ok_or(ViewError::Overflow)?;
        last = last.checked_add(step).ok_or(ViewError::Overflow)?;
    }
    let count = last.checked_add(1).ok_or(ViewError::Overflow)?;
    // Byte offsets of the widest dtype must fit in isize, as pointer arithmetic requires.
    match count.checked_mul(4) {
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(count),
        _ => Err(ViewError::Overflow),
    }
}

/// Checks that memory of `len` elements holds all elements of `shape` with `strides`, whose innermost is 1.
///
/// # Errors
/// [`ViewError::TooSmall`], [`ViewError::Overflow`] or [`ViewError::InnerStride`].
pub fn check(shape: [usize; 4], strides: [usize; 4], len: usize) -> Result<(), ViewError> {
    let needed = reach(shape, strides)?;
    if needed > len {
        return Err(ViewError::TooSmall { needed, got: len });
    }
    if shape[3] > 1 && strides[3] != 1 {
        return Err(ViewError::InnerStride { got: strides[3] });
    }
    Ok(())
}

/// Checks shape and strides of a mask in memory of unknown size: keys may be broadcast, so that the innermost stride is 0 or 1.
///
/// # Errors
/// [`ViewError::Overflow`] or [`ViewError::InnerStride`].
pub fn check_mask_strides(shape: [usize; 4], strides: [usize; 4]) -> Result<(), ViewError> {
    check_mask(shape, strides, usize::MAX)
}

/// Like [`check`], but keys may be broadcast: the innermost stride is 0 or 1.
fn check_mask(shape: [usize; 4], strides: [usize; 4], len: usize) -> Result<(), ViewError> {
    let [b, h, i, inner] = strides;
    if inner == 0 {
        // One key stands for all.
        return check([shape[0], shape[1], shape[2], shape[3].min(1)], [b, h, i, 1], len);
    }
    check(shape, strides, len)
}

/// Checks shape and strides of memory of unknown size.
///
/// # Errors
/// [`ViewError::Overflow`] or [`ViewError::InnerStride`].
pub fn check_strides(shape: [usize; 4], strides: [usize; 4]) -> Result<(), ViewError> {
    check(shape, strides, usize::MAX)
}

/// Checks that no two elements of a view share memory.
///
/// # Errors
/// [`ViewError::Overlap`]. The check is conservative: axes that interleave without sharing an element are refused too.
pub fn check_disjoint(shape: [usize; 4], strides: [usize; 4]) -> Result<(), ViewError> {
    if shape.contains(&0) {
        return Ok(());
    }
    let mut axes: Vec<(usize, usize)> = strides.into_iter().zip(shape).filter(|&(_, n)| n > 1).collect();
    axes.sort_unstable();
    let mut span = 1usize;
    for (stride, n) in axes {
        if stride < span {
            return Err(ViewError::Overlap { strides });
        }
        span = stride.saturating_mul(n);
    }
    Ok(())
}

/// Elements before `[b, h, row, 0]`. Strides of an axis without elements may be anything, so that sums wrap.
#[inline]
fn offset(index: [usize; 3], strides: [usize; 3]) -> usize {
    let [b, h, row] = index;
    let [sb, sh, sr] = strides;
    b.wrapping_mul(sb).wrapping_add(h.wrapping_mul(sh)).wrapping_add(row.wrapping_mul(sr))
}

/// Strides of a dense tensor `[d0, d1, d2, d3]`.
pub fn dense([_, d1, d2, d3]: [usize; 4]) -> [usize; 4] {
    let s2 = d3;
    let s1 = d2.saturating_mul(s2);
    [d1.saturating_mul(s1), s1, s2, 1]
}

/// Shape and strides in logical order of a dense `[batch, rows, heads, dim]` tensor.
fn from_bshd(shape: [usize; 4]) -> ([usize; 4], [usize; 4]) {
    let strides = dense(shape);
    ([shape[0], shape[2], shape[1], shape[3]], [strides[0], strides[2], strides[1], strides[3]])
}

/// The shape of some rows of every head.
fn shape_of_rows([batch, heads, got, dim]: [usize; 4], rows: &Range<usize>) -> Result<[usize; 4], ViewError> {
    if rows.start > rows.end || rows.end > got {
        return Err(ViewError::TooSmall { needed: rows.end.max(rows.start), got });
    }
    Ok([batch, heads, rows.len(), dim])
}

/// A read-only view `[batch, heads, rows, dim]` of f32, f16 or bf16 elements.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    ptr: *const u8,
    dtype: Dtype,
    shape: [usize; 4],
    strides: [usize; 4],
    memory: PhantomData<&'a [u8]>,
}

// SAFETY: the view only reads the memory it borrows, as `&[T]` of a Sync element type would.
unsafe impl Send for TensorView<'_> {}
// SAFETY: as for Send.
unsafe impl Sync for TensorView<'_> {}

impl<'a> TensorView<'a> {
    /// A view with any shape and strides (in elements, logical order `[batch, heads, rows, dim]`, last one 1).
    ///
    /// # Errors
    /// [`ViewError::TooSmall`], [`ViewError::Overflow`] or [`ViewError::InnerStride`].
    pub fn strided<T: Element>(
        data: &'a [T],
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self, ViewError> {
        check(shape, strides, data.len())?;
        Ok(Self { ptr: data.as_ptr().cast(), dtype: T::DTYPE, shape, strides, memory: PhantomData })
    }

    /// A view of raw bytes in native byte order, such as the contents of a file.
    ///
    /// # Errors
    /// The errors of [`TensorView::strided`], and [`ViewError::Misaligned`].
    pub fn from_bytes(
        dtype: Dtype,
        data: &'a [u8],
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self, ViewError> {
        check(shape, strides, data.len() / dtype.bytes())?;
        if !(data.as_ptr() as usize).is_multiple_of(dtype.bytes()) {
            return Err(ViewError::Misaligned { dtype });
        }
        Ok(Self { ptr: data.as_ptr(), dtype, shape, strides, memory: PhantomData })
    }

    /// A dense head-major tensor stored as `[batch, heads, rows, dim]`.
    ///
    /// # Errors
    /// The errors of [`TensorView::strided`].
    pub fn bhsd<T: Element>(data: &'a [T], shape: [usize; 4]) -> Result<Self, ViewError> {
        Self::strided(data, shape, dense(shape))
    }

    /// A dense sequence-major tensor stored as `[batch, rows, heads, dim]`, the shape given in that order.
    ///
    /// # Errors
    /// The errors of [`TensorView::strided`].
    pub fn bshd<T: Element>(data: &'a [T], shape: [usize; 4]) -> Result<Self, ViewError> {
        let (shape, strides) = from_bshd(shape);
        Self::strided(data, shape, strides)
    }

    /// Packed sequences stored as `[total rows, heads, dim]`: a single batch entry.
    ///
    /// # Errors
    /// The errors of [`TensorView::strided`].
    pub fn packed<T: Element>(data: &'a [T], [total, heads, dim]: [usize; 3]) -> Result<Self, ViewError> {
        Self::bshd(data, [1, total, heads, dim])
    }

    /// A view of memory that no Rust slice describes.
    ///
    /// # Errors
    /// [`ViewError::Overflow`], [`ViewError::InnerStride`] or [`ViewError::Misaligned`].
    ///
    /// # Safety
    /// For `'a`, every element that `shape` reaches from `ptr` with `strides` lies in one allocation, is readable and
    /// is not written.
    pub unsafe fn from_raw_parts(
        dtype: Dtype,
        ptr: *const u8,
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self, ViewError> {
        check(shape, strides, usize::MAX)?;
        if !(ptr as usize).is_multiple_of(dtype.bytes()) {
            return Err(ViewError::Misaligned { dtype });
        }
        Ok(Self { ptr, dtype, shape, strides, memory: PhantomData })
    }

    /// Element type.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// `[batch, heads, rows, dim]`.
    #[must_use]
    pub const fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Strides in elements, in the order of the shape.
    #[must_use]
    pub const fn strides(&self) -> [usize; 4] {
        self.strides
    }

    /// The first `columns` elements of every row, in the same memory.
    ///
    /// ```
    /// # use flashtile::TensorView;
    /// let rows = vec![0.5f32; 3 * 24];
    /// let k = TensorView::bhsd(&rows, [1, 1, 3, 24])?;
    /// let v = k.first_columns(16)?;
    /// assert_eq!((v.shape(), v.strides()), ([1, 1, 3, 16], k.strides()));
    /// # Ok::<(), flashtile::ViewError>(())
    /// ```
    ///
    /// # Errors
    /// [`ViewError::TooSmall`] if rows have fewer elements.
    pub fn first_columns(&self, columns: usize) -> Result<Self, ViewError> {
        let [.., got] = self.shape;
        if columns > got {
            Err(ViewError::TooSmall { needed: columns, got })
        } else {
            Ok(self.columns(columns))
        }
    }

    /// [`TensorView::first_columns`] of as many columns as rows have, or fewer.
    pub(crate) const fn columns(&self, columns: usize) -> Self {
        let [batch, heads, rows, _] = self.shape;
        Self { shape: [batch, heads, rows, columns], ..*self }
    }

    /// The view of some rows of every head.
    ///
    /// ```
    /// # use flashtile::TensorView;
    /// let rows: Vec<f32> = (0..6 * 16).map(|x| x as f32).collect();
    /// let q = TensorView::packed(&rows, [6, 1, 16])?;
    /// assert_eq!(q.rows(2..5)?.get([0, 0, 0, 1]), 33.0);
    /// # Ok::<(), flashtile::ViewError>(())
    /// ```
    ///
    /// # Errors
    /// [`ViewError::TooSmall`] if there are fewer rows.
    pub fn rows(&self, rows: Range<usize>) -> Result<Self, ViewError> {
        let shape = shape_of_rows(self.shape, &rows)?;
        let ptr = if rows.is_empty() { self.ptr } else { self.row(0, 0, rows.start) };
        Ok(Self { ptr, shape, ..*self })
    }

    /// Returns true if the rows are the first elements of the rows of `other`, in the same memory.
    #[must_use]
    pub fn is_first_columns_of(&self, other: &Self) -> bool {
        let ([.., columns], [.., dim]) = (self.shape, other.shape);
        columns <= dim
            && (self.ptr, self.dtype, self.strides) == (other.ptr, other.dtype, other.strides)
            && self.shape[..3] == other.shape[..3]
    }

    /// Address of element `[b, h, row, 0]`. Whoever dereferences it claims that the element exists.
    pub fn row(&self, b: usize, h: usize, row: usize) -> *const u8 {
        let [sb, sh, sr, _] = self.strides;
        self.ptr.wrapping_add(offset([b, h, row], [sb, sh, sr]).wrapping_mul(self.dtype.bytes()))
    }

    /// The memory from the first element to the last, including gaps between rows.
    ///
    /// # Safety
    /// All of it is initialised.
    pub unsafe fn span(&self) -> &'a [u8] {
        let bytes = reach(self.shape, self.strides).map_or(0, |n| n * self.dtype.bytes());
        // SAFETY: the constructor proved that the memory from the first element to the last lies in one allocation.
        unsafe { std::slice::from_raw_parts(self.ptr, bytes) }
    }

    /// The bytes of row `[b, h, row]`.
    ///
    /// # Panics
    /// If an index is outside the shape, or rows have no elements.
    pub fn row_bytes(&self, [b, h, row]: [usize; 3]) -> &'a [u8] {
        let [nb, nh, nr, nd] = self.shape;
        assert!(b < nb && h < nh && row < nr && nd > 0, "[{b}, {h}, {row}] in {:?}", self.shape);
        // SAFETY: the assertion puts the row inside the shape, its elements are contiguous, and the constructor
        // proved that they are readable for `'a`; elements have no padding.
        unsafe { std::slice::from_raw_parts(self.row(b, h, row), nd * self.dtype.bytes()) }
    }

    /// Element `[b, h, row, i]` as f32; exact.
    ///
    /// # Panics
    /// If an index is outside the shape.
    #[must_use]
    pub fn get(&self, [b, h, row, i]: [usize; 4]) -> f32 {
        let [nb, nh, nr, nd] = self.shape;
        assert!(b < nb && h < nh && row < nr && i < nd, "[{b}, {h}, {row}, {i}] in {:?}", self.shape);
        let p = self.row(b, h, row);
        // SAFETY: the assertion puts the element inside the shape, and the constructor proved that every such element
        // lies in readable, aligned memory of this dtype.
        unsafe {
            match self.dtype {
                Dtype::F32 => *p.cast::<f32>().add(i),
                Dtype::F16 => (*p.cast::<half::f16>().add(i)).to_f32(),
                Dtype::BF16 => (*p.cast::<half::bf16>().add(i)).to_f32(),
            }
        }
    }
}

/// A mutable view `[batch, heads, rows, dim]`; no two elements share memory.
#[derive(Debug)]
pub struct TensorViewMut<'a> {
    ptr: *mut u8,
    dtype: Dtype,
    shape: [usize; 4],
    strides: [usize; 4],
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: the view owns the exclusive borrow of plain-data memory, as `&mut [T]` of a Send element type would.
unsafe impl Send for TensorViewMut<'_> {}
// SAFETY: a shared reference to the view gives no access to the elements outside the crate; inside it, threads write
// disjoint rows.
unsafe impl Sync for TensorViewMut<'_> {}

impl<'a> TensorViewMut<'a> {
    /// A view with any shape and strides (in elements, logical order `[batch, heads, rows, dim]`, last one 1).
    ///
    /// # Errors
    /// [`ViewError::TooSmall`], [`ViewError::Overflow`], [`ViewError::InnerStride`] or [`ViewError::Overlap`].
    pub fn strided<T: Element>(
        data: &'a mut [T],
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self, ViewError> {
        check(shape, strides, data.len())?;
        check_disjoint(shape, strides)?;
        Ok(Self { ptr: data.as_mut_ptr().cast(), dtype: T::DTYPE, shape, strides, memory: PhantomData })
    }

    /// A view of raw bytes, to be written in native byte order.
    ///
    /// # Errors
    /// The errors of [`TensorViewMut::strided`], and [`ViewError::Misaligned`].
    pub fn from_bytes(
        dtype: Dtype,
        data: &'a mut [u8],
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self, ViewError> {
        check(shape, strides, data.len() / dtype.bytes())?;
        check_disjoint(shape, strides)?;
        if !(data.as_ptr() as usize).is_multiple_of(dtype.bytes()) {
            return Err(ViewError::Misaligned { dtype });
        }
        Ok(Self { ptr: data.as_mut_ptr(), dtype, shape, strides, memory: PhantomData })
    }

    /// A dense head-major tensor stored as `[batch, heads, rows, dim]`.
    ///
    /// # Errors
    /// The errors of [`TensorViewMut::strided`].
    pub fn bhsd<T: Element>(data: &'a mut [T], shape: [usize; 4]) -> Result<Self, ViewError> {
        Self::strided(data, shape, dense(shape))
    }

    /// A dense sequence-major tensor stored as `[batch, rows, heads, dim]`, the shape given in that order.
    ///
    /// # Errors
    /// The errors of [`TensorViewMut::strided`].
    pub fn bshd<T: Element>(data: &'a mut [T], shape: [usize; 4]) -> Result<Self, ViewError> {
        let (shape, strides) = from_bshd(shape);
        Self::strided(data, shape, strides)
    }

    /// Packed sequences stored as `[total rows, heads, dim]`: a single batch entry.
    ///
    /// # Errors
    /// The errors of [`TensorViewMut::strided`].
    pub fn packed<T: Element>(data: &'a mut [T], [total, heads, dim]: [usize; 3]) -> Result<Self, ViewError> {
        Self::bshd(data, [1, total, heads, dim])
    }

    /// A view of memory that no Rust slice describes.
    ///
    /// # Errors
    /// [`ViewError::Overflow`], [`ViewError::InnerStride`], [`ViewError::Overlap`] or [`ViewError::Misaligned`].
    ///
    /// # Safety
    /// For `'a`, every element that `shape` reaches from `ptr` with `strides` lies in one allocation, is writable and
    /// is not accessed through anything else.
    pub unsafe fn from_raw_parts(
        dtype: Dtype,
        ptr: *mut u8,
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self, ViewError> {
        check(shape, strides, usize::MAX)?;
        check_disjoint(shape, strides)?;
        if !(ptr as usize).is_multiple_of(dtype.bytes()) {
            return Err(ViewError::Misaligned { dtype });
        }
        Ok(Self { ptr, dtype, shape, strides, memory: PhantomData })
    }

    /// Element type.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// `[batch, heads, rows, dim]`.
    #[must_use]
    pub const fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Strides in elements, in the order of the shape.
    #[must_use]
    pub const fn strides(&self) -> [usize; 4] {
        self.strides
    }

    /// Borrows the view for a shorter time, such as for a call that takes it by value.
    #[must_use]
    pub const fn reborrow(&mut self) -> TensorViewMut<'_> {
        let Self { ptr, dtype, shape, strides, memory: _ } = *self;
        TensorViewMut { ptr, dtype, shape, strides, memory: PhantomData }
    }

    /// The view of some rows of every head, borrowed for a shorter time, as [`TensorView::rows`].
    ///
    /// # Errors
    /// [`ViewError::TooSmall`] if there are fewer rows.
    pub fn rows_mut(&mut self, rows: Range<usize>) -> Result<TensorViewMut<'_>, ViewError> {
        let shape = shape_of_rows(self.shape, &rows)?;
        let ptr = if rows.is_empty() { self.ptr } else { self.row(0, 0, rows.start) };
        Ok(TensorViewMut { ptr, shape, ..self.reborrow() })
    }

    /// The memory from the first element to the last, including gaps between rows.
    ///
    /// # Safety
    /// All of it is initialised, and the gaps between rows are not accessed through anything else.
    pub unsafe fn span_mut(&mut self) -> &mut [u8] {
        let bytes = reach(self.shape, self.strides).map_or(0, |n| n * self.dtype.bytes());
        // SAFETY: the constructor proved that the memory from the first element to the last lies in one allocation.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, bytes) }
    }

    /// The bytes of row `[b, h, row]`.
    ///
    /// # Panics
    /// If an index is outside the shape, or rows have no elements.
    pub fn row_bytes_mut(&mut self, [b, h, row]: [usize; 3]) -> &mut [u8] {
        let [nb, nh, nr, nd] = self.shape;
        assert!(b < nb && h < nh && row < nr && nd > 0, "[{b}, {h}, {row}] in {:?}", self.shape);
        // SAFETY: as for the read-only view; the view, and its memory with it, is borrowed exclusively. Any bytes
        // are valid elements.
        unsafe { std::slice::from_raw_parts_mut(self.row(b, h, row), nd * self.dtype.bytes()) }
    }

    /// Writes row `[b, h, row]`, each element rounded once.
    ///
    /// # Panics
    /// If an index is outside the shape, rows have no elements, or there are fewer values than elements.
    pub fn write_row(&mut self, at: [usize; 3], values: &[f64]) {
        let (dtype, dim) = (self.dtype, self.shape[3]);
        let row = self.row_bytes_mut(at).chunks_exact_mut(dtype.bytes());
        for (slot, &x) in row.zip(&values[..dim]) {
            match dtype {
                Dtype::F32 => slot.copy_from_slice(&(x as f32).to_ne_bytes()),
                Dtype::F16 => slot.copy_from_slice(&f16::from_f32(round_to_odd(x)).to_ne_bytes()),
                Dtype::BF16 => slot.copy_from_slice(&bf16::from_f32(round_to_odd(x)).to_ne_bytes()),
            }
        }
    }

    /// Address of element `[b, h, row, 0]`. Whoever writes to it claims that the element exists and that no other
    /// thread accesses it.
    pub fn row(&self, b: usize, h: usize, row: usize) -> *mut u8 {
        let [sb, sh, sr, _] = self.strides;
        self.ptr.wrapping_add(offset([b, h, row], [sb, sh, sr]).wrapping_mul(self.dtype.bytes()))
    }
}

/// An f32 that rounds to 16 bits as `x` itself does: of the two neighbours of a number that is no f32, the one with an odd last bit.
fn round_to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    let error = x - f64::from(nearest);
    if error == 0.0 || !error.is_finite() {
        return nearest;
    }
    // Towards zero first; the magnitude of an f32 grows with its bits.
    let is_beyond = (error < 0.0) == (x > 0.0);
    f32::from_bits((nearest.to_bits() - u32::from(is_beyond)) | 1)
}

#[derive(Debug, Clone, Copy)]
enum MaskData<'a> {
    Bool(*const u8, PhantomData<&'a [u8]>),
    Additive(*const u8, Dtype),
}

/// The shape of a mask with 2, 3 or 4 axes: `[queries, keys]`, `[batch, queries, keys]` or
/// `[batch, heads, queries, keys]`. With three axes the first one is the batch, where PyTorch, which aligns axes from the
/// right, has heads: a mask per head is `[1, heads, queries, keys]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaskShape([usize; 4]);

impl From<[usize; 2]> for MaskShape {
    fn from([queries, keys]: [usize; 2]) -> Self {
        Self([1, 1, queries, keys])
    }
}

impl From<[usize; 3]> for MaskShape {
    fn from([batch, queries, keys]: [usize; 3]) -> Self {
        Self([batch, 1, queries, keys])
    }
}

impl From<[usize; 4]> for MaskShape {
    fn from(shape: [usize; 4]) -> Self {
        Self(shape)
    }
}

/// A view of a materialised mask `[batch, heads, queries, keys]`. Every axis is 1 or the problem's size; an axis of 1, or
/// of stride 0, is broadcast.
#[derive(Debug, Clone, Copy)]
pub struct MaskView<'a> {
    data: MaskData<'a>,
    shape: [usize; 4],
    strides: [usize; 4],
}

// SAFETY: the view only reads the memory it borrows.
unsafe impl Send for MaskView<'_> {}
// SAFETY: as for Send.
unsafe impl Sync for MaskView<'_> {}

impl<'a> MaskView<'a> {
    /// A boolean mask: `true` where the key is visible. Strides in elements; the last one is 1, or 0 where all keys of a
    /// query have the same element.
    ///
    /// # Errors
    /// [`ViewError::TooSmall`], [`ViewError::Overflow`] or [`ViewError::InnerStride`].
    pub fn bool(data: &'a [bool], shape: [usize; 4], strides: [usize; 4]) -> Result<Self, ViewError> {
        check_mask(shape, strides, data.len())?;
        Ok(Self { data: MaskData::Bool(data.as_ptr().cast(), PhantomData), shape, strides })
    }

    /// A boolean mask stored as bytes: visible where the byte is not 0. Strides as for [`MaskView::bool`].
    ///
    /// # Errors
    /// The errors of [`MaskView::bool`].
    pub fn bool_bytes(data: &'a [u8], shape: [usize; 4], strides: [usize; 4]) -> Result<Self, ViewError> {
        check_mask(shape, strides, data.len())?;
        Ok(Self { data: MaskData::Bool(data.as_ptr(), PhantomData), shape, strides })
    }

    /// An additive mask: any rank-4 view with the axes `[batch, heads, queries, keys]`.
    #[must_use]
    pub const fn additive(view: TensorView<'a>) -> Self {
        Self { data: MaskData::Additive(view.ptr, view.dtype), shape: view.shape, strides: view.strides }
    }

    /// An additive mask whose strides, in elements, may be 0 on any axis.
    ///
    /// # Errors
    /// The errors of [`MaskView::bool`].
    pub fn additive_strided<T: Element>(
        data: &'a [T],
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self, ViewError> {
        check_mask(shape, strides, data.len())?;
        Ok(Self { data: MaskData::Additive(data.as_ptr().cast(), T::DTYPE), shape, strides })
    }

    /// A dense boolean mask with 2, 3 or 4 axes.
    ///
    /// ```
    /// # use flashtile::MaskView;
    /// let visible = [true, false, true, true];
    /// assert_eq!(MaskView::dense_bool(&visible, [2, 2])?.shape(), [1, 1, 2, 2]);
    /// assert_eq!(MaskView::dense_bool(&visible, [2, 1, 2])?.shape(), [2, 1, 1, 2]);
    /// # Ok::<(), flashtile::ViewError>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`MaskView::bool`].
    pub fn dense_bool(data: &'a [bool], shape: impl Into<MaskShape>) -> Result<Self, ViewError> {
        let MaskShape(shape) = shape.into();
        Self::bool(data, shape, dense(shape))
    }

    /// A dense additive mask with 2, 3 or 4 axes.
    ///
    /// # Errors
    /// The errors of [`MaskView::bool`].
    pub fn dense_additive<T: Element>(data: &'a [T], shape: impl Into<MaskShape>) -> Result<Self, ViewError> {
        let MaskShape(shape) = shape.into();
        Self::additive_strided(data, shape, dense(shape))
    }

    /// Kind of the mask's elements.
    #[must_use]
    pub const fn kind(&self) -> MaskKind {
        match self.data {
            MaskData::Bool(..) => MaskKind::Bool,
            MaskData::Additive(_, dtype) => MaskKind::Additive(dtype),
        }
    }

    /// `[batch, heads, queries, keys]`.
    #[must_use]
    pub const fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Strides in elements, in the order of the shape.
    #[must_use]
    pub const fn strides(&self) -> [usize; 4] {
        self.strides
    }

    /// The memory from the first element to the last, including gaps between rows.
    ///
    /// # Safety
    /// All of it is initialised.
    pub unsafe fn span(&self) -> &'a [u8] {
        let (ptr, bytes) = match self.data {
            MaskData::Bool(ptr, _) => (ptr, 1),
            MaskData::Additive(ptr, dtype) => (ptr, dtype.bytes()),
        };
        let bytes = reach(self.shape, self.strides).map_or(0, |n| n * bytes);
        // SAFETY: the constructor proved that the memory from the first element to the last lies in one allocation.
        unsafe { std::slice::from_raw_parts(ptr, bytes) }
    }

    /// The row of `(b, h, i)`: the address of its first element, and the stride between keys, which is 1, or 0 for a
    /// broadcast key axis.
    pub fn row(&self, b: usize, h: usize, i: usize) -> MaskRow<'a> {
        let [sb, sh, sr, _] = self.strides;
        let [nb, nh, nr, _] = self.shape;
        let index = [(b, nb), (h, nh), (i, nr)].map(|(at, n)| if n == 1 { 0 } else { at });
        let offset = offset(index, [sb, sh, sr]);
        let (ptr, kind) = match self.data {
            MaskData::Bool(p, _) => (p.wrapping_add(offset), MaskKind::Bool),
            MaskData::Additive(p, dtype) => {
                (p.wrapping_add(offset.wrapping_mul(dtype.bytes())), MaskKind::Additive(dtype))
            }
        };
        let broadcast = self.shape[3] == 1 || self.strides[3] == 0;
        MaskRow { ptr, kind, step: usize::from(!broadcast), mask: PhantomData }
    }

    /// The bias that the mask adds to the score of `(b, h, i, j)`: `-inf` if the key is hidden, 0 if a
    /// boolean mask shows it.
    ///
    /// # Panics
    /// If an index is outside an axis that is not broadcast.
    #[must_use]
    pub fn bias(&self, [b, h, i, j]: [usize; 4]) -> f32 {
        let inside = |axis: usize, x: usize| self.shape[axis] == 1 || x < self.shape[axis];
        assert!(
            inside(0, b) && inside(1, h) && inside(2, i) && inside(3, j),
            "[{b}, {h}, {i}, {j}] in {:?}",
            self.shape
        );
        let row = self.row(b, h, i);
        // SAFETY: every index is inside its axis or the axis is broadcast, so the constructor proved the element readable.
        unsafe { row.bias(j) }
    }
}

/// One row of a mask, addressed by key. Only [`MaskView::row`] makes one.
#[derive(Debug, Clone, Copy)]
pub struct MaskRow<'a> {
    ptr: *const u8,
    kind: MaskKind,
    step: usize,
    mask: PhantomData<&'a [u8]>,
}

impl MaskRow<'_> {
    /// The element of key 0.
    #[inline]
    #[must_use]
    pub const fn ptr(&self) -> *const u8 {
        self.ptr
    }

    /// Kind of the elements.
    #[inline]
    #[must_use]
    pub const fn kind(&self) -> MaskKind {
        self.kind
    }

    /// Elements from one key to the next: 1, or 0 if the key axis is broadcast.
    #[inline]
    #[must_use]
    pub const fn step(&self) -> usize {
        self.step
    }

    /// The bias that the mask adds to the score of key `j`.
    ///
    /// # Safety
    /// `j` is inside the mask's key axis or that axis is broadcast.
    #[inline]
    pub unsafe fn bias(&self, j: usize) -> f32 {
        let j = j * self.step;
        // SAFETY: the caller guarantees that the element exists, and the view's constructor proved such elements
        // readable.
        unsafe {
            match self.kind {
                MaskKind::Bool => {
                    if *self.ptr.add(j) != 0 {
                        0.0
                    } else {
                        f32::NEG_INFINITY
                    }
                }
                MaskKind::Additive(Dtype::F32) => *self.ptr.cast::<f32>().add(j),
                MaskKind::Additive(Dtype::F16) => (*self.ptr.cast::<half::f16>().add(j)).to_f32(),
                MaskKind::Additive(Dtype::BF16) => (*self.ptr.cast::<half::bf16>().add(j)).to_f32(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_views_of_the_same_elements() {
        let data: Vec<f32> = (0..24).map(|x| x as f32).collect();
        let head_major = TensorView::bhsd(&data, [1, 2, 3, 4]).unwrap();
        assert_eq!(head_major.get([0, 1, 2, 3]), 23.0);
        assert_eq!(head_major.get([0, 1, 0, 0]), 12.0);
        let seq_major = TensorView::bshd(&data, [1, 3, 2, 4]).unwrap();
        assert_eq!(seq_major.shape(), [1, 2, 3, 4]);
        assert_eq!(seq_major.get([0, 1, 0, 0]), 4.0);
        assert_eq!(seq_major.get([0, 0, 2, 1]), 17.0);
    }

    /// Rows are rounded once: beside every midpoint of two neighbours of 16 bits lie f64 that f32 takes for the midpoint.
    #[test]
    fn rows_are_rounded_once() {
        fn check<T>(of: fn(u16) -> T, to: fn(&T) -> f64, dtype: Dtype) {
            #[repr(align(2))]
            struct Bytes([u8; 4]);
            let mut bytes = Bytes([0; 4]);
            let bytes = &mut bytes.0;
            for bits in (0..0x7bffu16).step_by(37).chain([0, 1, 0x3ff, 0x400]) {
                let (low, high) = (of(bits), of(bits + 1));
                let (middle, even) = ((to(&low) + to(&high)) / 2.0, if bits % 2 == 0 { &low } else { &high });
                let step = f64::from_bits(middle.to_bits() + 1) - middle;
                let cases = [(middle, even), (middle - step, &low), (middle + step, &high)];
                for (x, want) in cases.into_iter().chain([(to(&low), &low), (to(&high), &high)]) {
                    let strides = dense([1, 1, 1, 2]);
                    let mut view = TensorViewMut::from_bytes(dtype, bytes, [1, 1, 1, 2], strides).unwrap();
                    view.write_row([0; 3], &[x, -x]);
                    let got = TensorView::from_bytes(dtype, bytes, [1, 1, 1, 2], strides).unwrap();
                    let want = to(want) as f32;
                    assert_eq!([got.get([0; 4]), got.get([0, 0, 0, 1])], [want, -want], "{dtype} {x:e}");
                }
            }
        }
        check(f16::from_bits, |x| x.to_f64(), Dtype::F16);
        check(bf16::from_bits, |x| x.to_f64(), Dtype::BF16);
    }

    #[test]
    fn refuses_what_memory_does_not_hold() {
        let mut data = [0.0f32; 23];
        assert_eq!(
            TensorView::bhsd(&data, [1, 2, 3, 4]).unwrap_err(),
            ViewError::TooSmall { needed: 24, got: 23 }
        );
        assert_eq!(
            TensorView::strided(&data, [usize::MAX, 1, 1, 1], [2, 1, 1, 1]).unwrap_err(),
            ViewError::Overflow
        );
        assert_eq!(
            TensorView::strided(&data, [1, 1, 1, 2], [1, 1, 1, 2]).unwrap_err(),
            ViewError::InnerStride { got: 2 }
        );
        let overlap = TensorViewMut::strided(&mut data, [1, 2, 3, 4], [24, 4, 4, 1]).unwrap_err();
        assert_eq!(overlap, ViewError::Overlap { strides: [24, 4, 4, 1] });
        assert!(TensorViewMut::strided(&mut data, [1, 2, 3, 3], [0, 9, 3, 1]).is_ok());
        let bytes = [0u8; 16];
        let odd = if (bytes.as_ptr() as usize).is_multiple_of(2) { &bytes[1..] } else { &bytes[..15] };
        assert_eq!(
            TensorView::from_bytes(Dtype::F16, odd, [1, 1, 1, 4], [4, 4, 4, 1]).unwrap_err(),
            ViewError::Misaligned { dtype: Dtype::F16 }
        );
    }

    #[test]
    fn mask_axes_of_one_broadcast() {
        let data = [true, false, true];
        let mask = MaskView::dense_bool(&data, [1, 1, 1, 3]).unwrap();
        assert_eq!(mask.bias([5, 7, 9, 0]), 0.0);
        assert_eq!(mask.bias([0, 0, 0, 1]), f32::NEG_INFINITY);
    }

    #[test]
    fn mask_axes_of_stride_0_broadcast() {
        let data = [0.0f32, -1.0, 2.0];
        // One element a query: all keys have it, in both batch entries.
        let mask = MaskView::additive_strided(&data, [2, 1, 3, 5], [0, 0, 1, 0]).unwrap();
        assert_eq!(mask.bias([1, 0, 1, 4]), -1.0);
        assert_eq!(mask.bias([0, 7, 2, 0]), 2.0);
        assert_eq!((mask.row(0, 0, 1).step(), mask.shape()), (0, [2, 1, 3, 5]));
        let short = MaskView::additive_strided(&data[..2], [2, 1, 3, 5], [0, 0, 1, 0]).unwrap_err();
        assert_eq!(short, ViewError::TooSmall { needed: 3, got: 2 });
        let wide = MaskView::additive_strided(&data, [1, 1, 1, 2], [0, 0, 0, 2]).unwrap_err();
        assert_eq!(wide, ViewError::InnerStride { got: 2 });
    }
}
