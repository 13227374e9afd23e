//! mlx-native's caches by definition, in scalar f64: its encoder, and a decode step over its buffers. They share only
//! tables with the codec.

use flashtile_core::codec::mlx::{SIGNS, tables};
use flashtile_core::codec::{Codec, RowKind};

/// One row in the format of mlx-native.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MlxRow {
    /// Codes: one byte for two coordinates at 4 bits, otherwise one byte each.
    pub codes: Vec<u8>,
    /// A norm for each 256 coordinates.
    pub norms: Vec<f64>,
    /// Distance of each coordinate from the nearest edge, in units of the codebook.
    pub margins: Vec<f64>,
}

/// Encodes a row of 256 or 512 elements.
///
/// # Panics
/// If the codec has another format or does not support rows of this length.
#[must_use]
pub fn mlx_encode(codec: Codec, x: &[f32]) -> MlxRow {
    let (bits, rotated) = format(codec);
    assert!(codec.supports(x.len()), "{codec} of {}", x.len());
    let x: Vec<f64> = x.iter().copied().map(f64::from).collect();
    let y = if rotated { rotate(&x) } else { x };
    let positive = tables(bits).1.iter().copied().map(f64::from);
    let edges: Vec<f64> = positive.clone().map(|edge| -edge).chain([0.0]).chain(positive).collect();
    let (mut indices, mut norms, mut margins) = (Vec::new(), Vec::new(), Vec::new());
    for block in y.chunks(256) {
        let length = block.iter().map(|y| y * y).sum::<f64>().sqrt();
        norms.push(if y.len() == 256 { length } else { length / 16.0 });
        for y in block {
            // In both dimensions, the root mean square of a block is 1.
            let z = if norms[norms.len() - 1] > 1e-10 { y / (length / 16.0) } else { 0.0 };
            indices.push(edges.iter().filter(|edge| **edge < z).count() as u8);
            margins.push(edges.iter().fold(f64::INFINITY, |min, edge| min.min((z - edge).abs())));
        }
    }
    let codes = match bits {
        4 => indices.chunks(2).map(|pair| pair[0] + 16 * pair[1]).collect(),
        _ => indices,
    };
    MlxRow { codes, norms, margins }
}

/// Keys or values of a slot.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_enums)]
pub enum MlxRows<'a> {
    /// `[kv_heads, capacity, dim]`.
    Elements(&'a [f32]),
    /// Codec, codes `[kv_heads, capacity, dim / 2 or dim]` and norms `[kv_heads, capacity, dim / 256]`.
    Codes(Codec, &'a [u8], &'a [f32]),
}

impl MlxRows<'_> {
    /// Row `at` of `[kv_heads * capacity]`, in the rotated domain if it is rotated.
    fn row(&self, dim: usize, at: usize) -> Vec<f64> {
        match *self {
            Self::Elements(x) => x[at * dim..][..dim].iter().copied().map(f64::from).collect(),
            Self::Codes(codec, codes, norms) => {
                let (bits, _) = format(codec);
                let positive = tables(bits).0.iter().copied().map(f64::from);
                let values: Vec<f64> = positive.clone().rev().map(|x| -x).chain(positive).collect();
                let code = |d: usize| match bits {
                    4 => codes[at * dim / 2 + d / 2] >> (4 * (d % 2)) & 15,
                    _ => codes[at * dim + d],
                };
                let factor = |d: usize| match dim {
                    256 => f64::from(norms[at]) / 16.0,
                    _ => f64::from(norms[2 * at + d / 256]),
                };
                (0..dim).map(|d| values[usize::from(code(d))] * factor(d)).collect()
            }
        }
    }

    fn rotated(&self) -> bool {
        matches!(self, Self::Codes(codec, ..) if format(*codec).1)
    }
}

/// A decode step over one slot: one query row per head.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct MlxStep<'a> {
    /// `[q_heads, dim]`.
    pub q: &'a [f32],
    /// Keys.
    pub k: MlxRows<'a>,
    /// Values.
    pub v: MlxRows<'a>,
    /// Key/value heads, rows of the slot, elements of a row.
    pub shape: [usize; 3],
    /// Rows of the slot that are read.
    pub kv_len: usize,
    /// The row that holds the oldest token.
    pub ring_start: usize,
    /// Number of the newest tokens that are visible.
    pub window: Option<usize>,
    /// Multiplier of `q . k`.
    pub scale: f32,
}

/// Output `[q_heads, dim]` of a step.
#[must_use]
pub fn mlx_decode(step: &MlxStep<'_>) -> Vec<f64> {
    let [kv_heads, capacity, dim] = step.shape;
    let group = step.q.len() / dim / kv_heads;
    let oldest = step.window.map_or(0, |window| step.kv_len.saturating_sub(window));
    let seen: Vec<usize> = (0..step.kv_len)
        .filter(|row| (oldest..step.kv_len).contains(&((row + capacity - step.ring_start) % capacity)))
        .collect();
    let mut out = Vec::with_capacity(step.q.len());
    for (head, q) in step.q.chunks(dim).enumerate() {
        let first = head / group * capacity;
        let q: Vec<f64> = q.iter().copied().map(f64::from).collect();
        let q = if step.k.rotated() { rotate(&q) } else { q };
        let score = |row: &usize| {
            let products = q.iter().zip(step.k.row(dim, first + row)).map(|(q, k)| q * k);
            f64::from(step.scale) * products.sum::<f64>()
        };
        let scores: Vec<f64> = seen.iter().map(score).collect();
        let row_max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let probs: Vec<f64> = scores.iter().map(|score| (score - row_max).exp()).collect();
        let row_sum: f64 = probs.iter().sum();
        let mut values = vec![0.0; dim];
        for (row, p) in seen.iter().zip(&probs) {
            values.iter_mut().zip(step.v.row(dim, first + row)).for_each(|(o, v)| *o += p / row_sum * v);
        }
        out.extend(if step.v.rotated() { rotate_back(&values) } else { values });
    }
    out
}

/// Bits of a code, and whether rows are rotated.
fn format(codec: Codec) -> (usize, bool) {
    let kind = codec.row_kind();
    assert!(matches!(kind, RowKind::Mlx { .. }), "{codec} is not a codec of mlx-native");
    if let RowKind::Mlx { bits, rotated } = kind { (bits, rotated) } else { (0, false) }
}

fn sign(i: usize) -> f64 {
    if SIGNS[i / 8] >> (i % 8) & 1 == 1 { -1.0 } else { 1.0 }
}

/// The Walsh-Hadamard matrix has the entry (-1)^n at `(i, j)`, where n is the number of one bits that `i` and `j`
/// share.
fn hadamard(x: &[f64]) -> Vec<f64> {
    let entry = |i: usize, j: usize| if (i & j).count_ones() % 2 == 1 { -1.0 } else { 1.0 };
    let sum = |i: usize| x.iter().enumerate().map(|(j, x)| entry(i, j) * x).sum::<f64>();
    (0..x.len()).map(|i| sum(i) / (x.len() as f64).sqrt()).collect()
}

fn rotate(x: &[f64]) -> Vec<f64> {
    hadamard(&x.iter().enumerate().map(|(i, x)| sign(i) * x).collect::<Vec<f64>>())
}

fn rotate_back(y: &[f64]) -> Vec<f64> {
    hadamard(y).into_iter().enumerate().map(|(i, x)| sign(i) * x).collect()
}
