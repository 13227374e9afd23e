//! Copies into the order in which the micro-kernel reads, converted to f32.

#![allow(unsafe_code)]

use super::super::simd::{Bf16, Elem, F16, Put, Simd, Split, Whole, load_head, with_elem};
use super::gemm::Ahead;
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

/// How far ahead of a stream its rows are asked for: more than arrives during the latency of memory.
const PREFETCH_BYTES: usize = 8192;

impl HeadRows<'_> {
    /// Address of a row that exists.
    #[inline(always)]
    pub(super) fn row(&self, j: usize) -> *const u8 {
        self.tensor.row(self.batch, self.head, self.start + j)
    }

    /// Bytes from a row to the next. Where there is a single row, this may be any number.
    #[inline(always)]
    fn step(&self) -> usize {
        self.tensor.strides()[2].wrapping_mul(self.tensor.dtype().bytes())
    }

    /// Bytes from a row to the one that is asked for while it is read, and the bytes of a row.
    #[inline(always)]
    pub(super) fn ahead(&self) -> (usize, usize) {
        let row = self.tensor.shape()[3] * self.tensor.dtype().bytes();
        (self.step().wrapping_mul(PREFETCH_BYTES.div_ceil(row)), row)
    }

    /// The first lines of row `j`, which need not exist, and of those after it.
    #[inline(always)]
    pub(super) fn stream(&self, j: usize) -> Ahead {
        let start = self.tensor.row(self.batch, self.head, 0);
        Ahead::Lines(start.wrapping_add((self.start + j).wrapping_mul(self.step())), self.step())
    }
}

/// Stands for keys past the end: zero in every dtype.
#[repr(align(64))]
struct ZeroRow([u8; 4 * MAX_HEAD_DIM]);
static ZERO_ROW: ZeroRow = ZeroRow([0; 4 * MAX_HEAD_DIM]);

/// Packs one panel of keys, `[head_dim][panel width]` (with pairs, `[head_dim / 2 rounded up][panel width]`) with columns
/// counted from `first`. Columns of the panel outside `columns` become zero; only keys `first + columns` are read.
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
    let head_dim = src.tensor.shape()[3];
    if S::PAIRS {
        // SAFETY: the caller's promise; an even row of bf16 is a row of pairs, which have the size of f32.
        unsafe {
            panel_of::<S, f32, Whole>(src, (first, panel), columns, head_dim / 2, dst);
            if head_dim % 2 == 1 {
                last_elements::<S>(src, (first, panel), columns, dst);
            }
        }
        return;
    }
    // SAFETY: the caller's promise.
    unsafe {
        match src.tensor.dtype() {
            Dtype::F32 => panel_of::<S, f32, Whole>(src, (first, panel), columns, head_dim, dst),
            Dtype::F16 => panel_of::<S, F16, Whole>(src, (first, panel), columns, head_dim, dst),
            // Moved in pairs, which takes half the shuffles.
            Dtype::BF16 => panel_of::<S, Bf16, Split>(src, (first, panel), columns, head_dim, dst),
        }
    }
}

/// The last line of a panel of pairs with an odd head_dim: the last element of each key, paired with zero.
///
/// # Safety
/// As [`key_panel`].
#[inline(always)]
unsafe fn last_elements<S: Simd>(
    src: HeadRows<'_>,
    (first, panel): (usize, usize),
    columns: &Range<usize>,
    dst: *mut f32,
) {
    let width = S::VECTORS * S::LANES;
    let last = src.tensor.shape()[3] - 1;
    for c in 0..width {
        // SAFETY: the caller's promise.
        unsafe {
            let column = panel * width + c;
            let bits = match columns.contains(&column) {
                true => src.row(first + column).cast::<u16>().add(last).read(),
                false => 0,
            };
            *dst.add(last / 2 * width + c) = f32::from_bits(u32::from(bits));
        }
    }
}

/// [`key_panel`] of rows of `len` elements.
///
/// # Safety
/// As [`key_panel`]; rows hold `len` elements.
#[inline(always)]
unsafe fn panel_of<S: Simd, E: Elem, P: Put>(
    src: HeadRows<'_>,
    (first, panel): (usize, usize),
    columns: &Range<usize>,
    len: usize,
    dst: *mut f32,
) {
    let width = S::VECTORS * S::LANES;
    let (ahead, _) = src.ahead();
    for vector in 0..S::VECTORS {
        let column = panel * width + vector * S::LANES;
        let mut rows = [ZERO_ROW.0.as_ptr().cast::<E>(); 16];
        for r in 0..S::LANES {
            if columns.contains(&(column + r)) {
                rows[r] = src.row(first + column + r).cast();
            }
        }
        let mut d = 0;
        // SAFETY: each row has `len` elements, the zero row at least as many; the panel has `len` lines of `width`
        // elements. A prefetch may name any address. Pairs are copied as the f32 they stand in for.
        unsafe {
            while d + S::LANES * P::LINES <= len {
                let mut at = rows;
                for r in 0..S::LANES {
                    at[r] = rows[r].add(d);
                    S::prefetch(at[r].cast::<u8>().wrapping_add(ahead));
                }
                let to = dst.add(d * width + vector * S::LANES);
                match P::LINES {
                    1 => S::transpose::<E, P>(at, to, width),
                    _ => S::transpose::<f32, P>(at.map(<*const E>::cast), to, width),
                }
                d += S::LANES * P::LINES;
            }
            while d < len {
                for r in 0..S::LANES {
                    *dst.add(d * width + vector * S::LANES + r) = rows[r].add(d).read_unaligned().to_f32();
                }
                d += 1;
            }
        }
    }
}

/// Copies one row of `len` elements, times `scale`, and fills with zeros to a whole number of vectors if `pad`.
#[inline(always)]
unsafe fn row<S: Simd, E: Elem>(src: *const E, len: usize, scale: f32, dst: *mut f32, pad: bool) {
    // SAFETY: `src` holds `len` elements; `dst` holds as many, rounded up to vectors if `pad`.
    unsafe {
        let scale = S::splat(scale);
        let whole = len / S::LANES * S::LANES;
        let mut c = 0;
        while c + 4 * S::LANES <= whole {
            for at in [c, c + S::LANES, c + 2 * S::LANES, c + 3 * S::LANES] {
                S::store(dst.add(at), S::mul(E::load::<S>(src.add(at)), scale));
            }
            c += 4 * S::LANES;
        }
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

/// Converts values `first + rows` to f32 rows of `stride` elements, the lanes past value_dim zero. With pairs, a row of `dst`
/// holds pairs of two values (of an even row and the next), and the missing half of a pair at either end is zero.
///
/// # Safety
/// As [`Simd`]; the values exist, `dst` is valid for the rows, `stride` is value_dim in whole vectors.
#[inline(always)]
pub(super) unsafe fn values<S: Simd>(src: HeadRows<'_>, first: usize, rows: Range<usize>, dst: *mut f32) {
    let value_dim = src.tensor.shape()[3];
    let stride = value_dim.next_multiple_of(S::LANES);
    let (ahead, row_bytes) = src.ahead();
    if S::PAIRS {
        for (n, pair) in (rows.start / 2..rows.end.div_ceil(2)).enumerate() {
            let half = |j: usize| if rows.contains(&j) { src.row(first + j) } else { ZERO_ROW.0.as_ptr() };
            // SAFETY: the caller's promise.
            unsafe {
                for offset in (0..2 * row_bytes).step_by(64) {
                    S::prefetch(src.row(first + 2 * pair).wrapping_add(ahead).wrapping_add(offset));
                }
                let (even, odd) = (half(2 * pair).cast(), half(2 * pair + 1).cast());
                pair_row::<S>(even, odd, value_dim, dst.add(n * stride));
            }
        }
        return;
    }
    with_elem!(src.tensor.dtype(), E => {
        for (n, j) in rows.enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                let from = src.row(first + j);
                for offset in (0..row_bytes).step_by(64) {
                    S::prefetch(from.wrapping_add(ahead).wrapping_add(offset));
                }
                row::<S, E>(from.cast(), value_dim, 1.0, dst.add(n * stride), true);
            }
        }
    });
}

/// Interleaves two rows of bf16 into a row of pairs, zero up to whole vectors.
///
/// # Safety
/// As [`Simd`]; the sources hold `len` elements, `dst` as many pairs, rounded up to vectors.
#[inline(always)]
unsafe fn pair_row<S: Simd>(even: *const u16, odd: *const u16, len: usize, dst: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut c = 0;
        while c + S::LANES <= len {
            S::interleave(even.add(c), odd.add(c), dst.add(c));
            c += S::LANES;
        }
        if c < len {
            let mut tail = [[0u16; 16]; 2];
            std::ptr::copy_nonoverlapping(even.add(c), tail[0].as_mut_ptr(), len - c);
            std::ptr::copy_nonoverlapping(odd.add(c), tail[1].as_mut_ptr(), len - c);
            S::interleave(tail[0].as_ptr(), tail[1].as_ptr(), dst.add(c));
        }
    }
}

/// Converts one query row to f32 times `scale`. With pairs, copies it as it is, a pair of an odd length made whole with zero.
///
/// # Safety
/// As [`Simd`]; `src` and `dst` hold `len` elements.
#[inline(always)]
pub(super) unsafe fn query<S: Simd>(dtype: Dtype, src: *const u8, len: usize, scale: f32, dst: *mut f32) {
    if S::PAIRS {
        // SAFETY: the caller's promise; `dst` holds `len` rounded up to pairs.
        unsafe {
            let dst = dst.cast::<u16>();
            *dst.add(len.next_multiple_of(2) - 1) = 0;
            std::ptr::copy_nonoverlapping(src.cast(), dst, len);
        }
        return;
    }
    // SAFETY: the caller's promise.
    with_elem!(dtype, E => unsafe { row::<S, E>(src.cast(), len, scale, dst, false) });
}
