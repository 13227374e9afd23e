//! Both products with quantized keys and values.
//!
//! In f32, a block of keys or values is decoded to where a block of elements is packed, and everything else is the same. For few rows,
//! where the machine multiplies bytes, codes are multiplied as they are: queries and weights become integers of 16 bits, in two halves
//! of 8, so that each product with a level is exact and the sums are those of the integers.

#![allow(unsafe_code)]

use super::super::simd::{CODE_DIM, CodeScores, CodeValues, Simd, TILE};
use super::pack;
use crate::BlockTables;
use crate::cache::NO_PAGE;
use crate::codec::{self, CodesView, UNIT};
use crate::plan::STREAM_ROWS;
use crate::problem::MAX_HEAD_DIM;
use half::f16;
use half::slice::HalfFloatSliceExt;
use std::ops::Range;

/// The greatest magnitude of a query's integers: its upper half is a signed byte.
const Q_ONE: f32 = 127.0 * 256.0;
/// Keys of a block.
const KEYS: usize = 256;

/// Quantized rows of one head of a sequence.
#[derive(Clone, Copy)]
pub(super) struct CodeRows<'a> {
    pub(super) view: &'a CodesView<'a>,
    head: usize,
    table: &'a [u32],
    page: usize,
}

impl<'a> CodeRows<'a> {
    pub(super) fn new(
        view: &'a CodesView<'a>,
        head: usize,
        tables: &'a BlockTables,
        sequence: usize,
    ) -> Self {
        let table = &tables.table[sequence * tables.width..][..tables.width];
        Self { view, head, table, page: tables.page }
    }

    fn dim(&self) -> usize {
        self.view.shape()[3]
    }

    /// Whether products can be made in integers.
    pub(super) fn can_be_integers(&self) -> bool {
        self.view.coder().is_integer() && self.dim().is_multiple_of(CODE_DIM)
    }

    /// The page of row `j`, and the row in it. Of a block that is nowhere, page 0.
    #[inline(always)]
    fn find(&self, j: usize) -> (&'a [u8], usize) {
        let (block, row) = (j / self.page, j % self.page);
        let block = if block < self.table.len() { block } else { block % self.table.len() };
        let page = match self.table[block] {
            NO_PAGE => 0,
            page => page as usize,
        };
        (self.view.page(page, self.head), row)
    }

    /// Calls `f` with each run of rows `rows` that lie one after another: the page, the first row in it, and the rows.
    #[inline(always)]
    fn runs(&self, rows: Range<usize>, mut f: impl FnMut(&'a [u8], usize, Range<usize>)) {
        let mut at = rows.start;
        while at < rows.end {
            let (page, row) = self.find(at);
            let end = rows.end.min(at + self.page - row);
            f(page, row, at..end);
            at = end;
        }
    }

    /// Decodes row `j`, in the rotated domain.
    fn decode(&self, j: usize, x: &mut [f32]) {
        let (page, row) = self.find(j);
        codec::decode_rotated(self.view.coder(), (page, self.page, row), x);
    }

    /// Scales of rows `rows`, divided by [`UNIT`].
    fn factors(&self, rows: Range<usize>, into: &mut [f32]) {
        let format = self.view.coder().format();
        let first = rows.start;
        self.runs(rows, |page, row, run| {
            let into = &mut into[run.start - first..run.end - first];
            let bytes = &page[self.page * (format.row_bytes() - 2) + 2 * row..][..2 * run.len()];
            let mut scales = [f16::ZERO; KEYS];
            for (scale, bytes) in scales.iter_mut().zip(bytes.as_chunks().0) {
                *scale = f16::from_le_bytes(*bytes);
            }
            scales[..run.len()].convert_to_f32_slice(into);
            into.iter_mut().for_each(|x| *x *= 1.0 / UNIT);
        });
    }

    /// Addresses of rows `rows` in each plane, from the first pointers on.
    fn places(&self, rows: Range<usize>, into: [&mut [*const u8]; 2]) {
        let first = rows.start;
        let [low, high] = into;
        let planes = self.view.coder().format().planes();
        self.runs(rows, |page, row, run| {
            let mut start = 0;
            for (plane, into) in planes.iter().zip([&mut *low, &mut *high]) {
                let base = page[start..].as_ptr();
                for (n, into) in into[run.start - first..run.end - first].iter_mut().enumerate() {
                    *into = base.wrapping_add((row + n) * plane.bytes);
                }
                start += self.page * plane.bytes;
            }
        });
    }
}

/// As [`pack::key_panel`], of codes; `memory` is of a vector of rows of keys.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn key_panel<S: Simd>(
    src: CodeRows<'_>,
    (first, panel): (usize, usize),
    columns: &Range<usize>,
    memory: *mut f32,
    dst: *mut f32,
) {
    let dim = src.dim();
    for vector in 0..S::VECTORS {
        let column = (panel * S::VECTORS + vector) * S::LANES;
        // SAFETY: the caller's promise.
        unsafe {
            let mut rows = pack::zero_rows();
            for r in (0..S::LANES).filter(|r| columns.contains(&(column + r))) {
                let row = memory.add(r * dim);
                src.decode(first + column + r, std::slice::from_raw_parts_mut(row, dim));
                rows[r] = row.cast_const().cast();
            }
            pack::panel_of_rows::<S>(rows, 4 * dim, dst.add(vector * S::LANES));
        }
    }
}

/// As [`pack::values`], of codes.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn values<S: Simd>(src: CodeRows<'_>, first: usize, rows: Range<usize>, dst: *mut f32) {
    let dim = src.dim();
    let stride = dim.next_multiple_of(S::LANES);
    for (n, j) in rows.enumerate() {
        // SAFETY: the caller's promise.
        let row = unsafe { std::slice::from_raw_parts_mut(dst.add(n * stride), stride) };
        src.decode(first + j, &mut row[..dim]);
        row[dim..].fill(0.0);
    }
}

/// Memory of a task with few rows, for products in integers: what [`CodeScores`] and [`CodeValues`] read.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    q: *mut i8,
    q_factors: *mut f32,
    start: *mut i32,
    w: *mut u8,
    w_factors: *mut f32,
    dim: usize,
}

impl Operands {
    /// In the memory of a plan for codes.
    pub(super) fn new(memory: *mut f32, dim: usize) -> Self {
        let q = memory.cast::<i8>();
        let q_factors: *mut f32 = q.wrapping_add(STREAM_ROWS * 2 * dim).cast();
        let start = q_factors.wrapping_add(STREAM_ROWS).cast::<i32>();
        let w_factors = start.wrapping_add(STREAM_ROWS).cast::<f32>();
        let w = w_factors.wrapping_add(STREAM_ROWS).cast();
        Self { q, q_factors, start, w, w_factors, dim }
    }

    /// Makes integers of `count` packed queries `[count, ldq]`.
    ///
    /// # Safety
    /// The memory and the queries are there.
    #[inline(always)]
    pub(super) unsafe fn set_queries(&self, q: *const f32, ldq: usize, count: usize) {
        for r in 0..count {
            // SAFETY: the caller's promise.
            unsafe {
                let row = std::slice::from_raw_parts(q.add(r * ldq), self.dim);
                let most = row.iter().fold(0.0f32, |most, x| if x.abs() > most { x.abs() } else { most });
                // Numbers that are not finite reach the scores by the factor.
                let finite = row.iter().fold(0.0f32, |sum, x| sum + x * 0.0) == 0.0;
                let inverse = if most > 0.0 && finite { Q_ONE / most } else { 0.0 };
                let high = std::slice::from_raw_parts_mut(self.q.add(2 * r * self.dim), self.dim);
                let low = std::slice::from_raw_parts_mut(self.q.add((2 * r + 1) * self.dim), self.dim);
                let mut sum = 0i32;
                for ((x, high), low) in row.iter().zip(high).zip(low) {
                    let x = (x * inverse).round_ties_even() as i32;
                    *low = x as i8;
                    *high = ((x - i32::from(*low)) >> 8) as i8;
                    sum += x;
                }
                *self.start.add(r) = sum.wrapping_mul(-128);
                *self.q_factors.add(r) = if finite { most / Q_ONE } else { f32::NAN };
            }
        }
    }

    /// Scores of `count` queries and keys `first + columns`, in whole vectors that cover the columns.
    ///
    /// # Safety
    /// As [`Simd`]; the keys exist, the queries were set, and `c` holds the vectors of each row.
    #[inline(always)]
    pub(super) unsafe fn scores<S: Simd>(
        &self,
        src: CodeRows<'_>,
        (first, columns): (usize, &Range<usize>),
        count: usize,
        (c, ldc): (*mut f32, usize),
    ) {
        let block = Block::new(src, first, columns);
        let coder = src.view.coder();
        // SAFETY: the caller's promise; rows of keys that are not seen are zeros.
        unsafe {
            S::code_scores(&CodeScores {
                format: coder.format(),
                levels: coder.levels(),
                rows: block.rows(TILE),
                k_factors: block.factors(),
                q: self.q,
                start: self.start,
                q_factors: self.q_factors,
                count,
                c: c.add(block.start),
                ldc,
            });
        }
    }

    /// Weighted values of the weights `[count, ldw]` of `columns`, in `c` `[count, ldc]`. Weights are those of whole vectors that
    /// cover the columns.
    ///
    /// # Safety
    /// As [`Simd`]; the values `first + columns` exist.
    #[inline(always)]
    pub(super) unsafe fn values<S: Simd>(
        &self,
        src: CodeRows<'_>,
        (first, columns): (usize, &Range<usize>),
        (weights, ldw, count): (*const f32, usize, usize),
        (c, ldc): (*mut f32, usize),
    ) {
        let block = Block::new(src, first, columns);
        let coder = src.view.coder();
        // SAFETY: the caller's promise; values that are not seen are zeros.
        unsafe {
            S::code_values(&CodeValues {
                format: coder.format(),
                levels: coder.levels(),
                rows: block.rows(4),
                v_factors: block.factors(),
                weights: weights.add(block.start),
                ldw,
                integers: self.w,
                w_factors: self.w_factors,
                count,
                c,
                ldc,
            });
        }
    }
}

/// Where the rows of a block of keys or values are.
struct Block {
    places: [[*const u8; KEYS]; 2],
    factors: [f32; KEYS],
    /// The column of the first, that of a whole vector, and how many there are from it on.
    start: usize,
    len: usize,
}

impl Block {
    /// Of rows `first + columns`. Those of the first vector that are before them, and those past the last, are zeros.
    fn new(src: CodeRows<'_>, first: usize, columns: &Range<usize>) -> Self {
        let start = columns.start / TILE * TILE;
        let (skipped, len) = (columns.start - start, columns.end - start);
        let mut block = Self { places: [[NOTHING.0.as_ptr(); KEYS]; 2], factors: [0.0; KEYS], start, len };
        let [low, high] = &mut block.places;
        let seen = first + columns.start..first + columns.end;
        src.places(seen.clone(), [&mut low[skipped..], &mut high[skipped..]]);
        src.factors(seen, &mut block.factors[skipped..]);
        block
    }

    fn rows(&self, multiple: usize) -> [&[*const u8]; 2] {
        let len = self.len.next_multiple_of(multiple);
        [&self.places[0][..len], &self.places[1][..len]]
    }

    fn factors(&self) -> &[f32] {
        &self.factors[..self.len.next_multiple_of(TILE)]
    }
}

/// Stands for rows that are not there.
#[repr(align(64))]
struct Nothing([u8; MAX_HEAD_DIM]);
static NOTHING: Nothing = Nothing([0; MAX_HEAD_DIM]);
