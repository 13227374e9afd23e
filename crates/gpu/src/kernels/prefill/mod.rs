//! Attention of many query rows: a threadgroup keeps a tile of rows and streams the keys that they see.
//!
//! The `S` SIMD groups are teams of `W`. A team has `16 M` rows of the tile, and each SIMD group of it a part of the columns of queries,
//! keys, values and outputs, so that registers hold its part of long rows. Queries and outputs stay in registers. Blocks of `16 U` keys
//! and values are brought to threadgroup memory once for all teams, by way of registers: words of the next block are on their way while
//! the current one is multiplied. For example, with `D` 128 an H200 has `S` 8, `W` 1, `M` 1 and `U` 4: a tile of 128 rows, of which each
//! SIMD group has 16, and blocks of 64 keys.
//!
//! ```text
//! block:   keys of block b are stored              barrier
//!          values of b are requested               products of b
//!          where W > 1: products are exchanged     barrier, their sums
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
//! Where threadgroup memory is scarce, keys and values take the same memory in turn (`B` is 1): values are stored when every SIMD group
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
use super::attend::Attend;
use super::formats::{MLX8_PLAIN, hadamard_order, has_half_norms, is_codes, padded};
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
/// Groups are (key/value heads times tiles of `16 M S / W` rows, splits, sequences). With one split, `out` and `lse` are written. With
/// more, each stores partial results as [`decode`](super::decode::decode()) does, undivided, for [`merge`](super::merge::merge()).
///
/// | generic | |
/// |---|---|
/// | `Q` | type of q |
/// | `KF`, `VF` | formats of keys and values: constants of [`formats`](super::formats) |
/// | `D`, `DV` | head dimensions |
/// | `M`, `U`, `S` | tiles of 16 query rows of a team, tiles of 16 keys of a block, SIMD groups |
/// | `W` | SIMD groups of a team, which divide the columns of its rows |
/// | `C` | copies of the table of `tq4`: 8, 16 or 32 |
/// | `R` | threadgroups that a core is to hold at a time |
/// | `B` | blocks in threadgroup memory: 2, or 1 that keys and values take in turn |
///
/// Generics that follow from them:
///
/// | generic | |
/// |---|---|
/// | `K`, `V` | types of the products with keys and values |
/// | `KC`, `VC` | columns of a block of keys, of values |
/// | `KN`, `VN` | tiles of 8 columns of a SIMD group |
/// | `KL`, `VL` | words of a row, or of a chunk, that a thread loads at a time |
/// | `KR`, `VR` | loads of a thread for a block |
/// | `KP`, `VP` | words of the decoded pairs of a row that eight lanes share |
/// | `KO`, `VO` | Hadamard orders of the rotations; 0 where rows are not rotated |
/// | `KB` | blocks of keys in threadgroup memory |
/// | `KS` | scales of a block of keys |
/// | `F` | tiles of 8 keys of a block |
/// | `VM` | elements of the values' own memory |
/// | `LEN` | f32 of a row that is prepared, or rotated back, and of its factor and bias |
/// | `SR` | rows that a team prepares, or rotates back, at a time |
/// | `SN`, `X` | f32 of the scales of a block; of the memory in which SIMD groups prepare rows and exchange products |
/// | `NB` | bytes of the table of `tq4` |
#[kernel(
    threads = (32 * S) as u32,
    resident = R as u32,
    derive(
        K: Element = product_type(Q, KF),
        V: Element = product_type(Q, VF),
        KC: usize = block_columns(D, W),
        VC: usize = block_columns(DV, W),
        KN: usize = block_columns(D, W) / (8 * W),
        VN: usize = block_columns(DV, W) / (8 * W),
        KL: usize = row_words(K, KF, D),
        VL: usize = row_words(V, VF, DV),
        KR: usize = row_turns(K, KF, D, U, S),
        VR: usize = row_turns(V, VF, DV, U, S),
        KP: usize = pair_words(K, D, 8),
        VP: usize = pair_words(V, DV, 8),
        KO: u32 = hadamard_order(KF, D),
        VO: u32 = hadamard_order(VF, DV),
        KB: usize = key_blocks(KF),
        KS: usize = block_scales(KF, D, U),
        F: usize = 2 * U,
        VM: usize = values_len(DV, U, W, B),
        LEN: usize = larger(D, DV) + 2,
        SN: usize = larger(block_scales(KF, D, U) + block_scales(VF, DV, U), 1),
        SR: usize = staged_rows(W, B),
        X: usize = scratch_len(M, U, S, W, staged_rows(W, B), larger(D, DV) + 2),
        NB: usize = nibble_bytes(KF, D, VF, DV, C),
    ),
    requires(KF <= MLX8_PLAIN && VF <= MLX8_PLAIN, "formats of rows"),
    requires(S.is_multiple_of(W) && 8usize.is_multiple_of(W), "teams of 1, 2, 4 or 8 SIMD groups"),
    requires(W > 1 || !(has_half_norms(KF, D as u32) || has_half_norms(VF, DV as u32)), "halves of a row with norms of their own are in different SIMD groups"),
    requires(B == 2 || B == 1 && (KF == VF || is_codes(KF) && is_codes(VF)) && KB == 1 && KC == VC && padded(D as u32) == padded(DV as u32), "keys and values of one memory are alike"),
    requires(U <= 2 * S || !(is_codes(KF) || is_codes(VF)), "a thread for each scale of a block"),
    requires(row_align.is_power_of_two() && row_align <= 16, "rows are at multiples of 1, 2, 4, 8 or 16 bytes"),
    requires(paging <= PAGED_BY_16, "ways to find rows"),
    requires(paging != PAGED_BY_16 || params.page.is_multiple_of(16), "pages of multiples of 16 tokens"),
    requires(params.page_divisor[1] < 64 && params.ring_divisor[1] < 64, "shifts of 64 bits"),
    requires(params.tiles > 0 && groups[0].is_multiple_of(params.tiles), "tiles of every key/value head"),
    requires(is_split || groups[1] == 1, "partial results of splits"),
    requires(params.page > 0 && params.width > 0 && params.group > 0, "pages have rows"),
    requires(sequences.len() >= 8 * groups[2] as usize, "eight words of every sequence"),
    requires(!has_sinks || sinks.len() >= params.q_heads as usize, "a sink for each head"),
    requires(!with_lse || lse.len() as u64 >= params.rows(), "a logsumexp for each row"),
    requires(KO == 0 || k_factors.len() >= D + block_count(KO, D), "a factor for each coordinate of a key, and a root for each block"),
    requires(VO == 0 || is_split || v_factors.len() >= DV + block_count(VO, DV), "a factor for each coordinate of a value, and a root for each block"),
    requires(!is_split || partial_max_sum.len() as u64 >= params.results(groups[1]).saturating_mul(2), "partial_max_sum of every partial result"),
    requires(!is_split || !has_alibi || partial_max_sum.len() as u64 >= params.results(groups[1]).saturating_mul(2).saturating_add(params.rows()), "a shift of every row"),
    requires(!is_split || partial_out.len() as u64 >= params.results(groups[1]).saturating_mul(DV as u64), "partial outputs of every partial result"),
    requires(output.reach([params.queries, params.q_heads, params.batches], DV).is_some_and(|needed| out.len() >= needed), "out reaches to its last row"),
    bench(
        shape(batch = [1, 1], length = [4096, 4096], heads = [16, 16], dim = [64, 128]),
        bytes = 8 * batch * length * heads * dim,
        flops = 4 * batch * heads * length * length * dim,
        tolerance = 0.02,
    ),
)]
pub fn prefill<
    Q: Element,
    const KF: u32,
    const VF: u32,
    const D: usize,
    const DV: usize,
    const M: usize,
    const U: usize,
    const S: usize,
    const W: usize,
    const C: usize,
    const R: usize,
    const B: usize,
>(
    q: &Buffer<Q>,
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
    out: &mut Buffer<Q>,
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
    let mut keys: Shared<K> = shared(KB * 16 * U * (KC + block::ROW_PADDING));
    let mut vals: Shared<V> = shared(VM);
    let mut scales: Shared<f32> = shared(SN);
    let mut scratch: Shared<f32> = shared(X);
    let mut nibbles: Shared<u8> = shared(NB);
    let mut flags: Shared<u32> = shared(1 + 32 * S);
    let has = Features { softcap: has_softcap, alibi: has_alibi, mask: has_mask, tree_mask: has_tree_mask };
    let bias = BiasMemory { slopes, mask, tree };
    let k_memory = BlockMemory { rows: k, table, codebooks, row_align };
    let v_memory = BlockMemory { rows: v, table, codebooks, row_align };
    let tile = tile_of_group(sequences, params, (16 * M * S / W) as u32);
    if tile.first >= tile.rows {
        return;
    }
    let pass = prefill_pass::<KF, VF, D, DV, M, U, S, W, C>(tile, slopes, params, has, paging);
    let k_codes = Codes { levels: pass.k.levels, codebooks };
    let v_codes = Codes { levels: pass.v.levels, codebooks };
    let mut next = no_block::<KL, KR>();
    if pass.first < pass.end {
        next = fetch_next::<KF, VF, D, DV, KL, KR, KP, U, S, M>(k_memory, v_memory, pass, pass.first);
    }
    clear_first(&mut flags);
    clear_blocks::<K, V, D, DV, KC, VC, KB, U, S, B>(&mut keys, &mut vals);
    fill_table::<KF, VF, D, DV, S>(k_codes, v_codes, &mut nibbles);
    let query = QueryMemory { factors: k_factors, means, centered: has_k_mean };
    let queries =
        queries_of::<Q, K, KF, D, KC, KP, KO, KN, M, W, SR, LEN>(q, tile, params, query, &mut scratch);
    let column = first_column::<VC, W>();
    let mut state = no_keys_yet::<VN, M>();
    let mut passes = true;
    while passes {
        let mut first = pass.first;
        while first < pass.end {
            store_keys::<K, KF, D, KC, KL, KR, KP, U, S>(&mut keys, next, k_codes, &nibbles);
            store_both_scales::<KF, D, VF, DV, U, KS>(&mut scales, next.scales);
            barrier();
            let v_words = fetch_block::<VF, DV, VL, VR, VP, U, S>(v_memory, pass.v, first);
            let products = products_of::<K, KF, D, KC, KN, M, F, W>(queries, &keys, &scales, &mut scratch);
            let step = step_of::<M, U>(pass, first);
            let mut block = ScoredBlock::<M> {
                pass,
                step,
                memory: bias,
                centered: has_k_mean,
                column,
                has_nonfinite: false,
            };
            let probs = softmax_block::<K, VF, DV, KN, VN, M, F, KS>(
                &mut state, products, queries, block, &scales, params,
            );
            let finds_nonfinite = step.any_partial || state.shrunk != 0;
            let v_block = ValueBlock::<VL, VR> { words: v_words, codes: v_codes, finds_nonfinite };
            store_values::<K, V, VF, DV, VC, VL, VR, VP, U, S, W, B>(
                &mut keys, &mut vals, v_block, &nibbles, &mut flags,
            );
            barrier();
            next = fetch_next::<KF, VF, D, DV, KL, KR, KP, U, S, M>(k_memory, v_memory, pass, step.next);
            block.has_nonfinite = finds_nonfinite && flags[0] != 0;
            add_values::<K, V, VC, VN, M, F, S, W, B>(&mut state, &mut keys, &mut vals, probs, block, params);
            first = step.end;
        }
        passes = starts_second_pass::<VF, VN, M, S, W>(&mut state, &mut flags);
    }
    if is_split {
        store_max_sum::<VN, M, W>(state, pass, tile, params, has_alibi, partial_max_sum);
        store_partial_out::<VF, DV, VC, VP, VN, M, W>(state, tile, params, partial_out);
        return;
    }
    let row_sinks = sinks_of::<M, W>(tile, sinks, params, has_sinks);
    let rows = OutputRows { tile, group: params.group, strides: output.out };
    let merged = merged_rows::<VN, M>(state, pass, row_sinks);
    store_rows::<Q, VF, DV, VC, VP, VO, VN, M, W, SR, LEN>(state, merged, rows, v_factors, &mut scratch, out);
    if with_lse {
        store_lse::<M, W>(merged, row_sinks, tile, params, lse);
    }
}
