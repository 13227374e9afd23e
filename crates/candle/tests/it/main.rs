//! Tests of flashtile-candle against candle's own operators.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod adapter;
mod cache;
mod errors;
mod flash;
mod gradients;
mod options;
mod sdpa;

use candle_core::{D, DType, Device, Result, Tensor};

/// Elements from -1 to 1, the same for the same seed.
fn random(shape: &[usize], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let all: Vec<f32> = std::iter::repeat_with(next).take(shape.iter().product()).collect();
    Tensor::from_vec(all, shape, &Device::Cpu).unwrap()
}

/// Options of the reference.
#[derive(Default)]
struct Terms {
    scale: f64,
    softcap: Option<f64>,
    /// Broadcastable to `(batch, heads, queries, keys)`.
    bias: Option<Tensor>,
    /// `(heads)`
    sinks: Option<Tensor>,
}

impl Terms {
    fn scale(scale: f64) -> Self {
        Self { scale, ..Self::default() }
    }

    /// Adds a bias for `[batch, head, query, key]`.
    fn bias(mut self, dims: [usize; 4], of: impl Fn([usize; 4]) -> f64) -> Self {
        let [b, h, q, k] = dims;
        let mut all = Vec::new();
        for n in 0..b * h * q * k {
            all.push(of([n / (h * q * k), n / (q * k) % h, n / k % q, n % k]));
        }
        self.bias = Some(Tensor::from_vec(all, &dims, &Device::Cpu).unwrap());
        self
    }
}

/// 0 where a key is visible.
fn hide(hidden: bool) -> f64 {
    if hidden { f64::NEG_INFINITY } else { 0.0 }
}

/// Attention and logsumexp by candle's matmul and softmax in f64, over `(batch, heads, seq, dim)`. Rows without keys are NaN.
fn reference(q: &Tensor, k: &Tensor, v: &Tensor, terms: &Terms) -> Result<(Tensor, Tensor)> {
    let heads = q.dim(1)?;
    let wide = |x: &Tensor| {
        let (b, kv_heads, s, d) = x.dims4()?;
        let x = x.to_dtype(DType::F64)?.unsqueeze(2)?.expand((b, kv_heads, heads / kv_heads, s, d))?;
        x.reshape((b, heads, s, d))
    };
    let (q, k, v) = (q.to_dtype(DType::F64)?.contiguous()?, wide(k)?, wide(v)?);
    let mut scores = (q.matmul(&k.t()?.contiguous()?)? * terms.scale)?;
    if let Some(c) = terms.softcap {
        scores = ((scores / c)?.tanh()? * c)?;
    }
    if let Some(bias) = &terms.bias {
        scores = scores.broadcast_add(bias)?;
    }
    let keys = scores.dim(3)?;
    if let Some(sinks) = &terms.sinks {
        let (b, h, s, _) = scores.dims4()?;
        let column = sinks.to_dtype(DType::F64)?.reshape((1, h, 1, 1))?.expand((b, h, s, 1))?;
        scores = Tensor::cat(&[&scores, &column.contiguous()?], 3)?;
    }
    let probs = candle_nn::ops::softmax(&scores, D::Minus1)?.narrow(3, 0, keys)?.contiguous()?;
    Ok((probs.matmul(&v)?, scores.log_sum_exp(3)?))
}

/// The largest difference of two tensors; NaN if one of them has a NaN.
fn distance(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    let list = |x: &Tensor| x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    list(a)
        .into_iter()
        .zip(list(b))
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |max, d| if d > max || d.is_nan() { d } else { max })
}

/// Returns true if all bits of two tensors are the same.
fn same(a: &Tensor, b: &Tensor) -> bool {
    // f32 holds every half-precision number, and keeps its sign.
    let bits = |x: &Tensor| {
        let all = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        all.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    (a.dtype(), a.dims()) == (b.dtype(), b.dims()) && bits(a) == bits(b)
}

/// The largest permitted distance from the reference, for elements of k and v up to 1. In half precision, the result is rounded once, and
/// each probability may be rounded once, each by at most half a unit in the last place of 1.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-6,
        DType::F16 => 2.0 * 2f64.powi(-11) + 2e-6,
        DType::BF16 => 2.0 * 2f64.powi(-9) + 2e-6,
        other => panic!("{other:?}"),
    }
}

fn check(out: &Tensor, expected: &Tensor) {
    let (distance, max) = (distance(out, expected), tolerance(out.dtype()));
    assert!(distance <= max, "{distance:e} from the reference, expected at most {max:e}");
}

/// `(batch, seq, heads, dim)` of `(batch, heads, seq, dim)` and back, as a view.
fn swap(x: &Tensor) -> Tensor {
    x.transpose(1, 2).unwrap()
}
