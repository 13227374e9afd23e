//! The table of README.md: milliseconds of candle's CPU attention, of matmul and softmax, of flashtile alone, and of this crate.
//!
//! ```sh
//! RAYON_NUM_THREADS=2 cargo bench --bench table
//! ```
//!
//! Every result is first compared with matmul and softmax in f64: `!` marks an error above 1e-5 in f32 and 2^-7 in bf16 of the largest
//! element, and the exit status is 1 if a result of flashtile has such an error. The columns take turns, each first as often as the others,
//! and the table has medians.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark reports by printing, and ends where it cannot run"
)]

use candle_core::{D, DType, Device, Result, Tensor, WithDType};
use candle_nn::attention::AttnMask;
use flashtile::{Attention, Element, Outputs, Runner, TensorView, TensorViewMut};
use half::bf16;
use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

struct Case {
    name: &'static str,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    queries: usize,
    keys: usize,
    dim: usize,
    causal: bool,
}

const CASES: [Case; 3] = [
    Case {
        name: "prefill, causal: 8 heads, 2048 tokens, D 64",
        batch: 1,
        heads: 8,
        kv_heads: 8,
        queries: 2048,
        keys: 2048,
        dim: 64,
        causal: true,
    },
    Case {
        name: "encoder: batch 8, 12 heads, 256 tokens, D 32",
        batch: 8,
        heads: 12,
        kv_heads: 12,
        queries: 256,
        keys: 256,
        dim: 32,
        causal: false,
    },
    Case {
        name: "decode: 32 heads over 8, 32768 keys, D 128",
        batch: 1,
        heads: 32,
        kv_heads: 8,
        queries: 1,
        keys: 32768,
        dim: 128,
        causal: false,
    },
];

const COLUMNS: [&str; 4] =
    ["candle-nn flash_attn", "candle matmul + softmax", "flashtile alone", "flashtile-candle"];

/// A column is measured at least seven times and for at least a second; a slow column stops after ten seconds.
fn is_measured(times: &[Duration]) -> bool {
    let total: Duration = times.iter().sum();
    (times.len() >= 7 && total >= Duration::from_secs(1)) || total >= Duration::from_secs(10)
}

impl Case {
    fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    /// q, k and v `(batch, seq, heads, dim)`.
    fn inputs(&self, dtype: DType) -> Result<[Tensor; 3]> {
        let of = |rows, heads| {
            Tensor::randn(0f32, 1.0, (self.batch, rows, heads, self.dim), &Device::Cpu)?.to_dtype(dtype)
        };
        Ok([of(self.queries, self.heads)?, of(self.keys, self.kv_heads)?, of(self.keys, self.kv_heads)?])
    }

    /// Attention as models write it, over `(batch, heads, seq, dim)`: keys and values are repeated for grouped heads.
    fn unfused(&self, [q, k, v]: &[Tensor; 3], mask: Option<&Tensor>) -> Result<Tensor> {
        let repeat = |x: &Tensor| match self.heads / self.kv_heads {
            1 => Ok(x.clone()),
            n => Tensor::cat(&vec![x; n], 2)?.reshape((self.batch, self.heads, self.keys, self.dim)),
        };
        let scores = (q.matmul(&repeat(k)?.t()?)? * f64::from(self.scale()))?;
        let scores = mask.map_or(Ok(scores.clone()), |mask| scores.broadcast_add(mask))?;
        // Candle's softmax sums in the dtype of its input, which is f32 here: in bf16, rows of probabilities sum to 1.7.
        let probs = candle_nn::ops::softmax(&scores.to_dtype(DType::F32)?, D::Minus1)?;
        probs.to_dtype(v.dtype())?.matmul(&repeat(v)?)
    }

    fn mask(&self, dtype: DType) -> Result<Option<Tensor>> {
        let row = |i: usize| (0..self.keys).map(move |j| if j > i { f32::NEG_INFINITY } else { 0.0 });
        let all: Vec<f32> = (0..self.queries).flat_map(row).collect();
        let mask = || Tensor::from_vec(all, (self.queries, self.keys), &Device::Cpu)?.to_dtype(dtype);
        self.causal.then(mask).transpose()
    }

    fn fused<T: WithDType + num_traits::Float>(&self, [q, k, v]: &[Tensor; 3]) -> Result<Tensor> {
        let mask = if self.causal { AttnMask::causal() } else { AttnMask::None };
        candle_nn::attention::flash_attn::<T>(q, k, v, self.scale(), mask, None, None)
    }
}

/// One case in one dtype, with the inputs and outputs of its columns.
struct Bench<'a, T> {
    case: &'a Case,
    /// `(batch, seq, heads, dim)`
    bshd: [Tensor; 3],
    /// `(batch, heads, seq, dim)`, dense.
    bhsd: [Tensor; 3],
    mask: Option<Tensor>,
    runner: Runner,
    out: Vec<T>,
}

impl<'a, T: WithDType + num_traits::Float + Element> Bench<'a, T> {
    fn new(case: &'a Case) -> Result<Self> {
        let bshd = case.inputs(<T as WithDType>::DTYPE)?;
        let dense = |x: &Tensor| x.transpose(1, 2)?.contiguous();
        let bhsd = [dense(&bshd[0])?, dense(&bshd[1])?, dense(&bshd[2])?];
        let out = vec![Element::from_f32(0.0); bshd[0].elem_count()];
        Ok(Self { case, bshd, bhsd, mask: case.mask(<T as WithDType>::DTYPE)?, runner: Runner::new(), out })
    }

    /// Computes a column. Returns its result `(batch, heads, seq, dim)`, or `None` if it is in `self.out`, which is
    /// `(batch, seq, heads, dim)`.
    fn run(&mut self, column: usize) -> Result<Option<Tensor>> {
        let [q, k, v] = &self.bshd;
        match column {
            0 => self.case.fused::<T>(&self.bshd).map(Some),
            1 => self.case.unfused(&self.bhsd, self.mask.as_ref()).map(Some),
            2 => self.alone().map(|()| None),
            _ => flashtile_candle::flash_attn(q, k, v, self.case.scale(), self.case.causal)?
                .transpose(1, 2)
                .map(Some),
        }
    }

    /// flashtile without candle, into existing memory.
    fn alone(&mut self) -> Result<()> {
        let stored = self.bshd.each_ref().map(|x| x.storage_and_layout());
        let view = |n: usize| {
            let candle_core::Storage::Cpu(storage) = &*stored[n].0 else {
                candle_core::bail!("not on the CPU")
            };
            let shape = self.bshd[n].dims4()?.into();
            TensorView::bshd(storage.as_slice::<T>()?, shape).map_err(candle_core::Error::wrap)
        };
        let (q, k, v) = (view(0)?, view(1)?, view(2)?);
        let options = if self.case.causal { Attention::causal() } else { Attention::full() };
        let out = TensorViewMut::bshd(&mut self.out, self.bshd[0].dims4()?.into());
        let mut outputs = Outputs::new(out.map_err(candle_core::Error::wrap)?);
        let run = self.runner.run(&options.desc(&q, &k, &v), &options.inputs(q, k, v), &mut outputs);
        run.map_err(candle_core::Error::wrap)
    }

    /// The largest distance of a column from the reference.
    fn error(&mut self, column: usize, reference: &Tensor) -> Result<f64> {
        let out = match self.run(column)? {
            Some(out) => out,
            None => Tensor::from_slice(&self.out, self.bshd[0].dims(), &Device::Cpu)?.transpose(1, 2)?,
        };
        (out.to_dtype(DType::F64)? - reference)?.abs()?.max_all()?.to_scalar::<f64>()
    }

    fn reference(&self) -> Result<Tensor> {
        let wide = |x: &Tensor| x.to_dtype(DType::F64);
        let [q, k, v] = &self.bhsd;
        self.case.unfused(&[wide(q)?, wide(k)?, wide(v)?], self.case.mask(DType::F64)?.as_ref())
    }

    /// Prints a row. Returns true if flashtile's results are right.
    fn row(&mut self, dtype: &str, limit: f64) -> Result<bool> {
        let reference = self.reference()?;
        let limit = limit * reference.abs()?.max_all()?.to_scalar::<f64>()?;
        let errors: Vec<_> = (0..COLUMNS.len()).map(|column| self.error(column, &reference)).collect();
        let is_wrong = |error: f64| error.is_nan() || error > limit;
        // Errors of candle's own results are shown, but do not count.
        let ours = errors[2..].iter().all(|error| error.as_ref().is_ok_and(|&error| !is_wrong(error)));
        let mut times = vec![Vec::new(); COLUMNS.len()];
        for first in 0.. {
            let wanted = |column: &usize| errors[*column].is_ok() && !is_measured(&times[*column]);
            let columns: Vec<usize> = (0..COLUMNS.len()).filter(wanted).collect();
            if columns.is_empty() {
                break;
            }
            for n in 0..columns.len() {
                let column = columns[(n + first) % columns.len()];
                let start = Instant::now();
                drop(black_box(self.run(column)?));
                times[column].push(start.elapsed());
            }
        }
        print!("| {}, {dtype} |", self.case.name);
        for (column, times) in times.iter_mut().enumerate() {
            times.sort_unstable();
            match (times.get(times.len() / 2), &errors[column]) {
                (Some(median), Ok(error)) => {
                    let mark = if is_wrong(*error) { " !" } else { "" };
                    print!(" {:.2} ({error:.0e}{mark}) |", median.as_secs_f64() * 1e3);
                }
                _ => print!(" refused |"),
            }
        }
        println!();
        Ok(ours)
    }
}

fn main() -> Result<ExitCode> {
    println!(
        "{} threads; ms, in brackets the largest error, ! where that is wrong\n",
        candle_core::utils::get_num_threads()
    );
    println!("| | {} |\n|---|{}", COLUMNS.join(" | "), "---|".repeat(COLUMNS.len()));
    let mut right = true;
    for case in &CASES {
        right &= Bench::<f32>::new(case)?.row("f32", 1e-5)?;
        // Two roundings of 2^-9 each, as in tests, and as much again.
        right &= Bench::<bf16>::new(case)?.row("bf16", 2f64.powi(-7))?;
    }
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
