//! One quantizing codec for one dimension: vectors to rows of a page, and back.

use super::convert::narrow;
use super::fp8;
use super::kind::{Codec, RowKind};
use super::mlx::{self, Mlx};
use super::numeric::greatest;
use super::ops::Ops;
use super::quantizer::{Quantizer, ScaleRule};
use super::rotation::{Rotate, Rotation};
use super::row_layout::{self, FP8_SCALE_UNIT, RowLayout, SCALE_UNIT};
use super::tq::codebook::Codebook;
use crate::dtype::Dtype;
use crate::isa::FloatEnv;
use crate::limits::MAX_HEAD_DIM;
use half::f16;
use std::ops::Range;

/// A row to write: the page of one head, its number of tokens, and the row.
pub(super) type Destination<'a> = (&'a mut [u8], usize, usize);
/// Rows to read: the page of one head, its number of tokens, and the rows.
pub(super) type Source<'a> = (&'a [u8], usize, Range<usize>);

/// The large steps of a row: compiled once per instruction set, and called rather than inlined. Instruction sets with
/// the same code share them.
pub(super) trait RowSteps: Ops + Rotate {
    /// [`Mlx::encode`].
    fn encode_mlx(mlx: &Mlx, x: &mut [f32], codes: &mut [u8], norms: &mut [u8]);

    /// [`encode_fp8`].
    fn encode_fp8(x: &[f32], codes: &mut [u8]) -> f16;

    /// [`RowLayout::write`].
    fn write(format: &RowLayout, codes: &[u8], scale: f16, to: Destination<'_>);

    /// [`RowLayout::read`].
    fn read(format: &RowLayout, page: &[u8], tokens: usize, row: usize, codes: &mut [u8]) -> f16;
}

/// A quantizing codec for rows of one dimension.
#[derive(Debug, Clone)]
pub struct Coder {
    pub(super) dim: usize,
    format: RowLayout,
    pub(super) scheme: Scheme,
}

/// The stored form of a vector.
#[derive(Debug, Clone)]
pub(super) enum Scheme {
    /// e4m3 values and a scale.
    Fp8,
    /// A rotated vector in f16.
    RotatedHalves(Rotation),
    /// Integers of a rotated vector and a scale.
    Integers(Quantizer),
    Mlx(Mlx),
}

impl Coder {
    /// The coder of a codec for rows of `dim` elements, which the codec must support; `None` for codecs of plain elements.
    pub fn new(codec: Codec, dim: usize) -> Option<Self> {
        debug_assert!(codec.supports(dim), "{codec} of {dim}");
        let _env = FloatEnv::ieee();
        let (scheme, format) = match codec.row_kind() {
            RowKind::Elements(_) => return None,
            RowKind::Fp8 => (Scheme::Fp8, RowLayout::new(dim, 8)),
            RowKind::RotatedHalves => {
                let layout = RowLayout::opaque(dim, dim * Dtype::F16.bytes(), 0);
                (Scheme::RotatedHalves(Rotation::new(dim)), layout)
            }
            RowKind::Integers { bits } => {
                (Scheme::Integers(Quantizer::new(dim, bits)), RowLayout::new(dim, bits))
            }
            RowKind::Mlx { bits, rotated } => {
                let layout = RowLayout::opaque(dim, mlx::code_bytes(dim, bits), mlx::norm_bytes(dim));
                (Scheme::Mlx(Mlx::new(dim, bits, rotated)), layout)
            }
        };
        Some(Self { dim, format, scheme })
    }

    /// The layout of a row's bytes in a page.
    #[must_use]
    pub const fn format(&self) -> &RowLayout {
        &self.format
    }

    /// The rotation, for codecs that rotate.
    pub fn rotation(&self) -> Option<&Rotation> {
        match &self.scheme {
            Scheme::Fp8 => None,
            Scheme::RotatedHalves(rotation) => Some(rotation),
            Scheme::Integers(quantizer) => Some(&quantizer.rotation),
            Scheme::Mlx(mlx) => mlx.rotation.as_ref(),
        }
    }

    /// Signed levels of codes, `[64]`; `None` for codes without levels.
    pub fn levels(&self) -> Option<&'static [i8; 64]> {
        match &self.scheme {
            Scheme::Integers(quantizer) => quantizer.table(),
            Scheme::Fp8 | Scheme::RotatedHalves(_) | Scheme::Mlx(_) => None,
        }
    }

    /// Returns true if products with codes are integers.
    pub const fn is_integer(&self) -> bool {
        matches!(self.scheme, Scheme::Integers(_))
    }

    /// Returns true if codes are e4m3 values.
    pub const fn is_fp8(&self) -> bool {
        matches!(self.scheme, Scheme::Fp8)
    }

    /// Stores a vector as a row of a page. Its elements are finite and its norm is at most
    /// [`MAX_NORM`](super::error::MAX_NORM). The contents of `x` are unspecified afterwards.
    #[inline(always)]
    pub(super) fn encode<O: RowSteps>(&self, x: &mut [f32], rule: ScaleRule, to: Destination<'_>) {
        let mut codes = [0u8; MAX_HEAD_DIM];
        let codes = &mut codes[..self.dim];
        let scale = match &self.scheme {
            Scheme::Fp8 => O::encode_fp8(x, codes),
            Scheme::Integers(quantizer) => quantizer.encode::<O>(x, rule, codes),
            Scheme::RotatedHalves(rotation) => {
                O::rotate(rotation, x);
                let (page, tokens, row) = to;
                let [halves, _] = self.format.row(tokens, row);
                return narrow(x, Dtype::F16, &mut page[halves]);
            }
            Scheme::Mlx(mlx) => {
                let (page, tokens, row) = to;
                let [codes, norms] = self.format.row(tokens, row);
                let (low, high) = page.split_at_mut(norms.start);
                return O::encode_mlx(mlx, x, &mut low[codes], &mut high[..norms.len()]);
            }
        };
        O::write(&self.format, codes, scale, to);
    }

    /// Decodes rows of a page: values of codes times the scale, in the rotated domain if the codec rotates. `x` is `[rows, stride]`.
    #[inline(always)]
    pub(super) fn decode_rotated<O: RowSteps>(
        &self,
        (page, tokens, rows): Source<'_>,
        x: &mut [f32],
        stride: usize,
    ) {
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
                    fp8::to_f32s(
                        &page[codes],
                        [1.0 / FP8_SCALE_UNIT, row_layout::scale(&page[scale]).to_f32()],
                        x,
                    );
                }
                Scheme::RotatedHalves(_) => {
                    let [halves, _] = self.format.row(tokens, row);
                    O::widen(Dtype::F16, &page[halves], x);
                }
                Scheme::Integers(quantizer) => {
                    // Products of 8-bit and 11-bit significands are exact.
                    let Some(levels) = quantizer.table() else {
                        let [codes, scale] = self.format.row(tokens, row);
                        widen(&page[codes], row_layout::scale(&page[scale]).to_f32() / SCALE_UNIT, x);
                        continue;
                    };
                    let codes = &mut memory[..self.dim];
                    let scale = O::read(&self.format, page, tokens, row, codes);
                    O::look_up(levels, codes);
                    widen(codes, scale.to_f32() / SCALE_UNIT, x);
                }
            }
        }
    }
}

/// The level nearest to each number of half-levels, plus 256 times its index; `None` for codecs without levels.
pub fn nearest_levels(codec: Codec) -> Option<[u32; 256]> {
    let RowKind::Integers { bits: bits @ 2..=6 } = codec.row_kind() else { return None };
    let levels = Codebook::of(bits);
    Some(std::array::from_fn(|n| u32::from(levels.nearest_of[n]) | u32::from(levels.index_of[n]) << 8))
}

/// The e4m3 code of a finite value.
pub fn e4m3(x: f32) -> u8 {
    fp8::from_f32(x)
}

/// Encodes a vector as e4m3 codes and returns its scale.
#[inline(always)]
pub(super) fn encode_fp8(x: &[f32], codes: &mut [u8]) -> f16 {
    let amax = greatest(x);
    // Elements are divided by the scale as it is stored, so that its rounding does not add to their error.
    let scale = f16::from_f32(amax * (FP8_SCALE_UNIT / fp8::MAX));
    if scale == f16::ZERO {
        codes.fill(0);
        return scale;
    }
    let inverse = FP8_SCALE_UNIT / scale.to_f32();
    for (code, x) in codes.iter_mut().zip(x) {
        *code = fp8::from_f32(*x * inverse);
    }
    scale
}

/// Multiplies signed bytes by a factor.
#[inline(always)]
fn widen(codes: &[u8], factor: f32, x: &mut [f32]) {
    for (x, code) in x.iter_mut().zip(codes) {
        *x = f32::from(code.cast_signed()) * factor;
    }
}
