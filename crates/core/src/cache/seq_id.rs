//! Identifiers of sequences.

use std::fmt;

/// Identifies a sequence of one cache. No other cache accepts it, and this one refuses it once the sequence is removed:
/// identifiers are not used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeqId {
    /// Identity of the cache.
    pub(super) cache: u64,
    /// Number of sequences that the cache created before this one.
    pub(super) serial: u64,
    /// Index in the table.
    pub(super) index: u32,
}

/// `sequence N`, counted from 0 in the order of creation.
impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.serial)
    }
}
