//! The command line as users see it: files, lines, exit statuses.

#![allow(clippy::unwrap_used, clippy::panic)]

mod answers;
mod commands;
mod examples;
mod exports;
mod files;
mod gradients;
mod kernels;
mod kv;
mod numpy;
mod pictures;
mod refusals;
mod runs;
#[cfg(feature = "simulator")]
mod simulator;
#[cfg(unix)]
mod writes;
