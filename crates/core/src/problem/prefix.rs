//! Prefixes that cached sequences share.

use super::{ProblemDesc, ProblemError, Sequences};
use std::ops::Range;

/// Tokens at the start of neighbouring sequences that lie in the same pages, so that they are read once for all of them
/// (cascade attention). The results are the same without it, bit for bit.
///
/// [`BlockTables::shared_prefixes`](crate::block_tables::BlockTables::shared_prefixes) finds those of a batch. Plans use the whole blocks of
/// [`CpuPlan::block_k`](flashtile_cpu::plan::CpuPlan::block_k) keys of them ([`CpuPlan::prefixes`](flashtile_cpu::plan::CpuPlan::prefixes)).
///
/// ```
/// use flashtile::{CacheDesc, CacheLayout, Codec, Dtype, KvCache, ProblemDesc, SharedPrefix, TensorView, Visibility};
/// let mut cache = KvCache::new(CacheDesc::new(CacheLayout::Paged { pages: 64, page: 16 }, [1, 2, 8], Codec::F32))?;
/// let prompt = cache.create()?;
/// let rows = vec![0.5f32; 600 * 2 * 8];
/// let kv = TensorView::packed(&rows, [600, 2, 8])?;
/// cache.append(&[(prompt, 600)], &[(kv, kv)])?;
/// let answers = [cache.fork(prompt)?, cache.fork(prompt)?];
/// cache.extend(&[(answers[0], 1), (answers[1], 1)])?; // each with a last page of its own
/// let tables = cache.tables(&answers)?;
/// let mut desc = ProblemDesc::cached([4, 2], [8, 8], Dtype::F32, &[(1, 601), (1, 601)]);
/// desc.visibility = Visibility::causal();
/// desc.prefixes = tables.shared_prefixes(1);
/// assert_eq!(desc.prefixes, [SharedPrefix { sequences: 0..2, len: 592 }]);
/// let plan = flashtile::Cpu::new().plan(&desc.validate()?, Default::default())?;
/// assert_eq!(plan.prefixes()[0].tokens, 0..512);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
