//! Keys and values of the head that a threadgroup attends to: which row holds a key, and a lane's words of 16 keys.
//!
//! A SIMD group computes 16 keys at a time. As left operands of the product with the queries, a lane holds words of key
//! rows `r` and `8 + r`, where `r` is its [`matrix_row`]; as operands of the product with the probabilities, words of
//! value rows `2 p`, `2 p + 1`, `2 p + 8` and `2 p + 9`, where `p` is its [`matrix_pair`].

use super::attend::Attend;
use super::formats::{has_half_norms, is_scaled};
use super::query::{KeyRange, RowTile};
use super::rows::{Levels, Row, Source, fetch, row_at, source_at};
use super::scale::fetch_scale;
use flashtile_kernel::prelude::*;

/// Rows of a sequence follow each other in one page or batch entry.
#[constant]
pub const CONTIGUOUS: u32 = 0;

/// Rows lie in pages of a block table.
#[constant]
pub const PAGED: u32 = 1;

/// Rows lie in pages of a block table, which have multiples of 16 tokens: a [`KeyGroup`] lies in one page.
#[constant]
pub const PAGED_BY_16: u32 = 2;

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
    /// How rows are found: [`CONTIGUOUS`], [`PAGED`] or [`PAGED_BY_16`].
    pub paging: u32,
    /// Row of key 0, where rows lie in no pages.
    pub start: u32,
    /// First entry of the sequence in the block table.
    pub line: u64,
    /// Entries of the sequence in the block table.
    pub width: u32,
    /// Multiplier and shift that divide by `width`, where the entries are a ring; otherwise the multiplier is 0.
    pub ring_divisor: [u32; 2],
    /// Tokens a page.
    pub tokens: u32,
    /// Multiplier and shift that divide by `tokens`.
    pub divisor: [u32; 2],
    /// The first key that is read.
    pub low: u32,
    /// The last key that is read.
    pub last: u32,
}

/// The keys, or the values, of a tile's head: `strides` are over batch entry or page, head and row, in bytes.
#[device]
pub fn kv_head<const FORMAT: u32, const DIM: usize>(
    tile: RowTile,
    params: &Attend,
    strides: [u64; 3],
    levels: Levels,
    keys: KeyRange,
    paging: u32,
) -> KvHead {
    // Through a block table, a page is found by its key.
    let mut entry = tile.sequence.page as u64;
    if paging != CONTIGUOUS {
        entry = 0;
    }
    let first = entry * strides[0] + tile.kv_head as u64 * strides[1];
    let head = KvHead {
        source: source_at::<FORMAT, DIM>(first, strides[0], strides[2], params.page),
        levels,
        paging,
        start: tile.sequence.kv_start,
        line: tile.index as u64 * params.width as u64,
        width: params.width,
        ring_divisor: params.ring_divisor,
        tokens: params.page,
        divisor: params.page_divisor,
        low: keys.low.max(0) as u32,
        last: (keys.high - 1).max(0) as u32,
    };
    head
}

/// Where a key lies.
#[device]
struct Place {
    /// Page, or 0.
    page: u32,
    /// Row of the page.
    row: u32,
}

/// The place of a key in the pages of the block table.
#[device]
fn paged_place(table: &Buffer<u32>, head: KvHead, key: u32) -> Place {
    let block = (key as u64 * head.divisor[0] as u64 >> head.divisor[1] as u64) as u32;
    let turns = (block as u64 * head.ring_divisor[0] as u64 >> head.ring_divisor[1] as u64) as u32;
    let entry = block - turns * head.width;
    let place = Place { page: table[head.line + entry as u64], row: key - block * head.tokens };
    place
}

/// Up to 16 keys, from a multiple of 16 on.
#[device]
pub struct KeyGroup {
    /// First key.
    pub first: u32,
    /// Page that holds all of them; unused in [`PAGED`] heads, whose keys are found one at a time.
    pub page: u32,
    /// Row of the first.
    pub row: u32,
    /// Row of the last that is read.
    pub last_row: u32,
}

/// No keys, before any are looked up.
#[device]
pub fn no_group() -> KeyGroup {
    let group = KeyGroup { first: 0, page: 0, row: 0, last_row: 0 };
    group
}

/// The group of the keys from `first` on, a multiple of 16; past the last key that is read, the group of that key.
#[device]
pub fn key_group(table: &Buffer<u32>, head: KvHead, first: u32) -> KeyGroup {
    let mut group = no_group();
    group.first = first.min(head.last / 16 * 16);
    group.row = head.start + group.first;
    if head.paging == PAGED_BY_16 {
        let place = paged_place(table, head, group.first);
        group.page = place.page;
        group.row = place.row;
    }
    group.last_row = group.row + (head.last - group.first);
    group
}

/// The row of key `offset` of a group, or of the last key that is read. Of a group in one page, keys before the first one that is
/// visible are read too: they are the sequence's.
#[device]
pub fn row_of_key<const FORMAT: u32, const DIM: usize>(
    table: &Buffer<u32>,
    head: KvHead,
    group: KeyGroup,
    offset: u32,
) -> Row {
    if head.paging == PAGED {
        let place = paged_place(table, head, (group.first + offset).max(head.low).min(head.last));
        return row_at::<FORMAT, DIM>(head.source, place.page as u64, place.row);
    }
    row_at::<FORMAT, DIM>(head.source, group.page as u64, (group.row + offset).min(group.last_row))
}

/// A lane's words of 16 keys.
#[device]
pub struct KeyWords<const K_WORDS: usize> {
    /// Words of key rows `r` and `8 + r`.
    pub words: [[u32; K_WORDS]; 2],
    /// Words of the scales of these rows.
    pub scales: [[u32; 2]; 2],
}

/// A lane's words of 16 values.
#[device]
pub struct ValueWords<const V_WORDS: usize> {
    /// Words of value rows `2 p`, `2 p + 1`, `2 p + 8` and `2 p + 9`.
    pub words: [[u32; V_WORDS]; 4],
    /// Words of the scales of these rows, where they are norms of the halves.
    pub scales: [[u32; 2]; 4],
}

/// No keys, before any are loaded.
#[device]
pub fn no_keys<const K_WORDS: usize>() -> KeyWords<K_WORDS> {
    let keys = KeyWords::<K_WORDS> { words: [[0u32; K_WORDS]; 2], scales: [[0u32; 2]; 2] };
    keys
}

/// No values, before any are loaded.
#[device]
pub fn no_values<const V_WORDS: usize>() -> ValueWords<V_WORDS> {
    let values = ValueWords::<V_WORDS> { words: [[0u32; V_WORDS]; 4], scales: [[0u32; 2]; 4] };
    values
}

/// Loads the keys of a group.
#[device]
#[inline(always)]
pub fn load_keys<const K_FORMAT: u32, const HEAD_DIM: usize, const K_WORDS: usize>(
    kv: KvMemory,
    head: KvHead,
    group: KeyGroup,
) -> KeyWords<K_WORDS> {
    let mut keys = no_keys::<K_WORDS>();
    for h in 0..2usize {
        let row = row_of_key::<K_FORMAT, HEAD_DIM>(kv.table, head, group, 8 * h as u32 + matrix_row());
        keys.words[h] = fetch::<K_FORMAT, HEAD_DIM, 4, K_WORDS>(
            kv.k,
            row,
            matrix_pair(),
            head.levels,
            kv.codebooks,
            kv.row_align,
        );
        keys.scales[h] = fetch_scale::<K_FORMAT, HEAD_DIM>(kv.k, row);
    }
    keys
}

/// Loads the scales of values `r` and `8 + r` of a group, the keys of a lane's scores: they join the row maximum.
#[device]
#[inline(always)]
pub fn load_value_scales<const V_FORMAT: u32, const VALUE_DIM: usize>(
    kv: KvMemory,
    head: KvHead,
    group: KeyGroup,
) -> [[u32; 2]; 2] {
    let mut scales = [[0u32; 2]; 2];
    if is_scaled(V_FORMAT) {
        for h in 0..2usize {
            let row = row_of_key::<V_FORMAT, VALUE_DIM>(kv.table, head, group, 8 * h as u32 + matrix_row());
            scales[h] = fetch_scale::<V_FORMAT, VALUE_DIM>(kv.v, row);
        }
    }
    scales
}

/// Loads the values of a group.
#[device]
#[inline(always)]
pub fn load_values<const V_FORMAT: u32, const VALUE_DIM: usize, const V_WORDS: usize>(
    kv: KvMemory,
    head: KvHead,
    group: KeyGroup,
) -> ValueWords<V_WORDS> {
    let mut values = no_values::<V_WORDS>();
    for n in 0..4usize {
        let offset = 8 * (n / 2) as u32 + 2 * matrix_pair() + (n % 2) as u32;
        let row = row_of_key::<V_FORMAT, VALUE_DIM>(kv.table, head, group, offset);
        values.words[n] = fetch::<V_FORMAT, VALUE_DIM, 8, V_WORDS>(
            kv.v,
            row,
            matrix_row(),
            head.levels,
            kv.codebooks,
            kv.row_align,
        );
        if has_half_norms(V_FORMAT, VALUE_DIM as u32) {
            values.scales[n] = fetch_scale::<V_FORMAT, VALUE_DIM>(kv.v, row);
        }
    }
    values
}

/// A lane's words of `16 KEY_TILES` keys and values: of the tile that is next.
#[device]
pub struct KvTile<const K_WORDS: usize, const V_WORDS: usize, const KEY_TILES: usize> {
    /// Where they lie.
    pub groups: [KeyGroup; KEY_TILES],
    /// Keys.
    pub keys: [KeyWords<K_WORDS>; KEY_TILES],
    /// Words of the scales of the values of the lane's scores.
    pub value_scales: [[[u32; 2]; 2]; KEY_TILES],
    /// Values.
    pub values: [ValueWords<V_WORDS>; KEY_TILES],
}

/// The tile before any is loaded.
#[device]
pub fn no_tile<const K_WORDS: usize, const V_WORDS: usize, const KEY_TILES: usize>()
-> KvTile<K_WORDS, V_WORDS, KEY_TILES> {
    let tile = KvTile::<K_WORDS, V_WORDS, KEY_TILES> {
        groups: [no_group(); KEY_TILES],
        keys: [no_keys::<K_WORDS>(); KEY_TILES],
        value_scales: [[[0u32; 2]; 2]; KEY_TILES],
        values: [no_values::<V_WORDS>(); KEY_TILES],
    };
    tile
}

/// Loads `16 KEY_TILES` keys and values from key `first` on.
#[device]
pub fn load_tile<
    const K_FORMAT: u32,
    const V_FORMAT: u32,
    const HEAD_DIM: usize,
    const VALUE_DIM: usize,
    const K_WORDS: usize,
    const V_WORDS: usize,
    const KEY_TILES: usize,
>(
    kv: KvMemory,
    k_head: KvHead,
    v_head: KvHead,
    first: u32,
) -> KvTile<K_WORDS, V_WORDS, KEY_TILES> {
    let mut tile = no_tile::<K_WORDS, V_WORDS, KEY_TILES>();
    for u in 0..KEY_TILES {
        let group = key_group(kv.table, k_head, first + 16 * u as u32);
        tile.groups[u] = group;
        tile.keys[u] = load_keys::<K_FORMAT, HEAD_DIM, K_WORDS>(kv, k_head, group);
        tile.value_scales[u] = load_value_scales::<V_FORMAT, VALUE_DIM>(kv, v_head, group);
        tile.values[u] = load_values::<V_FORMAT, VALUE_DIM, V_WORDS>(kv, v_head, group);
    }
    tile
}
