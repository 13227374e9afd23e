//! The rotation of the codecs: random signs, then a Hadamard transform, in place in threadgroup memory, by one SIMD group.
//!
//! A block of coordinates is `ORDER * run` long, and the run is a power of two: butterflies inside runs, then
//! Paley's matrix of order 12 or 20 across them. Rows of other lengths are blocks of powers of two, the
//! largest first. Sums are added in the order of the codecs on the host, so that encoded bytes are equal.

use super::formats::rotation_order;
use flashtile_kernel::prelude::*;

/// Bit `x` is set where `x` is a square modulo 11 (order 12) or 19 (order 20), and not 0.
#[device]
pub fn squares(order: u32) -> u32 {
    select(order == 12, 0x23a, 0x30af2)
}

/// Entry of Paley's matrix of an order.
#[device]
pub fn paley(order: u32, row: u32, column: u32) -> f32 {
    if row == column || row == 0 {
        return 1.0;
    }
    if column == 0 {
        return -1.0;
    }
    let prime = order - 1;
    let difference = (column + prime - row) % prime;
    select(squares(order) >> difference & 1 == 1, 1.0, -1.0)
}

/// Coordinates of the next block of a row that has `rest` of them left.
#[device]
#[inline]
pub const fn block_len(order: u32, rest: u32) -> u32 {
    if order > 1 {
        return rest;
    }
    0x8000_0000u32 >> rest.leading_zeros()
}

/// Blocks of a row.
pub const fn block_count(order: u32, dim: usize) -> usize {
    if order > 1 { 1 } else { dim.count_ones() as usize }
}

/// Butterflies of the runs of a block of `len` coordinates.
#[device]
fn butterflies(row: &mut Shared<f32>, start: u32, len: u32, run: u32) {
    let mut distance = 1u32;
    while distance < run {
        for at in (simd_lane()..len / 2).step_by(32) {
            // Bits of the place in a run of `distance` stay, those above it make way for one of the pair.
            let low = start + 2 * at - (at & (distance - 1));
            let a = row[low];
            let b = row[low + distance];
            row[low] = a + b;
            row[low + distance] = a - b;
        }
        simd_barrier();
        distance *= 2;
    }
}

/// Paley's matrix, or its transpose, across the runs of a block: sums from the first run to the last.
#[device]
fn across<const ORDER: u32>(row: &mut Shared<f32>, start: u32, run: u32, transposed: bool) {
    if ORDER <= 1 {
        return;
    }
    for at in (simd_lane()..run).step_by(32) {
        let mut column = [0.0; 20];
        for i in 0..ORDER {
            column[i as usize] = row[start + i * run + at];
        }
        for i in 0..ORDER {
            let mut sum = 0.0;
            for j in 0..ORDER {
                let entry = select(transposed, paley(ORDER, j, i), paley(ORDER, i, j));
                let term = entry * column[j as usize];
                sum = select(j == 0, term, sum + term);
            }
            row[start + i * run + at] = sum;
        }
    }
    simd_barrier();
}

/// Rotates `DIM` numbers from `start` on. `factors` has, from element `signs` on, the signs, then 1 over the root of the length of each
/// block. For queries of equalized keys, the signs are times the factors of the keys' channels. The order may be 0 in calls that are
/// compiled but never made.
#[device]
pub fn rotate<const DIM: usize, const ORDER: u32>(
    row: &mut Shared<f32>,
    start: u32,
    factors: &Buffer<f32>,
    signs: u64,
) {
    for at in (simd_lane()..DIM as u32).step_by(32) {
        row[start + at] *= factors[signs + at as u64];
    }
    simd_barrier();
    let mut first = 0u32;
    let mut block = 0u32;
    while first < DIM as u32 {
        let len = block_len(ORDER, DIM as u32 - first);
        let run = len / ORDER.max(1);
        butterflies(row, start + first, len, run);
        across::<ORDER>(row, start + first, run, false);
        for at in (simd_lane()..len).step_by(32) {
            row[start + first + at] *= factors[signs + (DIM as u32 + block) as u64];
        }
        first += len;
        block += 1;
    }
    simd_barrier();
}

/// Undoes [`rotate`]; of keys, with signs that are times their factors, also the division by these.
#[device]
pub fn unrotate<const DIM: usize, const ORDER: u32>(
    row: &mut Shared<f32>,
    start: u32,
    factors: &Buffer<f32>,
    signs: u64,
) {
    let mut first = 0u32;
    let mut block = 0u32;
    while first < DIM as u32 {
        let len = block_len(ORDER, DIM as u32 - first);
        let run = len / ORDER.max(1);
        across::<ORDER>(row, start + first, run, true);
        butterflies(row, start + first, len, run);
        for at in (simd_lane()..len).step_by(32) {
            let root = factors[signs + (DIM as u32 + block) as u64];
            row[start + first + at] = row[start + first + at] * root * factors[signs + (first + at) as u64];
        }
        first += len;
        block += 1;
    }
    simd_barrier();
}

/// Rotates rows `[rows, D]` into `out`, or back: the transform of the codecs by itself.
#[kernel(
    threads = 128,
    derive(ORDER: u32 = rotation_order(DIM)),
    exact,
    requires(x.len() >= rows as usize * DIM && out.len() >= rows as usize * DIM, "x and out hold the rows"),
    requires(factors.len() >= DIM + block_count(ORDER, DIM), "a factor for each coordinate, and a root for each block"),
    requires(groups[0] as usize >= (rows as usize).div_ceil(4), "a SIMD group for each row"),
    bench(shape(rows = [1024, 65536], dim = [128, 128]), bytes = 8 * rows * dim, flops = rows * dim * u64::from(dim.ilog2()), tolerance = 1e-6),
)]
pub fn hadamard<const DIM: usize>(
    x: &Buffer<f32>,
    factors: &Buffer<f32>,
    out: &mut Buffer<f32>,
    rows: u32,
    #[constant] back: bool,
) {
    let mut held: Shared<f32> = shared(4 * DIM);
    let row = 4 * group_x() + simd_index();
    let start = simd_index() * DIM as u32;
    if row < rows {
        for at in (simd_lane()..DIM as u32).step_by(32) {
            held[start + at] = x[row as u64 * DIM as u64 + at as u64];
        }
        simd_barrier();
        if back {
            unrotate::<DIM, ORDER>(&mut held, start, factors, 0);
        } else {
            rotate::<DIM, ORDER>(&mut held, start, factors, 0);
        }
        for at in (simd_lane()..DIM as u32).step_by(32) {
            out[row as u64 * DIM as u64 + at as u64] = held[start + at];
        }
    }
}
