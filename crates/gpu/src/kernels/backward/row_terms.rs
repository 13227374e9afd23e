//! Terms of a query row that every key of it needs: `-lse` and `delta`.

use super::params::Backward;
use crate::kernels::attend::Attend;
use crate::kernels::query::{Features, head_of, lse_index, row_bound, row_tile};
use crate::kernels::score::to_log2;
use flashtile_kernel::prelude::*;

/// Query rows of a threadgroup of [`row_terms()`].
#[constant]
pub const TERM_ROWS: u32 = 32;

/// Fills the terms of every query row, `[B, H, Sq]`:
///
/// ```text
/// neg_lse = -lse log2 e, less the shift that ALiBi adds to every score of the row
/// delta   = sum(d_out * out) - d_lse
/// ```
///
/// Groups are (key/value heads times tiles of [`TERM_ROWS`] rows, 1, sequences). Cost: reads `out` and `d_out` once.
#[kernel(
    threads = 128,
    requires(params.tiles > 0 && groups[0].is_multiple_of(params.tiles), "tiles of every key/value head"),
    requires(params.group > 0, "a GQA group has heads"),
    requires(lse.len() as u64 >= params.rows(), "a logsumexp for each row"),
    requires(neg_lse.len() as u64 >= params.rows() && delta.len() as u64 >= params.rows(), "terms of each row"),
    requires(!has_d_lse || d_lse.len() as u64 >= params.rows(), "a gradient for each logsumexp"),
    bench(
        shape(rows = [65536, 131072], dim = [64, 128]),
        bytes = 4 * rows * dim,
        flops = 2 * rows * dim,
        tolerance = 0.02,
    ),
)]
pub fn row_terms<QElement: Element, const VALUE_DIM: usize>(
    out: &Buffer<QElement>,
    d_out: &Buffer<QElement>,
    lse: &Buffer<f32>,
    d_lse: &Buffer<f32>,
    sequences: &Buffer<i32>,
    slopes: &Buffer<f32>,
    params: &Attend,
    backward: &Backward,
    neg_lse: &mut Buffer<f32>,
    delta: &mut Buffer<f32>,
    #[constant] has_alibi: bool,
    #[constant] has_d_lse: bool,
) {
    let has = Features { softcap: false, alibi: has_alibi, mask: false, tree_mask: false };
    let tile = row_tile(sequences, params, TERM_ROWS);
    for offset in (simd_index()..TERM_ROWS).step_by(4) {
        let row = tile.first + offset;
        if row < tile.rows {
            let batch = tile.sequence.batch as u64;
            let head = head_of(tile, params, row) as u64;
            let query = (tile.sequence.q_start + row / params.group) as u64;
            let of_out = batch * backward.out[0] + head * backward.out[1] + query * backward.out[2];
            let of_d_out = batch * backward.d_out[0] + head * backward.d_out[1] + query * backward.d_out[2];
            let mut sum = 0.0;
            for c in (simd_lane()..VALUE_DIM as u32).step_by(32) {
                sum += d_out[of_d_out + c as u64].to_f32() * out[of_out + c as u64].to_f32();
            }
            sum = simd_sum(sum);
            if simd_lane() == 0 {
                let at = lse_index(tile, params, row);
                if has_d_lse {
                    sum -= d_lse[at];
                }
                delta[at] = sum;
                let bound = row_bound(tile, row, slopes, params, has);
                neg_lse[at] = -to_log2(lse[at] - bound.shift);
            }
        }
    }
}
