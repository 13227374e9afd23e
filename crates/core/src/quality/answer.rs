//! How far two implementations' answers to one problem may be from each other.

use super::tolerance::{Accumulation, Report, Tolerance, compare_lse_off, compare_out_off};
use crate::dtype::Dtype;
use crate::reference::Attention;

/// Elements of an answer in f32, in the order of [`Attention`].
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct Answer<'a> {
    /// `[batch, q_heads, q_len, value_dim]`.
    pub out: &'a [f32],
    /// `[batch, q_heads, q_len]`.
    pub lse: &'a [f32],
}

impl Answer<'_> {
    /// Compares elements of out with another implementation's answer to the same problem, rounded once to `dtype` or to a
    /// more precise type. Rows see at most `keys` keys; their scores may be off by `off` ([`score_errors`]; empty: zeros).
    ///
    /// Both answers may be as far from the oracle's as [`Tolerance`] allows a kernel that rounds probabilities to `dtype`, so
    /// that they may be twice as far from each other: the limits are twice as wide as in [`compare_out_off`].
    ///
    /// [`score_errors`]: super::score_errors
    #[must_use]
    pub fn compare_out(&self, want: &[f32], dtype: Dtype, keys: usize, off: &[f64]) -> Report {
        let expected = Attention { out: wide(want), lse: wide(self.lse) };
        let tolerance = Tolerance::of(dtype, keys, Accumulation::of_cuda(dtype));
        of_two(compare_out_off(self.out, &expected, dtype, &tolerance, off))
    }

    /// Compares logsumexps in the same way: the limits are twice as wide as in [`compare_lse_off`].
    #[must_use]
    pub fn compare_lse(&self, want: &[f32], dtype: Dtype, keys: usize, off: &[f64]) -> Report {
        let expected = Attention { out: Vec::new(), lse: wide(want) };
        let tolerance = Tolerance::of(dtype, keys, Accumulation::of_cuda(dtype));
        of_two(compare_lse_off(self.lse, &expected, &tolerance, off))
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// The report with limits for two answers that may both err.
fn of_two(report: Report) -> Report {
    Report { limit: 2.0 * report.limit, worst: 0.5 * report.worst, ..report }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_twice_those_against_the_oracle() {
        let (want, lse) = ([1.0f32, 2.0], [1.0f32]);
        let report = |out: &[f32]| Answer { out, lse: &lse }.compare_out(&want, Dtype::F32, 1, &[]);
        // The limit of an element is 2 (2e-5 of the largest magnitude, and half a unit in the last place).
        assert_eq!(report(&want).limit, 4e-6);
        let near = report(&[1.0, 2.000_004]);
        assert!(near.within() && near.worst > 0.0 && near.nrmse > 1e-6, "{near}");
        assert!(!report(&[1.0, 2.000_1]).within());
        assert!(!report(&[1.0]).within() && !report(&[f32::NAN, 2.0]).within());
        // Errors of scores widen the limits.
        let off = Answer { out: &[1.0, 2.000_1], lse: &lse }.compare_out(&want, Dtype::F32, 1, &[1e-4]);
        assert!(off.within(), "{off}");
    }

    #[test]
    fn logsumexps_are_compared_one_by_one() {
        let report =
            |lse: &[f32], want: &[f32]| Answer { out: &[], lse }.compare_lse(want, Dtype::BF16, 1, &[]);
        let none = f32::NEG_INFINITY;
        assert!(report(&[1.0, none], &[1.000_015, none]).within());
        assert!(!report(&[1.0, 1.0], &[1.0, 1.000_03]).within());
        assert_eq!(report(&[1.0, 1.0], &[1.0, none]).worst_index, 1);
    }
}
