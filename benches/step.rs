//! Host time of a decode step on the first CUDA device, by `Step` and by the calls that it consists of:
//! `cargo bench --features cuda --bench step [-- ROUNDS]`.
//!
//! Eight sequences of 1000 tokens and more, 16 layers of 32/8 heads of 128 in bf16, pages of 16 tokens. A round takes one step in each way,
//! over caches of their own, and waits for the device after each. The table compares medians over all rounds, of the time until the last
//! layer was enqueued. The exit status is 1 where a step takes more than 1.2 times as long. Without a device, nothing is measured.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark reports by printing, and ends where it cannot run"
)]

use flashtile::cuda::{Cuda, CudaKvCache, GpuArray, GpuInputs, GpuOutputs, Memory, Session};
use flashtile::{
    CacheDesc, CacheLayout, CacheShape, Codec, Dtype, KvCacheExt, ProblemDesc, SeqId, SeqLens, Visibility,
};
use std::sync::Arc;
use std::time::Instant;

const SEQUENCES: usize = 8;
const LAYERS: usize = 16;
const Q_HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const PROMPT: usize = 1000;

/// A cache with the tensors of a step, all of zeros.
struct Decode {
    cache: CudaKvCache,
    sequences: Vec<SeqId>,
    q: GpuArray<Memory>,
    kv: GpuArray<Memory>,
    out: GpuArray<Memory>,
}

impl Decode {
    fn new(cuda: &Cuda, codec: Codec, stream: &Arc<flashtile::cuda::cudarc::driver::CudaStream>) -> Self {
        let shape = CacheShape { layers: LAYERS, kv_heads: KV_HEADS, head_dim: DIM, value_dim: DIM };
        let layout = CacheLayout::Paged { pages: 1024, page_size: 16 };
        let mut cache = cuda.kv_cache(CacheDesc::new(layout, shape, codec), stream).unwrap();
        let sequences: Vec<SeqId> = (0..SEQUENCES).map(|_| cache.create().unwrap()).collect();
        for &sequence in &sequences {
            cache.extend(&[(sequence, PROMPT)]).unwrap();
        }
        let gpu = cuda.gpu().on(stream);
        let rows = |heads| GpuArray::zeros(&gpu, Dtype::BF16, [1, heads, SEQUENCES, DIM]).unwrap();
        Self { cache, sequences, q: rows(Q_HEADS), kv: rows(KV_HEADS), out: rows(Q_HEADS) }
    }

    /// Seconds of a step.
    fn step(&mut self) -> f64 {
        let started = Instant::now();
        let batch: Vec<_> = self.sequences.iter().map(|&sequence| (sequence, 1)).collect();
        let mut step = self.cache.step(&batch).unwrap();
        for layer in 0..LAYERS {
            let (q, kv) = (self.q.view(), self.kv.view());
            step.attend(layer, q, kv, kv, &mut self.out.view_mut()).unwrap();
        }
        step.finish().unwrap();
        started.elapsed().as_secs_f64()
    }

    /// Seconds of the calls of a step.
    fn calls(&mut self, session: &mut Session) -> f64 {
        let started = Instant::now();
        let batch: Vec<_> = self.sequences.iter().map(|&sequence| (sequence, 1)).collect();
        self.cache.extend(&batch).unwrap();
        let tables = self.cache.tables(&self.sequences).unwrap();
        let lens: Vec<SeqLens> = tables.lens.iter().map(|&kv_len| SeqLens { q_len: 1, kv_len }).collect();
        let mut desc = ProblemDesc::over(self.cache.desc(), Q_HEADS, Dtype::BF16, &lens);
        desc.visibility = Visibility::causal();
        for layer in 0..LAYERS {
            let kv = self.kv.view();
            self.cache.write(layer, &batch, &kv, &kv).unwrap();
            let [k, v] = self.cache.store().kv(layer);
            let inputs = GpuInputs::new(self.q.view(), k, v);
            let mut outputs = GpuOutputs::new(self.out.view_mut());
            session.run_paged(&desc, &inputs, &tables, &mut outputs).unwrap();
        }
        started.elapsed().as_secs_f64()
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let cuda = match Cuda::new(0) {
        Ok(cuda) => cuda,
        Err(error) => return println!("SKIPPED: nothing was launched: {error}"),
    };
    let rounds = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(201).max(1);
    println!("| cache | calls, us a layer | step, us a layer | ratio |\n|---|---|---|---|");
    let mut over = false;
    for codec in [Codec::BF16, Codec::Int8] {
        let stream = cuda.context().new_stream().unwrap();
        let mut session = cuda.session(&stream);
        let [mut by_calls, mut by_steps] = [(); 2].map(|()| Decode::new(&cuda, codec, &stream));
        let (mut of_calls, mut of_steps) = (Vec::with_capacity(rounds), Vec::with_capacity(rounds));
        for round in 0..rounds + 3 {
            let mut both = [0.0; 2];
            // Each goes first as often as the other.
            for which in [round % 2, 1 - round % 2] {
                both[which] = if which == 0 { by_calls.calls(&mut session) } else { by_steps.step() };
                stream.synchronize().unwrap();
            }
            // The first rounds compile and allocate.
            if round >= 3 {
                of_calls.push(both[0]);
                of_steps.push(both[1]);
            }
        }
        let [calls, step] = [&mut of_calls, &mut of_steps].map(|times| median(times) * 1e6 / LAYERS as f64);
        over |= step / calls > 1.2;
        println!("| {codec} | {calls:.2} | {step:.2} | {:.3} |", step / calls);
    }
    std::process::exit(i32::from(over));
}
