//! The measured limits of a device, against which kernels are compared: memory bandwidth and matrix products.

#![allow(unsafe_code)]

use super::device::Cuda;
use super::error::CudaError;
use super::params::{ProductParams, ReadParams};
use super::sources::Source;
use crate::plan::NATIVE_CAPABILITY;
use flashtile_core::dtype::Dtype;
use flashtile_kernel::cuda::Grid;
use flashtile_kernel::cuda::cudarc::driver::DevicePtr;

/// Bytes that a measurement of the bandwidth reads: several times any second-level cache.
const READ_BYTES: usize = 1 << 30;

/// Runs of a measurement, of which the fastest counts: noise only ever slows.
const RUNS: usize = 5;

/// Bytes a second that the device reads from its memory.
///
/// # Errors
/// [`CudaError::Device`].
pub fn read_bandwidth(cuda: &Cuda) -> Result<f64, CudaError> {
    let failed = || CudaError::driver("measurement of the bandwidth");
    let stream = cuda.context().new_stream().map_err(failed())?;
    let function = cuda.function(Source::limits(), "read", 0)?;
    let memory = stream.alloc_zeros::<u8>(READ_BYTES).map_err(failed())?;
    let sink = stream.alloc_zeros::<u32>(1).map_err(failed())?;
    let (from, sink) = (memory.device_ptr(&stream).0, sink.device_ptr(&stream).0);
    let grid = Grid { blocks: [cuda.facts().multiprocessors * 4, 1, 1], threads: 512, shared: 0 };
    // Each thread reads 8 chunks of 16 bytes at a time, all of them as often.
    let round = grid.blocks[0] * grid.threads * 8 * 16;
    let bytes = READ_BYTES / round * round;
    let params = ReadParams { from, count: bytes as u64 / 16, sink };
    // SAFETY: the kernel reads `count` chunks of 16 bytes from `from` and writes at most one u32.
    let launch = || unsafe { function.launch(&stream, grid, &params) };
    let seconds = cuda.gpu().on(&stream).time(RUNS, launch)?.least();
    Ok(bytes as f64 / seconds)
}

/// The unit that computes the products of [`matrix_peak`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProductUnit {
    /// Threads, by `fma` in f32: bf16 and f32 before compute capability 8.0.
    Fma,
    /// The matrix unit, by `mma.sync`, with operands in registers.
    MmaSync,
    /// The matrix unit, by `wgmma`, with operands in shared memory: f16 and bf16 of compute capability 9.0.
    Wgmma,
}

/// A measured rate of products.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct MatrixPeak {
    /// Operations a second, two for each multiply-add.
    pub rate: f64,
    /// The unit that computes the products.
    pub unit: ProductUnit,
}

/// Operations a second by the fastest products that the device has for a dtype. An f32 product is a sum of three tf32 products and counts
/// once. NVRTC before 12.0 knows no `wgmma`: there it is the rate of `mma.sync`.
///
/// # Errors
/// [`CudaError::Device`].
pub fn matrix_peak(cuda: &Cuda, dtype: Dtype) -> Result<MatrixPeak, CudaError> {
    // Some milliseconds of each.
    const ROUNDS: u32 = 2000;
    let capability = cuda.facts().capability;
    let unit = if cuda.facts().wgmma && dtype != Dtype::F32 {
        ProductUnit::Wgmma
    } else if capability < NATIVE_CAPABILITY && dtype != Dtype::F16 {
        ProductUnit::Fma
    } else {
        ProductUnit::MmaSync
    };
    let failed = || CudaError::driver("measurement of the matrix unit");
    let stream = cuda.context().new_stream().map_err(failed())?;
    // Blocks of a multiprocessor, and multiply-adds of a block in a round: 64 products of m16n8k16 (m16n8k8 for f32) by each of eight
    // warps, or 4 of m64n256k16 by each of two warpgroups.
    let (source, entry, resident, multiply_adds) = match (unit, dtype) {
        (ProductUnit::Wgmma, Dtype::F16) => (Source::sm90_limits(), "wgmma_f16", 1, 2 * 4 * 64 * 256 * 16),
        (ProductUnit::Wgmma, _) => (Source::sm90_limits(), "wgmma_bf16", 1, 2 * 4 * 64 * 256 * 16),
        (_, Dtype::F32) => (Source::limits(), "products_f32", 2, 8 * 64 * 16 * 8 * 8),
        (_, Dtype::F16) => (Source::limits(), "products_f16", 2, 8 * 64 * 16 * 8 * 16),
        (_, Dtype::BF16) => (Source::limits(), "products_bf16", 2, 8 * 64 * 16 * 8 * 16),
    };
    let function = cuda.function(source, entry, 0)?;
    let sink = stream.alloc_zeros::<u32>(1).map_err(failed())?;
    let params = ProductParams { sink: sink.device_ptr(&stream).0, rounds: ROUNDS, unused: 0 };
    let blocks = cuda.facts().multiprocessors * resident;
    let grid = Grid { blocks: [blocks, 1, 1], threads: 256, shared: 0 };
    // SAFETY: the kernel writes at most one f32.
    let launch = || unsafe { function.launch(&stream, grid, &params) };
    let seconds = cuda.gpu().on(&stream).time(RUNS, launch)?.least();
    let rate = 2.0 * blocks as f64 * f64::from(ROUNDS) * f64::from(multiply_adds) / seconds;
    Ok(MatrixPeak { rate, unit })
}
