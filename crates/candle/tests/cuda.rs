//! flashtile-candle on a CUDA device, against candle's own operators there.
//!
//! ```text
//! cuda [--cpu] [GROUP...]
//! ```
//!
//! Prints a line for each case with the largest difference from candle's matmul and softmax in f64 and f32, goes on after a
//! failure, and exits with 1 if there was one. Without names, all groups of cases run, each in its own process: the processes
//! compile kernels at the same time, and a fault of the device ends only one of them. Times are measured afterwards. With `--cpu`,
//! the cases run on the CPU, so that a machine without a device can check them; cases about devices are left out. Without a device,
//! the program says so and exits with 0.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "the report")]

use candle_core::{D, DType, Device, Error, Result, Tensor, Var, bail};
use flashtile_candle::flashtile::{CacheDesc, CacheLayout, CacheShape, Codec, QOffset};
use flashtile_candle::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// A name, and cases.
type Group = (&'static str, fn(&mut Run));

const GROUPS: [Group; 8] = [
    ("f32", |run| dense(run, DType::F32)),
    ("f16", |run| {
        dense(run, DType::F16);
        strides(run);
        plans(run);
    }),
    ("bf16", |run| dense(run, DType::BF16)),
    ("options", every_option),
    ("packed", packed),
    ("paged", paged),
    ("caches", caches),
    ("gradients", |run| {
        gradients_of_options(run);
        gradients_of_views(run);
    }),
];

/// Groups that need a device. The last one runs after the others, as it measures.
const DEVICE_GROUPS: [Group; 3] = [("streams", streams), ("refusals", refusals), ("speed", speed)];

fn main() -> ExitCode {
    let (options, names): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|arg| arg.starts_with("--"));
    let cpu = options.iter().any(|arg| arg == "--cpu");
    let device = if cpu { Ok(Device::Cpu) } else { Device::new_cuda(0) };
    let device = match device {
        Ok(device) => device,
        Err(error) => {
            let error = error.to_string();
            println!("SKIPPED, nothing ran: no CUDA device: {}", error.lines().next().unwrap_or_default());
            // A caller who names groups expects a device.
            return if names.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        }
    };
    let groups = GROUPS.iter().chain(DEVICE_GROUPS.iter().filter(|_| !cpu));
    let wanted: Vec<&Group> =
        groups.filter(|(name, _)| names.is_empty() || names.iter().any(|of| of == name)).collect();
    let ok = if cpu || !names.is_empty() {
        let mut run = Run { device, cases: 0, failed: Vec::new() };
        wanted.into_iter().for_each(|(_, cases)| cases(&mut run));
        println!("{} cases, {} failed", run.cases, run.failed.len());
        run.failed.iter().for_each(|name| println!("FAILED {name}"));
        run.failed.is_empty()
    } else {
        drop(device);
        let (together, alone) = wanted.split_at(wanted.len() - 1);
        // Both run, even if the first fails.
        in_processes(together) & in_processes(alone)
    };
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs each group in a process, all at the same time, and prints their output one after another. Returns true if none failed.
fn in_processes(groups: &[&Group]) -> bool {
    let start = Instant::now();
    let program = std::env::current_exe().unwrap();
    let spawn = |(name, _): &&Group| {
        let process = Command::new(&program).arg(name).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        (*name, process.unwrap())
    };
    let processes: Vec<_> = groups.iter().map(spawn).collect();
    let mut failed = Vec::new();
    for (name, process) in processes {
        let ended = process.wait_with_output().unwrap();
        println!("\n{name}:\n{}", String::from_utf8_lossy(&ended.stdout));
        if !ended.status.success() {
            println!("{}: {}", ended.status, String::from_utf8_lossy(&ended.stderr));
            failed.push(name);
        }
    }
    println!("{} groups in {:.1} s, failed: {failed:?}", groups.len(), start.elapsed().as_secs_f64());
    failed.is_empty()
}

/// The results of the cases so far.
struct Run {
    device: Device,
    cases: usize,
    failed: Vec<String>,
}

/// The result of a case.
enum Found {
    Distance(Distance),
    /// Another measurement.
    Said(String),
}

impl Run {
    fn case(&mut self, name: &str, case: impl FnOnce(&Device) -> Result<Found>) {
        let start = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| case(&self.device)));
        let seconds = start.elapsed().as_secs_f64();
        let (ok, what) = match result {
            Err(_) => (false, "panicked".to_owned()),
            Ok(Err(error)) => (false, error.to_string()),
            Ok(Ok(Found::Said(what))) => (true, what),
            Ok(Ok(Found::Distance(distance))) => (distance.is_near(), distance.to_string()),
        };
        println!("{} {name}: {what} [{seconds:.2} s]", if ok { "ok    " } else { "FAILED" });
        self.cases += 1;
        if !ok {
            self.failed.push(name.to_owned());
        }
    }
}

/// The distance of a result from candle's operators.
struct Distance {
    f64: f64,
    f32: f64,
    most: f64,
}

impl Distance {
    fn is_near(&self) -> bool {
        // A NaN is not near. candle's own f32 result is rounded, too.
        self.f64 <= self.most && self.f32 <= self.most + 2e-6
    }

    /// The larger distance of each kind.
    fn or(self, other: Self) -> Self {
        let max = |a: f64, b: f64| if a > b || a.is_nan() { a } else { b };
        Self { f64: max(self.f64, other.f64), f32: max(self.f32, other.f32), most: self.most }
    }
}

impl std::fmt::Display for Distance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "max-abs {:.2e} (f64), {:.2e} (f32), at most {:.2e}", self.f64, self.f32, self.most)
    }
}

/// The largest permitted distance from the reference, for elements of k and v up to 1. In half precision, the result and each probability
/// are rounded once, each by at most half a unit in the last place of 1.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-6,
        DType::F16 => 2.0 * 2f64.powi(-11) + 2e-6,
        DType::BF16 => 2.0 * 2f64.powi(-9) + 2e-6,
        other => panic!("{other:?}"),
    }
}

/// The largest difference of two tensors; NaN if one of them has a NaN.
fn distance(a: &Tensor, b: &Tensor) -> Result<f64> {
    assert_eq!(a.dims(), b.dims());
    let list = |x: &Tensor| x.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let pairs = list(a)?.into_iter().zip(list(b)?);
    Ok(pairs.map(|(a, b)| (a - b).abs()).fold(0.0, |max, d| if d > max || d.is_nan() { d } else { max }))
}

/// Elements from -1 to 1, the same for the same seed.
fn random(shape: &[usize], seed: u64, dtype: DType, device: &Device) -> Result<Tensor> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let all: Vec<f32> = std::iter::repeat_with(next).take(shape.iter().product()).collect();
    Tensor::from_vec(all, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

/// q, k and v `(batch, seq, heads, dim)`.
fn inputs(
    [b, q_len, kv_len, heads, kv_heads, d]: [usize; 6],
    dtype: DType,
    device: &Device,
) -> Result<[Tensor; 3]> {
    let make = |len, heads, seed| random(&[b, len, heads, d], seed, dtype, device);
    Ok([make(q_len, heads, 1)?, make(kv_len, kv_heads, 2)?, make(kv_len, kv_heads, 3)?])
}

/// Options of the reference.
#[derive(Default, Clone)]
struct Terms {
    scale: f64,
    softcap: Option<f64>,
    /// Broadcastable to `(batch, heads, queries, keys)`.
    bias: Option<Tensor>,
    sinks: Option<Tensor>,
}

impl Terms {
    fn scale(scale: f64) -> Self {
        Self { scale, ..Self::default() }
    }

    /// Adds a bias for `[head, query, key]`.
    fn bias(mut self, [h, q, k]: [usize; 3], of: impl Fn([usize; 3]) -> f64) -> Self {
        let all: Vec<f64> = (0..h * q * k).map(|n| of([n / (q * k), n / k % q, n % k])).collect();
        self.bias = Some(Tensor::from_vec(all, (1, h, q, k), &Device::Cpu).unwrap());
        self
    }

    /// Adds a window whose last query sits at the last key.
    fn window(self, [q_len, kv_len]: [usize; 2], left: Option<usize>, right: Option<usize>) -> Self {
        self.bias([1, q_len, kv_len], |[_, i, j]| {
            let at = i + kv_len - q_len;
            let before = left.is_some_and(|left| j + left < at);
            if before || right.is_some_and(|right| j > at + right) { f64::NEG_INFINITY } else { 0.0 }
        })
    }

    /// Adds ALiBi and causality, with the last query at the last key.
    fn causal_alibi(self, [q_len, kv_len]: [usize; 2], slopes: &[f32]) -> Self {
        self.bias([slopes.len(), q_len, kv_len], |[h, i, j]| {
            let at = i + kv_len - q_len;
            if j > at { f64::NEG_INFINITY } else { -f64::from(slopes[h]) * (at - j) as f64 }
        })
    }
}

/// Attention and logsumexp by candle's operators, on the tensors' device, over `(batch, heads, seq, dim)`.
fn reference([q, k, v]: [&Tensor; 3], terms: &Terms, dtype: DType) -> Result<[Tensor; 2]> {
    let heads = q.dim(1)?;
    let wide = |x: &Tensor| {
        let (b, kv_heads, s, d) = x.dims4()?;
        let x = x.to_dtype(dtype)?.unsqueeze(2)?.expand((b, kv_heads, heads / kv_heads, s, d))?;
        x.contiguous()?.reshape((b, heads, s, d))
    };
    let place = |x: &Tensor| x.to_device(q.device())?.to_dtype(dtype);
    let (q, k, v) = (q.to_dtype(dtype)?.contiguous()?, wide(k)?, wide(v)?);
    let mut scores = (q.matmul(&k.t()?.contiguous()?)? * terms.scale)?;
    if let Some(c) = terms.softcap {
        scores = ((scores / c)?.tanh()? * c)?;
    }
    if let Some(bias) = &terms.bias {
        scores = scores.broadcast_add(&place(bias)?)?;
    }
    let (b, h, s, keys) = scores.dims4()?;
    if let Some(sinks) = &terms.sinks {
        let column = place(sinks)?.reshape((1, h, 1, 1))?.expand((b, h, s, 1))?.contiguous()?;
        scores = Tensor::cat(&[&scores, &column], 3)?;
    }
    let probs = candle_nn::ops::softmax(&scores, D::Minus1)?.narrow(3, 0, keys)?.contiguous()?;
    Ok([probs.matmul(&v)?, scores.log_sum_exp(3)?])
}

/// `(batch, seq, heads, dim)` of `(batch, heads, seq, dim)` and back, as a view.
fn swap(x: &Tensor) -> Tensor {
    x.transpose(1, 2).unwrap()
}

/// The distance of out `(batch, seq, heads, dim)`, which must be on the device of q, from candle's.
fn near([q, k, v]: [&Tensor; 3], terms: &Terms, out: &Tensor) -> Result<Found> {
    Ok(Found::Distance(distances([q, k, v], terms, out)?))
}

fn distances([q, k, v]: [&Tensor; 3], terms: &Terms, out: &Tensor) -> Result<Distance> {
    if !out.device().same_device(q.device()) || out.dtype() != q.dtype() {
        bail!("out is {:?} on {:?}", out.dtype(), out.device())
    }
    let [q, k, v] = [q, k, v].map(swap);
    let of = |dtype| distance(&swap(out), &reference([&q, &k, &v], terms, dtype)?[0]);
    Ok(Distance { f64: of(DType::F64)?, f32: of(DType::F32)?, most: tolerance(out.dtype()) })
}

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn dense(run: &mut Run, dtype: DType) {
    let scale = 0.125;
    run.case(&format!("flash_attn, GQA 8/2, {dtype:?}"), |device| {
        let [q, k, v] = &inputs([2, 200, 300, 8, 2, 64], dtype, device)?;
        near([q, k, v], &Terms::scale(scale), &flash_attn(q, k, v, scale as f32, false)?)
    });
    run.case(&format!("flash_attn, causal, {dtype:?}"), |device| {
        let [q, k, v] = &inputs([2, 200, 300, 8, 2, 64], dtype, device)?;
        let terms = Terms::scale(scale).window([200, 300], None, Some(0));
        near([q, k, v], &terms, &flash_attn(q, k, v, scale as f32, true)?)
    });
    for (left, right) in [(Some(17), Some(0)), (Some(40), Some(9)), (None, Some(30))] {
        run.case(&format!("flash_attn_windowed, {left:?} {right:?}, {dtype:?}"), |device| {
            let [q, k, v] = &inputs([2, 200, 300, 8, 2, 64], dtype, device)?;
            let terms = Terms::scale(scale).window([200, 300], left, right);
            near([q, k, v], &terms, &flash_attn_windowed(q, k, v, scale as f32, left, right)?)
        });
    }
    run.case(&format!("flash_attn_alibi, causal, {dtype:?}"), |device| {
        let [q, k, v] = &inputs([2, 200, 300, 8, 2, 64], dtype, device)?;
        let slopes: Vec<f32> = (1..=8).map(|n| 0.5f32.powi(n)).collect();
        let terms = Terms::scale(scale).causal_alibi([200, 300], &slopes);
        let slopes = Tensor::from_vec(slopes, 8, device)?;
        near([q, k, v], &terms, &flash_attn_alibi(q, k, v, &slopes, scale as f32, true)?)
    });
    run.case(&format!("flash_attn_alibi_windowed_softcap, {dtype:?}"), |device| {
        let [q, k, v] = &inputs([2, 200, 300, 8, 2, 64], dtype, device)?;
        let mut terms = Terms::scale(0.25).window([200, 300], Some(50), Some(0));
        terms.softcap = Some(1.0);
        let out = flash_attn_alibi_windowed_softcap(q, k, v, None, 0.25, Some(50), Some(0), 1.0)?;
        near([q, k, v], &terms, &out)
    });
    run.case(&format!("flash_attn, one query, 32/8 heads of 128, 4096 keys, {dtype:?}"), |device| {
        let [q, k, v] = &inputs([2, 1, 4096, 32, 8, 128], dtype, device)?;
        near([q, k, v], &Terms::scale(0.088), &flash_attn(q, k, v, 0.088, true)?)
    });
}

fn strides(run: &mut Run) {
    run.case("heads first, transposed views, F16", |device| {
        let [q, k, v] = &inputs([2, 200, 300, 8, 2, 64], DType::F16, device)?;
        let [a, b, c] = &[q, k, v].map(|x| swap(&swap(x).contiguous().unwrap()));
        near([q, k, v], &Terms::scale(0.125), &flash_attn(a, b, c, 0.125, false)?)
    });
    run.case("rows of q, k and v in one tensor, F16", |device| {
        let all = random(&[2, 200, 3, 8, 64], 9, DType::F16, device)?;
        let [q, k, v] = &[0, 1, 2].map(|n| all.narrow(2, n, 1).unwrap().squeeze(2).unwrap());
        let terms = Terms::scale(0.125).window([200, 200], None, Some(0));
        near([q, k, v], &terms, &flash_attn(q, k, v, 0.125, true)?)
    });
    run.case("the middle of longer sequences, expanded heads, BF16", |device| {
        let [q, k, v] = &inputs([2, 250, 350, 8, 1, 64], DType::BF16, device)?;
        let q = &q.narrow(1, 33, 200)?;
        let [k, v] = &[k, v].map(|x| x.narrow(1, 20, 300).unwrap().expand((2, 300, 2, 64)).unwrap());
        near([q, k, v], &Terms::scale(0.125), &flash_attn(q, k, v, 0.125, false)?)
    });
    run.case("rows that do not start on 16 bytes, F32", |device| {
        let make =
            |len, heads, seed| random(&[2, len, heads, 67], seed, DType::F32, device)?.narrow(3, 3, 64);
        let (q, k, v) = (&make(200, 8, 1)?, &make(300, 2, 2)?, &make(300, 2, 3)?);
        near([q, k, v], &Terms::scale(0.125), &flash_attn(q, k, v, 0.125, false)?)
    });
}

fn every_option(run: &mut Run) {
    for dtype in [DType::F32, DType::BF16] {
        run.case(&format!("sdpa, additive mask, {dtype:?}"), |device| {
            let [q, k, v] = &inputs([2, 200, 300, 8, 2, 64], dtype, device)?;
            let mask = random(&[1, 1, 200, 300], 5, dtype, device)?;
            let mut terms = Terms::scale(0.125);
            terms.bias = Some(mask.clone());
            let [a, b, c] = &[q, k, v].map(swap);
            near([q, k, v], &terms, &swap(&sdpa(a, b, c, Some(&mask), false, 0.125, 1.0)?))
        });
    }
    run.case("sdpa, causal, softcap, F32", |device| {
        let [q, k, v] = &inputs([2, 200, 300, 8, 2, 64], DType::F32, device)?;
        let mut terms = Terms::scale(0.25).window([200, 300], None, Some(0));
        terms.softcap = Some(1.5);
        let [a, b, c] = &[q, k, v].map(swap);
        near([q, k, v], &terms, &swap(&sdpa(a, b, c, None, true, 0.25, 1.5)?))
    });
    run.case("attention, visible keys, sinks, logsumexp, F32", |device| {
        let [q, k, v] = &inputs([2, 200, 300, 8, 2, 64], DType::F32, device)?;
        let visible = |i: usize, j: usize| j == 0 || !(i * 7 + j * 3).is_multiple_of(5);
        let mut terms = Terms::scale(0.125)
            .bias([1, 200, 300], |[_, i, j]| if visible(i, j) { 0.0 } else { f64::NEG_INFINITY });
        let sinks = random(&[8], 6, DType::F32, device)?;
        terms.sinks = Some(sinks.clone());
        let bytes: Vec<u8> = (0..200 * 300).map(|n| u8::from(visible(n / 300, n % 300))).collect();
        let mask = Tensor::from_vec(bytes, (200, 300), device)?;
        let options = Options::full().scale(0.125).mask(Mask::Visible(mask)).sinks(&sinks).lse();
        let [a, b, c] = [q, k, v].map(swap);
        let (out, lse) = attention(&a, &b, &c, &options)?;
        let lse = lse.expect("the logsumexp was asked for");
        assert!(lse.device().same_device(device) && lse.dims() == [2, 8, 200], "{lse:?}");
        let far = distance(&lse, &reference([&a, &b, &c], &terms, DType::F64)?[1])?;
        // Scores and their logarithms are up to 8.
        assert!(far <= 8.0 * 2e-6, "the logsumexp is {far:e} from candle's");
        near([q, k, v], &terms, &swap(&out))
    });
    run.case("attention, kv_lens, first query at key 0, BF16", |device| {
        let [q, k, v] = &inputs([2, 200, 300, 8, 2, 64], DType::BF16, device)?;
        let lens = [77, 300];
        let options = Options::causal()
            .layout(TensorLayout::Bshd)
            .q_offset(QOffset::TopLeft)
            .scale(0.125)
            .kv_lens(&lens);
        let (out, _) = attention(q, k, v, &options)?;
        let mut worst = None;
        for (n, len) in lens.into_iter().enumerate() {
            let row = |x: &Tensor| x.narrow(0, n, 1);
            let terms = Terms::scale(0.125).bias(
                [1, 200, len],
                |[_, i, j]| {
                    if j > i { f64::NEG_INFINITY } else { 0.0 }
                },
            );
            let (k, v) = (row(k)?.narrow(1, 0, len)?, row(v)?.narrow(1, 0, len)?);
            let found = distances([&row(q)?, &k, &v], &terms, &row(&out)?)?;
            worst = Some(match worst {
                None => found,
                Some(worst) => found.or(worst),
            });
        }
        Ok(Found::Distance(worst.expect("two sequences")))
    });
}

const Q_LENS: [usize; 3] = [70, 1, 130];
const K_LENS: [usize; 3] = [90, 40, 200];

/// Ends of sequences.
fn ends(lens: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let mut end = 0;
    let mut all = vec![0u32];
    all.extend(lens.iter().map(|&len| {
        end += len as u32;
        end
    }));
    Tensor::new(all, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

/// The difference of packed sequences `(total, heads, dim)`, each with its own terms.
fn each_sequence(
    [q, k, v]: [&Tensor; 3],
    out: &Tensor,
    terms: impl Fn([usize; 2]) -> Terms,
) -> Result<Found> {
    let (mut q_start, mut k_start, mut worst) = (0, 0, None);
    for (q_len, k_len) in Q_LENS.into_iter().zip(K_LENS) {
        let of = |x: &Tensor, start, len| x.narrow(0, start, len)?.unsqueeze(0);
        let (k, v) = (of(k, k_start, k_len)?, of(v, k_start, k_len)?);
        let found =
            distances([&of(q, q_start, q_len)?, &k, &v], &terms([q_len, k_len]), &of(out, q_start, q_len)?)?;
        worst = Some(match worst {
            None => found,
            Some(worst) => found.or(worst),
        });
        (q_start, k_start) = (q_start + q_len, k_start + k_len);
    }
    Ok(Found::Distance(worst.expect("three sequences")))
}

/// q, k and v of packed sequences.
fn packed_inputs(dtype: DType, device: &Device) -> Result<[Tensor; 3]> {
    let make =
        |lens: [usize; 3], heads, seed| random(&[lens.iter().sum::<usize>(), heads, 64], seed, dtype, device);
    Ok([make(Q_LENS, 8, 1)?, make(K_LENS, 2, 2)?, make(K_LENS, 2, 3)?])
}

fn packed(run: &mut Run) {
    for dtype in DTYPES {
        run.case(&format!("flash_attn_varlen, causal, lengths on the device, {dtype:?}"), |device| {
            let [q, k, v] = &packed_inputs(dtype, device)?;
            let (sq, sk) = (ends(&Q_LENS, DType::U32, device)?, ends(&K_LENS, DType::U32, device)?);
            let out = flash_attn_varlen(q, k, v, &sq, &sk, 130, 200, 0.125, true)?;
            each_sequence([q, k, v], &out, |lens| Terms::scale(0.125).window(lens, None, Some(0)))
        });
    }
    run.case("flash_attn_varlen_windowed, lengths on the CPU, F16", |device| {
        let [q, k, v] = &packed_inputs(DType::F16, device)?;
        let cpu = &Device::Cpu;
        let (sq, sk) = (ends(&Q_LENS, DType::I64, cpu)?, ends(&K_LENS, DType::I64, cpu)?);
        let out = flash_attn_varlen_windowed(q, k, v, &sq, &sk, 130, 200, 0.125, Some(20), Some(0))?;
        each_sequence([q, k, v], &out, |lens| Terms::scale(0.125).window(lens, Some(20), Some(0)))
    });
    run.case("flash_attn_varlen_alibi, causal, F32", |device| {
        let [q, k, v] = &packed_inputs(DType::F32, device)?;
        let (sq, sk) = (ends(&Q_LENS, DType::U32, device)?, ends(&K_LENS, DType::U32, device)?);
        let slopes: Vec<f32> = (1..=8).map(|n| 0.5f32.powi(n)).collect();
        let on_device = Tensor::from_slice(&slopes, 8, device)?;
        let out = flash_attn_varlen_alibi(q, k, v, &on_device, &sq, &sk, 130, 200, 0.125, true)?;
        each_sequence([q, k, v], &out, |lens| Terms::scale(0.125).causal_alibi(lens, &slopes))
    });
    run.case("flash_attn_varlen_alibi_windowed_softcap, F32", |device| {
        let [q, k, v] = &packed_inputs(DType::F32, device)?;
        let (sq, sk) = (ends(&Q_LENS, DType::U32, device)?, ends(&K_LENS, DType::U32, device)?);
        let out = flash_attn_varlen_alibi_windowed_softcap(
            q,
            k,
            v,
            None,
            &sq,
            &sk,
            130,
            200,
            0.25,
            None,
            Some(0),
            1.0,
        )?;
        each_sequence([q, k, v], &out, |lens| {
            let mut terms = Terms::scale(0.25).window(lens, None, Some(0));
            terms.softcap = Some(1.0);
            terms
        })
    });
}

const PAGE: usize = 16;

/// Pools of pages with the rows of k and v, and a table `(sequences, blocks)`. Pages are in reverse order; unused rows are NaN.
fn pages([k, v]: [&Tensor; 2]) -> Result<[Tensor; 3]> {
    let (heads, dim) = (k.dim(1)?, k.dim(2)?);
    let width = K_LENS.iter().map(|len| len.div_ceil(PAGE)).max().unwrap();
    let blocks = K_LENS.iter().map(|len| len.div_ceil(PAGE)).sum::<usize>() + 1;
    let mut table = vec![-1i32; K_LENS.len() * width];
    // The last row stands for all unused rows.
    let unused = k.dim(0)? as u32;
    let mut rows = vec![unused; blocks * PAGE];
    let (mut free, mut start) = (blocks, 0);
    for (sequence, len) in K_LENS.into_iter().enumerate() {
        for block in 0..len.div_ceil(PAGE) {
            free -= 1;
            table[sequence * width + block] = free as i32;
            for row in 0..PAGE.min(len - block * PAGE) {
                rows[free * PAGE + row] = (start + block * PAGE + row) as u32;
            }
        }
        start += len;
    }
    let rows = Tensor::new(rows, &Device::Cpu)?;
    let pool = |x: &Tensor| {
        let x = x.to_device(&Device::Cpu)?;
        let nan = Tensor::full(f32::NAN, (1, heads, dim), &Device::Cpu)?.to_dtype(x.dtype())?;
        Tensor::cat(&[&x, &nan], 0)?.index_select(&rows, 0)?.reshape((blocks, PAGE, heads, dim))
    };
    let table = Tensor::from_vec(table, (K_LENS.len(), width), &Device::Cpu)?;
    Ok([pool(k)?.to_device(k.device())?, pool(v)?.to_device(k.device())?, table])
}

/// Causal attention over pages, with a window of this many keys before each query.
fn paged_attention(
    [q, pool_k, pool_v]: [&Tensor; 3],
    [ends_q, ends_k]: [&Tensor; 2],
    table: &Tensor,
    ranges: Option<&Tensor>,
    left: Option<usize>,
) -> Result<Tensor> {
    let right = Some(0);
    flash_attn_varlen_paged_windowed(
        q, pool_k, pool_v, ends_q, ends_k, table, ranges, 130, 200, 0.125, left, right, PAGE, None,
    )
}

fn paged(run: &mut Run) {
    for dtype in [DType::F16, DType::BF16] {
        run.case(&format!("flash_attn_varlen_paged_windowed, tables on the device, {dtype:?}"), |device| {
            let [q, k, v] = &packed_inputs(dtype, device)?;
            let [pool_k, pool_v, table] = &pages([k, v])?;
            let (sq, sk) = (ends(&Q_LENS, DType::U32, device)?, ends(&K_LENS, DType::U32, device)?);
            let table = table.to_device(device)?;
            let out = paged_attention([q, pool_k, pool_v], [&sq, &sk], &table, None, Some(60))?;
            each_sequence([q, k, v], &out, |lens| Terms::scale(0.125).window(lens, Some(60), Some(0)))
        });
    }
    run.case(
        "flash_attn_varlen_paged_windowed, prefix ranges, lengths and tables on the CPU, F16",
        |device| {
            let [q, k, v] = &packed_inputs(DType::F16, device)?;
            let [pool_k, pool_v, table] = &pages([k, v])?;
            let cpu = &Device::Cpu;
            let (sq, sk) = (ends(&Q_LENS, DType::U32, cpu)?, ends(&K_LENS, DType::U32, cpu)?);
            // Positions of queries: 20..90, 39 and 70..200.
            let ranges = Tensor::new(&[[[30i32, 50]], [[0, 0]], [[80, 120]]], cpu)?;
            let out = paged_attention([q, pool_k, pool_v], [&sq, &sk], table, Some(&ranges), Some(9))?;
            each_sequence([q, k, v], &out, |[q_len, k_len]| {
                let range =
                    [30..50, 0..0, 80..120][Q_LENS.iter().position(|&len| len == q_len).unwrap()].clone();
                Terms::scale(0.125).bias([1, q_len, k_len], |[_, i, j]| {
                    let at = i + k_len - q_len;
                    let seen = j <= at && j + 9 >= at || range.contains(&at) && range.contains(&j);
                    if seen { 0.0 } else { f64::NEG_INFINITY }
                })
            })
        },
    );
}

/// Steps over a cache on the device, of layers that differ, beside those over a cache on the CPU.
fn caches(run: &mut Run) {
    for (dtype, codec) in [
        (DType::F32, Codec::F32),
        (DType::BF16, Codec::BF16),
        (DType::F16, Codec::Int8),
        (DType::BF16, Codec::Tq4),
    ] {
        run.case(&format!("steps over a KvCache of {codec}, {dtype:?}"), |device| {
            let shape = CacheShape { layers: 1, kv_heads: 2, head_dim: 64, value_dim: 64 };
            let layers = [
                CacheDesc::new(CacheLayout::Paged { pages: 16, page_size: 16 }, shape, codec),
                CacheDesc::new(CacheLayout::Ring { slots: 2, capacity: 64 }, shape, codec),
            ];
            let mut on_device = KvCache::of_layers(&layers, device)?;
            let mut on_host = KvCache::of_layers(&layers, &Device::Cpu)?;
            let seqs = [on_device.create()?, on_device.create()?];
            let host_seqs = [on_host.create()?, on_host.create()?];
            let mut most = 0f64;
            for (n, tokens) in [[30, 3], [5, 1], [1, 1], [1, 17], [1, 1]].into_iter().enumerate() {
                let total = tokens.iter().sum();
                let batch = |seqs: [_; 2]| seqs.into_iter().zip(tokens).collect::<Vec<_>>();
                let mut step = on_device.step(&batch(seqs))?;
                let mut host_step = on_host.step(&batch(host_seqs))?;
                for (layer, options) in
                    [Options::decode(), Options::decode().window(20, 0).lse()].iter().enumerate()
                {
                    let seed = (10 * n + layer) as u64;
                    let make = |heads, seed| random(&[total, heads, 64], seed, dtype, device);
                    let [q, k, v] = &[make(8, seed)?, make(2, seed + 100)?, make(2, seed + 200)?];
                    let (out, lse) = step.attend_with(layer, q, k, v, options)?;
                    let [q, k, v] = [q, k, v].map(|x| x.to_device(&Device::Cpu).unwrap());
                    let (host_out, host_lse) = host_step.attend_with(layer, &q, &k, &v, options)?;
                    most = most.max(distance(&out, &host_out)?);
                    if let (Some(lse), Some(host)) = (lse, host_lse) {
                        most = most.max(distance(&lse, &host)? / 4.0);
                    }
                }
                step.finish()?;
                host_step.finish()?;
            }
            on_device.remove(seqs[1])?;
            let fork = on_device.fork(seqs[0])?;
            assert_eq!(on_device.len(fork)?, on_host.len(host_seqs[0])?);
            assert_eq!(on_device.memory().bytes_reserved, on_host.memory().bytes_reserved);
            if most > 2.0 * tolerance(dtype) {
                bail!("{most:e} from the cache on the CPU")
            }
            Ok(Found::Said(format!("{most:.1e} from the cache on the CPU")))
        });
    }
}

/// The largest permitted distance of a gradient from the reference, relative to the largest element: in f32, exponentials have errors of a few
/// units in their last place; in half precision, probabilities and gradients of scores are rounded for products.
fn gradient_tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 4e-3,
        DType::BF16 => 3e-2,
        other => panic!("{other:?}"),
    }
}

/// The gradients of variables, of `sum(out * factors)`, whose factors all differ and have a dtype.
fn gradients<const N: usize>(vars: &[Var; N], out: &Tensor, dtype: DType) -> Result<[Tensor; N]> {
    let factors = random(out.dims(), 7, dtype, out.device())?.to_dtype(out.dtype())?;
    let store = (out * factors)?.sum_all()?.backward()?;
    let missing = || Error::msg("a variable has no gradient");
    let all: Result<Vec<Tensor>> =
        vars.iter().map(|var| store.get(var.as_tensor()).cloned().ok_or_else(missing)).collect();
    Ok(all?.try_into().expect("as many as variables"))
}

/// The largest distance of tensors from a reference, relative to the largest element of each.
fn relative<const N: usize>(got: &[Tensor; N], want: &[Tensor; N]) -> Result<f64> {
    let mut most = 0f64;
    for (got, want) in got.iter().zip(want) {
        let largest = want.to_dtype(DType::F64)?.abs()?.max_all()?.to_scalar::<f64>()?;
        assert!(largest > 0.0, "a gradient is 0");
        let far = distance(got, want)? / largest;
        most = if far > most || far.is_nan() { far } else { most };
    }
    Ok(most)
}

/// Sizes of a problem of gradients.
#[derive(Clone, Copy)]
struct Sizes {
    dtype: DType,
    dim: usize,
    value_dim: usize,
}

const QUERIES: usize = 100;
const KEYS: usize = 150;

/// Compares gradients of q, k and v `(batch, heads, seq, dim)` with candle's own, of matmul and softmax in f64, with the operator on the CPU,
/// and with a second run, which has the same bits.
fn trained(
    device: &Device,
    Sizes { dtype, dim, value_dim }: Sizes,
    terms: &Terms,
    attend: impl Fn([&Tensor; 3]) -> Result<Tensor>,
) -> Result<Found> {
    let make = |heads, rows, dim, seed| random(&[2, heads, rows, dim], seed, dtype, &Device::Cpu);
    let given = [make(8, QUERIES, dim, 1)?, make(2, KEYS, dim, 2)?, make(2, KEYS, value_dim, 3)?];
    let of = |on: &Device, inner: DType, attend: &dyn Fn([&Tensor; 3]) -> Result<Tensor>| {
        let var = |x: &Tensor| Var::from_tensor(&x.to_dtype(inner)?.to_device(on)?);
        let vars = [var(&given[0])?, var(&given[1])?, var(&given[2])?];
        gradients(&vars, &attend(vars.each_ref().map(Var::as_tensor))?, dtype)
    };
    let (got, again) = (of(device, dtype, &attend)?, of(device, dtype, &attend)?);
    for (got, again) in got.iter().zip(&again) {
        assert!(got.device().same_device(device) && got.dtype() == dtype, "{got:?}");
        assert!(distance(got, again)? == 0.0, "other bits in a second run");
    }
    let of_cpu = of(&Device::Cpu, dtype, &attend)?;
    let exact = of(device, DType::F64, &|qkv| Ok(reference(qkv, terms, DType::F64)?[0].clone()))?;
    let (from_exact, from_cpu) = (relative(&got, &exact)?, relative(&got, &of_cpu)?);
    let (most, said) = (gradient_tolerance(dtype), format!("{from_exact:.2e} (f64), {from_cpu:.2e} (CPU)"));
    // The CPU's are as far from the reference.
    if from_exact <= most && from_cpu <= 2.0 * most { Ok(Found::Said(said)) } else { bail!("{said}") }
}

fn gradients_of_options(run: &mut Run) {
    for dtype in DTYPES {
        let sizes = Sizes { dtype, dim: 64, value_dim: 48 };
        run.case(&format!("gradients, GQA 8/2, values of 48, {dtype:?}"), |device| {
            let options = Options::full().scale(0.125);
            trained(device, sizes, &Terms::scale(0.125), |[q, k, v]| Ok(attention(q, k, v, &options)?.0))
        });
        let sizes = Sizes { value_dim: 64, ..sizes };
        run.case(&format!("gradients, causal, {dtype:?}"), |device| {
            let terms = Terms::scale(0.125).window([QUERIES, KEYS], None, Some(0));
            trained(device, sizes, &terms, |[q, k, v]| {
                let [q, k, v] = &[q, k, v].map(swap);
                Ok(swap(&flash_attn(q, k, v, 0.125, true)?))
            })
        });
    }
    let sizes = Sizes { dtype: DType::F32, dim: 64, value_dim: 64 };
    run.case("gradients, causal window, softcap, F32", |device| {
        let mut terms = Terms::scale(0.5).window([QUERIES, KEYS], Some(40), Some(0));
        terms.softcap = Some(0.9);
        let options = Options::decode().window(40, 0).softcap(0.9).scale(0.5);
        trained(device, sizes, &terms, |[q, k, v]| Ok(attention(q, k, v, &options)?.0))
    });
    run.case("gradients, causal, ALiBi, sinks, additive mask, F32", |device| {
        let slopes: Vec<f32> = (1..=8).map(|n| 0.5f32.powi(n)).collect();
        let mut terms = Terms::scale(0.125).causal_alibi([QUERIES, KEYS], &slopes);
        let mask = random(&[1, 1, QUERIES, KEYS], 5, DType::F32, &Device::Cpu)?;
        let bias = terms.bias.take().expect("ALiBi is a bias");
        terms.bias = Some(bias.broadcast_add(&mask.to_dtype(DType::F64)?)?);
        let sinks = random(&[8], 6, DType::F32, &Device::Cpu)?;
        terms.sinks = Some(sinks.clone());
        trained(device, sizes, &terms, |[q, k, v]| {
            let on = |x: &Tensor| x.to_device(q.device());
            let options = Options::decode().scale(0.125).mask(Mask::Additive(on(&mask)?)).sinks(&on(&sinks)?);
            let options = options.alibi(&Tensor::from_slice(&slopes, 8, q.device())?);
            Ok(attention(q, k, v, &options)?.0)
        })
    });
    run.case("gradients, kv_lens, F32", |device| {
        let lens = [KEYS, 77];
        let hidden = (0..2 * KEYS).map(|n| if n % KEYS < lens[n / KEYS] { 0.0 } else { f64::NEG_INFINITY });
        let mut terms = Terms::scale(0.125);
        terms.bias = Some(Tensor::from_iter(hidden, &Device::Cpu)?.reshape((2, 1, 1, KEYS))?);
        let options = Options::full().scale(0.125).kv_lens(&lens);
        trained(device, sizes, &terms, |[q, k, v]| Ok(attention(q, k, v, &options)?.0))
    });
}

fn gradients_of_views(run: &mut Run) {
    for dtype in [DType::F32, DType::BF16] {
        run.case(&format!("gradients, packed, q, k and v in one variable, {dtype:?}"), |device| {
            let all = random(&[100, 3, 4, 64], 4, dtype, device)?;
            let part = |x: &Tensor, n: usize| x.narrow(1, n, 1)?.squeeze(1);
            let fused = [Var::from_tensor(&all)?];
            let x = fused[0].as_tensor();
            let options = Options::causal().scale(0.125).cu_seqlens(&[0, 30, 100], &[0, 30, 100]);
            let out = attention(&part(x, 0)?, &part(x, 1)?, &part(x, 2)?, &options)?.0;
            let got = gradients(&fused, &out, dtype)?;
            let fused = [Var::from_tensor(&all.to_dtype(DType::F64)?)?];
            let x = fused[0].as_tensor();
            let sequence = |start, len| {
                let rows = |n| part(x, n)?.narrow(0, start, len)?.transpose(0, 1)?.unsqueeze(0);
                let terms = Terms::scale(0.125).window([len, len], None, Some(0));
                let [out, _] = reference([&rows(0)?, &rows(1)?, &rows(2)?], &terms, DType::F64)?;
                out.squeeze(0)?.transpose(0, 1)
            };
            let out = Tensor::cat(&[&sequence(0, 30)?, &sequence(30, 70)?], 0)?;
            let far = relative(&got, &gradients(&fused, &out, dtype)?)?;
            if far > gradient_tolerance(dtype) {
                bail!("{far:.2e} from candle's in f64")
            }
            Ok(Found::Said(format!("{far:.2e} (f64)")))
        });
    }
    run.case("gradients, queries that see no key, F32", |device| {
        let make =
            |heads, rows, seed| Var::from_tensor(&random(&[2, heads, rows, 64], seed, DType::F32, device)?);
        let vars = [make(4, 3, 1)?, make(2, 5, 2)?, make(2, 5, 3)?];
        let [q, k, v] = vars.each_ref().map(Var::as_tensor);
        // A query before all keys sees none.
        let options = Options::causal().q_offset(QOffset::At(-9));
        let found = gradients(&vars, &attention(q, k, v, &options)?.0, DType::F32)?;
        for gradient in &found {
            assert!(distance(gradient, &gradient.zeros_like()?)? == 0.0, "{gradient:?}");
        }
        Ok(Found::Said("0".to_owned()))
    });
}

fn plans(run: &mut Run) {
    run.case("equal calls have equal bits, F32", |device| {
        let [q, k, v] = &inputs([2, 200, 300, 8, 2, 64], DType::F32, device)?;
        let first = flash_attn(q, k, v, 0.125, true)?;
        for _ in 0..3 {
            let far = distance(&first, &flash_attn(q, k, v, 0.125, true)?)?;
            assert!(far == 0.0, "{far:e} from the first call");
        }
        Ok(Found::Said("4 calls".to_owned()))
    });
    run.case("more plans than a thread keeps, F16", |device| {
        let [q, k, v] = &inputs([2, 200, 330, 8, 2, 64], DType::F16, device)?;
        let mut worst = None;
        for len in (300..330).chain([300]) {
            let (k, v) = (k.narrow(1, 0, len)?, v.narrow(1, 0, len)?);
            let found = distances([q, &k, &v], &Terms::scale(0.125), &flash_attn(q, &k, &v, 0.125, false)?)?;
            worst = Some(match worst {
                None => found,
                Some(worst) => found.or(worst),
            });
        }
        Ok(Found::Distance(worst.expect("31 lengths")))
    });
    run.case("on another thread, F16", |device| {
        let [q, k, v] = &inputs([2, 200, 300, 8, 2, 64], DType::F16, device)?;
        let terms = Terms::scale(0.125);
        // The stream of a candle device may be another one on each thread.
        device.synchronize()?;
        std::thread::scope(|scope| {
            let near = || near([q, k, v], &terms, &flash_attn(q, k, v, 0.125, false)?);
            scope.spawn(near).join().expect("the thread ended")
        })
    });
}

/// A chain of products that keeps the device busy for a while: each multiplies the result of the one before it.
struct Chain {
    start: Tensor,
    factor: Tensor,
}

impl Chain {
    const SIZE: usize = 4096;

    fn new(device: &Device) -> Result<Self> {
        let make = |seed| random(&[Self::SIZE, Self::SIZE], seed, DType::F32, device);
        // Products keep the magnitude of elements.
        let factor = (make(12)? / (Self::SIZE as f64 / 3.0).sqrt())?;
        Ok(Self { start: make(11)?, factor })
    }

    fn end(&self, rounds: usize) -> Result<Tensor> {
        let mut end = self.start.clone();
        for _ in 0..rounds {
            end = end.matmul(&self.factor)?;
        }
        Ok(end)
    }
}

/// Work before and after a call, ordered by the stream alone.
fn in_order(device: &Device) -> Result<Found> {
    let dtype = DType::F16;
    let shape = [2, 200, 8, 64];
    // After this call, the kernels and the plan exist: nothing below waits for the host.
    let [q, k, v] = &inputs([2, 200, 200, 8, 8, 64], dtype, device)?;
    flash_attn(q, k, v, 0.125, true)?;
    let chain = Chain::new(device)?;
    let (out, kept) = {
        let end = chain.end(20)?.flatten_all()?.narrow(0, 0, shape.iter().product())?;
        let q = end.clamp(-1f32, 1f32)?.reshape(&shape)?.to_dtype(dtype)?;
        let k = (&q * 0.5)?;
        let v = q.affine(-1.0, 0.25)?;
        let out = flash_attn(&q, &k, &v, 0.125, true)?.affine(2.0, 1.0)?;
        (out, q.copy()?)
    };
    // The memory that the call read is free now, and the next work writes it.
    let junk: Vec<Tensor> =
        (0..4).map(|_| Tensor::full(1000f32, &shape, device)?.to_dtype(dtype)).collect::<Result<_>>()?;
    let (k, v) = ((&kept * 0.5)?, kept.affine(-1.0, 0.25)?);
    let terms = Terms::scale(0.125).window([200, 200], None, Some(0));
    drop(junk);
    let spread = kept.to_dtype(DType::F32)?.flatten_all()?.sqr()?.mean_all()?.to_scalar::<f32>()?;
    assert!(spread > 1e-3, "the chain ends in zeros: {spread}");
    let mut found = distances([&kept, &k, &v], &terms, &out.affine(0.5, -0.5)?)?;
    // The result is doubled, and rounded twice more: with values up to 4, then up to 2.
    found.most += 3.0 * 2f64.powi(-11) * 2.0;
    Ok(Found::Distance(found))
}

/// A training step behind other work, ordered by the stream alone.
fn trains_in_order(device: &Device) -> Result<Found> {
    let (dtype, shape) = (DType::F16, [2, 200, 8, 64]);
    let step = |vars: &[Var; 3]| {
        let [q, k, v] = vars.each_ref().map(Var::as_tensor);
        gradients(vars, &flash_attn(q, k, v, 0.125, true)?, dtype)
    };
    let variables = |q: &Tensor| {
        let (k, v) = ((q * 0.5)?, q.affine(-1.0, 0.25)?);
        Ok::<_, Error>([Var::from_tensor(q)?, Var::from_tensor(&k)?, Var::from_tensor(&v)?])
    };
    // After this step, the kernels and the plans exist: nothing below waits for the host.
    step(&variables(&random(&shape, 1, dtype, device)?)?)?;
    let chain = Chain::new(device)?;
    let (got, kept) = {
        let end = chain.end(20)?.flatten_all()?.narrow(0, 0, shape.iter().product())?;
        let q = end.clamp(-1f32, 1f32)?.reshape(&shape)?.to_dtype(dtype)?;
        (step(&variables(&q)?)?, q.copy()?)
    };
    // The memory of the step is free now, and the next work writes it.
    let junk: Vec<Tensor> =
        (0..8).map(|_| Tensor::full(1000f32, &shape, device)?.to_dtype(dtype)).collect::<Result<_>>()?;
    device.synchronize()?;
    drop(junk);
    let want = step(&variables(&kept)?)?;
    for (got, want) in got.iter().zip(&want) {
        let far = distance(got, want)?;
        assert!(far == 0.0, "{far:e} from a step by itself");
    }
    Ok(Found::Said("the bits of a step by itself".to_owned()))
}

/// The time that calls take while the device is busy.
fn does_not_wait(device: &Device) -> Result<Found> {
    let [q, k, v] = &inputs([2, 200, 200, 8, 8, 64], DType::F16, device)?;
    let [pq, pk, pv] = &packed_inputs(DType::F16, device)?;
    let [pool_k, pool_v, table] = &pages([pk, pv])?;
    let (sq, sk) = (ends(&Q_LENS, DType::U32, &Device::Cpu)?, ends(&K_LENS, DType::U32, &Device::Cpu)?);
    let calls = || {
        flash_attn(q, k, v, 0.125, true)?;
        flash_attn_varlen(pq, pk, pv, &sq, &sk, 130, 200, 0.125, true)?;
        paged_attention([pq, pool_k, pool_v], [&sq, &sk], table, None, Some(60))
    };
    let chain = Chain::new(device)?;
    chain.end(3)?;
    calls()?;
    device.synchronize()?;
    let start = Instant::now();
    let end = chain.end(60)?;
    let enqueued = start.elapsed();
    calls()?;
    let called = start.elapsed() - enqueued;
    device.synchronize()?;
    let all = start.elapsed();
    drop(end);
    let left = all.saturating_sub(enqueued + called);
    let said = format!("three calls took {called:?}, and the device was busy for {left:?} after them");
    if left < Duration::from_millis(10) {
        bail!("{said}")
    }
    Ok(Found::Said(said))
}

fn streams(run: &mut Run) {
    run.case("work before and after, in order, candle's default stream", in_order);
    run.case("calls do not wait for the device", does_not_wait);
    run.case("a training step behind other work, in order, candle's default stream", trains_in_order);
    run.case("a training step behind other work, in order, a stream of its own", |_| {
        trains_in_order(&Device::new_cuda_with_stream(0)?)
    });
    run.case("work before and after, in order, a stream of its own", |_| {
        in_order(&Device::new_cuda_with_stream(0)?)
    });
    run.case("calls do not wait for the device, a stream of its own", |_| {
        does_not_wait(&Device::new_cuda_with_stream(0)?)
    });
}

/// Milliseconds of the fastest of 20 calls, each of which is waited for.
fn milliseconds(device: &Device, call: impl Fn() -> Result<Tensor>) -> Result<f64> {
    let mut least = f64::INFINITY;
    for _ in 0..20 {
        device.synchronize()?;
        let start = Instant::now();
        let out = call()?;
        device.synchronize()?;
        least = least.min(start.elapsed().as_secs_f64() * 1e3);
        drop(out);
    }
    Ok(least)
}

fn speed(run: &mut Run) {
    for (name, dims) in [
        ("causal prefill, 16 heads, 4096 tokens, D 128", [1, 4096, 4096, 16, 16, 128]),
        ("decode, 8 sequences, 32/8 heads, 8192 keys, D 128", [8, 1, 8192, 32, 8, 128]),
    ] {
        run.case(&format!("speed: {name}, BF16"), |device| {
            let [q, k, v] = &inputs(dims, DType::BF16, device)?;
            let flash = milliseconds(device, || flash_attn(q, k, v, 0.088, true))?;
            let [a, b, c] = &[q, k, v].map(swap);
            let terms = Terms::scale(0.088);
            let ops = milliseconds(device, || Ok(reference([a, b, c], &terms, DType::BF16)?[0].clone()))?;
            Ok(Found::Said(format!(
                "flash_attn {flash:.3} ms, matmul and softmax without a mask {ops:.3} ms"
            )))
        });
    }
}

/// The first line of an error, which must contain `expected`.
fn refused<T: std::fmt::Debug>(result: Result<T>, expected: &str) -> Result<String> {
    let error = match result {
        Ok(value) => bail!("expected an error with {expected:?}, got {value:?}"),
        Err(error) => error.to_string(),
    };
    let line = error.lines().next().unwrap_or_default().to_owned();
    if !line.contains(expected) {
        bail!("expected {expected:?}, got {line:?}")
    }
    Ok(line)
}

/// A name, and a call that is refused.
type Refusal = (&'static str, fn(&Device) -> Result<String>);

fn refusals(run: &mut Run) {
    let places_and_gradients: [Refusal; 6] = [
        ("tensors on two devices", |device| {
            let [q, k, v] = &inputs([1, 4, 4, 2, 2, 64], DType::F32, device)?;
            refused(flash_attn(q, &k.to_device(&Device::Cpu)?, v, 1.0, false), "k is on Cpu")?;
            refused(flash_attn(&q.to_device(&Device::Cpu)?, k, v, 1.0, false), "q is on Cpu")?;
            let other = &Device::new_cuda(0)?;
            let v = random(&[1, 4, 2, 64], 3, DType::F32, other)?;
            refused(flash_attn(q, k, &v, 1.0, false), "v is on another candle device")
        }),
        ("a mask and slopes on the CPU", |device| {
            let [q, k, v] = &inputs([1, 4, 4, 2, 2, 64], DType::F32, device)?;
            let mask = Tensor::zeros((4, 4), DType::F32, &Device::Cpu)?;
            let [a, b, c] = &[q, k, v].map(swap);
            refused(sdpa(a, b, c, Some(&mask), false, 1.0, 1.0), "mask is on Cpu")?;
            let slopes = Tensor::ones(2, DType::F32, &Device::Cpu)?;
            refused(flash_attn_alibi(q, k, v, &slopes, 1.0, false), "alibi_slopes is on Cpu")
        }),
        ("a KV cache", |device| {
            let shape = CacheShape { layers: 1, kv_heads: 2, head_dim: 64, value_dim: 64 };
            let layout = CacheLayout::Paged { pages: 4, page_size: 16 };
            let mut cache = KvCache::new(CacheDesc::new(layout, shape, Codec::Int8))?;
            let sequence = cache.create()?;
            let x = random(&[3, 2, 64], 1, DType::F32, device)?;
            refused(cache.step(&[(sequence, 3)])?.attend(0, &x, &x, &x), "q is on Cuda")
        }),
        ("a gradient over pages", |device| {
            let [q, k, v] = &packed_inputs(DType::F16, device)?;
            let [pool_k, pool_v, table] = &pages([k, v])?;
            let (sq, sk) = (ends(&Q_LENS, DType::U32, device)?, ends(&K_LENS, DType::U32, device)?);
            let q = Var::from_tensor(q)?;
            let out = paged_attention([q.as_tensor(), pool_k, pool_v], [&sq, &sk], table, None, None)?;
            refused(out.sum_all()?.backward().map(|_| ()), "in the pages of a cache have no gradients")
        }),
        ("gradients of a mask and of sinks", |device| {
            let [q, k, v] = &inputs([1, 4, 4, 2, 2, 64], DType::F32, device)?.map(|x| swap(&x));
            let mask = Var::from_tensor(&random(&[4, 4], 4, DType::F32, device)?)?;
            let options = Options::full().mask(Mask::Additive(mask.as_tensor().clone()));
            refused(attention(q, k, v, &options), "mask is a variable")?;
            let sinks = Var::from_tensor(&random(&[2], 5, DType::F32, device)?)?;
            refused(attention(q, k, v, &Options::full().sinks(sinks.as_tensor())), "sinks is a variable")
        }),
        ("a gradient of the logsumexp", |device| {
            let [q, k, v] = &inputs([1, 4, 4, 2, 2, 64], DType::F32, device)?;
            let q = Var::from_tensor(q)?;
            refused(attention(q.as_tensor(), k, v, &Options::full().lse()), "q is a variable")
        }),
    ];
    for (name, case) in places_and_gradients.into_iter().chain(wrong_tensors()) {
        run.case(&format!("refusal: {name}"), |device| case(device).map(Found::Said));
    }
}

fn wrong_tensors() -> [Refusal; 4] {
    [
        ("dtypes", |device| {
            let [q, k, v] = &inputs([1, 4, 4, 2, 2, 64], DType::F32, device)?;
            let double = q.to_dtype(DType::F64)?;
            refused(flash_attn(&double, k, v, 1.0, false), "q is F64, expected F32, F16 or BF16")?;
            refused(flash_attn(q, &k.to_dtype(DType::F16)?, v, 1.0, false), "k is f16, expected f32")
        }),
        ("shapes and strides", |device| {
            let [q, k, v] = &inputs([1, 4, 4, 2, 2, 64], DType::F32, device)?;
            let long = random(&[1, 5, 2, 64], 1, DType::F32, device)?;
            refused(
                flash_attn(q, k, &long, 1.0, false),
                "v has shape [1, 5, 2, 64], expected [1, 4, 2, 64]",
            )?;
            let turned = random(&[1, 64, 2, 4], 1, DType::F32, device)?.transpose(1, 3)?;
            refused(flash_attn(q, &turned, v, 1.0, false), "call contiguous() on it")
        }),
        ("a head dimension without a kernel", |device| {
            let [q, k, v] = &inputs([1, 4, 4, 2, 2, 520], DType::F32, device)?;
            refused(flash_attn(q, k, v, 1.0, false), "512")
        }),
        ("a page outside the pool", |device| {
            let [q, k, v] = &packed_inputs(DType::F16, device)?;
            let [pool_k, pool_v, table] = &pages([k, v])?;
            let (sq, sk) = (ends(&Q_LENS, DType::U32, device)?, ends(&K_LENS, DType::U32, device)?);
            let table = (table.to_dtype(DType::I64)? + 99.0)?.to_dtype(DType::U32)?;
            let out = paged_attention([q, pool_k, pool_v], [&sq, &sk], &table, None, None);
            refused(out, "page")
        }),
    ]
}
