//! The Metal backend: attention on Apple's GPUs, by the portable kernels.
//!
//! Plans are pure and can be made on every system. The rest needs one of Apple's: a `Metal` device, `Session`s that run attention
//! over tensors in its memory, and KV caches (`MetalKvCache`). Kernels are compiled when they are first needed, and kept on disk.
//!
//! A tensor is a `Memory` with a shape and strides, and a memory is a range of an `MTLBuffer`: an inference engine lends its own
//! buffers (`Gpu::borrow`), and encodes attention and operations of caches into its own command buffers (`Encode::encode`) or encoders
//! (`Encode::encode_in`). A library that keeps Metal's encoder to itself passes launches on by a `ForeignEncoder`
//! (`Encode::encode_in_foreign`).
//!
//! ```no_run
//! # #[cfg(target_vendor = "apple")] {
//! use flashtile::metal::{GpuInputs, GpuKv, GpuOutputs, GpuTensor, GpuTensorMut, Metal, ScalarType, dense};
//! use flashtile::{Dims, Dtype, ProblemDesc, Visibility};
//! let metal = Metal::new()?;
//! let dims = Dims { batch: 1, q_heads: 32, kv_heads: 8, q_len: 512, kv_len: 512, head_dim: 128, value_dim: 128 };
//! let elements = |shape: [usize; 4]| metal.zeros(ScalarType::F16, shape);
//! let (q, k, v) = (elements(dims.q_shape())?, elements(dims.k_shape())?, elements(dims.v_shape())?);
//! let mut out = elements(dims.out_shape())?;
//! let [of_q, of_k, of_v] = [dims.q_shape(), dims.k_shape(), dims.v_shape()];
//! let (k, v) = (GpuTensor::new(k.view(), of_k, dense(of_k))?, GpuTensor::new(v.view(), of_v, dense(of_v))?);
//! let q = GpuTensor::new(q.view(), of_q, dense(of_q))?;
//! let inputs = GpuInputs::new(q, GpuKv::elements(k)?, GpuKv::elements(v)?);
//! let mut desc = ProblemDesc::new(dims, Dtype::F16);
//! desc.visibility = Visibility::causal();
//! let mut session = metal.session();
//! let of_out = dims.out_shape();
//! let mut outputs = GpuOutputs::new(GpuTensorMut::new(out.view_mut(), of_out, dense(of_out))?);
//! session.run(&desc, &inputs, &mut outputs)?;
//! metal.gpu().synchronize()?;
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]

mod facts;
mod plan;
mod planner;

#[cfg(any(target_vendor = "apple", metal_standin))]
mod check;
#[cfg(any(target_vendor = "apple", metal_standin))]
mod device;
#[cfg(any(target_vendor = "apple", metal_standin))]
mod error;
#[cfg(any(target_vendor = "apple", metal_standin))]
pub mod limits;
#[cfg(any(target_vendor = "apple", metal_standin))]
mod session;
#[cfg(any(target_vendor = "apple", metal_standin))]
mod timed;

pub use facts::{ALL_APPLE, MetalFacts, facts_of};
pub use flashtile_gpu::facts::GpuFacts;
pub use flashtile_gpu::portable_kernel::PortableKernel;
pub use flashtile_gpu::tile::PortableTile;
pub use plan::MetalPlan;

#[cfg(any(target_vendor = "apple", metal_standin))]
pub use {
    device::Metal,
    error::MetalError,
    flashtile_core::tensor::dense,
    flashtile_gpu::SessionError,
    flashtile_gpu::cache::{GpuRows, GpuRowsMut, StoreError},
    flashtile_gpu::tensors::{GpuInputs, GpuKv, GpuMask, GpuOutputs, GpuTables, GpuTensor, GpuTensorMut},
    flashtile_kernel::metal::{
        Buffer, CACHE_VARIABLE, CommandBuffer, CommandBufferError, CommandQueue, ComputeEncoder,
        DispatchType, Error as DeviceError, ForeignEncoder, Gpu, HostPages, Memory, MetalDevice, SharedEvent,
        Timing, objc2, objc2_metal,
    },
    flashtile_kernel::{ScalarType, View, ViewMut},
    session::{Encode, MetalKvCache, MetalStore, Session},
    timed::{TimedBackwardRun, TimedRun},
};
