//! Kernels in the simulator against the CPU, and all kernels as printed. `tests/kernels` runs the kernels of attention.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test fails by panicking and reports by printing"
)]

mod backward;
mod cache;
mod copy;
mod cuda;
mod encode;
mod mask_tiles;
mod metal;
mod planted;
mod recorder;
mod rotation;
mod session;
