//! Kernels run on the host, every access checked.
//!
//! [`Simulator`] is a [`Device`]. The threads of a group are coroutines on one thread of the host; groups run one after
//! another. Which thread goes on where several can, and which group comes next, is drawn from a seed: a kernel whose
//! result depends on it gives different ones for different seeds, and the same one for the same seed.
//!
//! A launch ends at its first [`Fault`]:
//!
//! - an index outside a buffer, a shared array or a local array;
//! - a read of memory nothing was written to: shared arrays start uninitialised, buffers where they were made so;
//! - a race: two threads use an element, at least one of them writes, and nothing orders them. [`barrier`] orders the
//!   threads of a group, [`simd_barrier`] the lanes of a SIMD group, nothing orders groups; atomics race with other uses
//!   only. No order of threads hides a race: every use is compared with every other, whichever came first;
//! - a barrier not all threads of the group come to, a SIMD operation not all lanes of the SIMD group come to, or not in the
//!   same iterations of loops and by the same calls of device functions;
//! - a vector access to an address that is no multiple of its size, the base of every memory being aligned;
//! - arithmetic without a result, in every build profile, other panics, and loops without end.
//!
//! Not seen: a stack overflow of native code ends the process, as it does in Rust.
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
    barrier, broadcast, count_iteration, exchange, fault_arithmetic, gather, loop_iter, multiply_accumulate,
    outside_array, place, scope_enter, scope_leave, simd_barrier, simd_converge,
};
pub(crate) use memory::shared;
pub use memory::{Memory, MemoryError};
pub use report::Report;
pub use schedule::Simulator;

pub use crate::arguments::Arguments;

#[cfg(doc)]
use crate::device::Device;
