//! Copies into the order in which the micro-kernel reads, converted to f32.

#![allow(unsafe_code)]

use super::super::simd::{Elem, Simd, load_head, with_elem};
use crate::problem::MAX_HEAD_DIM;
use crate::{Dtype, TensorView};
use std::ops::Range;

/// Rows of one head: `row(j)` of a tensor view.
#[derive(Clone, Copy)]
pub(super) struct HeadRows<'a> {
    pub(super) tensor: &'a TensorView<'a>,
    pub(super) batch: usize,
    pub(super) head: usize,
    /// Row of the sequence's first element.
    pub(super) start: usize,
}

impl HeadRows<'_> {
    #[inline(always)]
    pub(super) fn row(&self, j: usize) -> *const u8 {
        self.tensor.row(self.batch, self.head, self.start + j)
    }
}

/// How far ahead of a stream its lines are asked for: more than arrives during the latency of memory.
const PREFETCH_BYTES: usize = 4096;

/// Asks for the lines of some rows, which need not exist.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
pub(super) unsafe fn prefetch<S: Simd>(src: HeadRows<'_>, rows: Range<usize>) {
    let bytes = src.tensor.shape()[3] * src.tensor.dtype().bytes();
    for j in rows {
        let row = src.row(j);
        for offset in (0..bytes).step_by(64) {
            // SAFETY: a prefetch may name any address.
            unsafe { S::prefetch(row.wrapping_add(offset)) }
        }
    }
}

/// Stands for keys past the end: zero in every dtype.
#[repr(align(64))]
struct ZeroRow([u8; 4 * MAX_HEAD_DIM]);
static ZERO_ROW: ZeroRow = ZeroRow([0; 4 * MAX_HEAD_DIM]);

/// Packs one panel of keys, `[head_dim][panel width]` with columns counted from `first`. Columns of the panel outside
/// `columns` become zero; only keys `first + columns` are read.
///
/// # Safety
/// As [`Simd`]; the keys exist, `dst` is valid for a panel.
#[inline(always)]
pub(super) unsafe fn key_panel<S: Simd>(
    src: HeadRows<'_>,
    first: usize,
    panel: usize,
    columns: &Range<usize>,
    dst: *mut f32,
) {
    let width = S::VECTORS * S::LANES;
    let head_dim = src.tensor.shape()[3];
    with_elem!(src.tensor.dtype(), E => {
        let stride = src.tensor.strides()[2];
        let ahead = stride * S::LANES.max(PREFETCH_BYTES / (stride * size_of::<E>()).max(1));
        for vector in 0..S::VECTORS {
            let column = panel * width + vector * S::LANES;
            let mut rows = [ZERO_ROW.0.as_ptr().cast::<E>(); 16];
            for r in 0..S::LANES {
                if columns.contains(&(column + r)) {
                    rows[r] = src.row(first + column + r).cast();
                }
            }
            let mut d = 0;
            // SAFETY: each row has head_dim elements, the zero row at least as many; the panel has head_dim lines of
            // `width` elements. A prefetch may name any address.
            unsafe {
                while d + S::LANES <= head_dim {
                    let mut at = rows;
                    for r in 0..S::LANES {
                        at[r] = rows[r].add(d);
                        S::prefetch(at[r].wrapping_add(ahead).cast());
                    }
                    S::transpose(at, dst.add(d * width + vector * S::LANES), width);
                    d += S::LANES;
                }
                while d < head_dim {
                    for r in 0..S::LANES {
                        *dst.add(d * width + vector * S::LANES + r) = (*rows[r].add(d)).to_f32();
                    }
                    d += 1;
                }
            }
        }
    });
}

/// Copies one row of `len` elements, times `scale`, and fills with zeros to a whole number of vectors if `pad`.
#[inline(always)]
unsafe fn row<S: Simd, E: Elem>(src: *const E, len: usize, scale: f32, dst: *mut f32, pad: bool) {
    // SAFETY: `src` holds `len` elements; `dst` holds as many, rounded up to vectors if `pad`.
    unsafe {
        let scale = S::splat(scale);
        let whole = len / S::LANES * S::LANES;
        let mut c = 0;
        while c < whole {
            S::store(dst.add(c), S::mul(E::load::<S>(src.add(c)), scale));
            c += S::LANES;
        }
        if whole < len {
            let tail = S::mul(load_head::<S, E>(src.add(whole), len - whole), scale);
            if pad {
                S::store(dst.add(whole), tail);
            } else {
                let mut lanes = [0.0f32; 16];
                S::store(lanes.as_mut_ptr(), tail);
                std::ptr::copy_nonoverlapping(lanes.as_ptr(), dst.add(whole), len - whole);
            }
        }
    }
}

/// Converts values `first + rows` to f32 rows of `stride` elements counted from `first`, the lanes past value_dim zero.
///
/// # Safety
/// As [`Simd`]; the values exist, `dst` is valid up to row `rows.end`, `stride` is value_dim in whole vectors.
#[inline(always)]
pub(super) unsafe fn values<S: Simd>(src: HeadRows<'_>, first: usize, rows: Range<usize>, dst: *mut f32) {
    let value_dim = src.tensor.shape()[3];
    let stride = value_dim.next_multiple_of(S::LANES);
    with_elem!(src.tensor.dtype(), E => {
        for j in rows {
            // SAFETY: the caller's promise.
            unsafe { row::<S, E>(src.row(first + j).cast(), value_dim, 1.0, dst.add(j * stride), true) }
        }
    });
}

/// Converts one query row to f32 times `scale`.
///
/// # Safety
/// As [`Simd`]; `src` and `dst` hold `len` elements.
#[inline(always)]
pub(super) unsafe fn query<S: Simd>(dtype: Dtype, src: *const u8, len: usize, scale: f32, dst: *mut f32) {
    // SAFETY: the caller's promise.
    with_elem!(dtype, E => unsafe { row::<S, E>(src.cast(), len, scale, dst, false) });
}
