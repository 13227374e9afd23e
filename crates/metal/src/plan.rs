//! The plan of one problem.

use crate::facts::MetalFacts;
use flashtile_core::plan::{KernelChoice, PlanOptions, Unsupported};
use flashtile_core::problem::Problem;
use flashtile_gpu::plan::Plan;
use flashtile_gpu::portable_kernel::PortableKernel;
use flashtile_gpu::tile::PortableTile;

/// A plan of the Metal backend. Pure: made for any device from its [`MetalFacts`].
#[derive(Debug, Clone, PartialEq)]
pub struct MetalPlan {
    options: PlanOptions,
    kernel: PortableKernel,
    plan: Box<Plan>,
}

impl MetalPlan {
    /// Plans a problem for a device. Pure; cost `O(threadgroups)`.
    ///
    /// # Errors
    /// [`Unsupported::Device`] where the options ask for native kernels, which Metal has none of, or the facts have no cores;
    /// [`Unsupported::SharedMemory`], [`Unsupported::Threads`], [`Unsupported::Splits`], [`Unsupported::Tasks`],
    /// [`Unsupported::Workspace`], [`Unsupported::Position`], [`Unsupported::Size`], [`Unsupported::KeyColumns`] and
    /// [`Unsupported::SkipTiles`].
    pub fn new(problem: &Problem, facts: &MetalFacts, options: PlanOptions) -> Result<Self, Unsupported> {
        Self::plan(problem, facts, options, None)
    }

    /// [`MetalPlan::new`] with a tile that the caller chooses, to measure tiles that the planner does not
    /// take.
    ///
    /// # Errors
    /// As [`MetalPlan::new`]; [`Unsupported::Tile`] where no kernel has the tile.
    pub fn with_tile(
        problem: &Problem,
        facts: &MetalFacts,
        options: PlanOptions,
        tile: PortableTile,
    ) -> Result<Self, Unsupported> {
        Self::plan(problem, facts, options, Some(tile))
    }

    fn plan(
        problem: &Problem,
        facts: &MetalFacts,
        options: PlanOptions,
        tile: Option<PortableTile>,
    ) -> Result<Self, Unsupported> {
        match options.kernels {
            KernelChoice::Auto | KernelChoice::Portable => {}
            KernelChoice::Native => {
                return Err(Unsupported::Device { why: "on Metal all kernels are portable ones" });
            }
        }
        if facts.cores == 0 {
            return Err(Unsupported::Device { why: "it has no cores" });
        }
        let plan = Box::new(Plan::new(problem, facts, options, tile)?);
        let kernel = PortableKernel::new("metal", problem, *plan.tile());
        Ok(Self { options, kernel, plan })
    }

    /// The problem that this plan computes.
    #[must_use]
    pub const fn problem(&self) -> &Problem {
        let plan: &Plan = &self.plan;
        plan.problem()
    }

    /// The options that it was made with.
    #[must_use]
    pub const fn options(&self) -> PlanOptions {
        self.options
    }

    /// The plan of the portable kernels.
    #[cfg(any(target_vendor = "apple", metal_standin))]
    pub(crate) const fn portable(&self) -> &Plan {
        &self.plan
    }

    /// Name of the kernel: `metal-prefill-f16-d128-portable`.
    #[must_use]
    pub fn kernel(&self) -> String {
        self.kernel.to_string()
    }

    /// How a threadgroup divides its work.
    #[must_use]
    pub fn tile(&self) -> &PortableTile {
        self.plan.tile()
    }

    /// Threadgroups of the first kernel.
    #[must_use]
    pub fn task_count(&self) -> usize {
        self.plan.groups()
    }

    /// Splits of the keys of a row.
    #[must_use]
    pub fn splits(&self) -> usize {
        self.plan.splits()
    }

    /// Bytes of memory that a run needs beside its tensors.
    #[must_use]
    pub const fn workspace_bytes(&self) -> usize {
        let plan: &Plan = &self.plan;
        plan.regions().len
    }

    /// Bytes of threadgroup memory of a threadgroup.
    #[must_use]
    pub fn threadgroup_bytes(&self) -> usize {
        self.kernel.shared_bytes()
    }
}

impl std::fmt::Display for MetalPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.kernel, self.plan)
    }
}
