//! NVIDIA devices: the driver and NVRTC found at run time, kernels compiled, kept on disk, loaded and launched.
//!
//! Nothing of NVIDIA's is needed to build: [`Error::Missing`] says what is missing at run time. Compiled kernels are kept in
//! the folder that [`CACHE_VARIABLE`] names, or in `flashtile` in the user's folder of caches.
//!
//! ```no_run
//! use flashtile_kernel::cuda::Gpu;
//! use flashtile_kernel::prelude::*;
//!
//! /// `out = factor * x`.
//! #[kernel(threads = 256, requires(x.len() >= n as usize && out.len() >= n as usize, "x and out hold n elements"))]
//! pub fn scale<T: Element>(x: &Buffer<T>, out: &mut Buffer<T>, factor: f32, n: u32) {
//!     let i = thread_position();
//!     if i < n {
//!         out[i] = T::from_f32(x[i].to_f32() * factor);
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let gpu = Gpu::new(0)?;
//! let x = gpu.buffer_from(&[1.0f32, 2.0, 3.0])?;
//! let mut out = gpu.uninit::<f32>(3)?;
//! scale::Call { x: x.view(), out: out.view_mut(), factor: 2.0, n: 3, groups: [1, 1, 1] }.launch::<f32>(&gpu)?;
//! assert_eq!(out.to_vec::<f32>()?, [2.0, 4.0, 6.0]);
//! # Ok(())
//! # }
//! ```
//!
//! CUDA C++ that is not printed from a kernel is a [`Program`] too: [`Gpu::load`] compiles it, and [`Function::launch_with`] trusts its
//! caller.

mod compiler;
mod disk;
mod error;
mod function;
mod gpu;
mod grid;
mod library;
mod memory;

pub use crate::disk::CACHE_VARIABLE;
pub use crate::timing::Timing;
pub use compiler::{Architecture, Compiler, Program};
pub use cudarc;
pub use error::Error;
pub use function::{Function, Resources};
pub use gpu::Gpu;
pub use grid::Grid;
pub use library::NVRTC_VARIABLE;
pub use memory::Memory;
