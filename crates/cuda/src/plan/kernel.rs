//! The kernels of the CUDA backend, of every kind.

use super::portable::{PortableKernel, PortableTile};
use super::sm80::{Sm80Kernel, Sm80Tile};
use super::sm90::{Sm90Kernel, Sm90Tile};

/// A kernel of the CUDA backend. [`Display`](std::fmt::Display) is its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CudaKernel {
    /// CUDA C++ for compute capability 8.0 and later, with products by `mma.sync`.
    Sm80(Sm80Kernel),
    /// CUDA C++ for compute capability 9.0, with products by `wgmma` and copies by TMA.
    Sm90(Sm90Kernel),
    /// The kernel language, printed as CUDA.
    Portable(PortableKernel),
}

impl CudaKernel {
    /// Returns true if the kernel is written in the kernel language.
    #[must_use]
    pub const fn is_portable(&self) -> bool {
        match self {
            Self::Sm80(_) | Self::Sm90(_) => false,
            Self::Portable(_) => true,
        }
    }

    /// Head dimension that the kernel is compiled for.
    #[must_use]
    pub const fn head_dim(&self) -> usize {
        match self {
            Self::Sm80(kernel) => kernel.head_dim(),
            Self::Sm90(kernel) => kernel.head_dim(),
            Self::Portable(kernel) => kernel.head_dim(),
        }
    }

    /// Columns of v that a block of threads computes.
    #[must_use]
    pub const fn value_dim(&self) -> usize {
        match self {
            Self::Sm80(kernel) => kernel.value_dim(),
            Self::Sm90(kernel) => kernel.value_dim(),
            Self::Portable(kernel) => kernel.value_dim(),
        }
    }

    /// Bytes of shared memory of a block of threads.
    #[must_use]
    pub fn shared_bytes(&self) -> usize {
        match self {
            Self::Sm80(kernel) => kernel.shared_bytes(),
            Self::Sm90(kernel) => kernel.shared_bytes(),
            Self::Portable(kernel) => kernel.shared_bytes(),
        }
    }

    /// How a block of threads divides its work.
    #[must_use]
    pub const fn tile(&self) -> CudaTile {
        match self {
            Self::Sm80(kernel) => CudaTile::Sm80(*kernel.tile()),
            Self::Sm90(kernel) => CudaTile::Sm90(*kernel.tile()),
            Self::Portable(kernel) => CudaTile::Portable(*kernel.tile()),
        }
    }
}

impl std::fmt::Display for CudaKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Sm80(kernel) => kernel.fmt(f),
            Self::Sm90(kernel) => kernel.fmt(f),
            Self::Portable(kernel) => kernel.fmt(f),
        }
    }
}

/// How a block of threads of a [`CudaKernel`] divides its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CudaTile {
    /// The tile of a [`CudaKernel::Sm80`].
    Sm80(Sm80Tile),
    /// The tile of a [`CudaKernel::Sm90`].
    Sm90(Sm90Tile),
    /// The tile of a [`CudaKernel::Portable`].
    Portable(PortableTile),
}

impl CudaTile {
    /// Query rows of a tile.
    #[must_use]
    pub const fn rows(&self) -> usize {
        match self {
            Self::Sm80(tile) => tile.rows(),
            Self::Sm90(tile) => tile.rows(),
            Self::Portable(tile) => tile.rows(),
        }
    }

    /// Keys that a block of threads multiplies at a time.
    #[must_use]
    pub const fn keys(&self) -> usize {
        match self {
            Self::Sm80(tile) => tile.keys(),
            Self::Sm90(tile) => tile.keys(),
            Self::Portable(tile) => tile.keys(),
        }
    }

    /// Threads of a block.
    #[must_use]
    pub const fn threads(&self) -> usize {
        match self {
            Self::Sm80(tile) => tile.threads(),
            Self::Sm90(tile) => tile.threads(),
            Self::Portable(tile) => tile.threads(),
        }
    }

    /// Tiles of keys, and of values, in shared memory; none where keys are read into registers.
    #[must_use]
    pub const fn stages(&self) -> Option<usize> {
        match self {
            Self::Sm80(tile) => Some(tile.stages()),
            Self::Sm90(tile) => Some(tile.stages()),
            Self::Portable(_) => None,
        }
    }

    /// Returns true if the warps of a block divide its keys, and not its rows.
    #[must_use]
    pub const fn warps_split_keys(&self) -> bool {
        match self {
            Self::Sm80(tile) => tile.warps_split_keys(),
            Self::Sm90(_) => false,
            Self::Portable(_) => true,
        }
    }

    /// Blocks of threads that a multiprocessor holds at a time.
    #[must_use]
    pub const fn resident(&self) -> usize {
        match self {
            Self::Sm80(tile) => tile.resident(),
            Self::Sm90(tile) => tile.resident(),
            Self::Portable(tile) => tile.resident(),
        }
    }
}

impl From<Sm80Tile> for CudaTile {
    fn from(tile: Sm80Tile) -> Self {
        Self::Sm80(tile)
    }
}

impl From<Sm90Tile> for CudaTile {
    fn from(tile: Sm90Tile) -> Self {
        Self::Sm90(tile)
    }
}

impl From<PortableTile> for CudaTile {
    fn from(tile: PortableTile) -> Self {
        Self::Portable(tile)
    }
}
