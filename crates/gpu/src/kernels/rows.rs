//! Rows of keys and values as a lane of a matrix multiplication holds them.
//!
//! A row is shared by `LANES` lanes, 4 of a key and 8 of a value. It comes as words, which can be asked for ahead ([`fetch`]), and
//! becomes pairs of numbers when it is used ([`pairs`]): `P` of them, each in one word for f16 and bf16 and in two (`E`) for f32. Which
//! coordinates a lane has is the format's choice, as long as the query and the sums follow it ([`coordinate`]):
//!
//! | format | a lane has |
//! |---|---|
//! | elements, bytes, nibbles of mlx | pieces of `PIECE` bytes, every `LANES`th one |
//! | `tq2` to `tq6` in multiples of 64 coordinates | words of the planes; coordinates half a block apart, which share bytes, are pairs |
//! | any other | neighbouring coordinates, gathered one by one |
//!
//! Levels of codes are whole numbers up to 127, exact in f16. The two bytes of a magnitude are looked up four codes at a time by
//! `byte_permute`: a table of eight bytes is two registers.

use super::formats::{BF16, F16, F32, FP8, INT8, MLX4, TQ2, TQ3, TQ4, TQ5, TQ6};
use super::formats::{first_bytes, in_planes, scale_bytes, second_bytes};
use flashtile_kernel::prelude::*;

/// What is known of a format when its codes are read: the bytes of the magnitudes of `tq`, as f16, four to a word: 32 low bytes, then 32
/// high ones; and where the codebook of `mlx` starts among the codebooks.
#[device]
pub struct Levels {
    /// Magnitudes of the levels of `tq`.
    pub magnitudes: [u32; 16],
    /// First entry of the codebook of mlx-native.
    pub codebook: u32,
}

/// Words at a byte that is a multiple of `ALIGN`.
#[device]
pub fn words<const W: usize, const ALIGN: usize>(memory: &Buffer<u8>, at: u64) -> [u32; W] {
    let mut words = [0u32; W];
    if ALIGN >= 16 && W % 4 == 0 {
        for i in 0..W / 4 {
            let piece = memory.load_as::<u32, 4>(at + (i * 16) as u64);
            for n in 0..4usize {
                words[4 * i + n] = piece[n];
            }
        }
    } else if ALIGN >= 8 && W % 2 == 0 {
        for i in 0..W / 2 {
            let piece = memory.load_as::<u32, 2>(at + (i * 8) as u64);
            for n in 0..2usize {
                words[2 * i + n] = piece[n];
            }
        }
    } else if ALIGN >= 4 {
        for i in 0..W {
            let piece = memory.load_as::<u32, 1>(at + (i * 4) as u64);
            words[i] = piece[0];
        }
    } else if ALIGN >= 2 {
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

/// Whether rows of a format are gathered one coordinate at a time.
#[device]
pub fn gathered(format: u32, dim: u32, lanes: u32) -> bool {
    if in_planes(format) {
        return dim % 64 != 0;
    }
    first_bytes(format, dim) % (4 * lanes) != 0
}

/// Coordinate number `index` of a lane.
#[device]
pub fn coordinate<const FORMAT: u32, const D: usize, const LANES: usize, const PIECE: usize>(
    lane: u32,
    index: u32,
) -> u32 {
    let dim = D as u32;
    let lanes = LANES as u32;
    if gathered(FORMAT, dim, lanes) {
        return lane * (dim / lanes) + index;
    }
    if in_planes(FORMAT) {
        // Whole blocks of 128 coordinates have 16 units of 8, a last one of 64 has 8.
        let block = index / (128 / lanes);
        let size = (dim - 128 * block).min(128);
        let within = index % (128 / lanes);
        let unit = lane * (size / (8 * lanes)) + within / 8;
        return 128 * block + 4 * unit + within % 8 / 2 + (within % 2) * (size / 2);
    }
    // Coordinates of a piece: 2 nibbles to a byte, or bytes of an element.
    let coordinates = PIECE as u32 * dim / first_bytes(FORMAT, dim);
    index / coordinates * lanes * coordinates + lane * coordinates + index % coordinates
}

/// Where a row lies: bytes at which its elements or codes start, its second plane, and its scale.
#[device]
pub struct Row {
    /// Byte at which elements, or codes of the first plane, start.
    pub first: u64,
    /// Byte at which codes of the second plane start.
    pub second: u64,
    /// Byte of the scale.
    pub scale: u64,
}

/// Where rows of a head lie: bytes at which its first page's planes and scales start, from page to page, and from row to row of
/// elements.
#[device]
pub struct Source {
    /// Row 0 of the first page.
    pub planes: Row,
    /// Bytes from page to page.
    pub page: u64,
    /// Bytes from row to row of elements.
    pub row: u64,
}

/// Rows of a head: of pages of `tokens` rows of codes, or of elements.
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
    if FORMAT >= INT8 {
        stride = first_bytes(FORMAT, D as u32) as u64;
    }
    let place = Row {
        first: source.planes.first + offset + at * stride,
        second: source.planes.second + offset + at * second_bytes(FORMAT, D as u32) as u64,
        scale: source.planes.scale + offset + at * scale_bytes(FORMAT, D as u32) as u64,
    };
    place
}

/// The words of a lane of a row, before they are looked at.
#[device]
pub fn fetch<
    const FORMAT: u32,
    const D: usize,
    const LANES: usize,
    const W: usize,
    const PIECE: usize,
    const ALIGN: usize,
>(
    memory: &Buffer<u8>,
    row: Row,
    lane: u32,
    levels: Levels,
    codebooks: &Buffer<f32>,
) -> [u32; W] {
    let mut words_of = [0u32; W];
    if gathered(FORMAT, D as u32, LANES as u32) {
        let first = lane * (D / LANES) as u32;
        for i in 0..W {
            let low = gather::<FORMAT, D>(memory, row, first + 2 * i as u32, levels, codebooks);
            let high = gather::<FORMAT, D>(memory, row, first + 2 * i as u32 + 1, levels, codebooks);
            words_of[i] = f16x2_from(low, high);
        }
    } else if in_planes(FORMAT) {
        // Words of a plane of a block of 128; those of the second plane follow those of the first.
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
                        let four = words::<4, ALIGN>(memory, at);
                        for n in 0..4usize {
                            words_of[into + n] = four[n];
                        }
                    } else if count == 2 {
                        let two = words::<2, ALIGN>(memory, at);
                        for n in 0..2usize {
                            words_of[into + n] = two[n];
                        }
                    } else {
                        let one = words::<1, ALIGN>(memory, at);
                        words_of[into] = one[0];
                    }
                }
            }
        }
    } else {
        let step = (LANES * PIECE) as u64;
        let at = row.first + (lane * PIECE as u32) as u64;
        if PIECE == 16 {
            for i in 0..W / 4 {
                let piece = words::<4, ALIGN>(memory, at + i as u64 * step);
                for n in 0..4usize {
                    words_of[4 * i + n] = piece[n];
                }
            }
        } else if PIECE == 8 {
            for i in 0..W / 2 {
                let piece = words::<2, ALIGN>(memory, at + i as u64 * step);
                for n in 0..2usize {
                    words_of[2 * i + n] = piece[n];
                }
            }
        } else {
            for i in 0..W {
                let piece = words::<1, ALIGN>(memory, at + i as u64 * step);
                words_of[i] = piece[0];
            }
        }
    }
    words_of
}

/// Bits of a code in a plane; 0 where there is none.
#[device]
pub fn plane_bits(format: u32, plane: u32) -> u32 {
    if plane == 0 {
        return select(format >= TQ4, 4u32, 2u32);
    }
    if format == TQ6 {
        return 2;
    }
    if format == TQ3 || format == TQ5 {
        return 1;
    }
    0
}

/// The bits of a coordinate's code in a plane whose row starts at a byte.
#[device]
pub fn plane_code<const D: usize>(memory: &Buffer<u8>, start: u64, coordinate: u32, bits: u32) -> u32 {
    let block = coordinate / 128;
    let within = coordinate % 128;
    let size = (D as u32 - 128 * block).min(128);
    let bytes = (size * bits).div_ceil(8);
    let byte = memory[start + (block * 16 * bits + within % bytes) as u64] as u32;
    byte >> (within / bytes * bits) & ((1u32 << bits) - 1)
}

/// The number of a coordinate of codes or elements, without the row's scale.
#[device]
pub fn gather<const FORMAT: u32, const D: usize>(
    memory: &Buffer<u8>,
    row: Row,
    coordinate: u32,
    levels: Levels,
    codebooks: &Buffer<f32>,
) -> f32 {
    let at = row.first + coordinate as u64;
    if FORMAT == F32 {
        let bits = memory.load_as::<u32, 1>(at + 3 * coordinate as u64);
        return f32::from_bits(bits[0]);
    }
    if FORMAT == F16 || FORMAT == BF16 {
        let bits = memory.load_as::<u16, 1>(at + coordinate as u64);
        let both = bits[0] as u32;
        if FORMAT == F16 {
            let number = pair_f16(both);
            return number[0];
        }
        let number = pair_bf16(both);
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

/// The number of an e4m3 code.
#[device]
pub fn e4m3(code: u32) -> f32 {
    let magnitude = code & 127;
    if magnitude == 127 {
        return f32::NAN;
    }
    // An exponent of four bits in the place of five; the bias is made up for by 2^8.
    let number = pair_f16(magnitude << 7u32 | (code & 128) << 8u32);
    256.0 * number[0]
}

/// Four bytes of magnitudes of codes of `tq`, from table `first` on: nibbles of the low half of `selector` name them among eight,
/// bytes of `upper` and `highest` are all ones where the fourth and the fifth bit of the index are set.
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

/// Eight codes of `tq`, of neighbouring bytes of a block, as four pairs of f16: coordinate `c` and the one half a block on. `first` and
/// `second` are words of the planes, `part` the place of `c`'s bits in a byte of a plane of 2 and of 1 bits.
#[device]
pub fn unit<const FORMAT: u32>(levels: Levels, first: u32, second: u32, part2: u32, part1: u32) -> [u32; 4] {
    // Bytes of these words have, in their top bits, the sign of the codes of the low and of the high half of the block.
    let mut low_signs = first << 4u32;
    let mut high_signs = first;
    let mut indices = first & 0x7777_7777;
    // The same for the fifth bit of the index.
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

/// A lane's part of a row as pairs of numbers, without the row's scale: words of two f16 or bf16, or two words of f32 (`E`).
#[device]
pub fn pairs<
    const FORMAT: u32,
    const D: usize,
    const LANES: usize,
    const W: usize,
    const PE: usize,
    const E: usize,
>(
    from: [u32; W],
    lane: u32,
    levels: Levels,
    codebooks: &Buffer<f32>,
) -> [u32; PE] {
    let mut result = [0u32; PE];
    if FORMAT == F32
        || gathered(FORMAT, D as u32, LANES as u32)
        || ((FORMAT == F16 || FORMAT == BF16) && E == 1)
    {
        for i in 0..PE {
            result[i] = from[i];
        }
    } else if FORMAT == F16 || FORMAT == BF16 {
        for i in 0..PE / 2 {
            let mut both = pair_f16(from[i]);
            if FORMAT == BF16 {
                both = pair_bf16(from[i]);
            }
            result[2 * i] = both[0].to_bits();
            result[2 * i + 1] = both[1].to_bits();
        }
    } else if in_planes(FORMAT) {
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
                let four =
                    unit::<FORMAT>(levels, from[at], second, c / (size / 4) as u32, c / (size / 8) as u32);
                for i in 0..4usize {
                    result[4 * at + i] = four[i];
                }
            }
        }
    } else if FORMAT == INT8 {
        for i in 0..W {
            // 1024 + byte is an f16 with the byte as its last bits.
            let bytes = from[i] ^ 0x8080_8080;
            result[2 * i] = f16x2_mul_add(byte_permute(bytes, 0x6464_6464, 0x4140), 0x3c00_3c00, 0xe480_e480);
            result[2 * i + 1] =
                f16x2_mul_add(byte_permute(bytes, 0x6464_6464, 0x4342), 0x3c00_3c00, 0xe480_e480);
        }
    } else if FORMAT == FP8 {
        for i in 0..W {
            for half in 0..2usize {
                let word = byte_permute(0u32, from[i], select(half == 0, 0x5040u32, 0x7060u32));
                // An exponent of four bits in the place of five; the bias is made up for by 2^8.
                let shifted = word & 0x8000_8000 | (word & 0x7f00_7f00) >> 1u32;
                result[2 * i + half] = f16x2_mul_add(shifted, 0x5c00_5c00, 0u32);
            }
            // Top bits of the bytes that are no numbers: there are none in what an encoder has written.
            let none = ((from[i] & 0x7f7f_7f7f) + 0x0101_0101) & 0x8080_8080;
            if none != 0 {
                result[2 * i] |= (byte_permute(0u32, none, 0x5040) >> 15u32) * 0x7e00;
                result[2 * i + 1] |= (byte_permute(0u32, none, 0x7060) >> 15u32) * 0x7e00;
            }
        }
    } else if FORMAT == MLX4 {
        for i in 0..W {
            for n in 0..4usize {
                let byte = from[i] >> (8 * n as u32);
                let low = codebooks[levels.codebook + (byte & 15)];
                let high = codebooks[levels.codebook + (byte >> 4u32 & 15)];
                result[4 * i + n] = f16x2_from(low, high);
            }
        }
    } else {
        for i in 0..W {
            for n in 0..2usize {
                let bytes = from[i] >> (16 * n as u32);
                let low = codebooks[levels.codebook + (bytes & 255)];
                let high = codebooks[levels.codebook + (bytes >> 8u32 & 255)];
                result[2 * i + n] = f16x2_from(low, high);
            }
        }
    }
    result
}
