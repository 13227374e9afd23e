//! Launches of the `mma.sync` kernels for one problem, and their scratch memory.

use super::kernel::Sm80Kernel;
use super::tile::Sm80Tile;
use crate::plan::facts::{CudaFacts, NATIVE_CAPABILITY};
use crate::plan::launch::{ALIGN, Launch, MASK_TILE_ROWS, MAX_GRID};
use crate::plan::schedule::{Assignment, tiles};
use crate::plan::work_tile::WorkTile;
use flashtile_core::plan::{PlanOptions, Unsupported};
use flashtile_core::problem::Problem;

/// The most work tiles of a plan.
const MAX_WORK_TILES: usize = 1 << 22;

/// Where the regions of scratch memory start, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Regions {
    /// The work tiles of each launch in turn, one after another.
    pub(crate) work_tiles: usize,
    pub(crate) counters: usize,
    /// Bytes up to here are written before the first run.
    pub(crate) written: usize,
    pub(crate) mask_tiles: usize,
    pub(crate) partials: usize,
    pub(crate) len: usize,
}

/// Shape of the table of mask tiles of a materialised mask: one byte for each plane, [`MASK_TILE_ROWS`] query positions and block of
/// keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MaskTileTable {
    pub(crate) block_k: usize,
    pub(crate) planes: usize,
    pub(crate) q_tiles: usize,
    pub(crate) k_blocks: usize,
}

/// The launches of a problem: sequences whose rows fit one fragment, and the others.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sm80Plan {
    launches: Vec<Launch<Sm80Kernel>>,
    mask_tiles: Vec<MaskTileTable>,
    regions: Regions,
}

impl Sm80Plan {
    /// Plans with the tile `asked` for all launches, or with the best of each.
    pub(crate) fn new(
        problem: &Problem,
        facts: &CudaFacts,
        options: PlanOptions,
        asked: Option<Sm80Tile>,
    ) -> Result<Self, Unsupported> {
        if facts.capability < NATIVE_CAPABILITY {
            return Err(Unsupported::Capability { got: facts.capability, min: NATIVE_CAPABILITY });
        }
        let gqa_group = problem.dims().gqa_group();
        let mut launches = Vec::new();
        for few in [true, false] {
            let belongs = |rows: usize| rows > 0 && (rows <= Sm80Tile::FRAGMENT_ROWS) == few;
            let chosen: Vec<usize> = (0..problem.sequences().len())
                .filter(|&s| belongs(problem.sequences()[s].q_len * gqa_group))
                .collect();
            if chosen.is_empty() {
                continue;
            }
            let rows = chosen.iter().map(|&s| problem.sequences()[s].q_len * gqa_group).max().unwrap_or(0);
            let kernel = Sm80Kernel::choose(problem, facts, rows, asked)?;
            launches.push(launch(problem, facts, options, kernel, &chosen)?);
        }
        if let Some(got) = options.splits {
            let max = launches.iter().map(|launch| launch.max_blocks).max().unwrap_or(1);
            if got == 0 || got > max {
                return Err(Unsupported::Splits { got, max });
            }
        }
        let mask_tiles: Vec<MaskTileTable> =
            launches.iter().filter_map(|launch| mask_tile_table(problem, launch)).collect();
        // The last two dimensions of the grid of the pre-pass over a mask.
        if let Some(got) = mask_tiles.iter().map(|t| t.planes.max(t.q_tiles)).find(|&n| n > MAX_GRID) {
            return Err(Unsupported::Tasks { got, max: MAX_GRID });
        }
        let mut plan = Self { launches, mask_tiles, regions: Regions::default() };
        let unaddressable = || Unsupported::Workspace { kernel: plan.kernel_names() };
        plan.regions = plan.layout().filter(|r| isize::try_from(r.len).is_ok()).ok_or_else(unaddressable)?;
        Ok(plan)
    }

    fn layout(&self) -> Option<Regions> {
        let mut len = 0usize;
        let mut region = |bytes: Option<usize>| {
            let start = len;
            len = len.checked_add(bytes?)?.checked_next_multiple_of(ALIGN)?;
            Some(start)
        };
        let sum = |of: &dyn Fn(&Launch<Sm80Kernel>) -> Option<usize>| {
            self.launches.iter().try_fold(0usize, |n, launch| n.checked_add(of(launch)?))
        };
        let work_tiles = region(sum(&|launch| Some(launch.capacity.work_tiles * size_of::<WorkTile>())))?;
        let counters = region(sum(&|launch| Some(launch.capacity.counters * 4)))?;
        let written = region(Some(0))?;
        let planes = |t: &MaskTileTable| t.planes.checked_mul(t.q_tiles)?.checked_mul(t.k_blocks);
        let mask_tiles = self.mask_tiles.iter().try_fold(0usize, |n, table| n.checked_add(planes(table)?));
        let mask_tiles = region(Some(mask_tiles?))?;
        let partial = |launch: &Launch<Sm80Kernel>| launch.kernel.partial_floats() * 4;
        let partials = region(sum(&|launch| launch.capacity.partials.checked_mul(partial(launch))))?;
        let len = region(Some(0))?;
        Some(Regions { work_tiles, counters, written, mask_tiles, partials, len })
    }

    pub(crate) fn launches(&self) -> &[Launch<Sm80Kernel>] {
        &self.launches
    }

    /// Tables of the launches, in their order; none where there is no mask.
    pub(crate) fn mask_tile_tables(&self) -> &[MaskTileTable] {
        &self.mask_tiles
    }

    pub(crate) const fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Names of the kernels, joined by `+`.
    pub(crate) fn kernel_names(&self) -> String {
        let names: Vec<String> = self.launches.iter().map(|launch| launch.kernel.to_string()).collect();
        if names.is_empty() { "cuda-none".to_owned() } else { names.join("+") }
    }

    /// Work tiles of all launches.
    pub(crate) fn work_tile_count(&self) -> usize {
        self.launches.iter().map(|launch| launch.count).sum()
    }

    /// The most splits of a tile.
    pub(crate) fn splits(&self) -> usize {
        self.launches.iter().map(|launch| launch.splits).max().unwrap_or(1)
    }
}

impl std::fmt::Display for Sm80Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for launch in &self.launches {
            let tile = &launch.kernel.tile;
            let (rows, keys) = (tile.rows(), tile.keys());
            write!(
                f,
                "{} tile {rows}x{keys} stages {} grid {} work_tiles {} splits {} + ",
                launch.kernel, tile.stages, launch.capacity.grid, launch.count, launch.splits
            )?;
        }
        Ok(())
    }
}

fn launch(
    problem: &Problem,
    facts: &CudaFacts,
    options: PlanOptions,
    kernel: Sm80Kernel,
    sequences: &[usize],
) -> Result<Launch<Sm80Kernel>, Unsupported> {
    let (tile, shape) = (kernel.tile, kernel.tile_shape(problem));
    let heads = problem.dims().kv_heads;
    let row_tiles = |&s: &usize| {
        (problem.sequences()[s].q_len * problem.dims().gqa_group()).div_ceil(shape.rows).saturating_mul(heads)
    };
    let count = sequences.iter().map(row_tiles).fold(0usize, usize::saturating_add);
    let count = count.saturating_mul(shape.panels).saturating_mul(options.splits.unwrap_or(1));
    let too_many = |got| Unsupported::Tasks { got, max: MAX_WORK_TILES };
    if count > MAX_WORK_TILES {
        return Err(too_many(count));
    }
    let work = tiles(problem, &shape, sequences, options.skip_tiles);
    let max_blocks = work.iter().map(|t| t.blocks(shape.keys)).max().unwrap_or(1);
    let room = facts.multiprocessors * tile.resident;
    let assignment = match options.splits {
        Some(splits) => Assignment::even(work, &shape, splits.max(1)),
        None if work.len() >= room && !tile.warps_split_keys() => {
            let row = (kernel.head_dim + kernel.value_dim) * problem.dtype().bytes();
            Assignment::whole(work, shape.keys, facts.l2 / 2 / row, room)
        }
        None => Assignment::equal(work, &shape, room),
    };
    let launch = Launch { max_blocks, ..assignment.launch(kernel, shape.teams) };
    if launch.work_tiles.len() > MAX_WORK_TILES {
        return Err(too_many(launch.work_tiles.len()));
    }
    Ok(launch)
}

fn mask_tile_table(problem: &Problem, launch: &Launch<Sm80Kernel>) -> Option<MaskTileTable> {
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
