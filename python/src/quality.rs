//! Errors of codecs on the keys and values of one layer.

use crate::failure::refused;
use crate::memory::Memory;
use crate::options::Options;
use crate::process;
use flashtile::codec::{key_factors, key_mean};
use flashtile::quality::{
    Comparison, Deviation, Head, HeadAttention, KeyCodec, KeyErrors, MEAN_ROWS, compare,
};
use flashtile::{Codec, Cpu, Problem, ProblemDesc, TensorView};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rayon::prelude::*;
use serde_json::{Value, json};
use std::ops::Range;

/// The report of one pair as JSON. `tensors` are k, v and q, which may be `None`.
#[pyfunction]
pub(crate) fn kv_pair(
    tensors: [Bound<'_, PyAny>; 3],
    options: &Bound<'_, PyTuple>,
    codecs: Vec<String>,
    rows: usize,
    equalize: Option<f32>,
    keep: [usize; 2],
) -> PyResult<String> {
    process::compute()?;
    let py = options.py();
    let [k, v, q] = &tensors;
    let options = Options::of(options)?;
    let axes = options.axes();
    let (k, v) = (Memory::of("k", k)?, Memory::of("v", v)?);
    let q = if q.is_none() { None } else { Some(Memory::of("q", q)?) };
    let (k, v) = (k.view(axes)?, v.view(axes)?);
    let q = q.as_ref().map(|q| q.view(axes)).transpose()?;
    let codec =
        |name: &String| name.parse::<Codec>().map_err(|error| PyValueError::new_err(error.to_string()));
    let values: Vec<Codec> = codecs.iter().map(codec).collect::<PyResult<_>>()?;
    let attention = options.attention()?;
    let asked = q.is_some();
    let pair = Pair { k, v, q: q.unwrap_or(k), rows: if asked { rows } else { 0 }, power: equalize, keep };
    let desc = attention.desc(&pair.q, &k, &v);
    let report = py.detach(|| pair.report(desc, &values)).map_err(refused)?;
    Ok(report.to_string())
}

/// The mean of the keys of a head, and their factors where they are equalized.
type Transform = (Vec<f32>, Option<Vec<f32>>);

/// Keys, values and queries of one layer.
struct Pair<'a> {
    k: TensorView<'a>,
    v: TensorView<'a>,
    /// The power of the deviations for the factors of equalized keys, if these are measured.
    power: Option<f32>,
    /// First and last tokens that stay in 16 bits.
    keep: [usize; 2],
    /// The keys where there are no queries: none of their rows is measured then.
    q: TensorView<'a>,
    rows: usize,
}

impl Pair<'_> {
    fn report(&self, desc: ProblemDesc, values: &[Codec]) -> flashtile::Result<Value> {
        Cpu::pool_threads()?;
        let problem = desc.validate()?;
        let dims = *problem.dims();
        for (tensor, expected, got) in
            [("k", dims.k_shape(), self.k.shape()), ("v", dims.v_shape(), self.v.shape())]
        {
            if expected != got {
                return Err(flashtile::RunError::Shape { tensor, expected, got }.into());
            }
        }
        let ways = |&codec: &Codec| {
            let centered = codec.dtype().is_none().then(|| KeyCodec::centered(codec));
            let equalized =
                (self.power.is_some() && codec.supports_key_factors()).then(|| KeyCodec::equalized(codec));
            [Some(KeyCodec::plain(codec)), centered, equalized]
        };
        let keys: Vec<KeyCodec> = values.iter().flat_map(ways).flatten().collect();
        let transforms: Vec<Transform> =
            (0..dims.kv_heads).map(|head| self.transform(head)).collect::<flashtile::Result<_>>()?;
        let heads: Vec<(usize, usize)> =
            (0..dims.batch).flat_map(|batch| (0..dims.kv_heads).map(move |head| (batch, head))).collect();
        let of = |&(batch, head): &(usize, usize)| {
            self.compare(&problem, [batch, head], &transforms[head], (&keys, values))
        };
        let found: Vec<Comparison> = heads.par_iter().map(of).collect::<flashtile::Result<_>>()?;
        Ok(Sums { found: &found, dims: [dims.head_dim, dims.value_dim] }.json(
            &keys,
            values,
            dims.batch * dims.kv_len,
        ))
    }

    /// The mean and the factors of the first keys of the first batch entry.
    fn transform(&self, head: usize) -> flashtile::Result<Transform> {
        let [_, _, tokens, dim] = self.k.shape();
        let rows = tokens.min(MEAN_ROWS);
        let keys = gather(&self.k, [0, head], 0..rows);
        let keys = TensorView::bhsd(&keys, [1, 1, rows, dim])?;
        let mean = key_mean(&keys);
        let factors = self.power.map(|power| key_factors(&keys, &mean, power));
        Ok((mean, factors))
    }

    fn compare(
        &self,
        problem: &Problem,
        [batch, head]: [usize; 2],
        (mean, factors): &Transform,
        (keys, values): (&[KeyCodec], &[Codec]),
    ) -> flashtile::Result<Comparison> {
        let dims = problem.dims();
        let sequence = &problem.sequences()[batch];
        let count = self.rows.min(sequence.q_len);
        let chosen: Vec<usize> = (0..count).map(|n| (2 * n + 1) * sequence.q_len / (2 * count)).collect();
        let (mut q, mut seen) = (Vec::new(), Vec::<Range<usize>>::new());
        for q_head in head * dims.gqa_group()..(head + 1) * dims.gqa_group() {
            chosen.iter().for_each(|&row| q.extend(gather(&self.q, [batch, q_head], row..row + 1)));
            seen.extend(chosen.iter().map(|&row| problem.visible(sequence, row)));
        }
        let k = gather(&self.k, [batch, head], 0..sequence.kv_len);
        let v = gather(&self.v, [batch, head], 0..sequence.kv_len);
        let (head_dim, value_dim) = (dims.head_dim, dims.value_dim);
        let head = Head { k: &k, v: &v, q: &q, head_dim, value_dim, scale: problem.scale() };
        let mut attention = HeadAttention::new(head);
        attention.seen = Some(&seen);
        attention.softcap = problem.desc().softcap;
        attention.key_mean = Some(mean);
        attention.key_factors = factors.as_deref();
        [attention.keep_first, attention.keep_last] = self.keep;
        Ok(compare(&attention, keys, values)?)
    }
}

/// Rows of a head as f32.
fn gather(of: &TensorView<'_>, [batch, head]: [usize; 2], rows: Range<usize>) -> Vec<f32> {
    let dim = of.shape()[3];
    rows.flat_map(|row| (0..dim).map(move |i| of.get([batch, head, row, i]))).collect()
}

/// Results of all heads.
struct Sums<'a> {
    found: &'a [Comparison],
    dims: [usize; 2],
}

impl Sums<'_> {
    fn json(&self, keys: &[KeyCodec], values: &[Codec], tokens: usize) -> Value {
        let queries: usize = self.found.iter().map(|head| head.queries).sum();
        let of_queries = |sum: f64| (queries > 0).then(|| sum / queries as f64);
        let of_key = |(at, key): (usize, &KeyCodec)| {
            let mut described = json!({"codec": key.codec.name(), "centered": key.centered, "equalized": key.equalized, "bits": bits(key.codec, self.dims[0])});
            let errors = self.found.iter().map(|head| head.keys[at].as_ref()).try_fold(
                KeyErrors::default(),
                |mut sum, of| {
                    sum.add(of?);
                    Ok::<_, &flashtile::quality::RefusedRow>(sum)
                },
            );
            match errors {
                Ok(sum) => {
                    described["error"] = json!(sum.rows.relative());
                    described["logit_rmse"] = json!(of_queries(sum.logits).map(f64::sqrt));
                    described["kl"] = json!(of_queries(sum.kl));
                }
                Err(row) => described["refused"] = json!(format!("row {} of k {}", row.row, row.why)),
            }
            described
        };
        let of_value = |(at, codec): (usize, &Codec)| {
            let mut described = json!({"codec": codec.name(), "bits": bits(*codec, self.dims[1])});
            let errors = self.found.iter().map(|head| head.values[at].as_ref()).try_fold(
                Deviation::default(),
                |mut sum, of| {
                    sum.add(*of?);
                    Ok::<_, &flashtile::quality::RefusedRow>(sum)
                },
            );
            match errors {
                Ok(sum) => described["error"] = json!(sum.relative()),
                Err(row) => described["refused"] = json!(format!("row {} of v {}", row.row, row.why)),
            }
            described
        };
        let out = |key: usize, value: usize| {
            let sum = self.found.iter().map(|head| head.out[key][value]).try_fold(
                Deviation::default(),
                |mut sum, of| {
                    sum.add(of?);
                    Some(sum)
                },
            );
            sum.filter(|_| queries > 0).map(|sum| sum.relative().sqrt())
        };
        let nrmse = |key| (0..values.len()).map(|value| out(key, value)).collect::<Vec<_>>();
        json!({
            "tokens": tokens,
            "queries": queries,
            "keys": keys.iter().enumerate().map(of_key).collect::<Vec<_>>(),
            "values": values.iter().enumerate().map(of_value).collect::<Vec<_>>(),
            "nrmse": (0..keys.len()).map(nrmse).collect::<Vec<_>>(),
        })
    }
}

/// Bits per element, scales included.
fn bits(codec: Codec, dim: usize) -> f64 {
    8.0 * codec.row_bytes(dim) as f64 / dim as f64
}
