//! The kernels on the simulator, against the oracle.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod attend;
mod counts;
mod dims;
mod lengths;
mod natives;
mod nonfinite;
mod splits;
mod support;
mod tiles;
