//! Gradients of sinks and of ALiBi slopes: sums over query rows.

use super::params::Backward;
use crate::kernels::attend::{Attend, sequence_of};
use crate::kernels::query::{Features, RowTile, lse_index, row_bound};
use crate::kernels::score::to_log2;
use flashtile_kernel::prelude::*;

/// Memory of the terms of rows.
#[device]
struct RowMemory<'a> {
    /// Logsumexps.
    lse: &'a Buffer<f32>,
    /// Their gradients.
    d_lse: &'a Buffer<f32>,
    /// `sum(d_out * out) - d_lse`.
    delta: &'a Buffer<f32>,
    /// Sums of `d_score` times the distance of the key from the nearest visible one.
    distance_sums: &'a Buffer<f32>,
    /// Logits of the sinks.
    sinks: &'a Buffer<f32>,
    /// True if there are sinks.
    has_sinks: bool,
    /// True if there are gradients of logsumexps.
    has_d_lse: bool,
}

/// `exp(sink - lse) delta` of a row; 0 without sinks, and where the sink's probability is 0.
#[device]
fn sink_term(memory: RowMemory, head: u32, at: u32) -> f32 {
    let mut term = 0.0;
    if memory.has_sinks {
        let lse = memory.lse[at];
        let exponent = to_log2(memory.sinks[head]) - to_log2(lse);
        let prob = select(exponent > 0.0, 0.0, exponent).exp2();
        term = select(prob == 0.0 || lse == f32::NEG_INFINITY, 0.0, prob * memory.delta[at]);
    }
    term
}

/// `sum(d_score * distance)` of a row: the sum of the distances from the nearest visible key, and what that key's own distance from the
/// row's position adds. The sum of `d_score` over all keys follows from the probabilities, which add up to 1 less that of the sink.
#[device]
fn slope_term(memory: RowMemory, tile: RowTile, params: &Attend, row: u32, at: u32) -> f32 {
    let none = Features { softcap: false, alibi: false, mask: false, tree_mask: false };
    let bound = row_bound(tile, row, memory.sinks, params, none);
    let position = tile.sequence.offset + (row / params.group) as i32;
    let shift = position.abs_diff(bound.position);
    let mut sum = memory.distance_sums[at];
    if shift > 0 && memory.lse[at] != f32::NEG_INFINITY {
        let mut all = sink_term(memory, tile.kv_head * params.group + row % params.group, at);
        if memory.has_d_lse {
            all += memory.d_lse[at];
        }
        sum += shift as f32 * all;
    }
    sum
}

/// Sums over rows, in a fixed order:
///
/// ```text
/// of_slopes:  d_alibi_slopes[n] = -sum d_score distance       of every key of the rows that slope n is for
/// otherwise:  d_sinks[h]        = -sum exp(sink[h] - lse) delta   of every row of head h
/// ```
///
/// Threadgroups are (sums, 1, 1). Slopes are `[H]`, or `[sequences, H]` where `params.alibi_stride` is not 0.
#[kernel(
    threads = 128,
    requires(sums.len() >= groups[0] as usize, "a sum for each threadgroup"),
    requires(params.group > 0 && params.q_heads > 0, "there are heads"),
    requires(lse.len() as u64 >= params.rows() && delta.len() as u64 >= params.rows(), "terms of each row"),
    requires(!of_slopes || distance_sums.len() as u64 >= params.rows(), "a sum for each row"),
    requires(!has_sinks || sinks.len() >= params.q_heads as usize, "a sink for each head"),
    requires(!has_d_lse || d_lse.len() as u64 >= params.rows(), "a gradient for each logsumexp"),
    bench(
        shape(rows = [4096, 16384], heads = [16, 16]),
        bytes = 8 * rows * heads,
        flops = 2 * rows * heads,
        tolerance = 0.02,
    ),
)]
pub fn sum_rows(
    lse: &Buffer<f32>,
    d_lse: &Buffer<f32>,
    delta: &Buffer<f32>,
    distance_sums: &Buffer<f32>,
    sinks: &Buffer<f32>,
    sequences: &Buffer<i32>,
    params: &Attend,
    backward: &Backward,
    sums: &mut Buffer<f32>,
    #[constant] of_slopes: bool,
    #[constant] has_sinks: bool,
    #[constant] has_d_lse: bool,
) {
    let mut simd_sums: Shared<f32> = shared(4);
    let memory = RowMemory { lse, d_lse, delta, distance_sums, sinks, has_sinks, has_d_lse };
    let head = group_x() % params.q_heads;
    let mut first = 0u32;
    let mut end = backward.sequences;
    if of_slopes && params.alibi_stride > 0 {
        first = group_x() / params.q_heads;
        end = first + 1;
    }
    let mut sum = 0.0;
    for index in first..end {
        let sequence = sequence_of(sequences, index);
        let kv_head = head / params.group;
        let tile = RowTile { sequence, index, kv_head, first: 0, rows: sequence.q_len * params.group };
        for query in (thread_index()..sequence.q_len).step_by(128) {
            let row = query * params.group + head % params.group;
            let at = lse_index(tile, params, row);
            if of_slopes {
                sum -= slope_term(memory, tile, params, row, at);
            } else {
                sum -= sink_term(memory, head, at);
            }
        }
    }
    sum = simd_sum(sum);
    if simd_lane() == 0 {
        simd_sums[simd_index()] = sum;
    }
    barrier();
    if thread_index() == 0 {
        sums[group_x()] = (simd_sums[0] + simd_sums[1]) + (simd_sums[2] + simd_sums[3]);
    }
}
