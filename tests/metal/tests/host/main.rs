//! flashtile's Metal host on the software device.
#![cfg(metal_standin)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod conformance;
mod support;
