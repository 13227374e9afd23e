//! Codecs: what the bytes of a token's row in a cache are.
//!
//! A quantized row of `D` numbers is `D` codes and one scale `s` (f16):
//!
//! ```text
//! int8         y = R x,   code = integer -127..127,          R x ~ s / 128 * code
//! tq2 to tq6   y = R x,   code = index into a codebook,      R x ~ s / 128 * level[code]
//! fp8          no rotation, code = e4m3 number,                x ~ s / 256 * number
//! ```
//!
//! The codecs `mlx-tq` are the format of another library, byte for byte (module `mlx`): rows of 256 or 512 elements, f32 norms,
//! tables of its own.
//!
//! `R` is orthonormal: random signs, then a Hadamard transform (module `rotation`), which makes the coordinates of any vector nearly
//! normal; levels are the Lloyd-Max codebooks of N(0, 1) in whole numbers (modules `lloyd`, `levels`). The encoder of `tq` tries eight
//! scales. Scales of keys make `<x, x^> = <x, x>` (so that scores have no bias), scales of values the mean square error least; fp8's
//! make the greatest number 448. Attention needs no `x^`: `q . R^T y = (R q) . y`, and sums of rotated values are rotated back once.
//!
//! Codes are stored in bit planes (module `planes`), rows of a page plane by plane (module `format`).
//!
//! Sources: rotation and codebook as TurboQuant (Zandieh et al. 2025), EDEN (Vargaftik et al. 2022), QuaRot (Ashkboos et al. 2024);
//! the rule of unbiased scales is EDEN's.

mod coder;
pub mod convert;
mod dispatch;
mod encode;
mod error;
mod fp8;
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
pub use kind::{Codec, RowKind};
pub use kv_view::KvView;
pub use mean::mean_row;
pub use numeric::{greatest, round};
pub use pages::{CodePages, CodesView, Side};
pub use rotation::Rotation;
pub use row_layout::{FP8_SCALE_UNIT, RowLayout, SCALE_UNIT};
