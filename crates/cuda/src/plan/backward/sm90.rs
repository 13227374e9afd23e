//! The backward pass on compute capability 9.0: `wgmma`, TMA and clusters.

use super::schedule::{BackwardSchedule, UnitShape};
use crate::plan::CudaFacts;
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::Problem;

/// Keys of a cluster of two blocks of threads.
const CLUSTER_KEYS: usize = 256;

/// Threads of a block: three warpgroups that multiply and one that copies.
pub(super) const THREADS: usize = 512;

/// Largest head dimension.
const MAX_DIM: usize = 128;

/// Elements of a tile of `d_q`, whatever its columns.
const TILE_ELEMENTS: usize = 8192;

/// Bytes of shared memory that a block of threads takes at most.
const MAX_SHARED_BYTES: usize = 227 << 10;

/// The plan of a problem.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sm90Backward {
    pub(crate) dtype: Dtype,
    pub(crate) schedule: BackwardSchedule,
}

impl Sm90Backward {
    /// True if a device has these kernels, and they have the problem's head dimensions.
    pub(super) fn has(problem: &Problem, facts: &CudaFacts) -> bool {
        let dims = problem.dims();
        facts.wgmma
            && facts.shared_per_block >= MAX_SHARED_BYTES
            && dims.head_dim.max(dims.value_dim) <= MAX_DIM
    }

    pub(crate) fn new(problem: &Problem) -> Result<Self, Unsupported> {
        let dims = problem.dims();
        let columns = if dims.head_dim.max(dims.value_dim) <= 64 { 64 } else { 128 };
        let shape = UnitShape { keys: CLUSTER_KEYS, rows: TILE_ELEMENTS / columns, columns, warps: 16 };
        Ok(Self { dtype: problem.dtype(), schedule: BackwardSchedule::new(problem, shape)? })
    }

    /// Name of the main kernel: `cuda-backward-{dtype}-d{columns}-wgmma{rows of a tile}x{keys of a cluster}`, and what it does to scores.
    pub(super) fn kernel(&self) -> String {
        let Self { dtype, schedule: BackwardSchedule { shape, score_mod, .. } } = self;
        let UnitShape { keys, rows, columns, .. } = shape;
        format!("cuda-backward-{dtype}-d{columns}-wgmma{rows}x{keys}{}", score_mod.suffix())
    }

    /// Bytes of shared memory of a block: keys and values and the peer's keys, two stages of queries and `d_out`, gradients of scores, half of a tile
    /// of `d_q`, terms of rows, barriers.
    pub(crate) const fn shared_bytes(&self) -> usize {
        let UnitShape { keys, rows, columns, .. } = self.schedule.shape;
        let keys = keys / 2;
        let kv = 3 * 2 * keys * columns;
        let stages = 2 * 2 * 2 * TILE_ELEMENTS;
        let d_scores = 3 * 2 * keys * rows;
        kv + stages + d_scores + 2 * TILE_ELEMENTS + 2 * 2 * 4 * rows + 8 * 15
    }
}
