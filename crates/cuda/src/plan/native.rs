//! Launches of native kernels for one problem, and their scratch memory.

use super::facts::{CudaFacts, NATIVE_CAPABILITY};
use super::kernel::CudaKernel;
use super::launch::{ALIGN, Launch, MASK_TILE_ROWS, MAX_GRID};
use super::native_kernel::{NativeKernel, NativeTile};
use super::schedule::{Assignment, tiles};
use super::sm80::Sm80Tile;
use super::work_tile::{MAX_RECOMPUTED, WorkTile};
use flashtile_core::plan::{PlanOptions, Unsupported};
use flashtile_core::problem::{Problem, Sequences};

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

/// The launches of a problem: sequences whose rows fit one fragment, and the others. Each has a kernel of one architecture.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NativePlan {
    launches: Vec<Launch<NativeKernel>>,
    mask_tiles: Vec<MaskTileTable>,
    regions: Regions,
}

impl NativePlan {
    /// Plans with the tile `asked` for all launches, or with the best of each.
    pub(crate) fn new(
        problem: &Problem,
        facts: &CudaFacts,
        options: PlanOptions,
        asked: Option<NativeTile>,
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
            let kernel = NativeKernel::choose(problem, facts, &chosen, asked)?;
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
        let sum = |of: &dyn Fn(&Launch<NativeKernel>) -> Option<usize>| {
            self.launches.iter().try_fold(0usize, |n, launch| n.checked_add(of(launch)?))
        };
        let work_tiles = region(sum(&|launch| Some(launch.capacity.work_tiles * size_of::<WorkTile>())))?;
        let counters = region(sum(&|launch| Some(launch.capacity.counters * 4)))?;
        let written = region(Some(0))?;
        let planes = |t: &MaskTileTable| t.planes.checked_mul(t.q_tiles)?.checked_mul(t.k_blocks);
        let mask_tiles = self.mask_tiles.iter().try_fold(0usize, |n, table| n.checked_add(planes(table)?));
        let mask_tiles = region(Some(mask_tiles?))?;
        let partial = |launch: &Launch<NativeKernel>| launch.kernel.partial_floats * 4;
        let partials = region(sum(&|launch| launch.capacity.partials.checked_mul(partial(launch))))?;
        let len = region(Some(0))?;
        Some(Regions { work_tiles, counters, written, mask_tiles, partials, len })
    }

    pub(crate) fn launches(&self) -> &[Launch<NativeKernel>] {
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
        let names: Vec<&str> = self.launches.iter().map(|launch| &*launch.kernel.public.name).collect();
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

impl std::fmt::Display for NativePlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for launch in &self.launches {
            let Launch { kernel, count, splits, capacity, .. } = launch;
            let CudaKernel { name, rows, keys, stages, .. } = &kernel.public;
            write!(
                f,
                "{name} tile {rows}x{keys} stages {stages} grid {} work_tiles {count} splits {splits} + ",
                capacity.grid
            )?;
        }
        Ok(())
    }
}

fn launch(
    problem: &Problem,
    facts: &CudaFacts,
    options: PlanOptions,
    kernel: NativeKernel,
    sequences: &[usize],
) -> Result<Launch<NativeKernel>, Unsupported> {
    let shape = kernel.tile_shape(problem);
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
    let room = facts.multiprocessors * kernel.public.resident;
    let assignment = match options.splits {
        Some(splits) => Assignment::even(work, &shape, splits.max(1)),
        None if work.len() >= room && !kernel.public.warps_split_keys => {
            let section = kernel.section(facts);
            // A `wgmma` kernel recomputes a work tile before it takes the next one from a queue; others end a list, then recompute.
            if kernel.public.uses_wgmma {
                // Other numbers of keys need the same work tiles in number: a graph has captured it.
                let cuts = problem.desc().sequences == Sequences::Dense;
                Assignment::queue(work, &shape, section, room, cuts)
            } else {
                Assignment::whole(work, shape.keys, section, room, MAX_RECOMPUTED)
            }
        }
        None => Assignment::equal(work, &shape, room),
    };
    let launch = Launch { max_blocks, ..assignment.launch(kernel, shape.teams) };
    if launch.work_tiles.len() > MAX_WORK_TILES {
        return Err(too_many(launch.work_tiles.len()));
    }
    Ok(launch)
}

fn mask_tile_table(problem: &Problem, launch: &Launch<NativeKernel>) -> Option<MaskTileTable> {
    problem.desc().mask?;
    let [planes, heads, q_len, kv_len] = problem.mask_shape();
    let block_k = launch.kernel.public.keys;
    Some(MaskTileTable {
        block_k,
        // An axis of 0 may be broadcast from 1.
        planes: planes.max(1).saturating_mul(heads),
        q_tiles: q_len.div_ceil(MASK_TILE_ROWS).max(1),
        k_blocks: kv_len.div_ceil(block_k).max(1),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::machines::{A100, H100};
    use crate::plan::sm90::Sm90Tile;
    use flashtile_core::dtype::{Dtype, MaskKind};
    use flashtile_core::problem::{Dims, HeadShape, ProblemDesc, QOffset, SeqLens, Visibility};

    /// Four query heads for each of two key/value heads: a query has 4 rows.
    fn desc(dtype: Dtype, q_len: usize, head_dim: usize, value_dim: usize) -> ProblemDesc {
        let dims = Dims { batch: 1, q_heads: 8, kv_heads: 2, q_len, kv_len: 4096, head_dim, value_dim };
        ProblemDesc::new(dims, dtype)
    }

    fn plan(
        desc: ProblemDesc,
        facts: &CudaFacts,
        asked: Option<NativeTile>,
    ) -> Result<NativePlan, Unsupported> {
        NativePlan::new(&desc.validate().unwrap(), facts, PlanOptions::default(), asked)
    }

    fn names(desc: ProblemDesc, facts: &CudaFacts) -> String {
        plan(desc, facts, None).unwrap().kernel_names()
    }

    #[test]
    fn tiles_of_wgmma_depend_on_how_many_keys_rows_see() {
        let of = |visibility, kv_len, head_dim| {
            let mut desc = desc(Dtype::BF16, 1100, head_dim, head_dim);
            desc.dims.batch = 16;
            (desc.dims.kv_len, desc.visibility) = (kv_len, visibility);
            desc.q_offset = Some(QOffset::BottomRight);
            names(desc, &H100)
        };
        assert_eq!(of(Visibility::full(), 4096, 64), "cuda-prefill-bf16-d64-wgmma192x112");
        assert_eq!(of(Visibility::causal(), 4096, 64), "cuda-prefill-bf16-d64-wgmma192x96");
        assert_eq!(of(Visibility::window(Some(127), Some(0)), 4096, 64), "cuda-prefill-bf16-d64-wgmma192x96");
        assert_eq!(of(Visibility::full(), 4096, 256), "cuda-prefill-bf16-d256-wgmma128x64");
        assert_eq!(of(Visibility::full(), 4097, 256), "cuda-prefill-bf16-d256-wgmma128x80");
    }

    #[test]
    fn chunks_of_the_same_sequences_have_the_same_kernel() {
        for head_dim in [64, 256] {
            for window in [None, Some(127)] {
                let of = |kv_len| {
                    let shape = HeadShape { q_heads: 8, kv_heads: 2, head_dim, value_dim: head_dim };
                    let lens = [SeqLens { q_len: 200, kv_len }, SeqLens { q_len: 1, kv_len: 9000 }];
                    let mut desc = ProblemDesc::cached(shape, Dtype::BF16, &lens);
                    desc.dims.kv_len = 9000;
                    desc.visibility = Visibility::window(window, Some(0));
                    names(desc, &H100)
                };
                let first = of(200);
                for kv_len in [257, 1536, 2049, 8192, 9000] {
                    assert_eq!(of(kv_len), first, "{kv_len} {window:?}");
                }
            }
        }
    }

    #[test]
    fn steps_of_decoding_have_no_say_in_the_tiles_of_chunks() {
        let of = |lens: &[SeqLens]| {
            let shape = HeadShape { q_heads: 8, kv_heads: 8, head_dim: 64, value_dim: 64 };
            names(ProblemDesc::cached(shape, Dtype::BF16, lens), &H100)
        };
        let mut lens = vec![SeqLens { q_len: 4096, kv_len: 4096 }];
        let alone = of(&lens);
        lens.extend([SeqLens { q_len: 1, kv_len: 4096 }; 64]);
        assert!(alone.contains("wgmma192") && of(&lens).ends_with(&alone), "{alone} {}", of(&lens));
    }

    #[test]
    fn many_rows_take_wgmma() {
        let bf16 = |q_len, head_dim, value_dim| names(desc(Dtype::BF16, q_len, head_dim, value_dim), &H100);
        assert_eq!(bf16(4, 128, 128), "cuda-decode-bf16-d128-mma16x64");
        assert_eq!(bf16(16, 128, 128), "cuda-prefill-bf16-d128-mma64x64");
        assert_eq!(bf16(17, 128, 128), "cuda-prefill-bf16-d128-wgmma128x128");
        assert_eq!(bf16(1000, 40, 33), "cuda-prefill-bf16-d64-wgmma192x112");
        assert_eq!(bf16(1000, 192, 128), "cuda-prefill-bf16-d192x128-wgmma128x128");
        assert_eq!(bf16(1000, 192, 192), "cuda-prefill-bf16-d192-wgmma128x96");
        assert_eq!(bf16(1000, 256, 256), "cuda-prefill-bf16-d256-wgmma128x64");
        assert_eq!(bf16(1000, 257, 64), "cuda-prefill-bf16-d288x128-wgmma64x64");
        assert_eq!(bf16(1000, 64, 257), "cuda-prefill-bf16-d64x384-wgmma64x64");
        assert_eq!(bf16(1000, 512, 512), "cuda-prefill-bf16-d512-wgmma64x64");
        let f16 = |facts: &CudaFacts| names(desc(Dtype::F16, 1000, 128, 128), facts);
        assert_eq!(f16(&H100), "cuda-prefill-f16-d128-wgmma128x128");
        for facts in [CudaFacts { wgmma: false, ..H100 }, A100] {
            assert_eq!(f16(&facts), "cuda-prefill-f16-d128-mma128x64");
        }
        let f32 = |q_len, head_dim, value_dim| names(desc(Dtype::F32, q_len, head_dim, value_dim), &H100);
        assert_eq!(f32(16, 128, 128), "cuda-prefill-f32-d128-mma64x32");
        assert_eq!(f32(1000, 64, 64), "cuda-prefill-f32-d64-wgmma128x64");
        assert_eq!(f32(1000, 128, 128), "cuda-prefill-f32-d128-wgmma128x32");
        assert_eq!(f32(1000, 192, 128), "cuda-prefill-f32-d192x128-wgmma64x64");
        // Values in two panels.
        assert_eq!(f32(1000, 256, 256), "cuda-prefill-f32-d256x128-wgmma64x48");
        assert_eq!(f32(1000, 257, 64), "cuda-prefill-f32-d288x64-mma64x32");
    }

    #[test]
    fn names_say_what_kernels_read_and_modify() {
        let with = |change: &dyn Fn(&mut ProblemDesc)| {
            let mut desc = desc(Dtype::BF16, 1000, 256, 256);
            change(&mut desc);
            names(desc, &H100)
        };
        // Rows with a bias leave less shared memory to keys.
        assert_eq!(with(&|desc| desc.softcap = Some(30.0)), "cuda-prefill-bf16-d256-wgmma128x48-bias");
        assert_eq!(with(&|desc| desc.mask = Some(MaskKind::Bool)), "cuda-prefill-bf16-d256-wgmma128x48-mask");
        let shape = HeadShape { q_heads: 8, kv_heads: 2, head_dim: 128, value_dim: 128 };
        let lens = [SeqLens { q_len: 500, kv_len: 900 }, SeqLens { q_len: 1, kv_len: 900 }];
        let cached = ProblemDesc::cached(shape, Dtype::BF16, &lens);
        assert_eq!(
            names(cached, &H100),
            "cuda-decode-bf16-d128-mma16x64-paged+cuda-prefill-bf16-d128-wgmma128x128-paged"
        );
    }

    #[test]
    fn launches_have_the_tile_that_is_asked_for() {
        let sm80 = Some(NativeTile::Sm80(Sm80Tile::new(4, 1, 1, 32, 2)));
        let names = plan(desc(Dtype::BF16, 1000, 128, 128), &H100, sm80).unwrap().kernel_names();
        assert_eq!(names, "cuda-prefill-bf16-d128-mma64x32");
        let sm90 = Some(NativeTile::Sm90(Sm90Tile::new(1, 48, 3)));
        let names = plan(desc(Dtype::BF16, 1, 128, 128), &H100, sm90).unwrap().kernel_names();
        assert_eq!(names, "cuda-prefill-bf16-d128-wgmma64x48");
        let largest = Some(NativeTile::Sm90(Sm90Tile::new(3, 256, 4)));
        for (dtype, dim, facts, asked) in [
            (Dtype::BF16, 128, A100, sm90),
            (Dtype::F32, 257, H100, sm90),
            (Dtype::F32, 64, H100, Some(NativeTile::Sm90(Sm90Tile::new(3, 48, 1)))),
            (Dtype::BF16, 257, H100, sm90),
            (Dtype::BF16, 128, H100, Some(NativeTile::Sm90(Sm90Tile::new(4, 48, 3)))),
        ] {
            let refusal = plan(desc(dtype, 1000, dim, dim), &facts, asked).unwrap_err();
            assert!(matches!(refusal, Unsupported::Tile { .. }), "{refusal}");
        }
        let refusal = plan(desc(Dtype::BF16, 1000, 128, 128), &H100, largest).unwrap_err();
        assert!(matches!(refusal, Unsupported::SharedMemory { .. }), "{refusal}");
    }

    #[test]
    fn a_block_of_threads_has_any_number_of_work_tiles_of_wgmma() {
        let mut many = desc(Dtype::BF16, 128, 64, 64);
        (many.dims.batch, many.dims.kv_len) = (4096, 128);
        let grids = [H100, CudaFacts { wgmma: false, ..H100 }].map(|facts| {
            let plan = plan(many.clone(), &facts, None).unwrap();
            plan.launches()[0].capacity.grid
        });
        assert_eq!(grids[0], 132);
        assert!(grids[1] > 264 && grids[1].is_multiple_of(132), "{grids:?}");
    }
}
