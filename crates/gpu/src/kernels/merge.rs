//! Merging of partial results over disjoint keys: any number of them, with sinks, rotated back.

use super::rotation::unrotate;
use super::score::{HUGE_SCORE, LN2, from_log2, to_log2};
use super::tile::SHRINK;
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
    /// Padding: 0.
    pub unused: u32,
}

impl Merge {
    /// Elements of `out` up to the end of the last row; none where they are too many to count.
    fn reach(&self, groups: [u32; 3], dim: usize) -> Option<usize> {
        let [queries, heads, batches] = groups.map(|n| n as usize);
        let [batch, head, query] = self.out.map(|stride| usize::try_from(stride).unwrap_or(usize::MAX));
        reach([batches, heads, queries, dim], [batch, head, query, 1]).ok()
    }
}

/// Adds up the partial results of every row:
///
/// ```text
/// row_max = max_i row_max_i                       row_sum = sum_i 2^(row_max_i - row_max) row_sum_i
/// out     = sum_i 2^(row_max_i - row_max) partial_out_i / row_sum
/// lse     = ln 2 (row_max + log2 row_sum) + shift
/// ```
///
/// `partial_max_sum` holds the pairs `(row_max_i, row_sum_i)`, and with ALiBi the shift of every row behind them: what was subtracted from its
/// scores so that f32 keeps their digits. The grid is (queries, heads, batch entries). With a Hadamard order, `out` is rotated back.
#[kernel(
    threads = 128,
    requires(partial_out.len() >= groups.iter().map(|n| *n as usize).product::<usize>() * params.splits as usize * DV, "a partial output of every split"),
    requires(partial_max_sum.len() >= groups.iter().map(|n| *n as usize).product::<usize>() * params.splits as usize * 2, "a maximum and a sum of every split"),
    requires(groups[0] == params.queries && groups[1] == params.q_heads, "a threadgroup for each row"),
    requires(!has_shift || partial_max_sum.len() >= groups.iter().map(|n| *n as usize).product::<usize>() * (params.splits as usize * 2 + 1), "a shift of every row"),
    requires(params.splits > 0, "there are splits"),
    requires(ORDER == 0 || factors.len() > DV, "a factor for each coordinate, and the root"),
    requires(!has_sinks || sinks.len() >= groups[1] as usize, "a sink for each head"),
    requires(!with_lse || lse.len() >= groups.iter().map(|n| *n as usize).product::<usize>(), "a logsumexp for each row"),
    requires(params.reach(groups, DV).is_some_and(|needed| out.len() >= needed), "out reaches to its last row"),
    bench(
        shape(rows = [512, 16384], splits = [16, 16], dim = [128, 128]),
        bytes = rows * (4 * splits * (dim + 2) + 2 * dim + 4),
        flops = 2 * rows * splits * (dim + 1),
        tolerance = 0.005,
    ),
)]
pub fn merge<Q: Element, const DV: usize, const ORDER: u32>(
    partial_out: &Buffer<f32>,
    partial_max_sum: &Buffer<f32>,
    factors: &Buffer<f32>,
    sinks: &Buffer<f32>,
    params: &Merge,
    out: &mut Buffer<Q>,
    lse: &mut Buffer<f32>,
    #[constant] has_sinks: bool,
    #[constant] with_lse: bool,
    #[constant] has_shift: bool,
) {
    let mut row: Shared<f32> = shared(DV);
    let mut quarters: Shared<f32> = shared(4 * DV);
    let result = (group_z() * params.queries + group_x()) * params.q_heads + group_y();
    let first = result * params.splits;

    // Every lane reads a part, every SIMD group all of them.
    let mut row_max = f32::NEG_INFINITY;
    for split in (simd_lane()..params.splits).step_by(32) {
        row_max = row_max.max(partial_max_sum[2 * (first + split)]);
    }
    row_max = simd_max(row_max);
    let keys_row_max = row_max;
    let mut shift = 0.0;
    if has_shift {
        shift = partial_max_sum[2 * groups_z() * params.queries * params.q_heads * params.splits + result];
    }
    let mut sink = f32::NEG_INFINITY;
    if has_sinks {
        sink = to_log2(sinks[group_y()] - shift);
        row_max = row_max.max(sink);
    }
    let mut row_sum = 0.0;
    for split in (simd_lane()..params.splits).step_by(32) {
        let one = partial_max_sum[2 * (first + split)];
        if one != f32::NEG_INFINITY {
            row_sum += (one - row_max).exp2() * partial_max_sum[2 * (first + split) + 1];
        }
    }
    row_sum = simd_sum(row_sum);
    if has_sinks && sink != f32::NEG_INFINITY {
        row_sum += (sink - row_max).exp2();
    }

    // Every SIMD group adds up a fourth of the parts, of which a lane has 32 at a time ready; less than 0 where a part is of no key.
    let mut sum = [0.0; 16];
    for base in (simd_index()..params.splits).step_by(128) {
        let own = base + 4 * simd_lane();
        let mut factor = -1.0;
        if own < params.splits {
            let one = partial_max_sum[2 * (first + own)];
            factor = select(one == f32::NEG_INFINITY, -1.0, (one - row_max).exp2());
        }
        for n in 0..(params.splits - base).div_ceil(4).min(32) {
            let by = simd_shuffle(factor, n);
            let at = (first + base + 4 * n) as u64 * DV as u64;
            for i in 0..(DV + 31) / 32 {
                let c = 32 * i as u32 + simd_lane();
                if c < DV as u32 {
                    let x = by * partial_out[at + c as u64];
                    sum[i] += select(by < 0.0, 0.0, x);
                }
            }
        }
    }
    for i in 0..(DV + 31) / 32 {
        let c = 32 * i as u32 + simd_lane();
        if c < DV as u32 {
            quarters[simd_index() * DV as u32 + c] = sum[i];
        }
    }
    barrier();
    for c in (thread_index()..DV as u32).step_by(128) {
        let mut whole = 0.0;
        for n in 0..4u32 {
            whole += quarters[n * DV as u32 + c];
        }
        let mut mean = whole / row_sum;
        if mean.abs() >= f32::INFINITY || mean.is_nan() {
            // Sums may overflow where their mean does not. What is infinite or NaN stays so.
            let mut small = 0.0;
            for split in 0..params.splits {
                let one = partial_max_sum[2 * (first + split)];
                if one != f32::NEG_INFINITY {
                    small += (one - row_max).exp2()
                        * SHRINK
                        * partial_out[(first + split) as u64 * DV as u64 + c as u64];
                }
            }
            small /= row_sum;
            mean = small / SHRINK;
            if small.abs() < f32::INFINITY {
                mean = mean.max(-3.402_823_5e38).min(3.402_823_5e38);
            }
        }
        row[c] = select(row_max == f32::NEG_INFINITY, 0.0, mean);
    }
    barrier();
    if ORDER > 0 {
        if simd_index() == 0 {
            unrotate::<DV, ORDER>(&mut row, 0, factors);
        }
        barrier();
    }
    let start = group_z() as u64 * params.out[0]
        + group_y() as u64 * params.out[1]
        + group_x() as u64 * params.out[2];
    for c in (thread_index()..DV as u32).step_by(128) {
        out[start + c as u64] = Q::from_f32(row[c]);
    }
    if with_lse && thread_index() == 0 {
        let at = (group_z() * params.q_heads + group_y()) * params.queries + group_x();
        let mut sum = (row_max + row_sum.log2()) * LN2;
        if row_max.abs() > HUGE_SCORE {
            sum = from_log2(row_max);
        }
        if shift != 0.0 {
            // A sink that is the greatest has digits that it would lose to the shift.
            if has_sinks && sink >= keys_row_max {
                sum = sinks[group_y()] + row_sum.log2() * LN2;
            } else {
                sum += shift;
            }
        }
        lse[at] = select(row_max == f32::NEG_INFINITY, f32::NEG_INFINITY, sum);
    }
}
