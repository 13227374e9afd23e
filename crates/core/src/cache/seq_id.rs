//! Names of sequences.

use std::fmt;

/// A sequence of a cache. It names that sequence for ever: no other cache accepts it, and none once the sequence is
/// removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeqId {
    /// Identity of the cache.
    pub(super) cache: u64,
    /// Number of sequences that the cache made before this one.
    pub(super) serial: u64,
    /// Place in the table.
    pub(super) index: u32,
}

/// `sequence N`, counted from 0 in the order of creation.
impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.serial)
    }
}
