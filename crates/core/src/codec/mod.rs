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

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod convert;
mod format;
mod fp8;
mod kv_view;
mod levels;
mod lloyd;
mod machine;
mod mean;
pub mod mlx;
mod pages;
mod planes;
mod quantizer;
mod rotation;
mod rows;
#[cfg(target_arch = "x86_64")]
mod rows512;
mod versions;

pub use convert::{convert, from_f32, to_f32};
pub use format::Format;
pub use kv_view::KvView;
pub use mean::mean_row;
pub use pages::{CodePages, CodesView, NotStored, PagesError, Side};
pub(crate) use quantizer::ScaleRule;
pub use rotation::Rotation;
pub use versions::{decode_rotated, rotate, unrotate};

use crate::dtype::Dtype;
use crate::limits::MAX_HEAD_DIM;
use half::f16;
use machine::Machine;
use mlx::Mlx;
use quantizer::Quantizer;
use versions::{Place, Source};

/// How the row of one token and one head is stored. K and V of a cache have each their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
    /// The format of mlx-native with 4 bits, its nibbles: rotated, 132 bytes for 256 elements. It and the following are for rows of
    /// 256 or 512 elements.
    MlxTq4,
    /// The format of mlx-native with 5 bits in a byte: rotated, 260 bytes for 256 elements.
    MlxTq5,
    /// The format of mlx-native with 6 bits in a byte: rotated, 260 bytes for 256 elements.
    MlxTq6,
    /// The format of mlx-native with 8 bits: rotated, 260 bytes for 256 elements.
    MlxTq8,
    /// As [`Codec::MlxTq5`], not rotated: the values of mlx-native's hybrid caches, whose keys are [`Codec::F16`].
    MlxTq5Plain,
    /// As [`Codec::MlxTq6`], not rotated.
    MlxTq6Plain,
    /// As [`Codec::MlxTq8`], not rotated.
    MlxTq8Plain,
}

/// The largest Euclidean norm of a vector that is quantized: its scale is an f16 then.
pub const MOST_NORM: f32 = 8192.0;

/// What a scale is divided by.
pub const UNIT: f32 = 128.0;

/// What the scale of e4m3 numbers is divided by.
pub const FP8_UNIT: f32 = 256.0;

impl Codec {
    /// Every codec.
    pub const ALL: [Self; 17] = [
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
        Self::MlxTq8,
        Self::MlxTq6,
        Self::MlxTq5,
        Self::MlxTq4,
        Self::MlxTq8Plain,
        Self::MlxTq6Plain,
        Self::MlxTq5Plain,
    ];

    /// Whether rows of `dim` elements can be stored: 256 and 512 in the format of mlx-native, 1 to [`MAX_HEAD_DIM`] in others.
    #[must_use]
    pub const fn supports(self, dim: usize) -> bool {
        match self.mlx() {
            Some(_) => dim == 256 || dim == 512,
            None => dim >= 1 && dim <= MAX_HEAD_DIM,
        }
    }

    /// The dimensions of [`Codec::supports`], in words.
    pub(crate) const fn dims(self) -> &'static str {
        if self.mlx().is_some() { "256 or 512" } else { "1 to 512" }
    }

    /// Bytes of a row of `dim` elements, which the codec [supports](Codec::supports); saturating.
    #[must_use]
    pub const fn row_bytes(self, dim: usize) -> usize {
        match (self.dtype(), self.mlx()) {
            (Some(dtype), _) => dim.saturating_mul(dtype.bytes()),
            (_, Some((bits, _))) => mlx::code_bytes(dim, bits).saturating_add(mlx::norm_bytes(dim)),
            _ => Format::bytes(dim, self.code_bits()),
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

    /// Name as used in messages and on the command line: `f32`, `f16`, `bf16`, `fp8`, `int8`, `tq6` to `tq2`, `mlx-tq8`, `mlx-tq6`,
    /// `mlx-tq5`, `mlx-tq4`, and `mlx-tq8-plain`, `mlx-tq6-plain`, `mlx-tq5-plain`.
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
            Self::MlxTq4 => "mlx-tq4",
            Self::MlxTq5 => "mlx-tq5",
            Self::MlxTq6 => "mlx-tq6",
            Self::MlxTq8 => "mlx-tq8",
            Self::MlxTq5Plain => "mlx-tq5-plain",
            Self::MlxTq6Plain => "mlx-tq6-plain",
            Self::MlxTq8Plain => "mlx-tq8-plain",
        }
    }

    /// Bits of the code of an element.
    const fn code_bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::BF16 => 16,
            Self::Fp8 | Self::Int8 | Self::MlxTq8 | Self::MlxTq8Plain => 8,
            Self::Tq2 => 2,
            Self::Tq3 => 3,
            Self::Tq4 | Self::MlxTq4 => 4,
            Self::Tq5 | Self::MlxTq5 | Self::MlxTq5Plain => 5,
            Self::Tq6 | Self::MlxTq6 | Self::MlxTq6Plain => 6,
        }
    }

    /// Bits of a code in the format of mlx-native, and whether rows are rotated; `None` of other codecs.
    pub const fn mlx(self) -> Option<(usize, bool)> {
        match self {
            Self::MlxTq4 | Self::MlxTq5 | Self::MlxTq6 | Self::MlxTq8 => Some((self.code_bits(), true)),
            Self::MlxTq5Plain | Self::MlxTq6Plain | Self::MlxTq8Plain => Some((self.code_bits(), false)),
            _ => None,
        }
    }

    /// Whether codes stand for integers times a scale.
    pub const fn is_integer(self) -> bool {
        matches!(self, Self::Int8 | Self::Tq2 | Self::Tq3 | Self::Tq4 | Self::Tq5 | Self::Tq6)
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
pub struct Coder {
    dim: usize,
    format: Format,
    scheme: Scheme,
}

/// What a codec makes of a vector.
#[derive(Debug, Clone)]
enum Scheme {
    /// e4m3 numbers and a scale.
    Fp8,
    /// Rotated, integers times a scale.
    Integers(Quantizer),
    Mlx(Mlx),
}

impl Coder {
    /// `None` for codecs of plain elements. The codec supports the dimension.
    pub fn new(codec: Codec, dim: usize) -> Option<Self> {
        debug_assert!(codec.supports(dim), "{codec} of {dim}");
        let bits = codec.code_bits();
        let scheme = match (codec, codec.mlx()) {
            _ if codec.dtype().is_some() => return None,
            (_, Some((bits, rotated))) => Scheme::Mlx(Mlx::new(dim, bits, rotated)),
            (Codec::Fp8, _) => Scheme::Fp8,
            _ => Scheme::Integers(Quantizer::new(dim, bits)),
        };
        let format = match &scheme {
            Scheme::Mlx(_) => Format::opaque(dim, mlx::code_bytes(dim, bits), mlx::norm_bytes(dim)),
            _ => Format::new(dim, bits),
        };
        Some(Self { dim, format, scheme })
    }

    /// Where the bytes of a row lie in a page.
    #[must_use]
    pub const fn format(&self) -> &Format {
        &self.format
    }

    /// The rotation, of codecs that rotate.
    pub fn rotation(&self) -> Option<&Rotation> {
        match &self.scheme {
            Scheme::Fp8 => None,
            Scheme::Integers(quantizer) => Some(&quantizer.rotation),
            Scheme::Mlx(mlx) => mlx.rotation.as_ref(),
        }
    }

    /// Signed levels of codes, `[64]`; `None` where codes are bytes.
    pub fn levels(&self) -> Option<&'static [i8; 64]> {
        match &self.scheme {
            Scheme::Integers(quantizer) => quantizer.table(),
            _ => None,
        }
    }

    /// Whether products with codes are integers.
    pub const fn is_integer(&self) -> bool {
        matches!(self.scheme, Scheme::Integers(_))
    }

    /// Whether codes are e4m3 numbers.
    pub const fn is_number(&self) -> bool {
        matches!(self.scheme, Scheme::Fp8)
    }

    /// Stores a vector of finite numbers, whose norm is at most [`MOST_NORM`], as a row of a page. What `x` holds then is not
    /// specified.
    #[inline(always)]
    fn encode<M: Machine>(&self, x: &mut [f32], rule: ScaleRule, (page, tokens, row): Place<'_>) {
        let mut codes = [0u8; MAX_HEAD_DIM];
        let codes = &mut codes[..self.dim];
        let scale = match &self.scheme {
            Scheme::Fp8 => encode_fp8(x, codes),
            Scheme::Integers(quantizer) => quantizer.encode::<M>(x, rule, codes),
            Scheme::Mlx(mlx) => {
                let [codes, norms] = self.format.row(tokens, row);
                let (low, high) = page.split_at_mut(norms.start);
                return mlx.encode::<M>(x, &mut low[codes], &mut high[..norms.len()]);
            }
        };
        self.format.write(codes, scale, page, tokens, row);
    }

    /// Stored rows of a page, in the rotated domain where the codec rotates: values of codes times the scale. `x` is `[rows, stride]`.
    #[inline(always)]
    fn decode_rotated<M: Machine>(&self, (page, tokens, rows): Source<'_>, x: &mut [f32], stride: usize) {
        let mut memory = [0u8; MAX_HEAD_DIM];
        for (row, x) in rows.zip(x.chunks_mut(stride)) {
            let x = &mut x[..self.dim];
            match &self.scheme {
                Scheme::Mlx(mlx) => {
                    let [codes, norms] = self.format.row(tokens, row);
                    mlx.decode(&page[codes], &page[norms], x);
                }
                Scheme::Fp8 => {
                    let [codes, scale] = self.format.row(tokens, row);
                    fp8::to_f32s(&page[codes], [1.0 / FP8_UNIT, format::scale(&page[scale]).to_f32()], x);
                }
                Scheme::Integers(quantizer) => {
                    // Products of 8 and 11 bits: exact.
                    let Some(levels) = quantizer.table() else {
                        let [codes, scale] = self.format.row(tokens, row);
                        widen(&page[codes], format::scale(&page[scale]).to_f32() / UNIT, x);
                        continue;
                    };
                    let codes = &mut memory[..self.dim];
                    let scale = self.format.read(page, tokens, row, codes);
                    M::look_up(levels, codes);
                    widen(codes, scale.to_f32() / UNIT, x);
                }
            }
        }
    }

    /// A stored row of a page.
    pub(crate) fn decode(&self, page: &[u8], tokens: usize, row: usize, x: &mut [f32]) {
        versions::decode_rotated(self, (page, tokens, row..row + 1), x, self.dim);
        if let Some(rotation) = self.rotation() {
            versions::unrotate(rotation, x);
        }
    }
}

/// Of a codec with levels: that nearest to each number of halves of levels, and 256 times its index.
pub fn nearest_levels(codec: Codec) -> Option<[u32; 256]> {
    let bits = codec.is_integer().then(|| codec.code_bits()).filter(|bits| *bits < 8)?;
    let levels = levels::Levels::of(bits);
    Some(std::array::from_fn(|n| u32::from(levels.nearest_of[n]) | u32::from(levels.index_of[n]) << 8))
}

/// The e4m3 code of a finite number.
pub fn e4m3(x: f32) -> u8 {
    fp8::from_f32(x)
}

/// e4m3 codes and scale of a vector.
#[inline(always)]
fn encode_fp8(x: &[f32], codes: &mut [u8]) -> f16 {
    let most = greatest(x);
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

/// Signed bytes times a factor.
#[inline(always)]
fn widen(codes: &[u8], factor: f32, x: &mut [f32]) {
    for (x, code) in x.iter_mut().zip(codes) {
        *x = f32::from(code.cast_signed()) * factor;
    }
}

/// The greatest magnitude; what is not finite is greater than all others. Their bits are ordered as they are, and vectors take the maximum of integers.
#[inline(always)]
pub fn greatest(x: &[f32]) -> f32 {
    let mut most = 0u32;
    for x in x {
        most = most.max(x.to_bits() & i32::MAX as u32);
    }
    f32::from_bits(most)
}

/// The integer nearest to a number below 2^22 in magnitude, ties to even: the sum with 3 * 2^22 has no place for fractions.
#[inline(always)]
pub fn round(x: f32) -> i32 {
    const ROUNDER: f32 = 12_582_912.0;
    (x + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits()) as i32
}

/// The sum of squares, in an order that vectors have too.
#[inline(always)]
fn energy(x: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    for x in x.chunks(16) {
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum += x * x;
        }
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests;
