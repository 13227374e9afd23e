//! Matrices in memory.

#![allow(unsafe_code)]

use crate::simd::{Elem, Simd};
use std::marker::PhantomData;

/// Rows and vectors of `C`, and the depth of a product in f32 of `A`.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(super) rows: usize,
    pub(super) vectors: usize,
    pub(super) depth: usize,
}

/// Row-major matrices, leading strides in elements.
#[derive(Clone, Copy)]
pub(crate) struct Operands<B> {
    pub(super) a: *const f32,
    pub(super) lda: usize,
    pub(super) b: B,
    pub(super) c: *mut f32,
    pub(super) ldc: usize,
    /// Whether the chains go on from what `c` holds: a product cut along its depth has the bits of the whole.
    pub(super) resume: bool,
}

/// Rows of `B`, in runs of rows at a constant distance.
///
/// The loop over packed rows prefetches nothing, and is a loop of its own: prefetches would cost it a tenth of its rate.
pub(super) trait Source: Copy {
    type Elem: Elem;
    /// Whether memory is prefetched while rows are read.
    const STREAMS: bool;
    /// Number of runs.
    fn runs(&self) -> usize;
    /// The first element of a run, its rows, and the distance in bytes from a row to the one that is prefetched while it is read. `depth` is
    /// the depth of the product.
    ///
    /// # Safety
    /// `n` is less than [`Source::runs`].
    unsafe fn run(&self, n: usize, depth: usize) -> (*const Self::Elem, usize, usize);
    /// Elements from a row to the next.
    fn ld(&self) -> usize;

    /// A vector of elements, converted.
    ///
    /// # Safety
    /// As [`Simd`].
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self::Elem) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { Self::Elem::load::<S>(p) }
    }
}

/// Rows in f32, one after another.
#[derive(Clone, Copy)]
pub(crate) struct Packed {
    pub(super) rows: *const f32,
    pub(super) ld: usize,
}

impl Source for Packed {
    type Elem = f32;
    const STREAMS: bool = false;
    #[inline(always)]
    fn runs(&self) -> usize {
        1
    }
    #[inline(always)]
    unsafe fn run(&self, _: usize, depth: usize) -> (*const f32, usize, usize) {
        (self.rows, depth, 0)
    }
    #[inline(always)]
    fn ld(&self) -> usize {
        self.ld
    }
}

/// Rows of elements of `E` where they lie, from a first column on.
#[derive(Clone, Copy)]
pub(super) struct Stream<'a, E> {
    pub(super) runs: &'a [Run],
    pub(super) column: usize,
    pub(super) ld: usize,
    pub(super) elements: PhantomData<E>,
}

impl<E: Elem> Source for Stream<'_, E> {
    type Elem = E;
    const STREAMS: bool = true;
    #[inline(always)]
    fn runs(&self) -> usize {
        self.runs.len()
    }
    #[inline(always)]
    unsafe fn run(&self, n: usize, _: usize) -> (*const E, usize, usize) {
        // SAFETY: the caller's contract; a run has the first column.
        unsafe {
            let run = self.runs.get_unchecked(n);
            (run.start.cast::<E>().add(self.column), run.rows, run.ahead)
        }
    }
    #[inline(always)]
    fn ld(&self) -> usize {
        self.ld
    }
}

/// Neighbouring rows at a constant distance, and what is prefetched while they are read.
#[derive(Clone, Copy)]
pub(super) struct Run {
    pub(super) start: *const u8,
    pub(super) rows: usize,
    /// Bytes from a row to the one that is prefetched while it is read: the same for each row of the run.
    pub(super) ahead: usize,
}

impl Run {
    /// No rows.
    pub(super) const NONE: Self = Self { start: std::ptr::null(), rows: 0, ahead: 0 };
}
