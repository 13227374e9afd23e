//! Packing of values.

#![allow(unsafe_code)]

use super::codes;
use super::mat::MatMut;
use super::products::Products;
use super::score_task::ScoreTask;
use crate::simd::{Elem, Simd};
use std::ops::Range;

/// Packs the values `first + keys` to `dst`.
///
/// # Safety
/// The contract of [`Simd`] holds; the values exist and are elements of `E`, `dst` is valid for their rows in whole steps of a product.
#[inline(always)]
pub(crate) unsafe fn pack_values<S: Simd, P: Products<S>, E: Elem>(
    task: &ScoreTask<'_>,
    first: usize,
    keys: &Range<usize>,
    dst: MatMut,
) {
    // SAFETY: the caller's contract.
    unsafe { P::pack_values::<E>(task.value_elements(), first, keys.clone(), dst) }
}

/// [`pack_values`] of quantized values.
///
/// # Safety
/// The values exist, `dst` is valid for their rows in whole steps of a product, and rows of `dst` follow one another without a gap.
pub(crate) unsafe fn pack_value_codes(task: &ScoreTask<'_>, first: usize, keys: &Range<usize>, dst: MatMut) {
    let v = task.value_codes();
    // SAFETY: the caller's contract.
    unsafe { codes::values(v, first, keys.clone(), dst) }
}
