//! Facts of a CUDA device that the planner needs.

use super::kernel::CudaKernel;

/// The facts that the planner needs about a CUDA device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct CudaFacts {
    /// Compute capability: 8.0 is `(8, 0)`.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: usize,
    /// Threads that a multiprocessor holds at a time.
    pub threads_per_multiprocessor: usize,
    /// Bytes of shared memory that one block of threads may use.
    pub shared_per_block: usize,
    /// Bytes of shared memory of a multiprocessor.
    pub shared_per_multiprocessor: usize,
    /// 32-bit registers of a multiprocessor.
    pub registers_per_multiprocessor: usize,
    /// Second-level cache, in bytes.
    pub l2: usize,
    /// True if kernels may use the instructions of compute capability 9.0: TMA and products of warpgroups (`wgmma`). The compiler
    /// must know them: NVRTC 12.0.
    pub wgmma: bool,
}

/// The least compute capability for which there are kernels: the portable ones multiply f16 on its matrix unit, and NVRTC 13 compiles
/// for nothing older.
pub const MIN_CAPABILITY: (u32, u32) = (7, 5);

/// The least compute capability of the CUDA C++ kernels: asynchronous copies, products of bf16.
pub const NATIVE_CAPABILITY: (u32, u32) = (8, 0);

/// The compute capability of `wgmma`, which no other has.
pub(crate) const WGMMA_CAPABILITY: (u32, u32) = (9, 0);

/// The first version of NVRTC that knows `wgmma` and TMA.
pub(crate) const WGMMA_COMPILER: (i32, i32) = (12, 0);

/// Bytes of shared memory that the driver keeps of every block of threads.
pub(super) const RESERVED_SHARED: usize = 1024;

impl CudaFacts {
    /// Returns true if the device runs a kernel.
    pub(crate) fn runs(&self, kernel: &CudaKernel) -> bool {
        let has_native = self.capability >= NATIVE_CAPABILITY;
        let has_instructions = if kernel.uses_wgmma { self.wgmma } else { kernel.is_portable || has_native };
        has_instructions && kernel.shared_bytes <= self.shared_per_block
    }

    /// Blocks of threads, each with `shared` bytes of shared memory and `registers` registers, that a multiprocessor holds at a time.
    pub(super) const fn resident(&self, shared: usize, registers: usize) -> usize {
        let by_shared = self.shared_per_multiprocessor / (shared + RESERVED_SHARED);
        let by_registers = self.registers_per_multiprocessor / registers;
        if by_shared < by_registers { by_shared } else { by_registers }
    }
}
