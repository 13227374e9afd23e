//! Prefixes that cached sequences share.

use super::{ProblemDesc, ProblemError, Sequences};
use std::ops::Range;

/// Tokens at the start of neighbouring sequences that lie in the same pages, so that they are read once for all of them
/// (cascade attention). The results are the same without it, bit for bit.
///
/// [`BlockTables::shared_prefixes`](crate::BlockTables::shared_prefixes) finds those of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct SharedPrefix {
    /// Indices of the sequences.
    pub sequences: Range<usize>,
    /// Tokens, at most the `kv_lens` of each of them.
    pub len: usize,
}

/// Checks the prefixes of a description: outer ones before those inside them.
pub(super) fn check(desc: &ProblemDesc) -> Result<(), ProblemError> {
    let kv_lens = match &desc.sequences {
        Sequences::Cached { kv_lens, .. } => kv_lens,
        _ if desc.prefixes.is_empty() => return Ok(()),
        _ => return Err(ProblemError::PrefixNotCached),
    };
    // Those that the next one may lie in, the outermost first.
    let mut outer: Vec<&SharedPrefix> = Vec::new();
    let mut last = 0;
    for (index, prefix) in desc.prefixes.iter().enumerate() {
        let Range { start, end } = prefix.sequences;
        if start >= end || end > kv_lens.len() {
            let (got, sequences) = (prefix.sequences.clone(), kv_lens.len());
            return Err(ProblemError::PrefixSequences { index, got, sequences });
        }
        if let Some(at) = kv_lens[start..end].iter().position(|&kv_len| kv_len < prefix.len) {
            let (sequence, len) = (start + at, prefix.len);
            return Err(ProblemError::PrefixLen { index, sequence, len, kv_len: kv_lens[sequence] });
        }
        while outer.pop_if(|o| o.sequences.end <= start).is_some() {}
        let inside = outer.last().is_none_or(|o| o.sequences.end >= end && o.len <= prefix.len);
        if start < last || !inside {
            return Err(ProblemError::PrefixOrder { index });
        }
        last = start;
        outer.push(prefix);
    }
    Ok(())
}
