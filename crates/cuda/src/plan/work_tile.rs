//! One unit of work of a block of threads.

use crate::device_struct::device_struct;

/// [`WorkTile::sequence`] of an entry that is no work.
pub(crate) const NONE: u32 = u32::MAX;

/// Splits of a tile that are merged first where there are many: `MERGE_GROUP` of the kernels.
pub(crate) const MERGE_GROUP: usize = 8;

/// Most work tiles that a block of threads can recompute, `MAX_RECOMPUTED` of the kernels. Where there are more tiles than that per
/// block, the grid has several times as many blocks as the device runs at once.
pub(crate) const MAX_RECOMPUTED: usize = 31;

/// Bit of [`WorkTile::splits`]: the splits of a tile are merged in groups first.
pub(super) const SPLITS_GROUPED: u32 = 1 << 31;

device_struct! {
    /// One unit of work of a block of threads.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) struct WorkTile {
        /// Index of the sequence; [`NONE`] for an entry that is no work.
        pub(crate) sequence: u32,
        pub(crate) kv_head: u32,
        /// First of the packed rows: (position, head of the GQA group) pairs.
        pub(crate) row: u32,
        /// Columns of values: panel `n` begins at `n` times the kernel's `value_dim`.
        pub(crate) panel: u32,
        /// First key to compute.
        pub(crate) begin: u32,
        /// End of the keys to compute.
        pub(crate) end: u32,
        /// First key that every row of the tile sees, before or after `begin`.
        pub(crate) full_begin: u32,
        /// End of the keys that every row of the tile sees; at most `full_begin` where there are none.
        pub(crate) full_end: u32,
        /// The partial that this split writes. Unused where the tile has one split.
        pub(crate) partial: u32,
        /// First partial of the tile's splits, which follow each other in key order; merged groups come behind them.
        pub(crate) first_partial: u32,
        /// Number of the tile's splits, at least 1, with [`SPLITS_GROUPED`] where they are merged in groups first.
        pub(crate) splits: u32,
        /// Counter of the tile's stored splits; the counters of its groups come behind it. Each team has its own.
        pub(crate) counter: u32,
        /// Entry of the next work tile of the thread block; 0: none. Entry 0 is always a first entry, so no link points to it.
        pub(crate) next: u32,
        /// Batch entry. This and the fields below describe the sequence, so that a thread block loads everything at once.
        pub(crate) batch: u32,
        pub(crate) q_start: u32,
        pub(crate) q_len: u32,
        pub(crate) kv_start: u32,
        pub(crate) kv_len: u32,
        pub(crate) q_offset: i64,
    }
}
