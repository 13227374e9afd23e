//! The imports of a module of kernels: attributes, types, intrinsics.

pub use crate::fragment::Fragment;
pub use crate::intrinsics::*;
pub use crate::matrix::*;
pub use crate::memory::{Buffer, Shared};
pub use crate::scalar::{Element, Number, Scalar};
pub use flashtile_kernel_macros::{constant, device, kernel, params};
pub use half::{bf16, f16};
