//! The query rows of a threadgroup: which keys each of them sees, and how they are staged for the product with the keys.
//!
//! A threadgroup has `8 ROW_TILES` query rows of one key/value head. A lane's scores are of `2 ROW_TILES` of them: `[t][n]` is
//! row `8 t + 2 p + n`, where `p` is its [`matrix_pair`].

use super::attend::{
    Attend, CODE_KEYS, FIRST_KEYS, LAST_KEYS, Sequence, num_splits, sequence_of, split_index,
};
use super::formats::{is_codes, padded};
use super::rotation::rotate;
use super::score::LOG2E;
use flashtile_kernel::prelude::*;

/// The largest magnitude of an ALiBi slope, `2^86`, which the host enforces too.
#[constant]
const MAX_ALIBI_SLOPE: f32 = 7.737_125_2e25;

/// Terms of a score beside the product of query and key.
#[device]
pub struct Features {
    /// `softcap tanh(x / softcap)` of every product.
    pub softcap: bool,
    /// Biases proportional to distances.
    pub alibi: bool,
    /// A materialised mask.
    pub mask: bool,
    /// A mask over the sequence's own tokens.
    pub tree_mask: bool,
}

/// The query rows of a threadgroup: of one key/value head, ordered by query, then by head of the GQA group.
#[device]
pub struct RowTile {
    /// The sequence.
    pub sequence: Sequence,
    /// Number of the sequence.
    pub index: u32,
    /// Key/value head.
    pub kv_head: u32,
    /// First row of the tile.
    pub first: u32,
    /// Rows of the key/value head: queries of the sequence times heads of the GQA group.
    pub rows: u32,
}

/// The tile of this threadgroup, of `size` rows, in decode's order: tiles of a key/value head follow one another. Prefill has an order of
/// its own and replaces head and first row ([`tile_of_group`](super::prefill::pass::tile_of_group)).
#[device]
pub fn row_tile(sequences: &Buffer<i32>, params: &Attend, size: u32) -> RowTile {
    let index = group_z();
    let sequence = sequence_of(sequences, index);
    let tile = RowTile {
        sequence,
        index,
        kv_head: group_x() / params.tiles,
        first: group_x() % params.tiles * size,
        rows: sequence.q_len * params.group,
    };
    tile
}

/// The query head of a row.
#[device]
pub fn head_of(tile: RowTile, params: &Attend, row: u32) -> u32 {
    tile.kv_head * params.group + row % params.group
}

/// The number of a row among the rows of all batch entries `[B, Sq, H]`.
#[device]
pub fn result_of(tile: RowTile, params: &Attend, row: u32) -> u32 {
    let query = tile.sequence.q_start + row / params.group;
    (tile.sequence.batch * params.queries + query) * params.q_heads + head_of(tile, params, row)
}

/// The number of a row among the rows of all batch entries `[B, H, Sq]`, in which order logsumexps lie.
#[device]
pub fn lse_index(tile: RowTile, params: &Attend, row: u32) -> u32 {
    let head = tile.sequence.batch * params.q_heads + head_of(tile, params, row);
    head * params.queries + tile.sequence.q_start + row / params.group
}

/// Row `[t][n]` of a lane.
#[device]
pub fn lane_query_row(tile: RowTile, t: usize, n: usize) -> u32 {
    tile.first + 8 * t as u32 + 2 * matrix_pair() + n as u32
}

/// The keys that a query row sees, and where its biases are.
#[device]
pub struct RowBound {
    /// First visible key, as far as no mask hides it.
    pub begin: i32,
    /// First key behind the visible ones.
    pub end: i32,
    /// The visible key that is nearest to the row's position: ALiBi counts distances from there.
    pub position: i32,
    /// ALiBi slope in units of log2.
    pub slope: f32,
    /// Number of the row among the rows of all batch entries `[B, Sq, H]`.
    pub result: u32,
    /// The term that ALiBi adds to every score of the row, in units of the score: for the distance from the
    /// row's position to `position`.
    pub shift: f32,
    /// First element of the row in the mask.
    pub mask: u64,
    /// First element of the row in the tree mask.
    pub tree: u64,
}

/// The bound of a row that sees no key.
#[device]
pub fn unseeing_row() -> RowBound {
    let row = RowBound { begin: 0, end: 0, position: 0, slope: 0.0, result: 0, shift: 0.0, mask: 0, tree: 0 };
    row
}

/// Keys from one on and up to another.
#[device]
pub struct VisibleKeys {
    /// The first key.
    pub begin: i32,
    /// The first key behind the last.
    pub end: i32,
}

/// The keys that a row sees, as far as no mask hides them, in any storage.
#[device]
fn seen_keys(tile: RowTile, row: u32, params: &Attend) -> VisibleKeys {
    let position = tile.sequence.offset + (row / params.group) as i32;
    let mut keys = VisibleKeys {
        begin: position.saturating_sub(params.left).clamp(0, tile.sequence.kv_len),
        end: position.saturating_add(params.right).saturating_add(1).clamp(0, tile.sequence.kv_len),
    };
    if params.chunk > 0 {
        // A position before key 0 is in no chunk that has keys.
        let first = position / params.chunk as i32 * params.chunk as i32;
        let next = if position < 0 { 0 } else { first.saturating_add(params.chunk as i32) };
        keys.begin = keys.begin.max(first.min(tile.sequence.kv_len));
        keys.end = keys.end.min(next);
    }
    keys
}

/// The keys that a row sees in the storage of the launch, of the keys that it sees in any.
#[device]
fn keys_of_part(tile: RowTile, row: u32, seen: VisibleKeys, params: &Attend) -> VisibleKeys {
    let mut keys = VisibleKeys { begin: seen.begin, end: seen.end };
    let position = tile.sequence.offset + (row / params.group) as i32;
    let first = tile.sequence.first_len;
    let last = position.saturating_sub(params.keep_last).saturating_add(1);
    let last = last.max(tile.sequence.last_from).max(first);
    if params.part == CODE_KEYS {
        keys.begin = keys.begin.max(first);
        keys.end = keys.end.min(last);
    }
    if params.part == FIRST_KEYS {
        keys.end = keys.end.min(first);
    }
    if params.part == LAST_KEYS {
        keys.begin = keys.begin.max(last);
    }
    keys
}

/// The keys that a row sees in the storage of the launch, as far as no mask hides them.
#[device]
pub fn visible_keys(tile: RowTile, row: u32, params: &Attend) -> VisibleKeys {
    keys_of_part(tile, row, seen_keys(tile, row, params), params)
}

/// The bound of a row of the tile.
#[device]
pub fn row_bound(tile: RowTile, row: u32, slopes: &Buffer<f32>, params: &Attend, has: Features) -> RowBound {
    let query = row / params.group;
    let head = head_of(tile, params, row);
    let position = tile.sequence.offset + query as i32;
    let mut bound = unseeing_row();
    let seen = seen_keys(tile, row, params);
    let keys = keys_of_part(tile, row, seen, params);
    bound.begin = keys.begin;
    bound.end = keys.end;
    bound.position = position;
    if seen.begin < seen.end {
        // The distance to the nearest visible key changes no probability, and would cost the other distances
        // digits of f32: it is a shift of the logsumexp.
        bound.position = position.clamp(seen.begin, seen.end - 1);
    }
    if has.alibi {
        bound.result = result_of(tile, params, row);
        let slope = slopes[tile.index * params.alibi_stride + head];
        // Slopes in the memory of a device are not validated: a row whose slope is too large becomes NaN.
        bound.slope = select(slope.abs() <= MAX_ALIBI_SLOPE, slope * LOG2E, f32::NAN);
        bound.shift = -slope * position.abs_diff(bound.position) as f32;
    }
    if has.mask {
        bound.mask =
            tile.index as u64 * params.mask[0] + head as u64 * params.mask[1] + query as u64 * params.mask[2];
    }
    if has.tree_mask {
        bound.tree = (tile.sequence.q_start + query) as u64 * params.tree;
    }
    bound
}

/// The keys that the rows of a tile see, as far as no mask hides them.
#[device]
pub struct KeyRange {
    /// First key that some row sees.
    pub low: i32,
    /// First key behind all keys that some row sees.
    pub high: i32,
    /// First key that every row sees.
    pub full_low: i32,
    /// First key behind the keys that every row sees.
    pub full_high: i32,
    /// The first key of the sequence's own tokens, which a tree mask is over.
    pub tree: i32,
}

/// The bounds of a lane's rows, and the keys of all rows of the tile.
#[device]
pub struct RowBounds<const ROW_TILES: usize> {
    /// Bounds of rows `[t][n]`.
    pub rows: [[RowBound; 2]; ROW_TILES],
    /// Keys of all rows of the tile.
    pub keys: KeyRange,
}

/// The first key of the sequence's own tokens, which a tree mask is over.
#[device]
pub fn first_own_key(tile: RowTile) -> i32 {
    tile.sequence.kv_len - tile.sequence.q_len as i32
}

/// Bounds of the rows of a tile.
#[device]
pub fn row_bounds<const ROW_TILES: usize>(
    tile: RowTile,
    slopes: &Buffer<f32>,
    params: &Attend,
    has: Features,
) -> RowBounds<ROW_TILES> {
    let mut rows = [[unseeing_row(); 2]; ROW_TILES];
    let mut low = i32::MAX;
    let mut high = 0i32;
    let mut full_low = 0i32;
    let mut full_high = i32::MAX;
    for t in 0..ROW_TILES {
        for n in 0..2usize {
            let row = lane_query_row(tile, t, n);
            if row < tile.rows {
                let bound = row_bound(tile, row, slopes, params, has);
                if bound.begin < bound.end {
                    low = low.min(bound.begin);
                    high = high.max(bound.end);
                }
                full_low = full_low.max(bound.begin);
                full_high = full_high.min(bound.end);
                rows[t][n] = bound;
            }
        }
    }
    let mut keys = KeyRange {
        low: simd_min(low),
        high: simd_max(high),
        full_low: simd_max(full_low),
        full_high: simd_min(full_high),
        tree: first_own_key(tile),
    };
    if has.tree_mask {
        keys.full_high = keys.full_high.min(keys.tree);
    }
    let bounds = RowBounds::<ROW_TILES> { rows, keys };
    bounds
}

/// Stores the shifts of the rows behind the `(row_max, row_sum)` pairs of all partial results. One SIMD group of the
/// first split does it.
#[device]
pub fn store_shifts<const ROW_TILES: usize>(
    tile: RowTile,
    rows: [[RowBound; 2]; ROW_TILES],
    params: &Attend,
    partial_max_sum: &mut Buffer<f32>,
) {
    if split_index(params) == 0 && simd_index() == 0 && matrix_row() == 0 {
        let results = params.batches * params.queries * params.q_heads * num_splits(params);
        for t in 0..ROW_TILES {
            for n in 0..2usize {
                if lane_query_row(tile, t, n) < tile.rows {
                    partial_max_sum[2 * results + rows[t][n].result] = rows[t][n].shift;
                }
            }
        }
    }
}

/// Loads the rows of the tile as f32 into threadgroup memory, [`padded`] with zeros; rows beyond the last are zeros.
#[device]
pub fn stage_queries<
    QElement: Element,
    const HEAD_DIM: usize,
    const ROW_TILES: usize,
    const SIMD_GROUPS: usize,
>(
    q: &Buffer<QElement>,
    tile: RowTile,
    params: &Attend,
    queries: &mut Shared<f32>,
) {
    let width = padded(HEAD_DIM as u32);
    for at in (thread_index()..8 * ROW_TILES as u32 * width).step_by(32 * SIMD_GROUPS) {
        let row = tile.first + at / width;
        let mut x = 0.0;
        if row < tile.rows && at % width < HEAD_DIM as u32 {
            let query = tile.sequence.q_start + row / params.group;
            let start = tile.sequence.batch as u64 * params.q[0]
                + head_of(tile, params, row) as u64 * params.q[1]
                + query as u64 * params.q[2];
            x = q[start + (at % width) as u64].to_f32();
        }
        queries[at] = x;
    }
}

/// Memory that queries are prepared with.
#[device]
pub struct QueryMemory<'a> {
    /// Signs of the rotation of keys, then 1 over the root of the length of each block.
    pub factors: &'a Buffer<f32>,
    /// Elements of `factors` from one key/value head to the next: see [`Attend`].
    pub factor_stride: u64,
    /// Means of centered keys `[Hkv, D]`.
    pub means: &'a Buffer<f32>,
    /// True if keys are centered.
    pub centered: bool,
}

/// The divisor of a prepared query, and the bias of its products.
#[device]
pub struct Prepared {
    /// A power of two.
    pub unit: f32,
    /// The product of the query with the mean of centered keys, which every product lacks.
    pub bias: f32,
}

/// Prepares the query that is staged from element `start` on for the product with the keys of its head: rotates it as
/// the keys are, times the factors of equalized keys, and, where they are codes, divides it by a power of two that makes its coordinates at most 2, as they
/// are multiplied as f16. By a SIMD group.
#[device]
pub fn prepare_query<const K_FORMAT: u32, const HEAD_DIM: usize, const K_ORDER: u32>(
    queries: &mut Shared<f32>,
    start: u32,
    memory: QueryMemory,
    kv_head: u32,
) -> Prepared {
    let mut prepared = Prepared { unit: 1.0, bias: 0.0 };
    if memory.centered {
        for c in (simd_lane()..HEAD_DIM as u32).step_by(32) {
            prepared.bias += queries[start + c] * memory.means[kv_head * HEAD_DIM as u32 + c];
        }
        prepared.bias = simd_sum(prepared.bias);
    }
    if K_ORDER > 0 {
        rotate::<HEAD_DIM, K_ORDER>(queries, start, memory.factors, kv_head as u64 * memory.factor_stride);
    }
    if is_codes(K_FORMAT) {
        let mut greatest = 0.0;
        for c in (simd_lane()..HEAD_DIM as u32).step_by(32) {
            greatest = greatest.max(queries[start + c].abs());
        }
        let exponent = simd_max(greatest).to_bits() & 0x7f80_0000;
        prepared.unit = f32::from_bits(exponent.clamp(0x2000_0000, 0x6000_0000));
        let inverse = 1.0 / prepared.unit;
        for c in (simd_lane()..HEAD_DIM as u32).step_by(32) {
            queries[start + c] *= inverse;
        }
    }
    prepared
}

/// Prepares the staged queries, a SIMD group one at a time, and stores the factor and the bias of each row's
/// products.
#[device]
pub fn prepare_queries<
    const K_FORMAT: u32,
    const HEAD_DIM: usize,
    const K_ORDER: u32,
    const ROW_TILES: usize,
    const SIMD_GROUPS: usize,
>(
    queries: &mut Shared<f32>,
    scales: &mut Shared<f32>,
    biases: &mut Shared<f32>,
    memory: QueryMemory,
    kv_head: u32,
    scale: f32,
) {
    for row in (simd_index()..(8 * ROW_TILES) as u32).step_by(SIMD_GROUPS) {
        let query = prepare_query::<K_FORMAT, HEAD_DIM, K_ORDER>(
            queries,
            row * padded(HEAD_DIM as u32),
            memory,
            kv_head,
        );
        if simd_lane() == 0 {
            scales[row] = query.unit * scale;
            biases[row] = query.bias * scale;
        }
    }
}
