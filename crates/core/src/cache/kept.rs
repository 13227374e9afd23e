//! Tokens that a cache keeps in 16 bits beside their codes: slots of the first tokens and of the last ones.
//!
//! Both are caches of their own, with the codec of kept rows, whose sequences have the names of the cache's. The slot of the first tokens
//! holds tokens `0..min(len, keep_first)`. The slot of the last tokens is a ring with the length of the sequence. Either may lack tokens,
//! which attention reads as codes then: after [`KvCache::truncate`] past the ring, [`KvCache::load`], or [`KvCache::restore`] of a
//! snapshot that lacks them.

use super::desc::CacheDesc;
use super::kept_tables::KeptTables;
use super::kv::{Kept, KvCache};
use super::page_store::PageStore;
use super::seq_id::SeqId;
use super::snapshot::Snapshot;
use crate::block_tables::BlockTables;
use crate::problem::KeptTokens;
use std::ops::Range;

impl<S: PageStore> Kept<S> {
    /// Empty slots for a cache with this description, in stores like the cache's own.
    pub(super) fn new(desc: &CacheDesc, store: &S) -> Result<Self, S::Error> {
        let cache = |desc: Option<CacheDesc>| -> Result<_, S::Error> {
            let cache = desc.map(|desc| KvCache::with_store(store.sibling(&desc)?));
            Ok(cache.transpose()?.map(Box::new))
        };
        let [first, last] = desc.kept_descs();
        Ok(Self {
            keep_first: desc.keep_first,
            keep_last: desc.keep_last,
            first: cache(first)?,
            last: cache(last)?,
        })
    }

    /// The caches of the slots.
    pub(super) fn caches(&self) -> impl Iterator<Item = &KvCache<S>> {
        [&self.first, &self.last].into_iter().flatten().map(|cache| &**cache)
    }

    /// [`Kept::caches`].
    pub(super) fn caches_mut(&mut self) -> impl Iterator<Item = &mut KvCache<S>> {
        [&mut self.first, &mut self.last].into_iter().flatten().map(|cache| &mut **cache)
    }

    /// Begins a sequence in both, or in none.
    fn begin(
        &mut self,
        first: impl FnOnce(&mut KvCache<S>) -> Result<SeqId, S::Error>,
        last: impl FnOnce(&mut KvCache<S>) -> Result<SeqId, S::Error>,
    ) -> Result<(), S::Error> {
        let begun = self.first.as_deref_mut().map(first).transpose()?;
        if let Some(Err(error)) = self.last.as_deref_mut().map(last) {
            for (cache, seq) in self.first.iter_mut().zip(begun) {
                cache.remove(seq)?;
            }
            return Err(error);
        }
        Ok(())
    }

    pub(super) fn create(&mut self) -> Result<(), S::Error> {
        self.begin(KvCache::create, KvCache::create)
    }

    pub(super) fn fork(&mut self, seq: SeqId) -> Result<(), S::Error> {
        self.begin(|first| first.fork(seq), |last| last.fork(seq))
    }

    /// Begins a sequence of `len` tokens, with the rows of the snapshots of a cache that kept as many tokens.
    pub(super) fn restore(
        &mut self,
        len: usize,
        [first, last]: [Option<&Snapshot>; 2],
    ) -> Result<(), S::Error> {
        let first_len = len.min(self.keep_first);
        let first = first.filter(|snapshot| snapshot.kept == (0..first_len));
        let last = last.filter(|snapshot| snapshot.len() == len);
        let begin = |snapshot: Option<&Snapshot>, cache: &mut KvCache<S>, len| match snapshot {
            Some(snapshot) if snapshot.check(cache.desc()).is_ok() => cache.restore(snapshot),
            _ => cache.create_without_rows(len),
        };
        self.begin(|cache| begin(first, cache, first_len), |cache| begin(last, cache, len))
    }

    /// Adds tokens to sequences, which have the lengths `lens` after it.
    pub(super) fn extend(&mut self, batch: &[(SeqId, usize)], lens: &[usize]) -> Result<(), S::Error> {
        let keep = self.keep_first;
        if let Some(first) = &mut self.first {
            let more = |(&(seq, tokens), &len): (&(SeqId, usize), &usize)| {
                (seq, len.min(keep) - (len - tokens).min(keep))
            };
            let batch: Vec<_> = batch.iter().zip(lens).map(more).collect();
            first.extend(&batch)?;
        }
        self.last.as_mut().map_or(Ok(()), |last| last.extend(batch))
    }

    /// Shortens a sequence. Slots that do not hold the last tokens any more hold none.
    pub(super) fn truncate(&mut self, seq: SeqId, len: usize) -> Result<(), S::Error> {
        let keep = self.keep_first;
        let first = self.first.as_deref_mut().map(|cache| (cache, len.min(keep)));
        let caches = first.into_iter().chain(self.last.as_deref_mut().map(|cache| (cache, len)));
        for (cache, len) in caches {
            if cache.first(seq)? <= len {
                cache.truncate(seq, len)?;
            } else {
                cache.drop_rows(seq, len)?;
            }
        }
        Ok(())
    }

    /// Drops the rows of a sequence, whose codes stand.
    pub(super) fn drop_rows(&mut self, seq: SeqId) -> Result<(), S::Error> {
        self.caches_mut().try_for_each(|cache| {
            let len = cache.len(seq)?;
            cache.drop_rows(seq, len)
        })
    }

    /// Drops the tokens before a position.
    pub(super) fn forget(&mut self, seq: SeqId, before: usize) -> Result<(), S::Error> {
        self.caches_mut().try_for_each(|cache| {
            let len = cache.len(seq)?;
            cache.forget(seq, before.min(len))
        })
    }

    /// Stores the rows of tokens that are in the slots.
    pub(super) fn write(
        &mut self,
        layer: usize,
        tokens: &[(SeqId, Range<usize>)],
        k: &S::Rows<'_>,
        v: &S::Rows<'_>,
    ) -> Result<(), S::Error> {
        if let Some(first) = &mut self.first {
            first.write_tokens(layer, tokens, k, v)?;
        }
        self.last.as_mut().map_or(Ok(()), |last| last.write_tokens(layer, tokens, k, v))
    }

    /// Which tokens of a batch with these lengths are kept.
    pub(super) fn tables(&self, batch: &[SeqId], lens: &[usize]) -> Result<KeptTables, S::Error> {
        let tables =
            |cache: &Option<Box<KvCache<S>>>| cache.as_ref().map(|cache| cache.tables(batch)).transpose();
        let (first, last) = (tables(&self.first)?, tables(&self.last)?);
        // Tokens of which the first were forgotten are read as codes.
        let whole = |tables: &BlockTables| {
            tables
                .first
                .iter()
                .zip(&tables.lens)
                .map(|(&first, &len)| if first == 0 { len } else { 0 })
                .collect()
        };
        let tokens = KeptTokens {
            last: self.keep_last,
            first_lens: first.as_ref().map_or_else(|| vec![0; batch.len()], whole),
            last_from: last.as_ref().map_or_else(|| lens.to_vec(), |tables| tables.first.clone()),
        };
        Ok(KeptTables { tokens, first, last })
    }
}
