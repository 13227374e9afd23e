//! Plans of the CPU backend.
//!
//! Keys are cut into blocks of [`CpuPlan::block_k`] keys, counted from the sequence's first key. Each block gives every
//! query row that sees it a partial result (maximum, sum, weighted values), and a row folds its partials in key order. The
//! bits of a row therefore depend on its own keys alone: not on the thread count, on splits, on the other rows, or on the
//! other sequences of the batch.
//!
//! The unit of work is a task: a range of query rows of one key/value head, and a range of the key blocks that they see.
//! Rows are (position, head of the GQA group) pairs ordered by position, so that all query heads of a GQA group share each packed block and
//! neighbouring rows see nearly the same keys. The module `schedule` makes the tasks.

mod backward_plan;
mod backward_schedule;
mod cpu_plan;
mod facts;
pub mod machines;
mod planner;
mod schedule;
mod sizes;

pub(crate) use backward_plan::BackwardLayout;
pub use backward_plan::CpuBackwardPlan;
pub(crate) use backward_schedule::{BackwardReduction, BackwardTask, BiasTask, DqTarget};
pub use cpu_plan::{CpuPlan, isa_for};
pub(crate) use cpu_plan::{MaskTileShape, register_tile};
pub use facts::CpuFacts;
pub use schedule::PlannedPrefix;
pub(crate) use schedule::{MAX_PARTS, Reduction, Rows, Target, Task, sequence_of, spans};
pub(crate) use sizes::{BLOCK_K, INTEGER_DIM_STEP, STREAM_ROWS};
