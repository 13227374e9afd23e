//! Kernels of the CUDA backend and the shapes of their tiles.

use super::facts::CudaFacts;
use super::work_tile::WorkTile;
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::{Problem, Sequence};

/// Largest scale that kernels fold into the exponential, `2^(x * scale - max * scale)`. The second product is rounded and the first is
/// not: scores above 2^31 leave a difference that overflows. Larger scales are multiplied before.
const MAX_FUSED_SCALE: f32 = 1024.0;

/// How a block of threads divides its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CudaTile {
    /// Warps over the rows of a tile.
    pub warps_q: usize,
    /// Warps over the keys of a tile; 1 where there are several over the rows.
    pub warps_k: usize,
    /// Fragments of 16 rows of a warp.
    pub fragments: usize,
    /// Keys that a warp takes at a time.
    pub warp_keys: usize,
    /// Tiles of keys, and of values, in shared memory.
    pub stages: usize,
    /// Blocks of threads that a multiprocessor holds at a time.
    pub resident: usize,
    /// Whether the fragments of q stay in registers.
    pub q_in_registers: bool,
}

impl CudaTile {
    /// Most rows of a sequence and key/value head that one fragment holds.
    pub(super) const FEW_ROWS: usize = 16;

    /// A tile for one block of threads a multiprocessor, with fragments of q in shared memory. One of the numbers of warps is 1.
    #[must_use]
    pub const fn new(warps: [usize; 2], fragments: usize, warp_keys: usize, stages: usize) -> Self {
        let [warps_q, warps_k] = warps;
        Self { warps_q, warps_k, fragments, warp_keys, stages, resident: 1, q_in_registers: false }
    }

    /// Checks a tile that a caller made.
    fn check(&self) -> Result<(), Unsupported> {
        let Self { warps_q, warps_k, fragments, warp_keys, stages, resident, .. } = *self;
        let refused = |why| Err(Unsupported::Tile { why });
        if ![1, 2, 4, 8].contains(&warps_q) || ![1, 2, 4, 8].contains(&warps_k) {
            return refused("warps are 1, 2, 4 or 8 over rows and over keys");
        }
        if warps_q > 1 && warps_k > 1 {
            return refused("warps divide rows or keys, not both");
        }
        if ![1, 2].contains(&fragments) {
            return refused("a warp has 1 or 2 fragments of 16 rows");
        }
        if warps_q == 8 && stages != 2 {
            return refused("8 warps over rows have 2 stages");
        }
        if !(16..=256).contains(&warp_keys) || !warp_keys.is_multiple_of(16) {
            return refused("keys of a warp are a multiple of 16, at most 256");
        }
        if !(2..=8).contains(&stages) || !(1..=16).contains(&resident) {
            return refused("2 to 8 stages, and 1 to 16 blocks a multiprocessor");
        }
        Ok(())
    }

    /// Query rows of a tile.
    #[must_use]
    pub const fn rows(&self) -> usize {
        16 * self.fragments * self.warps_q
    }

    /// Keys of a tile.
    #[must_use]
    pub const fn keys(&self) -> usize {
        self.warp_keys * self.warps_k
    }

    /// Threads of a block.
    #[must_use]
    pub const fn threads(&self) -> usize {
        32 * self.warps_q * self.warps_k
    }

    /// Whether warps divide the keys of a tile, each on its own, and not its rows: for few rows.
    pub(crate) const fn divides_keys(&self) -> bool {
        self.warps_q == 1
    }

    /// Groups of warps that end a tile each for itself.
    pub(super) const fn teams(&self) -> usize {
        if self.warps_q == 8 { 2 } else { 1 }
    }

    /// Fewest blocks of keys for which a part of a tile is worth its partial result.
    pub(super) const fn least_blocks(&self) -> usize {
        if self.divides_keys() { 1 } else { 4 }
    }
}

/// A kernel of the CUDA backend: one source, specialised by these constants.
///
/// Its name is `cuda-{prefill|decode}-{dtype}-d{head_dim}-{variant}`, with `x{value_dim}` where that differs. Dimensions are
/// those it is compiled for, multiples of 32: what a problem has less is filled with zeros in shared memory. The variant is
/// `mma{rows}x{keys}`, then `-paged` where keys lie in pages, and `-bias` or `-mask` where scores are changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CudaKernel {
    /// Element type of q, k, v and out.
    pub dtype: Dtype,
    /// Head dimension, rounded up.
    pub head_dim: usize,
    /// Columns of v that a work tile computes, rounded up; wider values are cut into panels.
    pub value_dim: usize,
    /// How a block of threads divides its work.
    pub tile: CudaTile,
    /// Whether keys lie in pages.
    pub paged: bool,
    /// Whether the kernel modifies scores before the softmax: for softcap, ALiBi, a tree mask, or a scale that is not positive or exceeds 2^10.
    pub biased: bool,
    /// Whether there is a materialised mask.
    pub masked: bool,
}

/// Most columns of values of a work tile: their sums are kept in registers.
const MAX_VALUE_COLUMNS: usize = 256;

/// Bytes that a warp keeps of its stream of work tiles: `STREAM` of the kernels.
pub(crate) const STREAM_BYTES: usize = 80;

/// Registers that a thread can have.
const MAX_REGISTERS: usize = 255;

impl CudaKernel {
    /// The kernel for sequences with up to so many rows for each key/value head.
    pub(super) fn choose(
        problem: &Problem,
        facts: &CudaFacts,
        rows: usize,
        asked: Option<CudaTile>,
    ) -> Result<Self, Unsupported> {
        let (dims, desc) = (problem.dims(), problem.desc());
        let head_dim = dims.head_dim.next_multiple_of(32);
        let panels = dims.value_dim.div_ceil(MAX_VALUE_COLUMNS);
        let value_dim = dims.value_dim.div_ceil(panels).next_multiple_of(32);
        let masked = desc.mask.is_some();
        let biased = masked
            || desc.softcap.is_some()
            || desc.alibi
            || desc.tree
            || !(0.0..=MAX_FUSED_SCALE).contains(&problem.scale())
            || problem.scale() == 0.0;
        let dtype = problem.dtype();
        let with =
            |tile| Self { dtype, head_dim, value_dim, tile, paged: problem.is_cached(), biased, masked };
        let mut least = usize::MAX;
        let candidates = match asked {
            Some(tile) => {
                tile.check()?;
                if tile.q_in_registers && dtype == Dtype::F32 {
                    return Err(Unsupported::Tile { why: "fragments of f32 queries stay in shared memory" });
                }
                vec![tile]
            }
            None => candidates(dtype, head_dim.max(value_dim), rows, is_long(problem, facts)),
        };
        for tile in candidates {
            let mut kernel = with(tile);
            let shared = kernel.shared_bytes();
            least = least.min(shared);
            if shared > facts.shared_per_block {
                continue;
            }
            if asked.is_some() {
                return Ok(kernel);
            }
            let threads = kernel.tile.threads();
            let registers = if threads > 128 { 65536 / threads / 8 * 8 } else { MAX_REGISTERS + 1 };
            let most = if threads > 128 { 1 } else { 2 };
            kernel.tile.resident = facts.resident(shared, registers * threads).clamp(1, most);
            kernel.tile.q_in_registers = dtype != Dtype::F32 && tile.fragments == 1 && head_dim <= 128;
            return Ok(kernel);
        }
        Err(Unsupported::SharedMemory { needed: least, available: facts.shared_per_block })
    }

    /// Panels of columns into which values are cut.
    pub(super) fn panels(&self, problem: &Problem) -> usize {
        problem.dims().value_dim.div_ceil(self.value_dim)
    }

    /// Bytes of shared memory: those that the kernel asserts.
    #[must_use]
    pub const fn shared_bytes(&self) -> usize {
        let CudaTile { warps_k, warp_keys, stages, .. } = self.tile;
        let (element, rows) = (self.dtype.bytes(), self.tile.rows());
        let q = rows * self.head_dim * element;
        let ring = stages * warps_k * warp_keys * (self.head_dim + self.value_dim) * element;
        let seen = rows * if self.biased { 40 } else { 8 };
        if self.tile.divides_keys() {
            let merge = warps_k * rows * (self.value_dim + 10) * 4;
            q + if ring > merge { ring } else { merge } + seen + 16
        } else {
            let (work_tiles, streams) =
                ((stages + 4) / 2 * 2 * size_of::<WorkTile>(), self.tile.warps_q * STREAM_BYTES);
            q + ring + 2 * seen + work_tiles + streams + 16
        }
    }

    /// f32 of a partial result: values, maximum and sum of each row.
    pub(crate) const fn slot_floats(&self) -> usize {
        self.tile.rows() * (self.value_dim + 2)
    }
}

/// Whether two teams with 256 rows are to be preferred to 128 rows: they multiply faster by a tenth, but their tiles reach over
/// more keys that some of the rows do not see, and there are half as many of them.
fn is_long(problem: &Problem, facts: &CudaFacts) -> bool {
    let (heads, group) = (problem.dims().kv_heads, problem.dims().group());
    let tiles = |s: &Sequence| (s.q_len * group).div_ceil(256) * heads;
    let Some(longest) = problem.sequences().iter().max_by_key(|s| s.q_len) else { return false };
    // Of a tile in the middle of the longest sequence.
    let keys = |rows: usize| {
        let middle = longest.q_len / 2;
        problem.visible_union(longest, middle..(middle + rows.div_ceil(group)).min(longest.q_len)).len()
    };
    problem.sequences().iter().map(tiles).sum::<usize>() >= 2 * facts.multiprocessors
        && keys(256) >= 512
        && 10 * keys(256) < 11 * keys(128)
}

/// Tiles for so many rows, best first: each takes less shared memory than the one before. `long` where there are enough rows
/// and keys for the largest tiles.
fn candidates(dtype: Dtype, dim: usize, rows: usize, long: bool) -> Vec<CudaTile> {
    let wide = dtype == Dtype::F32;
    if rows <= CudaTile::FEW_ROWS {
        // Bytes of keys and values on their way to a multiprocessor are what counts: about 32 KiB a stage.
        let (keys, stages) = match dim * dtype.bytes() {
            0..=128 => (32, 3),
            _ => (16, 2),
        };
        let mut tiles = vec![CudaTile::new([1, 4], 1, keys, stages)];
        tiles.extend([4, 2, 1].map(|warps| CudaTile::new([1, warps], 1, 16, 2)));
        return tiles;
    }
    let mut tiles = Vec::new();
    if !wide && rows > 64 {
        if dim <= 128 {
            if long {
                tiles.push(CudaTile::new([8, 1], 2, if dim <= 64 { 128 } else { 64 }, 2));
            }
            tiles.push(CudaTile::new([4, 1], 2, if dim <= 64 { 128 } else { 64 }, 2));
        } else if dim <= 256 {
            tiles.push(CudaTile::new([8, 1], 1, 64, 2));
        }
    }
    let shapes = [(4, 64), (4, 32), (4, 16), (2, 32), (2, 16)];
    let most = if wide { 32 } else { 64 };
    tiles.extend(
        shapes
            .into_iter()
            .filter(|&(_, keys)| keys <= most)
            .map(|(warps, keys)| CudaTile::new([warps, 1], 1, keys, 2)),
    );
    tiles.push(CudaTile::new([1, 1], 1, 16, 2));
    tiles
}

impl std::fmt::Display for CudaKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let op = if self.tile.divides_keys() { "decode" } else { "prefill" };
        write!(f, "cuda-{op}-{}-d{}", self.dtype, self.head_dim)?;
        if self.value_dim != self.head_dim {
            write!(f, "x{}", self.value_dim)?;
        }
        write!(f, "-mma{}x{}", self.tile.rows(), self.tile.keys())?;
        if self.paged {
            f.write_str("-paged")?;
        }
        f.write_str(match (self.masked, self.biased) {
            (true, _) => "-mask",
            (false, true) => "-bias",
            (false, false) => "",
        })
    }
}
