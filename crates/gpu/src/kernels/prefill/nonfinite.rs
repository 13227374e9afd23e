//! Blocks with values that are not finite, where some row does not see all keys.

use super::block::ROW_PADDING;
use super::pass::part_index;
use crate::kernels::attend::Attend;
use crate::kernels::query::{Features, KeyRange, RowBound};
use crate::kernels::tile::{Accumulator, BiasMemory, Scoring, masked};
use flashtile_kernel::prelude::*;

/// A block with a value that is not finite, of which some row of the threadgroup may not see all.
#[device]
pub struct SpoiledBlock<'a, const M: usize> {
    /// First key.
    pub first: u32,
    /// Bounds of the lane's rows.
    pub rows: [[RowBound; 2]; M],
    /// What hides keys.
    pub memory: BiasMemory<'a>,
    /// What the problem has.
    pub has: Features,
    /// Keys that are seen at all.
    pub keys: KeyRange,
}

/// Adds `p v` of the values of a block that are not finite, key by key to the rows that see it: `0 v` of a hidden key would not be
/// 0. To compilers the number of keys is unknown: unrolled, this rare path would be most of the kernel.
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
    block: SpoiledBlock<M>,
    params: &Attend,
) {
    let copied = probs;
    let first = (C / W) as u32 * part_index::<W>();
    let scoring = Scoring { has: block.has, partial: true, tree: block.keys.tree };
    let end = (block.keys.high as u32).min(block.first + (8 * F) as u32);
    for offset in 0..end.saturating_sub(block.first) {
        let lane = matrix_lane(matrix_row(), offset % 8 / 2);
        let key = (block.first + offset) as i32;
        let start = offset * (C + ROW_PADDING) as u32 + first + 2 * matrix_pair();
        for m in 0..M {
            for h in 0..2usize {
                let pair = copied[m][(offset / 8) as usize][h];
                let p = simd_shuffle(select(offset % 2 == 0, pair[0], pair[1]), lane);
                let score = masked(0.0, key, block.rows[m][h], block.memory, params, scoring);
                let seen = score != f32::NEG_INFINITY;
                for i in 0..N {
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
pub fn take_nonfinite<
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
    block: SpoiledBlock<M>,
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
