//! Times candle's attention on the CPU for the benchmark of flashtile.
//!
//! ```sh
//! python3 benches/peers/problems.py | RAYON_NUM_THREADS=2 peer-candle --threads 2 --seconds 0.5 > candle.jsonl
//! ```
//!
//! Problems come from standard input and rows go to standard output, both as JSON lines. Two peers:
//!
//! - `candle flash`: `candle_nn::attention::flash_attn`; a decode row is causal at the last position, as in candle's models;
//! - `candle matmul`: matmul, `softmax_last_dim`, matmul; key/value heads of GQA are repeated, causality is a mask that is added.
//!
//! A backward row is the time of candle's autograd alone, over the graph of `candle matmul`, whose softmax there is the differentiable one.
//!
//! All answers are checked, on small problems, before the first row is measured.

mod attention;
mod check;

use attention::{Call, Kind};
use candle_core::{DType, Device, Result, Tensor};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use rand_distr::StandardNormal;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::time::Instant;

/// Keys and values of a decode row rotate through copies of this many bytes in all, more than the caches hold.
const ROTATED: usize = 128 << 20;
const COPIES: usize = 32;

/// A problem: the fields that are common to what is read and what is written.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
struct Problem {
    kind: String,
    dtype: String,
    d: usize,
    h: usize,
    hkv: usize,
    b: usize,
    s: usize,
    causal: bool,
}

#[derive(Serialize)]
struct Row<'a> {
    peer: &'a str,
    #[serde(flatten)]
    problem: &'a Problem,
    /// Median of the calls.
    seconds: f64,
    calls: usize,
    /// Of the answer to the small problem, relative to the largest value of the reference.
    error: f64,
}

impl Problem {
    /// Number of queries.
    fn rows(&self) -> usize {
        if self.kind == "decode" { 1 } else { self.s }
    }

    fn is_backward(&self) -> bool {
        self.kind == "backward"
    }

    fn dtype(&self) -> Result<DType> {
        match self.dtype.as_str() {
            "f32" => Ok(DType::F32),
            "f16" => Ok(DType::F16),
            "bf16" => Ok(DType::BF16),
            other => candle_core::bail!("dtype {other}, expected f32, f16 or bf16"),
        }
    }

    /// A problem of the same kind, heads and mask for which the answer is soon checked.
    fn small(&self) -> Self {
        Self { s: if self.kind == "decode" { 700 } else { 150 }, ..self.clone() }
    }

    /// Normally distributed queries, keys, values and gradients of the output, `[b, heads, rows, d]`.
    fn inputs(&self, seed: u64) -> Result<[Tensor; 4]> {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut of = |heads, rows| {
            let shape = (self.b, heads, rows, self.d);
            let normal: Vec<f32> =
                (&mut random).sample_iter(StandardNormal).take(self.b * heads * rows * self.d).collect();
            Tensor::from_vec(normal, shape, &Device::Cpu)?.to_dtype(self.dtype()?)
        };
        Ok([of(self.h, self.rows())?, of(self.hkv, self.s)?, of(self.hkv, self.s)?, of(self.h, self.rows())?])
    }
}

/// Seconds that rows take.
struct Limits {
    /// Seconds of a row, at least.
    min_seconds: f64,
    /// No call begins later.
    longest: f64,
}

fn timed(call: &Call) -> Result<f64> {
    let begin = Instant::now();
    std::hint::black_box(call.run()?);
    Ok(begin.elapsed().as_secs_f64())
}

/// The median of the seconds of a call, and how many calls were timed. One that takes longer than a row may is timed once.
fn median(calls: &[Call], limits: &Limits) -> Result<(f64, usize)> {
    let first = timed(&calls[0])?;
    if first > limits.longest {
        return Ok((first, 1));
    }
    timed(&calls[calls.len() - 1])?;
    let (mut times, started) = (Vec::new(), Instant::now());
    loop {
        let spent = started.elapsed().as_secs_f64();
        let enough = spent >= limits.longest || (times.len() >= 5 && spent >= limits.min_seconds);
        if enough && !times.is_empty() {
            break;
        }
        times.push(timed(&calls[times.len() % calls.len()])?);
    }
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2], times.len()))
}

fn measure((kind, problem, error): (Kind, &Problem, f64), limits: &Limits) -> Result<()> {
    let copies = if problem.kind == "decode" {
        let size = 2 * problem.hkv * problem.s * problem.d * problem.dtype()?.size_in_bytes();
        (ROTATED / size).clamp(1, COPIES)
    } else {
        1
    };
    let calls = (0..copies as u64)
        .map(|seed| Call::new(kind, problem, problem.inputs(seed)?))
        .collect::<Result<Vec<_>>>()?;
    let (seconds, calls) = median(&calls, limits)?;
    let row = Row { peer: &kind.name()?, problem, seconds, calls, error };
    let line = serde_json::to_string(&row).map_err(candle_core::Error::wrap)?;
    writeln!(std::io::stdout(), "{line}")?;
    Ok(())
}

/// The value of an option, such as `--threads 2`.
fn option(name: &str, default: f64) -> Result<f64> {
    let mut args = std::env::args().skip_while(|arg| arg != name).skip(1);
    args.next().map_or(Ok(default), |text| text.parse().map_err(candle_core::Error::wrap))
}

fn main() -> Result<()> {
    let threads = option("--threads", 2.0)? as usize;
    if candle_core::utils::get_num_threads() != threads {
        let found = candle_core::utils::get_num_threads();
        candle_core::bail!("candle uses {found} threads, expected RAYON_NUM_THREADS={threads}");
    }
    let limits = Limits { min_seconds: option("--seconds", 0.5)?, longest: option("--longest", 5.0)? };
    let read = |line: std::io::Result<String>| serde_json::from_str(&line?).map_err(candle_core::Error::wrap);
    let problems: Vec<Problem> = std::io::stdin().lock().lines().map(read).collect::<Result<_>>()?;
    let mut todo = Vec::new();
    for kind in [Kind::Flash, Kind::Matmul] {
        let (refused, of): (Vec<_>, Vec<_>) = problems.iter().partition(|of| kind.refuses(of).is_some());
        todo.extend(of.into_iter().map(|problem| (kind, problem)));
        if let Some(why) = refused.first().and_then(|problem| kind.refuses(problem)) {
            eprintln!("{}: {} rows left out: {why}", kind.name()?, refused.len());
        }
    }
    let mut checked: Vec<(Kind, Problem, f64)> = Vec::new();
    let mut error = |kind: Kind, problem: &Problem| -> Result<f64> {
        let small = problem.small();
        if let Some((.., error)) = checked.iter().find(|(of, known, _)| *of == kind && *known == small) {
            return Ok(*error);
        }
        let error = check::check(kind, &small)?;
        checked.push((kind, small, error));
        Ok(error)
    };
    let todo = todo.into_iter().map(|(kind, problem)| Ok((kind, problem, error(kind, problem)?)));
    let todo = todo.collect::<Result<Vec<_>>>()?;
    todo.into_iter().try_for_each(|row| measure(row, &limits))
}
