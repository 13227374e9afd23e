//! What all planners share: the options of a caller and the reasons to refuse.
//!
//! A plan is a pure function of a problem and of facts about a device. It touches neither memory nor the device, so plans can be
//! made, printed and tested for machines that are not at hand.

use crate::codec::Codec;
use crate::isa::Isa;

/// Which kernels a device of several kinds of them runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KernelChoice {
    /// Those written for the device, where there are any; otherwise the portable ones.
    #[default]
    Auto,
    /// Those written for the device.
    Native,
    /// Those of the kernel language, which every GPU runs.
    Portable,
}

impl KernelChoice {
    /// `auto`, `native` or `portable`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Native => "native",
            Self::Portable => "portable",
        }
    }
}

impl std::fmt::Display for KernelChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

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
    /// Which kernels a CUDA device runs.
    pub kernels: KernelChoice,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self { splits: None, skip_tiles: true, kernels: KernelChoice::Auto }
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
        codec: Codec,
        /// The codec that there are kernels for: elements of the problem's dtype.
        expected: Codec,
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
    /// A head dimension that the kernels are not made for.
    HeadDim {
        /// `head_dim` or `value_dim`.
        name: &'static str,
        /// Its size.
        got: usize,
        /// What it is to be a multiple of.
        step: usize,
        /// The most.
        max: usize,
    },
    /// A query or key further from the first key than the kernels count.
    Position {
        /// Its position, or how many there are.
        got: i64,
        /// The furthest.
        max: i64,
    },
    /// More of something than the kernels count.
    Size {
        /// What there is too much of.
        what: &'static str,
        /// How many.
        got: usize,
        /// The most.
        max: usize,
    },
    /// Kernels that the backend has not were asked for.
    Kernels {
        /// What was asked for.
        asked: KernelChoice,
    },
    /// The kernels skip what no row sees, and were asked not to.
    SkipTiles,
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
            Self::HeadDim { name, got, step, max } => {
                write!(f, "{name} is {got}, expected a multiple of {step} up to {max}")
            }
            Self::Position { got, max } => {
                write!(f, "a query or key is at position {got}, expected at most {max} from the first key")
            }
            Self::Size { what, got, max } => write!(f, "{got} {what}, expected at most {max}"),
            Self::Kernels { asked } => write!(f, "{asked} kernels asked for, the backend has one kind alone"),
            Self::SkipTiles => {
                f.write_str("portable kernels skip what no row sees, which cannot be turned off")
            }
            Self::Isa { asked, best } => {
                write!(f, "{asked} asked for, the best that this machine runs is {best}")
            }
        }
    }
}

impl std::error::Error for Unsupported {}
