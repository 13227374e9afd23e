//! The backward pass.
//!
//! A task owns some keys of one key/value head: it packs them once, passes over the query rows that see them, tile by tile, and stores their
//! `d_k` and `d_v`. Each tile takes five products: `q . k`, `d_out . v`, and with `p = exp(score - lse)` and
//! `d_score = p * (d_out . v - delta)`, `p^T d_out`, `d_score^T q` and `d_score k`.

pub(crate) mod bias;
mod d_scores;
mod nonfinite;
pub(crate) mod operands;
mod pack;
mod products;
mod rows;
pub(crate) mod state;
pub(crate) mod task;

/// The phases of a task, which the ISA files instantiate.
pub(crate) mod phases {
    pub(crate) use super::d_scores::d_scores;
    pub(crate) use super::pack::{pack_block, pack_rows};
    pub(crate) use super::products::add_products;
    pub(crate) use super::rows::{row_terms, store};
}
