//! Blocks of rows of a tensor: from memory through registers to threadgroup memory, by all threads of a threadgroup.
//!
//! Rows lie [`ROW_PADDING`] elements farther apart than they are long, as blocks of the forward kernels do. Columns beyond the row are
//! zeros.

use crate::kernels::prefill::block::ROW_PADDING;
use crate::kernels::prefill::pass::first_column;
use crate::kernels::query::RowTile;
use crate::kernels::tile::element_of;
use flashtile_kernel::ScalarType;
use flashtile_kernel::prelude::*;

/// Elements of 16 bytes.
pub const fn chunk_elements(element: ScalarType) -> usize {
    16 / element.bytes()
}

/// How often a thread of `simd_groups` SIMD groups loads 16 bytes for a block of `16 * tiles` rows of `dim` elements.
pub const fn chunk_loads(element: ScalarType, dim: usize, tiles: usize, simd_groups: usize) -> usize {
    (16 * tiles * dim.div_ceil(chunk_elements(element))).div_ceil(32 * simd_groups)
}

/// Elements of a block of `16 * tiles` rows of `columns` columns in threadgroup memory.
pub const fn block_len(columns: usize, tiles: usize) -> usize {
    16 * tiles * (columns + ROW_PADDING)
}

/// Rows of one head of a tensor.
#[device]
pub struct HeadRows {
    /// First element of row 0.
    pub start: u64,
    /// Elements from row to row.
    pub stride: u64,
    /// The last row that is read, in place of rows behind it.
    pub last: u32,
}

/// The memory of the rows of a head.
#[device]
pub struct RowSource<'a, T: Element> {
    /// Elements of the tensor.
    pub memory: &'a Buffer<T>,
    /// The rows.
    pub rows: HeadRows,
    /// True if rows are multiples of 16 bytes at multiples of 16 bytes. Otherwise [`store_rows`] alone copies them.
    pub in_chunks: bool,
}

/// The rows of a head, of a tensor with these strides over batch entry, head and row, from row `first` on. There is at least one.
#[device]
pub fn head_rows(batch: u32, head: u32, first: u32, count: u32, strides: [u64; 3]) -> HeadRows {
    let rows = HeadRows {
        start: batch as u64 * strides[0] + head as u64 * strides[1] + first as u64 * strides[2],
        stride: strides[2],
        last: count.max(1) - 1,
    };
    rows
}

/// The keys, or the values, of a tile's head, or their gradients.
#[device]
pub fn head_of_keys(tile: RowTile, strides: [u64; 3]) -> HeadRows {
    let sequence = tile.sequence;
    head_rows(sequence.batch, tile.kv_head, sequence.kv_start, sequence.kv_len as u32, strides)
}

/// A thread's chunks of a block, on their way from memory.
#[device]
pub struct Chunks<const LOADS: usize> {
    /// Words of every chunk.
    pub words: [[u32; 4]; LOADS],
}

/// Chunks of the `16 TILES` rows from row `first` on: `t`, `t + 32 SIMD_GROUPS`, .., where `t` is the thread. None are read unless
/// `reads`.
#[device]
#[inline(always)]
pub fn fetch_rows<
    T: Element,
    const DIM: usize,
    const CHUNK: usize,
    const LOADS: usize,
    const TILES: usize,
    const SIMD_GROUPS: usize,
>(
    source: RowSource<T>,
    first: u32,
    reads: bool,
) -> Chunks<LOADS> {
    let mut block = Chunks::<LOADS> { words: [[0u32; 4]; LOADS] };
    if source.in_chunks && reads {
        let chunks = (DIM / CHUNK) as u32;
        for i in 0..LOADS {
            let thread = thread_index() + (32 * SIMD_GROUPS * i) as u32;
            if thread < 16 * TILES as u32 * chunks {
                let row = (first + thread / chunks).min(source.rows.last) as u64;
                let at =
                    source.rows.start + row * source.rows.stride + (thread % chunks * CHUNK as u32) as u64;
                block.words[i] = source.memory.load_as::<u32, 4>(at);
            }
        }
    }
    block
}

/// Stores the block of the `16 TILES` rows from row `first` on, whose chunks were fetched.
#[device]
#[inline(always)]
pub fn store_rows<
    T: Element,
    const DIM: usize,
    const COLUMNS: usize,
    const CHUNK: usize,
    const LOADS: usize,
    const TILES: usize,
    const SIMD_GROUPS: usize,
>(
    block: &mut Shared<T>,
    from: Chunks<LOADS>,
    source: RowSource<T>,
    first: u32,
) {
    let line = (COLUMNS + ROW_PADDING) as u32;
    if source.in_chunks {
        let chunks = (DIM / CHUNK) as u32;
        for i in 0..LOADS {
            let thread = thread_index() + (32 * SIMD_GROUPS * i) as u32;
            if thread < 16 * TILES as u32 * chunks {
                let at = thread / chunks * line + thread % chunks * CHUNK as u32;
                block.store_as::<u32, 4>(at, from.words[i]);
            }
        }
    } else {
        for at in (thread_index()..(16 * TILES * DIM) as u32).step_by(32 * SIMD_GROUPS) {
            let row = (first + at / DIM as u32).min(source.rows.last) as u64;
            let element = source.rows.start + row * source.rows.stride + (at % DIM as u32) as u64;
            block[at / DIM as u32 * line + at % DIM as u32] = source.memory[element];
        }
    }
}

/// Copies the `16 TILES` rows from row `first` on, with zeros beyond their columns. None are read unless `reads`.
#[device]
#[inline(always)]
pub fn copy_rows<
    T: Element,
    const DIM: usize,
    const COLUMNS: usize,
    const CHUNK: usize,
    const LOADS: usize,
    const TILES: usize,
    const SIMD_GROUPS: usize,
>(
    block: &mut Shared<T>,
    source: RowSource<T>,
    first: u32,
    reads: bool,
) {
    if reads {
        let from = fetch_rows::<T, DIM, CHUNK, LOADS, TILES, SIMD_GROUPS>(source, first, true);
        store_rows::<T, DIM, COLUMNS, CHUNK, LOADS, TILES, SIMD_GROUPS>(block, from, source, first);
    }
    clear_padding::<T, DIM, COLUMNS, TILES, SIMD_GROUPS>(block);
}

/// Fills the columns beyond the `DIM` elements of a row with zeros.
#[device]
pub fn clear_padding<
    T: Element,
    const DIM: usize,
    const COLUMNS: usize,
    const TILES: usize,
    const SIMD_GROUPS: usize,
>(
    block: &mut Shared<T>,
) {
    if COLUMNS > DIM {
        let count = (COLUMNS - DIM) as u32;
        for at in (thread_index()..16 * TILES as u32 * count).step_by(32 * SIMD_GROUPS) {
            block[at / count * (COLUMNS + ROW_PADDING) as u32 + DIM as u32 + at % count] = T::from_f32(0.0);
        }
    }
}

/// Writes row `h` of a lane's part of a tile of gradients, times `factor`, from element `start` on.
#[device]
#[inline(always)]
pub fn store_row<
    T: Element,
    const DIM: usize,
    const COLUMNS: usize,
    const PAIRS: usize,
    const TEAM_SIMDS: usize,
>(
    sums: [[[f32; 2]; 2]; PAIRS],
    h: usize,
    factor: f32,
    start: u64,
    gradients: &mut Buffer<T>,
) {
    let first = first_column::<COLUMNS, TEAM_SIMDS>() + 2 * matrix_pair();
    for i in 0..PAIRS {
        for n in 0..2usize {
            let c = first + (8 * i + n) as u32;
            if COLUMNS == DIM || c < DIM as u32 {
                gradients[start + c as u64] = element_of::<T>(sums[i][h][n] * factor);
            }
        }
    }
}
