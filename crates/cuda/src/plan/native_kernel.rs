//! The native kernels of every architecture, and their tiles.

use super::facts::CudaFacts;
use super::kernel::CudaKernel;
use super::schedule::{Section, TileShape};
use super::sm80::Sm80Tile;
use super::sm90::Sm90Tile;
use super::variant::NativeVariant;
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::Problem;

/// The most heads that `wgmma` kernels compute at a time. Of 2, 4, 6 and 8 none is best for every problem.
const SM90_SECTION_HEADS: usize = 4;

/// How a block of threads of a native kernel divides its work. Each architecture has a source of its own for its tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NativeTile {
    /// CUDA C++ for compute capability 8.0 and later, with products by `mma.sync`.
    Sm80(Sm80Tile),
    /// CUDA C++ for compute capability 9.0, with products by `wgmma` and copies by TMA.
    Sm90(Sm90Tile),
}

/// A kernel of a launch of a native plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NativeKernel {
    pub(crate) variant: NativeVariant,
    pub(crate) tile: NativeTile,
    /// The name and the sizes that follow from these, as callers see them.
    pub(crate) public: CudaKernel,
    /// Teams of warps that end a tile each for itself, with counters of their own.
    teams: usize,
    /// f32 of a partial result: the unnormalised output, row_max and row_sum of each row.
    pub(crate) partial_floats: usize,
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
        let sm80 = |asked| {
            let (variant, tile) = Sm80Tile::choose(problem, facts, rows, asked)?;
            Ok(Self::new(variant, NativeTile::Sm80(tile)))
        };
        let sm90 = |asked| {
            let (variant, tile) = Sm90Tile::choose(problem, facts, sequences, asked)?;
            Ok(Self::new(variant, NativeTile::Sm90(tile)))
        };
        match asked {
            Some(NativeTile::Sm80(tile)) => sm80(Some(tile)),
            Some(NativeTile::Sm90(tile)) => sm90(Some(tile)),
            None if Sm90Tile::takes(problem, facts, rows) => sm90(None),
            None => sm80(None),
        }
    }

    fn new(variant: NativeVariant, tile: NativeTile) -> Self {
        let (public, teams, value_consumers) = match tile {
            NativeTile::Sm80(tile) => (tile.describe(&variant), tile.teams(), 1),
            NativeTile::Sm90(tile) => (tile.describe(&variant), tile.warpgroups, tile.value_consumers()),
        };
        let partial_floats = public.rows * (public.value_dim + 2 * value_consumers);
        Self { variant, tile, public, teams, partial_floats }
    }

    /// True if TMA copies rows that it can read. f32 is copied by threads, which split it.
    pub(crate) fn uses_tma(&self) -> bool {
        self.public.uses_wgmma && self.variant.dtype != Dtype::F32
    }

    /// Heads that are computed at a time, as many as the second-level cache holds keys and values of. docs/kernels/hopper.md has
    /// measurements.
    pub(super) const fn section(&self, facts: &CudaFacts) -> Section {
        let row = (self.variant.head_dim + self.variant.value_dim) * self.variant.dtype.bytes();
        if self.public.uses_wgmma {
            Section { keys: facts.l2 / row, heads: SM90_SECTION_HEADS }
        } else {
            Section { keys: facts.l2 / 2 / row, heads: usize::MAX }
        }
    }

    /// The kernel's tile as the schedule sees it.
    pub(super) fn tile_shape(&self, problem: &Problem) -> TileShape {
        let CudaKernel { rows, keys, value_dim, warps_split_keys, .. } = self.public;
        let panels = problem.dims().value_dim.div_ceil(value_dim);
        let min_split_blocks = if warps_split_keys { 1 } else { 4 };
        TileShape { rows, keys, value_dim, panels, teams: self.teams, min_split_blocks }
    }
}
