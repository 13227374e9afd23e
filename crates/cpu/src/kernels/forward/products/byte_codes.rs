//! Products of f32 rows with codes of one byte: fp8, and 8-bit integers whose dimension the integer products do not take.

#![allow(unsafe_code)]

use super::code_block::{BlockGroups, CodeBlock, CodeProducts, GROUP};
use crate::kernels::forward::state::TaskState;
use crate::kernels::shared::mat::{Mat, MatMut};
use crate::kernels::shared::score_task::Tile;
use crate::plan::STREAM_ROWS;
use crate::simd::Simd;
use flashtile_core::codec::Coder;

/// Queries in f32 times codes of keys.
#[derive(Clone, Copy)]
pub(crate) struct ByteScores<'a> {
    pub(crate) keys: CodeBlock<'a>,
    /// At least [`STREAM_ROWS`] rows; rows from `count` on may hold anything.
    pub(crate) q: Mat,
    pub(crate) count: usize,
    /// Scores, with as many rows as queries.
    pub(crate) c: MatMut,
}

/// Probabilities in f32 times codes of values.
#[derive(Clone, Copy)]
pub(crate) struct ByteValues<'a> {
    pub(crate) values: CodeBlock<'a>,
    /// Probabilities of whole groups; 0 for a value that the row does not see. The products with the scales replace them.
    pub(crate) probs: MatMut,
    /// Sums, with as many rows as `probs`; `dim` columns are written.
    pub(crate) c: MatMut,
}

/// Vectors with products of f32 and codes of one byte.
///
/// # Safety
/// For every method: as [`Simd`], and the memory is as the job says.
pub(crate) trait ByteLanes: Simd {
    /// Computes scores.
    unsafe fn byte_scores(job: &ByteScores<'_>);
    /// Computes `p . v`.
    unsafe fn byte_values(job: &ByteValues<'_>);
}

/// Codes of one byte in f32.
#[derive(Clone, Copy)]
pub(crate) struct ByteCodes;

impl<S: ByteLanes> CodeProducts<S> for ByteCodes {
    // More rows are faster over a block that is decoded once.
    const TAKES_ANY_ROWS: bool = false;

    fn takes(coder: &Coder, dim: usize) -> bool {
        let bytes = coder.is_fp8() || coder.is_integer() && coder.levels().is_none();
        bytes && dim.is_multiple_of(GROUP)
    }
    unsafe fn set_queries(_: &TaskState<'_>) {}
    #[inline(always)]
    unsafe fn scores(work: &TaskState<'_>, tile: &Tile) {
        let k = work.task.key_codes();
        let dim = k.dim();
        // SAFETY: the caller's contract; the memory of packed keys is free, and the score tile holds block_k columns of each row.
        unsafe {
            let block = BlockGroups::new(
                k,
                tile.block * work.task.run.block_k,
                tile,
                work.task.memory.packed_k.cast(),
            );
            S::byte_scores(&ByteScores {
                keys: block.codes(k.coder()),
                q: Mat::new(work.task.memory.packed_q.add(tile.rows.start * dim), dim, STREAM_ROWS, dim),
                count: tile.rows.len(),
                c: work.task.memory.scores.from(0, block.start),
            });
        }
    }
    #[inline(always)]
    unsafe fn values(work: &TaskState<'_>, tile: &Tile) {
        let v = work.task.value_codes();
        // SAFETY: the caller's contract; the memory of packed values is free, and the tile of values holds `stride` columns of each row.
        unsafe {
            let block =
                BlockGroups::new(v, tile.block * work.task.run.block_k, tile, work.packed_v.at(0, 0).cast());
            S::byte_values(&ByteValues {
                values: block.codes(v.coder()),
                probs: work
                    .task
                    .memory
                    .scores
                    .first(tile.rows.len(), work.task.run.block_k)
                    .from(0, block.start),
                c: work.block_out,
            });
        }
    }
}
