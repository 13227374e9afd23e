//! The data of a run and of a task, and the table of phases that work on it.
//!
//! Phases take a [`TaskState`], which has the table of phases: these types name each other, so they are in one module.

#![allow(unsafe_code)]

use crate::kernels::shared::codes::CodeRows;
use crate::kernels::shared::mat::{Mat, MatMut, RowMaxSum};
use crate::kernels::shared::matrix_unit::MatrixUnitGuard;
use crate::kernels::shared::products::KeySteps;
use crate::kernels::shared::score_task::{RunInputs, ScoreMemory, ScoreTask, Stored, Tile};
use crate::kernels::shared::scores::{PackValues, ScoreKernels};
use crate::plan::{CpuPlan, Rows, STREAM_ROWS};
use flashtile_core::codec::Coder;
use flashtile_core::dtype::Dtype;
use flashtile_core::tensor::TensorViewMut;
use std::ops::Range;

/// The inputs, outputs and workspace of a run, for all of its tasks, checked against the plan's problem.
pub(crate) struct Context<'a> {
    pub(crate) plan: &'a CpuPlan,
    /// The storages that keys lie in, in the order of [`KeyBlocks`](crate::plan::KeyBlocks).
    pub(crate) parts: &'a [Part<'a>],
    pub(crate) out: &'a TensorViewMut<'a>,
    /// `[batch, q_heads, q_len]`, or null.
    pub(crate) lse: *mut f32,
    pub(crate) partials: Partials,
}

/// Keys and values in one storage.
pub(crate) struct Part<'a> {
    /// Kernels of the plan's instruction set.
    pub(crate) kernels: Kernels,
    pub(crate) run: RunInputs<'a>,
}

// SAFETY: tasks read the inputs and write disjoint rows of the outputs and disjoint partials.
unsafe impl Sync for Context<'_> {}

/// Results of rows over some of their keys, kept in the workspace.
#[derive(Clone, Copy)]
pub(crate) struct Partials {
    /// Unnormalised output `[partials, stride]`.
    pub(crate) partial_out: MatMut,
    /// `[partials]`.
    pub(crate) max_sum: RowMaxSum,
}

impl Partials {
    /// Stores the rows of `partial_out` and their maxima and sums.
    ///
    /// # Safety
    /// The partials and rows exist, no other thread uses the partials, and rows of `partial_out` follow one another without a gap, as
    /// partials do.
    pub(crate) unsafe fn store(&self, index: usize, partial_out: Mat, max_sum: RowMaxSum) {
        let rows = partial_out.rows();
        // SAFETY: the caller's contract.
        unsafe {
            let to = self.max_sum.from(index);
            std::ptr::copy_nonoverlapping(
                partial_out.at(0, 0),
                self.partial_out.at(index, 0),
                rows * self.partial_out.ld(),
            );
            std::ptr::copy_nonoverlapping(max_sum.max, to.max, rows);
            std::ptr::copy_nonoverlapping(max_sum.sum, to.sum, rows);
        }
    }

    /// Stores the state of rows that have seen no key. Their `partial_out` is not read.
    ///
    /// # Safety
    /// As [`Partials::store`].
    pub(crate) unsafe fn clear(&self, index: usize, rows: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.max_sum.clear(index..index + rows) }
    }

    /// Reads the maxima and sums of `rows` rows, and returns their `partial_out` in place.
    ///
    /// # Safety
    /// The partials were stored, the rows exist.
    pub(crate) unsafe fn load_max_sum(&self, index: usize, rows: usize, max_sum: RowMaxSum) -> Mat {
        // SAFETY: the caller's contract.
        unsafe {
            let from = self.max_sum.from(index);
            std::ptr::copy_nonoverlapping(from.max, max_sum.max, rows);
            std::ptr::copy_nonoverlapping(from.sum, max_sum.sum, rows);
            self.partial_out.from(index, 0).first(rows, self.partial_out.cols()).as_mat()
        }
    }

    /// Reads the rows of `partial_out` and their maxima and sums.
    ///
    /// # Safety
    /// As [`Partials::load_max_sum`], and rows of `partial_out` follow one another without a gap.
    pub(crate) unsafe fn load(&self, index: usize, partial_out: MatMut, max_sum: RowMaxSum) {
        let rows = partial_out.rows();
        // SAFETY: the caller's contract.
        unsafe {
            let stored = self.load_max_sum(index, rows, max_sum);
            std::ptr::copy_nonoverlapping(stored.at(0, 0), partial_out.at(0, 0), rows * stored.ld());
        }
    }
}

/// How the keys or values of a problem are stored: elements of a dtype, or codes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storage {
    Elements(Dtype),
    Codes,
}

/// The phases of a task for one instruction set and the storage of one problem: the only functions that are compiled with the
/// target features of the set.
///
/// Each is called once per task, block or tile, which costs nothing beside its work. Each is a separate function, because the time that
/// optimisation takes grows faster than the size of a function.
///
/// Safety of each: the machine has the instruction set, and the contract of the kernel of the same name holds.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    pub(crate) scores: ScoreKernels,
    /// How `p . v` takes keys.
    pub(crate) key_steps: KeySteps,
    /// Products with codes in place, the preferred ones first.
    pub(crate) code_phases: &'static [CodePhases],
    /// Configures the thread's matrix unit, if products use one.
    pub(crate) configure: unsafe fn() -> MatrixUnitGuard,
    pub(crate) probs: unsafe fn(&TaskState<'_>, &Tile),
    pub(crate) pack_values: PackValues,
    pub(crate) packed_values: unsafe fn(&TaskState<'_>, &Tile, &Range<usize>, Mat),
    pub(crate) stream_values: unsafe fn(&TaskState<'_>, &Tile, &Range<usize>),
    pub(crate) repair_nonfinite: unsafe fn(&TaskState<'_>, &Tile),
    pub(crate) fold: unsafe fn(usize, &Fold),
    pub(crate) finish: unsafe fn(&TaskState<'_>, usize, usize, &RowState),
}

/// The phases of [`CodeProducts`](super::products::code_block::CodeProducts).
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "other targets have none"))]
pub(crate) struct CodePhases {
    /// Returns true if rows of a coder and a dimension can be multiplied.
    pub(crate) takes: fn(&Coder, usize) -> bool,
    /// True if tasks may have any number of rows; otherwise their sequences have few.
    pub(crate) takes_any_rows: bool,
    pub(crate) set_queries: unsafe fn(&TaskState<'_>),
    pub(crate) scores: unsafe fn(&TaskState<'_>, &Tile),
    pub(crate) values: unsafe fn(&TaskState<'_>, &Tile),
}

/// Running state of some rows, and one block's result for them.
#[derive(Clone, Copy)]
pub(crate) struct Fold {
    /// Running unnormalised output, in whole vectors of columns.
    pub(crate) acc: MatMut,
    /// Running maxima and sums, in whole vectors of rows.
    pub(crate) max_sum: RowMaxSum,
    /// The block's unnormalised output, with the columns of `acc`.
    pub(crate) partial_out: Mat,
    /// The block's maxima and sums, `-inf` and 0 up to a whole vector of rows.
    pub(crate) block: RowMaxSum,
}

/// A task, and the scratch memory of the thread that computes it.
pub(crate) struct TaskState<'a> {
    pub(crate) cx: &'a Context<'a>,
    pub(crate) kernels: &'a Kernels,
    /// Its rows and their scores.
    pub(crate) task: ScoreTask<'a>,
    /// Packed values of a block, `[block_k, stride]`.
    pub(crate) packed_v: MatMut,
    /// Unnormalised output of a tile in one block: `[tile rows, stride]`.
    pub(crate) block_out: MatMut,
    /// Running unnormalised output: `[task rows, stride]`.
    pub(crate) acc: MatMut,
    /// Running maximum and sum of every row, padded by a vector.
    pub(crate) max_sum: RowMaxSum,
    /// Maximum and sum of the block for the rows of a tile.
    pub(crate) block_max_sum: RowMaxSum,
    /// Elements of a row of values: value_dim in whole vectors.
    pub(crate) stride: usize,
    /// How keys and values are read.
    pub(crate) k_path: Path,
    pub(crate) v_path: Path,
}

impl<'a> TaskState<'a> {
    /// The state of rows over the keys of a part of the context. States in the same memory have the same running outputs, maxima and sums.
    ///
    /// # Safety
    /// `scratch` is valid for the plan's scratch layout.
    pub(crate) unsafe fn new(cx: &'a Context<'a>, part: usize, rows: Rows, scratch: *mut f32) -> Self {
        let Part { kernels, run } = &cx.parts[part];
        let (plan, layout) = (cx.plan, cx.plan.scratch());
        let (tile_stats, row_stats) = (layout.tile_stats, layout.row_stats);
        let (stride, block_k, tile_rows) = (plan.value_stride(), plan.block_k(), plan.tile_rows());
        // SAFETY: every offset is the start of a region of the layout, which has the rows and columns.
        unsafe {
            let stats = scratch.add(layout.stats);
            let block_stats = stats.add(2 * row_stats);
            let memory = ScoreMemory {
                packed_q: scratch.add(layout.q),
                packed_rows: plan.task_rows().max(STREAM_ROWS),
                packed_k: scratch.add(layout.k),
                scores: MatMut::new(scratch.add(layout.scores), block_k, tile_rows, block_k),
                mean_scores: scratch.add(layout.mean_scores),
                codes: scratch.add(layout.codes),
            };
            Self {
                cx,
                kernels,
                task: ScoreTask::new(run, rows, memory),
                packed_v: MatMut::new(scratch.add(layout.v), stride, block_k, stride),
                block_out: MatMut::new(scratch.add(layout.partial), stride, tile_rows, stride),
                acc: MatMut::new(scratch.add(layout.acc), stride, plan.task_rows(), stride),
                max_sum: RowMaxSum { max: stats, sum: stats.add(row_stats) },
                block_max_sum: RowMaxSum { max: block_stats, sum: block_stats.add(tile_stats) },
                stride,
                k_path: Path::Packed,
                v_path: Path::Packed,
            }
            .with_paths()
        }
    }

    /// Chooses how keys and values are read.
    ///
    /// Elements: a task of at most [`STREAM_ROWS`] rows streams, with the bits of packing. Codes: their products round differently from products of
    /// decoded rows, so the choice must not depend on how rows are cut into tasks. Integer products take any number of rows, of shared
    /// prefixes too. For other products in place, the rows of the whole sequence decide, and a plan with shared prefixes decodes and packs
    /// instead. Codes that no products take are packed however few the rows are.
    fn with_paths(mut self) -> Self {
        let few_rows = self.cx.plan.has_few_rows(self.task.sequence);
        let path_of_codes = |rows: CodeRows<'_>| {
            let takes = |phases: &&CodePhases| {
                (few_rows || phases.takes_any_rows) && (phases.takes)(rows.coder(), rows.dim())
            };
            self.kernels.code_phases.iter().find(takes).map_or(Path::Packed, |phases| Path::Codes(*phases))
        };
        let path = |stored| match stored {
            Stored::Elements(_) if self.task.rows.count <= STREAM_ROWS => Path::Stream,
            Stored::Elements(_) => Path::Packed,
            Stored::Codes(rows) => path_of_codes(rows),
        };
        (self.k_path, self.v_path) = (path(self.task.keys()), path(self.task.values()));
        self.task.streams_keys = matches!(self.k_path, Path::Stream);
        self
    }
}

/// The state of some rows after all their keys.
#[derive(Clone, Copy)]
pub(crate) struct RowState {
    /// Unnormalised output.
    pub(crate) acc: MatMut,
    pub(crate) max_sum: RowMaxSum,
    /// Added to the output. A tile that sees one block is not folded, but must have the bits of a fold into the empty state, which stores
    /// `-0 + 0 = +0` for an output of -0: its `zero` is 0. After a fold it is -0, which changes nothing.
    pub(crate) zero: f32,
}

/// How the keys or values of a task are read.
#[derive(Clone, Copy)]
pub(crate) enum Path {
    /// One block at a time is packed.
    Packed,
    /// Elements are read in place.
    Stream,
    /// Codes are read in place.
    Codes(CodePhases),
}

impl Path {
    pub(crate) fn is_packed(&self) -> bool {
        matches!(self, Self::Packed)
    }
}
