//! The two ways in which candle computes attention.

use crate::Problem;
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::attention::{AttnMask, flash_attn};
use half::{bf16, f16};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Flash,
    Matmul,
}

impl Kind {
    /// The name in rows, with the version that the lock file states.
    pub fn name(self) -> Result<String> {
        let lock = include_str!("../Cargo.lock");
        let after = lock.split_once("name = \"candle-nn\"\nversion = \"").map(|(_, after)| after);
        let Some((version, _)) = after.and_then(|after| after.split_once('"')) else {
            candle_core::bail!("no version of candle-nn in Cargo.lock");
        };
        Ok(match self {
            Self::Flash => format!("candle flash {version}"),
            Self::Matmul => format!("candle matmul {version}"),
        })
    }

    /// Why candle cannot compute a problem.
    pub fn refuses(self, problem: &Problem) -> Option<&'static str> {
        match self {
            Self::Flash if problem.is_backward() => Some("flash_attn has no backward pass"),
            Self::Flash if problem.b > 1 && problem.dtype == "bf16" => {
                Some("flash_attn has no batches of bf16")
            }
            _ => None,
        }
    }
}

/// A problem whose inputs are prepared.
pub struct Call {
    kind: Kind,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: f64,
    /// Query heads for each key/value head.
    group: usize,
    /// The position of the first query, if later keys are hidden.
    causal: Option<usize>,
    /// The additive mask of the scores, `[rows, s]`.
    mask: Option<Tensor>,
    /// The graph of a backward pass.
    graph: Option<Graph>,
}

/// Queries, keys and values, and the scalar `sum(out * d_out)`, whose gradients are theirs.
struct Graph {
    leaves: [Var; 3],
    loss: Tensor,
}

impl Call {
    /// From queries, keys, values and gradients of the output, `[b, heads, rows, d]`.
    pub fn new(kind: Kind, problem: &Problem, [q, k, v, d_out]: [Tensor; 4]) -> Result<Self> {
        let arrange = |x: Tensor| match kind {
            Kind::Flash => x.transpose(1, 2)?.contiguous(),
            Kind::Matmul => Ok(x),
        };
        let (rows, s) = (problem.rows(), problem.s);
        let mask = if problem.causal && kind == Kind::Matmul {
            let hidden = |n: usize| if n % s > n / s { f32::NEG_INFINITY } else { 0.0 };
            let values: Vec<f32> = (0..rows * s).map(hidden).collect();
            Some(Tensor::from_vec(values, (rows, s), &Device::Cpu)?.to_dtype(problem.dtype()?)?)
        } else {
            None
        };
        let leaves = problem.is_backward().then(|| {
            Ok::<_, candle_core::Error>([Var::from_tensor(&q)?, Var::from_tensor(&k)?, Var::from_tensor(&v)?])
        });
        let leaves = leaves.transpose()?;
        let [q, k, v] =
            leaves.as_ref().map_or([q, k, v], |leaves| leaves.each_ref().map(|of| of.as_tensor().clone()));
        let mut call = Self {
            kind,
            q: arrange(q)?,
            k: arrange(k)?,
            v: arrange(v)?,
            scale: 1.0 / (problem.d as f64).sqrt(),
            group: problem.h / problem.hkv,
            causal: (problem.causal || rows == 1).then_some(s - rows),
            mask,
            graph: None,
        };
        if let Some(leaves) = leaves {
            let loss = (call.matmul()? * d_out)?.sum_all()?;
            call.graph = Some(Graph { leaves, loss });
        }
        Ok(call)
    }

    /// The answer, `[b, h, rows, d]`, or the gradients of queries, keys and values.
    pub fn run(&self) -> Result<Vec<Tensor>> {
        if let Some(Graph { leaves, loss }) = &self.graph {
            let gradients = loss.backward()?;
            let of = |leaf: &Var| {
                gradients.get(leaf).cloned().ok_or_else(|| candle_core::Error::msg("no gradient"))
            };
            return leaves.iter().map(of).collect();
        }
        Ok(vec![match self.kind {
            Kind::Flash => self.flash(),
            Kind::Matmul => self.matmul(),
        }?])
    }

    fn flash(&self) -> Result<Tensor> {
        let mask = || self.causal.map_or(AttnMask::None, AttnMask::causal_with_offset);
        let (q, k, v, scale) = (&self.q, &self.k, &self.v, self.scale as f32);
        match q.dtype() {
            DType::F32 => flash_attn::<f32>(q, k, v, scale, mask(), None, None),
            DType::F16 => flash_attn::<f16>(q, k, v, scale, mask(), None, None),
            _ => flash_attn::<bf16>(q, k, v, scale, mask(), None, None),
        }
    }

    fn matmul(&self) -> Result<Tensor> {
        let (k, v) = (self.repeated(&self.k)?, self.repeated(&self.v)?);
        let scores = (self.q.matmul(&k.transpose(2, 3)?)? * self.scale)?;
        let scores = match &self.mask {
            Some(mask) => scores.broadcast_add(mask)?,
            None => scores,
        };
        // The softmax of half-precision scores sums in their dtype: rows of bf16 sum to 1.7.
        let scores = scores.to_dtype(DType::F32)?;
        let probs = if scores.track_op() {
            candle_nn::ops::softmax(&scores, D::Minus1)?
        } else {
            candle_nn::ops::softmax_last_dim(&scores)?
        };
        probs.to_dtype(v.dtype())?.matmul(&v)
    }

    /// Keys or values with a head for each query head.
    fn repeated(&self, x: &Tensor) -> Result<Tensor> {
        if self.group == 1 {
            return Ok(x.clone());
        }
        let (b, heads, s, d) = x.dims4()?;
        Tensor::cat(&vec![x; self.group], 2)?.reshape((b, heads * self.group, s, d))
    }
}
