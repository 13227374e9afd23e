//! Kernels for compute capability 9.0, whose products are `wgmma` and whose copies are TMA.

mod backward;
mod kernel;
mod tile;

pub(crate) use backward::{
    BackwardSequence, BackwardTileUnits, BackwardUnit, CLUSTER_KEYS, ScoreMod, Sm90Backward,
};
pub use tile::Sm90Tile;
pub(crate) use tile::WARPGROUP_ROWS;
