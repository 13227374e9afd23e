//! Products with rows that are not finite, where some pairs of the tile are hidden: a hidden pair has a factor of 0, but 0 times an infinity
//! or NaN is NaN.

use crate::kernels::prefill::block::ROW_PADDING;
use crate::kernels::prefill::nonfinite::clear_nonfinite;
use crate::kernels::prefill::pass::first_column;
use crate::kernels::tile::{Accumulator, weighed};
use flashtile_kernel::prelude::*;

/// Sets `flags[0]` where an element of a block of `8 SCORE_TILES` rows is not finite. By all threads of the threadgroup.
#[device]
pub fn flag_nonfinite<
    T: Element,
    const COLUMNS: usize,
    const SCORE_TILES: usize,
    const SIMD_GROUPS: usize,
>(
    block: &Shared<T>,
    flags: &mut Shared<u32>,
) {
    let mut found = false;
    for at in (thread_index()..(8 * SCORE_TILES * COLUMNS) as u32).step_by(32 * SIMD_GROUPS) {
        let element = at / COLUMNS as u32 * (COLUMNS + ROW_PADDING) as u32 + at % COLUMNS as u32;
        found = found || !block[element].to_f32().is_finite();
    }
    if found {
        atomic_or(flags, 0u32, 1);
    }
}

/// Adds `factors x` of the elements of a block that are not finite to the rows that see them, row by row of the block. To compilers the
/// number of rows is unknown: unrolled, this rare path would be most of the kernel.
#[device]
fn add_nonfinite<
    T: Element,
    const COLUMNS: usize,
    const PAIRS: usize,
    const ROW_TILES: usize,
    const SCORE_TILES: usize,
    const TEAM_SIMDS: usize,
>(
    state: &mut Accumulator<PAIRS, ROW_TILES>,
    factors: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
    seen: [u32; ROW_TILES],
    block: &Shared<T>,
    rows: u32,
) {
    let copied = factors;
    let first = first_column::<COLUMNS, TEAM_SIMDS>();
    for offset in 0..rows.min((8 * SCORE_TILES) as u32) {
        let lane = matrix_lane(matrix_row(), offset % 8 / 2);
        let start = offset * (COLUMNS + ROW_PADDING) as u32 + first + 2 * matrix_pair();
        for m in 0..ROW_TILES {
            let bits = simd_shuffle(seen[m], lane);
            for h in 0..2usize {
                let pair = copied[m][(offset / 8) as usize][h];
                let factor = simd_shuffle(select(offset % 2 == 0, pair[0], pair[1]), lane);
                let sees = bits >> (4 * (offset / 8) + 2 * h as u32 + offset % 2) & 1 != 0;
                for i in 0..PAIRS {
                    for n in 0..2usize {
                        let x = block[start + (8 * i + n) as u32].to_f32();
                        let adds = sees && !x.is_finite();
                        state.out[m][i][h][n] += select(adds, weighed(factor, x), 0.0);
                    }
                }
            }
        }
    }
}

/// Adds `factors x` of the elements of a block that are not finite to the rows that see them, and replaces them by zeros. `rows` of the
/// block are of the sequence. By all threads of the threadgroup.
#[device]
pub fn take_nonfinite<
    T: Element,
    const COLUMNS: usize,
    const PAIRS: usize,
    const ROW_TILES: usize,
    const SCORE_TILES: usize,
    const SIMD_GROUPS: usize,
    const TEAM_SIMDS: usize,
>(
    state: &mut Accumulator<PAIRS, ROW_TILES>,
    factors: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
    seen: [u32; ROW_TILES],
    block: &mut Shared<T>,
    rows: u32,
) {
    add_nonfinite::<T, COLUMNS, PAIRS, ROW_TILES, SCORE_TILES, TEAM_SIMDS>(state, factors, seen, block, rows);
    barrier();
    clear_nonfinite::<T, COLUMNS, SCORE_TILES, SIMD_GROUPS>(block);
    barrier();
}
