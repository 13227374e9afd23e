//! The data of a run and of a task, and the table of phases that work on it.
//!
//! Phases take a [`TaskState`], which has the table of phases: these types name each other, so they are in one module.

#![allow(unsafe_code)]

use super::mask::{MaskTable, MaskTile};
use super::mat::{Mat, MatMut, RowMaxSum};
use super::matrix_unit::MatrixUnitGuard;
use crate::plan::{CpuPlan, Rows};
use flashtile_core::codec::Coder;
use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::Inputs;
use flashtile_core::isa::IsaToken;
use flashtile_core::problem::Sequence;
use flashtile_core::scoring::Scoring;
use flashtile_core::tensor::TensorViewMut;
use std::cell::Cell;
use std::ops::Range;

/// The inputs, outputs and workspace of a run, for all of its tasks, checked against the plan's problem.
pub(crate) struct Context<'a> {
    pub(crate) plan: &'a CpuPlan,
    /// Kernels of the plan's instruction set.
    pub(crate) kernels: Kernels,
    /// Token of the instruction set that codecs use.
    pub(crate) token: IsaToken,
    pub(crate) inputs: &'a Inputs<'a>,
    /// Scoring of the plan's problem over the inputs.
    pub(crate) scoring: Scoring<'a>,
    pub(crate) out: &'a TensorViewMut<'a>,
    /// `[batch, q_heads, q_len]`, or null.
    pub(crate) lse: *mut f32,
    pub(crate) partials: Partials,
    pub(crate) mask: Option<MaskTable<'a>>,
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
    pub(super) unsafe fn store(&self, index: usize, partial_out: Mat, max_sum: RowMaxSum) {
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
    pub(super) unsafe fn clear(&self, index: usize, rows: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.max_sum.clear(index..index + rows) }
    }

    /// Reads the maxima and sums of `rows` rows, and returns their `partial_out` in place.
    ///
    /// # Safety
    /// The partials were stored, the rows exist.
    pub(super) unsafe fn load_max_sum(&self, index: usize, rows: usize, max_sum: RowMaxSum) -> Mat {
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
    pub(super) unsafe fn load(&self, index: usize, partial_out: MatMut, max_sum: RowMaxSum) {
        let rows = partial_out.rows();
        // SAFETY: the caller's contract.
        unsafe {
            let stored = self.load_max_sum(index, rows, max_sum);
            std::ptr::copy_nonoverlapping(stored.at(0, 0), partial_out.at(0, 0), rows * stored.ld());
        }
    }
}

/// Packs some columns of a block of keys.
pub(crate) type PackKeys = unsafe fn(&TaskState<'_>, usize, &Range<usize>);
/// Packs the values of some keys, counted from a first one, to memory.
pub(crate) type PackValues = unsafe fn(&TaskState<'_>, usize, &Range<usize>, MatMut);

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
    /// How `p . v` takes keys.
    pub(crate) key_steps: KeySteps,
    /// Products with codes in place, the preferred ones first.
    pub(crate) code_phases: &'static [CodePhases],
    /// Configures the thread's matrix unit, if products use one.
    pub(crate) configure: unsafe fn() -> MatrixUnitGuard,
    pub(crate) pack_queries: unsafe fn(&TaskState<'_>),
    pub(crate) pack_keys: PackKeys,
    pub(crate) packed_scores: unsafe fn(&TaskState<'_>, &Tile),
    pub(crate) stream_scores: unsafe fn(&TaskState<'_>, &Tile),
    pub(crate) probs: unsafe fn(&TaskState<'_>, &Tile),
    pub(crate) pack_values: PackValues,
    pub(crate) packed_values: unsafe fn(&TaskState<'_>, &Tile, &Range<usize>, Mat),
    pub(crate) stream_values: unsafe fn(&TaskState<'_>, &Tile, &Range<usize>),
    pub(crate) repair_nonfinite: unsafe fn(&TaskState<'_>, &Tile),
    pub(crate) fold: unsafe fn(usize, &Fold),
    pub(crate) finish: unsafe fn(&TaskState<'_>, usize, usize, &RowState),
}

/// The phases of one `CodeProducts` of `kernels/products`.
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

/// How `p . v` takes keys.
#[derive(Clone, Copy)]
pub(crate) struct KeySteps {
    /// Keys in an f32 of packed values: 2 if products are of pairs of bf16.
    pub(crate) keys_per_f32: usize,
    /// Keys that a product takes at once: it runs over whole multiples, in which other keys have probability and value 0.
    pub(crate) step: usize,
}

impl KeySteps {
    /// Columns in whole steps.
    #[inline]
    pub(super) fn whole(self, columns: &Range<usize>) -> Range<usize> {
        columns.start / self.step * self.step..columns.end.next_multiple_of(self.step)
    }
}

/// Running state of some rows, and one block's result for them.
#[derive(Clone, Copy)]
pub(crate) struct Fold {
    /// Running unnormalised output, in whole vectors of columns.
    pub(super) acc: MatMut,
    /// Running maxima and sums, in whole vectors of rows.
    pub(super) max_sum: RowMaxSum,
    /// The block's unnormalised output, with the columns of `acc`.
    pub(super) partial_out: Mat,
    /// The block's maxima and sums, `-inf` and 0 up to a whole vector of rows.
    pub(super) block: RowMaxSum,
}

/// The rows of a task, and the scratch memory of the thread that computes them.
pub(crate) struct TaskState<'a> {
    pub(super) cx: &'a Context<'a>,
    pub(super) kernels: &'a Kernels,
    pub(super) rows: Rows,
    /// Sequence of the first row.
    pub(super) sequence: &'a Sequence,
    /// Packed queries `[task rows, depth]`.
    pub(super) packed_q: *mut f32,
    /// Packed keys of a block, `[panels][depth][panel width]`; or the memory of a streaming task.
    pub(super) packed_k: *mut f32,
    /// Packed values of a block, `[block_k, stride]`.
    pub(super) packed_v: MatMut,
    /// Scores of a tile, later probabilities: `[tile rows, block_k]`. The probability of column `c` is in f32 `c / PER_F32` of its row
    /// ([`Products::PER_F32`](super::products::Products::PER_F32)).
    pub(super) scores: MatMut,
    /// Unnormalised output of a tile in one block: `[tile rows, stride]`.
    pub(super) block_out: MatMut,
    /// Running unnormalised output: `[task rows, stride]`.
    pub(super) acc: MatMut,
    /// Running maximum and sum of every row, padded by a vector.
    pub(super) max_sum: RowMaxSum,
    /// Maximum and sum of the block for the rows of a tile.
    pub(super) block_max_sum: RowMaxSum,
    /// Elements of a row of values: value_dim in whole vectors.
    pub(super) stride: usize,
    pub(super) block_k: usize,
    /// Query heads of a key/value head.
    pub(super) gqa_group: usize,
    /// `q . k_mean` of each row, in units of the scores: stored keys lack this part. Empty unless quantized.
    pub(super) mean_scores: *mut f32,
    /// Memory for decoded rows and integer operands. Empty unless keys or values are quantized.
    pub(super) codes: *mut f32,
    /// How keys and values are read.
    pub(super) k_path: Path,
    pub(super) v_path: Path,
    /// Set once the packed query of some row has another factor than the scale of the scores
    /// ([`ScaleFactors`](super::scale::ScaleFactors)).
    pub(super) has_score_factors: Cell<bool>,
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
pub(super) enum Path {
    /// One block at a time is packed.
    Packed,
    /// Elements are read in place.
    Stream,
    /// Codes are read in place.
    Codes(CodePhases),
}

impl Path {
    pub(super) fn is_packed(&self) -> bool {
        matches!(self, Self::Packed)
    }
}

/// A row of q.
pub(super) struct Query<'a> {
    /// Index of its sequence.
    pub(super) index: usize,
    pub(super) sequence: &'a Sequence,
    /// Position in its sequence.
    pub(super) position: usize,
    pub(super) head: usize,
}

/// Rows of the task, and the columns of a block that some of them see.
pub(crate) struct Tile {
    pub(super) rows: Range<usize>,
    pub(super) block: usize,
    pub(super) columns: Range<usize>,
    /// True if causality, window and length let every row see every column.
    pub(super) full: bool,
    pub(super) mask: MaskTile,
}
