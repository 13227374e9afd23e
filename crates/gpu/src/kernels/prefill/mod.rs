//! Attention of many query rows: a threadgroup keeps a tile of rows and streams the keys that they see.
//!
//! The `SIMD_GROUPS` SIMD groups are teams of `TEAM_SIMDS`. A team has `16 ROW_TILES` rows of the tile, and each SIMD group of it a part of
//! the columns of queries, keys, values and outputs, so that registers hold its part of long rows. Queries and outputs stay in registers.
//! Blocks of `16 KEY_TILES` keys and values are brought to threadgroup memory once for all teams, by way of registers: words of the next
//! block are on their way while the current one is multiplied. For example, with `HEAD_DIM` 128 an H200 has `SIMD_GROUPS` 8, `TEAM_SIMDS` 1,
//! `ROW_TILES` 1 and `KEY_TILES` 4: a tile of 128 rows, of which each SIMD group has 16, and blocks of 64 keys.
//!
//! ```text
//! block:   keys of block b are stored              barrier
//!          values of b are requested               products of b
//!          in teams of several SIMD groups:
//!          products are exchanged                  barrier, their sums
//!                                                  scores of b, their softmax
//!          values of b are stored                  barrier
//!          keys of b + 1 are requested             probabilities times values of b
//! ```
//!
//! Queries and probabilities are left operands, keys (transposed) and values right operands. A lane holds `scores[m][j][h][n]`
//! of query row `16 m + 8 h + r` of its team and key `8 j + 2 p + n` of the block, where `r` is its [`matrix_row`] and `p`
//! its [`matrix_pair`]: as left operands of the second product, probabilities are where scores were. `out[m][i][h][n]` is
//! column `8 i + 2 p + n` of its part of the output of row `16 m + 8 h + r`. All SIMD groups of a team have the same scores.
//!
//! On CUDA, `r` is `lane / 4` and `p` is `lane % 4`. Of elements of 16 bits, a [`multiply_add_twice`] is one `mma.m16n8k16` (two
//! `mma.m16n8k8` of f16 on 7.5), and each of [`load_rights`] and [`load_rights_transposed`] is one `ldmatrix.x4`.
//!
//! Where threadgroup memory is scarce, keys and values take the same memory in turn (`KV_BUFFERS` is 1): values are stored when every SIMD group
//! has its products, which teams know by the barrier of their exchange and others by one of their own, and keys of the next block when
//! every SIMD group has added its values, by another barrier.
//!
//! Rows of threadgroup memory have [`ROW_PADDING`](block::ROW_PADDING) elements more than a row of keys or values. Of 16 bits, they
//! start an odd multiple of 16 bytes apart, so that eight of them lie in different banks.
//!
//! Queries of codes are rotated and scaled to at most 2, and multiplied as two f16 each, as in [`decode`](super::decode). Levels of codes
//! are exact in f16. The scale of a key multiplies its products, the scale of a value its probability.

pub mod block;
pub mod lefts;
pub mod nonfinite;
pub mod output;
pub mod pass;
pub mod softmax;
pub mod stream;

use self::block::{
    BlockMemory, Codes, block_columns, block_scales, clear_blocks, fetch_block, key_blocks, row_turns,
    row_words, scratch_len, staged_rows, store_both_scales, values_len,
};
use self::lefts::queries_of;
use self::nonfinite::add_values;
use self::output::{
    OutputRows, merged_rows, sinks_of, starts_second_pass, store_lse, store_max_sum, store_partial_out,
    store_rows,
};
use self::pass::{ScoredBlock, first_column, prefill_pass, step_of, tile_of_group};
use self::softmax::{products_of, softmax_block};
use self::stream::{ValueBlock, clear_first, fetch_next, fill_table, no_block, store_keys, store_values};
use super::attend::{Attend, SEQUENCE_WORDS};
use super::formats::{ROT16, hadamard_order, has_half_norms, is_codes, is_scaled, padded};
use super::kv::PAGED_BY_16;
use super::merge::Merge;
use super::nibbles::nibble_bytes;
use super::query::{Features, QueryMemory};
use super::rotation::block_count;
use super::rows::{larger, pair_words, product_type};
use super::tile::{BiasMemory, no_keys_yet};
use flashtile_kernel::prelude::*;

/// Attention of the query rows of each key/value head, one tile of rows a threadgroup: see the module.
///
/// ```text
/// out[b, h, i] = sum_j softmax_j(score[b, h, i, j]) v[b, h / group, j]          [B, H, Sq, Dv]
/// lse[b, h, i] = ln(sum_j exp(score[b, h, i, j]))                               [B, H, Sq], sinks included
/// ```
///
/// Groups are (key/value heads times tiles of `16 ROW_TILES SIMD_GROUPS / TEAM_SIMDS` rows, splits, sequences). With one split, `out` and `lse` are written. With
/// more, each stores partial results as [`decode`](super::decode::decode()) does, undivided, for [`merge`](super::merge::merge()).
///
/// | generic | |
/// |---|---|
/// | `QElement` | type of q |
/// | `K_FORMAT`, `V_FORMAT` | formats of keys and values: constants of [`formats`](super::formats) |
/// | `HEAD_DIM`, `VALUE_DIM` | head dimensions |
/// | `ROW_TILES`, `KEY_TILES`, `SIMD_GROUPS` | tiles of 16 query rows of a team, tiles of 16 keys of a block, SIMD groups |
/// | `TEAM_SIMDS` | SIMD groups of a team, which divide the columns of its rows |
/// | `TABLE_COPIES` | copies of the table of `tq4`: 8, 16 or 32 |
/// | `RESIDENT` | threadgroups that a core is to hold at a time |
/// | `KV_BUFFERS` | blocks in threadgroup memory: 2, or 1 that keys and values take in turn |
///
/// Generics that follow from them:
///
/// | generic | |
/// |---|---|
/// | `KOperand`, `VOperand` | types in which keys and values are multiplied |
/// | `K_COLUMNS`, `V_COLUMNS` | columns of a block of keys, of values |
/// | `K_PAIRS`, `V_PAIRS` | pairs of columns of a lane: one of every 8 columns of its SIMD group |
/// | `K_WORDS`, `V_WORDS` | words of a row, or of a chunk, that a thread loads at a time |
/// | `K_LOADS`, `V_LOADS` | loads of a thread for a block |
/// | `K_PAIR_WORDS`, `V_PAIR_WORDS` | words of the decoded pairs of a row that eight lanes share |
/// | `K_ORDER`, `V_ORDER` | Hadamard orders of the rotations; 0 where rows are not rotated |
/// | `K_BLOCKS` | blocks of keys in threadgroup memory |
/// | `K_SCALES` | scales of a block of keys |
/// | `SCORE_TILES` | tiles of 8 keys of a block, as a lane holds scores |
/// | `V_MEMORY_LEN` | elements of the values' own memory |
/// | `STAGED_LEN` | f32 of a row that is prepared, or rotated back, and of its factor and bias |
/// | `STAGED_ROWS` | rows that a team prepares, or rotates back, at a time |
/// | `BLOCK_SCALES`, `SCRATCH_LEN` | f32 of the scales of a block; of the memory in which SIMD groups prepare rows and exchange products |
/// | `TABLE_BYTES` | bytes of the table of `tq4` |
#[kernel(
    threads = (32 * SIMD_GROUPS) as u32,
    resident = RESIDENT as u32,
    derive(
        KOperand: Element = product_type(QElement, K_FORMAT),
        VOperand: Element = product_type(QElement, V_FORMAT),
        K_COLUMNS: usize = block_columns(HEAD_DIM, TEAM_SIMDS),
        V_COLUMNS: usize = block_columns(VALUE_DIM, TEAM_SIMDS),
        K_PAIRS: usize = block_columns(HEAD_DIM, TEAM_SIMDS) / (8 * TEAM_SIMDS),
        V_PAIRS: usize = block_columns(VALUE_DIM, TEAM_SIMDS) / (8 * TEAM_SIMDS),
        K_WORDS: usize = row_words(KOperand, K_FORMAT, HEAD_DIM),
        V_WORDS: usize = row_words(VOperand, V_FORMAT, VALUE_DIM),
        K_LOADS: usize = row_turns(KOperand, K_FORMAT, HEAD_DIM, KEY_TILES, SIMD_GROUPS),
        V_LOADS: usize = row_turns(VOperand, V_FORMAT, VALUE_DIM, KEY_TILES, SIMD_GROUPS),
        K_PAIR_WORDS: usize = pair_words(KOperand, HEAD_DIM, 8),
        V_PAIR_WORDS: usize = pair_words(VOperand, VALUE_DIM, 8),
        K_ORDER: u32 = hadamard_order(K_FORMAT, HEAD_DIM),
        V_ORDER: u32 = hadamard_order(V_FORMAT, VALUE_DIM),
        K_BLOCKS: usize = key_blocks(K_FORMAT),
        K_SCALES: usize = block_scales(K_FORMAT, HEAD_DIM, KEY_TILES),
        SCORE_TILES: usize = 2 * KEY_TILES,
        V_MEMORY_LEN: usize = values_len(VALUE_DIM, KEY_TILES, TEAM_SIMDS, KV_BUFFERS),
        STAGED_LEN: usize = larger(HEAD_DIM, VALUE_DIM) + 2,
        BLOCK_SCALES: usize = larger(block_scales(K_FORMAT, HEAD_DIM, KEY_TILES) + block_scales(V_FORMAT, VALUE_DIM, KEY_TILES), 1),
        STAGED_ROWS: usize = staged_rows(TEAM_SIMDS, KV_BUFFERS),
        SCRATCH_LEN: usize = scratch_len(ROW_TILES, KEY_TILES, SIMD_GROUPS, TEAM_SIMDS, staged_rows(TEAM_SIMDS, KV_BUFFERS), larger(HEAD_DIM, VALUE_DIM) + 2),
        TABLE_BYTES: usize = nibble_bytes(K_FORMAT, HEAD_DIM, V_FORMAT, VALUE_DIM, TABLE_COPIES),
    ),
    requires(K_FORMAT <= ROT16 && V_FORMAT <= ROT16, "formats of rows"),
    requires(SIMD_GROUPS.is_multiple_of(TEAM_SIMDS) && 8usize.is_multiple_of(TEAM_SIMDS), "teams of 1, 2, 4 or 8 SIMD groups"),
    requires(TEAM_SIMDS > 1 || !(has_half_norms(K_FORMAT, HEAD_DIM as u32) || has_half_norms(V_FORMAT, VALUE_DIM as u32)), "halves of a row with norms of their own are in different SIMD groups"),
    requires(KV_BUFFERS == 2 || KV_BUFFERS == 1 && (K_FORMAT == V_FORMAT || is_codes(K_FORMAT) && is_codes(V_FORMAT)) && K_BLOCKS == 1 && K_COLUMNS == V_COLUMNS && padded(HEAD_DIM as u32) == padded(VALUE_DIM as u32), "keys and values of one memory are alike"),
    requires(KEY_TILES <= 2 * SIMD_GROUPS || !(is_scaled(K_FORMAT) || is_scaled(V_FORMAT)), "a thread for each scale of a block"),
    requires(row_align.is_power_of_two() && row_align <= 16, "rows are at multiples of 1, 2, 4, 8 or 16 bytes"),
    requires(paging <= PAGED_BY_16, "ways to find rows"),
    requires(paging != PAGED_BY_16 || params.page.is_multiple_of(16), "pages of multiples of 16 tokens"),
    requires(params.page_divisor[1] < 64 && params.ring_divisor[1] < 64, "shifts of 64 bits"),
    requires(params.tiles > 0 && groups[0].is_multiple_of(params.tiles), "tiles of every key/value head"),
    requires(is_split || groups[1] == 1, "partial results of splits"),
    requires(params.page > 0 && params.width > 0 && params.group > 0, "pages have rows"),
    requires(sequences.len() >= (SEQUENCE_WORDS * groups[2]) as usize, "the words of every sequence"),
    requires(!has_sinks || sinks.len() >= params.q_heads as usize, "a sink for each head"),
    requires(!with_lse || lse.len() as u64 >= params.rows(), "a logsumexp for each row"),
    requires(K_ORDER == 0 || k_factors.len() >= params.k_factors(HEAD_DIM + block_count(K_ORDER, HEAD_DIM)), "a factor for each coordinate of a key, and a root for each block"),
    requires(V_ORDER == 0 || is_split || v_factors.len() >= VALUE_DIM + block_count(V_ORDER, VALUE_DIM), "a factor for each coordinate of a value, and a root for each block"),
    requires(!is_split || partial_max_sum.len() as u64 >= params.results(groups[1]).saturating_mul(2), "partial_max_sum of every partial result"),
    requires(!is_split || !has_alibi || partial_max_sum.len() as u64 >= params.results(groups[1]).saturating_mul(2).saturating_add(params.rows()), "a shift of every row"),
    requires(!is_split || partial_out.len() as u64 >= params.results(groups[1]).saturating_mul(VALUE_DIM as u64), "partial outputs of every partial result"),
    requires(output.reach([params.queries, params.q_heads, params.batches], VALUE_DIM).is_some_and(|needed| out.len() >= needed), "out reaches to its last row"),
    bench(
        shape(batch = [1, 1], length = [4096, 4096], heads = [16, 16], dim = [64, 128]),
        bytes = 8 * batch * length * heads * dim,
        flops = 4 * batch * heads * length * length * dim,
        tolerance = 0.02,
    ),
)]
// Generics of a call are a paragraph here: rustfmt gives each a line of its own, which would be most of the kernel.
#[rustfmt::skip]
pub fn prefill<
    QElement: Element,
    const K_FORMAT: u32,
    const V_FORMAT: u32,
    const HEAD_DIM: usize,
    const VALUE_DIM: usize,
    const ROW_TILES: usize,
    const KEY_TILES: usize,
    const SIMD_GROUPS: usize,
    const TEAM_SIMDS: usize,
    const TABLE_COPIES: usize,
    const RESIDENT: usize,
    const KV_BUFFERS: usize,
>(
    q: &Buffer<QElement>,
    k: &Buffer<u8>,
    v: &Buffer<u8>,
    table: &Buffer<u32>,
    sequences: &Buffer<i32>,
    k_factors: &Buffer<f32>,
    v_factors: &Buffer<f32>,
    codebooks: &Buffer<f32>,
    means: &Buffer<f32>,
    slopes: &Buffer<f32>,
    mask: &Buffer<u8>,
    tree: &Buffer<u8>,
    sinks: &Buffer<f32>,
    params: &Attend,
    // Only the strides of `out` are read.
    output: &Merge,
    out: &mut Buffer<QElement>,
    lse: &mut Buffer<f32>,
    partial_out: &mut Buffer<f32>,
    partial_max_sum: &mut Buffer<f32>,
    #[constant] paging: u32,
    #[constant] row_align: u32,
    #[constant] has_softcap: bool,
    #[constant] has_alibi: bool,
    #[constant] has_mask: bool,
    #[constant] has_tree_mask: bool,
    #[constant] has_k_mean: bool,
    #[constant] has_sinks: bool,
    #[constant] with_lse: bool,
    #[constant] is_split: bool,
) {
    let mut keys: Shared<KOperand> = shared(K_BLOCKS * 16 * KEY_TILES * (K_COLUMNS + block::ROW_PADDING));
    let mut vals: Shared<VOperand> = shared(V_MEMORY_LEN);
    let mut scales: Shared<f32> = shared(BLOCK_SCALES);
    let mut scratch: Shared<f32> = shared(SCRATCH_LEN);
    let mut nibbles: Shared<u8> = shared(TABLE_BYTES);
    let mut flags: Shared<u32> = shared(1 + 32 * SIMD_GROUPS);
    let has = Features { softcap: has_softcap, alibi: has_alibi, mask: has_mask, tree_mask: has_tree_mask };
    let bias = BiasMemory { slopes, mask, tree };
    let k_memory = BlockMemory { rows: k, table, codebooks, row_align };
    let v_memory = BlockMemory { rows: v, table, codebooks, row_align };
    let tile = tile_of_group(sequences, params, (16 * ROW_TILES * SIMD_GROUPS / TEAM_SIMDS) as u32);
    if tile.first >= tile.rows {
        return;
    }
    let pass = prefill_pass::<K_FORMAT, V_FORMAT, HEAD_DIM, VALUE_DIM, ROW_TILES, KEY_TILES, SIMD_GROUPS, TEAM_SIMDS,
        TABLE_COPIES>(tile, slopes, params, has, paging);
    let k_codes = Codes { levels: pass.k.levels, codebooks };
    let v_codes = Codes { levels: pass.v.levels, codebooks };
    let mut next = no_block::<K_WORDS, K_LOADS>();
    if pass.first < pass.end {
        next = fetch_next::<K_FORMAT, V_FORMAT, HEAD_DIM, VALUE_DIM, K_WORDS, K_LOADS, K_PAIR_WORDS, KEY_TILES,
            SIMD_GROUPS, ROW_TILES>(k_memory, v_memory, pass, pass.first);
    }
    clear_first(&mut flags);
    clear_blocks::<KOperand, VOperand, HEAD_DIM, VALUE_DIM, K_COLUMNS, V_COLUMNS, K_BLOCKS, KEY_TILES, SIMD_GROUPS,
        KV_BUFFERS>(&mut keys, &mut vals);
    fill_table::<K_FORMAT, V_FORMAT, HEAD_DIM, VALUE_DIM, SIMD_GROUPS>(k_codes, v_codes, &mut nibbles);
    let query = QueryMemory { factors: k_factors, factor_stride: params.k_factor_stride, means, centered: has_k_mean };
    let queries = queries_of::<QElement, KOperand, K_FORMAT, HEAD_DIM, K_COLUMNS, K_PAIR_WORDS, K_ORDER, K_PAIRS,
        ROW_TILES, TEAM_SIMDS, STAGED_ROWS, STAGED_LEN>(q, tile, params, query, &mut scratch);
    let column = first_column::<V_COLUMNS, TEAM_SIMDS>();
    let mut state = no_keys_yet::<V_PAIRS, ROW_TILES>();
    let mut passes = true;
    while passes {
        let mut first = pass.first;
        while first < pass.end {
            store_keys::<KOperand, K_FORMAT, HEAD_DIM, K_COLUMNS, K_WORDS, K_LOADS, K_PAIR_WORDS, KEY_TILES,
                SIMD_GROUPS>(&mut keys, next, k_codes, &nibbles);
            store_both_scales::<K_FORMAT, HEAD_DIM, V_FORMAT, VALUE_DIM, KEY_TILES, K_SCALES>(&mut scales,
                next.scales);
            barrier();
            let v_words = fetch_block::<V_FORMAT, VALUE_DIM, V_WORDS, V_LOADS, V_PAIR_WORDS, KEY_TILES,
                SIMD_GROUPS>(v_memory, pass.v, first);
            let products = products_of::<KOperand, K_FORMAT, HEAD_DIM, K_COLUMNS, K_PAIRS, ROW_TILES, SCORE_TILES,
                TEAM_SIMDS>(queries, &keys, &scales, &mut scratch);
            let step = step_of::<ROW_TILES, KEY_TILES>(pass, first);
            let mut block = ScoredBlock::<ROW_TILES> { pass, step, memory: bias, centered: has_k_mean, column,
                has_nonfinite: false };
            let probs = softmax_block::<KOperand, V_FORMAT, VALUE_DIM, K_PAIRS, V_PAIRS, ROW_TILES, SCORE_TILES,
                K_SCALES>(&mut state, products, queries, block, &scales, params);
            let finds_nonfinite = step.any_partial || state.shrunk != 0;
            let v_block = ValueBlock::<V_WORDS, V_LOADS> { words: v_words, codes: v_codes, finds_nonfinite };
            store_values::<KOperand, VOperand, V_FORMAT, VALUE_DIM, V_COLUMNS, V_WORDS, V_LOADS, V_PAIR_WORDS,
                KEY_TILES, SIMD_GROUPS, TEAM_SIMDS, KV_BUFFERS>(&mut keys, &mut vals, v_block, &nibbles, &mut flags);
            barrier();
            next = fetch_next::<K_FORMAT, V_FORMAT, HEAD_DIM, VALUE_DIM, K_WORDS, K_LOADS, K_PAIR_WORDS, KEY_TILES,
                SIMD_GROUPS, ROW_TILES>(k_memory, v_memory, pass, step.next);
            block.has_nonfinite = finds_nonfinite && flags[0] != 0;
            add_values::<KOperand, VOperand, V_COLUMNS, V_PAIRS, ROW_TILES, SCORE_TILES, SIMD_GROUPS, TEAM_SIMDS,
                KV_BUFFERS>(&mut state, &mut keys, &mut vals, probs, block, params);
            first = step.end;
        }
        passes = starts_second_pass::<V_FORMAT, V_PAIRS, ROW_TILES, SIMD_GROUPS, TEAM_SIMDS>(&mut state, &mut flags);
    }
    if is_split {
        store_max_sum::<V_PAIRS, ROW_TILES, TEAM_SIMDS>(state, pass, tile, params, has_alibi, partial_max_sum);
        store_partial_out::<V_FORMAT, VALUE_DIM, V_COLUMNS, V_PAIR_WORDS, V_PAIRS, ROW_TILES, TEAM_SIMDS>(state, tile,
            params, partial_out);
        return;
    }
    let row_sinks = sinks_of::<ROW_TILES, TEAM_SIMDS>(tile, sinks, params, has_sinks);
    let rows = OutputRows { tile, group: params.group, strides: output.out };
    let merged = merged_rows::<V_PAIRS, ROW_TILES>(state, pass, row_sinks);
    store_rows::<QElement, V_FORMAT, VALUE_DIM, V_COLUMNS, V_PAIR_WORDS, V_ORDER, V_PAIRS, ROW_TILES, TEAM_SIMDS,
        STAGED_ROWS, STAGED_LEN>(state, merged, rows, v_factors, &mut scratch, out);
    if with_lse {
        store_lse::<ROW_TILES, TEAM_SIMDS>(merged, row_sinks, tile, params, lse);
    }
}
