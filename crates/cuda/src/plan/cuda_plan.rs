//! The plan of one problem.

use super::facts::{CudaFacts, MIN_CAPABILITY, NATIVE_CAPABILITY};
use super::launch::{ALIGN, Launch, MAX_GRID};
use super::portable::{Portable, PortableKernel, PortableTile};
use super::schedule::{Shares, tiles};
use super::tile::{CudaKernel, CudaTile};
use super::work_tile::WorkTile;
use flashtile_core::codec::Codec;
use flashtile_core::plan::{KernelChoice, PlanOptions, Unsupported};
use flashtile_core::problem::Problem;

/// Where the parts of a device's scratch memory start, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Regions {
    /// Of each launch in turn, one after another.
    pub(crate) work_tiles: usize,
    pub(crate) counters: usize,
    /// Bytes up to here are written before the first run.
    pub(crate) written: usize,
    pub(crate) mask_tiles: usize,
    pub(crate) partials: usize,
    pub(crate) len: usize,
}

/// Shape of the table of classes of a materialised mask, one byte for each of its planes, 16 query positions and block of
/// keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MaskTileTable {
    pub(crate) block_k: usize,
    pub(crate) planes: usize,
    pub(crate) q_tiles: usize,
    pub(crate) k_blocks: usize,
}

/// Query positions of a class of a mask: `MASK_TILE_ROWS` of the kernels.
pub(crate) const MASK_TILE_ROWS: usize = 16;

/// A plan of the CUDA backend. Pure: made for any device from its [`CudaFacts`].
#[derive(Debug, Clone, PartialEq)]
pub struct CudaPlan {
    problem: Problem,
    options: PlanOptions,
    launches: Vec<Launch>,
    mask_tiles: Vec<MaskTileTable>,
    regions: Regions,
    /// In place of launches.
    portable: Option<Portable>,
}

/// Most work tiles of a plan.
const MAX_WORK_TILES: usize = 1 << 22;

impl CudaPlan {
    /// Plans `problem` for a device. Pure; cost `O(tiles log tiles + blocks of threads)`.
    ///
    /// # Errors
    /// [`Unsupported::Capability`] for devices before compute capability 7.5, or 8.0 where the option asks for native kernels;
    /// [`Unsupported::SharedMemory`] where not even the smallest tile fits the device; [`Unsupported::Splits`] where the option asks for
    /// more splits than there are blocks of keys; [`Unsupported::Tasks`] where the problem would be cut into more work tiles than a
    /// plan lists; [`Unsupported::Workspace`] where scratch memory is not addressable. Of portable kernels also
    /// [`Unsupported::HeadDim`], [`Unsupported::Position`], [`Unsupported::Size`] and [`Unsupported::SkipTiles`].
    pub fn new(problem: &Problem, facts: &CudaFacts, options: PlanOptions) -> Result<Self, Unsupported> {
        Self::with_tile(problem, facts, options, None)
    }

    /// The same with a tile of the caller's, for all launches of native kernels: to measure what another one would give.
    ///
    /// # Errors
    /// As [`CudaPlan::new`]; [`Unsupported::SharedMemory`] where the tile does not fit the device, [`Unsupported::Tile`] where portable
    /// kernels would run.
    pub fn with_tile(
        problem: &Problem,
        facts: &CudaFacts,
        options: PlanOptions,
        tile: Option<CudaTile>,
    ) -> Result<Self, Unsupported> {
        Self::check_device(problem, facts)?;
        let portable = match options.kernels {
            KernelChoice::Auto => facts.capability < NATIVE_CAPABILITY,
            KernelChoice::Native => false,
            KernelChoice::Portable => true,
        };
        match (portable, tile) {
            (false, tile) => Self::native(problem, facts, options, tile),
            (true, None) => Self::with_portable_tile(problem, facts, options, None),
            (true, Some(_)) => Err(Unsupported::Tile { why: "it is one of native kernels" }),
        }
    }

    /// A plan of portable kernels, whatever the options ask for, with a tile of the caller's: to measure what another one would give.
    ///
    /// # Errors
    /// As [`CudaPlan::new`]; [`Unsupported::Tile`].
    pub fn with_portable_tile(
        problem: &Problem,
        facts: &CudaFacts,
        options: PlanOptions,
        tile: Option<PortableTile>,
    ) -> Result<Self, Unsupported> {
        Self::check_device(problem, facts)?;
        let portable = Some(Portable::new(problem, facts, options, tile)?);
        let (launches, mask_tiles, regions) = (Vec::new(), Vec::new(), Regions::default());
        Ok(Self { problem: problem.clone(), options, launches, mask_tiles, regions, portable })
    }

    fn check_device(problem: &Problem, facts: &CudaFacts) -> Result<(), Unsupported> {
        if facts.capability < MIN_CAPABILITY {
            return Err(Unsupported::Capability { got: facts.capability, least: MIN_CAPABILITY });
        }
        let expected = Codec::of(problem.dtype());
        let stored = [("k", problem.k_codec()), ("v", problem.v_codec())];
        match stored.into_iter().find(|(_, codec)| *codec != expected) {
            Some((tensor, codec)) => Err(Unsupported::Codec { tensor, codec, expected }),
            None => Ok(()),
        }
    }

    fn native(
        problem: &Problem,
        facts: &CudaFacts,
        options: PlanOptions,
        tile: Option<CudaTile>,
    ) -> Result<Self, Unsupported> {
        if facts.capability < NATIVE_CAPABILITY {
            return Err(Unsupported::Capability { got: facts.capability, least: NATIVE_CAPABILITY });
        }
        let group = problem.dims().group();
        let mut launches = Vec::new();
        for few in [true, false] {
            let belongs = |rows: usize| rows > 0 && (rows <= CudaTile::FEW_ROWS) == few;
            let chosen: Vec<usize> = (0..problem.sequences().len())
                .filter(|&s| belongs(problem.sequences()[s].q_len * group))
                .collect();
            if chosen.is_empty() {
                continue;
            }
            let rows = chosen.iter().map(|&s| problem.sequences()[s].q_len * group).max().unwrap_or(0);
            let kernel = CudaKernel::choose(problem, facts, rows, tile)?;
            launches.push(launch(problem, facts, options, kernel, &chosen)?);
        }
        if let Some(got) = options.splits {
            let max = launches.iter().map(|launch| launch.most_blocks).max().unwrap_or(1);
            if got == 0 || got > max {
                return Err(Unsupported::Splits { got, max });
            }
        }
        let mask_tiles: Vec<MaskTileTable> =
            launches.iter().filter_map(|launch| mask_tile_table(problem, launch)).collect();
        // Blocks of threads that mask_tiles a mask: the last two dimensions of their grid.
        if let Some(got) = mask_tiles.iter().map(|t| t.planes.max(t.q_tiles)).find(|&n| n > MAX_GRID) {
            return Err(Unsupported::Tasks { got, max: MAX_GRID });
        }
        let (regions, portable) = (Regions::default(), None);
        let mut plan = Self { problem: problem.clone(), options, launches, mask_tiles, regions, portable };
        let kernel = || Unsupported::Workspace { kernel: plan.kernel() };
        plan.regions = plan.layout().filter(|r| isize::try_from(r.len).is_ok()).ok_or_else(kernel)?;
        Ok(plan)
    }

    fn layout(&self) -> Option<Regions> {
        let mut len = 0usize;
        let mut region = |bytes: Option<usize>| {
            let start = len;
            len = len.checked_add(bytes?)?.checked_next_multiple_of(ALIGN)?;
            Some(start)
        };
        let sum = |of: &dyn Fn(&Launch) -> Option<usize>| {
            self.launches.iter().try_fold(0usize, |n, launch| n.checked_add(of(launch)?))
        };
        let work_tiles = region(sum(&|launch| Some(launch.capacity.work_tiles * size_of::<WorkTile>())))?;
        let counters = region(sum(&|launch| Some(launch.capacity.counters * 4)))?;
        let written = region(Some(0))?;
        let planes = |t: &MaskTileTable| t.planes.checked_mul(t.q_tiles)?.checked_mul(t.k_blocks);
        let mask_tiles = self.mask_tiles.iter().try_fold(0usize, |n, table| n.checked_add(planes(table)?));
        let mask_tiles = region(Some(mask_tiles?))?;
        let slot = |launch: &Launch| launch.kernel.slot_floats() * 4;
        let partials = region(sum(&|launch| launch.capacity.partials.checked_mul(slot(launch))))?;
        let len = region(Some(0))?;
        Some(Regions { work_tiles, counters, written, mask_tiles, partials, len })
    }

    pub(crate) fn launches(&self) -> &[Launch] {
        &self.launches
    }

    /// Tables of the launches, in their order; none where there is no mask.
    pub(crate) fn mask_tile_tables(&self) -> &[MaskTileTable] {
        &self.mask_tiles
    }

    pub(crate) const fn regions(&self) -> &Regions {
        &self.regions
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

    pub(crate) const fn portable(&self) -> Option<&Portable> {
        self.portable.as_ref()
    }

    /// The portable kernel, where no native ones run.
    #[must_use]
    pub fn portable_kernel(&self) -> Option<&PortableKernel> {
        self.portable.as_ref().map(|portable| &portable.kernel)
    }

    /// Native kernels of the launches, in order; none where there are no query rows, or where the portable kernel runs.
    pub fn kernels(&self) -> impl Iterator<Item = &CudaKernel> {
        self.launches.iter().map(|launch| &launch.kernel)
    }

    /// Names of the kernels, see [`CudaKernel`], joined by `+`; or that of the portable one, see [`PortableKernel`].
    #[must_use]
    pub fn kernel(&self) -> String {
        if let Some(portable) = &self.portable {
            return portable.kernel.to_string();
        }
        let names: Vec<String> = self.kernels().map(ToString::to_string).collect();
        if names.is_empty() { "cuda-none".to_owned() } else { names.join("+") }
    }

    /// Work tiles of all launches; of the portable kernel its groups of threads.
    #[must_use]
    pub fn task_count(&self) -> usize {
        if let Some(portable) = &self.portable {
            return portable.groups();
        }
        self.launches.iter().map(|launch| launch.count).sum()
    }

    /// The most parts into which the keys of a tile are cut; of the portable kernel those of every tile.
    #[must_use]
    pub fn splits(&self) -> usize {
        if let Some(portable) = &self.portable {
            return portable.splits();
        }
        self.launches.iter().map(|launch| launch.splits).max().unwrap_or(1)
    }

    /// Bytes of device memory that a run needs beside its tensors: the schedule, classes of a mask, partial results.
    #[must_use]
    pub const fn workspace_bytes(&self) -> usize {
        match &self.portable {
            Some(portable) => portable.regions.len,
            None => self.regions.len,
        }
    }
}

fn launch(
    problem: &Problem,
    facts: &CudaFacts,
    options: PlanOptions,
    kernel: CudaKernel,
    sequences: &[usize],
) -> Result<Launch, Unsupported> {
    let tile = kernel.tile;
    let heads = problem.dims().kv_heads;
    let row_tiles = |&s: &usize| {
        (problem.sequences()[s].q_len * problem.dims().group()).div_ceil(tile.rows()).saturating_mul(heads)
    };
    let count = sequences.iter().map(row_tiles).fold(0usize, usize::saturating_add);
    let count = count.saturating_mul(kernel.panels(problem)).saturating_mul(options.splits.unwrap_or(1));
    let tasks = |got| Unsupported::Tasks { got, max: MAX_WORK_TILES };
    if count > MAX_WORK_TILES {
        return Err(tasks(count));
    }
    let work = tiles(problem, &kernel, sequences, options.skip_tiles);
    let most = work.iter().map(|t| t.blocks(tile.keys())).max().unwrap_or(1);
    let room = facts.multiprocessors * tile.resident;
    let shares = match options.splits {
        Some(splits) => Shares::even(work, &kernel, splits.max(1)),
        None if work.len() >= room && !tile.divides_keys() => {
            let row = (kernel.head_dim + kernel.value_dim) * problem.dtype().bytes();
            Shares::whole(work, tile.keys(), facts.l2 / 2 / row, room)
        }
        None => Shares::equal(work, &kernel, room),
    };
    let launch = Launch { most_blocks: most, ..shares.launch(kernel) };
    if launch.work_tiles.len() > MAX_WORK_TILES { Err(tasks(launch.work_tiles.len())) } else { Ok(launch) }
}

fn mask_tile_table(problem: &Problem, launch: &Launch) -> Option<MaskTileTable> {
    problem.desc().mask?;
    let [planes, heads, q_len, kv_len] = problem.mask_shape();
    let block_k = launch.kernel.tile.keys();
    Some(MaskTileTable {
        block_k,
        // An axis of 0 may be broadcast from 1.
        planes: planes.max(1).saturating_mul(heads),
        q_tiles: q_len.div_ceil(MASK_TILE_ROWS).max(1),
        k_blocks: kv_len.div_ceil(block_k).max(1),
    })
}

impl std::fmt::Display for CudaPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(portable) = &self.portable {
            write!(f, "{portable} + ")?;
        }
        for launch in &self.launches {
            let tile = &launch.kernel.tile;
            let (rows, keys) = (tile.rows(), tile.keys());
            write!(
                f,
                "{} tile {rows}x{keys} stages {} grid {} work_tiles {} splits {} + ",
                launch.kernel, tile.stages, launch.capacity.grid, launch.count, launch.splits
            )?;
        }
        write!(f, "workspace {}", self.workspace_bytes())
    }
}
