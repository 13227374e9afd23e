//! Conversion of rows between dtypes.

use crate::dtype::Dtype;
use crate::isa::FloatEnv;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Elements per step.
const BLOCK: usize = 64;

/// Converts a row. Equal types are copied bit by bit; others go through f32, which holds each of them exactly, so there is at most one
/// rounding. A NaN stays a NaN.
pub fn convert(from: Dtype, row: &[u8], to: Dtype, into: &mut [u8]) {
    if from == to {
        into.copy_from_slice(row);
        return;
    }
    let _env = FloatEnv::ieee();
    let mut block = [0.0f32; BLOCK];
    for (row, into) in row.chunks(BLOCK * from.bytes()).zip(into.chunks_mut(BLOCK * to.bytes())) {
        let block = &mut block[..row.len() / from.bytes()];
        widen(from, row, block);
        store(block, to, into);
    }
}

/// Widens a row to f32.
pub fn to_f32(from: Dtype, row: &[u8], into: &mut [f32]) {
    let _env = FloatEnv::ieee();
    widen(from, row, into);
}

/// Converts a row from f32, rounding to nearest even.
pub fn from_f32(row: &[f32], to: Dtype, into: &mut [u8]) {
    let _env = FloatEnv::ieee();
    narrow(row, to, into);
}

/// [`from_f32`] in the caller's floating-point environment.
pub(super) fn narrow(row: &[f32], to: Dtype, into: &mut [u8]) {
    for (row, into) in row.chunks(BLOCK).zip(into.chunks_mut(BLOCK * to.bytes())) {
        store(row, to, into);
    }
}

/// Widens a row to f32, in a loop that is compiled for the caller's instruction set.
#[inline(always)]
pub(super) fn widen(from: Dtype, row: &[u8], into: &mut [f32]) {
    match from {
        Dtype::F32 => {
            for (x, bytes) in into.iter_mut().zip(row.as_chunks().0) {
                *x = f32::from_ne_bytes(*bytes);
            }
        }
        Dtype::F16 => {
            for (x, bytes) in into.iter_mut().zip(row.as_chunks().0) {
                *x = widen_f16(u16::from_ne_bytes(*bytes));
            }
        }
        Dtype::BF16 => {
            for (x, bytes) in into.iter_mut().zip(row.as_chunks().0) {
                *x = f32::from_bits(u32::from(u16::from_ne_bytes(*bytes)) << 16);
            }
        }
    }
}

/// The value of an f16's bits.
#[inline(always)]
fn widen_f16(half: u16) -> f32 {
    // The factor is 2 to the difference of the exponent biases; multiplying by it also makes subnormal values normal.
    const BIAS: f32 = f32::from_bits((127 + 127 - 15) << 23);
    let magnitude = f32::from_bits(u32::from(half & 0x7fff) << 13) * BIAS;
    let infinite = if half & 0x7c00 == 0x7c00 { 0xff << 23 } else { 0 };
    f32::from_bits(magnitude.to_bits() | infinite | u32::from(half & 0x8000) << 16)
}

/// Converts at most [`BLOCK`] elements from f32.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_is_widened() {
        for half in 0..=u16::MAX {
            let (got, want) = (widen_f16(half), f16::from_bits(half).to_f32());
            assert!(
                got == want && got.is_sign_negative() == want.is_sign_negative()
                    || got.is_nan() && want.is_nan()
            );
        }
    }
}
