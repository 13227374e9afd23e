//! Which page holds which tokens: the bookkeeping of a cache, without its bytes.
//!
//! A sequence is a list of pages, one for each block of `page` positions with a kept token. In contiguous and ring
//! caches it has one page, its slot, from creation on: token `j` of a ring is row `j % page_size` of that page, so that a
//! token overwrites the one a capacity earlier.
//!
//! Every operation first determines whether it can be done, without visible changes, and then does it in steps that
//! cannot fail. Bytes that have to move are listed as [`PageCopy`]s.

use super::desc::CacheLayout;
use super::error::CacheError;
use super::seq_id::SeqId;
use crate::block_tables::{BlockTables, NO_PAGE};
use crate::limits::{MAX_LEN, MAX_SEQUENCES};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Consecutive tokens in consecutive rows of a page.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// The page.
    pub page: usize,
    /// Its first row.
    pub row: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Tokens of the range before this run.
    pub at: usize,
}

impl Run {
    /// The rows, where the first token of the range is row `at` of a tensor.
    pub(super) const fn from(self, at: usize) -> RowRun {
        RowRun { page: self.page, row: self.row, tokens: self.tokens, at: at + self.at }
    }
}

/// Consecutive rows of a page, and the rows of a tensor or of a list of bytes that belong to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct RowRun {
    /// The page.
    pub page: usize,
    /// Its first row.
    pub row: usize,
    /// Number of rows.
    pub tokens: usize,
    /// First row of the tensor or of the bytes.
    pub at: usize,
}

/// Rows to copy to the same rows of another page, in every layer, before anything is written.
#[derive(Debug, Clone)]
pub struct PageCopy {
    /// The page to read.
    pub from: usize,
    /// The page to write.
    pub to: usize,
    /// The rows to copy.
    pub rows: Range<usize>,
}

/// Counts of a memory report.
#[derive(Debug, Clone, Copy)]
pub struct Usage {
    pub(crate) free: usize,
    pub(crate) shared: usize,
    pub(crate) sequences: usize,
    pub(crate) tokens: usize,
}

/// Serial of an entry without a sequence.
const VACANT: u64 = u64::MAX;

/// An entry of the table.
#[derive(Debug)]
struct Entry {
    /// Serial of the sequence.
    serial: u64,
    /// The last batch that listed the sequence.
    stamp: u64,
    /// First kept token.
    first: usize,
    /// Length, including tokens that are no longer kept.
    len: usize,
    /// Pages of the blocks with a kept token, in order, or the page of the slot.
    blocks: Vec<u32>,
}

#[derive(Debug, Clone)]
struct Page {
    /// Number of sequences that hold the page.
    holders: u32,
    /// Holders in the batch `stamp` that will have replaced the page by a copy of their own.
    leaving: u32,
    stamp: u64,
}

#[derive(Debug)]
struct Pages {
    pages: Vec<Page>,
    /// Free pages, the next one last. The most recently used comes first, so that untouched memory stays untouched as
    /// long as possible.
    free: Vec<u32>,
}

impl Pages {
    /// Takes a free page. The caller has checked that there is one.
    fn take(&mut self) -> u32 {
        let Some(page) = self.free.pop() else {
            unreachable!("free pages are counted before they are taken")
        };
        self.pages[page as usize].holders = 1;
        page
    }

    fn release(&mut self, page: u32) {
        let holders = &mut self.pages[page as usize].holders;
        *holders -= 1;
        if *holders == 0 {
            self.free.push(page);
        }
    }
}

/// The sequences of a cache and their pages.
#[derive(Debug)]
pub struct SequenceTable {
    cache: u64,
    layout: CacheLayout,
    /// Tokens per page.
    page: usize,
    entries: Vec<Entry>,
    /// Entries without a sequence.
    vacant: Vec<u32>,
    pages: Pages,
    /// Serial of the next sequence.
    serial: u64,
    /// The last batch.
    stamp: u64,
}

/// Reserves room for `n` more elements.
pub(super) fn reserve<T>(list: &mut Vec<T>, n: usize) -> Result<(), CacheError> {
    list.try_reserve(n).map_err(|_| CacheError::Memory { bytes: n.saturating_mul(size_of::<T>()) })
}

/// Reserves room for `n` elements in total.
fn reserve_to<T>(list: &mut Vec<T>, n: usize) -> Result<(), CacheError> {
    let more = n.saturating_sub(list.len());
    reserve(list, more)
}

impl SequenceTable {
    /// An empty table over a validated layout.
    pub fn new(layout: CacheLayout) -> Result<Self, CacheError> {
        static CACHES: AtomicU64 = AtomicU64::new(0);
        let (count, page) = layout.pages();
        let (mut pages, mut free) = (Vec::new(), Vec::new());
        reserve(&mut pages, count)?;
        reserve(&mut free, count)?;
        pages.resize(count, Page { holders: 0, leaving: 0, stamp: 0 });
        free.extend((0..count as u32).rev());
        Ok(Self {
            cache: CACHES.fetch_add(1, Ordering::Relaxed),
            layout,
            page,
            entries: Vec::new(),
            vacant: Vec::new(),
            pages: Pages { pages, free },
            serial: 0,
            stamp: 0,
        })
    }

    /// Takes over the identity of another table.
    pub(super) const fn name_sequences_as(&mut self, other: &Self) {
        self.cache = other.cache;
    }

    pub(super) const fn next_serial(&self) -> u64 {
        self.serial
    }

    pub(super) const fn skip_to_serial(&mut self, serial: u64) {
        debug_assert!(serial >= self.serial);
        self.serial = serial;
    }

    const fn paged(&self) -> bool {
        matches!(self.layout, CacheLayout::Paged { .. })
    }

    /// The largest length of a sequence.
    const fn capacity(&self) -> usize {
        match self.layout {
            CacheLayout::Contiguous { capacity, .. } => capacity,
            CacheLayout::Ring { .. } | CacheLayout::Paged { .. } => MAX_LEN,
        }
    }

    fn check_len(&self, len: usize) -> Result<(), CacheError> {
        let capacity = self.capacity();
        if len > capacity { Err(CacheError::Capacity { len, capacity }) } else { Ok(()) }
    }

    /// First kept token of a sequence of `len` tokens that keeps none before `first`.
    fn kept_from(&self, first: usize, len: usize) -> usize {
        match self.layout {
            CacheLayout::Ring { capacity, .. } => first.max(len.saturating_sub(capacity)),
            CacheLayout::Contiguous { .. } | CacheLayout::Paged { .. } => first,
        }
    }

    /// The block of a sequence's first page.
    const fn front(&self, first: usize) -> usize {
        if self.paged() { first / self.page } else { 0 }
    }

    /// Number of pages of a sequence that keeps `first..len`.
    const fn held(&self, first: usize, len: usize) -> usize {
        match self.layout {
            CacheLayout::Paged { .. } if first == len => 0,
            CacheLayout::Paged { .. } => len.div_ceil(self.page) - first / self.page,
            CacheLayout::Contiguous { .. } | CacheLayout::Ring { .. } => 1,
        }
    }

    /// Index of a sequence's entry.
    fn find(&self, seq: SeqId) -> Result<usize, CacheError> {
        if seq.cache != self.cache {
            return Err(CacheError::ForeignSequence { seq });
        }
        let index = seq.index as usize;
        match self.entries.get(index) {
            Some(entry) if entry.serial == seq.serial => Ok(index),
            _ => Err(CacheError::RemovedSequence { seq }),
        }
    }

    fn entry(&self, seq: SeqId) -> Result<&Entry, CacheError> {
        Ok(&self.entries[self.find(seq)?])
    }

    /// Index of the entry of a sequence that the batch `self.stamp` does not list yet.
    fn enlist(&mut self, seq: SeqId) -> Result<usize, CacheError> {
        let index = self.find(seq)?;
        let stamp = std::mem::replace(&mut self.entries[index].stamp, self.stamp);
        if stamp == self.stamp { Err(CacheError::DuplicateSequence { seq }) } else { Ok(index) }
    }

    /// The range of kept tokens.
    pub fn kept(&self, seq: SeqId) -> Result<Range<usize>, CacheError> {
        let entry = self.entry(seq)?;
        Ok(entry.first..entry.len)
    }

    /// Where kept tokens of a sequence lie, in order.
    pub fn runs(
        &self,
        seq: SeqId,
        tokens: Range<usize>,
    ) -> Result<impl Iterator<Item = Run> + '_, CacheError> {
        Ok(self.runs_of(self.entry(seq)?, tokens))
    }

    fn runs_of<'a>(&'a self, entry: &'a Entry, tokens: Range<usize>) -> impl Iterator<Item = Run> + 'a {
        // A ring has a row for every position.
        let start = if self.layout.is_ring() { 0 } else { entry.first };
        debug_assert!(tokens.is_empty() || start <= tokens.start && tokens.end <= entry.len);
        let front = self.front(entry.first);
        let mut next = tokens.start;
        std::iter::from_fn(move || {
            if next >= tokens.end {
                return None;
            }
            let (block, row) = (next / self.page, next % self.page);
            let page = entry.blocks[if self.paged() { block - front } else { 0 }];
            let at = next - tokens.start;
            let count = (self.page - row).min(tokens.end - next);
            next += count;
            Some(Run { page: page as usize, row, tokens: count, at })
        })
    }

    /// Adds an entry for a sequence that keeps `first..len`, with its pages.
    fn place(&mut self, first: usize, len: usize) -> Result<SeqId, CacheError> {
        let needed = self.held(first, len);
        let free = self.pages.free.len();
        if needed > free {
            return Err(match self.layout {
                CacheLayout::Paged { .. } => CacheError::OutOfPages { needed, free },
                CacheLayout::Contiguous { slots, .. } | CacheLayout::Ring { slots, .. } => {
                    CacheError::OutOfSlots { slots }
                }
            });
        }
        let seq = self.open(needed)?;
        let entry = &mut self.entries[seq.index as usize];
        (entry.first, entry.len) = (first, first);
        self.resize(seq.index as usize, first, len);
        Ok(seq)
    }

    /// Adds an entry for an empty sequence, with room for `blocks` pages in its list.
    fn open(&mut self, blocks: usize) -> Result<SeqId, CacheError> {
        if self.entries.len() - self.vacant.len() >= MAX_SEQUENCES {
            return Err(CacheError::OutOfSlots { slots: MAX_SEQUENCES });
        }
        if self.vacant.is_empty() {
            reserve(&mut self.entries, 1)?;
            // New entries become vacant here, which needs no allocation.
            reserve(&mut self.vacant, self.entries.len() + 1)?;
            self.vacant.push(self.entries.len() as u32);
            self.entries.push(Entry { serial: VACANT, stamp: 0, first: 0, len: 0, blocks: Vec::new() });
        }
        let Some(&index) = self.vacant.last() else { unreachable!("an entry was made") };
        let entry = &mut self.entries[index as usize];
        reserve(&mut entry.blocks, blocks)?;
        (entry.serial, entry.first, entry.len) = (self.serial, 0, 0);
        self.vacant.pop();
        self.serial += 1;
        Ok(SeqId { cache: self.cache, serial: entry.serial, index })
    }

    /// Changes which tokens are kept and which pages are held. There are enough free pages, and the list has room for
    /// them.
    fn resize(&mut self, index: usize, first: usize, len: usize) {
        let (front, held) = (self.front(first), self.held(first, len));
        let dropped = front - self.front(self.entries[index].first);
        let Self { entries, pages, .. } = self;
        let entry = &mut entries[index];
        for page in entry.blocks.drain(..dropped.min(entry.blocks.len())) {
            pages.release(page);
        }
        while entry.blocks.len() > held {
            entry.blocks.pop().into_iter().for_each(|page| pages.release(page));
        }
        while entry.blocks.len() < held {
            entry.blocks.push(pages.take());
        }
        (entry.first, entry.len) = (first, len);
    }

    /// Creates an empty sequence.
    pub fn create(&mut self) -> Result<SeqId, CacheError> {
        self.place(0, 0)
    }

    /// Creates a sequence of `kept.end` tokens that keeps `kept`, or as many of them as the layout can.
    pub fn restore(&mut self, kept: Range<usize>) -> Result<SeqId, CacheError> {
        self.check_len(kept.end)?;
        self.place(self.kept_from(kept.start, kept.end), kept.end)
    }

    /// Ends a sequence.
    pub fn remove(&mut self, seq: SeqId) -> Result<(), CacheError> {
        let index = self.find(seq)?;
        let Self { entries, pages, vacant, .. } = self;
        let entry = &mut entries[index];
        for page in entry.blocks.drain(..) {
            pages.release(page);
        }
        entry.serial = VACANT;
        vacant.push(seq.index);
        Ok(())
    }

    /// Creates a sequence with the same tokens. Pages are shared; slots are copied.
    pub fn fork(&mut self, seq: SeqId, copies: &mut Vec<PageCopy>) -> Result<SeqId, CacheError> {
        let index = self.find(seq)?;
        let (first, len) = (self.entries[index].first, self.entries[index].len);
        if !self.paged() {
            reserve(copies, 2)?;
            let fork = self.place(first, len)?;
            let to = self.entries[fork.index as usize].blocks[0] as usize;
            let copy = |run: Run| PageCopy { from: run.page, to, rows: run.row..run.row + run.tokens };
            copies.extend(self.runs(seq, first..len)?.map(copy));
            return Ok(fork);
        }
        let fork = self.open(self.entries[index].blocks.len())?;
        for block in 0..self.entries[index].blocks.len() {
            let page = self.entries[index].blocks[block];
            self.pages.pages[page as usize].holders += 1;
            self.entries[fork.index as usize].blocks.push(page);
        }
        let entry = &mut self.entries[fork.index as usize];
        (entry.first, entry.len) = (first, len);
        Ok(fork)
    }

    /// Lengthens every sequence of a batch and gives it exclusive pages for its new tokens.
    pub fn extend(&mut self, batch: &[(SeqId, usize)], copies: &mut Vec<PageCopy>) -> Result<(), CacheError> {
        self.stamp += 1;
        let (mut new, mut copied) = (0usize, 0usize);
        for &(seq, tokens) in batch {
            let index = self.enlist(seq)?;
            let entry = &self.entries[index];
            let (old, len) = (entry.len, entry.len.saturating_add(tokens));
            self.check_len(len)?;
            let blocks = self.held(self.kept_from(entry.first, len), len) - entry.blocks.len();
            // A number of pages above the free ones is refused below.
            if blocks <= self.pages.free.len() {
                reserve(&mut self.entries[index].blocks, blocks)?;
            }
            new = new.saturating_add(blocks);
            copied += self.count_copies(index, old..len);
        }
        self.check_pages(new, copied, copies)?;
        for &(seq, tokens) in batch {
            let index = seq.index as usize;
            let entry = &self.entries[index];
            let (old, len) = (entry.len, entry.len + tokens);
            let first = self.kept_from(entry.first, len);
            self.own(index, old..len, copies);
            self.resize(index, first, len);
        }
        Ok(())
    }

    /// Gives every sequence of a batch exclusive pages for its last tokens.
    pub fn prepare_write(
        &mut self,
        batch: &[(SeqId, usize)],
        copies: &mut Vec<PageCopy>,
    ) -> Result<(), CacheError> {
        self.stamp += 1;
        let mut copied = 0;
        for &(seq, tokens) in batch {
            let index = self.enlist(seq)?;
            let tail = self.tail(seq, tokens)?;
            copied += self.count_copies(index, tail);
        }
        self.check_pages(0, copied, copies)?;
        for &(seq, tokens) in batch {
            let tail = self.tail(seq, tokens)?;
            self.own(seq.index as usize, tail, copies);
        }
        Ok(())
    }

    /// The kept ones of the last `tokens` tokens.
    fn tail(&self, seq: SeqId, tokens: usize) -> Result<Range<usize>, CacheError> {
        let &Entry { first, len, .. } = self.entry(seq)?;
        let Some(start) = len.checked_sub(tokens) else {
            return Err(CacheError::Tokens { seq, got: tokens, len });
        };
        Ok(start.max(first)..len)
    }

    /// Checks that a batch can have its pages and copies.
    fn check_pages(&self, new: usize, copied: usize, copies: &mut Vec<PageCopy>) -> Result<(), CacheError> {
        let (needed, free) = (new.saturating_add(copied), self.pages.free.len());
        if needed > free {
            return Err(CacheError::OutOfPages { needed, free });
        }
        reserve(copies, copied)
    }

    /// The pages of a sequence with tokens of a range, which starts at a kept token and may end past the last token.
    fn blocks(&self, index: usize, tokens: &Range<usize>) -> Range<usize> {
        // A slot has one holder.
        if !self.paged() || tokens.is_empty() {
            return 0..0;
        }
        let entry = &self.entries[index];
        let front = self.front(entry.first);
        let end = (tokens.end.div_ceil(self.page) - front).min(entry.blocks.len());
        (tokens.start / self.page - front).min(end)..end
    }

    /// Number of pages that [`SequenceTable::own`] will take if it is called for the same sequences in the same
    /// order. The last holder of a page keeps it.
    fn count_copies(&mut self, index: usize, tokens: Range<usize>) -> usize {
        let blocks = self.blocks(index, &tokens);
        let mut copies = 0;
        for &page in &self.entries[index].blocks[blocks] {
            let page = &mut self.pages.pages[page as usize];
            if page.stamp != self.stamp {
                (page.stamp, page.leaving) = (self.stamp, 0);
            }
            if page.holders - page.leaving > 1 {
                page.leaving += 1;
                copies += 1;
            }
        }
        copies
    }

    /// Replaces the shared pages of a range of tokens by copies of the kept tokens in them.
    fn own(&mut self, index: usize, tokens: Range<usize>, copies: &mut Vec<PageCopy>) {
        let blocks = self.blocks(index, &tokens);
        let front = self.front(self.entries[index].first);
        let Self { entries, pages, page: size, .. } = self;
        let entry = &mut entries[index];
        for block in blocks {
            let from = entry.blocks[block];
            if pages.pages[from as usize].holders == 1 {
                continue;
            }
            let to = pages.take();
            pages.release(from);
            entry.blocks[block] = to;
            let start = (front + block) * *size;
            let rows = entry.first.max(start) - start..(entry.len - start).min(*size);
            copies.push(PageCopy { from: from as usize, to: to as usize, rows });
        }
    }

    /// Shortens a sequence.
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> Result<(), CacheError> {
        let index = self.find(seq)?;
        let kept = self.kept(seq)?;
        if len < kept.start || len > kept.end {
            return Err(CacheError::Position { seq, got: len, min: kept.start, max: kept.end });
        }
        self.resize(index, kept.start, len);
        Ok(())
    }

    /// Changes the length of a sequence, none of whose tokens are kept any more.
    pub fn clear(&mut self, seq: SeqId, len: usize) -> Result<(), CacheError> {
        let index = self.find(seq)?;
        self.check_len(len)?;
        self.resize(index, len, len);
        Ok(())
    }

    /// The tokens of a range that a slot or pages would hold if the sequence ended with them.
    pub fn kept_of(&self, seq: SeqId, tokens: &Range<usize>) -> Result<Range<usize>, CacheError> {
        let entry = self.entry(seq)?;
        let end = tokens.end.min(entry.len);
        let start = match self.layout {
            // Tokens before the last ones are of a step whose later tokens are not stored yet: the ring still has room for them.
            CacheLayout::Ring { capacity, .. } if end < entry.len => {
                tokens.start.max(end.saturating_sub(capacity))
            }
            CacheLayout::Ring { .. } => tokens.start.max(entry.first),
            CacheLayout::Contiguous { .. } | CacheLayout::Paged { .. } => tokens.start.max(entry.first),
        };
        Ok(start..end.max(start))
    }

    /// Drops the tokens before a position.
    pub fn forget(&mut self, seq: SeqId, before: usize) -> Result<(), CacheError> {
        let index = self.find(seq)?;
        let kept = self.kept(seq)?;
        if before > kept.end {
            return Err(CacheError::Position { seq, got: before, min: 0, max: kept.end });
        }
        self.resize(index, kept.start.max(before), kept.end);
        Ok(())
    }

    /// Lengths and pages of a batch.
    pub fn tables(&self, batch: &[SeqId], out: &mut BlockTables) -> Result<(), CacheError> {
        let mut width = 1;
        for &seq in batch {
            width = width.max(self.entry(seq)?.blocks.len());
        }
        let entries = batch.len().saturating_mul(width);
        reserve_to(&mut out.table, entries)?;
        reserve_to(&mut out.lens, batch.len())?;
        reserve_to(&mut out.first, batch.len())?;
        (out.width, out.page_size, out.wraps) = (width, self.page, false);
        out.lens.clear();
        out.first.clear();
        out.table.clear();
        out.table.resize(entries, NO_PAGE);
        for (row, &seq) in out.table.chunks_exact_mut(width).zip(batch) {
            let entry = self.entry(seq)?;
            let front = self.front(entry.first);
            for (block, &page) in entry.blocks.iter().enumerate() {
                row[(front + block) % width] = page;
            }
            out.wraps |= entry.first < entry.len && entry.len > width * self.page;
            out.lens.push(entry.len);
            out.first.push(entry.first);
        }
        Ok(())
    }

    /// Every sequence.
    fn live(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.serial != VACANT)
    }

    /// Counts of a memory report. Cost: `O(pages + sequences)`.
    pub fn usage(&self) -> Usage {
        Usage {
            free: self.pages.free.len(),
            shared: self.pages.pages.iter().filter(|page| page.holders > 1).count(),
            sequences: self.live().count(),
            tokens: self.live().map(|entry| entry.len - entry.first).sum(),
        }
    }

    /// Which rows `[pages, page]` hold a token of a sequence.
    #[cfg(feature = "testkit")]
    pub fn rows_held(&self) -> Vec<bool> {
        let mut held = vec![false; self.pages.pages.len() * self.page];
        for entry in self.live() {
            for run in self.runs_of(entry, entry.first..entry.len) {
                let start = run.page * self.page + run.row;
                held[start..start + run.tokens].fill(true);
            }
        }
        held
    }
}

/// Tokens of a batch, summed over its sequences; `usize::MAX`, more than any tensor has, if the sum overflows.
#[must_use]
pub fn total_tokens(batch: &[(SeqId, usize)]) -> usize {
    batch.iter().fold(0, |sum, &(_, tokens)| sum.saturating_add(tokens))
}
