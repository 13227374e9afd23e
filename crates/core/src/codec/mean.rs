//! The mean of keys, which centered ones are stored without.

/// The mean of rows `[rows, dim]`: sums in f64 in the order of the rows, rounded once. NaN where there is no row.
///
/// The mean that a cache learns is that of the first [`MEAN_ROWS`](crate::cache::MEAN_ROWS) keys of a head.
///
/// # Panics
/// Where `dim` is 0.
#[must_use]
pub fn mean_row(rows: &[f32], dim: usize) -> Vec<f32> {
    let mut sums = vec![0.0f64; dim];
    for row in rows.chunks_exact(dim) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    let count = (rows.len() / dim) as f64;
    sums.into_iter().map(|sum| (sum / count) as f32).collect()
}
