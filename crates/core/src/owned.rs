//! Tensors that own their memory, of a dtype that is known at run time.

use crate::dtype::{Dtype, Element};
use crate::tensor::{TensorView, TensorViewMut, ViewError, dense};
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

impl OwnedTensor {
    /// A tensor of zeros.
    ///
    /// # Errors
    /// [`ViewError::Overflow`] where its size is not addressable.
    pub fn zeros(dtype: Dtype, shape: [usize; 4]) -> Result<Self, ViewError> {
        let count = crate::tensor::reach(shape, dense(shape))?;
        let elements = match dtype {
            Dtype::F32 => Elements::F32(vec![0.0; count]),
            Dtype::F16 => Elements::F16(vec![f16::ZERO; count]),
            Dtype::BF16 => Elements::BF16(vec![bf16::ZERO; count]),
        };
        Ok(Self { elements, shape })
    }

    /// A copy of a view, in the order `[batch, heads, rows, dim]` whatever its strides.
    #[must_use]
    pub fn copy_of(view: &TensorView<'_>) -> Self {
        fn collect<T: Element>(view: &TensorView<'_>) -> Vec<T> {
            let [batch, heads, rows, dim] = view.shape();
            let mut all = Vec::with_capacity(batch * heads * rows * dim);
            for (b, h, row) in
                (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..rows).map(move |r| (b, h, r))))
            {
                all.extend((0..dim).map(|d| T::from_f32(view.get([b, h, row, d]))));
            }
            all
        }
        let elements = match view.dtype() {
            Dtype::F32 => Elements::F32(collect(view)),
            Dtype::F16 => Elements::F16(collect(view)),
            Dtype::BF16 => Elements::BF16(collect(view)),
        };
        Self { elements, shape: view.shape() }
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
        /// `T` is one type with two names where the dtypes agree.
        fn taken<T: Element, U: Element>(all: Vec<U>) -> Result<Vec<T>, Vec<U>> {
            let mut all = Some(all);
            let same = (&mut all as &mut dyn Any).downcast_mut::<Option<Vec<T>>>();
            same.and_then(Option::take).ok_or_else(|| all.unwrap_or_default())
        }
        let shape = self.shape;
        let elements = match self.elements {
            Elements::F32(all) => taken(all).map_err(Elements::F32),
            Elements::F16(all) => taken(all).map_err(Elements::F16),
            Elements::BF16(all) => taken(all).map_err(Elements::BF16),
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
        let copy = OwnedTensor::copy_of(&view);
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
        let mut empty = OwnedTensor::zeros(Dtype::BF16, [0, 2, 1, 1]).unwrap();
        assert_eq!(empty.view_mut().shape(), [0, 2, 1, 1]);
    }
}
