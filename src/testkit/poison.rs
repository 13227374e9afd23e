//! Guarded memory: tensors at odd offsets between guard bands, everything outside the view a NaN pattern.
//!
//! A kernel that reads outside its view computes NaN; one that writes there breaks the pattern; one that leaves an output
//! element unwritten leaves NaN in it.

use super::rng::Rng;
use crate::{Dtype, Element, MaskKind, MaskView, TensorView, TensorViewMut};
use half::{bf16, f16};

/// Elements before the first and after the last of a view: odd, and longer than the widest vector of the narrowest type.
const BAND: usize = 67;

/// Order and spacing of a tensor's elements in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// `[batch, heads, rows, dim]`, dense.
    Bhsd,
    /// `[batch, rows, heads, dim]`, dense; for packed sequences `[total, heads, dim]`.
    Bshd,
    /// `[batch, heads, rows, dim]` with an odd number of unused elements after each row, head and batch entry.
    Padded,
    /// `[batch, rows, heads, dim]` as one third of a fused row.
    Fused,
}

impl Layout {
    /// Every layout.
    pub const ALL: [Self; 4] = [Self::Bhsd, Self::Bshd, Self::Padded, Self::Fused];

    /// Strides in elements of a tensor `[batch, heads, rows, dim]`.
    #[must_use]
    pub const fn strides(self, [_, heads, rows, dim]: [usize; 4]) -> [usize; 4] {
        match self {
            Self::Bhsd => [heads * rows * dim, rows * dim, dim, 1],
            Self::Bshd => [rows * heads * dim, dim, heads * dim, 1],
            Self::Padded => {
                let row = dim + 3;
                let head = rows * row + 5;
                [heads * head + 7, head, row, 1]
            }
            Self::Fused => [rows * 3 * heads * dim, dim, 3 * heads * dim, 1],
        }
    }
}

#[derive(Debug, Clone)]
enum Elements {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

const POISON_F32: u32 = 0x7FC5_5AC5;
const POISON_16: u16 = 0x7FDA;

/// The pattern of memory that nothing should have read or written: a NaN in every dtype.
const fn poison(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => POISON_F32,
        Dtype::F16 | Dtype::BF16 => POISON_16 as u32,
    }
}

/// A tensor in guarded memory. New, every element is the poison pattern.
#[derive(Debug, Clone)]
pub struct Guarded {
    elements: Elements,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl Guarded {
    /// A tensor `[batch, heads, rows, dim]` of poison.
    #[must_use]
    pub fn new(dtype: Dtype, shape: [usize; 4], layout: Layout) -> Self {
        let strides = layout.strides(shape);
        let reach = if shape.contains(&0) {
            0
        } else {
            1 + shape.iter().zip(strides).map(|(n, stride)| (n - 1) * stride).sum::<usize>()
        };
        let len = BAND + reach + BAND;
        let elements = match dtype {
            Dtype::F32 => Elements::F32(vec![f32::from_bits(POISON_F32); len]),
            Dtype::F16 => Elements::F16(vec![f16::from_bits(POISON_16); len]),
            Dtype::BF16 => Elements::BF16(vec![bf16::from_bits(POISON_16); len]),
        };
        Self { elements, shape, strides }
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

    fn at(&self, index: [usize; 4]) -> usize {
        debug_assert!(index.iter().zip(self.shape).all(|(&i, n)| i < n), "{index:?} in {:?}", self.shape);
        BAND + index.iter().zip(self.strides).map(|(i, stride)| i * stride).sum::<usize>()
    }

    /// Sets an element to the value nearest to `x`.
    pub fn set(&mut self, index: [usize; 4], x: f32) {
        let at = self.at(index);
        match &mut self.elements {
            Elements::F32(v) => v[at] = x,
            Elements::F16(v) => v[at] = f16::from_f32(x),
            Elements::BF16(v) => v[at] = bf16::from_f32(x),
        }
    }

    fn bits_at(&self, at: usize) -> u32 {
        match &self.elements {
            Elements::F32(v) => v[at].to_bits(),
            Elements::F16(v) => u32::from(v[at].to_bits()),
            Elements::BF16(v) => u32::from(v[at].to_bits()),
        }
    }

    /// An element as f32.
    #[must_use]
    pub fn get(&self, index: [usize; 4]) -> f32 {
        let at = self.at(index);
        match &self.elements {
            Elements::F32(v) => v[at].to_f32(),
            Elements::F16(v) => v[at].to_f32(),
            Elements::BF16(v) => v[at].to_f32(),
        }
    }

    /// Every index of the tensor, in order.
    pub fn indices(&self) -> impl Iterator<Item = [usize; 4]> + use<> {
        let [nb, nh, nr, nd] = self.shape;
        (0..nb).flat_map(move |b| {
            (0..nh).flat_map(move |h| (0..nr).flat_map(move |r| (0..nd).map(move |d| [b, h, r, d])))
        })
    }

    /// The elements in order, as f32.
    #[must_use]
    pub fn values(&self) -> Vec<f32> {
        self.indices().map(|index| self.get(index)).collect()
    }

    /// The bits of the elements in order.
    #[must_use]
    pub fn bits(&self) -> Vec<u32> {
        self.indices().map(|index| self.bits_at(self.at(index))).collect()
    }

    /// The tensor as an input.
    #[must_use]
    #[allow(clippy::expect_used, reason = "the memory was sized for this shape and these strides")]
    pub fn view(&self) -> TensorView<'_> {
        let (shape, strides) = (self.shape, self.strides);
        match &self.elements {
            Elements::F32(v) => TensorView::strided(&v[BAND..v.len() - BAND], shape, strides),
            Elements::F16(v) => TensorView::strided(&v[BAND..v.len() - BAND], shape, strides),
            Elements::BF16(v) => TensorView::strided(&v[BAND..v.len() - BAND], shape, strides),
        }
        .expect("the memory holds the view")
    }

    /// The tensor as an output.
    #[allow(clippy::expect_used, reason = "the memory was sized for this shape and these strides")]
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let (shape, strides) = (self.shape, self.strides);
        let window = |len: usize| BAND..len - BAND;
        match &mut self.elements {
            Elements::F32(v) => {
                let range = window(v.len());
                TensorViewMut::strided(&mut v[range], shape, strides)
            }
            Elements::F16(v) => {
                let range = window(v.len());
                TensorViewMut::strided(&mut v[range], shape, strides)
            }
            Elements::BF16(v) => {
                let range = window(v.len());
                TensorViewMut::strided(&mut v[range], shape, strides)
            }
        }
        .expect("the memory holds the view")
    }

    /// Position, counted in elements from the first of the view, of memory outside the view that is no longer the pattern.
    #[must_use]
    pub fn touched(&self) -> Option<isize> {
        let len = match &self.elements {
            Elements::F32(v) => v.len(),
            Elements::F16(v) => v.len(),
            Elements::BF16(v) => v.len(),
        };
        let mut inside = vec![false; len];
        for index in self.indices() {
            inside[self.at(index)] = true;
        }
        let pattern = poison(self.dtype());
        let at = (0..len).find(|&at| !inside[at] && self.bits_at(at) != pattern)?;
        Some(at as isize - BAND as isize)
    }
}

/// A list of f32 in guarded memory: logsumexp, slopes, sinks.
#[derive(Debug, Clone)]
pub struct GuardedList {
    elements: Vec<f32>,
}

impl GuardedList {
    /// `len` elements of poison.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self { elements: vec![f32::from_bits(POISON_F32); BAND + len + BAND] }
    }

    /// A list of these values.
    #[must_use]
    pub fn of(values: &[f32]) -> Self {
        let mut list = Self::new(values.len());
        list.slice_mut().copy_from_slice(values);
        list
    }

    /// The list.
    #[must_use]
    pub fn slice(&self) -> &[f32] {
        &self.elements[BAND..self.elements.len() - BAND]
    }

    /// The list, for writing.
    pub fn slice_mut(&mut self) -> &mut [f32] {
        let end = self.elements.len() - BAND;
        &mut self.elements[BAND..end]
    }

    /// Position, counted from the first of the list, of memory outside it that is no longer the pattern.
    #[must_use]
    pub fn touched(&self) -> Option<isize> {
        let end = self.elements.len() - BAND;
        let outside = (0..BAND).chain(end..self.elements.len());
        let at = outside.into_iter().find(|&at| self.elements[at].to_bits() != POISON_F32)?;
        Some(at as isize - BAND as isize)
    }
}

/// A materialised mask in guarded memory.
#[derive(Debug, Clone)]
pub enum GuardedMask {
    /// A boolean mask, one byte an element; what is outside the view looks visible.
    Bool {
        /// Bytes, with the guard bands.
        bytes: Vec<u8>,
        /// `[batch, heads, queries, keys]`.
        shape: [usize; 4],
        /// In elements.
        strides: [usize; 4],
    },
    /// An additive mask.
    Additive(Guarded),
}

impl GuardedMask {
    /// A mask of a kind, from the bias of each element: `-inf` hides, in a boolean mask everything else shows.
    pub fn new(
        kind: MaskKind,
        shape: [usize; 4],
        layout: Layout,
        mut bias: impl FnMut([usize; 4]) -> f32,
    ) -> Self {
        // A mask's rows are key rows of one (batch, head, query): only the layouts without interleaving make sense.
        let layout = if layout == Layout::Bhsd { layout } else { Layout::Padded };
        let mut additive = Guarded::new(
            match kind {
                MaskKind::Bool => Dtype::F32,
                MaskKind::Additive(dtype) => dtype,
            },
            shape,
            layout,
        );
        for index in additive.indices() {
            additive.set(index, bias(index));
        }
        match kind {
            MaskKind::Additive(_) => Self::Additive(additive),
            MaskKind::Bool => {
                // Any byte but 0 is true.
                let mut rng = Rng::new(0);
                let Elements::F32(values) = &additive.elements else { unreachable!("made as f32 above") };
                let byte = |&x: &f32| if x == f32::NEG_INFINITY { 0 } else { 1 + rng.below(255) as u8 };
                let bytes = values.iter().map(byte).collect();
                Self::Bool { bytes, shape, strides: additive.strides }
            }
        }
    }

    /// The mask as an input.
    #[must_use]
    #[allow(clippy::expect_used, reason = "the memory was sized for this shape and these strides")]
    pub fn view(&self) -> MaskView<'_> {
        match self {
            Self::Additive(tensor) => MaskView::additive(tensor.view()),
            Self::Bool { bytes, shape, strides } => {
                MaskView::bool_bytes(&bytes[BAND..bytes.len() - BAND], *shape, *strides)
                    .expect("the memory holds the view")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_outside_the_view_is_found() {
        for layout in Layout::ALL {
            for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
                let mut tensor = Guarded::new(dtype, [2, 3, 4, 5], layout);
                assert!(tensor.values().iter().all(|x| x.is_nan()));
                for index in tensor.indices() {
                    tensor.set(index, 1.0);
                }
                assert_eq!(tensor.touched(), None, "{layout:?}");
                let clobber = |at: usize| {
                    let mut tensor = tensor.clone();
                    match &mut tensor.elements {
                        Elements::F32(v) => v[at] = 0.0,
                        Elements::F16(v) => v[at] = f16::ZERO,
                        Elements::BF16(v) => v[at] = bf16::ZERO,
                    }
                    tensor.touched()
                };
                assert_eq!(clobber(BAND - 1), Some(-1));
                if layout == Layout::Padded {
                    assert_eq!(clobber(BAND + 5), Some(5));
                }
            }
        }
        let mut list = GuardedList::of(&[1.0, 2.0]);
        assert_eq!(list.touched(), None);
        list.elements[BAND + 2] = 0.0;
        assert_eq!(list.touched(), Some(2));
    }

    #[test]
    fn views_hold_the_values() {
        for layout in Layout::ALL {
            let mut tensor = Guarded::new(Dtype::F32, [2, 3, 4, 5], layout);
            for (n, index) in tensor.indices().enumerate() {
                tensor.set(index, n as f32);
            }
            let view = tensor.view();
            for (n, index) in tensor.indices().enumerate() {
                assert_eq!(view.get(index), n as f32, "{layout:?}");
            }
        }
    }

    #[test]
    fn boolean_and_additive_masks_hide_the_same_keys() {
        let hidden = |[_, h, i, j]: [usize; 4]| (h + i + j).is_multiple_of(3);
        let bias = |index| if hidden(index) { f32::NEG_INFINITY } else { 0.0 };
        for layout in [Layout::Bhsd, Layout::Padded] {
            for kind in [MaskKind::Bool, MaskKind::Additive(Dtype::F16)] {
                let mask = GuardedMask::new(kind, [1, 2, 3, 4], layout, bias);
                for h in 0..2 {
                    for i in 0..3 {
                        for j in 0..4 {
                            assert_eq!(mask.view().bias([0, h, i, j]), bias([0, h, i, j]));
                        }
                    }
                }
            }
        }
    }
}
