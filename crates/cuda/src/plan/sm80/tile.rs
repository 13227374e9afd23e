//! How a block of threads of the `mma.sync` kernels divides its work.

use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;

/// How a block of threads of the `mma.sync` kernels divides its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm80Tile {
    /// Warps over the rows of a tile.
    pub(crate) warps_q: usize,
    /// Warps over the keys of a tile; 1 where there are several over the rows.
    pub(crate) warps_k: usize,
    /// Fragments of 16 rows of a warp.
    pub(crate) fragments: usize,
    /// Keys that a warp multiplies at a time.
    pub(crate) warp_keys: usize,
    /// Tiles of keys, and of values, in shared memory.
    pub(crate) stages: usize,
    /// Blocks of threads that a multiprocessor holds at a time.
    pub(crate) resident: usize,
    /// True if the fragments of q stay in registers.
    pub(crate) q_in_registers: bool,
}

impl Sm80Tile {
    /// The largest number of rows of a sequence and key/value head that one fragment holds.
    pub(in crate::plan) const FRAGMENT_ROWS: usize = 16;

    /// A tile for one block of threads a multiprocessor, with fragments of q in shared memory: `warps_q` warps over rows of
    /// `fragments` times 16 each, or `warps_k` warps over `warp_keys` keys each, and `stages` tiles of keys in shared memory.
    /// A plan refuses tiles that the kernels cannot have.
    #[must_use]
    pub const fn new(
        warps_q: usize,
        warps_k: usize,
        fragments: usize,
        warp_keys: usize,
        stages: usize,
    ) -> Self {
        Self { warps_q, warps_k, fragments, warp_keys, stages, resident: 1, q_in_registers: false }
    }

    /// Sets the blocks of threads that a multiprocessor holds at a time.
    #[must_use]
    pub const fn with_resident(self, resident: usize) -> Self {
        Self { resident, ..self }
    }

    /// Sets where fragments of q stay: in registers if true, otherwise in shared memory.
    #[must_use]
    pub const fn with_q_in_registers(self, q_in_registers: bool) -> Self {
        Self { q_in_registers, ..self }
    }

    /// Checks a tile that a caller made.
    pub(super) fn check(&self, dtype: Dtype) -> Result<(), Unsupported> {
        let Self { warps_q, warps_k, fragments, warp_keys, stages, resident, q_in_registers } = *self;
        let refused = |why| Err(Unsupported::Tile { why });
        if ![1, 2, 4, 8].contains(&warps_q) || ![1, 2, 4, 8].contains(&warps_k) {
            return refused("warps are 1, 2, 4 or 8 over rows and over keys");
        }
        if warps_q > 1 && warps_k > 1 {
            return refused("warps divide rows or keys, not both");
        }
        if ![1, 2].contains(&fragments) {
            return refused("a warp has 1 or 2 fragments of 16 rows");
        }
        if warps_q == 8 && stages != 2 {
            return refused("8 warps over rows have 2 stages");
        }
        if !(16..=256).contains(&warp_keys) || !warp_keys.is_multiple_of(16) {
            return refused("keys of a warp are a multiple of 16, at most 256");
        }
        if !(2..=8).contains(&stages) || !(1..=16).contains(&resident) {
            return refused("2 to 8 stages, and 1 to 16 blocks a multiprocessor");
        }
        if q_in_registers && dtype == Dtype::F32 {
            return refused("fragments of f32 queries stay in shared memory");
        }
        Ok(())
    }

    /// Query rows of a tile.
    pub(super) const fn rows(&self) -> usize {
        16 * self.fragments * self.warps_q
    }

    /// Keys of a tile.
    pub(super) const fn keys(&self) -> usize {
        self.warp_keys * self.warps_k
    }

    /// Threads of a block.
    pub(super) const fn threads(&self) -> usize {
        32 * self.warps_q * self.warps_k
    }

    /// Returns true if warps divide the keys of a tile, each with keys of its own, and not its rows: for few
    /// rows.
    pub(crate) const fn warps_split_keys(&self) -> bool {
        self.warps_q == 1
    }

    /// Teams of warps that end a tile each for itself.
    pub(in crate::plan) const fn teams(&self) -> usize {
        if self.warps_q == 8 { 2 } else { 1 }
    }
}

/// Tiles for a number of rows, best first: each takes less shared memory than the one before. `long` where there are enough rows
/// and keys for the largest tiles.
pub(super) fn candidates(dtype: Dtype, dim: usize, rows: usize, long: bool) -> Vec<Sm80Tile> {
    let is_f32 = dtype == Dtype::F32;
    if rows <= Sm80Tile::FRAGMENT_ROWS {
        // Bytes of keys and values in flight to a multiprocessor are what counts: about 32 KiB a stage.
        let (keys, stages) = match dim * dtype.bytes() {
            0..=128 => (32, 3),
            _ => (16, 2),
        };
        let mut tiles = vec![Sm80Tile::new(1, 4, 1, keys, stages)];
        tiles.extend([4, 2, 1].map(|warps| Sm80Tile::new(1, warps, 1, 16, 2)));
        return tiles;
    }
    let mut tiles = Vec::new();
    if !is_f32 && rows > 64 {
        if dim <= 128 {
            let keys = if dim <= 64 { 128 } else { 64 };
            if long {
                tiles.push(Sm80Tile::new(8, 1, 2, keys, 2));
            }
            tiles.push(Sm80Tile::new(4, 1, 2, keys, 2));
        } else if dim <= 256 {
            tiles.push(Sm80Tile::new(8, 1, 1, 64, 2));
        }
    }
    let shapes = [(4, 64), (4, 32), (4, 16), (2, 32), (2, 16)];
    let max_keys = if is_f32 { 32 } else { 64 };
    tiles.extend(
        shapes
            .into_iter()
            .filter(|&(_, keys)| keys <= max_keys)
            .map(|(warps, keys)| Sm80Tile::new(warps, 1, 1, keys, 2)),
    );
    tiles.push(Sm80Tile::new(1, 1, 1, 16, 2));
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_have_every_candidate() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            for (dim, rows, long) in [32, 64, 96, 128, 160, 256, 512].into_iter().flat_map(|dim| {
                [1, 16, 17, 64, 65, 4096]
                    .into_iter()
                    .flat_map(move |rows| [(dim, rows, false), (dim, rows, true)])
            }) {
                for tile in candidates(dtype, dim, rows, long) {
                    tile.check(dtype).unwrap_or_else(|why| panic!("{dtype} {dim} {rows}: {tile:?}: {why}"));
                }
            }
        }
    }
}
