//! Products with codes in place: their operations, and how they find the codes of a block.

#![allow(unsafe_code)]

use crate::kernels::forward::state::TaskState;
use crate::kernels::shared::codes::CodeRows;
use crate::kernels::shared::score_task::Tile;
use crate::simd::Simd;
use flashtile_core::codec::{Coder, RowLayout};

/// Products of a task with codes in place, on vectors of `S`. A tile has at most [`STREAM_ROWS`](crate::plan::STREAM_ROWS) rows.
///
/// # Safety
/// Contract of every unsafe method:
///
/// - The machine has the instructions of `S` and of the products.
/// - The task's queries are packed in f32. For [`CodeProducts::scores`], [`CodeProducts::set_queries`] was called after that; for
///   [`CodeProducts::values`], the probabilities of the tile are computed.
/// - The keys and values of the tile's columns exist.
pub(crate) trait CodeProducts<S: Simd> {
    /// True if a task may have any number of rows; otherwise its sequence has at most as many as a tile.
    const TAKES_ANY_ROWS: bool;

    /// Returns true if rows of `dim` codes can be multiplied.
    fn takes(coder: &Coder, dim: usize) -> bool;

    /// Prepares the task's packed queries.
    unsafe fn set_queries(work: &TaskState<'_>);

    /// Scores of a tile, in whole groups of keys that cover its columns.
    unsafe fn scores(work: &TaskState<'_>, tile: &Tile);

    /// `p . v` of a tile. The probabilities are unspecified afterwards.
    unsafe fn values(work: &TaskState<'_>, tile: &Tile);
}

/// Number of rows in a group, whose scales fill a register.
pub(crate) const GROUP: usize = 16;

/// Upper bound of the keys of a [`CodeBlock`].
pub(crate) const CODE_KEYS: usize = 256;

// The plan's scratch memory is for blocks of this many keys.
const _: () = assert!(CODE_KEYS == crate::plan::BLOCK_K);

/// Upper bound of the groups of a block.
const GROUPS: usize = CODE_KEYS / GROUP;

/// The addresses of [`GROUP`] rows of codes: the first row in each plane, and the first scale. Rows follow one another without a gap.
#[derive(Clone, Copy)]
pub(crate) struct CodeGroup {
    pub(crate) lower: *const u8,
    /// Any address if the format has one plane.
    pub(crate) upper: *const u8,
    pub(crate) scales: *const u8,
}

impl CodeGroup {
    const NONE: Self = Self { lower: std::ptr::null(), upper: std::ptr::null(), scales: std::ptr::null() };
}

/// Codes of some keys or values.
///
/// - Groups are whole: the codes in both planes and the scales of all [`GROUP`] rows can be read, even if the block ends earlier, because
///   a group lies in one page or is a copy in the task's memory ([`BlockGroups::new`]).
/// - Rows that no query sees, at either end, hold anything.
#[derive(Clone, Copy)]
pub(crate) struct CodeBlock<'a> {
    pub(crate) format: &'a RowLayout,
    /// The level of each code; `None` if a code is a byte that is its own level.
    pub(crate) levels: Option<&'a [i8; 64]>,
    /// True if codes are e4m3 (fp8).
    pub(crate) is_fp8: bool,
    pub(crate) groups: &'a [CodeGroup],
    /// Groups to prefetch, which are likely to be read next: as many as above. They need not exist.
    pub(crate) next: &'a [CodeGroup],
}

/// The groups of a block of keys or values, and of the block after it.
pub(super) struct BlockGroups {
    groups: [CodeGroup; GROUPS],
    next: [CodeGroup; GROUPS],
    /// Column of the first group.
    pub(super) start: usize,
    count: usize,
}

impl BlockGroups {
    /// The groups that cover the columns of a tile.
    ///
    /// # Safety
    /// `memory` has room for the codes of a block.
    #[inline(always)]
    pub(super) unsafe fn new(src: CodeRows<'_>, first: usize, tile: &Tile, memory: *mut u8) -> Self {
        let start = tile.columns.start / GROUP * GROUP;
        let count = (tile.columns.end - start).div_ceil(GROUP);
        let bytes = src.coder().format().row_bytes() * GROUP;
        let mut groups = [CodeGroup::NONE; GROUPS];
        // SAFETY: the caller's contract.
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

    pub(super) fn codes<'a>(&'a self, coder: &'a Coder) -> CodeBlock<'a> {
        CodeBlock {
            format: coder.format(),
            levels: coder.levels(),
            is_fp8: coder.is_fp8(),
            groups: &self.groups[..self.count],
            next: &self.next[..self.count],
        }
    }
}

impl CodeRows<'_> {
    /// Finds the groups of rows from `j` on. `elsewhere(n, j)` gives a group `n` whose rows, from `j` on, do not lie in one page.
    fn groups(
        &self,
        j: usize,
        groups: &mut [CodeGroup],
        mut elsewhere: impl FnMut(usize, usize) -> CodeGroup,
    ) {
        let format = self.coder().format();
        let [lower, upper] = [0, 1].map(|n| format.planes().get(n).map_or(0, |plane| plane.bytes));
        let starts = |page: *const u8, row: usize| CodeGroup {
            lower: page.wrapping_add(row * lower),
            upper: page.wrapping_add(self.page_rows * lower + row * upper),
            scales: page.wrapping_add(self.page_rows * (lower + upper) + row * 2),
        };
        let (mut block, mut row) = (j / self.page_rows, j % self.page_rows);
        let mut page = self.page(block).as_ptr();
        // Usually all are in one page, and a loop without branches finds them.
        if row + GROUP * groups.len() <= self.page_rows {
            for (n, group) in groups.iter_mut().enumerate() {
                *group = starts(page, row + GROUP * n);
            }
            return;
        }
        for (n, group) in groups.iter_mut().enumerate() {
            if row >= self.page_rows {
                block += row / self.page_rows;
                row %= self.page_rows;
                page = self.page(block).as_ptr();
            }
            *group = if row + GROUP <= self.page_rows {
                starts(page, row)
            } else {
                elsewhere(n, block * self.page_rows + row)
            };
            row += GROUP;
        }
    }

    /// Copies rows `j..j + GROUP` to `to`, plane after plane, as a group.
    ///
    /// # Safety
    /// `to` is valid for the bytes.
    unsafe fn copy_group(&self, j: usize, to: *mut u8) -> CodeGroup {
        let format = self.coder().format();
        let mut starts = [to.cast_const(); 3];
        for n in 0..GROUP {
            let (page, row) = (self.page((j + n) / self.page_rows), (j + n) % self.page_rows);
            let places = format.places(self.page_rows, row..row + 1).zip(format.places(GROUP, n..n + 1));
            for (index, (from, at)) in places.enumerate() {
                // The scales are last.
                let index = if index == format.planes().len() { 2 } else { index };
                // SAFETY: the caller's contract.
                unsafe {
                    std::ptr::copy_nonoverlapping(page[from.clone()].as_ptr(), to.add(at.start), from.len());
                }
                if n == 0 {
                    starts[index] = to.wrapping_add(at.start).cast_const();
                }
            }
        }
        let [lower, upper, scales] = starts;
        CodeGroup { lower, upper, scales }
    }
}
