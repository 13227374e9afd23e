//! Checks answers against softmax(q k^T / sqrt(d)) v in f64, and gradients against its derivatives.

use crate::Problem;
use crate::attention::{Call, Kind};
use candle_core::{DType, Result, Tensor};

/// The largest error of the answer to a problem, relative to the largest value of the reference; fails if the answer is wrong.
pub fn check(kind: Kind, problem: &Problem) -> Result<f64> {
    let inputs = problem.inputs(1)?;
    let expected = reference(problem, &inputs)?;
    let answers = Call::new(kind, problem, inputs)?.run()?;
    let name = kind.name()?;
    let mut error = 0.0f64;
    for (n, (answer, expected)) in answers.iter().zip(&expected).enumerate() {
        let (heads, rows) = if n == 0 { (problem.h, problem.rows()) } else { (problem.hkv, problem.s) };
        let shape = answer.dims();
        if shape != [problem.b, heads, rows, problem.d] {
            candle_core::bail!("{name}: wrong shape {shape:?} for {problem:?}");
        }
        let found = values(answer)?;
        let largest = |values: &mut dyn Iterator<Item = f64>| {
            values.fold(0.0, |a: f64, b| if b.is_nan() { b } else { a.max(b) })
        };
        let scale = largest(&mut expected.iter().map(|x| x.abs()));
        let of = largest(&mut expected.iter().zip(&found).map(|(a, b)| (a - b).abs())) / scale;
        error = if of.is_nan() { of } else { error.max(of) };
    }
    // Sums of f16 leave errors of 1e-2; a wrong mask or a wrong layout, errors near 1.
    let tolerance = if problem.dtype == "f32" { 1e-5 } else { 4e-2 };
    if error.is_nan() || error > tolerance {
        candle_core::bail!("{name}: wrong answer, error {error:.2e} for {problem:?}");
    }
    Ok(error)
}

fn values(x: &Tensor) -> Result<Vec<f64>> {
    x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// The answer; of a backward pass the gradients of queries, keys and values.
fn reference(problem: &Problem, inputs: &[Tensor; 4]) -> Result<Vec<Vec<f64>>> {
    let [q, k, v, d_out] =
        [values(&inputs[0])?, values(&inputs[1])?, values(&inputs[2])?, values(&inputs[3])?];
    let Problem { d, h, hkv, b, s, .. } = *problem;
    let (rows, scale) = (problem.rows(), 1.0 / (d as f64).sqrt());
    let dot = |x: &[f64], i: usize, y: &[f64], j: usize| -> f64 {
        x[i * d..][..d].iter().zip(&y[j * d..][..d]).map(|(a, b)| a * b).sum()
    };
    let add = |to: &mut [f64], i: usize, factor: f64, x: &[f64], j: usize| {
        for (to, x) in to[i * d..][..d].iter_mut().zip(&x[j * d..][..d]) {
            *to += factor * x;
        }
    };
    let mut out = vec![0.0; q.len()];
    let (mut d_q, mut d_k, mut d_v) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for row in 0..b * h * rows {
        let (batch, head, position) = (row / (h * rows), row / rows % h, row % rows);
        let keys = (batch * hkv + head / (h / hkv)) * s;
        let visible = if problem.causal { position + 1 } else { s };
        let scores: Vec<f64> = (0..visible).map(|n| scale * dot(&q, row, &k, keys + n)).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let probs: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let total: f64 = probs.iter().sum();
        let probs: Vec<f64> = probs.iter().map(|p| p / total).collect();
        for (n, &p) in probs.iter().enumerate() {
            add(&mut out, row, p, &v, keys + n);
        }
        let delta = dot(&d_out, row, &out, row);
        for (n, &p) in probs.iter().enumerate() {
            let d_score = scale * p * (dot(&d_out, row, &v, keys + n) - delta);
            add(&mut d_q, row, d_score, &k, keys + n);
            add(&mut d_k, keys + n, d_score, &q, row);
            add(&mut d_v, keys + n, p, &d_out, row);
        }
    }
    Ok(if problem.is_backward() { vec![d_q, d_k, d_v] } else { vec![out] })
}
