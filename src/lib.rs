#![doc = include_str!("../README.md")]

mod bind;
pub mod cache;
pub mod codec;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dtype;
#[cfg(feature = "kernels")]
#[cfg_attr(not(test), allow(dead_code))]
pub mod kernels;
mod memory;
mod merge;
pub mod plan;
pub mod problem;
pub mod reference;
pub mod tensor;
#[cfg(feature = "testkit")]
pub mod testkit;

pub use bind::{Inputs, KvView, Outputs, RunError};
pub use cache::{BlockTables, CacheDesc, CacheError, CacheLayout, Codec, KvCache, SeqId};
pub use cpu::{Cpu, Workspace, WorkspaceError};
pub use dtype::{Dtype, Element};
pub use merge::{MergeError, Part, merge};
pub use plan::{CpuPlan, CudaPlan, KernelChoice, PlanOptions, Unsupported};
pub use problem::{
    Dims, MaskKind, Problem, ProblemDesc, ProblemError, QOffset, Sequence, Sequences, SharedPrefix,
    Visibility,
};
pub use tensor::{MaskView, TensorView, TensorViewMut, ViewError};
