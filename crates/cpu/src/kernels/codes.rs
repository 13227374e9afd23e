//! Both products with quantized keys and values.
//!
//! In general a block of keys or values is decoded to where a block of elements is packed, and everything else is the same. Tasks of few
//! rows multiply codes where they lie, if the instruction set can:
//!
//! - integers (VNNI): queries and probabilities become integers of 16 bits in two halves of 8, so that products with levels and their sums
//!   are exact;
//! - codes of one byte in f32: they are dequantized as they are loaded.

#![allow(unsafe_code)]

use super::pack;
use crate::plan::STREAM_ROWS;
use crate::simd::{
    ByteScores, ByteValues, CODE_DIM, CODE_KEYS, CodeBlock, CodeScores, CodeValues, Simd, TILE,
};
use flashtile_core::block_tables::BlockTables;
use flashtile_core::codec;
use flashtile_core::codec::{Coder, CodesView};
use flashtile_core::isa::IsaToken;
use flashtile_core::limits::MAX_HEAD_DIM;
use std::ops::Range;

/// The greatest magnitude of a query's integers: its upper half is a signed byte.
const Q_ONE: f32 = 127.0 * 256.0;
/// A query whose greatest magnitude is below it has scores of 0: no key is long enough to make them more.
const MIN_MAGNITUDE: f32 = 1e-30;

/// Quantized rows of one head of a sequence.
#[derive(Clone, Copy)]
pub(super) struct CodeRows<'a> {
    /// Of the instruction set that decodes them.
    token: IsaToken,
    pub(super) view: &'a CodesView<'a>,
    head: usize,
    table: &'a [u32],
    page: usize,
    /// Rows from which on there are none: of a ring none.
    end: usize,
}

impl<'a> CodeRows<'a> {
    pub(super) fn new(
        token: IsaToken,
        view: &'a CodesView<'a>,
        head: usize,
        tables: &'a BlockTables,
        sequence: usize,
    ) -> Self {
        let table = &tables.table[sequence * tables.width..][..tables.width];
        let end = if tables.wraps { usize::MAX } else { tables.lens[sequence] };
        Self { token, view, head, table, page: tables.page, end }
    }

    fn dim(&self) -> usize {
        self.view.shape()[3]
    }

    /// Whether products can be made in integers.
    pub(super) fn can_be_integers(&self) -> bool {
        self.view.coder().is_integer() && self.dim().is_multiple_of(CODE_DIM)
    }

    /// Whether codes are bytes that are multiplied in f32 where they lie.
    pub(super) fn can_be_bytes(&self) -> bool {
        let coder = self.view.coder();
        let bytes = coder.is_fp8() || coder.is_integer() && coder.levels().is_none();
        bytes && self.dim().is_multiple_of(TILE)
    }

    /// A page of the sequence. Page 0 for an entry that names no page of the pool: groups and prefetches take in rows that are
    /// not kept, whose entries were not checked.
    #[inline(always)]
    fn page(&self, block: usize) -> &'a [u8] {
        let block = if block < self.table.len() { block } else { block % self.table.len() };
        let page = self.table[block] as usize;
        self.view.page(if page < self.view.shape()[0] { page } else { 0 }, self.head)
    }

    /// Decodes rows `rows` to `x` `[rows, stride]`, in the rotated domain.
    fn decode(&self, rows: Range<usize>, x: &mut [f32], stride: usize) {
        let (mut j, mut x) = (rows.start, x);
        while j < rows.end {
            let first = j % self.page;
            let count = (self.page - first).min(rows.end - j);
            let source = (self.page(j / self.page), self.page, first..first + count);
            let (of_page, rest) = x.split_at_mut((count * stride).min(x.len()));
            codec::decode_rotated(self.token, self.view.coder(), source, of_page, stride);
            (j, x) = (j + count, rest);
        }
    }

    /// Where the groups of rows from `j` on begin: in both planes, and their scales. `elsewhere(n, j)` says it of those whose rows,
    /// from `j` on, do not lie in one page.
    fn groups(
        &self,
        j: usize,
        groups: &mut [[*const u8; 3]],
        mut elsewhere: impl FnMut(usize, usize) -> [*const u8; 3],
    ) {
        let format = self.view.coder().format();
        let [lower, upper] = [0, 1].map(|n| format.planes().get(n).map_or(0, |plane| plane.bytes));
        let starts = |page: *const u8, row: usize| {
            let (above, scales) = (self.page * lower + row * upper, self.page * (lower + upper) + row * 2);
            [page.wrapping_add(row * lower), page.wrapping_add(above), page.wrapping_add(scales)]
        };
        let (mut block, mut row) = (j / self.page, j % self.page);
        let mut page = self.page(block).as_ptr();
        // Mostly all are in one page, and a loop without branches finds them.
        if row + TILE * groups.len() <= self.page {
            for (n, group) in groups.iter_mut().enumerate() {
                *group = starts(page, row + TILE * n);
            }
            return;
        }
        for (n, group) in groups.iter_mut().enumerate() {
            if row >= self.page {
                block += row / self.page;
                row %= self.page;
                page = self.page(block).as_ptr();
            }
            *group = if row + TILE <= self.page {
                starts(page, row)
            } else {
                elsewhere(n, block * self.page + row)
            };
            row += TILE;
        }
    }

    /// Copies rows `j..j + TILE` to `to`, plane after plane, as a group.
    ///
    /// # Safety
    /// `to` is valid for the bytes.
    unsafe fn copy_group(&self, j: usize, to: *mut u8) -> [*const u8; 3] {
        let format = self.view.coder().format();
        let mut starts = [to.cast_const(); 3];
        for n in 0..TILE {
            let (page, row) = (self.page((j + n) / self.page), (j + n) % self.page);
            let places = format.places(self.page, row..row + 1).zip(format.places(TILE, n..n + 1));
            for (index, (from, at)) in places.enumerate() {
                // The scales are last.
                let index = if index == format.planes().len() { 2 } else { index };
                // SAFETY: the caller's promise.
                unsafe {
                    std::ptr::copy_nonoverlapping(page[from.clone()].as_ptr(), to.add(at.start), from.len());
                }
                if n == 0 {
                    starts[index] = to.wrapping_add(at.start).cast_const();
                }
            }
        }
        starts
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
            let seen = columns.start.max(column)..columns.end.min(column + S::LANES);
            if !seen.is_empty() {
                let decoded = std::slice::from_raw_parts_mut(memory, seen.len() * dim);
                src.decode(first + seen.start..first + seen.end, decoded, dim);
            }
            for (n, column_of) in seen.enumerate() {
                rows[column_of - column] = memory.add(n * dim).cast_const().cast();
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
pub(super) unsafe fn values(
    src: CodeRows<'_>,
    first: usize,
    rows: Range<usize>,
    (dst, stride): (*mut f32, usize),
) {
    let dim = src.dim();
    // SAFETY: the caller's promise.
    let decoded = unsafe { std::slice::from_raw_parts_mut(dst, rows.len() * stride) };
    src.decode(first + rows.start..first + rows.end, decoded, stride);
    if stride > dim {
        decoded.chunks_exact_mut(stride).for_each(|row| row[dim..].fill(0.0));
    }
}

/// Rows of scores or of `p . v`, `ldc` elements from one to the next.
#[derive(Clone, Copy)]
pub(super) struct ResultRows {
    pub(super) count: usize,
    pub(super) c: *mut f32,
    pub(super) ldc: usize,
}

/// Rows of probabilities, `ldp` elements from one to the next, and of `p . v`.
#[derive(Clone, Copy)]
pub(super) struct ValueRows {
    pub(super) probs: *mut f32,
    pub(super) ldp: usize,
    pub(super) out: ResultRows,
}

/// Memory of a task with few rows, for products in integers: what [`CodeScores`] and [`CodeValues`] read.
#[derive(Clone, Copy)]
pub(super) struct IntegerOperands {
    q: *mut i8,
    q_factors: *mut f32,
    start: *mut i32,
    w: *mut u8,
    w_factors: *mut f32,
    dim: usize,
}

impl IntegerOperands {
    /// In the memory of a plan for codes.
    pub(super) fn new(memory: *mut f32, dim: usize) -> Self {
        let q = memory.cast::<i8>();
        let q_factors: *mut f32 = q.wrapping_add(STREAM_ROWS * 2 * MAX_HEAD_DIM).cast();
        let start = q_factors.wrapping_add(STREAM_ROWS).cast::<i32>();
        let w_factors = start.wrapping_add(STREAM_ROWS).cast::<f32>();
        let w = w_factors.wrapping_add(STREAM_ROWS).cast();
        Self { q, q_factors, start, w, w_factors, dim }
    }

    /// Makes integers of `count` packed queries `[count, ldq]`.
    ///
    /// # Safety
    /// The memory and the queries are there.
    pub(super) unsafe fn set_queries(&self, q: *const f32, ldq: usize, count: usize) {
        for r in 0..count {
            // SAFETY: the caller's promise.
            unsafe {
                let row = std::slice::from_raw_parts(q.add(r * ldq), self.dim);
                let most = codec::greatest(row);
                // A query that is not finite reaches its scores by the factor.
                let finite = most.is_finite();
                let inverse = if finite && most > MIN_MAGNITUDE { Q_ONE / most } else { 0.0 };
                let half = |n: usize| self.q.add((2 * r + n) * MAX_HEAD_DIM);
                let high = std::slice::from_raw_parts_mut(half(0), self.dim);
                let low = std::slice::from_raw_parts_mut(half(1), self.dim);
                let mut sum = 0i32;
                for ((x, high), low) in row.iter().zip(high).zip(low) {
                    let x = if finite { codec::round(x * inverse) } else { 0 };
                    *low = x as i8;
                    *high = ((x - i32::from(*low)) >> 8) as i8;
                    sum += x;
                }
                *self.start.add(r) = sum.wrapping_mul(-128);
                *self.q_factors.add(r) = if finite { most / Q_ONE } else { f32::NAN };
            }
        }
    }

    /// Scores of the queries and keys `first + columns`, in whole vectors that cover the columns. `memory` has room for a block of
    /// codes.
    ///
    /// # Safety
    /// - The machine has the instructions of `product`.
    /// - The keys exist, and the queries were set.
    /// - `rows` holds the vectors of each row.
    #[inline(always)]
    pub(super) unsafe fn scores(
        &self,
        product: unsafe fn(&CodeScores<'_>),
        src: CodeRows<'_>,
        (first, columns): (usize, &Range<usize>),
        memory: *mut f32,
        rows: ResultRows,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let block = Block::new(src, first, columns, memory.cast());
            product(&CodeScores {
                keys: block.codes(src.view.coder()),
                q: self.q,
                start: self.start,
                q_factors: self.q_factors,
                count: rows.count,
                c: rows.c.add(block.start),
                ldc: rows.ldc,
            });
        }
    }

    /// `p . v` of `columns`. Probabilities are those of whole vectors that cover the columns.
    ///
    /// # Safety
    /// As [`IntegerOperands::scores`]; the values `first + columns` exist.
    #[inline(always)]
    pub(super) unsafe fn values(
        &self,
        product: unsafe fn(&CodeValues<'_>),
        src: CodeRows<'_>,
        (first, columns): (usize, &Range<usize>),
        memory: *mut f32,
        rows: ValueRows,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let block = Block::new(src, first, columns, memory.cast());
            product(&CodeValues {
                values: block.codes(src.view.coder()),
                probs: rows.probs.add(block.start).cast_const(),
                ldw: rows.ldp,
                integers: self.w,
                w_factors: self.w_factors,
                count: rows.out.count,
                c: rows.out.c,
                ldc: rows.out.ldc,
            });
        }
    }
}

/// As [`IntegerOperands::scores`], of codes of a byte in f32 and packed queries, `ldq` elements from one to the next.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn byte_scores(
    product: unsafe fn(&ByteScores<'_>),
    src: CodeRows<'_>,
    (first, columns): (usize, &Range<usize>),
    memory: *mut f32,
    (q, ldq): (*const f32, usize),
    rows: ResultRows,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let block = Block::new(src, first, columns, memory.cast());
        let keys = block.codes(src.view.coder());
        let c = rows.c.add(block.start);
        product(&ByteScores { keys, q, ldq, count: rows.count, c, ldc: rows.ldc });
    }
}

/// As [`IntegerOperands::values`], of codes of a byte in f32. Changes the probabilities.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn byte_values(
    product: unsafe fn(&ByteValues<'_>),
    src: CodeRows<'_>,
    (first, columns): (usize, &Range<usize>),
    memory: *mut f32,
    rows: ValueRows,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let block = Block::new(src, first, columns, memory.cast());
        let values = block.codes(src.view.coder());
        let probs = rows.probs.add(block.start);
        let ResultRows { count, c, ldc } = rows.out;
        product(&ByteValues { values, probs, ldw: rows.ldp, count, c, ldc });
    }
}

// The plan's scratch memory is for blocks of as many keys.
const _: () = assert!(CODE_KEYS == crate::plan::BLOCK_K);

/// Groups of a block.
const GROUPS: usize = CODE_KEYS / TILE;

/// Where the rows of a block of keys or values are, and those of the next one.
struct Block {
    groups: [[*const u8; 3]; GROUPS],
    next: [[*const u8; 3]; GROUPS],
    /// The column of the first group, and how many there are.
    start: usize,
    count: usize,
}

impl Block {
    /// Of rows `first + columns`, in whole groups.
    ///
    /// # Safety
    /// `memory` has room for a block of codes.
    #[inline(always)]
    unsafe fn new(src: CodeRows<'_>, first: usize, columns: &Range<usize>, memory: *mut u8) -> Self {
        let start = columns.start / TILE * TILE;
        let count = (columns.end - start).div_ceil(TILE);
        let bytes = src.view.coder().format().row_bytes() * TILE;
        let mut groups = [[std::ptr::null(); 3]; GROUPS];
        // SAFETY: the caller's promise.
        src.groups(first + start, &mut groups[..count], |n, j| unsafe {
            src.copy_group(j, memory.add(n * bytes))
        });
        let mut next = groups;
        let ahead = first + start + CODE_KEYS;
        if ahead < src.end {
            src.groups(ahead, &mut next[..count], |n, _| groups[n]);
        }
        Self { groups, next, start, count }
    }

    fn codes<'a>(&'a self, coder: &'a Coder) -> CodeBlock<'a> {
        CodeBlock {
            format: coder.format(),
            levels: coder.levels(),
            is_fp8: coder.is_fp8(),
            groups: &self.groups[..self.count],
            next: &self.next[..self.count],
        }
    }
}
