//! Operands of a product `C = A B`.

#![allow(unsafe_code)]

use super::mat::{Mat, MatMut};
use crate::simd::{Elem, Simd};
use std::marker::PhantomData;

/// The matrices of a product: `C` says how many rows and columns are computed, the columns of `A` are the depth.
#[derive(Clone, Copy)]
pub(crate) struct Operands<B> {
    /// At least the rows of `C`.
    pub(crate) a: Mat,
    pub(crate) b: B,
    /// Whole vectors of columns.
    pub(crate) c: MatMut,
    /// True if the chains continue from the contents of `c`: a product that is cut along its depth has the bits of the whole product.
    pub(crate) resume: bool,
}

impl Operands<Mat> {
    /// The product of at most `width` columns from `column` on.
    ///
    /// # Safety
    /// The column exists.
    #[inline(always)]
    pub(crate) unsafe fn columns(self, column: usize, width: usize) -> Self {
        let cols = (self.c.cols() - column).min(width);
        // SAFETY: the caller's contract; `B` has the columns of `C`.
        unsafe {
            let b = self.b.from(0, column).first(self.b.rows(), cols);
            let c = self.c.from(0, column).first(self.c.rows(), cols);
            Self { b, c, ..self }
        }
    }
}

/// Rows of `B`, in runs of rows at a constant distance.
///
/// Packed rows have a loop of their own, which prefetches nothing: prefetches would cost it a tenth of its rate.
pub(crate) trait Source: Copy {
    type Elem: Elem;
    /// True if memory is prefetched while rows are read.
    const STREAMS: bool;
    /// Number of runs.
    fn runs(&self) -> usize;
    /// Run `n`.
    ///
    /// # Safety
    /// `n` is less than [`Source::runs`].
    unsafe fn run(&self, n: usize) -> RunOf<Self::Elem>;
    /// Elements from a row to the next.
    fn ld(&self) -> usize;

    /// A vector of elements, converted.
    ///
    /// # Safety
    /// The contract of [`Simd`] holds.
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self::Elem) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { Self::Elem::load::<S>(p) }
    }
}

/// A run of elements.
pub(crate) struct RunOf<E> {
    pub(crate) start: *const E,
    pub(crate) rows: usize,
    /// Bytes from a row to the one that is prefetched while it is read.
    pub(crate) ahead: usize,
}

/// Packed rows are one run.
impl Source for Mat {
    type Elem = f32;
    const STREAMS: bool = false;
    #[inline(always)]
    fn runs(&self) -> usize {
        1
    }
    #[inline(always)]
    unsafe fn run(&self, _: usize) -> RunOf<f32> {
        // SAFETY: a matrix has its first element, or no rows to read.
        RunOf { start: unsafe { self.at(0, 0) }, rows: self.rows(), ahead: 0 }
    }
    #[inline(always)]
    fn ld(&self) -> usize {
        (*self).ld()
    }
}

/// Rows of elements of `E` in place, from a first column on.
#[derive(Clone, Copy)]
pub(crate) struct Stream<'a, E> {
    pub(crate) runs: &'a [Run],
    pub(crate) column: usize,
    pub(crate) ld: usize,
    pub(crate) elements: PhantomData<E>,
}

impl<E: Elem> Source for Stream<'_, E> {
    type Elem = E;
    const STREAMS: bool = true;
    #[inline(always)]
    fn runs(&self) -> usize {
        self.runs.len()
    }
    #[inline(always)]
    unsafe fn run(&self, n: usize) -> RunOf<E> {
        // SAFETY: the caller's contract; a run has the first column.
        unsafe {
            let Run { start, rows, ahead } = *self.runs.get_unchecked(n);
            RunOf { start: start.cast::<E>().add(self.column), rows, ahead }
        }
    }
    #[inline(always)]
    fn ld(&self) -> usize {
        self.ld
    }
}

/// Neighbouring rows at a constant distance, and what is prefetched while they are read.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    pub(crate) start: *const u8,
    pub(crate) rows: usize,
    /// Bytes from a row to the one that is prefetched while it is read: the same for each row of the run.
    pub(crate) ahead: usize,
}

impl Run {
    /// No rows.
    pub(crate) const NONE: Self = Self { start: std::ptr::null(), rows: 0, ahead: 0 };
}
