//! Codecs: how the row of a token is stored in a cache.
//!
//! A quantized row of `D` elements is `D` codes and one f16 scale `s`:
//!
//! ```text
//! int8         y = R x,   code = integer -127..127,          R x ~ s / 128 * code
//! tq2 to tq6   y = R x,   code = index into a codebook,      R x ~ s / 128 * level[code]
//! fp8          no rotation, code = e4m3 number,                x ~ s / 256 * number
//! ```
//!
//! `rot16` stores `R x` itself in f16, without a scale: rows beside codes that are to lose nothing.
//!
//! The `mlx-tq` codecs are the format of another library, byte for byte (module `mlx`): rows of 256 or 512 elements,
//! f32 norms, its own tables.
//!
//! `R` is orthonormal: random signs, then a Hadamard transform (module `rotation`), which makes the coordinates of
//! any vector nearly normal. Levels are the Lloyd-Max codebooks of N(0, 1), rounded to integers (module `tq`). The
//! `tq` encoder tries eight scales. Scales of keys make `<x, x^> = <x, x>`, so that scores are unbiased; scales of
//! values minimise the mean square error; scales of fp8 map the largest magnitude to 448. Attention does not need
//! `x^`: `q . R^T y = (R q) . y`, and sums of rotated values are rotated back once.
//!
//! Codes are stored as bit planes (module `planes`), and a page stores its rows plane by plane (module `row_layout`).
//!
//! Sources: rotation and codebook as in TurboQuant (Zandieh et al. 2025), EDEN (Vargaftik et al. 2022) and QuaRot
//! (Ashkboos et al. 2024); unbiased scales are EDEN's.

mod coder;
pub mod convert;
mod dispatch;
mod encode;
mod error;
mod fp8;
pub(crate) mod key_transform;
mod kind;
mod kv_view;
mod mean;
pub mod mlx;
mod mlx_pages;
mod numeric;
mod ops;
mod pages;
mod planes;
mod quantizer;
mod rotation;
mod row_layout;
#[cfg(test)]
mod tests;
mod tq;
mod walsh;

pub use coder::{Coder, e4m3, nearest_levels};
pub use dispatch::{decode_rotated, rotate, unrotate};
pub use error::{EncodeError, MAX_NORM, PagesError};
pub use key_transform::{KEY_FACTOR_RANGE, KeyTransform, key_factors};
pub use kind::{Codec, RowKind};
pub use kv_view::KvView;
pub use mean::key_mean;
pub use numeric::{greatest, round};
pub use pages::{CodePages, CodesView, Side};
pub use quantizer::level_factor;
pub use rotation::Rotation;
pub use row_layout::{FP8_SCALE_UNIT, RowLayout, SCALE_UNIT};
