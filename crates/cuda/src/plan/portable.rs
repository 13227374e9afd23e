//! Plans of the kernels of the kernel language on CUDA devices.
//!
//! One launch stores partial results, one merges them. Where the rows of the problem are too few for the device, keys are cut into splits
//! until there are as many threadgroups as it holds at a time. The number of splits depends on no sequence's length, since lengths are
//! what [`update`](crate::Prepared::update) changes.

use super::facts::{CudaFacts, NATIVE_CAPABILITY};
use super::launch::{ALIGN, MAX_GRID};
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::{PlanOptions, Unsupported};
use flashtile_core::problem::{Dims, Problem, Sequences};
use flashtile_gpu::plan::Plan;
use flashtile_gpu::shape::{Shape, Tile};

/// How a threadgroup of the portable kernel divides its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortableTile {
    /// Query rows: 8, 16 or 32.
    rows: usize,
    /// Keys that a SIMD group multiplies at a time: 16 or 32.
    simd_keys: usize,
    /// SIMD groups, each with keys of its own: 1, 2, 4 or 8.
    simds: usize,
    /// Threadgroups that a multiprocessor holds at a time.
    resident: usize,
}

impl PortableTile {
    /// A tile of `rows` query rows and of `simds` SIMD groups with `simd_keys` keys each, for `resident` threadgroups a multiprocessor. A
    /// plan refuses tiles that the kernel cannot have.
    #[must_use]
    pub const fn new(rows: usize, simd_keys: usize, simds: usize, resident: usize) -> Self {
        Self { rows, simd_keys, simds, resident }
    }

    fn check(&self) -> Result<(), Unsupported> {
        let refused = |why| Err(Unsupported::Tile { why });
        if ![8, 16, 32].contains(&self.rows) || ![16, 32].contains(&self.simd_keys) {
            return refused("portable tiles have 8, 16 or 32 rows, and 16 or 32 keys a SIMD group");
        }
        if ![1, 2, 4, 8].contains(&self.simds) || !(1..=16).contains(&self.resident) {
            return refused(
                "portable tiles have 1, 2, 4 or 8 SIMD groups, and 1 to 16 groups a multiprocessor",
            );
        }
        Ok(())
    }

    /// Query rows of a tile.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Threadgroups that a multiprocessor holds at a time.
    #[must_use]
    pub const fn resident(&self) -> usize {
        self.resident
    }

    /// Keys that the SIMD groups multiply at a time.
    #[must_use]
    pub const fn keys(&self) -> usize {
        self.simd_keys * self.simds
    }

    /// Threads of a threadgroup.
    #[must_use]
    pub const fn threads(&self) -> usize {
        32 * self.simds
    }

    pub(crate) const fn with_splits(&self, splits: usize) -> Tile {
        Tile { rows: self.rows / 8, keys: self.simd_keys / 16, simds: self.simds, splits }
    }
}

/// The kernel of the kernel language on a CUDA device, specialised by these constants.
///
/// Its name is `cuda-decode-{dtype}-d{head_dim}-portable`, for prefill too, with `x{value_dim}` where that differs, `-paged` where keys lie
/// in pages, and `-bias` or `-mask` where scores are modified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortableKernel {
    dtype: Dtype,
    head_dim: usize,
    value_dim: usize,
    tile: PortableTile,
    /// Whether keys lie in pages.
    pub(crate) paged: bool,
    /// Whether scores are modified: softcap, ALiBi, a tree mask, a mask.
    has_bias: bool,
    /// Whether there is a materialised mask.
    has_mask: bool,
}

impl PortableKernel {
    /// Head dimension.
    #[must_use]
    pub const fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Columns of v.
    #[must_use]
    pub const fn value_dim(&self) -> usize {
        self.value_dim
    }

    /// How a threadgroup divides its work.
    #[must_use]
    pub const fn tile(&self) -> &PortableTile {
        &self.tile
    }

    /// Bytes of shared memory of a threadgroup: its queries in f32, and the factor and the addend of their scores.
    #[must_use]
    pub const fn shared_bytes(&self) -> usize {
        self.tile.rows * (self.head_dim + 2) * 4
    }
}

impl std::fmt::Display for PortableKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda-decode-{}-d{}", self.dtype, self.head_dim)?;
        if self.value_dim != self.head_dim {
            write!(f, "x{}", self.value_dim)?;
        }
        f.write_str("-portable")?;
        if self.paged {
            f.write_str("-paged")?;
        }
        f.write_str(match (self.has_mask, self.has_bias) {
            (true, _) => "-mask",
            (false, true) => "-bias",
            (false, false) => "",
        })
    }
}

/// Where the regions of scratch memory start, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PortableRegions {
    /// Starts and lengths of the sequences.
    pub(crate) sequences: usize,
    /// Zeros, in the place of tensors that a problem lacks.
    pub(crate) zeros: usize,
    /// Bytes up to here are written before the first run.
    pub(crate) written: usize,
    pub(crate) partial_out: usize,
    pub(crate) partial_max_sum: usize,
    /// What a run writes and nobody reads.
    pub(crate) unwanted: usize,
    pub(crate) len: usize,
}

/// i32 of a sequence.
const SEQUENCE: usize = 8;

/// Registers that a thread can have, rounded up as they are allocated.
const MAX_REGISTERS: usize = 256;

/// The most splits of the keys of a row: merging more takes longer than their threadgroups gain.
const MAX_SPLITS: usize = 128;

/// A plan of the portable kernel.
#[derive(Debug, Clone)]
pub(crate) struct Portable {
    pub(crate) kernel: PortableKernel,
    tile: Tile,
    shape: Shape,
    /// What is launched.
    pub(crate) plan: Plan,
    pub(crate) regions: PortableRegions,
}

impl Portable {
    pub(super) fn new(
        problem: &Problem,
        facts: &CudaFacts,
        options: PlanOptions,
        asked: Option<PortableTile>,
    ) -> Result<Self, Unsupported> {
        if !options.skip_tiles {
            return Err(Unsupported::SkipTiles);
        }
        // Refuses dimensions before anything is computed from them.
        Shape::of(problem, PortableTile::new(8, 16, 1, 1).with_splits(1))?;
        let (dims, desc) = (problem.dims(), problem.desc());
        let has_mask = desc.mask.is_some();
        let has_bias = has_mask || desc.softcap.is_some() || desc.alibi || desc.tree;
        let mut kernel = PortableKernel {
            dtype: problem.dtype(),
            head_dim: dims.head_dim,
            value_dim: dims.value_dim,
            tile: asked.unwrap_or_else(|| tile(problem)),
            paged: problem.is_cached(),
            has_bias,
            has_mask,
        };
        kernel.tile.check()?;
        if asked.is_none() {
            kernel.tile.resident = resident(&kernel, dims, facts);
        }
        let needed = kernel.shared_bytes();
        if needed > facts.shared_per_block {
            return Err(Unsupported::SharedMemory { needed, available: facts.shared_per_block });
        }
        let single = Shape::of(problem, kernel.tile.with_splits(1))?;
        let splits = match options.splits {
            Some(got) => {
                let blocks = |s| problem.visible_union(s, 0..s.q_len).len().div_ceil(kernel.tile.keys());
                let max = problem.sequences().iter().map(blocks).max().unwrap_or(0).max(1);
                if got == 0 || got > max {
                    return Err(Unsupported::Splits { got, max });
                }
                got
            }
            None => {
                let groups = single.groups.iter().map(|&n| n as usize).product::<usize>().max(1);
                let room = facts.multiprocessors * kernel.tile.resident;
                (room / groups).clamp(1, max_splits(problem, &kernel.tile))
            }
        };
        let tile = kernel.tile.with_splits(splits);
        let shape = Shape::of(problem, tile)?;
        // The first dimension of a grid has no bound that problems reach.
        let [_, groups @ ..] = shape.groups;
        let [_, rows @ ..] = shape.rows;
        if let Some(got) = groups.into_iter().chain(rows).map(|n| n as usize).find(|&n| n > MAX_GRID) {
            return Err(Unsupported::Tasks { got, max: MAX_GRID });
        }
        let regions = regions(problem, &shape);
        let regions = regions.filter(|r| isize::try_from(r.len).is_ok());
        let regions = regions.ok_or_else(|| Unsupported::Workspace { kernel: kernel.to_string() })?;
        Ok(Self { kernel, tile, shape, plan: Plan::new(problem, tile)?, regions })
    }

    /// Registers of a thread that the plan assumes.
    #[cfg(test)]
    pub(crate) fn registers(&self, problem: &Problem, facts: &CudaFacts) -> usize {
        registers(&self.kernel, problem.dims(), facts)
    }

    /// Threadgroups that write partial results.
    pub(crate) fn groups(&self) -> usize {
        self.shape.groups.iter().map(|&n| n as usize).product()
    }

    pub(crate) const fn splits(&self) -> usize {
        self.tile.splits
    }
}

impl PartialEq for Portable {
    /// What is launched follows from the problem and the rest.
    fn eq(&self, other: &Self) -> bool {
        let all = |of: &Self| (of.kernel, of.tile, of.shape, of.regions);
        all(self) == all(other)
    }
}

impl std::fmt::Display for Portable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (tile, groups) = (&self.kernel.tile, self.groups());
        write!(
            f,
            "{} tile {}x{} groups {groups} splits {}",
            self.kernel,
            tile.rows,
            tile.keys(),
            self.splits()
        )
    }
}

fn regions(problem: &Problem, shape: &Shape) -> Option<PortableRegions> {
    let mut len = 0usize;
    let mut region = |words: usize| {
        let start = len;
        len = len.checked_add(words.checked_mul(4)?)?.checked_next_multiple_of(ALIGN)?;
        Some(start)
    };
    Some(PortableRegions {
        sequences: region(problem.sequences().len() * SEQUENCE)?,
        zeros: region(1)?,
        written: region(0)?,
        partial_out: region(shape.scratch[0])?,
        partial_max_sum: region(shape.scratch[1])?,
        unwanted: region(1)?,
        len: region(0)?,
    })
}

/// The tile of a problem, with one threadgroup a multiprocessor: 16 rows share what is read where there are more than 8 and registers
/// hold them.
fn tile(problem: &Problem) -> PortableTile {
    let gqa_group = problem.dims().gqa_group();
    let max_rows = problem.sequences().iter().map(|s| s.q_len * gqa_group).max().unwrap_or(0);
    let rows = if max_rows > 8 && words(problem.dtype(), problem.dims()) <= 128 { 16 } else { 8 };
    PortableTile::new(rows, 16, 4, 1)
}

/// Pairs of bytes of a row, of keys or of values.
fn words(dtype: Dtype, dims: &Dims) -> usize {
    dims.head_dim.max(dims.value_dim) * dtype.bytes() / 2
}

/// Threadgroups that a multiprocessor holds at a time.
fn resident(kernel: &PortableKernel, dims: &Dims, facts: &CudaFacts) -> usize {
    let threads = kernel.tile.threads();
    facts.resident(kernel.shared_bytes(), registers(kernel, dims, facts) * threads).clamp(1, 16)
}

/// Registers of a thread, at least as many as NVRTC 13 gives the kernel for rows that start on 16 bytes.
fn registers(kernel: &PortableKernel, dims: &Dims, facts: &CudaFacts) -> usize {
    // Products of bf16 are made of shuffles there.
    let shuffled = kernel.dtype == Dtype::BF16 && facts.capability < NATIVE_CAPABILITY;
    match (kernel.tile.rows, words(kernel.dtype, dims)) {
        (8, 0..=32) => 96,
        (8, 33..=64) if !shuffled => 128,
        (8, 33..=128) | (16, 0..=64) => 168,
        _ => MAX_REGISTERS,
    }
}

/// The most splits that the keys of a tile are worth, whatever lengths an update may bring.
fn max_splits(problem: &Problem, tile: &PortableTile) -> usize {
    let (dims, visibility) = (problem.dims(), problem.desc().visibility);
    let longest = || problem.sequences().iter().map(|s| s.kv_len).max().unwrap_or(0);
    let held = match problem.desc().sequences {
        Sequences::Cached { .. } => usize::MAX,
        Sequences::Padded { .. } => dims.kv_len,
        Sequences::Dense | Sequences::Packed { .. } => longest(),
    };
    let band = match (visibility.left(), visibility.right()) {
        // Of the positions of a tile's rows.
        (Some(left), Some(right)) => {
            left.saturating_add(right).saturating_add(tile.rows.div_ceil(dims.gqa_group()) + 1)
        }
        _ => usize::MAX,
    };
    held.min(band).div_ceil(tile.keys()).clamp(1, MAX_SPLITS)
}
