//! Gradients of queries: a threadgroup keeps a tile of query rows, as [`prefill`](crate::kernels::prefill) does, and streams the keys and
//! values that they see.
//!
//! ```text
//! block:   keys and values of b are stored        barrier
//!          rows of b + 1 are requested            q . k and d_out . v of b
//!                                                 probabilities, gradients of scores
//!                                                 d_q += d_product k            barrier
//! ```
//!
//! Queries and `d_out` are left operands in registers, keys and values right operands. SIMD groups of a team divide the columns of their
//! rows, and exchange both products.

use super::d_scores::{Modifiers, PairTile, RowTerms, TermMemory, TileProducts, no_terms, pair_of};
use super::nonfinite::{flag_nonfinite, take_nonfinite};
use super::params::Backward;
use super::row_block::{
    RowSource, block_len, chunk_elements, chunk_loads, clear_padding, fetch_rows, head_of_keys, store_row,
    store_rows,
};
use crate::kernels::attend::Attend;
use crate::kernels::prefill::block::{block_columns, scratch_len};
use crate::kernels::prefill::lefts::{Queries, row_lefts, row_start};
use crate::kernels::prefill::pass::{keys_of_rows, lane_row, part_index, team_index, tile_of_group};
use crate::kernels::prefill::softmax::{pv_block, qk_block, sum_parts};
use crate::kernels::prefill::stream::clear_first;
use crate::kernels::query::{Features, KeyRange, RowTile, lse_index, row_bound};
use crate::kernels::rows::larger;
use crate::kernels::tile::{Accumulator, BiasMemory, Scoring, no_keys_yet};
use flashtile_kernel::prelude::*;

/// Terms of a lane's rows.
#[device]
pub fn terms_of_rows<const ROW_TILES: usize, const TEAM_SIMDS: usize>(
    tile: RowTile,
    memory: TermMemory,
    params: &Attend,
    has: Features,
) -> [[RowTerms; 2]; ROW_TILES] {
    let mut terms = [[no_terms(); 2]; ROW_TILES];
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            let row = lane_row::<ROW_TILES, TEAM_SIMDS>(tile, m, h);
            if row < tile.rows {
                let at = lse_index(tile, params, row);
                terms[m][h].bound = row_bound(tile, row, memory.slopes, params, has);
                terms[m][h].neg_lse = memory.neg_lse[at];
                terms[m][h].delta = memory.delta[at];
            }
        }
    }
    terms
}

/// Queries, or rows of `d_out`, for [`qk_block`].
#[device]
pub fn operands_of<T: Element, const PAIRS: usize, const ROW_TILES: usize>(
    lefts: [[[Left<T>; 2]; PAIRS]; ROW_TILES],
) -> Queries<T, PAIRS, ROW_TILES> {
    let operands = Queries::<T, PAIRS, ROW_TILES> {
        rounded: lefts,
        residual: lefts,
        scale: [[1.0; 2]; ROW_TILES],
        bias: [[0.0; 2]; ROW_TILES],
    };
    operands
}

/// Sums of `d_score` times the distance of the key from the nearest visible one, of a lane's rows.
#[device]
struct DistanceSums<const ROW_TILES: usize> {
    /// `[m][h]` is the sum of row `16 m + 8 h + r`.
    rows: [[f32; 2]; ROW_TILES],
}

/// Pairs of a block from key `first` on, of its products.
#[device]
#[inline(always)]
fn pairs_of_block<const ROW_TILES: usize, const SCORE_TILES: usize>(
    products: TileProducts<SCORE_TILES, ROW_TILES>,
    first: i32,
    terms: [[RowTerms; 2]; ROW_TILES],
    sums: &mut DistanceSums<ROW_TILES>,
    modifiers: Modifiers,
    params: &Attend,
) -> PairTile<SCORE_TILES, ROW_TILES> {
    let mut pairs = PairTile::<SCORE_TILES, ROW_TILES> {
        probs: products.scores,
        d_products: products.scores,
        seen: [0u32; ROW_TILES],
    };
    for m in 0..ROW_TILES {
        for j in 0..SCORE_TILES {
            for h in 0..2usize {
                for n in 0..2usize {
                    let key = first + (8 * j + n) as i32 + 2 * matrix_pair() as i32;
                    let product = products.scores[m][j][h][n] * params.scale;
                    let d_prob = products.d_probs[m][j][h][n];
                    let pair = pair_of(product, d_prob, key, terms[m][h], modifiers, params);
                    pairs.probs[m][j][h][n] = pair.prob;
                    pairs.d_products[m][j][h][n] = pair.d_product;
                    pairs.seen[m] |= select(pair.seen, 1u32 << (4 * j + 2 * h + n) as u32, 0u32);
                    if modifiers.scoring.has.alibi {
                        let distance = terms[m][h].bound.position.abs_diff(key) as f32;
                        sums.rows[m][h] += select(pair.prob == 0.0, 0.0, pair.d_score * distance);
                    }
                }
            }
        }
    }
    pairs
}

/// Keys that the rows of a tile see.
#[device]
pub struct TileKeys {
    /// Keys that rows of the SIMD group's team see.
    pub own: KeyRange,
    /// Keys that rows of the threadgroup see.
    pub all: KeyRange,
}

/// The keys that the rows of a tile see, as far as no mask hides them.
#[device]
pub fn keys_of_tile<const ROW_TILES: usize, const SIMD_GROUPS: usize, const TEAM_SIMDS: usize>(
    tile: RowTile,
    params: &Attend,
    has: Features,
) -> TileKeys {
    let size = (16 * ROW_TILES) as u32;
    let first = tile.first + size * team_index::<TEAM_SIMDS>();
    let end = tile.first + (16 * ROW_TILES * SIMD_GROUPS / TEAM_SIMDS) as u32;
    let seen = TileKeys {
        own: keys_of_rows(tile, first, (first + size).min(tile.rows), params, has),
        all: keys_of_rows(tile, tile.first, end.min(tile.rows), params, has),
    };
    seen
}

/// Returns true if some row may not see some key from `first` on, up to `end`.
#[device]
pub fn is_partial(keys: KeyRange, first: u32, end: u32, has: Features) -> bool {
    has.mask || (first as i32) < keys.full_low || end as i32 > keys.full_high
}

/// Products of a team's rows with a block of keys and of values. By all threads of the threadgroup.
#[device]
#[inline(always)]
pub fn products_of_block<
    T: Element,
    const K_COLUMNS: usize,
    const V_COLUMNS: usize,
    const K_PAIRS: usize,
    const V_PAIRS: usize,
    const ROW_TILES: usize,
    const SCORE_TILES: usize,
    const TEAM_SIMDS: usize,
>(
    q: Queries<T, K_PAIRS, ROW_TILES>,
    d_out: Queries<T, V_PAIRS, ROW_TILES>,
    keys: &Shared<T>,
    values: &Shared<T>,
    exchange: &mut Shared<f32>,
) -> TileProducts<SCORE_TILES, ROW_TILES> {
    let own_scores = qk_block::<T, 0, K_COLUMNS, K_PAIRS, ROW_TILES, SCORE_TILES, TEAM_SIMDS>(q, keys);
    let scores = sum_parts::<ROW_TILES, SCORE_TILES, TEAM_SIMDS>(own_scores, exchange);
    let own_d_probs = qk_block::<T, 0, V_COLUMNS, V_PAIRS, ROW_TILES, SCORE_TILES, TEAM_SIMDS>(d_out, values);
    if TEAM_SIMDS > 1 {
        barrier();
    }
    let d_probs = sum_parts::<ROW_TILES, SCORE_TILES, TEAM_SIMDS>(own_d_probs, exchange);
    let products = TileProducts::<SCORE_TILES, ROW_TILES> { scores, d_probs };
    products
}

/// Writes the gradients of a lane's rows.
#[device]
fn store_d_q<
    QElement: Element,
    const HEAD_DIM: usize,
    const K_COLUMNS: usize,
    const K_PAIRS: usize,
    const ROW_TILES: usize,
    const TEAM_SIMDS: usize,
>(
    state: Accumulator<K_PAIRS, ROW_TILES>,
    tile: RowTile,
    params: &Attend,
    backward: &Backward,
    d_q: &mut Buffer<QElement>,
) {
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            let row = lane_row::<ROW_TILES, TEAM_SIMDS>(tile, m, h);
            if row < tile.rows {
                let start = row_start(tile, params, backward.d_q, row);
                store_row::<QElement, HEAD_DIM, K_COLUMNS, K_PAIRS, TEAM_SIMDS>(
                    state.out[m],
                    h,
                    backward.scale,
                    start,
                    d_q,
                );
            }
        }
    }
}

/// Writes the sums of a lane's rows over all keys.
#[device]
fn store_sums<const ROW_TILES: usize, const TEAM_SIMDS: usize>(
    sums: DistanceSums<ROW_TILES>,
    tile: RowTile,
    params: &Attend,
    distance_sums: &mut Buffer<f32>,
) {
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            let row = lane_row::<ROW_TILES, TEAM_SIMDS>(tile, m, h);
            let sum = matrix_row_sum(sums.rows[m][h]);
            if row < tile.rows && matrix_pair() == 0 && part_index::<TEAM_SIMDS>() == 0 {
                distance_sums[lse_index(tile, params, row)] = sum;
            }
        }
    }
}

/// Gradients of the query rows of each key/value head, one tile of rows a threadgroup: see the module.
///
/// ```text
/// prob[i, j]    = exp(score[i, j] - lse[i])
/// d_score[i, j] = prob[i, j] (d_out[i] . v[j] - delta[i])
/// d_q[b, h, i]  = scale sum_j softcap'(scale q[i] . k[j]) d_score[i, j] k[j]        [B, H, Sq, D]
/// ```
///
/// Groups are (key/value heads times tiles of `16 ROW_TILES SIMD_GROUPS / TEAM_SIMDS` rows, 1, sequences). Keys and values are added
/// block by block in their order, so that equal launches give equal bits. With `has_alibi`, `distance_sums` `[B, H, Sq]` gets the sums over
/// the keys of a row of `d_score` times the distance from the visible key that is nearest to the row's position.
///
/// | generic | |
/// |---|---|
/// | `QElement` | type of all tensors |
/// | `HEAD_DIM`, `VALUE_DIM` | head dimensions |
/// | `ROW_TILES`, `KEY_TILES`, `SIMD_GROUPS` | tiles of 16 query rows of a team, tiles of 16 keys of a block, SIMD groups |
/// | `TEAM_SIMDS` | SIMD groups of a team, which divide the columns of its rows |
/// | `RESIDENT` | threadgroups that a core is to hold at a time |
/// | `K_COLUMNS`, `V_COLUMNS`, `K_PAIRS`, `V_PAIRS` | columns of a block, and pairs of columns of a lane |
/// | `CHUNK`, `K_LOADS`, `V_LOADS` | elements of 16 bytes, and loads of a thread for a block |
/// | `SCORE_TILES` | tiles of 8 keys of a block |
/// | `SCRATCH_LEN` | f32 in which SIMD groups of a team exchange products |
#[kernel(
    threads = (32 * SIMD_GROUPS) as u32,
    resident = RESIDENT as u32,
    derive(
        K_COLUMNS: usize = block_columns(HEAD_DIM, TEAM_SIMDS),
        V_COLUMNS: usize = block_columns(VALUE_DIM, TEAM_SIMDS),
        K_PAIRS: usize = block_columns(HEAD_DIM, TEAM_SIMDS) / (8 * TEAM_SIMDS),
        V_PAIRS: usize = block_columns(VALUE_DIM, TEAM_SIMDS) / (8 * TEAM_SIMDS),
        CHUNK: usize = chunk_elements(QElement),
        K_LOADS: usize = chunk_loads(QElement, HEAD_DIM, KEY_TILES, SIMD_GROUPS),
        V_LOADS: usize = chunk_loads(QElement, VALUE_DIM, KEY_TILES, SIMD_GROUPS),
        SCORE_TILES: usize = 2 * KEY_TILES,
        K_LEN: usize = block_len(block_columns(HEAD_DIM, TEAM_SIMDS), KEY_TILES),
        V_LEN: usize = block_len(block_columns(VALUE_DIM, TEAM_SIMDS), KEY_TILES),
        SCRATCH_LEN: usize = larger(scratch_len(ROW_TILES, KEY_TILES, SIMD_GROUPS, TEAM_SIMDS, 0, 0), 1),
    ),
    requires(SIMD_GROUPS.is_multiple_of(TEAM_SIMDS) && 8usize.is_multiple_of(TEAM_SIMDS), "teams of 1, 2, 4 or 8 SIMD groups"),
    requires(KEY_TILES <= 4, "a bit for each score of a lane"),
    requires(params.tiles > 0 && groups[0].is_multiple_of(params.tiles), "tiles of every key/value head"),
    requires(params.group > 0, "a GQA group has heads"),
    requires(neg_lse.len() as u64 >= params.rows() && delta.len() as u64 >= params.rows(), "terms of each row"),
    requires(!has_alibi || distance_sums.len() as u64 >= params.rows(), "a sum for each row"),
    bench(
        shape(batch = [1, 1], length = [4096, 4096], heads = [16, 16], dim = [64, 128]),
        bytes = 10 * batch * length * heads * dim,
        flops = 6 * batch * heads * length * length * dim,
        tolerance = 0.02,
    ),
)]
// Generics of a call are a paragraph here: rustfmt gives each a line of its own, which would be most of the kernel.
#[rustfmt::skip]
pub fn backward_q<
    QElement: Element,
    const HEAD_DIM: usize,
    const VALUE_DIM: usize,
    const ROW_TILES: usize,
    const KEY_TILES: usize,
    const SIMD_GROUPS: usize,
    const TEAM_SIMDS: usize,
    const RESIDENT: usize,
>(
    q: &Buffer<QElement>,
    k: &Buffer<QElement>,
    v: &Buffer<QElement>,
    d_out: &Buffer<QElement>,
    sequences: &Buffer<i32>,
    slopes: &Buffer<f32>,
    mask: &Buffer<u8>,
    tree: &Buffer<u8>,
    neg_lse: &Buffer<f32>,
    delta: &Buffer<f32>,
    params: &Attend,
    backward: &Backward,
    d_q: &mut Buffer<QElement>,
    distance_sums: &mut Buffer<f32>,
    #[constant] in_chunks: bool,
    #[constant] has_softcap: bool,
    #[constant] has_alibi: bool,
    #[constant] has_mask: bool,
    #[constant] has_tree_mask: bool,
) {
    let mut keys: Shared<QElement> = shared(K_LEN);
    let mut values: Shared<QElement> = shared(V_LEN);
    let mut exchange: Shared<f32> = shared(SCRATCH_LEN);
    let mut flags: Shared<u32> = shared(4);
    let has = Features { softcap: has_softcap, alibi: has_alibi, mask: has_mask, tree_mask: has_tree_mask };
    let memory = BiasMemory { slopes, mask, tree };
    let tile = tile_of_group(sequences, params, (16 * ROW_TILES * SIMD_GROUPS / TEAM_SIMDS) as u32);
    if tile.first >= tile.rows {
        return;
    }
    let seen = keys_of_tile::<ROW_TILES, SIMD_GROUPS, TEAM_SIMDS>(tile, params, has);
    let k_source = RowSource::<QElement> { memory: k, rows: head_of_keys(tile, backward.k), in_chunks };
    let v_source = RowSource::<QElement> { memory: v, rows: head_of_keys(tile, backward.v), in_chunks };
    let end = seen.all.high as u32;
    let mut first = seen.all.low as u32 / 16 * 16;
    clear_first(&mut flags);
    clear_padding::<QElement, HEAD_DIM, K_COLUMNS, KEY_TILES, SIMD_GROUPS>(&mut keys);
    clear_padding::<QElement, VALUE_DIM, V_COLUMNS, KEY_TILES, SIMD_GROUPS>(&mut values);
    let q_lefts = operands_of::<QElement, K_PAIRS, ROW_TILES>(row_lefts::<QElement, QElement, HEAD_DIM, K_COLUMNS,
        K_PAIRS, ROW_TILES, TEAM_SIMDS>(q, params.q, tile, params, 1.0));
    let d_out_lefts = operands_of::<QElement, V_PAIRS, ROW_TILES>(row_lefts::<QElement, QElement, VALUE_DIM, V_COLUMNS,
        V_PAIRS, ROW_TILES, TEAM_SIMDS>(d_out, backward.d_out, tile, params, 1.0));
    let of_rows = TermMemory { slopes, neg_lse, delta };
    let terms = terms_of_rows::<ROW_TILES, TEAM_SIMDS>(tile, of_rows, params, has);
    let mut state = no_keys_yet::<K_PAIRS, ROW_TILES>();
    let mut sums = DistanceSums::<ROW_TILES> { rows: [[0.0; 2]; ROW_TILES] };
    // A tile that sees no key reads none.
    let mut next_k = fetch_rows::<QElement, HEAD_DIM, CHUNK, K_LOADS, KEY_TILES, SIMD_GROUPS>(k_source, first, first < end);
    let mut next_v = fetch_rows::<QElement, VALUE_DIM, CHUNK, V_LOADS, KEY_TILES, SIMD_GROUPS>(v_source, first, first < end);
    while first < end {
        store_rows::<QElement, HEAD_DIM, K_COLUMNS, CHUNK, K_LOADS, KEY_TILES, SIMD_GROUPS>(&mut keys, next_k, k_source, first);
        store_rows::<QElement, VALUE_DIM, V_COLUMNS, CHUNK, V_LOADS, KEY_TILES, SIMD_GROUPS>(&mut values, next_v, v_source, first);
        barrier();
        let following = first + (16 * KEY_TILES) as u32;
        next_k = fetch_rows::<QElement, HEAD_DIM, CHUNK, K_LOADS, KEY_TILES, SIMD_GROUPS>(k_source, following, following < end);
        next_v = fetch_rows::<QElement, VALUE_DIM, CHUNK, V_LOADS, KEY_TILES, SIMD_GROUPS>(v_source, following, following < end);
        let products = products_of_block::<QElement, K_COLUMNS, V_COLUMNS, K_PAIRS, V_PAIRS, ROW_TILES, SCORE_TILES,
            TEAM_SIMDS>(q_lefts, d_out_lefts, &keys, &values, &mut exchange);
        let partial = is_partial(seen.own, first, following, has);
        let modifiers = Modifiers { memory, scoring: Scoring { has, partial, tree: seen.all.tree } };
        let pairs = pairs_of_block::<ROW_TILES, SCORE_TILES>(products, first as i32, terms, &mut sums, modifiers, params);
        if is_partial(seen.all, first, following, has) {
            flag_nonfinite::<QElement, K_COLUMNS, SCORE_TILES, SIMD_GROUPS>(&keys, &mut flags);
            barrier();
            if flags[0] != 0 {
                take_nonfinite::<QElement, K_COLUMNS, K_PAIRS, ROW_TILES, SCORE_TILES, SIMD_GROUPS, TEAM_SIMDS>(&mut state,
                    pairs.d_products, pairs.seen, &mut keys, end - first);
            }
        }
        pv_block::<QElement, K_COLUMNS, K_PAIRS, ROW_TILES, SCORE_TILES, TEAM_SIMDS>(&mut state, pairs.d_products, &keys);
        barrier();
        first = following;
    }
    store_d_q::<QElement, HEAD_DIM, K_COLUMNS, K_PAIRS, ROW_TILES, TEAM_SIMDS>(state, tile, params, backward, d_q);
    if has_alibi {
        store_sums::<ROW_TILES, TEAM_SIMDS>(sums, tile, params, distance_sums);
    }
}
