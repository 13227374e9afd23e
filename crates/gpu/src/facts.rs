//! Facts of a device that the planner needs.

/// The facts that the planner needs about a GPU of any vendor.
///
/// Shared memory is threadgroup memory in Metal's words. Registers that a vendor does not publish are
/// estimates: they decide how many threadgroups a launch has, not whether the launch is possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuFacts {
    /// Multiprocessors of NVIDIA, GPU cores of Apple.
    pub cores: usize,
    /// SIMD groups that a core holds at a time.
    pub simds_per_core: usize,
    /// Threads that a threadgroup may have: the device's limit, or a pipeline's own where that is lower.
    pub threads_per_group: usize,
    /// Bytes of shared memory that one threadgroup may use.
    pub shared_per_group: usize,
    /// Bytes of shared memory of a core.
    pub shared_per_core: usize,
    /// Bytes of it that are gone for every threadgroup.
    pub reserved_shared: usize,
    /// 32-bit registers of a core.
    pub registers_per_core: usize,
    /// 32-bit registers that a thread can have, rounded up as they are allocated.
    pub registers_per_thread: usize,
    /// True if the matrix unit multiplies f32. Otherwise kernels use shuffles and multiply-adds, which take registers.
    pub multiplies_f32: bool,
    /// True if the matrix unit multiplies bf16. Otherwise kernels use shuffles and multiply-adds.
    pub multiplies_bf16: bool,
    /// True if threadgroups that read the same keys at about the same time read them from a cache that is several times as fast as
    /// memory. Otherwise plans avoid it: up to as many rows as a tile can have, keys are read once.
    pub rereads_in_cache: bool,
    /// The most threadgroups in the second and third dimension of a launch. The first has no bound that problems reach.
    pub max_groups: usize,
}

impl GpuFacts {
    /// The facts for a pipeline whose threadgroups may have at most `threads` threads.
    ///
    /// Metal reports `maxTotalThreadsPerThreadgroup` once a pipeline is compiled: on Apple7 and Apple8 it
    /// falls as the pipeline's registers grow. Where it is below the threads of a plan's tile, a plan of
    /// these facts has a smaller tile.
    #[must_use]
    pub const fn with_threads_per_group(self, threads: usize) -> Self {
        Self { threads_per_group: threads, ..self }
    }

    /// The most SIMD groups of a threadgroup that portable tiles have on the device: a power of two up to 8, and 1 where even that one is
    /// too many.
    pub(crate) const fn max_simds(&self) -> usize {
        match self.threads_per_group / 32 {
            0 | 1 => 1,
            2 | 3 => 2,
            4..=7 => 4,
            8.. => 8,
        }
    }

    /// Threadgroups, each with `simds` SIMD groups, `shared` bytes of shared memory and `registers` registers, that a core holds at a time.
    pub(crate) fn resident(&self, simds: usize, shared: usize, registers: usize) -> usize {
        let by_shared = self.shared_per_core / (shared + self.reserved_shared);
        by_shared.min(self.registers_per_core / registers.max(1)).min(self.simds_per_core / simds)
    }
}
