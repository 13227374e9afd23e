//! Memory of the host as views.

#![allow(unsafe_code)]

use super::block::{Axes, Block, Kind, Refusal};
use flashtile::{Dtype, MaskView, TensorView, TensorViewMut};

impl Block {
    /// The memory as a tensor that is read.
    ///
    /// # Safety
    /// - The elements lie in one allocation of the host, and are readable while the result lives.
    /// - Nobody writes to them meanwhile.
    pub(crate) unsafe fn view(&self, axes: Axes) -> Result<TensorView<'_>, Refusal> {
        let (dtype, shape, strides) = self.logical(axes)?;
        // SAFETY: the caller's contract.
        unsafe { TensorView::from_raw_parts(dtype, self.ptr, shape, strides) }
            .map_err(|error| self.refuse(error))
    }

    /// The memory as a tensor that is written, and that has no memory in common with `others`.
    ///
    /// # Safety
    /// - As for [`Block::view`], and the elements are writable.
    /// - `others` are all other memory that is read or written while the result lives.
    pub(crate) unsafe fn view_mut(
        &mut self,
        axes: Axes,
        others: &[&Self],
    ) -> Result<TensorViewMut<'_>, Refusal> {
        let (dtype, shape, strides) = self.logical(axes)?;
        self.check_exclusive(others)?;
        let ptr = self.ptr;
        // SAFETY: the caller's contract; `check_exclusive` showed that `others` have no address in common with it. `self` is borrowed
        // exclusively.
        unsafe { TensorViewMut::from_raw_parts(dtype, ptr, shape, strides) }
            .map_err(|error| self.refuse(error))
    }

    /// Memory of a shape, dense and in the order of its axes, as a list of f32 that is read.
    ///
    /// # Safety
    /// As for [`Block::view`].
    pub(crate) unsafe fn list(&self, shape: &[usize]) -> Result<&[f32], Refusal> {
        self.check_order(shape)?;
        let count = self.check_list()?;
        if count == 0 {
            return Ok(&[]);
        }
        // SAFETY: the caller's contract: `count` elements reach as far as the shape does; aligned, and any bytes are an f32.
        Ok(unsafe { std::slice::from_raw_parts(self.ptr.cast(), count) })
    }

    /// Dense memory as a list of f32 that is written.
    ///
    /// # Safety
    /// As for [`Block::view_mut`].
    pub(crate) unsafe fn list_mut(&mut self, others: &[&Self]) -> Result<&mut [f32], Refusal> {
        self.check_exclusive(others)?;
        let count = self.check_list()?;
        if count == 0 {
            return Ok(&mut []);
        }
        // SAFETY: the caller's contract: `count` elements reach as far as the shape does; aligned, and any bytes are an f32.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.ptr.cast(), count) })
    }

    /// The memory as a mask of one, two or four axes.
    ///
    /// # Safety
    /// As for [`Block::view`], gaps between the elements included.
    pub(crate) unsafe fn mask(&self) -> Result<MaskView<'_>, Refusal> {
        let (shape, strides) = self.mask_axes()?;
        // SAFETY: the caller's contract.
        let view = unsafe {
            match self.kind {
                Kind::Bool => MaskView::bool_bytes(self.elements::<u8>()?, shape, strides),
                Kind::Element(Dtype::F32) => {
                    MaskView::additive_strided(self.elements::<f32>()?, shape, strides)
                }
                Kind::Element(Dtype::F16) => {
                    MaskView::additive_strided(self.elements::<half::f16>()?, shape, strides)
                }
                Kind::Element(Dtype::BF16) => {
                    MaskView::additive_strided(self.elements::<half::bf16>()?, shape, strides)
                }
            }
        };
        view.map_err(|error| self.refuse(error))
    }

    /// The elements from the first to the last that the shape reaches, gaps included.
    ///
    /// # Safety
    /// As for [`Block::mask`].
    unsafe fn elements<T: Plain>(&self) -> Result<&[T], Refusal> {
        let count = self.span();
        if count == 0 {
            return Ok(&[]);
        }
        if size_of::<T>() != self.kind.bytes() || !(self.ptr as usize).is_multiple_of(align_of::<T>()) {
            return Err(Refusal::Buffer(format!("{} is not aligned to its elements", self.name)));
        }
        // SAFETY: `T` has the size of an element, and any bytes are a `T`. The rest is the caller's contract.
        Ok(unsafe { std::slice::from_raw_parts(self.ptr.cast(), count) })
    }
}

/// Types without padding of which any bytes are a value.
trait Plain {}
impl Plain for u8 {}
impl Plain for f32 {}
impl Plain for half::f16 {}
impl Plain for half::bf16 {}
