//! Scales of rows of codes.

use super::formats::{FP8, first_bytes, has_half_norms, is_mlx, is_scaled, second_bytes};
use super::rows::Row;
use flashtile_kernel::prelude::*;

/// The scale of a row.
#[device]
pub struct Scale {
    /// The scale of the row; where the halves have norms of their own, of the greater one.
    pub whole: f32,
    /// The norms of the halves over `whole`, where they have norms of their own.
    pub halves: [f32; 2],
}

/// The factor of decoded codes beside the scale of their row: levels are decoded to integers.
#[device]
pub fn code_unit(format: u32, dim: u32) -> f32 {
    if is_mlx(format) {
        return select(dim == 512, 1.0, 0.0625);
    }
    select(format == FP8, 0.003_906_25, 0.007_812_5)
}

/// The words of a row's scale as they lie in memory, to be fetched ahead of their use as codes are: one, or the norms of both halves;
/// zeros where rows have no scales.
#[device]
pub fn fetch_scale<const FORMAT: u32, const DIM: usize>(memory: &Buffer<u8>, row: Row) -> [u32; 2] {
    let mut words = [0u32; 2];
    if is_mlx(FORMAT) {
        let first = memory.load_as::<u32, 1>(row.scale);
        words[0] = first[0];
        if has_half_norms(FORMAT, DIM as u32) {
            let second = memory.load_as::<u32, 1>(row.scale + 4);
            words[1] = second[0];
        }
    } else if is_scaled(FORMAT) {
        if (first_bytes(FORMAT, DIM as u32) + second_bytes(FORMAT, DIM as u32)) % 2 == 0 {
            let bits = memory.load_as::<u16, 1>(row.scale);
            words[0] = bits[0] as u32;
        } else {
            // Behind an odd number of bytes.
            words[0] = memory[row.scale] as u32 | (memory[row.scale + 1] as u32) << 8u32;
        }
    }
    words
}

/// The scale that these words are.
#[device]
pub fn scale_of<const FORMAT: u32, const DIM: usize>(words: [u32; 2]) -> Scale {
    let mut scale = Scale { whole: 1.0, halves: [1.0, 1.0] };
    if is_mlx(FORMAT) {
        let first = f32::from_bits(words[0]);
        scale.whole = first;
        if has_half_norms(FORMAT, DIM as u32) {
            let second = f32::from_bits(words[1]);
            scale.whole = first.max(second);
            let inverse = select(scale.whole > 0.0, 1.0 / scale.whole, 0.0);
            scale.halves[0] = first * inverse;
            scale.halves[1] = second * inverse;
        }
        scale.whole *= code_unit(FORMAT, DIM as u32);
    } else if is_scaled(FORMAT) {
        // The bit of the sign is the encoder's: a scale has none.
        let number = pair_f16(words[0] & 0x7fff);
        scale.whole = number[0] * code_unit(FORMAT, DIM as u32);
    }
    scale
}
