//! Scores of a block, their online softmax, and the product with the values.

use super::block::{ROW_PADDING, scale_pair};
use super::lefts::Queries;
use super::pass::{ScoredBlock, first_column, team_index};
use crate::kernels::attend::Attend;
use crate::kernels::formats::{has_half_norms, is_codes, is_mlx, is_scaled};
use crate::kernels::query::RowBound;
use crate::kernels::tile::{
    Accumulator, BiasMemory, MIN_SCALE, SLACK, Scoring, biased, log2_near, masked, shrink_of, weighed,
};
use flashtile_kernel::prelude::*;

/// Products of a SIMD group's queries with its columns of the keys of a block of `K_COLUMNS` columns.
#[device]
#[inline(always)]
pub fn qk_block<
    KOperand: Element,
    const K_FORMAT: u32,
    const K_COLUMNS: usize,
    const K_PAIRS: usize,
    const ROW_TILES: usize,
    const SCORE_TILES: usize,
    const TEAM_SIMDS: usize,
>(
    queries: Queries<KOperand, K_PAIRS, ROW_TILES>,
    keys: &Shared<KOperand>,
) -> [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES] {
    let mut products = [[[[0.0; 2]; 2]; SCORE_TILES]; ROW_TILES];
    let row = (K_COLUMNS + ROW_PADDING) as u32;
    let first = first_column::<K_COLUMNS, TEAM_SIMDS>();
    for i in 0..K_PAIRS / 2 {
        for u in 0..SCORE_TILES / 2 {
            let at = first + 16 * u as u32 * row + 16 * i as u32;
            let k = load_rights_transposed::<KOperand>(keys, at, row);
            let mut rest = k;
            if is_mlx(K_FORMAT) {
                rest = load_rights_transposed::<KOperand>(keys, at + 8 * SCORE_TILES as u32 * row, row);
            }
            for n in 0..2usize {
                let j = 2 * u + n;
                for m in 0..ROW_TILES {
                    let q = queries.rounded[m][2 * i];
                    let q_next = queries.rounded[m][2 * i + 1];
                    let mut sum = products[m][j];
                    if is_mlx(K_FORMAT) {
                        sum = multiply_add_twice::<KOperand>(q, rest[2 * n], q_next, rest[2 * n + 1], sum);
                    }
                    if is_codes(K_FORMAT) {
                        let left = queries.residual[m][2 * i];
                        let left_next = queries.residual[m][2 * i + 1];
                        sum = multiply_add_twice::<KOperand>(left, k[2 * n], left_next, k[2 * n + 1], sum);
                    }
                    products[m][j] = multiply_add_twice::<KOperand>(q, k[2 * n], q_next, k[2 * n + 1], sum);
                }
            }
        }
    }
    products
}

/// Products times the scales of their keys, for the SIMD group's columns.
#[device]
#[inline(always)]
fn with_key_scales<
    const K_FORMAT: u32,
    const HEAD_DIM: usize,
    const K_COLUMNS: usize,
    const ROW_TILES: usize,
    const SCORE_TILES: usize,
    const TEAM_SIMDS: usize,
>(
    products: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
    scales: &Shared<f32>,
) -> [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES] {
    let mut result = products;
    if is_scaled(K_FORMAT) {
        let of_keys = lane_scales::<K_FORMAT, HEAD_DIM, SCORE_TILES>(
            scales,
            0,
            first_column::<K_COLUMNS, TEAM_SIMDS>(),
        );
        for j in 0..SCORE_TILES {
            for m in 0..ROW_TILES {
                for h in 0..2usize {
                    for n in 0..2usize {
                        result[m][j][h][n] = products[m][j][h][n] * of_keys[j][n];
                    }
                }
            }
        }
    }
    result
}

/// Adds up the products of the SIMD groups of a team, each over its own columns, in the order of the columns: all of them have the same
/// scores. By all threads of the threadgroup, with `exchange` `[SIMD_GROUPS, ROW_TILES, SCORE_TILES, 32, 4]`.
#[device]
#[inline(always)]
pub fn sum_parts<const ROW_TILES: usize, const SCORE_TILES: usize, const TEAM_SIMDS: usize>(
    products: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
    exchange: &mut Shared<f32>,
) -> [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES] {
    let mut sums = products;
    if TEAM_SIMDS > 1 {
        let size = (128 * ROW_TILES * SCORE_TILES) as u32;
        for m in 0..ROW_TILES {
            for j in 0..SCORE_TILES {
                let at = simd_index() * size + (128 * (m * SCORE_TILES + j)) as u32 + 4 * simd_lane();
                let four = products[m][j];
                exchange.store::<4>(at, [four[0][0], four[0][1], four[1][0], four[1][1]]);
            }
        }
        barrier();
        let first = TEAM_SIMDS as u32 * team_index::<TEAM_SIMDS>() * size;
        for m in 0..ROW_TILES {
            for j in 0..SCORE_TILES {
                let at = first + (128 * (m * SCORE_TILES + j)) as u32 + 4 * simd_lane();
                let mut sum = exchange.load::<4>(at);
                for part in 1..TEAM_SIMDS {
                    let four = exchange.load::<4>(at + part as u32 * size);
                    for n in 0..4usize {
                        sum[n] += four[n];
                    }
                }
                sums[m][j] = [[sum[0], sum[1]], [sum[2], sum[3]]];
            }
        }
    }
    sums
}

/// Products of queries and keys of a block, over all columns: times the scales of the keys, and added up over the SIMD groups of a team. By
/// all threads of the threadgroup.
#[device]
#[inline(always)]
pub fn products_of<
    KOperand: Element,
    const K_FORMAT: u32,
    const HEAD_DIM: usize,
    const K_COLUMNS: usize,
    const K_PAIRS: usize,
    const ROW_TILES: usize,
    const SCORE_TILES: usize,
    const TEAM_SIMDS: usize,
>(
    queries: Queries<KOperand, K_PAIRS, ROW_TILES>,
    keys: &Shared<KOperand>,
    scales: &Shared<f32>,
    exchange: &mut Shared<f32>,
) -> [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES] {
    let products =
        qk_block::<KOperand, K_FORMAT, K_COLUMNS, K_PAIRS, ROW_TILES, SCORE_TILES, TEAM_SIMDS>(queries, keys);
    let scaled = with_key_scales::<K_FORMAT, HEAD_DIM, K_COLUMNS, ROW_TILES, SCORE_TILES, TEAM_SIMDS>(
        products, scales,
    );
    sum_parts::<ROW_TILES, SCORE_TILES, TEAM_SIMDS>(scaled, exchange)
}

/// Terms that make scores of the products of a lane's rows.
#[device]
struct RowTerms<const ROW_TILES: usize> {
    /// Factor of the products.
    scale: [[f32; 2]; ROW_TILES],
    /// Bias of the scaled products.
    bias: [[f32; 2]; ROW_TILES],
    /// Keys that the rows see.
    rows: [[RowBound; 2]; ROW_TILES],
}

/// Scores in units of log2 of the products of a block from key `first` on: scaled, with softcap, ALiBi and masks.
#[device]
#[inline(always)]
fn scores_of<const ROW_TILES: usize, const SCORE_TILES: usize>(
    products: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
    terms: RowTerms<ROW_TILES>,
    first: i32,
    memory: BiasMemory,
    params: &Attend,
    scoring: Scoring,
) -> [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES] {
    let mut scores = products;
    for m in 0..ROW_TILES {
        for j in 0..SCORE_TILES {
            for n in 0..2usize {
                let key = first + (8 * j + n) as i32 + 2 * matrix_pair() as i32;
                for h in 0..2usize {
                    let product = products[m][j][h][n] * terms.scale[m][h] + terms.bias[m][h];
                    let mut score = biased(product, key, terms.rows[m][h], params, scoring);
                    if scoring.partial {
                        score = masked(score, key, terms.rows[m][h], memory, params, scoring);
                    }
                    scores[m][j][h][n] = score;
                }
            }
        }
    }
    scores
}

/// Raises `row_max` to the greatest scores of a block, which are `scores` times `factor`, where some row's is above it by more
/// than the slack. Where values have scales, these join the scores.
#[device]
#[inline(always)]
fn follow_row_max<
    const V_FORMAT: u32,
    const V_PAIRS: usize,
    const ROW_TILES: usize,
    const SCORE_TILES: usize,
>(
    state: &mut Accumulator<V_PAIRS, ROW_TILES>,
    scores: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
    factor: [[f32; 2]; ROW_TILES],
    value_scales: [[f32; 2]; SCORE_TILES],
) {
    let mut greatest = [[f32::NEG_INFINITY; 2]; ROW_TILES];
    let mut behind = false;
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            for j in 0..SCORE_TILES {
                for n in 0..2usize {
                    let mut score = scores[m][j][h][n];
                    if is_scaled(V_FORMAT) {
                        score = score.mul_add(factor[m][h], log2_near(value_scales[j][n]).max(MIN_SCALE));
                    }
                    greatest[m][h] = greatest[m][h].max(score);
                }
            }
            if !is_scaled(V_FORMAT) {
                greatest[m][h] *= factor[m][h];
            }
            behind = behind || greatest[m][h] > state.row_max[m][h] + SLACK;
        }
    }
    if simd_any(behind) {
        for m in 0..ROW_TILES {
            for h in 0..2usize {
                let new = state.row_max[m][h].max(matrix_row_max(greatest[m][h]));
                let by = select(new == f32::NEG_INFINITY, 1.0, (state.row_max[m][h] - new).exp2());
                state.row_max[m][h] = new;
                state.row_sum[m][h] *= by;
                // The first pass makes an infinite output NaN where `by` underflows, and a second one follows.
                if state.shrunk != 0 {
                    for i in 0..V_PAIRS {
                        for n in 0..2usize {
                            state.out[m][i][h][n] = weighed(by, state.out[m][i][h][n]);
                        }
                    }
                } else {
                    for i in 0..V_PAIRS {
                        for n in 0..2usize {
                            state.out[m][i][h][n] *= by;
                        }
                    }
                }
            }
        }
    }
}

/// Probabilities `2^(factor score - row_max)` of a block, which join `row_sum`; then times the scales of their values and the
/// factors of their rows.
#[device]
#[inline(always)]
fn probs_of<const V_FORMAT: u32, const V_PAIRS: usize, const ROW_TILES: usize, const SCORE_TILES: usize>(
    state: &mut Accumulator<V_PAIRS, ROW_TILES>,
    scores: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
    factor: [[f32; 2]; ROW_TILES],
    value_scales: [[f32; 2]; SCORE_TILES],
) -> [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES] {
    let mut probs = scores;
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            // A row that has seen no key has scores of `-inf` alone.
            let row_max = state.row_max[m][h];
            let reference = select(row_max == f32::NEG_INFINITY, 0.0, row_max);
            for j in 0..SCORE_TILES {
                for n in 0..2usize {
                    let p = scores[m][j][h][n].mul_add(factor[m][h], -reference).exp2();
                    state.row_sum[m][h] += p;
                    probs[m][j][h][n] = p;
                    if is_scaled(V_FORMAT) {
                        probs[m][j][h][n] = select(p == 0.0, 0.0, p * value_scales[j][n]);
                    }
                }
            }
        }
    }
    if state.shrunk != 0 {
        for m in 0..ROW_TILES {
            for h in 0..2usize {
                let shrink = shrink_of(state.shrunk, 2 * m + h);
                for j in 0..SCORE_TILES {
                    for n in 0..2usize {
                        probs[m][j][h][n] *= shrink;
                    }
                }
            }
        }
    }
    probs
}

/// The scales of a lane's keys `8 j + 2 p + n` of a block, whose scales start at element `start`, for the columns from `column` on.
#[device]
#[inline(always)]
fn lane_scales<const FORMAT: u32, const DIM: usize, const SCORE_TILES: usize>(
    scales: &Shared<f32>,
    start: u32,
    column: u32,
) -> [[f32; 2]; SCORE_TILES] {
    let mut result = [[1.0; 2]; SCORE_TILES];
    if is_scaled(FORMAT) {
        for j in 0..SCORE_TILES {
            result[j] = scale_pair::<FORMAT, DIM, SCORE_TILES>(scales, start + 8 * j as u32, column);
        }
    }
    result
}

/// Scales of the values of a lane's keys.
#[device]
struct ValueScales<const SCORE_TILES: usize> {
    /// Of the columns of the SIMD group.
    own: [[f32; 2]; SCORE_TILES],
    /// The greatest of a row.
    greatest: [[f32; 2]; SCORE_TILES],
}

/// The scales of the values of a block, of which the SIMD group has the columns from `column` on.
#[device]
#[inline(always)]
fn value_scales_of<const V_FORMAT: u32, const VALUE_DIM: usize, const SCORE_TILES: usize>(
    scales: &Shared<f32>,
    start: u32,
    column: u32,
) -> ValueScales<SCORE_TILES> {
    let own = lane_scales::<V_FORMAT, VALUE_DIM, SCORE_TILES>(scales, start, column);
    let mut both = ValueScales::<SCORE_TILES> { own, greatest: own };
    if has_half_norms(V_FORMAT, VALUE_DIM as u32) {
        let first = lane_scales::<V_FORMAT, VALUE_DIM, SCORE_TILES>(scales, start, 0);
        let second = lane_scales::<V_FORMAT, VALUE_DIM, SCORE_TILES>(scales, start, 256);
        for j in 0..SCORE_TILES {
            for n in 0..2usize {
                both.greatest[j][n] = first[j][n].max(second[j][n]);
            }
        }
    }
    both
}

/// Probabilities of a block, of its products. Where scores are scaled products, the scale joins the exponent. `scales` has `K_SCALES` scales of
/// keys, then the scales of values.
#[device]
#[inline(always)]
pub fn softmax_block<
    KOperand: Element,
    const V_FORMAT: u32,
    const VALUE_DIM: usize,
    const K_PAIRS: usize,
    const V_PAIRS: usize,
    const ROW_TILES: usize,
    const SCORE_TILES: usize,
    const K_SCALES: usize,
>(
    state: &mut Accumulator<V_PAIRS, ROW_TILES>,
    products: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
    queries: Queries<KOperand, K_PAIRS, ROW_TILES>,
    block: ScoredBlock<ROW_TILES>,
    scales: &Shared<f32>,
    params: &Attend,
) -> [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES] {
    let mut scores = products;
    let mut factor = queries.scale;
    let pass = block.pass;
    let step = block.step;
    if step.partial || pass.has.softcap || pass.has.alibi || block.centered {
        let scoring = Scoring { has: pass.has, partial: step.partial, tree: pass.all.tree };
        let terms = RowTerms::<ROW_TILES> { scale: queries.scale, bias: queries.bias, rows: pass.rows };
        scores = scores_of::<ROW_TILES, SCORE_TILES>(
            products,
            terms,
            step.first as i32,
            block.memory,
            params,
            scoring,
        );
        factor = [[1.0; 2]; ROW_TILES];
    }
    let of_values =
        value_scales_of::<V_FORMAT, VALUE_DIM, SCORE_TILES>(scales, K_SCALES as u32, block.column);
    follow_row_max::<V_FORMAT, V_PAIRS, ROW_TILES, SCORE_TILES>(state, scores, factor, of_values.greatest);
    probs_of::<V_FORMAT, V_PAIRS, ROW_TILES, SCORE_TILES>(state, scores, factor, of_values.own)
}

/// Adds `p v` of a block of `V_COLUMNS` columns to the outputs of the SIMD group's columns.
#[device]
#[inline(always)]
pub fn pv_block<
    VOperand: Element,
    const V_COLUMNS: usize,
    const V_PAIRS: usize,
    const ROW_TILES: usize,
    const SCORE_TILES: usize,
    const TEAM_SIMDS: usize,
>(
    state: &mut Accumulator<V_PAIRS, ROW_TILES>,
    probs: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
    values: &Shared<VOperand>,
) {
    let row = (V_COLUMNS + ROW_PADDING) as u32;
    let first = first_column::<V_COLUMNS, TEAM_SIMDS>();
    for u in 0..SCORE_TILES / 2 {
        let mut p = [[left_from::<VOperand>(0.0, 0.0); 2]; ROW_TILES];
        let mut p_next = [[left_from::<VOperand>(0.0, 0.0); 2]; ROW_TILES];
        for m in 0..ROW_TILES {
            for h in 0..2usize {
                p[m][h] = left_from::<VOperand>(probs[m][2 * u][h][0], probs[m][2 * u][h][1]);
                p_next[m][h] = left_from::<VOperand>(probs[m][2 * u + 1][h][0], probs[m][2 * u + 1][h][1]);
            }
        }
        for i in 0..V_PAIRS / 2 {
            let at = first + 16 * u as u32 * row + 16 * i as u32;
            let v = load_rights::<VOperand>(values, at, row);
            for n in 0..2usize {
                let c = 2 * i + n;
                for m in 0..ROW_TILES {
                    let sum = state.out[m][c];
                    state.out[m][c] =
                        multiply_add_twice::<VOperand>(p[m], v[2 * n], p_next[m], v[2 * n + 1], sum);
                }
            }
        }
    }
}
