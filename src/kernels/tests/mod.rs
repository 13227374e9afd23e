//! Kernels in the simulator, against what the CPU computes; those of attention are run in `tests/kernels`. All of them as printed.

mod classify;
#[cfg(feature = "cuda")]
mod copy;
#[cfg(feature = "cuda")]
mod cuda;
mod encode;
mod metal;
mod planted;
mod rotation;
