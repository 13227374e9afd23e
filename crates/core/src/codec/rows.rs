//! Rows of tensors that are to be stored.

use super::machine::{Loops, Machine};
use super::{Coder, MOST_NORM, NotStored, ScaleRule, energy};
use crate::limits::MAX_HEAD_DIM;
use crate::tensor::TensorView;
use std::ops::Range;

/// The greatest energy of a row that is stored.
pub(super) const MOST_ENERGY: f32 = MOST_NORM * MOST_NORM;

/// Rows of a tensor `[1, heads, rows, dim]`, without a mean `[heads, dim]`.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) tensor: &'a TensorView<'a>,
    pub(super) mean: Option<&'a [f32]>,
}

impl<'a> Rows<'a> {
    /// The elements of a row, the mean not taken out.
    #[inline(always)]
    pub(super) fn row(&self, head: usize, row: usize) -> &'a [u8] {
        self.tensor.row_bytes([0, head, row])
    }

    /// The mean of a head.
    #[inline(always)]
    pub(super) fn mean(&self, head: usize) -> Option<&'a [f32]> {
        let dim = self.tensor.shape()[3];
        self.mean.map(|mean| &mean[head * dim..][..dim])
    }

    /// A row as f32.
    #[inline(always)]
    pub(super) fn load<M: Machine>(&self, head: usize, row: usize, x: &mut [f32]) {
        M::widen(self.tensor.dtype(), self.row(head, row), x);
        if let Some(mean) = self.mean(head) {
            for (x, mean) in x.iter_mut().zip(mean) {
                *x -= mean;
            }
        }
    }

    /// Why a row that is refused is.
    pub(super) fn reason(&self, head: usize, row: usize) -> NotStored {
        let mut x = [0.0f32; MAX_HEAD_DIM];
        let x = &mut x[..self.tensor.shape()[3]];
        self.load::<Loops>(head, row, x);
        if x.iter().all(|x| x.is_finite()) { NotStored::Norm } else { NotStored::NotFinite }
    }

    /// Head and row of the first token that is too long or not finite, of several heads the first.
    #[inline(always)]
    pub(super) fn first_refused<M: Machine>(&self) -> Option<[usize; 2]> {
        let [_, heads, rows, dim] = self.tensor.shape();
        let mut x = [0.0f32; MAX_HEAD_DIM];
        for row in 0..rows {
            for head in 0..heads {
                if M::is_short(self, head, row) {
                    continue;
                }
                self.load::<M>(head, row, &mut x[..dim]);
                if !is_storable(energy(&x[..dim])) {
                    return Some([head, row]);
                }
            }
        }
        None
    }
}

/// Whether a row of this energy can be stored; it is no number or infinite where a coordinate is.
pub(super) fn is_storable(energy: f32) -> bool {
    energy <= MOST_ENERGY
}

/// Rows of a page of every head.
pub(super) struct Pages<'a> {
    /// `[heads]` pages.
    pub(super) bytes: &'a mut [u8],
    /// Tokens of a page.
    pub(super) tokens: usize,
    pub(super) rows: Range<usize>,
}

/// Rows of a tensor and where they go.
pub(super) struct Job<'a> {
    pub(super) coder: &'a Coder,
    pub(super) rule: ScaleRule,
    pub(super) rows: Rows<'a>,
    /// The tensor's row that is the first.
    pub(super) from: usize,
    pub(super) pages: Pages<'a>,
}

impl Job<'_> {
    /// Stores the rows. They are finite, and their norms at most [`MOST_NORM`].
    #[inline(always)]
    pub(super) fn run<M: Machine>(&mut self) {
        if M::store(self) {
            return;
        }
        let Pages { bytes, tokens, rows } = &mut self.pages;
        let [_, heads, _, dim] = self.rows.tensor.shape();
        let page_bytes = *tokens * self.coder.format().row_bytes();
        let mut x = [0.0f32; MAX_HEAD_DIM];
        // As tokens lie in most tensors: those of a head are far apart.
        for row in rows.clone() {
            for head in 0..heads {
                let page = &mut bytes[head * page_bytes..][..page_bytes];
                self.rows.load::<M>(head, self.from + row - rows.start, &mut x[..dim]);
                self.coder.encode::<M>(&mut x[..dim], self.rule, (page, *tokens, row));
            }
        }
    }
}
