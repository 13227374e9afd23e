//! Seeded keys, values and queries to judge codecs by.

use super::rng::Rng;

/// Keys, values and queries of one head, `[rows, dim]` each.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AttentionSet {
    /// Keys.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
    /// Queries, each directed at one to three of the keys.
    pub q: Vec<f32>,
    /// Elements per row.
    pub dim: usize,
}

impl AttentionSet {
    /// Normal keys and values. A query is a multiple of the sum of one to three keys, such that their probabilities
    /// at the scale `1 / sqrt(dim)` add up to a value drawn from 0.65 to 0.95. Then `bias` times a normal vector is
    /// added to every key, which changes no probability of exact attention.
    #[must_use]
    pub fn normal([tokens, queries, dim]: [usize; 3], bias: f32, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut rows = |n: usize| -> Vec<f32> { (0..n * dim).map(|_| rng.normal()).collect() };
        let (mut k, v, offset) = (rows(tokens), rows(tokens), rows(1));
        let mut q = Vec::with_capacity(queries * dim);
        for _ in 0..queries {
            let mut direction = vec![0.0f32; dim];
            let targets: Vec<usize> = (0..=rng.below(3)).map(|_| rng.below(tokens)).collect();
            for target in &targets {
                direction.iter_mut().zip(&k[target * dim..]).for_each(|(d, k)| *d += k);
            }
            let wanted = 0.65 + 0.3 * rng.below(1 << 16) as f64 / f64::from(1 << 16);
            let scores: Vec<f64> =
                k.chunks_exact(dim).map(|k| product(&direction, k) / (dim as f64).sqrt()).collect();
            let (mut low, mut high) = (0.0, 8.0);
            for _ in 0..50 {
                let middle = (low + high) / 2.0;
                if weight(&scores, &targets, middle) < wanted { low = middle } else { high = middle }
            }
            q.extend(direction.iter().map(|d| d * low as f32));
        }
        for row in k.chunks_exact_mut(dim) {
            row.iter_mut().zip(&offset).for_each(|(k, offset)| *k += bias * offset);
        }
        Self { k, v, q, dim }
    }
}

fn product(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Probability of some of the scores, times a factor, each counted once.
fn weight(scores: &[f64], targets: &[usize], factor: f64) -> f64 {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let of = |score: &f64| (factor * (score - max)).exp();
    let all: f64 = scores.iter().map(of).sum();
    let own = targets.iter().enumerate().filter(|(n, target)| !targets[..*n].contains(target));
    own.map(|(_, target)| of(&scores[*target])).sum::<f64>() / all
}
