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
    /// True if a kept token lies at or past `width * page_size`, so that blocks wrap around.
    pub wraps: bool,
    /// `[sequences]`: length of each sequence, including tokens that are no longer kept.
    pub lens: Vec<usize>,
    /// `[sequences]`: the first token of each sequence that is kept.
    pub first: Vec<usize>,
}

/// Page lists of a batch in compressed sparse rows, as FlashInfer has them.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct CsrTables<'a> {
    /// `[sequences + 1]`: where the pages of each sequence start in `indices`, from 0, never decreasing, then their number.
    pub indptr: &'a [usize],
    /// Pages, sequence by sequence.
    pub indices: &'a [u32],
    /// `[sequences]`: tokens in the last page of each sequence, 1 to `page_size`; 0 where it has no pages.
    pub last_page_len: &'a [usize],
    /// Tokens per page.
    pub page_size: usize,
}

impl BlockTables {
    /// Tables of sequences that keep all tokens, from rows of pages as vLLM and mistral.rs have them: `table` is
    /// `[sequences, width]`, row-major, and `lens` the length of each sequence in tokens. Entries behind a sequence's last
    /// page are not read, whatever they hold.
    ///
    /// ```
    /// # use flashtile::BlockTables;
    /// let tables = BlockTables::from_rows(&[7, 2, 5, u32::MAX], &[20, 3], 16)?;
    /// assert_eq!((tables.width, tables.locate(0, 17), tables.locate(1, 2)), (2, Some((2, 1)), Some((5, 2))));
    /// # Ok::<(), flashtile::cache::TableError>(())
    /// ```
    ///
    /// # Errors
    /// [`TableError::Length`] unless `table` has the same number of entries for each sequence.
    pub fn from_rows(table: &[u32], lens: &[usize], page_size: usize) -> Result<Self, TableError> {
        let width = table.len().checked_div(lens.len()).unwrap_or(0);
        if width * lens.len() != table.len() {
            let expected = width * lens.len();
            return Err(TableError::Length { name: "table", expected, got: table.len() });
        }
        Ok(Self {
            table: table.to_vec(),
            width,
            page_size,
            wraps: false,
            lens: lens.to_vec(),
            first: vec![0; lens.len()],
        })
    }

    /// Tables of sequences that keep all tokens, from page lists in compressed sparse rows.
    ///
    /// ```
    /// # use flashtile::cache::{BlockTables, CsrTables};
    /// let csr = CsrTables { indptr: &[0, 2, 3], indices: &[7, 2, 5], last_page_len: &[4, 3], page_size: 16 };
    /// assert_eq!(BlockTables::from_csr(csr)?, BlockTables::from_rows(&[7, 2, 5, u32::MAX], &[20, 3], 16)?);
    /// # Ok::<(), flashtile::cache::TableError>(())
    /// ```
    ///
    /// # Errors
    /// [`TableError::Length`], [`TableError::Indptr`], [`TableError::LastPage`] or [`TableError::TooLarge`], as every sequence gets as
    /// many entries as the longest one.
    pub fn from_csr(csr: CsrTables<'_>) -> Result<Self, TableError> {
        let CsrTables { indptr, indices, last_page_len, page_size } = csr;
        let sequences = last_page_len.len();
        if indptr.len() != sequences + 1 {
            return Err(TableError::Length { name: "indptr", expected: sequences + 1, got: indptr.len() });
        }
        if let Some(index) = (1..indptr.len()).find(|&n| indptr[n] < indptr[n - 1]) {
            return Err(TableError::Indptr { index, from: indptr[index - 1], to: indptr[index] });
        }
        if indptr[0] != 0 {
            return Err(TableError::Indptr { index: 0, from: 0, to: indptr[0] });
        }
        if indptr[sequences] != indices.len() {
            let (expected, got) = (indptr[sequences], indices.len());
            return Err(TableError::Length { name: "indices", expected, got });
        }
        let width = indptr.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
        let mut tables = Self { width, page_size, ..Self::default() };
        let entries = sequences.checked_mul(width).filter(|&n| tables.table.try_reserve_exact(n).is_ok());
        if entries.is_none() {
            return Err(TableError::TooLarge { sequences, width });
        }
        for (sequence, (w, &last)) in indptr.windows(2).zip(last_page_len).enumerate() {
            let pages = w[1] - w[0];
            let full = if pages == 0 { last == 0 } else { (1..=page_size).contains(&last) };
            let len = pages.saturating_sub(1).checked_mul(page_size).and_then(|n| n.checked_add(last));
            let (true, Some(len)) = (full, len) else {
                return Err(TableError::LastPage { sequence, pages, got: last, page_size });
            };
            tables.table.extend_from_slice(&indices[w[0]..w[1]]);
            tables.table.extend(std::iter::repeat_n(NO_PAGE, width - pages));
            tables.lens.push(len);
        }
        tables.first = vec![0; sequences];
        Ok(tables)
    }

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
        let page = self.page(sequence, position.checked_div(self.page_size)?)?;
        Some((page as usize, position % self.page_size))
    }

    /// The page of a block, if the table has such a sequence and block.
    fn page(&self, sequence: usize, block: usize) -> Option<u32> {
        let entry = if self.wraps { block.checked_rem(self.width)? } else { block };
        let at = sequence.checked_mul(self.width)?.checked_add(entry).filter(|_| entry < self.width)?;
        self.table.get(at).copied().filter(|&page| page != NO_PAGE)
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
        let same = |block: usize| self.page(a, block).is_some_and(|at| self.page(b, block) == Some(at));
        // Blocks that wrap around repeat the entries of those before, and the first block past a table that does not differs.
        let end = len.div_ceil(self.page_size).min(from.saturating_add(self.width).saturating_add(1));
        let differs = (from..end).find(|&block| !same(block));
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
    /// Page lists in compressed sparse rows do not start at 0, or an end lies before its start.
    Indptr {
        /// Index of the entry.
        index: usize,
        /// The entry before it, or 0.
        from: usize,
        /// The entry.
        to: usize,
    },
    /// The last page of a sequence holds no token, or more than a page does; or there are tokens without a page.
    LastPage {
        /// Index of the sequence.
        sequence: usize,
        /// Its pages.
        pages: usize,
        /// Tokens of its last page.
        got: usize,
        /// Tokens per page.
        page_size: usize,
    },
    /// There is no memory for the table.
    TooLarge {
        /// Number of sequences.
        sequences: usize,
        /// Pages of the longest one.
        width: usize,
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
            Self::TooLarge { sequences, width } => {
                write!(f, "no memory for a table of {sequences} sequences of {width} pages")
            }
            Self::Indptr { index: 0, to, .. } => write!(f, "indptr starts at {to}, expected 0"),
            Self::Indptr { index, from, to } => {
                write!(f, "indptr[{index}] is {to}, expected at least {from}, the entry before it")
            }
            Self::LastPage { sequence, pages: 0, got, .. } => {
                write!(f, "last_page_len[{sequence}] is {got}, expected 0: the sequence has no pages")
            }
            Self::LastPage { sequence, got, page_size, .. } => {
                write!(f, "last_page_len[{sequence}] is {got}, expected 1 to {page_size}")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_lists_that_disagree_are_refused() {
        let csr = |indptr: &[usize], last_page_len: &[usize]| {
            let csr = CsrTables { indptr, indices: &[7, 2, 5], last_page_len, page_size: 16 };
            BlockTables::from_csr(csr).unwrap_err().to_string()
        };
        assert_eq!(csr(&[0, 3], &[4, 3]), "indptr has 2 entries, expected 3");
        assert_eq!(csr(&[1, 2, 3], &[4, 3]), "indptr starts at 1, expected 0");
        assert_eq!(csr(&[0, 3, 2], &[4, 3]), "indptr[2] is 2, expected at least 3, the entry before it");
        assert_eq!(csr(&[0, 2, 4], &[4, 3]), "indices has 3 entries, expected 4");
        assert_eq!(csr(&[0, 2, 3], &[17, 3]), "last_page_len[0] is 17, expected 1 to 16");
        assert_eq!(csr(&[0, 3, 3], &[4, 1]), "last_page_len[1] is 1, expected 0: the sequence has no pages");
        let rows = BlockTables::from_rows(&[7, 2, 5], &[20, 3], 16).unwrap_err();
        assert_eq!(rows.to_string(), "table has 3 entries, expected 2");
        assert_eq!(BlockTables::from_rows(&[], &[], 16).unwrap().sequences(), 0);
    }
}
