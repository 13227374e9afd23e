//! Encoding of rows of tensors.

#[cfg(target_arch = "x86_64")]
mod avx512;

use super::coder::{Coder, RowSteps};
use super::error::{EncodeError, MAX_NORM};
use super::key_transform::ChannelTransform;
use super::numeric::energy;
#[cfg(target_arch = "x86_64")]
use super::ops::avx2::Avx2;
use super::ops::{Ops, Portable};
use super::quantizer::ScaleRule;
use crate::limits::MAX_HEAD_DIM;
use crate::tensor::TensorView;
use std::ops::Range;

/// An encoder of whole rows, for instruction sets that have one.
pub(super) trait EncodeRows: RowSteps {
    /// Stores rows as the same bytes that the generic encoder gives. Returns false, and stores nothing, if it does not support them.
    #[inline(always)]
    fn store(_: &mut EncodeJob<'_>) -> bool {
        false
    }

    /// Returns true if the energy of a row, after its transform, is below the limit by more than the
    /// order of summation can change.
    #[inline(always)]
    fn is_short(_: &SourceRows<'_>, _head: usize, _row: usize) -> bool {
        false
    }
}

impl EncodeRows for Portable {}

#[cfg(target_arch = "x86_64")]
impl EncodeRows for Avx2 {}

/// The largest energy of a row that is stored.
pub(super) const MAX_ENERGY: f32 = MAX_NORM * MAX_NORM;

/// Rows of a tensor `[1, heads, rows, dim]`, and the transform `[heads, dim]` of its channels.
#[derive(Clone, Copy)]
pub(super) struct SourceRows<'a> {
    pub(super) tensor: &'a TensorView<'a>,
    pub(super) transform: ChannelTransform<'a>,
}

impl<'a> SourceRows<'a> {
    /// The elements of a row before the transform.
    #[inline(always)]
    pub(super) fn row(&self, head: usize, row: usize) -> &'a [u8] {
        self.tensor.row_bytes([0, head, row])
    }

    /// The transform of a head.
    #[inline(always)]
    pub(super) fn of_head(&self, head: usize) -> ChannelTransform<'a> {
        self.transform.head(head, self.tensor.shape()[3])
    }

    /// A row as f32, transformed.
    #[inline(always)]
    pub(super) fn load<O: Ops>(&self, head: usize, row: usize, x: &mut [f32]) {
        O::widen(self.tensor.dtype(), self.row(head, row), x);
        let ChannelTransform { mean, inverses, .. } = self.of_head(head);
        if let Some(mean) = mean {
            for (x, mean) in x.iter_mut().zip(mean) {
                *x -= mean;
            }
        }
        if let Some(inverses) = inverses {
            for (x, inverse) in x.iter_mut().zip(inverses) {
                *x *= inverse;
            }
        }
    }

    /// Why a row is refused.
    pub(super) fn reason(&self, head: usize, row: usize) -> EncodeError {
        let mut x = [0.0f32; MAX_HEAD_DIM];
        let x = &mut x[..self.tensor.shape()[3]];
        self.load::<Portable>(head, row, x);
        if x.iter().all(|x| x.is_finite()) { EncodeError::Norm } else { EncodeError::NotFinite }
    }

    /// Head and row of the first token that is too long or not finite, in the lowest head that has such a token.
    #[inline(always)]
    pub(super) fn first_refused<O: EncodeRows>(&self) -> Option<[usize; 2]> {
        let [_, heads, rows, dim] = self.tensor.shape();
        let mut x = [0.0f32; MAX_HEAD_DIM];
        for row in 0..rows {
            for head in 0..heads {
                if O::is_short(self, head, row) {
                    continue;
                }
                self.load::<O>(head, row, &mut x[..dim]);
                if !is_storable(energy(&x[..dim])) {
                    return Some([head, row]);
                }
            }
        }
        None
    }
}

/// Returns true if a row of this energy can be stored. The energy is NaN or infinite if a coordinate is.
pub(super) fn is_storable(energy: f32) -> bool {
    energy <= MAX_ENERGY
}

/// Rows of a page, for every head.
pub(super) struct PageRows<'a> {
    /// `[heads]` pages.
    pub(super) bytes: &'a mut [u8],
    /// Tokens per page.
    pub(super) tokens: usize,
    pub(super) rows: Range<usize>,
}

/// Rows of a tensor and their destination.
pub(super) struct EncodeJob<'a> {
    pub(super) coder: &'a Coder,
    pub(super) rule: ScaleRule,
    pub(super) rows: SourceRows<'a>,
    /// The first row of the tensor.
    pub(super) from: usize,
    pub(super) pages: PageRows<'a>,
}

impl EncodeJob<'_> {
    /// Stores the rows, which are finite with norms of at most [`MAX_NORM`].
    #[inline(always)]
    pub(super) fn run<O: EncodeRows>(&mut self) {
        if O::store(self) {
            return;
        }
        let PageRows { bytes, tokens, rows } = &mut self.pages;
        let [_, heads, _, dim] = self.rows.tensor.shape();
        let page_bytes = *tokens * self.coder.format().row_bytes();
        let mut x = [0.0f32; MAX_HEAD_DIM];
        // Tokens are the outer loop, as in most tensors, where the rows of one head are far apart.
        for row in rows.clone() {
            for head in 0..heads {
                let page = &mut bytes[head * page_bytes..][..page_bytes];
                self.rows.load::<O>(head, self.from + row - rows.start, &mut x[..dim]);
                self.coder.encode::<O>(&mut x[..dim], self.rule, (page, *tokens, row));
            }
        }
    }
}
