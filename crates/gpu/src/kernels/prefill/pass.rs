//! Which keys a threadgroup attends to, block by block, and which SIMD group has which rows and columns.

use crate::kernels::attend::Attend;
use crate::kernels::kv::{KvHead, kv_head};
use crate::kernels::query::{
    Features, KeyRange, RowBound, RowTile, first_own_key, row_bound, row_tile, unseeing_row, visible_keys,
};
use crate::kernels::rows::Levels;
use crate::kernels::tile::BiasMemory;
use flashtile_kernel::prelude::*;

/// The team of a SIMD group.
#[device]
pub fn team_index<const TEAM_SIMDS: usize>() -> u32 {
    simd_index() / TEAM_SIMDS as u32
}

/// The first of the columns that a SIMD group has of a block of `COLUMNS` columns.
#[device]
pub fn first_column<const COLUMNS: usize, const TEAM_SIMDS: usize>() -> u32 {
    (COLUMNS / TEAM_SIMDS) as u32 * part_index::<TEAM_SIMDS>()
}

/// The part of the columns that a SIMD group has.
#[device]
pub fn part_index<const TEAM_SIMDS: usize>() -> u32 {
    simd_index() % TEAM_SIMDS as u32
}

/// The tile of this threadgroup, of `size` rows. The tiles of the last rows come first: where keys are masked causally they
/// take the longest.
#[device]
pub fn tile_of_group(sequences: &Buffer<i32>, params: &Attend, size: u32) -> RowTile {
    let heads = groups_x() / params.tiles;
    let mut tile = row_tile(sequences, params, size);
    tile.kv_head = group_x() % heads;
    tile.first = (params.tiles - 1 - group_x() / heads) * size;
    tile
}

/// The keys that rows `first` to `end` of a tile see. Both bounds of the keys of a row grow with the row.
#[device]
pub fn keys_of_rows(tile: RowTile, first: u32, end: u32, params: &Attend, has: Features) -> KeyRange {
    let mut keys = KeyRange { low: 0, high: 0, full_low: i32::MAX, full_high: 0, tree: first_own_key(tile) };
    if first < end {
        let of_first = visible_keys(tile, first, params);
        let of_last = visible_keys(tile, end - 1, params);
        keys.low = of_first.begin;
        keys.high = of_last.end;
        keys.full_low = of_last.begin;
        keys.full_high = of_first.end;
    }
    if has.tree_mask {
        keys.full_high = keys.full_high.min(keys.tree);
    }
    keys
}

/// Row `16 m + 8 h + r` of a team with `16 ROW_TILES` rows.
#[device]
pub fn lane_row<const ROW_TILES: usize, const TEAM_SIMDS: usize>(tile: RowTile, m: usize, h: usize) -> u32 {
    tile.first + (16 * ROW_TILES) as u32 * team_index::<TEAM_SIMDS>() + (16 * m + 8 * h) as u32 + matrix_row()
}

/// Which keys a threadgroup attends to, and how.
#[device]
pub struct PrefillPass<const ROW_TILES: usize> {
    /// Keys of the head.
    pub k: KvHead,
    /// Values of the head.
    pub v: KvHead,
    /// Bounds of the lane's rows.
    pub rows: [[RowBound; 2]; ROW_TILES],
    /// Keys that the rows of the team see.
    pub own: KeyRange,
    /// Keys that the rows of the threadgroup see.
    pub all: KeyRange,
    /// First key of the first block of the split: a multiple of 16, so that no 16 keys straddle a page of 16.
    pub first: u32,
    /// First key behind the last visible one of the split.
    pub end: u32,
    /// Terms of the score that the problem has.
    pub has: Features,
}

/// Keys `first` to `end`.
#[device]
struct SplitKeys {
    /// The first key.
    first: u32,
    /// The first key behind the last.
    end: u32,
}

/// The keys of this threadgroup's split: blocks of `size` keys, divided as equally as possible.
#[device]
fn split_keys(keys: KeyRange, size: u32) -> SplitKeys {
    let first = keys.low as u32 / 16 * 16;
    let end = keys.high as u32;
    let blocks = end.saturating_sub(first).div_ceil(size).div_ceil(groups_y());
    let start = first + group_y() * blocks * size;
    let split = SplitKeys { first: start, end: end.min(start + blocks * size) };
    split
}

/// The pass of a threadgroup of `SIMD_GROUPS` SIMD groups, over blocks of `16 KEY_TILES` keys.
#[device]
pub fn prefill_pass<
    const K_FORMAT: u32,
    const V_FORMAT: u32,
    const HEAD_DIM: usize,
    const VALUE_DIM: usize,
    const ROW_TILES: usize,
    const KEY_TILES: usize,
    const SIMD_GROUPS: usize,
    const TEAM_SIMDS: usize,
    const TABLE_COPIES: usize,
>(
    tile: RowTile,
    slopes: &Buffer<f32>,
    params: &Attend,
    has: Features,
    paging: u32,
) -> PrefillPass<ROW_TILES> {
    let mut rows = [[unseeing_row(); 2]; ROW_TILES];
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            let row = lane_row::<ROW_TILES, TEAM_SIMDS>(tile, m, h);
            if row < tile.rows {
                rows[m][h] = row_bound(tile, row, slopes, params, has);
            }
        }
    }
    let first = tile.first + (16 * ROW_TILES) as u32 * team_index::<TEAM_SIMDS>();
    let own = keys_of_rows(tile, first, (first + (16 * ROW_TILES) as u32).min(tile.rows), params, has);
    let end = (tile.first + (16 * ROW_TILES * SIMD_GROUPS / TEAM_SIMDS) as u32).min(tile.rows);
    let all = keys_of_rows(tile, tile.first, end, params, has);
    let k_levels =
        Levels { magnitudes: params.k_levels, codebook: params.codebooks[0], copies: TABLE_COPIES as u32 };
    let v_levels =
        Levels { magnitudes: params.v_levels, codebook: params.codebooks[1], copies: TABLE_COPIES as u32 };
    let keys = split_keys(all, (16 * KEY_TILES) as u32);
    let pass = PrefillPass::<ROW_TILES> {
        k: kv_head::<K_FORMAT, HEAD_DIM>(tile, params, params.k, k_levels, all, paging),
        v: kv_head::<V_FORMAT, VALUE_DIM>(tile, params, params.v, v_levels, all, paging),
        rows,
        own,
        all,
        first: keys.first,
        end: keys.end,
        has,
    };
    pass
}

/// The block of a step of a pass.
#[device]
pub struct BlockStep {
    /// First key.
    pub first: u32,
    /// First key behind it.
    pub end: u32,
    /// First key of the block that follows: after the last one, of the first, as a second pass may follow.
    pub next: u32,
    /// True if some row of the team may not see some key.
    pub partial: bool,
    /// True if some row of the threadgroup may not see some key.
    pub any_partial: bool,
}

/// The block from key `first` on.
#[device]
pub fn step_of<const ROW_TILES: usize, const KEY_TILES: usize>(
    pass: PrefillPass<ROW_TILES>,
    first: u32,
) -> BlockStep {
    let low = first as i32;
    let high = low + 16 * KEY_TILES as i32;
    let end = first + (16 * KEY_TILES) as u32;
    let step = BlockStep {
        first,
        end,
        next: select(end < pass.end, end, pass.first),
        partial: pass.has.mask || low < pass.own.full_low || high > pass.own.full_high,
        any_partial: pass.has.mask || low < pass.all.full_low || high > pass.all.full_high,
    };
    step
}

/// A block whose products become probabilities.
#[device]
pub struct ScoredBlock<'a, const ROW_TILES: usize> {
    /// The pass.
    pub pass: PrefillPass<ROW_TILES>,
    /// The block.
    pub step: BlockStep,
    /// Masks and ALiBi slopes.
    pub memory: BiasMemory<'a>,
    /// True if keys are centered.
    pub centered: bool,
    /// First column of the SIMD group's part of the values.
    pub column: u32,
    /// True if a value of the block was flagged as not finite; known once the values have arrived.
    pub has_nonfinite: bool,
}
