//! Plans of the CUDA backend.
//!
//! Query rows of one key/value head are (position, head of the group) pairs ordered by position, cut into tiles. A work tile is
//! a tile and a range of the keys that its rows see; a block of threads computes work tiles one after another. Where there are
//! enough tiles to fill the device, each is one work tile, longest first among heads whose keys fit its second-level cache.
//! Otherwise the keys of all tiles, laid end to end, are cut into equal shares, one for each block of threads that the device
//! holds at a time; the block that ends a tile last adds up its parts, in the order of the keys. The same plan gives the same
//! bits.
//!
//! Sequences with so few rows that they fit one fragment of the matrix unit, and the others, are launches of their own.
//!
//! Devices that those kernels are too new for run the portable ones, whose plan is of another kind: see `portable`.

mod cuda_plan;
mod facts;
mod launch;
pub mod machines;
mod portable;
mod schedule;
mod tile;
mod work_tile;

pub use cuda_plan::CudaPlan;
pub(crate) use cuda_plan::{MASK_TILE_ROWS, MaskTileTable};
pub use facts::{CudaFacts, MIN_CAPABILITY, NATIVE_CAPABILITY};
pub(crate) use launch::{Launch, MAX_GRID};
pub(crate) use portable::Portable;
pub use portable::{PortableKernel, PortableTile};
pub(crate) use tile::STREAM_BYTES;
pub use tile::{CudaKernel, CudaTile};
pub(crate) use work_tile::{AGAIN, GROUP, WorkTile};
