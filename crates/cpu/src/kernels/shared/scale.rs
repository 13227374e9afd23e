//! The scale of the scores. It is applied to the query, or to the query's products if the scaled query would overflow or lose digits.

#![allow(unsafe_code)]

use super::score_task::{Query, ScoreTask};
use crate::simd::{Simd, load_head};

/// Lower bound of the largest magnitude of a scaled query, `2^-120`: below it, small elements would lose digits as subnormal numbers.
const MIN_SCALED: f32 = f32::from_bits((127 - 120) << 23);

/// Queries up to this magnitude, `2^-10`, have finite products with any key.
const MAX_PLAIN: f32 = f32::from_bits((127 - 10) << 23);

/// The two factors of the scale of a row's scores.
#[derive(Clone, Copy)]
pub(crate) struct ScaleFactors {
    /// Factor of the query.
    pub(crate) query: f32,
    /// Factor of its products with keys.
    pub(crate) scores: f32,
}

impl ScaleFactors {
    /// The factors of a row whose largest finite magnitude is `q_max`: all of the scale goes to the query, which costs nothing, unless the
    /// query would overflow or lose digits.
    fn new(scale: f32, q_max: f32) -> Self {
        let scaled = q_max * scale.abs();
        if is_plain(scaled) || q_max == 0.0 || scale == 0.0 {
            return Self { query: scale, scores: 1.0 };
        }
        // The factor is a power of two, so that the scores of a query that is too small are rounded once, like others.
        let query = if scaled < MIN_SCALED && q_max > MAX_PLAIN {
            MAX_PLAIN / f32::from_bits(q_max.to_bits() & 0x7f80_0000)
        } else {
            1.0
        };
        Self { query, scores: scale / query }
    }
}

/// Returns true if a query can be scaled to this largest magnitude.
#[inline(always)]
fn is_plain(scaled: f32) -> bool {
    (MIN_SCALED..=f32::MAX).contains(&scaled)
}

/// Returns true if a scaled query of `len` elements keeps its digits: no finite element became infinite, and not all are too small.
///
/// # Safety
/// The contract of [`Simd`] holds; the row has the elements.
#[inline(always)]
pub(crate) unsafe fn is_scaled<S: Simd>(row: *const f32, len: usize) -> bool {
    // SAFETY: the caller's contract.
    unsafe {
        let mut max = [S::splat(0.0); 2];
        let mut c = 0;
        while c + 2 * S::LANES <= len {
            max[0] = S::max(S::abs(S::load(row.add(c))), max[0]);
            max[1] = S::max(S::abs(S::load(row.add(c + S::LANES))), max[1]);
            c += 2 * S::LANES;
        }
        while c < len {
            let x = load_head::<S, f32>(row.add(c), (len - c).min(S::LANES));
            max[0] = S::max(S::abs(x), max[0]);
            c += S::LANES;
        }
        is_plain(S::reduce_max(S::max(max[0], max[1])))
    }
}

impl ScoreTask<'_> {
    /// The factor of a row's products, if some row of the task has one.
    #[inline]
    pub(crate) fn factor_of_scores(&self, query: &Query<'_>) -> Option<f32> {
        self.has_score_factors.get().then(|| self.scale_factors(query).scores)
    }

    /// The factors of a row.
    #[cold]
    pub(crate) fn scale_factors(&self, query: &Query<'_>) -> ScaleFactors {
        let (q, s) = (&self.run.inputs.q, query.sequence);
        let row = s.q_start + query.position;
        let element = |d: usize| q.get([s.batch, query.head, row, d]).abs();
        let q_max = (0..q.shape()[3]).map(element).filter(|x| x.is_finite()).fold(0.0, f32::max);
        ScaleFactors::new(self.score_scale(), q_max)
    }
}
