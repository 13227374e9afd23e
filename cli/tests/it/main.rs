//! The command line as its users see it: files in, files out, lines, exit statuses.

#![allow(clippy::unwrap_used, clippy::panic)]

mod commands;
mod examples;
mod files;
mod kernels;
mod kv;
mod refusals;
mod runs;
#[cfg(feature = "simulator")]
mod simulator;
#[cfg(unix)]
mod writes;
