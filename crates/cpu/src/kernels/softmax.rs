//! Operations on rows of scores, without a task: modify, hide, maximum and exponential of one block, and the fold of a block's result into
//! the running state. `probs.rs` applies all but the fold to a tile.

#![allow(unsafe_code)]

use super::mat::{Mat, MatMut, RowMaxSum};
use super::products::Products;
use super::state::Fold;
use crate::simd::{Bf16, Elem, F16, Simd, exp2, tanh};
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::tensor::MaskRow;
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Changes of the scores of a row before its softmax, in their order. Scores are in units of log2, or of the softcap.
#[derive(Clone, Copy)]
pub(super) struct Modifiers<'a> {
    /// Factor of the scores.
    pub(super) scale: f32,
    /// Added to them: `q . k_mean`.
    pub(super) offset: f32,
    pub(super) softcap: Option<f32>,
    pub(super) alibi: Option<Alibi>,
    pub(super) mask: Option<MaskColumns<'a>>,
}

/// ALiBi of a row.
#[derive(Clone, Copy)]
pub(super) struct Alibi {
    pub(super) slope: f32,
    /// Where distances are counted from, relative to the first column.
    pub(super) position: f32,
}

/// A mask row over the columns of a block.
#[derive(Clone, Copy)]
pub(super) struct MaskColumns<'a> {
    pub(super) row: MaskRow<'a>,
    /// Key of the first column.
    pub(super) first: usize,
    /// Keys of the mask's axis.
    pub(super) keys: usize,
}

/// The part of a bias above this magnitude, `2^126`, is multiplied by [`HUGE_RATE`] instead of `log2 e`, so that it stays finite
/// (docs/numerics.md, "What is exact in the bits").
const HUGE_BIAS: f32 = f32::from_bits((126 + 127) << 23);
const HUGE_RATE: f32 = 0.5;

/// A score in units of log2.
pub(super) fn to_log2(score: f64) -> f64 {
    let core = score.clamp(-f64::from(HUGE_BIAS), f64::from(HUGE_BIAS));
    // An infinite score has an infinite part above the bound.
    core * std::f64::consts::LOG2_E + (score - core) * f64::from(HUGE_RATE)
}

/// The inverse of [`to_log2`], and of the change of units in [`modify`].
pub(super) fn from_log2(x: f64) -> f64 {
    let huge = f64::from(HUGE_BIAS) * f64::from(LOG2_E);
    if x.abs() <= huge || !x.is_finite() {
        return x * std::f64::consts::LN_2;
    }
    // `x` is a rounded sum: its inverse may be above the largest f32.
    let magnitude = f64::from(HUGE_BIAS) + (x.abs() - huge) / f64::from(HUGE_RATE);
    magnitude.min(f64::from(f32::MAX)).copysign(x)
}

static LANE_INDEX: [f32; 16] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// An element of a mask in memory.
trait MaskElem: Copy {
    /// For lanes without an element.
    const ZERO: Self;
    /// The biases of `LANES` elements.
    unsafe fn load<S: Simd>(p: *const Self) -> S::V;
    /// A score in units of log2 with a bias that is not `-inf`.
    unsafe fn add<S: Simd>(x: S::V, bias: S::V) -> S::V;
}

/// Hides a key where it is 0.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Shows(u8);

impl MaskElem for Shows {
    const ZERO: Self = Self(0);
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: the caller's contract; `Shows` is a transparent u8.
        unsafe { S::load_bool(p.cast()) }
    }
    #[inline(always)]
    unsafe fn add<S: Simd>(x: S::V, _: S::V) -> S::V {
        x
    }
}

impl MaskElem for F16 {
    const ZERO: Self = <Self as Elem>::ZERO;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { <Self as Elem>::load::<S>(p) }
    }
    /// f16 holds no huge bias.
    #[inline(always)]
    unsafe fn add<S: Simd>(x: S::V, bias: S::V) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { S::fma(S::max(S::splat(-HUGE_BIAS), bias), S::splat(LOG2_E), x) }
    }
}

macro_rules! wide_mask_elem {
    ($($E:ty)*) => { $(
        impl MaskElem for $E {
            const ZERO: Self = <Self as Elem>::ZERO;
            #[inline(always)]
            unsafe fn load<S: Simd>(p: *const Self) -> S::V {
                // SAFETY: the caller's contract.
                unsafe { <Self as Elem>::load::<S>(p) }
            }
            #[inline(always)]
            unsafe fn add<S: Simd>(x: S::V, bias: S::V) -> S::V {
                // SAFETY: the caller's contract.
                unsafe {
                    // A NaN passes both comparisons.
                    let core = S::max(S::splat(-HUGE_BIAS), bias);
                    let core = S::select_lt(S::splat(HUGE_BIAS), core, S::splat(HUGE_BIAS), core);
                    let x = S::fma(core, S::splat(LOG2_E), x);
                    S::fma(S::sub(bias, core), S::splat(HUGE_RATE), x)
                }
            }
        }
    )* };
}
wide_mask_elem!(f32 Bf16);

/// Applies scale, offset, softcap and ALiBi, then the mask, to whole vectors that cover `columns`. Hidden keys get `-inf`.
///
/// # Safety
/// As [`Simd`]; `scores` is valid for the vectors, the mask row for its keys.
#[inline(always)]
pub(super) unsafe fn modify<S: Simd>(scores: *mut f32, columns: Range<usize>, with: &Modifiers<'_>) {
    let mut scale = with.scale;
    // SAFETY: the caller's contract.
    unsafe {
        if with.softcap.is_some() || with.alibi.is_some() || with.offset != 0.0 || with.mask.is_none() {
            shape::<S>(scores, columns.clone(), with);
            scale = 1.0;
        }
        // A loop for each kind of mask: a choice for each vector would cost as much as its arithmetic.
        if let Some(mask) = &with.mask {
            match mask.row.kind() {
                MaskKind::Bool => add_mask::<S, Shows>(scores, columns, scale, mask),
                MaskKind::Additive(Dtype::F32) => add_mask::<S, f32>(scores, columns, scale, mask),
                MaskKind::Additive(Dtype::F16) => add_mask::<S, F16>(scores, columns, scale, mask),
                MaskKind::Additive(Dtype::BF16) => add_mask::<S, Bf16>(scores, columns, scale, mask),
            }
        }
    }
}

/// The part of [`modify`] before the mask.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn shape<S: Simd>(scores: *mut f32, columns: Range<usize>, with: &Modifiers<'_>) {
    let mut c = columns.start;
    while c < columns.end {
        // SAFETY: the caller's contract.
        unsafe {
            let mut x = S::add(S::mul(S::load(scores.add(c)), S::splat(with.scale)), S::splat(with.offset));
            if let Some(cap) = with.softcap {
                x = S::mul(tanh::<S>(x), S::splat(cap * LOG2_E));
            }
            if let Some(Alibi { slope, position }) = with.alibi {
                let lanes = S::load(LANE_INDEX.as_ptr());
                let distance = S::abs(S::sub(S::splat(position - c as f32), lanes));
                x = S::fma(distance, S::splat(-slope * LOG2_E), x);
            }
            S::store(scores.add(c), x);
        }
        c += S::LANES;
    }
}

/// Scales scores and adds a mask, whose elements are of `M`.
///
/// # Safety
/// As [`modify`].
#[inline(always)]
unsafe fn add_mask<S: Simd, M: MaskElem>(
    scores: *mut f32,
    columns: Range<usize>,
    scale: f32,
    mask: &MaskColumns<'_>,
) {
    let MaskColumns { row, first, keys } = *mask;
    let elements = row.ptr().cast::<M>().wrapping_add(first);
    let keys = keys.saturating_sub(first);
    let broadcast = row.step() == 0;
    let mut c = columns.start;
    // SAFETY: the caller's contract: the row has `keys` elements, or one that stands for all.
    unsafe {
        let one = if broadcast { S::splat(row.bias(0)) } else { S::splat(0.0) };
        while !broadcast && c + S::LANES <= columns.end.min(keys) {
            add_bias::<S, M>(scores.add(c), scale, M::load::<S>(elements.add(c)));
            c += S::LANES;
        }
        // The vector that the mask ends in, vectors past it, and all of them where one element stands for all keys.
        while c < columns.end {
            let mut bias = one;
            if !broadcast {
                let mut lanes = [M::ZERO; 16];
                let n = keys.saturating_sub(c).min(S::LANES);
                std::ptr::copy_nonoverlapping(elements.wrapping_add(c), lanes.as_mut_ptr(), n);
                bias = M::load::<S>(lanes.as_ptr());
            }
            add_bias::<S, M>(scores.add(c), scale, bias);
            c += S::LANES;
        }
    }
}

/// Scales a vector of scores and adds a bias; `-inf` hides, whatever the score.
///
/// # Safety
/// As [`Simd`]; `scores` is valid for a vector.
#[inline(always)]
unsafe fn add_bias<S: Simd, M: MaskElem>(scores: *mut f32, scale: f32, bias: S::V) {
    // SAFETY: the caller's contract.
    unsafe {
        let hidden = S::splat(f32::NEG_INFINITY);
        let x = M::add::<S>(S::mul(S::load(scores), S::splat(scale)), bias);
        S::store(scores, S::select_eq(bias, hidden, hidden, x));
    }
}

/// Hides the columns of whole vectors `columns` outside `visible`.
///
/// # Safety
/// As [`Simd`]; `scores` is valid for `columns`.
#[inline(always)]
pub(super) unsafe fn hide<S: Simd>(scores: *mut f32, columns: Range<usize>, visible: Range<usize>) {
    let mut c = columns.start;
    while c < columns.end {
        if visible.start <= c && c + S::LANES <= visible.end {
            c = visible.end / S::LANES * S::LANES;
            continue;
        }
        // SAFETY: the caller's contract.
        unsafe {
            let hidden = S::splat(f32::NEG_INFINITY);
            let (start, end) = (S::splat(visible.start as f32), S::splat(visible.end as f32));
            let lanes = S::add(S::splat(c as f32), S::load(LANE_INDEX.as_ptr()));
            let x = S::select_lt(lanes, start, hidden, S::load(scores.add(c)));
            S::store(scores.add(c), S::select_lt(lanes, end, x, hidden));
        }
        c += S::LANES;
    }
}

/// Hides the columns that a boolean mask row hides, whose element `from` is the first column.
///
/// # Safety
/// `scores` is valid for `columns`, the row for as many elements from `from` on.
#[inline(always)]
pub(super) unsafe fn prune(scores: *mut f32, columns: Range<usize>, row: MaskRow<'_>, from: usize) {
    for (n, c) in columns.enumerate() {
        // SAFETY: the caller's contract; a row of step 0 has one element, which stands for all.
        unsafe {
            if *row.ptr().add((from + n) * row.step()) == 0 {
                *scores.add(c) = f32::NEG_INFINITY;
            }
        }
    }
}

/// Largest score of `R` rows over whole vectors `columns`; NaN scores are ignored.
///
/// # Safety
/// As [`softmax`], for R rows.
#[inline(always)]
unsafe fn maxima<S: Simd, const R: usize>(scores: Mat, columns: &Range<usize>, out: *mut f32) {
    // SAFETY: the contract of `softmax`, for R rows.
    unsafe {
        let mut max = [S::splat(f32::NEG_INFINITY); R];
        let mut c = columns.start;
        while c < columns.end {
            for r in 0..R {
                max[r] = S::max(S::load(scores.at(r, c)), max[r]);
            }
            c += S::LANES;
        }
        for r in 0..R {
            *out.add(r) = S::reduce_max(max[r]);
        }
    }
}

/// Replaces the scores of rows in whole vectors `columns` by `exp2(scale * score - max)`, as `p . v` takes it
/// ([`Products::exp_row`]), with `max` the row's largest `scale * score`; `scale` is positive. Stores the maximum
/// (`-inf` where every key is hidden; NaN scores are ignored) and the sum of the probabilities (NaN where a score is NaN or
/// `+inf`).
///
/// The sum is taken lane by lane counted from column 0, so it does not depend on hidden columns at either end.
///
/// # Safety
/// As [`Simd`], with the contracts of `scores` and `max_sum`, which has as many rows.
#[inline(always)]
pub(super) unsafe fn softmax<S: Simd, P: Products<S>>(
    scores: MatMut,
    columns: Range<usize>,
    max_sum: RowMaxSum,
    scale: f32,
) {
    let rows = scores.rows();
    // SAFETY: the caller's contract.
    unsafe {
        // Several rows at once: one row's maximum is a single chain of dependent operations.
        let mut r = 0;
        while r + 4 <= rows {
            maxima::<S, 4>(scores.from(r, 0).as_mat(), &columns, max_sum.max.add(r));
            r += 4;
        }
        while r < rows {
            maxima::<S, 1>(scores.from(r, 0).as_mat(), &columns, max_sum.max.add(r));
            r += 1;
        }
        for r in 0..rows {
            let row = scores.at(r, 0);
            let max = *max_sum.max.add(r) * scale;
            *max_sum.max.add(r) = max;
            let shift = S::splat(if max == f32::NEG_INFINITY { 0.0 } else { -max });
            let sum = P::exp_row(row, columns.clone(), scale, shift);
            *max_sum.sum.add(r) = S::reduce_add(sum);
        }
    }
}

/// Folds the result of one block into the running state of `rows` rows:
/// `m' = max(m, mb)`, `l' = l * 2^(m - m') + lb * 2^(mb - m')`, and likewise the values. A row to which the block gave
/// nothing keeps its state, bit for bit; of a row that saw nothing before, the running values are not read.
///
/// # Safety
/// As [`Simd`]; the matrices of [`Fold`] have `rows` rows.
#[inline(always)]
pub(crate) unsafe fn fold<S: Simd>(rows: usize, f: &Fold) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut first = 0;
        while first < rows {
            let (m, l) = (S::load(f.max_sum.max.add(first)), S::load(f.max_sum.sum.add(first)));
            let (mb, lb) = (S::load(f.block.max.add(first)), S::load(f.block.sum.add(first)));
            let new = S::max(m, mb);
            let none = S::splat(f32::NEG_INFINITY);
            let shift = S::select_eq(new, none, S::splat(0.0), new);
            let (old, add) = (exp2::<S>(S::sub(m, shift)), exp2::<S>(S::sub(mb, shift)));
            let sum = S::fma(l, old, S::mul(lb, add));
            let (mut before, mut gave) = ([0.0f32; 16], [0.0f32; 16]);
            let mut factors = [[0.0f32; 16]; 2];
            S::store(before.as_mut_ptr(), l);
            S::store(gave.as_mut_ptr(), lb);
            S::store(factors[0].as_mut_ptr(), old);
            S::store(factors[1].as_mut_ptr(), add);
            let nothing = S::splat(0.0);
            S::store(f.max_sum.max.add(first), S::select_eq(lb, nothing, m, new));
            S::store(f.max_sum.sum.add(first), S::select_eq(lb, nothing, l, sum));
            for r in 0..S::LANES.min(rows - first) {
                if gave[r] == 0.0 {
                    continue;
                }
                let (old, add) = (S::splat(factors[0][r]), S::splat(factors[1][r]));
                let (acc, values) = (f.acc.at(first + r, 0), f.values.at(first + r, 0));
                let mut c = 0;
                // The factor of the block is 1. The sum with 0 is what a fold into zeros gives, for a value of -0 too.
                while before[r] == 0.0 && c < f.acc.cols() {
                    S::store(acc.add(c), S::add(S::load(values.add(c)), nothing));
                    c += S::LANES;
                }
                while c < f.acc.cols() {
                    let scaled = S::mul(S::load(values.add(c)), add);
                    S::store(acc.add(c), S::fma(S::load(acc.add(c)), old, scaled));
                    c += S::LANES;
                }
            }
            first += S::LANES;
        }
    }
}
