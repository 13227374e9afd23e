//! What the planner asks a device for.

/// What the planner knows of a device, whoever made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuFacts {
    /// Multiprocessors of NVIDIA, GPU cores of Apple.
    pub cores: usize,
    /// Bytes of shared memory that one threadgroup may use.
    pub shared_per_group: usize,
    /// Bytes of shared memory of a core.
    pub shared_per_core: usize,
    /// Bytes of it that are gone for every threadgroup.
    pub reserved_shared: usize,
    /// 32-bit registers of a core.
    pub registers_per_core: usize,
    /// Whether the matrix unit multiplies bf16. Where not, such products are made of shuffles, which take registers.
    pub multiplies_bf16: bool,
    /// The most threadgroups in the second and third dimension of a launch. The first has no bound that problems reach.
    pub max_groups: usize,
}

impl GpuFacts {
    /// Threadgroups, each with `shared` bytes of shared memory and `registers` registers, that a core holds at a time.
    pub(crate) fn resident(&self, shared: usize, registers: usize) -> usize {
        let by_shared = self.shared_per_core / (shared + self.reserved_shared);
        by_shared.min(self.registers_per_core / registers)
    }
}
