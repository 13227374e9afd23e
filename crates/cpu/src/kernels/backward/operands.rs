//! Operands of the products whose depth is query rows, which only the backward pass has.

#![allow(unsafe_code)]

use crate::kernels::shared::mat::{Mat, MatMut};
use crate::kernels::shared::products::Products;
use crate::kernels::shared::products::amx::{Amx, MatrixUnit};
use crate::kernels::shared::products::bf16_pairs::{Bf16Pairs, PairLanes, interleave_row};
use crate::kernels::shared::products::f32_fma::F32;
use crate::simd::Simd;
use std::f32::consts::LN_2;
use std::ops::Range;

/// Conversions of tiles and rows to operands. f32 tiles need none.
///
/// # Safety
/// The contract of [`Products`].
pub(crate) trait BackwardProducts<S: Simd>: Products<S> {
    /// Factor from sums of `d_score * packed query` to `d_k`.
    fn d_k_factor(scale: f32, softcap: Option<f32>) -> f32;

    /// Interleaves two rows of `len` elements, for a product whose depth is rows. `odd` may be null: zeros.
    unsafe fn pair_rows(even: *const u8, odd: *const u8, len: usize, dst: *mut f32);

    /// Replaces the first `rows` rows of a tile, in whole vectors `columns`, by pairs of rows as [`Products::multiply_transposed`] takes them:
    /// in whole steps, which are zero after the last row.
    unsafe fn to_row_pairs(tile: MatMut, rows: usize, columns: &Range<usize>);

    /// Rows of numbers in whole vectors `columns`, as [`Products::multiply`] takes probabilities; in `memory` if they are converted.
    unsafe fn to_key_pairs(tile: Mat, columns: &Range<usize>, memory: MatMut) -> Mat;
}

impl<S: Simd> BackwardProducts<S> for F32 {
    /// Packed queries have the scale, in units of log2 or of the softcap.
    #[inline(always)]
    fn d_k_factor(_: f32, softcap: Option<f32>) -> f32 {
        softcap.unwrap_or(LN_2)
    }
    #[inline(always)]
    unsafe fn pair_rows(_: *const u8, _: *const u8, _: usize, _: *mut f32) {}
    #[inline(always)]
    unsafe fn to_row_pairs(_: MatMut, _: usize, _: &Range<usize>) {}
    #[inline(always)]
    unsafe fn to_key_pairs(tile: Mat, _: &Range<usize>, _: MatMut) -> Mat {
        tile
    }
}

macro_rules! pairs {
    ($P:ty, $Lanes:ident) => {
        impl<S: $Lanes> BackwardProducts<S> for $P {
            #[inline(always)]
            fn d_k_factor(scale: f32, _: Option<f32>) -> f32 {
                scale
            }
            #[inline(always)]
            unsafe fn pair_rows(even: *const u8, odd: *const u8, len: usize, dst: *mut f32) {
                // SAFETY: the caller's contract.
                unsafe { pair_rows::<S>(even, odd, len, dst) }
            }
            #[inline(always)]
            unsafe fn to_row_pairs(tile: MatMut, rows: usize, columns: &Range<usize>) {
                // SAFETY: the caller's contract.
                unsafe { to_row_pairs::<S, Self>(tile, rows, columns) }
            }
            #[inline(always)]
            unsafe fn to_key_pairs(tile: Mat, columns: &Range<usize>, memory: MatMut) -> Mat {
                // SAFETY: the caller's contract.
                unsafe { to_key_pairs::<S>(tile, columns, memory) }
            }
        }
    };
}
pairs!(Bf16Pairs, PairLanes);
pairs!(Amx, MatrixUnit);

/// # Safety
/// As [`BackwardProducts::pair_rows`].
#[inline(always)]
unsafe fn pair_rows<S: PairLanes>(even: *const u8, odd: *const u8, len: usize, dst: *mut f32) {
    let odd = if odd.is_null() { crate::kernels::shared::pack::zero_rows()[0] } else { odd };
    // SAFETY: the caller's contract; the row of zeros is as long as any row.
    unsafe { interleave_row::<S>(even.cast(), odd.cast(), len, dst) }
}

/// # Safety
/// As [`BackwardProducts::to_row_pairs`].
#[inline(always)]
unsafe fn to_row_pairs<S: PairLanes, P: Products<S>>(tile: MatMut, rows: usize, columns: &Range<usize>) {
    for pair in 0..rows.next_multiple_of(P::KEY_STEP) / 2 {
        let mut c = columns.start;
        while c < columns.end {
            // SAFETY: the caller's contract. Row `pair` has been read when it is written.
            unsafe {
                // Not a closure: that would be a function without the instruction set.
                let mut halves = [S::splat(0.0); 2];
                for half in 0..2 {
                    if 2 * pair + half < rows {
                        halves[half] = S::load(tile.at(2 * pair + half, c));
                    }
                }
                S::store(tile.at(pair, c), S::row_pairs(halves[0], halves[1]));
            }
            c += S::LANES;
        }
    }
}

/// # Safety
/// As [`BackwardProducts::to_key_pairs`].
#[inline(always)]
unsafe fn to_key_pairs<S: PairLanes>(tile: Mat, columns: &Range<usize>, memory: MatMut) -> Mat {
    for r in 0..tile.rows() {
        let mut c = columns.start;
        while c < columns.end {
            // SAFETY: the caller's contract; columns come in pairs of vectors.
            unsafe {
                let (low, high) = (S::load(tile.at(r, c)), S::load(tile.at(r, c + S::LANES)));
                S::store(memory.at(r, c / 2), S::to_pairs(low, high));
            }
            c += 2 * S::LANES;
        }
    }
    memory.as_mat()
}
