//! The `mma.sync` kernels: the choice of one, and its requirements.

use super::tile::{Sm80Tile, candidates};
use crate::plan::facts::CudaFacts;
use crate::plan::kernel::CudaKernel;
use crate::plan::variant::{NativeVariant, first_that_fits, row_mask_bytes};
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

impl Sm80Tile {
    /// The kernel for sequences with up to `rows` rows for each key/value head: its constants, and the tile `asked` or the best that the
    /// device holds.
    pub(in crate::plan) fn choose(
        problem: &Problem,
        facts: &CudaFacts,
        rows: usize,
        asked: Option<Self>,
    ) -> Result<(NativeVariant, Self), Unsupported> {
        let (dims, dtype) = (problem.dims(), problem.dtype());
        let head_dim = dims.head_dim.next_multiple_of(32);
        let panels = dims.value_dim.div_ceil(MAX_VALUE_COLUMNS);
        let value_dim = dims.value_dim.div_ceil(panels).next_multiple_of(32);
        let variant = NativeVariant::new(problem, head_dim, value_dim);
        let candidates = match asked {
            Some(tile) => {
                tile.check(dtype)?;
                vec![tile]
            }
            None => candidates(dtype, head_dim.max(value_dim), rows, is_long(problem, facts)),
        };
        let shared_bytes = |tile: &Self| tile.shared_bytes(&variant);
        let mut tile = first_that_fits(&candidates, shared_bytes, facts.shared_per_block)?;
        if asked.is_none() {
            let threads = tile.threads();
            let registers = if threads > 128 { 65536 / threads / 8 * 8 } else { MAX_REGISTERS + 1 };
            let max_resident = if threads > 128 { 1 } else { 2 };
            tile.resident = facts.resident(shared_bytes(&tile), registers * threads).clamp(1, max_resident);
            tile.q_in_registers = dtype != Dtype::F32 && tile.fragments == 1 && head_dim <= 128;
        }
        Ok((variant, tile))
    }

    /// Describes the kernel with this tile to callers.
    pub(in crate::plan) fn describe(&self, variant: &NativeVariant) -> CudaKernel {
        let (rows, keys, warps_split_keys) = (self.rows(), self.keys(), self.warps_split_keys());
        let op = if warps_split_keys { "decode" } else { "prefill" };
        CudaKernel {
            name: variant.name(op, "mma", rows, keys),
            is_portable: false,
            uses_wgmma: false,
            head_dim: variant.head_dim,
            value_dim: variant.value_dim,
            rows,
            keys,
            threads: self.threads(),
            key_stages: self.stages,
            stages: self.stages,
            resident: self.resident,
            warps_split_keys,
            shared_bytes: self.shared_bytes(variant),
        }
    }

    /// Bytes of shared memory: those that the kernel asserts.
    const fn shared_bytes(&self, variant: &NativeVariant) -> usize {
        let Self { warps_q, warps_k, warp_keys, stages, .. } = *self;
        let NativeVariant { head_dim, value_dim, has_bias, .. } = *variant;
        let (element, rows) = (variant.dtype.bytes(), self.rows());
        let q = rows * head_dim * element;
        let rings = stages * warps_k * warp_keys * (head_dim + value_dim) * element;
        let row_masks = rows * row_mask_bytes(has_bias);
        if self.warps_split_keys() {
            // The warps' results, in rows padded by 8 columns, take the place of keys and values.
            let results = warps_k * rows * (value_dim + 8 + 2) * 4;
            q + if rings > results { rings } else { results } + row_masks + FLAG_BYTES
        } else {
            let work_tiles = (stages + 4) / 2 * 2 * size_of::<WorkTile>();
            q + rings + 2 * row_masks + work_tiles + warps_q * WARP_STREAM_BYTES + FLAG_BYTES
        }
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
