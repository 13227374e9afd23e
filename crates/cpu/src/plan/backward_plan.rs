//! The plan of the backward pass of one problem.

use super::backward_schedule::{BackwardLevel, BackwardSchedule, BiasTask, Heads};
use super::cpu_plan::{MaskTileShape, isa_for, mask_tile_shape, packed_depth, register_tile};
use super::facts::CpuFacts;
use super::schedule::Rows;
use super::sizes::{MAX_TASKS, MAX_THREADS};
use flashtile_core::isa::Isa;
use flashtile_core::plan::{KernelChoice, PlanOptions, Unsupported};
use flashtile_core::problem::{Problem, Sequence, Sequences};
use flashtile_core::quality::Accumulation;
use std::ops::Range;

/// Keys of a block: a tile of scores and its gradient stay in the second-level cache.
const BLOCK_K: usize = 128;
/// Blocks of a chunk. Fixed, because the bits of `d_q` depend on it: it adds up over the keys of a chunk, and then over chunks.
const CHUNK_BLOCKS: usize = 8;
/// Query rows of a tile, a multiple of the rows of every register tile.
const TILE_ROWS: usize = 96;
/// Rows whose terms are computed together.
const ROW_RANGE: usize = 4 * TILE_ROWS;
/// Floats after each row of a tile of scores, so that rows do not fall into the same sets of a cache.
const SCORE_PADDING: usize = 16;
/// Upper bound of the memory that partial sums of `d_q` take, unless there would be fewer of them than threads; in bytes.
const MAX_PARTIAL_BYTES: usize = 32 << 20;

/// Offsets and sizes in f32 of one thread's scratch memory in a backward run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BackwardLayout {
    pub(crate) tile_rows: usize,
    pub(crate) chunk_keys: usize,
    /// Elements between rows of gradients: head_dim and value_dim in whole vectors.
    pub(crate) q_stride: usize,
    pub(crate) v_stride: usize,
    /// Elements between rows of a tile of scores.
    pub(crate) score_stride: usize,
    /// Panels of keys, `keys_len` for each block.
    pub(crate) keys: usize,
    pub(crate) keys_len: usize,
    /// Panels of values, likewise.
    pub(crate) values: usize,
    pub(crate) values_len: usize,
    pub(crate) key_rows: usize,
    pub(crate) d_k: usize,
    pub(crate) d_v: usize,
    pub(crate) packed_q: usize,
    pub(crate) packed_d_out: usize,
    pub(crate) row_q: usize,
    pub(crate) row_d_out: usize,
    pub(crate) scores: usize,
    pub(crate) d_probs: usize,
    pub(crate) softcap_slopes: usize,
    pub(crate) key_pairs: usize,
    pub(crate) d_q: usize,
    /// Sums of `d_q` of a whole head, if its keys are more than a chunk.
    pub(crate) acc: usize,
    pub(crate) len: usize,
    /// Floats of a partial sum of `d_q` in the workspace.
    pub(crate) partial: usize,
}

/// A plan of the backward pass on the CPU. Made by [`Cpu::plan_backward`](crate::cpu::Cpu::plan_backward) for the machine at hand, or by
/// [`CpuBackwardPlan::new`] for any.
///
/// Keys are cut into chunks of 1024. A task owns the gradients of some chunks of one key/value head. `d_q` adds up over the chunks in their
/// order, so that its bits do not depend on how chunks are cut into tasks.
#[derive(Debug, Clone, PartialEq)]
pub struct CpuBackwardPlan {
    problem: Problem,
    options: PlanOptions,
    isa: Isa,
    threads: usize,
    schedule: BackwardSchedule,
    row_ranges: Vec<Rows>,
    layout: BackwardLayout,
    mask_tile_shape: Option<MaskTileShape>,
    workspace: WorkspaceParts,
}

/// Sizes of the parts of a workspace: f32 unless it says bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkspaceParts {
    /// Scratch memory of all workers.
    pub(crate) scratch: usize,
    /// `-lse` and delta of each row.
    pub(crate) rows: usize,
    /// Sums of the gradients of ALiBi slopes, of each row and chunk.
    pub(crate) slope_sums: usize,
    /// Partial sums of `d_q`.
    pub(crate) partials: usize,
    /// Bytes of mask tiles.
    pub(crate) mask_tiles: usize,
}

impl WorkspaceParts {
    /// Floats before the mask tiles.
    pub(crate) fn floats(&self) -> Option<usize> {
        let Self { scratch, rows, slope_sums, partials, mask_tiles: _ } = *self;
        [scratch, rows, slope_sums, partials].into_iter().try_fold(0usize, |sum, len| sum.checked_add(len))
    }

    fn bytes(&self) -> Option<usize> {
        let bytes = self.floats()?.checked_mul(4)?.checked_add(self.mask_tiles)?;
        isize::try_from(bytes).ok()?;
        Some(bytes)
    }
}

impl CpuBackwardPlan {
    /// Plans the backward pass of `problem` for a machine. The function is pure and costs `O(tasks log tasks + query rows)`.
    ///
    /// [`PlanOptions::splits`] of 1 keeps the chunks of a head in one task; a larger number makes each chunk a task.
    ///
    /// # Errors
    /// [`Unsupported::Backward`] where the problem has no backward pass; [`Unsupported::Splits`] for 0 splits; [`Unsupported::Tasks`] and
    /// [`Unsupported::Workspace`] if the problem is too large; [`Unsupported::Kernels`] if the option names a kind of kernels.
    pub fn new(problem: &Problem, facts: &CpuFacts, options: PlanOptions) -> Result<Self, Unsupported> {
        if let Some(why) = problem.no_gradients() {
            return Err(Unsupported::Backward { why });
        }
        if options.kernels != KernelChoice::Auto {
            return Err(Unsupported::Kernels { asked: options.kernels });
        }
        let max_chunks = problem.sequences().iter().map(num_chunks).max().unwrap_or(1);
        if options.splits == Some(0) {
            return Err(Unsupported::Splits { got: 0, max: max_chunks });
        }
        let isa = isa_for(facts.isa, problem);
        let threads = facts.threads.clamp(1, MAX_THREADS);
        let dims = problem.dims();
        // Each sequence has a task of every chunk of its keys, and a range of row terms for every few tiles of its rows.
        let units = |s: &Sequence| {
            let ranges = s.q_len.saturating_mul(dims.gqa_group()).div_ceil(ROW_RANGE);
            num_chunks(s).saturating_add(ranges).saturating_mul(dims.kv_heads)
        };
        let tasks = problem.sequences().iter().map(units).fold(0, usize::saturating_add);
        if tasks > MAX_TASKS {
            return Err(Unsupported::Tasks { got: tasks, max: MAX_TASKS });
        }
        let overflow = || Unsupported::Workspace { kernel: kernel_name(problem, isa) };
        let max_rows =
            problem.sequences().iter().map(|s| s.q_len).max().unwrap_or(0).checked_mul(dims.gqa_group());
        let max_rows = max_rows.ok_or_else(overflow)?;
        let partial =
            max_rows.checked_mul(dims.head_dim.next_multiple_of(isa.lanes())).ok_or_else(overflow)?;
        let max_partials = (MAX_PARTIAL_BYTES / partial.saturating_mul(4).max(1)).max(threads);
        let heads = Heads { problem, options, threads, max_partials };
        let schedule = heads.schedule(num_chunks, chunk_keys);
        let max_keys = problem.sequences().iter().map(|s| s.kv_len).max().unwrap_or(0);
        let layout = BackwardLayout::new(
            problem,
            isa,
            max_keys,
            if schedule.sums_heads { partial } else { 0 },
            partial,
        )
        .ok_or_else(overflow)?;
        let mut plan = Self {
            problem: problem.clone(),
            options,
            isa,
            threads,
            schedule,
            row_ranges: row_ranges(problem),
            layout,
            mask_tile_shape: mask_tile_shape(problem, BLOCK_K).ok_or_else(overflow)?,
            workspace: WorkspaceParts { scratch: 0, rows: 0, slope_sums: 0, partials: 0, mask_tiles: 0 },
        };
        plan.workspace = plan.sized_workspace(max_chunks).ok_or_else(overflow)?;
        plan.workspace.bytes().ok_or_else(overflow)?;
        Ok(plan)
    }

    fn sized_workspace(&self, max_chunks: usize) -> Option<WorkspaceParts> {
        let rows = self.row_count();
        let slope_sums = if self.problem.desc().alibi { rows.checked_mul(max_chunks)? } else { 0 };
        let mask_tiles = self.mask_tile_shape.as_ref().map_or(Some(0), MaskTileShape::bytes)?;
        Some(WorkspaceParts {
            scratch: self.layout.len.checked_mul(self.workers())?,
            rows: rows.checked_mul(2)?.next_multiple_of(16),
            slope_sums: slope_sums.next_multiple_of(16),
            partials: self.layout.partial.checked_mul(self.schedule.num_partials)?,
            mask_tiles,
        })
    }

    pub(crate) const fn workspace_parts(&self) -> &WorkspaceParts {
        &self.workspace
    }

    pub(crate) const fn layout(&self) -> &BackwardLayout {
        &self.layout
    }

    pub(crate) const fn mask_tile_shape(&self) -> Option<&MaskTileShape> {
        self.mask_tile_shape.as_ref()
    }

    pub(crate) fn levels(&self) -> &[BackwardLevel] {
        &self.schedule.levels
    }

    /// Rows of all key/value heads, in ranges of a few tiles.
    pub(crate) fn row_ranges(&self) -> &[Rows] {
        &self.row_ranges
    }

    /// Tasks of the gradient of a mask of some shape.
    pub(crate) fn bias_tasks(&self, shape: [usize; 4]) -> Vec<BiasTask> {
        BiasTask::of_mask(
            &self.problem,
            shape,
            self.problem.sequences().iter().map(num_chunks).max().unwrap_or(1),
        )
    }

    /// Chunks of the keys of a sequence, at least 1.
    pub(crate) fn num_chunks(&self, s: &Sequence) -> usize {
        num_chunks(s)
    }

    /// Blocks of a chunk.
    pub(crate) fn chunk_blocks(&self, s: &Sequence, chunk: usize) -> Range<usize> {
        let keys = chunk_keys(s, chunk);
        keys.start / BLOCK_K..keys.end.div_ceil(BLOCK_K)
    }

    /// Rows of d_k that a sequence stores: its keys, with the padding after them.
    pub(crate) fn stored_rows(&self, s: &Sequence) -> usize {
        match self.problem.desc().sequences {
            Sequences::Dense | Sequences::Padded { .. } => self.problem.dims().kv_len,
            Sequences::Packed { .. } | Sequences::Cached { .. } => s.kv_len,
        }
    }

    /// Rows of lse.
    pub(crate) fn row_count(&self) -> usize {
        self.problem.dims().lse_shape().iter().product()
    }

    /// The problem whose backward pass this is.
    #[must_use]
    pub const fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The options that the plan was made with.
    #[must_use]
    pub const fn options(&self) -> PlanOptions {
        self.options
    }

    /// Instruction set.
    #[must_use]
    pub const fn isa(&self) -> Isa {
        self.isa
    }

    /// Upper bound of the threads that share the tasks.
    #[must_use]
    pub const fn threads(&self) -> usize {
        self.threads
    }

    /// Number of threads that have work.
    #[must_use]
    pub fn workers(&self) -> usize {
        let widest = self.schedule.levels.iter().map(|level| level.tasks.len()).max();
        self.threads.min(widest.unwrap_or(0)).max(1)
    }

    /// Number of keys in a block.
    #[must_use]
    pub const fn block_k(&self) -> usize {
        BLOCK_K
    }

    /// Number of query rows in a tile.
    #[must_use]
    pub const fn tile_rows(&self) -> usize {
        TILE_ROWS
    }

    /// Number of units of work.
    #[must_use]
    pub fn task_count(&self) -> usize {
        self.schedule.levels.iter().map(|level| level.tasks.len()).sum()
    }

    /// Number of levels: the tasks of one run after the reductions of the one before it.
    #[must_use]
    pub fn level_count(&self) -> usize {
        self.schedule.levels.len()
    }

    /// The kernel's accumulation, on which tolerances depend.
    #[must_use]
    pub const fn accumulation(&self) -> Accumulation {
        if self.isa.multiplies_pairs() { Accumulation::Half } else { Accumulation::F32 }
    }

    /// Floating-point operations: five products for each visible pair, 2.5 times as many as in the forward pass where value_dim = head_dim.
    #[must_use]
    pub fn flops(&self) -> f64 {
        self.problem.backward_flops()
    }

    /// Bytes of workspace that a run needs.
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.bytes().unwrap_or(usize::MAX)
    }

    /// Name of the kernel: `cpu-backward-{dtype}-d{head_dim}-{isa}`, with `x{value_dim}` if that differs.
    #[must_use]
    pub fn kernel(&self) -> String {
        kernel_name(&self.problem, self.isa)
    }
}

impl std::fmt::Display for CpuBackwardPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} tile {TILE_ROWS}x{BLOCK_K} tasks {} levels {} threads {} workspace {}",
            self.kernel(),
            self.task_count(),
            self.schedule.levels.len(),
            self.threads,
            self.workspace_bytes()
        )
    }
}

fn kernel_name(problem: &Problem, isa: Isa) -> String {
    let d = problem.dims();
    let value = if d.value_dim == d.head_dim { String::new() } else { format!("x{}", d.value_dim) };
    format!("cpu-backward-{}-d{}{value}-{isa}", problem.dtype(), d.head_dim)
}

/// Rows of all key/value heads, in ranges of a few tiles.
fn row_ranges(problem: &Problem) -> Vec<Rows> {
    let dims = problem.dims();
    let of = |(sequence, s): (usize, &Sequence)| {
        let count = s.q_len * dims.gqa_group();
        let of_head = move |kv_head| {
            let firsts = (0..count).step_by(ROW_RANGE);
            firsts.map(move |first| Rows { sequence, kv_head, first, count: ROW_RANGE.min(count - first) })
        };
        (0..dims.kv_heads).flat_map(of_head)
    };
    problem.sequences().iter().enumerate().flat_map(of).collect()
}

/// Keys of a chunk of a sequence.
fn chunk_keys(s: &Sequence, chunk: usize) -> Range<usize> {
    let first = chunk * CHUNK_BLOCKS * BLOCK_K;
    first..(first + CHUNK_BLOCKS * BLOCK_K).min(s.kv_len)
}

/// Chunks of the keys of a sequence, at least 1.
fn num_chunks(s: &Sequence) -> usize {
    s.kv_len.div_ceil(CHUNK_BLOCKS * BLOCK_K).max(1)
}

impl BackwardLayout {
    /// `None` if sizes overflow.
    fn new(problem: &Problem, isa: Isa, max_keys: usize, acc: usize, partial: usize) -> Option<Self> {
        let dims = problem.dims();
        let [q_stride, v_stride] =
            [dims.head_dim, dims.value_dim].map(|dim| dim.next_multiple_of(isa.lanes()));
        let [depth_q, depth_v] = [dims.head_dim, dims.value_dim].map(|dim| packed_depth(isa, dim));
        let blocks = max_keys.div_ceil(BLOCK_K).clamp(1, CHUNK_BLOCKS);
        let tile = register_tile(isa);
        let panels = BLOCK_K.next_multiple_of(tile.vectors * isa.lanes());
        let (keys_len, values_len, chunk_keys) = (panels * depth_q, panels * depth_v, blocks * BLOCK_K);
        let score_stride = BLOCK_K + SCORE_PADDING;
        let pairs = isa.multiplies_pairs();
        let mut len = 0usize;
        // Regions start on cache lines.
        let mut region = |floats: usize| {
            let start = len;
            len += floats.next_multiple_of(16);
            start
        };
        let mut layout = Self {
            tile_rows: TILE_ROWS,
            chunk_keys,
            q_stride,
            v_stride,
            score_stride,
            keys: region(blocks * keys_len),
            keys_len,
            values: region(blocks * values_len),
            values_len,
            key_rows: region(chunk_keys * q_stride),
            d_k: region(chunk_keys * q_stride),
            d_v: region(chunk_keys * v_stride),
            packed_q: region(TILE_ROWS * depth_q),
            packed_d_out: region(TILE_ROWS * depth_v),
            row_q: region(TILE_ROWS * q_stride),
            row_d_out: region(TILE_ROWS * v_stride),
            scores: region(TILE_ROWS * score_stride),
            d_probs: region(TILE_ROWS * score_stride),
            softcap_slopes: region(if problem.desc().softcap.is_some() {
                TILE_ROWS * score_stride
            } else {
                0
            }),
            key_pairs: region(if pairs { TILE_ROWS * score_stride } else { 0 }),
            d_q: region(TILE_ROWS * q_stride),
            acc: 0,
            len: 0,
            partial,
        };
        layout.acc = len;
        layout.len = len.checked_add(acc)?.checked_next_multiple_of(16)?;
        Some(layout)
    }
}
