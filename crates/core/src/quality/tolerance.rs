//! How far an answer may be from the oracle's.

use crate::codec::KvView;
use crate::dtype::Dtype;
use crate::inputs::Inputs;
use crate::isa::IsaToken;
use crate::problem::Problem;
use crate::reference::{Attention, for_each_row};

/// The precision of a kernel's products and sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accumulation {
    /// Scores, probabilities and sums in f32.
    F32,
    /// Probabilities (or quantized operands) rounded to a half-precision or 8-bit type before a product, sums in f32.
    Half,
    /// Queries and probabilities as 16-bit integers, whose products with codes are exact.
    Integers,
    /// Probabilities rounded to the problem's dtype before their product with the values, sums in f32: matrix units.
    Probs,
    /// Probabilities and levels of codes rounded to f16 before products with codes, sums in f32: matrix units over
    /// codes.
    Operands,
}

impl Accumulation {
    /// The accumulation of the CUDA backend's kernels for a dtype.
    #[must_use]
    pub const fn of_cuda(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 | Dtype::BF16 => Self::Probs,
        }
    }
}

/// Limits of the difference between an answer and the oracle's.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Tolerance {
    /// Root mean square error over the whole tensor relative to the root mean square of the oracle's answer, for
    /// scores of ordinary size.
    pub nrmse: f64,
    /// Limit of an element's error relative to its own magnitude: half a unit in the last place of the dtype.
    pub relative: f64,
    /// Limit of an element's error relative to the largest magnitude of the tensor, added to `relative`.
    pub absolute: f64,
    /// Limit of the error of a logsumexp `l`, relative to `max(1, |l|)`.
    pub lse: f64,
}

impl Tolerance {
    /// The limits for an output dtype, the largest number of keys that a row sees, and an accumulation.
    #[must_use]
    pub fn of(dtype: Dtype, keys: usize, accumulation: Accumulation) -> Self {
        // Rounding errors of independent terms add like a random walk; up to 4096 keys the base covers it.
        let growth = (keys as f64 / 4096.0).sqrt().max(1.0);
        let (base, rounding): (f64, f64) = match dtype {
            Dtype::F32 => (2e-6, 0.5 * f64::from(f32::EPSILON)),
            Dtype::F16 => (1e-3, 0.5 * f64::from(half::f16::EPSILON.to_f32())),
            Dtype::BF16 => (8e-3, 0.5 * f64::from(half::bf16::EPSILON.to_f32())),
        };
        let math: f64 = match accumulation {
            Accumulation::F32 => 2e-6,
            Accumulation::Half | Accumulation::Operands => 5e-3,
            // Rounding to 2^-16 of the largest element of a query and of the largest probability.
            Accumulation::Integers => 2e-4,
            Accumulation::Probs => match dtype {
                Dtype::F32 => 2e-6,
                // Probabilities have the units in the last place of bf16.
                Dtype::F16 => 5e-3 / 8.0,
                Dtype::BF16 => 5e-3,
            },
        };
        Self {
            nrmse: base.max(math) * growth,
            relative: rounding,
            absolute: if math <= 2e-6 { 10.0 } else { 2.0 } * math * growth,
            lse: growth
                * match accumulation {
                    // Levels that are not integers err by 2^-12.
                    Accumulation::Operands => 5e-4,
                    Accumulation::F32 | Accumulation::Half | Accumulation::Integers | Accumulation::Probs => {
                        1e-5
                    }
                },
        }
    }
}

/// Relative error of a row's probabilities because a score is an f32: half a unit in the last place of a score as
/// large as the row's logsumexp.
fn score_rounding(lse: f64) -> f64 {
    if lse.is_finite() { 0.5 * f64::from(f32::EPSILON) * lse.abs() } else { 0.0 }
}

/// Rounding to integers has independent errors of up to half a unit each. A score may err by this many units times
/// the norm of a key, 5.2 standard deviations.
const INTEGER_ERRORS: f64 = 1.5;

/// The largest integer of a query in kernels with [`Accumulation::Integers`].
const INTEGER_ONE: f64 = 127.0 * 256.0;

/// For each row `[batch, q_heads, q_len]`, how far its scores may be off if queries are multiplied as integers
/// ([`Accumulation::Integers`]): `1.5 |scale| max|q| / 32512` times the norm of the longest key that it sees, with q
/// and key rotated, q times the keys' factors, and the key without its mean and divided by them. 0 for keys that are not multiplied that way.
#[must_use]
pub fn integer_errors(problem: &Problem, inputs: &Inputs<'_>) -> Vec<f64> {
    let dims = problem.dims();
    let mut errors = vec![0.0f64; dims.lse_shape().iter().product()];
    let (KvView::Codes(codes), Some(tables)) = (&inputs.k, inputs.tables) else { return errors };
    let Some(rotation) = codes.coder().rotation().filter(|_| codes.coder().is_integer()) else {
        return errors;
    };
    let mut row = vec![0.0f32; dims.head_dim];
    for (index, s) in problem.sequences().iter().enumerate() {
        for kv_head in 0..dims.kv_heads {
            let factors =
                || codes.factors(kv_head).unwrap_or_default().iter().chain(std::iter::repeat(&1.0)).copied();
            let mut norm = |j: usize| {
                let Some((page, at)) = tables.locate(index, j) else { return 0.0 };
                codes.read(page, kv_head, at, &mut row);
                let means = codes.mean(kv_head).unwrap_or_default().iter().chain(std::iter::repeat(&0.0));
                let stored =
                    row.iter().zip(means).zip(factors()).map(|((x, mean), factor)| (x - mean) / factor);
                stored.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
            };
            let norms: Vec<f64> = (0..s.kv_len).map(&mut norm).collect();
            for (h, i) in (0..dims.gqa_group()).flat_map(|g| (0..s.q_len).map(move |i| (g, i))) {
                let h = kv_head * dims.gqa_group() + h;
                let element = |d| inputs.q.get([s.batch, h, s.q_start + i, d]);
                let mut q: Vec<f32> =
                    (0..dims.head_dim).zip(factors()).map(|(d, factor)| element(d) * factor).collect();
                crate::codec::rotate(IsaToken::best(), rotation, &mut q);
                let max = q.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                let longest = norms[problem.visible(s, i)].iter().fold(0.0f64, |max, &norm| max.max(norm));
                let unit = f64::from(problem.scale().abs()) * f64::from(max) / INTEGER_ONE;
                errors[(s.batch * dims.q_heads + h) * dims.q_len + s.q_start + i] =
                    INTEGER_ERRORS * unit * longest;
            }
        }
    }
    errors
}

/// Allowed standard deviations of a score's rounding errors.
const SCORE_DEVIATIONS: f64 = 3.0;

/// The largest error of a score that [`score_errors`] allows: an answer that is further off is wrong, however large its
/// scores are.
const MAX_SCORE_ERROR: f64 = 0.25;

/// How far the scores of each row `[batch, q_heads, q_len]` may be off because a dot product is a sum of `n =
/// head_dim` terms in f32: `3 u |scale| sqrt(n / 6) |q * k|`, where `u` is the unit roundoff and `|q * k|` the
/// Euclidean norm of the terms, the largest of any visible key with a finite score; at most 1/4.
///
/// Each addition rounds the partial sum `S_m` with an error of variance at most `(u S_m)^2 / 3`. The partial sums of terms of
/// random signs have `S_m^2 = m / n |q * k|^2` on average, so the variances add up to `u^2 n / 6 |q * k|^2`. For elements of
/// N(0, 1) and the default scale the bound is below 2e-6 at every head dimension: it matters where scores are large and
/// cancel. Cost: as much as the reference.
#[must_use]
pub fn score_errors(problem: &Problem, inputs: &Inputs<'_>) -> Vec<f64> {
    let dims = problem.dims();
    let mut errors = vec![0.0f64; dims.lse_shape().iter().product()];
    let unit = 0.5 * f64::from(f32::EPSILON) * f64::from(problem.scale().abs());
    let factor = SCORE_DEVIATIONS * unit * (dims.head_dim as f64 / 6.0).sqrt();
    for_each_row(problem, inputs, |at, row| {
        errors[at] = (factor * row.max_products_norm()).min(MAX_SCORE_ERROR);
    });
    errors
}

/// Difference between an answer and the oracle's. If their sizes differ, it is infinite at the end of the shorter
/// one.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// Largest absolute difference.
    pub max_abs: f64,
    /// Root mean square difference over the root mean square of the oracle's answer. 0 where both are 0.
    pub nrmse: f64,
    /// The limit of `nrmse`.
    pub limit: f64,
    /// Largest ratio of an element's difference to its limit; at most 1 is within tolerance. Infinite if one is NaN
    /// or infinite and the other is not the same.
    pub worst: f64,
    /// Index of the element with the largest ratio.
    pub worst_index: usize,
    /// The answer's element.
    pub got: f64,
    /// The oracle's element.
    pub want: f64,
    /// Number of elements compared.
    pub count: usize,
}

impl Report {
    /// Returns true if the answer is within its limits.
    #[must_use]
    pub fn within(&self) -> bool {
        self.worst <= 1.0 && self.nrmse <= self.limit
    }

    fn new(got: &[f32], want: &[f64], limit: impl Fn(usize, f64) -> f64, round: impl Fn(f64) -> f64) -> Self {
        let mut report = Self {
            max_abs: 0.0,
            nrmse: 0.0,
            limit: f64::INFINITY,
            worst: 0.0,
            worst_index: 0,
            got: got.first().map_or(0.0, |&x| f64::from(x)),
            want: want.first().copied().unwrap_or(0.0),
            count: got.len(),
        };
        let (mut error, mut power) = (0.0, 0.0);
        for (index, (&got, &want)) in got.iter().zip(want).enumerate() {
            let got = f64::from(got);
            // Values out of the dtype's range are infinite in the answer too.
            let held = round(want);
            let same_class = if held.is_nan() {
                got.is_nan()
            } else if held.is_infinite() {
                got == held
            } else {
                got.is_finite()
            };
            let (difference, ratio) = if !same_class {
                (f64::INFINITY, f64::INFINITY)
            } else if !got.is_finite() || got == want {
                (0.0, 0.0)
            } else {
                let difference = (got - want).abs();
                (difference, difference / limit(index, want))
            };
            if held.is_finite() {
                error += difference * difference;
                power += want * want;
            }
            report.max_abs = report.max_abs.max(difference);
            if ratio > report.worst {
                (report.worst, report.worst_index, report.got, report.want) = (ratio, index, got, want);
            }
        }
        report.nrmse = if error == 0.0 { 0.0 } else { (error / power).sqrt() };
        if got.len() != want.len() {
            (report.worst, report.worst_index) = (f64::INFINITY, got.len().min(want.len()));
        }
        report
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "nrmse {:.2e}", self.nrmse)?;
        if self.limit.is_finite() {
            write!(f, " (limit {:.1e})", self.limit)?;
        }
        write!(
            f,
            ", max-abs {:.2e}, worst at element {} of {}: {:e}, oracle {:e}, {:.3} of its limit",
            self.max_abs, self.worst_index, self.count, self.got, self.want, self.worst
        )
    }
}

/// Compares elements of out. NaN and infinities must be the oracle's, element by element.
#[must_use]
pub fn compare_out(got: &[f32], expected: &Attention, dtype: Dtype, tolerance: &Tolerance) -> Report {
    compare_out_off(got, expected, dtype, tolerance, &[])
}

/// Like [`compare_out`], for rows whose scores may be off by `off`: their probabilities err by that relatively, and
/// by twice as much relative to their sum. An empty list means zeros.
#[must_use]
pub fn compare_out_off(
    got: &[f32],
    expected: &Attention,
    dtype: Dtype,
    tolerance: &Tolerance,
    off: &[f64],
) -> Report {
    let off = |row: usize| off.get(row).copied().unwrap_or(0.0);
    let want = &expected.out;
    let largest = want.iter().filter(|x| x.is_finite()).fold(0.0f64, |m, x| m.max(x.abs()));
    // The spacing of subnormal numbers does not shrink with the number.
    let smallest = match dtype {
        Dtype::F32 | Dtype::BF16 => 0.0,
        Dtype::F16 => 0.5 * f64::from(half::f16::MIN_POSITIVE_SUBNORMAL.to_f32()),
    };
    let dim = (want.len() / expected.lse.len().max(1)).max(1);
    let limit = |index: usize, want: f64| {
        let row = index / dim;
        let math = tolerance.absolute + 10.0 * score_rounding(expected.lse[row]) + 2.0 * off(row);
        tolerance.relative * want.abs() + math * largest + smallest
    };
    let mut report = Report::new(got, want, limit, |want| rounded(dtype, want));
    let rows = expected.lse.iter().enumerate();
    let rows = rows.map(|(row, &lse)| tolerance.nrmse.max(score_rounding(lse)).max(off(row)).powi(2));
    let rows_limit = (rows.sum::<f64>() / expected.lse.len().max(1) as f64).sqrt();
    let finite = || want.iter().filter(|x| x.is_finite());
    let rms = (finite().map(|x| x * x).sum::<f64>() / finite().count().max(1) as f64).sqrt();
    report.limit = if rms > 0.0 { rows_limit.hypot(smallest / rms) } else { rows_limit };
    report
}

/// Compares logsumexps, each element by itself: a mean square error would hide a single row. NaN and infinities must
/// be the oracle's.
#[must_use]
pub fn compare_lse(got: &[f32], expected: &Attention, tolerance: &Tolerance) -> Report {
    compare_lse_off(got, expected, tolerance, &[])
}

/// Like [`compare_lse`], for rows whose scores may be off by `off`: a logsumexp errs by no more than the scores do.
#[must_use]
pub fn compare_lse_off(got: &[f32], expected: &Attention, tolerance: &Tolerance, off: &[f64]) -> Report {
    let off = |row: usize| off.get(row).copied().unwrap_or(0.0);
    let limit = |row, want: f64| tolerance.lse * want.abs().max(1.0) + off(row);
    Report::new(got, &expected.lse, limit, |want| f64::from(want as f32))
}

/// A number rounded to a dtype.
fn rounded(dtype: Dtype, x: f64) -> f64 {
    match dtype {
        Dtype::F32 => f64::from(x as f32),
        Dtype::F16 => f64::from(half::f16::from_f64(x).to_f32()),
        Dtype::BF16 => f64::from(half::bf16::from_f64(x).to_f32()),
    }
}

/// Compares numbers of a dtype with the oracle's, of which each may be off by as much as the same element of `limits` says.
#[must_use]
pub fn compare_within(got: &[f32], want: &[f64], limits: &[f64], dtype: Dtype) -> Report {
    Report::new(got, want, |index, _| limits[index], |want| rounded(dtype, want))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Dims, ProblemDesc};
    use crate::tensor::TensorView;

    fn report(got: &[f32], want: &[f64], dtype: Dtype, lse: f64) -> Report {
        let expected = Attention { out: want.to_vec(), lse: vec![lse] };
        compare_out(got, &expected, dtype, &Tolerance::of(dtype, 1, Accumulation::F32))
    }

    fn f32_report(got: &[f32], want: &[f64]) -> Report {
        report(got, want, Dtype::F32, 1.0)
    }

    #[test]
    fn finds_the_worst_element() {
        let report = f32_report(&[1.0, 2.0, 3.5], &[1.0, 2.0, 3.0]);
        assert_eq!((report.worst_index, report.max_abs), (2, 0.5));
        assert!((report.nrmse - 0.5 / 14f64.sqrt()).abs() < 1e-12);
        assert!(!report.within());
        assert_eq!(
            report.to_string(),
            "nrmse 1.34e-1 (limit 2.0e-6), max-abs 5.00e-1, worst at element 2 of 3: 3.5e0, oracle 3e0, 8068.817 of its limit"
        );
    }

    #[test]
    fn a_small_error_anywhere_is_within_a_large_one_is_not() {
        assert!(f32_report(&[1.0, 2.000_000_2], &[1.0, 2.0]).within());
        assert!(!f32_report(&[1.0, 2.000_02], &[1.0, 2.0]).within());
        // One wrong element in a thousand is found, though it leaves the whole tensor's error small.
        let want = vec![1.0f64; 100_000];
        let mut got = vec![1.0f32; 100_000];
        got[77] = 1.000_5;
        let report = f32_report(&got, &want);
        assert!(report.nrmse < 2e-6 && !report.within(), "{report}");
    }

    #[test]
    fn nan_and_infinities_must_match() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        assert!(f32_report(&[f32::NAN, 1.0], &[nan, 1.0]).within());
        assert!(f32_report(&[f32::INFINITY], &[inf]).within());
        for (got, want) in
            [(f32::NAN, 1.0), (1.0, nan), (f32::INFINITY, 1.0), (f32::NEG_INFINITY, inf), (f32::NAN, inf)]
        {
            assert_eq!(f32_report(&[got], &[want]).worst, inf, "{got} {want}");
        }
        assert!(report(&[f32::INFINITY], &[1e6], Dtype::F16, 1.0).within());
    }

    #[test]
    fn zero_means_zero() {
        assert!(f32_report(&[0.0], &[0.0]).within());
        assert!(!f32_report(&[1e-30], &[0.0]).within());
    }

    #[test]
    fn large_scores_widen_the_limits_of_their_own_rows() {
        let (want, got) = ([1.0, 1.0], [1.0f32, 1.000_03]);
        assert!(!report(&got, &want, Dtype::F32, 30.0).within());
        assert!(report(&got, &want, Dtype::F32, -2000.0).within());
        let mixed = Attention { out: want.to_vec(), lse: vec![2000.0, 1.0] };
        assert!(
            !compare_out(&got, &mixed, Dtype::F32, &Tolerance::of(Dtype::F32, 1, Accumulation::F32)).within()
        );
    }

    #[test]
    fn no_key_widens_limits_without_end() {
        let dims = Dims { batch: 1, q_heads: 1, kv_heads: 1, q_len: 1, kv_len: 2, head_dim: 4, value_dim: 4 };
        let problem = ProblemDesc::new(dims, Dtype::F32).validate().unwrap();
        let errors = |first: f32| {
            let (q, v, mut k) = ([1.0f32; 4], [1.0f32; 8], [1.0f32; 8]);
            k[0] = first;
            let of = |x| TensorView::bhsd(x, dims.k_shape()).unwrap();
            let q = TensorView::bhsd(&q, dims.q_shape()).unwrap();
            score_errors(&problem, &Inputs::new(q, of(&k), of(&v)))[0]
        };
        assert!(errors(1.0) > 0.0 && errors(100.0) > 10.0 * errors(1.0));
        assert_eq!(errors(f32::INFINITY), errors(1.0));
        assert_eq!(errors(1e30), MAX_SCORE_ERROR);
    }

    #[test]
    fn limits_are_those_of_the_documentation() {
        let nrmse = |dtype, accumulation| Tolerance::of(dtype, 1000, accumulation).nrmse;
        assert_eq!(nrmse(Dtype::F32, Accumulation::F32), 2e-6);
        assert_eq!(nrmse(Dtype::F16, Accumulation::F32), 1e-3);
        assert_eq!(nrmse(Dtype::BF16, Accumulation::F32), 8e-3);
        assert_eq!(nrmse(Dtype::F32, Accumulation::Half), 5e-3);
        assert_eq!(Tolerance::of(Dtype::F32, 16384, Accumulation::F32).nrmse, 4e-6);
    }
}
