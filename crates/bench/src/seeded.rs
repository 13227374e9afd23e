//! Seeded data of benchmarks.

use flashtile_core::codec::convert;
use flashtile_core::dtype::Dtype;

/// A seeded generator: a seed gives the same values in every run.
#[derive(Debug, Clone)]
pub struct Rng {
    uniform: fastrand::Rng,
    spare: Option<f64>,
}

impl Rng {
    /// A generator of its own for each seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { uniform: fastrand::Rng::with_seed(seed), spare: None }
    }

    /// An integer in `0..n`; 0 if `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        self.uniform.usize(..n.max(1))
    }

    /// Puts the elements in random order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        self.uniform.shuffle(list);
    }

    /// Uniform in `[-1, 1)`.
    fn symmetric(&mut self) -> f64 {
        2.0 * self.uniform.f64() - 1.0
    }

    /// Normal with mean 0 and variance 1 (Marsaglia's polar method).
    pub fn normal(&mut self) -> f32 {
        if let Some(spare) = self.spare.take() {
            return spare as f32;
        }
        loop {
            let (x, y) = (self.symmetric(), self.symmetric());
            let s = x * x + y * y;
            if s > 0.0 && s < 1.0 {
                let gain = (-2.0 * s.ln() / s).sqrt();
                self.spare = Some(y * gain);
                return (x * gain) as f32;
            }
        }
    }
}

/// Fills whole elements with normal values.
pub fn fill_normal(rng: &mut Rng, dtype: Dtype, elements: &mut [u8]) {
    let mut values = [0.0f32; 64];
    for into in elements.chunks_mut(values.len() * dtype.bytes()) {
        let values = &mut values[..into.len() / dtype.bytes()];
        values.iter_mut().for_each(|x| *x = rng.normal());
        convert::from_f32(values, dtype, into);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_the_values_of_the_generator() {
        for dtype in Dtype::ALL {
            let (count, size) = (150, dtype.bytes());
            let mut bytes = vec![0; count * size];
            fill_normal(&mut Rng::new(7), dtype, &mut bytes);
            let (mut rng, mut got) = (Rng::new(7), vec![0.0; count]);
            let want: Vec<u8> = (0..count)
                .flat_map(|_| {
                    let mut one = vec![0; size];
                    convert::from_f32(&[rng.normal()], dtype, &mut one);
                    one
                })
                .collect();
            convert::to_f32(dtype, &bytes, &mut got);
            assert_eq!(bytes, want, "{dtype}");
            assert!(got.iter().any(|x| *x != got[0]), "{dtype}");
        }
    }

    #[test]
    fn normal_values_have_mean_0_and_variance_1() {
        let mut rng = Rng::new(3);
        let draws: Vec<f64> = (0..100_000).map(|_| f64::from(rng.normal())).collect();
        let moment = |k: i32| draws.iter().map(|x| x.powi(k)).sum::<f64>() / draws.len() as f64;
        assert!(moment(1).abs() < 0.02 && (moment(2) - 1.0).abs() < 0.02, "{} {}", moment(1), moment(2));
        assert!((moment(4) - 3.0).abs() < 0.1, "{}", moment(4));
        assert_ne!(Rng::new(4).normal(), Rng::new(5).normal());
    }

    #[test]
    fn a_shuffled_list_has_the_same_elements() {
        let mut list: Vec<u32> = (0..100).collect();
        Rng::new(1).shuffle(&mut list);
        assert_ne!(list, (0..100).collect::<Vec<_>>());
        list.sort_unstable();
        assert_eq!(list, (0..100).collect::<Vec<_>>());
    }
}
