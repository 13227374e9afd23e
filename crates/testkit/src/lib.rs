//! Shared by the test suite and `flashtile check`: seeded data, the named case catalogue,
//! tolerances and poisoned memory. Unstable: no semver promise.
//!
//! ```
//! use flashtile_testkit::{CpuRunner, find, run_case};
//! let case = find("gqa_4_causal").ok_or("no such case")?;
//! let outcome = run_case(&case, &CpuRunner::new(flashtile_cpu::cpu::Cpu::new()))?;
//! println!("{}: {} nrmse {:e}", case.name, outcome.plan, outcome.out.nrmse);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]

mod backward;
#[cfg(any(feature = "cuda", all(feature = "metal", any(target_vendor = "apple", metal_standin))))]
mod banded;
#[cfg(feature = "gpu")]
mod cache_twins;
mod cases;
mod catalogue;
#[cfg(feature = "cuda")]
mod cuda;
mod edges;
mod float_env;
#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
mod metal;
mod mlx;
#[cfg(any(feature = "simulator", all(feature = "metal", any(target_vendor = "apple", metal_standin))))]
mod padding;
mod poison;
mod random;
mod rng;
mod run;
mod runners;
mod sets;
#[cfg(feature = "simulator")]
mod simulator;

pub use backward::{BackwardCase, GradientAnswer};
#[cfg(feature = "gpu")]
pub use cache_twins::CacheTwins;
pub use cases::{Case, CaseData, Keep, Mask, MaskFill, Paging, Tree};
pub use catalogue::{catalogue, find, quantized};
#[cfg(feature = "cuda")]
pub use cuda::{CudaRunner, DevicePlacement, GuardedRun};
pub use float_env::HostileFloats;
#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
pub use metal::{MetalPath, MetalRunner};
pub use mlx::{MlxRow, MlxRows, MlxStep, mlx_decode, mlx_encode};
pub use poison::{Guarded, GuardedList, GuardedMask, Layout, Placement};
pub use random::{random_case, seeded_case};
pub use rng::Rng;
pub use run::{
    Answer, CaseResult, CpuRunner, Failure, Outcome, Prepared, RunReport, Runner, RunnerError, conformance,
    run_case,
};
pub use runners::{RunnerOptions, runners};
pub use sets::AttentionSet;
#[cfg(feature = "simulator")]
pub use simulator::SimulatorRunner;
