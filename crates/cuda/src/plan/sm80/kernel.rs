//! The `mma.sync` kernels: the choice of one, and its requirements.

use super::tile::{Sm80Tile, candidates};
use crate::plan::facts::CudaFacts;
use crate::plan::schedule::TileShape;
use crate::plan::variant::{NativeName, first_that_fits, has_bias, row_mask_bytes};
use crate::plan::work_tile::WorkTile;
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::{Problem, Sequence};

/// The most columns of values of a work tile: their accumulators are registers.
const MAX_VALUE_COLUMNS: usize = 256;

/// Bytes of the `WarpStream` of a warp of the prefill kernel.
const WARP_STREAM_BYTES: usize = 80;

/// Bytes of the flags that the warps of a block share.
const FLAG_BYTES: usize = 16;

/// Registers that a thread can have.
const MAX_REGISTERS: usize = 255;

/// A kernel for compute capability 8.0 and later: one source, specialised by these constants.
///
/// Its name is `cuda-{prefill|decode}-{dtype}-d{head_dim}-{variant}`, with `x{value_dim}` where that differs.
/// Dimensions are the compiled ones, multiples of 32: zeros in shared memory fill the rest where the problem
/// has less. The variant is `mma{rows}x{keys}`, then `-paged` where keys lie in pages, and `-bias` or `-mask`
/// where scores are modified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm80Kernel {
    pub(crate) dtype: Dtype,
    /// Head dimension, rounded up.
    pub(crate) head_dim: usize,
    /// Columns of v that a work tile computes, rounded up; wider values are cut into panels.
    pub(crate) value_dim: usize,
    pub(crate) tile: Sm80Tile,
    /// True if keys lie in pages.
    pub(crate) paged: bool,
    /// True if the kernel modifies scores before the softmax: for softcap, ALiBi, a tree mask, a mask, or a
    /// scale that is not positive or exceeds 2^10.
    pub(crate) has_bias: bool,
    /// True if there is a materialised mask.
    pub(crate) has_mask: bool,
}

impl Sm80Kernel {
    /// The kernel for sequences with up to `rows` rows for each key/value head, with the tile `asked` or the best that the device holds.
    pub(in crate::plan) fn choose(
        problem: &Problem,
        facts: &CudaFacts,
        rows: usize,
        asked: Option<Sm80Tile>,
    ) -> Result<Self, Unsupported> {
        let (dims, dtype) = (problem.dims(), problem.dtype());
        let head_dim = dims.head_dim.next_multiple_of(32);
        let panels = dims.value_dim.div_ceil(MAX_VALUE_COLUMNS);
        let value_dim = dims.value_dim.div_ceil(panels).next_multiple_of(32);
        let (has_bias, has_mask) = (has_bias(problem), problem.desc().mask.is_some());
        let paged = problem.is_cached();
        let with = |tile| Self { dtype, head_dim, value_dim, tile, paged, has_bias, has_mask };
        let candidates = match asked {
            Some(tile) => {
                tile.check(dtype)?;
                vec![tile]
            }
            None => candidates(dtype, head_dim.max(value_dim), rows, is_long(problem, facts)),
        };
        let kernels = candidates.into_iter().map(with);
        let mut kernel = first_that_fits(kernels, Self::shared_bytes, facts.shared_per_block)?;
        if asked.is_none() {
            let threads = kernel.tile.threads();
            let registers = if threads > 128 { 65536 / threads / 8 * 8 } else { MAX_REGISTERS + 1 };
            let max_resident = if threads > 128 { 1 } else { 2 };
            kernel.tile.resident =
                facts.resident(kernel.shared_bytes(), registers * threads).clamp(1, max_resident);
            kernel.tile.q_in_registers = dtype != Dtype::F32 && kernel.tile.fragments == 1 && head_dim <= 128;
        }
        Ok(kernel)
    }

    /// Head dimension that the kernel is compiled for.
    #[must_use]
    pub const fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Columns of v that a work tile computes.
    #[must_use]
    pub const fn value_dim(&self) -> usize {
        self.value_dim
    }

    /// How a block of threads divides its work.
    #[must_use]
    pub const fn tile(&self) -> &Sm80Tile {
        &self.tile
    }

    /// The sizes of the kernel's tile that the schedule of a problem depends on.
    pub(in crate::plan) fn tile_shape(&self, problem: &Problem) -> TileShape {
        TileShape {
            rows: self.tile.rows(),
            keys: self.tile.keys(),
            value_dim: self.value_dim,
            panels: problem.dims().value_dim.div_ceil(self.value_dim),
            teams: self.tile.teams(),
            min_split_blocks: self.tile.min_split_blocks(),
        }
    }

    /// Bytes of shared memory: those that the kernel asserts.
    #[must_use]
    pub const fn shared_bytes(&self) -> usize {
        let Sm80Tile { warps_q, warps_k, warp_keys, stages, .. } = self.tile;
        let (element, rows) = (self.dtype.bytes(), self.tile.rows());
        let q = rows * self.head_dim * element;
        let rings = stages * warps_k * warp_keys * (self.head_dim + self.value_dim) * element;
        let row_masks = rows * row_mask_bytes(self.has_bias);
        if self.tile.warps_split_keys() {
            // The warps' results, in rows padded by 8 columns, take the place of keys and values.
            let results = warps_k * rows * (self.value_dim + 8 + 2) * 4;
            q + if rings > results { rings } else { results } + row_masks + FLAG_BYTES
        } else {
            let work_tiles = (stages + 4) / 2 * 2 * size_of::<WorkTile>();
            q + rings + 2 * row_masks + work_tiles + warps_q * WARP_STREAM_BYTES + FLAG_BYTES
        }
    }

    /// f32 of a partial result: the unnormalised output, row_max and row_sum of each row.
    pub(crate) const fn partial_floats(&self) -> usize {
        self.tile.rows() * (self.value_dim + 2)
    }
}

/// Returns true if two teams with 256 rows are preferred to 128 rows: they multiply faster by a tenth, but
/// their tiles reach over more keys that some of the rows do not see, and there are half as many of them.
fn is_long(problem: &Problem, facts: &CudaFacts) -> bool {
    let (heads, gqa_group) = (problem.dims().kv_heads, problem.dims().gqa_group());
    let tiles = |s: &Sequence| (s.q_len * gqa_group).div_ceil(256) * heads;
    let Some(longest) = problem.sequences().iter().max_by_key(|s| s.q_len) else { return false };
    // Keys that a tile in the middle of the longest sequence sees.
    let keys = |rows: usize| {
        let middle = longest.q_len / 2;
        problem.visible_union(longest, middle..(middle + rows.div_ceil(gqa_group)).min(longest.q_len)).len()
    };
    problem.sequences().iter().map(tiles).sum::<usize>() >= 2 * facts.multiprocessors
        && keys(256) >= 512
        && 10 * keys(256) < 11 * keys(128)
}

impl std::fmt::Display for Sm80Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { dtype, head_dim, value_dim, tile, paged, has_bias, has_mask } = *self;
        let op = if tile.warps_split_keys() { "decode" } else { "prefill" };
        let (products, rows, keys) = ("mma", tile.rows(), tile.keys());
        NativeName { op, dtype, head_dim, value_dim, products, rows, keys, paged, has_bias, has_mask }.fmt(f)
    }
}
