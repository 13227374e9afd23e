//! Checks answers against softmax(q k^T / sqrt(d)) v in f64.

use crate::Problem;
use crate::attention::{Call, Kind};
use candle_core::{DType, Result, Tensor};

/// The largest error of the answer to a problem, relative to the largest value of the reference; fails if the answer is wrong.
pub fn check(kind: Kind, problem: &Problem) -> Result<f64> {
    let inputs = problem.inputs(1)?;
    let expected = reference(problem, &inputs)?;
    let answer = Call::new(kind, problem, inputs)?.run()?;
    let (name, shape) = (kind.name()?, answer.dims());
    if shape != [problem.b, problem.h, problem.rows(), problem.d] {
        candle_core::bail!("{name}: wrong shape {shape:?} for {problem:?}");
    }
    let found = values(&answer)?;
    let largest = |values: &mut dyn Iterator<Item = f64>| {
        values.fold(0.0, |a: f64, b| if b.is_nan() { b } else { a.max(b) })
    };
    let scale = largest(&mut expected.iter().map(|x| x.abs()));
    let error = largest(&mut expected.iter().zip(&found).map(|(a, b)| (a - b).abs())) / scale;
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

fn reference(problem: &Problem, inputs: &[Tensor; 3]) -> Result<Vec<f64>> {
    let [q, k, v] = [values(&inputs[0])?, values(&inputs[1])?, values(&inputs[2])?];
    let Problem { d, h, hkv, b, s, .. } = *problem;
    let rows = problem.rows();
    let mut out = vec![0.0; q.len()];
    for row in 0..b * h * rows {
        let (batch, head, position) = (row / (h * rows), row / rows % h, row % rows);
        let keys = (batch * hkv + head / (h / hkv)) * s;
        let visible = if problem.causal { position + 1 } else { s };
        let of = |x: &[f64], n: usize| x[n * d..][..d].to_vec();
        let dot = |n: usize| -> f64 {
            of(&q, row).iter().zip(of(&k, keys + n)).map(|(a, b)| a * b).sum::<f64>() / (d as f64).sqrt()
        };
        let scores: Vec<f64> = (0..visible).map(dot).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let probs: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let total: f64 = probs.iter().sum();
        for (n, p) in probs.iter().enumerate() {
            for (i, value) in of(&v, keys + n).into_iter().enumerate() {
                out[row * d + i] += p / total * value;
            }
        }
    }
    Ok(out)
}
