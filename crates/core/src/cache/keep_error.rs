//! Why tokens cannot be kept in 16 bits beside their codes.

use crate::codec::Codec;
use std::fmt;

/// Why tokens cannot be kept in 16 bits as a description, or a step, asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeepError {
    /// The codes have no such rows, or keys and values are both elements.
    Codecs {
        /// Codec of the keys.
        k: Codec,
        /// Codec of the values.
        v: Codec,
    },
    /// `keep_first` is not 0 in a ring, which gives up its first tokens.
    FirstOfRing,
    /// `keep_slots` is not the number of sequences of a paged cache that keeps tokens in 16 bits, or not 0 in another cache.
    Slots {
        /// Its value.
        got: usize,
        /// The largest value.
        max: usize,
    },
    /// The memory of the cache has no pages of such tokens.
    Store {
        /// First tokens asked for.
        keep_first: usize,
        /// Last tokens asked for.
        keep_last: usize,
    },
    /// A step that adds too many tokens to a sequence to be computed at once asks for something that is not computed a few tokens at a time.
    Step {
        /// The input, the output or the kind of visibility asked for.
        what: &'static str,
        /// Tokens of the sequence in this step.
        tokens: usize,
        /// The most tokens that are computed at once: [`KEPT_STEP`](super::KEPT_STEP).
        max: usize,
    },
}

impl fmt::Display for KeepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Codecs { k, v } => write!(
                f,
                "keep_first and keep_last need keys or values of int8 or tq2 to tq6, and elements or such codes beside \
                 them: k is {k}, v is {v}"
            ),
            Self::FirstOfRing => {
                f.write_str("keep_first is for caches that keep their first tokens: a ring gives them up")
            }
            Self::Slots { got, max: 0 } => write!(
                f,
                "keep_slots is {got}, expected 0: it is for paged caches with keep_first or keep_last"
            ),
            Self::Slots { got, max } => write!(
                f,
                "keep_slots is {got}, expected 1 to {max}: sequences at a time, whose kept tokens lie in slots"
            ),
            Self::Store { keep_first, keep_last } => write!(
                f,
                "keep_first is {keep_first} and keep_last {keep_last}, expected 0: this memory keeps no tokens beside codes"
            ),
            Self::Step { what, tokens, max } => write!(
                f,
                "{what} in a step of {tokens} tokens over a cache with keep_last, expected at most {max} tokens: longer \
                 steps are computed {max} tokens at a time"
            ),
        }
    }
}

impl std::error::Error for KeepError {}
