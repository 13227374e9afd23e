//! Plans of the CUDA backend.
//!
//! Query rows of one key/value head are (position, head of the GQA group) pairs ordered by position, cut into tiles. A work tile
//! is a tile and a range of the keys that its rows see; a block of threads computes work tiles one after another. Where there are
//! enough tiles to fill the device, each is one work tile, longest first among heads whose keys fit its second-level cache: on
//! sm80 each block has a list, on sm90 each has its first work tile, and takes the others from a queue of all blocks. Where
//! blocks would wait long for the queue's last round, a dense problem's last tiles are cut along their keys. With fewer tiles,
//! the keys of all tiles, laid end to end, are cut into ranges of equal time, one for each block of threads that the device holds
//! at a time.
//!
//! The splits of a tile are merged in the order of their keys: on sm80 by the warps that store the last one, on sm90 by the
//! consumer that stores the last one together with those that have no further work tile and wait for it. Equal plans give equal
//! bits.
//!
//! `schedule`, `launch` and `work_tile` hold this for native kernels of any architecture.
//!
//! `native` has the launches of a problem and their scratch memory. Sequences whose rows fit one fragment of the matrix unit, and the
//! others, are launches of their own, each of a kernel of one architecture. `sm80` has the kernels for compute capability 8.0 and later,
//! and `sm90` those for 9.0, which take over with more rows than one warpgroup has; each has its tiles beside it.
//!
//! Older devices run the portable kernels, whose plan is of another kind: see `portable`.

mod backward;
mod cuda_plan;
mod facts;
mod kernel;
mod launch;
pub mod machines;
mod native;
mod native_kernel;
mod planner;
mod portable;
mod schedule;
mod sm80;
mod sm90;
mod variant;
mod work_tile;

pub use backward::CudaBackwardPlan;
pub(crate) use backward::{
    BackwardSequence, BackwardTileUnits, BackwardUnit, NativeBackward, ScoreMod, UnitShape, column_warps,
};
pub(crate) use cuda_plan::PlannedKernels;
pub use cuda_plan::{CudaPlan, CudaTile};
pub use facts::{CudaFacts, MIN_CAPABILITY, NATIVE_CAPABILITY};
pub(crate) use facts::{WGMMA_CAPABILITY, WGMMA_COMPILER};
pub use kernel::CudaKernel;
pub(crate) use launch::MASK_TILE_ROWS;
pub(crate) use native::{MaskTileTable, NativePlan};
pub(crate) use native_kernel::NativeKernel;
pub use native_kernel::NativeTile;
pub use portable::PortableTile;
pub use sm80::Sm80Tile;
pub use sm90::Sm90Tile;
pub(crate) use sm90::WARPGROUP_ROWS;
pub(crate) use variant::NativeVariant;
pub(crate) use work_tile::{MAX_RECOMPUTED, MERGE_GROUP, WorkTile};
