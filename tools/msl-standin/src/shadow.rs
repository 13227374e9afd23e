//! Shadows of memory: who accessed which bytes. They find races, and know what a run read and wrote.
//!
//! A shadow is kept page by page and only where memory is accessed, so that its cost follows what a kernel touches, not what is
//! bound.

use std::ops::Range;

/// Bytes of memory that a page of a shadow covers, and words of a bit per byte.
const PAGE: usize = 1024;
const WORDS: usize = PAGE / 64;
/// Granules of a new page have `1 << GRANULE` bytes: most elements have 4 or more.
const GRANULE: u32 = 2;

/// An access to some bytes, with the barriers that order accesses to their kind of memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Touch {
    /// Number of the threadgroup plus one; 0 is no access.
    pub(crate) group: u32,
    pub(crate) thread: u16,
    pub(crate) atomic: bool,
    /// Barriers passed by the threadgroup and by the SIMD-group.
    pub(crate) barriers: u32,
    pub(crate) simd_barriers: u32,
}

impl Touch {
    /// Whether nothing orders this access before `now`.
    fn races(&self, now: &Touch, across_groups: bool) -> bool {
        if self.group == 0 || (self.atomic && now.atomic) {
            return false;
        }
        if self.group != now.group {
            return across_groups;
        }
        self.thread != now.thread
            && self.barriers == now.barriers
            && (self.thread / 32 != now.thread / 32 || self.simd_barriers == now.simd_barriers)
    }
}

/// The earlier access of a race.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Earlier {
    pub(crate) touch: Touch,
    pub(crate) wrote: bool,
}

/// The last write of some bytes, and the last reads by two different threads.
#[derive(Clone, Copy, Debug, Default)]
struct Granule {
    write: Touch,
    reads: [Touch; 2],
}

impl Granule {
    fn access(&mut self, write: bool, now: &Touch, across_groups: bool) -> Option<Earlier> {
        let mut found = None;
        if self.write.races(now, across_groups) {
            found = Some(Earlier { touch: self.write, wrote: true });
        }
        if write {
            if let Some(read) = self.reads.iter().find(|r| r.races(now, across_groups)) {
                found = Some(Earlier { touch: *read, wrote: false });
            }
            self.write = *now;
        } else {
            if (self.reads[0].group, self.reads[0].thread) != (now.group, now.thread) {
                self.reads[1] = self.reads[0];
            }
            self.reads[0] = *now;
        }
        found
    }
}

#[derive(Debug)]
struct Page {
    /// Which page of the shadow it is.
    index: usize,
    /// A bit per byte.
    read: [u64; WORDS],
    written: [u64; WORDS],
    /// Granules have `1 << shift` bytes, and every access so far covered whole ones.
    shift: u32,
    /// Empty where races are not looked for.
    granules: Vec<Granule>,
}

impl Page {
    fn new(index: usize, finds_races: bool) -> Self {
        let granules = if finds_races { vec![Granule::default(); PAGE >> GRANULE] } else { Vec::new() };
        Self { index, read: [0; WORDS], written: [0; WORDS], shift: GRANULE, granules }
    }

    fn mark(&mut self, bytes: &Range<usize>, write: bool) {
        let bits = if write { &mut self.written } else { &mut self.read };
        let mut at = bytes.start;
        while at < bytes.end {
            let count = (64 - at % 64).min(bytes.end - at);
            bits[at / 64] |= u64::MAX >> (64 - count) << (at % 64);
            at += count;
        }
    }

    /// Halves granules until these bytes are whole ones; each half keeps the accesses of the granule.
    fn refine(&mut self, bytes: &Range<usize>) {
        let shift = (bytes.start | bytes.end).trailing_zeros().min(self.shift);
        let count = 1 << (self.shift - shift);
        if count > 1 {
            self.granules = self.granules.iter().flat_map(|&g| std::iter::repeat_n(g, count)).collect();
            self.shift = shift;
        }
    }

    fn access(
        &mut self,
        bytes: &Range<usize>,
        write: bool,
        now: &Touch,
        across_groups: bool,
    ) -> Option<Earlier> {
        self.mark(bytes, write);
        if self.granules.is_empty() {
            return None;
        }
        self.refine(bytes);
        let touched = &mut self.granules[bytes.start >> self.shift..bytes.end >> self.shift];
        touched.iter_mut().filter_map(|g| g.access(write, now, across_groups)).last()
    }
}

/// The shadow of a range of addresses.
#[derive(Debug)]
pub(crate) struct Shadow {
    /// The address of page 0, a multiple of [`PAGE`].
    base: u64,
    /// The place of each page among `pages`, plus one; 0 for a page without accesses. The system provides zeros without touching
    /// them, so that a large table costs nothing where it is not used.
    table: Vec<u32>,
    pages: Vec<Page>,
    /// Whether accesses of different threadgroups race.
    across_groups: bool,
    finds_races: bool,
}

impl Shadow {
    /// The shadow of the addresses from `start` to `end`.
    pub(crate) fn new(start: u64, end: u64, across_groups: bool, finds_races: bool) -> Self {
        let base = start - start % PAGE as u64;
        let count = (end.max(start) - base).div_ceil(PAGE as u64) as usize;
        Self { base, table: vec![0; count], pages: Vec::new(), across_groups, finds_races }
    }

    fn page(&mut self, index: usize) -> &mut Page {
        if self.table[index] == 0 {
            self.pages.push(Page::new(index, self.finds_races));
            self.table[index] = self.pages.len() as u32;
        }
        &mut self.pages[self.table[index] as usize - 1]
    }

    /// Records an access inside the shadow's range; an earlier one that it races with.
    pub(crate) fn access(&mut self, at: u64, size: u64, write: bool, now: &Touch) -> Option<Earlier> {
        let across_groups = self.across_groups;
        let mut found = None;
        let (mut at, end) = ((at - self.base) as usize, (at - self.base + size) as usize);
        while at < end {
            let within = at % PAGE;
            let bytes = within..(within + end - at).min(PAGE);
            found = self.page(at / PAGE).access(&bytes, write, now, across_groups).or(found);
            at += bytes.len();
        }
        found
    }

    /// The bytes that were read and the bytes that were written, counted from `start`.
    pub(crate) fn ranges(&self, start: u64) -> [Vec<Range<usize>>; 2] {
        let mut pages: Vec<&Page> = self.pages.iter().collect();
        pages.sort_unstable_by_key(|page| page.index);
        let of = |bits: fn(&Page) -> &[u64; WORDS]| {
            let mut found = Vec::new();
            for page in &pages {
                let first = self.base + (page.index * PAGE) as u64;
                for (n, &word) in bits(page).iter().enumerate() {
                    add_bits(&mut found, first + n as u64 * 64, word, start);
                }
            }
            found
        };
        [of(|page| &page.read), of(|page| &page.written)]
    }
}

/// Adds the bytes of a word of bits, whose first bit is the byte at `address`.
fn add_bits(found: &mut Vec<Range<usize>>, address: u64, mut word: u64, start: u64) {
    let mut at = 0;
    while word != 0 {
        let skipped = word.trailing_zeros();
        word >>= skipped;
        let ones = word.trailing_ones();
        word = if ones == 64 { 0 } else { word >> ones };
        at += u64::from(skipped);
        // Accesses lie inside the region, so that no byte with a bit lies before its start.
        let from = (address + at - start) as usize;
        let range = from..from + ones as usize;
        match found.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => found.push(range),
        }
        at += u64::from(ones);
    }
}
