//! Plans of the CUDA backend.
//!
//! Query rows of one key/value head are (position, head of the group) pairs ordered by position, cut into tiles. An item is
//! a tile and a range of the keys that its rows see; a block of threads computes items one after another. Where there are
//! enough tiles to fill the device, each is one item, longest first among heads whose keys fit its second-level cache.
//! Otherwise the keys of all tiles, laid end to end, are cut into equal shares, one for each block of threads that the device
//! holds at a time; the block that ends a tile last adds up its parts, in the order of the keys. The same plan gives the same
//! bits.
//!
//! Sequences with so few rows that they fit one fragment of the matrix unit, and the others, are launches of their own.
//!
//! Devices that those kernels are too new for run the portable ones, whose plan is of another kind: see `portable`.

pub mod machines;
mod portable;
mod schedule;
mod tile;

pub use portable::{PortableKernel, PortableTile};
pub(crate) use tile::STREAM_BYTES;
pub use tile::{CudaKernel, CudaTile};

use flashtile_core::codec::Codec;
use flashtile_core::plan::{KernelChoice, PlanOptions, Unsupported};
use flashtile_core::problem::{Problem, Sequences};
pub(crate) use portable::Portable;
pub(crate) use schedule::{AGAIN, GROUP, Item};
use schedule::{Shares, tiles};

/// What the planner knows of a CUDA device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct CudaFacts {
    /// Compute capability: 8.0 is `(8, 0)`.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of shared memory that one block of threads may use.
    pub shared_per_block: usize,
    /// Bytes of shared memory of a multiprocessor.
    pub shared_per_multiprocessor: usize,
    /// 32-bit registers of a multiprocessor.
    pub registers_per_multiprocessor: usize,
    /// Second-level cache, in bytes.
    pub l2: usize,
}

/// The least compute capability for which there are kernels: the portable ones multiply f16 on its matrix unit, and NVRTC 13 compiles
/// for nothing older.
pub const LEAST_CAPABILITY: (u32, u32) = (7, 5);

/// The least compute capability of the CUDA C++ kernels: asynchronous copies, products of bf16.
pub const NATIVE_CAPABILITY: (u32, u32) = (8, 0);

/// Bytes of shared memory that the driver keeps of every block of threads.
const RESERVED_SHARED: usize = 1024;

impl CudaFacts {
    /// Blocks of threads with so much shared memory and so many registers that a multiprocessor holds at a time.
    const fn resident(&self, shared: usize, registers: usize) -> usize {
        let by_shared = self.shared_per_multiprocessor / (shared + RESERVED_SHARED);
        let by_registers = self.registers_per_multiprocessor / registers;
        if by_shared < by_registers { by_shared } else { by_registers }
    }
}

/// Room of a launch in scratch memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Capacity {
    /// Blocks of threads.
    pub(crate) grid: usize,
    pub(crate) items: usize,
    /// Partial results of [`CudaKernel::slot_floats`] each, and counters of the tiles that they are of.
    pub(crate) slots: usize,
    pub(crate) counters: usize,
}

impl Capacity {
    fn max(self, other: Self) -> Self {
        Self {
            grid: self.grid.max(other.grid),
            items: self.items.max(other.items),
            slots: self.slots.max(other.slots),
            counters: self.counters.max(other.counters),
        }
    }
}

/// One launch of a kernel.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Launch {
    pub(crate) kernel: CudaKernel,
    /// The first item of each block of threads, then the others.
    pub(crate) items: Vec<Item>,
    /// Those that are work.
    pub(crate) count: usize,
    /// The most parts of a tile.
    pub(crate) splits: usize,
    /// The most blocks of keys of a tile.
    pub(crate) most_blocks: usize,
    /// What is launched and reserved: enough for other lengths of the same sequences too, where blocks of threads share
    /// tiles.
    pub(crate) capacity: Capacity,
}

/// Where the parts of a device's scratch memory start, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Regions {
    /// Of each launch in turn, one after another.
    pub(crate) items: usize,
    pub(crate) counters: usize,
    /// Bytes up to here are written before the first run.
    pub(crate) written: usize,
    pub(crate) classes: usize,
    pub(crate) partials: usize,
    pub(crate) len: usize,
}

/// Shape of the table of classes of a materialised mask, one byte for each of its planes, 16 query positions and block of
/// keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClassTable {
    pub(crate) block_k: usize,
    pub(crate) planes: usize,
    pub(crate) q_tiles: usize,
    pub(crate) k_blocks: usize,
}

/// Query positions of a class of a mask: `CLASS_ROWS` of the kernels.
pub(crate) const CLASS_ROWS: usize = 16;

/// A plan of the CUDA backend. Pure: made for any device from its [`CudaFacts`].
#[derive(Debug, Clone, PartialEq)]
pub struct CudaPlan {
    problem: Problem,
    options: PlanOptions,
    launches: Vec<Launch>,
    classes: Vec<ClassTable>,
    regions: Regions,
    /// In place of launches.
    portable: Option<Portable>,
}

/// Most blocks of threads in the second and third dimension of a grid.
pub(crate) const MAX_GRID: usize = 65_535;

/// Most items of a plan.
const MAX_ITEMS: usize = 1 << 22;

/// Alignment of the parts of scratch memory.
const ALIGN: usize = 256;

impl CudaPlan {
    /// Plans `problem` for a device. Pure; cost `O(tiles log tiles + blocks of threads)`.
    ///
    /// # Errors
    /// [`Unsupported::Capability`] for devices before compute capability 7.5, or 8.0 where the option asks for native kernels;
    /// [`Unsupported::SharedMemory`] where not even the smallest tile fits the device; [`Unsupported::Splits`] where the option asks for
    /// more splits than there are blocks of keys; [`Unsupported::Tasks`] where the problem would be cut into more items than a
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
        let (launches, classes, regions) = (Vec::new(), Vec::new(), Regions::default());
        Ok(Self { problem: problem.clone(), options, launches, classes, regions, portable })
    }

    fn check_device(problem: &Problem, facts: &CudaFacts) -> Result<(), Unsupported> {
        if facts.capability < LEAST_CAPABILITY {
            return Err(Unsupported::Capability { got: facts.capability, least: LEAST_CAPABILITY });
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
        let classes: Vec<ClassTable> =
            launches.iter().filter_map(|launch| class_table(problem, launch)).collect();
        // Blocks of threads that classify a mask: the last two dimensions of their grid.
        if let Some(got) = classes.iter().map(|t| t.planes.max(t.q_tiles)).find(|&n| n > MAX_GRID) {
            return Err(Unsupported::Tasks { got, max: MAX_GRID });
        }
        let (regions, portable) = (Regions::default(), None);
        let mut plan = Self { problem: problem.clone(), options, launches, classes, regions, portable };
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
        let items = region(sum(&|launch| Some(launch.capacity.items * size_of::<Item>())))?;
        let counters = region(sum(&|launch| Some(launch.capacity.counters * 4)))?;
        let written = region(Some(0))?;
        let planes = |t: &ClassTable| t.planes.checked_mul(t.q_tiles)?.checked_mul(t.k_blocks);
        let classes = self.classes.iter().try_fold(0usize, |n, table| n.checked_add(planes(table)?));
        let classes = region(Some(classes?))?;
        let slot = |launch: &Launch| launch.kernel.slot_floats() * 4;
        let partials = region(sum(&|launch| launch.capacity.slots.checked_mul(slot(launch))))?;
        let len = region(Some(0))?;
        Some(Regions { items, counters, written, classes, partials, len })
    }

    pub(crate) fn launches(&self) -> &[Launch] {
        &self.launches
    }

    /// Tables of the launches, in their order; none where there is no mask.
    pub(crate) fn class_tables(&self) -> &[ClassTable] {
        &self.classes
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

    /// Items of all launches; of the portable kernel its groups of threads.
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
            return portable.parts();
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
    let tasks = |got| Unsupported::Tasks { got, max: MAX_ITEMS };
    if count > MAX_ITEMS {
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
    if launch.items.len() > MAX_ITEMS { Err(tasks(launch.items.len())) } else { Ok(launch) }
}

fn class_table(problem: &Problem, launch: &Launch) -> Option<ClassTable> {
    problem.desc().mask?;
    let [planes, heads, q_len, kv_len] = problem.mask_shape();
    let block_k = launch.kernel.tile.keys();
    Some(ClassTable {
        block_k,
        // An axis of 0 may be broadcast from 1.
        planes: planes.max(1).saturating_mul(heads),
        q_tiles: q_len.div_ceil(CLASS_ROWS).max(1),
        k_blocks: kv_len.div_ceil(block_k).max(1),
    })
}

/// Whether the keys of a problem lie in pages.
fn is_paged(problem: &Problem) -> bool {
    matches!(problem.desc().sequences, Sequences::Cached { .. })
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
                "{} tile {rows}x{keys} stages {} grid {} items {} splits {} + ",
                launch.kernel, tile.stages, launch.capacity.grid, launch.count, launch.splits
            )?;
        }
        write!(f, "workspace {}", self.workspace_bytes())
    }
}
