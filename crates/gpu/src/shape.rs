//! Which problems the kernels of the kernel language take, and how their work is cut, for every device that runs them.
//!
//! The query rows of a key/value head are (position, head of the GQA group) pairs ordered by position, cut into tiles
//! of a few rows. The keys of a tile are cut into splits, each of which stores a partial result. A second kernel merges the
//! partial results of a row in order: the same plan gives the same bits.

use flashtile_core::codec::Codec;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::Problem;

/// Head dimensions of these kernels are multiples of this, up to [`MAX_DIM`].
pub(crate) const DIM_STEP: usize = 16;
pub(crate) const MAX_DIM: usize = 512;

/// Head dimensions that instances are listed for.
pub const HEAD_DIMS: [usize; 7] = [64, 80, 96, 128, 192, 256, 512];

/// Positions and counts are kept in 32 bits; further ones than this are refused.
pub(crate) const MAX_COUNT: i64 = 1 << 30;

/// The work of a threadgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Eights of query rows.
    pub rows: usize,
    /// Sixteens of keys at a time.
    pub keys: usize,
    /// SIMD groups.
    pub simds: usize,
    /// Splits of the keys of a row.
    pub splits: usize,
}

impl Tile {
    /// The fastest tile where tiles were measured: 32 keys at a time where their words and operands fit in registers.
    pub const fn of(k: Codec, head_dim: usize) -> Self {
        let fit = matches!(k, Codec::Tq4 | Codec::Int8) && head_dim <= 128;
        Self { rows: 1, keys: if fit { 2 } else { 1 }, simds: 4, splits: 1 }
    }
}

/// Sizes of the launches of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Threadgroups of `decode`: key/value heads times tiles of rows, splits, sequences.
    pub groups: [u32; 3],
    /// Threadgroups of `merge`: queries, query heads, batch entries.
    pub rows: [u32; 3],
    /// Tiles of rows of a key/value head.
    pub(crate) tiles: u32,
    /// SIMD groups of a threadgroup of `decode`.
    pub(crate) simds: u32,
    /// f32 of the partial outputs, and of their `(row_max, row_sum)` pairs with, for ALiBi, a shift of each row behind them.
    pub scratch: [usize; 2],
}

impl Shape {
    /// # Errors
    /// [`Unsupported::HeadDim`], [`Unsupported::Position`] or [`Unsupported::Size`].
    pub fn of(problem: &Problem, tile: Tile) -> Result<Self, Unsupported> {
        let dims = problem.dims();
        for (name, got) in [("head_dim", dims.head_dim), ("value_dim", dims.value_dim)] {
            if !got.is_multiple_of(DIM_STEP) || got > MAX_DIM || got == 0 {
                return Err(Unsupported::HeadDim { name, got, step: DIM_STEP, max: MAX_DIM });
            }
        }
        for s in problem.sequences() {
            for got in [s.q_offset, s.q_offset.saturating_add(s.q_len as i64), s.kv_len as i64] {
                if got.abs() > MAX_COUNT {
                    return Err(Unsupported::Position { got, max: MAX_COUNT });
                }
            }
        }
        let longest = problem.sequences().iter().map(|s| s.q_len).max().unwrap_or(0);
        let tiles = longest.saturating_mul(dims.gqa_group()).div_ceil(8 * tile.rows).max(1);
        let rows = dims.batch.saturating_mul(dims.q_len).saturating_mul(dims.q_heads);
        let all = count("rows times splits", rows.saturating_mul(tile.splits))? as usize;
        Ok(Self {
            groups: [
                count("heads times tiles of rows", dims.kv_heads.saturating_mul(tiles))?,
                count("splits", tile.splits)?,
                count("sequences", problem.sequences().len())?,
            ],
            rows: [
                count("queries", dims.q_len)?,
                count("query heads", dims.q_heads)?,
                count("batch entries", dims.batch)?,
            ],
            tiles: count("tiles of rows", tiles)?,
            simds: count("SIMD groups", tile.simds)?,
            scratch: [all * dims.value_dim, all * 2 + if problem.desc().alibi { rows } else { 0 }],
        })
    }
}

/// A number as these kernels count.
pub(crate) fn count(what: &'static str, got: usize) -> Result<u32, Unsupported> {
    let max = MAX_COUNT as usize;
    if got <= max { Ok(got as u32) } else { Err(Unsupported::Size { what, got, max }) }
}
