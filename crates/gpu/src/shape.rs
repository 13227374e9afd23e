//! Which problems the kernels of the kernel language take, and how their work is cut, for every device that runs them.
//!
//! The query rows of a key/value head are (position, head of the GQA group) pairs ordered by position, cut
//! into tiles of rows. Where tiles are few, the keys of a tile are cut into splits, each of which stores a
//! partial result, and a second kernel merges the partial results of a row in order. Where there are many
//! rows and tiles, a tile has all keys of its rows, and one kernel does everything. Equal plans give equal
//! bits.

use crate::tile::Tiling;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::{KeyPart, Problem};

/// Positions and counts are kept in 32 bits; further ones than this are refused.
pub(crate) const MAX_COUNT: i64 = 1 << 30;

/// Sizes of the launches of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Threadgroups of `decode` or `prefill`: key/value heads times tiles of rows, splits, sequences.
    pub groups: [u32; 3],
    /// Threadgroups of `merge`: queries, query heads, batch entries.
    pub rows: [u32; 3],
    /// Tiles of rows of a key/value head.
    pub(crate) tiles: u32,
    /// The divisor of partial outputs: the SIMD groups of a threadgroup for `decode`, 1 for `prefill`.
    pub(crate) simds: u32,
    /// f32 of the partial outputs, and of their `(row_max, row_sum)` pairs with, for ALiBi, a shift of each row behind them.
    pub scratch: [usize; 2],
}

impl Shape {
    /// # Errors
    /// [`Unsupported::Position`] or [`Unsupported::Size`].
    pub fn of(problem: &Problem, tiling: impl Into<Tiling>) -> Result<Self, Unsupported> {
        let Tiling { tile, splits } = tiling.into();
        let dims = problem.dims();
        for s in problem.sequences() {
            for got in [s.q_offset, s.q_offset.saturating_add(s.q_len as i64), s.kv_len as i64] {
                if got.abs() > MAX_COUNT {
                    return Err(Unsupported::Position { got, max: MAX_COUNT });
                }
            }
        }
        let longest = problem.sequences().iter().map(|s| s.q_len).max().unwrap_or(0);
        let tiles = longest.saturating_mul(dims.gqa_group()).div_ceil(tile.rows()).max(1);
        let rows = dims.batch.saturating_mul(dims.q_len).saturating_mul(dims.q_heads);
        // Prefill without splits ends its rows itself, where no other launch has some of their keys.
        let others = kept_parts(problem).len();
        let results = if tile.is_prefill() && splits + others == 1 { 0 } else { splits + others };
        let all = count("rows times partial results", rows.saturating_mul(results))? as usize;
        count("rows", rows)?;
        Ok(Self {
            groups: [
                count("heads times tiles of rows", dims.kv_heads.saturating_mul(tiles))?,
                count("splits", splits)?,
                count("sequences", problem.sequences().len())?,
            ],
            rows: [
                count("queries", dims.q_len)?,
                count("query heads", dims.q_heads)?,
                count("batch entries", dims.batch)?,
            ],
            tiles: count("tiles of rows", tiles)?,
            simds: count("SIMD groups", if tile.is_prefill() { 1 } else { tile.simds() })?,
            scratch: [
                all * dims.value_dim,
                all * 2 + if problem.desc().alibi && results > 0 { rows } else { 0 },
            ],
        })
    }
}

/// The storages in 16 bits that some keys of a problem are read from, beside their codes: the launch of each has one split.
pub(crate) fn kept_parts(problem: &Problem) -> Vec<KeyPart> {
    let has_keys = |part: &KeyPart| match part {
        KeyPart::First => problem.sequences().iter().any(|s| s.first_len > 0),
        KeyPart::Last => problem.desc().kept.as_ref().is_some_and(|kept| kept.last > 0),
        KeyPart::All | KeyPart::Codes => false,
    };
    [KeyPart::First, KeyPart::Last].into_iter().filter(has_keys).collect()
}

/// A number as these kernels count.
pub(crate) fn count(what: &'static str, got: usize) -> Result<u32, Unsupported> {
    let max = MAX_COUNT as usize;
    if got <= max { Ok(got as u32) } else { Err(Unsupported::Size { what, got, max }) }
}
