//! Gradients of attention: the tensors of a backward run, checked against the problem once, for every backend.
//!
//! Let `L` be a loss of `out` and `lse`, with `d_out = dL/d_out` and `d_lse = dL/d_lse`. With `p = exp(score - lse)` of a visible key,
//! sinks included in `lse`, and `delta = sum(d_out * out) - d_lse` of a query row:
//!
//! ```text
//! d_v     = sum over rows of  p * d_out
//! d_score = p * (d_out . v - delta)
//! d_q     = sum over keys of  scale * softcap'(scale * q . k) * d_score * k
//! d_k     = sum over rows of  scale * softcap'(scale * q . k) * d_score * q
//! d_bias  = d_score, summed over the axes that the mask broadcasts
//! d_alibi_slopes = sum of -d_score * |p(i) - j|
//! d_sinks = sum over rows of -exp(sink - lse) * delta
//! ```
//!
//! Sums over rows are over the rows of every query head of a GQA group. A row that sees no key adds nothing, and its `d_q` is 0. Keys
//! and values that no query sees, padding included, have gradient 0.

use crate::dtype::{Dtype, MaskKind};
use crate::inputs::{self, Inputs, RunError};
use crate::problem::Problem;
use crate::tensor::{TensorView, TensorViewMut};

/// Tensors that a backward run reads.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct BackwardInputs<'a> {
    /// Inputs of the forward run.
    pub forward: Inputs<'a>,
    /// Its output, `[batch, q_heads, q_len, value_dim]`.
    pub out: TensorView<'a>,
    /// Its logsumexp, dense `[batch, q_heads, q_len]`.
    pub lse: &'a [f32],
    /// Gradient of the loss with respect to `out`, `[batch, q_heads, q_len, value_dim]`.
    pub d_out: TensorView<'a>,
    /// Gradient of the loss with respect to `lse`, dense `[batch, q_heads, q_len]`; `None` for zeros.
    pub d_lse: Option<&'a [f32]>,
}

impl<'a> BackwardInputs<'a> {
    /// Inputs of a loss that depends on `out` alone, of the forward run without masks, ALiBi slopes or sinks, which are public fields of
    /// `forward`: q, k and v, then the run's `out` and `lse`, and `d_out`.
    #[must_use]
    pub const fn new(
        [q, k, v]: [TensorView<'a>; 3],
        out: TensorView<'a>,
        lse: &'a [f32],
        d_out: TensorView<'a>,
    ) -> Self {
        Self { forward: Inputs::new(q, k, v), out, lse, d_out, d_lse: None }
    }
}

/// Tensors that a backward run writes: gradients of the loss with respect to the inputs. Contents before the run are never read. Every
/// element is written.
#[derive(Debug)]
#[non_exhaustive]
pub struct Gradients<'a> {
    /// `[batch, q_heads, q_len, head_dim]`, of the problem's dtype.
    pub d_q: TensorViewMut<'a>,
    /// `[batch, kv_heads, kv_len, head_dim]`, of the problem's dtype.
    pub d_k: TensorViewMut<'a>,
    /// `[batch, kv_heads, kv_len, value_dim]`, of the problem's dtype.
    pub d_v: TensorViewMut<'a>,
    /// `[q_heads]`, if wanted, where the problem has sinks.
    pub d_sinks: Option<&'a mut [f32]>,
    /// Dense, with the [shape of the mask](bias_shape), if wanted, where the mask is additive.
    pub d_bias: Option<&'a mut [f32]>,
    /// One for each slope, if wanted, where the problem has ALiBi.
    pub d_alibi_slopes: Option<&'a mut [f32]>,
}

impl<'a> Gradients<'a> {
    /// The gradients of queries, keys and values. Others are public fields.
    #[must_use]
    pub const fn new(d_q: TensorViewMut<'a>, d_k: TensorViewMut<'a>, d_v: TensorViewMut<'a>) -> Self {
        Self { d_q, d_k, d_v, d_sinks: None, d_bias: None, d_alibi_slopes: None }
    }
}

/// Shape of `d_bias`: that of the mask, if it is additive.
#[must_use]
pub fn bias_shape(inputs: &Inputs<'_>) -> Option<[usize; 4]> {
    let mask = inputs.mask.as_ref()?;
    matches!(mask.kind(), MaskKind::Additive(_)).then(|| mask.shape())
}

fn check_len(tensor: &'static str, expected: usize, got: Option<usize>) -> Result<(), RunError> {
    match got {
        Some(got) if got != expected => Err(RunError::Length { tensor, expected, got }),
        _ => Ok(()),
    }
}

/// Checks dtype and shape of `d_out`, `d_q`, `d_k` or `d_v`, for backends whose tensors are not in host memory.
///
/// # Errors
/// [`RunError::Dtype`] or [`RunError::Shape`].
pub fn check_tensor(problem: &Problem, name: &'static str, got: (Dtype, [usize; 4])) -> Result<(), RunError> {
    let dims = problem.dims();
    let shape = match name {
        "d_q" => dims.q_shape(),
        "d_k" => dims.k_shape(),
        "d_v" => dims.v_shape(),
        _ => dims.out_shape(),
    };
    inputs::tensor(name, (problem.dtype(), shape), got)
}

/// Checks the inputs of a forward run, and the gradients of its results.
pub(crate) fn check_out_gradients(
    problem: &Problem,
    inputs: &Inputs<'_>,
    d_out: &TensorView<'_>,
    d_lse: Option<&[f32]>,
) -> Result<(), RunError> {
    if let Some(why) = problem.no_gradients() {
        return Err(RunError::NoGradients { why });
    }
    inputs::check_inputs(problem, inputs)?;
    let dims = problem.dims();
    check_tensor(problem, "d_out", (d_out.dtype(), d_out.shape()))?;
    check_len("d_lse", dims.lse_shape().iter().product(), d_lse.map(<[f32]>::len))
}

/// Checks inputs and gradients of a backward run.
pub fn check(
    problem: &Problem,
    inputs: &BackwardInputs<'_>,
    gradients: &Gradients<'_>,
) -> Result<(), RunError> {
    let BackwardInputs { forward, out, lse, d_out, d_lse } = inputs;
    check_out_gradients(problem, forward, d_out, *d_lse)?;
    inputs::check_outputs(problem, (out.dtype(), out.shape()), Some(lse.len()))?;
    let Gradients { d_q, d_k, d_v, d_sinks, d_bias, d_alibi_slopes } = gradients;
    check_tensor(problem, "d_q", (d_q.dtype(), d_q.shape()))?;
    check_tensor(problem, "d_k", (d_k.dtype(), d_k.shape()))?;
    check_tensor(problem, "d_v", (d_v.dtype(), d_v.shape()))?;
    let list = |tensor, expected: Option<usize>, got: &Option<&mut [f32]>| match (expected, got) {
        (None, Some(_)) => Err(RunError::Unexpected { tensor }),
        (None, None) => Ok(()),
        (Some(expected), got) => check_len(tensor, expected, got.as_ref().map(|list| list.len())),
    };
    list("d_sinks", forward.sinks.map(<[f32]>::len), d_sinks)?;
    list("d_bias", bias_shape(forward).map(|shape| shape.iter().product()), d_bias)?;
    list("d_alibi_slopes", forward.alibi_slopes.map(<[f32]>::len), d_alibi_slopes)
}
