#![doc = include_str!("../README.md")]

mod compat;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cuda_cache;
mod dispatch;
#[cfg(any(feature = "cuda", feature = "metal"))]
mod gpu;
#[cfg(any(feature = "cuda", feature = "metal"))]
mod gpu_gradient;
#[cfg(any(feature = "cuda", feature = "metal"))]
mod gpu_operator;
mod gradient;
mod kv_cache;
#[cfg(feature = "metal")]
mod metal;
mod options;
mod storage;

pub use compat::{
    flash_attn, flash_attn_alibi, flash_attn_alibi_windowed, flash_attn_alibi_windowed_softcap,
    flash_attn_varlen, flash_attn_varlen_alibi, flash_attn_varlen_alibi_windowed,
    flash_attn_varlen_alibi_windowed_softcap, flash_attn_varlen_paged_windowed, flash_attn_varlen_windowed,
    flash_attn_windowed, sdpa,
};
pub use dispatch::attention;
pub use flashtile;
#[cfg(all(feature = "metal", metal_standin))]
#[doc(hidden)]
pub use gpu_gradient::gradients_of;
pub use kv_cache::{KvCache, Step};
pub use options::{Mask, Options};
pub use storage::TensorLayout;

// Runs the examples of a page that the package does not have.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/from-candle.md")]
mod from_candle {}
