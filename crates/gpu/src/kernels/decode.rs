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

use super::attend::Attend;
use super::formats::{BF16, MLX8_PLAIN, TQ4, hadamard_order, padded};
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
pub struct Pass<const T: usize> {
    /// Keys of the head.
    pub k: KvHead,
    /// Values of the head.
    pub v: KvHead,
    /// Bounds of the lane's rows.
    pub rows: [[RowBound; 2]; T],
    /// Keys that the rows of the tile see.
    pub keys: KeyRange,
    /// Tiles of the SIMD group.
    pub tiles: KeyTiles,
    /// Terms of the score that the problem has.
    pub has: Features,
}

/// The pass of a SIMD group over its tiles of `16 U` keys.
#[device]
pub fn pass_of<
    const KF: u32,
    const VF: u32,
    const D: usize,
    const DV: usize,
    const T: usize,
    const U: usize,
    const S: usize,
    const C: usize,
>(
    tile: RowTile,
    bounds: RowBounds<T>,
    params: &Attend,
    has: Features,
    paging: u32,
) -> Pass<T> {
    let k_levels = Levels { magnitudes: params.k_levels, codebook: params.codebooks[0], copies: C as u32 };
    let v_levels = Levels { magnitudes: params.v_levels, codebook: params.codebooks[1], copies: C as u32 };
    let pass = Pass::<T> {
        k: kv_head::<KF, D>(tile, params, params.k, k_levels, bounds.keys, paging),
        v: kv_head::<VF, DV>(tile, params, params.v, v_levels, bounds.keys, paging),
        rows: bounds.rows,
        keys: bounds.keys,
        tiles: key_tiles(bounds.keys, groups_y(), 16 * U as u32, S as u32),
        has,
    };
    pass
}

/// The first tile of a pass, on its way from memory.
#[device]
#[inline(always)]
fn first_tile<
    const KF: u32,
    const VF: u32,
    const D: usize,
    const DV: usize,
    const KW: usize,
    const VW: usize,
    const T: usize,
    const U: usize,
>(
    kv: KvMemory,
    pass: Pass<T>,
) -> KvTile<KW, VW, U> {
    let mut tile = no_tile::<KW, VW, U>();
    if pass.tiles.first < pass.tiles.end {
        tile = load_tile::<KF, VF, D, DV, KW, VW, U>(kv, pass.k, pass.v, pass.tiles.first);
    }
    tile
}

/// Fills the table of `tq4`, where keys or values are read by it.
#[device]
fn fill_table<const KF: u32, const VF: u32, const D: usize, const DV: usize, const S: usize>(
    k: Levels,
    v: Levels,
    nibbles: &mut Shared<u8>,
) {
    if uses_nibbles(KF, D as u32, 4) {
        fill_nibbles::<S>(k, nibbles);
    } else if uses_nibbles(VF, DV as u32, 8) {
        fill_nibbles::<S>(v, nibbles);
    }
}

/// Scores of `16 U` keys and a lane's rows, with the scales of their values.
#[device]
struct TileScores<const T: usize, const U: usize> {
    /// Scores of each 16 keys.
    scores: [[[[f32; 2]; 2]; T]; U],
    /// Scales of the values of the same keys.
    value_scales: [[f32; 2]; U],
}

/// Scores of the keys of a tile, whose place the keys and the scales of the next tile take.
#[device]
#[inline(always)]
fn scores_of<
    K: Element,
    const KF: u32,
    const VF: u32,
    const D: usize,
    const DV: usize,
    const KN: usize,
    const KW: usize,
    const VW: usize,
    const KP: usize,
    const T: usize,
    const U: usize,
>(
    tile: &mut KvTile<KW, VW, U>,
    queries: QueryOperands<K, KN, T>,
    pass: Pass<T>,
    kv: KvMemory,
    nibbles: &Shared<u8>,
    next: u32,
) -> TileScores<T, U> {
    let mut tile_scores = TileScores::<T, U> { scores: [[[[0.0; 2]; 2]; T]; U], value_scales: [[1.0; 2]; U] };
    for u in 0..U {
        for h in 0..2usize {
            let scale = scale_of::<VF, DV>(tile.value_scales[u][h]);
            tile_scores.value_scales[u][h] = scale.whole;
        }
        tile_scores.scores[u] =
            qk_tile::<K, KF, D, KW, KP, KN, T>(tile.keys[u], queries, pass.k.levels, kv.codebooks, nibbles);
        let group = key_group(kv.table, pass.k, next + 16 * u as u32);
        tile.groups[u] = group;
        tile.keys[u] = load_keys::<KF, D, KW>(kv, pass.k, group);
        tile.value_scales[u] = load_value_scales::<VF, DV>(kv, pass.v, group);
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
    V: Element,
    const VF: u32,
    const DV: usize,
    const VN: usize,
    const KW: usize,
    const VW: usize,
    const VP: usize,
    const T: usize,
    const U: usize,
>(
    state: &mut Accumulator<VN, T>,
    tile: &mut KvTile<KW, VW, U>,
    tile_scores: TileScores<T, U>,
    kv: KvMemory,
    nibbles: &Shared<u8>,
    step: Step,
) {
    for u in 0..U {
        let probs = probabilities::<VF, VN, T>(state, tile_scores.scores[u], tile_scores.value_scales[u]);
        let mut nonfinite = false;
        if step.partial || state.shrunk != 0 {
            nonfinite = any_nonfinite::<VF, DV, VW>(tile.values[u]);
        }
        if nonfinite {
            let group = key_group(kv.table, step.v, step.base + 16 * u as u32);
            pv_tile_nonfinite::<VF, DV, VN, T>(state, tile_scores.scores[u], probs, kv, step.v, group);
        } else {
            pv_tile::<V, VF, DV, VW, VP, VN, T>(
                state,
                probs,
                tile.values[u],
                step.v.levels,
                kv.codebooks,
                nibbles,
            );
        }
        tile.values[u] = load_values::<VF, DV, VW>(kv, step.v, tile.groups[u]);
    }
}

/// A pass, and the queries that it is made for.
#[device]
struct QueriedPass<K: Element, const KN: usize, const T: usize> {
    /// The queries.
    queries: QueryOperands<K, KN, T>,
    /// The pass.
    pass: Pass<T>,
}

/// Attends to all tiles of a pass. `tile` is the first one, loaded, and is again when the pass is done: a second pass may follow.
#[device]
#[inline(always)]
fn attend_tiles<
    K: Element,
    V: Element,
    const KF: u32,
    const VF: u32,
    const D: usize,
    const DV: usize,
    const KN: usize,
    const VN: usize,
    const KW: usize,
    const VW: usize,
    const KP: usize,
    const VP: usize,
    const T: usize,
    const U: usize,
>(
    state: &mut Accumulator<VN, T>,
    tile: &mut KvTile<KW, VW, U>,
    queried: QueriedPass<K, KN, T>,
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
        let mut tile_scores = scores_of::<K, KF, VF, D, DV, KN, KW, VW, KP, T, U>(
            tile,
            queried.queries,
            pass,
            memory.kv,
            nibbles,
            next,
        );
        let last = base as i32 + 16 * U as i32;
        let partial = pass.has.mask || (base as i32) < pass.keys.full_low || last > pass.keys.full_high;
        let scoring = Scoring { has: pass.has, partial, tree: pass.keys.tree };
        let mut greatest = [[f32::NEG_INFINITY; 2]; T];
        for u in 0..U {
            let key = base as i32 + 16 * u as i32;
            tile_scores.scores[u] =
                mask_and_bias::<T>(tile_scores.scores[u], key, pass.rows, memory.bias, params, scoring);
            greatest = greatest_score::<VF, T>(greatest, tile_scores.scores[u], tile_scores.value_scales[u]);
        }
        online_softmax::<VN, T>(state, greatest);
        let step = Step { base, partial, v: pass.v };
        add_values::<V, VF, DV, VN, KW, VW, VP, T, U>(state, tile, tile_scores, memory.kv, nibbles, step);
        base = next;
    }
}

/// Partial results of attention of the query rows of each key/value head: see the module. `partial_out`
/// `[B, Sq, H, splits, Dv]` is divided by `S`, `partial_max_sum` holds the pairs `(row_max, row_sum)` `[B, Sq, H, splits]`. With
/// ALiBi, distances are from the nearest key that a row sees, and behind the pairs follows the shift of each row
/// `[B, Sq, H]`, in units of the score.
///
/// Groups are (key/value heads times tiles of `8 T` rows, splits, sequences).
///
/// | generic | |
/// |---|---|
/// | `Q` | type of q |
/// | `KF`, `VF` | formats of keys and values: constants of [`formats`](super::formats) |
/// | `D`, `DV` | head dimensions |
/// | `T`, `U`, `S` | tiles of 8 query rows, tiles of 16 keys at a time, SIMD groups |
/// | `C` | copies of the table of `tq4`: 8, 16 or 32 |
///
/// Generics that follow from them:
///
/// | generic | |
/// |---|---|
/// | `K`, `V` | types of the products with keys and values |
/// | `KN`, `VN` | pairs of coordinates a lane of a key, of a value |
/// | `KW`, `VW` | words of a lane as they are loaded |
/// | `KP`, `VP` | words of the decoded pairs of a lane |
/// | `ORDER` | Hadamard order of the keys' rotation; 0 where they are not rotated |
/// | `NB` | bytes of the table of `tq4` |
/// | `DM` | the larger head dimension, [`padded`] |
#[kernel(
    threads = (32 * S) as u32,
    derive(
        K: Element = product_type(Q, KF),
        V: Element = product_type(Q, VF),
        KN: usize = lane_pairs(D, 4),
        VN: usize = lane_pairs(DV, 8),
        KW: usize = lane_words(KF, D, 4),
        VW: usize = lane_words(VF, DV, 8),
        KP: usize = pair_words(K, D, 4),
        VP: usize = pair_words(V, DV, 8),
        ORDER: u32 = hadamard_order(KF, D),
        NB: usize = nibble_bytes(KF, D, VF, DV, C),
        DM: usize = padded(larger(D, DV) as u32) as usize,
    ),
    requires(KF <= MLX8_PLAIN && VF <= MLX8_PLAIN, "formats of rows"),
    requires(row_align.is_power_of_two() && row_align <= 16, "rows are at multiples of 1, 2, 4, 8 or 16 bytes"),
    requires(paging <= PAGED_BY_16, "ways to find rows"),
    requires(paging != PAGED_BY_16 || params.page.is_multiple_of(16), "pages of multiples of 16 tokens"),
    requires(params.page_divisor[1] < 64 && params.ring_divisor[1] < 64, "shifts of 64 bits"),
    requires(groups[0].is_multiple_of(params.tiles), "tiles of every key/value head"),
    requires(params.page > 0 && params.width > 0 && params.group > 0, "pages have rows"),
    requires(sequences.len() >= 8 * groups[2] as usize, "eight words of every sequence"),
    requires(partial_max_sum.len() as u64 >= params.results(groups[1]).saturating_mul(2), "partial_max_sum of every partial result"),
    requires(!has_alibi || partial_max_sum.len() as u64 >= params.results(groups[1]).saturating_mul(2).saturating_add(params.rows()), "a shift of every row"),
    requires(partial_out.len() as u64 >= params.results(groups[1]).saturating_mul(DV as u64), "partial outputs of every partial result"),
    requires(ORDER == 0 || factors.len() >= D + block_count(ORDER, D), "a factor for each coordinate, and a root for each block"),
    bench(
        shape(batch = [16, 16], keys = [8192, 8192], q_heads = [32, 32], kv_heads = [8, 8], dim = [128, 128],
              format = [BF16, TQ4], row = [256, 66], splits = [4, 4]),
        bytes = batch * (2 * kv_heads * keys * row + 4 * q_heads * dim),
        flops = 4 * batch * q_heads * keys * dim,
        tolerance = 0.02,
    ),
)]
pub fn decode<
    Q: Element,
    const KF: u32,
    const VF: u32,
    const D: usize,
    const DV: usize,
    const T: usize,
    const U: usize,
    const S: usize,
    const C: usize,
>(
    q: &Buffer<Q>,
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
    let mut queries: Shared<f32> = shared(8 * T * DM);
    // The factor and the bias of the products of each row.
    let mut scales: Shared<f32> = shared(8 * T);
    let mut biases: Shared<f32> = shared(8 * T);
    let mut max_sum: Shared<f32> = shared(16 * S * T);
    let mut nibbles: Shared<u8> = shared(NB);
    let has = Features { softcap: has_softcap, alibi: has_alibi, mask: has_mask, tree_mask: has_tree_mask };
    let kv = KvMemory { k, v, table, codebooks, row_align };
    let memory = PassMemory { kv, bias: BiasMemory { slopes, mask, tree } };
    let query_memory = QueryMemory { factors, means, centered: has_k_mean };
    let tile = row_tile(sequences, params, (8 * T) as u32);
    if tile.first >= tile.rows {
        return;
    }
    let bounds = row_bounds::<T>(tile, slopes, params, has);
    if has_alibi {
        store_shifts::<T>(tile, bounds.rows, params, partial_max_sum);
    }
    let pass = pass_of::<KF, VF, D, DV, T, U, S, C>(tile, bounds, params, has, paging);
    let mut next = first_tile::<KF, VF, D, DV, KW, VW, T, U>(kv, pass);
    // The table and the queries, while the first keys and values are on their way.
    fill_table::<KF, VF, D, DV, S>(pass.k.levels, pass.v.levels, &mut nibbles);
    stage_queries::<Q, D, T, S>(q, tile, params, &mut queries);
    barrier();
    let head = tile.kv_head;
    let scale = params.scale;
    prepare_queries::<KF, D, ORDER, T, S>(&mut queries, &mut scales, &mut biases, query_memory, head, scale);
    barrier();
    let operands = query_operands::<K, KF, D, KN, T>(&queries, &scales, &biases);
    let queried = QueriedPass::<K, KN, T> { queries: operands, pass };
    let mut state = no_keys_yet::<VN, T>();
    let mut passes = true;
    while passes {
        attend_tiles::<K, V, KF, VF, D, DV, KN, VN, KW, VW, KP, VP, T, U>(
            &mut state, &mut next, queried, memory, &nibbles, params,
        );
        passes = needs_second_pass::<VF, VN, T>(&mut state);
    }
    merge_simds::<S, VN, T>(state, &mut max_sum, &mut queries);
    store_partial::<VF, DV, S, VN, T>(&max_sum, &queries, tile, params, partial_out, partial_max_sum);
}
