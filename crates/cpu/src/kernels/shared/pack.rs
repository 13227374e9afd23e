//! Copies of operands, converted to f32, in the order in which the micro-kernel reads.

#![allow(unsafe_code)]

use super::mat::MatMut;
use super::operands::Run;
use crate::simd::{Elem, LINES, LaneFormat, Simd, load_head, with_elem};
use flashtile_core::block_tables::BlockTables;
use flashtile_core::block_tables::NO_PAGE;
use flashtile_core::dtype::Dtype;
use flashtile_core::limits::MAX_HEAD_DIM;
use flashtile_core::tensor::TensorView;
use std::ops::Range;

/// The block table of a sequence, and the sizes of its pages.
#[derive(Clone, Copy)]
struct Pages<'a> {
    /// Page of each block of rows; block `b` is at `b % width`.
    table: &'a [u32],
    width: u32,
    /// Number of rows in a page. Divisions are of u32, which are cheaper; a page of more rows than a u32 counts has
    /// every row in its first block.
    page_size: u32,
    /// Logarithm of `page_size`, if it is a power of two: a division would take longer than the products of a short row.
    shift: Option<u32>,
    /// Bytes from a page to the next.
    stride: usize,
}

/// Rows of one head of a sequence: consecutive rows of a tensor, or rows in pages of a pool.
#[derive(Clone, Copy)]
pub(crate) struct HeadRows<'a> {
    pub(crate) tensor: &'a TensorView<'a>,
    /// The first row of the sequence, or of page 0.
    origin: *const u8,
    pages: Option<Pages<'a>>,
}

/// Number of bytes that a stream prefetches ahead: more than arrive during the latency of memory.
const PREFETCH_BYTES: usize = 16384;
/// Pages of fewer rows are packed rather than streamed: a separate product for each page costs more than the copy.
const MIN_RUN: usize = 8;

impl<'a> HeadRows<'a> {
    /// Rows of a head from row `start` of a batch entry on.
    pub(crate) fn of_tensor(tensor: &'a TensorView<'a>, batch: usize, head: usize, start: usize) -> Self {
        Self { tensor, origin: tensor.row(batch, head, start), pages: None }
    }

    /// Rows of a head in the pages that the sequence has in valid tables.
    pub(crate) fn of_pages(
        tensor: &'a TensorView<'a>,
        head: usize,
        tables: &'a BlockTables,
        sequence: usize,
    ) -> Self {
        let table = &tables.table[sequence * tables.width..][..tables.width];
        let stride = tensor.strides()[0].wrapping_mul(tensor.dtype().bytes());
        let page_size = u32::try_from(tables.page_size).unwrap_or(u32::MAX);
        let width = u32::try_from(table.len()).unwrap_or(u32::MAX);
        let shift = page_size.is_power_of_two().then(|| page_size.trailing_zeros());
        let pages = Some(Pages { table, width, page_size, shift, stride });
        Self { tensor, origin: tensor.row(0, head, 0), pages }
    }

    /// Address of row `j`, and the number of rows from it on that are a step apart. The row may be past the end; it is not read then.
    #[inline(always)]
    fn find(&self, j: usize) -> (*const u8, usize) {
        let Some(p) = self.pages else {
            return (self.origin.wrapping_add(j.wrapping_mul(self.row_stride())), usize::MAX);
        };
        let j = j as u32;
        let (block, row) = match p.shift {
            Some(shift) => (j >> shift, (j & (p.page_size - 1)) as usize),
            None => (j / p.page_size, (j % p.page_size) as usize),
        };
        let block = if block < p.width { block } else { block % p.width };
        // A row that is prefetched past the end may have no page. Page 0 replaces it, because the prefetch of a mapped address
        // costs no failed translation.
        let page = match p.table[block as usize] {
            NO_PAGE => 0,
            page => page as usize,
        };
        let offset = page.wrapping_mul(p.stride).wrapping_add(row.wrapping_mul(self.row_stride()));
        (self.origin.wrapping_add(offset), p.page_size as usize - row)
    }

    /// The rows from `j` on that are a step apart, as long as the rows that are prefetched meanwhile, at least `distance` rows further
    /// on, are a step apart too.
    #[inline(always)]
    pub(crate) fn span(&self, j: usize, distance: usize) -> Run {
        let (start, rows) = self.find(j);
        let distance = self.distance().max(distance);
        if self.pages.is_none() {
            return Run { start, rows, ahead: self.row_stride().wrapping_mul(distance) };
        }
        // If pages hold whole vectors of rows, both runs end together.
        let (next, next_rows) = self.find(j + distance.next_multiple_of(16));
        let ahead = (next as usize).wrapping_sub(start as usize);
        Run { start, rows: rows.min(next_rows), ahead }
    }

    /// The runs of the `len` rows from `j` on, as many runs as `memory` has room for.
    #[inline(always)]
    pub(crate) fn runs<'m>(&self, j: usize, len: usize, memory: &'m mut [Run]) -> &'m [Run] {
        let (mut found, mut at) = (0, 0);
        while at < len && found < memory.len() {
            let run = self.span(j + at, 1);
            let rows = run.rows.min(len - at);
            memory[found] = Run { rows, ..run };
            found += 1;
            at += rows;
        }
        &memory[..found]
    }

    /// Prefetches rows, some of which need not exist.
    ///
    /// # Safety
    /// The contract of [`Simd`] holds.
    #[inline(always)]
    pub(crate) unsafe fn request<S: Simd>(&self, rows: Range<usize>) {
        let mut walk = self.walk(rows.start);
        for _ in rows {
            let row = walk.next();
            for offset in (0..self.row_bytes()).step_by(64) {
                // SAFETY: a prefetch may name any address.
                unsafe { S::prefetch(row.wrapping_add(offset)) }
            }
        }
    }

    /// Number of rows from the row that is read to the row that is prefetched meanwhile.
    #[inline(always)]
    pub(crate) fn distance(&self) -> usize {
        PREFETCH_BYTES.div_ceil(self.row_bytes())
    }

    /// Rows from `j` on, one at a time.
    #[inline(always)]
    fn walk(&self, j: usize) -> Walk<'a> {
        let (next, left) = self.find(j);
        Walk { rows: *self, j, next, left }
    }

    /// Rows from `j` on, one at a time, each prefetched [`HeadRows::distance`] rows earlier.
    #[inline(always)]
    pub(crate) fn prefetching_walk(&self, j: usize) -> PrefetchingWalk<'a> {
        PrefetchingWalk {
            walk: self.walk(j),
            ahead: self.walk(j + self.distance()),
            row_bytes: self.row_bytes(),
        }
    }

    /// Returns true if rows come in runs so short that they are packed before a product.
    #[inline(always)]
    pub(crate) fn scattered(&self) -> bool {
        self.pages.is_some_and(|p| (p.page_size as usize) < MIN_RUN)
    }

    /// Bytes from a row to the next; any number if there is a single row.
    #[inline(always)]
    pub(crate) fn row_stride(&self) -> usize {
        self.tensor.strides()[2].wrapping_mul(self.tensor.dtype().bytes())
    }

    /// Number of bytes in a row.
    #[inline(always)]
    pub(crate) fn row_bytes(&self) -> usize {
        self.tensor.shape()[3] * self.tensor.dtype().bytes()
    }
}

/// Addresses of one row after another.
struct Walk<'a> {
    rows: HeadRows<'a>,
    /// The next row, its address, and the number of rows from it on that are a step apart.
    j: usize,
    next: *const u8,
    left: usize,
}

impl Walk<'_> {
    #[inline(always)]
    fn next(&mut self) -> *const u8 {
        let row = self.next;
        self.j += 1;
        self.left -= 1;
        if self.left == 0 {
            (self.next, self.left) = self.rows.find(self.j);
        } else {
            self.next = row.wrapping_add(self.rows.row_stride());
        }
        row
    }
}

/// Addresses of one row after another, and prefetches of rows further on.
pub(crate) struct PrefetchingWalk<'a> {
    walk: Walk<'a>,
    ahead: Walk<'a>,
    row_bytes: usize,
}

impl PrefetchingWalk<'_> {
    /// Prefetches the row further on, and returns the next row.
    ///
    /// # Safety
    /// The contract of [`Simd`] holds.
    #[inline(always)]
    pub(crate) unsafe fn next<S: Simd>(&mut self) -> *const u8 {
        let further = self.ahead.next();
        for offset in (0..self.row_bytes).step_by(64) {
            // SAFETY: a prefetch may name any address.
            unsafe { S::prefetch(further.wrapping_add(offset)) }
        }
        self.walk.next()
    }
}

/// Stands in for keys past the end: zero in every dtype.
#[repr(align(64))]
struct ZeroRow([u8; 4 * MAX_HEAD_DIM]);
static ZERO_ROW: ZeroRow = ZeroRow([0; 4 * MAX_HEAD_DIM]);

/// Keys of one vector of lanes, and the distance of prefetches.
#[derive(Clone, Copy)]
pub(crate) struct KeyVector {
    /// The rows; zeros for a key that is not wanted.
    rows: [*const u8; 16],
    /// Bytes from a row to the one that is prefetched while it is read.
    ahead: usize,
    row_bytes: usize,
}

impl KeyVector {
    /// The rows; zeros for a key that is not wanted.
    #[inline(always)]
    pub(crate) const fn rows(&self) -> &[*const u8; 16] {
        &self.rows
    }

    /// The keys from `first + column` on whose columns are in `columns`. These keys exist.
    ///
    /// # Safety
    /// The contract of [`Simd`] holds.
    #[inline(always)]
    pub(crate) unsafe fn new<S: Simd>(
        src: HeadRows<'_>,
        first: usize,
        column: usize,
        columns: &Range<usize>,
    ) -> Self {
        let (run, row_bytes) = (src.span(first + column, S::LANES), src.row_bytes());
        let mut rows = [ZERO_ROW.0.as_ptr(); 16];
        if columns.start <= column && column + S::LANES <= columns.end && run.rows >= S::LANES {
            let stride = src.row_stride();
            for r in 0..S::LANES {
                rows[r] = run.start.wrapping_add(r.wrapping_mul(stride));
            }
            return Self { rows, ahead: run.ahead, row_bytes };
        }
        let mut walk = src.walk(first + column);
        for r in 0..S::LANES {
            let row = walk.next();
            if columns.contains(&(column + r)) {
                rows[r] = row;
            }
        }
        if run.rows >= S::LANES {
            return Self { rows, ahead: run.ahead, row_bytes };
        }
        // Later rows are at no constant distance, so they are all prefetched here.
        let next = first + column + src.distance().max(S::LANES);
        // SAFETY: the caller's contract.
        unsafe { src.request::<S>(next..next + S::LANES) }
        Self { rows, ahead: 0, row_bytes }
    }

    /// The next [`LINES`] lines, from byte `at` of the rows on, all inside the rows.
    ///
    /// # Safety
    /// The contract of [`Simd`] holds; the rows exist.
    #[inline(always)]
    pub(crate) unsafe fn lines<S: Simd, R: LaneFormat>(&self, at: usize) -> [S::V; LINES] {
        let mut from = [std::ptr::null(); 16];
        // SAFETY: the caller's contract; a prefetch may name any address.
        unsafe {
            if at.is_multiple_of(64) {
                for r in 0..S::LANES {
                    S::prefetch(self.rows[r].wrapping_add(at + self.ahead));
                }
            }
            // This is a loop because array methods that take closures are functions without the instruction set.
            for r in 0..S::LANES {
                from[r] = self.rows[r].add(at).cast();
            }
            S::transpose::<R::Lane>(from)
        }
    }

    /// The lines from byte `at` to the end of the rows, fewer than [`LINES`]; the others are zero.
    ///
    /// # Safety
    /// The contract of [`Simd`] holds; the rows exist.
    #[inline(always)]
    pub(crate) unsafe fn last_lines<S: Simd, R: LaneFormat>(&self, at: usize) -> [S::V; LINES] {
        // The alignment is that of the largest element type.
        let mut tail = [[0u32; LINES]; 16];
        let mut from = [std::ptr::null(); 16];
        // SAFETY: a row has `row_bytes` bytes, the zero row at least as many.
        unsafe {
            for r in 0..S::LANES {
                let rest = self.rows[r].add(at);
                std::ptr::copy_nonoverlapping(rest, tail[r].as_mut_ptr().cast(), self.row_bytes - at);
                from[r] = tail[r].as_ptr().cast();
            }
            S::transpose::<R::Lane>(from)
        }
    }
}

/// Rows that stand in for keys that are not wanted.
#[inline(always)]
pub(crate) const fn zero_rows() -> [*const u8; 16] {
    [ZERO_ROW.0.as_ptr(); 16]
}

/// Packs one vector of lanes of a panel from rows of f32.
///
/// # Safety
/// As [`key_panel`]; the rows have `row_bytes` bytes.
#[inline(always)]
pub(crate) unsafe fn panel_of_rows<S: Simd>(rows: [*const u8; 16], row_bytes: usize, dst: *mut f32) {
    let keys = KeyVector { rows, ahead: 0, row_bytes };
    // SAFETY: the caller's contract.
    unsafe { panel_vector::<S, crate::simd::Single<f32>>(&keys, 1, dst) }
}

/// Packs one panel of keys, `[depth][panel width]`, whose columns are keys counted from `first`. The depth is `R`'s steps in a row,
/// filled with zeros to a multiple of `depth_step`. Columns of the panel outside `columns` become zero; only keys `first + columns` are
/// read.
///
/// # Safety
/// The contract of [`Simd`] holds; the keys exist, `dst` is valid for a panel.
#[inline(always)]
pub(crate) unsafe fn key_panel<S: Simd, R: LaneFormat>(
    src: HeadRows<'_>,
    first: usize,
    panel: usize,
    columns: &Range<usize>,
    depth_step: usize,
    dst: *mut f32,
) {
    let width = S::VECTORS * S::LANES;
    for vector in 0..S::VECTORS {
        let column = panel * width + vector * S::LANES;
        // SAFETY: the caller's contract.
        unsafe {
            let keys = KeyVector::new::<S>(src, first, column, columns);
            panel_vector::<S, R>(&keys, depth_step, dst.add(vector * S::LANES));
        }
    }
}

/// Packs one vector of lanes of a panel.
///
/// # Safety
/// As [`key_panel`].
#[inline(always)]
unsafe fn panel_vector<S: Simd, R: LaneFormat>(keys: &KeyVector, depth_step: usize, dst: *mut f32) {
    let width = S::VECTORS * S::LANES;
    let (block, steps) = (LINES * size_of::<R::Lane>(), LINES * R::STEPS);
    let whole = keys.row_bytes / block;
    // SAFETY: the caller's contract; the panel has a line of `width` elements for every step.
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
        let depth = steps_in::<R>(keys.row_bytes);
        for n in depth..depth.next_multiple_of(depth_step) {
            S::store(dst.add(n * width), S::splat(0.0));
        }
    }
}

/// Steps of a product's depth in a row of `row_bytes` bytes.
#[inline(always)]
pub(crate) fn steps_in<R: LaneFormat>(row_bytes: usize) -> usize {
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

/// Converts values `first + keys` to rows of f32, with zeros in the lanes past value_dim.
///
/// # Safety
/// The contract of [`Simd`] holds; the values exist, `dst` has the rows, of value_dim in whole vectors.
#[inline(always)]
pub(crate) unsafe fn values<S: Simd, E: Elem>(
    src: HeadRows<'_>,
    first: usize,
    keys: Range<usize>,
    dst: MatMut,
) {
    let value_dim = src.tensor.shape()[3];
    let mut next = src.prefetching_walk(first + keys.start);
    for n in 0..keys.len() {
        // SAFETY: the caller's contract.
        unsafe { row::<S, E>(next.next::<S>().cast(), value_dim, 1.0, dst.at(n, 0), true) }
    }
}

/// Converts one query row to f32 times `scale`.
///
/// # Safety
/// The contract of [`Simd`] holds; `src` and `dst` hold `len` elements.
#[inline(always)]
pub(crate) unsafe fn query<S: Simd>(dtype: Dtype, src: *const u8, len: usize, scale: f32, dst: *mut f32) {
    // SAFETY: the caller's contract.
    with_elem!(dtype, E => unsafe { row::<S, E>(src.cast(), len, scale, dst, false) });
}
