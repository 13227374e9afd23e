//! The mean that is subtracted from centered keys.

use crate::isa::FloatEnv;

/// The mean of rows `[rows, dim]`: summed in f64 in the order of the rows, rounded once. NaN without rows.
///
/// A cache learns the mean of the first [`MEAN_ROWS`](crate::cache::MEAN_ROWS) keys of a head.
///
/// # Panics
/// If `dim` is 0.
#[must_use]
pub fn mean_row(rows: &[f32], dim: usize) -> Vec<f32> {
    let _env = FloatEnv::ieee();
    let mut sums = vec![0.0f64; dim];
    for row in rows.chunks_exact(dim) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    let count = (rows.len() / dim) as f64;
    sums.into_iter().map(|sum| (sum / count) as f32).collect()
}
