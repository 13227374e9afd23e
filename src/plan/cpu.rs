//! Plans of the CPU backend.
//!
//! Keys are cut into blocks of [`CpuPlan::block_k`] keys, counted from the sequence's first key. Each block gives every
//! query row that sees it a partial result (maximum, sum, weighted values), and a row folds its partials in key order. The
//! bits of a row therefore depend on its own keys alone: not on the thread count, on splits, on the other rows, or on the
//! other sequences of the batch.
//!
//! The unit of work is a task: one key/value head of one sequence, a range of its query rows, a range of its key blocks.
//! Rows are (position, head of the group) pairs ordered by position, so that all query heads of a group share each packed
//! block and neighbouring rows see nearly the same keys.

use super::{PlanOptions, Unsupported};
use crate::Dtype;
use crate::problem::{Problem, Sequence};
use std::ops::Range;

/// Instruction set of a CPU kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust that the compiler vectorises.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with BF16: bf16 problems multiply in pairs of bf16 and accumulate in f32.
    Avx512Bf16,
    /// AVX-512 with BF16 and AMX: bf16 problems multiply in tiles of pairs of bf16 and accumulate in f32.
    Amx,
}

impl Isa {
    /// Every instruction set, each a superset of those before it on its architecture.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// The one whose kernels compute a dtype on a machine with this one.
    #[must_use]
    pub const fn for_dtype(self, dtype: Dtype) -> Self {
        match (self, dtype) {
            (Self::Avx512Bf16 | Self::Amx, Dtype::F32 | Dtype::F16) => Self::Avx512,
            (isa, _) => isa,
        }
    }

    /// Name as used in kernel names and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
        }
    }

    /// f32 lanes of a vector register.
    #[must_use]
    pub const fn lanes(self) -> usize {
        match self {
            Self::Portable => 4,
            Self::Avx2 => 8,
            Self::Avx512 | Self::Avx512Bf16 | Self::Amx => 16,
        }
    }

    /// Rows and vectors of the register tile.
    pub(crate) const fn register_tile(self) -> (usize, usize) {
        match self {
            Self::Portable => (4, 2),
            Self::Avx2 => (6, 2),
            Self::Avx512 | Self::Avx512Bf16 => (6, 4),
            Self::Amx => (32, 4),
        }
    }

    /// Whether products are of pairs of bf16, with weights rounded to bf16.
    pub(crate) const fn multiplies_pairs(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::Amx)
    }

    /// f32 that a row of packed queries or keys takes: whole steps of the matrix unit where tiles are multiplied.
    const fn packed_depth(self, head_dim: usize) -> usize {
        match self {
            Self::Amx => head_dim.div_ceil(2).next_multiple_of(16),
            _ => head_dim,
        }
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What the planner knows of a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct CpuFacts {
    /// Best instruction set to use.
    pub isa: Isa,
    /// Threads to use.
    pub threads: usize,
    /// First-level data cache of a core, in bytes.
    pub l1d: usize,
    /// Second-level cache of a core, in bytes.
    pub l2: usize,
    /// Last-level cache, in bytes.
    pub l3: usize,
}

/// One unit of work: a range of query rows and key blocks of one key/value head of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Task {
    pub(crate) sequence: usize,
    pub(crate) kv_head: usize,
    /// First row, in (position, group head) order.
    pub(crate) row: usize,
    pub(crate) rows: usize,
    /// Key blocks, whole; the visible ones among them are computed.
    pub(crate) blocks: (usize, usize),
    /// Visible pairs, for ordering the longest tasks first.
    pub(crate) work: u64,
    /// Where a split task stores the partials of its blocks: index of the partial of its first row and of the sequence's
    /// first visible block. Unsplit tasks write the output themselves.
    pub(crate) partial: Option<PartialSlot>,
}

/// Place of a row range's partials: slot of `(row, block)` is `base + (block - first_block) * rows + row`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartialSlot {
    pub(crate) base: usize,
    pub(crate) first_block: usize,
    pub(crate) blocks: usize,
}

/// Offsets in f32 elements of one thread's scratch memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScratchLayout {
    pub(crate) q: usize,
    pub(crate) k: usize,
    pub(crate) v: usize,
    pub(crate) scores: usize,
    pub(crate) partial: usize,
    pub(crate) acc: usize,
    /// Running maximum and sum of `row_stats` rows each, then those of one block for `tile_stats` rows.
    pub(crate) stats: usize,
    pub(crate) row_stats: usize,
    pub(crate) tile_stats: usize,
    pub(crate) len: usize,
}

/// Shape of the table that classifies a materialised mask: one byte for each mask plane, tile of query positions and block
/// of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MaskClasses {
    /// Query positions of a tile.
    pub(crate) tile_q: usize,
    /// Most planes, query tiles and key blocks that a mask of this problem may have.
    pub(crate) planes: usize,
    pub(crate) q_tiles: usize,
    pub(crate) k_blocks: usize,
}

impl MaskClasses {
    fn bytes(&self) -> Option<usize> {
        self.planes.checked_mul(self.q_tiles)?.checked_mul(self.k_blocks)
    }
}

/// A plan of the CPU backend. Made by [`Cpu::plan`](crate::Cpu::plan) for the machine at hand, or by [`CpuPlan::new`] for any.
#[derive(Debug, Clone, PartialEq)]
pub struct CpuPlan {
    problem: Problem,
    options: PlanOptions,
    isa: Isa,
    threads: usize,
    block_k: usize,
    tile_rows: usize,
    task_rows: usize,
    splits: usize,
    tasks: Vec<Task>,
    partial_slots: usize,
    scratch: ScratchLayout,
    mask_classes: Option<MaskClasses>,
    workspace_bytes: usize,
}

/// Keys of a block. Fixed, because the bits of a result depend on it: 256 keys keep a tile of scores in the first-level
/// cache and make the cost of folding a partial result negligible.
const BLOCK_K: usize = 256;
/// Most query rows of a task that reads keys and values in place, once: their scores of one vector of keys stay in registers
/// beside a transposed block of the keys.
pub(crate) const STREAM_ROWS: usize = 16;
/// Query positions of a mask tile.
const MASK_TILE_Q: usize = 16;
/// Upper bound of the memory that split tasks may take for partials, in bytes.
const MAX_PARTIAL_BYTES: usize = 64 << 20;
/// Most threads of a plan.
const MAX_THREADS: usize = 1 << 12;
/// Most tasks of a plan.
const MAX_TASKS: usize = 1 << 22;
/// Tasks per thread that even out differences in work.
const TASKS_PER_THREAD: usize = 4;

impl CpuPlan {
    /// Plans `problem` for a machine. Pure; cost `O(tasks log tasks + query rows)`.
    ///
    /// # Errors
    /// [`Unsupported::Splits`] where the option asks for more splits than there are blocks of keys;
    /// [`Unsupported::Tasks`] where the problem would be cut into more units of work than a plan lists;
    /// [`Unsupported::Workspace`] where the workspace is not addressable.
    pub fn new(problem: &Problem, facts: &CpuFacts, options: PlanOptions) -> Result<Self, Unsupported> {
        let dims = problem.dims();
        let isa = facts.isa.for_dtype(problem.dtype());
        let threads = facts.threads.clamp(1, MAX_THREADS);
        let group = dims.group();
        let sequences = problem.sequences();
        let (mr, nv) = isa.register_tile();
        let value_stride = dims.value_dim.next_multiple_of(isa.lanes());

        let max_blocks = sequences.iter().map(|s| s.kv_len.div_ceil(BLOCK_K)).max().unwrap_or(0).max(1);
        if let Some(got) = options.splits
            && (got == 0 || got > max_blocks)
        {
            return Err(Unsupported::Splits { got, max: max_blocks });
        }

        // Rows whose scores of one block fill about half of the first-level cache.
        let tile_rows = (facts.l1d / 2 / (BLOCK_K * 4)).clamp(STREAM_ROWS, 48).next_multiple_of(mr);
        // Rows that share a packed block: q, the accumulators and the block stay in the second-level cache.
        let row_bytes = (dims.head_dim + 2 * value_stride) * 4;
        let block_bytes = BLOCK_K * (dims.head_dim + value_stride) * 4;
        let most_rows = (facts.l2.saturating_sub(block_bytes) / 4 * 3 / row_bytes).clamp(tile_rows, 768);
        let longest = sequences.iter().map(|s| s.q_len * group).max().unwrap_or(0).max(1);
        let total_rows: usize = sequences.iter().map(|s| s.q_len * group).sum::<usize>() * dims.kv_heads;
        let even = total_rows.div_ceil(threads * TASKS_PER_THREAD);
        let task_rows =
            if threads == 1 { most_rows } else { even.clamp((2 * tile_rows).min(most_rows), most_rows) };
        let task_rows = task_rows.min(longest.next_multiple_of(mr)).next_multiple_of(mr);

        let row_tasks: usize =
            sequences.iter().map(|s| (s.q_len * group).div_ceil(task_rows)).sum::<usize>() * dims.kv_heads;
        let splits = options.splits.unwrap_or_else(|| {
            let wanted = (threads * TASKS_PER_THREAD).div_ceil(row_tasks.max(1));
            let partial_bytes = total_rows.saturating_mul(max_blocks).saturating_mul((value_stride + 2) * 4);
            let affordable = partial_bytes <= MAX_PARTIAL_BYTES;
            if threads > 1 && row_tasks < 2 * threads && affordable { wanted.clamp(1, max_blocks) } else { 1 }
        });

        let most_tasks = row_tasks.saturating_mul(splits);
        if most_tasks > MAX_TASKS {
            return Err(Unsupported::Tasks { got: most_tasks, max: MAX_TASKS });
        }

        let mut plan = Self {
            problem: problem.clone(),
            options,
            isa,
            threads,
            block_k: BLOCK_K,
            tile_rows,
            task_rows,
            splits,
            tasks: Vec::new(),
            partial_slots: 0,
            scratch: scratch(
                (task_rows, tile_rows),
                isa.packed_depth(dims.head_dim),
                value_stride,
                nv * isa.lanes(),
            ),
            mask_classes: None,
            workspace_bytes: 0,
        };
        let overflow = || Unsupported::Workspace { kernel: plan_name(problem, isa) };
        (plan.tasks, plan.partial_slots) = plan.cut().ok_or_else(overflow)?;
        if problem.desc().mask.is_some() {
            let [planes, heads, q_len, kv_len] = problem.mask_shape();
            // An axis of 0 may be broadcast from 1.
            plan.mask_classes = Some(MaskClasses {
                tile_q: MASK_TILE_Q,
                planes: planes.max(1).checked_mul(heads).ok_or_else(overflow)?,
                q_tiles: q_len.div_ceil(MASK_TILE_Q).max(1),
                k_blocks: kv_len.div_ceil(BLOCK_K).max(1),
            });
        }
        plan.workspace_bytes = plan.size().filter(|&n| isize::try_from(n).is_ok()).ok_or_else(overflow)?;
        Ok(plan)
    }

    /// Tasks, longest first, and the number of partials that they store. `None` on overflow.
    fn cut(&self) -> Option<(Vec<Task>, usize)> {
        let mut tasks = Vec::new();
        let mut slots = 0usize;
        let group = self.problem.dims().group();
        for (index, s) in self.problem.sequences().iter().enumerate() {
            let total = s.q_len * group;
            for row in (0..total).step_by(self.task_rows) {
                let rows = self.task_rows.min(total - row);
                let (first, last) = self.blocks(s, row, rows);
                let pieces = self.splits.min((last - first).max(1));
                let work =
                    |blocks: (usize, usize)| self.work(s, row / group..(row + rows).div_ceil(group), blocks);
                for kv_head in 0..self.problem.dims().kv_heads {
                    let partial = if pieces > 1 {
                        let slot = PartialSlot { base: slots, first_block: first, blocks: last - first };
                        slots = slots.checked_add(rows.checked_mul(last - first)?)?;
                        Some(slot)
                    } else {
                        None
                    };
                    for piece in 0..pieces {
                        let at = |n: usize| first + (last - first) * n / pieces;
                        let blocks = (at(piece), at(piece + 1));
                        let work = work(blocks);
                        tasks.push(Task { sequence: index, kv_head, row, rows, blocks, work, partial });
                    }
                }
            }
        }
        // Stable: tasks of equal work keep their order, neighbours share keys in the last-level cache.
        tasks.sort_by_key(|t| std::cmp::Reverse(t.work));
        Some((tasks, slots))
    }

    /// Key blocks that some row of the range sees; all of them where tiles are not skipped.
    fn blocks(&self, s: &Sequence, row: usize, rows: usize) -> (usize, usize) {
        let group = self.problem.dims().group();
        let keys = if self.options.skip_tiles {
            visible_union(&self.problem, s, row / group..(row + rows).div_ceil(group))
        } else {
            0..s.kv_len
        };
        if keys.is_empty() { (0, 0) } else { (keys.start / self.block_k, keys.end.div_ceil(self.block_k)) }
    }

    /// Visible pairs of one head, estimated from the first and last position.
    fn work(&self, s: &Sequence, positions: Range<usize>, (first, last): (usize, usize)) -> u64 {
        let inside = |i: usize| {
            let keys = self.problem.visible(s, i);
            let (lo, hi) = (first * self.block_k, last * self.block_k);
            keys.end.min(hi).saturating_sub(keys.start.max(lo)) as u64
        };
        (inside(positions.start) + inside(positions.end - 1)) * positions.len() as u64 / 2
    }

    fn size(&self) -> Option<usize> {
        let classes = self.mask_classes.as_ref().map_or(Some(0), MaskClasses::bytes)?;
        let scratch = self.scratch.len.checked_mul(self.workers())?;
        // Values, maximum and sum of each partial.
        let partials = self.partial_slots.checked_mul(self.value_stride() + 2)?;
        scratch.checked_add(partials)?.checked_mul(4)?.checked_add(classes)
    }

    /// Bytes at the start of the workspace that hold f32: scratch memory of the workers, then partials.
    pub(crate) fn float_bytes(&self) -> usize {
        4 * (self.scratch.len * self.workers() + self.partial_slots * (self.value_stride() + 2))
    }

    /// Elements between rows of packed values and accumulators.
    pub(crate) fn value_stride(&self) -> usize {
        self.problem.dims().value_dim.next_multiple_of(self.isa.lanes())
    }

    /// Threads that have work.
    pub(crate) fn workers(&self) -> usize {
        self.threads.min(self.tasks.len()).max(1)
    }

    pub(crate) fn tasks(&self) -> &[Task] {
        &self.tasks
    }

    pub(crate) const fn scratch(&self) -> &ScratchLayout {
        &self.scratch
    }

    pub(crate) const fn mask_classes(&self) -> Option<&MaskClasses> {
        self.mask_classes.as_ref()
    }

    pub(crate) const fn partial_slots(&self) -> usize {
        self.partial_slots
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

    /// Instruction set.
    #[must_use]
    pub const fn isa(&self) -> Isa {
        self.isa
    }

    /// Most threads that share the tasks.
    #[must_use]
    pub const fn threads(&self) -> usize {
        self.threads
    }

    /// Keys of a block.
    #[must_use]
    pub const fn block_k(&self) -> usize {
        self.block_k
    }

    /// Query rows of a tile: the unit that is skipped, computed whole or masked.
    #[must_use]
    pub const fn tile_rows(&self) -> usize {
        self.tile_rows
    }

    /// Query rows (of all heads of a group) that share each packed block of keys.
    #[must_use]
    pub const fn task_rows(&self) -> usize {
        self.task_rows
    }

    /// Pieces into which the keys of a sequence are divided for parallel work.
    #[must_use]
    pub const fn splits(&self) -> usize {
        self.splits
    }

    /// Number of units of work.
    #[must_use]
    pub const fn task_count(&self) -> usize {
        self.tasks.len()
    }

    /// Bytes of workspace that a run needs.
    #[must_use]
    pub const fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Name of the kernel: `cpu-{prefill|decode}-{dtype}-d{head_dim}-{isa}`, with `x{value_dim}` where that differs; decode
    /// where the query rows of a key/value head are so few that keys and values are streamed once, from where they lie.
    #[must_use]
    pub fn kernel(&self) -> String {
        plan_name(&self.problem, self.isa)
    }
}

fn plan_name(problem: &Problem, isa: Isa) -> String {
    let d = problem.dims();
    let op = if problem.sequences().iter().all(|s| s.q_len * d.group() <= STREAM_ROWS) {
        "decode"
    } else {
        "prefill"
    };
    let value = if d.value_dim == d.head_dim { String::new() } else { format!("x{}", d.value_dim) };
    format!("cpu-{op}-{}-d{}{value}-{isa}", problem.dtype(), d.head_dim)
}

/// Smallest interval that holds every key that a position of the range sees.
pub(crate) fn visible_union(problem: &Problem, s: &Sequence, positions: Range<usize>) -> Range<usize> {
    // Both ends of the interval grow with the position, but an empty interval may lie anywhere.
    let first = positions.clone().map(|i| problem.visible(s, i)).find(|r| !r.is_empty());
    let last = positions.rev().map(|i| problem.visible(s, i)).find(|r| !r.is_empty());
    match (first, last) {
        (Some(first), Some(last)) => first.start..last.end,
        _ => 0..0,
    }
}

fn scratch(
    (task_rows, tile_rows): (usize, usize),
    depth: usize,
    value_stride: usize,
    panel: usize,
) -> ScratchLayout {
    let mut len = 0;
    // Regions start on cache lines.
    let mut region = |floats: usize| {
        let start = len;
        len += floats.next_multiple_of(16);
        start
    };
    // A tile may end inside a vector of rows.
    let (row_stats, tile_stats) = (task_rows.next_multiple_of(16) + 16, tile_rows.next_multiple_of(16));
    ScratchLayout {
        // Rows past the last are read where rows are few.
        q: region(task_rows.max(STREAM_ROWS) * depth),
        k: region(BLOCK_K.next_multiple_of(panel) * depth),
        v: region(BLOCK_K * value_stride),
        scores: region(tile_rows * BLOCK_K),
        partial: region(tile_rows * value_stride),
        acc: region(task_rows * value_stride),
        stats: region(2 * row_stats + 2 * tile_stats),
        row_stats,
        tile_stats,
        len,
    }
}

impl std::fmt::Display for CpuPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} tile {}x{} task_rows {} splits {} tasks {} threads {} workspace {}",
            self.kernel(),
            self.tile_rows,
            self.block_k,
            self.task_rows,
            self.splits,
            self.tasks.len(),
            self.threads,
            self.workspace_bytes
        )
    }
}
