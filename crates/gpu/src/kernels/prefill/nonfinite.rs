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
    block: ScoredBlock<ROW_TILES>,
    params: &Attend,
) {
    let copied = probs;
    let first = first_column::<V_COLUMNS, TEAM_SIMDS>();
    let scoring = Scoring { has: block.pass.has, partial: true, tree: block.pass.all.tree };
    let end = (block.pass.all.high as u32).min(block.step.first + (8 * SCORE_TILES) as u32);
    for offset in 0..end.saturating_sub(block.step.first) {
        let lane = matrix_lane(matrix_row(), offset % 8 / 2);
        let key = (block.step.first + offset) as i32;
        let start = offset * (V_COLUMNS + ROW_PADDING) as u32 + first + 2 * matrix_pair();
        for m in 0..ROW_TILES {
            for h in 0..2usize {
                let pair = copied[m][(offset / 8) as usize][h];
                let p = simd_shuffle(select(offset % 2 == 0, pair[0], pair[1]), lane);
                let score = masked(0.0, key, block.pass.rows[m][h], block.memory, params, scoring);
                let seen = score != f32::NEG_INFINITY;
                for i in 0..V_PAIRS {
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

/// Replaces the elements of a block of `8 SCORE_TILES` rows that are not finite by zeros. By all threads of the threadgroup.
#[device]
pub fn clear_nonfinite<
    T: Element,
    const COLUMNS: usize,
    const SCORE_TILES: usize,
    const SIMD_GROUPS: usize,
>(
    block: &mut Shared<T>,
) {
    for at in (thread_index()..(8 * SCORE_TILES * COLUMNS) as u32).step_by(32 * SIMD_GROUPS) {
        let element = at / COLUMNS as u32 * (COLUMNS + ROW_PADDING) as u32 + at % COLUMNS as u32;
        if !block[element].to_f32().is_finite() {
            block[element] = T::from_f32(0.0);
        }
    }
}

/// Adds `p v` of the values of a block that are not finite, and replaces them by zeros. By all threads of the threadgroup.
#[device]
fn take_nonfinite<
    VOperand: Element,
    const V_COLUMNS: usize,
    const V_PAIRS: usize,
    const ROW_TILES: usize,
    const SCORE_TILES: usize,
    const SIMD_GROUPS: usize,
    const TEAM_SIMDS: usize,
>(
    state: &mut Accumulator<V_PAIRS, ROW_TILES>,
    values: &mut Shared<VOperand>,
    probs: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
    block: ScoredBlock<ROW_TILES>,
    params: &Attend,
) {
    add_nonfinite::<VOperand, V_COLUMNS, V_PAIRS, ROW_TILES, SCORE_TILES, TEAM_SIMDS>(
        state, probs, values, block, params,
    );
    barrier();
    clear_nonfinite::<VOperand, V_COLUMNS, SCORE_TILES, SIMD_GROUPS>(values);
    barrier();
}

/// Adds `p v` of a block to the outputs: of values in memory of their own (`KV_BUFFERS` is 2), or in that of the keys, which the next block may
/// take when all threads are done.
#[device]
#[inline(always)]
pub fn add_values<
    KOperand: Element,
    VOperand: Element,
    const V_COLUMNS: usize,
    const V_PAIRS: usize,
    const ROW_TILES: usize,
    const SCORE_TILES: usize,
    const SIMD_GROUPS: usize,
    const TEAM_SIMDS: usize,
    const KV_BUFFERS: usize,
>(
    state: &mut Accumulator<V_PAIRS, ROW_TILES>,
    keys: &mut Shared<KOperand>,
    values: &mut Shared<VOperand>,
    probs: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
    block: ScoredBlock<ROW_TILES>,
    params: &Attend,
) {
    if KV_BUFFERS == 1 {
        if block.has_nonfinite {
            take_nonfinite::<KOperand, V_COLUMNS, V_PAIRS, ROW_TILES, SCORE_TILES, SIMD_GROUPS, TEAM_SIMDS>(
                state, keys, probs, block, params,
            );
        }
        pv_block::<KOperand, V_COLUMNS, V_PAIRS, ROW_TILES, SCORE_TILES, TEAM_SIMDS>(state, probs, keys);
        barrier();
    } else {
        if block.has_nonfinite {
            take_nonfinite::<VOperand, V_COLUMNS, V_PAIRS, ROW_TILES, SCORE_TILES, SIMD_GROUPS, TEAM_SIMDS>(
                state, values, probs, block, params,
            );
        }
        pv_block::<VOperand, V_COLUMNS, V_PAIRS, ROW_TILES, SCORE_TILES, TEAM_SIMDS>(state, probs, values);
    }
}
