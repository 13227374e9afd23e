//! Seeded data with the same values on every machine.

use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::RngCore;

/// A seeded generator. A seed gives the same values on every platform and in every version: the integers are
/// specified, and floats are made of them by operations that IEEE 754 rounds exactly.
#[derive(Debug, Clone)]
pub struct Rng {
    pcg: Pcg64Mcg,
    spare: Option<f64>,
}

impl Rng {
    /// The generator of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        // The generator is linear in its state: neighbouring seeds must not be neighbouring states.
        let state = u128::from(mix(seed)) << 64 | u128::from(mix(!seed));
        Self { pcg: Pcg64Mcg::new(state), spare: None }
    }

    /// The generator of a name.
    #[must_use]
    pub fn named(name: &str) -> Self {
        // FNV-1a.
        let hash = name
            .bytes()
            .fold(0xCBF2_9CE4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01B3));
        Self::new(hash)
    }

    /// 64 uniform bits.
    pub fn bits(&mut self) -> u64 {
        self.pcg.next_u64()
    }

    /// An integer in `0..n`; 0 if `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        let wide = u128::from(self.bits()) * n as u128;
        (wide >> 64) as usize
    }

    /// Puts the elements in random order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for n in (1..list.len()).rev() {
            list.swap(n, self.below(n + 1));
        }
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `[low, high)`.
    pub fn uniform(&mut self, low: f32, high: f32) -> f32 {
        (f64::from(low) + self.unit() * (f64::from(high) - f64::from(low))) as f32
    }

    /// Normal with mean 0 and variance 1 (Marsaglia's polar method).
    pub fn normal(&mut self) -> f32 {
        if let Some(spare) = self.spare.take() {
            return spare as f32;
        }
        loop {
            let (x, y) = (2.0 * self.unit() - 1.0, 2.0 * self.unit() - 1.0);
            let s = x * x + y * y;
            if s > 0.0 && s < 1.0 {
                let gain = (-2.0 * ln(s) / s).sqrt();
                self.spare = Some(y * gain);
                return (x * gain) as f32;
            }
        }
    }
}

/// SplitMix64's finalizer: every bit of `x` changes about half of the bits of the result.
const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// `1/29, 1/27, .. 1/3, 1`.
const ODD_RECIPROCALS: [f64; 15] = {
    let mut reciprocals = [0.0; 15];
    let mut n = 0;
    while n < 15 {
        reciprocals[n] = 1.0 / (29 - 2 * n) as f64;
        n += 1;
    }
    reciprocals
};

/// Natural logarithm of a positive normal number, to about 1e-13. Platform libraries differ in their last bits.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let exponent = (bits >> 52) as i64 - 1023;
    let mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    // ln(m) = 2 atanh((m - 1) / (m + 1)), m in [1, 2).
    let z = (mantissa - 1.0) / (mantissa + 1.0);
    let mut series = 0.0;
    for reciprocal in ODD_RECIPROCALS {
        series = series * z * z + reciprocal;
    }
    2.0 * z * series + exponent as f64 * std::f64::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithm_is_the_logarithm() {
        for x in [1e-300, 1e-17, 0.1, 0.5, 0.999_999, 1.0, 1.5, 1.999_999, 7.0] {
            assert!((ln(x) - x.ln()).abs() < 1e-12 * x.ln().abs().max(1.0), "{x}");
        }
    }

    #[test]
    fn values_are_fixed() {
        let mut rng = Rng::new(1);
        let got: Vec<u64> = (0..3).map(|_| rng.bits()).collect();
        assert_eq!(got, VALUES);
        let mut rng = Rng::named("a name");
        let got: Vec<u32> = (0..3).map(|_| rng.normal().to_bits()).collect();
        assert_eq!(got, NORMALS);
    }

    const VALUES: [u64; 3] =
        [5_008_804_015_799_018_935, 1_997_891_166_926_688_489, 10_299_103_704_554_651_859];
    const NORMALS: [u32; 3] = [3_204_542_502, 1_060_251_471, 1_062_288_176];

    #[test]
    fn normal_has_the_moments_of_the_normal_law() {
        let mut rng = Rng::new(3);
        let draws: Vec<f64> = (0..200_000).map(|_| f64::from(rng.normal())).collect();
        let moment = |k: i32| draws.iter().map(|x| x.powi(k)).sum::<f64>() / draws.len() as f64;
        assert!(moment(1).abs() < 0.01, "{}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.01, "{}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.1, "{}", moment(4));
    }

    #[test]
    fn integers_cover_their_range_evenly() {
        let mut rng = Rng::new(4);
        let mut counts = [0u32; 7];
        for _ in 0..70_000 {
            counts[rng.below(7)] += 1;
        }
        assert!(counts.iter().all(|&n| (9_500..10_500).contains(&n)), "{counts:?}");
    }
}
