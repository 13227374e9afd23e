//! Kernels for compute capability 9.0, whose products are `wgmma` and whose copies are TMA.

mod kernel;
mod tile;

pub use tile::Sm90Tile;
pub(crate) use tile::WARPGROUP_ROWS;
