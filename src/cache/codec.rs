//! What the bytes of a token's row are.

use crate::Dtype;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

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
}

impl Codec {
    /// Bytes of a row of `dim` elements; saturating.
    #[must_use]
    pub const fn row_bytes(self, dim: usize) -> usize {
        match self {
            Self::F32 => dim.saturating_mul(4),
            Self::F16 | Self::BF16 => dim.saturating_mul(2),
        }
    }

    /// The element type of a codec whose rows are plain elements.
    #[must_use]
    pub const fn dtype(self) -> Option<Dtype> {
        match self {
            Self::F32 => Some(Dtype::F32),
            Self::F16 => Some(Dtype::F16),
            Self::BF16 => Some(Dtype::BF16),
        }
    }

    /// Name as used in messages and on the command line: `f32`, `f16`, `bf16`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        }
    }

    /// Stores a row of elements of type `from`.
    pub(super) fn encode(self, from: Dtype, row: &[u8], into: &mut [u8]) {
        match self {
            Self::F32 => convert(from, row, Dtype::F32, into),
            Self::F16 => convert(from, row, Dtype::F16, into),
            Self::BF16 => convert(from, row, Dtype::BF16, into),
        }
    }

    /// Reads a stored row as elements of type `to`, rounded to nearest even.
    pub(super) fn decode(self, row: &[u8], to: Dtype, into: &mut [u8]) {
        match self {
            Self::F32 => convert(Dtype::F32, row, to, into),
            Self::F16 => convert(Dtype::F16, row, to, into),
            Self::BF16 => convert(Dtype::BF16, row, to, into),
        }
    }
}

impl std::fmt::Display for Codec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The codec that stores elements of a dtype as they are.
impl From<Dtype> for Codec {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::BF16 => Self::BF16,
        }
    }
}

/// Elements converted at a time.
const BLOCK: usize = 64;

/// Converts a row. Equal types are copied bit by bit; others go through f32, which holds each of them exactly, so that
/// one rounding happens at most. A NaN stays a NaN.
fn convert(from: Dtype, row: &[u8], to: Dtype, into: &mut [u8]) {
    if from == to {
        into.copy_from_slice(row);
        return;
    }
    let mut block = [0.0f32; BLOCK];
    for (row, into) in row.chunks(BLOCK * from.bytes()).zip(into.chunks_mut(BLOCK * to.bytes())) {
        let block = &mut block[..row.len() / from.bytes()];
        load(from, row, block);
        store(block, to, into);
    }
}

/// At most [`BLOCK`] elements as f32.
fn load(from: Dtype, bytes: &[u8], block: &mut [f32]) {
    let n = block.len();
    match from {
        Dtype::F32 => {
            for (x, &bytes) in block.iter_mut().zip(bytes.as_chunks().0) {
                *x = f32::from_ne_bytes(bytes);
            }
        }
        Dtype::F16 => {
            let mut half = [f16::ZERO; BLOCK];
            for (x, &bytes) in half.iter_mut().zip(bytes.as_chunks().0) {
                *x = f16::from_ne_bytes(bytes);
            }
            half[..n].convert_to_f32_slice(block);
        }
        Dtype::BF16 => {
            let mut half = [bf16::ZERO; BLOCK];
            for (x, &bytes) in half.iter_mut().zip(bytes.as_chunks().0) {
                *x = bf16::from_ne_bytes(bytes);
            }
            half[..n].convert_to_f32_slice(block);
        }
    }
}

/// At most [`BLOCK`] elements from f32.
fn store(block: &[f32], to: Dtype, bytes: &mut [u8]) {
    let n = block.len();
    match to {
        Dtype::F32 => {
            for (bytes, x) in bytes.as_chunks_mut().0.iter_mut().zip(block) {
                *bytes = x.to_ne_bytes();
            }
        }
        Dtype::F16 => {
            let mut half = [f16::ZERO; BLOCK];
            half[..n].convert_from_f32_slice(block);
            for (bytes, x) in bytes.as_chunks_mut().0.iter_mut().zip(half) {
                *bytes = x.to_ne_bytes();
            }
        }
        Dtype::BF16 => {
            let mut half = [bf16::ZERO; BLOCK];
            half[..n].convert_from_f32_slice(block);
            for (bytes, x) in bytes.as_chunks_mut().0.iter_mut().zip(half) {
                *bytes = x.to_ne_bytes();
            }
        }
    }
}
