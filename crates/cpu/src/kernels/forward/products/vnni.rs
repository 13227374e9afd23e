//! Products with codes as integers: queries and probabilities become integers of 16 bits, in two halves of 8 bits, so that products with
//! levels and their sums are exact.

#![allow(unsafe_code)]

use super::code_block::{BlockGroups, CodeBlock, CodeProducts};
use crate::kernels::forward::state::TaskState;
use crate::kernels::shared::mat::{Mat, MatMut};
use crate::kernels::shared::score_task::Tile;
use crate::plan::{INTEGER_DIM_STEP, STREAM_ROWS};
use crate::simd::Simd;
use flashtile_core::codec::{self, Coder};
use flashtile_core::limits::MAX_HEAD_DIM;

/// The largest magnitude of a query's integers: its upper half is a signed byte.
const Q_ONE: f32 = 127.0 * 256.0;
/// Scores of a query whose largest magnitude is below this are 0: no key is long enough for more.
const MIN_MAGNITUDE: f32 = 1e-30;

/// Queries, integers of 16 bits, times codes of keys.
///
/// Kernels take a few queries at a time and do not stop at `count`: every `[rows]` here, scores too, is memory for [`STREAM_ROWS`] rows.
/// Rows from `count` on may hold anything before and after.
#[derive(Clone, Copy)]
pub(crate) struct IntegerScores<'a> {
    pub(crate) keys: CodeBlock<'a>,
    /// Queries `[rows][2][MAX_HEAD_DIM]`: the upper and the lower half of each integer, signed.
    pub(crate) q: *const i8,
    /// `[rows]`: -128 times the sum of each query.
    pub(crate) start: *const i32,
    /// `[rows]`: factors from integer sums to scores.
    pub(crate) q_factors: *const f32,
    pub(crate) count: usize,
    /// Scores `[rows]`.
    pub(crate) c: MatMut,
}

/// Probabilities, which become integers of 16 bits, times codes of values.
///
/// As in [`IntegerScores`], integers, factors and sums are memory for [`STREAM_ROWS`] rows. `probs` has only the rows that are asked for.
#[derive(Clone, Copy)]
pub(crate) struct IntegerValues<'a> {
    pub(crate) values: CodeBlock<'a>,
    /// Probabilities of whole groups; 0 for a value that the row does not see.
    pub(crate) probs: Mat,
    /// Memory for integers `[rows][2][CODE_KEYS]`.
    pub(crate) integers: *mut u8,
    /// Memory `[rows]` for factors from integer sums to `p . v`.
    pub(crate) p_factors: *mut f32,
    /// Sums `[rows]`; `dim` columns are written.
    pub(crate) c: MatMut,
}

/// Vectors with products of integers and codes.
///
/// # Safety
/// For every method: as [`Simd`], and the memory is as the job says.
pub(crate) trait IntegerLanes: Simd {
    /// Computes scores.
    unsafe fn integer_scores(job: &IntegerScores<'_>);
    /// Computes `p . v`.
    unsafe fn integer_values(job: &IntegerValues<'_>);
}

/// Codes as integers.
#[derive(Clone, Copy)]
pub(crate) struct Vnni;

impl<S: IntegerLanes> CodeProducts<S> for Vnni {
    // Integers are multiplied so fast that looking up levels again for each tile costs less than decoding them once.
    const TAKES_ANY_ROWS: bool = true;

    fn takes(coder: &Coder, dim: usize) -> bool {
        coder.is_integer() && dim.is_multiple_of(INTEGER_DIM_STEP)
    }
    unsafe fn set_queries(work: &TaskState<'_>) {
        // SAFETY: the caller's contract.
        unsafe { IntegerOperands::of(work).set_queries(work) }
    }
    #[inline(always)]
    unsafe fn scores(work: &TaskState<'_>, tile: &Tile) {
        let (k, operands) = (work.task.key_codes(), IntegerOperands::of(work));
        // SAFETY: the caller's contract; the memory of packed keys is free, and the score tile holds block_k columns of each row.
        unsafe {
            let block = BlockGroups::new(
                k,
                tile.block * work.task.run.block_k,
                tile,
                work.task.memory.packed_k.cast(),
            );
            S::integer_scores(&IntegerScores {
                keys: block.codes(k.coder()),
                q: operands.q.add(tile.rows.start * 2 * MAX_HEAD_DIM),
                start: operands.start.add(tile.rows.start),
                q_factors: operands.q_factors.add(tile.rows.start),
                count: tile.rows.len(),
                c: work.task.memory.scores.from(0, block.start),
            });
        }
    }
    #[inline(always)]
    unsafe fn values(work: &TaskState<'_>, tile: &Tile) {
        let (v, operands) = (work.task.value_codes(), IntegerOperands::of(work));
        // SAFETY: the caller's contract; the memory of packed values is free, and the tile of values holds `stride` columns of each row.
        unsafe {
            let block =
                BlockGroups::new(v, tile.block * work.task.run.block_k, tile, work.packed_v.at(0, 0).cast());
            S::integer_values(&IntegerValues {
                values: block.codes(v.coder()),
                probs: work
                    .task
                    .memory
                    .scores
                    .first(tile.rows.len(), work.task.run.block_k)
                    .from(0, block.start)
                    .as_mat(),
                integers: operands.p,
                p_factors: operands.p_factors,
                c: work.block_out,
            });
        }
    }
}

/// The operands that [`IntegerScores`] and [`IntegerValues`] read, in the task's memory for codes: queries of the whole task, which has
/// whole tiles of [`STREAM_ROWS`] rows, and probabilities of one tile.
#[derive(Clone, Copy)]
struct IntegerOperands {
    q: *mut i8,
    q_factors: *mut f32,
    start: *mut i32,
    p_factors: *mut f32,
    p: *mut u8,
}

impl IntegerOperands {
    fn of(work: &TaskState<'_>) -> Self {
        let rows = work.cx.plan.task_rows().next_multiple_of(STREAM_ROWS);
        let q = work.task.memory.codes.cast::<i8>();
        let q_factors: *mut f32 = q.wrapping_add(rows * 2 * MAX_HEAD_DIM).cast();
        let start = q_factors.wrapping_add(rows).cast::<i32>();
        let p_factors = start.wrapping_add(rows).cast::<f32>();
        let p = p_factors.wrapping_add(STREAM_ROWS).cast();
        Self { q, q_factors, start, p_factors, p }
    }

    /// Converts the packed queries to integers.
    ///
    /// # Safety
    /// The queries of the task are packed in f32.
    unsafe fn set_queries(&self, work: &TaskState<'_>) {
        let dim = work.task.key_codes().dim();
        for r in 0..work.task.rows.count {
            // SAFETY: the caller's contract.
            unsafe {
                let row = std::slice::from_raw_parts(work.task.memory.packed_q.add(r * dim), dim);
                let max = codec::greatest(row);
                // A query that is not finite makes its scores NaN by the factor.
                let finite = max.is_finite();
                let inverse = if finite && max > MIN_MAGNITUDE { Q_ONE / max } else { 0.0 };
                let half = |n: usize| self.q.add((2 * r + n) * MAX_HEAD_DIM);
                let high = std::slice::from_raw_parts_mut(half(0), dim);
                let low = std::slice::from_raw_parts_mut(half(1), dim);
                let mut sum = 0i32;
                for ((x, high), low) in row.iter().zip(high).zip(low) {
                    let x = if finite { codec::round(x * inverse) } else { 0 };
                    *low = x as i8;
                    *high = ((x - i32::from(*low)) >> 8) as i8;
                    sum += x;
                }
                *self.start.add(r) = sum.wrapping_mul(-128);
                *self.q_factors.add(r) = if finite { max / Q_ONE } else { f32::NAN };
            }
        }
    }
}
