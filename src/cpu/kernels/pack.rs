//! Copies into the order in which the micro-kernel reads, converted to f32.

#![allow(unsafe_code)]

use super::super::simd::{Elem, LINES, Rows, Simd, TILE, load_head, with_elem};
use crate::problem::MAX_HEAD_DIM;
use crate::{Dtype, TensorView};
use std::ops::Range;

/// Runs a generic call for the way in which rows of keys move through a transpose: with pairs, a pair of bf16 stands in for
/// an f32.
macro_rules! with_rows {
    ($S:ident, $dtype:expr, $R:ident => $body:expr) => {
        match $dtype {
            $crate::Dtype::BF16 if !$S::PAIRS => {
                type $R = $crate::cpu::simd::Double;
                $body
            }
            $crate::Dtype::F16 => {
                type $R = $crate::cpu::simd::Single<$crate::cpu::simd::F16>;
                $body
            }
            _ => {
                type $R = $crate::cpu::simd::Single<f32>;
                $body
            }
        }
    };
}
pub(super) use with_rows;

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
const PREFETCH_BYTES: usize = 16384;

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

    /// Start of the `len` rows from `j` on, and the bytes from one to the next, where these are the same for all.
    #[inline(always)]
    pub(super) fn run(&self, j: usize, _len: usize) -> Option<(*const u8, usize)> {
        Some((self.row(j), self.step()))
    }

    /// Bytes of a row.
    #[inline(always)]
    pub(super) fn row_bytes(&self) -> usize {
        self.tensor.shape()[3] * self.tensor.dtype().bytes()
    }

    /// Bytes from a row to the one that is asked for while it is read, which is at least `rows` rows further on.
    #[inline(always)]
    pub(super) fn ahead(&self, rows: usize) -> usize {
        self.step().wrapping_mul(PREFETCH_BYTES.div_ceil(self.row_bytes()).max(rows))
    }
}

/// Stands for keys past the end: zero in every dtype.
#[repr(align(64))]
struct ZeroRow([u8; 4 * MAX_HEAD_DIM]);
static ZERO_ROW: ZeroRow = ZeroRow([0; 4 * MAX_HEAD_DIM]);

/// Keys of one vector of lanes, and the lines of memory to ask for meanwhile.
#[derive(Clone, Copy)]
pub(super) struct KeyVector {
    /// The rows: zeros for a key that is not wanted.
    rows: [*const u8; 16],
    /// Bytes from a row to what is asked for while it is read.
    ahead: usize,
    row_bytes: usize,
}

impl KeyVector {
    /// The rows, zeros for a key that is not wanted.
    #[inline(always)]
    pub(super) const fn rows(&self) -> &[*const u8; 16] {
        &self.rows
    }

    /// Keys `first + column..` of those in `columns`, which exist.
    #[inline(always)]
    pub(super) fn new<S: Simd>(
        src: HeadRows<'_>,
        first: usize,
        column: usize,
        columns: &Range<usize>,
    ) -> Self {
        let (ahead, row_bytes) = (src.ahead(S::LANES), src.row_bytes());
        let mut rows = [ZERO_ROW.0.as_ptr(); 16];
        if columns.start <= column && column + S::LANES <= columns.end {
            let (start, step) = (src.row(first + column), src.step());
            for r in 0..S::LANES {
                rows[r] = start.wrapping_add(r * step);
            }
        } else {
            for r in 0..S::LANES {
                if columns.contains(&(column + r)) {
                    rows[r] = src.row(first + column + r);
                }
            }
        }
        Self { rows, ahead, row_bytes }
    }

    /// The next [`LINES`] lines, from byte `at` of the rows on, all inside the rows.
    ///
    /// # Safety
    /// As [`Simd`]; the rows exist.
    #[inline(always)]
    pub(super) unsafe fn lines<S: Simd, R: Rows>(&self, at: usize) -> [S::V; LINES] {
        let mut from = self.rows;
        // SAFETY: the caller's promise; a prefetch may name any address.
        unsafe {
            if at.is_multiple_of(64) {
                for r in 0..S::LANES {
                    S::prefetch(self.rows[r].wrapping_add(at + self.ahead));
                }
            }
            for r in 0..S::LANES {
                from[r] = self.rows[r].add(at);
            }
            S::transpose::<R::Lane>(from.map(<*const u8>::cast))
        }
    }

    /// The lines from byte `at` to the end of the rows, fewer than [`LINES`]; the others are zero.
    ///
    /// # Safety
    /// As [`Simd`]; the rows exist.
    #[inline(always)]
    pub(super) unsafe fn last_lines<S: Simd, R: Rows>(&self, at: usize) -> [S::V; LINES] {
        let mut tail = [[0u8; LINES * 4]; 16];
        let mut from = self.rows;
        // SAFETY: a row has `row_bytes` bytes, the zero row at least as many.
        unsafe {
            for r in 0..S::LANES {
                let rest = self.rows[r].add(at);
                std::ptr::copy_nonoverlapping(rest, tail[r].as_mut_ptr(), self.row_bytes - at);
                from[r] = tail[r].as_ptr();
            }
            S::transpose::<R::Lane>(from.map(<*const u8>::cast))
        }
    }
}

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
    with_rows!(S, src.tensor.dtype(), R => {
        let width = S::VECTORS * S::LANES;
        for vector in 0..S::VECTORS {
            let column = panel * width + vector * S::LANES;
            // SAFETY: the caller's promise.
            unsafe {
                let keys = KeyVector::new::<S>(src, first, column, columns);
                panel_vector::<S, R>(&keys, dst.add(vector * S::LANES));
            }
        }
    });
}

/// One vector of lanes of a panel.
///
/// # Safety
/// As [`key_panel`].
#[inline(always)]
unsafe fn panel_vector<S: Simd, R: Rows>(keys: &KeyVector, dst: *mut f32) {
    let width = S::VECTORS * S::LANES;
    let (block, steps) = (LINES * size_of::<R::Lane>(), LINES * R::STEPS);
    let whole = keys.row_bytes / block;
    // SAFETY: the caller's promise; the panel has a line of `width` elements for every step.
    unsafe {
        for n in 0..whole {
            let lines = keys.lines::<S, R>(n * block);
            let dst = dst.add(n * steps * width);
            for c in 0..LINES {
                for i in 0..R::STEPS {
                    S::store(dst.add((c * R::STEPS + i) * width), R::step::<S>(lines[c], i));
                }
            }
        }
        if whole * block < keys.row_bytes {
            let lines = keys.last_lines::<S, R>(whole * block);
            for n in whole * steps..steps_in::<R>(keys.row_bytes) {
                let c = n - whole * steps;
                S::store(dst.add(n * width), R::step::<S>(lines[c / R::STEPS], c % R::STEPS));
            }
        }
        if S::TILES {
            let depth = steps_in::<R>(keys.row_bytes);
            for n in depth..depth.next_multiple_of(TILE) {
                S::store(dst.add(n * width), S::splat(0.0));
            }
        }
    }
}

/// Steps of a product's depth in a row of so many bytes.
#[inline(always)]
pub(super) fn steps_in<R: Rows>(row_bytes: usize) -> usize {
    let step = size_of::<R::Lane>() / R::STEPS;
    row_bytes.div_ceil(step)
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
/// holds pairs of two values (of an even row and the next), and the missing half of a pair at either end is zero; with tiles,
/// so are the missing pairs of a step.
///
/// # Safety
/// As [`Simd`]; the values exist, `dst` is valid for the rows, `stride` is value_dim in whole vectors.
#[inline(always)]
pub(super) unsafe fn values<S: Simd>(src: HeadRows<'_>, first: usize, rows: Range<usize>, dst: *mut f32) {
    let value_dim = src.tensor.shape()[3];
    let stride = value_dim.next_multiple_of(S::LANES);
    let (ahead, row_bytes) = (src.ahead(1), src.row_bytes());
    if S::PAIRS {
        let whole = if S::TILES { 2 * TILE } else { 2 };
        let pairs = rows.start / whole * whole / 2..rows.end.next_multiple_of(whole) / 2;
        for (n, pair) in pairs.enumerate() {
            let half = |j: usize| if rows.contains(&j) { src.row(first + j) } else { ZERO_ROW.0.as_ptr() };
            // SAFETY: the caller's promise.
            unsafe {
                let (even, odd) = (half(2 * pair), half(2 * pair + 1));
                for offset in (0..row_bytes).step_by(64) {
                    S::prefetch(even.wrapping_add(ahead + offset));
                    S::prefetch(odd.wrapping_add(ahead + offset));
                }
                pair_row::<S>(even.cast(), odd.cast(), value_dim, dst.add(n * stride));
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

/// Converts one query row to f32 times `scale`. With pairs, copies it as it is, the last pair, or step of tiles, made whole
/// with zeros.
///
/// # Safety
/// As [`Simd`]; `src` and `dst` hold `len` elements.
#[inline(always)]
pub(super) unsafe fn query<S: Simd>(dtype: Dtype, src: *const u8, len: usize, scale: f32, dst: *mut f32) {
    if S::PAIRS {
        // SAFETY: the caller's promise; `dst` holds `len` rounded up to pairs or steps.
        unsafe {
            let dst = dst.cast::<u16>();
            let whole = len.next_multiple_of(if S::TILES { 2 * TILE } else { 2 });
            std::ptr::copy_nonoverlapping(src.cast(), dst, len);
            std::ptr::write_bytes(dst.add(len), 0, whole - len);
        }
        return;
    }
    // SAFETY: the caller's promise.
    with_elem!(dtype, E => unsafe { row::<S, E>(src.cast(), len, scale, dst, false) });
}
