//! The table by which codes of `tq4` are decoded: the two f16 of every byte, in threadgroup memory.

use super::formats::TQ4;
use super::rows::{Levels, gathered};
use flashtile_kernel::prelude::*;

/// The fewest copies of the table of [`fill_nibbles`].
pub const MIN_COPIES: usize = 8;

/// Copies of the table with which decode stays within 32 KiB of threadgroup memory, over rows of up to `dim` elements.
pub const fn min_copies(dim: usize) -> usize {
    if dim > 256 { MIN_COPIES } else { 16 }
}

/// Bytes of the table of [`fill_nibbles`]; 16 where no row is looked up there.
pub const fn nibble_bytes(
    k_format: u32,
    head_dim: usize,
    v_format: u32,
    value_dim: usize,
    copies: usize,
) -> usize {
    if uses_nibbles(k_format, head_dim as u32, 4) || uses_nibbles(v_format, value_dim as u32, 8) {
        1024 * copies
    } else {
        16
    }
}

/// Returns true if rows are decoded with the lookup table of [`fill_nibbles`].
#[device]
#[inline]
pub const fn uses_nibbles(format: u32, dim: u32, lanes: u32) -> bool {
    format == TQ4 && !gathered(format, dim, lanes)
}

/// The f16 of a code of `tq4`, as bits.
#[device]
fn nibble_bits(levels: Levels, code: u32) -> u32 {
    let low = byte_permute(levels.magnitudes[0], levels.magnitudes[1], code & 7) & 255;
    let high = byte_permute(levels.magnitudes[8], levels.magnitudes[9], code & 7) & 255;
    low | high << 8u32 | (code & 8) << 12u32
}

/// Fills a table with the two f16 of every byte of `tq4`, low nibble first: entry `byte` of copy `n` is the word from byte
/// `4 (copies byte + n)` on. Lane `l` reads copy `l % copies`, so that of 16 copies two lanes have the same banks at most, and of 32 none. By
/// a threadgroup of `SIMD_GROUPS` SIMD groups.
#[device]
pub fn fill_nibbles<const SIMD_GROUPS: usize>(levels: Levels, table: &mut Shared<u8>) {
    let copies = levels.copies;
    for first in (32 * simd_index()..256).step_by(32 * SIMD_GROUPS) {
        let byte = first + simd_lane();
        let both = nibble_bits(levels, byte & 15) | nibble_bits(levels, byte >> 4u32) << 16u32;
        for n in (0..32u32).step_by((32 / copies) as usize) {
            let entry = simd_shuffle(both, n + simd_lane() / copies);
            table.store_as::<u32, 1>(4 * ((first + n) * copies + simd_lane()), [entry]);
        }
    }
}

/// The two f16 of each byte of a word of `tq4`.
#[device]
#[inline(always)]
pub fn look_up_nibbles(levels: Levels, table: &Shared<u8>, word: u32) -> [u32; 4] {
    let copy = 4 * (simd_lane() % levels.copies);
    let mut result = [0u32; 4];
    for n in 0..4usize {
        let byte = byte_permute(word, 0u32, 0x4440 + n as u32);
        let both = table.load_as::<u32, 1>(byte * (4 * levels.copies) + copy);
        result[n] = both[0];
    }
    result
}
