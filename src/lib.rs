#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(doctest)]
#[doc = include_str!("../docs/serving.md")]
mod serving {}

mod attention;
mod backend;
mod backend_name;
mod backends;
mod choice;
mod error;
mod presence;
mod runner;
mod step;

pub use attention::{Attention, SequencesRef, attention, attention_backward, attention_probs, attention_vec};
pub use backend::{Backend, HostSession, Limit, Rate, TimedBackward, TimedRun, Unit};
pub use backend_name::BackendName;
pub use choice::Choice;
pub use error::{BackendNameError, Error, Result};
pub use runner::Runner;
pub use step::{CurrentRunner, KvCacheExt, Step, StepRunner, StepStore, StepTensors};

pub use flashtile_core::block_tables::BlockTables;
pub use flashtile_core::cache::{
    CacheDesc, CacheError, CacheLayout, CacheShape, HybridCache, KvCache, SeqId,
};
pub use flashtile_core::codec::{Codec, KvView, key_factors, key_mean};
pub use flashtile_core::dtype::{Dtype, Element, MaskKind};
pub use flashtile_core::gradients::{BackwardInputs, Gradients};
/// The crate of the scalar types `f16` and `bf16`, in the version whose types are [`Element`]s.
///
/// ```
/// use flashtile::{Dtype, Element, half::bf16};
/// assert_eq!(bf16::DTYPE, Dtype::BF16);
/// ```
pub use flashtile_core::half;
pub use flashtile_core::inputs::{Inputs, KeptInputs, KeptPages, Outputs, RunError, check_tables};
pub use flashtile_core::owned::OwnedTensor;
pub use flashtile_core::plan::{AnyBackwardPlan, AnyPlan, KernelChoice, PlanOptions, Unsupported};
pub use flashtile_core::problem::{
    Dims, HeadShape, KvStorage, Problem, ProblemDesc, ProblemError, QOffset, SeqLens, Sequence, Sequences,
    SharedPrefix, Visibility,
};
pub use flashtile_core::tensor::{MaskShape, MaskView, TensorView, TensorViewMut, ViewError};
pub use flashtile_cpu::cpu::Cpu;
pub use flashtile_cpu::merge::{AttentionState, MergeError, merge};
pub use flashtile_cpu::plan::{CpuBackwardPlan, CpuPlan};
pub use flashtile_cpu::workspace::{Workspace, WorkspaceError};
#[cfg(feature = "cuda")]
pub use flashtile_cuda::plan::CudaPlan;
#[cfg(feature = "metal")]
pub use flashtile_metal::MetalPlan;

pub mod problem {
    //! Descriptions of problems: dimensions, dtype, visibility, bias, sequences, and the limits of each.

    pub use flashtile_core::limits::{
        MAX_ALIBI_SLOPE, MAX_HEAD_DIM, MAX_LEN, MAX_SCALE, MAX_SEQUENCES, MAX_SOFTCAP,
    };
    pub use flashtile_core::problem::{
        Dims, HeadShape, KeptError, KeptTokens, KeyColumnsError, KeyPart, KvStorage, Positional, Problem,
        ProblemDesc, ProblemError, QOffset, SeqLens, Sequence, Sequences, SharedPrefix, Side, Visibility,
    };
}

pub mod tensor {
    //! Strided views of borrowed memory, checked when they are made.

    pub use flashtile_core::dtype::{Dtype, Element, MaskKind};
    pub use flashtile_core::owned::OwnedTensor;
    pub use flashtile_core::tensor::{
        MaskShape, MaskView, TensorView, TensorViewMut, ViewError, check_disjoint, dense, reach,
    };
}

pub mod cache {
    //! KV caches: keys and values of sequences that grow token by token.

    pub use flashtile_core::block_tables::{BlockTables, CsrTables, NO_PAGE, TableError};
    pub use flashtile_core::cache::{
        CacheDesc, CacheError, CacheLayout, CacheMemory, CacheShape, HostStore, HybridCache, KEPT_STEP,
        KeepError, KeptTables, KeyTransformError, KvCache, PageStore, SeqId, Snapshot,
    };
    pub use flashtile_core::codec::Codec;
}

#[doc(inline)]
pub use flashtile_core::gradients;
#[doc(hidden)]
pub use flashtile_core::human;
#[doc(inline)]
pub use flashtile_core::quality;
#[doc(inline)]
pub use flashtile_core::reference;

pub mod codec {
    //! How caches store rows of keys and values.

    pub use flashtile_core::codec::{
        CodePages, Codec, CodesView, EncodeError, KEY_FACTOR_RANGE, KeyTransform, KvView, MAX_NORM,
        PagesError, RowKind, Side, key_factors, key_mean,
    };
}

pub mod plan {
    //! How to compute a problem: pure functions of the problem and of facts about a machine.
    //!
    //! Nothing here touches memory or a device, so that plans can be made, printed and tested for absent machines.
    //! Support, workspace sizes, printed plans and launches all derive from the same plan.

    pub use crate::backends::known_machines;
    pub use crate::choice::{Chosen, Machine, choose};
    pub use crate::presence::Presence;
    pub use flashtile_core::isa::Isa;
    pub use flashtile_core::plan::{
        AnyBackwardPlan, AnyFacts, AnyPlan, BackwardPlan, Explanation, Facts, Field, Fields, KernelChoice,
        Plan, PlanOptions, Rates, TileSize, Unsupported,
    };
    pub use flashtile_cpu::plan::{CpuFacts, CpuPlan, PlannedPrefix, isa_for};
    #[cfg(feature = "cuda")]
    pub use flashtile_cuda::plan::{
        CudaFacts, CudaKernel, CudaPlan, CudaTile, MIN_CAPABILITY, NATIVE_CAPABILITY, NativeTile,
        PortableTile, Sm80Tile, Sm90Tile,
    };
    #[cfg(feature = "metal")]
    pub use flashtile_gpu::facts::GpuFacts;
    #[cfg(feature = "metal")]
    pub use flashtile_metal::{MetalFacts, MetalPlan};

    pub mod machines {
        //! Facts of machines as data, to plan for machines that are absent.

        pub use flashtile_cpu::plan::machines::{
            ALL, AMX_64, AVX2_8, AVX512_2, AVX512_64, AVX512BF16_8, PORTABLE_4,
        };
        #[cfg(feature = "cuda")]
        pub use flashtile_cuda::plan::machines::{A100, ALL_CUDA, GH200, H100, H200, RTX_4090, T4};
        #[cfg(feature = "metal")]
        pub use flashtile_metal::ALL_APPLE;
    }
}

pub mod cpu {
    //! The CPU backend, and the compute and bandwidth limits of the machine.

    pub use flashtile_cpu::cpu::Cpu;
    pub use flashtile_cpu::limits;
    pub use flashtile_cpu::workspace::{Workspace, WorkspaceError};
}

#[cfg(feature = "cuda")]
#[doc(inline)]
pub use flashtile_cuda as cuda;

#[cfg(feature = "metal")]
#[doc(inline)]
pub use flashtile_metal as metal;

#[cfg(feature = "gpu")]
#[doc(inline)]
pub use flashtile_kernel as kernel;

#[cfg(feature = "simulator")]
pub mod simulator {
    //! Attention by the portable GPU kernels on their simulator, which checks every access: a session with the verbs of
    //! the one on CUDA.

    pub use flashtile_gpu::SessionError;
    pub use flashtile_gpu::array::GpuArray;
    pub use flashtile_gpu::cache::{GpuStore, StoreError};
    pub use flashtile_gpu::engine::PortableEngine;
    pub use flashtile_gpu::session::Session;
    pub use flashtile_gpu::simulator::{CODECS, DECODE_TILE, DIMS, PREFILL_TILE, find, no_native, session};
    pub use flashtile_gpu::tensors::{
        GpuInputs, GpuKv, GpuMask, GpuOutputs, GpuTables, GpuTensor, GpuTensorMut,
    };
    pub use flashtile_gpu::upload::{Results, Uploaded};
    pub use flashtile_kernel::simulator::{Fault, Memory, Simulator};
}

#[cfg(feature = "gpu")]
pub mod gpu {
    //! Sessions and tensors of every GPU backend, for code that serves more than one: each takes the [`Engine`] of its device.

    pub use crate::backends::gpu::GpuAttention;
    pub use flashtile_gpu::SessionError;
    pub use flashtile_gpu::array::GpuArray;
    pub use flashtile_gpu::backward::tensors::{GpuBackwardInputs, GpuGradients};
    pub use flashtile_gpu::cache::{GpuStore, StoreError};
    pub use flashtile_gpu::codecs::scalar_type;
    pub use flashtile_gpu::engine::{Engine, MemoryOf, PortableEngine};
    pub use flashtile_gpu::session::Session;
    pub use flashtile_gpu::tensors::{
        GpuInputs, GpuKv, GpuMask, GpuOutputs, GpuTables, GpuTensor, GpuTensorMut, dtype_of,
    };
    pub use flashtile_kernel::HostAccess;
}

#[cfg(feature = "gpu")]
pub mod kernels {
    //! The portable GPU kernels as data: listed, specialised, and printed as Metal and CUDA.

    pub use flashtile_gpu::registry::{KERNELS, instance_of, instances, metal_instance_of, metal_instances};
    pub use flashtile_gpu::variant::{HEAD_DIMS, Variant, VariantError, VariantOption};
}
