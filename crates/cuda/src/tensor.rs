//! Tensors in device memory.

#![allow(unsafe_code)]

use flashtile_core::block_tables::BlockTables;
use flashtile_core::codec::{Codec, RowKind};
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::tensor::ViewError;
use flashtile_core::tensor::{check_disjoint, check_mask_strides, check_strides};
use std::marker::PhantomData;

/// A strided view `[batch, heads, rows, dim]` of device memory. Strides are in elements, the last one 1.
///
/// Memory whose address and strides are multiples of 16 bytes is copied in vectors; any other element by element, which is
/// slower.
#[derive(Debug, Clone, Copy)]
pub struct DeviceTensor<'a> {
    pub(super) raw: RawTensor,
    memory: PhantomData<&'a [u8]>,
}

/// Pages of quantized rows in device memory, as [`CodePages`](flashtile_core::codec::CodePages) has them in main memory: a page of a head has
/// `page_size` times [`Codec::row_bytes`] bytes.
#[derive(Debug, Clone, Copy)]
pub struct DeviceCodes<'a> {
    pub(super) at: u64,
    pub(super) codec: Codec,
    pub(super) shape: [usize; 4],
    /// From page to page and from head to head, in bytes.
    pub(super) strides: [usize; 2],
    /// `[kv_heads, dim]`, of centered keys.
    pub(super) means: Option<DeviceList<'a>>,
}

impl<'a> DeviceCodes<'a> {
    /// Pages `[pages, heads, page_size, dim]` at a device address. `strides` are bytes from page to page and from head to head; where the
    /// address and they are multiples of 16, codes are read in vectors. They are multiples of the scales' size at least: 2, or 4 of the
    /// codecs of mlx-native.
    ///
    /// # Errors
    /// [`ViewError::Overflow`] or [`ViewError::Misaligned`].
    ///
    /// # Safety
    /// Every page that `shape` reaches from `at` under `strides` lies in one allocation of the device, and may be read and is not written
    /// until the work that was given the view has ended on its stream. Its bytes are rows of the codec.
    pub unsafe fn from_raw_parts(
        codec: Codec,
        at: u64,
        shape: [usize; 4],
        strides: [usize; 2],
    ) -> Result<Self, ViewError> {
        let codes = Self { at, codec, shape, strides, means: None };
        codes.reach().ok_or(ViewError::Overflow)?;
        let [pages, heads, ..] = shape;
        let used = [(pages, strides[0]), (heads, strides[1])].into_iter().filter(|(n, _)| *n > 1);
        let scale = if matches!(codec.row_kind(), RowKind::Mlx { .. }) { Dtype::F32 } else { Dtype::F16 };
        used.map(|(_, stride)| stride as u64).chain([at]).try_for_each(|at| check_aligned(at, scale))?;
        Ok(codes)
    }

    /// Codes of centered keys, whose means `[heads, dim]` are added to every row.
    ///
    /// # Errors
    /// [`ViewError::TooSmall`].
    pub const fn centered(mut self, means: DeviceList<'a>) -> Result<Self, ViewError> {
        let [_, heads, _, dim] = self.shape;
        let needed = heads.saturating_mul(dim);
        if means.len < needed {
            return Err(ViewError::TooSmall { needed, got: means.len });
        }
        self.means = Some(means);
        Ok(self)
    }

    /// Bytes from the first to one past the last.
    pub(super) fn reach(&self) -> Option<usize> {
        let [pages, heads, rows, dim] = self.shape;
        if pages == 0 || heads == 0 {
            return Some(0);
        }
        let last = (pages - 1)
            .checked_mul(self.strides[0])?
            .checked_add((heads - 1).checked_mul(self.strides[1])?)?;
        let reach = last.checked_add(rows.checked_mul(self.codec.row_bytes(dim))?)?;
        isize::try_from(reach).ok()?;
        Some(reach)
    }
}

/// Keys or values in device memory.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_enums)]
pub enum DeviceKv<'a> {
    /// Elements.
    Elements(DeviceTensor<'a>),
    /// Pages of quantized rows.
    Codes(DeviceCodes<'a>),
}

impl DeviceKv<'_> {
    /// `[batch, heads, rows, dim]`, or `[pages, heads, page_size, dim]`.
    #[must_use]
    pub const fn shape(&self) -> [usize; 4] {
        match self {
            Self::Elements(tensor) => tensor.raw.shape,
            Self::Codes(codes) => codes.shape,
        }
    }

    /// How rows are stored.
    #[must_use]
    pub fn codec(&self) -> Codec {
        match self {
            Self::Elements(tensor) => tensor.raw.dtype.into(),
            Self::Codes(codes) => codes.codec,
        }
    }

    /// The elements, where they are elements.
    pub(super) const fn elements(&self) -> Option<&RawTensor> {
        match self {
            Self::Elements(tensor) => Some(&tensor.raw),
            Self::Codes(_) => None,
        }
    }
}

impl<'a> From<DeviceTensor<'a>> for DeviceKv<'a> {
    fn from(tensor: DeviceTensor<'a>) -> Self {
        Self::Elements(tensor)
    }
}

impl<'a> From<DeviceCodes<'a>> for DeviceKv<'a> {
    fn from(codes: DeviceCodes<'a>) -> Self {
        Self::Codes(codes)
    }
}

/// A strided view of device memory that a run writes. No two elements share memory.
#[derive(Debug)]
pub struct DeviceTensorMut<'a> {
    pub(super) raw: RawTensor,
    memory: PhantomData<&'a mut [u8]>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct RawTensor {
    pub(super) at: u64,
    pub(super) dtype: Dtype,
    pub(super) shape: [usize; 4],
    pub(super) strides: [usize; 4],
}

/// Checks that an address is one of elements of a dtype, or of their size.
fn check_aligned(at: u64, dtype: Dtype) -> Result<(), ViewError> {
    if at.is_multiple_of(dtype.bytes() as u64) { Ok(()) } else { Err(ViewError::Misaligned { dtype }) }
}

impl RawTensor {
    fn new(dtype: Dtype, at: u64, shape: [usize; 4], strides: [usize; 4]) -> Result<Self, ViewError> {
        check_strides(shape, strides)?;
        check_aligned(at, dtype)?;
        Ok(Self { at, dtype, shape, strides })
    }

    /// Bytes between elements of each axis.
    pub(super) fn byte_strides(&self) -> [i64; 4] {
        self.strides.map(|stride| stride.saturating_mul(self.dtype.bytes()) as i64)
    }

    /// Whether every row starts on 16 bytes.
    pub(super) fn in_vectors(&self) -> bool {
        let [b, h, s, _] = self.strides;
        let used = [(self.shape[0], b), (self.shape[1], h), (self.shape[2], s)];
        let step = 16 / self.dtype.bytes();
        self.at.is_multiple_of(16) && used.iter().all(|&(n, stride)| n < 2 || stride.is_multiple_of(step))
    }
}

impl DeviceTensor<'_> {
    /// `[batch, heads, rows, dim]`.
    #[must_use]
    pub const fn shape(&self) -> [usize; 4] {
        self.raw.shape
    }

    /// A view of memory at a device address.
    ///
    /// # Errors
    /// [`ViewError::Overflow`], [`ViewError::InnerStride`] or [`ViewError::Misaligned`].
    ///
    /// # Safety
    /// Every element that `shape` reaches from `at` under `strides` lies in one allocation of the device, and may be read and
    /// is not written until the work that was given the view has ended on its stream.
    pub unsafe fn from_raw_parts(
        dtype: Dtype,
        at: u64,
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self, ViewError> {
        Ok(Self { raw: RawTensor::new(dtype, at, shape, strides)?, memory: PhantomData })
    }
}

impl DeviceTensorMut<'_> {
    /// A view of memory at a device address.
    ///
    /// # Errors
    /// [`ViewError::Overflow`], [`ViewError::InnerStride`], [`ViewError::Overlap`] or [`ViewError::Misaligned`].
    ///
    /// # Safety
    /// Every element that `shape` reaches from `at` under `strides` lies in one allocation of the device, and may be written and
    /// is not accessed otherwise until the work that was given the view has ended on its stream.
    pub unsafe fn from_raw_parts(
        dtype: Dtype,
        at: u64,
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self, ViewError> {
        check_disjoint(shape, strides)?;
        Ok(Self { raw: RawTensor::new(dtype, at, shape, strides)?, memory: PhantomData })
    }
}

/// A list of f32 in device memory that a run writes: logsumexp.
#[derive(Debug)]
pub struct DeviceListMut<'a> {
    pub(super) at: u64,
    pub(super) len: usize,
    memory: PhantomData<&'a mut [u8]>,
}

impl DeviceListMut<'_> {
    /// A list at a device address.
    ///
    /// # Errors
    /// [`ViewError::Misaligned`].
    ///
    /// # Safety
    /// `len` f32 lie there in one allocation of the device, and are not accessed otherwise until the work that was given the list
    /// has ended on its stream.
    pub unsafe fn from_raw_parts(at: u64, len: usize) -> Result<Self, ViewError> {
        check_aligned(at, Dtype::F32)?;
        Ok(Self { at, len, memory: PhantomData })
    }
}

/// A list of f32 in device memory: slopes, sinks.
#[derive(Debug, Clone, Copy)]
pub struct DeviceList<'a> {
    pub(super) at: u64,
    pub(super) len: usize,
    memory: PhantomData<&'a [u8]>,
}

impl DeviceList<'_> {
    /// A list at a device address.
    ///
    /// # Errors
    /// [`ViewError::Misaligned`].
    ///
    /// # Safety
    /// `len` f32 lie there in one allocation of the device, and are not written until the work that was given the list has ended on its stream.
    pub unsafe fn from_raw_parts(at: u64, len: usize) -> Result<Self, ViewError> {
        check_aligned(at, Dtype::F32)?;
        Ok(Self { at, len, memory: PhantomData })
    }
}

/// A materialised mask in device memory, as [`MaskView`](flashtile_core::tensor::MaskView): every axis is 1 or the problem's.
#[derive(Debug, Clone, Copy)]
pub struct DeviceMask<'a> {
    pub(super) kind: MaskKind,
    pub(super) at: u64,
    pub(super) shape: [usize; 4],
    pub(super) strides: [usize; 4],
    memory: PhantomData<&'a [u8]>,
}

impl<'a> DeviceMask<'a> {
    /// A boolean mask at a device address, one byte an element: visible where it is not 0. Strides in elements; the last one
    /// is 1, or 0 where all keys of a query have the same element.
    ///
    /// # Errors
    /// [`ViewError::Overflow`] or [`ViewError::InnerStride`].
    ///
    /// # Safety
    /// As [`DeviceTensor::from_raw_parts`].
    pub unsafe fn bool(at: u64, shape: [usize; 4], strides: [usize; 4]) -> Result<Self, ViewError> {
        check_mask_strides(shape, strides)?;
        Ok(Self { kind: MaskKind::Bool, at, shape, strides, memory: PhantomData })
    }

    /// A mask that is added to the scores.
    #[must_use]
    pub const fn additive(tensor: DeviceTensor<'a>) -> Self {
        let RawTensor { at, dtype, shape, strides } = tensor.raw;
        Self { kind: MaskKind::Additive(dtype), at, shape, strides, memory: PhantomData }
    }

    /// An additive mask at a device address, whose strides, in elements, may be 0 on any axis.
    ///
    /// # Errors
    /// [`ViewError::Overflow`], [`ViewError::InnerStride`] or [`ViewError::Misaligned`].
    ///
    /// # Safety
    /// As [`DeviceTensor::from_raw_parts`].
    pub unsafe fn additive_strided(
        dtype: Dtype,
        at: u64,
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self, ViewError> {
        check_mask_strides(shape, strides)?;
        check_aligned(at, dtype)?;
        Ok(Self { kind: MaskKind::Additive(dtype), at, shape, strides, memory: PhantomData })
    }

    /// Bytes between elements of each axis, 0 where it is broadcast.
    pub(super) fn steps(&self) -> [i64; 4] {
        let bytes = match self.kind {
            MaskKind::Bool => 1,
            MaskKind::Additive(dtype) => dtype.bytes(),
        };
        let step = |axis: usize| {
            if self.shape[axis] == 1 { 0 } else { self.strides[axis].saturating_mul(bytes) as i64 }
        };
        [step(0), step(1), step(2), step(3)]
    }
}

/// Where the tokens of a batch lie in a pool of pages: the table of [`BlockTables`] in device memory, and what else the
/// formula there needs.
#[derive(Debug, Clone, Copy)]
pub struct DeviceTables<'a> {
    pub(super) at: u64,
    pub(super) entries: usize,
    pub(super) width: usize,
    pub(super) page_size: usize,
    pub(super) wraps: bool,
    memory: PhantomData<&'a [u8]>,
}

impl DeviceTables<'_> {
    /// The `table` of `tables`, `[sequences, width]` u32, at a device address.
    ///
    /// # Errors
    /// [`ViewError::Misaligned`].
    ///
    /// # Safety
    /// The entries lie there as in `tables`, until the work that was given the tables has ended on its stream. For every plan
    /// that they are used with, each token that a query row sees has an entry, which is one of the pool's pages:
    /// [`BlockTables::validate`] checks it for the lengths in `tables`.
    pub unsafe fn from_raw_parts(at: u64, tables: &BlockTables) -> Result<Self, ViewError> {
        check_aligned(at, Dtype::F32)?;
        let BlockTables { width, page_size, wraps, .. } = *tables;
        Ok(Self { at, entries: tables.table.len(), width, page_size, wraps, memory: PhantomData })
    }
}

/// Tensors that a forward run reads, as [`Inputs`](flashtile_core::inputs::Inputs) in device memory.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct DeviceInputs<'a> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: DeviceTensor<'a>,
    /// `[batch, kv_heads, kv_len, head_dim]`; of cached sequences the pages `[pages, kv_heads, page_size, head_dim]`.
    pub k: DeviceKv<'a>,
    /// `[batch, kv_heads, kv_len, value_dim]`; of cached sequences the pages `[pages, kv_heads, page_size, value_dim]`.
    pub v: DeviceKv<'a>,
    /// Which page holds which token; present exactly when the problem's sequences are cached.
    pub tables: Option<DeviceTables<'a>>,
    /// Boolean, of the shape [`Problem::tree_shape`](flashtile_core::problem::Problem::tree_shape); present exactly when the problem has a tree mask.
    pub tree: Option<DeviceMask<'a>>,
    /// Broadcastable to [`Problem::mask_shape`](flashtile_core::problem::Problem::mask_shape); present exactly when the problem has a mask.
    pub mask: Option<DeviceMask<'a>>,
    /// `[q_heads]`; present exactly when the problem has ALiBi. The host does not see them: a head whose slope is not within
    /// [`MAX_ALIBI_SLOPE`](flashtile_core::limits::MAX_ALIBI_SLOPE) has rows of NaN.
    pub alibi_slopes: Option<DeviceList<'a>>,
    /// `[q_heads]` logits; present exactly when the problem has sinks.
    pub sinks: Option<DeviceList<'a>>,
}

impl<'a> DeviceInputs<'a> {
    /// Inputs without tables, masks, ALiBi slopes or sinks; add them through the fields.
    #[must_use]
    pub fn new(q: DeviceTensor<'a>, k: impl Into<DeviceKv<'a>>, v: impl Into<DeviceKv<'a>>) -> Self {
        let (k, v) = (k.into(), v.into());
        Self { q, k, v, tables: None, tree: None, mask: None, alibi_slopes: None, sinks: None }
    }
}

/// Tensors that a forward run writes, in device memory. Contents before the run are never read.
#[derive(Debug)]
#[non_exhaustive]
pub struct DeviceOutputs<'a> {
    /// `[batch, q_heads, q_len, value_dim]`.
    pub out: DeviceTensorMut<'a>,
    /// Logsumexp, dense `[batch, q_heads, q_len]`, where wanted.
    pub lse: Option<DeviceListMut<'a>>,
}

impl<'a> DeviceOutputs<'a> {
    /// Outputs without logsumexp; add it through the field.
    #[must_use]
    pub const fn new(out: DeviceTensorMut<'a>) -> Self {
        Self { out, lse: None }
    }
}
