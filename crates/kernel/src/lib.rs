//! GPU kernels as Rust functions.
//!
//! A `#[kernel]` is an ordinary function: rustc checks its types, the [simulator] runs it on the host and
//! checks every access, and from the same tokens it is printed as C++ for Metal and for CUDA. Code that
//! cannot be printed does not compile.
//!
//! ```
//! use flashtile_kernel::prelude::*;
//! use flashtile_kernel::simulator::{Memory, Simulator};
//! use flashtile_kernel::Target;
//!
//! /// Doubles the first n elements of x.
//! #[kernel(
//!     threads = 64,
//!     requires(x.len() >= n as usize && out.len() >= n as usize, "x and out hold n elements"),
//!     requires(groups[0] * threads >= n, "every element has a thread"),
//! )]
//! pub fn double<T: Element>(x: &Buffer<T>, out: &mut Buffer<T>, n: u32) {
//!     let i = thread_position();
//!     if i < n {
//!         out[i] = T::from_f32(2.0 * x[i].to_f32());
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let x = Memory::from_slice(&[1.0f32, 2.0, 3.0]);
//! let mut out = Memory::uninit::<f32>(3);
//! double::Call { x: x.view(), out: out.view_mut(), n: 3, groups: [1, 1, 1] }.launch::<f32>(&Simulator::new())?;
//! assert_eq!(out.to_vec::<f32>()?, [2.0, 4.0, 6.0]);
//!
//! assert!(double::instance::<f16>().source(Target::Metal).contains("out[i] = ft_from_f32<T>(2.0f * ft_to_f32(x[i]));"));
//! # Ok(())
//! # }
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`prelude`] | the imports of a module of kernels: attributes, types, intrinsics |
//! | [`intrinsics`] | the functions Rust does not have, and how exact they are on each target |
//! | [`scalar`], [`memory`] | types, and what may be done with them |
//! | [`source`] | kernels as data, and whole programs for each target |
//! | [`device`] | launches, and the contract they are checked against |
//! | [`simulator`] | launches on the host (feature `simulator`, which is on by default) |
//! | [`ops`] | the operators of native functions, which the attributes write |
//!
//! [The guide](guide) leads from a first kernel to attention and is the reference of the language.

#![cfg_attr(docsrs, feature(doc_cfg))]

// The attributes name the crate so, also in its own kernels.
#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
extern crate self as flashtile_kernel;

#[cfg(feature = "simulator")]
mod arguments;
#[cfg(not(feature = "simulator"))]
#[path = "no_arguments.rs"]
mod arguments;
mod arrays;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
#[cfg(any(feature = "cuda", all(feature = "metal", any(target_vendor = "apple", metal_standin))))]
mod disk;
mod facts;
mod fragment;
mod generic;
pub mod intrinsics;
mod lanes;
mod literal;
pub mod matrix;
pub mod memory;
#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
#[cfg_attr(docsrs, doc(cfg(feature = "metal")))]
pub mod metal;
pub mod ops;
pub mod prelude;
mod print;
mod region;
pub mod scalar;
#[cfg(feature = "simulator")]
pub mod simulator;
#[cfg(not(feature = "simulator"))]
#[doc(hidden)]
#[path = "no_simulator.rs"]
pub mod simulator;
pub mod source;
#[cfg(any(feature = "cuda", all(feature = "metal", any(target_vendor = "apple", metal_standin))))]
mod timing;

pub use device::{
    Argument, Constant, ContractError, ContractErrorKind, Device, DeviceMemory, Facts, HostAccess, Launch,
    LaunchError, Limits, Span, View, ViewMut,
};
pub use fragment::Fragment;
pub use half::{bf16, f16};
pub use memory::{Buffer, Shared};
pub use scalar::{Element, Number, ParamsField, Plain, Scalar, ScalarType, Value, Words};
#[cfg(feature = "simulator")]
pub use simulator::Simulator;
pub use source::{Bench, Generic, Instance, ItemSource, Kernel, Target};

// Its examples are fragments of the tests in `tests/guide`, not programs.
#[cfg(all(doc, not(doctest)))]
#[doc = include_str!("../kernel-language.md")]
pub mod guide {}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

/// The native code of an instance, given its own: generic code that is not named here is not compiled.
#[doc(hidden)]
#[cfg(feature = "simulator")]
#[macro_export]
macro_rules! native {
    ($own:expr) => {
        $own
    };
}

/// The native code of an instance where nothing runs it.
#[doc(hidden)]
#[cfg(not(feature = "simulator"))]
#[macro_export]
macro_rules! native {
    ($own:expr) => {
        $crate::simulator::no_native
    };
}

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the kernel language has 64-bit sizes: hosts with other ones cannot run it");
