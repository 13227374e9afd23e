//! Properties of keys: a constant component, channels with outliers.

use serde_json::{Value, json};

/// Ratio of the mean key's norm to the spread around it. From this ratio on, a mean that is not subtracted costs half a
/// bit or more: codes resolve a fixed fraction of the whole, whose energy is `1 + ratio^2` times the energy of the
/// spread.
pub(super) const BIAS: f64 = 1.0;

/// Energy of the channel that deviates most, relative to the energy of all channels at the median. From this ratio on,
/// the channel is an outlier: a rotation spreads errors evenly over all channels, so half of every channel's error
/// energy comes from that one channel, which costs half a bit.
pub(super) const OUTLIER: f64 = 1.0;

/// A ratio, and the head of the sequence in which it is largest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Worst {
    pub(super) ratio: f64,
    pub(super) head: usize,
}

impl Worst {
    fn max(self, other: Self) -> Self {
        if other.ratio > self.ratio { other } else { self }
    }
}

/// Properties of a head's keys in one sequence, or the worst of several, each value independently.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Diagnosis {
    /// `||mean key||` over the root mean square of `||key - mean||`; infinite if all keys are equal.
    pub(super) bias: Worst,
    /// Standard deviation of the channel that deviates most over that of the median channel; infinite if half of the
    /// channels are constant.
    pub(super) channel: Worst,
    /// Index of that channel.
    pub(super) index: usize,
    /// Elements of a key.
    head_dim: usize,
}

impl Diagnosis {
    /// Diagnoses the keys `[tokens, head_dim]` of a head in a sequence.
    pub(super) fn of(keys: &[f32], head_dim: usize, head: usize) -> Self {
        let tokens = (keys.len() / head_dim) as f64;
        let mut mean = vec![0.0f64; head_dim];
        for key in keys.chunks_exact(head_dim) {
            mean.iter_mut().zip(key).for_each(|(mean, x)| *mean += f64::from(*x) / tokens);
        }
        let mut variance = vec![0.0f64; head_dim];
        for key in keys.chunks_exact(head_dim) {
            let spread = key.iter().zip(&mean).map(|(x, mean)| (f64::from(*x) - mean).powi(2));
            variance.iter_mut().zip(spread).for_each(|(variance, x)| *variance += x / tokens);
        }
        let energy: f64 = mean.iter().map(|x| x * x).sum();
        let (index, max) = variance
            .iter()
            .enumerate()
            .fold((0, 0.0), |max, (at, x)| if *x > max.1 { (at, *x) } else { max });
        let bias = ratio(energy, variance.iter().sum());
        let mut sorted = variance;
        sorted.sort_by(f64::total_cmp);
        let median = sorted[(head_dim - 1) / 2];
        // Equal keys have no channel that deviates.
        let channel = if max == 0.0 { 1.0 } else { ratio(max, median) };
        Self { bias: Worst { ratio: bias, head }, channel: Worst { ratio: channel, head }, index, head_dim }
    }

    /// The worse of two, each value independently.
    pub(super) fn worse(self, other: Self) -> Self {
        let index = if other.channel.ratio > self.channel.ratio { other.index } else { self.index };
        Self { bias: self.bias.max(other.bias), channel: self.channel.max(other.channel), index, ..self }
    }

    /// Bits that a mean costs if it is not subtracted.
    pub(super) fn bits_lost(&self) -> f64 {
        (1.0 + self.bias.ratio * self.bias.ratio).log2() / 2.0
    }

    /// True if the energy of the channel that deviates most is at least the energy of all channels at the median, and
    /// there are other channels that it harms.
    fn outlier(&self) -> bool {
        let energy = self.channel.ratio * self.channel.ratio / self.head_dim as f64;
        self.head_dim > 1 && energy >= OUTLIER
    }

    /// Describes the mean, and advises whether to center keys.
    pub(super) fn bias_words(&self) -> String {
        let ratio = self.bias.ratio;
        if !ratio.is_finite() {
            return "the same for every token: center them".to_owned();
        }
        let (lost, advice) =
            (self.bits_lost(), if ratio >= BIAS { "center them" } else { "centering is optional" });
        format!("a mean {ratio:.2} times their spread (not subtracted, it costs {lost:.1} bits): {advice}")
    }

    /// Describes the channels, and says whether one is an outlier.
    pub(super) fn channel_words(&self) -> String {
        let ratio = self.channel.ratio;
        if self.head_dim == 1 {
            return "a single channel".to_owned();
        }
        if !ratio.is_finite() {
            return "half of the channels are constant, others are not".to_owned();
        }
        let words = format!("channels deviate up to {ratio:.1} times as much as the median one");
        if self.outlier() {
            format!(
                "{words}: an outlier, whose errors a rotation spreads over all; trust KL, not mean square errors"
            )
        } else {
            format!("{words}: no outlier")
        }
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "bias": finite(self.bias.ratio),
            "bias_head": self.bias.head,
            "bias_bits": finite(self.bits_lost()),
            "center": self.bias.ratio >= BIAS,
            "channel_ratio": finite(self.channel.ratio),
            "channel_head": self.channel.head,
            "channel": self.index,
            "outlier": self.outlier(),
        })
    }
}

/// Square root of a ratio of energies.
fn ratio(a: f64, b: f64) -> f64 {
    if a == 0.0 { 0.0 } else { (a / b).sqrt() }
}

/// A number for JSON, which has no infinities and no NaN.
pub(super) fn finite(x: f64) -> Option<f64> {
    x.is_finite().then_some(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bias_and_channels_are_those_put_in() {
        // Four channels around a mean of norm 5: the third deviates by 6, the others by 1.
        let keys: Vec<f32> =
            [1.0f32, -1.0].iter().flat_map(|s| [3.0 + s, s * 1.0, 4.0 + 6.0 * s, s * 1.0]).collect();
        let found = Diagnosis::of(&keys, 4, 7);
        assert!((found.bias.ratio - 5.0 / 39f64.sqrt()).abs() < 1e-9, "{found:?}");
        assert!((found.channel.ratio - 6.0).abs() < 1e-9 && found.index == 2 && found.channel.head == 7);
        assert!(found.outlier() && found.channel_words().contains("an outlier"));
        assert!(found.bias_words().contains("is optional"), "{}", found.bias_words());
        // Without spread, and with nothing at all.
        let same = Diagnosis::of(&[2.0; 12], 4, 1);
        assert!(same.bias.ratio.is_infinite() && same.bias_words().contains("the same for every token"));
        assert_eq!((same.channel.ratio, finite(same.bits_lost())), (1.0, None));
        let zeros = Diagnosis::of(&[0.0; 12], 4, 0);
        assert_eq!((zeros.bias.ratio, zeros.channel.ratio), (0.0, 1.0));
        // A single channel has no others.
        let one = Diagnosis::of(&[1.0, -1.0, 3.0], 1, 0);
        assert!(!one.outlier() && one.channel_words().contains("a single channel"), "{one:?}");
        assert_eq!(one.json()["outlier"], false);
        // The mean is 23 times the spread.
        let keys: Vec<f32> = [1.0f32, -1.0].iter().flat_map(|s| [23.0 + s, 23.0 - s]).collect();
        let biased = Diagnosis::of(&keys, 2, 3);
        assert!((biased.bias.ratio - 23.0).abs() < 1e-6 && (biased.bits_lost() - 4.525).abs() < 1e-2);
        assert!(biased.bias_words().contains("center them"), "{}", biased.bias_words());
        let worst = zeros.worse(biased).worse(found);
        assert_eq!((worst.bias.head, worst.channel.head, worst.index), (3, 7, 2));
    }
}
