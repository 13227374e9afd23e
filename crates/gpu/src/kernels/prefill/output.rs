//! The epilogue of a threadgroup: it writes outputs and logsumexps of its rows, or partial results where keys
//! are split.

use super::block::column_coordinate;
use super::lefts::staged_start;
use super::pass::{PrefillPass, first_column, lane_row, part_index, team_index};
use crate::kernels::attend::{Attend, num_splits, split_index};
use crate::kernels::formats::{BF16, F16, F32};
use crate::kernels::merge::{Merged, lse_of};
use crate::kernels::query::{RowTile, head_of, lse_index, result_of};
use crate::kernels::rotation::unrotate;
use crate::kernels::score::to_log2;
use crate::kernels::tile::{Accumulator, SECOND_PASS, SHRINK, element_of, shrink_of, weighed};
use flashtile_kernel::prelude::*;

/// Bits `2 m + h` of a lane's rows whose outputs are infinite or NaN while their `row_sum` is finite: they overflowed, or a value is
/// not finite.
#[device]
fn overflowed_rows<const V_PAIRS: usize, const ROW_TILES: usize>(
    out: [[[[f32; 2]; 2]; V_PAIRS]; ROW_TILES],
    row_sum: [[f32; 2]; ROW_TILES],
) -> u32 {
    let mut bits = 0u32;
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            let mut found = 0.0;
            for i in 0..V_PAIRS {
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

/// Returns true if the threadgroup has to recompute its rows, because outputs of some of them are infinite or
/// NaN though probabilities are not. Empties the accumulator if so. Outputs of f16 cannot overflow, but are
/// NaN for an infinite value whose probability underflows; outputs of codes are finite. The SIMD groups of a
/// team agree on the rows: `flags` has a word for each thread, from the second on.
#[device]
pub fn starts_second_pass<
    const V_FORMAT: u32,
    const V_PAIRS: usize,
    const ROW_TILES: usize,
    const SIMD_GROUPS: usize,
    const TEAM_SIMDS: usize,
>(
    state: &mut Accumulator<V_PAIRS, ROW_TILES>,
    flags: &mut Shared<u32>,
) -> bool {
    let mut again = false;
    if state.shrunk == 0 && (V_FORMAT == F32 || V_FORMAT == F16 || V_FORMAT == BF16) {
        flags[1 + thread_index()] = overflowed_rows::<V_PAIRS, ROW_TILES>(state.out, state.row_sum);
        barrier();
        let mut shrunk = 0u32;
        let mut any = 0u32;
        for simd in 0..SIMD_GROUPS as u32 {
            let rows = flags[1 + 32 * simd + simd_lane()];
            any |= rows;
            shrunk |= select(simd / TEAM_SIMDS as u32 == team_index::<TEAM_SIMDS>(), rows, 0u32);
        }
        again = simd_any(any != 0);
        if again {
            for m in 0..ROW_TILES {
                state.out[m] = [[[0.0; 2]; 2]; V_PAIRS];
                state.row_max[m] = [f32::NEG_INFINITY; 2];
                state.row_sum[m] = [0.0; 2];
            }
            state.shrunk = select(V_FORMAT == F16, 0u32, shrunk) | SECOND_PASS;
        }
    }
    again
}

/// The sinks of a lane's rows in units of the score; `-inf` where there are none.
#[device]
pub fn sinks_of<const ROW_TILES: usize, const TEAM_SIMDS: usize>(
    tile: RowTile,
    sinks: &Buffer<f32>,
    params: &Attend,
    has_sinks: bool,
) -> [[f32; 2]; ROW_TILES] {
    let mut all = [[f32::NEG_INFINITY; 2]; ROW_TILES];
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            let row = lane_row::<ROW_TILES, TEAM_SIMDS>(tile, m, h);
            if has_sinks && row < tile.rows {
                all[m][h] = sinks[head_of(tile, params, row)];
            }
        }
    }
    all
}

/// The softmax of row `[m][h]` over all keys that it sees, sink included.
#[device]
fn merged_row<const V_PAIRS: usize, const ROW_TILES: usize>(
    state: Accumulator<V_PAIRS, ROW_TILES>,
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
pub fn merged_rows<const V_PAIRS: usize, const ROW_TILES: usize>(
    state: Accumulator<V_PAIRS, ROW_TILES>,
    pass: PrefillPass<ROW_TILES>,
    sinks: [[f32; 2]; ROW_TILES],
) -> [[Merged; 2]; ROW_TILES] {
    let none = Merged { row_max: 0.0, keys_row_max: 0.0, row_sum: 0.0, sink: 0.0, shift: 0.0 };
    let mut rows = [[none; 2]; ROW_TILES];
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            rows[m][h] = merged_row::<V_PAIRS, ROW_TILES>(state, m, h, pass.rows[m][h].shift, sinks[m][h]);
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
        // The product may overflow where the mean does not. A mean that is infinite or NaN stays so.
        let small = weighed(factor * SHRINK, x);
        mean = small * (1.0 / SHRINK);
        if small.is_finite() {
            mean = mean.max(-3.402_823_5e38).min(3.402_823_5e38);
        }
    }
    mean
}

/// Where the rows of a threadgroup go.
#[device]
pub struct OutputRows {
    /// The rows.
    pub tile: RowTile,
    /// Query heads of a key/value head.
    pub group: u32,
    /// Strides of the output over batch entry, head and query, in elements.
    pub strides: [u64; 3],
}

/// The first element of an output row.
#[device]
fn out_start(output: OutputRows, row: u32) -> u64 {
    let tile = output.tile;
    let head = tile.kv_head * output.group + row % output.group;
    let query = tile.sequence.q_start + row / output.group;
    tile.sequence.batch as u64 * output.strides[0]
        + head as u64 * output.strides[1]
        + query as u64 * output.strides[2]
}

/// Writes the outputs of a lane's rows where values are not rotated.
#[device]
fn store_out<
    QElement: Element,
    const V_FORMAT: u32,
    const VALUE_DIM: usize,
    const V_COLUMNS: usize,
    const V_PAIR_WORDS: usize,
    const V_PAIRS: usize,
    const ROW_TILES: usize,
    const TEAM_SIMDS: usize,
>(
    state: Accumulator<V_PAIRS, ROW_TILES>,
    rows: [[Merged; 2]; ROW_TILES],
    output: OutputRows,
    out: &mut Buffer<QElement>,
) {
    let first = first_column::<V_COLUMNS, TEAM_SIMDS>() + 2 * matrix_pair();
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            let row = lane_row::<ROW_TILES, TEAM_SIMDS>(output.tile, m, h);
            if row < output.tile.rows {
                let start = out_start(output, row);
                let factor = normalizer(rows[m][h]);
                for i in 0..V_PAIRS {
                    for n in 0..2usize {
                        let c = column_coordinate::<V_FORMAT, VALUE_DIM, V_PAIR_WORDS>(
                            first + (8 * i + n) as u32,
                        );
                        if V_COLUMNS == VALUE_DIM || c < VALUE_DIM as u32 {
                            out[start + c as u64] =
                                element_of::<QElement>(mean_of(state.out[m][i][h][n], factor));
                        }
                    }
                }
            }
        }
    }
}

/// The outputs of the lane's columns of row `[m][h]`, into the row that is staged from element `to` on.
#[device]
#[inline(always)]
fn stage_out<
    const V_FORMAT: u32,
    const VALUE_DIM: usize,
    const V_COLUMNS: usize,
    const V_PAIR_WORDS: usize,
    const V_PAIRS: usize,
    const TEAM_SIMDS: usize,
>(
    out: [[[f32; 2]; 2]; V_PAIRS],
    h: usize,
    factor: f32,
    to: u32,
    staged: &mut Shared<f32>,
) {
    let first = first_column::<V_COLUMNS, TEAM_SIMDS>() + 2 * matrix_pair();
    for i in 0..V_PAIRS {
        for n in 0..2usize {
            let c = column_coordinate::<V_FORMAT, VALUE_DIM, V_PAIR_WORDS>(first + (8 * i + n) as u32);
            if c < VALUE_DIM as u32 {
                staged[to + c] = mean_of(out[i][h][n], factor);
            }
        }
    }
}

/// Writes the outputs of rows whose values are rotated. The first `STAGED_ROWS` SIMD groups of a team rotate a row each back at a time, in
/// threadgroup memory: `staged` has a row of `STAGED_LEN` numbers for each of them.
#[device]
fn store_unrotated<
    QElement: Element,
    const V_FORMAT: u32,
    const VALUE_DIM: usize,
    const V_COLUMNS: usize,
    const V_PAIR_WORDS: usize,
    const V_ORDER: u32,
    const V_PAIRS: usize,
    const ROW_TILES: usize,
    const TEAM_SIMDS: usize,
    const STAGED_ROWS: usize,
    const STAGED_LEN: usize,
>(
    state: Accumulator<V_PAIRS, ROW_TILES>,
    rows: [[Merged; 2]; ROW_TILES],
    output: OutputRows,
    factors: &Buffer<f32>,
    staged: &mut Shared<f32>,
    out: &mut Buffer<QElement>,
) {
    let start = staged_start::<TEAM_SIMDS, STAGED_ROWS, STAGED_LEN>(part_index::<TEAM_SIMDS>());
    let own_row =
        output.tile.first + (16 * ROW_TILES) as u32 * team_index::<TEAM_SIMDS>() + part_index::<TEAM_SIMDS>();
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            let factor = normalizer(rows[m][h]);
            // To compilers the number of turns is unknown: unrolled, rotating back would be most of the kernel.
            let mut turn = 0u32;
            while turn < 8 / STAGED_ROWS as u32 {
                for part in 0..STAGED_ROWS as u32 {
                    if matrix_row() == STAGED_ROWS as u32 * turn + part {
                        let to = staged_start::<TEAM_SIMDS, STAGED_ROWS, STAGED_LEN>(part);
                        stage_out::<V_FORMAT, VALUE_DIM, V_COLUMNS, V_PAIR_WORDS, V_PAIRS, TEAM_SIMDS>(
                            state.out[m],
                            h,
                            factor,
                            to,
                            staged,
                        );
                    }
                }
                barrier();
                if STAGED_ROWS == TEAM_SIMDS || part_index::<TEAM_SIMDS>() < STAGED_ROWS as u32 {
                    unrotate::<VALUE_DIM, V_ORDER>(staged, start, factors, 0);
                    let row = own_row + (16 * m + 8 * h) as u32 + STAGED_ROWS as u32 * turn;
                    if row < output.tile.rows {
                        let at = out_start(output, row);
                        for c in (simd_lane()..VALUE_DIM as u32).step_by(32) {
                            out[at + c as u64] = element_of::<QElement>(staged[start + c]);
                        }
                    }
                }
                barrier();
                turn += 1;
            }
        }
    }
}

/// Writes the outputs of a lane's rows.
#[device]
pub fn store_rows<
    QElement: Element,
    const V_FORMAT: u32,
    const VALUE_DIM: usize,
    const V_COLUMNS: usize,
    const V_PAIR_WORDS: usize,
    const V_ORDER: u32,
    const V_PAIRS: usize,
    const ROW_TILES: usize,
    const TEAM_SIMDS: usize,
    const STAGED_ROWS: usize,
    const STAGED_LEN: usize,
>(
    state: Accumulator<V_PAIRS, ROW_TILES>,
    rows: [[Merged; 2]; ROW_TILES],
    output: OutputRows,
    factors: &Buffer<f32>,
    staged: &mut Shared<f32>,
    out: &mut Buffer<QElement>,
) {
    if V_ORDER > 0 {
        store_unrotated::<
            QElement,
            V_FORMAT,
            VALUE_DIM,
            V_COLUMNS,
            V_PAIR_WORDS,
            V_ORDER,
            V_PAIRS,
            ROW_TILES,
            TEAM_SIMDS,
            STAGED_ROWS,
            STAGED_LEN,
        >(state, rows, output, factors, staged, out);
    } else {
        store_out::<QElement, V_FORMAT, VALUE_DIM, V_COLUMNS, V_PAIR_WORDS, V_PAIRS, ROW_TILES, TEAM_SIMDS>(
            state, rows, output, out,
        );
    }
}

/// Writes the logsumexp of a lane's rows.
#[device]
pub fn store_lse<const ROW_TILES: usize, const TEAM_SIMDS: usize>(
    rows: [[Merged; 2]; ROW_TILES],
    sinks: [[f32; 2]; ROW_TILES],
    tile: RowTile,
    params: &Attend,
    lse: &mut Buffer<f32>,
) {
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            let row = lane_row::<ROW_TILES, TEAM_SIMDS>(tile, m, h);
            if row < tile.rows && matrix_pair() == 0 && part_index::<TEAM_SIMDS>() == 0 {
                let at = lse_index(tile, params, row);
                lse[at] = lse_of(rows[m][h], sinks[m][h]);
            }
        }
    }
}

/// Stores the pair `(row_max, row_sum)` of each of a lane's rows for its split and, where there are shifts, those behind all pairs.
#[device]
pub fn store_max_sum<const V_PAIRS: usize, const ROW_TILES: usize, const TEAM_SIMDS: usize>(
    state: Accumulator<V_PAIRS, ROW_TILES>,
    pass: PrefillPass<ROW_TILES>,
    tile: RowTile,
    params: &Attend,
    has_shift: bool,
    partial_max_sum: &mut Buffer<f32>,
) {
    let results = params.batches * params.queries * params.q_heads * num_splits(params);
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            let row = lane_row::<ROW_TILES, TEAM_SIMDS>(tile, m, h);
            let pair = merged_row::<V_PAIRS, ROW_TILES>(state, m, h, 0.0, f32::NEG_INFINITY);
            if row < tile.rows && matrix_pair() == 0 && part_index::<TEAM_SIMDS>() == 0 {
                let result = result_of(tile, params, row);
                let partial = result * num_splits(params) + split_index(params);
                partial_max_sum[2 * partial] = pair.row_max;
                partial_max_sum[2 * partial + 1] = pair.row_sum;
                if has_shift && split_index(params) == 0 {
                    partial_max_sum[2 * results + result] = pass.rows[m][h].shift;
                }
            }
        }
    }
}

/// Stores the partial outputs of a lane's rows for its split.
#[device]
pub fn store_partial_out<
    const V_FORMAT: u32,
    const VALUE_DIM: usize,
    const V_COLUMNS: usize,
    const V_PAIR_WORDS: usize,
    const V_PAIRS: usize,
    const ROW_TILES: usize,
    const TEAM_SIMDS: usize,
>(
    state: Accumulator<V_PAIRS, ROW_TILES>,
    tile: RowTile,
    params: &Attend,
    partial_out: &mut Buffer<f32>,
) {
    let first = first_column::<V_COLUMNS, TEAM_SIMDS>() + 2 * matrix_pair();
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            let row = lane_row::<ROW_TILES, TEAM_SIMDS>(tile, m, h);
            if row < tile.rows {
                let partial = result_of(tile, params, row) * num_splits(params) + split_index(params);
                let start = partial as u64 * VALUE_DIM as u64;
                for i in 0..V_PAIRS {
                    for n in 0..2usize {
                        let c = column_coordinate::<V_FORMAT, VALUE_DIM, V_PAIR_WORDS>(
                            first + (8 * i + n) as u32,
                        );
                        if V_COLUMNS == VALUE_DIM || c < VALUE_DIM as u32 {
                            partial_out[start + c as u64] = state.out[m][i][h][n];
                        }
                    }
                }
            }
        }
    }
}
