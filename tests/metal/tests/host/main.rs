//! flashtile's Metal host on the software device.
#![cfg(metal_standin)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]
#![allow(unsafe_code, reason = "buffers are lent")]

mod caches;
mod conformance;
#[path = "../../../it/decode_loop.rs"]
mod decode_loop;
mod defects;
#[path = "../../../it/external.rs"]
mod external;
mod faults;
mod front_door;
mod gradients;
mod kernels_on_disk;
mod memory;
mod order;
mod support;
