//! The results of one file.

use super::choice::{self, Candidate, Choice, Gate};
use super::measure::{Codecs, Measured, Sums};
use super::options::KvArgs;
use super::pairs::{Pair, Refusal};

/// Everything in the report.
pub(super) struct Report<'a> {
    pub(super) args: &'a KvArgs,
    pub(super) codecs: &'a Codecs,
    pub(super) gate: Gate,
    pub(super) pairs: Vec<(&'a Pair<'a>, &'a Measured)>,
    pub(super) refused: &'a [Refusal],
    pub(super) unread: &'a [String],
    /// Over all pairs with results; `None` if there are none.
    pub(super) all: Option<Sums>,
    pub(super) candidates: &'a [Candidate],
    pub(super) choice: Option<Choice>,
}

impl Report<'_> {
    /// Bits per element if keys and values are in one codec.
    pub(super) fn bits(&self, key: usize, value: usize) -> f64 {
        let codecs = [self.codecs.keys[key].codec, self.codecs.values[value]];
        choice::bits(&self.pairs, codecs, self.codecs.keep)
    }

    /// Index of the codec of values that is also the codec of the keys.
    pub(super) fn same(&self, key: usize) -> usize {
        let codec = self.codecs.keys[key].codec;
        self.codecs.values.iter().position(|value| *value == codec).unwrap_or(0)
    }

    /// The head of all pairs with the largest mean divergence: pair, head, divergence.
    pub(super) fn worst_head(&self, key: usize) -> Option<(&str, usize, f64)> {
        let heads = self.pairs.iter().filter_map(|(pair, measured)| {
            let (head, kl) = measured.worst_head(key)?;
            Some((pair.name.as_str(), head, kl))
        });
        heads.max_by(|a, b| a.2.total_cmp(&b.2))
    }
}
