//! Products of matrices.

use flashtile_kernel::prelude::*;
use flashtile_kernel::simulator::Memory;

/// `out = a b` for matrices of `8 * n` rows and columns, a SIMD group for each 8x8 of `out`: groups are (columns, rows).
#[kernel(
    threads = 32,
    requires(a.len() >= 64 * (n * n) as usize && b.len() >= 64 * (n * n) as usize, "a and b are square"),
    requires(out.len() >= 64 * (n * n) as usize, "out is as large"),
    requires(groups[0] == n && groups[1] == n, "a group for each 8x8"),
)]
pub fn product<T: Element>(a: &Buffer<T>, b: &Buffer<T>, out: &mut Buffer<f32>, n: u32) {
    let mut sum = Fragment::<f32>::zero();
    for k in 0..n {
        let left = Fragment::<T>::load(a, (group_y() * 8 * n + k) * 8, 8 * n);
        let right = Fragment::<T>::load(b, (k * 8 * n + group_x()) * 8, 8 * n);
        sum = Fragment::multiply_accumulate(&left, &right, &sum);
    }
    sum.store(out, (group_y() * 8 * n + group_x()) * 8, 8 * n);
}

/// 16 rows of `a` (two left operands) times one 8x8 of `b`, with the operands of `matrix`: rows of 8 numbers each.
#[kernel(
    threads = 32,
    requires(a.len() >= 128 && b.len() >= 64 && out.len() >= 128, "16x8, 8x8 and 16x8"),
)]
pub fn sixteen_rows(a: &Buffer<f16>, b: &Buffer<f32>, out: &mut Buffer<f32>) {
    let row = matrix_row();
    let pair = 2 * matrix_pair();
    // Two f16 are one word of a left operand.
    let low = a.load_as::<u32, 1>(row * 8 + pair)[0];
    let high = a.load_as::<u32, 1>((row + 8) * 8 + pair)[0];
    let lefts = [left::<f16>(low, 0), left::<f16>(high, 0)];
    let column = right::<f16>(b[row * 8 + pair], b[row * 8 + pair + 1]);
    let sums = multiply_add::<f16>(lefts, column, [[0.0; 2]; 2]);
    for half in 0..2u32 {
        for n in 0..2u32 {
            out[(row + 8 * half) * 8 + pair + n] = sums[half][n];
        }
    }
}

/// `out = a b` for 16x16 matrices, by way of threadgroup memory; `b` is stored by columns where it is `transposed`. Lines of 24
/// numbers start an odd multiple of 16 bytes apart: they lie in different banks.
#[kernel(
    threads = 32,
    requires(a.len() >= 256 && b.len() >= 256 && out.len() >= 256, "16x16 numbers"),
)]
pub fn staged<T: Element>(a: &Buffer<T>, b: &Buffer<T>, out: &mut Buffer<f32>, #[constant] transposed: bool) {
    let mut a_lines: Shared<T> = shared(384);
    let mut b_lines: Shared<T> = shared(384);
    for i in (thread_index()..256).step_by(32) {
        a_lines[i / 16 * 24 + i % 16] = a[i];
        b_lines[i / 16 * 24 + i % 16] = b[i];
    }
    barrier();
    let x = load_lefts::<T>(&a_lines, 0u32, 24u32);
    let mut y = load_rights::<T>(&b_lines, 0u32, 24u32);
    if transposed {
        y = load_rights_transposed::<T>(&b_lines, 0u32, 24u32);
    }
    for i in 0..2usize {
        let zeros = [[0.0; 2]; 2];
        let sums = multiply_add_twice::<T>([x[0], x[1]], y[2 * i], [x[2], x[3]], y[2 * i + 1], zeros);
        for half in 0..2u32 {
            for n in 0..2u32 {
                out[(matrix_row() + 8 * half) * 16 + 8 * i as u32 + 2 * matrix_pair() + n] = sums[half][n];
            }
        }
    }
}

/// The greatest and the sum of the lanes that share a row with a lane.
#[kernel(threads = 32, requires(x.len() >= 32 && out.len() >= 64, "a number a lane"))]
pub fn of_rows(x: &Buffer<f32>, out: &mut Buffer<f32>) {
    let lane = matrix_lane(matrix_row(), matrix_pair());
    let number = x[4 * matrix_row() + matrix_pair()];
    let greatest = matrix_row_max(number);
    let sum = matrix_row_sum(number);
    if lane == simd_lane() {
        out[4 * matrix_row() + matrix_pair()] = greatest;
        out[32 + 4 * matrix_row() + matrix_pair()] = sum;
    }
}

fn multiplied(a: &[f32], b: &[f32], rows: usize, n: usize) -> Vec<f32> {
    let at = |i: usize| (0..n).map(|k| a[i / n * n + k] * b[k * n + i % n]).sum();
    (0..rows * n).map(at).collect()
}

#[test]
fn fragments_multiply_everywhere() {
    use crate::anywhere::{Anywhere, eighths, everywhere};
    fn run<T: Element>(device: &Anywhere) -> Vec<f32> {
        let (a, b) = (Memory::from_slice(&eighths::<T>(256, 1)), Memory::from_slice(&eighths::<T>(256, 2)));
        let mut out = Memory::from_slice(&[0f32; 256]);
        product::Call { a: a.view(), b: b.view(), out: out.view_mut(), n: 2, groups: [2, 2, 1] }
            .launch::<T>(device)
            .unwrap();
        out.to_vec().unwrap()
    }
    let expected = multiplied(&eighths(256, 1), &eighths(256, 2), 16, 16);
    everywhere(&expected, run::<f32>);
    everywhere(&expected, run::<f16>);
    everywhere(&expected, run::<bf16>);
}

#[test]
fn operands_multiply_everywhere() {
    use crate::anywhere::{eighths, everywhere};
    let expected = multiplied(&eighths(128, 3), &eighths(64, 4), 16, 8);
    everywhere(&expected, |device| {
        let (a, b) =
            (Memory::from_slice(&eighths::<f16>(128, 3)), Memory::from_slice(&eighths::<f32>(64, 4)));
        let mut out = Memory::from_slice(&[0f32; 128]);
        sixteen_rows::Call { a: a.view(), b: b.view(), out: out.view_mut(), groups: [1, 1, 1] }
            .launch(device)
            .unwrap();
        out.to_vec().unwrap()
    });
}

#[test]
fn staged_matrices_multiply_everywhere() {
    use crate::anywhere::{Anywhere, eighths, everywhere};
    fn run<T: Element>(device: &Anywhere, transposed: bool) -> Vec<f32> {
        let (a, b) = (Memory::from_slice(&eighths::<T>(256, 5)), Memory::from_slice(&eighths::<T>(256, 6)));
        let mut out = Memory::from_slice(&[0f32; 256]);
        staged::Call { a: a.view(), b: b.view(), out: out.view_mut(), transposed, groups: [1, 1, 1] }
            .launch::<T>(device)
            .unwrap();
        out.to_vec().unwrap()
    }
    let (a, b) = (eighths::<f32>(256, 5), eighths::<f32>(256, 6));
    let by_columns: Vec<f32> = (0..256).map(|i| b[i % 16 * 16 + i / 16]).collect();
    for (transposed, b) in [(false, b.clone()), (true, by_columns)] {
        let expected = multiplied(&a, &b, 16, 16);
        everywhere(&expected, |device| run::<f32>(device, transposed));
        everywhere(&expected, |device| run::<f16>(device, transposed));
        everywhere(&expected, |device| run::<bf16>(device, transposed));
    }
}

#[test]
fn rows_reduce_everywhere() {
    use crate::anywhere::{eighths, everywhere};
    let x = eighths::<f32>(32, 7);
    let rows = x.chunks(4).flat_map(|row| [row.iter().copied().fold(f32::MIN, f32::max); 4]);
    let expected: Vec<f32> = rows.chain(x.chunks(4).flat_map(|row| [row.iter().sum(); 4])).collect();
    everywhere(&expected, |device| {
        let x = Memory::from_slice(&x);
        let mut out = Memory::from_slice(&[0f32; 64]);
        of_rows::Call { x: x.view(), out: out.view_mut(), groups: [1, 1, 1] }.launch(device).unwrap();
        out.to_vec().unwrap()
    });
}

/// Lines that start at no multiple of 16 bytes.
#[kernel(threads = 32)]
fn askew(out: &mut Buffer<f32>) {
    let mut lines: Shared<f16> = shared(320);
    for i in (thread_index()..320).step_by(32) {
        lines[i] = f16::from_f32(1.0);
    }
    barrier();
    let x = load_lefts::<f16>(&lines, 0u32, 20u32);
    let y = load_rights::<f16>(&lines, 0u32, 16u32);
    let sums = multiply_add::<f16>([x[0], x[1]], y[0], [[0.0; 2]; 2]);
    out[simd_lane()] = sums[0][0];
}

#[test]
fn lines_of_matrices_are_aligned() {
    use flashtile_kernel::LaunchError;
    use flashtile_kernel::simulator::{FaultKind, Simulator};
    let mut out = Memory::uninit::<f32>(32);
    let launched = askew::Call { out: out.view_mut(), groups: [1, 1, 1] }.launch(&Simulator::new());
    let Err(LaunchError::Device(fault)) = launched else { panic!("{launched:?}") };
    assert_eq!(fault.kind, FaultKind::Misaligned, "{fault}");
}
