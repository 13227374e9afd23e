//! The CUDA backend: native kernels for devices of compute capability 8.0 and later, portable kernels for 7.5.
//!
//! Nothing of NVIDIA's is needed to build: driver and NVRTC are looked for at run time, and what is missing is said by
//! [`DeviceError::Missing`]. Kernels are source, compiled for the device when they are first needed and kept on disk (in the folder
//! that [`CACHE_VARIABLE`] names, or `flashtile` in the user's folder of caches); [`Cuda::prewarm`] does so ahead.
//!
//! A run works on borrowed device memory and a borrowed stream, allocates nothing, waits for nothing, and can be captured in
//! a CUDA graph. A [`Session`] keeps what it needs beside its tensors: the plan's schedule in device memory, and room for partial
//! results. Whoever captures graphs that outlive a step has that by [`Cuda::prepare`]: one [`Prepared`] serves every layer of a model, and
//! [`Prepared::update`] writes the schedule of the next step to the same place, so that a captured graph stays valid.
//!
//! ```no_run
//! use flashtile::cuda::{Cuda, GpuInputs, GpuKv, GpuOutputs, GpuTensor, GpuTensorMut, ScalarType};
//! use flashtile::tensor::dense;
//! use flashtile::{Dims, Dtype, ProblemDesc};
//! let cuda = Cuda::new(0)?;
//! let dims = Dims { batch: 1, q_heads: 32, kv_heads: 8, q_len: 512, kv_len: 512, head_dim: 128, value_dim: 128 };
//! let stream = cuda.context().new_stream()?;
//! # let (q, k, v, out) = (0, 0, 0, 0);
//! // SAFETY: at these device addresses lie dense tensors, which live until the stream has ended its work; nothing else accesses out.
//! let borrow = |at, shape: [usize; 4]| unsafe {
//!     cuda.gpu().borrow(ScalarType::Bf16, at, shape.iter().product())
//! };
//! let (of_q, of_k, of_v, of_out) = (dims.q_shape(), dims.k_shape(), dims.v_shape(), dims.out_shape());
//! let (q, k, v, mut out) = (borrow(q, of_q), borrow(k, of_k), borrow(v, of_v), borrow(out, of_out));
//! let k = GpuKv::elements(GpuTensor::new(k.view(), of_k, dense(of_k))?)?;
//! let v = GpuKv::elements(GpuTensor::new(v.view(), of_v, dense(of_v))?)?;
//! let inputs = GpuInputs::new(GpuTensor::new(q.view(), of_q, dense(of_q))?, k, v);
//! let mut outputs = GpuOutputs::new(GpuTensorMut::new(out.view_mut(), of_out, dense(of_out))?);
//! cuda.session(&stream).run(&ProblemDesc::new(dims, Dtype::BF16), &inputs, &mut outputs)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]

mod backward;
mod cache;
mod device;
mod device_struct;
mod error;
pub mod limits;
mod native;
mod params;
pub mod plan;
mod portable;
mod prepared;
mod prewarm;
mod session;
#[cfg(test)]
mod sm90_tests;
mod sources;
mod timed;
mod timer;
mod tma;
mod wgmma;

pub use backward::PreparedCudaBackward;
pub use cache::{CudaKvCache, CudaStore};
pub use device::Cuda;
pub use error::{CudaError, DeviceError};
pub use flashtile_gpu::SessionError;
pub use flashtile_gpu::array::GpuArray;
pub use flashtile_gpu::cache::StoreError;
pub use flashtile_gpu::tensors::{GpuInputs, GpuKv, GpuMask, GpuOutputs, GpuTables, GpuTensor, GpuTensorMut};
pub use flashtile_kernel::cuda::{CACHE_VARIABLE, Gpu, Memory, NVRTC_VARIABLE, cudarc};
pub use flashtile_kernel::{ScalarType, View, ViewMut};
pub use prepared::Prepared;
pub use session::{CudaEngine, Session, with_session};
pub use timed::{TimedBackwardRun, TimedRun};
pub use timer::Timer;
