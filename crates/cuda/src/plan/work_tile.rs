//! One unit of work of a block of threads.

use crate::device_struct::device_struct;

/// The sequence of an entry that is no work.
pub(crate) const NONE: u32 = u32::MAX;

/// Splits of a tile that are merged first where there are many: `MERGE_GROUP` of the kernels.
pub(crate) const MERGE_GROUP: usize = 8;

/// Most work tiles that a block of threads can recompute, `MAX_RECOMPUTED` of the kernels. Where there are more tiles than that per
/// block, the grid has several times as many blocks as the device runs at once.
pub(crate) const MAX_RECOMPUTED: usize = 31;

/// In `splits`: the splits of a tile are merged in groups first.
pub(super) const SPLITS_GROUPED: u32 = 1 << 31;

device_struct! {
    /// One unit of work of a block of threads.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) struct WorkTile {
        pub(crate) sequence: u32,
        pub(crate) kv_head: u32,
        /// First of the packed rows: (position, head of the GQA group) pairs.
        pub(crate) row: u32,
        /// Columns of values: panel `n` begins at `n` times the kernel's `value_dim`.
        pub(crate) panel: u32,
        /// Keys to compute, and among them those that every row sees.
        pub(crate) begin: u32,
        pub(crate) end: u32,
        pub(crate) full_begin: u32,
        pub(crate) full_end: u32,
        /// Its partial result, the first partial of its tile, and the number of the tile's splits, with [`SPLITS_GROUPED`] where they are
        /// merged in groups first: the merged groups are in the partials behind the splits, and the counters of groups behind the tile's.
        pub(crate) partial: u32,
        pub(crate) first_partial: u32,
        pub(crate) splits: u32,
        pub(crate) counter: u32,
        /// Entry of the next work tile of the block of threads; 0 where there is none.
        pub(crate) next: u32,
        /// The sequence itself, so that a block of threads loads everything at once.
        pub(crate) batch: u32,
        pub(crate) q_start: u32,
        pub(crate) q_len: u32,
        pub(crate) kv_start: u32,
        pub(crate) kv_len: u32,
        pub(crate) q_offset: i64,
    }
}
