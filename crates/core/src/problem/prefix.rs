//! Prefixes that cached sequences share.

use std::ops::Range;

/// Tokens at the start of neighbouring sequences that lie in the same pages. They are read once for all of these
/// sequences (cascade attention), and the results are the same bits as without. Over quantized caches they may differ by
/// rounding: rows that share a prefix multiply decoded codes, others may multiply the codes themselves.
///
/// [`BlockTables::shared_prefixes`](crate::block_tables::BlockTables::shared_prefixes) finds the prefixes of a batch.
/// Plans use whole blocks of `CpuPlan::block_k` keys of a prefix (`CpuPlan::prefixes`).
///
/// ```
/// use flashtile::{CacheDesc, CacheLayout, CacheShape, Codec, Dtype, HeadShape, KvCache, ProblemDesc, SeqLens};
/// use flashtile::{SharedPrefix, TensorView, Visibility};
/// let shape = CacheShape { layers: 1, kv_heads: 2, head_dim: 8, value_dim: 8 };
/// let mut cache = KvCache::new(CacheDesc::new(CacheLayout::Paged { pages: 64, page_size: 16 }, shape, Codec::F32))?;
/// let prompt = cache.create()?;
/// let rows = vec![0.5f32; 600 * 2 * 8];
/// let kv = TensorView::packed(&rows, [600, 2, 8])?;
/// cache.append(&[(prompt, 600)], &[(kv, kv)])?;
/// let answers = [cache.fork(prompt)?, cache.fork(prompt)?];
/// cache.extend(&[(answers[0], 1), (answers[1], 1)])?; // each with a last page of its own
/// let tables = cache.tables(&answers)?;
/// let heads = HeadShape { q_heads: 4, kv_heads: 2, head_dim: 8, value_dim: 8 };
/// let mut desc = ProblemDesc::cached(heads, Dtype::F32, &[SeqLens::decode(601); 2]);
/// desc.visibility = Visibility::causal();
/// desc.prefixes = tables.shared_prefixes(1);
/// assert_eq!(desc.prefixes, [SharedPrefix { sequences: 0..2, len: 592 }]);
/// let plan = flashtile::Cpu::new().plan(&desc.validate()?, Default::default())?;
/// assert_eq!(plan.prefixes()[0].tokens, 0..512);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[allow(clippy::exhaustive_structs)]
pub struct SharedPrefix {
    /// Indices of the sequences.
    pub sequences: Range<usize>,
    /// Length in tokens, at most the `kv_lens` of each sequence.
    pub len: usize,
}
