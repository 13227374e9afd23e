//! Device code: kernels and the functions that they share.

pub mod copy;
pub mod decode;
pub mod encode;
pub mod formats;
pub mod mask_tiles;
pub mod merge;
pub mod rotation;
pub mod rows;
