//! How `q . k` and `p . v` are multiplied.
//!
//! | type | operands | vectors |
//! |---|---|---|
//! | [`F32`](f32_fma::F32) | f32 | any |
//! | [`Bf16Pairs`](bf16_pairs::Bf16Pairs) | pairs of bf16 along the depth | [`PairLanes`](bf16_pairs::PairLanes) |
//! | [`Amx`](amx::Amx) | 16 x 16 tiles of pairs of bf16 | [`MatrixUnit`](amx::MatrixUnit) |
//!
//! Codes are multiplied in place by the products of `forward/products`, if one of them takes them; other codes are decoded to f32 first.
//!
//! Phases are generic over [`Simd`], the lanes, and [`Products`]. A type of products that lacks an operation, or that is instantiated for
//! lanes without its instructions, does not compile.

#![allow(unsafe_code)]

pub(crate) mod amx;
pub(crate) mod bf16_pairs;
pub(crate) mod f32_fma;

use super::mat::{Mat, MatMut};
use super::matrix_unit::MatrixUnitGuard;
use super::operands::Operands;
use super::pack::HeadRows;
use super::stream::Scores;
use crate::simd::{Elem, LaneFormat, Simd};
use flashtile_core::dtype::Dtype;
use std::ops::Range;

/// The operations of one way to multiply, on vectors of `S`.
///
/// # Safety
/// Contract of every unsafe method:
///
/// - The machine has the instructions of `S` and of the products, and the function is inlined where they are enabled.
/// - The [`MatrixUnitGuard`] of [`Products::configure`] is held by this thread.
/// - Matrices keep their contract ([`Mat`], [`MatMut`]).
/// - Other pointers are valid for the elements that the method names; f32 are aligned, elements of tensors to their type.
/// - Memory that a method writes overlaps nothing else that it is given.
pub(crate) trait Products<S: Simd>: 'static {
    /// Elements of the depth in each f32 of packed operands.
    const PER_F32: usize;
    /// A packed row of queries or keys is filled up with zeros to a multiple of this many f32.
    const DEPTH_STEP: usize;
    /// Keys that `p . v` takes at once: it runs over whole multiples, in which other keys have probability and value 0.
    const KEY_STEP: usize;
    /// True if packed queries have the scale, so that [`Products::scale_of_scores`] is 1.
    const SCALES_QUERIES: bool;
    /// Multiply-adds of a round of [`Products::peak_loop`].
    const PEAK_ROUND: usize;
    /// The sum of one vector of `p . v`, key after key.
    type Chain: Copy;

    /// Configures this thread for the products.
    unsafe fn configure() -> MatrixUnitGuard;

    /// The factor of scores after the product, for the `scale` of [`Products::pack_query`]: 1 if packed queries have it.
    fn scale_of_scores(scale: f32) -> f32;

    /// Packs a row `src` of `head_dim` elements to `dst`, times `scale` unless [`Products::scale_of_scores`] leaves it to the scores.
    unsafe fn pack_query(dtype: Dtype, src: *const u8, head_dim: usize, scale: f32, dst: *mut f32);

    /// Prepares packed queries `q` of a task of few rows for [`Products::stream_scores`], in `memory` that a task of many rows
    /// packs keys to.
    unsafe fn set_stream_queries(q: Mat, memory: *mut f32);

    /// `C = A B`, or `C + A B` to resume, of packed operands: queries and a panel of keys, or probabilities and values. An element of `C`
    /// has the same bits in products of any shape.
    unsafe fn multiply(operands: Operands<Mat>);

    /// [`Products::multiply`] of any number of columns, with `A` stored transposed, `[depth, rows]`. Its depth is a multiple of
    /// [`Products::DEPTH_STEP`].
    unsafe fn multiply_transposed(operands: Operands<Mat>);

    /// Scores of few rows with the keys `first + columns`, read in place; `memory` was prepared for the queries of `scores`.
    unsafe fn stream_scores<R: LaneFormat>(
        keys: HeadRows<'_>,
        first: usize,
        columns: &Range<usize>,
        scores: Scores,
        memory: *mut f32,
    );

    /// Packs the values `first + keys`, elements of `E`, to rows of `dst` as [`Products::multiply`] takes them, in whole key steps.
    unsafe fn pack_values<E: Elem>(src: HeadRows<'_>, first: usize, keys: Range<usize>, dst: MatMut);

    /// Replaces the scores of a row in whole vectors `columns`, of [`Products::PER_F32`] at a time, by `2^(scale * score + neg_max)` as
    /// [`Products::multiply`] takes them. `scale` is [`Products::scale_of_scores`], or 1 if the scores have it already.
    /// Returns the sum lane by lane.
    unsafe fn exp_row(row: *mut f32, columns: Range<usize>, scale: f32, neg_max: S::V) -> S::V;

    /// A sum that continues from `start`.
    unsafe fn chain_from(start: S::V) -> Self::Chain;

    /// Adds the products of packed probabilities, of f32 `at` of their row, and packed values, in the order of [`Products::multiply`].
    unsafe fn add_to_chain(chain: &mut Self::Chain, at: usize, probs: S::V, values: S::V);

    /// The sum over whole key steps.
    unsafe fn chain_sum(chain: Self::Chain) -> S::V;

    /// `rounds` of independent steps of a product, at the limit of the instruction set.
    unsafe fn peak_loop(rounds: u64) -> f32;
}

/// How `p . v` takes keys.
#[derive(Clone, Copy)]
pub(crate) struct KeySteps {
    /// Keys in an f32 of packed values: 2 if products are of pairs of bf16.
    pub(crate) keys_per_f32: usize,
    /// Keys that a product takes at once: it runs over whole multiples, in which other keys have probability and value 0.
    pub(crate) step: usize,
}

impl KeySteps {
    /// Columns in whole steps.
    #[inline]
    pub(crate) fn whole(self, columns: &Range<usize>) -> Range<usize> {
        columns.start / self.step * self.step..columns.end.next_multiple_of(self.step)
    }
}

/// How `p . v` takes keys, as data.
pub(crate) const fn key_steps<S: Simd, P: Products<S>>() -> KeySteps {
    KeySteps { keys_per_f32: P::PER_F32, step: P::KEY_STEP }
}
