//! Gradients of attention by definition.

use super::forward::{Row, elements, for_each_row, softmax};
use crate::gradients;
use crate::inputs::{Inputs, RunError};
use crate::problem::Problem;
use crate::tensor::TensorView;

/// Output of [`backward`], dense: the gradients of a loss with respect to the inputs of attention.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub struct AttentionGradients {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub d_q: Vec<f64>,
    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub d_k: Vec<f64>,
    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub d_v: Vec<f64>,
    /// `[q_heads]`; empty without sinks.
    pub d_sinks: Vec<f64>,
    /// The shape of the mask; empty unless the mask is additive.
    pub d_bias: Vec<f64>,
    /// The shape of the slopes; empty without ALiBi.
    pub d_alibi_slopes: Vec<f64>,
}

/// Gradients of a loss with respect to the inputs of attention, as [`crate::gradients`] defines them, from its gradients with respect to out,
/// `d_out` `[batch, q_heads, q_len, value_dim]`, and to lse, `d_lse` `[batch, q_heads, q_len]` (zeros if `None`). Cost: as
/// [`attention`](super::attention), times 3.
///
/// # Errors
/// [`RunError`] if the tensors do not match the problem.
pub fn backward(
    problem: &Problem,
    inputs: &Inputs<'_>,
    d_out: &TensorView<'_>,
    d_lse: Option<&[f32]>,
) -> Result<AttentionGradients, RunError> {
    gradients::check_out_gradients(problem, inputs, d_out, d_lse)?;
    let dims = problem.dims();
    let zeros = |shape: [usize; 4]| vec![0.0; shape.iter().product()];
    let mut result = AttentionGradients {
        d_q: zeros(dims.q_shape()),
        d_k: zeros(dims.k_shape()),
        d_v: zeros(dims.v_shape()),
        d_sinks: vec![0.0; inputs.sinks.map_or(0, <[f32]>::len)],
        d_bias: gradients::bias_shape(inputs).map_or(Vec::new(), zeros),
        d_alibi_slopes: vec![0.0; inputs.alibi_slopes.map_or(0, <[f32]>::len)],
    };
    for_each_row(problem, inputs, |at, row| {
        let (s, h) = (row.sequence, row.h);
        let d_out: Vec<f64> = elements(d_out, [s.batch, h, s.q_start + row.i]).collect();
        let d_lse = d_lse.map_or(0.0, |d_lse| f64::from(d_lse[at]));
        add_row(row, at, &RowGradients { d_out, d_lse }, &mut result);
    });
    Ok(result)
}

/// Gradients of the loss with respect to the results of a row.
struct RowGradients {
    d_out: Vec<f64>,
    d_lse: f64,
}

/// Adds the contribution of a query row, whose index in `[batch, q_heads, q_len]` is `at`.
fn add_row(row: &Row<'_>, at: usize, gradients: &RowGradients, to: &mut AttentionGradients) {
    let RowGradients { d_out, d_lse } = gradients;
    let (problem, inputs, s) = (row.problem, row.inputs, row.sequence);
    let (dims, scale) = (problem.dims(), f64::from(problem.scale()));
    let (probs, lse) = softmax(row);
    // d_p of a key is d_out . v, and the softmax takes off their mean, d_out . out.
    let d_probs: Vec<f64> = probs.iter().map(|&(j, _)| dot(d_out, row.value(j))).collect();
    let delta = probs.iter().zip(&d_probs).map(|((_, p), d_p)| p * d_p).sum::<f64>() - d_lse;
    let kv_head = row.h / dims.gqa_group();
    for (&(j, p), d_p) in probs.iter().zip(&d_probs) {
        let key = (s.batch * dims.kv_heads + kv_head) * dims.kv_len + s.kv_start + j;
        add(&mut to.d_v[key * dims.value_dim..], p, d_out);
        let d_score = p * (d_p - delta);
        if let Some(index) = bias_index(row, j) {
            to.d_bias[index] += d_score;
        }
        if let Some(slopes) = inputs.alibi_slopes {
            to.d_alibi_slopes[row.slope_index(slopes.len())] -= d_score * row.distance(j) as f64;
        }
        let d_product = d_score * softcap_slope(row, j) * scale;
        add(&mut to.d_q[at * dims.head_dim..], d_product, row.key(j));
        add(&mut to.d_k[key * dims.head_dim..], d_product, row.q);
    }
    if let Some(sinks) = inputs.sinks {
        let p = (f64::from(sinks[row.h]) - lse).exp();
        to.d_sinks[row.h] -= if lse == f64::NEG_INFINITY { 0.0 } else { p * delta };
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `to += factor * of`, as far as `of` reaches.
fn add(to: &mut [f64], factor: f64, of: &[f64]) {
    to.iter_mut().zip(of).for_each(|(to, x)| *to += factor * x);
}

/// The derivative of the softcap, `1 - tanh(x / c)^2`; 1 without one.
fn softcap_slope(row: &Row<'_>, j: usize) -> f64 {
    row.problem.desc().softcap.map_or(1.0, |c| (row.scaled_product(j) / f64::from(c)).cosh().powi(-2))
}

/// Index of the element of an additive mask that key `j` has.
fn bias_index(row: &Row<'_>, j: usize) -> Option<usize> {
    let shape = gradients::bias_shape(row.inputs)?;
    let at = [row.index, row.h, row.i, j];
    Some(shape.iter().zip(at).fold(0, |index, (&n, at)| index * n + if n == 1 { 0 } else { at }))
}
