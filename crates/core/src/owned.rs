//! Tensors that own their memory, of a dtype that is known at run time.

use crate::dtype::{Dtype, Element};
use crate::tensor::{TensorView, TensorViewMut, ViewError, dense, reach};
use half::{bf16, f16};
use std::any::Any;

/// The elements of an [`OwnedTensor`].
#[derive(Debug, Clone, PartialEq)]
enum Elements {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

/// A dense tensor `[batch, heads, rows, dim]` that owns its memory, with a dtype that is known at run time.
///
/// ```
/// use flashtile::{Dtype, OwnedTensor};
/// let mut out = OwnedTensor::zeros(Dtype::BF16, [1, 2, 3, 4])?;
/// assert_eq!(out.view_mut().shape(), [1, 2, 3, 4]);
/// let elements = out.into_vec::<half::bf16>().expect("bf16");
/// assert_eq!(elements.len(), 24);
/// # Ok::<(), flashtile::ViewError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct OwnedTensor {
    elements: Elements,
    shape: [usize; 4],
}

/// Memory for elements.
fn reserve<T>(count: usize) -> Result<Vec<T>, ViewError> {
    let bytes = count.checked_mul(size_of::<T>()).ok_or(ViewError::Overflow)?;
    let mut all = Vec::new();
    all.try_reserve_exact(count).map_err(|_| ViewError::Memory { bytes })?;
    Ok(all)
}

/// A list of `count` elements, each `value`.
///
/// # Errors
/// [`ViewError::Overflow`] where its size is not addressable, [`ViewError::Memory`] where there is no memory for it.
pub fn filled<T: Clone>(count: usize, value: T) -> Result<Vec<T>, ViewError> {
    let mut all = reserve(count)?;
    all.resize(count, value);
    Ok(all)
}

/// The elements of a view in the order `[batch, heads, rows, dim]`, each of `N` bytes.
fn gather<T, const N: usize>(view: &TensorView<'_>, from: fn([u8; N]) -> T) -> Result<Vec<T>, ViewError> {
    let [batch, heads, rows, dim] = view.shape();
    let mut all = reserve(reach(view.shape(), dense(view.shape()))?)?;
    if dim > 0 {
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            for row in 0..rows {
                let (elements, _) = view.row_bytes([b, h, row]).as_chunks::<N>();
                all.extend(elements.iter().map(|&bytes| from(bytes)));
            }
        }
    }
    Ok(all)
}

/// Converts a list without a copy, where `T` and `U` are one type with two names; returns it as an error
/// where they are not.
fn same<T: Element, U: Element>(all: Vec<T>) -> Result<Vec<U>, Vec<T>> {
    let mut all = Some(all);
    let same = (&mut all as &mut dyn Any).downcast_mut::<Option<Vec<U>>>();
    same.and_then(Option::take).ok_or_else(|| all.unwrap_or_default())
}

impl OwnedTensor {
    /// A tensor of zeros.
    ///
    /// # Errors
    /// [`ViewError::Overflow`] where its size is not addressable, [`ViewError::Memory`] where there is no memory for it.
    pub fn zeros(dtype: Dtype, shape: [usize; 4]) -> Result<Self, ViewError> {
        let count = reach(shape, dense(shape))?;
        let elements = match dtype {
            Dtype::F32 => Elements::F32(filled(count, 0.0)?),
            Dtype::F16 => Elements::F16(filled(count, f16::ZERO)?),
            Dtype::BF16 => Elements::BF16(filled(count, bf16::ZERO)?),
        };
        Ok(Self { elements, shape })
    }

    /// A tensor of these elements, in the order `[batch, heads, rows, dim]`. Elements behind the shape are dropped.
    ///
    /// # Errors
    /// [`ViewError::TooSmall`] or [`ViewError::Overflow`].
    pub fn from_vec<T: Element>(mut all: Vec<T>, shape: [usize; 4]) -> Result<Self, ViewError> {
        all.truncate(TensorView::bhsd(&all, shape).and_then(|view| reach(view.shape(), view.strides()))?);
        let elements = match T::DTYPE {
            Dtype::F32 => same(all).map(Elements::F32).ok(),
            Dtype::F16 => same(all).map(Elements::F16).ok(),
            Dtype::BF16 => same(all).map(Elements::BF16).ok(),
        };
        match elements {
            Some(elements) => Ok(Self { elements, shape }),
            None => unreachable!("each dtype has one type of elements"),
        }
    }

    /// A copy of a view, in the order `[batch, heads, rows, dim]` whatever its strides.
    ///
    /// # Errors
    /// [`ViewError::Overflow`] or [`ViewError::Memory`], as axes of stride 0 may make the copy larger than the memory of the view.
    pub fn copy_of(view: &TensorView<'_>) -> Result<Self, ViewError> {
        let elements = match view.dtype() {
            Dtype::F32 => Elements::F32(gather(view, f32::from_ne_bytes)?),
            Dtype::F16 => Elements::F16(gather(view, f16::from_ne_bytes)?),
            Dtype::BF16 => Elements::BF16(gather(view, bf16::from_ne_bytes)?),
        };
        Ok(Self { elements, shape: view.shape() })
    }

    /// Element type.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        match self.elements {
            Elements::F32(_) => Dtype::F32,
            Elements::F16(_) => Dtype::F16,
            Elements::BF16(_) => Dtype::BF16,
        }
    }

    /// `[batch, heads, rows, dim]`.
    #[must_use]
    pub const fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// All of it, to read.
    #[must_use]
    pub fn view(&self) -> TensorView<'_> {
        let made = match &self.elements {
            Elements::F32(all) => TensorView::bhsd(all, self.shape),
            Elements::F16(all) => TensorView::bhsd(all, self.shape),
            Elements::BF16(all) => TensorView::bhsd(all, self.shape),
        };
        whole(made)
    }

    /// All of it, to write.
    #[must_use]
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let made = match &mut self.elements {
            Elements::F32(all) => TensorViewMut::bhsd(all, self.shape),
            Elements::F16(all) => TensorViewMut::bhsd(all, self.shape),
            Elements::BF16(all) => TensorViewMut::bhsd(all, self.shape),
        };
        whole(made)
    }

    /// The elements, in the order `[batch, heads, rows, dim]`.
    ///
    /// # Errors
    /// The tensor, unchanged, where [`OwnedTensor::dtype`] is not `T::DTYPE`.
    pub fn into_vec<T: Element>(self) -> Result<Vec<T>, Self> {
        let shape = self.shape;
        let elements = match self.elements {
            Elements::F32(all) => same(all).map_err(Elements::F32),
            Elements::F16(all) => same(all).map_err(Elements::F16),
            Elements::BF16(all) => same(all).map_err(Elements::BF16),
        };
        elements.map_err(|elements| Self { elements, shape })
    }
}

/// A view of memory whose size was checked when the tensor was made.
fn whole<V>(made: Result<V, ViewError>) -> V {
    match made {
        Ok(view) => view,
        Err(why) => unreachable!("{why}: a tensor owns as many elements as its shape has"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_dense_and_come_back_as_their_own_type_only() {
        let data: Vec<f16> = (0..24).map(|x| f16::from_f32(x as f32)).collect();
        let view = TensorView::bshd(&data, [1, 3, 2, 4]).unwrap();
        let copy = OwnedTensor::copy_of(&view).unwrap();
        assert_eq!(
            (copy.dtype(), copy.shape(), copy.view().strides()),
            (Dtype::F16, [1, 2, 3, 4], [24, 12, 4, 1])
        );
        assert_eq!(copy.view().get([0, 1, 2, 3]), view.get([0, 1, 2, 3]));
        let kept = copy.clone().into_vec::<f32>().unwrap_err();
        assert_eq!(kept, copy);
        let elements = kept.into_vec::<f16>().unwrap();
        assert_eq!(elements[12..16], data[4..8]);
    }

    #[test]
    fn sizes_are_checked() {
        let huge = OwnedTensor::zeros(Dtype::F32, [usize::MAX, 2, 1, 1]).unwrap_err();
        assert_eq!(huge, ViewError::Overflow);
        // One element in memory, more than there is memory for in the copy.
        let one = [1.0f32];
        let wide = TensorView::strided(&one, [1 << 20, 1 << 20, 1 << 10, 1], [0, 0, 0, 1]).unwrap();
        let refused = OwnedTensor::copy_of(&wide).unwrap_err();
        assert!(matches!(refused, ViewError::Overflow | ViewError::Memory { .. }), "{refused}");
        let short = OwnedTensor::from_vec(vec![bf16::ONE; 5], [1, 1, 2, 3]).unwrap_err();
        assert_eq!(short, ViewError::TooSmall { needed: 6, got: 5 });
        let owned = OwnedTensor::from_vec(vec![bf16::ONE; 7], [1, 1, 2, 3]).unwrap();
        assert_eq!((owned.dtype(), owned.into_vec::<bf16>().unwrap().len()), (Dtype::BF16, 6));
        let mut empty = OwnedTensor::zeros(Dtype::BF16, [0, 2, 1, 1]).unwrap();
        assert_eq!(empty.view_mut().shape(), [0, 2, 1, 1]);
    }
}
