//! What a device can do at best, measured: the two limits that kernels are held against.

#![allow(unsafe_code)]

use super::cudarc::driver::DevicePtr;
use super::device::Cuda;
use super::error::CudaError;
use super::params::{ProductParams, ReadParams};
use super::sources::Source;
use flashtile_core::dtype::Dtype;
use flashtile_kernel::cuda::Grid;

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

/// Operations a second of the matrix unit by `mma.sync`, two for each multiply-add. An f32 product is a sum of three tf32 products and
/// counts once. For dtypes that the unit does not multiply (bf16 and f32 before compute capability 8.0) it is the rate of `fma` in f32.
///
/// # Errors
/// [`CudaError::Device`].
pub fn matrix_peak(cuda: &Cuda, dtype: Dtype) -> Result<f64, CudaError> {
    const ROUNDS: u32 = 2000;
    let failed = || CudaError::driver("measurement of the matrix unit");
    let stream = cuda.context().new_stream().map_err(failed())?;
    let (entry, depth) = match dtype {
        Dtype::F32 => ("products_f32", 8.0),
        Dtype::F16 => ("products_f16", 16.0),
        Dtype::BF16 => ("products_bf16", 16.0),
    };
    let function = cuda.function(Source::limits(), entry, 0)?;
    let sink = stream.alloc_zeros::<u32>(1).map_err(failed())?;
    let params = ProductParams { sink: sink.device_ptr(&stream).0, rounds: ROUNDS, unused: 0 };
    let blocks = cuda.facts().multiprocessors * 2;
    let grid = Grid { blocks: [blocks, 1, 1], threads: 256, shared: 0 };
    // SAFETY: the kernel writes at most one f32.
    let launch = || unsafe { function.launch(&stream, grid, &params) };
    let seconds = cuda.gpu().on(&stream).time(RUNS, launch)?.least();
    let products = blocks as f64 * 8.0 * f64::from(ROUNDS) * 64.0;
    Ok(products * 2.0 * 16.0 * 8.0 * depth / seconds)
}
