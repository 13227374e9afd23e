//! Plans of the kernels for compute capability 8.0 and later, whose products are `mma.sync`.

mod kernel;
mod plan;
mod tile;

pub use kernel::Sm80Kernel;
pub(crate) use plan::{MaskTileTable, Sm80Plan};
pub use tile::Sm80Tile;
