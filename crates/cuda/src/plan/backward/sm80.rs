//! The backward pass by `mma.sync`, for compute capability 8.0 and later.

use super::schedule::{BackwardSchedule, UnitShape};
use crate::plan::{CudaFacts, NATIVE_CAPABILITY};
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::{Dims, Problem};

/// Warps of a block of threads.
const WARPS: usize = 8;

/// Threads of a block.
pub(super) const THREADS: usize = 32 * WARPS;

/// Keys of a warp.
const WARP_KEYS: usize = 16;

/// Largest head dimension.
const MAX_DIM: usize = 256;

/// Largest head dimension of which a warp has all columns of `d_k` and `d_v` in registers.
const MAX_COLUMNS: usize = 128;

/// A unit and the value dimension, rounded up.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sm80BackwardTile {
    shape: UnitShape,
    value_dim: usize,
}

/// The plan of a problem.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sm80Backward {
    pub(crate) dtype: Dtype,
    /// Value dimension, rounded up.
    pub(crate) value_dim: usize,
    pub(crate) schedule: BackwardSchedule,
}

impl Sm80Backward {
    /// The tile of a device for some head dimensions, or why there is none.
    pub(super) fn tile(dims: &Dims, facts: &CudaFacts) -> Result<Sm80BackwardTile, &'static str> {
        if facts.capability < NATIVE_CAPABILITY {
            return Err("native backward kernels need compute capability 8.0");
        }
        if dims.head_dim.max(dims.value_dim) > MAX_DIM {
            return Err("native backward kernels have head dimensions up to 256 only");
        }
        largest(dims, facts.shared_per_block)
            .ok_or("the device has less shared memory than native backward kernels take")
    }

    pub(super) fn new(problem: &Problem, tile: Sm80BackwardTile) -> Result<Self, Unsupported> {
        let Sm80BackwardTile { shape, value_dim } = tile;
        Ok(Self { dtype: problem.dtype(), value_dim, schedule: BackwardSchedule::new(problem, shape)? })
    }

    /// Name of the main kernel: `cuda-backward-{dtype}-d{columns}-mma{rows of a tile}x{keys of a block}`, and what it does to scores.
    pub(super) fn kernel(&self) -> String {
        let Self { dtype, value_dim, schedule: BackwardSchedule { shape, score_mod, .. } } = self;
        let UnitShape { keys, rows, columns, .. } = shape;
        let dims = if columns == value_dim { columns.to_string() } else { format!("{columns}x{value_dim}") };
        format!("cuda-backward-{dtype}-d{dims}-mma{rows}x{keys}{}", score_mod.suffix())
    }

    /// Bytes of shared memory of a block of threads.
    pub(crate) const fn shared_bytes(&self) -> usize {
        shared_bytes(self.schedule.shape, self.value_dim)
    }
}

/// Bytes of shared memory: keys and values, a tile of queries and one of `d_out`, gradients of scores (and probabilities, where two warps have the same
/// keys), terms of rows.
const fn shared_bytes(shape: UnitShape, value_dim: usize) -> usize {
    let UnitShape { keys, rows, columns, .. } = shape;
    2 * (keys + rows) * (columns + value_dim) + 2 * column_warps(shape) * keys * rows + 2 * 4 * rows
}

/// Warps that have the same keys.
pub(crate) const fn column_warps(shape: UnitShape) -> usize {
    shape.warps * WARP_KEYS / shape.keys
}

/// The largest tile that fits. A warp has 16 rows and a multiple of 16 columns of a tile of `d_q`.
fn largest(dims: &Dims, shared_per_block: usize) -> Option<Sm80BackwardTile> {
    let (keys, tile_rows): (usize, &[usize]) = match dims.head_dim.max(dims.value_dim) {
        0..=64 => (128, &[128]),
        65..=MAX_COLUMNS => (128, &[64, 32]),
        _ => (64, &[64]),
    };
    tile_rows.iter().find_map(|&rows| {
        let d_q_warps = WARPS * 16 / rows;
        let columns = dims.head_dim.next_multiple_of(32.max(16 * d_q_warps));
        let value_dim = dims.value_dim.next_multiple_of(32);
        let shape = UnitShape { keys, rows, columns, warps: WARPS };
        (shared_bytes(shape, value_dim) <= shared_per_block).then_some(Sm80BackwardTile { shape, value_dim })
    })
}
