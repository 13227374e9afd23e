//! The data of a backward run and of a task, and the table of phases that work on it.

#![allow(unsafe_code)]

use crate::kernels::shared::mat::{Mat, MatMut};
use crate::kernels::shared::matrix_unit::MatrixUnitGuard;
use crate::kernels::shared::score_task::{Query, RunInputs, ScoreMemory, ScoreTask, Tile};
use crate::kernels::shared::scores::ScoreKernels;
use crate::plan::{BackwardLayout, CpuBackwardPlan, Rows};
use flashtile_core::gradients::BackwardInputs;
use flashtile_core::tensor::TensorViewMut;
use std::cell::Cell;
use std::ops::Range;

/// The inputs, outputs and workspace of a run, for all of its tasks, checked against the plan's problem.
pub(crate) struct Context<'a> {
    pub(crate) plan: &'a CpuBackwardPlan,
    /// Kernels of the plan's instruction set.
    pub(crate) kernels: BackwardKernels,
    pub(crate) run: RunInputs<'a>,
    pub(crate) inputs: &'a BackwardInputs<'a>,
    pub(crate) d_q: &'a TensorViewMut<'a>,
    pub(crate) d_k: &'a TensorViewMut<'a>,
    pub(crate) d_v: &'a TensorViewMut<'a>,
    pub(crate) rows: RowTerms,
    /// Partial sums of `d_q` over some of the keys, of [`BackwardLayout::partial`] floats each.
    pub(crate) partials: *mut f32,
}

// SAFETY: tasks read the inputs and write disjoint rows of the gradients and disjoint partials.
unsafe impl Sync for Context<'_> {}

/// Terms of the gradients of a query row's scores, `[batch, q_heads, q_len]` each, as lse is.
#[derive(Clone, Copy)]
pub(crate) struct RowTerms {
    /// `-lse` in units of log2, less the constant that the row's scores leave out
    /// ([`Query::alibi_shift`](crate::kernels::shared::score_task::Query::alibi_shift)).
    pub(crate) neg_lse: *mut f32,
    /// `sum(d_out * out) - d_lse`.
    pub(crate) delta: *mut f32,
    /// `sum(d_score * distance)` of the keys of each chunk, by their distances from the nearest visible key, `[chunks][batch, q_heads, q_len]`; null unless the gradients of ALiBi slopes are
    /// wanted.
    pub(crate) slope_sums: *mut f32,
}

impl Context<'_> {
    /// Index of a query's row in `[batch, q_heads, q_len]`.
    #[inline]
    pub(crate) fn row_index(&self, query: &Query<'_>) -> usize {
        let dims = self.run.problem.dims();
        let row = query.sequence.q_start + query.position;
        (query.sequence.batch * dims.q_heads + query.head) * dims.q_len + row
    }
}

/// The phases of a task for one instruction set and dtype.
///
/// Safety of each: the machine has the instruction set, and the contract of the kernel of the same name holds.
#[derive(Clone, Copy)]
pub(crate) struct BackwardKernels {
    pub(crate) scores: ScoreKernels,
    /// Configures the thread's matrix unit, if products use one.
    pub(crate) configure: unsafe fn() -> MatrixUnitGuard,
    /// Factor from sums of `d_score * packed query` to `d_k`, by the scale and the softcap of the problem.
    pub(crate) d_k_factor: fn(f32, Option<f32>) -> f32,
    pub(crate) row_terms: unsafe fn(&Context<'_>, Rows),
    pub(crate) pack_block: unsafe fn(&KeyState<'_>, usize, &Range<usize>),
    pub(crate) pack_rows: unsafe fn(&TileState<'_>),
    pub(crate) d_scores: unsafe fn(&TileState<'_>, &Tile),
    pub(crate) add_products: unsafe fn(&TileState<'_>, &Tile, bool),
    pub(crate) store: unsafe fn(&TensorViewMut<'_>, [usize; 3], *const f32, f32),
}

/// The phases that a dtype determines.
#[derive(Clone, Copy)]
pub(crate) struct PackPhases {
    pub(crate) block: unsafe fn(&KeyState<'_>, usize, &Range<usize>),
    pub(crate) rows: unsafe fn(&TileState<'_>),
}

/// The keys that a task owns, packed, and their gradients.
pub(crate) struct KeyState<'a> {
    pub(crate) cx: &'a Context<'a>,
    /// All query rows of the key/value head, without packed queries.
    pub(crate) task: ScoreTask<'a>,
    /// The first block of the chunk.
    pub(crate) first_block: usize,
    pub(crate) memory: KeyMemory,
    /// Cleared where an element of the packed keys or values is infinite or NaN.
    pub(crate) is_finite: Cell<bool>,
}

/// Scratch memory of the keys of a chunk.
#[derive(Clone, Copy)]
pub(crate) struct KeyMemory {
    /// Panels of keys, as scores take them, of `keys_len` floats for each block.
    keys: *mut f32,
    keys_len: usize,
    /// Panels of values, likewise.
    values: *mut f32,
    values_len: usize,
    /// Rows of keys, as `p . v` takes values: `[chunk_keys, q_stride]`, fewer if an f32 holds a pair of keys.
    pub(crate) key_rows: MatMut,
    /// `[chunk_keys, q_stride]`.
    pub(crate) d_k: MatMut,
    /// `[chunk_keys, v_stride]`.
    pub(crate) d_v: MatMut,
}

impl KeyState<'_> {
    /// Memory of the key panels of a block.
    pub(crate) fn key_panels(&self, block: usize) -> *mut f32 {
        self.memory.keys.wrapping_add((block - self.first_block) * self.memory.keys_len)
    }

    /// Memory of the value panels of a block.
    pub(crate) fn value_panels(&self, block: usize) -> *mut f32 {
        self.memory.values.wrapping_add((block - self.first_block) * self.memory.values_len)
    }

    /// Row of the chunk's gradients that a block starts at.
    pub(crate) fn first_row(&self, block: usize) -> usize {
        (block - self.first_block) * self.cx.plan.block_k()
    }
}

/// A tile of query rows, packed, with the memory of its scores in one block.
pub(crate) struct TileState<'a> {
    pub(crate) cx: &'a Context<'a>,
    pub(crate) keys: &'a KeyState<'a>,
    /// The rows of the tile.
    pub(crate) task: ScoreTask<'a>,
    pub(crate) memory: TileMemory,
    /// Rows of q as `d_score^T q` takes them.
    pub(crate) row_q: Cell<Mat>,
    /// Rows of d_out as `p^T d_out` takes them.
    pub(crate) row_d_out: Cell<Mat>,
    /// False if an element of the rows is infinite or NaN.
    pub(crate) is_finite: Cell<bool>,
    /// True if gradients of the scores have the derivative of the softcap, as products `q . k` need it; biases are added after the softcap.
    pub(crate) applies_softcap_slope: bool,
    /// [`RowTerms::slope_sums`] of the tile's chunk, if they are wanted.
    pub(crate) slope_sums: Option<*mut f32>,
}

/// Scratch memory of a tile beside [`ScoreMemory`].
#[derive(Clone, Copy)]
pub(crate) struct TileMemory {
    /// Rows of d_out, packed like queries.
    pub(crate) packed_d_out: *mut f32,
    /// Rows of q and of d_out for products over rows, where packed rows do not serve.
    pub(crate) row_q: MatMut,
    pub(crate) row_d_out: MatMut,
    /// `d_out . v`, later `d_score`, of a tile in a block: `[tile rows, score_stride]`.
    pub(crate) d_probs: MatMut,
    /// Derivatives of the softcap, likewise.
    pub(crate) softcap_slopes: MatMut,
    /// `d_score` as pairs of keys, where products take them: `[tile rows, score_stride]`.
    pub(crate) key_pairs: MatMut,
    /// Sums of `d_score k` over the blocks of a chunk: `[tile rows, q_stride]`.
    pub(crate) d_q: MatMut,
}

impl<'a> KeyState<'a> {
    /// # Safety
    /// `scratch` is valid for the plan's layout.
    pub(crate) unsafe fn new(cx: &'a Context<'a>, rows: Rows, first_block: usize, scratch: *mut f32) -> Self {
        let layout = cx.plan.layout();
        // SAFETY: every offset is the start of a region of the layout, which has the rows and columns.
        unsafe {
            let mat = |at: usize, rows: usize, cols: usize| MatMut::new(scratch.add(at), cols, rows, cols);
            let memory = KeyMemory {
                keys: scratch.add(layout.keys),
                keys_len: layout.keys_len,
                values: scratch.add(layout.values),
                values_len: layout.values_len,
                key_rows: mat(layout.key_rows, layout.chunk_keys, layout.q_stride),
                d_k: mat(layout.d_k, layout.chunk_keys, layout.q_stride),
                d_v: mat(layout.d_v, layout.chunk_keys, layout.v_stride),
            };
            let task = ScoreTask::new(&cx.run, rows, score_memory(layout, scratch));
            Self { cx, task, first_block, memory, is_finite: Cell::new(true) }
        }
    }

    /// Packs what the rows see of some blocks of the chunk.
    ///
    /// # Safety
    /// The machine has the instruction set of the kernels.
    pub(crate) unsafe fn pack(&self, blocks: Range<usize>) {
        for block in blocks {
            let columns = self.task.columns(&(0..self.task.rows.count), block);
            if !columns.is_empty() {
                // SAFETY: the caller's contract; the keys exist.
                unsafe { (self.cx.kernels.pack_block)(self, block, &columns) }
            }
        }
    }
}

impl<'a> TileState<'a> {
    /// # Safety
    /// As [`KeyState::new`].
    pub(crate) unsafe fn new(keys: &'a KeyState<'a>, rows: Rows, scratch: *mut f32) -> Self {
        let (cx, layout) = (keys.cx, keys.cx.plan.layout());
        // SAFETY: every offset is the start of a region of the layout, which has the rows and columns.
        unsafe {
            let mat = |at: usize, cols: usize| MatMut::new(scratch.add(at), cols, layout.tile_rows, cols);
            let memory = TileMemory {
                packed_d_out: scratch.add(layout.packed_d_out),
                row_q: mat(layout.row_q, layout.q_stride),
                row_d_out: mat(layout.row_d_out, layout.v_stride),
                d_probs: mat(layout.d_probs, layout.score_stride),
                softcap_slopes: mat(layout.softcap_slopes, layout.score_stride),
                key_pairs: mat(layout.key_pairs, layout.score_stride),
                d_q: mat(layout.d_q, layout.q_stride),
            };
            Self {
                cx,
                keys,
                task: ScoreTask::new(&cx.run, rows, score_memory(layout, scratch)),
                row_q: Cell::new(memory.row_q.as_mat()),
                row_d_out: Cell::new(memory.row_d_out.as_mat()),
                memory,
                is_finite: Cell::new(true),
                applies_softcap_slope: true,
                slope_sums: None,
            }
        }
    }
}

/// # Safety
/// As [`KeyState::new`].
unsafe fn score_memory(layout: &BackwardLayout, scratch: *mut f32) -> ScoreMemory {
    // SAFETY: the caller's contract.
    unsafe {
        let scores = scratch.add(layout.scores);
        ScoreMemory {
            packed_q: scratch.add(layout.packed_q),
            packed_rows: layout.tile_rows,
            packed_k: scratch.add(layout.keys),
            scores: MatMut::new(scores, layout.score_stride, layout.tile_rows, layout.score_stride),
            // Elements have neither.
            mean_scores: scratch,
            codes: scratch,
        }
    }
}
