//! Plans of the backward pass on CUDA devices.

use super::facts::CudaFacts;
use super::sm90::Sm90Backward;
use flashtile_core::plan::{BackwardPlan, Field, KernelChoice, PlanOptions, Unsupported};
use flashtile_core::problem::Problem;
use flashtile_gpu::backward::planner::GpuBackwardPlan;
use std::fmt;

/// A plan of the backward pass on a CUDA device: native kernels where the device and the problem have some, and portable ones, which also take
/// over where tensors do not allow TMA.
#[derive(Debug, Clone)]
pub struct CudaBackwardPlan {
    native: Option<Sm90Backward>,
    /// Why there are no native kernels, if there are none.
    lacks: Option<&'static str>,
    portable: GpuBackwardPlan,
}

impl CudaBackwardPlan {
    /// Plans the backward pass of a problem for a device. Pure; cost `O(tiles * tiles of keys)`.
    ///
    /// # Errors
    /// [`Unsupported`].
    pub fn new(problem: &Problem, facts: &CudaFacts, options: PlanOptions) -> Result<Self, Unsupported> {
        let mut others = options;
        if options.kernels == KernelChoice::Native {
            others.kernels = KernelChoice::Auto;
        }
        let portable = GpuBackwardPlan::new("cuda", problem, &facts.into(), others)?;
        let lacks = match options.kernels {
            KernelChoice::Portable => Some("portable kernels were asked for"),
            KernelChoice::Auto | KernelChoice::Native if !facts.wgmma => {
                Some("the device has no native backward kernels")
            }
            KernelChoice::Auto | KernelChoice::Native
                if facts.shared_per_block < Sm90Backward::MAX_SHARED_BYTES =>
            {
                Some("the device has less shared memory than native backward kernels take")
            }
            KernelChoice::Auto | KernelChoice::Native => Sm90Backward::lacks(problem),
        };
        let native = match lacks {
            None => Some(Sm90Backward::new(problem)?),
            Some(why) if options.kernels == KernelChoice::Native => {
                return Err(Unsupported::Backward { why });
            }
            Some(_) => None,
        };
        Ok(Self { native, lacks, portable: portable.with_options(options) })
    }

    /// The problem whose gradients the plan computes.
    #[must_use]
    pub const fn problem(&self) -> &Problem {
        self.portable.portable().problem()
    }

    pub(crate) const fn native(&self) -> Option<&Sm90Backward> {
        self.native.as_ref()
    }

    pub(crate) const fn portable(&self) -> &GpuBackwardPlan {
        &self.portable
    }
}

impl BackwardPlan for CudaBackwardPlan {
    fn problem(&self) -> &Problem {
        self.problem()
    }

    fn options(&self) -> PlanOptions {
        self.portable.options()
    }

    fn kernel(&self) -> String {
        self.native.as_ref().map_or_else(|| self.portable.kernel(), Sm90Backward::kernel)
    }

    fn workspace_bytes(&self) -> usize {
        self.native.as_ref().map_or_else(|| self.portable.workspace_bytes(), |native| native.regions().len)
    }

    fn task_count(&self) -> usize {
        self.native.as_ref().map_or_else(|| self.portable.task_count(), |native| native.units.len())
    }

    fn words(&self) -> String {
        let Some(native) = &self.native else {
            let why = self.lacks.map_or_else(String::new, |why| format!(" ({why})"));
            return self.portable.words() + &why;
        };
        format!(
            "{} clusters of {} keys, tiles of {} rows, 5 products",
            native.units.len(),
            super::sm90::CLUSTER_KEYS,
            native.tile_rows()
        )
    }

    fn fields(&self) -> Vec<(&'static str, Field)> {
        let Some(native) = &self.native else { return self.portable.fields() };
        vec![
            ("tile_rows", native.tile_rows().into()),
            ("cluster_keys", super::sm90::CLUSTER_KEYS.into()),
            ("shared_bytes", native.shared_bytes().into()),
        ]
    }
}

impl fmt::Display for CudaBackwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.native {
            None => self.portable.fmt(f),
            Some(native) => {
                write!(
                    f,
                    "{} clusters {} workspace {}",
                    self.kernel(),
                    native.units.len(),
                    self.workspace_bytes()
                )
            }
        }
    }
}
