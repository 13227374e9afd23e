//! Probabilities of a tile of scores, and gradients of the scores.
//!
//! A lane holds `[m][j][h][n]` of row `16 m + 8 h + r` and column `8 j + 2 p + n` of a tile, where `r` is its [`matrix_row`] and `p` its
//! [`matrix_pair`]: as results of a product, and as left operands of the next.

use crate::kernels::attend::Attend;
use crate::kernels::query::{RowBound, unseeing_row};
use crate::kernels::score::LOG2E;
use crate::kernels::tile::{BiasMemory, Scoring, biased, masked};
use flashtile_kernel::prelude::*;

/// Terms of a query row that its pairs need.
#[device]
pub struct RowTerms {
    /// The keys that it sees, and where its biases are.
    pub bound: RowBound,
    /// Minus the logsumexp of the row's scores, in units of log2.
    pub neg_lse: f32,
    /// `sum(d_out * out) - d_lse`.
    pub delta: f32,
}

/// Memory of the terms of rows.
#[device]
pub struct TermMemory<'a> {
    /// ALiBi slopes.
    pub slopes: &'a Buffer<f32>,
    /// Terms `neg_lse`.
    pub neg_lse: &'a Buffer<f32>,
    /// Terms `delta`.
    pub delta: &'a Buffer<f32>,
}

/// The terms of a row that sees no key.
#[device]
pub fn no_terms() -> RowTerms {
    let terms = RowTerms { bound: unseeing_row(), neg_lse: 0.0, delta: 0.0 };
    terms
}

/// Terms that make scores of scaled products.
#[device]
pub struct Modifiers<'a> {
    /// Masks and ALiBi slopes.
    pub memory: BiasMemory<'a>,
    /// Terms of the score that the problem has, and whether some pair of the tile may be hidden.
    pub scoring: Scoring,
}

/// Products of a tile of query rows and keys.
#[device]
pub struct TileProducts<const SCORE_TILES: usize, const ROW_TILES: usize> {
    /// `q . k`.
    pub scores: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
    /// `d_out . v`.
    pub d_probs: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
}

/// A pair of a query row and a key.
#[device]
pub struct Pair {
    /// `exp(score - lse)`; 0 where the row does not see the key.
    pub prob: f32,
    /// The gradient of the score, `prob (d_out . v - delta)`.
    pub d_score: f32,
    /// The gradient of the scaled product, `d_score` times the derivative of the softcap.
    pub d_product: f32,
    /// True if the row sees the key.
    pub seen: bool,
}

/// The pair of a row and a key, of the products `scale q . k` and `d_out . v`.
///
/// Gradients are 0 where `prob` is 0, also where the products are NaN: of a key that the row does not see they may be anything.
#[device]
#[inline(always)]
pub fn pair_of(
    product: f32,
    d_prob: f32,
    key: i32,
    row: RowTerms,
    modifiers: Modifiers,
    params: &Attend,
) -> Pair {
    let scoring = modifiers.scoring;
    let mut score = biased(product, key, row.bound, params, scoring);
    if scoring.partial {
        score = masked(score, key, row.bound, modifiers.memory, params, scoring);
    }
    let seen = score != f32::NEG_INFINITY;
    // No probability is above 1, but lse is rounded. A NaN passes.
    let exponent = score + row.neg_lse;
    let prob = select(seen, select(exponent > 0.0, 0.0, exponent).exp2(), 0.0);
    let d_score = select(prob == 0.0, 0.0, prob * (d_prob - row.delta));
    let mut d_product = d_score;
    if scoring.has.softcap {
        // 1 - tanh(x)^2 with the digits that the difference would lose.
        let e = (-2.0 * LOG2E * product.abs()).exp2();
        d_product = select(prob == 0.0, 0.0, d_score * (4.0 * e / ((1.0 + e) * (1.0 + e))));
    }
    let pair = Pair { prob, d_score, d_product, seen };
    pair
}

/// A tile of pairs.
#[device]
pub struct PairTile<const SCORE_TILES: usize, const ROW_TILES: usize> {
    /// Probabilities.
    pub probs: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
    /// Gradients of the scaled products.
    pub d_products: [[[[f32; 2]; 2]; SCORE_TILES]; ROW_TILES],
    /// Bits `4 j + 2 h + n` of `m`: whether the pair is visible.
    pub seen: [u32; ROW_TILES],
}
