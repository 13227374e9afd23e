//! Attention of many query rows: a threadgroup keeps a tile of rows and streams the keys that they see.
//!
//! Every SIMD group has `16 M` rows of the tile, whose queries and outputs stay in its registers. Blocks of `16 U` keys and
//! values are copied to threadgroup memory once for all of them, by way of registers: words of the next block are on their way
//! while the current one is multiplied.
//!
//! ```text
//! block:   keys of block b are stored              barrier
//!          values of b are requested               scores of b, their softmax
//!          values of b are stored                  barrier
//!          keys of b + 1 are requested             probabilities times values of b
//! ```
//!
//! Queries and probabilities are left operands, keys (transposed) and values right operands. A lane holds `scores[m][j][h][n]`
//! of query row `16 m + 8 h + r` of its SIMD group and key `8 j + 2 p + n` of the block, where `r` is its [`matrix_row`] and `p`
//! its [`matrix_pair`]: as left operands of the second product, probabilities are where scores were. `out[m][i][h][n]` is
//! coordinate `8 i + 2 p + n` of the output of row `16 m + 8 h + r`.
//!
//! Rows of threadgroup memory have [`ROW_PADDING`] elements more than a row of keys or values. They start an odd multiple of 16
//! bytes apart, so that eight of them lie in different banks.

use super::attend::Attend;
use super::formats::{BF16, F32, first_bytes};
use super::kv::{KvHead, PAGED_BY_16, key_group, kv_head, row_of_key};
use super::merge::{Merge, Merged, lse_of};
use super::query::{
    Features, KeyRange, RowBound, RowTile, head_of, row_bound, row_tile, unseeing_row, visible_keys,
};
use super::rows::{Levels, has_nonfinite, product_type, words};
use super::score::to_log2;
use super::tile::{
    Accumulator, BiasMemory, SECOND_PASS, SHRINK, SLACK, Scoring, masked, no_keys_yet, shrink_of,
};
use flashtile_kernel::prelude::*;

/// Elements between two rows of a block in threadgroup memory.
#[constant]
pub const ROW_PADDING: usize = 8;

/// Words of a block of `16 * sixteens` rows that a thread of `simds` SIMD groups copies: chunks of four words.
pub const fn block_words(format: u32, dim: usize, sixteens: usize, simds: usize) -> usize {
    (sixteens * first_bytes(format, dim as u32) as usize).div_ceil(32 * simds) * 4
}

/// The tile of this threadgroup, of `size` rows. The tiles of the last rows come first: where keys are masked causally they
/// take the longest.
#[device]
fn tile_of_group(sequences: &Buffer<i32>, params: &Attend, size: u32) -> RowTile {
    let heads = groups_x() / params.tiles;
    let mut tile = row_tile(sequences, params, size);
    tile.kv_head = group_x() % heads;
    tile.first = (params.tiles - 1 - group_x() / heads) * size;
    tile
}

/// The keys that rows `first` to `end` of a tile see. Both bounds of the keys of a row grow with the row.
#[device]
fn keys_of_rows(tile: RowTile, first: u32, end: u32, params: &Attend, has: Features) -> KeyRange {
    let mut keys = KeyRange {
        low: 0,
        high: 0,
        full_low: i32::MAX,
        full_high: 0,
        tree: tile.sequence.kv_len - tile.sequence.q_len as i32,
    };
    if first < end {
        let of_first = visible_keys(tile, first, params);
        let of_last = visible_keys(tile, end - 1, params);
        keys.low = of_first.begin;
        keys.high = of_last.end;
        keys.full_low = of_last.begin;
        keys.full_high = of_first.end;
    }
    if has.tree_mask {
        keys.full_high = keys.full_high.min(keys.tree);
    }
    keys
}

/// Row `16 m + 8 h + r` of a SIMD group with `16 M` rows.
#[device]
fn lane_row<const M: usize>(tile: RowTile, m: usize, h: usize) -> u32 {
    tile.first + (16 * M) as u32 * simd_index() + (16 * m + 8 * h) as u32 + matrix_row()
}

/// Which keys a threadgroup attends to, and how.
#[device]
struct PrefillPass<const M: usize> {
    /// Keys of the head.
    k: KvHead,
    /// Values of the head.
    v: KvHead,
    /// Bounds of the lane's rows.
    rows: [[RowBound; 2]; M],
    /// Keys that the rows of the SIMD group see.
    own: KeyRange,
    /// Keys that the rows of the threadgroup see.
    all: KeyRange,
    /// First key of the first block: a multiple of 16, so that no 16 keys straddle a page of 16.
    first: u32,
    /// First key behind the last visible one.
    end: u32,
    /// What the problem has.
    has: Features,
}

/// The pass of a threadgroup.
#[device]
fn prefill_pass<
    const KF: u32,
    const VF: u32,
    const D: usize,
    const DV: usize,
    const M: usize,
    const S: usize,
>(
    tile: RowTile,
    slopes: &Buffer<f32>,
    params: &Attend,
    has: Features,
    paging: u32,
) -> PrefillPass<M> {
    let mut rows = [[unseeing_row(); 2]; M];
    for m in 0..M {
        for h in 0..2usize {
            let row = lane_row::<M>(tile, m, h);
            if row < tile.rows {
                rows[m][h] = row_bound(tile, row, slopes, params, has);
            }
        }
    }
    let first = tile.first + (16 * M) as u32 * simd_index();
    let own = keys_of_rows(tile, first, (first + (16 * M) as u32).min(tile.rows), params, has);
    let end = (tile.first + (16 * M * S) as u32).min(tile.rows);
    let all = keys_of_rows(tile, tile.first, end, params, has);
    // Elements are multiplied as they are.
    let levels = Levels { magnitudes: [0u32; 16], codebook: 0, copies: 0 };
    let pass = PrefillPass::<M> {
        k: kv_head::<KF, D>(tile, params, params.k, levels, all, paging),
        v: kv_head::<VF, DV>(tile, params, params.v, levels, all, paging),
        rows,
        own,
        all,
        first: all.low as u32 / 16 * 16,
        end: all.high as u32,
        has,
    };
    pass
}

/// A thread's words of the block of `16 U` rows from key `first` on: every `32 S`th chunk of 16 bytes.
#[device]
#[inline(always)]
fn fetch_block<const FORMAT: u32, const D: usize, const W: usize, const U: usize, const S: usize>(
    memory: &Buffer<u8>,
    table: &Buffer<u32>,
    head: KvHead,
    first: u32,
    row_align: u32,
) -> [u32; W] {
    let mut result = [0u32; W];
    let chunks = first_bytes(FORMAT, D as u32) / 16;
    for i in 0..W / 4 {
        let chunk = thread_index() + (32 * S * i) as u32;
        if 8 * S * W == 16 * U * chunks as usize || chunk < 16 * U as u32 * chunks {
            let offset = chunk / chunks;
            let group = key_group(table, head, first + offset / 16 * 16);
            let row = row_of_key::<FORMAT, D>(table, head, group, offset % 16);
            let four = words::<4>(memory, row.first + (16 * (chunk % chunks)) as u64, row_align);
            for n in 0..4usize {
                result[4 * i + n] = four[n];
            }
        }
    }
    result
}

/// Stores a thread's words of a block in threadgroup memory.
#[device]
#[inline(always)]
fn store_block<
    T: Element,
    const FORMAT: u32,
    const D: usize,
    const W: usize,
    const U: usize,
    const S: usize,
>(
    block: &mut Shared<T>,
    from: [u32; W],
) {
    let chunks = first_bytes(FORMAT, D as u32) / 16;
    for i in 0..W / 4 {
        let chunk = thread_index() + (32 * S * i) as u32;
        if 8 * S * W == 16 * U * chunks as usize || chunk < 16 * U as u32 * chunks {
            let four = [from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]];
            let row = chunk / chunks * (D + ROW_PADDING) as u32;
            block.store_as::<u32, 4>(row + chunk % chunks * (D as u32 / chunks), four);
        }
    }
}

/// Left operands of a SIMD group's query rows: `[m][i]` has rows from `16 m` and from `16 m + 8` on, coordinates from `8 i` on.
/// A negative scale changes their signs; rows beyond the last are zeros.
#[device]
fn query_lefts<Q: Element, K: Element, const KN: usize, const M: usize>(
    q: &Buffer<Q>,
    tile: RowTile,
    params: &Attend,
) -> [[[Left<K>; 2]; KN]; M] {
    let mut queries = [[[left_from::<K>(0.0, 0.0); 2]; KN]; M];
    let sign = select(params.scale < 0.0, -1.0, 1.0);
    for m in 0..M {
        for h in 0..2usize {
            let row = lane_row::<M>(tile, m, h);
            if row < tile.rows {
                let query = tile.sequence.q_start + row / params.group;
                let start = tile.sequence.batch as u64 * params.q[0]
                    + head_of(tile, params, row) as u64 * params.q[1]
                    + query as u64 * params.q[2]
                    + (2 * matrix_pair()) as u64;
                for i in 0..KN {
                    let x = q[start + 8 * i as u64].to_f32() * sign;
                    let y = q[start + 8 * i as u64 + 1].to_f32() * sign;
                    queries[m][i][h] = left_from::<K>(x, y);
                }
            }
        }
    }
    queries
}

/// Products of a SIMD group's queries with the keys of a block.
#[device]
#[inline(always)]
fn qk_block<K: Element, const D: usize, const KN: usize, const M: usize, const F: usize>(
    queries: [[[Left<K>; 2]; KN]; M],
    keys: &Shared<K>,
) -> [[[[f32; 2]; 2]; F]; M] {
    let mut products = [[[[0.0; 2]; 2]; F]; M];
    for i in 0..KN / 2 {
        for u in 0..F / 2 {
            let at = 16 * u * (D + ROW_PADDING) + 16 * i;
            let k = load_rights_transposed::<K>(keys, at as u32, (D + ROW_PADDING) as u32);
            for n in 0..2usize {
                let j = 2 * u + n;
                for m in 0..M {
                    let q = queries[m][2 * i];
                    let q_next = queries[m][2 * i + 1];
                    products[m][j] =
                        multiply_add_twice::<K>(q, k[2 * n], q_next, k[2 * n + 1], products[m][j]);
                }
            }
        }
    }
    products
}

/// Scores in units of log2 of the products of a block from key `first` on: scaled, with softcap, ALiBi and masks.
#[device]
#[inline(always)]
fn scores_of<const M: usize, const F: usize>(
    products: [[[[f32; 2]; 2]; F]; M],
    first: i32,
    rows: [[RowBound; 2]; M],
    memory: BiasMemory,
    params: &Attend,
    scoring: Scoring,
) -> [[[[f32; 2]; 2]; F]; M] {
    let mut scores = products;
    for m in 0..M {
        for j in 0..F {
            for n in 0..2usize {
                let key = first + (8 * j + n) as i32 + 2 * matrix_pair() as i32;
                for h in 0..2usize {
                    let mut score = products[m][j][h][n] * params.scale.abs();
                    if scoring.has.softcap {
                        score = params.cap * score.tanh();
                    }
                    if scoring.has.alibi {
                        score -= rows[m][h].slope * rows[m][h].position.abs_diff(key) as f32;
                    }
                    if scoring.partial {
                        score = masked(score, key, rows[m][h], memory, params, scoring);
                    }
                    scores[m][j][h][n] = score;
                }
            }
        }
    }
    scores
}

/// Raises `row_max` to the greatest scores of a block, which are `scores` times `factor`, where some row's is above it by more
/// than the slack.
#[device]
#[inline(always)]
fn follow_row_max<const VN: usize, const M: usize, const F: usize>(
    state: &mut Accumulator<VN, M>,
    scores: [[[[f32; 2]; 2]; F]; M],
    factor: f32,
) {
    let mut greatest = [[f32::NEG_INFINITY; 2]; M];
    let mut behind = false;
    for m in 0..M {
        for h in 0..2usize {
            for j in 0..F {
                greatest[m][h] = greatest[m][h].max(scores[m][j][h][0]).max(scores[m][j][h][1]);
            }
            greatest[m][h] *= factor;
            behind = behind || greatest[m][h] > state.row_max[m][h] + SLACK;
        }
    }
    if simd_any(behind) {
        for m in 0..M {
            for h in 0..2usize {
                let new = state.row_max[m][h].max(matrix_row_max(greatest[m][h]));
                let by = select(new == f32::NEG_INFINITY, 1.0, (state.row_max[m][h] - new).exp2());
                state.row_max[m][h] = new;
                state.row_sum[m][h] *= by;
                for i in 0..VN {
                    for n in 0..2usize {
                        state.out[m][i][h][n] *= by;
                    }
                }
            }
        }
    }
}

/// Probabilities `2^(factor score - row_max)` of a block, which join `row_sum`, times the factors of their rows.
#[device]
#[inline(always)]
fn probs_of<const VN: usize, const M: usize, const F: usize>(
    state: &mut Accumulator<VN, M>,
    scores: [[[[f32; 2]; 2]; F]; M],
    factor: f32,
) -> [[[[f32; 2]; 2]; F]; M] {
    let mut probs = scores;
    for m in 0..M {
        for h in 0..2usize {
            // A row that has seen no key has scores of `-inf` alone.
            let row_max = state.row_max[m][h];
            let reference = select(row_max == f32::NEG_INFINITY, 0.0, row_max);
            for j in 0..F {
                for n in 0..2usize {
                    let p = scores[m][j][h][n].mul_add(factor, -reference).exp2();
                    state.row_sum[m][h] += p;
                    probs[m][j][h][n] = p;
                }
            }
        }
    }
    if state.shrunk != 0 {
        for m in 0..M {
            for h in 0..2usize {
                let shrink = shrink_of(state.shrunk, 2 * m + h);
                for j in 0..F {
                    for n in 0..2usize {
                        probs[m][j][h][n] *= shrink;
                    }
                }
            }
        }
    }
    probs
}

/// The block of a step of a pass.
#[device]
struct BlockStep {
    /// First key.
    first: u32,
    /// First key behind it.
    end: u32,
    /// First key of the block that follows: after the last one, of the first, as a second pass may follow.
    next: u32,
    /// Whether some row of the SIMD group may not see some key.
    partial: bool,
    /// Whether some row of the threadgroup may not.
    any_partial: bool,
}

/// The block from key `first` on.
#[device]
fn step_of<const M: usize, const U: usize>(pass: PrefillPass<M>, first: u32) -> BlockStep {
    let low = first as i32;
    let high = low + 16 * U as i32;
    let end = first + (16 * U) as u32;
    let step = BlockStep {
        first,
        end,
        next: select(end < pass.end, end, pass.first),
        partial: pass.has.mask || low < pass.own.full_low || high > pass.own.full_high,
        any_partial: pass.has.mask || low < pass.all.full_low || high > pass.all.full_high,
    };
    step
}

/// Probabilities of a block, of its products. Where scores are scaled products, the scale joins the exponent.
#[device]
#[inline(always)]
fn softmax_block<const VN: usize, const M: usize, const F: usize>(
    state: &mut Accumulator<VN, M>,
    products: [[[[f32; 2]; 2]; F]; M],
    pass: PrefillPass<M>,
    step: BlockStep,
    memory: BiasMemory,
    params: &Attend,
) -> [[[[f32; 2]; 2]; F]; M] {
    let mut scores = products;
    let mut factor = params.scale.abs();
    if step.partial || pass.has.softcap || pass.has.alibi {
        let scoring = Scoring { has: pass.has, partial: step.partial, tree: pass.all.tree };
        scores = scores_of::<M, F>(products, step.first as i32, pass.rows, memory, params, scoring);
        factor = 1.0;
    }
    follow_row_max::<VN, M, F>(state, scores, factor);
    probs_of::<VN, M, F>(state, scores, factor)
}

/// Adds `p v` of a block to the outputs.
#[device]
#[inline(always)]
fn pv_block<V: Element, const DV: usize, const VN: usize, const M: usize, const F: usize>(
    state: &mut Accumulator<VN, M>,
    probs: [[[[f32; 2]; 2]; F]; M],
    values: &Shared<V>,
) {
    for u in 0..F / 2 {
        let mut p = [[left_from::<V>(0.0, 0.0); 2]; M];
        let mut p_next = [[left_from::<V>(0.0, 0.0); 2]; M];
        for m in 0..M {
            for h in 0..2usize {
                p[m][h] = left_from::<V>(probs[m][2 * u][h][0], probs[m][2 * u][h][1]);
                p_next[m][h] = left_from::<V>(probs[m][2 * u + 1][h][0], probs[m][2 * u + 1][h][1]);
            }
        }
        for i in 0..VN / 2 {
            let at = 16 * u * (DV + ROW_PADDING) + 16 * i;
            let v = load_rights::<V>(values, at as u32, (DV + ROW_PADDING) as u32);
            for n in 0..2usize {
                let c = 2 * i + n;
                for m in 0..M {
                    let sum = state.out[m][c];
                    state.out[m][c] = multiply_add_twice::<V>(p[m], v[2 * n], p_next[m], v[2 * n + 1], sum);
                }
            }
        }
    }
}

/// A block with a value that is not finite, of which some row of the threadgroup may not see all.
#[device]
struct SpoiledBlock<'a, const M: usize> {
    /// First key.
    first: u32,
    /// Bounds of the lane's rows.
    rows: [[RowBound; 2]; M],
    /// What hides keys.
    memory: BiasMemory<'a>,
    /// What the problem has.
    has: Features,
    /// Keys that are seen at all.
    keys: KeyRange,
}

/// Adds `p v` of the values of a block that are not finite, key by key to the rows that see it: `0 v` of a hidden key would not be
/// 0. To compilers the number of keys is unknown: unrolled, this rare path would be most of the kernel.
#[device]
fn add_nonfinite<V: Element, const DV: usize, const VN: usize, const M: usize, const F: usize>(
    state: &mut Accumulator<VN, M>,
    probs: [[[[f32; 2]; 2]; F]; M],
    values: &Shared<V>,
    block: SpoiledBlock<M>,
    params: &Attend,
) {
    let copied = probs;
    let scoring = Scoring { has: block.has, partial: true, tree: block.keys.tree };
    let end = (block.keys.high as u32).min(block.first + (8 * F) as u32);
    for offset in 0..end.saturating_sub(block.first) {
        let lane = matrix_lane(matrix_row(), offset % 8 / 2);
        let key = (block.first + offset) as i32;
        let start = offset * (DV + ROW_PADDING) as u32 + 2 * matrix_pair();
        for m in 0..M {
            for h in 0..2usize {
                let pair = copied[m][(offset / 8) as usize][h];
                let p = simd_shuffle(select(offset % 2 == 0, pair[0], pair[1]), lane);
                let score = masked(0.0, key, block.rows[m][h], block.memory, params, scoring);
                let seen = score != f32::NEG_INFINITY;
                for i in 0..VN {
                    for n in 0..2usize {
                        let x = values[start + (8 * i + n) as u32].to_f32();
                        let adds = seen && !x.is_finite();
                        state.out[m][i][h][n] += select(adds, p * x, 0.0);
                    }
                }
            }
        }
    }
}

/// Adds `p v` of the values of a block that are not finite, and replaces them by zeros. By all threads of the threadgroup.
#[device]
fn take_nonfinite<
    V: Element,
    const DV: usize,
    const VN: usize,
    const M: usize,
    const F: usize,
    const S: usize,
>(
    state: &mut Accumulator<VN, M>,
    values: &mut Shared<V>,
    probs: [[[[f32; 2]; 2]; F]; M],
    block: SpoiledBlock<M>,
    params: &Attend,
) {
    add_nonfinite::<V, DV, VN, M, F>(state, probs, values, block, params);
    barrier();
    for at in (thread_index()..(8 * F * DV) as u32).step_by(32 * S) {
        let element = at / DV as u32 * (DV + ROW_PADDING) as u32 + at % DV as u32;
        if !values[element].to_f32().is_finite() {
            values[element] = V::from_f32(0.0);
        }
    }
    barrier();
}

/// Sets the first of the flags to 0: whether a value that was stored is not finite. The others are what SIMD groups tell each other.
#[device]
fn clear_first(flags: &mut Shared<u32>) {
    if thread_index() == 0 {
        flags[0] = 0;
    }
}

/// Bits `2 m + h` of a lane's rows whose outputs are infinite or NaN while their `row_sum` is finite: they overflowed, or a value is
/// not finite.
#[device]
fn overflowed_rows<const VN: usize, const M: usize>(
    out: [[[[f32; 2]; 2]; VN]; M],
    row_sum: [[f32; 2]; M],
) -> u32 {
    let mut bits = 0u32;
    for m in 0..M {
        for h in 0..2usize {
            let mut found = 0.0;
            for i in 0..VN {
                for n in 0..2usize {
                    found = select(out[m][i][h][n].abs() < f32::INFINITY, found, 1.0);
                }
            }
            let any = matrix_row_max(found);
            let sum = matrix_row_sum(row_sum[m][h]);
            bits |= select(any > 0.0 && sum < f32::INFINITY, 1u32 << (2 * m + h) as u32, 0u32);
        }
    }
    bits
}

/// Whether the threadgroup has to compute its rows again, because outputs of some of them overflowed though probabilities did
/// not. Empties the accumulator if so. Outputs of f16 cannot overflow. `flags` has a number a SIMD group, from the second on.
#[device]
fn starts_second_pass<const FORMAT: u32, const VN: usize, const M: usize, const S: usize>(
    state: &mut Accumulator<VN, M>,
    flags: &mut Shared<u32>,
) -> bool {
    let mut again = 0u32;
    if state.shrunk == 0 && (FORMAT == F32 || FORMAT == BF16) {
        let shrunk = overflowed_rows::<VN, M>(state.out, state.row_sum);
        let own = simd_any(shrunk != 0);
        if simd_lane() == 0 {
            flags[1 + simd_index()] = own as u32;
        }
        barrier();
        for simd in 0..S {
            again |= flags[1 + simd];
        }
        if again != 0 {
            for m in 0..M {
                state.out[m] = [[[0.0; 2]; 2]; VN];
                state.row_max[m] = [f32::NEG_INFINITY; 2];
                state.row_sum[m] = [0.0; 2];
            }
            state.shrunk = shrunk | SECOND_PASS;
        }
    }
    again != 0
}

/// The sinks of a lane's rows.
#[device]
struct RowSinks<const M: usize> {
    /// In units of the score; `-inf` where there are none.
    logits: [[f32; 2]; M],
}

/// Reads the sinks of a lane's rows.
#[device]
fn sinks_of<const M: usize>(
    tile: RowTile,
    sinks: &Buffer<f32>,
    params: &Attend,
    has_sinks: bool,
) -> RowSinks<M> {
    let mut all = RowSinks::<M> { logits: [[f32::NEG_INFINITY; 2]; M] };
    for m in 0..M {
        for h in 0..2usize {
            let row = lane_row::<M>(tile, m, h);
            if has_sinks && row < tile.rows {
                all.logits[m][h] = sinks[head_of(tile, params, row)];
            }
        }
    }
    all
}

/// The softmax of row `[m][h]` over all keys that it sees, sink included.
#[device]
fn merged_row<const VN: usize, const M: usize>(
    state: Accumulator<VN, M>,
    m: usize,
    h: usize,
    shift: f32,
    sink_logit: f32,
) -> Merged {
    let shrink = shrink_of(state.shrunk, 2 * m + h);
    let sum = matrix_row_sum(state.row_sum[m][h]) * shrink;
    // `-inf` says that no key was seen. If the sum is NaN, any `row_max` other than `-inf` is correct.
    let keys_row_max = select(sum.is_nan(), 0.0, state.row_max[m][h] - shrink.log2());
    let sink = to_log2(sink_logit - shift);
    let row_max = keys_row_max.max(sink);
    let mut row_sum = 0.0;
    if keys_row_max != f32::NEG_INFINITY {
        row_sum = sum * (keys_row_max - row_max).exp2();
    }
    if sink != f32::NEG_INFINITY {
        row_sum += (sink - row_max).exp2();
    }
    let merged = Merged { row_max, keys_row_max, row_sum, sink, shift };
    merged
}

/// The softmax of all rows of a lane.
#[device]
fn merged_rows<const VN: usize, const M: usize>(
    state: Accumulator<VN, M>,
    bounds: [[RowBound; 2]; M],
    sinks: RowSinks<M>,
) -> [[Merged; 2]; M] {
    let none = Merged { row_max: 0.0, keys_row_max: 0.0, row_sum: 0.0, sink: 0.0, shift: 0.0 };
    let mut rows = [[none; 2]; M];
    for m in 0..M {
        for h in 0..2usize {
            rows[m][h] = merged_row::<VN, M>(state, m, h, bounds[m][h].shift, sinks.logits[m][h]);
        }
    }
    rows
}

/// The factor of a row's sums of products: 0 where the row has seen no key.
#[device]
fn normalizer(row: Merged) -> f32 {
    let factor = (row.keys_row_max - row.row_max).exp2() / row.row_sum;
    select(row.keys_row_max == f32::NEG_INFINITY, 0.0, factor)
}

/// One coordinate of a row's output, of its sum `x` of products and its [`normalizer`].
#[device]
fn mean_of(x: f32, factor: f32) -> f32 {
    let mut mean = x * factor;
    if !mean.is_finite() {
        // The product may overflow where the mean does not. What is infinite or NaN stays so.
        let small = x * (factor * SHRINK);
        mean = small * (1.0 / SHRINK);
        if small.is_finite() {
            mean = mean.max(-3.402_823_5e38).min(3.402_823_5e38);
        }
    }
    mean
}

/// Writes the outputs of a lane's rows.
#[device]
fn store_out<Q: Element, const VN: usize, const M: usize>(
    state: Accumulator<VN, M>,
    rows: [[Merged; 2]; M],
    tile: RowTile,
    params: &Attend,
    to: &Merge,
    out: &mut Buffer<Q>,
) {
    for m in 0..M {
        for h in 0..2usize {
            let row = lane_row::<M>(tile, m, h);
            if row < tile.rows {
                let start = tile.sequence.batch as u64 * to.out[0]
                    + head_of(tile, params, row) as u64 * to.out[1]
                    + (tile.sequence.q_start + row / params.group) as u64 * to.out[2]
                    + (2 * matrix_pair()) as u64;
                let factor = normalizer(rows[m][h]);
                for i in 0..VN {
                    for n in 0..2usize {
                        let mean = mean_of(state.out[m][i][h][n], factor);
                        out[start + (8 * i + n) as u64] = Q::from_f32(mean);
                    }
                }
            }
        }
    }
}

/// Writes the logsumexp of a lane's rows, if it is wanted.
#[device]
fn store_lse<const M: usize>(
    rows: [[Merged; 2]; M],
    sinks: RowSinks<M>,
    tile: RowTile,
    params: &Attend,
    with_lse: bool,
    lse: &mut Buffer<f32>,
) {
    for m in 0..M {
        for h in 0..2usize {
            let row = lane_row::<M>(tile, m, h);
            if with_lse && row < tile.rows && matrix_pair() == 0 {
                let head = tile.sequence.batch * params.q_heads + head_of(tile, params, row);
                let at = head * params.queries + tile.sequence.q_start + row / params.group;
                lse[at] = lse_of(rows[m][h], sinks.logits[m][h]);
            }
        }
    }
}

/// Attention of the query rows of each key/value head, one tile of rows a threadgroup: see the module.
///
/// ```text
/// out[b, h, i] = sum_j softmax_j(score[b, h, i, j]) v[b, h / group, j]          [B, H, Sq, Dv]
/// lse[b, h, i] = ln(sum_j exp(score[b, h, i, j]))                               [B, H, Sq], sinks included
/// ```
///
/// Keys and values are elements of the type of q. Groups are (key/value heads times tiles of `16 M S` rows, 1, sequences).
///
/// | generic | |
/// |---|---|
/// | `Q` | type of q |
/// | `KF`, `VF` | formats of keys and values: constants of [`formats`](super::formats) |
/// | `D`, `DV` | head dimensions |
/// | `M`, `U`, `S` | sixteens of query rows a SIMD group, sixteens of keys of a block, SIMD groups |
/// | `R` | threadgroups that a core is to hold at a time |
///
/// What follows from them:
///
/// | generic | |
/// |---|---|
/// | `K`, `V` | types of the products with keys and values |
/// | `KN`, `VN` | eights of coordinates of a key, of a value |
/// | `KW`, `VW` | words of a block that a thread copies |
/// | `F` | eights of keys of a block |
#[kernel(
    threads = (32 * S) as u32,
    resident = R as u32,
    derive(
        K: Element = product_type(Q, KF),
        V: Element = product_type(Q, VF),
        KN: usize = D / 8,
        VN: usize = DV / 8,
        KW: usize = block_words(KF, D, U, S),
        VW: usize = block_words(VF, DV, U, S),
        F: usize = 2 * U,
    ),
    requires(KF <= BF16 && VF <= BF16, "formats of elements"),
    requires(D.is_multiple_of(16) && DV.is_multiple_of(16), "head dimensions are multiples of 16"),
    requires(row_align.is_power_of_two() && row_align <= 16, "rows are at multiples of 1, 2, 4, 8 or 16 bytes"),
    requires(paging <= PAGED_BY_16, "ways to find rows"),
    requires(paging != PAGED_BY_16 || params.page.is_multiple_of(16), "pages of multiples of 16 tokens"),
    requires(params.page_divisor[1] < 64 && params.ring_divisor[1] < 64, "shifts of 64 bits"),
    requires(params.tiles > 0 && groups[0].is_multiple_of(params.tiles), "tiles of every key/value head"),
    requires(groups[1] == 1, "keys are not split"),
    requires(params.page > 0 && params.width > 0 && params.group > 0, "pages have rows"),
    requires(sequences.len() >= 8 * groups[2] as usize, "eight words of every sequence"),
    requires(!has_sinks || sinks.len() >= params.q_heads as usize, "a sink for each head"),
    requires(!with_lse || lse.len() as u64 >= params.rows(), "a logsumexp for each row"),
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
    const R: usize,
>(
    q: &Buffer<Q>,
    k: &Buffer<u8>,
    v: &Buffer<u8>,
    table: &Buffer<u32>,
    sequences: &Buffer<i32>,
    slopes: &Buffer<f32>,
    mask: &Buffer<u8>,
    tree: &Buffer<u8>,
    sinks: &Buffer<f32>,
    params: &Attend,
    output: &Merge,
    out: &mut Buffer<Q>,
    lse: &mut Buffer<f32>,
    #[constant] paging: u32,
    #[constant] row_align: u32,
    #[constant] has_softcap: bool,
    #[constant] has_alibi: bool,
    #[constant] has_mask: bool,
    #[constant] has_tree_mask: bool,
    #[constant] has_sinks: bool,
    #[constant] with_lse: bool,
) {
    let mut keys: Shared<K> = shared(16 * U * (D + ROW_PADDING));
    let mut values: Shared<V> = shared(16 * U * (DV + ROW_PADDING));
    let mut flags: Shared<u32> = shared(1 + S);
    let has = Features { softcap: has_softcap, alibi: has_alibi, mask: has_mask, tree_mask: has_tree_mask };
    let bias = BiasMemory { slopes, mask, tree };
    let tile = tile_of_group(sequences, params, (16 * M * S) as u32);
    if tile.first >= tile.rows {
        return;
    }
    let pass = prefill_pass::<KF, VF, D, DV, M, S>(tile, slopes, params, has, paging);
    let mut k_words = [0u32; KW];
    if pass.first < pass.end {
        k_words = fetch_block::<KF, D, KW, U, S>(k, table, pass.k, pass.first, row_align);
    }
    clear_first(&mut flags);
    let queries = query_lefts::<Q, K, KN, M>(q, tile, params);
    let mut state = no_keys_yet::<VN, M>();
    let mut passes = true;
    while passes {
        let mut first = pass.first;
        while first < pass.end {
            store_block::<K, KF, D, KW, U, S>(&mut keys, k_words);
            barrier();
            let v_words = fetch_block::<VF, DV, VW, U, S>(v, table, pass.v, first, row_align);
            let products = qk_block::<K, D, KN, M, F>(queries, &keys);
            let step = step_of::<M, U>(pass, first);
            let probs = softmax_block::<VN, M, F>(&mut state, products, pass, step, bias, params);
            store_block::<V, VF, DV, VW, U, S>(&mut values, v_words);
            if step.any_partial && has_nonfinite::<VF, DV, 8, VW>(v_words) {
                atomic_or(&mut flags, 0u32, 1);
            }
            barrier();
            k_words = fetch_block::<KF, D, KW, U, S>(k, table, pass.k, step.next, row_align);
            if step.any_partial && flags[0] != 0 {
                let spoiled = SpoiledBlock::<M> { first, rows: pass.rows, memory: bias, has, keys: pass.all };
                take_nonfinite::<V, DV, VN, M, F, S>(&mut state, &mut values, probs, spoiled, params);
            }
            pv_block::<V, DV, VN, M, F>(&mut state, probs, &values);
            first = step.end;
        }
        passes = starts_second_pass::<VF, VN, M, S>(&mut state, &mut flags);
    }
    let row_sinks = sinks_of::<M>(tile, sinks, params, has_sinks);
    let merged = merged_rows::<VN, M>(state, pass.rows, row_sinks);
    store_out::<Q, VN, M>(state, merged, tile, params, output, out);
    store_lse::<M>(merged, row_sinks, tile, params, with_lse, lse);
}
