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
//! `R` is orthonormal: random signs, then a Hadamard transform (module `rotation`), which makes the coordinates of any vector nearly
//! normal; levels are the Lloyd-Max codebooks of N(0, 1) in whole numbers (modules `lloyd`, `levels`). The encoder of `tq` tries eight
//! scales. Scales of keys make `<x, x^> = <x, x>` (so that scores have no bias), scales of values the mean square error least; fp8's
//! make the greatest number 448. Attention needs no `x^`: `q . R^T y = (R q) . y`, and sums of rotated values are rotated back once.
//!
//! Codes are stored in bit planes (module `planes`), rows of a page plane by plane (module `format`).
//!
//! Sources: rotation and codebook as TurboQuant (Zandieh et al. 2025), EDEN (Vargaftik et al. 2022), QuaRot (Ashkboos et al. 2024);
//! the rule of unbiased scales is EDEN's.

mod compare;
mod convert;
mod format;
mod fp8;
mod levels;
mod lloyd;
mod pages;
mod planes;
mod quality;
mod quantizer;
mod rotation;
mod versions;

pub use compare::{Comparison, Deviation, HeadAttention, KeyCodec, KeyErrors, RefusedRow, compare, has_rows};
pub(crate) use convert::{convert, from_f32, to_f32};
pub(crate) use format::Format;
pub use pages::{CodePages, CodesView, NotStored, Side};
pub use quality::{Head, Quality, quality};
pub(crate) use quantizer::ScaleRule;
pub(crate) use rotation::Rotation;
pub(crate) use versions::{decode_rotated, encode};

use crate::Dtype;
use half::f16;
use quantizer::Quantizer;

/// How the row of one token and one head is stored. K and V of a cache have each their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Codec {
    /// Elements as f32.
    F32,
    /// Elements as f16, rounded to nearest even; what is beyond its range becomes infinite.
    F16,
    /// Elements as bf16, rounded to nearest even.
    BF16,
    /// e4m3 numbers and a scale: `dim + 2` bytes.
    Fp8,
    /// Rotated, integers of 8 bits and a scale: `dim + 2` bytes.
    Int8,
    /// Rotated, codebook of 2 bits and a scale: 34 bytes for 128 elements.
    Tq2,
    /// Rotated, codebook of 3 bits and a scale: 50 bytes for 128 elements.
    Tq3,
    /// Rotated, codebook of 4 bits and a scale: 66 bytes for 128 elements.
    Tq4,
    /// Rotated, codebook of 5 bits and a scale: 82 bytes for 128 elements.
    Tq5,
    /// Rotated, codebook of 6 bits and a scale: 98 bytes for 128 elements.
    Tq6,
}

/// The largest Euclidean norm of a vector that is quantized: its scale is an f16 then.
pub const MOST_NORM: f32 = 8192.0;

/// What a scale is divided by.
pub(crate) const UNIT: f32 = 128.0;

/// What the scale of e4m3 numbers is divided by.
const FP8_UNIT: f32 = 256.0;

impl Codec {
    /// Every codec.
    pub const ALL: [Self; 10] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Fp8,
        Self::Int8,
        Self::Tq6,
        Self::Tq5,
        Self::Tq4,
        Self::Tq3,
        Self::Tq2,
    ];

    /// Bytes of a row of `dim` elements; saturating.
    #[must_use]
    pub const fn row_bytes(self, dim: usize) -> usize {
        match self.dtype() {
            Some(dtype) => dim.saturating_mul(dtype.bytes()),
            None => Format::bytes(dim, self.code_bits()),
        }
    }

    /// The element type of a codec whose rows are plain elements.
    #[must_use]
    pub const fn dtype(self) -> Option<Dtype> {
        match self {
            Self::F32 => Some(Dtype::F32),
            Self::F16 => Some(Dtype::F16),
            Self::BF16 => Some(Dtype::BF16),
            _ => None,
        }
    }

    /// The codec that stores elements of a dtype as they are.
    #[must_use]
    pub const fn of(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::BF16 => Self::BF16,
        }
    }

    /// Name as used in messages and on the command line: `f32`, `f16`, `bf16`, `fp8`, `int8`, `tq6` to `tq2`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => Dtype::F32.name(),
            Self::F16 => Dtype::F16.name(),
            Self::BF16 => Dtype::BF16.name(),
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
            Self::Tq2 => "tq2",
            Self::Tq3 => "tq3",
            Self::Tq4 => "tq4",
            Self::Tq5 => "tq5",
            Self::Tq6 => "tq6",
        }
    }

    /// Bits of the code of an element.
    const fn code_bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::BF16 => 16,
            Self::Fp8 | Self::Int8 => 8,
            Self::Tq2 => 2,
            Self::Tq3 => 3,
            Self::Tq4 => 4,
            Self::Tq5 => 5,
            Self::Tq6 => 6,
        }
    }
}

impl std::fmt::Display for Codec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Reads a name as [`Codec::name`] gives it.
impl std::str::FromStr for Codec {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|codec| codec.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            format!("{name} is no codec, expected one of {known}")
        })
    }
}

/// The codec that stores elements of a dtype as they are.
impl From<Dtype> for Codec {
    fn from(dtype: Dtype) -> Self {
        Self::of(dtype)
    }
}

/// A quantizing codec for rows of one dimension.
#[derive(Debug, Clone)]
pub(crate) struct Coder {
    dim: usize,
    format: Format,
    /// None for e4m3.
    quantizer: Option<Quantizer>,
    /// What each byte or index stands for, times the scale: with [`Coder::unit`].
    values: Box<[f32; 256]>,
}

impl Coder {
    /// `None` for codecs of plain elements.
    pub(crate) fn new(codec: Codec, dim: usize) -> Option<Self> {
        if codec.dtype().is_some() {
            return None;
        }
        let bits = codec.code_bits();
        let quantizer = (codec != Codec::Fp8).then(|| Quantizer::new(dim, bits));
        let mut values = Box::new([0.0f32; 256]);
        for (code, value) in values.iter_mut().enumerate() {
            *value = match &quantizer {
                None => fp8::to_f32(code as u8) / FP8_UNIT,
                Some(_) if bits < 8 && code >= 64 => 0.0,
                Some(quantizer) => f32::from(quantizer.level(code as u8)) / UNIT,
            };
        }
        Some(Self { dim, format: Format::new(dim, bits), quantizer, values })
    }

    pub(crate) const fn dim(&self) -> usize {
        self.dim
    }

    pub(crate) const fn format(&self) -> &Format {
        &self.format
    }

    /// The rotation, of codecs that rotate.
    pub(crate) fn rotation(&self) -> Option<&Rotation> {
        self.quantizer.as_ref().map(|quantizer| &quantizer.rotation)
    }

    /// Signed levels of codes, `[64]`; `None` where codes are bytes.
    pub(crate) fn levels(&self) -> Option<&'static [i8; 64]> {
        self.quantizer.as_ref().and_then(Quantizer::table)
    }

    /// Whether products with codes are integers.
    pub(crate) const fn is_integer(&self) -> bool {
        self.quantizer.is_some()
    }

    /// Codes and scale of a vector of finite numbers, whose norm is at most [`MOST_NORM`]. What `x` holds then is not specified.
    #[inline(always)]
    fn encode(&self, x: &mut [f32], rule: ScaleRule, codes: &mut [u8]) -> f16 {
        if let Some(quantizer) = &self.quantizer {
            return quantizer.encode(x, rule, codes);
        }
        let most = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        // The stored scale, so that its own rounding is not an error of the numbers.
        let scale = f16::from_f32(most * (FP8_UNIT / fp8::MOST));
        if scale == f16::ZERO {
            codes.fill(0);
            return scale;
        }
        let inverse = FP8_UNIT / scale.to_f32();
        for (code, x) in codes.iter_mut().zip(x) {
            *code = fp8::from_f32(*x * inverse);
        }
        scale
    }

    /// A stored row of a page, in the rotated domain where the codec rotates: codes times the scale.
    #[inline(always)]
    fn decode_rotated(&self, page: &[u8], tokens: usize, row: usize, x: &mut [f32]) {
        let mut codes = [0u8; crate::problem::MAX_HEAD_DIM];
        let codes = &mut codes[..self.dim];
        let scale = self.format.read(page, tokens, row, codes).to_f32();
        for (x, code) in x.iter_mut().zip(&*codes) {
            *x = self.values[usize::from(*code)] * scale;
        }
    }

    /// A stored row of a page.
    pub(crate) fn decode(&self, page: &[u8], tokens: usize, row: usize, x: &mut [f32]) {
        self.decode_rotated(page, tokens, row, x);
        if let Some(rotation) = self.rotation() {
            rotation.undo(x);
        }
    }
}

#[cfg(test)]
mod tests;
