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
