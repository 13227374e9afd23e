//! Plans of the backward pass on CUDA devices.

mod schedule;
mod sm80;
mod sm90;

use super::facts::CudaFacts;
use super::launch::MAX_GRID;
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::{BackwardPlan, Field, KernelChoice, PlanOptions, Unsupported};
use flashtile_core::problem::{Problem, Sequence};
use flashtile_gpu::backward::planner::GpuBackwardPlan;
pub(crate) use schedule::{
    BackwardSchedule, BackwardSequence, BackwardTileUnits, BackwardUnit, ScoreMod, UnitShape,
};
pub(crate) use sm80::{Sm80Backward, column_warps};
pub(crate) use sm90::Sm90Backward;
use std::fmt;

/// A plan of native kernels.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum NativeBackward {
    Sm80(Sm80Backward),
    Sm90(Sm90Backward),
}

impl NativeBackward {
    /// Why no native kernels compute a problem, if they do not, or the plan of those that do.
    fn new(problem: &Problem, facts: &CudaFacts) -> Result<Result<Self, &'static str>, Unsupported> {
        if let Some(why) = lacks(problem) {
            return Ok(Err(why));
        }
        if Sm90Backward::has(problem, facts) {
            return Ok(Ok(Self::Sm90(Sm90Backward::new(problem)?)));
        }
        match Sm80Backward::tile(problem.dims(), facts) {
            Ok(tile) => Ok(Ok(Self::Sm80(Sm80Backward::new(problem, tile)?))),
            Err(why) => Ok(Err(why)),
        }
    }

    pub(crate) const fn schedule(&self) -> &BackwardSchedule {
        match self {
            Self::Sm80(plan) => &plan.schedule,
            Self::Sm90(plan) => &plan.schedule,
        }
    }

    pub(crate) const fn dtype(&self) -> Dtype {
        match self {
            Self::Sm80(plan) => plan.dtype,
            Self::Sm90(plan) => plan.dtype,
        }
    }

    pub(crate) fn kernel(&self) -> String {
        match self {
            Self::Sm80(plan) => plan.kernel(),
            Self::Sm90(plan) => plan.kernel(),
        }
    }

    pub(crate) const fn shared_bytes(&self) -> usize {
        match self {
            Self::Sm80(plan) => plan.shared_bytes(),
            Self::Sm90(plan) => plan.shared_bytes(),
        }
    }

    /// Threads of a block.
    pub(crate) const fn threads(&self) -> usize {
        match self {
            Self::Sm80(_) => sm80::THREADS,
            Self::Sm90(_) => sm90::THREADS,
        }
    }

    /// Blocks of threads of a unit.
    pub(crate) const fn unit_blocks(&self) -> usize {
        match self {
            Self::Sm80(_) => 1,
            Self::Sm90(_) => 2,
        }
    }

    /// The word for units.
    const fn unit_name(&self) -> &'static str {
        match self {
            Self::Sm80(_) => "blocks",
            Self::Sm90(_) => "clusters",
        }
    }
}

/// The reason why no native kernel computes a problem, on any device.
fn lacks(problem: &Problem) -> Option<&'static str> {
    let (dims, desc) = (problem.dims(), problem.desc());
    let furthest = |s: &Sequence| s.q_offset.unsigned_abs() as usize + s.q_len.max(s.kv_len);
    let reasons = [
        (problem.dtype() == Dtype::F32, "native backward kernels multiply f16 and bf16 only"),
        (desc.mask.is_some() || desc.tree, "native backward kernels have no masks"),
        // Rows are accessed in chunks of 16 bytes.
        (
            !(dims.head_dim.is_multiple_of(8) && dims.value_dim.is_multiple_of(8)),
            "native backward kernels have head dimensions of multiples of 8 only",
        ),
        (
            dims.q_heads.max(problem.sequences().len()) > MAX_GRID,
            "native backward kernels have up to 65535 heads and sequences only",
        ),
        (problem.scale() == 0.0, "native backward kernels have no scale of 0"),
        (
            problem.sequences().iter().any(|s| furthest(s) > schedule::MAX_POSITION),
            "native backward kernels have positions below 2^29 only",
        ),
    ];
    reasons.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why)
}

/// A plan of the backward pass on a CUDA device: native kernels where the device and the problem have some, and portable ones, which also take
/// over where rows of tensors do not start on 16 bytes.
#[derive(Debug, Clone)]
pub struct CudaBackwardPlan {
    native: Option<NativeBackward>,
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
        let native = match options.kernels {
            KernelChoice::Portable => Err("portable kernels were asked for"),
            KernelChoice::Auto | KernelChoice::Native => NativeBackward::new(problem, facts)?,
        };
        let (native, lacks) = match native {
            Ok(native) => (Some(native), None),
            Err(why) if options.kernels == KernelChoice::Native => {
                return Err(Unsupported::Backward { why });
            }
            Err(why) => (None, Some(why)),
        };
        Ok(Self { native, lacks, portable: portable.with_options(options) })
    }

    /// The problem whose gradients the plan computes.
    #[must_use]
    pub const fn problem(&self) -> &Problem {
        self.portable.portable().problem()
    }

    pub(crate) const fn native(&self) -> Option<&NativeBackward> {
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
        self.native.as_ref().map_or_else(|| self.portable.kernel(), NativeBackward::kernel)
    }

    fn workspace_bytes(&self) -> usize {
        self.native
            .as_ref()
            .map_or_else(|| self.portable.workspace_bytes(), |native| native.schedule().regions().len)
    }

    fn task_count(&self) -> usize {
        self.native
            .as_ref()
            .map_or_else(|| self.portable.task_count(), |native| native.schedule().units.len())
    }

    fn words(&self) -> String {
        let Some(native) = &self.native else {
            let why = self.lacks.map_or_else(String::new, |why| format!(" ({why})"));
            return self.portable.words() + &why;
        };
        let BackwardSchedule { units, shape: UnitShape { keys, rows, .. }, .. } = native.schedule();
        let name = native.unit_name();
        format!("{} {name} of {keys} keys, tiles of {rows} rows, 5 products", units.len())
    }

    fn fields(&self) -> Vec<(&'static str, Field)> {
        let Some(native) = &self.native else { return self.portable.fields() };
        vec![
            ("tile_rows", native.schedule().shape.rows.into()),
            ("unit_keys", native.schedule().shape.keys.into()),
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
                    "{} {} {} workspace {}",
                    self.kernel(),
                    native.unit_name(),
                    native.schedule().units.len(),
                    self.workspace_bytes()
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::machines::ALL_CUDA;
    use flashtile_core::problem::{Dims, ProblemDesc};

    #[test]
    fn blocks_fit_shared_memory() {
        let mut native = 0;
        for (head_dim, value_dim) in [(32, 32), (64, 64), (96, 40), (128, 128), (192, 128), (256, 256)] {
            let dims =
                Dims { batch: 1, q_heads: 2, kv_heads: 1, q_len: 300, kv_len: 300, head_dim, value_dim };
            let problem = ProblemDesc::new(dims, Dtype::BF16).validate().unwrap();
            for (machine, facts) in ALL_CUDA {
                let plan = CudaBackwardPlan::new(&problem, &facts, PlanOptions::default()).unwrap();
                let Some(plan) = plan.native() else { continue };
                assert!(plan.shared_bytes() <= facts.shared_per_block, "{} on {machine}", plan.kernel());
                native += 1;
            }
        }
        // Five machines of capability 8.0 and later; the one with the least shared memory has none for 256 columns.
        assert_eq!(native, 29);
    }
}
