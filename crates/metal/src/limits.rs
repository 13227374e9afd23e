//! The measured limits of a device, against which kernels are compared: copy bandwidth and product
//! throughput.

use crate::device::Metal;
use crate::error::MetalError;
use flashtile_core::dtype::Dtype;
use flashtile_gpu::SessionError;
use flashtile_gpu::kernels::copy::copy;
use flashtile_gpu::kernels::products::{PRODUCTS, products};
use flashtile_kernel::metal::Error;
use flashtile_kernel::{LaunchError, bf16, f16};

/// Vectors of 16 bytes that a measurement of the bandwidth copies: several times any cache.
const VECTORS: u32 = 16 << 20;

/// Runs of a measurement, of which the fastest counts: noise only ever slows.
const RUNS: usize = 5;

/// Rounds of products.
const ROUNDS: u32 = 4096;

/// Bytes a second that the device moves in a copy, reads and writes together.
///
/// # Errors
/// [`MetalError`].
pub fn copy_bandwidth(metal: &Metal) -> Result<f64, MetalError> {
    let gpu = metal.gpu();
    let x = gpu.uninit::<f32>(4 * VECTORS as usize).map_err(Failed::from)?;
    let mut out = gpu.uninit::<f32>(4 * VECTORS as usize).map_err(Failed::from)?;
    let (instance, groups) = (copy::instance(), [VECTORS.div_ceil(256), 1, 1]);
    let timing = gpu.time::<Failed>(RUNS, || {
        let call = copy::Call { x: x.view(), out: out.view_mut(), n: VECTORS, groups };
        Ok(call.launch_instance(gpu, &instance)?)
    })?;
    Ok(2.0 * 16.0 * f64::from(VECTORS) / timing.least())
}

/// Operations a second of the matrix unit on 8x8 matrices of a dtype, summed in f32; two for each multiply-add.
///
/// # Errors
/// [`MetalError`].
pub fn matrix_peak(metal: &Metal, dtype: Dtype) -> Result<f64, MetalError> {
    let gpu = metal.gpu();
    // Enough threadgroups of eight SIMD groups for twice the threads that a core holds.
    let groups = 24 * metal.facts().cores as u32;
    let mut out = gpu.uninit::<f32>(groups as usize * 512).map_err(Failed::from)?;
    let instance = match dtype {
        Dtype::F32 => products::instance::<f32>(),
        Dtype::F16 => products::instance::<f16>(),
        Dtype::BF16 => products::instance::<bf16>(),
    };
    let timing = gpu.time::<Failed>(RUNS, || {
        let call = products::Call { out: out.view_mut(), rounds: ROUNDS, groups: [groups, 1, 1] };
        Ok(call.launch_instance(gpu, &instance)?)
    })?;
    let multiplied = f64::from(groups) * 8.0 * f64::from(ROUNDS) * f64::from(PRODUCTS);
    Ok(multiplied * 2.0 * 512.0 / timing.least())
}

/// A launch that failed, or its timing.
struct Failed(MetalError);

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self(SessionError::device(error))
    }
}

impl From<LaunchError<Error>> for Failed {
    fn from(error: LaunchError<Error>) -> Self {
        Self(SessionError::Launch(error))
    }
}

impl From<Failed> for MetalError {
    fn from(Failed(error): Failed) -> Self {
        error
    }
}
