//! Mask tiles of a materialised mask: blocks that change no score, and blocks that hide every key.

use super::score::bias_at;
use flashtile_core::tensor::reach;
use flashtile_kernel::prelude::*;

/// A mask and its blocks. Strides in elements.
#[params]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mask {
    /// From sequence to sequence, head to head, query to query.
    pub strides: [u64; 3],
    /// From key to key.
    pub step: u32,
    /// 0 f32, 1 f16, 2 bf16, 3 bool.
    pub kind: u32,
    /// Heads that it tells apart.
    pub heads: u32,
    /// Query rows.
    pub queries: u32,
    /// Keys.
    pub keys: u32,
    /// Query rows of a mask tile.
    pub rows: u32,
    /// Keys of a mask tile.
    pub columns: u32,
    /// Padding: 0.
    pub unused: u32,
}

impl Mask {
    /// Bytes up to the end of the last element of `planes` planes; `None` where they overflow.
    fn reach(&self, planes: u32) -> Option<usize> {
        let shape = [planes / self.heads, self.heads, self.queries, self.keys].map(|n| n as usize);
        let [sequence, head, query] =
            self.strides.map(|stride| usize::try_from(stride).unwrap_or(usize::MAX));
        let elements = reach(shape, [sequence, head, query, self.step as usize]).ok()?;
        elements.checked_mul([4, 2, 2, 1][self.kind as usize])
    }
}

/// One byte for each block of a mask: 0 where it hides all of the block's keys from all of its queries, 2 where it adds
/// nothing to any score, 1 otherwise. Threadgroups are (blocks of keys, blocks of queries, sequences times heads);
/// `mask_tiles` is `[z, y, x]` of them.
#[kernel(
    threads = 128,
    requires(params.rows > 0 && params.columns > 0 && params.heads > 0, "blocks have rows and columns, a mask a head"),
    requires(params.kind < 4, "an element that masks have"),
    requires(params.reach(groups[2]).is_some_and(|needed| mask.len() >= needed), "mask reaches to its last element"),
    requires(groups[0] == params.keys.div_ceil(params.columns), "a group for each block of keys"),
    requires(groups[1] == params.queries.div_ceil(params.rows), "a group for each block of queries"),
    requires(groups[2].is_multiple_of(params.heads), "all heads of every sequence"),
    requires(mask_tiles.len() >= groups.iter().map(|n| *n as usize).product::<usize>(), "a byte for each group"),
    bench(
        shape(queries = [2048, 8192], keys = [2048, 8192]),
        bytes = queries * keys,
        flops = 0,
        tolerance = 0.0,
    ),
)]
pub fn mask_tiles(mask: &Buffer<u8>, params: &Mask, mask_tiles: &mut Buffer<u8>) {
    let mut found: Shared<u32> = shared(4);
    let plane = group_z();
    let first = plane as u64 / params.heads as u64 * params.strides[0]
        + plane as u64 % params.heads as u64 * params.strides[1];
    let row = group_y() * params.rows;
    let column = group_x() * params.columns;
    let rows = (params.queries - row).min(params.rows);
    let columns = (params.keys - column).min(params.columns);
    // Bit 0: something is open, 1: something is hidden, 2: something is neither.
    let mut kinds = 0u32;
    for n in (thread_index()..rows * columns).step_by(128) {
        let at = first
            + (row + n / columns) as u64 * params.strides[2]
            + (column + n % columns) as u64 * params.step as u64;
        let bias = bias_at(mask, params.kind, at);
        kinds |= select(bias == 0.0, 1, select(bias == f32::NEG_INFINITY, 2u32, 4u32));
    }
    let mut all = simd_shuffle_xor(kinds, 16) | kinds;
    all |= simd_shuffle_xor(all, 8);
    all |= simd_shuffle_xor(all, 4);
    all |= simd_shuffle_xor(all, 2);
    all |= simd_shuffle_xor(all, 1);
    if simd_lane() == 0 {
        found[simd_index()] = all;
    }
    barrier();
    if thread_index() == 0 {
        let kinds = found[0] | found[1] | found[2] | found[3];
        let mut tile = 1u32;
        if kinds == 1 {
            tile = 2;
        }
        if kinds == 2 {
            tile = 0;
        }
        mask_tiles[(plane * groups_y() + group_y()) * groups_x() + group_x()] = tile as u8;
    }
}
