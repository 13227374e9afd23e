//! Memory of the host, as flashtile reads and writes it.

#![allow(unsafe_code)]

use super::{Axes, Kind, Memory, Place};
use flashtile::{Dtype, MaskView, TensorView, TensorViewMut};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

impl Memory {
    /// The memory as a tensor that is read.
    pub(crate) fn view(&self, axes: Axes) -> PyResult<TensorView<'_>> {
        let (dtype, shape, strides) = self.logical(axes)?;
        self.check_place(Place::Host)?;
        // SAFETY: by the invariant the elements lie in one allocation and are readable while `self`, which the view borrows, has their
        // owner; that nobody writes to them during a call is asked of the program, and `view_mut` refuses to overlap.
        unsafe { TensorView::from_raw_parts(dtype, self.ptr, shape, strides) }
            .map_err(|error| self.refuse(error))
    }

    /// The memory as a tensor that is written, and that has no memory in common with `others`.
    pub(crate) fn view_mut(&mut self, axes: Axes, others: &[&Self]) -> PyResult<TensorViewMut<'_>> {
        let (dtype, shape, strides) = self.logical(axes)?;
        self.check_place(Place::Host)?;
        self.check_exclusive(others)?;
        let ptr = self.ptr;
        // SAFETY: as for `view`; the memory is not read-only, and `check_exclusive` showed that no other argument of the call has an
        // address in common with it. `self` is borrowed exclusively.
        unsafe { TensorViewMut::from_raw_parts(dtype, ptr, shape, strides) }
            .map_err(|error| self.refuse(error))
    }

    /// Dense memory as a list of f32 that is written.
    pub(crate) fn list_mut(&mut self, others: &[&Self]) -> PyResult<&mut [f32]> {
        self.check_place(Place::Host)?;
        self.check_exclusive(others)?;
        let count = self.check_list()?;
        if count == 0 {
            return Ok(&mut []);
        }
        // SAFETY: `count` elements reach as far as the shape does, so that they are all of the memory of the invariant; aligned, and any
        // bytes are an f32. Exclusive as in `view_mut`.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.ptr.cast(), count) })
    }

    /// The memory as a mask of two or four axes.
    pub(crate) fn mask(&self) -> PyResult<MaskView<'_>> {
        let (shape, strides) = self.mask_axes()?;
        let view = match self.kind {
            Kind::Bool => MaskView::bool_bytes(self.elements::<u8>()?, shape, strides),
            Kind::Element(Dtype::F32) => MaskView::additive_strided(self.elements::<f32>()?, shape, strides),
            Kind::Element(Dtype::F16) => {
                MaskView::additive_strided(self.elements::<half::f16>()?, shape, strides)
            }
            Kind::Element(Dtype::BF16) => {
                MaskView::additive_strided(self.elements::<half::bf16>()?, shape, strides)
            }
        };
        view.map_err(|error| self.refuse(error))
    }

    /// The elements from the first to the last that the shape reaches, gaps included.
    fn elements<T: Plain>(&self) -> PyResult<&[T]> {
        self.check_place(Place::Host)?;
        let count = self.span()?;
        if count == 0 {
            return Ok(&[]);
        }
        if size_of::<T>() != self.kind.bytes() || !(self.ptr as usize).is_multiple_of(align_of::<T>()) {
            return Err(PyBufferError::new_err(format!("{} is not aligned to its elements", self.name)));
        }
        // SAFETY: `T` has the size of an element, and any bytes are a `T`. By the invariant the first element and the last are in one
        // allocation, and so is what lies between them; it is readable while `self` is borrowed, and unwritten as for `view`.
        Ok(unsafe { std::slice::from_raw_parts(self.ptr.cast(), count) })
    }
}

/// Types without padding of which any bytes are a value.
trait Plain {}
impl Plain for u8 {}
impl Plain for f32 {}
impl Plain for half::f16 {}
impl Plain for half::bf16 {}
