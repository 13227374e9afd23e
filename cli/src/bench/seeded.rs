//! Seeded data of benchmarks.

/// A seeded generator: a seed gives the same values in every run.
#[derive(Debug, Clone)]
pub(super) struct Rng {
    uniform: fastrand::Rng,
    spare: Option<f64>,
}

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self { uniform: fastrand::Rng::with_seed(seed), spare: None }
    }

    /// An integer in `0..n`; 0 if `n` is 0.
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.uniform.usize(..n.max(1))
    }

    /// Puts the elements in random order.
    pub(super) fn shuffle<T>(&mut self, list: &mut [T]) {
        self.uniform.shuffle(list);
    }

    /// Uniform in `[-1, 1)`.
    fn symmetric(&mut self) -> f64 {
        2.0 * self.uniform.f64() - 1.0
    }

    /// Normal with mean 0 and variance 1 (Marsaglia's polar method).
    pub(super) fn normal(&mut self) -> f32 {
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

#[cfg(test)]
mod tests {
    use super::*;

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
