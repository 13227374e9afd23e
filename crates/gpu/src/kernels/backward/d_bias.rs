//! Gradients of an additive mask: a threadgroup keeps a tile of the mask, and adds up the gradients of every score that an element of the
//! tile is added to.
//!
//! Where the mask is broadcast, an element is added to many scores. The threadgroup then visits all sequences, heads, query rows or keys, and
//! adds tile upon tile of gradients in registers; rows or columns of a broadcast axis are added in threadgroup memory at the end. Each
//! element has one owner, and its terms a fixed order.

use super::d_q::{is_partial, keys_of_tile, operands_of, products_of_block, terms_of_rows};
use super::d_scores::{Modifiers, RowTerms, TermMemory, TileProducts, pair_of};
use super::params::Backward;
use super::row_block::{RowSource, block_len, chunk_elements, chunk_loads, copy_rows, head_of_keys};
use crate::kernels::attend::{Attend, sequence_of};
use crate::kernels::prefill::block::{block_columns, scratch_len};
use crate::kernels::prefill::lefts::row_lefts;
use crate::kernels::prefill::pass::{part_index, team_index};
use crate::kernels::query::{Features, RowTile};
use crate::kernels::rows::larger;
use crate::kernels::tile::{BiasMemory, Scoring};
use flashtile_kernel::prelude::*;

/// The gradient of a mask.
#[params]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MaskGradient {
    /// Sequences, query heads, query rows and keys of the mask; 1 where it is broadcast.
    pub shape: [u32; 4],
    /// Query heads of a key/value head.
    pub group: u32,
}

/// Gradients of the scores of a tile, `[m][j][h][n]` as [`d_scores`](super::d_scores) has them.
#[device]
struct ScoreSums<const SCORE_TILES: usize, const ROW_TILES: usize> {
    /// Sums over all tiles so far.
    sums: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
}

/// Adds the gradients of the scores of a block from key `first` on.
#[device]
#[inline(always)]
fn add_scores<const ROW_TILES: usize, const SCORE_TILES: usize>(
    products: TileProducts<SCORE_TILES, ROW_TILES>,
    first: i32,
    terms: [[RowTerms; 2]; ROW_TILES],
    to: &mut ScoreSums<SCORE_TILES, ROW_TILES>,
    modifiers: Modifiers,
    params: &Attend,
) {
    for m in 0..ROW_TILES {
        for j in 0..SCORE_TILES {
            for h in 0..2usize {
                for n in 0..2usize {
                    let key = first + (8 * j + n) as i32 + 2 * matrix_pair() as i32;
                    let product = products.scores[m][j][h][n] * params.scale;
                    let d_prob = products.d_probs[m][j][h][n];
                    let pair = pair_of(product, d_prob, key, terms[m][h], modifiers, params);
                    to.sums[m][j][h][n] += pair.d_score;
                }
            }
        }
    }
}

/// Stores the sums of a team's rows in threadgroup memory, `[rows of the threadgroup, 8 SCORE_TILES]`.
#[device]
fn store_tile<const ROW_TILES: usize, const SCORE_TILES: usize, const TEAM_SIMDS: usize>(
    from: ScoreSums<SCORE_TILES, ROW_TILES>,
    tile_sums: &mut Shared<f32>,
) {
    let first = (16 * ROW_TILES) as u32 * team_index::<TEAM_SIMDS>() + matrix_row();
    if part_index::<TEAM_SIMDS>() == 0 {
        for m in 0..ROW_TILES {
            for h in 0..2usize {
                let row = first + (16 * m + 8 * h) as u32;
                for j in 0..SCORE_TILES {
                    for n in 0..2usize {
                        let column = (8 * j + n) as u32 + 2 * matrix_pair();
                        tile_sums[row * (8 * SCORE_TILES) as u32 + column] = from.sums[m][j][h][n];
                    }
                }
            }
        }
    }
}

/// Indices from one on and up to another.
#[device]
struct Span {
    /// The first.
    first: u32,
    /// The first behind the last.
    end: u32,
}

/// The indices of an axis that an element or a tile of the mask adds up: all of them where the mask has 1 element, otherwise its own.
#[device]
fn visited(mask: u32, own: u32, all: u32) -> Span {
    let mut span = Span { first: own, end: own + 1 };
    if mask == 1 {
        span.first = 0;
        span.end = all;
    }
    span
}

/// Writes the mask's elements from row `row` and column `column` on, of the sums of a tile of `ROWS` rows and `COLUMNS` columns.
#[device]
fn store_mask<const ROWS: usize, const COLUMNS: usize, const SIMD_GROUPS: usize>(
    tile_sums: &Shared<f32>,
    row: u32,
    column: u32,
    shape: [u32; 4],
    d_bias: &mut Buffer<f32>,
) {
    let rows = (shape[2] - row).min(ROWS as u32);
    let columns = (shape[3] - column).min(COLUMNS as u32);
    let start = (group_z() as u64 * shape[1] as u64 + group_y() as u64) * shape[2] as u64;
    for at in (thread_index()..rows * columns).step_by(32 * SIMD_GROUPS) {
        let own_row = at / columns;
        let own_column = at % columns;
        let of_rows = visited(shape[2], own_row, ROWS as u32);
        let of_columns = visited(shape[3], own_column, COLUMNS as u32);
        let mut sum = 0.0;
        for r in of_rows.first..of_rows.end {
            for c in of_columns.first..of_columns.end {
                sum += tile_sums[r * COLUMNS as u32 + c];
            }
        }
        let line = start + (row + own_row) as u64;
        d_bias[line * shape[3] as u64 + (column + own_column) as u64] = sum;
    }
}

/// Gradients of an additive mask, one tile of its elements a threadgroup: see the module.
///
/// ```text
/// d_bias[b, h, i, j] = sum prob[i, j] (d_out[i] . v[j] - delta[i])        of every score that the element is added to
/// ```
///
/// Groups are (tiles of `16 ROW_TILES SIMD_GROUPS / TEAM_SIMDS` rows times tiles of `16 KEY_TILES` keys, heads, sequences). Heads or sequences are
/// 1 where the mask is broadcast. `params.tiles` is the number of tiles of rows, and `params.group` 1: rows are of one query head. It has the
/// generics of [`backward_q`](super::d_q::backward_q()).
#[kernel(
    threads = (32 * SIMD_GROUPS) as u32,
    derive(
        K_COLUMNS: usize = block_columns(HEAD_DIM, TEAM_SIMDS),
        V_COLUMNS: usize = block_columns(VALUE_DIM, TEAM_SIMDS),
        K_PAIRS: usize = block_columns(HEAD_DIM, TEAM_SIMDS) / (8 * TEAM_SIMDS),
        V_PAIRS: usize = block_columns(VALUE_DIM, TEAM_SIMDS) / (8 * TEAM_SIMDS),
        CHUNK: usize = chunk_elements(QElement),
        K_LOADS: usize = chunk_loads(QElement, HEAD_DIM, KEY_TILES, SIMD_GROUPS),
        V_LOADS: usize = chunk_loads(QElement, VALUE_DIM, KEY_TILES, SIMD_GROUPS),
        SCORE_TILES: usize = 2 * KEY_TILES,
        ROWS: usize = 16 * ROW_TILES * SIMD_GROUPS / TEAM_SIMDS,
        KEYS: usize = 16 * KEY_TILES,
        K_LEN: usize = block_len(block_columns(HEAD_DIM, TEAM_SIMDS), KEY_TILES),
        V_LEN: usize = block_len(block_columns(VALUE_DIM, TEAM_SIMDS), KEY_TILES),
        SUMS_LEN: usize = 16 * ROW_TILES * SIMD_GROUPS / TEAM_SIMDS * 16 * KEY_TILES,
        SCRATCH_LEN: usize = larger(scratch_len(ROW_TILES, KEY_TILES, SIMD_GROUPS, TEAM_SIMDS, 0, 0), 1),
    ),
    requires(SIMD_GROUPS.is_multiple_of(TEAM_SIMDS) && 8usize.is_multiple_of(TEAM_SIMDS), "teams of 1, 2, 4 or 8 SIMD groups"),
    requires(params.tiles > 0 && groups[0].is_multiple_of(params.tiles), "tiles of rows for every tile of keys"),
    requires(params.group == 1 && of_mask.group > 0, "rows of one query head"),
    requires(neg_lse.len() as u64 >= params.rows() && delta.len() as u64 >= params.rows(), "terms of each row"),
    bench(
        shape(batch = [1, 1], length = [4096, 4096], heads = [16, 16], dim = [64, 128]),
        bytes = 8 * batch * length * heads * dim + 8 * heads * length * length,
        flops = 4 * batch * heads * length * length * dim,
        tolerance = 0.02,
    ),
)]
// Generics of a call are a paragraph here: rustfmt gives each a line of its own, which would be most of the kernel.
#[rustfmt::skip]
pub fn backward_bias<
    QElement: Element,
    const HEAD_DIM: usize,
    const VALUE_DIM: usize,
    const ROW_TILES: usize,
    const KEY_TILES: usize,
    const SIMD_GROUPS: usize,
    const TEAM_SIMDS: usize,
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
    of_mask: &MaskGradient,
    d_bias: &mut Buffer<f32>,
    #[constant] in_chunks: bool,
    #[constant] has_softcap: bool,
    #[constant] has_alibi: bool,
    #[constant] has_mask: bool,
    #[constant] has_tree_mask: bool,
) {
    let mut keys: Shared<QElement> = shared(K_LEN);
    let mut values: Shared<QElement> = shared(V_LEN);
    let mut exchange: Shared<f32> = shared(SCRATCH_LEN);
    let mut tile_sums: Shared<f32> = shared(SUMS_LEN);
    let has = Features { softcap: has_softcap, alibi: has_alibi, mask: has_mask, tree_mask: has_tree_mask };
    let memory = BiasMemory { slopes, mask, tree };
    let of_rows = TermMemory { slopes, neg_lse, delta };
    let own_row = group_x() % params.tiles * ROWS as u32;
    let own_key = group_x() / params.tiles * KEYS as u32;
    let of_sequences = visited(of_mask.shape[0], group_z(), backward.sequences);
    let of_heads = visited(of_mask.shape[1], group_y(), params.q_heads);
    let mut sums = ScoreSums::<SCORE_TILES, ROW_TILES> { sums: [[[[0.0; 2]; 2]; SCORE_TILES]; ROW_TILES] };
    for index in of_sequences.first..of_sequences.end {
        let sequence = sequence_of(sequences, index);
        let mut end_row = sequence.q_len;
        if of_mask.shape[2] > 1 {
            end_row = end_row.min(own_row + ROWS as u32);
        }
        for head in of_heads.first..of_heads.end {
            for row in (own_row..end_row).step_by(ROWS) {
                let tile = RowTile { sequence, index, kv_head: head, first: row, rows: sequence.q_len };
                let mut of_keys = tile;
                of_keys.kv_head = head / of_mask.group;
                let seen = keys_of_tile::<ROW_TILES, SIMD_GROUPS, TEAM_SIMDS>(tile, params, has);
                let mut key = seen.all.low as u32 / 16 * 16;
                let mut end_key = seen.all.high as u32;
                if of_mask.shape[3] > 1 {
                    // Keys of blocks in front of the visible ones have gradients of 0.
                    end_key = select(own_key + KEYS as u32 > key, end_key.min(own_key + KEYS as u32), 0);
                    key = own_key;
                }
                if key < end_key {
                    let k_source = RowSource::<QElement> { memory: k, rows: head_of_keys(of_keys, backward.k), in_chunks };
                    let v_source = RowSource::<QElement> { memory: v, rows: head_of_keys(of_keys, backward.v), in_chunks };
                    let q_lefts = operands_of::<QElement, K_PAIRS, ROW_TILES>(row_lefts::<QElement, QElement, HEAD_DIM, K_COLUMNS,
                        K_PAIRS, ROW_TILES, TEAM_SIMDS>(q, params.q, tile, params, 1.0));
                    let d_out_lefts = operands_of::<QElement, V_PAIRS, ROW_TILES>(row_lefts::<QElement, QElement, VALUE_DIM,
                        V_COLUMNS, V_PAIRS, ROW_TILES, TEAM_SIMDS>(d_out, backward.d_out, tile, params, 1.0));
                    let terms = terms_of_rows::<ROW_TILES, TEAM_SIMDS>(tile, of_rows, params, has);
                    while key < end_key {
                        copy_rows::<QElement, HEAD_DIM, K_COLUMNS, CHUNK, K_LOADS, KEY_TILES, SIMD_GROUPS>(&mut keys, k_source, key, true);
                        copy_rows::<QElement, VALUE_DIM, V_COLUMNS, CHUNK, V_LOADS, KEY_TILES, SIMD_GROUPS>(&mut values, v_source, key, true);
                        barrier();
                        let products = products_of_block::<QElement, K_COLUMNS, V_COLUMNS, K_PAIRS, V_PAIRS, ROW_TILES, SCORE_TILES,
                            TEAM_SIMDS>(q_lefts, d_out_lefts, &keys, &values, &mut exchange);
                        let following = key + KEYS as u32;
                        let partial = is_partial(seen.own, key, following, has);
                        let modifiers = Modifiers { memory, scoring: Scoring { has, partial, tree: seen.all.tree } };
                        add_scores::<ROW_TILES, SCORE_TILES>(products, key as i32, terms, &mut sums, modifiers, params);
                        barrier();
                        key = following;
                    }
                }
            }
        }
    }
    store_tile::<ROW_TILES, SCORE_TILES, TEAM_SIMDS>(sums, &mut tile_sums);
    barrier();
    store_mask::<ROWS, KEYS, SIMD_GROUPS>(&tile_sums, own_row, own_key, of_mask.shape, d_bias);
}
