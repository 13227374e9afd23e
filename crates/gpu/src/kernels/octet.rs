//! The encoder of rows in registers: a SIMD group encodes four rows at a time, eight lanes each.
//!
//! Lane `l` of an octet has the coordinates `8 k + l` of its row, `LANE_COORDINATES = DIM / 8` of them: bytes of every plane come from the
//! coordinates of one lane, and sixteen partial sums of an energy are two of each lane. A lane is also the trial `l` of
//! the row's scale, so that no lane repeats what another computes.
//!
//! Decisions that depend on integers of 64 bits are first tried in f32. Where f32 decides, within a bound on
//! its error, the integers are not computed: a few rows in a hundred need them.

use super::formats::{ROT16, TQ2, in_planes, is_codes, is_mlx, plane_bits, scale_bytes};
use super::quantize::{FLOATS, HALVES, INTEGERS, MIN_MAGNITUDE, ONE, TO_E4M3, TO_INTEGER};
use super::quantize::{e4m3_of, factor_of, quotient, rounded, scale_of, stepped};
use super::rows::Row;
use flashtile_kernel::prelude::*;

/// The square of the largest norm that is stored.
#[constant]
pub const MAX_ENERGY: f32 = flashtile_core::codec::MAX_NORM * flashtile_core::codec::MAX_NORM;

/// An energy up to this is below the limit in any order of summation: sums of 512 squares differ by at most 4e-5.
#[constant]
const SHORT: f32 = 0.99 * flashtile_core::codec::MAX_NORM * flashtile_core::codec::MAX_NORM;

/// A number below 2^22 plus this has no fraction, and its integer in the last bits; so has a magnitude plus 2^23.
#[constant]
const ROUNDER: f32 = 12_582_912.0;
#[constant]
const MAGNITUDE_ROUNDER: f32 = 8_388_608.0;

/// The addend that rounds to half levels, and its bits: see [`entry_of`].
#[constant]
const BELOW_INTEGERS: f32 = 8_388_607.5;
#[constant]
const BELOW_INTEGERS_BITS: u32 = 0x4aff_ffff;

/// Entries of the tables of levels and of their indices.
#[constant]
pub const ENTRIES: u32 = 256;

/// 2^-19. Estimates of f64 results are off by less than half of it, relative to themselves: at most two
/// `rsqrt` with errors of 2^-22, four products and three conversions of 2^-24.
#[constant]
const DOUBT: f32 = 1.907_348_6e-6;

/// Returns true if rows of a format and dimension are encoded in octets.
#[device]
#[inline]
pub const fn in_octets(format: u32, dim: u32) -> bool {
    is_codes(format) && !is_mlx(format) && dim >= 64 && dim <= 512 && dim & (dim - 1) == 0
}

/// Coordinates of a lane; 4 where rows are not encoded in octets, for code that is compiled but does not run.
pub const fn octet_coordinates(format: u32, dim: usize) -> usize {
    if in_octets(format, dim as u32) { dim / 8 } else { 4 }
}

/// Threadgroups that a core is to hold: for which registers hold all rows; 0 for any number.
pub const fn encode_resident(format: u32, dim: usize) -> u32 {
    match dim {
        64 if in_octets(format, 64) => 7,
        128 if in_octets(format, 128) => 5,
        256 if in_octets(format, 256) => 3,
        512 if in_octets(format, 512) => 2,
        _ => 0,
    }
}

/// The number of half levels of an entry of the tables: the first two have none, and those above the last are beyond
/// the edges of every format.
#[device]
#[inline]
pub const fn half_levels_of(entry: u32) -> u32 {
    entry.saturating_sub(1)
}

/// The rotation of an octet.
#[device]
pub struct OctetRotation {
    /// Bit `k` is set where coordinate `8 k + l` changes its sign.
    pub signs: [u32; 2],
    /// 1 over the root of `DIM`.
    pub root: f32,
}

/// The lane's part of a rotation whose `factors` are the signs, then 1 over the root of `DIM`. There is none of order 0.
#[device]
pub fn octet_rotation<const ORDER: u32, const LANE_COORDINATES: usize>(
    factors: &Buffer<f32>,
) -> OctetRotation {
    let lane = simd_lane() % 8;
    let mut rotation = OctetRotation { signs: [0u32, 0u32], root: 1.0 };
    if ORDER > 0 {
        for k in (0..LANE_COORDINATES).rev() {
            let sign = factors[8 * k as u32 + lane].to_bits() >> 31u32;
            rotation.signs[k / 32] = rotation.signs[k / 32] << 1u32 | sign;
        }
        rotation.root = factors[8 * LANE_COORDINATES as u32];
    }
    rotation
}

/// The sum over the lanes of an octet, the same in all of them.
#[device]
fn octet_sum<T: Number>(x: T) -> T {
    let pair = x + simd_shuffle_xor(x, 1);
    let four = pair + simd_shuffle_xor(pair, 2);
    four + simd_shuffle_xor(four, 4)
}

/// The greatest over the lanes of an octet.
#[device]
fn octet_max(x: f32) -> f32 {
    let pair = x.max(simd_shuffle_xor(x, 1));
    let four = pair.max(simd_shuffle_xor(pair, 2));
    four.max(simd_shuffle_xor(four, 4))
}

/// [`octet_max`] of integers.
#[device]
fn octet_max_u32(x: u32) -> u32 {
    let pair = x.max(simd_shuffle_xor(x, 1));
    let four = pair.max(simd_shuffle_xor(pair, 2));
    four.max(simd_shuffle_xor(four, 4))
}

/// The lanes of an octet for which something holds, as 8 bits.
#[device]
fn octet_ballot(holds: bool) -> u32 {
    simd_ballot(holds) >> (simd_lane() & 24) & 255
}

/// The first lane of the octet.
#[device]
fn octet_lane() -> u32 {
    simd_lane() & 24
}

/// The checks that a row must pass to be stored.
#[device]
pub struct OctetFit {
    /// Its norm is at most the largest one.
    pub fits: bool,
    /// Its elements are finite.
    pub finite: bool,
}

/// Returns true if the energy of a row, summed as the host sums it, is at most [`MAX_ENERGY`]: sixteen sums
/// of every sixteenth square, added from the first to the last.
#[device]
fn exact_fit<const LANE_COORDINATES: usize>(x: [f32; LANE_COORDINATES]) -> bool {
    let mut low = 0.0;
    let mut high = 0.0;
    for k in 0..LANE_COORDINATES / 2 {
        low += x[2 * k] * x[2 * k];
        high += x[2 * k + 1] * x[2 * k + 1];
    }
    let mut sum = 0.0;
    for lane in 0..8u32 {
        sum += simd_shuffle(low, octet_lane() + lane);
    }
    for lane in 0..8u32 {
        sum += simd_shuffle(high, octet_lane() + lane);
    }
    sum <= MAX_ENERGY
}

/// Checks that a row may be stored, and makes it a row of zeros if it may not.
#[device]
pub fn fit_octet<const LANE_COORDINATES: usize>(x: &mut [f32; LANE_COORDINATES]) -> OctetFit {
    let mut sum = 0.0;
    for k in 0..LANE_COORDINATES {
        sum = x[k].mul_add(x[k], sum);
    }
    let mut fit = OctetFit { fits: octet_sum(sum) <= SHORT, finite: true };
    if simd_any(!fit.fits) {
        fit.fits = exact_fit::<LANE_COORDINATES>(*x);
        let mut finite = true;
        for k in 0..LANE_COORDINATES {
            finite = finite && x[k].is_finite();
            x[k] = select(fit.fits, x[k], 0.0);
        }
        fit.finite = octet_ballot(finite) == 255;
    }
    fit
}

/// Rotates a row: every sum is that of [`rotate`](super::rotation::rotate).
#[device]
pub fn rotate_octet<const LANE_COORDINATES: usize>(x: &mut [f32; LANE_COORDINATES], rotation: OctetRotation) {
    for k in 0..LANE_COORDINATES {
        let sign = rotation.signs[k / 32] << (31 - k % 32) as u32 & 0x8000_0000;
        x[k] = f32::from_bits(x[k].to_bits() ^ sign);
    }
    for step in 0..3u32 {
        // The upper lane of a pair has the difference.
        let mine = select(simd_lane() >> step & 1 == 1, -1.0, 1.0);
        for k in 0..LANE_COORDINATES {
            let other = simd_shuffle_xor(x[k], 1u32 << step);
            x[k] = x[k].mul_add(mine, other);
        }
    }
    for step in 0..6u32 {
        let distance = 1usize << step;
        if distance < LANE_COORDINATES {
            for at in 0..LANE_COORDINATES / 2 {
                let low = 2 * at - (at & (distance - 1));
                let a = x[low];
                let b = x[low + distance];
                x[low] = a + b;
                x[low + distance] = a - b;
            }
        }
    }
    for k in 0..LANE_COORDINATES {
        x[k] *= rotation.root;
    }
}

/// The greatest magnitude of a row.
#[device]
fn octet_greatest<const LANE_COORDINATES: usize>(x: [f32; LANE_COORDINATES]) -> f32 {
    let mut most = 0.0;
    for k in 0..LANE_COORDINATES {
        most = x[k].abs().max(most);
    }
    octet_max(most)
}

/// The last bytes of four words.
#[device]
fn last_bytes(a: u32, b: u32, c: u32, d: u32) -> u32 {
    byte_permute(byte_permute(a, b, 0x0040), byte_permute(c, d, 0x0040), 0x5410)
}

/// A lane's coordinates in fixed point.
#[device]
pub struct OctetFixed<const LANE_COORDINATES: usize, const LANE_WORDS: usize> {
    /// Whole numbers.
    x: [f32; LANE_COORDINATES],
    /// The low and the high bytes of their magnitudes, four to a word.
    low: [u32; LANE_WORDS],
    high: [u32; LANE_WORDS],
    /// The sum of squares of the row.
    energy: u64,
}

/// Whole numbers of a row whose greatest magnitude, times `factor`, is [`ONE`].
#[device]
fn fix_octet<const LANE_COORDINATES: usize, const LANE_WORDS: usize>(
    x: [f32; LANE_COORDINATES],
    factor: f32,
) -> OctetFixed<LANE_COORDINATES, LANE_WORDS> {
    let mut fixed = OctetFixed::<LANE_COORDINATES, LANE_WORDS> {
        x: [0.0; LANE_COORDINATES],
        low: [0u32; LANE_WORDS],
        high: [0u32; LANE_WORDS],
        energy: 0,
    };
    let mut bits = [0u32; LANE_COORDINATES];
    for k in 0..LANE_COORDINATES {
        fixed.x[k] = (x[k] * factor + ROUNDER) - ROUNDER;
        bits[k] = (fixed.x[k].abs() + MAGNITUDE_ROUNDER).to_bits();
    }
    // Of low and high bytes l and h: l is summed up as l - 128, as bytes of one factor are signed.
    let mut lows = 0i32;
    let mut squares = -16384 * LANE_COORDINATES as i32;
    let mut mixed = 0i32;
    let mut highs = 0i32;
    for q in 0..LANE_WORDS {
        let first = byte_permute(bits[4 * q], bits[4 * q + 1], 0x5410);
        let second = byte_permute(bits[4 * q + 2], bits[4 * q + 3], 0x5410);
        let low = byte_permute(first, second, 0x6420);
        let high = byte_permute(first, second, 0x7531);
        let moved = low ^ 0x8080_8080;
        lows = dot4_unsigned(low, 0x0101_0101, lows);
        squares = dot4(moved, moved, squares);
        mixed = dot4_unsigned(low, high, mixed);
        highs = dot4_unsigned(high, high, highs);
        fixed.low[q] = low;
        fixed.high[q] = high;
    }
    let below = octet_sum((squares + 256 * lows) as u32);
    let above = octet_sum((mixed + 128 * highs) as u32);
    fixed.energy = above as u64 * 512 + below as u64;
    fixed
}

/// Sums of a row over its codes, and the unit of [`unit_of`] that the codes are found with.
#[device]
struct OctetSums {
    /// Of products of coordinates and codes.
    products: u32,
    /// Of squares of codes.
    squares: u32,
    /// Half levels of a step of fixed point.
    unit: f32,
}

/// The sums of eight numbers over the lanes of an octet: lane `l` gets that of number `l`. Each step gives half of the
/// numbers away, so that 7 shuffles do what eight sums do with 24.
#[device]
pub fn sum_each(numbers: [u32; 8]) -> u32 {
    let lane = simd_lane();
    let mut four = [0u32; 4];
    for n in 0..4usize {
        let upper = lane & 4 != 0;
        let kept = select(upper, numbers[n + 4], numbers[n]);
        let given = select(upper, numbers[n], numbers[n + 4]);
        four[n] = kept + simd_shuffle_xor(given, 4);
    }
    let mut two = [0u32; 2];
    for n in 0..2usize {
        let upper = lane & 2 != 0;
        let kept = select(upper, four[n + 2], four[n]);
        let given = select(upper, four[n], four[n + 2]);
        two[n] = kept + simd_shuffle_xor(given, 2);
    }
    let upper = lane & 1 != 0;
    select(upper, two[1], two[0]) + simd_shuffle_xor(select(upper, two[0], two[1]), 1)
}

/// A factor of [`factor_of`] in units of 2^-16, for [`entry_of`].
#[device]
pub fn unit_of(factor: u32) -> f32 {
    let unit = factor as f32 * 1.525_878_9e-5;
    // Only products with a factor of few odd bits are whole numbers of half levels below 256.
    let may_be_whole = factor >> factor.trailing_zeros() < 256;
    f32::from_bits(unit.to_bits() + select(may_be_whole, 1u32, 0u32))
}

/// The entry of the tables for a coordinate `x` and a unit `u`: the number of half levels `floor(x u)`, plus 1; or 0 for
/// less than one.
///
/// One multiply-add rounds `x u - 1/2` to an integer, as the sum has no fraction. The integer is the floor,
/// unless `x u` is whole and the sum is in the middle between integers. For those products [`unit_of`] makes
/// `u` slightly larger: it adds less than 2^-15 to `x u`, which is a multiple of 2^-15 there, so it reaches
/// no other integer.
#[device]
pub fn entry_of(x: f32, unit: f32) -> u32 {
    (x.abs().mul_add(unit, BELOW_INTEGERS).to_bits() - BELOW_INTEGERS_BITS).min(ENTRIES - 1)
}

/// The sums of the lane's trial, of which `step` is one of [`f64_steps`](crate::encoding::f64_steps).
#[device]
fn try_octet<const FORMAT: u32, const DIM: usize, const LANE_COORDINATES: usize, const LANE_WORDS: usize>(
    fixed: OctetFixed<LANE_COORDINATES, LANE_WORDS>,
    levels: &Shared<u8>,
    step: u64,
) -> OctetSums {
    let energy = stepped(fixed.energy, step, fixed.energy);
    let unit = unit_of(factor_of::<FORMAT, DIM>(energy, simd_lane() % 8));
    let mut products = [0u32; 8];
    let mut squares = [0u32; 8];
    for t in 0..8usize {
        let tried = simd_shuffle(unit, octet_lane() + t as u32);
        let mut low = 0i32;
        let mut high = 0i32;
        let mut square = 0i32;
        for q in 0..LANE_WORDS {
            let a = levels[entry_of(fixed.x[4 * q], tried)] as u32;
            let b = levels[entry_of(fixed.x[4 * q + 1], tried)] as u32;
            let c = levels[entry_of(fixed.x[4 * q + 2], tried)] as u32;
            let d = levels[entry_of(fixed.x[4 * q + 3], tried)] as u32;
            let word = last_bytes(a, b, c, d);
            low = dot4_unsigned(fixed.low[q], word, low);
            high = dot4_unsigned(fixed.high[q], word, high);
            square = dot4_unsigned(word, word, square);
        }
        products[t] = (low + 256 * high) as u32;
        squares[t] = square as u32;
    }
    let sums = OctetSums { products: sum_each(products), squares: sum_each(squares), unit };
    sums
}

/// The first of the lanes of an octet whose `products^2 / squares` is the greatest, as f64 has it.
#[device]
fn exact_best(sums: OctetSums) -> u32 {
    let square = sums.products as u64 * sums.products as u64;
    let explained = quotient(rounded(square, false, 0), sums.squares);
    // Positive f64 are ordered as their bits.
    let high = (explained >> 32u32) as u32;
    let most_high = octet_max_u32(high);
    let low = select(high == most_high, explained as u32, 0);
    let most_low = octet_max_u32(low);
    octet_ballot(high == most_high && low == most_low).trailing_zeros()
}

/// The trial with which least squares explains most of the energy.
#[device]
fn best_of_octet(sums: OctetSums) -> OctetSums {
    let root = sums.products as f32 * (sums.squares as f32).rsqrt();
    let explained = root * root;
    let most = octet_max(explained);
    let near = octet_ballot(explained >= most * (1.0 - DOUBT));
    let mut best = near.trailing_zeros();
    if simd_any(near.count_ones() > 1) {
        best = exact_best(sums);
    }
    let from = octet_lane() + best;
    let chosen = OctetSums {
        products: simd_shuffle(sums.products, from),
        squares: simd_shuffle(sums.squares, from),
        unit: simd_shuffle(sums.unit, from),
    };
    chosen
}

/// The bits of the scale of a row: [`scale_of`].
#[device]
fn octet_scale(energy: u64, sums: OctetSums, most: f32, unbiased: bool) -> u32 {
    let over = select(unbiased, energy as f32, sums.products as f32);
    let root = (select(unbiased, sums.products, sums.squares) as f32).rsqrt();
    let scale = over * root * root * (most * (128.0 / 32767.0));
    // Roundings never fall: a scale between two numbers with the same f16 has that one.
    let pair = f16x2_from(scale * (1.0 - DOUBT), scale * (1.0 + DOUBT));
    let mut bits = pair & 0xffff;
    if simd_any(bits != pair >> 16u32) {
        bits = scale_of(energy, sums.products, sums.squares, most, unbiased);
    }
    bits
}

/// A lane's codes, and the bits of the scale of its row.
#[device]
pub struct OctetCodes<const LANE_COORDINATES: usize> {
    /// Of coordinates `8 k + l`.
    pub codes: [u32; LANE_COORDINATES],
    /// The bits of an f16; 0 where rows have no scales.
    pub scale: u32,
}

/// Codes of levels.
#[device]
fn octet_levels<const FORMAT: u32, const LANE_COORDINATES: usize>(
    x: [f32; LANE_COORDINATES],
    unit: f32,
    indices: &Shared<u8>,
) -> [u32; LANE_COORDINATES] {
    let shift = 31 - (FORMAT.max(TQ2) - TQ2 + 1);
    let mut codes = [0u32; LANE_COORDINATES];
    for k in 0..LANE_COORDINATES {
        let sign = x[k].to_bits() >> shift & 1u32 << (31 - shift);
        codes[k] = indices[entry_of(x[k], unit)] as u32 | sign;
    }
    codes
}

/// Codes of 8 bits.
#[device]
fn octet_integers<const LANE_COORDINATES: usize, const LANE_WORDS: usize>(
    fixed: OctetFixed<LANE_COORDINATES, LANE_WORDS>,
    codes: &mut [u32; LANE_COORDINATES],
) -> OctetSums {
    let mut sizes = [0u32; LANE_COORDINATES];
    for k in 0..LANE_COORDINATES {
        let code = fixed.x[k] * TO_INTEGER + ROUNDER;
        codes[k] = code.to_bits() & 255;
        sizes[k] = ((code - ROUNDER).abs() + MAGNITUDE_ROUNDER).to_bits();
    }
    let mut low = 0i32;
    let mut high = 0i32;
    let mut square = 0i32;
    for q in 0..LANE_WORDS {
        // The signs of a coordinate and its code are equal.
        let word = last_bytes(sizes[4 * q], sizes[4 * q + 1], sizes[4 * q + 2], sizes[4 * q + 3]);
        low = dot4_unsigned(fixed.low[q], word, low);
        high = dot4_unsigned(fixed.high[q], word, high);
        square = dot4_unsigned(word, word, square);
    }
    let sums = OctetSums {
        products: octet_sum((low + 256 * high) as u32),
        squares: octet_sum(square as u32),
        unit: 0.0,
    };
    sums
}

/// e4m3 codes of a row.
#[device]
fn octet_floats<const LANE_COORDINATES: usize>(x: [f32; LANE_COORDINATES]) -> OctetCodes<LANE_COORDINATES> {
    let scale = f16x2_from(octet_greatest::<LANE_COORDINATES>(x) * TO_E4M3, 0.0);
    let number = pair_f16(scale);
    let inverse = select(scale == 0, 0.0, 256.0 / number[0]);
    let mut coded = OctetCodes::<LANE_COORDINATES> { codes: [0u32; LANE_COORDINATES], scale };
    for k in 0..LANE_COORDINATES {
        let code = e4m3_of(x[k] * inverse);
        coded.codes[k] = select(scale == 0, 0u32, code);
    }
    coded
}

/// f16 codes of a row, which has no scale.
#[device]
fn octet_halves<const LANE_COORDINATES: usize>(x: [f32; LANE_COORDINATES]) -> OctetCodes<LANE_COORDINATES> {
    let mut coded = OctetCodes::<LANE_COORDINATES> { codes: [0u32; LANE_COORDINATES], scale: 0 };
    for k in 0..LANE_COORDINATES {
        coded.codes[k] = f16x2_from(x[k], 0.0);
    }
    coded
}

/// Codes and scale of a row of `int8` or `tq`, which are 0 for a row of zeros.
#[device]
fn octet_scaled<
    const FORMAT: u32,
    const SCHEME: u32,
    const DIM: usize,
    const LANE_COORDINATES: usize,
    const LANE_WORDS: usize,
>(
    x: [f32; LANE_COORDINATES],
    levels: &Shared<u8>,
    indices: &Shared<u8>,
    step: u64,
    unbiased: bool,
) -> OctetCodes<LANE_COORDINATES> {
    let most = octet_greatest::<LANE_COORDINATES>(x);
    let zero = most < MIN_MAGNITUDE;
    let mut fixed = fix_octet::<LANE_COORDINATES, LANE_WORDS>(x, select(zero, 0.0, ONE / most));
    // Lanes of a row of zeros compute with numbers in range.
    fixed.energy = select(zero, 1_073_676_289u64, fixed.energy);
    let mut coded = OctetCodes::<LANE_COORDINATES> { codes: [0u32; LANE_COORDINATES], scale: 0 };
    let mut sums: OctetSums = if SCHEME == INTEGERS {
        octet_integers::<LANE_COORDINATES, LANE_WORDS>(fixed, &mut coded.codes)
    } else {
        try_octet::<FORMAT, DIM, LANE_COORDINATES, LANE_WORDS>(fixed, levels, step)
    };
    sums.products = sums.products.max(1);
    sums.squares = sums.squares.max(1);
    if SCHEME != INTEGERS {
        sums = best_of_octet(sums);
        coded.codes = octet_levels::<FORMAT, LANE_COORDINATES>(fixed.x, sums.unit, indices);
    }
    let scale = octet_scale(fixed.energy, sums, select(zero, 1.0, most), unbiased);
    coded.scale = select(zero, 0u32, scale);
    coded
}

/// Codes and scale of a row. `levels` and `indices` have the nearest level and its index for each entry, `step` is that of
/// the lane's trial.
#[device]
pub fn encode_octet<
    const FORMAT: u32,
    const SCHEME: u32,
    const DIM: usize,
    const LANE_COORDINATES: usize,
    const LANE_WORDS: usize,
>(
    x: [f32; LANE_COORDINATES],
    levels: &Shared<u8>,
    indices: &Shared<u8>,
    step: u64,
    unbiased: bool,
) -> OctetCodes<LANE_COORDINATES> {
    if SCHEME == FLOATS {
        return octet_floats::<LANE_COORDINATES>(x);
    }
    if SCHEME == HALVES {
        return octet_halves::<LANE_COORDINATES>(x);
    }
    octet_scaled::<FORMAT, SCHEME, DIM, LANE_COORDINATES, LANE_WORDS>(x, levels, indices, step, unbiased)
}

/// Stores `bits` of each code, from bit `from` on, as the lane's bytes of a plane that starts at byte `start`.
#[device]
fn store_octet_plane<const LANE_COORDINATES: usize>(
    pages: &mut Buffer<u8>,
    start: u64,
    codes: [u32; LANE_COORDINATES],
    bits: u32,
    from: u32,
) {
    let first = start + (simd_lane() % 8) as u64;
    for block in 0..LANE_COORDINATES.div_ceil(16) {
        // The lane's coordinates and bytes of the block.
        let coordinates = (LANE_COORDINATES as u32 - 16 * block as u32).min(16);
        let bytes = coordinates * bits / 8;
        #[unroll]
        for byte in 0..bytes {
            let mut word = 0u32;
            #[unroll]
            for part in 0..8 / bits {
                let code = codes[16 * block + (part * bytes + byte) as usize];
                word |= (code >> from & ((1u32 << bits) - 1)) << (part * bits);
            }
            pages[first + (16 * bits * block as u32 + 8 * byte) as u64] = word as u8;
        }
    }
}

/// Stores codes and scale of a row.
#[device]
pub fn store_octet<const FORMAT: u32, const LANE_COORDINATES: usize>(
    pages: &mut Buffer<u8>,
    row: Row,
    coded: OctetCodes<LANE_COORDINATES>,
) {
    let lane = simd_lane() % 8;
    let bits = plane_bits(FORMAT, 0);
    if in_planes(FORMAT) {
        store_octet_plane::<LANE_COORDINATES>(pages, row.first, coded.codes, bits, 0);
        if plane_bits(FORMAT, 1) > 0 {
            store_octet_plane::<LANE_COORDINATES>(
                pages,
                row.second,
                coded.codes,
                plane_bits(FORMAT, 1),
                bits,
            );
        }
    } else if FORMAT == ROT16 {
        for k in 0..LANE_COORDINATES {
            let at = row.first + 2 * (8 * k as u32 + lane) as u64;
            pages.store_as::<u16, 1>(at, [coded.codes[k] as u16]);
        }
    } else {
        for k in 0..LANE_COORDINATES {
            pages[row.first + (8 * k as u32 + lane) as u64] = coded.codes[k] as u8;
        }
    }
    if lane < scale_bytes(FORMAT, 8 * LANE_COORDINATES as u32) {
        pages[row.scale + lane as u64] = (coded.scale >> (8 * lane) & 255) as u8;
    }
}
