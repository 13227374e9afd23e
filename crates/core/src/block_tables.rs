//! Block tables: which page of a pool holds which tokens of a batch.

use crate::problem::SharedPrefix;
use std::cmp::Reverse;
use std::fmt;

/// The entry of a block without a page.
pub const NO_PAGE: u32 = u32::MAX;

/// Lengths and pages of a batch of sequences, as plain data. Positions are counted from the start of a sequence,
/// including tokens that are no longer kept.
///
/// ```text
/// token j of sequence s, first[s] <= j < lens[s], is row  j % page_size  of page  table[s * width + (j / page_size) % width]
/// ```
///
/// [`KvCache::tables`](crate::cache::KvCache::tables) makes one; an engine that owns its pages fills in the fields.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct BlockTables {
    /// `[sequences, width]`, row-major: indices of pages in the pool, [`NO_PAGE`] for unused entries.
    pub table: Vec<u32>,
    /// Entries per sequence.
    pub width: usize,
    /// Tokens per page.
    pub page_size: usize,
    /// Whether a kept token lies at or past `width * page_size`, so that blocks wrap around.
    pub wraps: bool,
    /// `[sequences]`: length of each sequence, including tokens that are no longer kept.
    pub lens: Vec<usize>,
    /// `[sequences]`: the first token of each sequence that is kept.
    pub first: Vec<usize>,
}

impl BlockTables {
    /// Number of sequences.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.lens.len()
    }

    /// Page and row of a token, or `None` if the table has no such sequence, token or page. The page is not checked
    /// against the pool.
    #[must_use]
    pub fn locate(&self, sequence: usize, position: usize) -> Option<(usize, usize)> {
        let kept = *self.first.get(sequence)?..*self.lens.get(sequence)?;
        if !kept.contains(&position) {
            return None;
        }
        let block = position.checked_div(self.page_size)?.checked_rem(self.width)?;
        let page = *self.table.get(sequence.checked_mul(self.width)?.checked_add(block)?)?;
        (page != NO_PAGE).then_some((page as usize, position % self.page_size))
    }

    /// Prefixes of at least `min_len` tokens that neighbouring sequences of the batch share, for
    /// [`ProblemDesc::prefixes`](crate::problem::ProblemDesc::prefixes). A `min_len` of 1 is fine: plans drop prefixes
    /// shorter than a block of keys. Only neighbours can share, so that a batch should be sorted by the rows of its
    /// table. Sequences share a prefix if its pages are the same and they have dropped the same blocks of it.
    ///
    /// Cost: `O(table + sequences log sequences)`.
    #[must_use]
    pub fn shared_prefixes(&self, min_len: usize) -> Vec<SharedPrefix> {
        let mut prefixes = Vec::new();
        // Open prefixes, which the next sequence may still share: first sequence and length, in increasing length.
        let mut open: Vec<(usize, usize)> = Vec::new();
        for sequence in 0..self.sequences() {
            let next = sequence + 1;
            let common = if next < self.sequences() {
                self.shared(sequence, next, self.lens[sequence].min(self.lens[next]))
            } else {
                0
            };
            let mut start = sequence;
            while let Some((first, len)) = open.pop_if(|group| group.1 > common) {
                prefixes.push(SharedPrefix { sequences: first..next, len });
                start = first;
            }
            if common >= min_len.max(1) && open.last().is_none_or(|group| group.1 < common) {
                open.push((start, common));
            }
        }
        prefixes.sort_by_key(|p| (p.sequences.start, Reverse(p.sequences.end)));
        prefixes
    }

    /// How many of the first `len` tokens of sequence `b` lie in the pages of sequence `a`: all, or the tokens
    /// before the first block that differs. Blocks that `b` has dropped must be dropped by `a` too.
    pub(crate) fn shared(&self, a: usize, b: usize, len: usize) -> usize {
        if a == b || len == 0 {
            return len;
        }
        let from = |s: usize| self.first.get(s)?.checked_div(self.page_size);
        let (Some(from), true) = (from(b), from(a) == from(b)) else { return 0 };
        let page = |s: usize, block: usize| {
            let entry = s.checked_mul(self.width)?.checked_add(block.checked_rem(self.width)?)?;
            self.table.get(entry).filter(|&&page| page != NO_PAGE)
        };
        let same = |block: usize| page(a, block).is_some_and(|at| page(b, block) == Some(at));
        let differs = (from..len.div_ceil(self.page_size)).find(|&block| !same(block));
        differs.map_or(len, |block| if block == from { 0 } else { block * self.page_size })
    }

    /// Checks that the fields agree and that every kept token has a page of the pool. Cost: `O(table)`.
    ///
    /// # Errors
    /// The first rule that is broken; see [`TableError`].
    pub fn validate(&self, pages: usize) -> Result<(), TableError> {
        let sequences = self.sequences();
        for (name, got, expected) in [
            ("first", self.first.len(), sequences),
            ("table", self.table.len(), sequences.saturating_mul(self.width)),
        ] {
            if got != expected {
                return Err(TableError::Length { name, expected, got });
            }
        }
        let room = self.width.saturating_mul(self.page_size);
        for (sequence, (&first, &len)) in self.first.iter().zip(&self.lens).enumerate() {
            if first > len {
                return Err(TableError::First { sequence, first, len });
            }
            if len - first > room {
                return Err(TableError::Room { sequence, tokens: len - first, room });
            }
            if first == len {
                continue;
            }
            if len > room && !self.wraps {
                return Err(TableError::Wraps { sequence, len, room });
            }
            // There is room for tokens, so that neither `page` nor `width` is 0.
            for block in first / self.page_size..=(len - 1) / self.page_size {
                let page = self.table[sequence * self.width + block % self.width];
                if page as usize >= pages {
                    return Err(TableError::Page { sequence, block, page, pages });
                }
            }
        }
        Ok(())
    }
}

/// Why [`BlockTables`] do not describe sequences in a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TableError {
    /// The length of a list does not match the number of sequences, `lens.len()`.
    Length {
        /// Name of the field.
        name: &'static str,
        /// Entries expected.
        expected: usize,
        /// Entries found.
        got: usize,
    },
    /// The first kept token is past the end of the sequence.
    First {
        /// Index of the sequence.
        sequence: usize,
        /// Its `first`.
        first: usize,
        /// Its length.
        len: usize,
    },
    /// A sequence keeps more tokens than a row of the table has room for.
    Room {
        /// Index of the sequence.
        sequence: usize,
        /// Tokens kept.
        tokens: usize,
        /// `width * page_size`.
        room: usize,
    },
    /// A token lies past `width * page_size` of a table that does not wrap.
    Wraps {
        /// Index of the sequence.
        sequence: usize,
        /// Its length.
        len: usize,
        /// `width * page_size`.
        room: usize,
    },
    /// The page of a kept token is not one of the pool's.
    Page {
        /// Index of the sequence.
        sequence: usize,
        /// The token's position divided by `page`.
        block: usize,
        /// The entry of the table.
        page: u32,
        /// Pages of the pool.
        pages: usize,
    },
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { name, expected, got } => {
                write!(f, "{name} has {got} entries, expected {expected}")
            }
            Self::First { sequence, first, len } => {
                write!(f, "sequence {sequence} keeps tokens from {first}, its length is {len}")
            }
            Self::Room { sequence, tokens, room } => {
                write!(f, "sequence {sequence} keeps {tokens} tokens, its pages hold {room}")
            }
            Self::Wraps { sequence, len, room } => {
                write!(f, "sequence {sequence} has length {len}, a table that does not wrap reaches {room}")
            }
            Self::Page { sequence, block, page: NO_PAGE, .. } => {
                write!(f, "block {block} of sequence {sequence} has no page")
            }
            Self::Page { sequence, block, page, pages } => {
                write!(f, "block {block} of sequence {sequence} is page {page}, the pool has {pages}")
            }
        }
    }
}

impl std::error::Error for TableError {}
