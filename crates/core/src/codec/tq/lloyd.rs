//! Lloyd-Max codebooks of the normal distribution.
//!
//! The codebook of `2^b` values with the smallest mean square error for N(0, 1). Every value is the mean of its cell, the inputs that are
//! nearest to it:
//!
//! ```text
//! c[k] = E[x | e[k-1] < x < e[k]] = (phi(e[k-1]) - phi(e[k])) / (Phi(e[k]) - Phi(e[k-1])),   e[k] = (c[k] + c[k+1]) / 2
//! ```
//!
//! (Lloyd 1982, Max 1960). It is symmetric, and only the positive half is kept. A test recomputes it by Newton's
//! method.

/// Positive values of the codebooks of 2 to 6 bits, ascending.
const HALVES: [&[f64]; 5] = [&HALF2, &HALF3, &HALF4, &HALF5, &HALF6];

/// The positive half of the codebook of `bits`, 2 to 6.
pub(in crate::codec) const fn half(bits: usize) -> &'static [f64] {
    HALVES[bits - 2]
}

const HALF2: [f64; 2] = [0.45278003463649197, 1.5104176084990952];

const HALF3: [f64; 4] = [0.2450941789442217, 0.756005281205877, 1.3439092785050002, 2.151945704536986];

const HALF4: [f64; 8] = [
    0.12839502985114715,
    0.38804829949029185,
    0.6567591185324644,
    0.9423404564869632,
    1.2562311973471785,
    1.618046386021881,
    2.069017226531383,
    2.7325895709951578,
];

const HALF5: [f64; 16] = [
    0.06588965977082287,
    0.19805182966943197,
    0.3313783057601138,
    0.46669952297668377,
    0.6049336240094343,
    0.747135703687816,
    0.8945651173883679,
    1.0487833199231968,
    1.2118043806092593,
    1.3863403395866178,
    1.5762280786121785,
    1.7872332177032504,
    2.028728399395475,
    2.317739404194713,
    2.6911195773766488,
    3.260732493401374,
];

const HALF6: [f64; 32] = [
    0.03340950637009996,
    0.1002782893038855,
    0.16729690336899358,
    0.23456698533600293,
    0.3021928463716908,
    0.37028264525893834,
    0.4389496716586358,
    0.5083137808979917,
    0.5785030305188005,
    0.6496555810635353,
    0.7219219405696689,
    0.7954676558408549,
    0.8704765865441069,
    0.9471549447432784,
    1.0257363490773166,
    1.1064882395373041,
    1.1897201418608532,
    1.2757944864337256,
    1.3651410198101972,
    1.4582763746977798,
    1.5558312247051218,
    1.6585889004238221,
    1.7675418829911622,
    1.8839772405223958,
    2.009611042593644,
    2.1468102170558283,
    2.2989812097603313,
    2.4713047976182256,
    2.672273835255224,
    2.917406790722947,
    3.2404370550121557,
    3.7441012708952983,
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::f64::consts::{PI, SQRT_2};

    fn density(x: f64) -> f64 {
        (-x * x / 2.0).exp() / (2.0 * PI).sqrt()
    }

    /// The probability of a value above `x`, without cancellation.
    fn above(x: f64) -> f64 {
        if x.is_infinite() { 0.0 } else { libm::erfc(x / SQRT_2) / 2.0 }
    }

    /// Residual: values minus the means of their cells.
    fn residual(half: &[f64]) -> Vec<f64> {
        let edge = |k: usize| match k {
            0 => 0.0,
            _ if k == half.len() => f64::INFINITY,
            _ => (half[k - 1] + half[k]) / 2.0,
        };
        let mean = |k: usize| {
            let (low, high) = (edge(k), edge(k + 1));
            (density(low) - density(high)) / (above(low) - above(high))
        };
        (0..half.len()).map(|k| half[k] - mean(k)).collect()
    }

    /// Newton's method. A cell depends only on its neighbours, so that the system is tridiagonal.
    fn solve(n: usize) -> Vec<f64> {
        // The starting point is optimal for many values: quantiles of the density's cube root, which is a normal
        // density with sqrt(3) times the deviation, found by bisection.
        let quantile = |p: f64| {
            let (mut low, mut high) = (0.0, 40.0);
            for _ in 0..200 {
                let middle = (low + high) / 2.0;
                if above(middle / 3.0_f64.sqrt()) > 1.0 - p { low = middle } else { high = middle }
            }
            low
        };
        let mut c: Vec<f64> = (0..n).map(|k| quantile(0.5 + (k as f64 + 0.5) / (2 * n) as f64)).collect();
        for _ in 0..100 {
            let r = residual(&c);
            if r.iter().all(|x| x.abs() < 1e-15) {
                break;
            }
            let step = 1e-7;
            let mut rows = vec![vec![0.0; n + 1]; n];
            for j in 0..n {
                let moved = |by: f64| {
                    let mut c = c.clone();
                    c[j] += by;
                    residual(&c)
                };
                let (up, down) = (moved(step), moved(-step));
                for i in j.saturating_sub(1)..(j + 2).min(n) {
                    rows[i][j] = (up[i] - down[i]) / (2.0 * step);
                }
            }
            (0..n).for_each(|i| rows[i][n] = -r[i]);
            for i in 1..n {
                let factor = rows[i][i - 1] / rows[i - 1][i - 1];
                for j in 0..=n {
                    rows[i][j] -= factor * rows[i - 1][j];
                }
            }
            let mut change = vec![0.0; n];
            for i in (0..n).rev() {
                let known: f64 = if i + 1 < n { rows[i][i + 1] * change[i + 1] } else { 0.0 };
                change[i] = (rows[i][n] - known) / rows[i][i];
            }
            let mut length = 1.0;
            loop {
                let next: Vec<f64> = c.iter().zip(&change).map(|(c, d)| c + length * d).collect();
                if next[0] > 0.0 && next.is_sorted() {
                    c = next;
                    break;
                }
                length /= 2.0;
            }
        }
        c
    }

    #[test]
    fn codebooks_are_fixed_points_and_those_of_the_solver() {
        // Mean square errors of the optimal quantizers of N(0, 1), from their defining integrals.
        let errors = [1.17482e-1, 3.45478e-2, 9.50101e-3, 2.50467e-3, 6.44240e-4];
        for (bits, error) in (2..=6).zip(errors) {
            let kept = half(bits);
            assert_eq!(kept.len(), 1 << (bits - 1));
            let max = residual(kept).into_iter().fold(0.0, |m: f64, x| m.max(x.abs()));
            assert!(max <= 1e-14, "{bits} bits: {max:e}");
            let solved = solve(kept.len());
            let max = kept.iter().zip(&solved).fold(0.0, |m: f64, (a, b)| m.max((a - b).abs()));
            assert!(max <= 1e-13, "{bits} bits: {max:e} from the solver's");
            // At a fixed point, the error is 1 minus the mean square of the values.
            let edge = |k: usize| if k == 0 { 0.0 } else { (kept[k - 1] + kept[k]) / 2.0 };
            let weight =
                |k: usize| above(edge(k)) - if k + 1 < kept.len() { above(edge(k + 1)) } else { 0.0 };
            let got = 1.0 - 2.0 * (0..kept.len()).map(|k| weight(k) * kept[k] * kept[k]).sum::<f64>();
            assert!((got / error - 1.0).abs() < 1e-5, "{bits} bits: {got:e}, not {error:e}");
        }
    }
}
