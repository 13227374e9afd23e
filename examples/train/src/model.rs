//! A decoder of characters: RMSNorm, grouped-query attention with learned positions, and a gated MLP.

use anyhow::{Context, Result};
use candle_core::{D, DType, Device, Tensor, Var};
use candle_nn::ops;
use flashtile_candle::{Options, attention};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Normal};
use std::collections::BTreeMap;

/// Sizes of a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) vocabulary: usize,
    /// Tokens that a position sees at most.
    pub(crate) context: usize,
    pub(crate) layers: usize,
    pub(crate) width: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
}

/// Parameters by name, all variables of one dtype.
#[derive(Debug)]
pub(crate) struct Model {
    sizes: Sizes,
    variables: BTreeMap<String, Var>,
}

/// Added to the mean square of a row before its root.
const EPSILON: f64 = 1e-5;

impl Model {
    /// A model with normal parameters, the same for the same seed.
    pub(crate) fn new(sizes: Sizes, seed: u64) -> Result<Self> {
        let Sizes { vocabulary, context, layers, width, heads, kv_heads } = sizes;
        let kv_width = width / heads * kv_heads;
        let mut shapes = vec![
            ("tokens".to_owned(), vec![vocabulary, width]),
            ("positions".to_owned(), vec![context, width]),
            ("norm".to_owned(), vec![width]),
            ("head".to_owned(), vec![vocabulary, width]),
        ];
        for layer in 0..layers {
            let of_layer = [
                ("norm1", vec![width]),
                ("q", vec![width, width]),
                ("k", vec![kv_width, width]),
                ("v", vec![kv_width, width]),
                ("o", vec![width, width]),
                ("norm2", vec![width]),
                ("gate", vec![3 * width, width]),
                ("up", vec![3 * width, width]),
                ("down", vec![width, 3 * width]),
            ];
            shapes.extend(of_layer.map(|(name, shape)| (format!("{layer}.{name}"), shape)));
        }
        let mut rng = StdRng::seed_from_u64(seed);
        let mut variables = BTreeMap::new();
        for (name, shape) in shapes {
            let len = shape.iter().product();
            let values: Vec<f32> = if name.contains("norm") {
                vec![1.0; len]
            } else {
                // Tokens outweigh positions, and what layers add at first.
                let deviation = match name.rsplit('.').next() {
                    Some("tokens") => 0.5,
                    Some("positions") => 0.2,
                    Some("o" | "down" | "head") => 0.3 / (width as f32).sqrt(),
                    _ => 1.0 / (width as f32).sqrt(),
                };
                let normal = Normal::new(0.0, deviation)?;
                (0..len).map(|_| normal.sample(&mut rng)).collect()
            };
            variables.insert(name, Var::from_tensor(&Tensor::from_vec(values, shape, &Device::Cpu)?)?);
        }
        Ok(Self { sizes, variables })
    }

    /// A copy in another dtype.
    pub(crate) fn to_dtype(&self, dtype: DType) -> Result<Self> {
        let copy = |(name, var): (&String, &Var)| {
            Ok((name.clone(), Var::from_tensor(&var.as_tensor().to_dtype(dtype)?.copy()?)?))
        };
        Ok(Self { sizes: self.sizes, variables: self.variables.iter().map(copy).collect::<Result<_>>()? })
    }

    /// All parameters, in the order of their names.
    pub(crate) fn variables(&self) -> Vec<Var> {
        self.variables.values().cloned().collect()
    }

    /// Parameters by name, to be stored.
    pub(crate) fn tensors(&self) -> std::collections::HashMap<String, Tensor> {
        self.variables.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect()
    }

    fn parameter(&self, name: &str) -> Result<&Tensor> {
        Ok(self.variables.get(name).with_context(|| format!("no parameter {name}"))?.as_tensor())
    }

    /// Logits `(batch, tokens, vocabulary)` of tokens `(batch, tokens)`.
    pub(crate) fn logits(&self, tokens: &Tensor) -> Result<Tensor> {
        let (batch, len) = tokens.dims2()?;
        let positions = self.parameter("positions")?.narrow(0, 0, len)?;
        let embedded = self.parameter("tokens")?.index_select(&tokens.flatten_all()?, 0)?;
        let mut x = embedded.reshape((batch, len, self.sizes.width))?.broadcast_add(&positions)?;
        for layer in 0..self.sizes.layers {
            let of = |name: &str| self.parameter(&format!("{layer}.{name}"));
            let attended = self.attend(&normed(&x, of("norm1")?)?, &of)?;
            x = (x + attended)?;
            let y = normed(&x, of("norm2")?)?;
            let gated = (ops::silu(&linear(&y, of("gate")?)?)? * linear(&y, of("up")?)?)?;
            x = (x + linear(&gated, of("down")?)?)?;
        }
        linear(&normed(&x, self.parameter("norm")?)?, self.parameter("head")?)
    }

    /// Attention of a layer over rows `(batch, tokens, width)`.
    fn attend<'a>(&self, x: &Tensor, of: &impl Fn(&str) -> Result<&'a Tensor>) -> Result<Tensor> {
        let (batch, len, width) = x.dims3()?;
        let heads = |x: Tensor, heads: usize| {
            Ok::<_, candle_core::Error>(
                x.reshape((batch, len, heads, width / self.sizes.heads))?.transpose(1, 2)?,
            )
        };
        let q = heads(linear(x, of("q")?)?, self.sizes.heads)?;
        let k = heads(linear(x, of("k")?)?, self.sizes.kv_heads)?;
        let v = heads(linear(x, of("v")?)?, self.sizes.kv_heads)?;
        let out = match x.dtype() {
            DType::F64 => composed(&q, &k, &v)?,
            _ => attention(&q, &k, &v, &Options::causal())?.0,
        };
        linear(&out.transpose(1, 2)?.reshape((batch, len, width))?, of("o")?)
    }
}

/// Causal attention in candle's operations, which a dtype without kernels of flashtile takes.
fn composed(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (batch, heads, len, dim) = q.dims4()?;
    let wide = |x: &Tensor| -> Result<Tensor> {
        let kv_heads = x.dim(1)?;
        let x = x.unsqueeze(2)?.expand((batch, kv_heads, heads / kv_heads, len, dim))?;
        Ok(x.reshape((batch, heads, len, dim))?)
    };
    let scores = (q.contiguous()?.matmul(&wide(k)?.t()?.contiguous()?)? / (dim as f64).sqrt())?;
    let hidden = |n: usize| if n % len > n / len { f64::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f64> = (0..len * len).map(hidden).collect();
    let mask = Tensor::from_vec(mask, (len, len), &Device::Cpu)?.to_dtype(q.dtype())?;
    let probs = ops::softmax(&scores.broadcast_add(&mask)?, D::Minus1)?;
    Ok(probs.matmul(&wide(v)?)?)
}

/// `x` times the transpose of a weight `(out, in)`.
fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let dims = x.dims();
    let rows = x.reshape(((), dims[dims.len() - 1]))?.matmul(&weight.t()?)?;
    let mut shape = dims.to_vec();
    shape[dims.len() - 1] = weight.dim(0)?;
    Ok(rows.reshape(shape)?)
}

/// Rows over the root of their mean square, times a weight.
fn normed(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let square = (x.sqr()?.mean_keepdim(D::Minus1)? + EPSILON)?;
    Ok(x.broadcast_div(&square.sqrt()?)?.broadcast_mul(weight)?)
}
