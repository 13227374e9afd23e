//! A packed batch beside its sequences one by one, on the first CUDA device:
//! `cargo bench --features cuda --bench packed [-- ROUNDS]`.
//!
//! Causal prefill in bf16 of 16 sequences of 256 to 8192 tokens, 16 heads of 128. A round runs the batch in one launch, then each sequence
//! in a launch of its own, so that all of them find the device at the same temperature and power; the second-level cache is flushed before
//! each launch. The table compares medians over all rounds, with the matrix unit's rate in the same run. The exit status is 1 where the
//! answers differ. Without a device, nothing is measured.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark reports by printing, and ends where it cannot run"
)]

use flashtile::cuda::{Cuda, TimedRun, limits};
use flashtile::{Attention, CudaPlan, Dtype, Inputs, Outputs, PlanOptions, TensorView, TensorViewMut};
use flashtile_testkit::Rng;
use half::bf16;

const SEQUENCES: usize = 16;
const HEADS: usize = 16;
const DIM: usize = 128;
const ROW: usize = HEADS * DIM;

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Elements in [-1, 1), equal in all runs.
fn uniform(seed: u64, len: usize) -> Vec<bf16> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| bf16::from_f32(rng.uniform(-1.0, 1.0))).collect()
}

/// A launch of packed sequences, or of one dense sequence, with its answer.
fn prepared(cuda: &Cuda, attention: &Attention<'_>, tensors: [&[bf16]; 3]) -> (TimedRun, Vec<bf16>) {
    let shape = [1, tensors[0].len() / ROW, HEADS, DIM];
    let [q, k, v] = tensors.map(|data| TensorView::bshd(data, shape).unwrap());
    let problem = attention.desc(&q, &k, &v).validate().unwrap();
    let plan = CudaPlan::new(&problem, cuda.facts(), PlanOptions::default()).unwrap();
    let inputs = Inputs::new(q, k, v);
    let mut out = vec![bf16::ZERO; tensors[0].len()];
    let mut outputs = Outputs::new(TensorViewMut::bshd(&mut out, shape).unwrap());
    let mut run = TimedRun::new(cuda, &plan, &inputs, &outputs).unwrap();
    run.compute(&mut outputs).unwrap();
    (run, out)
}

fn main() {
    let cuda = match Cuda::new(0) {
        Ok(cuda) => cuda,
        Err(error) => return println!("SKIPPED: nothing was launched: {error}"),
    };
    let rounds = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(101).max(1);
    let lens: Vec<usize> = (0..SEQUENCES).map(|n| 256 + (8192 - 256) * n / (SEQUENCES - 1)).collect();
    let ends: Vec<usize> = (0..=SEQUENCES).map(|n| lens[..n].iter().sum()).collect();
    let tensors = [1, 2, 3].map(|seed| uniform(seed, ends[SEQUENCES] * ROW));
    let rows = |from: usize, to: usize| tensors.each_ref().map(|data| &data[from * ROW..to * ROW]);

    let (mut batch, answer) =
        prepared(&cuda, &Attention::causal().cu_seqlens(&ends, &ends), rows(0, ends[SEQUENCES]));
    let mut singles = Vec::new();
    let (mut square, mut difference) = (0.0, 0.0);
    for pair in ends.windows(2) {
        let (run, single) = prepared(&cuda, &Attention::causal(), rows(pair[0], pair[1]));
        for (a, b) in answer[pair[0] * ROW..].iter().zip(&single) {
            let (a, b) = (f64::from(a.to_f32()), f64::from(b.to_f32()));
            (square, difference) = (square + b * b, difference + (a - b) * (a - b));
        }
        singles.push(run);
    }
    let error = (difference / square).sqrt();

    let mut of_batch = Vec::new();
    let mut of_singles = vec![Vec::new(); SEQUENCES];
    for _ in 0..rounds {
        of_batch.push(batch.seconds().unwrap());
        for (run, times) in singles.iter_mut().zip(&mut of_singles) {
            times.push(run.seconds().unwrap());
        }
    }
    let peak = limits::matrix_peak(&cuda, Dtype::BF16).unwrap().rate;
    println!("| tokens | ms | TFLOP/s | of the matrix unit |\n|---|---|---|---|");
    let row = |name: &str, seconds: f64, lens: &[usize]| {
        let pairs: usize = lens.iter().map(|len| len * (len + 1) / 2).sum();
        let rate = (4 * DIM * HEADS * pairs) as f64 / seconds;
        println!("| {name} | {:.3} | {:.0} | {:.2} |", seconds * 1e3, rate / 1e12, rate / peak);
    };
    let mut sum = 0.0;
    for (len, times) in lens.iter().zip(&mut of_singles) {
        let seconds = median(times);
        row(&len.to_string(), seconds, &[*len]);
        sum += seconds;
    }
    let seconds = median(&mut of_batch);
    row("sum", sum, &lens);
    row("packed", seconds, &lens);
    println!("\npacked takes {:.3} of the sum; difference of the answers {error:.1e} (nrmse)", seconds / sum);
    std::process::exit(i32::from(error.is_nan() || error > 4e-3));
}
