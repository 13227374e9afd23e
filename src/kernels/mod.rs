//! Kernels of attention in the kernel language, for Apple's GPUs and for those of NVIDIA that the kernels of `cuda` are not for, and the
//! way they are launched.
//!
//! | file | |
//! |---|---|
//! | `formats`, `rows` | how rows of keys and values are stored, and what a lane makes of its part of one |
//! | `decode` | partial results of attention over any format |
//! | `encode` | rows are stored in pages, as codes or as elements |
//! | `merge` | any number of partial results become one |
//! | `rotation` | the transform of the codecs |
//! | `classify` | classes of blocks of a mask |
//! | `registry` | the kernels as a list, and their instances |
//! | `variant` | instances by what they are for |
//! | `bench`, `copy` | what kernels are measured on, and what they are compared with |
//! | `plan` | which instances a problem runs, with which parameters |

#[cfg(all(feature = "testkit", any(feature = "cuda", feature = "simulator")))]
pub mod bench;
#[doc(hidden)]
pub mod classify;
#[cfg(all(feature = "testkit", feature = "cuda"))]
mod copy;
#[doc(hidden)]
pub mod decode;
pub(crate) mod encode;
mod formats;
#[doc(hidden)]
pub mod merge;
#[doc(hidden)]
pub mod plan;
mod registry;
#[doc(hidden)]
pub mod rotation;
mod rows;
mod variant;

pub use registry::{HEAD_DIMS, KERNELS, instances};
pub use variant::{NoInstance, Variant, VariantOption};

#[cfg(test)]
mod tests;
