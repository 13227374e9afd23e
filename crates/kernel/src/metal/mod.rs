//! Apple's GPUs: kernels compiled from their printed source, kept in binary archives, and encoded for a queue.
//!
//! ```no_run
//! use flashtile_kernel::metal::Gpu;
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
//! let gpu = Gpu::system_default()?;
//! let x = gpu.buffer_from(&[1.0f32, 2.0, 3.0])?;
//! let mut out = gpu.uninit::<f32>(3)?;
//! scale::Call { x: x.view(), out: out.view_mut(), factor: 2.0, n: 3, groups: [1, 1, 1] }.launch::<f32>(&gpu)?;
//! assert_eq!(gpu.to_vec::<f32>(&out)?, [2.0, 4.0, 6.0]);
//! # Ok(())
//! # }
//! ```
//!
//! | type | meaning |
//! |---|---|
//! | [`Gpu`] | a device, and where its launches are encoded: a queue, or an encoder of the caller's |
//! | [`Memory`] | elements of an `MTLBuffer`, from a byte offset on |
//! | [`HostPages`] | memory of the host that a device uses without a copy |
//! | [`ForeignEncoder`] | an encoder that another library wraps |
//! | [`Error`] | the reason why a device refused or failed |
//!
//! Compiled pipelines are kept in the folder that [`CACHE_VARIABLE`] names, or in `flashtile` in the user's folder of caches.

mod archive;
mod encoder;
mod error;
mod gpu;
mod host;
mod memory;
mod object;
mod pipeline;
mod queue;
mod write;

pub use crate::disk::CACHE_VARIABLE;
pub use crate::timing::Timing;
pub use encoder::{DispatchType, ForeignEncoder};
pub use error::{CommandBufferError, Error};
pub use gpu::Gpu;
pub use host::HostPages;
pub use memory::Memory;
pub use object::{Buffer, CommandBuffer, CommandQueue, ComputeEncoder, MetalDevice, SharedEvent};
pub use {objc2, objc2_metal};
