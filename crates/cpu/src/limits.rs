//! The limits of this machine, measured: the rates against which kernels are judged.

#![allow(unsafe_code)]

use crate::{isa, pool};
use flashtile_core::isa::Isa;
use flashtile_core::memory::Zeroed;
use rayon::prelude::*;
use std::time::{Duration, Instant};

/// Approximate time of a measurement.
const BUDGET: Duration = Duration::from_millis(200);

/// Floating-point operations per second (a multiply-add counts as two) of `threads` threads that do nothing but independent
/// multiply-adds on the registers of `isa`: of f32, or of pairs of bf16 for [`Isa::Avx512Bf16`] and [`Isa::Amx`]. The result is the largest
/// of several rounds, and takes about 0.2 s.
///
/// Returns 0 if the machine lacks the instruction set, or threads cannot start.
#[must_use]
pub fn fma_peak(isa: Isa, threads: usize) -> f64 {
    const ROUNDS: u64 = 200_000;
    if !isa::best().contains(isa) {
        return 0.0;
    }
    let loops = isa::loops(isa);
    let flops = 2.0 * loops.peak_round as f64 * ROUNDS as f64;
    // SAFETY: the machine has the instruction set.
    best(
        threads,
        |_| flops,
        |_| unsafe {
            std::hint::black_box((loops.peak)(std::hint::black_box(ROUNDS)));
        },
    )
}

/// Bytes per second that `threads` threads read from memory, each streaming its own part of a buffer much larger than the caches. The
/// result is the largest of several rounds, and takes about 0.2 s. Returns 0 if there is no memory for the buffer, or threads cannot start.
#[must_use]
pub fn read_bandwidth(threads: usize) -> f64 {
    let facts = isa::facts();
    let threads = threads.max(1);
    let per_thread = ((2 * facts.l3).max(64 << 20) / 4 / threads).next_multiple_of(64);
    let bytes = per_thread * threads * size_of::<f32>();
    // Without memory for the buffer, there is no rate.
    let Some(mut data) = Zeroed::new(bytes) else { return 0.0 };
    // Memory that was never written would be one page of zeros, read from the caches.
    data.fill(1);
    let loops = isa::loops(facts.isa).read;
    best(
        threads,
        |_| (per_thread * 4) as f64,
        |worker| {
            let part = &data[worker * per_thread * size_of::<f32>()..][..per_thread * size_of::<f32>()];
            // SAFETY: the machine has the instruction set. The part starts on a cache line and is valid for its elements, whose
            // number is a multiple of 64.
            std::hint::black_box(unsafe { loops(part.as_ptr().cast(), per_thread) });
        },
    )
}

/// Largest rate over rounds in which every thread calls `f(worker)`, which does `amount(worker)` of work; 0 if threads cannot start.
fn best(threads: usize, amount: impl Fn(usize) -> f64, f: impl Fn(usize) + Sync) -> f64 {
    let threads = threads.max(1);
    if threads > 1 && pool::threads().is_err() {
        return 0.0;
    }
    let total: f64 = (0..threads).map(amount).sum();
    let started = Instant::now();
    let mut best: f64 = 0.0;
    let mut rounds = 0;
    while rounds < 3 || started.elapsed() < BUDGET {
        let round = Instant::now();
        if threads == 1 {
            f(0);
        } else {
            (0..threads).into_par_iter().with_max_len(1).for_each(&f);
        }
        best = best.max(total / round.elapsed().as_secs_f64());
        rounds += 1;
    }
    best
}
