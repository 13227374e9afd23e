//! Rows are appended to pages: [`encode()`] stores them as codes and scales, [`append()`] as elements.
//!
//! The encoder in `codec` stores the same bytes: its rotations and sums of f32 have a fixed order, and its codes are
//! found with integers ([`quantize`](super::quantize)). Rows of 64 to 512 coordinates whose number is a power of two are
//! encoded in registers, four in a SIMD group ([`octet`](super::octet)), other rows in threadgroup memory, one in a SIMD
//! group.
//!
//! Elements below 2^-126 may count as zeros where a GPU flushes them: there bytes may differ.

use super::formats::{F16, F32, MLX4, TQ2};
use super::formats::{
    first_bytes, hadamard_order, in_planes, is_codes, is_mlx, plane_bits, scale_bytes, second_bytes,
};
use super::octet::{
    ENTRIES, MAX_ENERGY, encode_octet, encode_resident, fit_octet, half_levels_of, in_octets,
};
use super::octet::{octet_coordinates, octet_rotation, rotate_octet, store_octet, sum_each};
use super::quantize::{CODEBOOK, FLOATS, HALVES, INTEGERS, MIN_MAGNITUDE, ONE, TO_E4M3, TO_INTEGER};
use super::quantize::{e4m3_of, factor_of, quotient, rounded, scale_of, scheme_of, stepped};
use super::rotation::{block_count, rotate};
use super::rows::{Row, row_at, source_at};
use flashtile_kernel::prelude::*;

/// A norm of mlx-native up to this is that of zeros.
#[constant]
const MIN_NORM: f32 = 1e-10;

/// Where rows come from and go to.
#[params]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rows {
    /// From batch entry to batch entry, row to row and head to head, in elements.
    pub x: [u64; 3],
    /// From page to page and head to head, and from row to row of elements, in bytes.
    pub pages: [u64; 3],
    /// Elements of the factors of the rotation from head to head, where equalized keys are read: a head has signs times factors, then
    /// roots. 0 where all heads share signs and roots, and where rows are stored.
    pub factor_stride: u64,
    /// Key/value heads.
    pub heads: u32,
    /// Elements of a row.
    pub dim: u32,
    /// Rows of a page.
    pub page: u32,
    /// Entries of a sequence in the table.
    pub width: u32,
}

impl Rows {
    /// Elements of the factors of all heads, for `len` of a head.
    #[must_use]
    pub const fn factors(&self, len: usize) -> usize {
        let heads = (self.heads as usize).saturating_sub(1);
        (self.factor_stride as usize).saturating_mul(heads).saturating_add(len)
    }
}

/// Rows that go to one sequence, as `runs` has them in 8 numbers: the batch entry and the first row that they come
/// from, how many, the sequence's line of the table, the position of the first, and the rows of all runs before; two
/// are not used.
#[device]
pub struct Run {
    /// Batch entry of the rows.
    pub batch: u32,
    /// First row.
    pub first: u32,
    /// Number of rows.
    pub rows: u32,
    /// Line of the table.
    pub sequence: u32,
    /// Position of the first row.
    pub position: u32,
    /// Rows of all runs before.
    pub before: u32,
}

/// Run `index`.
#[device]
pub fn run_of(runs: &Buffer<u32>, index: u32) -> Run {
    let at = 8 * index;
    let run = Run {
        batch: runs[at],
        first: runs[at + 1],
        rows: runs[at + 2],
        sequence: runs[at + 3],
        position: runs[at + 4],
        before: runs[at + 5],
    };
    run
}

/// The first element of a row.
#[device]
fn first_of(params: &Rows, run: Run, row: u32, head: u32) -> u64 {
    run.batch as u64 * params.x[0] + (run.first + row) as u64 * params.x[1] + head as u64 * params.x[2]
}

/// The first byte of the page of a position and head. Blocks that the table has no entry for start it again: a ring.
#[device]
fn page_of(table: &Buffer<u32>, params: &Rows, sequence: u32, position: u32, head: u32) -> u64 {
    let block = position / params.page;
    let page = table[sequence as u64 * params.width as u64 + (block % params.width) as u64];
    page as u64 * params.pages[0] + head as u64 * params.pages[1]
}

/// The sum of squares in the codecs' order: 16 sums of every sixteenth number, added from the first to the last.
#[device]
fn energy_of(row: &Shared<f32>, start: u32, count: u32) -> f32 {
    let mut part = 0.0;
    for c in (simd_lane() % 16..count).step_by(16) {
        let x = row[start + c];
        part += x * x;
    }
    let mut sum = simd_shuffle(part, 0);
    for lane in 1..16u32 {
        sum += simd_shuffle(part, lane);
    }
    sum
}

/// The greatest magnitude of numbers that are finite.
#[device]
fn greatest<const DIM: usize>(row: &Shared<f32>, start: u32) -> f32 {
    let mut most = 0u32;
    for c in (simd_lane()..DIM as u32).step_by(32) {
        let bits = row[start + c].to_bits() & 0x7fff_ffff;
        most = most.max(bits);
    }
    f32::from_bits(simd_max(most))
}

/// Makes whole numbers of a row, of which the greatest magnitude is ONE, and returns the sum of their squares.
#[device]
fn fix<const DIM: usize>(row: &mut Shared<f32>, start: u32, most: f32) -> u64 {
    let factor = ONE / most;
    // 32-bit sums of the squares' bits above and below 2^16.
    let mut high = 0u32;
    let mut low = 0u32;
    for c in (simd_lane()..DIM as u32).step_by(32) {
        let x = (row[start + c] * factor).round_ties_even();
        row[start + c] = x;
        let square = x.abs() as u32 * x.abs() as u32;
        high += square >> 16u32;
        low += square & 0xffff;
    }
    let above = simd_sum(high);
    let below = simd_sum(low);
    ((above as u64) << 16u32) + below as u64
}

/// Sums of products of a vector with its codes and of the codes' squares.
#[device]
struct Sums {
    products: u32,
    squares: u32,
}

/// Codes of 8 bits of a row of whole numbers.
#[device]
fn integers<const DIM: usize>(row: &Shared<f32>, start: u32, codes: &mut Shared<u8>) -> Sums {
    let mut products = 0u32;
    let mut squares = 0u32;
    for c in (simd_lane()..DIM as u32).step_by(32) {
        let x = row[start + c];
        let code = (x * TO_INTEGER).round_ties_even();
        let size = code.abs() as u32;
        // Their signs are equal.
        products += x.abs() as u32 * size;
        squares += size * size;
        codes[start + c] = (code as i32 as u32 & 255) as u8;
    }
    let sums = Sums { products: simd_sum(products), squares: simd_sum(squares) };
    sums
}

/// Index into the tables of levels: `floor(magnitude factor / 2^16)`, at most 255.
#[device]
fn half_levels(magnitude: u32, factor: u32) -> u32 {
    (magnitude * factor >> 16u32).min(255)
}

/// The sums of eight numbers over the lanes of the SIMD group: lane `l` gets that of number `l % 8`.
#[device]
fn sum_all(numbers: [u32; 8]) -> u32 {
    let octet = sum_each(numbers);
    let pair = octet + simd_shuffle_xor(octet, 8);
    pair + simd_shuffle_xor(pair, 16)
}

/// Codes of levels of a row of whole numbers, of the best of eight scales: that with which least squares explains most
/// of the energy. `known` has the numbers of [`encode()`]; `levels` the levels alone, as 256 bytes are two words a bank, so
/// that few lanes wait for each other.
#[device]
fn search<const FORMAT: u32, const DIM: usize>(
    row: &Shared<f32>,
    start: u32,
    energy: u64,
    known: &Shared<u32>,
    levels: &Shared<u8>,
    codes: &mut Shared<u8>,
) -> Sums {
    // Every eighth lane has the same trial.
    let trial = simd_lane() % 8;
    let mut at = energy;
    for n in 0..4u32 {
        let word = 256 + 8 * trial + 2 * n;
        let step = known[word] as u64 | (known[word + 1] as u64) << 32u32;
        at = stepped(energy, step, at);
    }
    let factor = factor_of::<FORMAT, DIM>(at, trial);
    let mut factors = [0u32; 8];
    for t in 0..8usize {
        factors[t] = simd_shuffle(factor, t as u32);
    }
    let mut products = [0u32; 8];
    let mut squares = [0u32; 8];
    for c in (simd_lane()..DIM as u32).step_by(32) {
        let x = row[start + c].abs() as u32;
        for t in 0..8usize {
            let level = levels[half_levels(x, factors[t])] as u32;
            products[t] += x * level;
            squares[t] += level * level;
        }
    }
    let mine = Sums { products: sum_all(products), squares: sum_all(squares) };
    let square = mine.products as u64 * mine.products as u64;
    let explained = quotient(rounded(square, false, 0), mine.squares);
    // The first of the greatest: positive f64 are ordered as their bits.
    let high = (explained >> 32u32) as u32;
    let most_high = simd_max(high);
    let low = select(high == most_high, explained as u32, 0);
    let most_low = simd_max(low);
    let best = simd_min(select(high == most_high && low == most_low, trial, 8));

    let chosen = simd_shuffle(factor, best);
    let sign = 1u32 << (FORMAT.max(TQ2) - TQ2 + 1);
    for c in (simd_lane()..DIM as u32).step_by(32) {
        let x = row[start + c];
        let index = known[half_levels(x.abs() as u32, chosen)] >> 8u32;
        codes[start + c] = (index | select(x < 0.0, sign, 0)) as u8;
    }
    let sums =
        Sums { products: simd_shuffle(mine.products, best), squares: simd_shuffle(mine.squares, best) };
    sums
}

/// e4m3 codes of a row; returns the bits of its scale.
#[device]
fn floats<const DIM: usize>(row: &Shared<f32>, start: u32, codes: &mut Shared<u8>) -> u32 {
    let scale = f16x2_from(greatest::<DIM>(row, start) * TO_E4M3, 0.0);
    let number = pair_f16(scale);
    let inverse = 256.0 / number[0];
    for c in (simd_lane()..DIM as u32).step_by(32) {
        let mut code = 0u32;
        if scale != 0 {
            code = e4m3_of(row[start + c] * inverse);
        }
        codes[start + c] = code as u8;
    }
    scale
}

/// Codes of the format of mlx-native; returns the bits of the norms of its halves, or of the whole row. `edges` are
/// bits of f32, ascending.
#[device]
fn normalised<const FORMAT: u32, const DIM: usize>(
    row: &Shared<f32>,
    start: u32,
    edges: &Shared<u32>,
    codes: &mut Shared<u8>,
) -> [u32; 2] {
    let mut norms = [0u32; 2];
    for block in 0..DIM.div_ceil(256) {
        let first = start + 256 * block as u32;
        let energy = energy_of(row, first, 256);
        let mean = select(DIM == 512, energy / 256.0, energy);
        let norm = mean.sqrt();
        let factor = select(norm > MIN_NORM, 1.0 / norm * select(DIM == 512, 1.0, 16.0), 0.0);
        for c in (simd_lane()..256).step_by(32) {
            let z = row[first + c] * factor;
            // How many edges are below.
            let mut code = 0u32;
            let mut step = select(FORMAT == MLX4, 8u32, 128u32);
            while step > 0 {
                if f32::from_bits(edges[code + step - 1]) < z {
                    code += step;
                }
                step /= 2;
            }
            codes[first + c] = code as u8;
        }
        norms[block] = norm.to_bits();
    }
    norms
}

/// Byte `index` of a plane of `bits` of each code from bit `from` on.
#[device]
fn packed<const DIM: usize>(codes: &Shared<u8>, start: u32, index: u32, bits: u32, from: u32) -> u32 {
    let block = index / (16 * bits);
    let within = index % (16 * bits);
    let size = (DIM as u32 - 128 * block).min(128);
    let bytes = (size * bits).div_ceil(8);
    let mut byte = 0u32;
    for part in 0..8 / bits {
        let at = part * bytes + within;
        if at < size {
            let code = codes[start + 128 * block + at] as u32;
            byte |= (code >> from & ((1u32 << bits) - 1)) << (part * bits);
        }
    }
    byte
}

/// Writes codes and scale of a row.
#[device]
fn store<const FORMAT: u32, const DIM: usize>(
    pages: &mut Buffer<u8>,
    row: Row,
    codes: &Shared<u8>,
    start: u32,
    scale: [u32; 2],
) {
    let bits = plane_bits(FORMAT, 0);
    for at in (simd_lane()..first_bytes(FORMAT, DIM as u32)).step_by(32) {
        let byte: u32 = if in_planes(FORMAT) {
            packed::<DIM>(codes, start, at, bits, 0)
        } else if FORMAT == MLX4 {
            codes[start + 2 * at] as u32 | (codes[start + 2 * at + 1] as u32) << 4u32
        } else {
            codes[start + at] as u32
        };
        pages[row.first + at as u64] = byte as u8;
    }
    for at in (simd_lane()..second_bytes(FORMAT, DIM as u32)).step_by(32) {
        pages[row.second + at as u64] = packed::<DIM>(codes, start, at, plane_bits(FORMAT, 1), bits) as u8;
    }
    let lane = simd_lane();
    if lane < scale_bytes(FORMAT, DIM as u32) {
        let word = select(lane < 4, scale[0], scale[1]);
        pages[row.scale + lane as u64] = (word >> (8 * (lane % 4)) & 255) as u8;
    }
}

/// Writes a row as f16.
#[device]
fn store_halves<const DIM: usize>(pages: &mut Buffer<u8>, row: Row, x: &Shared<f32>, start: u32) {
    for c in (simd_lane()..DIM as u32).step_by(32) {
        pages.store_as::<f16, 1>(row.first + 2 * c as u64, [f16::from_f32(x[start + c])]);
    }
}

/// Fills a row with bytes 0xFF: its scale is a NaN, or its elements are. By `lanes` lanes.
#[device]
fn poison<const FORMAT: u32, const DIM: usize>(pages: &mut Buffer<u8>, row: Row, lane: u32, lanes: u32) {
    for at in (lane..first_bytes(FORMAT, DIM as u32)).step_by(lanes as usize) {
        pages[row.first + at as u64] = 255u32 as u8;
    }
    for at in (lane..second_bytes(FORMAT, DIM as u32)).step_by(lanes as usize) {
        pages[row.second + at as u64] = 255u32 as u8;
    }
    if lane < scale_bytes(FORMAT, DIM as u32) {
        pages[row.scale + lane as u64] = 255u32 as u8;
    }
}

/// One of [`f64_steps`](crate::encoding::f64_steps) of the lane's trial.
#[device]
fn step_of(numbers: &Buffer<u32>, n: u32) -> u64 {
    let at = 256 + 8 * (simd_lane() % 8) + 2 * n;
    numbers[at] as u64 | (numbers[at + 1] as u64) << 32u32
}

/// Codes of a row of `int8` or `tq`; returns the bits of its scale, which is 0 for a row of zeros.
#[device]
fn scaled<const FORMAT: u32, const SCHEME: u32, const DIM: usize>(
    row: &mut Shared<f32>,
    start: u32,
    known: &Shared<u32>,
    levels: &Shared<u8>,
    codes: &mut Shared<u8>,
    unbiased: bool,
) -> u32 {
    let most = greatest::<DIM>(row, start);
    if most < MIN_MAGNITUDE {
        for c in (simd_lane()..DIM as u32).step_by(32) {
            codes[start + c] = 0u32 as u8;
        }
        return 0;
    }
    let energy = fix::<DIM>(row, start, most);
    let sums: Sums = if SCHEME == INTEGERS {
        integers::<DIM>(row, start, codes)
    } else {
        search::<FORMAT, DIM>(row, start, energy, known, levels, codes)
    };
    scale_of(energy, sums.products, sums.squares, most, unbiased)
}

/// Codes of a row; returns the bits of its scale, or of the norms of its halves.
#[device]
fn quantized<const FORMAT: u32, const SCHEME: u32, const DIM: usize>(
    row: &mut Shared<f32>,
    start: u32,
    known: &Shared<u32>,
    levels: &Shared<u8>,
    codes: &mut Shared<u8>,
    unbiased: bool,
) -> [u32; 2] {
    if SCHEME == CODEBOOK {
        return normalised::<FORMAT, DIM>(row, start, known, codes);
    }
    let scale: u32 = if SCHEME == FLOATS {
        floats::<DIM>(row, start, codes)
    } else {
        scaled::<FORMAT, SCHEME, DIM>(row, start, known, levels, codes, unbiased)
    };
    [scale, 0]
}

/// One row of a run.
#[device]
pub struct RunRow {
    /// Its number in the run.
    pub index: u32,
    /// Its key/value head.
    pub head: u32,
    /// Its first element in the tensor.
    pub element: u64,
    /// The first byte of its page and head.
    pub page: u64,
    /// Its number in the page.
    pub in_page: u32,
}

/// Row `n` of a run: positions in order, the heads of a position one after another.
#[device]
pub fn row_of(table: &Buffer<u32>, params: &Rows, run: Run, n: u32) -> RunRow {
    let index = n / params.heads;
    let head = n % params.heads;
    let position = run.position + index;
    let row = RunRow {
        index,
        head,
        element: first_of(params, run, index, head),
        page: page_of(table, params, run.sequence, position, head),
        in_page: position % params.page,
    };
    row
}

/// Where rows of elements are read.
#[device]
struct Elements<'a, T: Element> {
    /// Rows.
    x: &'a Buffer<T>,
    /// Means `[heads, D]`.
    means: &'a Buffer<f32>,
    /// Inverses of the factors of equalized keys `[heads, D]`.
    inverses: &'a Buffer<f32>,
    /// True if the mean of their head is subtracted from rows before they are stored.
    centered: bool,
    /// True if they are multiplied by the inverses of their head then.
    equalized: bool,
}

/// Loads a row. Returns true if the lane's own elements are finite.
#[device]
fn load_row<T: Element, const DIM: usize>(
    elements: Elements<T>,
    from: RunRow,
    row: &mut Shared<f32>,
    start: u32,
) -> bool {
    let mut finite = true;
    for c in (simd_lane()..DIM as u32).step_by(32) {
        let mut number = elements.x[from.element + c as u64].to_f32();
        if elements.centered {
            number -= elements.means[from.head * DIM as u32 + c];
        }
        if elements.equalized {
            number *= elements.inverses[from.head * DIM as u32 + c];
        }
        row[start + c] = number;
        finite = finite && number.is_finite();
    }
    finite
}

/// The lane's elements of a row: see [`octet`](super::octet).
#[device]
fn load_octet<T: Element, const LANE_COORDINATES: usize>(
    elements: Elements<T>,
    from: RunRow,
) -> [f32; LANE_COORDINATES] {
    let lane = simd_lane() % 8;
    let mut x = [0.0; LANE_COORDINATES];
    for k in 0..LANE_COORDINATES {
        let c = 8 * k as u32 + lane;
        let mut number = elements.x[from.element + c as u64].to_f32();
        if elements.centered {
            number -= elements.means[from.head * (8 * LANE_COORDINATES) as u32 + c];
        }
        if elements.equalized {
            number *= elements.inverses[from.head * (8 * LANE_COORDINATES) as u32 + c];
        }
        x[k] = number;
    }
    x
}

/// Numbers of threadgroup memory that rows are held in.
pub const fn held_numbers(format: u32, dim: usize) -> usize {
    if in_octets(format, dim as u32) { 1 } else { 4 * dim }
}

/// Fills the tables of `tq` and the edges of mlx-native.
#[device]
fn fill_tables<const FORMAT: u32, const DIM: usize>(
    numbers: &Buffer<u32>,
    known: &mut Shared<u32>,
    levels: &mut Shared<u8>,
    indices: &mut Shared<u8>,
) {
    if in_octets(FORMAT, DIM as u32) {
        for at in (thread_index()..ENTRIES).step_by(128) {
            let number = numbers[half_levels_of(at)];
            levels[at] = (number & 255) as u8;
            indices[at] = (number >> 8u32) as u8;
        }
    } else {
        for at in (thread_index()..320).step_by(128) {
            known[at] = numbers[at];
        }
        for at in (thread_index()..256).step_by(128) {
            levels[at] = (numbers[at] & 255) as u8;
        }
    }
}

/// Reports that a row is not stored, from the lane that is `first` of the row's: see [`encode()`].
#[device]
fn refuse(status: &mut Buffer<u32>, params: &Rows, run: Run, row: RunRow, finite: bool, first: bool) {
    if first {
        let number = (run.before + row.index) * params.heads + row.head;
        atomic_min(status, 0, 2 * number + select(finite, 1u32, 0u32));
    }
}

/// Where a row of codes is stored.
#[device]
pub fn codes_at<const FORMAT: u32, const DIM: usize>(params: &Rows, row: RunRow) -> Row {
    row_at::<FORMAT, DIM>(source_at::<FORMAT, DIM>(row.page, 0, 0, params.page), 0, row.in_page)
}

/// Encodes rows of elements and stores each at its position: byte for byte what the encoder of `codec` stores.
///
/// Threadgroups are (any number, runs): the SIMD groups of a run share its rows. A line of `table` holds the pages of a
/// sequence by blocks of positions: contiguous keys are one page, a ring is a line that starts again. `numbers` is
/// [`encode_table`](crate::encoding::encode_table), `factors` has the signs of the rotation of order `ORDER`, which is
/// 0 where the codec has none. Centered keys are stored without the mean `[heads, D]` of their head, and then equalized
/// ones times the `inverses` of its factors `[heads, D]`.
///
/// A row whose norm is above the largest one, or that has a NaN or an infinity, is not stored: its bytes become 0xFF,
/// so that its scale is a NaN, or its elements are. `status` becomes the smallest `2 n + f` of these rows, where `n` numbers rows in the
/// order of runs, rows and heads, and `f` is 1 for a row of finite elements. `status` starts as `u32::MAX`, which a
/// launch that stores all rows leaves.
#[kernel(
    threads = 128,
    derive(
        ORDER: u32 = hadamard_order(FORMAT, DIM),
        SCHEME: u32 = scheme_of(FORMAT),
        HELD: usize = held_numbers(FORMAT, DIM),
        LANE_COORDINATES: usize = octet_coordinates(FORMAT, DIM),
        LANE_WORDS: usize = LANE_COORDINATES / 4,
    ),
    resident = encode_resident(FORMAT, DIM),
    exact,
    requires(is_codes(FORMAT) && DIM > 0 && DIM <= 512, "rows of codes, of at most 512 elements"),
    requires(!is_mlx(FORMAT) || DIM == 256 || DIM == 512, "rows of mlx-native are of 256 or 512 elements"),
    requires(params.heads > 0 && params.page > 0 && params.width > 0, "pages have rows"),
    requires(runs.len() >= 8 * groups[1] as usize, "a run for each y"),
    requires(numbers.len() >= 320 && !status.is_empty(), "320 numbers and a status"),
    requires(!centered || means.len() >= params.heads as usize * DIM, "a mean for each head"),
    requires(!equalized || inverses.len() >= params.heads as usize * DIM, "an inverse factor for each coordinate of each head"),
    requires(ORDER == 0 || factors.len() >= DIM + block_count(ORDER, DIM), "a factor for each coordinate, and a root for each block"),
    bench(
        shape(rows = [32, 8192, 262_144], dim = [128, 128, 128]),
        bytes = rows * dim * 5 / 2 + 2 * rows,
        flops = rows * dim * (u64::from(dim.ilog2()) + 32),
        tolerance = 0.0,
    ),
)]
pub fn encode<T: Element, const FORMAT: u32, const DIM: usize>(
    x: &Buffer<T>,
    means: &Buffer<f32>,
    inverses: &Buffer<f32>,
    factors: &Buffer<f32>,
    numbers: &Buffer<u32>,
    table: &Buffer<u32>,
    runs: &Buffer<u32>,
    params: &Rows,
    pages: &mut Buffer<u8>,
    status: &mut Buffer<u32>,
    #[constant] centered: bool,
    #[constant] equalized: bool,
    #[constant] unbiased: bool,
) {
    let mut held: Shared<f32> = shared(HELD);
    let mut codes: Shared<u8> = shared(HELD);
    let mut known: Shared<u32> = shared(320);
    let mut levels: Shared<u8> = shared(256);
    let mut indices: Shared<u8> = shared(256);
    fill_tables::<FORMAT, DIM>(numbers, &mut known, &mut levels, &mut indices);
    barrier();
    let elements = Elements::<T> { x, means, inverses, centered, equalized };
    let run = run_of(runs, group_y());
    let rows = run.rows * params.heads;
    if in_octets(FORMAT, DIM as u32) {
        let rotation = octet_rotation::<ORDER, LANE_COORDINATES>(factors);
        // Of these dimensions no trial has more than one.
        let f64_step = step_of(numbers, 0);
        let step = 16 * groups_x();
        // All SIMD groups take equally many steps, for compilers to see that their lanes stay together.
        for first in (16 * group_x()..rows).step_by(step as usize) {
            let n = first + thread_index() / 8;
            let row = row_of(table, params, run, n.min(rows - 1));
            let mut x = load_octet::<T, LANE_COORDINATES>(elements, row);
            let place = codes_at::<FORMAT, DIM>(params, row);
            let fit = fit_octet::<LANE_COORDINATES>(&mut x);
            if ORDER > 0 {
                rotate_octet::<LANE_COORDINATES>(&mut x, rotation);
            }
            let coded = encode_octet::<FORMAT, SCHEME, DIM, LANE_COORDINATES, LANE_WORDS>(
                x, &levels, &indices, f64_step, unbiased,
            );
            if n < rows && fit.fits {
                store_octet::<FORMAT, LANE_COORDINATES>(pages, place, coded);
            } else if n < rows {
                poison::<FORMAT, DIM>(pages, place, simd_lane() % 8, 8);
                refuse(status, params, run, row, fit.finite, simd_lane() % 8 == 0);
            }
        }
    } else {
        let start = simd_index() * DIM as u32;
        let step = 4 * groups_x();
        for n in (4 * group_x() + simd_index()..rows).step_by(step as usize) {
            let row = row_of(table, params, run, n);
            let finite = load_row::<T, DIM>(elements, row, &mut held, start);
            simd_barrier();
            let place = codes_at::<FORMAT, DIM>(params, row);
            let fits = energy_of(&held, start, DIM as u32) <= MAX_ENERGY;
            let all_finite = simd_all(finite);
            if fits {
                if ORDER > 0 {
                    // Lanes have read the elements that others are about to rotate.
                    simd_barrier();
                    rotate::<DIM, ORDER>(&mut held, start, factors, 0);
                }
                if SCHEME == HALVES {
                    store_halves::<DIM>(pages, place, &held, start);
                } else {
                    let scale = quantized::<FORMAT, SCHEME, DIM>(
                        &mut held, start, &known, &levels, &mut codes, unbiased,
                    );
                    simd_barrier();
                    store::<FORMAT, DIM>(pages, place, &codes, start, scale);
                }
            } else {
                poison::<FORMAT, DIM>(pages, place, simd_lane(), 32);
                refuse(status, params, run, row, all_finite, simd_lane() == 0);
            }
            // The next row takes the place of this one.
            simd_barrier();
        }
    }
}

/// Stores rows of elements as elements of another type or, where they have the `same`, as they are, bit by bit; f16 and
/// bf16 are rounded to nearest even, and a NaN stays one. Threadgroups, table and runs are as in [`encode()`].
#[kernel(
    threads = 128,
    requires(!is_codes(FORMAT), "rows of elements"),
    requires(params.heads > 0 && params.page > 0 && params.width > 0, "pages have rows"),
    requires(runs.len() >= 8 * groups[1] as usize, "a run for each y"),
    bench(shape(rows = [32, 8192, 262_144], dim = [128, 128, 128]), bytes = 4 * rows * dim, flops = 0, tolerance = 0.0),
)]
pub fn append<T: Element, const FORMAT: u32>(
    x: &Buffer<T>,
    table: &Buffer<u32>,
    runs: &Buffer<u32>,
    params: &Rows,
    pages: &mut Buffer<u8>,
    #[constant] same: bool,
) {
    let run = run_of(runs, group_y());
    let step = 4 * groups_x();
    for n in (4 * group_x() + simd_index()..run.rows * params.heads).step_by(step as usize) {
        let row = row_of(table, params, run, n);
        let to = row.page + row.in_page as u64 * params.pages[2];
        for c in (simd_lane()..params.dim).step_by(32) {
            let at = row.element + c as u64;
            if FORMAT == F32 {
                let number = x[at].to_f32();
                pages.store_as::<f32, 1>(to + 4 * c as u64, [number]);
            } else if same {
                let bits = x.load_as::<u16, 1>(at);
                pages.store_as::<u16, 1>(to + 2 * c as u64, bits);
            } else if FORMAT == F16 {
                let number = f16::from_f32(x[at].to_f32());
                pages.store_as::<f16, 1>(to + 2 * c as u64, [number]);
            } else {
                let number = bf16::from_f32(x[at].to_f32());
                pages.store_as::<bf16, 1>(to + 2 * c as u64, [number]);
            }
        }
    }
}
