//! Programs that the stand-in accepts, with answers, and programs that it refuses, with reasons.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod accepted;
mod bound;
mod reflected;
mod refused;
mod support;
