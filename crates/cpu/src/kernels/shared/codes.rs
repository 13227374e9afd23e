//! Quantized keys and values: the rows of a head, and their decoding to the place where a block of elements is packed.
//!
//! After decoding, they are treated like elements. Codes that the instruction set can multiply in place
//! ([`code_block`](crate::kernels::forward::products::code_block)) are multiplied in place instead: by integer
//! products in tasks of any number of rows, by f32 products only for sequences with few rows.

#![allow(unsafe_code)]

use super::mat::MatMut;
use super::pack;
use crate::simd::Simd;
use flashtile_core::block_tables::BlockTables;
use flashtile_core::codec;
use flashtile_core::codec::{Coder, CodesView};
use flashtile_core::isa::IsaToken;
use std::ops::Range;

/// Quantized rows of one head of a sequence.
#[derive(Clone, Copy)]
pub(crate) struct CodeRows<'a> {
    /// Token of the instruction set that decodes them.
    token: IsaToken,
    pub(crate) view: &'a CodesView<'a>,
    head: usize,
    table: &'a [u32],
    /// Number of rows in a page.
    pub(crate) page_rows: usize,
    /// Number of rows of the sequence; `usize::MAX` for a ring, which has a row for every index.
    pub(crate) end: usize,
}

impl<'a> CodeRows<'a> {
    pub(crate) fn new(
        token: IsaToken,
        view: &'a CodesView<'a>,
        head: usize,
        tables: &'a BlockTables,
        sequence: usize,
    ) -> Self {
        let table = &tables.table[sequence * tables.width..][..tables.width];
        let end = if tables.wraps { usize::MAX } else { tables.lens[sequence] };
        Self { token, view, head, table, page_rows: tables.page_size, end }
    }

    pub(crate) fn dim(&self) -> usize {
        self.view.shape()[3]
    }

    /// Codec of the rows.
    pub(crate) fn coder(&self) -> &'a Coder {
        self.view.coder()
    }

    /// A page of the sequence. An entry that names no page of the pool gives page 0: groups and prefetches include rows that are not kept,
    /// whose entries were not checked.
    #[inline(always)]
    pub(crate) fn page(&self, block: usize) -> &'a [u8] {
        let block = if block < self.table.len() { block } else { block % self.table.len() };
        let page = self.table[block] as usize;
        self.view.page(if page < self.view.shape()[0] { page } else { 0 }, self.head)
    }

    /// Decodes rows `rows` to `x` `[rows, stride]`, in the rotated domain.
    fn decode(&self, rows: Range<usize>, x: &mut [f32], stride: usize) {
        let (mut j, mut x) = (rows.start, x);
        while j < rows.end {
            let first = j % self.page_rows;
            let count = (self.page_rows - first).min(rows.end - j);
            let source = (self.page(j / self.page_rows), self.page_rows, first..first + count);
            let (of_page, rest) = x.split_at_mut((count * stride).min(x.len()));
            codec::decode_rotated(self.token, self.view.coder(), source, of_page, stride);
            (j, x) = (j + count, rest);
        }
    }
}

/// [`pack::key_panel`] of codes. A vector of keys is decoded to `memory` first.
///
/// # Safety
/// The contract of [`pack::key_panel`] holds, and `memory` has room for the rows of a vector of keys.
#[inline(always)]
pub(crate) unsafe fn key_panel<S: Simd>(
    src: CodeRows<'_>,
    first: usize,
    panel: usize,
    columns: &Range<usize>,
    memory: *mut f32,
    dst: *mut f32,
) {
    let dim = src.dim();
    for vector in 0..S::VECTORS {
        let column = (panel * S::VECTORS + vector) * S::LANES;
        // SAFETY: the caller's contract.
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

/// [`pack::values`] of codes.
///
/// # Safety
/// As [`pack::values`]; rows of `dst` follow one another without a gap.
#[inline(always)]
pub(crate) unsafe fn values(src: CodeRows<'_>, first: usize, keys: Range<usize>, dst: MatMut) {
    let (dim, stride) = (src.dim(), dst.ld());
    // SAFETY: the caller's contract.
    let decoded = unsafe { std::slice::from_raw_parts_mut(dst.at(0, 0), keys.len() * stride) };
    src.decode(first + keys.start..first + keys.end, decoded, stride);
    if stride > dim {
        decoded.chunks_exact_mut(stride).for_each(|row| row[dim..].fill(0.0));
    }
}
