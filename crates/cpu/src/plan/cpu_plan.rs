//! The plan of one problem.

use super::facts::CpuFacts;
use super::schedule::{Choices, Level, PlannedPrefix, Schedule, Segments, TASKS_PER_THREAD};
use super::sizes::{
    BLOCK_K, INTEGER_DIM_STEP, INTEGER_TASK_ROWS, MASK_TILE_Q, MAX_TASKS, MAX_THREADS, STREAM_ROWS,
};
use flashtile_core::codec::Codec;
use flashtile_core::dtype::Dtype;
use flashtile_core::isa::Isa;
use flashtile_core::limits::MAX_HEAD_DIM;
use flashtile_core::plan::{KernelChoice, PlanOptions, Unsupported};
use flashtile_core::problem::{KeyPart, KvStorage, Problem, Sequence};
use flashtile_core::quality::Accumulation;

/// Offsets in f32 elements of one thread's scratch memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScratchLayout {
    pub(crate) q: usize,
    pub(crate) k: usize,
    pub(crate) v: usize,
    pub(crate) scores: usize,
    pub(crate) partial: usize,
    pub(crate) acc: usize,
    /// Running maxima and sums of `row_stats` rows, then the maxima and sums of one block for `tile_stats` rows.
    pub(crate) stats: usize,
    /// `q . k_mean` of each row if keys or values are quantized; otherwise empty, like `codes`.
    pub(crate) mean_scores: usize,
    /// Decoded rows, and integer operands.
    pub(crate) codes: usize,
    pub(crate) row_stats: usize,
    pub(crate) tile_stats: usize,
    pub(crate) len: usize,
}

/// Shape of the table of mask tiles of a materialised mask: one byte for each mask plane, tile of query positions and block
/// of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MaskTileShape {
    /// Query positions of a tile.
    pub(crate) tile_q: usize,
    /// Upper bounds of the planes, query tiles and key blocks of a mask of this problem.
    pub(crate) planes: usize,
    pub(crate) q_tiles: usize,
    pub(crate) k_blocks: usize,
}

impl MaskTileShape {
    pub(super) fn bytes(&self) -> Option<usize> {
        self.planes.checked_mul(self.q_tiles)?.checked_mul(self.k_blocks)
    }
}

/// A plan of the CPU backend. Made by [`Cpu::plan`](crate::cpu::Cpu::plan) for the machine at hand, or by [`CpuPlan::new`] for any.
///
/// If the keys of a task are split, the workspace holds the state of each of its rows and, for each row and each key block after the first
/// split, a partial result. A state or a partial result takes `value_dim`, rounded up to whole vectors, plus 2 f32.
#[derive(Debug, Clone, PartialEq)]
pub struct CpuPlan {
    problem: Problem,
    /// The problem over each storage of its keys; empty where all lie in one.
    parts: Vec<Problem>,
    options: PlanOptions,
    isa: Isa,
    threads: usize,
    block_k: usize,
    tile_rows: usize,
    task_rows: usize,
    schedule: Schedule,
    scratch: ScratchLayout,
    mask_tile_shape: Option<MaskTileShape>,
    workspace_bytes: usize,
}

impl CpuPlan {
    /// Plans `problem` for a machine. The function is pure and costs `O(tasks log tasks + query rows)`, where a row counts once more for
    /// each prefix that it has in common with others.
    ///
    /// # Errors
    /// [`Unsupported::Splits`] if the option asks for more splits than there are blocks of keys; [`Unsupported::Tasks`] if the problem
    /// would be cut into more units of work than a plan lists; [`Unsupported::Workspace`] if the workspace is not addressable;
    /// [`Unsupported::Kernels`] if the option names a kind of kernels; [`Unsupported::KeyColumns`] if values are columns of quantized keys.
    pub fn new(problem: &Problem, facts: &CpuFacts, options: PlanOptions) -> Result<Self, Unsupported> {
        check(problem, options)?;
        let dims = problem.dims();
        let isa = isa_for(facts.isa, problem);
        let threads = facts.threads.clamp(1, MAX_THREADS);
        let sequences = problem.sequences();
        let tile = register_tile(isa);
        let value_stride = dims.value_dim.next_multiple_of(isa.lanes());

        let max_blocks = sequences.iter().map(|s| s.kv_len.div_ceil(BLOCK_K)).max().unwrap_or(0).max(1);
        if let Some(got) = options.splits
            && (got == 0 || got > max_blocks)
        {
            return Err(Unsupported::Splits { got, max: max_blocks });
        }

        let integers = has_integer_products(problem, isa);
        let row_step = if integers { STREAM_ROWS } else { tile.rows };
        // The scores of these rows with one block fill about half of the first-level cache. Integer products take a fixed number of rows.
        let l1_rows = if integers { STREAM_ROWS } else { facts.l1d / 2 / (BLOCK_K * 4) };
        let tile_rows = l1_rows.clamp(STREAM_ROWS, 48).next_multiple_of(row_step);
        // Rows that share a packed block: q, the accumulators and the block stay in the second-level cache.
        let row_bytes = (dims.head_dim + 2 * value_stride) * 4;
        let block_bytes = BLOCK_K * (dims.head_dim + value_stride) * 4;
        let bound = if integers { INTEGER_TASK_ROWS } else { 768 };
        let most_rows = (facts.l2.saturating_sub(block_bytes) / 4 * 3 / row_bytes).clamp(tile_rows, bound);
        let parts = parts(problem);
        let segments = Segments::of(if parts.is_empty() { std::slice::from_ref(problem) } else { &parts });
        let even = segments.rows().div_ceil(threads * TASKS_PER_THREAD);
        let task_rows =
            if threads == 1 { most_rows } else { even.clamp((2 * tile_rows).min(most_rows), most_rows) };
        let longest = segments.longest().max(1).next_multiple_of(row_step);
        let task_rows = task_rows.min(longest).next_multiple_of(row_step);

        let most_tasks = segments.tasks(task_rows).saturating_mul(options.splits.unwrap_or(1));
        if most_tasks > MAX_TASKS {
            return Err(Unsupported::Tasks { got: most_tasks, max: MAX_TASKS });
        }
        let overflow = || Unsupported::Workspace { kernel: plan_name(problem, isa) };
        let partial_bytes = (value_stride + 2) * 4;
        let choices = Choices { options, threads, task_rows, partial_bytes };
        let schedule = segments.schedule(&choices).ok_or_else(overflow)?;

        let quantized = problem.is_quantized();
        let mut plan = Self {
            problem: problem.clone(),
            parts: Vec::new(),
            options,
            isa,
            threads,
            block_k: BLOCK_K,
            tile_rows,
            task_rows,
            schedule,
            scratch: ScratchLayout::new(&ScratchSizes {
                task_rows,
                tile_rows,
                depth: packed_depth(isa, dims.head_dim),
                value_stride,
                panel: tile.vectors * isa.lanes(),
                quantized,
                integers,
            }),
            mask_tile_shape: None,
            workspace_bytes: 0,
        };
        plan.mask_tile_shape = mask_tile_shape(problem, BLOCK_K).ok_or_else(overflow)?;
        plan.parts = parts;
        plan.workspace_bytes = plan.size().filter(|&n| isize::try_from(n).is_ok()).ok_or_else(overflow)?;
        Ok(plan)
    }

    fn size(&self) -> Option<usize> {
        let mask_tiles = self.mask_tile_shape.as_ref().map_or(Some(0), MaskTileShape::bytes)?;
        let scratch = self.scratch.len.checked_mul(self.workers())?;
        // Values, maximum and sum of each.
        let partials = self.schedule.num_partials.checked_mul(self.value_stride() + 2)?;
        scratch.checked_add(partials)?.checked_mul(4)?.checked_add(mask_tiles)
    }

    /// Bytes at the start of the workspace that hold f32: scratch memory of the workers, then the partials.
    pub(crate) fn float_bytes(&self) -> usize {
        4 * (self.scratch.len * self.workers() + self.schedule.num_partials * (self.value_stride() + 2))
    }

    /// Elements between rows of packed values and accumulators.
    pub(crate) fn value_stride(&self) -> usize {
        self.problem.dims().value_dim.next_multiple_of(self.isa.lanes())
    }

    /// Number of threads that have work.
    #[must_use]
    pub fn workers(&self) -> usize {
        let most = self.schedule.levels.iter().map(|level| level.tasks.len()).max();
        self.threads.min(most.unwrap_or(0)).max(1)
    }

    pub(crate) fn levels(&self) -> &[Level] {
        &self.schedule.levels
    }

    pub(crate) const fn scratch(&self) -> &ScratchLayout {
        &self.scratch
    }

    pub(crate) const fn mask_tile_shape(&self) -> Option<&MaskTileShape> {
        self.mask_tile_shape.as_ref()
    }

    /// Number of states and partial results in the workspace.
    pub(crate) const fn num_partials(&self) -> usize {
        self.schedule.num_partials
    }

    /// The problem over each storage of its keys.
    pub(crate) fn parts(&self) -> &[Problem] {
        if self.parts.is_empty() { std::slice::from_ref(&self.problem) } else { &self.parts }
    }

    /// The problem that this plan computes.
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

    /// The kernel's accumulation, on which tolerances depend: products of pairs of bf16 take probabilities rounded to bf16.
    #[must_use]
    pub fn accumulation(&self) -> Accumulation {
        if self.isa().multiplies_pairs() {
            Accumulation::Half
        } else if self.multiplies_integers() {
            Accumulation::Integers
        } else {
            Accumulation::F32
        }
    }

    /// Returns true if codes of keys or values are multiplied as integers of 16 bits. All other products with codes are in f32.
    #[must_use]
    pub fn multiplies_integers(&self) -> bool {
        has_integer_products(&self.problem, self.isa)
    }

    /// Returns true if no prefixes are shared and the sequence has so few rows that its tasks multiply one-byte codes in f32
    /// without decoding them to memory.
    pub(crate) fn has_few_rows(&self, sequence: &Sequence) -> bool {
        sequence.q_len * self.problem.dims().gqa_group() <= STREAM_ROWS && self.prefixes().is_empty()
    }

    /// Number of keys in a block.
    #[must_use]
    pub const fn block_k(&self) -> usize {
        self.block_k
    }

    /// Number of query rows in a tile: the unit that is skipped, computed whole or masked.
    #[must_use]
    pub const fn tile_rows(&self) -> usize {
        self.tile_rows
    }

    /// Number of query rows (of all heads of a GQA group) that share each packed block of keys.
    #[must_use]
    pub const fn task_rows(&self) -> usize {
        self.task_rows
    }

    /// Upper bound of the splits of the keys of a sequence for parallel work.
    #[must_use]
    pub fn splits(&self) -> usize {
        let prefixes = self.schedule.prefixes.iter().map(|prefix| prefix.splits);
        prefixes.chain(self.schedule.splits.iter().copied()).max().unwrap_or(1)
    }

    /// Upper bound of the splits of each sequence's own keys, which are in none of [`CpuPlan::prefixes`]: `[sequences]`.
    #[must_use]
    pub fn sequence_splits(&self) -> &[usize] {
        &self.schedule.splits
    }

    /// Shared prefixes that are computed once for all their sequences: the prefixes of the problem that hold a whole block of keys.
    #[must_use]
    pub fn prefixes(&self) -> &[PlannedPrefix] {
        &self.schedule.prefixes
    }

    /// Fraction of the time that threads wait for others, if tasks take the time that the planner estimates.
    #[must_use]
    pub fn idle(&self) -> f64 {
        self.schedule.idle(self.threads)
    }

    /// Number of units of work.
    #[must_use]
    pub fn task_count(&self) -> usize {
        self.schedule.levels.iter().map(|level| level.tasks.len()).sum()
    }

    /// Bytes of workspace that a run needs.
    #[must_use]
    pub const fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Name of the kernel: `cpu-{prefill|decode}-{dtype}-d{head_dim}-{isa}`, with `x{value_dim}` if that differs, and
    /// `-{k codec}+{v codec}` if they are not elements of the dtype (one codec if both are equal). It is `decode` if a key/value head has
    /// at most 16 query rows, which stream keys and values once, in place.
    #[must_use]
    pub fn kernel(&self) -> String {
        plan_name(&self.problem, self.isa)
    }
}

fn plan_name(problem: &Problem, isa: Isa) -> String {
    let d = problem.dims();
    let op = if problem.sequences().iter().all(|s| s.q_len * d.gqa_group() <= STREAM_ROWS) {
        "decode"
    } else {
        "prefill"
    };
    let value = if d.value_dim == d.head_dim { String::new() } else { format!("x{}", d.value_dim) };
    let plain = Codec::of(problem.dtype());
    let codecs = match (problem.k_codec(), problem.v_codec()) {
        (k, v) if k == plain && v == plain => String::new(),
        (k, v) if k == v => format!("-{k}"),
        (k, v) => format!("-{k}+{v}"),
    };
    format!("cpu-{op}-{}-d{}{value}{codecs}-{isa}", problem.dtype(), d.head_dim)
}

/// Shape of the table of mask tiles of a problem, `Some(None)` if it has no mask; `None` if its size overflows.
#[allow(clippy::option_option, reason = "two answers: no table, and no size")]
pub(super) fn mask_tile_shape(problem: &Problem, block_k: usize) -> Option<Option<MaskTileShape>> {
    if problem.desc().mask.is_none() {
        return Some(None);
    }
    let [planes, heads, q_len, kv_len] = problem.mask_shape();
    // An axis of 0 may be broadcast from 1.
    Some(Some(MaskTileShape {
        tile_q: MASK_TILE_Q,
        planes: planes.max(1).checked_mul(heads)?,
        q_tiles: q_len.div_ceil(MASK_TILE_Q).max(1),
        k_blocks: kv_len.div_ceil(block_k).max(1),
    }))
}

/// The problem over each storage that some of its keys are read from, codes first; empty if no tokens are kept in 16 bits.
fn parts(problem: &Problem) -> Vec<Problem> {
    if problem.desc().kept.is_none() {
        return Vec::new();
    }
    let part = |part| problem.part(part);
    let has_keys = |part: &Problem| part.sequences().iter().any(|s| part.first_visible(s).is_some());
    let kept = [KeyPart::First, KeyPart::Last].map(part).into_iter().filter(has_keys);
    std::iter::once(part(KeyPart::Codes)).chain(kept).collect()
}

/// Checks that the CPU has kernels for a problem and of the kind asked for.
fn check(problem: &Problem, options: PlanOptions) -> Result<(), Unsupported> {
    if options.kernels != KernelChoice::Auto {
        return Err(Unsupported::Kernels { asked: options.kernels });
    }
    // Strides reach the first elements of a row, but a row of codes is decoded as a whole.
    if problem.kv_storage() == KvStorage::KeyColumns && problem.is_quantized() {
        return Err(Unsupported::KeyColumns { codec: problem.k_codec() });
    }
    Ok(())
}

/// The instruction set whose kernels compute a problem on a machine that has `isa`.
#[must_use]
pub fn isa_for(isa: Isa, problem: &Problem) -> Isa {
    let codecs = [problem.k_codec(), problem.v_codec()];
    if codecs.iter().any(|codec| codec.is_integer()) {
        return isa.for_codes();
    }
    // Pairs need bf16 keys and values.
    let plain = codecs == [Codec::of(problem.dtype()); 2];
    isa.for_dtype(if plain { problem.dtype() } else { Dtype::F32 })
}

/// Returns true if an instruction set multiplies the codes of keys or of values as integers.
fn has_integer_products(problem: &Problem, isa: Isa) -> bool {
    let dims = problem.dims();
    let takes = |codec: Codec, dim: usize| codec.is_integer() && dim.is_multiple_of(INTEGER_DIM_STEP);
    isa == Isa::Avx512Vnni
        && (takes(problem.k_codec(), dims.head_dim) || takes(problem.v_codec(), dims.value_dim))
}

/// The tile of a product that the registers of an instruction set hold.
#[derive(Clone, Copy)]
pub(crate) struct RegisterTile {
    pub(crate) rows: usize,
    /// Vectors of a row.
    pub(crate) vectors: usize,
}

pub(crate) const fn register_tile(isa: Isa) -> RegisterTile {
    let (rows, vectors) = match isa {
        Isa::Portable => (4, 2),
        Isa::Avx2 => (6, 2),
        Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 => (6, 4),
        Isa::Amx => (32, 4),
    };
    RegisterTile { rows, vectors }
}

/// Upper bound of the f32 in a row of packed queries or keys: whole steps of the matrix unit if tiles are multiplied. Pairs of bf16 in
/// vectors take half as many.
pub(super) const fn packed_depth(isa: Isa, head_dim: usize) -> usize {
    match isa {
        Isa::Amx => head_dim.div_ceil(2).next_multiple_of(16),
        Isa::Portable | Isa::Avx2 | Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 => head_dim,
    }
}

/// The quantities that determine the sizes of scratch memory.
struct ScratchSizes {
    task_rows: usize,
    tile_rows: usize,
    /// Upper bound of the f32 in a row of packed queries or keys: [`packed_depth`].
    depth: usize,
    /// Number of f32 in a row of packed values.
    value_stride: usize,
    /// Keys of a packed panel.
    panel: usize,
    quantized: bool,
    /// True if codes are multiplied as integers.
    integers: bool,
}

impl ScratchLayout {
    fn new(sizes: &ScratchSizes) -> Self {
        let &ScratchSizes { task_rows, tile_rows, depth, value_stride, panel, quantized, integers } = sizes;
        let mut len = 0;
        // Regions start on cache lines.
        let mut region = |floats: usize| {
            let start = len;
            len += floats.next_multiple_of(16);
            start
        };
        // A tile may end inside a vector of rows.
        let (row_stats, tile_stats) = (task_rows.next_multiple_of(16) + 16, tile_rows.next_multiple_of(16));
        Self {
            // Kernels of few rows also read rows past the last.
            q: region(task_rows.max(STREAM_ROWS) * depth),
            k: region(BLOCK_K.next_multiple_of(panel) * depth),
            v: region(BLOCK_K * value_stride),
            scores: region(tile_rows * BLOCK_K),
            partial: region(tile_rows * value_stride),
            acc: region(task_rows * value_stride),
            stats: region(2 * row_stats + 2 * tile_stats),
            mean_scores: region(if quantized { row_stats } else { 0 }),
            codes: region(match (quantized, integers) {
                (false, _) => 0,
                (true, false) => decoded_scratch(depth),
                (true, true) => decoded_scratch(depth).max(integer_scratch(task_rows)),
            }),
            row_stats,
            tile_stats,
            len,
        }
    }
}

/// Number of f32 in 16 decoded rows of codes.
const fn decoded_scratch(depth: usize) -> usize {
    16 * depth
}

/// Number of f32 for integer operands: for each query of a task, two bytes per element, a factor and a start; for the probabilities of each
/// row of a tile, two bytes per key and a factor.
const fn integer_scratch(task_rows: usize) -> usize {
    task_rows.next_multiple_of(STREAM_ROWS) * (MAX_HEAD_DIM / 2 + 2) + STREAM_ROWS * (BLOCK_K / 2 + 1)
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
            self.splits(),
            self.task_count(),
            self.threads,
            self.workspace_bytes
        )
    }
}
