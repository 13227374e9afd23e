//! Kernels run on the host, every access checked.
//!
//! [`Simulator`] is a [`Device`]. The threads of a threadgroup are coroutines on one thread of the host; threadgroups run one after
//! another. A seed decides which ready thread runs and which threadgroup comes next: a kernel whose result depends on the order gives
//! different results for different seeds, and the same result for the same seed.
//!
//! A launch ends at its first [`Fault`]:
//!
//! - an index outside a buffer, a shared array or a local array;
//! - a read of memory before anything was written to it: shared arrays start uninitialised, and buffers may;
//! - a race: two threads use an element, at least one of them writes, and nothing orders them. [`barrier`] orders the
//!   threads of a threadgroup, [`simd_barrier`] the lanes of a SIMD group, nothing orders threadgroups; atomics race with other uses
//!   only. No order of threads hides a race: every use is compared with every other, whichever came first;
//! - divergence: a barrier that not all threads of the threadgroup reach, or a SIMD operation that not all lanes of the SIMD group reach,
//!   in the same iterations of loops and by the same calls of device functions;
//! - a vector access to an address that is not a multiple of its size; the base of every memory is aligned;
//! - arithmetic without a result, in every build profile, other panics, and loops without end.
//!
//! A stack overflow of native code is not caught: it ends the process, as in Rust.
//!
//! [`barrier`]: crate::intrinsics::barrier
//! [`simd_barrier`]: crate::intrinsics::simd_barrier

mod fault;
mod machine;
mod memory;
mod panics;
mod report;
mod schedule;
mod shadow;
#[cfg(test)]
mod tests;

pub use fault::{Fault, FaultKind};
pub(crate) use machine::{
    barrier, broadcast, count_exponential, count_iteration, exchange, fault_arithmetic, gather,
    load_matrices, loop_iter, multiply_accumulate, outside_array, place, scope_enter, scope_leave,
    simd_barrier, simd_converge, store_matrices, uncounted,
};
pub(crate) use memory::shared;
pub use memory::{Memory, MemoryError};
pub use report::{BufferReport, Report};
pub use schedule::Simulator;

pub use crate::arguments::Arguments;

#[cfg(doc)]
use crate::device::Device;
