//! The guide of the kernel language: every snippet of it compiled and simulated; and Rust as odd as it may be, equal in plain
//! Rust, in the simulator and in printed source.

#![allow(missing_docs)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test fails by panicking and reports by printing"
)]
#![recursion_limit = "4096"]

mod anywhere;
pub mod decode;
mod document;
pub mod first;
pub mod language;
pub mod literals;
pub mod matrices;
pub mod odd;
pub mod sums;
