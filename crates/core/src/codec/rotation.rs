//! The rotation that makes the coordinates of any vector nearly normal: random signs, then a Hadamard transform.
//!
//! ```text
//! y = H S x,   S = diag(+1 or -1),   H orthonormal, with entries +-1 / sqrt(n) in each block
//! ```
//!
//! A dimension is one block if it is `2^k`, `12 * 2^k` or `20 * 2^k`: the Walsh-Hadamard transform, alone or combined
//! with Paley's Hadamard matrix of order 12 or 20. Any other dimension is split into blocks of the powers of two in
//! its binary representation, the largest first (112 = 64 + 32 + 16). Nothing is padded.

use super::ops::RotationOps;
use super::walsh::Real;

/// Signs are bits of SplitMix64 (Steele, Lea and Flood 2014) from this state: bit `i % 64` of output `i / 64` is set
/// for -1.
const SEED: u64 = 0x666c_6173_6874_696c;

/// Orders of Paley's matrices, and the prime of each.
const PALEY: [(usize, usize); 2] = [(12, 11), (20, 19)];

/// A rotation of vectors of one dimension.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotation {
    signs: Vec<f32>,
    blocks: Vec<Block>,
}

/// A block of `order * run` coordinates, where `order` is 1 or the order of a Paley matrix, and `run` is a power of two.
#[derive(Debug, Clone, PartialEq)]
struct Block {
    order: usize,
    run: usize,
    /// `[order, order]`; empty for order 1.
    matrix: Vec<f32>,
    /// One over the square root of the number of coordinates.
    root: f64,
}

impl Block {
    fn new(order: usize, run: usize) -> Self {
        let prime = PALEY.iter().find(|(known, _)| *known == order).map_or(0, |(_, prime)| *prime);
        let entries = if order == 1 { 0 } else { order * order };
        let matrix = (0..entries).map(|at| paley(prime, at / order, at % order)).collect();
        Self { order, run, matrix, root: 1.0 / ((order * run) as f64).sqrt() }
    }

    const fn len(&self) -> usize {
        self.order * self.run
    }

    #[inline(always)]
    fn walsh<T: Real, O: RotationOps<T>>(&self, x: &mut [T]) {
        if self.order == 1 {
            return O::walsh(x);
        }
        // This is a plain loop because a closure would be compiled without the caller's instruction set.
        for run in x.chunks_exact_mut(self.run) {
            O::walsh(run);
        }
    }
}

impl Rotation {
    /// The rotation of a dimension, with the documented signs.
    pub fn new(dim: usize) -> Self {
        let mut state = SEED;
        let mut bits = 0;
        let sign = |i: usize| {
            if i.is_multiple_of(64) {
                bits = split_mix(&mut state);
            }
            if bits >> (i % 64) & 1 == 1 { -1.0 } else { 1.0 }
        };
        Self::with_signs((0..dim).map(sign).collect())
    }

    /// A rotation with these signs, one per coordinate.
    pub(super) fn with_signs(signs: Vec<f32>) -> Self {
        Self { blocks: blocks(signs.len()), signs }
    }

    /// The signs, then 1 over the square root of the length of each block.
    pub fn factors(&self) -> Vec<f32> {
        let roots = self.blocks.iter().map(|block| f32::from_f64(block.root));
        self.signs.iter().copied().chain(roots).collect()
    }

    /// The signs, and the factor after the Walsh-Hadamard transform. The dimension must be a power of two.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn power_of_two(&self) -> (&[f32], f32) {
        debug_assert!(self.signs.len().is_power_of_two());
        (&self.signs, f32::from_f64(self.blocks[0].root))
    }

    /// Rotates in place. Every output is a fixed tree of additions with one multiplication at its root.
    #[inline(always)]
    pub(super) fn apply<O: RotationOps<f32>>(&self, x: &mut [f32]) {
        O::flip(x, &self.signs);
        let mut rest = x;
        for block in &self.blocks {
            let (x, tail) = rest.split_at_mut(block.len());
            block.walsh::<_, O>(x);
            across(block, x, false);
            O::scale(x, f32::from_f64(block.root));
            rest = tail;
        }
    }

    /// The inverse of [`Rotation::apply`], up to rounding.
    #[inline(always)]
    pub(super) fn undo<T: Real, O: RotationOps<T>>(&self, y: &mut [T]) {
        let mut rest = &mut *y;
        for block in &self.blocks {
            let (y, tail) = rest.split_at_mut(block.len());
            across(block, y, true);
            block.walsh::<_, O>(y);
            O::scale(y, T::from_f64(block.root));
            rest = tail;
        }
        O::flip(y, &self.signs);
    }
}

/// The rotation, compiled once per instruction set and called rather than inlined, because its code is large.
pub(super) trait Rotate {
    /// [`Rotation::apply`].
    fn rotate(rotation: &Rotation, x: &mut [f32]);
}

fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn blocks(dim: usize) -> Vec<Block> {
    for order in [1, 12, 20] {
        if dim.is_multiple_of(order) && (dim / order).is_power_of_two() {
            return vec![Block::new(order, dim / order)];
        }
    }
    let powers = (0..usize::BITS).rev().map(|k| 1usize << k);
    powers.filter(|power| dim & power != 0).map(|power| Block::new(1, power)).collect()
}

/// Multiplies by the block's Paley matrix, or its transpose, across runs, summing from the first run to the last.
#[inline(always)]
fn across<T: Real>(block: &Block, x: &mut [T], transposed: bool) {
    let n = block.order;
    if n == 1 {
        return;
    }
    for at in 0..block.run {
        let mut column = [T::from(0.0f32); 20];
        (0..n).for_each(|i| column[i] = x[i * block.run + at]);
        for i in 0..n {
            let entry = |j: usize| block.matrix[if transposed { j * n + i } else { i * n + j }];
            let term = |j: usize| T::from(entry(j)) * column[j];
            x[i * block.run + at] = (1..n).fold(term(0), |sum, j| sum + term(j));
        }
    }
}

/// Entry of Paley's first construction for a prime congruent to 3 modulo 4: `I + [[0, 1], [-1, chi(j - i)]]`.
fn paley(prime: usize, row: usize, col: usize) -> f32 {
    match (row, col) {
        _ if row == col => 1.0,
        (0, _) => 1.0,
        (_, 0) => -1.0,
        _ if is_square(prime, (col + prime - row) % prime) => 1.0,
        _ => -1.0,
    }
}

/// Returns true if a nonzero number is a square modulo a prime.
fn is_square(prime: usize, x: usize) -> bool {
    (1..prime).any(|y| y * y % prime == x)
}

#[cfg(test)]
mod tests {
    use crate::codec::dispatch;
    use crate::isa::IsaToken;

    fn rotate(rotation: &Rotation, x: &mut [f32]) {
        dispatch::rotate(IsaToken::best(), rotation, x);
    }

    fn unrotate(rotation: &Rotation, x: &mut [f32]) {
        dispatch::unrotate(IsaToken::best(), rotation, x);
    }
    use super::*;

    #[test]
    fn rotations_are_orthonormal_and_undone() {
        for dim in [1, 2, 12, 24, 33, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512, 576] {
            let rotation = Rotation::new(dim);
            assert_eq!(rotation.blocks.iter().map(Block::len).sum::<usize>(), dim);
            let columns: Vec<Vec<f32>> = (0..dim)
                .map(|i| {
                    let mut x = vec![0.0; dim];
                    x[i] = 1.0;
                    rotate(&rotation, &mut x);
                    x
                })
                .collect();
            for i in 0..dim {
                for j in 0..=i {
                    let dot: f64 =
                        columns[i].iter().zip(&columns[j]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    assert!((dot - f64::from(u8::from(i == j))).abs() < 1e-5, "{dim}: {i} {j} {dot}");
                }
                let mut back = columns[i].clone();
                unrotate(&rotation, &mut back);
                for (j, x) in back.iter().enumerate() {
                    assert!((x - f32::from(u8::from(i == j))).abs() < 1e-5, "{dim}: {i} {j} {x}");
                }
            }
        }
    }

    #[test]
    fn one_block_where_a_hadamard_matrix_is_known() {
        let sizes = |dim| blocks(dim).iter().map(|b| (b.order, b.run)).collect::<Vec<_>>();
        assert_eq!(sizes(128), [(1, 128)]);
        assert_eq!(sizes(96), [(12, 8)]);
        assert_eq!(sizes(192), [(12, 16)]);
        assert_eq!(sizes(80), [(20, 4)]);
        assert_eq!(sizes(112), [(1, 64), (1, 32), (1, 16)]);
        assert_eq!(sizes(576), [(1, 512), (1, 64)]);
    }

    #[test]
    fn signs_are_those_of_the_documented_generator() {
        let signs: String =
            Rotation::new(64).signs.iter().map(|s| if *s < 0.0 { '-' } else { '+' }).collect();
        let minus = signs.matches('-').count();
        assert!((20..=44).contains(&minus), "{signs}");
        // The first output of SplitMix64 from state 0, as published.
        assert_eq!(split_mix(&mut 0), 0xe220_a839_7b1d_cdaf);
    }
}
