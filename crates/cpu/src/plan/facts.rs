//! Facts about a CPU.

use flashtile_core::isa::Isa;

/// The facts about a CPU that the planner uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct CpuFacts {
    /// Best instruction set to use.
    pub isa: Isa,
    /// Threads to use.
    pub threads: usize,
    /// First-level data cache of a core, in bytes.
    pub l1d: usize,
    /// Second-level cache of a core, in bytes.
    pub l2: usize,
    /// Last-level cache, in bytes.
    pub l3: usize,
}
