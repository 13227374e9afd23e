//! The kernel language, from the attributes to the simulator, to printed source and devices.

#![allow(missing_docs)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test fails by panicking and reports by printing"
)]

#[cfg(feature = "cuda")]
pub mod agree;
pub mod convergence;
#[cfg(feature = "cuda")]
mod cuda;
pub mod example;
mod gcc;
#[cfg(feature = "cuda")]
mod hosts;
pub mod intrinsics;
pub mod language;
mod natives;
mod nvrtc;
mod simulator;
mod ui;
