//! Estimated times of a problem on the CPU and on a device, to choose between them.
//!
//! Arithmetic on the constants below, each a rate that is reached, not a limit. They need to be right within a factor of two:
//! where the two times are closer, either choice is good. docs/design.md lists them.

use flashtile_core::dtype::Dtype;
use flashtile_core::isa::Isa;
use flashtile_core::problem::Problem;
use flashtile_cpu::plan::{CpuFacts, isa_for};
#[cfg(feature = "cuda")]
use flashtile_cuda::plan::{CudaFacts, CudaPlan};
#[cfg(feature = "metal")]
use flashtile_metal::MetalFacts;

/// Estimated seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Estimate {
    /// On the CPU.
    pub(crate) cpu: f64,
    /// On the device, with start and copies.
    pub(crate) device: f64,
    /// The device's start and copies alone.
    pub(crate) overhead: f64,
}

impl Estimate {
    /// Of a problem on a device of such rates. Cost: `O(query rows)`.
    pub(crate) fn new(problem: &Problem, cpu: &CpuFacts, rates: &Rates) -> Self {
        let overhead = rates.start + copied_bytes(problem) / rates.copy;
        let kernels = (problem.flops() / rates.flops).max(kv_bytes(problem) / rates.bandwidth);
        Self { cpu: cpu_seconds(problem, cpu), device: overhead + kernels, overhead }
    }
}

/// The throughput that a device reaches for a problem.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rates {
    /// Seconds of launches, of the calls that copy tensors there and back, and of waiting for the result.
    start: f64,
    /// Bytes per second between tensors of the host and memory of the device.
    copy: f64,
    /// Floating-point operations per second.
    flops: f64,
    /// Bytes per second that kernels read.
    bandwidth: f64,
}

impl Rates {
    /// Of a CUDA device.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_cuda(plan: &CudaPlan, facts: &CudaFacts) -> Self {
        let multiprocessors = facts.multiprocessors.max(1) as f64;
        Self {
            start: CUDA_START,
            copy: PCIE_BANDWIDTH,
            flops: multiprocessors * cuda_multiprocessor_flops(plan.problem().dtype(), is_portable(plan)),
            bandwidth: multiprocessors * CUDA_MULTIPROCESSOR_BANDWIDTH,
        }
    }

    /// Of one of Apple's GPUs.
    #[cfg(feature = "metal")]
    pub(crate) fn of_metal(dtype: Dtype, facts: &MetalFacts) -> Self {
        let cores = facts.cores.max(1) as f64;
        Self {
            start: METAL_START,
            copy: UNIFIED_COPY_BANDWIDTH,
            flops: cores * metal_core_flops(dtype),
            bandwidth: cores * METAL_CORE_BANDWIDTH,
        }
    }
}

/// Packed rows of a sequence up to which kernels on every backend stream keys: decode.
const DECODE_ROWS: usize = 16;

pub(crate) fn op(problem: &Problem) -> &'static str {
    let gqa_group = problem.dims().gqa_group();
    let is_decode = problem.sequences().iter().all(|s| s.q_len.saturating_mul(gqa_group) <= DECODE_ROWS);
    if is_decode { "decode" } else { "prefill" }
}

#[cfg(feature = "cuda")]
pub(crate) fn is_portable(plan: &CudaPlan) -> bool {
    plan.kernels().any(|kernel| kernel.is_portable())
}

/// Seconds between a call on the CPU and the first product of its threads.
const CPU_START: f64 = 5e-6;

/// Bytes per second that a thread reads from memory.
const CPU_THREAD_BANDWIDTH: f64 = 12e9;

/// Threads that saturate the memory of a processor.
const CPU_MEMORY_THREADS: usize = 16;

/// Floating-point operations per second of one thread in prefill.
const fn cpu_thread_flops(isa: Isa) -> f64 {
    match isa {
        Isa::Portable => 12e9,
        Isa::Avx2 => 75e9,
        Isa::Avx512 | Isa::Avx512Vnni => 130e9,
        Isa::Avx512Bf16 => 250e9,
        Isa::Amx => 500e9,
    }
}

/// [`Rates::start`] of a CUDA device.
#[cfg(feature = "cuda")]
const CUDA_START: f64 = 50e-6;

/// Bytes per second between pageable host memory and a device, over PCIe.
#[cfg(feature = "cuda")]
const PCIE_BANDWIDTH: f64 = 10e9;

/// Bytes per second that a multiprocessor reads from the memory of its device.
#[cfg(feature = "cuda")]
const CUDA_MULTIPROCESSOR_BANDWIDTH: f64 = 8e9;

/// Floating-point operations per second of one multiprocessor in prefill.
#[cfg(feature = "cuda")]
const fn cuda_multiprocessor_flops(dtype: Dtype, portable: bool) -> f64 {
    match (dtype, portable) {
        (Dtype::F16 | Dtype::BF16, false) => 1e12,
        (Dtype::F16 | Dtype::BF16, true) => 0.3e12,
        (Dtype::F32, false) => 0.15e12,
        (Dtype::F32, true) => 0.03e12,
    }
}

/// [`Rates::start`] of one of Apple's GPUs: a command buffer from its commit to the end of the wait takes 0.1 to 0.2 ms. None of the
/// numbers of these devices was measured by flashtile.
#[cfg(feature = "metal")]
const METAL_START: f64 = 200e-6;

/// Bytes per second of a copy inside of unified memory by one core of the processor.
#[cfg(feature = "metal")]
const UNIFIED_COPY_BANDWIDTH: f64 = 20e9;

/// Bytes per second that a GPU core reads: an M1 of 8 cores has 68 GB/s, an M3 Max of 40 cores 400 GB/s (Apple newsroom).
#[cfg(feature = "metal")]
const METAL_CORE_BANDWIDTH: f64 = 8e9;

/// Floating-point operations per second of one GPU core in prefill: a third to a half of an M1's, of 2.6e12 in f32 by 8 cores (Apple
/// newsroom).
#[cfg(feature = "metal")]
const fn metal_core_flops(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 | Dtype::BF16 => 0.15e12,
        Dtype::F32 => 0.1e12,
    }
}

/// Bytes of a key and a value of one head.
fn row_bytes(problem: &Problem) -> f64 {
    let dims = problem.dims();
    (problem.k_codec().row_bytes(dims.head_dim) + problem.v_codec().row_bytes(dims.value_dim)) as f64
}

/// Bytes of the keys and values that some query row sees, each once.
fn kv_bytes(problem: &Problem) -> f64 {
    let keys = problem.sequences().iter().map(|s| problem.visible_union(s, 0..s.q_len).len() as f64);
    keys.sum::<f64>() * problem.dims().kv_heads as f64 * row_bytes(problem)
}

/// Estimated time on the CPU: the longer of arithmetic and reading.
fn cpu_seconds(problem: &Problem, facts: &CpuFacts) -> f64 {
    let threads = facts.threads.max(1);
    let arithmetic = problem.flops() / (threads as f64 * cpu_thread_flops(isa_for(facts.isa, problem)));
    let bandwidth = threads.min(CPU_MEMORY_THREADS) as f64 * CPU_THREAD_BANDWIDTH;
    CPU_START + arithmetic.max(kv_bytes(problem) / bandwidth)
}

/// Bytes of tensors of the host that are copied to a device and back.
fn copied_bytes(problem: &Problem) -> f64 {
    let dims = problem.dims();
    let elements = |shape: [usize; 4]| shape.iter().map(|&n| n as f64).product::<f64>();
    let rows = if problem.is_cached() {
        problem.sequences().iter().map(|s| s.q_len as f64).sum()
    } else {
        dims.batch as f64 * dims.kv_len as f64
    };
    let queries = (elements(dims.q_shape()) + elements(dims.out_shape())) * problem.dtype().bytes() as f64;
    queries + rows * dims.kv_heads as f64 * row_bytes(problem)
}

/// A time with two significant digits: `26 us`, `1.5 ms`.
pub(crate) fn time(seconds: f64) -> String {
    let units = [(1e-6, "us"), (1e-3, "ms"), (1.0, "s")];
    // 995 us are 1.0 ms.
    let fits = |&&(unit, _): &&(f64, &str)| seconds < 995.0 * unit;
    let (unit, name) = units.iter().find(fits).unwrap_or(&units[2]);
    let x = seconds / unit;
    match x {
        ..9.95 => format!("{x:.1} {name}"),
        ..99.5 => format!("{x:.0} {name}"),
        _ => format!("{:.0} {name}", (x / 10.0).round() * 10.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_two_digits() {
        let shown = [5e-6, 26.4e-6, 994e-6, 996e-6, 1.53e-3, 0.5312, 1.0, 123.0, 9.96e-6].map(time);
        let want = ["5.0 us", "26 us", "990 us", "1.0 ms", "1.5 ms", "530 ms", "1.0 s", "120 s", "10 us"];
        assert_eq!(shown, want);
    }
}
