//! Blocks of keys or values: from memory through registers to threadgroup memory, by all threads of a threadgroup.
//!
//! Elements of the type that is multiplied are copied, 16 bytes at a time. Other rows are decoded on the way: eight lanes share a row,
//! each with `WORDS` words of it, and store their pairs of coordinates in runs. [`column_coordinate`] says which coordinate of a row a
//! column of threadgroup memory holds: queries and outputs follow it.
//!
//! The scale of a row is not multiplied in. Scales of a block lie in threadgroup memory of their own, to join the scores and the
//! probabilities, which are f32.

use crate::kernels::formats::{ROT16, first_bytes, has_half_norms, is_codes, is_mlx, is_scaled, padded};
use crate::kernels::kv::{KvHead, key_group, row_of_key};
use crate::kernels::pairs::pairs;
use crate::kernels::rows::{Levels, coordinate, fetch, lane_words, larger, pair_words, word_align, words};
use crate::kernels::scale::{Scale, fetch_scale, scale_of};
use flashtile_kernel::ScalarType;
use flashtile_kernel::prelude::*;

/// Elements between two rows of a block in threadgroup memory.
#[constant]
pub const ROW_PADDING: usize = 8;

/// Columns of a row of `dim` coordinates that `team` SIMD groups divide: multiples of 16, with zeros beyond the row.
pub const fn block_columns(dim: usize, team: usize) -> usize {
    dim.div_ceil(16 * team) * 16 * team
}

/// Returns true if rows are copied to threadgroup memory unchanged. When eight lanes share a row, each lane holds `pair_words` words.
#[device]
#[inline]
pub const fn is_copied(format: u32, dim: u32, pair_words: u32) -> bool {
    (!is_codes(format) || format == ROT16) && dim % 16 == 0 && first_bytes(format, dim) == 32 * pair_words
}

const fn copies(product: ScalarType, format: u32, dim: usize) -> bool {
    is_copied(format, dim as u32, pair_words(product, dim, 8) as u32)
}

/// Words that a thread loads of a row at a time.
pub const fn row_words(product: ScalarType, format: u32, dim: usize) -> usize {
    if copies(product, format, dim) { 4 } else { lane_words(format, dim, 8) }
}

/// How often a thread of `simd_groups` SIMD groups loads [`row_words`] for a block of `16 * key_tiles` rows.
pub const fn row_turns(
    product: ScalarType,
    format: u32,
    dim: usize,
    key_tiles: usize,
    simd_groups: usize,
) -> usize {
    if copies(product, format, dim) {
        (key_tiles * first_bytes(format, dim as u32) as usize).div_ceil(32 * simd_groups)
    } else {
        (4 * key_tiles).div_ceil(simd_groups)
    }
}

/// The smallest alignment with which threads read rows as they do with `aligned`.
pub const fn block_align(product: ScalarType, format: u32, dim: usize, aligned: usize) -> u32 {
    if copies(product, format, dim) {
        aligned as u32
    } else {
        word_align(format, dim as u32, 8, aligned as u32)
    }
}

/// Blocks of keys that are multiplied: codebooks of mlx-native are f32, so a second block holds their
/// rounding residuals in f16.
pub const fn key_blocks(format: u32) -> usize {
    if is_mlx(format) { 2 } else { 1 }
}

/// Scales of a block of `16 * key_tiles` rows.
pub const fn block_scales(format: u32, dim: usize, key_tiles: usize) -> usize {
    if has_half_norms(format, dim as u32) {
        32 * key_tiles
    } else if is_scaled(format) {
        16 * key_tiles
    } else {
        0
    }
}

/// Rows that a team of `team_simds` SIMD groups prepares, or rotates back, at a time: one for each of them, or for every other where
/// threadgroup memory is scarce and there is one of the two `kv_buffers`.
pub const fn staged_rows(team_simds: usize, kv_buffers: usize) -> usize {
    if kv_buffers == 2 { team_simds } else { team_simds.div_ceil(2) }
}

/// f32 of threadgroup memory in which the SIMD groups of teams of `team_simds` exchange products of `16 * row_tiles` rows with
/// `16 * key_tiles` keys, and before and after prepare queries and rotate outputs back, `staged` rows of `row` numbers a team.
pub const fn scratch_len(
    row_tiles: usize,
    key_tiles: usize,
    simd_groups: usize,
    team_simds: usize,
    staged: usize,
    row: usize,
) -> usize {
    let exchanged = if team_simds > 1 { 256 * row_tiles * key_tiles } else { 0 };
    larger(simd_groups * exchanged, simd_groups / team_simds * staged * row)
}

/// Elements of the memory of values of `dim` coordinates in blocks of `16 * key_tiles` rows, where they have memory of their own:
/// `kv_buffers` is 2. Otherwise as few as an array may have.
pub const fn values_len(dim: usize, key_tiles: usize, team_simds: usize, kv_buffers: usize) -> usize {
    if kv_buffers == 2 {
        16 * key_tiles * (block_columns(dim, team_simds) + ROW_PADDING)
    } else {
        ROW_PADDING
    }
}

/// Words of a run: the neighbouring columns that a lane stores at a time.
#[device]
#[inline]
const fn run_words(pair_words: u32) -> u32 {
    if pair_words % 4 == 0 {
        return 4;
    }
    if pair_words % 2 == 0 {
        return 2;
    }
    1
}

/// Columns of a run.
#[device]
#[inline]
const fn run_columns(dim: u32, pair_words: u32) -> u32 {
    run_words(pair_words) * (padded(dim) / 8) / pair_words
}

/// The coordinate that a column holds; those beyond the row hold zeros.
#[device]
pub fn column_coordinate<const FORMAT: u32, const DIM: usize, const PAIR_WORDS: usize>(column: u32) -> u32 {
    let dim = DIM as u32;
    if is_copied(FORMAT, dim, PAIR_WORDS as u32) || column >= padded(dim) {
        return column;
    }
    let size = run_columns(dim, PAIR_WORDS as u32);
    let run = column / size;
    coordinate::<FORMAT, DIM, 8>(run % 8, run / 8 * size + column % size)
}

/// The memory of a block.
#[device]
pub struct BlockMemory<'a> {
    /// Rows, in the bytes of their format.
    pub rows: &'a Buffer<u8>,
    /// Pages of every sequence.
    pub table: &'a Buffer<u32>,
    /// Codebooks of mlx-native.
    pub codebooks: &'a Buffer<f32>,
    /// A power of two up to 16 that the addresses of all rows are multiples of, in bytes.
    pub row_align: u32,
}

/// How codes of a block become values.
#[device]
pub struct Codes<'a> {
    /// Levels.
    pub levels: Levels,
    /// Codebooks of mlx-native.
    pub codebooks: &'a Buffer<f32>,
}

/// A thread's words of a block, on their way from memory.
#[device]
pub struct BlockWords<const WORDS: usize, const LOADS: usize> {
    /// Words of `LOADS` chunks of 16 bytes, or of `LOADS` rows that eight lanes share.
    pub words: [[u32; WORDS]; LOADS],
}

/// No words.
#[device]
pub fn no_words<const WORDS: usize, const LOADS: usize>() -> BlockWords<WORDS, LOADS> {
    let none = BlockWords::<WORDS, LOADS> { words: [[0u32; WORDS]; LOADS] };
    none
}

/// A thread's words of the block of `16 KEY_TILES` rows from key `first` on: chunks `t`, `t + 32 SIMD_GROUPS`, .. of 16 bytes, or a part of rows `t / 8`,
/// `t / 8 + 4 SIMD_GROUPS`, ..
#[device]
#[inline(always)]
pub fn fetch_block<
    const FORMAT: u32,
    const DIM: usize,
    const WORDS: usize,
    const LOADS: usize,
    const PAIR_WORDS: usize,
    const KEY_TILES: usize,
    const SIMD_GROUPS: usize,
>(
    memory: BlockMemory,
    head: KvHead,
    first: u32,
) -> BlockWords<WORDS, LOADS> {
    let mut block = no_words::<WORDS, LOADS>();
    let chunks = first_bytes(FORMAT, DIM as u32) / 16;
    for i in 0..LOADS {
        let thread = thread_index() + (32 * SIMD_GROUPS * i) as u32;
        if is_copied(FORMAT, DIM as u32, PAIR_WORDS as u32) {
            if 2 * SIMD_GROUPS * LOADS == KEY_TILES * chunks as usize
                || thread < 16 * KEY_TILES as u32 * chunks
            {
                let offset = thread / chunks;
                let group = key_group(memory.table, head, first + offset / 16 * 16);
                let row = row_of_key::<FORMAT, DIM>(memory.table, head, group, offset % 16);
                let at = row.first + (16 * (thread % chunks)) as u64;
                let four = words::<4>(memory.rows, at, memory.row_align);
                for n in 0..4usize {
                    block.words[i][n] = four[n];
                }
            }
        } else if SIMD_GROUPS * LOADS == 4 * KEY_TILES || thread < (128 * KEY_TILES) as u32 {
            let offset = thread / 8;
            let group = key_group(memory.table, head, first + offset / 16 * 16);
            let row = row_of_key::<FORMAT, DIM>(memory.table, head, group, offset % 16);
            block.words[i] = fetch::<FORMAT, DIM, 8, WORDS>(
                memory.rows,
                row,
                thread % 8,
                head.levels,
                memory.codebooks,
                memory.row_align,
            );
        }
    }
    block
}

/// Stores a thread's words of a block in threadgroup memory, from element `start` on. `COLUMNS` columns a row.
#[device]
#[inline(always)]
pub fn store_block<
    T: Element,
    const FORMAT: u32,
    const DIM: usize,
    const COLUMNS: usize,
    const WORDS: usize,
    const LOADS: usize,
    const PAIR_WORDS: usize,
    const KEY_TILES: usize,
    const SIMD_GROUPS: usize,
>(
    block: &mut Shared<T>,
    start: u32,
    from: BlockWords<WORDS, LOADS>,
    codes: Codes,
    nibbles: &Shared<u8>,
) {
    let chunks = first_bytes(FORMAT, DIM as u32) / 16;
    for i in 0..LOADS {
        let thread = thread_index() + (32 * SIMD_GROUPS * i) as u32;
        if is_copied(FORMAT, DIM as u32, PAIR_WORDS as u32) {
            if 2 * SIMD_GROUPS * LOADS == KEY_TILES * chunks as usize
                || thread < 16 * KEY_TILES as u32 * chunks
            {
                let mut four = [0u32; 4];
                for n in 0..4usize {
                    four[n] = from.words[i][n];
                }
                let row = start + thread / chunks * (COLUMNS + ROW_PADDING) as u32;
                block.store_as::<u32, 4>(row + thread % chunks * (DIM as u32 / chunks), four);
            }
        } else if SIMD_GROUPS * LOADS == 4 * KEY_TILES || thread < (128 * KEY_TILES) as u32 {
            let row = start + thread / 8 * (COLUMNS + ROW_PADDING) as u32;
            let decoded = pairs::<FORMAT, DIM, 8, WORDS, PAIR_WORDS>(
                from.words[i],
                thread % 8,
                codes.levels,
                codes.codebooks,
                nibbles,
            );
            store_runs::<T, DIM, PAIR_WORDS>(block, row, decoded);
        }
    }
}

/// Stores a lane's pairs of a row that starts at element `row`: every eighth run.
#[device]
#[inline(always)]
fn store_runs<T: Element, const DIM: usize, const PAIR_WORDS: usize>(
    block: &mut Shared<T>,
    row: u32,
    from: [u32; PAIR_WORDS],
) {
    let size = run_columns(DIM as u32, PAIR_WORDS as u32);
    let first = row + thread_index() % 8 * size;
    if PAIR_WORDS % 4 == 0 {
        for i in 0..PAIR_WORDS / 4 {
            let four = [from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]];
            block.store_as::<u32, 4>(first + 8 * i as u32 * size, four);
        }
    } else if PAIR_WORDS % 2 == 0 {
        for i in 0..PAIR_WORDS / 2 {
            block.store_as::<u32, 2>(first + 8 * i as u32 * size, [from[2 * i], from[2 * i + 1]]);
        }
    } else {
        for i in 0..PAIR_WORDS {
            block.store_as::<u32, 1>(first + 8 * i as u32 * size, [from[i]]);
        }
    }
}

/// Fills the columns beyond a row's coordinates with zeros, in `BLOCKS` blocks of `16 KEY_TILES` rows.
#[device]
fn clear_columns<
    T: Element,
    const DIM: usize,
    const COLUMNS: usize,
    const BLOCKS: usize,
    const KEY_TILES: usize,
    const SIMD_GROUPS: usize,
>(
    block: &mut Shared<T>,
) {
    let first = padded(DIM as u32);
    let count = COLUMNS as u32 - first;
    if count > 0 {
        for at in (thread_index()..(16 * BLOCKS * KEY_TILES) as u32 * count).step_by(32 * SIMD_GROUPS) {
            block[at / count * (COLUMNS + ROW_PADDING) as u32 + first + at % count] = T::from_f32(0.0);
        }
    }
}

/// Fills the columns beyond the coordinates of keys and of values with zeros. Values without memory of their own have the keys' columns.
#[device]
pub fn clear_blocks<
    KOperand: Element,
    VOperand: Element,
    const HEAD_DIM: usize,
    const VALUE_DIM: usize,
    const K_COLUMNS: usize,
    const V_COLUMNS: usize,
    const K_BLOCKS: usize,
    const KEY_TILES: usize,
    const SIMD_GROUPS: usize,
    const KV_BUFFERS: usize,
>(
    keys: &mut Shared<KOperand>,
    values: &mut Shared<VOperand>,
) {
    clear_columns::<KOperand, HEAD_DIM, K_COLUMNS, K_BLOCKS, KEY_TILES, SIMD_GROUPS>(keys);
    if KV_BUFFERS == 2 {
        clear_columns::<VOperand, VALUE_DIM, V_COLUMNS, 1, KEY_TILES, SIMD_GROUPS>(values);
    }
}

/// Words of the scales of the `16 KEY_TILES` rows from key `first` on, a row a thread.
#[device]
#[inline(always)]
pub fn fetch_scales<const FORMAT: u32, const DIM: usize, const KEY_TILES: usize>(
    memory: BlockMemory,
    head: KvHead,
    first: u32,
) -> [u32; 2] {
    let mut scale = [0u32; 2];
    if is_scaled(FORMAT) && thread_index() < (16 * KEY_TILES) as u32 {
        let offset = thread_index();
        let group = key_group(memory.table, head, first + offset / 16 * 16);
        let row = row_of_key::<FORMAT, DIM>(memory.table, head, group, offset % 16);
        scale = fetch_scale::<FORMAT, DIM>(memory.rows, row);
    }
    scale
}

/// Stores the scales of a block from element `start` on; where each half of a row has a norm, first the norms of all first halves.
#[device]
fn store_scales<const FORMAT: u32, const DIM: usize, const KEY_TILES: usize>(
    scales: &mut Shared<f32>,
    start: u32,
    words: [u32; 2],
) {
    if is_scaled(FORMAT) && thread_index() < (16 * KEY_TILES) as u32 {
        let at = start + thread_index();
        let scale: Scale = scale_of::<FORMAT, DIM>(words);
        if has_half_norms(FORMAT, DIM as u32) {
            scales[at] = scale.whole * scale.halves[0];
            scales[at + (16 * KEY_TILES) as u32] = scale.whole * scale.halves[1];
        } else {
            scales[at] = scale.whole;
        }
    }
}

/// Stores the scales of a block's keys, of which there are `K_SCALES`, and behind them the scales of its values.
#[device]
pub fn store_both_scales<
    const K_FORMAT: u32,
    const HEAD_DIM: usize,
    const V_FORMAT: u32,
    const VALUE_DIM: usize,
    const KEY_TILES: usize,
    const K_SCALES: usize,
>(
    scales: &mut Shared<f32>,
    words: [[u32; 2]; 2],
) {
    store_scales::<K_FORMAT, HEAD_DIM, KEY_TILES>(scales, 0, words[0]);
    store_scales::<V_FORMAT, VALUE_DIM, KEY_TILES>(scales, K_SCALES as u32, words[1]);
}

/// The scales of rows `2 p` and `2 p + 1` from row `first` on of a block of `8 SCORE_TILES` rows, for columns from `column` on.
#[device]
#[inline(always)]
pub fn scale_pair<const FORMAT: u32, const DIM: usize, const SCORE_TILES: usize>(
    scales: &Shared<f32>,
    first: u32,
    column: u32,
) -> [f32; 2] {
    let mut at = first + 2 * matrix_pair();
    if has_half_norms(FORMAT, DIM as u32) && column >= 256 {
        at += (8 * SCORE_TILES) as u32;
    }
    scales.load::<2>(at)
}
