//! Rows of scores before their softmax, without a task: scale, softcap, ALiBi and masks, in vectors of f32 and units of log2. The formula is
//! [`flashtile_core::scoring`]'s.

#![allow(unsafe_code)]

use crate::simd::{Bf16, Elem, F16, Simd, tanh};
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::scoring::{ScoreNumber, ScoreRow, masked};
use flashtile_core::tensor::MaskRow;
use std::f32::consts::LOG2_E;
use std::marker::PhantomData;
use std::ops::Range;

/// Changes of the scores of a row before its softmax, in their order. Scores are in units of log2, or of the softcap.
#[derive(Clone, Copy)]
pub(crate) struct Modifiers<'a> {
    /// All but the mask. Keys are counted from the first column.
    pub(crate) terms: ScoreRow<f32, f32>,
    pub(crate) mask: Option<MaskColumns<'a>>,
}

/// A mask row over the columns of a block.
#[derive(Clone, Copy)]
pub(crate) struct MaskColumns<'a> {
    pub(crate) row: MaskRow<'a>,
    /// Keys of the mask's axis.
    pub(crate) keys: usize,
}

/// The part of a bias above this magnitude, `2^126`, is multiplied by [`HUGE_RATE`] instead of `log2 e`, so that it stays finite
/// (docs/numerics.md, "What is exact in the bits").
const HUGE_BIAS: f32 = f32::from_bits((126 + 127) << 23);
const HUGE_RATE: f32 = 0.5;

/// A score in units of log2.
pub(crate) fn to_log2(score: f64) -> f64 {
    let core = score.clamp(-f64::from(HUGE_BIAS), f64::from(HUGE_BIAS));
    // An infinite score has an infinite part above the bound.
    core * std::f64::consts::LOG2_E + (score - core) * f64::from(HUGE_RATE)
}

/// The inverse of [`to_log2`], and of the change of units in [`modify`].
pub(crate) fn from_log2(x: f64) -> f64 {
    let huge = f64::from(HUGE_BIAS) * f64::from(LOG2_E);
    if x.abs() <= huge || !x.is_finite() {
        return x * std::f64::consts::LN_2;
    }
    // `x` is a rounded sum: its inverse may be above the largest f32.
    let magnitude = f64::from(HUGE_BIAS) + (x.abs() - huge) / f64::from(HUGE_RATE);
    magnitude.min(f64::from(f32::MAX)).copysign(x)
}

/// Index of each lane.
pub(crate) static LANE_INDEX: [f32; 16] =
    [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

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

/// Numbers of consecutive keys of a row whose mask has elements of `M`: scores in units of log2 or of the softcap, distances, or biases.
///
/// # Safety
/// A value proves that the machine has the instruction set of `S`: [`Lanes::new`] is the one constructor.
struct Lanes<S: Simd, M> {
    vector: S::V,
    mask: PhantomData<M>,
}

impl<S: Simd, M> Lanes<S, M> {
    /// # Safety
    /// The contract of [`Simd`] holds.
    #[inline(always)]
    unsafe fn new(vector: S::V) -> Self {
        Self { vector, mask: PhantomData }
    }
}

impl<S: Simd, M> Clone for Lanes<S, M> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Simd, M> Copy for Lanes<S, M> {}

impl<S: Simd, M: MaskElem> ScoreNumber for Lanes<S, M> {
    type Constant = f32;
    type Position = f32;

    #[inline(always)]
    fn constant(x: f32) -> f32 {
        x * LOG2_E
    }
    #[inline(always)]
    fn times(self, factor: f32) -> Self {
        // SAFETY: `self` proves the instruction set.
        unsafe { Self::new(S::mul(self.vector, S::splat(factor))) }
    }
    #[inline(always)]
    fn plus(self, addend: f32) -> Self {
        // SAFETY: `self` proves the instruction set.
        unsafe { Self::new(S::add(self.vector, S::splat(addend))) }
    }
    #[inline(always)]
    fn plus_product(self, a: Self, b: f32) -> Self {
        // SAFETY: `self` proves the instruction set.
        unsafe { Self::new(S::fma(a.vector, S::splat(b), self.vector)) }
    }
    #[inline(always)]
    fn in_softcaps(self, _: f32) -> Self {
        self
    }
    #[inline(always)]
    fn tanh(self) -> Self {
        // SAFETY: `self` proves the instruction set.
        unsafe { Self::new(tanh::<S>(self.vector)) }
    }
    #[inline(always)]
    fn distance(self, origin: f32, key: f32) -> Self {
        // SAFETY: `self` proves the instruction set; the widest vector has as many indices.
        unsafe { Self::new(S::abs(S::sub(S::splat(origin - key), S::load(LANE_INDEX.as_ptr())))) }
    }
    #[inline(always)]
    fn add_bias(self, bias: Self) -> Self {
        // SAFETY: `self` proves the instruction set.
        unsafe { Self::new(M::add::<S>(self.vector, bias.vector)) }
    }
    #[inline(always)]
    fn hide(self, bias: Self) -> Self {
        // SAFETY: `self` proves the instruction set.
        unsafe {
            let hidden = S::splat(f32::NEG_INFINITY);
            Self::new(S::select_eq(bias.vector, hidden, hidden, self.vector))
        }
    }
}

/// Applies scale, offset, softcap and ALiBi, then the mask, to whole vectors that cover `columns`. Hidden keys get `-inf`.
///
/// # Safety
/// The contract of [`Simd`] holds; `scores` is valid for the vectors, the mask row for its keys.
#[inline(always)]
pub(crate) unsafe fn modify<S: Simd>(scores: *mut f32, columns: Range<usize>, with: &Modifiers<'_>) {
    let mut terms = with.terms;
    // SAFETY: the caller's contract.
    unsafe {
        if terms.softcap.is_some() || terms.alibi.is_some() || terms.offset != 0.0 || with.mask.is_none() {
            add_terms::<S>(scores, columns.clone(), &terms);
            terms.scale = 1.0;
        }
        // A loop for each kind of mask: a choice for each vector would cost as much as its arithmetic.
        if let Some(mask) = &with.mask {
            match mask.row.kind() {
                MaskKind::Bool => add_mask::<S, Shows>(scores, columns, &terms, mask),
                MaskKind::Additive(Dtype::F32) => add_mask::<S, f32>(scores, columns, &terms, mask),
                MaskKind::Additive(Dtype::F16) => add_mask::<S, F16>(scores, columns, &terms, mask),
                MaskKind::Additive(Dtype::BF16) => add_mask::<S, Bf16>(scores, columns, &terms, mask),
            }
        }
    }
}

/// The part of [`modify`] before the mask.
///
/// # Safety
/// The contract of [`modify`] holds.
#[inline(always)]
unsafe fn add_terms<S: Simd>(scores: *mut f32, columns: Range<usize>, terms: &ScoreRow<f32, f32>) {
    let mut c = columns.start;
    while c < columns.end {
        // SAFETY: the caller's contract.
        unsafe {
            let product = Lanes::<S, Shows>::new(S::load(scores.add(c)));
            S::store(scores.add(c), terms.score(c as f32, product).vector);
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
    terms: &ScoreRow<f32, f32>,
    mask: &MaskColumns<'_>,
) {
    let MaskColumns { row, keys } = *mask;
    let elements = row.ptr().cast::<M>().wrapping_add(terms.first_key);
    let keys = keys.saturating_sub(terms.first_key);
    let broadcast = row.step() == 0;
    let mut c = columns.start;
    // SAFETY: the caller's contract: the row has `keys` elements, or one that stands for all.
    unsafe {
        let one = if broadcast { S::splat(row.bias(0)) } else { S::splat(0.0) };
        while !broadcast && c + S::LANES <= columns.end.min(keys) {
            add_bias::<S, M>(scores.add(c), terms, M::load::<S>(elements.add(c)));
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
            add_bias::<S, M>(scores.add(c), terms, bias);
            c += S::LANES;
        }
    }
}

/// Scales a vector of scores and adds a bias; `-inf` hides, whatever the score.
///
/// # Safety
/// The contract of [`Simd`] holds; `scores` is valid for a vector.
#[inline(always)]
unsafe fn add_bias<S: Simd, M: MaskElem>(scores: *mut f32, terms: &ScoreRow<f32, f32>, bias: S::V) {
    // SAFETY: the caller's contract.
    unsafe {
        let score = terms.scaled(Lanes::<S, M>::new(S::load(scores)));
        S::store(scores, masked(score, Lanes::new(bias)).vector);
    }
}

/// Hides the columns of whole vectors `columns` outside `visible`.
///
/// # Safety
/// The contract of [`Simd`] holds; `scores` is valid for `columns`.
#[inline(always)]
pub(crate) unsafe fn hide<S: Simd>(scores: *mut f32, columns: Range<usize>, visible: Range<usize>) {
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
pub(crate) unsafe fn prune(scores: *mut f32, columns: Range<usize>, row: MaskRow<'_>, from: usize) {
    for (n, c) in columns.enumerate() {
        // SAFETY: the caller's contract; a row of step 0 has one element, which stands for all.
        unsafe {
            if *row.ptr().add((from + n) * row.step()) == 0 {
                *scores.add(c) = f32::NEG_INFINITY;
            }
        }
    }
}
