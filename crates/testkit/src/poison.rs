//! Guarded memory: tensors at odd offsets between guard bands, with a NaN pattern everywhere outside the view.
//!
//! A kernel that reads outside its view computes NaN, one that writes there changes the pattern, and an output
//! element that was not written is NaN.
//!
//! A read whose result is discarded leaves no trace. Memory checkers find such reads, but not inside a guard band,
//! which is valid memory: [`Placement::Exact`] ends a tensor where its allocation ends.

use super::rng::Rng;
use flashtile_core::dtype::{Dtype, Element, MaskKind};
use flashtile_core::tensor::{MaskView, TensorView, TensorViewMut};
use half::{bf16, f16};
use std::ops::Range;

/// Elements before the first and after the last of a view: an odd number, and more than the widest vector of the
/// narrowest type has.
const BAND: usize = 67;

/// Where a tensor lies in its allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Placement {
    /// Between guard bands of an odd number of elements.
    Guarded,
    /// At the end of its allocation, so that memory after the last element does not belong to the process.
    Exact {
        /// Elements before the first. With none, a read before the tensor is out of its allocation too; with an odd
        /// number, vectors are as misaligned as between guard bands.
        lead: usize,
    },
}

impl Placement {
    /// At the end of the allocation; for every other name at its start too.
    #[must_use]
    pub fn exact(name: &str) -> Self {
        let draw = Rng::named(name).below(BAND + 1);
        Self::Exact { lead: if draw.is_multiple_of(2) { 0 } else { draw } }
    }

    /// Elements before the first of a view and after its last.
    const fn bands(self) -> [usize; 2] {
        match self {
            Self::Guarded => [BAND, BAND],
            Self::Exact { lead } => [lead, 0],
        }
    }

    /// Which of the `len` elements of an allocation belong to the view.
    const fn window(self, len: usize) -> Range<usize> {
        let [lead, trail] = self.bands();
        lead..len - trail
    }
}

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

/// The pattern of memory that must not be accessed: a NaN in every dtype.
const fn poison(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => POISON_F32,
        Dtype::F16 | Dtype::BF16 => POISON_16 as u32,
    }
}

/// A tensor in guarded memory. Initially, every element is the poison pattern.
#[derive(Debug, Clone)]
pub struct Guarded {
    elements: Elements,
    placement: Placement,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl Guarded {
    /// A tensor `[batch, heads, rows, dim]` of poison between guard bands.
    #[must_use]
    pub fn new(dtype: Dtype, shape: [usize; 4], layout: Layout) -> Self {
        Self::placed(dtype, shape, layout, Placement::Guarded)
    }

    /// Like [`Guarded::new`], with a placement.
    #[must_use]
    pub fn placed(dtype: Dtype, shape: [usize; 4], layout: Layout, placement: Placement) -> Self {
        let strides = layout.strides(shape);
        let reach = if shape.contains(&0) {
            0
        } else {
            1 + shape.iter().zip(strides).map(|(n, stride)| (n - 1) * stride).sum::<usize>()
        };
        let [lead, trail] = placement.bands();
        let len = lead + reach + trail;
        // Allocated by `vec!`, whose capacity is its length.
        let elements = match dtype {
            Dtype::F32 => Elements::F32(vec![f32::from_bits(POISON_F32); len]),
            Dtype::F16 => Elements::F16(vec![f16::from_bits(POISON_16); len]),
            Dtype::BF16 => Elements::BF16(vec![bf16::from_bits(POISON_16); len]),
        };
        Self { elements, placement, shape, strides }
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
        let [lead, _] = self.placement.bands();
        let ([b, h, r, d], [batch, head, row, element]) = (index, self.strides);
        lead + b * batch + h * head + r * row + d * element
    }

    /// Where the elements of each row lie, row by row. The elements of a row are contiguous in every layout.
    fn rows(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let ([lead, _], [nb, nh, nr, dim]) = (self.placement.bands(), self.shape);
        let [batch, head, row, _] = self.strides;
        let count = if dim == 0 { 0 } else { nb * nh * nr };
        // As in `indices`.
        (0..count).map(move |n| {
            let start = lead + n / nr / nh * batch + n / nr % nh * head + n % nr * row;
            start..start + dim
        })
    }

    fn len(&self) -> usize {
        match &self.elements {
            Elements::F32(v) => v.len(),
            Elements::F16(v) => v.len(),
            Elements::BF16(v) => v.len(),
        }
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
        // One counter, since the compiler turns nested iterators into branches on uninitialised memory, which are
        // harmless but reported by memory checkers.
        (0..nb * nh * nr * nd).map(move |n| {
            let (row, d) = (n / nd, n % nd);
            let (head, r) = (row / nr, row % nr);
            [head / nh, head % nh, r, d]
        })
    }

    /// The elements in order, as f32.
    #[must_use]
    pub fn values(&self) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.shape.iter().product());
        for row in self.rows() {
            match &self.elements {
                Elements::F32(v) => values.extend_from_slice(&v[row]),
                Elements::F16(v) => values.extend(v[row].iter().map(|x| x.to_f32())),
                Elements::BF16(v) => values.extend(v[row].iter().map(|x| x.to_f32())),
            }
        }
        values
    }

    /// The bits of the elements in order.
    #[must_use]
    pub fn bits(&self) -> Vec<u32> {
        let mut bits = Vec::with_capacity(self.shape.iter().product());
        for row in self.rows() {
            match &self.elements {
                Elements::F32(v) => bits.extend(v[row].iter().map(|x| x.to_bits())),
                Elements::F16(v) => bits.extend(v[row].iter().map(|x| u32::from(x.to_bits()))),
                Elements::BF16(v) => bits.extend(v[row].iter().map(|x| u32::from(x.to_bits()))),
            }
        }
        bits
    }

    /// The tensor as an input.
    #[must_use]
    #[allow(clippy::expect_used, reason = "the memory was sized for this shape and these strides")]
    pub fn view(&self) -> TensorView<'_> {
        let (shape, strides) = (self.shape, self.strides);
        let window = self.placement.window(self.len());
        match &self.elements {
            Elements::F32(v) => TensorView::strided(&v[window], shape, strides),
            Elements::F16(v) => TensorView::strided(&v[window], shape, strides),
            Elements::BF16(v) => TensorView::strided(&v[window], shape, strides),
        }
        .expect("the memory holds the view")
    }

    /// The tensor as an output.
    #[allow(clippy::expect_used, reason = "the memory was sized for this shape and these strides")]
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let (shape, strides) = (self.shape, self.strides);
        let window = self.placement.window(self.len());
        match &mut self.elements {
            Elements::F32(v) => TensorViewMut::strided(&mut v[window], shape, strides),
            Elements::F16(v) => TensorViewMut::strided(&mut v[window], shape, strides),
            Elements::BF16(v) => TensorViewMut::strided(&mut v[window], shape, strides),
        }
        .expect("the memory holds the view")
    }

    /// Addresses of the view's memory, including gaps between rows: its first byte, and one past its last.
    #[must_use]
    pub fn addresses(&self) -> Range<*const u8> {
        let window = self.placement.window(self.len());
        match &self.elements {
            Elements::F32(v) => addresses(&v[window]),
            Elements::F16(v) => addresses(&v[window]),
            Elements::BF16(v) => addresses(&v[window]),
        }
    }

    /// Position of the first changed element outside the view, counted in elements from the first of the view.
    #[must_use]
    pub fn touched(&self) -> Option<isize> {
        let len = self.len();
        let mut inside = vec![false; len];
        for row in self.rows() {
            inside[row].fill(true);
        }
        let pattern = poison(self.dtype());
        let at = (0..len).find(|&at| !inside[at] && self.bits_at(at) != pattern)?;
        let [lead, _] = self.placement.bands();
        Some(at as isize - lead as isize)
    }
}

fn addresses<T>(memory: &[T]) -> Range<*const u8> {
    let Range { start, end } = memory.as_ptr_range();
    start.cast()..end.cast()
}

/// A list of f32 in guarded memory: logsumexp, slopes, sinks.
#[derive(Debug, Clone)]
pub struct GuardedList {
    elements: Vec<f32>,
    placement: Placement,
}

impl GuardedList {
    /// `len` elements of poison between guard bands.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self::placed(len, Placement::Guarded)
    }

    /// Like [`GuardedList::new`], with a placement.
    #[must_use]
    pub fn placed(len: usize, placement: Placement) -> Self {
        let [lead, trail] = placement.bands();
        Self { elements: vec![f32::from_bits(POISON_F32); lead + len + trail], placement }
    }

    /// A list of these values between guard bands.
    #[must_use]
    pub fn of(values: &[f32]) -> Self {
        let mut list = Self::new(values.len());
        list.slice_mut().copy_from_slice(values);
        list
    }

    /// The list.
    #[must_use]
    pub fn slice(&self) -> &[f32] {
        &self.elements[self.placement.window(self.elements.len())]
    }

    /// The list, for writing.
    pub fn slice_mut(&mut self) -> &mut [f32] {
        let window = self.placement.window(self.elements.len());
        &mut self.elements[window]
    }

    /// Position of the first changed element outside the list, counted from the first of the list.
    #[must_use]
    pub fn touched(&self) -> Option<isize> {
        let Range { start, end } = self.placement.window(self.elements.len());
        let outside = (0..start).chain(end..self.elements.len());
        let at = outside.into_iter().find(|&at| self.elements[at].to_bits() != POISON_F32)?;
        Some(at as isize - start as isize)
    }
}

/// A materialised mask in guarded memory.
#[derive(Debug, Clone)]
pub enum GuardedMask {
    /// A boolean mask, one byte per element; bytes outside the view look visible.
    Bool {
        /// Bytes, including the guard bands.
        bytes: Vec<u8>,
        /// The range of the view among them.
        placement: Placement,
        /// `[batch, heads, queries, keys]`.
        shape: [usize; 4],
        /// In elements.
        strides: [usize; 4],
    },
    /// An additive mask.
    Additive(Guarded),
}

impl GuardedMask {
    /// A mask of a kind between guard bands, from the bias of each element: `-inf` hides, and in a boolean mask
    /// everything else shows.
    pub fn new(
        kind: MaskKind,
        shape: [usize; 4],
        layout: Layout,
        bias: impl FnMut([usize; 4]) -> f32,
    ) -> Self {
        Self::placed(kind, shape, (layout, Placement::Guarded), bias)
    }

    /// Like [`GuardedMask::new`], with a placement.
    pub fn placed(
        kind: MaskKind,
        shape: [usize; 4],
        (layout, placement): (Layout, Placement),
        mut bias: impl FnMut([usize; 4]) -> f32,
    ) -> Self {
        // A mask's rows are the keys of one (batch, head, query): only layouts without interleaving make sense.
        let layout = if layout == Layout::Bhsd { layout } else { Layout::Padded };
        let mut additive = Guarded::placed(
            match kind {
                MaskKind::Bool => Dtype::F32,
                MaskKind::Additive(dtype) => dtype,
            },
            shape,
            layout,
            placement,
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
                // Collected from an iterator of known length, so that the capacity is the length.
                let bytes = values.iter().map(byte).collect();
                Self::Bool { bytes, placement, shape, strides: additive.strides }
            }
        }
    }

    /// The mask as an input.
    #[must_use]
    #[allow(clippy::expect_used, reason = "the memory was sized for this shape and these strides")]
    pub fn view(&self) -> MaskView<'_> {
        match self {
            Self::Additive(tensor) => MaskView::additive(tensor.view()),
            Self::Bool { bytes, placement, shape, strides } => {
                MaskView::bool_bytes(&bytes[placement.window(bytes.len())], *shape, *strides)
                    .expect("the memory holds the view")
            }
        }
    }

    /// Addresses of the view's memory, like [`Guarded::addresses`].
    #[must_use]
    pub fn addresses(&self) -> Range<*const u8> {
        match self {
            Self::Additive(tensor) => tensor.addresses(),
            Self::Bool { bytes, placement, .. } => addresses(&bytes[placement.window(bytes.len())]),
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

    /// The address one past the memory of the vector.
    fn end<T>(v: &Vec<T>) -> *const u8 {
        v.as_ptr().wrapping_add(v.capacity()).cast()
    }

    #[test]
    fn what_is_placed_exactly_ends_with_its_allocation() {
        for lead in [0, 1, 67] {
            let placement = Placement::Exact { lead };
            for layout in Layout::ALL {
                for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
                    let tensor = Guarded::placed(dtype, [2, 3, 4, 5], layout, placement).clone();
                    let allocation = match &tensor.elements {
                        Elements::F32(v) => v.as_ptr().cast()..end(v),
                        Elements::F16(v) => v.as_ptr().cast()..end(v),
                        Elements::BF16(v) => v.as_ptr().cast()..end(v),
                    };
                    let Range { start, end } = tensor.addresses();
                    assert_eq!(allocation.end, end, "{layout:?} {dtype}");
                    assert_eq!(allocation.start.wrapping_add(lead * dtype.bytes()), start);
                    // The last element of the shape is the last of the memory.
                    assert_eq!(tensor.at([1, 2, 3, 4]), tensor.len() - 1, "{layout:?}");
                }
                for kind in [MaskKind::Bool, MaskKind::Additive(Dtype::BF16)] {
                    let mask = GuardedMask::placed(kind, [1, 2, 3, 5], (layout, placement), |_| 0.0);
                    let allocated = match &mask {
                        GuardedMask::Bool { bytes, .. } => end(bytes),
                        GuardedMask::Additive(tensor) => tensor.addresses().end,
                    };
                    assert_eq!(mask.addresses().end, allocated, "{kind:?}");
                }
            }
            let mut list = GuardedList::placed(3, placement);
            assert_eq!(list.slice().as_ptr_range().end.cast(), end(&list.elements));
            assert_eq!(list.touched(), None);
            list.slice_mut().fill(1.0);
            assert_eq!(list.touched(), None);
            if lead > 0 {
                list.elements[lead - 1] = 0.0;
                assert_eq!(list.touched(), Some(-1));
            }
            let nothing = Guarded::placed(Dtype::F32, [1, 2, 0, 3], Layout::Bhsd, placement);
            assert!(nothing.addresses().is_empty() && nothing.indices().next().is_none());
        }
    }

    #[test]
    fn exact_placements_start_at_the_allocation_or_at_an_odd_element() {
        let leads = (0..200).map(|n| match Placement::exact(&n.to_string()) {
            Placement::Exact { lead } => lead,
            Placement::Guarded => usize::MAX,
        });
        let (none, odd): (Vec<usize>, Vec<usize>) = leads.partition(|&lead| lead == 0);
        assert!(none.len() > 50 && odd.len() > 50, "{} {}", none.len(), odd.len());
        assert!(odd.iter().all(|&lead| lead % 2 == 1 && lead <= BAND), "{odd:?}");
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
