//! Products with values, those that are not finite among them where some row does not see all keys, and in a second pass.

use super::block::ROW_PADDING;
use super::pass::{ScoredBlock, first_column};
use super::softmax::pv_block;
use crate::kernels::attend::Attend;
use crate::kernels::tile::{Accumulator, Scoring, masked, weighed};
use flashtile_kernel::prelude::*;

/// Adds `p v` of the values of a block that are not finite, key by key to the rows that see it: `0 v` of a hidden key would not be
/// 0, and of a key whose probability underflows not infinite. To compilers the number of keys is unknown: unrolled, this rare path would be most of the kernel.
#[device]
fn add_nonfinite<
    V: Element,
    const C: usize,
    const N: usize,
    const M: usize,
    const F: usize,
    const W: usize,
>(
    state: &mut Accumulator<N, M>,
    probs: [[[[f32; 2]; 2]; F]; M],
    values: &Shared<V>,
    block: ScoredBlock<M>,
    params: &Attend,
) {
    let copied = probs;
    let first = first_column::<C, W>();
    let scoring = Scoring { has: block.pass.has, partial: true, tree: block.pass.all.tree };
    let end = (block.pass.all.high as u32).min(block.step.first + (8 * F) as u32);
    for offset in 0..end.saturating_sub(block.step.first) {
        let lane = matrix_lane(matrix_row(), offset % 8 / 2);
        let key = (block.step.first + offset) as i32;
        let start = offset * (C + ROW_PADDING) as u32 + first + 2 * matrix_pair();
        for m in 0..M {
            for h in 0..2usize {
                let pair = copied[m][(offset / 8) as usize][h];
                let p = simd_shuffle(select(offset % 2 == 0, pair[0], pair[1]), lane);
                let score = masked(0.0, key, block.pass.rows[m][h], block.memory, params, scoring);
                let seen = score != f32::NEG_INFINITY;
                for i in 0..N {
                    for n in 0..2usize {
                        let x = values[start + (8 * i + n) as u32].to_f32();
                        let adds = seen && !x.is_finite();
                        state.out[m][i][h][n] += select(adds, weighed(p, x), 0.0);
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
    const C: usize,
    const N: usize,
    const M: usize,
    const F: usize,
    const S: usize,
    const W: usize,
>(
    state: &mut Accumulator<N, M>,
    values: &mut Shared<V>,
    probs: [[[[f32; 2]; 2]; F]; M],
    block: ScoredBlock<M>,
    params: &Attend,
) {
    add_nonfinite::<V, C, N, M, F, W>(state, probs, values, block, params);
    barrier();
    for at in (thread_index()..(8 * F * C) as u32).step_by(32 * S) {
        let element = at / C as u32 * (C + ROW_PADDING) as u32 + at % C as u32;
        if !values[element].to_f32().is_finite() {
            values[element] = V::from_f32(0.0);
        }
    }
    barrier();
}

/// Adds `p v` of a block to the outputs: of values in memory of their own (`B` is 2), or in that of the keys, which the next block may
/// take when all threads are done.
#[device]
#[inline(always)]
pub fn add_values<
    K: Element,
    V: Element,
    const C: usize,
    const N: usize,
    const M: usize,
    const F: usize,
    const S: usize,
    const W: usize,
    const B: usize,
>(
    state: &mut Accumulator<N, M>,
    keys: &mut Shared<K>,
    values: &mut Shared<V>,
    probs: [[[[f32; 2]; 2]; F]; M],
    block: ScoredBlock<M>,
    params: &Attend,
) {
    if B == 1 {
        if block.has_nonfinite {
            take_nonfinite::<K, C, N, M, F, S, W>(state, keys, probs, block, params);
        }
        pv_block::<K, C, N, M, F, W>(state, probs, keys);
        barrier();
    } else {
        if block.has_nonfinite {
            take_nonfinite::<V, C, N, M, F, S, W>(state, values, probs, block, params);
        }
        pv_block::<V, C, N, M, F, W>(state, probs, values);
    }
}
