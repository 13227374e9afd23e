//! How a block of threads of the `wgmma` kernels divides its work.

use flashtile_core::plan::Unsupported;

/// The largest head dimension of warpgroups with rows of their own, and of warpgroups that share rows.
pub(super) const MAX_NARROW_DIM: usize = 256;
pub(super) const MAX_DIM: usize = 512;

/// The most columns of values of f32 that a warpgroup computes at a time: its registers hold the output and a tile's product.
pub(super) const MAX_F32_VALUE_DIM: usize = 128;

/// Rows of a product of a warpgroup.
pub(crate) const WARPGROUP_ROWS: usize = 64;

/// How a block of threads of the `wgmma` kernels divides its work: warpgroups that multiply (consumers), and one that copies (the
/// producer).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm90Tile {
    /// Warpgroups that multiply: with 64 rows each, or, if `shares_rows`, two with 64 rows together.
    pub(crate) warpgroups: usize,
    /// Keys of a tile. A warpgroup multiplies all of them at a time, or, if `shares_rows`, computes the scores of half of them.
    pub(crate) keys: usize,
    /// Tiles of values in shared memory; of keys as many, or one more.
    pub(crate) stages: usize,
    /// True if warpgroups take turns: one multiplies while the others compute probabilities.
    pub(crate) ping_pong: bool,
    /// True if two warpgroups share 64 rows. Each computes the probabilities of half of a tile's keys, and half of the output's columns.
    pub(crate) shares_rows: bool,
}

impl Sm90Tile {
    /// A tile of `warpgroups` times 64 rows and `keys` keys, with `stages` tiles of keys and of values in shared memory, and with ping-pong where
    /// there are 2 or 3 warpgroups. Some kernels of one or two warpgroups with two stages have a third tile of keys. A plan refuses tiles that the
    /// kernels cannot have.
    #[must_use]
    pub const fn new(warpgroups: usize, keys: usize, stages: usize) -> Self {
        Self { warpgroups, keys, stages, ping_pong: matches!(warpgroups, 2 | 3), shares_rows: false }
    }

    /// The tile for head dimensions from 257 to 512: two warpgroups that share 64 rows, and 64 keys.
    #[must_use]
    pub const fn wide(stages: usize) -> Self {
        Self { warpgroups: 2, keys: 64, stages, ping_pong: false, shares_rows: true }
    }

    /// Sets whether warpgroups take turns: they multiply one after another if true, otherwise at any time.
    #[must_use]
    pub const fn with_ping_pong(self, ping_pong: bool) -> Self {
        Self { ping_pong, ..self }
    }

    /// Checks a tile that a caller made.
    pub(super) fn check(&self) -> Result<(), Unsupported> {
        let Self { warpgroups, keys, stages, ping_pong, shares_rows } = *self;
        let refused = |why| Err(Unsupported::Tile { why });
        if !(1..=4).contains(&warpgroups) {
            return refused("1 to 4 warpgroups multiply");
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
        if ping_pong && !(2..=3).contains(&warpgroups) {
            return refused("2 or 3 warpgroups take turns");
        }
        Ok(())
    }

    /// Query rows of a tile.
    pub(crate) const fn rows(&self) -> usize {
        WARPGROUP_ROWS * self.warpgroups / self.value_consumers()
    }

    /// Warpgroups that share rows, each with columns of the output of its own.
    pub(crate) const fn value_consumers(&self) -> usize {
        if self.shares_rows { 2 } else { 1 }
    }
}

/// The work of a launch, apart from head dimensions: the choice of a tile depends on it.
pub(super) struct Workload {
    /// Rows of each sequence: queries times query heads of a key/value head.
    pub(super) rows: Vec<usize>,
    /// Key/value heads, each with such rows.
    pub(super) kv_heads: usize,
    /// Multiprocessors of the device.
    pub(super) multiprocessors: usize,
    /// The most keys that a row sees.
    pub(super) keys: usize,
    /// True if rows do not see keys behind their position.
    pub(super) is_causal: bool,
    /// True if rows see from one key to all: work tiles then take half the time of the longest on average.
    pub(super) is_triangular: bool,
    /// True if scores are modified before the softmax.
    pub(super) has_bias: bool,
}

impl Workload {
    /// An estimate of the time with tiles of `warpgroups`, each of which takes `of_row` for a row: that of all work tiles on all multiprocessors, but
    /// not less than that of the longest. (The number is this times twice the multiprocessors.) Warpgroups without rows compute nothing, but others
    /// seldom fill their time. With many keys no work tile is too long, since it can be split.
    fn time(&self, warpgroups: usize, of_row: usize) -> usize {
        let of_tile = warpgroups * of_row;
        let tiles = self.rows.iter().map(|rows| rows.div_ceil(warpgroups * WARPGROUP_ROWS));
        let tiles = tiles.fold(0, usize::saturating_add).saturating_mul(self.kv_heads);
        let all = tiles.saturating_mul(of_tile).saturating_mul(if self.is_triangular { 1 } else { 2 });
        let longest = if self.keys <= 2048 { self.multiprocessors.saturating_mul(2 * of_tile) } else { 0 };
        all.max(longest)
    }
}

/// Tiles for dimensions that the kernels are compiled for, best first. Modified scores take registers: there
/// are fewer warpgroups then, or fewer keys.
pub(super) fn candidates(head_dim: usize, value_dim: usize, workload: &Workload) -> Vec<Sm90Tile> {
    let has_bias = workload.has_bias;
    if head_dim.max(value_dim) > MAX_NARROW_DIM {
        return vec![Sm90Tile::wide(2), Sm90Tile::wide(1)];
    }
    let best = match head_dim.max(value_dim) {
        0..=64 => match warpgroups(workload) {
            2 => Sm90Tile::new(2, 128, 4),
            3 => three_warpgroups(workload),
            _ => Sm90Tile::new(4, 64, 4),
        },
        65..=128 => tile_of_128_columns(workload),
        129..=192 if value_dim <= 128 => Sm90Tile::new(2, 128, 2),
        129..=192 => Sm90Tile::new(2, 96, 2),
        _ if has_bias => Sm90Tile::new(2, 48, 2),
        // With 64 keys, and as many columns of both, there is room for a third stage of keys.
        _ if workload.keys <= if head_dim.min(value_dim) > 192 { 4096 } else { 2048 } => {
            Sm90Tile::new(2, 64, 2)
        }
        _ => Sm90Tile::new(2, 80, 2),
    };
    vec![best, Sm90Tile::new(2, 64, 2), Sm90Tile::new(2, 32, 2)]
}

/// The tile of three warpgroups, which take no turns. A wide tile takes fewer instructions for a key. A narrow one has fewer keys that a row does
/// not see: about half a tile where causal rows end, and behind the last key. Without GQA, causal work tiles of 192 rows end where tiles of 96 keys do.
fn three_warpgroups(workload: &Workload) -> Sm90Tile {
    let narrow = workload.keys < if workload.is_causal { 8192 } else { 1536 };
    let (keys, stages) = if narrow { (96, 4) } else { (112, 3) };
    Sm90Tile::new(3, keys, stages).with_ping_pong(false)
}

/// The tile for head dimensions from 65 to 128. Three warpgroups whose products do not overlap mask fewer tiles: each only those that its own 64 rows
/// see in part. That pays where masked tiles are many: where causal rows see fewer than 1024 keys, on average where they see all before. For a row, three
/// take about 2 % less time than two, or a tenth less where rows see at most 512 keys, but tiles of 192 rows may fit the rows or the device worse. Where TMA
/// does not copy, they are slower; whether it does is known at the launch.
fn tile_of_128_columns(workload: &Workload) -> Sm90Tile {
    let (keys, stages, of_row) = if workload.keys <= 512 { (64, 3, 40) } else { (96, 2, 43) };
    let seen_on_average = if workload.is_triangular { workload.keys / 2 } else { workload.keys };
    let masks_much = workload.is_causal && seen_on_average < 1024 && !workload.has_bias;
    if masks_much && workload.time(3, of_row) < workload.time(2, 44) {
        Sm90Tile::new(3, keys, stages).with_ping_pong(false)
    } else {
        Sm90Tile::new(2, 128, 2)
    }
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

/// The number of warpgroups that computes a workload fastest, for head dimensions up to 64. For a row, two take a fifth longer than three. Four take
/// about as long as three where rows see up to 2048 keys, or up to 4096 if they are causal, since fewer of their tiles are masked; with more keys
/// three take a twentieth less, since their products overlap with probabilities.
fn warpgroups(workload: &Workload) -> usize {
    if workload.has_bias {
        return 2;
    }
    let few_keys = workload.keys <= if workload.is_causal { 4096 } else { 2048 };
    let (two, three) = (workload.time(2, 48), workload.time(3, 40));
    let four = workload.time(4, if few_keys { 39 } else { 42 });
    if three <= two.min(four) {
        3
    } else if two <= four {
        2
    } else {
        4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(rows: usize, keys: usize, is_causal: bool, has_bias: bool) -> Workload {
        let is_triangular = is_causal && rows == keys;
        Workload {
            rows: vec![rows; 64],
            kv_heads: 8,
            multiprocessors: 132,
            keys,
            is_causal,
            is_triangular,
            has_bias,
        }
    }

    /// Candidates for long sequences.
    fn of(head_dim: usize, value_dim: usize, has_bias: bool) -> Vec<Sm90Tile> {
        candidates(head_dim, value_dim, &workload(16_384, 16_384, false, has_bias))
    }

    #[test]
    fn warpgroups_are_for_rows_that_exist() {
        for (rows, keys, warpgroups) in [
            (64, 64, 2),
            (128, 128, 2),
            (192, 192, 3),
            (256, 256, 4),
            (384, 384, 3),
            (640, 640, 4),
            (1024, 1024, 4),
            (1024, 1 << 16, 4),
            (1152, 1152, 3),
            (2048, 2048, 4),
            (4096, 4096, 3),
            (8192, 8192, 3),
            (1 << 14, 256, 4),
            (1 << 14, 1 << 14, 3),
        ] {
            let best = candidates(64, 64, &workload(rows, keys, false, false))[0];
            assert_eq!(best.warpgroups, warpgroups, "{rows} {keys}");
        }
    }

    #[test]
    fn few_rows_are_divided_among_all_multiprocessors() {
        for (head_dim, rows, warpgroups) in
            [(64, 2048, 2), (64, 4096, 2), (64, 8192, 4), (128, 2048, 2), (128, 4096, 2), (128, 8192, 2)]
        {
            let one =
                Workload { rows: vec![rows], is_triangular: true, ..workload(rows, rows / 4, true, false) };
            assert_eq!(candidates(head_dim, head_dim, &one)[0].warpgroups, warpgroups, "{head_dim} {rows}");
        }
    }

    #[test]
    fn three_warpgroups_of_128_columns_are_for_causal_rows_that_see_few_keys() {
        for (rows, keys, is_causal, tile) in [
            (256, 256, true, (2, 128)),
            (512, 512, true, (2, 128)),
            (576, 576, true, (3, 96)),
            (1024, 1024, true, (2, 128)),
            (8192, 1023, true, (3, 96)),
            (8192, 1024, true, (2, 128)),
            (8192, 1023, false, (2, 128)),
            (16_384, 128, true, (3, 64)),
            (16_384, 2049, true, (2, 128)),
        ] {
            let best = candidates(128, 128, &workload(rows, keys, is_causal, false))[0];
            assert_eq!((best.warpgroups, best.keys), tile, "{rows} {keys} {is_causal}");
        }
        assert_eq!(candidates(128, 128, &workload(8192, 128, true, true))[0].warpgroups, 2);
    }

    #[test]
    fn tiles_have_fewer_keys_where_rows_see_fewer() {
        for (head_dim, keys, is_causal, tile_keys) in [
            (64, 1535, false, 96),
            (64, 1536, false, 112),
            (64, 8191, true, 96),
            (64, 8192, true, 112),
            (128, 512, true, 64),
            (128, 1023, true, 96),
            (128, 1024, true, 128),
            (256, 4096, false, 64),
            (256, 4097, true, 80),
        ] {
            let best = candidates(head_dim, head_dim, &workload(384, keys, is_causal, false))[0];
            assert_eq!(best.keys, tile_keys, "{head_dim} {keys} {is_causal}");
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
            (32, 64, Sm90Tile::new(3, 112, 3).with_ping_pong(false)),
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
            [(0, 64, 2), (5, 64, 2), (2, 0, 2), (2, 24, 2), (2, 272, 2), (2, 64, 0), (2, 64, 5)]
        {
            let tile = Sm90Tile::new(warpgroups, keys, stages);
            assert!(matches!(tile.check(), Err(Unsupported::Tile { .. })), "{tile:?}");
        }
        let one = Sm90Tile::new(1, 64, 1);
        assert!(one.check().is_ok() && one.with_ping_pong(true).check().is_err());
        let four = Sm90Tile::new(4, 64, 4);
        assert!(four.check().is_ok() && four.with_ping_pong(true).check().is_err());
    }
}
