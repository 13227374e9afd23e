//! Rows of keys and values as the lanes of a matrix product hold them.
//!
//! `LANES` lanes share a row: 4 lanes a key row, 8 lanes a value row. A lane loads its `W` words ahead of their use
//! ([`fetch`]) and decodes them to pairs of coordinates when they are used ([`pairs`]): `P` words, one a pair for f16
//! and bf16, two for f32. The format chooses which coordinates a lane holds; the query and the output follow it
//! ([`coordinate`]):
//!
//! | format | a lane holds |
//! |---|---|
//! | elements, codes of a byte, nibbles of mlx-native | every `LANES`th run of [`piece_bytes`] bytes |
//! | `tq2` to `tq6`, `D` a multiple of 64 | words of the planes; a pair is two coordinates half a block apart, whose codes share a byte |
//! | all others | [`padded`]`(D) / LANES` neighbouring coordinates, gathered one by one; those beyond the row are zeros |
//!
//! Levels of codes are integers up to 127, exact in f16. `byte_permute` looks up the low and the high bytes of the
//! magnitudes of four codes at a time: a table of eight bytes is two registers.

use super::formats::{BF16, F16, F32, FP8, INT8, MLX4, TQ2, TQ3, TQ4, TQ5, TQ6};
use super::formats::{
    first_bytes, has_half_norms, in_planes, is_codes, is_half, is_mlx, padded, plane_bits, scale_bytes,
    second_bytes,
};
use flashtile_kernel::ScalarType;
use flashtile_kernel::prelude::*;

/// How codes of a format become values.
#[device]
pub struct Levels {
    /// Of `tq`: magnitudes of the levels as f16, four bytes to a word; 32 low bytes, then 32 high bytes.
    pub magnitudes: [u32; 16],
    /// Of mlx-native: first entry of the codebook in the buffer of codebooks.
    pub codebook: u32,
    /// Of `tq4`: copies of the table of [`fill_nibbles`].
    pub copies: u32,
}

/// Whether rows of a format are gathered one coordinate at a time.
#[device]
#[inline]
pub const fn gathered(format: u32, dim: u32, lanes: u32) -> bool {
    if in_planes(format) {
        return dim % 64 != 0;
    }
    dim % 16 != 0 || first_bytes(format, dim) % (4 * lanes) != 0
}

/// Neighbouring bytes of a row that one lane holds, where rows are neither gathered nor in planes: 16, 8 or 4.
#[device]
#[inline]
pub const fn piece_bytes(format: u32, dim: u32, lanes: u32) -> u32 {
    let bytes = first_bytes(format, dim) / lanes;
    if bytes % 16 == 0 {
        return 16;
    }
    if bytes % 8 == 0 {
        return 8;
    }
    4
}

/// The larger of two head dimensions.
pub const fn larger(a: usize, b: usize) -> usize {
    if a > b { a } else { b }
}

/// Words that a lane loads of a row.
pub const fn lane_words(format: u32, dim: usize, lanes: usize) -> usize {
    if gathered(format, dim as u32, lanes as u32) {
        let words = if format == F32 { 2 } else { 1 };
        return words * (padded(dim as u32) as usize / lanes / 2);
    }
    if in_planes(format) {
        let planes = if second_bytes(format, dim as u32) > 0 { 2 } else { 1 };
        return planes * dim / (8 * lanes);
    }
    first_bytes(format, dim as u32) as usize / lanes / 4
}

/// What the addresses of a lane's words are multiples of, in bytes, where the memory of rows and the strides between
/// them are multiples of `aligned`, a power of two.
#[device]
#[inline]
pub const fn word_align(format: u32, dim: u32, lanes: u32, aligned: u32) -> u32 {
    if gathered(format, dim, lanes) {
        return 1;
    }
    // Planes and scales of all rows of a page lie one after another: a row starts at a multiple of its bytes.
    let mut multiple = 16u32;
    if is_codes(format) {
        multiple |= first_bytes(format, dim);
    }
    multiple |= second_bytes(format, dim);
    if !in_planes(format) {
        multiple |= piece_bytes(format, dim, lanes);
    }
    let align = 1u32 << multiple.trailing_zeros();
    if align < aligned {
        return align;
    }
    aligned
}

/// The smallest alignment with which lanes read keys and values as they do with `aligned`: alignments that make no
/// difference share a compiled kernel.
pub const fn kv_align(
    k_format: u32,
    head_dim: usize,
    v_format: u32,
    value_dim: usize,
    aligned: usize,
) -> u32 {
    let k = word_align(k_format, head_dim as u32, 4, aligned as u32);
    let v = word_align(v_format, value_dim as u32, 8, aligned as u32);
    if k > v { k } else { v }
}

/// Words of a lane's pairs of coordinates, decoded for products of a type: two a pair for f32, otherwise one.
pub const fn pair_words(product: ScalarType, dim: usize, lanes: usize) -> usize {
    let words = if matches!(product, ScalarType::F32) { 2 } else { 1 };
    words * lane_pairs(dim, lanes)
}

/// Pairs of coordinates that a lane holds of a row.
pub const fn lane_pairs(dim: usize, lanes: usize) -> usize {
    padded(dim as u32) as usize / lanes / 2
}

/// The type of the products of queries of type `q` with rows of a format, or of probabilities with them: f16 for codes,
/// the type of elements for queries of that type, otherwise f32.
pub const fn product_type(q: ScalarType, format: u32) -> ScalarType {
    if is_codes(format) || format == F16 && matches!(q, ScalarType::F16) {
        ScalarType::F16
    } else if format == BF16 && matches!(q, ScalarType::Bf16) {
        ScalarType::Bf16
    } else {
        ScalarType::F32
    }
}

/// `W` words from byte `at` on, a multiple of `align`.
#[device]
pub fn words<const W: usize>(memory: &Buffer<u8>, at: u64, align: u32) -> [u32; W] {
    let mut words = [0u32; W];
    if align >= 16 && W % 4 == 0 {
        for i in 0..W / 4 {
            let piece = memory.load_as::<u32, 4>(at + (i * 16) as u64);
            for n in 0..4usize {
                words[4 * i + n] = piece[n];
            }
        }
    } else if align >= 8 && W % 2 == 0 {
        for i in 0..W / 2 {
            let piece = memory.load_as::<u32, 2>(at + (i * 8) as u64);
            for n in 0..2usize {
                words[2 * i + n] = piece[n];
            }
        }
    } else if align >= 4 {
        for i in 0..W {
            let piece = memory.load_as::<u32, 1>(at + (i * 4) as u64);
            words[i] = piece[0];
        }
    } else if align >= 2 {
        for i in 0..W {
            let low = memory.load_as::<u16, 1>(at + (i * 4) as u64);
            let high = memory.load_as::<u16, 1>(at + (i * 4 + 2) as u64);
            words[i] = low[0] as u32 | (high[0] as u32) << 16u32;
        }
    } else {
        for i in 0..W {
            for n in 0..4usize {
                words[i] |= (memory[at + (i * 4 + n) as u64] as u32) << (8 * n as u32);
            }
        }
    }
    words
}

/// The coordinate that a lane holds at `index`, below [`padded`]`(D) / LANES`.
#[device]
pub fn coordinate<const FORMAT: u32, const D: usize, const LANES: usize>(lane: u32, index: u32) -> u32 {
    let dim = D as u32;
    let lanes = LANES as u32;
    if gathered(FORMAT, dim, lanes) {
        return lane * (padded(dim) / lanes) + index;
    }
    if in_planes(FORMAT) {
        // Whole blocks of 128 coordinates have 16 units of 8, a last one of 64 has 8.
        let block = index / (128 / lanes);
        let size = (dim - 128 * block).min(128);
        let within = index % (128 / lanes);
        let unit = lane * (size / (8 * lanes)) + within / 8;
        return 128 * block + 4 * unit + within % 8 / 2 + (within % 2) * (size / 2);
    }
    // Between two runs of bytes of a lane lie the runs of the other lanes.
    let coordinates = piece_bytes(FORMAT, dim, lanes) * dim / first_bytes(FORMAT, dim);
    let others = (lanes - 1) * (index / coordinates * coordinates);
    index + others + lane * coordinates
}

/// Where a row lies in memory, in bytes.
#[device]
pub struct Row {
    /// First byte of the elements, or of the codes in the first plane.
    pub first: u64,
    /// First byte of the codes in the second plane.
    pub second: u64,
    /// First byte of the scale.
    pub scale: u64,
}

/// Where the rows of one head lie, in bytes.
#[device]
pub struct Source {
    /// Row 0 of the first page.
    pub planes: Row,
    /// Stride over pages.
    pub page: u64,
    /// Stride over rows of elements; rows of codes are packed.
    pub row: u64,
}

/// The rows of a head whose first page starts at byte `start`; `tokens` rows a page.
#[device]
pub fn source_at<const FORMAT: u32, const D: usize>(start: u64, page: u64, row: u64, tokens: u32) -> Source {
    let all = tokens as u64;
    let first = first_bytes(FORMAT, D as u32) as u64;
    let both = first + second_bytes(FORMAT, D as u32) as u64;
    let planes = Row { first: start, second: start + all * first, scale: start + all * both };
    let source = Source { planes: planes, page: page, row: row };
    source
}

/// Row `row` of page `page`.
#[device]
pub fn row_at<const FORMAT: u32, const D: usize>(source: Source, page: u64, row: u32) -> Row {
    let offset = page * source.page;
    let at = row as u64;
    let mut stride = source.row;
    if is_codes(FORMAT) {
        stride = first_bytes(FORMAT, D as u32) as u64;
    }
    let place = Row {
        first: source.planes.first + offset + at * stride,
        second: source.planes.second + offset + at * second_bytes(FORMAT, D as u32) as u64,
        scale: source.planes.scale + offset + at * scale_bytes(FORMAT, D as u32) as u64,
    };
    place
}

/// A lane's words of a row, not yet decoded. Rows are at multiples of `row_align` bytes, as far as their format
/// has them there: [`word_align`].
#[device]
pub fn fetch<const FORMAT: u32, const D: usize, const LANES: usize, const W: usize>(
    memory: &Buffer<u8>,
    row: Row,
    lane: u32,
    levels: Levels,
    codebooks: &Buffer<f32>,
    row_align: u32,
) -> [u32; W] {
    if gathered(FORMAT, D as u32, LANES as u32) {
        return fetch_gathered::<FORMAT, D, LANES, W>(memory, row, lane, levels, codebooks);
    }
    if in_planes(FORMAT) {
        return fetch_planes::<FORMAT, D, LANES, W>(memory, row, lane, row_align);
    }
    fetch_pieces::<FORMAT, D, LANES, W>(memory, row.first, lane, row_align)
}

/// Words of two neighbouring coordinates: of codes as f16, of elements as they are. Coordinates beyond the row are zeros.
#[device]
fn fetch_gathered<const FORMAT: u32, const D: usize, const LANES: usize, const W: usize>(
    memory: &Buffer<u8>,
    row: Row,
    lane: u32,
    levels: Levels,
    codebooks: &Buffer<f32>,
) -> [u32; W] {
    let mut result = [0u32; W];
    let first = lane * (padded(D as u32) / LANES as u32);
    for i in 0..W {
        if FORMAT == F32 {
            result[i] = element_bits::<FORMAT, D>(memory, row, first + i as u32);
        } else if is_half(FORMAT) {
            let low = element_bits::<FORMAT, D>(memory, row, first + 2 * i as u32);
            let high = element_bits::<FORMAT, D>(memory, row, first + 2 * i as u32 + 1);
            result[i] = low | high << 16u32;
        } else {
            let low = gather::<FORMAT, D>(memory, row, first + 2 * i as u32, levels, codebooks);
            let high = gather::<FORMAT, D>(memory, row, first + 2 * i as u32 + 1, levels, codebooks);
            result[i] = f16x2_from(low, high);
        }
    }
    result
}

/// The bits of an element; 0 beyond the row.
#[device]
fn element_bits<const FORMAT: u32, const D: usize>(memory: &Buffer<u8>, row: Row, coordinate: u32) -> u32 {
    if coordinate >= D as u32 {
        return 0;
    }
    if FORMAT == F32 {
        let bits = memory.load_as::<u32, 1>(row.first + 4 * coordinate as u64);
        return bits[0];
    }
    let bits = memory.load_as::<u16, 1>(row.first + 2 * coordinate as u64);
    bits[0] as u32
}

/// Words of the planes, block by block of 128 coordinates: all words of the first plane, then all words of the second.
#[device]
fn fetch_planes<const FORMAT: u32, const D: usize, const LANES: usize, const W: usize>(
    memory: &Buffer<u8>,
    row: Row,
    lane: u32,
    row_align: u32,
) -> [u32; W] {
    let mut result = [0u32; W];
    let align = word_align(FORMAT, D as u32, LANES as u32, row_align);
    let whole = 16 / LANES;
    for block in 0..(D + 127) / 128 {
        let size = (D - 128 * block).min(128);
        let count = size / (8 * LANES);
        let unit = lane * count as u32;
        for plane in 0..2usize {
            let bits = plane_bits(FORMAT, plane as u32);
            if bits > 0 {
                let start =
                    select(plane == 0, row.first, row.second) + (128 * block as u64 * bits as u64) / 8;
                let at = start + (4 * unit % (size as u32 * bits / 8)) as u64;
                let into = plane * (D / (8 * LANES)) + whole * block;
                if count == 4 {
                    let four = words::<4>(memory, at, align);
                    for n in 0..4usize {
                        result[into + n] = four[n];
                    }
                } else if count == 2 {
                    let two = words::<2>(memory, at, align);
                    for n in 0..2usize {
                        result[into + n] = two[n];
                    }
                } else {
                    let one = words::<1>(memory, at, align);
                    result[into] = one[0];
                }
            }
        }
    }
    result
}

/// Words of every `LANES`th piece from byte `first` on.
#[device]
fn fetch_pieces<const FORMAT: u32, const D: usize, const LANES: usize, const W: usize>(
    memory: &Buffer<u8>,
    first: u64,
    lane: u32,
    row_align: u32,
) -> [u32; W] {
    let mut result = [0u32; W];
    let align = word_align(FORMAT, D as u32, LANES as u32, row_align);
    let piece = piece_bytes(FORMAT, D as u32, LANES as u32);
    let step = (LANES as u32 * piece) as u64;
    let at = first + (lane * piece) as u64;
    if piece == 16 {
        for i in 0..W / 4 {
            let four = words::<4>(memory, at + i as u64 * step, align);
            for n in 0..4usize {
                result[4 * i + n] = four[n];
            }
        }
    } else if piece == 8 {
        for i in 0..W / 2 {
            let two = words::<2>(memory, at + i as u64 * step, align);
            for n in 0..2usize {
                result[2 * i + n] = two[n];
            }
        }
    } else {
        for i in 0..W {
            let one = words::<1>(memory, at + i as u64 * step, align);
            result[i] = one[0];
        }
    }
    result
}

/// The bits of a coordinate's code in a plane, whose part of the row starts at byte `start`.
#[device]
pub fn plane_code<const D: usize>(memory: &Buffer<u8>, start: u64, coordinate: u32, bits: u32) -> u32 {
    let block = coordinate / 128;
    let within = coordinate % 128;
    let size = (D as u32 - 128 * block).min(128);
    let bytes = (size * bits).div_ceil(8);
    let byte = memory[start + (block * 16 * bits + within % bytes) as u64] as u32;
    byte >> (within / bytes * bits) & ((1u32 << bits) - 1)
}

/// The value of one coordinate, without the row's scale; 0 beyond the row.
#[device]
pub fn gather<const FORMAT: u32, const D: usize>(
    memory: &Buffer<u8>,
    row: Row,
    coordinate: u32,
    levels: Levels,
    codebooks: &Buffer<f32>,
) -> f32 {
    if coordinate >= D as u32 {
        return 0.0;
    }
    let at = row.first + coordinate as u64;
    if !is_codes(FORMAT) {
        let bits = element_bits::<FORMAT, D>(memory, row, coordinate);
        if FORMAT == F32 {
            return f32::from_bits(bits);
        }
        let mut number = pair_f16(bits);
        if FORMAT == BF16 {
            number = pair_bf16(bits);
        }
        return number[0];
    }
    if FORMAT == INT8 {
        let code = memory[at] as i8;
        return code as i32 as f32;
    }
    if FORMAT == FP8 {
        return e4m3(memory[at] as u32);
    }
    if FORMAT == MLX4 {
        let byte = memory[row.first + (coordinate / 2) as u64] as u32;
        return codebooks[levels.codebook + (byte >> (4 * (coordinate % 2)) & 15)];
    }
    if !in_planes(FORMAT) {
        return codebooks[levels.codebook + memory[at] as u32];
    }
    let first = plane_bits(FORMAT, 0);
    let second = plane_bits(FORMAT, 1);
    let mut code = plane_code::<D>(memory, row.first, coordinate, first);
    if second > 0 {
        code |= plane_code::<D>(memory, row.second, coordinate, second) << first;
    }
    let sign = 1u32 << (first + second - 1);
    let index = code & (sign - 1);
    let shift = 8 * (index % 4);
    let low = levels.magnitudes[index / 4] >> shift & 255;
    let high = levels.magnitudes[8 + index / 4] >> shift & 255;
    let magnitude = pair_f16(low | high << 8u32);
    select(code & sign != 0, -magnitude[0], magnitude[0])
}

/// The value of an e4m3 code.
#[device]
pub fn e4m3(code: u32) -> f32 {
    let magnitude = code & 127;
    if magnitude == 127 {
        return f32::NAN;
    }
    // The exponent has four bits, that of f16 five: 2^8 makes up for the difference of their biases.
    let number = pair_f16(magnitude << 7u32 | (code & 128) << 8u32);
    256.0 * number[0]
}

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

/// Whether rows are decoded by the table of [`fill_nibbles`].
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
/// `S` SIMD groups.
#[device]
pub fn fill_nibbles<const S: usize>(levels: Levels, table: &mut Shared<u8>) {
    let copies = levels.copies;
    for first in (32 * simd_index()..256).step_by(32 * S) {
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
fn look_up_nibbles(levels: Levels, table: &Shared<u8>, word: u32) -> [u32; 4] {
    let copy = 4 * (simd_lane() % levels.copies);
    let mut result = [0u32; 4];
    for n in 0..4usize {
        let byte = byte_permute(word, 0u32, 0x4440 + n as u32);
        let both = table.load_as::<u32, 1>(byte * (4 * levels.copies) + copy);
        result[n] = both[0];
    }
    result
}

/// One byte each of the magnitudes of four codes of `tq`, from the table at word `first`. The low three bits of the
/// indices are the nibbles of `selector`'s low half; the bytes of `upper` and `highest` are all ones where the fourth
/// and the fifth bit of an index are set.
#[device]
pub fn look_up<const FORMAT: u32>(
    levels: Levels,
    first: usize,
    selector: u32,
    upper: u32,
    highest: u32,
) -> u32 {
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
pub fn unit<const FORMAT: u32>(levels: Levels, first: u32, second: u32, part2: u32, part1: u32) -> [u32; 4] {
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
/// words of f32 where `P` is twice the number of pairs.
#[device]
pub fn pairs<const FORMAT: u32, const D: usize, const LANES: usize, const W: usize, const P: usize>(
    from: [u32; W],
    lane: u32,
    levels: Levels,
    codebooks: &Buffer<f32>,
    nibbles: &Shared<u8>,
) -> [u32; P] {
    let mut result = [0u32; P];
    let packed = P == padded(D as u32) as usize / LANES / 2;
    let ready = is_codes(FORMAT) && gathered(FORMAT, D as u32, LANES as u32);
    if FORMAT == F32 || ready || (is_half(FORMAT) && packed) {
        for i in 0..P {
            result[i] = from[i];
        }
    } else if is_half(FORMAT) {
        for i in 0..P / 2 {
            let mut both = pair_f16(from[i]);
            if FORMAT == BF16 {
                both = pair_bf16(from[i]);
            }
            result[2 * i] = both[0].to_bits();
            result[2 * i + 1] = both[1].to_bits();
        }
    } else if FORMAT == TQ4 {
        result = pairs_of_nibbles::<W, P>(from, levels, nibbles);
    } else if in_planes(FORMAT) {
        result = pairs_of_planes::<FORMAT, D, LANES, W, P>(from, lane, levels);
    } else if FORMAT == INT8 {
        result = pairs_of_int8::<W, P>(from);
    } else if FORMAT == FP8 {
        result = pairs_of_fp8::<W, P>(from);
    } else {
        result = pairs_of_mlx::<FORMAT, W, P>(from, levels.codebook, codebooks);
    }
    result
}

/// Pairs of `tq4`.
#[device]
fn pairs_of_nibbles<const W: usize, const P: usize>(
    from: [u32; W],
    levels: Levels,
    nibbles: &Shared<u8>,
) -> [u32; P] {
    let mut result = [0u32; P];
    for i in 0..W {
        let four = look_up_nibbles(levels, nibbles, from[i]);
        for n in 0..4usize {
            result[4 * i + n] = four[n];
        }
    }
    result
}

/// Pairs of `tq2` to `tq6`.
#[device]
fn pairs_of_planes<const FORMAT: u32, const D: usize, const LANES: usize, const W: usize, const P: usize>(
    from: [u32; W],
    lane: u32,
    levels: Levels,
) -> [u32; P] {
    let mut result = [0u32; P];
    let whole = 16 / LANES;
    for block in 0..(D + 127) / 128 {
        let size = (D - 128 * block).min(128);
        let count = size / (8 * LANES);
        for n in 0..count {
            let c = 4 * (lane * count as u32 + n as u32);
            let at = whole * block + n;
            let mut second = 0u32;
            if plane_bits(FORMAT, 1) > 0 {
                second = from[D / (8 * LANES) + at];
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
fn pairs_of_int8<const W: usize, const P: usize>(from: [u32; W]) -> [u32; P] {
    let mut result = [0u32; P];
    for i in 0..W {
        // 1024 + byte is an f16 with the byte as its last bits.
        let bytes = from[i] ^ 0x8080_8080;
        result[2 * i] = f16x2_mul_add(byte_permute(bytes, 0x6464_6464, 0x4140), 0x3c00_3c00, 0xe480_e480);
        result[2 * i + 1] = f16x2_mul_add(byte_permute(bytes, 0x6464_6464, 0x4342), 0x3c00_3c00, 0xe480_e480);
    }
    result
}

/// Pairs of e4m3.
#[device]
fn pairs_of_fp8<const W: usize, const P: usize>(from: [u32; W]) -> [u32; P] {
    let mut result = [0u32; P];
    for i in 0..W {
        result[2 * i] = f16x2_from_e4m3(from[i]);
        result[2 * i + 1] = f16x2_from_e4m3(from[i] >> 16u32);
    }
    result
}

/// Pairs of mlx-native, from the codebook at entry `codebook`.
#[device]
fn pairs_of_mlx<const FORMAT: u32, const W: usize, const P: usize>(
    from: [u32; W],
    codebook: u32,
    codebooks: &Buffer<f32>,
) -> [u32; P] {
    let mut result = [0u32; P];
    let bits = select(FORMAT == MLX4, 4u32, 8u32);
    for i in 0..W {
        for n in 0..P / W {
            let codes = from[i] >> (2 * bits * n as u32);
            let low = codebooks[codebook + (codes & ((1u32 << bits) - 1))];
            let high = codebooks[codebook + (codes >> bits & ((1u32 << bits) - 1))];
            result[P / W * i + n] = f16x2_from(low, high);
        }
    }
    result
}

/// Words of two keys: one of each coordinate.
#[device]
pub struct Transposed<const P: usize> {
    /// Of the first coordinate of each pair.
    pub first: [u32; P],
    /// Of the second coordinate.
    pub second: [u32; P],
}

/// Decodes a lane's words of the rows of two keys to words of one coordinate of both, for products of 16 bits. `halves` are the norms
/// of the halves of each row, relative to its scale.
#[device]
#[inline(always)]
pub fn transposed_pairs<
    const FORMAT: u32,
    const D: usize,
    const LANES: usize,
    const W: usize,
    const P: usize,
>(
    from: [[u32; W]; 2],
    halves: [[f32; 2]; 2],
    lane: u32,
    levels: Levels,
    codebooks: &Buffer<f32>,
    nibbles: &Shared<u8>,
) -> Transposed<P> {
    if uses_nibbles(FORMAT, D as u32, LANES as u32) {
        return transposed_nibbles::<W, P>(from, levels, nibbles);
    }
    if (FORMAT == INT8 || FORMAT == FP8) && !gathered(FORMAT, D as u32, LANES as u32) {
        return transposed_bytes::<FORMAT, W, P>(from);
    }
    transpose::<FORMAT, D, LANES, W, P>(from, halves, lane, levels, codebooks, nibbles)
}

/// The same for any format: decodes both rows, then transposes.
#[device]
fn transpose<const FORMAT: u32, const D: usize, const LANES: usize, const W: usize, const P: usize>(
    from: [[u32; W]; 2],
    halves: [[f32; 2]; 2],
    lane: u32,
    levels: Levels,
    codebooks: &Buffer<f32>,
    nibbles: &Shared<u8>,
) -> Transposed<P> {
    let even_pairs = pairs::<FORMAT, D, LANES, W, P>(from[0], lane, levels, codebooks, nibbles);
    let even = with_half_norms::<FORMAT, D, LANES, P>(even_pairs, lane, halves[0]);
    let odd_pairs = pairs::<FORMAT, D, LANES, W, P>(from[1], lane, levels, codebooks, nibbles);
    let odd = with_half_norms::<FORMAT, D, LANES, P>(odd_pairs, lane, halves[1]);
    let mut words = Transposed::<P> { first: [0u32; P], second: [0u32; P] };
    for i in 0..P {
        words.first[i] = byte_permute(even[i], odd[i], 0x5410);
        words.second[i] = byte_permute(even[i], odd[i], 0x7632);
    }
    words
}

/// The same of `tq4`: nibbles of both rows become bytes of one coordinate.
#[device]
fn transposed_nibbles<const W: usize, const P: usize>(
    from: [[u32; W]; 2],
    levels: Levels,
    nibbles: &Shared<u8>,
) -> Transposed<P> {
    let mut words = Transposed::<P> { first: [0u32; P], second: [0u32; P] };
    for i in 0..W {
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

/// The same of `int8` and e4m3: bytes of both rows are brought together before they are converted.
#[device]
fn transposed_bytes<const FORMAT: u32, const W: usize, const P: usize>(from: [[u32; W]; 2]) -> Transposed<P> {
    let mut words = Transposed::<P> { first: [0u32; P], second: [0u32; P] };
    for i in 0..W {
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

/// The scale of a row.
#[device]
pub struct Scale {
    /// The scale of the row; where the halves have norms of their own, of the greater one.
    pub whole: f32,
    /// The norms of the halves over `whole`, where they have norms of their own.
    pub halves: [f32; 2],
}

/// What decoded codes are multiplied by, beside the scale of their row: levels are decoded to integers.
#[device]
pub fn code_unit(format: u32, dim: u32) -> f32 {
    if is_mlx(format) {
        return select(dim == 512, 1.0, 0.0625);
    }
    select(format == FP8, 0.003_906_25, 0.007_812_5)
}

/// The words of a row's scale as they lie in memory, to be fetched ahead of their use as codes are: one, or the norms of both halves;
/// zeros of elements.
#[device]
pub fn fetch_scale<const FORMAT: u32, const D: usize>(memory: &Buffer<u8>, row: Row) -> [u32; 2] {
    let mut words = [0u32; 2];
    if is_mlx(FORMAT) {
        let first = memory.load_as::<u32, 1>(row.scale);
        words[0] = first[0];
        if has_half_norms(FORMAT, D as u32) {
            let second = memory.load_as::<u32, 1>(row.scale + 4);
            words[1] = second[0];
        }
    } else if is_codes(FORMAT) {
        if (first_bytes(FORMAT, D as u32) + second_bytes(FORMAT, D as u32)) % 2 == 0 {
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
pub fn scale_of<const FORMAT: u32, const D: usize>(words: [u32; 2]) -> Scale {
    let mut scale = Scale { whole: 1.0, halves: [1.0, 1.0] };
    if is_mlx(FORMAT) {
        let first = f32::from_bits(words[0]);
        scale.whole = first;
        if has_half_norms(FORMAT, D as u32) {
            let second = f32::from_bits(words[1]);
            scale.whole = first.max(second);
            let inverse = select(scale.whole > 0.0, 1.0 / scale.whole, 0.0);
            scale.halves[0] = first * inverse;
            scale.halves[1] = second * inverse;
        }
        scale.whole *= code_unit(FORMAT, D as u32);
    } else if is_codes(FORMAT) {
        // The bit of the sign is the encoder's: a scale has none.
        let number = pair_f16(words[0] & 0x7fff);
        scale.whole = number[0] * code_unit(FORMAT, D as u32);
    }
    scale
}

/// Multiplies pairs of a row by the norm of their half, where each half has a norm of its own.
#[device]
pub fn with_half_norms<const FORMAT: u32, const D: usize, const LANES: usize, const P: usize>(
    from: [u32; P],
    lane: u32,
    norms: [f32; 2],
) -> [u32; P] {
    let mut result = from;
    if has_half_norms(FORMAT, D as u32) {
        let first = f16x2_from(norms[0], norms[0]);
        let second = f16x2_from(norms[1], norms[1]);
        for i in 0..P {
            let in_second = coordinate::<FORMAT, D, LANES>(lane, 2 * i as u32) >= 256;
            result[i] = f16x2_mul_add(from[i], select(in_second, second, first), 0u32);
        }
    }
    result
}

/// Whether one of a lane's words of a row has a NaN or an infinity.
#[device]
pub fn has_nonfinite<const FORMAT: u32, const D: usize, const LANES: usize, const W: usize>(
    words: [u32; W],
) -> bool {
    let mut found = false;
    // Gathered codes are f16 already.
    let is_f16 = FORMAT == F16 || (FORMAT == FP8 && gathered(FORMAT, D as u32, LANES as u32));
    for i in 0..W {
        if FORMAT == F32 {
            found = found || words[i] & 0x7f80_0000 == 0x7f80_0000;
        } else if is_f16 {
            found = found || words[i] & 0x7c00 == 0x7c00 || words[i] & 0x7c00_0000 == 0x7c00_0000;
        } else if FORMAT == BF16 {
            found = found || words[i] & 0x7f80 == 0x7f80 || words[i] & 0x7f80_0000 == 0x7f80_0000;
        } else if FORMAT == FP8 {
            found = found || ((words[i] & 0x7f7f_7f7f) + 0x0101_0101) & 0x8080_8080 != 0;
        }
    }
    found
}
