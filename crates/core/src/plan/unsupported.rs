//! Reasons of planners to refuse a problem.

use super::options::KernelChoice;
use crate::codec::Codec;
use crate::isa::Isa;

/// Why a device has no plan for a valid problem.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unsupported {
    /// No splits, or more splits than blocks of keys.
    Splits {
        /// Splits asked for.
        got: usize,
        /// The blocks of keys of the longest sequence.
        max: usize,
    },
    /// More tasks than a plan can list.
    Tasks {
        /// Tasks that the problem would be cut into.
        got: usize,
        /// The maximum.
        max: usize,
    },
    /// The workspace, or the scratch memory of a device, is too large to be addressed.
    Workspace {
        /// Name of the kernel.
        kernel: String,
    },
    /// The device is older than the kernels support.
    Capability {
        /// Its compute capability.
        got: (u32, u32),
        /// The lowest supported.
        min: (u32, u32),
    },
    /// No plan can be made for a device of such facts.
    Device {
        /// The reason.
        why: &'static str,
    },
    /// The backend has no kernels for the codec of keys or values.
    Codec {
        /// `k` or `v`.
        tensor: &'static str,
        /// Their codec.
        codec: Codec,
        /// The supported codec: elements of the problem's dtype.
        expected: Codec,
    },
    /// The kernels of the backend need values in rows of their own.
    KeyColumns {
        /// Codec of the keys, whose first columns are the values.
        codec: Codec,
    },
    /// No kernel has this tile.
    Tile {
        /// The reason.
        why: &'static str,
    },
    /// Not even the smallest tile fits the shared memory of the device.
    SharedMemory {
        /// Bytes of the smallest tile.
        needed: usize,
        /// Bytes that a block of threads may use.
        available: usize,
    },
    /// A threadgroup of a kernel has more threads than the device, or the kernel's pipeline, allows.
    Threads {
        /// Name of the kernel's instance.
        kernel: String,
        /// Threads of its threadgroups.
        needed: usize,
        /// Threads that a threadgroup may have.
        available: usize,
    },
    /// A query or key is further from the first key than the kernels can count.
    Position {
        /// Its position, or the number of positions.
        got: i64,
        /// The maximum.
        max: i64,
    },
    /// A count exceeds the range of the kernels' counters.
    Size {
        /// The counted quantity, such as rows of a write.
        what: &'static str,
        /// The count.
        got: usize,
        /// The maximum.
        max: usize,
    },
    /// No instance of a kernel takes the problem.
    Instance {
        /// The requirement of the kernel that the problem does not meet.
        why: String,
    },
    /// The backend has no kernels of the kind asked for.
    Kernels {
        /// The kind asked for.
        asked: KernelChoice,
    },
    /// The kernels always skip tiles that no row sees, but the options ask them not to.
    SkipTiles,
    /// The backend computes no gradients of the problem, or not with these options.
    Backward {
        /// The reason.
        why: &'static str,
    },
    /// The machine lacks the instruction set asked for.
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
            Self::Tasks { got, max } => write!(f, "{got} tasks, expected at most {max}"),
            Self::Workspace { kernel } => write!(f, "{kernel}: the workspace is not addressable"),
            Self::Capability { got, min } => {
                write!(f, "compute capability {}.{}, expected at least {}.{}", got.0, got.1, min.0, min.1)
            }
            Self::Device { why } => write!(f, "no plan for this device: {why}"),
            Self::Codec { tensor, codec, expected } => write!(f, "{tensor} is {codec}, expected {expected}"),
            Self::KeyColumns { codec } => {
                write!(f, "the backend reads no values that are columns of {codec} keys")
            }
            Self::Tile { why } => write!(f, "no kernel has this tile: {why}"),
            Self::SharedMemory { needed, available } => write!(
                f,
                "the smallest tile takes {needed} bytes of shared memory, a block of threads has {available}"
            ),
            Self::Threads { kernel, needed, available } => {
                write!(f, "{kernel}: a threadgroup takes {needed} threads, the device allows {available}")
            }
            Self::Position { got, max } => {
                write!(f, "a query or key is at position {got}, expected at most {max} from the first key")
            }
            Self::Size { what, got, max } => write!(f, "{got} {what}, expected at most {max}"),
            Self::Instance { why } => f.write_str(why),
            Self::Kernels { asked } => write!(f, "{asked} kernels asked for, the backend has only one kind"),
            Self::SkipTiles => f.write_str("portable kernels always skip tiles that no row sees"),
            Self::Backward { why } => write!(f, "no backward pass: {why}"),
            Self::Isa { asked, best } => {
                write!(f, "{asked} asked for, the best of this machine is {best}")
            }
        }
    }
}

impl std::error::Error for Unsupported {}
