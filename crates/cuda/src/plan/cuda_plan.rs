//! The plan of one problem.

use super::facts::{CudaFacts, MIN_CAPABILITY, NATIVE_CAPABILITY};
use super::kernel::CudaKernel;
use super::native::NativePlan;
use super::native_kernel::NativeTile;
use super::portable::{Portable, PortableTile};
use super::sm80::Sm80Tile;
use super::sm90::Sm90Tile;
use flashtile_core::codec::Codec;
use flashtile_core::plan::{KernelChoice, PlanOptions, Unsupported};
use flashtile_core::problem::{KvStorage, Problem};

/// A plan of the CUDA backend. Pure: made for any device from its [`CudaFacts`].
#[derive(Debug, Clone, PartialEq)]
pub struct CudaPlan {
    problem: Problem,
    options: PlanOptions,
    kernels: PlannedKernels,
}

/// How a block of threads divides its work: a tile that a caller asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CudaTile {
    /// A tile of native kernels.
    Native(NativeTile),
    /// A tile of the portable kernels.
    Portable(PortableTile),
}

impl From<Sm80Tile> for CudaTile {
    fn from(tile: Sm80Tile) -> Self {
        Self::Native(NativeTile::Sm80(tile))
    }
}

impl From<Sm90Tile> for CudaTile {
    fn from(tile: Sm90Tile) -> Self {
        Self::Native(NativeTile::Sm90(tile))
    }
}

impl From<PortableTile> for CudaTile {
    fn from(tile: PortableTile) -> Self {
        Self::Portable(tile)
    }
}

/// The kind of kernels that compute a plan.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PlannedKernels {
    Native(NativePlan),
    Portable(Box<Portable>),
}

impl CudaPlan {
    /// Plans `problem` for a device. Pure; cost `O(tiles log tiles + blocks of threads)`. Native kernels read elements of the problem's
    /// dtype; over other elements and over codes the portable ones run.
    ///
    /// # Errors
    /// [`Unsupported::Capability`] for devices before compute capability 7.5, or 8.0 where the option asks
    /// for native kernels; [`Unsupported::Device`] for facts without multiprocessors; [`Unsupported::Codec`]
    /// where the option asks for native kernels and keys or values are codes; [`Unsupported::SharedMemory`]
    /// where not even the smallest tile fits the device; [`Unsupported::Splits`] where the option asks for
    /// more splits than there are blocks of keys; [`Unsupported::Tasks`] where the problem would be cut into
    /// more work tiles than a plan lists; [`Unsupported::Workspace`] where scratch memory is not addressable.
    /// [`Unsupported::KeyColumns`] where values are columns of the keys. Portable kernels also refuse by
    /// [`Unsupported::Position`], [`Unsupported::Size`] and [`Unsupported::SkipTiles`].
    pub fn new(problem: &Problem, facts: &CudaFacts, options: PlanOptions) -> Result<Self, Unsupported> {
        let portable = Self::takes_portable(problem, facts, options)?;
        let kernels = if portable {
            PlannedKernels::Portable(Box::new(Portable::new(problem, facts, options, None)?))
        } else {
            PlannedKernels::Native(NativePlan::new(problem, facts, options, None)?)
        };
        Ok(Self { problem: problem.clone(), options, kernels })
    }

    /// [`CudaPlan::new`] with a tile that the caller chooses for all launches, to measure tiles that the
    /// planner does not take. All kernels are of the tile's kind; a portable tile gives portable kernels,
    /// whatever the options ask for.
    ///
    /// # Errors
    /// The errors of [`CudaPlan::new`]; [`Unsupported::SharedMemory`] where the tile does not fit the device,
    /// [`Unsupported::Tile`] where no kernel has the tile, where it is for native kernels and portable ones
    /// would run, or where kernels of its kind do not compute the problem on the device.
    pub fn with_tile(
        problem: &Problem,
        facts: &CudaFacts,
        options: PlanOptions,
        tile: CudaTile,
    ) -> Result<Self, Unsupported> {
        let kernels = match tile {
            CudaTile::Portable(tile) => {
                let mut options = options;
                options.kernels = KernelChoice::Portable;
                Self::takes_portable(problem, facts, options)?;
                PlannedKernels::Portable(Box::new(Portable::new(problem, facts, options, Some(tile))?))
            }
            CudaTile::Native(_) if Self::takes_portable(problem, facts, options)? => {
                return Err(Unsupported::Tile { why: "it is one of native kernels" });
            }
            CudaTile::Native(tile) => {
                PlannedKernels::Native(NativePlan::new(problem, facts, options, Some(tile))?)
            }
        };
        Ok(Self { problem: problem.clone(), options, kernels })
    }

    /// Returns true if portable kernels run where the caller gives no tile: there are no native ones for the
    /// device or for the codecs of keys and values, or the options ask for portable ones.
    fn takes_portable(
        problem: &Problem,
        facts: &CudaFacts,
        options: PlanOptions,
    ) -> Result<bool, Unsupported> {
        if facts.capability < MIN_CAPABILITY {
            return Err(Unsupported::Capability { got: facts.capability, min: MIN_CAPABILITY });
        }
        if facts.multiprocessors == 0 {
            return Err(Unsupported::Device { why: "it has no multiprocessors" });
        }
        if problem.kv_storage() == KvStorage::KeyColumns {
            return Err(Unsupported::KeyColumns { codec: problem.k_codec() });
        }
        let expected = Codec::of(problem.dtype());
        let stored = [("k", problem.k_codec()), ("v", problem.v_codec())];
        let other = stored.into_iter().find(|(_, codec)| *codec != expected);
        match (options.kernels, other) {
            (KernelChoice::Portable, _) | (KernelChoice::Auto, Some(_)) => Ok(true),
            (KernelChoice::Auto, None) => Ok(facts.capability < NATIVE_CAPABILITY),
            (KernelChoice::Native, None) => Ok(false),
            (KernelChoice::Native, Some((tensor, codec))) => {
                Err(Unsupported::Codec { tensor, codec, expected })
            }
        }
    }

    /// The problem that this plan computes.
    #[must_use]
    pub const fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The options that it was made with.
    #[must_use]
    pub const fn options(&self) -> PlanOptions {
        self.options
    }

    pub(crate) const fn planned_kernels(&self) -> &PlannedKernels {
        &self.kernels
    }

    pub(crate) const fn native(&self) -> Option<&NativePlan> {
        match &self.kernels {
            PlannedKernels::Native(plan) => Some(plan),
            PlannedKernels::Portable(_) => None,
        }
    }

    pub(crate) const fn portable(&self) -> Option<&Portable> {
        match &self.kernels {
            PlannedKernels::Native(_) => None,
            PlannedKernels::Portable(plan) => Some(&**plan),
        }
    }

    /// One kernel for each launch of a native plan, in order; none where there are no query rows. A portable plan yields one, also
    /// without query rows, which stands for the launch of `merge` too.
    pub fn kernels(&self) -> impl Iterator<Item = &CudaKernel> {
        let native = self.native().map_or(&[][..], NativePlan::launches);
        let portable = self.portable().map(|plan| &plan.kernel);
        native.iter().map(|launch| &launch.kernel.public).chain(portable)
    }

    /// Names of the kernels, see [`CudaKernel::name`], joined by `+`.
    #[must_use]
    pub fn kernel(&self) -> String {
        match &self.kernels {
            PlannedKernels::Native(plan) => plan.kernel_names(),
            PlannedKernels::Portable(plan) => plan.kernel.name.clone(),
        }
    }

    /// Work tiles of all launches; of the portable kernel its threadgroups.
    #[must_use]
    pub fn task_count(&self) -> usize {
        match &self.kernels {
            PlannedKernels::Native(plan) => plan.work_tile_count(),
            PlannedKernels::Portable(plan) => plan.plan.groups(),
        }
    }

    /// The most splits into which the keys of a tile are cut; with the portable kernel every tile has that number.
    #[must_use]
    pub fn splits(&self) -> usize {
        match &self.kernels {
            PlannedKernels::Native(plan) => plan.splits(),
            PlannedKernels::Portable(plan) => plan.plan.splits(),
        }
    }

    /// Bytes of device memory that a run needs beside its tensors: the schedule, mask tiles, partial results.
    #[must_use]
    pub const fn workspace_bytes(&self) -> usize {
        match &self.kernels {
            PlannedKernels::Native(plan) => plan.regions().len,
            PlannedKernels::Portable(plan) => plan.plan.regions().len,
        }
    }
}

impl std::fmt::Display for CudaPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.kernels {
            PlannedKernels::Native(plan) => write!(f, "{plan}workspace {}", self.workspace_bytes()),
            PlannedKernels::Portable(plan) => write!(f, "{} {}", plan.kernel, plan.plan),
        }
    }
}
