//! Attention in the kernel language: kernels for Apple's GPUs and for NVIDIA GPUs that `flashtile-cuda` has no kernels
//! for, and which instances of them a problem launches.
//!
//! | module | |
//! |---|---|
//! | [`kernels`] | device code |
//! | [`codecs`], [`encoding`] | codecs as kernels know them; the host side of the encoder |
//! | [`shape`] | which problems the kernels take, and how work is cut, on any device |
//! | [`facts`], [`tile`], [`plan`] | what a device can hold, how a problem's work is cut for it, and what memory runs need |
//! | [`machines`] | facts of Apple's GPUs |
//! | [`portable_kernel`] | names of kernels in plans |
//! | [`launches`] | the instances, parameters and constants of a problem |
//! | [`session`] | attention on any device: checked inputs, plans and block tables that are kept |
//! | [`engine`], [`run`] | how a device computes: the portable kernels' engine, and their launches |
//! | [`backward`] | the backward pass: plans, launches, tensors |
//! | [`tensors`] | tensors in the memory of a device, whoever has allocated it |
//! | [`mod@array`], [`upload`], [`uploaded_run`] | copies of host tensors in the memory of a device, and their way back |
//! | [`cache`] | KV caches in the memory of any device |
//! | [`registry`], [`variant`] | the kernels as a list, their instances, and instances by what they are for |
//!
//! A backend gives a `flashtile_kernel::Device`, and an [`engine::Engine`] where it has kernels of its own.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod array;
pub mod backward;
pub mod cache;
pub mod codecs;
pub mod encoding;
pub mod engine;
mod error;
pub mod facts;
pub mod kernels;
pub mod launches;
pub mod machines;
pub mod plan;
pub mod portable_kernel;
pub mod registry;
pub mod run;
pub mod session;
pub mod shape;
#[cfg(feature = "simulator")]
pub mod simulator;
pub mod tensors;
pub mod tile;
pub mod upload;
pub mod uploaded_backward;
pub mod uploaded_run;
pub mod variant;

pub use error::SessionError;
