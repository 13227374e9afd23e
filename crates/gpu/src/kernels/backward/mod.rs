//! The backward pass in five kernels, without atomics: equal launches give equal bits.
//!
//! | kernel | a threadgroup has | products of a tile | writes |
//! |---|---|---|---|
//! | [`row_terms`](row_terms::row_terms()) | query rows | | `-lse` and `delta` of each row |
//! | [`backward_q`](d_q::backward_q()) | a tile of query rows | `q . k`, `d_out . v`, `d_product k` | `d_q` |
//! | [`backward_kv`](d_kv::backward_kv()) | a tile of keys | `q . k`, `d_out . v`, `p^T d_out`, `d_product^T q` | `d_k`, `d_v` |
//! | [`backward_bias`](d_bias::backward_bias()) | a tile of an additive mask | `q . k`, `d_out . v` | `d_bias` |
//! | [`sum_rows`](sum_rows::sum_rows()) | a slope or a sink | | `d_alibi_slopes` or `d_sinks` |
//!
//! Scores are computed twice, seven products instead of five, and a third time for the gradient of a mask: each gradient has one owner, and no sum of partial gradients goes through
//! memory.

pub mod d_bias;
pub mod d_kv;
pub mod d_q;
pub mod d_scores;
pub mod nonfinite;
pub mod params;
pub mod row_block;
pub mod row_terms;
pub mod sum_rows;
