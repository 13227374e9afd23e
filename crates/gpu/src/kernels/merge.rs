//! Merging of partial results over disjoint keys: any number of them, with sinks, rotated back.

use super::rotation::{block_count, unrotate};
use super::score::{HUGE_SCORE, LN2, from_log2, to_log2};
use super::tile::{SHRINK, element_of, weighed};
use flashtile_core::tensor::reach;
use flashtile_kernel::prelude::*;

/// Where results go: elements from batch entry to batch entry, head to head and query to query of `out`.
#[params]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Merge {
    /// Strides of out over batch entry, head and query, in elements.
    pub out: [u64; 3],
    /// Query heads.
    pub q_heads: u32,
    /// Query rows.
    pub queries: u32,
    /// Partial results of a row.
    pub splits: u32,
    /// The divisor of partial outputs: the number of SIMD groups whose outputs each of them sums.
    pub simds: u32,
}

impl Merge {
    /// Elements of `out` up to the end of the last row; none where they are too many to count.
    pub(crate) fn reach(&self, groups: [u32; 3], dim: usize) -> Option<usize> {
        let [queries, heads, batches] = groups.map(|n| n as usize);
        let [batch, head, query] = self.out.map(|stride| usize::try_from(stride).unwrap_or(usize::MAX));
        reach([batches, heads, queries, dim], [batch, head, query, 1]).ok()
    }
}

/// The partial results of a row.
#[device]
struct Partials<'a> {
    /// Partial outputs of all rows.
    out: &'a Buffer<f32>,
    /// Pairs `(row_max, row_sum)` of all rows.
    max_sum: &'a Buffer<f32>,
    /// The first partial result of the row.
    first: u32,
    /// Partial results of a row.
    splits: u32,
}

/// The softmax of a row over all its keys, in units of log2.
#[device]
pub struct Merged {
    /// The maximum that exponents are relative to: `keys_row_max`, or the sink where it is larger.
    pub row_max: f32,
    /// The largest `row_max` of the partial results, each of which may be below the largest score and over codes includes log2 of the
    /// values' scales ([`Accumulator`](super::tile::Accumulator)).
    pub keys_row_max: f32,
    /// The sum of `2^(score - row_max)`, sink included.
    pub row_sum: f32,
    /// The score of the sink, `-inf` without one.
    pub sink: f32,
    /// The shift that was subtracted from the scores, in units of the score.
    pub shift: f32,
}

/// Merges the pairs of row `result`: every lane reads a part of them, every SIMD group all.
#[device]
fn merged_row(
    partials: Partials,
    result: u32,
    sinks: &Buffer<f32>,
    params: &Merge,
    has_sinks: bool,
    has_shift: bool,
) -> Merged {
    let mut row_max = f32::NEG_INFINITY;
    for split in (simd_lane()..partials.splits).step_by(32) {
        row_max = row_max.max(partials.max_sum[2 * (partials.first + split)]);
    }
    row_max = simd_max(row_max);
    let keys_row_max = row_max;
    let mut shift = 0.0;
    if has_shift {
        let results = groups_z() * params.queries * params.q_heads * params.splits;
        shift = partials.max_sum[2 * results + result];
    }
    let mut sink = f32::NEG_INFINITY;
    if has_sinks {
        sink = to_log2(sinks[group_y()] - shift);
        row_max = row_max.max(sink);
    }
    let mut row_sum = 0.0;
    for split in (simd_lane()..partials.splits).step_by(32) {
        let one = partials.max_sum[2 * (partials.first + split)];
        if one != f32::NEG_INFINITY {
            row_sum += (one - row_max).exp2() * partials.max_sum[2 * (partials.first + split) + 1];
        }
    }
    row_sum = simd_sum(row_sum);
    if has_sinks && sink != f32::NEG_INFINITY {
        row_sum += (sink - row_max).exp2();
    }
    let merged = Merged { row_max, keys_row_max, row_sum, sink, shift };
    merged
}

/// A lane's part of the partial output of a split: every 32nd coordinate.
#[device]
#[inline(always)]
fn partial_out<const VALUE_DIM: usize>(partials: Partials, split: u32) -> [f32; 16] {
    let mut out = [0.0; 16];
    let at = (partials.first + split) as u64 * VALUE_DIM as u64;
    for i in 0..(VALUE_DIM + 31) / 32 {
        let c = 32 * i as u32 + simd_lane();
        if c < VALUE_DIM as u32 {
            out[i] = partials.out[at + c as u64];
        }
    }
    out
}

/// Each of the four SIMD groups sums every fourth partial output of the row; its lanes hold the factors of 32 at a time.
#[device]
fn sum_splits<const VALUE_DIM: usize>(partials: Partials, row_max: f32, quarters: &mut Shared<f32>) {
    let mut sum = [0.0; 16];
    for base in (simd_index()..partials.splits).step_by(128) {
        let own = base + 4 * simd_lane();
        // Less than 0 where a split has no key.
        let mut factor = -1.0;
        if own < partials.splits {
            let one = partials.max_sum[2 * (partials.first + own)];
            factor = select(one == f32::NEG_INFINITY, -1.0, (one - row_max).exp2());
        }
        let count = (partials.splits - base).div_ceil(4).min(32);
        for first in (0..count).step_by(4) {
            // Four partial outputs are on their way at a time.
            let mut out = [[0.0; 16]; 4];
            for n in 0..4usize {
                if first + (n as u32) < count {
                    out[n] = partial_out::<VALUE_DIM>(partials, base + 4 * (first + n as u32));
                }
            }
            for n in 0..4usize {
                let by = simd_shuffle(factor, first + n as u32);
                for i in 0..(VALUE_DIM + 31) / 32 {
                    sum[i] += select(by < 0.0 || first + n as u32 >= count, 0.0, by * out[n][i]);
                }
            }
        }
    }
    for i in 0..(VALUE_DIM + 31) / 32 {
        let c = 32 * i as u32 + simd_lane();
        if c < VALUE_DIM as u32 {
            quarters[simd_index() * VALUE_DIM as u32 + c] = sum[i];
        }
    }
}

/// Coordinate `c` of a row's output, of the four sums of its partial outputs.
#[device]
fn mean_of<const VALUE_DIM: usize>(
    partials: Partials,
    row: Merged,
    quarters: &Shared<f32>,
    c: u32,
    simds: u32,
) -> f32 {
    let mut whole = 0.0;
    for n in 0..4u32 {
        whole += quarters[n * VALUE_DIM as u32 + c];
    }
    let mut mean = whole / row.row_sum * simds as f32;
    if mean.abs() >= f32::INFINITY || mean.is_nan() {
        // The sum may overflow where the mean does not, and it is NaN where the factor of an infinity
        // underflows. Other infinities and NaN stay.
        let mut small = 0.0;
        for split in 0..partials.splits {
            let one = partials.max_sum[2 * (partials.first + split)];
            if one != f32::NEG_INFINITY {
                let factor = (one - row.row_max).exp2() * SHRINK;
                small += weighed(
                    factor,
                    partials.out[(partials.first + split) as u64 * VALUE_DIM as u64 + c as u64],
                );
            }
        }
        small /= row.row_sum;
        mean = small / SHRINK * simds as f32;
        if small.abs() < f32::INFINITY {
            mean = mean.max(-3.402_823_5e38).min(3.402_823_5e38);
        }
    }
    select(row.row_max == f32::NEG_INFINITY, 0.0, mean)
}

/// The logsumexp of a row, with its sink in units of the score, `-inf` without one.
#[device]
pub fn lse_of(row: Merged, sink_logit: f32) -> f32 {
    let mut lse = (row.row_max + row.row_sum.log2()) * LN2;
    if row.row_max.abs() > HUGE_SCORE {
        lse = from_log2(row.row_max);
    }
    if row.shift != 0.0 {
        // A sink that is the greatest has digits that it would lose to the shift.
        if row.sink != f32::NEG_INFINITY && row.sink >= row.keys_row_max {
            lse = sink_logit + row.row_sum.log2() * LN2;
        } else {
            lse += row.shift;
        }
    }
    select(row.row_max == f32::NEG_INFINITY, f32::NEG_INFINITY, lse)
}

/// Adds up the partial results of every row:
///
/// ```text
/// row_max = max_i row_max_i                       row_sum = sum_i 2^(row_max_i - row_max) row_sum_i
/// out     = simds sum_i 2^(row_max_i - row_max) partial_out_i / row_sum
/// lse     = ln 2 (row_max + log2 row_sum) + shift
/// ```
///
/// `partial_max_sum` holds the pairs `(row_max_i, row_sum_i)`, and with ALiBi the shift of every row behind them: what
/// was subtracted from its scores so that f32 keeps their digits. The grid is (queries, heads, batch entries). With a
/// Hadamard order, `out` is rotated back.
#[kernel(
    threads = 128,
    requires(partial_out.len() >= groups.iter().map(|n| *n as usize).product::<usize>() * params.splits as usize * VALUE_DIM, "a partial output of every split"),
    requires(partial_max_sum.len() >= groups.iter().map(|n| *n as usize).product::<usize>() * params.splits as usize * 2, "a maximum and a sum of every split"),
    requires(groups[0] == params.queries && groups[1] == params.q_heads, "a threadgroup for each row"),
    requires(!has_shift || partial_max_sum.len() >= groups.iter().map(|n| *n as usize).product::<usize>() * (params.splits as usize * 2 + 1), "a shift of every row"),
    requires(params.splits > 0, "there are splits"),
    requires(ORDER == 0 || factors.len() >= VALUE_DIM + block_count(ORDER, VALUE_DIM), "a factor for each coordinate, and a root for each block"),
    requires(!has_sinks || sinks.len() >= groups[1] as usize, "a sink for each head"),
    requires(!with_lse || lse.len() >= groups.iter().map(|n| *n as usize).product::<usize>(), "a logsumexp for each row"),
    requires(params.reach(groups, VALUE_DIM).is_some_and(|needed| out.len() >= needed), "out reaches to its last row"),
    bench(
        shape(rows = [512, 16384], splits = [16, 16], dim = [128, 128]),
        bytes = rows * (4 * splits * (dim + 2) + 2 * dim + 4),
        flops = 2 * rows * splits * (dim + 1),
        tolerance = 0.005,
    ),
)]
pub fn merge<QElement: Element, const VALUE_DIM: usize, const ORDER: u32>(
    partial_out: &Buffer<f32>,
    partial_max_sum: &Buffer<f32>,
    factors: &Buffer<f32>,
    sinks: &Buffer<f32>,
    params: &Merge,
    out: &mut Buffer<QElement>,
    lse: &mut Buffer<f32>,
    #[constant] has_sinks: bool,
    #[constant] with_lse: bool,
    #[constant] has_shift: bool,
) {
    let mut row: Shared<f32> = shared(VALUE_DIM);
    let mut quarters: Shared<f32> = shared(4 * VALUE_DIM);
    let result = (group_z() * params.queries + group_x()) * params.q_heads + group_y();
    let partials = Partials {
        out: partial_out,
        max_sum: partial_max_sum,
        first: result * params.splits,
        splits: params.splits,
    };
    let merged = merged_row(partials, result, sinks, params, has_sinks, has_shift);
    sum_splits::<VALUE_DIM>(partials, merged.row_max, &mut quarters);
    barrier();
    for c in (thread_index()..VALUE_DIM as u32).step_by(128) {
        row[c] = mean_of::<VALUE_DIM>(partials, merged, &quarters, c, params.simds);
    }
    barrier();
    if ORDER > 0 {
        if simd_index() == 0 {
            unrotate::<VALUE_DIM, ORDER>(&mut row, 0, factors, 0);
        }
        barrier();
    }
    let start = group_z() as u64 * params.out[0]
        + group_y() as u64 * params.out[1]
        + group_x() as u64 * params.out[2];
    for c in (thread_index()..VALUE_DIM as u32).step_by(128) {
        out[start + c as u64] = element_of::<QElement>(row[c]);
    }
    if with_lse && thread_index() == 0 {
        let at = (group_z() * params.q_heads + group_y()) * params.queries + group_x();
        let mut sink_logit = f32::NEG_INFINITY;
        if has_sinks {
            sink_logit = sinks[group_y()];
        }
        lse[at] = lse_of(merged, sink_logit);
    }
}
