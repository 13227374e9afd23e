#![doc = include_str!("../README.md")]

mod attention;
mod cache;
mod status;
mod tensors;

pub use attention::{
    FlashtileOptions, FlashtileQOffset, flashtile_attention, flashtile_explain, flashtile_text_free,
};
pub use cache::{
    FlashtileCache, FlashtileCacheDesc, FlashtileCacheMemory, FlashtileCodec, FlashtileLayout,
    FlashtileNewTokens, FlashtileSequence, flashtile_cache_create, flashtile_cache_forget,
    flashtile_cache_fork, flashtile_cache_free, flashtile_cache_length, flashtile_cache_memory,
    flashtile_cache_new, flashtile_cache_remove, flashtile_cache_set_key_factors,
    flashtile_cache_set_key_mean, flashtile_cache_truncate, flashtile_step_attend, flashtile_step_begin,
    flashtile_step_cancel, flashtile_step_finish,
};
pub use status::{FlashtileStatus, flashtile_last_error, flashtile_version};
pub use tensors::{
    FlashtileDtype, FlashtileFloats, FlashtileFloatsMut, FlashtileMask, FlashtileMaskKind, FlashtileSizes,
    FlashtileTensor, FlashtileTensorMut, FlashtileTensors,
};
