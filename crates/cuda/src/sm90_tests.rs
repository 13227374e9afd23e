//! The building blocks of kernels for compute capability 9.0, on a GPU: products of warpgroups with both kinds of operands, copies by TMA that
//! end where a sequence ends, and a ring of tiles between a warp that copies and a warpgroup that multiplies.

#![allow(unsafe_code, clippy::print_stdout, reason = "a test that does not run says so")]

use crate::device::Cuda;
use crate::limits::{ProductUnit, matrix_peak};
use crate::params::dtype_name;
use crate::sources::{BARRIER, COPY, TMA, TYPES, WGMMA};
use crate::tma::{Boxes, TensorMap};
use crate::wgmma;
use flashtile_core::dtype::Dtype;
use flashtile_kernel::cuda::{Compiler, Gpu, Grid, Program};
use half::{bf16, f16};

/// Queries of the kernel: rows of a warpgroup.
const ROWS: usize = 64;
const THREADS: usize = 256;
const HEADS: usize = 3;

/// A variant of the kernel.
#[derive(Debug, Clone, Copy)]
struct Variant {
    dtype: Dtype,
    head_dim: usize,
    block_n: usize,
    stages: usize,
}

const VARIANTS: [Variant; 6] = {
    const fn of(dtype: Dtype, head_dim: usize, block_n: usize, stages: usize) -> Variant {
        Variant { dtype, head_dim, block_n, stages }
    }
    [
        of(Dtype::BF16, 128, 128, 2),
        of(Dtype::F16, 128, 128, 2),
        of(Dtype::BF16, 64, 128, 3),
        of(Dtype::F16, 128, 176, 2),
        of(Dtype::BF16, 256, 80, 2),
        of(Dtype::F16, 192, 96, 1),
    ]
};

impl Variant {
    fn program(&self) -> Program {
        let Self { dtype, head_dim, block_n, stages } = *self;
        let constants = format!(
            "constexpr Dtype DTYPE = {};\nconstexpr int HEAD_DIM = {head_dim}, BLOCK_N = {block_n}, STAGES = {stages};\n",
            dtype_name(dtype)
        );
        let mut columns = vec![head_dim, block_n];
        columns.dedup();
        let products = wgmma::sources(&columns);
        let map = TensorMap::device_source();
        let files = [
            TYPES,
            &map,
            COPY,
            WGMMA,
            &products,
            BARRIER,
            TMA,
            &constants,
            include_str!("kernels/sm90/tests.cu"),
        ];
        Program { name: format!("{self:?}"), source: files.join("\n"), options: Vec::new() }
    }

    fn shared_bytes(&self) -> usize {
        (ROWS + 2 * self.stages * self.block_n) * self.head_dim * 2
    }
}

/// `MultiplyParams` of the kernel.
#[derive(Debug)]
#[repr(C, align(64))]
struct MultiplyParams {
    maps: [TensorMap; 3],
    out: u64,
    q_start: u32,
    q_len: u32,
    kv_start: u32,
    kv_len: u32,
}

/// The map of packed rows `[tokens, heads, dim]`.
fn ragged_map(dtype: Dtype, at: u64, rows: usize, dim: usize, box_rows: usize) -> TensorMap {
    let row = (HEADS * dim * dtype.bytes()) as i64;
    let boxes = Boxes {
        at,
        steps: [0, (dim * dtype.bytes()) as i64, row],
        dtype,
        batch: 1,
        heads: HEADS,
        rows,
        columns: dim,
        box_heads: 1,
        box_rows: box_rows as u32,
    };
    boxes.ragged_map().unwrap().map
}

/// Numbers from -1 to 1 without a pattern.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn round(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_f32(x).to_f32(),
        _ => bf16::from_f32(x).to_f32(),
    }
}

fn bits(dtype: Dtype, x: f32) -> u16 {
    match dtype {
        Dtype::F16 => f16::from_f32(x).to_bits(),
        _ => bf16::from_f32(x).to_bits(),
    }
}

/// A device of compute capability 9.0, if there is one; says so where there is none.
fn hopper() -> Option<Cuda> {
    let cuda = Cuda::new(0).map_err(|why| println!("SKIPPED, nothing ran on a GPU: {why}")).ok()?;
    if cuda.facts().capability != (9, 0) {
        println!("SKIPPED, nothing ran on a GPU: {} is not of compute capability 9.0", cuda.name());
        return None;
    }
    Some(cuda)
}

/// Runs a variant over `kv_len` keys of a sequence that lies between two others, whose rows are NaN; returns the largest error.
fn run(gpu: &Gpu, variant: Variant, q_len: usize, kv_len: usize) -> f64 {
    const BEFORE: usize = 37;
    let Variant { dtype, head_dim, .. } = variant;
    let (function, _) = gpu.load(&variant.program(), "multiply", variant.shared_bytes()).unwrap();
    let row = HEADS * head_dim;
    let upload = |seed: u32, len: usize| {
        let values: Vec<f32> = numbers(seed, len * row).into_iter().map(|x| round(dtype, x)).collect();
        let nan = |rows: usize| std::iter::repeat_n(bits(dtype, f32::NAN), rows * row);
        let values_bits = values.iter().map(|&x| bits(dtype, x));
        let all: Vec<u16> = nan(BEFORE).chain(values_bits).chain(nan(BEFORE)).collect();
        (values, gpu.buffer_from(&all).unwrap())
    };
    let (q, q_memory) = upload(1, q_len);
    let (k, k_memory) = upload(2, kv_len);
    let (v, v_memory) = upload(3, kv_len);
    let out = gpu.uninit::<f32>(HEADS * ROWS * head_dim).unwrap();
    let map = |at: u64, len: usize, box_rows| ragged_map(dtype, at, len + 2 * BEFORE, head_dim, box_rows);
    let params = MultiplyParams {
        maps: [
            map(q_memory.address(), q_len, ROWS),
            map(k_memory.address(), kv_len, variant.block_n),
            map(v_memory.address(), kv_len, variant.block_n),
        ],
        out: out.address(),
        q_start: BEFORE as u32,
        q_len: q_len as u32,
        kv_start: BEFORE as u32,
        kv_len: kv_len as u32,
    };
    let grid = Grid { blocks: [HEADS, 1, 1], threads: THREADS, shared: variant.shared_bytes() };
    // SAFETY: the kernel reads rows of the three tensors and writes ROWS rows of each head to `out`, all of which live until the copy below.
    unsafe { function.launch(gpu.stream(), grid, &params) }.unwrap();
    let out = out.to_vec::<f32>().unwrap();
    let at = |tensor: &[f32], token: usize, head: usize, column: usize| {
        f64::from(tensor[token * row + head * head_dim + column])
    };
    let mut worst = 0.0;
    for head in 0..HEADS {
        for m in 0..ROWS {
            let mut expected = vec![0.0; head_dim];
            for n in 0..if m < q_len { kv_len } else { 0 } {
                let score: f64 = (0..head_dim).map(|d| at(&q, m, head, d) * at(&k, n, head, d)).sum();
                let prob = f64::from(round(dtype, (score / 8.0) as f32));
                for (d, sum) in expected.iter_mut().enumerate() {
                    *sum += prob * at(&v, n, head, d);
                }
            }
            for (d, want) in expected.into_iter().enumerate() {
                let error = (want - f64::from(out[(head * ROWS + m) * head_dim + d])).abs();
                // A NaN is the largest error.
                worst = if error <= worst { worst } else { error };
            }
        }
    }
    worst
}

#[test]
fn warpgroups_multiply_what_tma_copies() {
    let Some(cuda) = hopper() else { return };
    for variant in VARIANTS {
        let n = variant.block_n;
        for (q_len, kv_len) in [(64, n), (64, 1), (1, 8 * n), (40, 5 * n - 3), (63, n + 1)] {
            let error = run(cuda.gpu(), variant, q_len, kv_len);
            // A probability that is rounded the other way is off by 2^-8 of at most about 2, a value by 1.
            assert!(error < 0.02, "{variant:?}, {q_len} queries, {kv_len} keys: off by {error}");
            println!("{variant:?}, {q_len} queries, {kv_len} keys: off by {error:.1e}");
        }
    }
}

#[test]
fn the_matrix_unit_is_measured_by_its_fastest_products() {
    let Some(cuda) = hopper() else { return };
    for dtype in [Dtype::F16, Dtype::BF16] {
        let peak = matrix_peak(&cuda, dtype).unwrap();
        println!("{dtype}: {:.0} TFLOP/s by {:?}", peak.rate * 1e-12, peak.unit);
        assert_eq!(peak.unit, ProductUnit::Wgmma);
        assert!(peak.rate > 400e12, "{peak:?}");
    }
}

#[test]
fn building_blocks_compile() {
    let compiler = match Compiler::load() {
        Ok(compiler) if compiler.version() >= (12, 0) => compiler,
        Ok(compiler) => {
            return println!("SKIPPED, no kernel was compiled: NVRTC {:?} is too old", compiler.version());
        }
        Err(why) => return println!("SKIPPED, no kernel was compiled: {why}"),
    };
    let target = compiler.target((9, 0));
    for variant in VARIANTS {
        compiler.compile(&variant.program(), &target).unwrap_or_else(|why| panic!("{variant:?}: {why}"));
    }
}
