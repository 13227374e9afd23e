//! The `wgmma` kernels: the problems that they compute, the choice of one, and its requirements.

use super::tile::{
    MAX_DIM, MAX_F32_VALUE_DIM, MAX_NARROW_DIM, Sm90Tile, WARPGROUP_ROWS, Workload, candidates,
    f32_candidates,
};
use crate::plan::facts::CudaFacts;
use crate::plan::kernel::CudaKernel;
use crate::plan::variant::{NativeVariant, first_that_fits, row_mask_bytes};
use crate::plan::work_tile::WorkTile;
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::{Problem, Sequences};

/// Elements of a row of a panel in shared memory: 128 bytes, those that TMA and `wgmma` swizzle.
const PANEL_COLUMNS: usize = 64;
const PANEL_ROW_BYTES: usize = 128;

/// Terms of 16 bits into which an f32 is split.
const F32_TERMS: usize = 3;

/// The most warpgroups that multiply f32: their threads have more registers than three have room for.
const MAX_F32_WARPGROUPS: usize = 2;

/// Bytes that warpgroups with common rows share: probabilities of 64 rows and keys, and two f32 of each
/// thread.
const SHARED_ROWS_BYTES: usize = WARPGROUP_ROWS * PANEL_ROW_BYTES + 2 * 128 * 8;

/// Bytes of a barrier in shared memory (`mbarrier`).
const BARRIER_BYTES: usize = 8;

/// Work tiles in shared memory: the one that is computed, and the next.
const WORK_TILES: usize = 2;

/// Shared memory that a block of compute capability 9.0 may have (CUDA Programming Guide, "technical specifications per compute capability").
const MAX_SHARED_BYTES: usize = 227 << 10;

/// Bytes of the flags that the warps of a block share.
const FLAG_BYTES: usize = 24;

impl Sm90Tile {
    /// Returns true if these kernels compute a launch whose sequences have up to `rows` rows for each key/value head: more rows than one
    /// warpgroup has.
    pub(in crate::plan) fn takes(problem: &Problem, facts: &CudaFacts, rows: usize) -> bool {
        rows > WARPGROUP_ROWS && Self::refusal(problem, facts).is_none()
    }

    /// Why no such kernel computes the problem on the device; none where one does.
    fn refusal(problem: &Problem, facts: &CudaFacts) -> Option<&'static str> {
        let dims = problem.dims();
        if !facts.wgmma {
            Some("tiles of wgmma need compute capability 9.0 and NVRTC 12.0")
        } else if problem.dtype() == Dtype::F32 && dims.head_dim.max(dims.value_dim) > MAX_NARROW_DIM {
            Some("it is of kernels for head dimensions up to 256 in f32")
        } else if dims.head_dim.max(dims.value_dim) > MAX_DIM {
            Some("it is of kernels for head dimensions up to 512")
        } else {
            None
        }
    }

    /// The kernel for the launch of some `sequences`: its constants, and the tile `asked` or the best that the device holds.
    pub(in crate::plan) fn choose(
        problem: &Problem,
        facts: &CudaFacts,
        sequences: &[usize],
        asked: Option<Self>,
    ) -> Result<(NativeVariant, Self), Unsupported> {
        if let Some(why) = Self::refusal(problem, facts) {
            return Err(Unsupported::Tile { why });
        }
        let (dims, dtype) = (problem.dims(), problem.dtype());
        let is_wide = dims.head_dim.max(dims.value_dim) > MAX_NARROW_DIM;
        let head_dim = dims.head_dim.next_multiple_of(32);
        let value_dim = match dtype {
            Dtype::F32 => {
                let panels = dims.value_dim.div_ceil(MAX_F32_VALUE_DIM);
                dims.value_dim.div_ceil(panels).next_multiple_of(32)
            }
            // Warpgroups that share rows have whole panels of columns each.
            Dtype::F16 | Dtype::BF16 => {
                dims.value_dim.next_multiple_of(if is_wide { 2 * PANEL_COLUMNS } else { 32 })
            }
        };
        let variant = NativeVariant::new(problem, head_dim, value_dim);
        let candidates = match asked {
            Some(tile) => {
                tile.check()?;
                if dtype == Dtype::F32 && tile.warpgroups > MAX_F32_WARPGROUPS {
                    return Err(Unsupported::Tile { why: "1 or 2 warpgroups multiply f32" });
                }
                if tile.warpgroups == 4 && (head_dim.max(value_dim).max(tile.keys) > 64 || variant.has_bias) {
                    return Err(Unsupported::Tile {
                        why: "4 warpgroups have registers for at most 64 keys and 64 columns, and none for what modifies scores",
                    });
                }
                if tile.shares_rows != is_wide {
                    return Err(Unsupported::Tile {
                        why: "warpgroups share rows above a head dimension of 256; there only the planner chooses tiles",
                    });
                }
                vec![tile]
            }
            None if dtype == Dtype::F32 => f32_candidates(head_dim, value_dim),
            None => candidates(head_dim, value_dim, &workload(problem, facts, sequences, variant.has_bias)),
        };
        let shared_bytes = |tile: &Self| tile.shared_bytes(&variant);
        Ok((variant, first_that_fits(&candidates, shared_bytes, facts.shared_per_block)?))
    }

    /// Describes the kernel with this tile to callers.
    pub(in crate::plan) fn describe(&self, variant: &NativeVariant) -> CudaKernel {
        let (rows, keys) = (self.rows(), self.keys);
        CudaKernel {
            name: variant.name("prefill", "wgmma", rows, keys),
            is_portable: false,
            uses_wgmma: true,
            head_dim: variant.head_dim,
            value_dim: variant.value_dim,
            rows,
            keys,
            // With the warpgroup that copies.
            threads: 128 * (self.warpgroups + 1),
            key_stages: self.key_stages(variant),
            stages: self.stages,
            resident: 1,
            warps_split_keys: false,
            shared_bytes: self.shared_bytes(variant),
        }
    }

    /// Work tiles whose rows of q are in shared memory: two where they fit, so that the next one's are copied early, else one.
    pub(crate) const fn q_stages(&self, variant: &NativeVariant) -> usize {
        let needed = self.shared_bytes_with(variant, WORK_TILES, self.stages);
        if is_f32(variant) || needed > MAX_SHARED_BYTES { 1 } else { WORK_TILES }
    }

    /// Tiles of keys in shared memory: one more than of values where those are two and there is room for it, but not for rows of q of a second work
    /// tile. It pays in kernels without biases, since these let keys go late, and of one or two warpgroups with rows of their own. Beside rows of q of
    /// two work tiles it gained nothing. With NVRTC before 12.9 kernels do not use it.
    const fn key_stages(&self, variant: &NativeVariant) -> usize {
        let Self { warpgroups, stages, shares_rows, .. } = *self;
        let lets_keys_go_late = !is_f32(variant) && !shares_rows && !variant.has_bias && warpgroups <= 2;
        let fits = self.shared_bytes_with(variant, 1, stages + 1) <= MAX_SHARED_BYTES;
        let has_one_more = lets_keys_go_late && stages == 2 && self.q_stages(variant) == 1 && fits;
        if has_one_more { stages + 1 } else { stages }
    }

    /// Bytes of shared memory: those that the kernel asserts.
    const fn shared_bytes(&self, variant: &NativeVariant) -> usize {
        self.shared_bytes_with(variant, self.q_stages(variant), self.key_stages(variant))
    }

    /// Bytes of shared memory with rows of q of `q_stages` work tiles and `key_stages` tiles of keys. Rows of q, keys and values are cut into panels
    /// of 64 columns of 16 bits.
    const fn shared_bytes_with(&self, variant: &NativeVariant, q_stages: usize, key_stages: usize) -> usize {
        let (Self { keys, stages, shares_rows, .. }, rows) = (*self, self.rows());
        let terms = if is_f32(variant) { F32_TERMS } else { 1 };
        let row = terms * variant.head_dim.div_ceil(PANEL_COLUMNS) * PANEL_ROW_BYTES;
        let value_row = terms * variant.value_dim.div_ceil(PANEL_COLUMNS) * PANEL_ROW_BYTES;
        let q = q_stages * rows * row;
        let rings = keys * (key_stages * row + stages * value_row);
        let row_masks = WORK_TILES * rows * row_mask_bytes(variant.has_bias);
        let barriers = (q_stages + 1) * (rows / WARPGROUP_ROWS) + 3 * WORK_TILES + 2 * (key_stages + stages);
        let shared_rows = if shares_rows { SHARED_ROWS_BYTES } else { 0 };
        shared_rows
            + q
            + rings
            + row_masks
            + WORK_TILES * size_of::<WorkTile>()
            + BARRIER_BYTES * barriers
            + FLAG_BYTES
    }
}

/// True if threads copy rows and split them; otherwise TMA copies those that it can read.
const fn is_f32(variant: &NativeVariant) -> bool {
    matches!(variant.dtype, Dtype::F32)
}

/// Describes a launch of `sequences` to the choice of its tile.
fn workload(problem: &Problem, facts: &CudaFacts, sequences: &[usize], has_bias: bool) -> Workload {
    let (desc, dims) = (problem.desc(), problem.dims());
    let chosen = || sequences.iter().map(|&s| &problem.sequences()[s]);
    // Steps of the same sequences have the same kernel, however many keys there are by then: a graph has captured it.
    let kv_len = match desc.sequences {
        Sequences::Dense | Sequences::Packed { .. } => chosen().map(|s| s.kv_len).max().unwrap_or(0),
        Sequences::Padded { .. } => dims.kv_len,
        Sequences::Cached { .. } => usize::MAX,
    };
    let is_causal = desc.visibility.right() == Some(0);
    let sees_all_before = desc.visibility.is_causal() && chosen().all(|s| s.kv_len <= s.q_len);
    Workload {
        rows: chosen().map(|s| s.q_len.saturating_mul(dims.gqa_group())).collect(),
        kv_heads: dims.kv_heads,
        multiprocessors: facts.multiprocessors,
        keys: desc.visibility.span().map_or(kv_len, |span| span.min(kv_len)),
        is_causal,
        is_triangular: sees_all_before,
        has_bias,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_a_stage_more_where_there_is_room_and_they_go_late() {
        let stages = |dtype, [head_dim, value_dim]: [usize; 2], tile: Sm90Tile, has_bias| {
            let variant =
                NativeVariant { dtype, head_dim, value_dim, paged: false, has_bias, has_mask: false };
            assert!(tile.shared_bytes(&variant) <= MAX_SHARED_BYTES, "{tile:?} {variant:?}");
            (tile.q_stages(&variant), tile.key_stages(&variant))
        };
        let bf16 = |dims, keys| stages(Dtype::BF16, dims, Sm90Tile::new(2, keys, 2), false);
        assert_eq!(bf16([256, 256], 64), (1, 3));
        assert_eq!(bf16([256, 256], 80), (1, 2));
        assert_eq!(bf16([256, 128], 64), (2, 2));
        assert_eq!(bf16([192, 192], 96), (1, 2));
        assert_eq!(bf16([128, 128], 128), (2, 2));
        assert_eq!(stages(Dtype::BF16, [256, 256], Sm90Tile::new(2, 48, 2), true), (1, 2));
        assert_eq!(stages(Dtype::F32, [128, 128], Sm90Tile::new(2, 32, 2), false), (1, 2));
        assert_eq!(stages(Dtype::F16, [512, 512], Sm90Tile::wide(1), false), (1, 1));
    }
}
