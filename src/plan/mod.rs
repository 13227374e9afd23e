//! How a problem is computed: pure functions of the problem and of facts about a device.
//!
//! Nothing here touches memory or a device, so plans can be made, printed and tested for machines that are not at hand;
//! [`devices`] holds the facts of some. What is supported, how much workspace it needs, what is printed and what runs all
//! derive from the same plan.

mod cpu;
mod cuda;
pub mod devices;

pub(crate) use cpu::{
    BLOCK_K, MaskClasses, Reduction, Rows, STREAM_ROWS, Target, Task, sequence_of, spans, visible_union,
};
pub use cpu::{CpuFacts, CpuPlan, Isa, PlannedPrefix};
#[cfg(feature = "cuda")]
pub(crate) use cuda::{AGAIN, CLASS_ROWS, ClassTable, GROUP, Item, Launch, MAX_GRID, STREAM_BYTES};
pub use cuda::{CudaFacts, CudaKernel, CudaPlan, CudaTile, LEAST_CAPABILITY};

/// Choices that a caller may take from the planner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanOptions {
    /// Pieces into which the keys of every sequence are divided for parallel work; `None` lets the planner choose. The
    /// result does not depend on it, on the CPU bit for bit. With more than one, the workspace holds a partial result
    /// (`value_dim + 2` f32) for each query row and block of keys that its task sees, those of the first piece counted once.
    pub splits: Option<usize>,
    /// Whether tiles that no row sees are skipped. Off, every tile is computed and masked: the same bits, for tests and
    /// for measuring what skipping saves.
    pub skip_tiles: bool,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self { splits: None, skip_tiles: true }
    }
}

/// Why a valid problem has no plan on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unsupported {
    /// More splits than blocks of keys, or none.
    Splits {
        /// Splits asked for.
        got: usize,
        /// The most that the longest sequence can be divided into.
        max: usize,
    },
    /// More units of work than a plan lists.
    Tasks {
        /// Units that the problem would be cut into.
        got: usize,
        /// The most that a plan lists.
        max: usize,
    },
    /// The workspace, or the scratch memory of a device, is not addressable.
    Workspace {
        /// Kernel of the plan.
        kernel: String,
    },
    /// The device is older than the kernels.
    Capability {
        /// Its compute capability.
        got: (u32, u32),
        /// The least for which there are kernels.
        least: (u32, u32),
    },
    /// The backend has no kernels for keys or values that are stored so.
    Codec {
        /// `k` or `v`.
        tensor: &'static str,
        /// How they are stored.
        codec: crate::Codec,
        /// The codec that there are kernels for: elements of the problem's dtype.
        expected: crate::Codec,
    },
    /// A tile that no kernel has.
    Tile {
        /// What is wrong with it.
        why: &'static str,
    },
    /// Not even the smallest tile fits the shared memory of the device.
    SharedMemory {
        /// Bytes of the smallest tile.
        needed: usize,
        /// Bytes that a block of threads may use.
        available: usize,
    },
    /// The machine lacks an instruction set that was asked for.
    Isa {
        /// The instruction set asked for.
        asked: Isa,
        /// The best that the machine has.
        best: Isa,
    },
}

impl std::fmt::Display for Unsupported {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Splits { got, max } => write!(f, "{got} splits asked for, expected 1 to {max}"),
            Self::Tasks { got, max } => write!(f, "{got} units of work, expected at most {max}"),
            Self::Workspace { kernel } => write!(f, "{kernel}: the workspace is not addressable"),
            Self::Capability { got, least } => {
                write!(f, "compute capability {}.{}, expected at least {}.{}", got.0, got.1, least.0, least.1)
            }
            Self::Codec { tensor, codec, expected } => write!(f, "{tensor} is {codec}, expected {expected}"),
            Self::Tile { why } => write!(f, "no kernel has this tile: {why}"),
            Self::SharedMemory { needed, available } => write!(
                f,
                "the smallest tile takes {needed} bytes of shared memory, a block of threads has {available}"
            ),
            Self::Isa { asked, best } => {
                write!(f, "{asked} asked for, the best that this machine runs is {best}")
            }
        }
    }
}

impl std::error::Error for Unsupported {}
