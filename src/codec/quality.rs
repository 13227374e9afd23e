//! What a pair of codecs does to attention over given keys and values.

use super::{CodePages, Codec, NotStored, Side, convert};
use crate::Dtype;
use crate::problem::MAX_HEAD_DIM;

/// Keys `[tokens, head_dim]`, values `[tokens, value_dim]` and queries `[rows, head_dim]` of one head, row-major.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct Head<'a> {
    /// Keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
    /// Queries; each sees every key.
    pub q: &'a [f32],
    /// Elements of a key.
    pub head_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Multiplier of `q . k`.
    pub scale: f32,
}

/// How far attention over stored keys and values is from attention over the given ones, in f64.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Quality {
    /// Bits of an element, keys and values together, scales included.
    pub bits: f64,
    /// Mean square error of the keys over their mean square.
    pub k_error: f64,
    /// Mean square error of the values over their mean square.
    pub v_error: f64,
    /// Root mean square error of the logits, without what is the same for all keys of a query.
    pub logit_rmse: f64,
    /// Mean over queries of the Kullback-Leibler divergence of the weights, in nats.
    pub kl: f64,
    /// Root mean square error of the output over its root mean square.
    pub nrmse: f64,
}

/// Attention over keys and values in codecs, against attention over them as they are. With `centred`, the mean of the keys is not part
/// of stored ones; it has no effect on plain elements. Cost: `O(rows * tokens * (head_dim + value_dim))` on one thread.
///
/// # Errors
/// Where a row cannot be stored: `k` or `v`, its number, and why.
///
/// # Panics
/// Where the slices are no whole rows of dimensions from 1 to [`MAX_HEAD_DIM`], or there is no key.
pub fn quality(
    head: &Head<'_>,
    [k_codec, v_codec]: [Codec; 2],
    centred: bool,
) -> Result<Quality, (&'static str, usize, NotStored)> {
    let tokens = head.k.len() / head.head_dim;
    assert!(tokens > 0 && head.head_dim.max(head.value_dim) <= MAX_HEAD_DIM, "rows of keys");
    assert_eq!((head.k.len(), head.v.len()), (tokens * head.head_dim, tokens * head.value_dim), "whole rows");
    let mean = centred.then(|| mean(head.k, head.head_dim));
    let k =
        stored(head.k, head.head_dim, (k_codec, Side::Keys), mean).map_err(|(row, why)| ("k", row, why))?;
    let v = stored(head.v, head.value_dim, (v_codec, Side::Values), None)
        .map_err(|(row, why)| ("v", row, why))?;
    let (mut logit, mut kl, mut error, mut energy) = (0.0, 0.0, 0.0, 0.0);
    let mut rows = 0;
    for q in head.q.chunks_exact(head.head_dim) {
        let exact = logits(q, head.k, head.scale);
        let got = logits(q, &k, head.scale);
        let shift = exact.iter().zip(&got).map(|(a, b)| a - b).sum::<f64>() / tokens as f64;
        logit += exact.iter().zip(&got).map(|(a, b)| (a - b - shift).powi(2)).sum::<f64>() / tokens as f64;
        let (p, log_p) = softmax(&exact);
        let (r, log_r) = softmax(&got);
        kl += p.iter().zip(log_p.iter().zip(&log_r)).map(|(p, (a, b))| p * (a - b)).sum::<f64>();
        let (want, out) = (weighted(&p, head.v, head.value_dim), weighted(&r, &v, head.value_dim));
        error += want.iter().zip(&out).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
        energy += want.iter().map(|x| x * x).sum::<f64>();
        rows += 1;
    }
    let of_rows = |sum: f64| sum / f64::from(rows.max(1));
    let bytes = k_codec.row_bytes(head.head_dim) + v_codec.row_bytes(head.value_dim);
    Ok(Quality {
        bits: 8.0 * bytes as f64 / (head.head_dim + head.value_dim) as f64,
        k_error: relative(head.k, &k),
        v_error: relative(head.v, &v),
        logit_rmse: of_rows(logit).sqrt(),
        kl: of_rows(kl),
        nrmse: if energy == 0.0 { 0.0 } else { (error / energy).sqrt() },
    })
}

/// The mean row.
fn mean(rows: &[f32], dim: usize) -> Vec<f32> {
    let mut sums = vec![0.0f64; dim];
    for row in rows.chunks_exact(dim) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    let count = (rows.len() / dim) as f64;
    sums.into_iter().map(|sum| (sum / count) as f32).collect()
}

/// Rows as they come back from a codec.
fn stored(
    rows: &[f32],
    dim: usize,
    (codec, side): (Codec, Side),
    mean: Option<Vec<f32>>,
) -> Result<Vec<f32>, (usize, NotStored)> {
    if let Some(dtype) = codec.dtype() {
        let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let mut narrow = vec![0u8; rows.len() * dtype.bytes()];
        convert(Dtype::F32, &bytes, dtype, &mut narrow);
        let mut back = vec![0.0; rows.len()];
        super::to_f32(dtype, &narrow, &mut back);
        return Ok(back);
    }
    let mut back = vec![0.0; rows.len()];
    // A page of one row, written again for each.
    let Ok(mut page) = CodePages::new(codec, side, [1, 1, 1, dim]) else {
        return Err((0, NotStored::Dim { codec, dim }));
    };
    page.set_mean(mean);
    for (n, (row, back)) in rows.chunks_exact(dim).zip(back.chunks_exact_mut(dim)).enumerate() {
        page.store([0, 0, 0], row).map_err(|why| (n, why))?;
        page.read(0, 0, 0, back);
    }
    Ok(back)
}

fn relative(rows: &[f32], back: &[f32]) -> f64 {
    let energy: f64 = rows.iter().map(|x| f64::from(*x).powi(2)).sum();
    let error: f64 = rows.iter().zip(back).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
    if energy == 0.0 { 0.0 } else { error / energy }
}

fn logits(q: &[f32], k: &[f32], scale: f32) -> Vec<f64> {
    let product = |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
    k.chunks_exact(q.len()).map(|k| f64::from(scale) * product(k)).collect()
}

/// Weights and their logarithms.
fn softmax(logits: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = most + logits.iter().map(|x| (x - most).exp()).sum::<f64>().ln();
    let logs: Vec<f64> = logits.iter().map(|x| x - lse).collect();
    (logs.iter().map(|x| x.exp()).collect(), logs)
}

fn weighted(p: &[f64], v: &[f32], dim: usize) -> Vec<f64> {
    let mut out = vec![0.0; dim];
    for (p, v) in p.iter().zip(v.chunks_exact(dim)) {
        out.iter_mut().zip(v).for_each(|(o, v)| *o += p * f64::from(*v));
    }
    out
}
