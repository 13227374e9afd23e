//! The choice of the pair of codecs to recommend.

use super::measure::{Codecs, Measured};
use super::pairs::Pair;
use flashtile::Codec;
use flashtile::cache::KEPT_STEP;

/// Bits per element of a half-precision cache.
pub(super) const HALF_BITS: f64 = 16.0;

/// Factor by which centering must reduce the divergence to be worth storing a mean, and equalization to be worth storing factors.
const TRANSFORM_GAIN: f64 = 0.9;

/// Limits on the errors of a pair of codecs, which hold for each pair of tensors. Both are positive.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gate {
    /// Mean divergence of the probabilities, in nats.
    pub(super) kl: f64,
    /// Relative root mean square error of the output.
    pub(super) nrmse: f64,
}

/// A codec of keys and one of values, as indices in [`Codecs`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub(super) key: usize,
    pub(super) value: usize,
    /// Bits per element, keys and values together.
    pub(super) bits: f64,
    /// The largest divergence of any pair of tensors.
    pub(super) kl: f64,
    /// The largest error of any pair of tensors.
    pub(super) nrmse: f64,
}

impl Candidate {
    pub(super) fn meets(&self, gate: Gate) -> bool {
        self.kl <= gate.kl && self.nrmse <= gate.nrmse
    }

    /// The product of the ratios by which its errors exceed the gate: 1 if it meets the gate.
    fn excess(&self, gate: Gate) -> f64 {
        (self.kl / gate.kl).max(1.0) * (self.nrmse / gate.nrmse).max(1.0)
    }
}

/// The recommendation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    pub(super) best: Candidate,
    /// True if `best` meets the gate; otherwise `best` is the candidate nearest to it.
    pub(super) meets: bool,
    /// The cheaper candidate that is nearest to the gate.
    pub(super) cheaper: Option<Candidate>,
}

/// Bits per element of the keys and values of all pairs, with the first and last tokens of each sequence that `keep` has in 16 bits.
pub(super) fn bits(pairs: &[(&Pair<'_>, &Measured)], [k, v]: [Codec; 2], keep: [usize; 2]) -> f64 {
    let plain = k.dtype().is_some() && v.dtype().is_some();
    let most = if plain { 0 } else { kept_rows(keep) };
    let (mut bytes, mut elements) = (0.0, 0.0);
    for (pair, measured) in pairs {
        let dims = pair.problem.dims();
        let row_bytes = |k: Codec, v: Codec| k.row_bytes(dims.head_dim) + v.row_bytes(dims.value_dim);
        let rows = (measured.tokens * dims.kv_heads) as f64;
        let kept: usize = pair.problem.sequences().iter().map(|sequence| sequence.kv_len.min(most)).sum();
        bytes += rows * row_bytes(k, v) as f64;
        bytes += (kept * dims.kv_heads * row_bytes(k.kept(), v.kept())) as f64;
        elements += rows * (dims.head_dim + dims.value_dim) as f64;
    }
    8.0 * bytes / elements
}

/// Rows in 16 bits of a long sequence: the last ones have room for a step.
fn kept_rows([first, last]: [usize; 2]) -> usize {
    first.saturating_add(if last == 0 { 0 } else { last.saturating_add(KEPT_STEP) })
}

/// Every pair of codecs that stores all tensors in fewer bits than f16, and of which at least one quantizes. Errors
/// count only in pairs of tensors with queries.
pub(super) fn candidates(pairs: &[(&Pair<'_>, &Measured)], codecs: &Codecs) -> Vec<Candidate> {
    let judged: Vec<&Measured> =
        pairs.iter().map(|(_, measured)| *measured).filter(|m| m.all.queries > 0).collect();
    if judged.is_empty() {
        return Vec::new();
    }
    let mut candidates = Vec::new();
    for (key, k) in codecs.keys.iter().enumerate() {
        for (value, v) in codecs.values.iter().enumerate() {
            let plain = k.codec.dtype().is_some() && v.dtype().is_some();
            let stored = pairs.iter().all(|(_, m)| m.all.keys[key].is_ok() && m.all.values[value].is_ok());
            let bits = bits(pairs, [k.codec, *v], codecs.keep);
            // The scale of a short row may take more than its codes save.
            if plain || !stored || bits >= HALF_BITS {
                continue;
            }
            let worst = |of: &dyn Fn(&Measured) -> Option<f64>| {
                judged.iter().filter_map(|m| of(m)).fold(0.0, f64::max)
            };
            candidates.push(Candidate {
                key,
                value,
                bits,
                kl: worst(&|m| m.all.kl(key)),
                nrmse: worst(&|m| m.all.nrmse(key, value)),
            });
        }
    }
    candidates
}

/// The cheapest candidate that meets the gate; among equally cheap ones the one with the smallest divergence, then
/// error. If none does, the quantizing pair that is nearest to the gate.
pub(super) fn choose(candidates: &[Candidate], codecs: &Codecs, gate: Gate) -> Option<Choice> {
    let worth_it = |c: &&Candidate| {
        let codec = codecs.keys[c.key].codec;
        // Keep one of the plain, the centered and the equalized one: the simplest, unless a further one gains enough, or only that meets
        // the gate.
        let alike = candidates.iter().filter(|o| o.value == c.value && codecs.keys[o.key].codec == codec);
        let mut alike: Vec<&Candidate> = alike.collect();
        alike.sort_by_key(|o| (codecs.keys[o.key].equalized, codecs.keys[o.key].centered));
        let simplest = alike.into_iter().reduce(|best, next| {
            let gains = next.kl < TRANSFORM_GAIN * best.kl || (next.meets(gate) && !best.meets(gate));
            if gains { next } else { best }
        });
        simplest == Some(*c)
    };
    let left: Vec<&Candidate> = candidates.iter().filter(worth_it).collect();
    let by_cost = |a: &&&Candidate, b: &&&Candidate| {
        let keys = |c: &Candidate| [c.bits, c.kl, c.nrmse];
        keys(a)
            .iter()
            .zip(keys(b))
            .map(|(a, b)| a.total_cmp(&b))
            .find(|o| o.is_ne())
            .unwrap_or(std::cmp::Ordering::Equal)
    };
    let nearest = |a: &&&Candidate, b: &&&Candidate| {
        a.excess(gate).total_cmp(&b.excess(gate)).then_with(|| by_cost(a, b))
    };
    let quantizes = |c: &Candidate| {
        codecs.keys[c.key].codec.dtype().is_none() && codecs.values[c.value].dtype().is_none()
    };
    let meets = left.iter().filter(|c| c.meets(gate)).min_by(by_cost);
    let best = **meets.or_else(|| left.iter().filter(|c| quantizes(c)).min_by(nearest))?;
    let cheaper = left.iter().filter(|c| c.bits < best.bits && quantizes(c)).min_by(nearest);
    Some(Choice { best, meets: meets.is_some(), cheaper: meets.and(cheaper).map(|c| **c) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtile::quality::KeyCodec;

    fn codecs() -> Codecs {
        Codecs {
            keys: vec![
                KeyCodec::plain(Codec::F16),
                KeyCodec::plain(Codec::Int8),
                KeyCodec::centered(Codec::Int8),
                KeyCodec::plain(Codec::Tq4),
                KeyCodec::centered(Codec::Tq4),
                KeyCodec::equalized(Codec::Tq4),
            ],
            values: vec![Codec::F16, Codec::Tq5, Codec::Tq4],
            left_out: Vec::new(),
            power: Some(0.5),
            keep: [0; 2],
        }
    }

    fn candidate(key: usize, value: usize, [bits, kl, nrmse]: [f64; 3]) -> Candidate {
        Candidate { key, value, bits, kl, nrmse }
    }

    const GATE: Gate = Gate { kl: 1e-4, nrmse: 0.05 };

    #[test]
    fn the_cheapest_that_meets_the_gate_is_taken() {
        let all = [
            candidate(0, 1, [10.6, 0.0, 0.04]),
            candidate(1, 1, [6.6, 9e-5, 0.045]),
            candidate(2, 1, [6.6, 5e-5, 0.044]),
            candidate(1, 2, [6.1, 9e-5, 0.08]),
            candidate(2, 2, [6.1, 5e-5, 0.07]),
            candidate(4, 2, [4.1, 4e-3, 0.1]),
        ];
        let choice = choose(&all, &codecs(), GATE).unwrap();
        assert!(choice.meets && choice.best == all[2], "{choice:?}");
        assert_eq!(choice.cheaper, Some(all[4]));
        // The gain is too small for centering.
        let mut close = all;
        close[2].kl = 8.9e-5;
        assert_eq!(choose(&close, &codecs(), GATE).unwrap().best, all[1]);
        // Unless centering is needed to meet the gate.
        (close[1].kl, close[2].kl) = (1.05e-4, 9.9e-5);
        assert_eq!(choose(&close, &codecs(), GATE).unwrap().best, close[2]);
        // Plain keys are the last resort that meets the gate.
        let strict = Gate { kl: 1e-6, ..GATE };
        let choice = choose(&all, &codecs(), strict).unwrap();
        assert!(choice.meets && choice.best == all[0] && choice.cheaper == Some(all[2]), "{choice:?}");
    }

    #[test]
    fn equalized_keys_are_taken_where_they_gain() {
        let loose = Gate { kl: 1e-2, nrmse: 0.2 };
        let mut all = [
            candidate(3, 2, [4.1, 8e-3, 0.1]),
            candidate(4, 2, [4.1, 6e-3, 0.1]),
            candidate(5, 2, [4.1, 3e-3, 0.1]),
        ];
        let best = |all: &[Candidate], gate| choose(all, &codecs(), gate).unwrap().best;
        assert_eq!(best(&all, loose), all[2]);
        // Too little over centered keys, then over plain ones.
        all[2].kl = 5.8e-3;
        assert_eq!(best(&all, loose), all[1]);
        all[1].kl = 7.9e-3;
        all[2].kl = 7.8e-3;
        assert_eq!(best(&all, loose), all[0]);
        // Enough over plain keys, which centering alone does not gain.
        all[2].kl = 7.1e-3;
        assert_eq!(best(&all, loose), all[2]);
        // Only they meet the gate.
        (all[0].kl, all[1].kl, all[2].kl) = (1.05e-2, 1.03e-2, 0.99e-2);
        assert_eq!(best(&all, loose), all[2]);
    }

    #[test]
    fn where_none_meets_the_gate_it_is_the_nearest() {
        let all = [
            candidate(0, 2, [10.1, 0.0, 0.2]),
            candidate(2, 1, [6.6, 2e-4, 0.06]),
            candidate(4, 2, [4.1, 4e-3, 0.1]),
        ];
        let choice = choose(&all, &codecs(), GATE).unwrap();
        assert!(!choice.meets && choice.best == all[1] && choice.cheaper.is_none(), "{choice:?}");
        // NaN errors count as infinite.
        let endless = [candidate(2, 1, [6.6, f64::INFINITY, f64::INFINITY])];
        assert!(!choose(&endless, &codecs(), GATE).unwrap().meets);
        assert!(choose(&[], &codecs(), GATE).is_none());
    }
}
