//! Why kept tokens do not fit a problem.

use std::fmt;

/// Why [`KeptTokens`](super::KeptTokens) do not fit the sequences of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeptError {
    /// Sequences are not cached.
    NotCached,
    /// A list does not have an entry for each sequence.
    Count {
        /// `first_lens` or `last_from`.
        name: &'static str,
        /// Entries given.
        got: usize,
        /// Number of sequences.
        sequences: usize,
    },
    /// An entry is above the length of its sequence.
    Len {
        /// `first_lens` or `last_from`.
        name: &'static str,
        /// Sequence.
        index: usize,
        /// The number given.
        got: usize,
        /// Tokens of the sequence.
        kv_len: usize,
    },
}

impl fmt::Display for KeptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotCached => f.write_str("kept tokens need cached sequences"),
            Self::Count { name, got, sequences } => {
                write!(f, "kept.{name} has {got} entries, expected {sequences}, one for each sequence")
            }
            Self::Len { name, index, got, kv_len } => {
                write!(
                    f,
                    "kept.{name}[{index}] is {got}, expected at most {kv_len}, the length of the sequence"
                )
            }
        }
    }
}

impl std::error::Error for KeptError {}
