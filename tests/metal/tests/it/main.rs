//! The software Metal device, used as a host uses Metal: by objc2-metal.
#![cfg(metal_standin)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]
#![allow(
    unsafe_code,
    clippy::undocumented_unsafe_blocks,
    reason = "calls of Metal with what the tests have just made"
)]

mod archives;
mod basics;
mod faults;
mod host;
mod libraries;
mod order;
mod queues;
mod resources;
mod rules;
mod runtime;
mod tools;
