//! The mean that is subtracted from centered keys.

use super::convert;
use crate::isa::FloatEnv;
use crate::tensor::TensorView;

/// The mean `[heads, dim]` of keys `[batch, heads, rows, dim]` of any dtype over batch and rows, for
/// [`KvCache::set_key_mean`](crate::cache::KvCache::set_key_mean): summed in f64 in the order of the rows, and rounded once. Measure it
/// with the keys of a representative prompt: hundreds of rows, not only a first token. The mean of no rows is NaN.
///
/// ```
/// use flashtile::{TensorView, codec::key_mean};
/// let keys = [1.0f32, 10.0, 2.0, 20.0, 3.0, 60.0]; // 3 tokens of 2 heads of 1 element
/// assert_eq!(key_mean(&TensorView::packed(&keys, [3, 2, 1])?), [2.0, 30.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub fn key_mean(keys: &TensorView<'_>) -> Vec<f32> {
    let _env = FloatEnv::ieee();
    let [batch, heads, rows, dim] = keys.shape();
    let mut sums = vec![0.0f64; heads * dim];
    let mut key = vec![0.0f32; dim];
    for head in 0..heads {
        let sums = &mut sums[head * dim..][..dim];
        for row in head_rows(keys, head) {
            convert::to_f32(keys.dtype(), row, &mut key);
            sums.iter_mut().zip(&key).for_each(|(sum, x)| *sum += f64::from(*x));
        }
    }
    let count = batch as f64 * rows as f64;
    sums.into_iter().map(|sum| (sum / count) as f32).collect()
}

/// The rows of a head of every batch entry.
pub(super) fn head_rows<'a>(keys: &'a TensorView<'a>, head: usize) -> impl Iterator<Item = &'a [u8]> {
    let [batch, _, rows, _] = keys.shape();
    (0..batch).flat_map(move |b| (0..rows).map(move |row| keys.row_bytes([b, head, row])))
}
