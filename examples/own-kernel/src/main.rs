//! RMS norm as a custom kernel: checked against plain Rust on the simulator, printed, and launched on a GPU if there
//! is one.
//!
//! ```sh
//! cargo run                       # simulate and check
//! cargo run -- metal              # print Metal Shading Language
//! cargo run -- cuda               # print CUDA C++
//! cargo run --features cuda       # simulate, then launch on an NVIDIA GPU
//! ```

use flashtile_kernel::Target;
use flashtile_kernel::prelude::*;
use flashtile_kernel::simulator::{Memory, Simulator};
use std::error::Error;

/// Parameters of a launch.
#[params]
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// Elements of a row.
    pub dim: u32,
    /// Added to the mean square.
    pub epsilon: f32,
}

/// `out = x * weight / sqrt(mean(x^2) + epsilon)` for each row, with one threadgroup per row.
#[kernel(
    threads <= 1024,
    requires(params.dim > 0, "rows are not empty"),
    requires(x.len() >= groups[0] as usize * params.dim as usize, "x holds a row a group"),
    requires(weight.len() >= params.dim as usize, "a weight for each number of a row"),
    requires(out.len() >= groups[0] as usize * params.dim as usize, "out holds a row a group"),
    bench(
        shape(rows = [4096], dim = [4096]),
        bytes = 4 * rows * dim,
        flops = 4 * rows * dim,
        tolerance = 1e-2,
    ),
)]
pub fn rms_norm<T: Element>(x: &Buffer<T>, weight: &Buffer<T>, out: &mut Buffer<T>, params: &Norm) {
    let mut parts: Shared<f32> = shared(32);
    let start = group_x() as u64 * params.dim as u64;

    let mut squares = 0.0;
    for i in (thread_index()..params.dim).step_by(threads() as usize) {
        let number = x[start + i as u64].to_f32();
        squares += number * number;
    }

    // Each SIMD group has one partial sum; then every SIMD group adds up all of them.
    let squares = simd_sum(squares);
    if simd_lane() == 0 {
        parts[simd_index()] = squares;
    }
    barrier();
    let mut total = 0.0;
    if simd_lane() < simd_groups() {
        total = parts[simd_lane()];
    }
    let mean = simd_sum(total) / params.dim as f32;
    let factor = (mean + params.epsilon).rsqrt();

    for i in (thread_index()..params.dim).step_by(threads() as usize) {
        let number = x[start + i as u64].to_f32() * factor;
        out[start + i as u64] = T::from_f32(number * weight[i].to_f32());
    }
}

/// The reference: RMS norm of each row, in f64.
fn expected(x: &[f32], weight: &[f32], epsilon: f32) -> Vec<f32> {
    let mut out = Vec::new();
    for row in x.chunks(weight.len()) {
        let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / row.len() as f64;
        let factor = 1.0 / (mean + f64::from(epsilon)).sqrt();
        out.extend(row.iter().zip(weight).map(|(x, w)| (f64::from(*x) * factor * f64::from(*w)) as f32));
    }
    out
}

const ROWS: u32 = 5;
const DIM: u32 = 1000;
const PARAMS: Norm = Norm { dim: DIM, epsilon: 1e-5 };

fn numbers<T: Element>(n: u32, seed: u32) -> Vec<T> {
    let mixed = |i: u32| (i + seed).wrapping_mul(2_654_435_761) >> 8;
    (0..n).map(|i| T::from_f32(mixed(i) as f32 / 8_388_608.0 - 1.0)).collect()
}

/// The largest error; the magnitude of out is at most a few.
fn error<T: Element>(out: &[T], x: &[T], weight: &[T]) -> f32 {
    let wide = |x: &[T]| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
    let expected = expected(&wide(x), &wide(weight), PARAMS.epsilon);
    out.iter().zip(expected).map(|(found, want)| (found.to_f32() - want).abs()).fold(0.0, f32::max)
}

fn simulate<T: Element>(tolerance: f32) -> Result<(), Box<dyn Error>> {
    let (x, weight) = (numbers::<T>(ROWS * DIM, 1), numbers::<T>(DIM, 9));
    let simulator = Simulator::new();
    let mut out = Memory::uninit::<T>(x.len());
    rms_norm::Call {
        x: Memory::from_slice(&x).view(),
        weight: Memory::from_slice(&weight).view(),
        out: out.view_mut(),
        params: PARAMS,
        groups: [ROWS, 1, 1],
        threads: 128,
    }
    .launch::<T>(&simulator)?;
    let error = error(&out.to_vec()?, &x, &weight);
    let read = simulator.report().device_read;
    println!("simulator, {}: greatest error {error:.1e}, {read} bytes read", T::TYPE);
    if error > tolerance { Err("the simulated kernel errs".into()) } else { Ok(()) }
}

#[cfg(feature = "cuda")]
fn launch<T: Element>(tolerance: f32) -> Result<(), Box<dyn Error>> {
    use flashtile_kernel::cuda::Gpu;

    let gpu = match Gpu::new(0) {
        Ok(gpu) => gpu,
        Err(why) => {
            println!("SKIPPED, nothing was launched: {why}");
            return Ok(());
        }
    };
    let (x, weight) = (numbers::<T>(ROWS * DIM, 1), numbers::<T>(DIM, 9));
    let mut out = gpu.uninit::<T>(x.len())?;
    rms_norm::Call {
        x: gpu.buffer_from(&x)?.view(),
        weight: gpu.buffer_from(&weight)?.view(),
        out: out.view_mut(),
        params: PARAMS,
        groups: [ROWS, 1, 1],
        threads: 128,
    }
    .launch::<T>(&gpu)?;
    let error = error(&out.to_vec()?, &x, &weight);
    println!("{}, {}: greatest error {error:.1e}", gpu.name(), T::TYPE);
    if error > tolerance { Err("the launched kernel errs".into()) } else { Ok(()) }
}

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1).as_deref() {
        Some("metal") => print!("{}", rms_norm::instance::<f16>().source(Target::Metal)),
        Some("cuda") => print!("{}", rms_norm::instance::<f16>().source(Target::Cuda)),
        Some(other) => return Err(format!("`{other}`: say nothing, metal or cuda").into()),
        None => {
            simulate::<f32>(1e-5)?;
            simulate::<f16>(4e-3)?;
            #[cfg(feature = "cuda")]
            {
                launch::<f32>(1e-5)?;
                launch::<f16>(4e-3)?;
            }
        }
    }
    Ok(())
}
