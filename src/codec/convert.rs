//! Rows of elements from one dtype to another.

use crate::Dtype;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Elements converted at a time.
const BLOCK: usize = 64;

/// Converts a row. Equal types are copied bit by bit; others go through f32, which holds each of them exactly, so that
/// one rounding happens at most. A NaN stays a NaN.
pub(crate) fn convert(from: Dtype, row: &[u8], to: Dtype, into: &mut [u8]) {
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

/// A row as f32.
pub(crate) fn to_f32(from: Dtype, row: &[u8], into: &mut [f32]) {
    for (row, into) in row.chunks(BLOCK * from.bytes()).zip(into.chunks_mut(BLOCK)) {
        load(from, row, into);
    }
}

/// A row from f32, rounded to nearest even.
pub(crate) fn from_f32(row: &[f32], to: Dtype, into: &mut [u8]) {
    for (row, into) in row.chunks(BLOCK).zip(into.chunks_mut(BLOCK * to.bytes())) {
        store(row, to, into);
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
