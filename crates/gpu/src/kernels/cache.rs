//! Rows of a cache that stay or leave: [`copy_rows()`] copies them between pages, [`read_codes()`] and [`read_elements()`] fill
//! tensors from them. How rows enter is in [`encode`](super::encode).

use super::encode::{Rows, codes_at, row_of, run_of};
use super::formats::{BF16, F16, F32, hadamard_order, is_codes, is_mlx};
use super::rotation::{block_count, unrotate};
use super::rows::{Levels, Row, gather};
use super::scale::{code_unit, fetch_scale, scale_of};
use flashtile_kernel::prelude::*;

/// How the pages of a pool lie: a page of a head has up to three regions, each with a run of bytes for every row (elements; or
/// codes of one plane or two, and scales).
#[params]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PageBytes {
    /// From page to page, in bytes.
    pub page: u64,
    /// From head to head, in bytes.
    pub head: u64,
    /// Bytes of a row in each region.
    pub row: [u32; 3],
    /// Rows of a page.
    pub tokens: u32,
}

/// Copies bytes, 16 at a time where both places allow it.
#[device]
fn copy_bytes(pages: &mut Buffer<u8>, from: u64, to: u64, count: u64) {
    if (from | to | count) % 16 == 0 {
        let mut at = 16 * thread_index() as u64;
        while at < count {
            let words = pages.load_as::<u32, 4>(from + at);
            pages.store_as::<u32, 4>(to + at, words);
            at += 2048u64;
        }
    } else {
        let mut at = thread_index() as u64;
        while at < count {
            let byte = pages[from + at];
            pages[to + at] = byte;
            at += 128u64;
        }
    }
}

/// Copies rows of pages to the same rows of other pages, in every head. `copies` has four words of each copy: the page to read, the
/// page to write, the first row, the number of rows. No copy writes a row that another one reads or writes. Threadgroups are
/// (heads, copies).
#[kernel(
    threads = 128,
    requires(copies.len() >= 4 * groups[1] as usize, "four words of each copy"),
    requires(params.tokens > 0, "pages have rows"),
    bench(
        shape(rows = [8192, 65536], dim = [128, 128]),
        bytes = 2 * rows * (dim * 5 / 2 + 2),
        flops = 0,
        tolerance = 0.0,
    ),
)]
pub fn copy_rows(copies: &Buffer<u32>, params: &PageBytes, pages: &mut Buffer<u8>) {
    let at = 4 * group_y();
    let from = copies[at] as u64 * params.page + group_x() as u64 * params.head;
    let to = copies[at + 1] as u64 * params.page + group_x() as u64 * params.head;
    let first = copies[at + 2] as u64;
    let rows = copies[at + 3] as u64;
    let mut region = 0u64;
    for n in 0..3usize {
        let bytes = params.row[n] as u64;
        copy_bytes(pages, from + region + first * bytes, to + region + first * bytes, rows * bytes);
        region += params.tokens as u64 * bytes;
    }
}

/// The factor of coordinate `c` of a row: its scale, or, of mlx-native, the norm of its 256 coordinates.
#[device]
fn factor_of<const FORMAT: u32, const DIM: usize>(pages: &Buffer<u8>, row: Row, c: u32) -> f32 {
    if is_mlx(FORMAT) {
        let norm = pages.load_as::<f32, 1>(row.scale + 4 * (c / 256) as u64);
        return norm[0] * code_unit(FORMAT, DIM as u32);
    }
    let scale = scale_of::<FORMAT, DIM>(fetch_scale::<FORMAT, DIM>(pages, row));
    scale.whole
}

/// Decodes rows of codes, rotated back and with the mean `[heads, D]` of their head added where they are `centered`; rounded to the
/// nearest element. The signs of equalized keys are times their factors, for each head. Threadgroups, `table` and `runs` are as in [`encode()`](super::encode::encode()), with rows of `x` in the place
/// of those that it reads. `levels` has the magnitudes of the codec as launches of `decode` have them, `codebooks` that of
/// mlx-native.
#[kernel(
    threads = 128,
    derive(ORDER: u32 = hadamard_order(FORMAT, DIM)),
    exact,
    requires(is_codes(FORMAT) && DIM > 0 && DIM <= 512, "rows of codes, of at most 512 elements"),
    requires(params.heads > 0 && params.page > 0 && params.width > 0, "pages have rows"),
    requires(runs.len() >= 8 * groups[1] as usize, "a run for each y"),
    requires(levels.len() >= 16, "magnitudes of 16 words"),
    requires(!centered || means.len() >= params.heads as usize * DIM, "a mean for each head"),
    requires(ORDER == 0 || factors.len() >= params.factors(DIM + block_count(ORDER, DIM)), "a factor for each coordinate, and a root for each block"),
    bench(
        shape(rows = [32, 8192, 262_144], dim = [128, 128, 128]),
        bytes = rows * dim * 5 / 2 + 2 * rows,
        flops = rows * dim * (u64::from(dim.ilog2()) + 2),
        tolerance = 0.005,
    ),
)]
pub fn read_codes<T: Element, const FORMAT: u32, const DIM: usize>(
    pages: &Buffer<u8>,
    means: &Buffer<f32>,
    factors: &Buffer<f32>,
    levels: &Buffer<u32>,
    codebooks: &Buffer<f32>,
    table: &Buffer<u32>,
    runs: &Buffer<u32>,
    params: &Rows,
    x: &mut Buffer<T>,
    #[constant] centered: bool,
) {
    let mut held: Shared<f32> = shared(4 * DIM);
    let mut magnitudes = [0u32; 16];
    for n in 0..16usize {
        magnitudes[n] = levels[n];
    }
    let known = Levels { magnitudes, codebook: 0, copies: 0 };
    let start = simd_index() * DIM as u32;
    let run = run_of(runs, group_y());
    let step = 4 * groups_x();
    for n in (4 * group_x() + simd_index()..run.rows * params.heads).step_by(step as usize) {
        let row = row_of(table, params, run, n);
        let place = codes_at::<FORMAT, DIM>(params, row);
        for c in (simd_lane()..DIM as u32).step_by(32) {
            let level = gather::<FORMAT, DIM>(pages, place, c, known, codebooks);
            held[start + c] = level * factor_of::<FORMAT, DIM>(pages, place, c);
        }
        simd_barrier();
        if ORDER > 0 {
            unrotate::<DIM, ORDER>(&mut held, start, factors, row.head as u64 * params.factor_stride);
        }
        for c in (simd_lane()..DIM as u32).step_by(32) {
            let mut number = held[start + c];
            if centered {
                number += means[row.head * DIM as u32 + c];
            }
            x[row.element + c as u64] = T::from_f32(number);
        }
        // The next row takes the place of this one.
        simd_barrier();
    }
}

/// Copies rows of elements to rows of `x`, rounded to the nearest element; bit by bit where they have the `same` type. Threadgroups,
/// `table` and `runs` are as in [`read_codes()`].
#[kernel(
    threads = 128,
    requires(!is_codes(FORMAT), "rows of elements"),
    requires(params.heads > 0 && params.page > 0 && params.width > 0, "pages have rows"),
    requires(runs.len() >= 8 * groups[1] as usize, "a run for each y"),
    bench(shape(rows = [32, 8192, 262_144], dim = [128, 128, 128]), bytes = 4 * rows * dim, flops = 0, tolerance = 0.0),
)]
pub fn read_elements<T: Element, const FORMAT: u32>(
    pages: &Buffer<u8>,
    table: &Buffer<u32>,
    runs: &Buffer<u32>,
    params: &Rows,
    x: &mut Buffer<T>,
    #[constant] same: bool,
) {
    let run = run_of(runs, group_y());
    let step = 4 * groups_x();
    for n in (4 * group_x() + simd_index()..run.rows * params.heads).step_by(step as usize) {
        let row = row_of(table, params, run, n);
        let from = row.page + row.in_page as u64 * params.pages[2];
        for c in (simd_lane()..params.dim).step_by(32) {
            if FORMAT == F32 {
                let number = pages.load_as::<f32, 1>(from + 4 * c as u64);
                x[row.element + c as u64] = T::from_f32(number[0]);
            } else if same {
                let bits = pages.load_as::<u16, 1>(from + 2 * c as u64);
                x.store_as::<u16, 1>(row.element + c as u64, bits);
            } else if FORMAT == F16 {
                let number = pages.load_as::<f16, 1>(from + 2 * c as u64);
                x[row.element + c as u64] = T::from_f32(number[0].to_f32());
            } else if FORMAT == BF16 {
                let number = pages.load_as::<bf16, 1>(from + 2 * c as u64);
                x[row.element + c as u64] = T::from_f32(number[0].to_f32());
            }
        }
    }
}
