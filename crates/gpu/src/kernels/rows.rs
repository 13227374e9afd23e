//! Rows of keys and values as the lanes of a matrix product hold them.
//!
//! `LANES` lanes share a row: of decode 4 lanes a key row and 8 lanes a value row, of prefill 8 lanes any row. A lane loads its `WORDS` words ahead of their use
//! ([`fetch`]) and decodes them to pairs of coordinates when they are used ([`pairs`](super::pairs)): `PAIR_WORDS` words, one a pair for f16
//! and bf16, two for f32. The format chooses which coordinates a lane holds; the query and the output follow it
//! ([`coordinate`]):
//!
//! | format | a lane holds |
//! |---|---|
//! | elements, codes of a byte or of two, nibbles of mlx-native | every `LANES`th run of [`piece_bytes`] bytes |
//! | `tq2` to `tq6`, `DIM` a multiple of 64 | words of the planes; a pair is two coordinates half a block apart, whose codes share a byte |
//! | all others | [`padded`]`(DIM) / LANES` neighbouring coordinates, gathered one by one; those beyond the row are zeros |

use super::formats::{
    BF16, F16, F32, FP8, INT8, MLX4, ROT16, first_bytes, in_planes, is_codes, is_half, padded, plane_bits,
    scale_bytes, second_bytes,
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
    /// Of `tq4`: copies of the table of [`fill_nibbles`](super::nibbles::fill_nibbles).
    pub copies: u32,
}

/// Returns true if rows of a format are gathered one coordinate at a time.
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

/// The alignment of a lane's words, in bytes, where the memory of rows and the strides between them are
/// multiples of `aligned`, a power of two.
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

/// `WORDS` words from byte `at` on, a multiple of `align`.
#[device]
pub fn words<const WORDS: usize>(memory: &Buffer<u8>, at: u64, align: u32) -> [u32; WORDS] {
    let mut words = [0u32; WORDS];
    if align >= 16 && WORDS % 4 == 0 {
        for i in 0..WORDS / 4 {
            let piece = memory.load_as::<u32, 4>(at + (i * 16) as u64);
            for n in 0..4usize {
                words[4 * i + n] = piece[n];
            }
        }
    } else if align >= 8 && WORDS % 2 == 0 {
        for i in 0..WORDS / 2 {
            let piece = memory.load_as::<u32, 2>(at + (i * 8) as u64);
            for n in 0..2usize {
                words[2 * i + n] = piece[n];
            }
        }
    } else if align >= 4 {
        for i in 0..WORDS {
            let piece = memory.load_as::<u32, 1>(at + (i * 4) as u64);
            words[i] = piece[0];
        }
    } else if align >= 2 {
        for i in 0..WORDS {
            let low = memory.load_as::<u16, 1>(at + (i * 4) as u64);
            let high = memory.load_as::<u16, 1>(at + (i * 4 + 2) as u64);
            words[i] = low[0] as u32 | (high[0] as u32) << 16u32;
        }
    } else {
        for i in 0..WORDS {
            for n in 0..4usize {
                words[i] |= (memory[at + (i * 4 + n) as u64] as u32) << (8 * n as u32);
            }
        }
    }
    words
}

/// The coordinate that a lane holds at `index`, below [`padded`]`(DIM) / LANES`.
#[device]
pub fn coordinate<const FORMAT: u32, const DIM: usize, const LANES: usize>(lane: u32, index: u32) -> u32 {
    let dim = DIM as u32;
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
pub fn source_at<const FORMAT: u32, const DIM: usize>(
    start: u64,
    page: u64,
    row: u64,
    tokens: u32,
) -> Source {
    let all = tokens as u64;
    let first = first_bytes(FORMAT, DIM as u32) as u64;
    let both = first + second_bytes(FORMAT, DIM as u32) as u64;
    let planes = Row { first: start, second: start + all * first, scale: start + all * both };
    let source = Source { planes: planes, page: page, row: row };
    source
}

/// Row `row` of page `page`.
#[device]
pub fn row_at<const FORMAT: u32, const DIM: usize>(source: Source, page: u64, row: u32) -> Row {
    let offset = page * source.page;
    let at = row as u64;
    let mut stride = source.row;
    if is_codes(FORMAT) {
        stride = first_bytes(FORMAT, DIM as u32) as u64;
    }
    let place = Row {
        first: source.planes.first + offset + at * stride,
        second: source.planes.second + offset + at * second_bytes(FORMAT, DIM as u32) as u64,
        scale: source.planes.scale + offset + at * scale_bytes(FORMAT, DIM as u32) as u64,
    };
    place
}

/// A lane's words of a row, not yet decoded. Rows are at multiples of `row_align` bytes, as far as their format
/// has them there: [`word_align`].
#[device]
pub fn fetch<const FORMAT: u32, const DIM: usize, const LANES: usize, const WORDS: usize>(
    memory: &Buffer<u8>,
    row: Row,
    lane: u32,
    levels: Levels,
    codebooks: &Buffer<f32>,
    row_align: u32,
) -> [u32; WORDS] {
    if gathered(FORMAT, DIM as u32, LANES as u32) {
        return fetch_gathered::<FORMAT, DIM, LANES, WORDS>(memory, row, lane, levels, codebooks);
    }
    if in_planes(FORMAT) {
        return fetch_planes::<FORMAT, DIM, LANES, WORDS>(memory, row, lane, row_align);
    }
    fetch_pieces::<FORMAT, DIM, LANES, WORDS>(memory, row.first, lane, row_align)
}

/// Words of two neighbouring coordinates: of codes as f16, of elements as they are. Coordinates beyond the row are zeros.
#[device]
fn fetch_gathered<const FORMAT: u32, const DIM: usize, const LANES: usize, const WORDS: usize>(
    memory: &Buffer<u8>,
    row: Row,
    lane: u32,
    levels: Levels,
    codebooks: &Buffer<f32>,
) -> [u32; WORDS] {
    let mut result = [0u32; WORDS];
    let first = lane * (padded(DIM as u32) / LANES as u32);
    for i in 0..WORDS {
        if FORMAT == F32 {
            result[i] = element_bits::<FORMAT, DIM>(memory, row, first + i as u32);
        } else if is_half(FORMAT) {
            let low = element_bits::<FORMAT, DIM>(memory, row, first + 2 * i as u32);
            let high = element_bits::<FORMAT, DIM>(memory, row, first + 2 * i as u32 + 1);
            result[i] = low | high << 16u32;
        } else {
            let low = gather::<FORMAT, DIM>(memory, row, first + 2 * i as u32, levels, codebooks);
            let high = gather::<FORMAT, DIM>(memory, row, first + 2 * i as u32 + 1, levels, codebooks);
            result[i] = f16x2_from(low, high);
        }
    }
    result
}

/// The bits of an f32, f16 or bf16; 0 beyond the row.
#[device]
fn element_bits<const FORMAT: u32, const DIM: usize>(memory: &Buffer<u8>, row: Row, coordinate: u32) -> u32 {
    if coordinate >= DIM as u32 {
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
fn fetch_planes<const FORMAT: u32, const DIM: usize, const LANES: usize, const WORDS: usize>(
    memory: &Buffer<u8>,
    row: Row,
    lane: u32,
    row_align: u32,
) -> [u32; WORDS] {
    let mut result = [0u32; WORDS];
    let align = word_align(FORMAT, DIM as u32, LANES as u32, row_align);
    let whole = 16 / LANES;
    for block in 0..(DIM + 127) / 128 {
        let size = (DIM - 128 * block).min(128);
        let count = size / (8 * LANES);
        let unit = lane * count as u32;
        for plane in 0..2usize {
            let bits = plane_bits(FORMAT, plane as u32);
            if bits > 0 {
                let start =
                    select(plane == 0, row.first, row.second) + (128 * block as u64 * bits as u64) / 8;
                let at = start + (4 * unit % (size as u32 * bits / 8)) as u64;
                let into = plane * (DIM / (8 * LANES)) + whole * block;
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
fn fetch_pieces<const FORMAT: u32, const DIM: usize, const LANES: usize, const WORDS: usize>(
    memory: &Buffer<u8>,
    first: u64,
    lane: u32,
    row_align: u32,
) -> [u32; WORDS] {
    let mut result = [0u32; WORDS];
    let align = word_align(FORMAT, DIM as u32, LANES as u32, row_align);
    let piece = piece_bytes(FORMAT, DIM as u32, LANES as u32);
    let step = (LANES as u32 * piece) as u64;
    let at = first + (lane * piece) as u64;
    if piece == 16 {
        for i in 0..WORDS / 4 {
            let four = words::<4>(memory, at + i as u64 * step, align);
            for n in 0..4usize {
                result[4 * i + n] = four[n];
            }
        }
    } else if piece == 8 {
        for i in 0..WORDS / 2 {
            let two = words::<2>(memory, at + i as u64 * step, align);
            for n in 0..2usize {
                result[2 * i + n] = two[n];
            }
        }
    } else {
        for i in 0..WORDS {
            let one = words::<1>(memory, at + i as u64 * step, align);
            result[i] = one[0];
        }
    }
    result
}

/// The bits of a coordinate's code in a plane, whose part of the row starts at byte `start`.
#[device]
pub fn plane_code<const DIM: usize>(memory: &Buffer<u8>, start: u64, coordinate: u32, bits: u32) -> u32 {
    let block = coordinate / 128;
    let within = coordinate % 128;
    let size = (DIM as u32 - 128 * block).min(128);
    let bytes = (size * bits).div_ceil(8);
    let byte = memory[start + (block * 16 * bits + within % bytes) as u64] as u32;
    byte >> (within / bytes * bits) & ((1u32 << bits) - 1)
}

/// The value of one coordinate, without the row's scale; 0 beyond the row.
#[device]
pub fn gather<const FORMAT: u32, const DIM: usize>(
    memory: &Buffer<u8>,
    row: Row,
    coordinate: u32,
    levels: Levels,
    codebooks: &Buffer<f32>,
) -> f32 {
    if coordinate >= DIM as u32 {
        return 0.0;
    }
    let at = row.first + coordinate as u64;
    if FORMAT == F32 || is_half(FORMAT) {
        let bits = element_bits::<FORMAT, DIM>(memory, row, coordinate);
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
    let mut code = plane_code::<DIM>(memory, row.first, coordinate, first);
    if second > 0 {
        code |= plane_code::<DIM>(memory, row.second, coordinate, second) << first;
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

/// Returns true if one of a lane's words of a row has a NaN or an infinity.
#[device]
pub fn has_nonfinite<const FORMAT: u32, const DIM: usize, const LANES: usize, const WORDS: usize>(
    words: [u32; WORDS],
) -> bool {
    let mut found = false;
    // Gathered codes are f16 already.
    let is_f16 =
        FORMAT == F16 || FORMAT == ROT16 || (FORMAT == FP8 && gathered(FORMAT, DIM as u32, LANES as u32));
    for i in 0..WORDS {
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
