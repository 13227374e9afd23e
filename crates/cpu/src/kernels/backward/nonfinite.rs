//! Products of a tile some of whose rows hide keys, where a key, a value, a query or a row of d_out is infinite or NaN.
//!
//! A hidden pair has a `p` and a `d_score` of 0, but 0 times an infinity or NaN is NaN. These products leave hidden pairs out, and add the
//! others in the order of the fast ones, so that finite results have the same bits.

#![allow(unsafe_code)]

use super::operands::BackwardProducts;
use super::state::TileState;
use crate::kernels::shared::mat::Mat;
use crate::kernels::shared::operands::Operands;
use crate::kernels::shared::products::key_steps;
use crate::kernels::shared::score_task::Tile;
use crate::kernels::shared::scores::whole_columns;
use crate::simd::Simd;

/// Visibility of the elements of the depth, keys or rows of a tile.
type Sees = [bool; 128];

/// `d_score k`: `C = A B` or `C + A B`, whose depth is the keys of the tile.
///
/// # Safety
/// As [`add_products`](super::products::add_products).
#[cold]
pub(super) unsafe fn d_q_product<S: Simd, P: BackwardProducts<S>>(
    work: &TileState<'_>,
    tile: &Tile,
    m: Operands<Mat>,
) {
    let first_key = tile.block * work.task.run.block_k;
    let first = key_steps::<S, P>().whole(&tile.columns).start;
    for r in 0..m.c.rows() {
        let seen = work.task.query(r).seen_keys(work.task.run);
        let mut sees: Sees = [false; 128];
        for column in tile.columns.clone() {
            sees[column - first] = seen.contains(first_key + column);
        }
        // SAFETY: the caller's contract.
        unsafe { row::<S, P>(&m, r, |k| *m.a.at(r, k), &sees) }
    }
}

/// `p^T d_out` or `d_score^T q`: `C + A^T B`, whose depth is the rows of the tile.
///
/// # Safety
/// As [`add_products`](super::products::add_products).
#[cold]
pub(super) unsafe fn d_kv_product<S: Simd, P: BackwardProducts<S>>(
    work: &TileState<'_>,
    tile: &Tile,
    m: Operands<Mat>,
) {
    let first_key = tile.block * work.task.run.block_k;
    let columns = whole_columns::<S, P>(tile);
    for c in 0..m.c.rows() {
        let column = columns.start + c;
        let mut sees: Sees = [false; 128];
        if tile.columns.contains(&column) {
            for r in 0..tile.rows.len() {
                sees[r] = work.task.query(r).seen_keys(work.task.run).contains(first_key + column);
            }
        }
        // SAFETY: the caller's contract.
        unsafe { row::<S, P>(&m, c, |k| *m.a.at(k, c), &sees) }
    }
}

/// Row `r` of a product: `a(k)` is element `k` of its row of `A`, and `sees` says which elements of the depth are added.
///
/// # Safety
/// As [`add_products`](super::products::add_products).
#[inline(always)]
unsafe fn row<S: Simd, P: BackwardProducts<S>>(
    m: &Operands<Mat>,
    r: usize,
    a: impl Fn(usize) -> f32,
    sees: &Sees,
) {
    for c in (0..m.c.cols()).step_by(S::LANES) {
        // SAFETY: the caller's contract.
        unsafe {
            let to = m.c.at(r, c);
            let mut chain = P::chain_from(if m.resume { S::load(to) } else { S::splat(0.0) });
            for k in 0..m.b.rows() {
                let mut keep = 0u32;
                for half in 0..P::PER_F32 {
                    if sees[k * P::PER_F32 + half] {
                        keep |= if P::PER_F32 == 2 { 0xffff << (16 * half) } else { u32::MAX };
                    }
                }
                P::add_to_chain(&mut chain, k, S::splat(a(k)), S::and(S::load(m.b.at(k, c)), keep));
            }
            S::store(to, P::chain_sum(chain));
        }
    }
}
