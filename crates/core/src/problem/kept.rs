//! Tokens of cached sequences that are kept in 16 bits beside their codes.

use super::kept_error::KeptError;
use super::sequence::Sequence;
use std::ops::Range;

/// Tokens at the start and at the end of cached sequences whose rows are kept in 16 bits, beside the codes that every token has.
///
/// ```text
/// the row at position p reads key and value j   in 16 bits   if j < first_lens[s]  or  j > p - last and j >= last_from[s]
///                                               as codes     otherwise
/// ```
///
/// so that a row reads the last `last` tokens up to its own in 16 bits, whichever step computes it.
/// [`KvCache::kept_tables`](crate::cache::KvCache::kept_tables) has the lists of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[allow(clippy::exhaustive_structs)]
pub struct KeptTokens {
    /// Tokens up to a row's own that it reads in 16 bits.
    pub last: usize,
    /// `[sequences]`: how many of the first tokens of each sequence are kept, at most its length.
    pub first_lens: Vec<usize>,
    /// `[sequences]`: the first token of each sequence that is kept as one of the last, at most its length.
    pub last_from: Vec<usize>,
}

/// Where the keys of a problem lie that a row reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[allow(clippy::exhaustive_enums)]
pub enum KeyPart {
    /// All keys.
    #[default]
    All,
    /// Keys that are read as codes.
    Codes,
    /// Keys that are kept as one of the first tokens.
    First,
    /// Keys that are kept as one of the last tokens.
    Last,
}

impl KeyPart {
    /// The keys of the part among `seen`, the keys that the row of a sequence at position `p` sees, where the last `last` tokens are kept.
    pub(super) fn keys(self, last: usize, sequence: &Sequence, p: i64, seen: Range<usize>) -> Range<usize> {
        let after = p.saturating_sub(i64::try_from(last).unwrap_or(i64::MAX)).saturating_add(1);
        let first = sequence.first_len;
        let last = usize::try_from(after).unwrap_or(0).max(sequence.last_from).max(first);
        let keys = match self {
            Self::All => return seen,
            Self::First => seen.start..seen.end.min(first),
            Self::Codes => seen.start.max(first)..seen.end.min(last),
            Self::Last => seen.start.max(last)..seen.end,
        };
        keys.start..keys.end.max(keys.start)
    }
}

/// Checks the lists of kept tokens, and gives them to the sequences.
pub(super) fn resolve(kept: &KeptTokens, sequences: &mut [Sequence], cached: bool) -> Result<(), KeptError> {
    if !cached {
        return Err(KeptError::NotCached);
    }
    for (name, list) in [("first_lens", &kept.first_lens), ("last_from", &kept.last_from)] {
        if list.len() != sequences.len() {
            return Err(KeptError::Count { name, got: list.len(), sequences: sequences.len() });
        }
        let mut lens = list.iter().zip(&*sequences).enumerate();
        if let Some((index, (&got, s))) = lens.find(|(_, (got, s))| **got > s.kv_len) {
            return Err(KeptError::Len { name, index, got, kv_len: s.kv_len });
        }
    }
    for ((s, &first_len), &last_from) in sequences.iter_mut().zip(&kept.first_lens).zip(&kept.last_from) {
        (s.first_len, s.last_from) = (first_len, last_from);
    }
    Ok(())
}
