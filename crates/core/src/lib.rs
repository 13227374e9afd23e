//! The part of flashtile that all backends share: problems, tensor views, KV caches, codecs, and the f64
//! reference.
//!
//! Backends ([`flashtile-cpu`](https://docs.rs/flashtile-cpu) and others) depend on this crate. It depends on
//! none of them, starts no threads and touches no device. Applications use the crate `flashtile`, which
//! re-exports the types that they need; items that are public only here serve backends and may change in any
//! release.
//!
//! | module | |
//! |---|---|
//! | [`problem`] | the description of attention and its validation |
//! | [`limits`], [`dtype`] | the largest problem; element types |
//! | [`memory`] | zeroed memory in huge pages, for caches and workspaces |
//! | [`tensor`], [`owned`] | strided views; tensors that own their memory |
//! | [`inputs`] | tensors of a run, checked against the problem |
//! | [`gradients`] | tensors of a backward run, likewise |
//! | [`block_tables`], [`cache`] | which page holds which token; caches |
//! | [`codec`] | how rows of keys and values are stored |
//! | [`isa`], [`plan`] | instruction sets; plans of any backend, with the options and refusals of planners |
//! | [`scoring`] | the score formula of host code |
//! | [`mod@reference`] | attention and its gradients by definition, in f64 |
//! | [`human`] | numbers as people read them |
//! | [`quality`] | how far an answer is from the reference, and the errors of codecs |

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod block_tables;
pub mod cache;
pub mod codec;
pub mod dtype;
pub mod gradients;
pub mod human;
pub mod inputs;
pub mod isa;
pub mod limits;
pub mod memory;
#[cfg(feature = "serde")]
mod named;
pub mod owned;
pub mod plan;
pub mod problem;
pub mod quality;
pub mod reference;
pub mod scoring;
pub mod tensor;

pub use half;
