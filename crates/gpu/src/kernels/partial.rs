//! The partial results of a threadgroup: merged from its SIMD groups, and stored.
//!
//! ```text
//! row_max     = max_s row_max_s                                 over SIMD groups s
//! row_sum     = sum_s 2^(row_max_s - row_max) row_sum_s
//! partial_out = sum_s 2^(row_max_s - row_max) out_s / S
//! ```
//!
//! The division by the number of SIMD groups keeps sums of finite outputs finite. Outputs are added in the order of the SIMD
//! groups, so that results do not depend on which of them is done first.

use super::attend::{Attend, num_splits, split_index};
use super::query::{RowTile, lane_query_row, result_of};
use super::rows::coordinate;
use super::tile::{Accumulator, shrink_of, weighed};
use flashtile_kernel::prelude::*;

/// Where row `[t][n]` of a lane is among the `8 ROW_TILES` rows of the threadgroup.
#[device]
fn row_in_tile(t: usize, n: usize) -> u32 {
    8 * t as u32 + 2 * matrix_pair() + n as u32
}

/// Stores the pairs `(row_max, row_sum)` of a SIMD group's rows in `max_sum` `[SIMD_GROUPS, 8 ROW_TILES, 2]`.
#[device]
fn share_max_sum<const V_PAIRS: usize, const ROW_TILES: usize>(
    state: Accumulator<V_PAIRS, ROW_TILES>,
    max_sum: &mut Shared<f32>,
) {
    for t in 0..ROW_TILES {
        for n in 0..2usize {
            let shrink = shrink_of(state.shrunk, 2 * t + n);
            let sum = matrix_column_sum(state.row_sum[t][n]) * shrink;
            if matrix_row() == 0 {
                let at = 2 * (simd_index() * (8 * ROW_TILES) as u32 + row_in_tile(t, n));
                // `-inf` says that no key was seen. If the sum is NaN, any `row_max` other than `-inf` is correct.
                max_sum[at] = select(sum.is_nan(), 0.0, state.row_max[t][n] - shrink.log2());
                max_sum[at + 1] = sum;
            }
        }
    }
}

/// The pair of a row over the keys of all SIMD groups.
#[device]
struct MaxSum {
    row_max: f32,
    row_sum: f32,
}

/// Merges the pairs of row `row` of the tile.
#[device]
fn merged_max_sum<const SIMD_GROUPS: usize, const ROW_TILES: usize>(
    max_sum: &Shared<f32>,
    row: u32,
) -> MaxSum {
    let mut merged = MaxSum { row_max: f32::NEG_INFINITY, row_sum: 0.0 };
    for s in 0..SIMD_GROUPS {
        merged.row_max = merged.row_max.max(max_sum[2 * ((8 * s * ROW_TILES) as u32 + row)]);
    }
    for s in 0..SIMD_GROUPS {
        let at = 2 * ((8 * s * ROW_TILES) as u32 + row);
        if max_sum[at] != f32::NEG_INFINITY {
            merged.row_sum += (max_sum[at] - merged.row_max).exp2() * max_sum[at + 1];
        }
    }
    merged
}

/// Adds up the outputs of the SIMD groups in `sums`, `[ROW_TILES, V_PAIRS, 2, 2, 32]` as lanes hold them. `max_sum` has the pairs of every SIMD
/// group.
#[device]
fn sum_outputs<const SIMD_GROUPS: usize, const V_PAIRS: usize, const ROW_TILES: usize>(
    state: Accumulator<V_PAIRS, ROW_TILES>,
    max_sum: &Shared<f32>,
    sums: &mut Shared<f32>,
) {
    // Less than 0 where the SIMD group saw no key.
    let mut factors = [[-1.0; 2]; ROW_TILES];
    for t in 0..ROW_TILES {
        for n in 0..2usize {
            let row = row_in_tile(t, n);
            let own = max_sum[2 * (simd_index() * (8 * ROW_TILES) as u32 + row)];
            if own != f32::NEG_INFINITY {
                let all = merged_max_sum::<SIMD_GROUPS, ROW_TILES>(max_sum, row);
                factors[t][n] = (own - all.row_max).exp2() / SIMD_GROUPS as f32;
            }
        }
    }
    for s in 0..SIMD_GROUPS {
        if simd_index() == s as u32 {
            for t in 0..ROW_TILES {
                for i in 0..V_PAIRS {
                    for h in 0..2usize {
                        for n in 0..2usize {
                            let at = (64 * (2 * (t * V_PAIRS + i) + h) + 32 * n) as u32 + simd_lane();
                            let x = weighed(factors[t][n], state.out[t][i][h][n]);
                            let mut sum = select(factors[t][n] < 0.0, 0.0, x);
                            if s > 0 {
                                sum += sums[at];
                            }
                            sums[at] = sum;
                        }
                    }
                }
            }
        }
        barrier();
    }
}

/// Merges the results of the SIMD groups into `max_sum` `[SIMD_GROUPS, 8 ROW_TILES, 2]` and `sums` `[ROW_TILES, V_PAIRS, 2, 2, 32]`. Every thread of the threadgroup
/// takes part.
#[device]
pub fn merge_simds<const SIMD_GROUPS: usize, const V_PAIRS: usize, const ROW_TILES: usize>(
    state: Accumulator<V_PAIRS, ROW_TILES>,
    max_sum: &mut Shared<f32>,
    sums: &mut Shared<f32>,
) {
    share_max_sum::<V_PAIRS, ROW_TILES>(state, max_sum);
    // After the barrier no thread reads the old contents of `sums` either.
    barrier();
    sum_outputs::<SIMD_GROUPS, V_PAIRS, ROW_TILES>(state, max_sum, sums);
}

/// Stores the partial results of the threadgroup's rows, for its split. SIMD groups take the coordinates in turns.
#[device]
pub fn store_partial<
    const V_FORMAT: u32,
    const VALUE_DIM: usize,
    const SIMD_GROUPS: usize,
    const V_PAIRS: usize,
    const ROW_TILES: usize,
>(
    max_sum: &Shared<f32>,
    sums: &Shared<f32>,
    tile: RowTile,
    params: &Attend,
    partial_out: &mut Buffer<f32>,
    partial_max_sum: &mut Buffer<f32>,
) {
    for t in 0..ROW_TILES {
        for n in 0..2usize {
            let row = lane_query_row(tile, t, n);
            if row < tile.rows {
                let partial = result_of(tile, params, row) * num_splits(params) + split_index(params);
                for j in (simd_index()..2 * V_PAIRS as u32).step_by(SIMD_GROUPS) {
                    let c = coordinate::<V_FORMAT, VALUE_DIM, 8>(matrix_row(), j);
                    let at = 64 * (2 * (t * V_PAIRS) as u32 + j) + 32 * n as u32 + simd_lane();
                    if c < VALUE_DIM as u32 {
                        partial_out[partial as u64 * VALUE_DIM as u64 + c as u64] = sums[at];
                    }
                }
                if simd_index() == 0 && matrix_row() == 0 {
                    let merged = merged_max_sum::<SIMD_GROUPS, ROW_TILES>(max_sum, row_in_tile(t, n));
                    partial_max_sum[2 * partial] = merged.row_max;
                    partial_max_sum[2 * partial + 1] = merged.row_sum;
                }
            }
        }
    }
}
