//! Decoding of a lane's words of a row to pairs of coordinates, and to pairs of keys for the product with values.
//!
//! Levels of codes are integers up to 127, exact in f16. `byte_permute` looks up the low and the high bytes of the
//! magnitudes of four codes at a time: a table of eight bytes is two registers.

use super::formats::{
    BF16, F32, FP8, INT8, MLX4, TQ2, TQ3, TQ4, TQ5, TQ6, has_half_norms, in_planes, is_codes, is_half,
    padded, plane_bits,
};
use super::nibbles::{look_up_nibbles, uses_nibbles};
use super::rows::{Levels, coordinate, gathered};
use flashtile_kernel::prelude::*;

/// One byte each of the magnitudes of four codes of `tq`, from the table at word `first`. The low three bits of the
/// indices are the nibbles of `selector`'s low half; the bytes of `upper` and `highest` are all ones where the fourth
/// and the fifth bit of an index are set.
#[device]
fn look_up<const FORMAT: u32>(levels: Levels, first: usize, selector: u32, upper: u32, highest: u32) -> u32 {
    let table = levels.magnitudes;
    let mut bytes = byte_permute(table[first], table[first + 1], selector);
    if FORMAT == TQ5 || FORMAT == TQ6 {
        bytes ^= (bytes ^ byte_permute(table[first + 2], table[first + 3], selector)) & upper;
    }
    if FORMAT == TQ6 {
        let mut above = byte_permute(table[first + 4], table[first + 5], selector);
        above ^= (above ^ byte_permute(table[first + 6], table[first + 7], selector)) & upper;
        bytes ^= (bytes ^ above) & highest;
    }
    bytes
}

/// Decodes eight codes of `tq` in neighbouring bytes of a block to four pairs of f16: coordinate `c` and the one half a
/// block on. `first` and `second` are words of the planes; `part2` and `part1` say which bits of a byte belong to `c`,
/// in a plane of 2 bits and in one of 1 bit.
#[device]
fn unit<const FORMAT: u32>(levels: Levels, first: u32, second: u32, part2: u32, part1: u32) -> [u32; 4] {
    // The top bits of these bytes are the signs of the codes in the low and in the high half of the block.
    let mut low_signs = first << 4u32;
    let mut high_signs = first;
    let mut indices = first & 0x7777_7777;
    // Likewise the fifth bits of the indices.
    let mut low_top = 0u32;
    let mut high_top = 0u32;
    if FORMAT == TQ2 {
        indices = first >> (2 * part2) & 0x1111_1111;
        low_signs = first << (6 - 2 * part2);
        high_signs = first << (2 - 2 * part2);
    } else if FORMAT == TQ3 {
        indices = first >> (2 * part2) & 0x3333_3333;
    } else if FORMAT == TQ6 {
        low_signs = second << (6 - 2 * part2);
        high_signs = second << (2 - 2 * part2);
        low_top = second << (7 - 2 * part2);
        high_top = second << (3 - 2 * part2);
    }
    if FORMAT == TQ3 || FORMAT == TQ5 {
        low_signs = second << (7 - part1);
        high_signs = second << (3 - part1);
    }
    let mut result = [0u32; 4];
    for half in 0..2usize {
        let pick = select(half == 0, 0x5140u32, 0x7362u32);
        let selector = indices >> (16 * half as u32);
        let mut upper = 0u32;
        let mut highest = 0u32;
        if FORMAT == TQ5 || FORMAT == TQ6 {
            upper = byte_signs(first << 4u32, first, pick);
        }
        if FORMAT == TQ6 {
            highest = byte_signs(low_top, high_top, pick);
        }
        let low = look_up::<FORMAT>(levels, 0, selector, upper, highest);
        let signs = byte_permute(low_signs, high_signs, pick) & 0x8080_8080;
        let high = look_up::<FORMAT>(levels, 8, selector, upper, highest) | signs;
        result[2 * half] = byte_permute(low, high, 0x5140);
        result[2 * half + 1] = byte_permute(low, high, 0x7362);
    }
    result
}

/// Decodes a lane's words of a row to pairs of coordinates, without the row's scale: a word of two f16 or bf16, or two
/// words of f32 where `PAIR_WORDS` is twice the number of pairs.
#[device]
pub fn pairs<
    const FORMAT: u32,
    const DIM: usize,
    const LANES: usize,
    const WORDS: usize,
    const PAIR_WORDS: usize,
>(
    from: [u32; WORDS],
    lane: u32,
    levels: Levels,
    codebooks: &Buffer<f32>,
    nibbles: &Shared<u8>,
) -> [u32; PAIR_WORDS] {
    let mut result = [0u32; PAIR_WORDS];
    let packed = PAIR_WORDS == padded(DIM as u32) as usize / LANES / 2;
    let ready = is_codes(FORMAT) && gathered(FORMAT, DIM as u32, LANES as u32);
    if FORMAT == F32 || ready || (is_half(FORMAT) && packed) {
        for i in 0..PAIR_WORDS {
            result[i] = from[i];
        }
    } else if is_half(FORMAT) {
        for i in 0..PAIR_WORDS / 2 {
            let mut both = pair_f16(from[i]);
            if FORMAT == BF16 {
                both = pair_bf16(from[i]);
            }
            result[2 * i] = both[0].to_bits();
            result[2 * i + 1] = both[1].to_bits();
        }
    } else if FORMAT == TQ4 {
        result = pairs_of_nibbles::<WORDS, PAIR_WORDS>(from, levels, nibbles);
    } else if in_planes(FORMAT) {
        result = pairs_of_planes::<FORMAT, DIM, LANES, WORDS, PAIR_WORDS>(from, lane, levels);
    } else if FORMAT == INT8 {
        result = pairs_of_int8::<WORDS, PAIR_WORDS>(from);
    } else if FORMAT == FP8 {
        result = pairs_of_fp8::<WORDS, PAIR_WORDS>(from);
    } else {
        result = pairs_of_mlx::<FORMAT, WORDS, PAIR_WORDS>(from, levels.codebook, codebooks);
    }
    result
}

/// Pairs of `tq4`.
#[device]
fn pairs_of_nibbles<const WORDS: usize, const PAIR_WORDS: usize>(
    from: [u32; WORDS],
    levels: Levels,
    nibbles: &Shared<u8>,
) -> [u32; PAIR_WORDS] {
    let mut result = [0u32; PAIR_WORDS];
    for i in 0..WORDS {
        let four = look_up_nibbles(levels, nibbles, from[i]);
        for n in 0..4usize {
            result[4 * i + n] = four[n];
        }
    }
    result
}

/// Pairs of `tq2` to `tq6`.
#[device]
fn pairs_of_planes<
    const FORMAT: u32,
    const DIM: usize,
    const LANES: usize,
    const WORDS: usize,
    const PAIR_WORDS: usize,
>(
    from: [u32; WORDS],
    lane: u32,
    levels: Levels,
) -> [u32; PAIR_WORDS] {
    let mut result = [0u32; PAIR_WORDS];
    let whole = 16 / LANES;
    for block in 0..(DIM + 127) / 128 {
        let size = (DIM - 128 * block).min(128);
        let count = size / (8 * LANES);
        for n in 0..count {
            let c = 4 * (lane * count as u32 + n as u32);
            let at = whole * block + n;
            let mut second = 0u32;
            if plane_bits(FORMAT, 1) > 0 {
                second = from[DIM / (8 * LANES) + at];
            }
            let four = unit::<FORMAT>(levels, from[at], second, c / (size / 4) as u32, c / (size / 8) as u32);
            for i in 0..4usize {
                result[4 * at + i] = four[i];
            }
        }
    }
    result
}

/// Pairs of `int8`.
#[device]
fn pairs_of_int8<const WORDS: usize, const PAIR_WORDS: usize>(from: [u32; WORDS]) -> [u32; PAIR_WORDS] {
    let mut result = [0u32; PAIR_WORDS];
    for i in 0..WORDS {
        // 1024 + byte is an f16 with the byte as its last bits.
        let bytes = from[i] ^ 0x8080_8080;
        result[2 * i] = f16x2_mul_add(byte_permute(bytes, 0x6464_6464, 0x4140), 0x3c00_3c00, 0xe480_e480);
        result[2 * i + 1] = f16x2_mul_add(byte_permute(bytes, 0x6464_6464, 0x4342), 0x3c00_3c00, 0xe480_e480);
    }
    result
}

/// Pairs of e4m3.
#[device]
fn pairs_of_fp8<const WORDS: usize, const PAIR_WORDS: usize>(from: [u32; WORDS]) -> [u32; PAIR_WORDS] {
    let mut result = [0u32; PAIR_WORDS];
    for i in 0..WORDS {
        result[2 * i] = f16x2_from_e4m3(from[i]);
        result[2 * i + 1] = f16x2_from_e4m3(from[i] >> 16u32);
    }
    result
}

/// Pairs of mlx-native, from the codebook at entry `codebook`.
#[device]
fn pairs_of_mlx<const FORMAT: u32, const WORDS: usize, const PAIR_WORDS: usize>(
    from: [u32; WORDS],
    codebook: u32,
    codebooks: &Buffer<f32>,
) -> [u32; PAIR_WORDS] {
    let mut result = [0u32; PAIR_WORDS];
    let bits = select(FORMAT == MLX4, 4u32, 8u32);
    for i in 0..WORDS {
        for n in 0..PAIR_WORDS / WORDS {
            let codes = from[i] >> (2 * bits * n as u32);
            let low = codebooks[codebook + (codes & ((1u32 << bits) - 1))];
            let high = codebooks[codebook + (codes >> bits & ((1u32 << bits) - 1))];
            result[PAIR_WORDS / WORDS * i + n] = f16x2_from(low, high);
        }
    }
    result
}

/// Words of two keys: one of each coordinate.
#[device]
pub struct Transposed<const PAIR_WORDS: usize> {
    /// Words of the first coordinate of each pair.
    pub first: [u32; PAIR_WORDS],
    /// Words of the second coordinate of each pair.
    pub second: [u32; PAIR_WORDS],
}

/// Decodes a lane's words of the rows of two keys to words of one coordinate of both, for products of 16 bits. `halves` are the norms
/// of the halves of each row, relative to its scale.
#[device]
#[inline(always)]
pub fn transposed_pairs<
    const FORMAT: u32,
    const DIM: usize,
    const LANES: usize,
    const WORDS: usize,
    const PAIR_WORDS: usize,
>(
    from: [[u32; WORDS]; 2],
    halves: [[f32; 2]; 2],
    lane: u32,
    levels: Levels,
    codebooks: &Buffer<f32>,
    nibbles: &Shared<u8>,
) -> Transposed<PAIR_WORDS> {
    if uses_nibbles(FORMAT, DIM as u32, LANES as u32) {
        return transposed_nibbles::<WORDS, PAIR_WORDS>(from, levels, nibbles);
    }
    if (FORMAT == INT8 || FORMAT == FP8) && !gathered(FORMAT, DIM as u32, LANES as u32) {
        return transposed_bytes::<FORMAT, WORDS, PAIR_WORDS>(from);
    }
    transpose::<FORMAT, DIM, LANES, WORDS, PAIR_WORDS>(from, halves, lane, levels, codebooks, nibbles)
}

/// [`transposed_pairs`] for any format: decodes both rows, then transposes.
#[device]
fn transpose<
    const FORMAT: u32,
    const DIM: usize,
    const LANES: usize,
    const WORDS: usize,
    const PAIR_WORDS: usize,
>(
    from: [[u32; WORDS]; 2],
    halves: [[f32; 2]; 2],
    lane: u32,
    levels: Levels,
    codebooks: &Buffer<f32>,
    nibbles: &Shared<u8>,
) -> Transposed<PAIR_WORDS> {
    let even_pairs =
        pairs::<FORMAT, DIM, LANES, WORDS, PAIR_WORDS>(from[0], lane, levels, codebooks, nibbles);
    let even = with_half_norms::<FORMAT, DIM, LANES, PAIR_WORDS>(even_pairs, lane, halves[0]);
    let odd_pairs = pairs::<FORMAT, DIM, LANES, WORDS, PAIR_WORDS>(from[1], lane, levels, codebooks, nibbles);
    let odd = with_half_norms::<FORMAT, DIM, LANES, PAIR_WORDS>(odd_pairs, lane, halves[1]);
    let mut words = Transposed::<PAIR_WORDS> { first: [0u32; PAIR_WORDS], second: [0u32; PAIR_WORDS] };
    for i in 0..PAIR_WORDS {
        words.first[i] = byte_permute(even[i], odd[i], 0x5410);
        words.second[i] = byte_permute(even[i], odd[i], 0x7632);
    }
    words
}

/// [`transposed_pairs`] for `tq4`: nibbles of both rows become bytes of one coordinate before they are
/// decoded.
#[device]
fn transposed_nibbles<const WORDS: usize, const PAIR_WORDS: usize>(
    from: [[u32; WORDS]; 2],
    levels: Levels,
    nibbles: &Shared<u8>,
) -> Transposed<PAIR_WORDS> {
    let mut words = Transposed::<PAIR_WORDS> { first: [0u32; PAIR_WORDS], second: [0u32; PAIR_WORDS] };
    for i in 0..WORDS {
        let low = (from[0][i] & 0x0f0f_0f0f) | (from[1][i] << 4u32 & 0xf0f0_f0f0);
        let high = (from[0][i] >> 4u32 & 0x0f0f_0f0f) | (from[1][i] & 0xf0f0_f0f0);
        let first = look_up_nibbles(levels, nibbles, low);
        let second = look_up_nibbles(levels, nibbles, high);
        for n in 0..4usize {
            words.first[4 * i + n] = first[n];
            words.second[4 * i + n] = second[n];
        }
    }
    words
}

/// [`transposed_pairs`] for `int8` and e4m3: bytes of both rows are brought together before they are decoded.
#[device]
fn transposed_bytes<const FORMAT: u32, const WORDS: usize, const PAIR_WORDS: usize>(
    from: [[u32; WORDS]; 2],
) -> Transposed<PAIR_WORDS> {
    let mut words = Transposed::<PAIR_WORDS> { first: [0u32; PAIR_WORDS], second: [0u32; PAIR_WORDS] };
    for i in 0..WORDS {
        let both =
            [byte_permute(from[0][i], from[1][i], 0x5140), byte_permute(from[0][i], from[1][i], 0x7362)];
        let decoded: [u32; 4] =
            if FORMAT == FP8 { pairs_of_fp8::<2, 4>(both) } else { pairs_of_int8::<2, 4>(both) };
        for n in 0..2usize {
            words.first[2 * i + n] = decoded[2 * n];
            words.second[2 * i + n] = decoded[2 * n + 1];
        }
    }
    words
}

/// Multiplies pairs of a row by the norm of their half, where each half has a norm of its own.
#[device]
pub fn with_half_norms<const FORMAT: u32, const DIM: usize, const LANES: usize, const PAIR_WORDS: usize>(
    from: [u32; PAIR_WORDS],
    lane: u32,
    norms: [f32; 2],
) -> [u32; PAIR_WORDS] {
    let mut result = from;
    if has_half_norms(FORMAT, DIM as u32) {
        let first = f16x2_from(norms[0], norms[0]);
        let second = f16x2_from(norms[1], norms[1]);
        for i in 0..PAIR_WORDS {
            let in_second = coordinate::<FORMAT, DIM, LANES>(lane, 2 * i as u32) >= 256;
            result[i] = f16x2_mul_add(from[i], select(in_second, second, first), 0u32);
        }
    }
    result
}
