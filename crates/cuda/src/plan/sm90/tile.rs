//! How a block of threads of the `wgmma` kernels divides its work.

use flashtile_core::plan::Unsupported;

/// The largest head dimension of warpgroups with rows of their own, and of warpgroups that share rows.
pub(super) const MAX_NARROW_DIM: usize = 256;
pub(super) const MAX_DIM: usize = 512;

/// The most columns of values of f32 that a warpgroup computes at a time: its registers hold the output and a tile's product.
pub(super) const MAX_F32_VALUE_DIM: usize = 128;

/// Rows of a product of a warpgroup.
pub(crate) const WARPGROUP_ROWS: usize = 64;

/// How a block of threads of an [`Sm90Kernel`](super::Sm90Kernel) divides its work: warpgroups that multiply, and one that copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm90Tile {
    /// Warpgroups that multiply, with 64 rows each.
    pub(crate) warpgroups: usize,
    /// Keys that a warpgroup multiplies at a time.
    pub(crate) keys: usize,
    /// Tiles of keys, and of values, in shared memory.
    pub(crate) stages: usize,
    /// True if warpgroups take turns: one multiplies while the others compute probabilities.
    pub(crate) ping_pong: bool,
    /// True if two warpgroups share 64 rows. Each computes the probabilities of half of a tile's keys, and half of the output's columns.
    pub(crate) shares_rows: bool,
}

impl Sm90Tile {
    /// A tile of `warpgroups` times 64 rows and `keys` keys, with `stages` tiles of keys in shared memory, and with ping-pong where there
    /// are several warpgroups. A plan refuses tiles that the kernels cannot have.
    #[must_use]
    pub const fn new(warpgroups: usize, keys: usize, stages: usize) -> Self {
        Self { warpgroups, keys, stages, ping_pong: warpgroups > 1, shares_rows: false }
    }

    /// The tile for head dimensions from 257 to 512: two warpgroups that share 64 rows, and 64 keys.
    #[must_use]
    pub const fn wide(stages: usize) -> Self {
        Self { warpgroups: 2, keys: 64, stages, ping_pong: false, shares_rows: true }
    }

    /// The same tile, with warpgroups that multiply one after another or at any time.
    #[must_use]
    pub const fn with_ping_pong(self, ping_pong: bool) -> Self {
        Self { ping_pong, ..self }
    }

    /// Checks a tile that a caller made.
    pub(super) fn check(&self) -> Result<(), Unsupported> {
        let Self { warpgroups, keys, stages, ping_pong, shares_rows } = *self;
        let refused = |why| Err(Unsupported::Tile { why });
        if !(1..=3).contains(&warpgroups) {
            return refused("1 to 3 warpgroups multiply");
        }
        if !(16..=256).contains(&keys) || !keys.is_multiple_of(16) {
            return refused("keys of a warpgroup are a multiple of 16, at most 256");
        }
        if !(1..=4).contains(&stages) {
            return refused("1 to 4 stages");
        }
        if shares_rows && *self != Self::wide(stages) {
            return refused("two warpgroups share rows, with 64 keys and without ping-pong");
        }
        if ping_pong && warpgroups < 2 {
            return refused("ping-pong needs 2 warpgroups");
        }
        Ok(())
    }

    /// Query rows of a tile.
    #[must_use]
    pub const fn rows(&self) -> usize {
        WARPGROUP_ROWS * self.warpgroups / self.value_teams()
    }

    /// Warpgroups that share rows, each with columns of the output of its own.
    pub(crate) const fn value_teams(&self) -> usize {
        if self.shares_rows { 2 } else { 1 }
    }

    /// Keys of a tile.
    #[must_use]
    pub const fn keys(&self) -> usize {
        self.keys
    }

    /// Threads of a block, including the warpgroup that copies.
    #[must_use]
    pub const fn threads(&self) -> usize {
        128 * (self.warpgroups + 1)
    }

    /// Tiles of keys, and of values, in shared memory.
    #[must_use]
    pub const fn stages(&self) -> usize {
        self.stages
    }

    /// Blocks of threads that a multiprocessor holds at a time.
    #[must_use]
    pub const fn resident(&self) -> usize {
        1
    }

    /// Warpgroups that end a tile each for itself.
    pub(super) const fn teams(&self) -> usize {
        self.warpgroups
    }

    /// The fewest blocks of keys for which a split of a tile is worth its partial result.
    pub(super) const fn min_split_blocks(&self) -> usize {
        4
    }
}

/// Tiles for dimensions that the kernels are compiled for, best first; each sequence has its number of `rows`. What modifies scores takes
/// registers: there are fewer warpgroups then, or fewer keys.
pub(super) fn candidates(
    head_dim: usize,
    value_dim: usize,
    has_bias: bool,
    rows: impl Iterator<Item = usize> + Clone,
) -> Vec<Sm90Tile> {
    if head_dim.max(value_dim) > MAX_NARROW_DIM {
        return vec![Sm90Tile::wide(2), Sm90Tile::wide(1)];
    }
    let best = match head_dim.max(value_dim) {
        0..=64 if !has_bias && !prefers_two_warpgroups(rows) => (3, 112, 3),
        0..=64 => (2, 128, 4),
        65..=128 => (2, 128, 2),
        129..=192 if value_dim <= 128 => (2, 128, 2),
        129..=192 => (2, 96, 2),
        _ if has_bias => (2, 48, 2),
        _ => (2, 80, 2),
    };
    let shapes = [best, (2, 64, 2), (2, 32, 2)];
    shapes.map(|(warpgroups, keys, stages)| Sm90Tile::new(warpgroups, keys, stages)).to_vec()
}

/// Tiles of f32, best first. Shared memory holds three terms of 16 bits of each element: above a head dimension of 128 there is room for rows of
/// one warpgroup.
pub(super) fn f32_candidates(head_dim: usize, value_dim: usize) -> Vec<Sm90Tile> {
    let best = match head_dim.max(value_dim) {
        0..=64 => (2, 64, 3),
        65..=128 => (2, 32, 2),
        129..=192 => (1, 64, 1),
        _ => (1, 48, 1),
    };
    let shapes = [best, (1, 32, 1), (1, 16, 1)];
    shapes
        .map(|(warpgroups, keys, stages)| Sm90Tile::new(warpgroups, keys, stages).with_ping_pong(false))
        .to_vec()
}

/// True if two warpgroups are faster than three for sequences of these numbers of rows. Three need 0.87 to 0.92 of the time for a row, but
/// their tiles are larger, and may have more rows beyond the end of a sequence.
fn prefers_two_warpgroups(rows: impl Iterator<Item = usize> + Clone) -> bool {
    let computed = |warpgroups: usize| -> usize {
        rows.clone().map(|rows| rows.div_ceil(warpgroups * WARPGROUP_ROWS)).fold(0, usize::saturating_add)
            * warpgroups
    };
    computed(3).saturating_mul(10) > computed(2).saturating_mul(11)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Candidates for long sequences.
    fn of(head_dim: usize, value_dim: usize, has_bias: bool) -> Vec<Sm90Tile> {
        candidates(head_dim, value_dim, has_bias, std::iter::once(16_384))
    }

    #[test]
    fn three_warpgroups_are_for_rows_that_exist() {
        for (rows, warpgroups) in [(1024, 2), (1152, 3), (1536, 3), (640, 2), (2048, 3)] {
            assert_eq!(candidates(64, 64, false, [rows; 3].into_iter())[0].warpgroups, warpgroups, "{rows}");
        }
    }

    #[test]
    fn kernels_have_every_candidate() {
        for head_dim in (32..=512).step_by(32) {
            for value_dim in (32..=512).step_by(32) {
                let of_16_bits = [false, true].into_iter().flat_map(|bias| of(head_dim, value_dim, bias));
                let of_f32 = f32_candidates(head_dim.min(256), value_dim.min(MAX_F32_VALUE_DIM));
                for tile in of_16_bits.chain(of_f32) {
                    tile.check().unwrap_or_else(|why| panic!("{head_dim} {value_dim}: {tile:?}: {why}"));
                }
            }
        }
    }

    #[test]
    fn candidates_depend_on_both_dimensions() {
        for (head_dim, value_dim, best) in [
            (32, 64, Sm90Tile::new(3, 112, 3)),
            (64, 96, Sm90Tile::new(2, 128, 2)),
            (128, 128, Sm90Tile::new(2, 128, 2)),
            (192, 128, Sm90Tile::new(2, 128, 2)),
            (128, 192, Sm90Tile::new(2, 96, 2)),
            (160, 160, Sm90Tile::new(2, 96, 2)),
            (224, 128, Sm90Tile::new(2, 80, 2)),
            (256, 256, Sm90Tile::new(2, 80, 2)),
        ] {
            let tiles = of(head_dim, value_dim, false);
            assert_eq!(tiles[0], best, "{head_dim} {value_dim}");
            assert_eq!(tiles[1..], [Sm90Tile::new(2, 64, 2), Sm90Tile::new(2, 32, 2)]);
        }
    }

    #[test]
    fn biases_take_registers() {
        assert_eq!(of(64, 64, true)[0], Sm90Tile::new(2, 128, 4));
        assert_eq!(of(256, 256, true)[0], Sm90Tile::new(2, 48, 2));
    }

    #[test]
    fn tiles_that_no_kernel_has_are_refused() {
        for (warpgroups, keys, stages) in
            [(0, 64, 2), (4, 64, 2), (2, 0, 2), (2, 24, 2), (2, 272, 2), (2, 64, 0), (2, 64, 5)]
        {
            let tile = Sm90Tile::new(warpgroups, keys, stages);
            assert!(matches!(tile.check(), Err(Unsupported::Tile { .. })), "{tile:?}");
        }
        let one = Sm90Tile::new(1, 64, 1);
        assert!(one.check().is_ok() && one.with_ping_pong(true).check().is_err());
    }
}
