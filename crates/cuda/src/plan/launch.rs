//! One launch of a native kernel, and limits of all launches.

use super::work_tile::WorkTile;

/// The most blocks of threads in the second and third dimension of a grid.
pub(crate) const MAX_GRID: usize = 65_535;

/// The most threads of a block (CUDA Programming Guide, "technical specifications per compute capability").
pub(super) const MAX_BLOCK_THREADS: usize = 1024;

/// Query positions of a mask tile: `MASK_TILE_ROWS` of the kernels.
pub(crate) const MASK_TILE_ROWS: usize = 16;

/// Alignment of the regions of scratch memory, in bytes.
pub(super) const ALIGN: usize = 256;

/// Room of a launch in scratch memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Capacity {
    /// Blocks of threads.
    pub(crate) grid: usize,
    pub(crate) work_tiles: usize,
    /// Partial results, and counters of the tiles whose splits they are.
    pub(crate) partials: usize,
    pub(crate) counters: usize,
}

impl Capacity {
    pub(super) fn max(self, other: Self) -> Self {
        Self {
            grid: self.grid.max(other.grid),
            work_tiles: self.work_tiles.max(other.work_tiles),
            partials: self.partials.max(other.partials),
            counters: self.counters.max(other.counters),
        }
    }
}

/// One launch of a kernel.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Launch<K> {
    pub(crate) kernel: K,
    /// The first work tile of each block of threads, then the others.
    pub(crate) work_tiles: Vec<WorkTile>,
    /// True if the others are a queue for all blocks of threads, which a counter leads through; else each has a list.
    pub(crate) is_queue: bool,
    /// The entries that are work.
    pub(crate) count: usize,
    /// The most splits of a tile.
    pub(crate) splits: usize,
    /// The most blocks of keys of a tile.
    pub(crate) max_blocks: usize,
    /// The blocks that are launched and the memory that is reserved: enough for other lengths of the same
    /// sequences too, where blocks of threads share tiles.
    pub(crate) capacity: Capacity,
}

impl<K> Launch<K> {
    /// Work tiles of the queue, with the first of each block of threads; 0 where there is none.
    pub(crate) const fn queued(&self) -> u32 {
        if self.is_queue { self.count as u32 } else { 0 }
    }
}
