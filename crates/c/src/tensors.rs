//! Tensors, masks and lists of the caller as views.

#![allow(unsafe_code, reason = "memory of the caller is an address")]

use crate::status::Failure;
use flashtile::tensor::reach;
use flashtile::{Dtype, MaskView, Outputs, TensorView, TensorViewMut};
use half::{bf16, f16};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::slice;

/// Element type of a tensor.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "a header has all values")]
pub enum FlashtileDtype {
    /// IEEE 754 binary32: `float`.
    F32 = 0,
    /// IEEE 754 binary16.
    F16 = 1,
    /// bfloat16: the upper half of a binary32.
    Bf16 = 2,
}

/// Kind of the elements of a mask.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "a header has all values")]
pub enum FlashtileMaskKind {
    /// A byte: the key is visible where it is not 0.
    Bool = 0,
    /// Added to the score, as F32. Minus infinity hides the key.
    F32 = 1,
    /// Added to the score, as F16.
    F16 = 2,
    /// Added to the score, as BF16.
    Bf16 = 3,
}

/// A tensor that is read: `[batch, heads, rows, dim]`, whatever the order in memory. Every element that `shape` reaches from `data` with
/// `strides` is readable, and nothing writes it during the call. `data` is a multiple of the size of an element, and may be null where
/// the shape has a 0.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs, reason = "C programs fill all fields")]
pub struct FlashtileTensor {
    /// The first element.
    pub data: *const c_void,
    /// A `FlashtileDtype`.
    pub dtype: u32,
    /// Elements of each axis: batch, heads, rows, dim.
    pub shape: [usize; 4],
    /// Elements between neighbours of each axis. The last one is 1.
    pub strides: [usize; 4],
}

/// A tensor that is written: like `FlashtileTensor`, every element writable, without a stride by which two elements share memory, and
/// apart from everything that the call reads. Its memory may be uninitialized.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs, reason = "C programs fill all fields")]
pub struct FlashtileTensorMut {
    /// The first element.
    pub data: *mut c_void,
    /// A `FlashtileDtype`.
    pub dtype: u32,
    /// Elements of each axis: batch, heads, rows, dim.
    pub shape: [usize; 4],
    /// Elements between neighbours of each axis. The last one is 1.
    pub strides: [usize; 4],
}

/// A mask: `[batch, heads, queries, keys]`. An axis of size 1, or of stride 0, stands for all. The memory from the first element to the
/// last is readable and initialized.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs, reason = "C programs fill all fields")]
pub struct FlashtileMask {
    /// The first element.
    pub data: *const c_void,
    /// A `FlashtileMaskKind`.
    pub kind: u32,
    /// Elements of each axis: batch, heads, queries, keys.
    pub shape: [usize; 4],
    /// Elements between neighbours of each axis. The last one is 1, or 0 where all keys of a query have the same element.
    pub strides: [usize; 4],
}

/// A list that is read; `{NULL, 0}` is no list.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs, reason = "C programs fill all fields")]
pub struct FlashtileFloats {
    /// The first element.
    pub data: *const f32,
    /// Elements.
    pub len: usize,
}

/// A list that is written; `{NULL, 0}` is no list. Its memory may be uninitialized, and is apart from everything that the call reads.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs, reason = "C programs fill all fields")]
pub struct FlashtileFloatsMut {
    /// The first element.
    pub data: *mut f32,
    /// Elements.
    pub len: usize,
}

/// A list of sizes that is read; `{NULL, 0}` is no list.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs, reason = "C programs fill all fields")]
pub struct FlashtileSizes {
    /// The first element.
    pub data: *const usize,
    /// Elements.
    pub len: usize,
}

/// The tensors of one attention: q `[batch, q_heads, q_len, head_dim]`, k `[batch, kv_heads, kv_len, head_dim]` and v `[batch, kv_heads,
/// kv_len, value_dim]` give out `[batch, q_heads, q_len, value_dim]`. All have one dtype; `q_heads` is a multiple of `kv_heads`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs, reason = "C programs fill all fields")]
pub struct FlashtileTensors {
    /// Queries.
    pub q: FlashtileTensor,
    /// Keys.
    pub k: FlashtileTensor,
    /// Values.
    pub v: FlashtileTensor,
    /// Results.
    pub out: FlashtileTensorMut,
    /// The logsumexp of each row, dense `[batch, q_heads, q_len]`, if wanted. Where a call is refused it may be set to 0.
    pub lse: FlashtileFloatsMut,
}

/// Queries, keys and values as views.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Views<'a> {
    pub(crate) q: TensorView<'a>,
    pub(crate) k: TensorView<'a>,
    pub(crate) v: TensorView<'a>,
}

/// The value that a code of the header stands for.
pub(crate) fn known<T: Copy>(field: &str, code: u32, values: &[T]) -> Result<T, Failure> {
    let value = usize::try_from(code).ok().and_then(|at| values.get(at)).copied();
    value.ok_or_else(|| {
        Failure::invalid(format_args!("{field} is {code}, expected 0 to {}", values.len() - 1))
    })
}

/// A flag, which C programs keep as a number.
pub(crate) fn flag(field: &str, value: u32) -> Result<bool, Failure> {
    known(field, value, &[false, true])
}

/// Refuses a null pointer to a struct.
///
/// # Safety
/// A pointer that is not null points to a `T` that nothing writes for `'a`.
pub(crate) unsafe fn given<'a, T>(name: &str, pointer: *const T) -> Result<&'a T, Failure> {
    if !pointer.is_aligned() {
        return Err(Failure::invalid(format_args!("{name} is not aligned")));
    }
    // SAFETY: the pointer is aligned, and null or valid by the contract.
    unsafe { pointer.as_ref() }.ok_or_else(|| Failure::invalid(format_args!("{name} is null")))
}

/// Checks the address of a list. Returns false for no list.
fn check_list<T>(name: &str, data: *const T, len: usize) -> Result<bool, Failure> {
    if data.is_null() {
        return if len == 0 {
            Ok(false)
        } else {
            Err(Failure::invalid(format_args!("{name} is null and has {len} elements")))
        };
    }
    if !data.is_aligned() {
        return Err(Failure::invalid(format_args!("{name} is not aligned to {} bytes", align_of::<T>())));
    }
    match len.checked_mul(size_of::<T>()) {
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(true),
        _ => Err(Failure::invalid(format_args!("{name} has {len} elements, which are not addressable"))),
    }
}

/// A list, or none.
///
/// # Safety
/// `data` is null or points to `len` elements that nothing writes for `'a`.
pub(crate) unsafe fn list<'a, T>(name: &str, data: *const T, len: usize) -> Result<Option<&'a [T]>, Failure> {
    let is_given = check_list(name, data, len)?;
    // SAFETY: the address is neither null nor misaligned, and the size is below that of the address space; the rest is the contract.
    Ok(is_given.then(|| unsafe { slice::from_raw_parts(data, len) }))
}

/// Refuses the null pointer where a tensor has elements; where it has none, any aligned address serves.
fn address(name: &str, data: *const c_void, shape: [usize; 4]) -> Result<*mut u8, Failure> {
    if !data.is_null() {
        Ok(data.cast_mut().cast())
    } else if shape.contains(&0) {
        Ok(NonNull::<u64>::dangling().as_ptr().cast())
    } else {
        Err(Failure::invalid(format_args!("{name} is null and has shape {shape:?}")))
    }
}

fn named(name: &'static str) -> impl FnOnce(flashtile::ViewError) -> Failure {
    move |error| Failure::invalid(format_args!("{name}: {error}"))
}

impl FlashtileTensor {
    pub(crate) fn dtype(&self, name: &str) -> Result<Dtype, Failure> {
        known(&format!("dtype of {name}"), self.dtype, &Dtype::ALL)
    }

    /// # Safety
    /// The contract of the type, for `'a`.
    unsafe fn view<'a>(&self, name: &'static str) -> Result<TensorView<'a>, Failure> {
        let data = address(name, self.data, self.shape)?;
        let dtype = self.dtype(name)?;
        // SAFETY: the elements are readable by the contract; where the pointer was null there are none.
        let view = unsafe { TensorView::from_raw_parts(dtype, data, self.shape, self.strides) };
        view.map_err(named(name))
    }
}

impl FlashtileTensorMut {
    /// # Safety
    /// The contract of the type, for `'a`.
    unsafe fn view<'a>(&self) -> Result<TensorViewMut<'a>, Failure> {
        let data = address("out", self.data, self.shape)?;
        let dtype = known("dtype of out", self.dtype, &Dtype::ALL)?;
        // SAFETY: the elements are writable by the contract, and nothing else accesses them; where the pointer was null there are none.
        let view = unsafe { TensorViewMut::from_raw_parts(dtype, data, self.shape, self.strides) };
        view.map_err(named("out"))
    }
}

impl FlashtileMask {
    /// # Safety
    /// The contract of the type, for `'a`.
    pub(crate) unsafe fn view<'a>(&self) -> Result<MaskView<'a>, Failure> {
        let Self { data, kind, shape, strides } = *self;
        let data = address("mask", data, shape)?;
        let kind =
            known("kind of mask", kind, &[None, Some(Dtype::F32), Some(Dtype::F16), Some(Dtype::BF16)])?;
        let len = reach(shape, strides).map_err(named("mask"))?;
        // SAFETY: the memory from the first element to the last is readable and initialized by the contract; f16 and bf16 have the
        // layout of 16 bits, and any bits are a value.
        let view = unsafe {
            match kind {
                None => MaskView::bool_bytes(elements(data, len)?, shape, strides),
                Some(Dtype::F32) => MaskView::additive_strided::<f32>(elements(data, len)?, shape, strides),
                Some(Dtype::F16) => MaskView::additive_strided::<f16>(elements(data, len)?, shape, strides),
                Some(Dtype::BF16) => MaskView::additive_strided::<bf16>(elements(data, len)?, shape, strides),
            }
        };
        view.map_err(named("mask"))
    }
}

/// # Safety
/// As [`list`].
unsafe fn elements<'a, T>(data: *const u8, len: usize) -> Result<&'a [T], Failure> {
    // SAFETY: the contract is the same.
    Ok(unsafe { list("mask", data.cast(), len) }?.unwrap_or_default())
}

impl FlashtileFloatsMut {
    /// The list, set to 0, or none.
    ///
    /// # Safety
    /// The contract of the type, for `'a`.
    unsafe fn zeros<'a>(&self, name: &str) -> Result<Option<&'a mut [f32]>, Failure> {
        if !check_list(name, self.data, self.len)? {
            return Ok(None);
        }
        // SAFETY: `len` elements from an aligned address are writable by the contract, all bits 0 are a float, and nothing else
        // accesses them.
        Ok(Some(unsafe {
            self.data.write_bytes(0, self.len);
            slice::from_raw_parts_mut(self.data, self.len)
        }))
    }
}

impl FlashtileTensors {
    /// # Safety
    /// The contracts of the tensors that are read, for `'a`.
    pub(crate) unsafe fn views<'a>(&self) -> Result<Views<'a>, Failure> {
        // SAFETY: the contract is the same.
        unsafe { Ok(Views { q: self.q.view("q")?, k: self.k.view("k")?, v: self.v.view("v")? }) }
    }

    /// # Safety
    /// The contracts of the tensors that are written, for `'a`.
    pub(crate) unsafe fn outputs<'a>(&self) -> Result<Outputs<'a>, Failure> {
        // SAFETY: the contract is the same.
        let (out, lse) = unsafe { (self.out.view()?, self.lse.zeros("lse")?) };
        let mut outputs = Outputs::new(out);
        outputs.lse = lse;
        Ok(outputs)
    }
}
