//! One unit of work of a block of threads.

use crate::device_struct::device_struct;

/// The sequence of an entry that is no work.
pub(crate) const NONE: u32 = u32::MAX;

/// Parts of a tile that are added up first where there are many: `GROUP` of the kernels.
pub(crate) const GROUP: usize = 8;

/// Work tiles of a block of threads that it can compute again, `AGAIN` of the kernels; with more tiles than that for each there are
/// several times as many blocks as the device holds.
pub(crate) const AGAIN: usize = 31;

/// Of `splits`: the parts of a tile are added up in groups.
pub(super) const GROUPED: u32 = 1 << 31;

device_struct! {
    /// One unit of work of a block of threads.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) struct WorkTile {
        pub(crate) sequence: u32,
        pub(crate) kv_head: u32,
        /// First of the packed rows.
        pub(crate) row: u32,
        pub(crate) panel: u32,
        /// Keys to compute, and among them those that every row sees.
        pub(crate) begin: u32,
        pub(crate) end: u32,
        pub(crate) full_begin: u32,
        pub(crate) full_end: u32,
        /// Slot of its partial result, the first of its tile's, and their number, with [`GROUPED`] where they are added up in groups:
        /// sums of groups are in the partials behind them, and counters of groups behind the tile's.
        pub(crate) slot: u32,
        pub(crate) first: u32,
        pub(crate) splits: u32,
        pub(crate) counter: u32,
        /// Entry of the next work tile of the block of threads; 0 where there is none.
        pub(crate) next: u32,
        /// The sequence itself, so that a block of threads has all that it needs at once.
        pub(crate) batch: u32,
        pub(crate) q_start: u32,
        pub(crate) q_len: u32,
        pub(crate) kv_start: u32,
        pub(crate) kv_len: u32,
        pub(crate) q_offset: i64,
    }
}
