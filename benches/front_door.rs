//! Overhead of `attention` over a run of a kept plan: `cargo bench --bench front_door`.
//!
//! Each row runs both in turns and compares medians. The exit status is 1 where the call takes more than 3 % longer on problems of
//! 100 us and more, or more than 3 us longer on smaller ones.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark reports by printing, and ends where it cannot run"
)]

use flashtile::{Attention, Cpu, Inputs, Outputs, PlanOptions, TensorView, TensorViewMut, attention};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Query heads, key/value heads, queries and keys.
const SHAPES: [[usize; 4]; 7] = [
    [1, 1, 1, 1],
    [8, 2, 1, 64],
    [32, 8, 1, 512],
    [8, 8, 64, 64],
    [8, 8, 256, 256],
    [32, 8, 1, 8192],
    [8, 8, 1024, 1024],
];
const DIM: usize = 64;

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}

fn main() {
    println!(
        "| query heads / kv heads, queries x keys | plan kept, us | one call, us | difference |\n|---|---|---|---|"
    );
    let mut over = false;
    for [q_heads, kv_heads, queries, keys] in SHAPES {
        let (q, kv) = (vec![0.5f32; q_heads * queries * DIM], vec![0.25f32; kv_heads * keys * DIM]);
        let q = TensorView::bhsd(&q, [1, q_heads, queries, DIM]).unwrap();
        let kv = TensorView::bhsd(&kv, [1, kv_heads, keys, DIM]).unwrap();
        let mut out = vec![0.0f32; q_heads * queries * DIM];
        let mut view = TensorViewMut::bhsd(&mut out, [1, q_heads, queries, DIM]).unwrap();
        let options = Attention::decode();

        let cpu = Cpu::new();
        let plan = cpu.plan(&options.desc(&q, &kv, &kv).validate().unwrap(), PlanOptions::default()).unwrap();
        let mut workspace = plan.workspace();
        let mut kept = || {
            let start = Instant::now();
            let mut outputs = Outputs::new(view.reborrow());
            cpu.run(black_box(&plan), &Inputs::new(q, kv, kv), &mut outputs, &mut workspace).unwrap();
            start.elapsed()
        };
        let once = kept().max(kept());
        // Rounds for about 0.4 seconds of the kept plan; both sides use the same inputs, in turn.
        let rounds =
            (Duration::from_millis(400).as_nanos() / once.as_nanos().max(1)).clamp(51, 20_001) as usize;
        let (mut of_plan, mut of_call) = (Vec::with_capacity(rounds), Vec::with_capacity(rounds));
        let mut out = vec![0.0f32; q_heads * queries * DIM];
        let mut other = TensorViewMut::bhsd(&mut out, [1, q_heads, queries, DIM]).unwrap();
        let mut call = || {
            let start = Instant::now();
            attention(q, kv, kv, &mut other, black_box(&options)).unwrap();
            start.elapsed()
        };
        call();
        for round in 0..rounds {
            // Each goes first as often as the other.
            if round % 2 == 0 {
                of_plan.push(kept());
                of_call.push(call());
            } else {
                of_call.push(call());
                of_plan.push(kept());
            }
        }
        let (of_plan, of_call) = (median(of_plan), median(of_call));
        let slower = if of_plan >= 100.0 { of_call / of_plan > 1.03 } else { of_call - of_plan > 3.0 };
        over |= slower;
        println!(
            "| {q_heads}/{kv_heads}, {queries} x {keys} | {of_plan:.2} | {of_call:.2} | {:+.2} us, {:+.1} %{} |",
            of_call - of_plan,
            100.0 * (of_call / of_plan - 1.0),
            if slower { ", too much" } else { "" },
        );
    }
    std::process::exit(i32::from(over));
}
