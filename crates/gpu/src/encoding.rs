//! The host side of the encoder: the positions of rows, the tables that kernels read, and the meaning of the
//! status.

use crate::codecs::{format_id, scalar_type};
use crate::kernels::octet::in_octets;
use crate::kernels::quantize::hundredfold;
use flashtile_core::codec::{Codec, EncodeError, RowKind, level_factor, mlx, nearest_levels};
use flashtile_core::dtype::Dtype;
use flashtile_kernel::Generic;

/// SIMD groups of a threadgroup, and the most threadgroups of a launch over rows.
const SIMDS: u32 = 4;
const MAX_GROUPS: u32 = 4096;

/// Words of [`encode_table`], and numbers of [`f64_steps`] that it has of each trial.
const TABLE: usize = 320;
const STEPS: usize = 4;

/// Rows `first..first + rows` of a batch entry that go to positions `position..` of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Appended {
    /// Batch entry of the rows.
    pub batch: u32,
    /// First row.
    pub first: u32,
    /// Number of rows.
    pub rows: u32,
    /// Row of the block table.
    pub sequence: u32,
    /// Position of the first row in its sequence.
    pub position: u32,
}

/// Runs as kernels take them; `None` where the rows of `heads` heads exceed 2^31 - 1, or positions 2^32 - 1.
pub fn runs(appended: &[Appended], heads: u32) -> Option<Vec<u32>> {
    let mut words = Vec::with_capacity(8 * appended.len());
    let mut before = 0u32;
    for run in appended {
        words.extend([run.batch, run.first, run.rows, run.sequence, run.position, before, 0, 0]);
        run.position.checked_add(run.rows)?;
        run.first.checked_add(run.rows)?;
        before = before.checked_add(run.rows)?;
    }
    before.checked_mul(heads).filter(|rows| *rows < 1 << 31)?;
    Some(words)
}

/// The lookup table of [`encode()`](crate::kernels::encode::encode()), 320 words. For `tq`: for each number of half levels, the
/// nearest level and 256 times its index; then [`f64_steps`] of two words each. For mlx-native: the bits of the edges
/// between values, ascending, then the bits of infinity.
pub fn encode_table(codec: Codec, dim: usize) -> Vec<u32> {
    if let RowKind::Mlx { bits, .. } = codec.row_kind() {
        let half = mlx::tables(bits).1;
        let edges = half.iter().rev().map(|edge| -edge).chain([0.0]).chain(half.iter().copied());
        return edges.chain(std::iter::repeat(f32::INFINITY)).take(TABLE).map(f32::to_bits).collect();
    }
    let mut words = nearest_levels(codec).map_or_else(|| vec![0; 256], |known| known.to_vec());
    for trial in 0..8 {
        let steps = f64_steps(codec, dim, trial).into_iter().chain([0; STEPS]).take(STEPS);
        words.extend(steps.flat_map(|step| [step as u32, (step >> 32) as u32]));
    }
    words
}

/// Energies for which the factor of a trial is not the integer nearest to the exact quotient, as f64 rounds five times:
/// twice the energy, plus 1 where the factor is that of the next energy, and not of the one before. At most four, and
/// none for most dimensions.
///
/// The quotient is above `n + 1/2` where the energy is below `2^36 (100 F)^2 D / ((2 n + 1) percent)^2`. f64 can only be on
/// the other side where that is nearly an integer.
pub fn f64_steps(codec: Codec, dim: usize, trial: u32) -> Vec<u64> {
    const ONE: u64 = 32767 * 32767;
    let at = |energy: u64| level_factor(codec, dim, energy, trial as usize).map(u32::from);
    let (Some(low), Some(high)) = (at(dim as u64 * ONE), at(ONE)) else { return Vec::new() };
    let hundredfold = u128::from(hundredfold(format_id(codec)));
    let limit = (hundredfold * hundredfold * dim as u128) << 36;
    let mut steps = Vec::new();
    for n in low.saturating_sub(1)..=high {
        let root = u128::from((2 * n + 1) * (72 + 5 * trial));
        let (last, rest) = ((limit / (root * root)) as u64, limit % (root * root));
        // A hundred times what f64 tells apart at the largest energy.
        let is_near = rest < root * root / 8 || rest > root * root / 8 * 7;
        let energies =
            (last - 1..=last + 1).filter(|energy| is_near && (ONE..=dim as u64 * ONE).contains(energy));
        for energy in energies {
            let exact = n + u32::from(root * root * u128::from(energy) < limit);
            match at(energy) {
                Some(factor) if factor < exact => steps.push(2 * energy + 1),
                Some(factor) if factor > exact => steps.push(2 * energy),
                _ => {}
            }
        }
    }
    steps
}

/// The instance of [`encode()`](crate::kernels::encode::encode()) that stores rows of a dtype, or that of
/// [`append`](crate::kernels::encode::append()).
pub fn encode_generics(codec: Codec, dtype: Dtype, dim: usize) -> Vec<Generic> {
    let mut generics = vec![Generic::Type(scalar_type(dtype)), Generic::U32(format_id(codec))];
    if codec.dtype().is_none() {
        generics.push(Generic::Usize(dim));
    }
    generics
}

/// Threadgroups of a launch over rows of a cache, where the longest run has `rows` in all heads. Beyond a few
/// for each core they take rows in turns: the work of a threadgroup before its first row would otherwise be a
/// good part of the whole.
pub fn row_groups(rows: u32) -> u32 {
    rows.div_ceil(SIMDS).clamp(1, MAX_GROUPS)
}

/// [`row_groups`] of a launch of [`encode()`](crate::kernels::encode::encode()), whose SIMD groups may take four rows at a
/// time.
pub fn encode_groups(codec: Codec, dim: usize, rows: u32) -> u32 {
    if in_octets(format_id(codec), dim as u32) { row_groups(rows.div_ceil(4)) } else { row_groups(rows) }
}

/// The first row that [`encode()`](crate::kernels::encode::encode()) refused, decoded from its status: the
/// reason, the number of the row among all runs, and the head.
pub fn refusal(status: u32, heads: u32) -> Option<(EncodeError, [u32; 2])> {
    let why = if status & 1 == 1 { EncodeError::Norm } else { EncodeError::NotFinite };
    let number = status / 2;
    (status != u32::MAX).then(|| (why, [number / heads, number % heads]))
}
