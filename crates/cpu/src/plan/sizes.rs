//! Sizes that plans and kernels share.

/// Keys of a block. Fixed, because the bits of a result depend on it: 256 keys keep a tile of scores in the first-level
/// cache and make the cost of folding a partial result negligible.
pub(crate) const BLOCK_K: usize = 256;
/// Upper bound of the query rows of a task that reads keys and values once, in place: the scores of these rows with one vector of keys stay
/// in registers beside a transposed block of the keys.
pub(crate) const STREAM_ROWS: usize = 16;
/// Upper bound of the query rows of a task that multiplies codes as integers, [`STREAM_ROWS`] at a time: codes in the second-level cache
/// serve all of its rows, whose integers fit beside them.
pub(crate) const INTEGER_TASK_ROWS: usize = 64;
/// Dimensions of codes that are multiplied as integers are multiples of this.
pub(crate) const INTEGER_DIM_STEP: usize = 64;
/// Query positions of a mask tile.
pub(super) const MASK_TILE_Q: usize = 16;
/// Upper bound of the threads of a plan.
pub(super) const MAX_THREADS: usize = 1 << 12;
/// Upper bound of the tasks of a plan.
pub(super) const MAX_TASKS: usize = 1 << 22;
