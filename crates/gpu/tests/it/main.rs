//! Kernels in the simulator, against what the CPU computes; those of attention are run in `tests/kernels`. All of them as printed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test fails by panicking and reports by printing"
)]

mod copy;
mod cuda;
mod encode;
mod mask_tiles;
mod metal;
mod planted;
mod rotation;
