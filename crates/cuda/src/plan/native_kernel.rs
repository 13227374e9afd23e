//! The native kernels of every architecture.

use super::facts::{CudaFacts, NATIVE_CAPABILITY};
use super::kernel::{CudaKernel, CudaTile};
use super::schedule::{Section, TileShape};
use super::sm80::{Sm80Kernel, Sm80Tile};
use super::sm90::{Sm90Kernel, Sm90Tile};
use super::work_tile::MAX_RECOMPUTED;
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::Problem;

/// The most heads that `wgmma` kernels compute at a time. Of 2, 4, 6 and 8 none is best for every problem.
const SM90_SECTION_HEADS: usize = 4;

/// A kernel of a launch of a native plan. [`Display`](std::fmt::Display) is its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum NativeKernel {
    Sm80(Sm80Kernel),
    Sm90(Sm90Kernel),
}

/// A tile that a caller asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum NativeTile {
    Sm80(Sm80Tile),
    Sm90(Sm90Tile),
}

impl NativeKernel {
    /// The kernel for the launch of some `sequences`, with the tile `asked` or the best that the device holds.
    pub(super) fn choose(
        problem: &Problem,
        facts: &CudaFacts,
        sequences: &[usize],
        asked: Option<NativeTile>,
    ) -> Result<Self, Unsupported> {
        let gqa_group = problem.dims().gqa_group();
        let rows = sequences.iter().map(|&s| problem.sequences()[s].q_len * gqa_group).max().unwrap_or(0);
        match asked {
            Some(NativeTile::Sm80(tile)) => {
                Sm80Kernel::choose(problem, facts, rows, Some(tile)).map(Self::Sm80)
            }
            Some(NativeTile::Sm90(tile)) => {
                Sm90Kernel::choose(problem, facts, sequences, Some(tile)).map(Self::Sm90)
            }
            None if Sm90Kernel::takes(problem, facts, rows) => {
                Sm90Kernel::choose(problem, facts, sequences, None).map(Self::Sm90)
            }
            None => Sm80Kernel::choose(problem, facts, rows, None).map(Self::Sm80),
        }
    }

    /// True if the device runs the kernel, shared memory aside.
    pub(super) fn runs_on(self, facts: &CudaFacts) -> bool {
        match self {
            Self::Sm80(_) => facts.capability >= NATIVE_CAPABILITY,
            Self::Sm90(_) => facts.wgmma,
        }
    }

    /// Heads that are computed at a time, as many as the second-level cache holds keys and values of. docs/kernels/hopper.md has
    /// measurements.
    pub(super) const fn section(self, facts: &CudaFacts, dtype: Dtype) -> Section {
        let row = (self.head_dim() + self.value_dim()) * dtype.bytes();
        match self {
            Self::Sm80(_) => Section { keys: facts.l2 / 2 / row, heads: usize::MAX },
            Self::Sm90(_) => Section { keys: facts.l2 / row, heads: SM90_SECTION_HEADS },
        }
    }

    /// Head dimension that the kernel is compiled for.
    pub(super) const fn head_dim(self) -> usize {
        match self {
            Self::Sm80(kernel) => kernel.head_dim(),
            Self::Sm90(kernel) => kernel.head_dim(),
        }
    }

    /// Columns of v that a work tile computes.
    pub(super) const fn value_dim(self) -> usize {
        match self {
            Self::Sm80(kernel) => kernel.value_dim(),
            Self::Sm90(kernel) => kernel.value_dim(),
        }
    }

    /// How a block of threads divides its work.
    pub(crate) const fn tile(self) -> CudaTile {
        match self {
            Self::Sm80(kernel) => CudaTile::Sm80(*kernel.tile()),
            Self::Sm90(kernel) => CudaTile::Sm90(*kernel.tile()),
        }
    }

    /// Tiles of keys, and of values, in shared memory.
    pub(super) const fn stages(self) -> usize {
        match self {
            Self::Sm80(kernel) => kernel.tile().stages(),
            Self::Sm90(kernel) => kernel.tile().stages(),
        }
    }

    /// The kernel's tile as the schedule sees it.
    pub(super) fn tile_shape(self, problem: &Problem) -> TileShape {
        match self {
            Self::Sm80(kernel) => kernel.tile_shape(problem),
            Self::Sm90(kernel) => kernel.tile_shape(problem),
        }
    }

    /// The most work tiles of a block of threads that computes tiles as a whole from a list: those that it can recompute. None of an sm90
    /// kernel, which recomputes a work tile before it begins the next one, and takes them from a queue.
    pub(super) const fn max_work_tiles(self) -> Option<usize> {
        match self {
            Self::Sm80(_) => Some(MAX_RECOMPUTED),
            Self::Sm90(_) => None,
        }
    }

    /// Bytes of shared memory of a block of threads.
    pub(crate) const fn shared_bytes(self) -> usize {
        match self {
            Self::Sm80(kernel) => kernel.shared_bytes(),
            Self::Sm90(kernel) => kernel.shared_bytes(),
        }
    }

    /// f32 of a partial result: the unnormalised output, row_max and row_sum of each row.
    pub(crate) const fn partial_floats(self) -> usize {
        match self {
            Self::Sm80(kernel) => kernel.partial_floats(),
            Self::Sm90(kernel) => kernel.partial_floats(),
        }
    }
}

impl From<NativeKernel> for CudaKernel {
    fn from(kernel: NativeKernel) -> Self {
        match kernel {
            NativeKernel::Sm80(kernel) => Self::Sm80(kernel),
            NativeKernel::Sm90(kernel) => Self::Sm90(kernel),
        }
    }
}

impl std::fmt::Display for NativeKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Sm80(kernel) => kernel.fmt(f),
            Self::Sm90(kernel) => kernel.fmt(f),
        }
    }
}
