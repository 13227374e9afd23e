//! The CPU backend: [`cpu::Cpu`] plans a problem and runs the plan on the threads of a rayon pool.
//!
//! | module | |
//! |---|---|
//! | [`cpu`] | the machine: instruction set, threads, runs |
//! | [`plan`] | tiles, tasks, splits and workspace of a problem, as a pure function of facts about a machine |
//! | [`merge`] | merges attention states over disjoint keys |
//! | [`limits`] | peak compute rate and read bandwidth of the machine, measured |
//! | [`workspace`] | scratch memory of a run |

#![cfg_attr(docsrs, feature(doc_cfg))]

mod backward;
pub mod cpu;
mod forward;
mod isa;
mod kernels;
pub mod limits;
pub mod merge;
pub mod plan;
mod pool;
mod simd;
#[cfg(test)]
mod tests;
pub mod workspace;
