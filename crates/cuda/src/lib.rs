//! The CUDA backend: native kernels for devices of compute capability 8.0 and later, portable kernels for 7.5.
//!
//! Nothing of NVIDIA's is needed to build: driver and NVRTC are looked for at run time, and what is missing is said by
//! [`DeviceError::Missing`]. Kernels are source, compiled for the device when they are first needed and kept on disk (in the folder
//! that [`CACHE_VARIABLE`] names, or `flashtile` in the user's folder of caches); [`Cuda::prewarm`] does so ahead.
//!
//! A run works on borrowed device memory and a borrowed stream, allocates nothing, waits for nothing, and can be captured in
//! a CUDA graph. What it needs beside its tensors is made once by [`Cuda::prepare`]: the plan's schedule in device memory, and
//! room for partial results. One [`Prepared`] serves every layer of a model; for the next step of the same sequences
//! [`Prepared::update`] writes a new schedule to the same place, so that a captured graph stays valid.
//!
//! ```no_run
//! use flashtile::cuda::{Cuda, DeviceInputs, DeviceOutputs, DeviceTensor, DeviceTensorMut};
//! use flashtile::{Dims, Dtype, PlanOptions, ProblemDesc};
//! let cuda = Cuda::new(0)?;
//! let dims = Dims { batch: 1, q_heads: 32, kv_heads: 8, q_len: 512, kv_len: 512, head_dim: 128, value_dim: 128 };
//! let problem = ProblemDesc::new(dims, Dtype::BF16).validate()?;
//! let stream = cuda.context().new_stream()?;
//! let mut prepared = cuda.prepare(&cuda.plan(&problem, PlanOptions::default())?, &stream)?;
//! # let (q, k, v, out) = (0, 0, 0, 0);
//! let dense = |[_, heads, rows, dim]: [usize; 4]| [heads * rows * dim, rows * dim, dim, 1];
//! // SAFETY: q, k and v are device addresses of dense tensors, which live until the stream has ended its work.
//! let view = |at, shape| unsafe { DeviceTensor::from_raw_parts(Dtype::BF16, at, shape, dense(shape)) };
//! let inputs = DeviceInputs::new(view(q, dims.q_shape())?, view(k, dims.k_shape())?, view(v, dims.v_shape())?);
//! let shape = dims.out_shape();
//! // SAFETY: out is the device address of a dense tensor that nothing else accesses.
//! let out = unsafe { DeviceTensorMut::from_raw_parts(Dtype::BF16, out, shape, dense(shape))? };
//! prepared.run(&inputs, &mut DeviceOutputs::new(out))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]

mod array;
mod cache;
mod device;
mod device_struct;
mod error;
mod host;
pub mod limits;
mod params;
pub mod plan;
mod portable;
mod prepared;
mod prewarm;
mod session;
#[cfg(test)]
mod sm90_tests;
mod sources;
mod tensor;
mod timed;
mod timer;
mod tma;
mod views;
mod wgmma;

pub use array::DeviceArray;
pub use cache::{CudaStore, DeviceKvCache};
pub use device::Cuda;
pub use error::{CudaError, DeviceError};
pub use flashtile_kernel::cuda::{CACHE_VARIABLE, Gpu, NVRTC_VARIABLE, cudarc};
pub use host::DeviceTensors;
pub use prepared::{DeviceMemory, Prepared};
pub use session::Session;
pub use tensor::{
    DeviceCodes, DeviceInputs, DeviceKv, DeviceList, DeviceListMut, DeviceMask, DeviceOutputs, DeviceTables,
    DeviceTensor, DeviceTensorMut,
};
pub use timed::TimedRun;
pub use timer::Timer;
