//! Attention over keys and values of any format, split along the keys. [`decode()`] stores a partial result for every
//! query row and split; [`merge`](super::merge::merge()) combines them.
//!
//! ```text
//! score_j     = softcap(scale q . k_j) - slope |p - j| + mask_j               in units of log2
//! row_max     = within 2^SLACK of the largest score_j + log2(scale of v_j)
//! row_sum     = sum over keys of 2^(score_j - row_max)
//! partial_out = sum over keys of 2^(score_j - row_max) v_j
//! ```
//!
//! The words of the next keys and values are loaded before the current ones are used. Partial outputs stay in
//! registers, and all query rows of a GQA group share every byte that is read. How a tile of scores lies in a SIMD
//! group is in [`tile`](super::tile). The SIMD groups of a threadgroup divide its keys; [`partial`](super::partial) adds up
//! what each of them has.
//!
//! Queries of codes are rotated and scaled to at most 2, and multiplied as two f16 each: sums are f32, and scores as
//! exact as for f32 queries. The scale of a value row is folded into its probability, so that the largest product is
//! near 1 whatever the scales are.

use super::attend::{Attend, SEQUENCE_WORDS};
use super::formats::{BF16, ROT16, TQ4, hadamard_order, padded};
use super::kv::{
    KvHead, KvMemory, KvTile, PAGED_BY_16, key_group, kv_head, load_keys, load_tile, load_value_scales,
    load_values, no_tile,
};
use super::nibbles::{fill_nibbles, nibble_bytes, uses_nibbles};
use super::partial::{merge_simds, store_partial};
use super::query::{
    Features, KeyRange, QueryMemory, RowBound, RowBounds, RowTile, prepare_queries, row_bounds, row_tile,
    stage_queries, store_shifts,
};
use super::rotation::block_count;
use super::rows::{Levels, lane_pairs, lane_words, larger, pair_words, product_type};
use super::scale::scale_of;
use super::tile::{
    Accumulator, BiasMemory, QueryOperands, Scoring, any_nonfinite, greatest_score, mask_and_bias,
    needs_second_pass, no_keys_yet, online_softmax, probabilities, pv_tile, pv_tile_nonfinite, qk_tile,
    query_operands,
};
use flashtile_kernel::prelude::*;

/// The tiles of keys of a SIMD group.
#[device]
pub struct KeyTiles {
    /// First key of the first tile.
    pub first: u32,
    /// First key behind the last tile.
    pub end: u32,
    /// Keys from a tile to the next.
    pub step: u32,
}

/// Cuts the visible keys into tiles of `size` keys, divided as equally as possible among the splits. The first tile starts at a
/// multiple of 16, so that no 16 keys straddle a page of 16. The `simds` SIMD groups of a split take its tiles in turn.
#[device]
pub fn key_tiles(keys: KeyRange, splits: u32, size: u32, simds: u32) -> KeyTiles {
    let mut tile = 0i32;
    let mut end = 0i32;
    let low = keys.low.max(0) / 16 * 16;
    if keys.low < keys.high {
        let all = (keys.high - low + size as i32 - 1) / size as i32;
        let groups = splits as i32 * simds as i32;
        let of_split = (all + groups - 1) / groups * simds as i32;
        tile = of_split * group_y() as i32 + simd_index() as i32;
        end = (of_split * (group_y() as i32 + 1)).min(all);
    }
    let first = low as u32;
    let tiles =
        KeyTiles { first: first + tile as u32 * size, end: first + end as u32 * size, step: size * simds };
    tiles
}

/// The memory that a pass over the keys reads.
#[device]
pub struct PassMemory<'a> {
    /// Of keys and values.
    pub kv: KvMemory<'a>,
    /// Of biases.
    pub bias: BiasMemory<'a>,
}

/// Which keys a pass attends to, and how.
#[device]
pub struct Pass<const ROW_TILES: usize> {
    /// Keys of the head.
    pub k: KvHead,
    /// Values of the head.
    pub v: KvHead,
    /// Bounds of the lane's rows.
    pub rows: [[RowBound; 2]; ROW_TILES],
    /// Keys that the rows of the tile see.
    pub keys: KeyRange,
    /// Tiles of the SIMD group.
    pub tiles: KeyTiles,
    /// Terms of the score that the problem has.
    pub has: Features,
}

/// The pass of a SIMD group over its tiles of `16 KEY_TILES` keys.
#[device]
pub fn pass_of<
    const K_FORMAT: u32,
    const V_FORMAT: u32,
    const HEAD_DIM: usize,
    const VALUE_DIM: usize,
    const ROW_TILES: usize,
    const KEY_TILES: usize,
    const SIMD_GROUPS: usize,
    const TABLE_COPIES: usize,
>(
    tile: RowTile,
    bounds: RowBounds<ROW_TILES>,
    params: &Attend,
    has: Features,
    paging: u32,
) -> Pass<ROW_TILES> {
    let k_levels =
        Levels { magnitudes: params.k_levels, codebook: params.codebooks[0], copies: TABLE_COPIES as u32 };
    let v_levels =
        Levels { magnitudes: params.v_levels, codebook: params.codebooks[1], copies: TABLE_COPIES as u32 };
    let pass = Pass::<ROW_TILES> {
        k: kv_head::<K_FORMAT, HEAD_DIM>(tile, params, params.k, k_levels, bounds.keys, paging),
        v: kv_head::<V_FORMAT, VALUE_DIM>(tile, params, params.v, v_levels, bounds.keys, paging),
        rows: bounds.rows,
        keys: bounds.keys,
        tiles: key_tiles(bounds.keys, groups_y(), 16 * KEY_TILES as u32, SIMD_GROUPS as u32),
        has,
    };
    pass
}

/// The first tile of a pass, on its way from memory.
#[device]
#[inline(always)]
fn first_tile<
    const K_FORMAT: u32,
    const V_FORMAT: u32,
    const HEAD_DIM: usize,
    const VALUE_DIM: usize,
    const K_WORDS: usize,
    const V_WORDS: usize,
    const ROW_TILES: usize,
    const KEY_TILES: usize,
>(
    kv: KvMemory,
    pass: Pass<ROW_TILES>,
) -> KvTile<K_WORDS, V_WORDS, KEY_TILES> {
    let mut tile = no_tile::<K_WORDS, V_WORDS, KEY_TILES>();
    if pass.tiles.first < pass.tiles.end {
        tile = load_tile::<K_FORMAT, V_FORMAT, HEAD_DIM, VALUE_DIM, K_WORDS, V_WORDS, KEY_TILES>(
            kv,
            pass.k,
            pass.v,
            pass.tiles.first,
        );
    }
    tile
}

/// Fills the table of `tq4`, where keys or values are read by it.
#[device]
fn fill_table<
    const K_FORMAT: u32,
    const V_FORMAT: u32,
    const HEAD_DIM: usize,
    const VALUE_DIM: usize,
    const SIMD_GROUPS: usize,
>(
    k: Levels,
    v: Levels,
    nibbles: &mut Shared<u8>,
) {
    if uses_nibbles(K_FORMAT, HEAD_DIM as u32, 4) {
        fill_nibbles::<SIMD_GROUPS>(k, nibbles);
    } else if uses_nibbles(V_FORMAT, VALUE_DIM as u32, 8) {
        fill_nibbles::<SIMD_GROUPS>(v, nibbles);
    }
}

/// Scores of `16 KEY_TILES` keys and a lane's rows, with the scales of their values.
#[device]
struct TileScores<const ROW_TILES: usize, const KEY_TILES: usize> {
    /// Scores of each 16 keys.
    scores: [[[[f32; 2]; 2]; ROW_TILES]; KEY_TILES],
    /// Scales of the values of the same keys.
    value_scales: [[f32; 2]; KEY_TILES],
}

/// Scores of the keys of a tile, whose place the keys and the scales of the next tile take.
#[device]
#[inline(always)]
fn scores_of<
    KOperand: Element,
    const K_FORMAT: u32,
    const V_FORMAT: u32,
    const HEAD_DIM: usize,
    const VALUE_DIM: usize,
    const K_PAIRS: usize,
    const K_WORDS: usize,
    const V_WORDS: usize,
    const K_PAIR_WORDS: usize,
    const ROW_TILES: usize,
    const KEY_TILES: usize,
>(
    tile: &mut KvTile<K_WORDS, V_WORDS, KEY_TILES>,
    queries: QueryOperands<KOperand, K_PAIRS, ROW_TILES>,
    pass: Pass<ROW_TILES>,
    kv: KvMemory,
    nibbles: &Shared<u8>,
    next: u32,
) -> TileScores<ROW_TILES, KEY_TILES> {
    let mut tile_scores = TileScores::<ROW_TILES, KEY_TILES> {
        scores: [[[[0.0; 2]; 2]; ROW_TILES]; KEY_TILES],
        value_scales: [[1.0; 2]; KEY_TILES],
    };
    for u in 0..KEY_TILES {
        for h in 0..2usize {
            let scale = scale_of::<V_FORMAT, VALUE_DIM>(tile.value_scales[u][h]);
            tile_scores.value_scales[u][h] = scale.whole;
        }
        tile_scores.scores[u] =
            qk_tile::<KOperand, K_FORMAT, HEAD_DIM, K_WORDS, K_PAIR_WORDS, K_PAIRS, ROW_TILES>(
                tile.keys[u],
                queries,
                pass.k.levels,
                kv.codebooks,
                nibbles,
            );
        let group = key_group(kv.table, pass.k, next + 16 * u as u32);
        tile.groups[u] = group;
        tile.keys[u] = load_keys::<K_FORMAT, HEAD_DIM, K_WORDS>(kv, pass.k, group);
        tile.value_scales[u] = load_value_scales::<V_FORMAT, VALUE_DIM>(kv, pass.v, group);
    }
    tile_scores
}

/// The tile of a step of a pass.
#[device]
struct Step {
    /// First key.
    base: u32,
    /// True if some row may not see some key.
    partial: bool,
    /// Values of the head.
    v: KvHead,
}

/// Adds `p v` of a tile of keys with these scores to the partial outputs. The values of the next tile take the place of
/// this one's.
#[device]
#[inline(always)]
fn add_values<
    VOperand: Element,
    const V_FORMAT: u32,
    const VALUE_DIM: usize,
    const V_PAIRS: usize,
    const K_WORDS: usize,
    const V_WORDS: usize,
    const V_PAIR_WORDS: usize,
    const ROW_TILES: usize,
    const KEY_TILES: usize,
>(
    state: &mut Accumulator<V_PAIRS, ROW_TILES>,
    tile: &mut KvTile<K_WORDS, V_WORDS, KEY_TILES>,
    tile_scores: TileScores<ROW_TILES, KEY_TILES>,
    kv: KvMemory,
    nibbles: &Shared<u8>,
    step: Step,
) {
    for u in 0..KEY_TILES {
        let probs = probabilities::<V_FORMAT, V_PAIRS, ROW_TILES>(
            state,
            tile_scores.scores[u],
            tile_scores.value_scales[u],
        );
        let mut nonfinite = false;
        if step.partial || state.shrunk != 0 {
            nonfinite = any_nonfinite::<V_FORMAT, VALUE_DIM, V_WORDS>(tile.values[u]);
        }
        if nonfinite {
            let group = key_group(kv.table, step.v, step.base + 16 * u as u32);
            pv_tile_nonfinite::<V_FORMAT, VALUE_DIM, V_PAIRS, ROW_TILES>(
                state,
                tile_scores.scores[u],
                probs,
                kv,
                step.v,
                group,
            );
        } else {
            pv_tile::<VOperand, V_FORMAT, VALUE_DIM, V_WORDS, V_PAIR_WORDS, V_PAIRS, ROW_TILES>(
                state,
                probs,
                tile.values[u],
                step.v.levels,
                kv.codebooks,
                nibbles,
            );
        }
        tile.values[u] = load_values::<V_FORMAT, VALUE_DIM, V_WORDS>(kv, step.v, tile.groups[u]);
    }
}

/// A pass, and the queries that it is made for.
#[device]
struct QueriedPass<KOperand: Element, const K_PAIRS: usize, const ROW_TILES: usize> {
    /// The queries.
    queries: QueryOperands<KOperand, K_PAIRS, ROW_TILES>,
    /// The pass.
    pass: Pass<ROW_TILES>,
}

/// Attends to all tiles of a pass. `tile` is the first one, loaded, and is again when the pass is done: a second pass may follow.
#[device]
#[inline(always)]
fn attend_tiles<
    KOperand: Element,
    VOperand: Element,
    const K_FORMAT: u32,
    const V_FORMAT: u32,
    const HEAD_DIM: usize,
    const VALUE_DIM: usize,
    const K_PAIRS: usize,
    const V_PAIRS: usize,
    const K_WORDS: usize,
    const V_WORDS: usize,
    const K_PAIR_WORDS: usize,
    const V_PAIR_WORDS: usize,
    const ROW_TILES: usize,
    const KEY_TILES: usize,
>(
    state: &mut Accumulator<V_PAIRS, ROW_TILES>,
    tile: &mut KvTile<K_WORDS, V_WORDS, KEY_TILES>,
    queried: QueriedPass<KOperand, K_PAIRS, ROW_TILES>,
    memory: PassMemory,
    nibbles: &Shared<u8>,
    params: &Attend,
) {
    let pass = queried.pass;
    let mut base = pass.tiles.first;
    let mut more = base < pass.tiles.end;
    while more {
        more = base + pass.tiles.step < pass.tiles.end;
        let next = select(more, base + pass.tiles.step, pass.tiles.first);
        let mut tile_scores = scores_of::<
            KOperand,
            K_FORMAT,
            V_FORMAT,
            HEAD_DIM,
            VALUE_DIM,
            K_PAIRS,
            K_WORDS,
            V_WORDS,
            K_PAIR_WORDS,
            ROW_TILES,
            KEY_TILES,
        >(tile, queried.queries, pass, memory.kv, nibbles, next);
        let last = base as i32 + 16 * KEY_TILES as i32;
        let partial = pass.has.mask || (base as i32) < pass.keys.full_low || last > pass.keys.full_high;
        let scoring = Scoring { has: pass.has, partial, tree: pass.keys.tree };
        let mut greatest = [[f32::NEG_INFINITY; 2]; ROW_TILES];
        for u in 0..KEY_TILES {
            let key = base as i32 + 16 * u as i32;
            tile_scores.scores[u] = mask_and_bias::<ROW_TILES>(
                tile_scores.scores[u],
                key,
                pass.rows,
                memory.bias,
                params,
                scoring,
            );
            greatest = greatest_score::<V_FORMAT, ROW_TILES>(
                greatest,
                tile_scores.scores[u],
                tile_scores.value_scales[u],
            );
        }
        online_softmax::<V_PAIRS, ROW_TILES>(state, greatest);
        let step = Step { base, partial, v: pass.v };
        add_values::<
            VOperand,
            V_FORMAT,
            VALUE_DIM,
            V_PAIRS,
            K_WORDS,
            V_WORDS,
            V_PAIR_WORDS,
            ROW_TILES,
            KEY_TILES,
        >(state, tile, tile_scores, memory.kv, nibbles, step);
        base = next;
    }
}

/// Partial results of attention of the query rows of each key/value head: see the module. `partial_out`
/// `[B, Sq, H, splits, Dv]` is divided by `SIMD_GROUPS`, `partial_max_sum` holds the pairs `(row_max, row_sum)` `[B, Sq, H, splits]`. With
/// ALiBi, distances are from the nearest key that a row sees, and behind the pairs follows the shift of each row
/// `[B, Sq, H]`, in units of the score.
///
/// Groups are (key/value heads times tiles of `8 ROW_TILES` rows, splits, sequences).
///
/// | generic | |
/// |---|---|
/// | `QElement` | type of q |
/// | `K_FORMAT`, `V_FORMAT` | formats of keys and values: constants of [`formats`](super::formats) |
/// | `HEAD_DIM`, `VALUE_DIM` | head dimensions |
/// | `ROW_TILES`, `KEY_TILES`, `SIMD_GROUPS` | tiles of 8 query rows, tiles of 16 keys at a time, SIMD groups |
/// | `TABLE_COPIES` | copies of the table of `tq4`: 8, 16 or 32 |
///
/// Generics that follow from them:
///
/// | generic | |
/// |---|---|
/// | `KOperand`, `VOperand` | types in which keys and values are multiplied |
/// | `K_PAIRS`, `V_PAIRS` | pairs of coordinates of a key, of a value that a lane holds |
/// | `K_WORDS`, `V_WORDS` | words of a key, of a value that a lane loads |
/// | `K_PAIR_WORDS`, `V_PAIR_WORDS` | words of the pairs of a lane, decoded |
/// | `K_ORDER` | Hadamard order of the keys' rotation; 0 where they are not rotated |
/// | `TABLE_BYTES` | bytes of the table of `tq4` |
/// | `PADDED_DIM` | the larger head dimension, [`padded`] |
#[kernel(
    threads = (32 * SIMD_GROUPS) as u32,
    derive(
        KOperand: Element = product_type(QElement, K_FORMAT),
        VOperand: Element = product_type(QElement, V_FORMAT),
        K_PAIRS: usize = lane_pairs(HEAD_DIM, 4),
        V_PAIRS: usize = lane_pairs(VALUE_DIM, 8),
        K_WORDS: usize = lane_words(K_FORMAT, HEAD_DIM, 4),
        V_WORDS: usize = lane_words(V_FORMAT, VALUE_DIM, 8),
        K_PAIR_WORDS: usize = pair_words(KOperand, HEAD_DIM, 4),
        V_PAIR_WORDS: usize = pair_words(VOperand, VALUE_DIM, 8),
        K_ORDER: u32 = hadamard_order(K_FORMAT, HEAD_DIM),
        TABLE_BYTES: usize = nibble_bytes(K_FORMAT, HEAD_DIM, V_FORMAT, VALUE_DIM, TABLE_COPIES),
        PADDED_DIM: usize = padded(larger(HEAD_DIM, VALUE_DIM) as u32) as usize,
    ),
    requires(K_FORMAT <= ROT16 && V_FORMAT <= ROT16, "formats of rows"),
    requires(row_align.is_power_of_two() && row_align <= 16, "rows are at multiples of 1, 2, 4, 8 or 16 bytes"),
    requires(paging <= PAGED_BY_16, "ways to find rows"),
    requires(paging != PAGED_BY_16 || params.page.is_multiple_of(16), "pages of multiples of 16 tokens"),
    requires(params.page_divisor[1] < 64 && params.ring_divisor[1] < 64, "shifts of 64 bits"),
    requires(groups[0].is_multiple_of(params.tiles), "tiles of every key/value head"),
    requires(params.page > 0 && params.width > 0 && params.group > 0, "pages have rows"),
    requires(sequences.len() >= (SEQUENCE_WORDS * groups[2]) as usize, "the words of every sequence"),
    requires(partial_max_sum.len() as u64 >= params.results(groups[1]).saturating_mul(2), "partial_max_sum of every partial result"),
    requires(!has_alibi || partial_max_sum.len() as u64 >= params.results(groups[1]).saturating_mul(2).saturating_add(params.rows()), "a shift of every row"),
    requires(partial_out.len() as u64 >= params.results(groups[1]).saturating_mul(VALUE_DIM as u64), "partial outputs of every partial result"),
    requires(K_ORDER == 0 || factors.len() >= params.k_factors(HEAD_DIM + block_count(K_ORDER, HEAD_DIM)), "a factor for each coordinate, and a root for each block"),
    bench(
        shape(batch = [16, 16], keys = [8192, 8192], q_heads = [32, 32], kv_heads = [8, 8], dim = [128, 128],
              format = [BF16, TQ4], row = [256, 66], splits = [4, 4]),
        bytes = batch * (2 * kv_heads * keys * row + 4 * q_heads * dim),
        flops = 4 * batch * q_heads * keys * dim,
        tolerance = 0.02,
    ),
)]
// Generics of a call are a paragraph here: rustfmt gives each a line of its own, which would be half of the kernel.
#[rustfmt::skip]
pub fn decode<
    QElement: Element,
    const K_FORMAT: u32,
    const V_FORMAT: u32,
    const HEAD_DIM: usize,
    const VALUE_DIM: usize,
    const ROW_TILES: usize,
    const KEY_TILES: usize,
    const SIMD_GROUPS: usize,
    const TABLE_COPIES: usize,
>(
    q: &Buffer<QElement>,
    k: &Buffer<u8>,
    v: &Buffer<u8>,
    table: &Buffer<u32>,
    sequences: &Buffer<i32>,
    factors: &Buffer<f32>,
    codebooks: &Buffer<f32>,
    means: &Buffer<f32>,
    slopes: &Buffer<f32>,
    mask: &Buffer<u8>,
    tree: &Buffer<u8>,
    params: &Attend,
    partial_out: &mut Buffer<f32>,
    partial_max_sum: &mut Buffer<f32>,
    #[constant] paging: u32,
    #[constant] row_align: u32,
    #[constant] has_softcap: bool,
    #[constant] has_alibi: bool,
    #[constant] has_mask: bool,
    #[constant] has_tree_mask: bool,
    #[constant] has_k_mean: bool,
) {
    // Queries; at the end, sums of the outputs of the SIMD groups.
    let mut queries: Shared<f32> = shared(8 * ROW_TILES * PADDED_DIM);
    // The factor and the bias of the products of each row.
    let mut scales: Shared<f32> = shared(8 * ROW_TILES);
    let mut biases: Shared<f32> = shared(8 * ROW_TILES);
    let mut max_sum: Shared<f32> = shared(16 * SIMD_GROUPS * ROW_TILES);
    let mut nibbles: Shared<u8> = shared(TABLE_BYTES);
    let has = Features { softcap: has_softcap, alibi: has_alibi, mask: has_mask, tree_mask: has_tree_mask };
    let kv = KvMemory { k, v, table, codebooks, row_align };
    let memory = PassMemory { kv, bias: BiasMemory { slopes, mask, tree } };
    let query_memory = QueryMemory { factors, factor_stride: params.k_factor_stride, means, centered: has_k_mean };
    let tile = row_tile(sequences, params, (8 * ROW_TILES) as u32);
    if tile.first >= tile.rows {
        return;
    }
    let bounds = row_bounds::<ROW_TILES>(tile, slopes, params, has);
    if has_alibi {
        store_shifts::<ROW_TILES>(tile, bounds.rows, params, partial_max_sum);
    }
    let pass = pass_of::<K_FORMAT, V_FORMAT, HEAD_DIM, VALUE_DIM, ROW_TILES, KEY_TILES, SIMD_GROUPS,
        TABLE_COPIES>(tile, bounds, params, has, paging);
    let mut next = first_tile::<K_FORMAT, V_FORMAT, HEAD_DIM, VALUE_DIM, K_WORDS, V_WORDS, ROW_TILES,
        KEY_TILES>(kv, pass);
    // The table and the queries, while the first keys and values are on their way.
    fill_table::<K_FORMAT, V_FORMAT, HEAD_DIM, VALUE_DIM, SIMD_GROUPS>(pass.k.levels, pass.v.levels,
        &mut nibbles);
    stage_queries::<QElement, HEAD_DIM, ROW_TILES, SIMD_GROUPS>(q, tile, params, &mut queries);
    barrier();
    let head = tile.kv_head;
    let scale = params.scale;
    prepare_queries::<K_FORMAT, HEAD_DIM, K_ORDER, ROW_TILES, SIMD_GROUPS>(&mut queries, &mut scales,
        &mut biases, query_memory, head, scale);
    barrier();
    let operands = query_operands::<KOperand, K_FORMAT, HEAD_DIM, K_PAIRS, ROW_TILES>(&queries, &scales,
        &biases);
    let queried = QueriedPass::<KOperand, K_PAIRS, ROW_TILES> { queries: operands, pass };
    let mut state = no_keys_yet::<V_PAIRS, ROW_TILES>();
    let mut passes = true;
    while passes {
        attend_tiles::<KOperand, VOperand, K_FORMAT, V_FORMAT, HEAD_DIM, VALUE_DIM, K_PAIRS, V_PAIRS, K_WORDS,
            V_WORDS, K_PAIR_WORDS, V_PAIR_WORDS, ROW_TILES, KEY_TILES>(&mut state, &mut next, queried, memory,
            &nibbles, params);
        passes = needs_second_pass::<V_FORMAT, V_PAIRS, ROW_TILES>(&mut state);
    }
    merge_simds::<SIMD_GROUPS, V_PAIRS, ROW_TILES>(state, &mut max_sum, &mut queries);
    store_partial::<V_FORMAT, VALUE_DIM, SIMD_GROUPS, V_PAIRS, ROW_TILES>(&max_sum, &queries, tile, params,
        partial_out, partial_max_sum);
}
