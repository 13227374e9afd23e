//! The integration tests in one binary. `docs/testing.md` describes their organisation.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test fails by panicking and reports by printing"
)]

mod backend;
mod backward;
mod cache;
mod cached;
mod conformance;
mod cuda;
mod decode_loop;
mod defects;
mod docs;
mod edges;
mod equalized;
mod external;
mod external_gradients;
mod front_door;
mod hostile;
mod hybrid;
mod invariance;
mod kept;
mod key_columns;
mod merge;
mod mlx;
mod plans;
mod portable;
mod properties;
mod quantized;
mod recording;
mod refusals;
mod serial;
mod steps;
mod support;
