//! A plan of any backend, and the facts that it follows from.

use flashtile_core::plan::{PlanOptions, Unsupported};
use flashtile_core::problem::{Problem, Sequence};
use flashtile_cpu::plan::{CpuFacts, CpuPlan, machines};
#[cfg(feature = "cuda")]
use flashtile_cuda::plan::{CudaFacts, CudaPlan, machines::ALL_CUDA};
#[cfg(feature = "metal")]
use flashtile_metal::{ALL_APPLE, MetalFacts, MetalPlan};

/// The kind of a backend. [`Display`](std::fmt::Display) is its name: `cpu`, `cuda`, `metal`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendKind {
    /// The processor.
    Cpu,
    /// NVIDIA devices; also known to builds that lack the feature `cuda`.
    Cuda,
    /// Apple's GPUs; also known to builds that lack the feature `metal`.
    Metal,
}

impl BackendKind {
    /// `cpu`, `cuda` or `metal`, as kernel names begin.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Metal => "metal",
        }
    }
}

impl std::fmt::Display for BackendKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The facts that a planner knows about a device of any backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AnyFacts {
    /// A processor.
    Cpu(CpuFacts),
    /// A CUDA device.
    #[cfg(feature = "cuda")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
    Cuda(CudaFacts),
    /// One of Apple's GPUs.
    #[cfg(feature = "metal")]
    #[cfg_attr(docsrs, doc(cfg(feature = "metal")))]
    Metal(MetalFacts),
}

impl AnyFacts {
    /// The machines and devices of [`machines`](crate::plan::machines) with the names that `flashtile plan --device` takes,
    /// such as `avx2-8core`, `h200` and `m3-max`: to plan for hardware that is absent.
    #[must_use]
    pub fn known() -> Vec<(&'static str, Self)> {
        let cpu = machines::ALL.iter().map(|&(name, facts)| (name, Self::Cpu(facts)));
        #[cfg(feature = "cuda")]
        let cpu = cpu.chain(ALL_CUDA.iter().map(|&(name, facts)| (name, Self::Cuda(facts))));
        #[cfg(feature = "metal")]
        let cpu = cpu.chain(ALL_APPLE.iter().map(|&(name, facts)| (name, Self::Metal(facts))));
        cpu.collect()
    }

    /// The facts, if they are of a processor.
    #[must_use]
    pub const fn as_cpu(&self) -> Option<&CpuFacts> {
        match self {
            Self::Cpu(facts) => Some(facts),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => None,
            #[cfg(feature = "metal")]
            Self::Metal(_) => None,
        }
    }

    /// The facts, if they are of a CUDA device.
    #[cfg(feature = "cuda")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
    #[must_use]
    pub const fn as_cuda(&self) -> Option<&CudaFacts> {
        match self {
            Self::Cuda(facts) => Some(facts),
            Self::Cpu(_) => None,
            #[cfg(feature = "metal")]
            Self::Metal(_) => None,
        }
    }

    /// The facts, if they are of one of Apple's GPUs.
    #[cfg(feature = "metal")]
    #[cfg_attr(docsrs, doc(cfg(feature = "metal")))]
    #[must_use]
    pub const fn as_metal(&self) -> Option<&MetalFacts> {
        match self {
            Self::Metal(facts) => Some(facts),
            Self::Cpu(_) => None,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => None,
        }
    }

    /// The backend of the device.
    #[must_use]
    pub const fn kind(&self) -> BackendKind {
        match self {
            Self::Cpu(_) => BackendKind::Cpu,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => BackendKind::Cuda,
            #[cfg(feature = "metal")]
            Self::Metal(_) => BackendKind::Metal,
        }
    }
}

/// Rows and keys of a tile: the unit that is skipped, computed whole or masked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TileSize {
    /// Packed query rows: pairs of a position and a query head of the GQA group.
    pub rows: usize,
    /// Keys.
    pub keys: usize,
}

/// A plan of any backend. Every accessor derives from the plan inside, and so do the launches of a run.
///
/// ```
/// use flashtile::plan::{AnyFacts, AnyPlan, machines};
/// use flashtile::{Dims, Dtype, PlanOptions, ProblemDesc};
/// let dims = Dims { batch: 1, q_heads: 8, kv_heads: 2, q_len: 64, kv_len: 64, head_dim: 64, value_dim: 64 };
/// let problem = ProblemDesc::new(dims, Dtype::F32).validate()?;
/// let plan = AnyPlan::new(&problem, &AnyFacts::Cpu(machines::AVX2_8), PlanOptions::default())?;
/// assert_eq!(plan.kernel(), "cpu-prefill-f32-d64-avx2");
/// # Ok::<(), flashtile::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum AnyPlan {
    /// A plan of the CPU backend.
    Cpu(CpuPlan),
    /// A plan of the CUDA backend.
    #[cfg(feature = "cuda")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
    Cuda(CudaPlan),
    /// A plan of the Metal backend.
    #[cfg(feature = "metal")]
    #[cfg_attr(docsrs, doc(cfg(feature = "metal")))]
    Metal(MetalPlan),
}

impl AnyPlan {
    /// Plans a problem for a device. Pure; cost as [`CpuPlan::new`], `CudaPlan::new` and `MetalPlan::new`.
    ///
    /// # Errors
    /// [`Unsupported`] as [`CpuPlan::new`], `CudaPlan::new` and `MetalPlan::new`.
    pub fn new(problem: &Problem, facts: &AnyFacts, options: PlanOptions) -> Result<Self, Unsupported> {
        match facts {
            AnyFacts::Cpu(facts) => CpuPlan::new(problem, facts, options).map(Self::Cpu),
            #[cfg(feature = "cuda")]
            AnyFacts::Cuda(facts) => CudaPlan::new(problem, facts, options).map(Self::Cuda),
            #[cfg(feature = "metal")]
            AnyFacts::Metal(facts) => MetalPlan::new(problem, facts, options).map(Self::Metal),
        }
    }

    /// The backend that runs the plan.
    #[must_use]
    pub const fn kind(&self) -> BackendKind {
        match self {
            Self::Cpu(_) => BackendKind::Cpu,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => BackendKind::Cuda,
            #[cfg(feature = "metal")]
            Self::Metal(_) => BackendKind::Metal,
        }
    }

    /// The plan, if it is for the CPU.
    #[must_use]
    pub const fn as_cpu(&self) -> Option<&CpuPlan> {
        match self {
            Self::Cpu(plan) => Some(plan),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => None,
            #[cfg(feature = "metal")]
            Self::Metal(_) => None,
        }
    }

    /// The plan, if it is for a CUDA device.
    #[cfg(feature = "cuda")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
    #[must_use]
    pub const fn as_cuda(&self) -> Option<&CudaPlan> {
        match self {
            Self::Cuda(plan) => Some(plan),
            Self::Cpu(_) => None,
            #[cfg(feature = "metal")]
            Self::Metal(_) => None,
        }
    }

    /// The plan, if it is for one of Apple's GPUs.
    #[cfg(feature = "metal")]
    #[cfg_attr(docsrs, doc(cfg(feature = "metal")))]
    #[must_use]
    pub const fn as_metal(&self) -> Option<&MetalPlan> {
        match self {
            Self::Metal(plan) => Some(plan),
            Self::Cpu(_) => None,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => None,
        }
    }

    /// The problem that the plan computes.
    #[must_use]
    pub const fn problem(&self) -> &Problem {
        match self {
            Self::Cpu(plan) => plan.problem(),
            #[cfg(feature = "cuda")]
            Self::Cuda(plan) => plan.problem(),
            #[cfg(feature = "metal")]
            Self::Metal(plan) => plan.problem(),
        }
    }

    /// The options that it was made with.
    #[must_use]
    pub const fn options(&self) -> PlanOptions {
        match self {
            Self::Cpu(plan) => plan.options(),
            #[cfg(feature = "cuda")]
            Self::Cuda(plan) => plan.options(),
            #[cfg(feature = "metal")]
            Self::Metal(plan) => plan.options(),
        }
    }

    /// Name of the kernel, or names joined by `+`.
    #[must_use]
    pub fn kernel(&self) -> String {
        match self {
            Self::Cpu(plan) => plan.kernel(),
            #[cfg(feature = "cuda")]
            Self::Cuda(plan) => plan.kernel(),
            #[cfg(feature = "metal")]
            Self::Metal(plan) => plan.kernel(),
        }
    }

    /// Bytes of memory that a run needs beside its tensors: host memory on the CPU, device memory on a device.
    #[must_use]
    pub const fn workspace_bytes(&self) -> usize {
        match self {
            Self::Cpu(plan) => plan.workspace_bytes(),
            #[cfg(feature = "cuda")]
            Self::Cuda(plan) => plan.workspace_bytes(),
            #[cfg(feature = "metal")]
            Self::Metal(plan) => plan.workspace_bytes(),
        }
    }

    /// The most splits into which the keys of a row are cut for parallel work.
    #[must_use]
    pub fn splits(&self) -> usize {
        match self {
            Self::Cpu(plan) => plan.splits(),
            #[cfg(feature = "cuda")]
            Self::Cuda(plan) => plan.splits(),
            #[cfg(feature = "metal")]
            Self::Metal(plan) => plan.splits(),
        }
    }

    /// Units of work: tasks of the CPU, work tiles or threadgroups of a device.
    #[must_use]
    pub fn task_count(&self) -> usize {
        match self {
            Self::Cpu(plan) => plan.task_count(),
            #[cfg(feature = "cuda")]
            Self::Cuda(plan) => plan.task_count(),
            #[cfg(feature = "metal")]
            Self::Metal(plan) => plan.task_count(),
        }
    }

    /// The tile by which a sequence of the problem is computed. Of several kernels, it is that of the one with the smallest
    /// tile that holds all rows of a GQA group, or with the largest tile.
    #[must_use]
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables, reason = "other plans have one tile"))]
    pub fn tile(&self, sequence: &Sequence) -> TileSize {
        match self {
            Self::Cpu(plan) => TileSize { rows: plan.tile_rows(), keys: plan.block_k() },
            #[cfg(feature = "cuda")]
            Self::Cuda(plan) => {
                let rows = sequence.q_len.saturating_mul(plan.problem().dims().gqa_group());
                let size = |tile: flashtile_cuda::plan::CudaTile| (tile.rows(), tile.keys());
                let mut tiles: Vec<_> = plan.kernels().map(|kernel| size(kernel.tile())).collect();
                tiles.sort_unstable();
                let holds = tiles.iter().find(|tile| tile.0 >= rows);
                // A plan without query rows launches no kernel.
                let (rows, keys) = holds.or(tiles.last()).copied().unwrap_or((16, 64));
                TileSize { rows, keys }
            }
            #[cfg(feature = "metal")]
            Self::Metal(plan) => TileSize { rows: plan.tile().rows(), keys: plan.tile().keys() },
        }
    }
}

/// An [`AnyPlan`] has the serialised form of the plan inside.
#[cfg(feature = "serde")]
impl serde::Serialize for AnyPlan {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Cpu(plan) => plan.serialize(serializer),
            #[cfg(feature = "cuda")]
            Self::Cuda(plan) => plan.serialize(serializer),
            #[cfg(feature = "metal")]
            Self::Metal(plan) => plan.serialize(serializer),
        }
    }
}

impl std::fmt::Display for AnyPlan {
    /// Kernel, tiles, units of work, splits and workspace on one line.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu(plan) => write!(
                f,
                "{}: tiles of {} rows x {} keys, {} tasks, splits {}, workspace {}",
                plan.kernel(),
                plan.tile_rows(),
                plan.block_k(),
                plan.task_count(),
                plan.splits(),
                plan.workspace_bytes()
            ),
            #[cfg(feature = "cuda")]
            Self::Cuda(plan) => plan.fmt(f),
            #[cfg(feature = "metal")]
            Self::Metal(plan) => plan.fmt(f),
        }
    }
}

impl From<CpuPlan> for AnyPlan {
    fn from(plan: CpuPlan) -> Self {
        Self::Cpu(plan)
    }
}

#[cfg(feature = "cuda")]
impl From<CudaPlan> for AnyPlan {
    fn from(plan: CudaPlan) -> Self {
        Self::Cuda(plan)
    }
}

#[cfg(feature = "metal")]
impl From<MetalPlan> for AnyPlan {
    fn from(plan: MetalPlan) -> Self {
        Self::Metal(plan)
    }
}
