//! Gradients of keys and values: a threadgroup keeps a tile of keys and streams the query rows that see them, of every head of the GQA
//! group in turn.
//!
//! ```text
//! block:   q and d_out of b are stored, with      barrier
//!          the terms of their rows
//!          q and d_out of b + 1 are requested     k . q and v . d_out of b
//!                                                 probabilities, gradients of scores
//!                                                 d_v += p^T d_out, d_k += d_product^T q      barrier
//! ```
//!
//! Keys and values are left operands, queries and `d_out` right operands: a lane holds probabilities of key `16 m + 8 h + r` of its team and
//! query `8 j + 2 p + n` of the block, transposed scores, which are left operands of the products that make `d_v` and `d_k`. Keys and values
//! lie in threadgroup memory, or, with `IN_REGISTERS` 1, in registers where that memory is scarce.

use super::d_scores::{Modifiers, PairTile, RowTerms, TermMemory, TileProducts, no_terms, pair_of};
use super::nonfinite::{flag_nonfinite, take_nonfinite};
use super::params::Backward;
use super::row_block::{
    HeadRows, RowSource, block_len, chunk_elements, chunk_loads, clear_padding, copy_rows, fetch_rows,
    head_of_keys, head_rows, store_row, store_rows,
};
use crate::kernels::attend::Attend;
use crate::kernels::prefill::block::{ROW_PADDING, block_columns, scratch_len};
use crate::kernels::prefill::lefts::lefts_of_row;
use crate::kernels::prefill::pass::{first_column, team_index};
use crate::kernels::prefill::softmax::{pv_block, sum_parts};
use crate::kernels::prefill::stream::clear_first;
use crate::kernels::query::{
    Features, RowBound, RowTile, first_own_key, head_of, lse_index, row_bound, row_tile, visible_keys,
};
use crate::kernels::rows::larger;
use crate::kernels::tile::{Accumulator, BiasMemory, Scoring, no_keys_yet};
use flashtile_kernel::prelude::*;

/// Elements of a tile of `16 * tiles` keys in threadgroup memory, where they are not in registers.
pub const fn kept_len(columns: usize, tiles: usize, in_registers: usize) -> usize {
    if in_registers == 1 { ROW_PADDING } else { block_len(columns, tiles) }
}

/// Left operands of a team's keys, or values, in registers.
#[device]
struct KeptRows<T: Element, const PAIRS: usize, const ROW_TILES: usize> {
    /// `[m][i]` has rows from `16 m` and from `16 m + 8` on, and columns from `8 i` on.
    lefts: [[[Left<T>; 2]; PAIRS]; ROW_TILES],
}

/// Keys and values of a team in registers.
#[device]
struct Kept<T: Element, const K_PAIRS: usize, const V_PAIRS: usize, const ROW_TILES: usize> {
    /// Keys.
    keys: KeptRows<T, K_PAIRS, ROW_TILES>,
    /// Values.
    values: KeptRows<T, V_PAIRS, ROW_TILES>,
}

/// The rows of a team from memory, of a threadgroup whose rows start at `first`; without `IN_REGISTERS`, or without any rows to read, zeros.
#[device]
fn kept_rows<
    T: Element,
    const DIM: usize,
    const COLUMNS: usize,
    const PAIRS: usize,
    const ROW_TILES: usize,
    const TEAM_SIMDS: usize,
    const IN_REGISTERS: usize,
>(
    source: RowSource<T>,
    first: u32,
    reads: bool,
) -> KeptRows<T, PAIRS, ROW_TILES> {
    let mut kept =
        KeptRows::<T, PAIRS, ROW_TILES> { lefts: [[[left_from::<T>(0.0, 0.0); 2]; PAIRS]; ROW_TILES] };
    if IN_REGISTERS == 1 && reads {
        let own = first + (16 * ROW_TILES) as u32 * team_index::<TEAM_SIMDS>();
        for m in 0..ROW_TILES {
            for h in 0..2usize {
                let row = own + (16 * m + 8 * h) as u32 + matrix_row();
                let start = source.rows.start + row.min(source.rows.last) as u64 * source.rows.stride;
                let lefts = lefts_of_row::<T, T, DIM, COLUMNS, PAIRS, TEAM_SIMDS>(source.memory, start, 1.0);
                for i in 0..PAIRS {
                    kept.lefts[m][i][h] = lefts[i];
                }
            }
        }
    }
    kept
}

/// Products of a team's keys with the rows of a block, over the SIMD group's columns.
#[device]
#[inline(always)]
fn kept_products<
    T: Element,
    const COLUMNS: usize,
    const PAIRS: usize,
    const ROW_TILES: usize,
    const SCORE_TILES: usize,
    const TEAM_SIMDS: usize,
    const IN_REGISTERS: usize,
>(
    kept: KeptRows<T, PAIRS, ROW_TILES>,
    keys: &Shared<T>,
    block: &Shared<T>,
) -> [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES] {
    let mut products = [[[[0.0; 2]; 2]; SCORE_TILES]; ROW_TILES];
    let line = (COLUMNS + ROW_PADDING) as u32;
    let first = first_column::<COLUMNS, TEAM_SIMDS>();
    let own = (16 * ROW_TILES) as u32 * team_index::<TEAM_SIMDS>() * line + first;
    for i in 0..PAIRS / 2 {
        let mut low = [[left_from::<T>(0.0, 0.0); 2]; ROW_TILES];
        let mut high = [[left_from::<T>(0.0, 0.0); 2]; ROW_TILES];
        for m in 0..ROW_TILES {
            if IN_REGISTERS == 1 {
                low[m] = kept.lefts[m][2 * i];
                high[m] = kept.lefts[m][2 * i + 1];
            } else {
                let four = load_lefts::<T>(keys, own + 16 * m as u32 * line + 16 * i as u32, line);
                low[m] = [four[0], four[1]];
                high[m] = [four[2], four[3]];
            }
        }
        for u in 0..SCORE_TILES / 2 {
            let at = first + 16 * u as u32 * line + 16 * i as u32;
            let rights = load_rights_transposed::<T>(block, at, line);
            for n in 0..2usize {
                let j = 2 * u + n;
                for m in 0..ROW_TILES {
                    let sum = products[m][j];
                    products[m][j] =
                        multiply_add_twice::<T>(low[m], rights[2 * n], high[m], rights[2 * n + 1], sum);
                }
            }
        }
    }
    products
}

/// Products of a team's keys and values with the rows of a block. By all threads of the threadgroup.
#[device]
#[inline(always)]
fn products_of_block<
    T: Element,
    const K_COLUMNS: usize,
    const V_COLUMNS: usize,
    const K_PAIRS: usize,
    const V_PAIRS: usize,
    const ROW_TILES: usize,
    const SCORE_TILES: usize,
    const TEAM_SIMDS: usize,
    const IN_REGISTERS: usize,
>(
    kept: Kept<T, K_PAIRS, V_PAIRS, ROW_TILES>,
    keys: &Shared<T>,
    values: &Shared<T>,
    queries: &Shared<T>,
    d_outs: &Shared<T>,
    exchange: &mut Shared<f32>,
) -> TileProducts<SCORE_TILES, ROW_TILES> {
    let own_scores = kept_products::<T, K_COLUMNS, K_PAIRS, ROW_TILES, SCORE_TILES, TEAM_SIMDS, IN_REGISTERS>(
        kept.keys, keys, queries,
    );
    let scores = sum_parts::<ROW_TILES, SCORE_TILES, TEAM_SIMDS>(own_scores, exchange);
    let own_d_probs = kept_products::<T, V_COLUMNS, V_PAIRS, ROW_TILES, SCORE_TILES, TEAM_SIMDS, IN_REGISTERS>(
        kept.values,
        values,
        d_outs,
    );
    if TEAM_SIMDS > 1 {
        barrier();
    }
    let d_probs = sum_parts::<ROW_TILES, SCORE_TILES, TEAM_SIMDS>(own_d_probs, exchange);
    let products = TileProducts::<SCORE_TILES, ROW_TILES> { scores, d_probs };
    products
}

/// A tile of keys of one head.
#[device]
struct KeyTile {
    /// Sequence and key/value head; `first` is the query head of the GQA group whose rows are streamed.
    of: RowTile,
    /// First key.
    first: u32,
    /// First key behind the tile, as far as there are keys.
    end: u32,
    /// Rows of the sequence, padding included.
    rows: u32,
    /// The first query row that may see a key of the tile.
    begin_query: u32,
    /// The first query row behind all that may.
    end_query: u32,
    /// The first key that a tree mask is over.
    tree: i32,
}

/// The tile of this threadgroup, of `size` keys. The tiles of the first keys come first: where keys are masked causally, most rows see them.
#[device]
fn key_tile_of_group(sequences: &Buffer<i32>, params: &Attend, size: u32, kv_rows: u32) -> KeyTile {
    let heads = groups_x() / params.tiles;
    let mut of = row_tile(sequences, params, 1);
    of.kv_head = group_x() % heads;
    let kv_len = of.sequence.kv_len as u32;
    let first = group_x() / heads * size;
    let mut tile = KeyTile {
        of,
        first,
        end: (first + size).min(kv_len),
        rows: kv_rows.max(kv_len),
        begin_query: of.sequence.q_len,
        end_query: of.sequence.q_len,
        tree: first_own_key(of),
    };
    if tile.first < tile.end {
        tile.begin_query = rows_in_front(of, params, tile.first as i32 + 1, true);
        tile.end_query = rows_in_front(of, params, tile.end as i32, false);
    }
    tile
}

/// The rows of the query head `tile.first` of the GQA group.
#[device]
fn head_of_queries(tile: RowTile, params: &Attend, strides: [u64; 3]) -> HeadRows {
    let sequence = tile.sequence;
    head_rows(sequence.batch, head_of(tile, params, tile.first), sequence.q_start, sequence.q_len, strides)
}

/// The number of query rows of a head whose first visible key, or with `of_ends` the first key behind the visible ones, is in front of `key`:
/// both grow with the row.
#[device]
fn rows_in_front(tile: RowTile, params: &Attend, key: i32, of_ends: bool) -> u32 {
    let mut low = 0u32;
    let mut high = tile.sequence.q_len;
    while low < high {
        let middle = (low + high) / 2;
        let keys = visible_keys(tile, middle * params.group, params);
        if select(of_ends, keys.end, keys.begin) < key {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

/// Stores the terms of the rows of a block, a row a thread: `neg_lse` and `delta` in `terms`, then the first and the last visible key and
/// the nearest one in `bounds`. Rows behind the last see no key.
#[device]
fn store_terms<const ROWS: usize>(
    tile: RowTile,
    query: u32,
    memory: TermMemory,
    params: &Attend,
    terms: &mut Shared<f32>,
    bounds: &mut Shared<i32>,
) {
    let thread = thread_index();
    if thread < ROWS as u32 {
        let mut row = no_terms();
        if query + thread < tile.sequence.q_len {
            let none = Features { softcap: false, alibi: false, mask: false, tree_mask: false };
            let index = (query + thread) * params.group + tile.first;
            let at = lse_index(tile, params, index);
            row.bound = row_bound(tile, index, memory.slopes, params, none);
            row.neg_lse = memory.neg_lse[at];
            row.delta = memory.delta[at];
        }
        terms[thread] = row.neg_lse;
        terms[ROWS as u32 + thread] = row.delta;
        bounds[thread] = row.bound.begin;
        bounds[ROWS as u32 + thread] = row.bound.end;
        bounds[2 * ROWS as u32 + thread] = row.bound.position;
    }
}

/// A block of query rows of one head.
#[device]
struct QueryBlock {
    /// The first row.
    query: u32,
    /// The first key of the threadgroup.
    key: u32,
    /// ALiBi slope of the head in units of log2.
    slope: f32,
    /// First element of the head in the mask.
    mask: u64,
    /// First element of the sequence in the tree mask.
    tree: u64,
}

/// The first block of the query head `tile.of.first` of the GQA group.
#[device]
fn first_block(tile: KeyTile, slopes: &Buffer<f32>, params: &Attend, has: Features) -> QueryBlock {
    let of = tile.of;
    let mut block = QueryBlock {
        query: tile.begin_query,
        key: tile.first,
        slope: 0.0,
        mask: of.index as u64 * params.mask[0] + head_of(of, params, of.first) as u64 * params.mask[1],
        tree: of.sequence.q_start as u64 * params.tree,
    };
    if has.alibi {
        let bound = row_bound(of, of.first, slopes, params, has);
        block.slope = bound.slope;
    }
    block
}

/// Returns true if some row of the block from row `query` on may not see some key of the tile.
#[device]
fn is_partial<const ROWS: usize>(tile: KeyTile, query: u32, bounds: &Shared<i32>, has: Features) -> bool {
    has.mask
        || query + ROWS as u32 > tile.of.sequence.q_len
        || bounds[ROWS as u32 - 1] > tile.first as i32
        || bounds[ROWS as u32] < tile.end as i32
        || has.tree_mask && tile.end as i32 > tile.tree
}

/// Terms of row `8 j + 2 p + n` of a block.
#[device]
#[inline(always)]
fn terms_of_column<const ROWS: usize>(
    column: u32,
    block: QueryBlock,
    params: &Attend,
    terms: &Shared<f32>,
    bounds: &Shared<i32>,
) -> RowTerms {
    let query = block.query + column;
    let bound = RowBound {
        begin: bounds[column],
        end: bounds[ROWS as u32 + column],
        position: bounds[2 * ROWS as u32 + column],
        slope: block.slope,
        result: 0,
        shift: 0.0,
        mask: block.mask + query as u64 * params.mask[2],
        tree: block.tree + query as u64 * params.tree,
    };
    let row = RowTerms { bound, neg_lse: terms[column], delta: terms[ROWS as u32 + column] };
    row
}

/// Pairs of a block, of its products.
#[device]
#[inline(always)]
fn pairs_of_block<
    const ROWS: usize,
    const ROW_TILES: usize,
    const SCORE_TILES: usize,
    const TEAM_SIMDS: usize,
>(
    products: TileProducts<SCORE_TILES, ROW_TILES>,
    block: QueryBlock,
    terms: &Shared<f32>,
    bounds: &Shared<i32>,
    modifiers: Modifiers,
    params: &Attend,
) -> PairTile<SCORE_TILES, ROW_TILES> {
    let mut pairs = PairTile::<SCORE_TILES, ROW_TILES> {
        probs: products.scores,
        d_products: products.scores,
        seen: [0u32; ROW_TILES],
    };
    let own = block.key + (16 * ROW_TILES) as u32 * team_index::<TEAM_SIMDS>() + matrix_row();
    for j in 0..SCORE_TILES {
        for n in 0..2usize {
            let column = (8 * j + n) as u32 + 2 * matrix_pair();
            let row = terms_of_column::<ROWS>(column, block, params, terms, bounds);
            for m in 0..ROW_TILES {
                for h in 0..2usize {
                    let key = (own + (16 * m + 8 * h) as u32) as i32;
                    let product = products.scores[m][j][h][n] * params.scale;
                    let pair = pair_of(product, products.d_probs[m][j][h][n], key, row, modifiers, params);
                    pairs.probs[m][j][h][n] = pair.prob;
                    pairs.d_products[m][j][h][n] = pair.d_product;
                    pairs.seen[m] |= select(pair.seen, 1u32 << (4 * j + 2 * h + n) as u32, 0u32);
                }
            }
        }
    }
    pairs
}

/// Writes the gradients of a lane's keys, or values: `factor` times the sums, and zeros for padding.
#[device]
fn store_gradients<
    T: Element,
    const DIM: usize,
    const COLUMNS: usize,
    const PAIRS: usize,
    const ROW_TILES: usize,
    const TEAM_SIMDS: usize,
>(
    state: Accumulator<PAIRS, ROW_TILES>,
    tile: KeyTile,
    strides: [u64; 3],
    factor: f32,
    gradients: &mut Buffer<T>,
) {
    let to = head_of_keys(tile.of, strides);
    let own = tile.first + (16 * ROW_TILES) as u32 * team_index::<TEAM_SIMDS>() + matrix_row();
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            let row = own + (16 * m + 8 * h) as u32;
            if row < tile.rows {
                let mut sums = state.out[m];
                if row >= tile.of.sequence.kv_len as u32 {
                    sums = [[[0.0; 2]; 2]; PAIRS];
                }
                let start = to.start + row as u64 * to.stride;
                store_row::<T, DIM, COLUMNS, PAIRS, TEAM_SIMDS>(sums, h, factor, start, gradients);
            }
        }
    }
}

/// Gradients of the keys and values of each key/value head, one tile of keys a threadgroup: see the module.
///
/// ```text
/// d_v[b, g, j] = sum_i prob[i, j] d_out[i]                                                  [B, Hkv, Skv, Dv]
/// d_k[b, g, j] = scale sum_i softcap'(scale q[i] . k[j]) d_score[i, j] q[i]                  [B, Hkv, Skv, D]
/// ```
///
/// over the rows `i` of every query head of the GQA group, head by head, block by block: equal launches give equal bits. Groups are
/// (key/value heads times tiles of `16 ROW_TILES SIMD_GROUPS / TEAM_SIMDS` keys, 1, sequences), `params.tiles` of a head. Every row of `d_k` and
/// `d_v` is written: padding and keys that no row sees get zeros.
///
/// | generic | |
/// |---|---|
/// | `QElement` | type of all tensors |
/// | `HEAD_DIM`, `VALUE_DIM` | head dimensions |
/// | `ROW_TILES`, `QUERY_TILES`, `SIMD_GROUPS` | tiles of 16 keys of a team, tiles of 16 query rows of a block, SIMD groups |
/// | `TEAM_SIMDS` | SIMD groups of a team, which divide the columns of its keys |
/// | `IN_REGISTERS` | 1 where keys and values lie in registers, 0 where they lie in threadgroup memory |
/// | `RESIDENT` | threadgroups that a core is to hold at a time |
#[kernel(
    threads = (32 * SIMD_GROUPS) as u32,
    resident = RESIDENT as u32,
    derive(
        K_COLUMNS: usize = block_columns(HEAD_DIM, TEAM_SIMDS),
        V_COLUMNS: usize = block_columns(VALUE_DIM, TEAM_SIMDS),
        K_PAIRS: usize = block_columns(HEAD_DIM, TEAM_SIMDS) / (8 * TEAM_SIMDS),
        V_PAIRS: usize = block_columns(VALUE_DIM, TEAM_SIMDS) / (8 * TEAM_SIMDS),
        CHUNK: usize = chunk_elements(QElement),
        Q_LOADS: usize = chunk_loads(QElement, HEAD_DIM, QUERY_TILES, SIMD_GROUPS),
        O_LOADS: usize = chunk_loads(QElement, VALUE_DIM, QUERY_TILES, SIMD_GROUPS),
        KEY_TILES: usize = ROW_TILES * SIMD_GROUPS / TEAM_SIMDS,
        K_LOADS: usize = chunk_loads(QElement, HEAD_DIM, ROW_TILES * SIMD_GROUPS / TEAM_SIMDS, SIMD_GROUPS),
        V_LOADS: usize = chunk_loads(QElement, VALUE_DIM, ROW_TILES * SIMD_GROUPS / TEAM_SIMDS, SIMD_GROUPS),
        SCORE_TILES: usize = 2 * QUERY_TILES,
        ROWS: usize = 16 * QUERY_TILES,
        K_LEN: usize = kept_len(block_columns(HEAD_DIM, TEAM_SIMDS), ROW_TILES * SIMD_GROUPS / TEAM_SIMDS, IN_REGISTERS),
        V_LEN: usize = kept_len(block_columns(VALUE_DIM, TEAM_SIMDS), ROW_TILES * SIMD_GROUPS / TEAM_SIMDS, IN_REGISTERS),
        Q_LEN: usize = block_len(block_columns(HEAD_DIM, TEAM_SIMDS), QUERY_TILES),
        O_LEN: usize = block_len(block_columns(VALUE_DIM, TEAM_SIMDS), QUERY_TILES),
        SCRATCH_LEN: usize = larger(scratch_len(ROW_TILES, QUERY_TILES, SIMD_GROUPS, TEAM_SIMDS, 0, 0), 1),
    ),
    requires(SIMD_GROUPS.is_multiple_of(TEAM_SIMDS) && 8usize.is_multiple_of(TEAM_SIMDS), "teams of 1, 2, 4 or 8 SIMD groups"),
    requires(QUERY_TILES <= 4 && QUERY_TILES <= 2 * SIMD_GROUPS, "a bit for each score of a lane, a thread for each row of a block"),
    requires(params.tiles > 0 && groups[0].is_multiple_of(params.tiles), "tiles of every key/value head"),
    requires(params.group > 0, "a GQA group has heads"),
    requires(neg_lse.len() as u64 >= params.rows() && delta.len() as u64 >= params.rows(), "terms of each row"),
    bench(
        shape(batch = [1, 1], length = [4096, 4096], heads = [16, 16], dim = [64, 128]),
        bytes = 12 * batch * length * heads * dim,
        flops = 8 * batch * heads * length * length * dim,
        tolerance = 0.02,
    ),
)]
// Generics of a call are a paragraph here: rustfmt gives each a line of its own, which would be most of the kernel.
#[rustfmt::skip]
pub fn backward_kv<
    QElement: Element,
    const HEAD_DIM: usize,
    const VALUE_DIM: usize,
    const ROW_TILES: usize,
    const QUERY_TILES: usize,
    const SIMD_GROUPS: usize,
    const TEAM_SIMDS: usize,
    const IN_REGISTERS: usize,
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
    d_k: &mut Buffer<QElement>,
    d_v: &mut Buffer<QElement>,
    #[constant] in_chunks: bool,
    #[constant] has_softcap: bool,
    #[constant] has_alibi: bool,
    #[constant] has_mask: bool,
    #[constant] has_tree_mask: bool,
) {
    let mut keys: Shared<QElement> = shared(K_LEN);
    let mut values: Shared<QElement> = shared(V_LEN);
    let mut queries: Shared<QElement> = shared(Q_LEN);
    let mut d_outs: Shared<QElement> = shared(O_LEN);
    let mut terms: Shared<f32> = shared(2 * ROWS);
    let mut bounds: Shared<i32> = shared(3 * ROWS);
    let mut exchange: Shared<f32> = shared(SCRATCH_LEN);
    let mut flags: Shared<u32> = shared(4);
    let has = Features { softcap: has_softcap, alibi: has_alibi, mask: has_mask, tree_mask: has_tree_mask };
    let memory = BiasMemory { slopes, mask, tree };
    let mut tile = key_tile_of_group(sequences, params, (16 * KEY_TILES) as u32, backward.kv_rows);
    if tile.first >= tile.rows {
        return;
    }
    let k_source = RowSource::<QElement> { memory: k, rows: head_of_keys(tile.of, backward.k), in_chunks };
    let v_source = RowSource::<QElement> { memory: v, rows: head_of_keys(tile.of, backward.v), in_chunks };
    let reads = tile.begin_query < tile.end_query;
    let kept = Kept::<QElement, K_PAIRS, V_PAIRS, ROW_TILES> {
        keys: kept_rows::<QElement, HEAD_DIM, K_COLUMNS, K_PAIRS, ROW_TILES, TEAM_SIMDS, IN_REGISTERS>(k_source,
            tile.first, reads),
        values: kept_rows::<QElement, VALUE_DIM, V_COLUMNS, V_PAIRS, ROW_TILES, TEAM_SIMDS, IN_REGISTERS>(v_source,
            tile.first, reads),
    };
    if IN_REGISTERS == 0 {
        copy_rows::<QElement, HEAD_DIM, K_COLUMNS, CHUNK, K_LOADS, KEY_TILES, SIMD_GROUPS>(&mut keys, k_source, tile.first, reads);
        copy_rows::<QElement, VALUE_DIM, V_COLUMNS, CHUNK, V_LOADS, KEY_TILES, SIMD_GROUPS>(&mut values, v_source, tile.first, reads);
    }
    clear_padding::<QElement, HEAD_DIM, K_COLUMNS, QUERY_TILES, SIMD_GROUPS>(&mut queries);
    clear_padding::<QElement, VALUE_DIM, V_COLUMNS, QUERY_TILES, SIMD_GROUPS>(&mut d_outs);
    clear_first(&mut flags);
    let of_rows = TermMemory { slopes, neg_lse, delta };
    let mut d_key = no_keys_yet::<K_PAIRS, ROW_TILES>();
    let mut d_value = no_keys_yet::<V_PAIRS, ROW_TILES>();
    for g in 0..params.group {
        tile.of.first = g;
        let q_source = RowSource::<QElement> { memory: q, rows: head_of_queries(tile.of, params, params.q), in_chunks };
        let o_source = RowSource::<QElement> { memory: d_out, rows: head_of_queries(tile.of, params, backward.d_out), in_chunks };
        let mut block = first_block(tile, slopes, params, has);
        let mut next_q = fetch_rows::<QElement, HEAD_DIM, CHUNK, Q_LOADS, QUERY_TILES, SIMD_GROUPS>(q_source, block.query, reads);
        let mut next_o = fetch_rows::<QElement, VALUE_DIM, CHUNK, O_LOADS, QUERY_TILES, SIMD_GROUPS>(o_source, block.query, reads);
        while block.query < tile.end_query {
            store_rows::<QElement, HEAD_DIM, K_COLUMNS, CHUNK, Q_LOADS, QUERY_TILES, SIMD_GROUPS>(&mut queries, next_q, q_source,
                block.query);
            store_rows::<QElement, VALUE_DIM, V_COLUMNS, CHUNK, O_LOADS, QUERY_TILES, SIMD_GROUPS>(&mut d_outs, next_o, o_source,
                block.query);
            store_terms::<ROWS>(tile.of, block.query, of_rows, params, &mut terms, &mut bounds);
            barrier();
            let next = block.query + ROWS as u32;
            let more = next < tile.end_query;
            next_q = fetch_rows::<QElement, HEAD_DIM, CHUNK, Q_LOADS, QUERY_TILES, SIMD_GROUPS>(q_source, next, more);
            next_o = fetch_rows::<QElement, VALUE_DIM, CHUNK, O_LOADS, QUERY_TILES, SIMD_GROUPS>(o_source, next, more);
            let products = products_of_block::<QElement, K_COLUMNS, V_COLUMNS, K_PAIRS, V_PAIRS, ROW_TILES, SCORE_TILES,
                TEAM_SIMDS, IN_REGISTERS>(kept, &keys, &values, &queries, &d_outs, &mut exchange);
            let partial = is_partial::<ROWS>(tile, block.query, &bounds, has);
            let modifiers = Modifiers { memory, scoring: Scoring { has, partial, tree: tile.tree } };
            let pairs = pairs_of_block::<ROWS, ROW_TILES, SCORE_TILES, TEAM_SIMDS>(products, block, &terms, &bounds,
                modifiers, params);
            if partial {
                flag_nonfinite::<QElement, K_COLUMNS, SCORE_TILES, SIMD_GROUPS>(&queries, &mut flags);
                flag_nonfinite::<QElement, V_COLUMNS, SCORE_TILES, SIMD_GROUPS>(&d_outs, &mut flags);
                barrier();
                if flags[0] != 0 {
                    let count = tile.of.sequence.q_len - block.query;
                    take_nonfinite::<QElement, K_COLUMNS, K_PAIRS, ROW_TILES, SCORE_TILES, SIMD_GROUPS, TEAM_SIMDS>(
                        &mut d_key, pairs.d_products, pairs.seen, &mut queries, count);
                    take_nonfinite::<QElement, V_COLUMNS, V_PAIRS, ROW_TILES, SCORE_TILES, SIMD_GROUPS, TEAM_SIMDS>(
                        &mut d_value, pairs.probs, pairs.seen, &mut d_outs, count);
                }
            }
            pv_block::<QElement, V_COLUMNS, V_PAIRS, ROW_TILES, SCORE_TILES, TEAM_SIMDS>(&mut d_value, pairs.probs, &d_outs);
            pv_block::<QElement, K_COLUMNS, K_PAIRS, ROW_TILES, SCORE_TILES, TEAM_SIMDS>(&mut d_key, pairs.d_products, &queries);
            barrier();
            block.query = next;
        }
    }
    store_gradients::<QElement, HEAD_DIM, K_COLUMNS, K_PAIRS, ROW_TILES, TEAM_SIMDS>(d_key, tile, backward.d_k, backward.scale, d_k);
    store_gradients::<QElement, VALUE_DIM, V_COLUMNS, V_PAIRS, ROW_TILES, TEAM_SIMDS>(d_value, tile, backward.d_v, 1.0, d_v);
}
