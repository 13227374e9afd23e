//! Plans of the portable kernels, on any device.
//!
//! Many rows are computed by `prefill`, in one launch where their tiles fill the device. Few rows are computed by `decode`, which stores
//! partial results that `merge` combines. Where rows alone cannot fill the device, keys are cut into splits until there are as many
//! threadgroups as it holds at a time, by either kernel. The number of
//! splits depends on no sequence's length, so that a step of decoding changes nothing but the numbers of its sequences.

use crate::codecs::Tables;
use crate::facts::GpuFacts;
use crate::kernels::attend::SEQUENCE_WORDS;
use crate::launches::{Launches, Strides, sequences};
use crate::shape::{Shape, kept_parts};
use crate::tile::{PortableTile, Tiling};
use flashtile_core::cache::KEPT_STEP;
use flashtile_core::plan::{PlanOptions, Unsupported};
use flashtile_core::problem::{KeyPart, Problem};
use flashtile_kernel::{Constant, Instance};

/// Pages whose size is a multiple of this have faster kernels, which are loaded before the first run.
pub const USUAL_PAGE_SIZE: usize = 16;

/// Kernels, and the values of their constants.
pub type Loads = Vec<(Instance, Vec<Constant>)>;

/// Alignment of the regions of scratch memory, in bytes.
const ALIGN: usize = 256;

/// i32 of a sequence.
const SEQUENCE: usize = SEQUENCE_WORDS as usize;

/// Where the regions of scratch memory start, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Regions {
    /// Starts and lengths of the sequences.
    pub sequences: usize,
    /// Bytes up to here change with the lengths of sequences.
    pub updated: usize,
    /// Zeros, in the place of tensors that a problem lacks.
    pub zeros: usize,
    /// Factors that the rotations of keys and of values look up.
    pub factors: [usize; 2],
    /// Codebooks.
    pub codebooks: usize,
    /// Bytes up to here are written before the first run.
    pub written: usize,
    /// Partial outputs.
    pub partial_out: usize,
    /// Row maxima and row sums.
    pub partial_max_sum: usize,
    /// Outputs that a run writes and nobody reads.
    pub unwanted: usize,
    /// Bytes of all of them.
    pub len: usize,
}

/// The launches of a problem on a device, and the memory that they need.
#[derive(Debug, Clone)]
pub struct Plan {
    problem: Problem,
    launches: Launches,
    tables: Tables,
    tile: PortableTile,
    regions: Regions,
}

impl Plan {
    /// Plans a problem for a device, with a tile that the caller chooses or the one that suits it.
    ///
    /// # Errors
    /// [`Unsupported`].
    pub fn new(
        problem: &Problem,
        facts: &GpuFacts,
        options: PlanOptions,
        asked: Option<PortableTile>,
    ) -> Result<Self, Unsupported> {
        if !options.skip_tiles {
            return Err(Unsupported::SkipTiles);
        }
        // Refuses dimensions before anything is computed from them.
        Shape::of(problem, PortableTile::new(8, 16, 1, 1))?;
        let asked = asked.map(|tile| tile.on(facts));
        let tile = asked.unwrap_or_else(|| PortableTile::of(problem, facts));
        tile.check(problem)?;
        let groups = groups(&Shape::of(problem, tile)?);
        let splits = tile.splits(problem, facts, options.splits, groups)?;
        let launches = Launches::new(problem, tile.with_splits(splits))?;
        fits(&launches, facts)?;
        let shape = launches.shape();
        let [[_, of_first @ ..], [_, of_merge @ ..]] = [shape.groups, shape.rows];
        let max = facts.max_groups;
        if let Some(got) = of_first.into_iter().chain(of_merge).map(|n| n as usize).find(|&n| n > max) {
            return Err(Unsupported::Tasks { got, max });
        }
        Self::of_launches(problem, launches, tile)
    }

    /// A plan whose work is cut so, whatever device it is for.
    ///
    /// # Errors
    /// [`Unsupported`].
    pub fn with_tiling(problem: &Problem, tiling: impl Into<Tiling>) -> Result<Self, Unsupported> {
        let tiling = tiling.into();
        Self::of_launches(problem, Launches::new(problem, tiling)?, tiling.tile)
    }

    fn of_launches(problem: &Problem, launches: Launches, tile: PortableTile) -> Result<Self, Unsupported> {
        let tables = Tables::of(problem);
        let regions = regions(problem, launches.shape(), &tables);
        let regions = regions.filter(|regions| isize::try_from(regions.len).is_ok());
        let regions = regions.ok_or_else(|| Unsupported::Workspace { kernel: launches.entry() })?;
        Ok(Self { problem: problem.clone(), launches, tables, tile, regions })
    }

    /// Replaces the instances by native code, for devices that run nothing else. Returns `None` if `find` has
    /// none for one of them.
    #[must_use]
    pub fn with_native(self, find: impl Fn(&Instance) -> Option<Instance>) -> Option<Self> {
        Some(Self { launches: self.launches.with_native(find)?, ..self })
    }

    /// The problem that this plan computes.
    #[must_use]
    pub const fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The launches of a run.
    #[must_use]
    pub const fn launches(&self) -> &Launches {
        &self.launches
    }

    /// How a threadgroup divides its work.
    #[must_use]
    pub const fn tile(&self) -> &PortableTile {
        &self.tile
    }

    /// Splits of the keys of a row.
    #[must_use]
    pub const fn splits(&self) -> usize {
        self.launches.shape().groups[1] as usize
    }

    /// Threadgroups of the first kernel.
    #[must_use]
    pub fn groups(&self) -> usize {
        groups(self.launches.shape())
    }

    /// Tables that kernels look up for the codecs of the problem.
    #[must_use]
    pub const fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Numbers of the sequences, as kernels read them. `pages` has the page of each sequence where every
    /// sequence of a cache has one page; otherwise it is empty.
    ///
    /// Numbers for the launch of each storage of kept tokens follow.
    pub(crate) fn sequences(&self, pages: &[u32]) -> Vec<i32> {
        let batch = |index: usize| self.problem.sequences()[index].batch;
        let page = |index: usize| pages.get(index).map_or_else(|| batch(index), |page| *page as usize);
        let mut numbers = sequences(&self.problem, page);
        // Kept tokens are found through their tables.
        self.launches.kept().iter().for_each(|_| numbers.extend(sequences(&self.problem, batch)));
        numbers
    }

    /// The bytes at the beginning of scratch memory that are written before the first run.
    #[must_use]
    pub fn written(&self) -> Vec<u8> {
        let mut bytes = self.updated();
        bytes.resize(self.regions.written, 0);
        let [k, v] = self.regions.factors;
        let [of_k, of_v] = &self.tables.factors;
        for (at, list) in [(k, of_k), (v, of_v), (self.regions.codebooks, &self.tables.codebooks)] {
            for (to, x) in bytes[at..].as_chunks_mut().0.iter_mut().zip(list) {
                *to = x.to_ne_bytes();
            }
        }
        bytes
    }

    /// The first bytes of [`Plan::written`], which change with the lengths of sequences.
    #[must_use]
    pub fn updated(&self) -> Vec<u8> {
        let mut bytes = vec![0u8; self.regions.updated];
        let at = self.regions.sequences;
        for (to, number) in bytes[at..].as_chunks_mut().0.iter_mut().zip(self.sequences(&[])) {
            *to = number.to_ne_bytes();
        }
        bytes
    }

    /// Kernels and the values of their constants, for runs whose rows start at multiples of `aligned` bytes, with and without a logsumexp, to
    /// be compiled ahead. Cached keys lie in pages of `page_size` tokens.
    ///
    /// # Errors
    /// [`Unsupported`] where no kernel takes such strides.
    pub fn loads(&self, aligned: usize, page_size: usize) -> Result<Loads, Unsupported> {
        let pages = self.problem.is_cached().then_some([page_size, 1]);
        let strides = |pages| Strides { aligned, pages, ..Strides::default() };
        let placed = self.launches.place(&strides(pages), false)?;
        // Slots of kept tokens are pages of as many tokens as a cache keeps.
        let kept = self.launches.kept().iter().enumerate().map(|(index, launch)| {
            let kept = self.problem.desc().kept.as_ref();
            let tokens = kept.map_or(1, |kept| match launch.part {
                KeyPart::First => kept.first_lens.iter().copied().max().unwrap_or(0).max(1),
                KeyPart::All | KeyPart::Codes | KeyPart::Last => kept.last + KEPT_STEP,
            });
            self.launches.place_kept(index, &strides(Some([tokens, 1])), false)
        });
        let kept = kept.collect::<Result<Vec<_>, _>>()?;
        // The last kernel writes the logsumexp.
        let without_lse = self.launches.constants(&placed, &kept, false).pop();
        let all = self.launches.constants(&placed, &kept, true).into_iter().chain(without_lse);
        Ok(all.map(|(instance, constants)| (instance.clone(), constants)).collect())
    }

    /// Scratch memory of a run.
    #[must_use]
    pub const fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Registers of a thread that the plan assumes.
    #[must_use]
    pub fn registers(&self, facts: &GpuFacts) -> usize {
        self.tile.registers(&self.problem, facts)
    }
}

impl PartialEq for Plan {
    /// Compares tile, shape and regions. The other fields follow from these and the problem.
    fn eq(&self, other: &Self) -> bool {
        let all = |of: &Self| (of.tile, *of.launches.shape(), of.regions);
        all(self) == all(other)
    }
}

impl std::fmt::Display for Plan {
    /// Prints tile, threadgroups of the first kernel, splits, and bytes of scratch memory, which follow the
    /// kernel's name in the line of a plan.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (tile, groups, splits) = (&self.tile, self.groups(), self.splits());
        write!(f, "tile {}x{} groups {groups} splits {splits} + ", tile.rows(), tile.keys())?;
        write!(f, "workspace {}", self.regions.len)
    }
}

/// Checks that a device can run the threadgroups of every launch.
fn fits(launches: &Launches, facts: &GpuFacts) -> Result<(), Unsupported> {
    for instance in launches.instances() {
        let (needed, available) = (instance.threads().most() as usize, facts.threads_per_group);
        if needed > available {
            return Err(Unsupported::Threads { kernel: instance.entry(), needed, available });
        }
        let (needed, available) = (instance.shared_bytes(), facts.shared_per_group);
        if needed > available {
            return Err(Unsupported::SharedMemory { needed, available });
        }
    }
    Ok(())
}

fn groups(shape: &Shape) -> usize {
    shape.groups.iter().map(|&n| n as usize).product()
}

fn regions(problem: &Problem, shape: &Shape, tables: &Tables) -> Option<Regions> {
    let mut len = 0usize;
    let mut region = |words: usize| {
        let start = len;
        len = len.checked_add(words.checked_mul(4)?)?.checked_next_multiple_of(ALIGN)?;
        Some(start)
    };
    Some(Regions {
        sequences: region(problem.sequences().len() * SEQUENCE * (1 + kept_parts(problem).len()))?,
        updated: region(0)?,
        zeros: region(1)?,
        factors: [region(tables.factors[0].len())?, region(tables.factors[1].len())?],
        codebooks: region(tables.codebooks.len())?,
        written: region(0)?,
        partial_out: region(shape.scratch[0])?,
        partial_max_sum: region(shape.scratch[1])?,
        unwanted: region(1)?,
        len: region(0)?,
    })
}

/// The line of an explanation that says what becomes of shared prefixes, where a problem has any.
#[must_use]
pub fn prefix_line(problem: &Problem) -> Option<(&'static str, String)> {
    let count = problem.desc().prefixes.len();
    let (noun, verb) = if count == 1 { ("prefix", "is") } else { ("prefixes", "are") };
    let said = || {
        format!("{count} shared {noun} {verb} read by each sequence: kernels of GPUs do not share the reads")
    };
    (count > 0).then(|| ("prefix", said()))
}
