//! The host side of the encoder: where rows go, the tables that it reads, and what its status says.

use crate::codecs::{format_id, scalar_type};
use flashtile_core::codec::{Codec, EncodeError, RowKind, mlx, nearest_levels};
use flashtile_core::dtype::Dtype;
use flashtile_kernel::Generic;

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

/// What [`encode()`](crate::kernels::encode::encode()) looks up. For `tq`: for each number of half levels, the nearest
/// level and 256 times its index. For mlx-native: the bits of the edges between values, ascending, then the bits of
/// infinity.
pub fn encode_table(codec: Codec) -> Vec<u32> {
    if let RowKind::Mlx { bits, .. } = codec.row_kind() {
        let half = mlx::tables(bits).1;
        let edges = half.iter().rev().map(|edge| -edge).chain([0.0]).chain(half.iter().copied());
        return edges.chain(std::iter::repeat(f32::INFINITY)).take(256).map(f32::to_bits).collect();
    }
    nearest_levels(codec).map_or_else(|| vec![0; 256], |known| known.to_vec())
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

/// What the status of [`encode()`](crate::kernels::encode::encode()) says: the row of all runs and the head that was
/// not stored first.
pub fn refusal(status: u32, heads: u32) -> Option<(EncodeError, [u32; 2])> {
    let why = if status & 1 == 1 { EncodeError::Norm } else { EncodeError::NotFinite };
    let number = status / 2;
    (status != u32::MAX).then(|| (why, [number / heads, number % heads]))
}
