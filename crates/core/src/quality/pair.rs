//! The error of a pair of codecs for given keys and values.

use super::compare::{HeadAttention, KeyCodec, RefusedRow, compare};
use super::error::QualityError;
use super::head::Head;
use crate::codec::Codec;

/// How far attention over stored keys and values is from attention over the originals.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Quality {
    /// Bits per element, keys and values together, including scales.
    pub bits: f64,
    /// Mean square error of the keys relative to their mean square.
    pub k_error: f64,
    /// Mean square error of the values relative to their mean square.
    pub v_error: f64,
    /// Root mean square error of the logits, up to a constant per query.
    pub logit_rmse: f64,
    /// Mean over queries of the Kullback-Leibler divergence of the probabilities, in nats.
    pub kl: f64,
    /// Root mean square error of the output relative to its root mean square.
    pub nrmse: f64,
}

/// Compares attention over keys and values in codecs with attention over the originals; every query sees every key.
/// With `centered`, the mean of the keys is subtracted before they are stored, without effect on plain elements.
/// [`compare`] takes several codecs at once. Cost: `O(rows * tokens * (head_dim + value_dim))` on one thread.
///
/// # Errors
/// [`QualityError`].
pub fn quality(
    head: &Head<'_>,
    [k_codec, v_codec]: [Codec; 2],
    centered: bool,
) -> Result<Quality, QualityError> {
    let refused = |tensor| move |of: RefusedRow| QualityError::Encode { tensor, row: of.row, why: of.why };
    let found = compare(
        &HeadAttention::new(*head),
        &[KeyCodec { centered, ..KeyCodec::plain(k_codec) }],
        &[v_codec],
    )?;
    let k = found.keys[0].map_err(refused("k"))?;
    let v = found.values[0].map_err(refused("v"))?;
    let of_rows = |sum: f64| sum / found.queries.max(1) as f64;
    let bytes = k_codec.row_bytes(head.head_dim) + v_codec.row_bytes(head.value_dim);
    Ok(Quality {
        bits: 8.0 * bytes as f64 / (head.head_dim + head.value_dim) as f64,
        k_error: k.rows.relative(),
        v_error: v.relative(),
        logit_rmse: of_rows(k.logits).sqrt(),
        kl: of_rows(k.kl),
        nrmse: found.out[0][0].unwrap_or_default().relative().sqrt(),
    })
}
