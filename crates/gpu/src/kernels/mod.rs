//! Device code: kernels and the functions that they share.

pub mod attend;
pub mod backward;
pub mod cache;
pub mod copy;
pub mod decode;
pub mod encode;
pub mod formats;
pub mod kv;
pub mod mask_tiles;
pub mod merge;
pub mod nibbles;
pub mod octet;
pub mod pairs;
pub mod partial;
pub mod prefill;
pub mod products;
pub mod quantize;
pub mod query;
pub mod rotation;
pub mod rows;
pub mod scale;
pub mod score;
pub mod tile;
