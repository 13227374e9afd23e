//! One tile of attention: the scores of 16 keys and `8 ROW_TILES` query rows, their softmax, and the product with the values.
//!
//! The 16 keys are two stacked left operands of 8 rows, the queries the right operand: a lane holds `scores[t][h][n]`
//! of key `8 h + r` and query row `8 t + 2 p + n`, where `r` is its [`matrix_row`] and `p` its [`matrix_pair`].
//! Probabilities have the same layout, which transposed is that of the right operand of the product with the values;
//! `out[t][i][h][n]` is coordinate `2 i + h` of the lane's part of a value row, of query row `8 t + 2 p + n`.

use super::attend::Attend;
use super::formats::{BF16, F16, F32, has_half_norms, is_codes, is_mlx, is_scaled, may_be_nonfinite, padded};
use super::kv::{KeyGroup, KeyWords, KvHead, KvMemory, ValueWords, row_of_key};
use super::pairs::{pairs, transposed_pairs};
use super::query::{Features, RowBound};
use super::rows::{Levels, coordinate, gather, has_nonfinite};
use super::scale::{Scale, scale_of};
use super::score::{HUGE_BIAS, HUGE_RATE, LOG2E, bias_at};
use flashtile_kernel::prelude::*;

/// `row_max` follows the largest score of a row only where it falls behind by more than this many powers of 2: rescaling is rare.
#[constant]
pub const SLACK: f32 = 8.0;

/// A power of two that brings the sum of as many values as there can be keys, with probabilities up to `2^SLACK`, below
/// a single value.
#[constant]
pub const SHRINK: f32 = 9.094_947e-13;

/// Set in `shrunk` while rows are recomputed.
#[constant]
pub const SECOND_PASS: u32 = 0x8000_0000;

/// The smallest scale of a value row that `row_max` takes into account, in units of log2.
#[constant]
pub const MIN_SCALE: f32 = -60.0;

/// Right operands of the product with the keys, and the terms that make scores of the products.
#[device]
pub struct QueryOperands<KOperand: Element, const K_PAIRS: usize, const ROW_TILES: usize> {
    /// The queries, rounded to `KOperand`.
    pub rounded: [[Right<KOperand>; K_PAIRS]; ROW_TILES],
    /// Rounding residuals of the queries when keys are codes: they make scores as exact as with f32 queries.
    pub residual: [[Right<KOperand>; K_PAIRS]; ROW_TILES],
    /// Factor of the products of a row.
    pub scale: [[f32; 2]; ROW_TILES],
    /// Bias of the products of a row.
    pub bias: [[f32; 2]; ROW_TILES],
}

/// Right operands of the queries that are staged in threadgroup memory, with the factors and the biases of their rows.
#[device]
pub fn query_operands<
    KOperand: Element,
    const K_FORMAT: u32,
    const HEAD_DIM: usize,
    const K_PAIRS: usize,
    const ROW_TILES: usize,
>(
    queries: &Shared<f32>,
    scales: &Shared<f32>,
    biases: &Shared<f32>,
) -> QueryOperands<KOperand, K_PAIRS, ROW_TILES> {
    let mut operands = QueryOperands::<KOperand, K_PAIRS, ROW_TILES> {
        rounded: [[right_zero::<KOperand>(); K_PAIRS]; ROW_TILES],
        residual: [[right_zero::<KOperand>(); K_PAIRS]; ROW_TILES],
        scale: [[0.0; 2]; ROW_TILES],
        bias: [[0.0; 2]; ROW_TILES],
    };
    for t in 0..ROW_TILES {
        for i in 0..K_PAIRS {
            let start = (8 * t as u32 + matrix_row()) * padded(HEAD_DIM as u32);
            let x = queries[start + coordinate::<K_FORMAT, HEAD_DIM, 4>(matrix_pair(), 2 * i as u32)];
            let y = queries[start + coordinate::<K_FORMAT, HEAD_DIM, 4>(matrix_pair(), 2 * i as u32 + 1)];
            operands.rounded[t][i] = right_transposed::<KOperand>(x, y);
            if is_codes(K_FORMAT) {
                let x_left = x - KOperand::from_f32(x).to_f32();
                let y_left = y - KOperand::from_f32(y).to_f32();
                operands.residual[t][i] = right_transposed::<KOperand>(x_left, y_left);
            }
        }
        for n in 0..2usize {
            let row = 8 * t as u32 + 2 * matrix_pair() + n as u32;
            operands.scale[t][n] = scales[row];
            operands.bias[t][n] = biases[row];
        }
    }
    operands
}

/// Sum of two tiles, element by element.
#[device]
fn add_tiles(a: [[f32; 2]; 2], b: [[f32; 2]; 2]) -> [[f32; 2]; 2] {
    let mut sum = a;
    for h in 0..2usize {
        for n in 0..2usize {
            sum[h][n] += b[h][n];
        }
    }
    sum
}

/// Products over one half of the coordinates of two times eight keys, times the norm that this half of each key has.
#[device]
fn times_half_norm(products: [[f32; 2]; 2], scales: [Scale; 2], half: usize) -> [[f32; 2]; 2] {
    let mut result = products;
    for h in 0..2usize {
        for n in 0..2usize {
            result[h][n] *= scales[h].halves[half];
        }
    }
    result
}

/// Scores of 16 keys: `scale q . k + bias`. A lane has `K_PAIRS` pairs of coordinates.
#[device]
#[inline(always)]
pub fn qk_tile<
    KOperand: Element,
    const K_FORMAT: u32,
    const HEAD_DIM: usize,
    const K_WORDS: usize,
    const K_PAIR_WORDS: usize,
    const K_PAIRS: usize,
    const ROW_TILES: usize,
>(
    keys: KeyWords<K_WORDS>,
    queries: QueryOperands<KOperand, K_PAIRS, ROW_TILES>,
    levels: Levels,
    codebooks: &Buffer<f32>,
    nibbles: &Shared<u8>,
) -> [[[f32; 2]; 2]; ROW_TILES] {
    let mut scores = [[[0.0; 2]; 2]; ROW_TILES];
    let mut whole = [[[0.0; 2]; 2]; ROW_TILES];
    // Sums of their own, so that products do not all wait for each other.
    let mut left_over = [[[0.0; 2]; 2]; ROW_TILES];
    let scales =
        [scale_of::<K_FORMAT, HEAD_DIM>(keys.scales[0]), scale_of::<K_FORMAT, HEAD_DIM>(keys.scales[1])];
    let low = pairs::<K_FORMAT, HEAD_DIM, 4, K_WORDS, K_PAIR_WORDS>(
        keys.words[0],
        matrix_pair(),
        levels,
        codebooks,
        nibbles,
    );
    let high = pairs::<K_FORMAT, HEAD_DIM, 4, K_WORDS, K_PAIR_WORDS>(
        keys.words[1],
        matrix_pair(),
        levels,
        codebooks,
        nibbles,
    );
    // Codebooks are f32: a second operand has their rounding residuals in f16.
    let mut low_left = low;
    let mut high_left = high;
    if is_mlx(K_FORMAT) {
        let rest =
            Levels { magnitudes: levels.magnitudes, codebook: levels.codebook + 256, copies: levels.copies };
        low_left = pairs::<K_FORMAT, HEAD_DIM, 4, K_WORDS, K_PAIR_WORDS>(
            keys.words[0],
            matrix_pair(),
            rest,
            codebooks,
            nibbles,
        );
        high_left = pairs::<K_FORMAT, HEAD_DIM, 4, K_WORDS, K_PAIR_WORDS>(
            keys.words[1],
            matrix_pair(),
            rest,
            codebooks,
            nibbles,
        );
    }
    for j in 0..K_PAIRS / 2 {
        let a = K_PAIR_WORDS / K_PAIRS * 2 * j;
        let a_last = K_PAIR_WORDS / K_PAIRS * (2 * j + 1) - 1;
        let b = a_last + 1;
        let b_last = K_PAIR_WORDS / K_PAIRS * (2 * j + 2) - 1;
        let k = [left::<KOperand>(low[a], low[a_last]), left::<KOperand>(high[a], high[a_last])];
        let k_next = [left::<KOperand>(low[b], low[b_last]), left::<KOperand>(high[b], high[b_last])];
        for t in 0..ROW_TILES {
            let q = queries.rounded[t][2 * j];
            let q_next = queries.rounded[t][2 * j + 1];
            let mut sum = scores[t];
            // Products of f32 are summed by 64: the error is that of fewer additions.
            if K_PAIR_WORDS == 2 * K_PAIRS && j % 4 == 0 {
                sum = [[0.0; 2]; 2];
                whole[t] = add_tiles(whole[t], scores[t]);
            }
            if has_half_norms(K_FORMAT, HEAD_DIM as u32) && j == K_PAIRS / 4 {
                sum = [[0.0; 2]; 2];
                whole[t] = times_half_norm(add_tiles(scores[t], left_over[t]), scales, 0);
                left_over[t] = [[0.0; 2]; 2];
            }
            scores[t] = multiply_add_twice::<KOperand>(k, q, k_next, q_next, sum);
            if is_codes(K_FORMAT) {
                let residual = queries.residual[t][2 * j];
                let residual_next = queries.residual[t][2 * j + 1];
                left_over[t] =
                    multiply_add_twice::<KOperand>(k, residual, k_next, residual_next, left_over[t]);
            }
            if is_mlx(K_FORMAT) {
                let rest = [
                    left::<KOperand>(low_left[a], low_left[a_last]),
                    left::<KOperand>(high_left[a], high_left[a_last]),
                ];
                let rest_next = [
                    left::<KOperand>(low_left[b], low_left[b_last]),
                    left::<KOperand>(high_left[b], high_left[b_last]),
                ];
                left_over[t] = multiply_add_twice::<KOperand>(rest, q, rest_next, q_next, left_over[t]);
            }
        }
    }
    for t in 0..ROW_TILES {
        if is_codes(K_FORMAT) {
            scores[t] = add_tiles(scores[t], left_over[t]);
        }
        if K_PAIR_WORDS == 2 * K_PAIRS {
            scores[t] = add_tiles(whole[t], scores[t]);
        }
        if has_half_norms(K_FORMAT, HEAD_DIM as u32) {
            scores[t] = add_tiles(whole[t], times_half_norm(scores[t], scales, 1));
        }
        for h in 0..2usize {
            for n in 0..2usize {
                let scale = queries.scale[t][n] * scales[h].whole;
                scores[t][h][n] = scores[t][h][n] * scale + queries.bias[t][n];
            }
        }
    }
    scores
}

/// Memory of the biases and masks of scores.
#[device]
pub struct BiasMemory<'a> {
    /// ALiBi slopes `[H]`.
    pub slopes: &'a Buffer<f32>,
    /// The mask, in the bytes of its elements.
    pub mask: &'a Buffer<u8>,
    /// The tree mask: 0 hides.
    pub tree: &'a Buffer<u8>,
}

/// How products become scores.
#[device]
pub struct Scoring {
    /// Terms of the score that the problem has.
    pub has: Features,
    /// True if some row may not see some key of the tile.
    pub partial: bool,
    /// The first key that a tree mask is over.
    pub tree: i32,
}

/// A score plus the mask's bias of its key, `-inf` where the row does not see the key.
#[device]
pub fn masked(
    score: f32,
    key: i32,
    row: RowBound,
    memory: BiasMemory,
    params: &Attend,
    scoring: Scoring,
) -> f32 {
    let mut result = score;
    let mut seen = key >= row.begin && key < row.end;
    if scoring.has.tree_mask && seen && key >= scoring.tree {
        let column = (key - scoring.tree) as u64 * params.tree_step as u64;
        seen = memory.tree[row.tree + column] as u32 != 0;
    }
    if scoring.has.mask && seen {
        let column = key as u64 * params.mask_step as u64;
        let bias = bias_at(memory.mask, params.mask_kind, row.mask + column);
        seen = bias != f32::NEG_INFINITY;
        // In two steps, as the sum may be within f32 where the bias in units of log2 is not.
        let core = bias.max(-HUGE_BIAS).min(HUGE_BIAS);
        result += core * LOG2E;
        result += (bias - core) * HUGE_RATE;
        if bias.is_nan() {
            result = f32::NAN;
        }
    }
    select(seen, result, f32::NEG_INFINITY)
}

/// A scaled product with softcap and ALiBi, in units of log2: the score of a row and a key that it sees, without the bias of a mask.
/// A score function of the user's belongs here: a row is of one sequence, head and query position, though it has only the position of the
/// nearest visible key.
#[device]
#[inline(always)]
pub fn biased(product: f32, key: i32, row: RowBound, params: &Attend, scoring: Scoring) -> f32 {
    let mut score = product;
    if scoring.has.softcap {
        score = params.cap * score.tanh();
    }
    if scoring.has.alibi {
        score -= row.slope * row.position.abs_diff(key) as f32;
    }
    score
}

/// Applies softcap, ALiBi and masks to the scores of 16 keys from key `first` on.
#[device]
#[inline(always)]
pub fn mask_and_bias<const ROW_TILES: usize>(
    scores: [[[f32; 2]; 2]; ROW_TILES],
    first: i32,
    rows: [[RowBound; 2]; ROW_TILES],
    memory: BiasMemory,
    params: &Attend,
    scoring: Scoring,
) -> [[[f32; 2]; 2]; ROW_TILES] {
    let mut result = scores;
    for h in 0..2usize {
        let key = first + 8 * h as i32 + matrix_row() as i32;
        for t in 0..ROW_TILES {
            for n in 0..2usize {
                result[t][h][n] = biased(scores[t][h][n], key, rows[t][n], params, scoring);
            }
        }
    }
    // One branch around all of them: most tiles skip it.
    if scoring.partial {
        for h in 0..2usize {
            let key = first + 8 * h as i32 + matrix_row() as i32;
            for t in 0..ROW_TILES {
                for n in 0..2usize {
                    result[t][h][n] = masked(result[t][h][n], key, rows[t][n], memory, params, scoring);
                }
            }
        }
    }
    result
}

/// Running softmax of a lane's query rows.
///
/// | | `out` | `row_max`, `row_sum` | bit of `shrunk` |
/// |---|---|---|---|
/// | [`decode`](super::decode), rows `8 t + 2 p + n` | `[t][i][h][n]`: see the module | `[t][n]` | `2 t + n` |
/// | [`prefill`](super::prefill), rows `16 m + 8 h + r` | `[m][i][h][n]`: see there | `[m][h]` | `2 m + h` |
#[device]
pub struct Accumulator<const V_PAIRS: usize, const ROW_TILES: usize> {
    /// Partial outputs `sum of p v`.
    pub out: [[[[f32; 2]; 2]; V_PAIRS]; ROW_TILES],
    /// The maximum that exponents of probabilities are relative to. It is at most [`SLACK`] below the largest score so far, to each of which
    /// codes add log2 of the value's scale ([`greatest_score`]).
    pub row_max: [[f32; 2]; ROW_TILES],
    /// Sums of the probabilities of a lane's own keys.
    pub row_sum: [[f32; 2]; ROW_TILES],
    /// The bits of rows that are recomputed with partial outputs that are smaller by [`SHRINK`]; in the second pass, [`SECOND_PASS`]
    /// too.
    pub shrunk: u32,
}

/// The accumulator before the first key.
#[device]
pub fn no_keys_yet<const V_PAIRS: usize, const ROW_TILES: usize>() -> Accumulator<V_PAIRS, ROW_TILES> {
    let empty = Accumulator::<V_PAIRS, ROW_TILES> {
        out: [[[[0.0; 2]; 2]; V_PAIRS]; ROW_TILES],
        row_max: [[f32::NEG_INFINITY; 2]; ROW_TILES],
        row_sum: [[0.0; 2]; ROW_TILES],
        shrunk: 0,
    };
    empty
}

/// `log2 x` of a positive number, too small by at most 0.09: the bits of an f32 are nearly proportional to it.
#[device]
pub fn log2_near(x: f32) -> f32 {
    (x.to_bits() as i32 as f32).mul_add(1.192_092_9e-7, -127.0)
}

/// The greater of `greatest` and the scores of 16 keys, each with the scale of its value, in units of log2.
#[device]
#[inline(always)]
pub fn greatest_score<const V_FORMAT: u32, const ROW_TILES: usize>(
    greatest: [[f32; 2]; ROW_TILES],
    scores: [[[f32; 2]; 2]; ROW_TILES],
    value_scales: [f32; 2],
) -> [[f32; 2]; ROW_TILES] {
    let mut result = greatest;
    for h in 0..2usize {
        let mut scale = 0.0;
        if is_scaled(V_FORMAT) {
            scale = log2_near(value_scales[h]).max(MIN_SCALE);
        }
        for t in 0..ROW_TILES {
            for n in 0..2usize {
                result[t][n] = result[t][n].max(scores[t][h][n] + scale);
            }
        }
    }
    result
}

/// `p x`, where `p` is a probability or a ratio of two: positive, also where it underflows to 0, so that an infinity stays one.
#[device]
pub fn weighed(p: f32, x: f32) -> f32 {
    select(p == 0.0 && x.abs() == f32::INFINITY, x, p * x)
}

/// Raises `row_max` to the greatest scores of a tile, where some row's is above it by more than the slack.
#[device]
#[inline(always)]
pub fn online_softmax<const V_PAIRS: usize, const ROW_TILES: usize>(
    state: &mut Accumulator<V_PAIRS, ROW_TILES>,
    greatest: [[f32; 2]; ROW_TILES],
) {
    let mut behind = false;
    for t in 0..ROW_TILES {
        for n in 0..2usize {
            behind = behind || greatest[t][n] > state.row_max[t][n] + SLACK;
        }
    }
    if simd_any(behind) {
        for t in 0..ROW_TILES {
            for n in 0..2usize {
                let new = state.row_max[t][n].max(matrix_column_max(greatest[t][n]));
                let by = select(new == f32::NEG_INFINITY, 1.0, (state.row_max[t][n] - new).exp2());
                state.row_max[t][n] = new;
                state.row_sum[t][n] *= by;
                for i in 0..V_PAIRS {
                    for h in 0..2usize {
                        state.out[t][i][h][n] = weighed(by, state.out[t][i][h][n]);
                    }
                }
            }
        }
    }
}

/// A mean as an element of the output. Probabilities in 16 bits may round up where their sum in f32 does not, by a factor of at most `1 + 2^-8`
/// (f16: `1 + 2^-11`): a mean that exceeds the largest element by no more becomes that element. Values of wider types may be larger, and their
/// means infinite.
#[device]
pub fn element_of<QElement: Element>(mean: f32) -> QElement {
    let mut element = QElement::from_f32(mean);
    if mean.is_finite() && !element.to_f32().is_finite() {
        // bf16 represents 1e5; in f16 it overflows.
        let is_bf16 = QElement::from_f32(1e5).to_f32().is_finite();
        let largest = select(is_bf16, 3.389_531_4e38, 65504.0);
        let rounding = select(is_bf16, 0.003_906_25, 0.000_488_281_25);
        if mean.abs() <= largest * (1.0 + rounding) {
            element = QElement::from_f32(mean.max(-largest).min(largest));
        }
    }
    element
}

/// The factor of the partial outputs of row `2 t + n` of a lane: [`SHRINK`] where its bit in `shrunk` says so.
#[device]
pub fn shrink_of(shrunk: u32, row: usize) -> f32 {
    select(shrunk >> row as u32 & 1 != 0, SHRINK, 1.0)
}

/// Probabilities `2^(score - row_max)` of 16 keys, which join `row_sum`; then times the scales of their values and the
/// factors of their rows.
#[device]
#[inline(always)]
pub fn probabilities<const V_FORMAT: u32, const V_PAIRS: usize, const ROW_TILES: usize>(
    state: &mut Accumulator<V_PAIRS, ROW_TILES>,
    scores: [[[f32; 2]; 2]; ROW_TILES],
    value_scales: [f32; 2],
) -> [[[f32; 2]; 2]; ROW_TILES] {
    let mut probs = [[[0.0; 2]; 2]; ROW_TILES];
    for t in 0..ROW_TILES {
        for n in 0..2usize {
            // A row that has seen no key has scores of `-inf` alone.
            let row_max = state.row_max[t][n];
            let reference = select(row_max == f32::NEG_INFINITY, 0.0, row_max);
            for h in 0..2usize {
                let p = (scores[t][h][n] - reference).exp2();
                state.row_sum[t][n] += p;
                probs[t][h][n] = p;
                if is_scaled(V_FORMAT) {
                    probs[t][h][n] = select(p == 0.0, 0.0, p * value_scales[h]);
                }
            }
        }
    }
    if state.shrunk != 0 {
        for t in 0..ROW_TILES {
            for h in 0..2usize {
                for n in 0..2usize {
                    probs[t][h][n] *= shrink_of(state.shrunk, 2 * t + n);
                }
            }
        }
    }
    probs
}

/// Returns true if a value that the SIMD group has loaded is NaN or infinite.
#[device]
pub fn any_nonfinite<const V_FORMAT: u32, const VALUE_DIM: usize, const V_WORDS: usize>(
    values: ValueWords<V_WORDS>,
) -> bool {
    let mut found = false;
    if may_be_nonfinite(V_FORMAT) {
        for n in 0..4usize {
            found = found || has_nonfinite::<V_FORMAT, VALUE_DIM, 8, V_WORDS>(values.words[n]);
        }
        found = simd_any(found);
    }
    found
}

/// Adds `p v` of 16 keys to the partial outputs.
#[device]
#[inline(always)]
pub fn pv_tile<
    VOperand: Element,
    const V_FORMAT: u32,
    const VALUE_DIM: usize,
    const V_WORDS: usize,
    const V_PAIR_WORDS: usize,
    const V_PAIRS: usize,
    const ROW_TILES: usize,
>(
    state: &mut Accumulator<V_PAIRS, ROW_TILES>,
    probs: [[[f32; 2]; 2]; ROW_TILES],
    values: ValueWords<V_WORDS>,
    levels: Levels,
    codebooks: &Buffer<f32>,
    nibbles: &Shared<u8>,
) {
    let low = value_lefts::<VOperand, V_FORMAT, VALUE_DIM, V_WORDS, V_PAIR_WORDS, V_PAIRS>(
        values, 0, levels, codebooks, nibbles,
    );
    let high = value_lefts::<VOperand, V_FORMAT, VALUE_DIM, V_WORDS, V_PAIR_WORDS, V_PAIRS>(
        values, 1, levels, codebooks, nibbles,
    );
    for t in 0..ROW_TILES {
        let p = right::<VOperand>(probs[t][0][0], probs[t][0][1]);
        let p_next = right::<VOperand>(probs[t][1][0], probs[t][1][1]);
        for i in 0..V_PAIRS {
            state.out[t][i] = multiply_add_twice::<VOperand>(low[i], p, high[i], p_next, state.out[t][i]);
        }
    }
}

/// Left operands of the coordinates of 8 values, from value `8 h` on.
#[device]
#[inline(always)]
fn value_lefts<
    VOperand: Element,
    const V_FORMAT: u32,
    const VALUE_DIM: usize,
    const V_WORDS: usize,
    const V_PAIR_WORDS: usize,
    const V_PAIRS: usize,
>(
    values: ValueWords<V_WORDS>,
    h: usize,
    levels: Levels,
    codebooks: &Buffer<f32>,
    nibbles: &Shared<u8>,
) -> [[Left<VOperand>; 2]; V_PAIRS] {
    let lane = matrix_row();
    let mut lefts = [[left::<VOperand>(0u32, 0u32); 2]; V_PAIRS];
    if V_PAIR_WORDS == V_PAIRS {
        let rows = [values.words[2 * h], values.words[2 * h + 1]];
        let even = scale_of::<V_FORMAT, VALUE_DIM>(values.scales[2 * h]);
        let odd = scale_of::<V_FORMAT, VALUE_DIM>(values.scales[2 * h + 1]);
        let words = transposed_pairs::<V_FORMAT, VALUE_DIM, 8, V_WORDS, V_PAIR_WORDS>(
            rows,
            [even.halves, odd.halves],
            lane,
            levels,
            codebooks,
            nibbles,
        );
        for i in 0..V_PAIRS {
            lefts[i] = [
                left::<VOperand>(words.first[i], words.first[i]),
                left::<VOperand>(words.second[i], words.second[i]),
            ];
        }
    } else {
        // Words of f32, of elements alone.
        let even = pairs::<V_FORMAT, VALUE_DIM, 8, V_WORDS, V_PAIR_WORDS>(
            values.words[2 * h],
            lane,
            levels,
            codebooks,
            nibbles,
        );
        let odd = pairs::<V_FORMAT, VALUE_DIM, 8, V_WORDS, V_PAIR_WORDS>(
            values.words[2 * h + 1],
            lane,
            levels,
            codebooks,
            nibbles,
        );
        for i in 0..V_PAIRS {
            lefts[i] = [
                left::<VOperand>(even[2 * i], odd[2 * i]),
                left::<VOperand>(even[2 * i + 1], odd[2 * i + 1]),
            ];
        }
    }
    lefts
}

/// Adds `p v` of a group of keys, key by key, where a value is not finite: `0 v` of a hidden key would not be 0, and of a key
/// whose probability underflows not infinite. To compilers the number of keys is unknown: unrolled, this rare path would be most of the kernel.
#[device]
pub fn pv_tile_nonfinite<
    const V_FORMAT: u32,
    const VALUE_DIM: usize,
    const V_PAIRS: usize,
    const ROW_TILES: usize,
>(
    state: &mut Accumulator<V_PAIRS, ROW_TILES>,
    scores: [[[f32; 2]; 2]; ROW_TILES],
    probs: [[[f32; 2]; 2]; ROW_TILES],
    kv: KvMemory,
    head: KvHead,
    group: KeyGroup,
) {
    for key in head.low.saturating_sub(group.first)..(head.last + 1).saturating_sub(group.first).min(16) {
        let row = row_of_key::<V_FORMAT, VALUE_DIM>(kv.table, head, group, key);
        let lane = matrix_lane(key % 8, matrix_pair());
        let mut seen = [[false; 2]; ROW_TILES];
        let mut p = [[0.0; 2]; ROW_TILES];
        for t in 0..ROW_TILES {
            for n in 0..2usize {
                let score = select(key < 8, scores[t][0][n], scores[t][1][n]);
                seen[t][n] = simd_shuffle(score, lane) != f32::NEG_INFINITY;
                p[t][n] = simd_shuffle(select(key < 8, probs[t][0][n], probs[t][1][n]), lane);
            }
        }
        for i in 0..V_PAIRS {
            for h in 0..2usize {
                let c = coordinate::<V_FORMAT, VALUE_DIM, 8>(matrix_row(), (2 * i + h) as u32);
                let x = gather::<V_FORMAT, VALUE_DIM>(kv.v, row, c, head.levels, kv.codebooks);
                for t in 0..ROW_TILES {
                    for n in 0..2usize {
                        state.out[t][i][h][n] += select(seen[t][n], weighed(p[t][n], x), 0.0);
                    }
                }
            }
        }
    }
}

/// Bits `2 t + n` of a lane's rows whose partial outputs are infinite or NaN while their `row_sum` is finite: they
/// overflowed, or a value is not finite.
#[device]
fn overflowed<const V_PAIRS: usize, const ROW_TILES: usize>(
    out: [[[[f32; 2]; 2]; V_PAIRS]; ROW_TILES],
    row_sum: [[f32; 2]; ROW_TILES],
) -> u32 {
    let mut bits = 0u32;
    for t in 0..ROW_TILES {
        for n in 0..2usize {
            let mut found = 0.0;
            for i in 0..V_PAIRS {
                for h in 0..2usize {
                    found = select(out[t][i][h][n].abs() < f32::INFINITY, found, 1.0);
                }
            }
            let any = matrix_column_max(found);
            let sum = matrix_column_sum(row_sum[t][n]);
            bits |= select(any > 0.0 && sum < f32::INFINITY, 1u32 << (2 * t + n) as u32, 0u32);
        }
    }
    bits
}

/// Returns true if the SIMD group has to recompute its rows, because partial outputs are infinite or NaN
/// though probabilities are not. Empties the accumulator if so. Partial outputs of f16 cannot overflow, but
/// are NaN for an infinite value whose probability underflows; partial outputs of codes are finite.
#[device]
pub fn needs_second_pass<const V_FORMAT: u32, const V_PAIRS: usize, const ROW_TILES: usize>(
    state: &mut Accumulator<V_PAIRS, ROW_TILES>,
) -> bool {
    let mut again = false;
    if state.shrunk == 0 && (V_FORMAT == F32 || V_FORMAT == F16 || V_FORMAT == BF16) {
        let shrunk = overflowed::<V_PAIRS, ROW_TILES>(state.out, state.row_sum);
        again = simd_any(shrunk != 0);
        if again {
            for t in 0..ROW_TILES {
                state.out[t] = [[[0.0; 2]; 2]; V_PAIRS];
                state.row_max[t] = [f32::NEG_INFINITY; 2];
                state.row_sum[t] = [0.0; 2];
            }
            state.shrunk = select(V_FORMAT == F16, 0u32, shrunk) | SECOND_PASS;
        }
    }
    again
}

#[cfg(test)]
mod tests {
    use super::element_of;
    use flashtile_kernel::{bf16, f16};

    #[test]
    fn only_rounding_is_cut_off() {
        for (mean, of_f16, of_bf16) in [
            (65504.0, 65504.0, 65536.0),
            (65535.9, 65504.0, 65536.0),
            (-65535.9, -65504.0, -65536.0),
            (65537.0, f32::INFINITY, 65536.0),
            (-1e5, f32::NEG_INFINITY, -99840.0),
            (3.4e38, f32::INFINITY, 3.389_531_4e38),
            (-3.4027e38, f32::NEG_INFINITY, -3.389_531_4e38),
            (3.4028e38, f32::INFINITY, f32::INFINITY),
            (f32::INFINITY, f32::INFINITY, f32::INFINITY),
        ] {
            assert_eq!(element_of::<f16>(mean).to_f32(), of_f16, "{mean}");
            assert_eq!(element_of::<bf16>(mean).to_f32(), of_bf16, "{mean}");
            assert_eq!(element_of::<f32>(mean), mean);
        }
        assert!(element_of::<f16>(f32::NAN).is_nan() && element_of::<bf16>(f32::NAN).is_nan());
    }
}
