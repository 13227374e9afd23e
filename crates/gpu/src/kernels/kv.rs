//! Keys and values of the head that a threadgroup attends to: which row holds a key, and a lane's words of 16 keys.
//!
//! A SIMD group computes 16 keys at a time. As left operands of the product with the queries, a lane holds words of key
//! rows `r` and `8 + r`, where `r` is its [`matrix_row`]; as operands of the product with the probabilities, words of
//! value rows `2 p`, `2 p + 1`, `2 p + 8` and `2 p + 9`, where `p` is its [`matrix_pair`].

use super::attend::Attend;
use super::formats::{is_codes, is_mlx};
use super::query::RowTile;
use super::rows::{Levels, Row, Scale, Source, fetch, no_scale, row_at, scale_of, source_at};
use flashtile_kernel::prelude::*;

/// The memory of keys and values.
#[device]
pub struct KvMemory<'a> {
    /// Rows of keys, in the bytes of their format.
    pub k: &'a Buffer<u8>,
    /// Rows of values.
    pub v: &'a Buffer<u8>,
    /// Pages of every sequence, a line each.
    pub table: &'a Buffer<u32>,
    /// Codebooks of mlx-native.
    pub codebooks: &'a Buffer<f32>,
    /// A power of two up to 16 that the addresses of all rows are multiples of, in bytes.
    pub row_align: u32,
}

/// Keys, or values, of one head of a sequence.
#[device]
pub struct KvHead {
    /// Where rows lie.
    pub source: Source,
    /// How codes become values.
    pub levels: Levels,
    /// Whether rows are found through the block table.
    pub paged: bool,
    /// Row of key 0, where rows lie in no pages.
    pub start: u32,
    /// First entry of the sequence in the block table.
    pub line: u32,
    /// Entries of the sequence in the block table.
    pub width: u32,
    /// Tokens a page.
    pub tokens: u32,
    /// The last key that is read.
    pub last: u32,
}

/// The keys, or the values, of a tile's head: `strides` are over batch entry or page, head and row, in bytes.
#[device]
pub fn kv_head<const FORMAT: u32, const D: usize>(
    tile: RowTile,
    params: &Attend,
    strides: [u64; 3],
    levels: Levels,
    last: u32,
    paged: bool,
) -> KvHead {
    // Through a block table, a page is found by its key.
    let mut entry = tile.sequence.page as u64;
    if paged {
        entry = 0;
    }
    let first = entry * strides[0] + tile.kv_head as u64 * strides[1];
    let head = KvHead {
        source: source_at::<FORMAT, D>(first, strides[0], strides[2], params.page),
        levels,
        paged,
        start: tile.sequence.kv_start,
        line: tile.index * params.width,
        width: params.width,
        tokens: params.page,
        last,
    };
    head
}

/// The row of a key.
#[device]
pub fn row_of_key<const FORMAT: u32, const D: usize>(table: &Buffer<u32>, head: KvHead, key: u32) -> Row {
    let mut page = 0u64;
    let mut row = head.start + key;
    if head.paged {
        let block = key / head.tokens;
        page = table[head.line + block % head.width] as u64;
        row = key - block * head.tokens;
    }
    row_at::<FORMAT, D>(head.source, page, row)
}

/// A lane's words of 16 keys.
#[device]
pub struct KeyWords<const W: usize> {
    /// Words of key rows `r` and `8 + r`.
    pub words: [[u32; W]; 2],
    /// Scales of these rows.
    pub scales: [Scale; 2],
}

/// A lane's words of 16 values.
#[device]
pub struct ValueWords<const W: usize> {
    /// Words of value rows `2 p`, `2 p + 1`, `2 p + 8` and `2 p + 9`.
    pub words: [[u32; W]; 4],
    /// Norms of the halves of these rows relative to their scales.
    pub halves: [[f32; 2]; 4],
}

/// No keys, before any are loaded.
#[device]
pub fn no_keys<const W: usize>() -> KeyWords<W> {
    let keys = KeyWords::<W> { words: [[0u32; W]; 2], scales: [no_scale(); 2] };
    keys
}

/// No values, before any are loaded.
#[device]
pub fn no_values<const W: usize>() -> ValueWords<W> {
    let values = ValueWords::<W> { words: [[0u32; W]; 4], halves: [[1.0; 2]; 4] };
    values
}

/// Loads 16 keys from key `first` on.
#[device]
#[inline(always)]
pub fn load_keys<const FORMAT: u32, const D: usize, const W: usize>(
    kv: KvMemory,
    head: KvHead,
    first: u32,
) -> KeyWords<W> {
    let mut keys = no_keys::<W>();
    for h in 0..2usize {
        let key = (first + 8 * h as u32 + matrix_row()).min(head.last);
        let row = row_of_key::<FORMAT, D>(kv.table, head, key);
        keys.words[h] =
            fetch::<FORMAT, D, 4, W>(kv.k, row, matrix_pair(), head.levels, kv.codebooks, kv.row_align);
        keys.scales[h] = scale_of::<FORMAT, D>(kv.k, row);
    }
    keys
}

/// Loads the scales of values `r` and `8 + r` of 16, the keys of a lane's scores: they join the row maximum.
#[device]
#[inline(always)]
pub fn load_value_scales<const FORMAT: u32, const D: usize>(
    kv: KvMemory,
    head: KvHead,
    first: u32,
) -> [f32; 2] {
    let mut scales = [1.0; 2];
    if is_codes(FORMAT) {
        for h in 0..2usize {
            let key = (first + 8 * h as u32 + matrix_row()).min(head.last);
            let row = row_of_key::<FORMAT, D>(kv.table, head, key);
            let scale = scale_of::<FORMAT, D>(kv.v, row);
            scales[h] = scale.whole;
        }
    }
    scales
}

/// Loads 16 values from key `first` on.
#[device]
#[inline(always)]
pub fn load_values<const FORMAT: u32, const D: usize, const W: usize>(
    kv: KvMemory,
    head: KvHead,
    first: u32,
) -> ValueWords<W> {
    let mut values = no_values::<W>();
    for n in 0..4usize {
        let of_tile = 8 * (n / 2) as u32 + 2 * matrix_pair() + (n % 2) as u32;
        let key = (first + of_tile).min(head.last);
        let row = row_of_key::<FORMAT, D>(kv.table, head, key);
        values.words[n] =
            fetch::<FORMAT, D, 8, W>(kv.v, row, matrix_row(), head.levels, kv.codebooks, kv.row_align);
        if is_mlx(FORMAT) {
            let scale = scale_of::<FORMAT, D>(kv.v, row);
            values.halves[n] = scale.halves;
        }
    }
    values
}

/// A lane's words of `16 U` keys and values: of the tile that is next.
#[device]
pub struct KvTile<const KW: usize, const VW: usize, const U: usize> {
    /// Keys.
    pub keys: [KeyWords<KW>; U],
    /// Scales of the values of the lane's scores.
    pub value_scales: [[f32; 2]; U],
    /// Values.
    pub values: [ValueWords<VW>; U],
}

/// The tile before any is loaded.
#[device]
pub fn no_tile<const KW: usize, const VW: usize, const U: usize>() -> KvTile<KW, VW, U> {
    let tile = KvTile::<KW, VW, U> {
        keys: [no_keys::<KW>(); U],
        value_scales: [[1.0; 2]; U],
        values: [no_values::<VW>(); U],
    };
    tile
}

/// Loads `16 U` keys and values from key `first` on.
#[device]
pub fn load_tile<
    const KF: u32,
    const VF: u32,
    const D: usize,
    const DV: usize,
    const KW: usize,
    const VW: usize,
    const U: usize,
>(
    kv: KvMemory,
    k_head: KvHead,
    v_head: KvHead,
    first: u32,
) -> KvTile<KW, VW, U> {
    let mut tile = no_tile::<KW, VW, U>();
    for u in 0..U {
        let key = first + 16 * u as u32;
        tile.keys[u] = load_keys::<KF, D, KW>(kv, k_head, key);
        tile.value_scales[u] = load_value_scales::<VF, DV>(kv, v_head, key);
        tile.values[u] = load_values::<VF, DV, VW>(kv, v_head, key);
    }
    tile
}
