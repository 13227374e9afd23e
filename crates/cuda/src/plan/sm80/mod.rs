//! Kernels for compute capability 8.0 and later, whose products are `mma.sync`.

mod kernel;
mod tile;

pub use tile::Sm80Tile;
