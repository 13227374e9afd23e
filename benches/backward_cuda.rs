//! Time of the backward pass on the first CUDA device, by the portable kernels:
//! `cargo bench --features cuda --bench backward_cuda -- [DTYPE D SQ HEADS KV_HEADS causal|full [Q KV]]`.
//!
//! One sequence, by default of 4096 rows and keys and 16 heads in bf16, D 64 and 128, full and causal. `Q` and `KV` ask for tiles instead of the
//! plan's: `BLOCK_TILES,SIMDS,TEAM` and `BLOCK_TILES,SIMDS,TEAM,IN_REGISTERS`. A line for each: TFLOP/s of the five products of the backward pass over
//! visible pairs, of the median of 20 runs of 10 launches. The forward pass gives out and logsumexp. Without a device, nothing is measured.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark reports by printing, and ends where it cannot run"
)]

use flashtile::cuda::{Cuda, GpuArray, GpuInputs, GpuOutputs};
use flashtile::gpu::{GpuBackwardInputs, GpuGradients, GpuKv, HostAccess};
use flashtile::{Dims, Dtype, OwnedTensor, ProblemDesc, QOffset, Visibility};
use flashtile_gpu::backward::plan::BackwardPlan;
use flashtile_gpu::backward::run::{BackwardWorkspace, run};
use flashtile_gpu::backward::tile::{BackwardTile, TileShape};
use flashtile_gpu::facts::GpuFacts;
use flashtile_kernel::{ScalarType, bf16, f16};
use flashtile_testkit::Rng;
use std::time::Instant;

const RUNS: usize = 20;
const LAUNCHES: usize = 10;

struct Row {
    dtype: Dtype,
    dims: Dims,
    is_causal: bool,
    tile: Option<BackwardTile>,
}

fn numbers(text: &str) -> Vec<usize> {
    text.split(',').map(|n| n.parse().unwrap()).collect()
}

fn rows(args: &[String]) -> Vec<Row> {
    let dims = |head_dim, q_len, q_heads, kv_heads| Dims {
        batch: 1,
        q_heads,
        kv_heads,
        q_len,
        kv_len: q_len,
        head_dim,
        value_dim: head_dim,
    };
    if let [dtype, d, len, heads, kv_heads, mask, tile @ ..] = args {
        let n = |text: &String| text.parse().unwrap();
        let tile = (tile.len() == 2).then(|| {
            let (q, kv) = (numbers(&tile[0]), numbers(&tile[1]));
            let shape = |of: &[usize], in_registers| TileShape {
                block_tiles: of[0],
                simds: of[1],
                team: of[2],
                in_registers,
            };
            BackwardTile { q: shape(&q, true), kv: shape(&kv, kv[3] == 1) }
        });
        let dtype = dtype.parse().unwrap();
        let is_causal = mask == "causal";
        return vec![Row { dtype, dims: dims(n(d), n(len), n(heads), n(kv_heads)), is_causal, tile }];
    }
    let all = [64, 128].into_iter().flat_map(|d| [(d, false), (d, true)]);
    all.map(|(d, is_causal)| Row { dtype: Dtype::BF16, dims: dims(d, 4096, 16, 16), is_causal, tile: None })
        .collect()
}

fn measure(cuda: &Cuda, row: &Row) {
    let Row { dtype, dims, is_causal, tile } = row;
    let mut desc = ProblemDesc::new(*dims, *dtype);
    if *is_causal {
        (desc.visibility, desc.q_offset) = (Visibility::causal(), Some(QOffset::BottomRight));
    }
    let problem = desc.clone().validate().unwrap();
    let mut session = cuda.open_session().unwrap();
    let mut rng = Rng::new(1);
    let gpu = session.device();
    let mut array = |shape: [usize; 4]| {
        let numbers: Vec<f32> = (0..shape.iter().product()).map(|_| rng.normal()).collect();
        let host = match dtype {
            Dtype::F32 => OwnedTensor::from_vec(numbers, shape),
            Dtype::F16 => OwnedTensor::from_vec(numbers.into_iter().map(f16::from_f32).collect(), shape),
            Dtype::BF16 => OwnedTensor::from_vec(numbers.into_iter().map(bf16::from_f32).collect(), shape),
        }
        .unwrap();
        GpuArray::upload(gpu, &host.view()).unwrap()
    };
    let (q, k, v) = (array(dims.q_shape()), array(dims.k_shape()), array(dims.v_shape()));
    let d_out = array(dims.out_shape());
    let zeros = |shape| GpuArray::zeros(gpu, *dtype, shape).unwrap();
    let (mut out, mut d_q) = (zeros(dims.out_shape()), zeros(dims.q_shape()));
    let (mut d_k, mut d_v) = (zeros(dims.k_shape()), zeros(dims.v_shape()));
    let mut lse = gpu.zeroed(ScalarType::F32, dims.lse_shape().iter().product()).unwrap();
    let (of_k, of_v) = (GpuKv::elements(k.view()).unwrap(), GpuKv::elements(v.view()).unwrap());
    let forward = GpuInputs::new(q.view(), of_k, of_v);
    let mut outputs = GpuOutputs::new(out.view_mut());
    outputs.lse = Some(lse.view_mut());
    session.run(&desc, &forward, &mut outputs).unwrap();
    let gpu = session.device();
    let facts: GpuFacts = cuda.facts().into();
    let plan = match tile {
        Some(tile) => BackwardPlan::with_tile(&problem, *tile).unwrap(),
        None => BackwardPlan::new(&problem, &facts).unwrap(),
    };
    let mut workspace = BackwardWorkspace::new(gpu, &plan).unwrap();
    let inputs = GpuBackwardInputs {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        out: out.view(),
        lse: lse.view(),
        d_out: d_out.view(),
        d_lse: None,
        tree: None,
        mask: None,
        alibi_slopes: None,
        sinks: None,
    };
    let mut seconds = Vec::new();
    for _ in 0..=RUNS {
        let started = Instant::now();
        for _ in 0..LAUNCHES {
            let mut gradients = GpuGradients {
                d_q: d_q.view_mut(),
                d_k: d_k.view_mut(),
                d_v: d_v.view_mut(),
                d_sinks: None,
                d_alibi_slopes: None,
            };
            run(gpu, &plan, &inputs, &mut gradients, &mut workspace).unwrap();
        }
        // Waits for all launches before.
        gpu.read(&lse, 0, &mut [0; 4]).unwrap();
        seconds.push(started.elapsed().as_secs_f64() / LAUNCHES as f64);
    }
    seconds.remove(0);
    seconds.sort_by(f64::total_cmp);
    let median = seconds[RUNS / 2];
    let tflops = problem.backward_flops() / median / 1e12;
    let mask = if *is_causal { "causal" } else { "full" };
    println!(
        "{dtype} d{} s{} h{}/{} {mask}: {:.3} ms, {tflops:.1} TFLOP/s, {:?}",
        dims.head_dim,
        dims.q_len,
        dims.q_heads,
        dims.kv_heads,
        median * 1e3,
        plan.tile(),
    );
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    match Cuda::new(0) {
        Ok(cuda) => rows(&args).iter().for_each(|row| measure(&cuda, row)),
        Err(why) => println!("SKIPPED, nothing was measured: {why}"),
    }
}
