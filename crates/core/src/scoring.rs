//! The score formula of host code: `softcap(scale * q . k) + bias`, written once, generic over the numbers that it is computed in.
//!
//! Kernels of the host, their f64 fallback and [`quality`](crate::quality) call [`ScoreRow::score`]; the oracle
//! ([`reference`](mod@crate::reference)) has a definition of its own.

use crate::inputs::{Inputs, alibi_stride};
use crate::problem::Problem;
use crate::tensor::MaskView;
use std::f32::consts::LOG2_E;

/// Options of a problem and lists of its inputs that scores depend on.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct Scoring<'a> {
    /// Factor of `q . k`.
    pub scale: f32,
    /// `c` of `softcap(x) = c * tanh(x / c)`.
    pub softcap: Option<f32>,
    /// ALiBi slopes `[q_heads]`, or `[sequences, q_heads]`.
    pub alibi_slopes: Option<&'a [f32]>,
    /// Slopes from one sequence to the next; 0 where all sequences share them.
    pub alibi_stride: usize,
    /// Mask, additive or boolean.
    pub mask: Option<MaskView<'a>>,
    /// Tree mask, over the keys of a step.
    pub tree: Option<MaskView<'a>>,
}

/// Factors that bring products to scores in units of log2.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(clippy::exhaustive_structs)]
pub struct Log2Factors {
    /// Factor from `q . k` to units of log2, or of the softcap where there is one.
    pub scale: f32,
    /// Factor of the tanh, where there is a softcap.
    pub softcap: Option<f32>,
}

/// Position of a row of scores.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct RowIndex {
    /// Sequence.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Position of the query, counted in keys.
    pub query: i64,
}

impl<'a> Scoring<'a> {
    /// Scoring of a problem over inputs that were checked against it.
    #[must_use]
    pub fn new(problem: &Problem, inputs: &Inputs<'a>) -> Self {
        Self {
            scale: problem.scale(),
            softcap: problem.desc().softcap,
            alibi_slopes: inputs.alibi_slopes,
            alibi_stride: alibi_stride(inputs.alibi_slopes.map_or(0, <[f32]>::len), problem.dims().q_heads),
            mask: inputs.mask,
            tree: inputs.tree,
        }
    }

    /// The ALiBi slope of a query head of a sequence.
    #[inline]
    #[must_use]
    pub fn alibi_slope(&self, sequence: usize, head: usize) -> Option<f32> {
        self.alibi_slopes.map(|slopes| slopes[sequence * self.alibi_stride + head])
    }

    /// Factors in units of log2, as kernels fold them into queries and exponents.
    #[inline]
    #[must_use]
    pub fn log2_factors(&self) -> Log2Factors {
        log2_factors(self.scale, self.softcap)
    }

    /// Terms of a row in f64, whose scores are in units of e.
    #[must_use]
    pub fn row(&self, at: RowIndex) -> ScoreRow<f64, i64> {
        ScoreRow {
            at,
            first_key: 0,
            scale: f64::from(self.scale),
            offset: 0.0,
            softcap: self.softcap,
            alibi: self.alibi_slope(at.batch, at.head).map(|slope| Alibi { slope, origin: at.query }),
        }
    }
}

/// Factors of a scale and a softcap in units of log2.
#[inline]
#[must_use]
pub fn log2_factors(scale: f32, softcap: Option<f32>) -> Log2Factors {
    match softcap {
        Some(cap) => Log2Factors { scale: scale / cap, softcap: Some(cap * LOG2_E) },
        None => Log2Factors { scale: scale * LOG2_E, softcap: None },
    }
}

/// Number that scores are computed in: f64 in units of e for one key, a vector of f32 in units of log2 for consecutive keys.
pub trait ScoreNumber: Copy {
    /// Number that all keys of a row share.
    type Constant: Copy;
    /// Position of a key, counted from [`ScoreRow::first_key`]; of a vector, its first.
    type Position: Copy;

    /// Converts a constant of the score from units of e to the units of these numbers.
    fn constant(x: f32) -> Self::Constant;
    /// The product with a factor.
    #[must_use]
    fn times(self, factor: Self::Constant) -> Self;
    /// The sum with an addend.
    #[must_use]
    fn plus(self, addend: Self::Constant) -> Self;
    /// `self + a * b`, fused or not as the number's arithmetic has it.
    #[must_use]
    fn plus_product(self, a: Self, b: Self::Constant) -> Self;
    /// The scaled product divided by the softcap; unchanged if the scale contains the division.
    #[must_use]
    fn in_softcaps(self, softcap: f32) -> Self;
    /// Hyperbolic tangent.
    #[must_use]
    fn tanh(self) -> Self;
    /// Distance of the number's keys, the first of which is `key`, from `origin`.
    #[must_use]
    fn distance(self, origin: Self::Position, key: Self::Position) -> Self;
    /// A score plus the bias of a mask, which is in units of e.
    #[must_use]
    fn add_bias(self, bias: Self) -> Self;
    /// `-inf` where the bias of a mask is `-inf`, else the number.
    #[must_use]
    fn hide(self, bias: Self) -> Self;
}

/// ALiBi of a row.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct Alibi<P> {
    /// The head's slope.
    pub slope: f32,
    /// Position from which distances are counted.
    pub origin: P,
}

/// Terms of the scores of one query of one head: constants of [`ScoreNumber::Constant`], positions of [`ScoreNumber::Position`].
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct ScoreRow<C, P> {
    /// Position of the row.
    pub at: RowIndex,
    /// Key from which positions of keys are counted.
    pub first_key: usize,
    /// Factor of the products `q . k`.
    pub scale: C,
    /// Addend of the scaled products: `q . k_mean` of centered keys under a softcap.
    pub offset: C,
    /// `c` of `softcap(x) = c * tanh(x / c)`.
    pub softcap: Option<f32>,
    /// ALiBi, where heads have slopes.
    pub alibi: Option<Alibi<P>>,
}

impl<C: Copy, P: Copy> ScoreRow<C, P> {
    /// The score of a product `q . k`, without the bias of a mask. A score function of the user's belongs here. Its arguments are the
    /// score, the row's batch, head and query position ([`ScoreRow::at`], which nothing else reads), and the position of the key; kernels that
    /// leave this call out where it changes nothing have to know of it.
    #[inline(always)]
    pub fn score<N: ScoreNumber<Constant = C, Position = P>>(&self, key: P, product: N) -> N {
        let mut score = self.scaled(product).plus(self.offset);
        if let Some(cap) = self.softcap {
            score = score.in_softcaps(cap).tanh().times(N::constant(cap));
        }
        if let Some(Alibi { slope, origin }) = self.alibi {
            score = score.plus_product(score.distance(origin, key), alibi_rate::<N>(slope));
        }
        score
    }

    /// A scaled product: the score where scores have no other term but a mask.
    #[inline(always)]
    pub fn scaled<N: ScoreNumber<Constant = C>>(&self, product: N) -> N {
        product.times(self.scale)
    }
}

/// A score with the bias of a mask; `-inf` hides the key, whatever its score.
#[inline(always)]
pub fn masked<N: ScoreNumber>(score: N, bias: N) -> N {
    score.add_bias(bias).hide(bias)
}

/// Factor from a distance to the bias of ALiBi.
#[inline(always)]
#[must_use]
pub fn alibi_rate<N: ScoreNumber>(slope: f32) -> N::Constant {
    N::constant(-slope)
}

impl ScoreNumber for f64 {
    type Constant = Self;
    type Position = i64;

    #[inline]
    fn constant(x: f32) -> Self {
        Self::from(x)
    }
    #[inline]
    fn times(self, factor: Self) -> Self {
        self * factor
    }
    #[inline]
    fn plus(self, addend: Self) -> Self {
        self + addend
    }
    #[inline]
    fn plus_product(self, a: Self, b: Self) -> Self {
        self + a * b
    }
    #[inline]
    fn in_softcaps(self, softcap: f32) -> Self {
        self / Self::from(softcap)
    }
    #[inline]
    fn tanh(self) -> Self {
        Self::tanh(self)
    }
    #[inline]
    fn distance(self, origin: i64, key: i64) -> Self {
        origin.abs_diff(key) as Self
    }
    #[inline]
    fn add_bias(self, bias: Self) -> Self {
        self + bias
    }
    #[inline]
    fn hide(self, bias: Self) -> Self {
        if bias == Self::NEG_INFINITY { bias } else { self }
    }
}
