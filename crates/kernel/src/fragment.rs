//! 8x8 matrices held by the 32 lanes of a SIMD group.

use crate::lanes::position_of;
use crate::memory::Memory;
use crate::scalar::{Element, Value};

/// An 8x8 matrix held by the lanes of a SIMD group, two elements a lane.
///
/// Lane `l` holds columns `col` and `col + 1` of row `row`, in Apple's layout: with `q = l / 4`,
/// `row = (q & 4) + (l / 2) % 4` and `col = (q & 2) * 2 + (l % 2) * 2`.
///
/// All 32 lanes take part in every operation but [`element`](Self::element) and [`set_element`](Self::set_element).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fragment<T> {
    elements: [T; 2],
}

impl<T> Value for Fragment<T> {}

impl<T: Element> Fragment<T> {
    /// A matrix of zeros.
    pub fn zero() -> Self {
        Self::filled(T::from_f32(0.0))
    }

    /// A matrix of `x`; lanes may give different values, each for its own elements.
    pub fn filled(x: T) -> Self {
        Self { elements: [x; 2] }
    }

    /// Element `(r, c)` from `memory[offset + r * stride + c]`.
    ///
    /// # Faults
    /// Where the lanes diverge, and as for reading each element.
    #[track_caller]
    pub fn load<M: Memory<Item = T>>(memory: &M, offset: u32, stride: u32) -> Self {
        crate::simulator::load_matrices("Fragment::load", 1);
        let (row, col) = lane_position();
        Self { elements: read_pair(memory, [at(offset, stride, row, col), at(offset, stride, row, col + 1)]) }
    }

    /// Element `(r, c)` from `memory[offset + c * stride + r]`.
    ///
    /// # Faults
    /// As [`load`](Self::load).
    #[track_caller]
    pub fn load_transposed<M: Memory<Item = T>>(memory: &M, offset: u32, stride: u32) -> Self {
        crate::simulator::load_matrices("Fragment::load_transposed", 1);
        let (row, col) = lane_position();
        Self { elements: read_pair(memory, [at(offset, stride, col, row), at(offset, stride, col + 1, row)]) }
    }

    /// Element `(r, c)` to `memory[offset + r * stride + c]`.
    ///
    /// # Faults
    /// Where the lanes diverge, and as for writing each element.
    #[track_caller]
    pub fn store<M: Memory<Item = T>>(&self, memory: &mut M, offset: u32, stride: u32) {
        crate::simulator::store_matrices("Fragment::store", 1);
        let (row, col) = lane_position();
        for (n, x) in self.elements.into_iter().enumerate() {
            memory.region().set(at(offset, stride, row, col + n as u32), x.to_raw());
        }
    }

    /// `a * b + c`, with exact products and a sum in `f32`.
    ///
    /// # Faults
    /// Where the lanes diverge.
    #[track_caller]
    pub fn multiply_accumulate(a: &Self, b: &Self, c: &Fragment<f32>) -> Fragment<f32> {
        let own =
            [a.elements[0].to_f32(), a.elements[1].to_f32(), b.elements[0].to_f32(), b.elements[1].to_f32()];
        let elements = crate::simulator::multiply_accumulate(own, c.elements);
        Fragment { elements }
    }

    /// This lane's element `n`, 0 or 1.
    ///
    /// # Faults
    /// Where `n` is greater.
    #[track_caller]
    pub fn element(&self, n: u32) -> T {
        crate::ops::Place::ft_get(&self.elements, n)
    }

    /// Replaces this lane's element `n`, 0 or 1.
    ///
    /// # Faults
    /// Where `n` is greater.
    #[track_caller]
    pub fn set_element(&mut self, n: u32, x: T) {
        crate::ops::Place::ft_set(&mut self.elements, n, x);
    }
}

/// The row and the first column of the elements of the current lane.
fn lane_position() -> (u32, u32) {
    position_of(crate::intrinsics::simd_lane())
}

fn at(offset: u32, stride: u32, major: u32, minor: u32) -> u64 {
    u64::from(offset) + u64::from(major) * u64::from(stride) + u64::from(minor)
}

#[track_caller]
fn read_pair<M: Memory>(memory: &M, indices: [u64; 2]) -> [M::Item; 2] {
    use crate::scalar::Scalar;
    let [first, second] = indices;
    [M::Item::from_raw(memory.region().get(first)), M::Item::from_raw(memory.region().get(second))]
}
