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

/// An access to some bytes, with the barriers that order accesses to its kind of memory. Two words, which are copied at each
/// access.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Touch {
    /// The number of the threadgroup plus one in the upper half, the thread and whether the access is atomic in the lower one; 0 is
    /// no access.
    who: u64,
    /// Barriers passed by the threadgroup in the upper half, by the SIMD-group in the lower one.
    barriers: u64,
}

const ATOMIC: u64 = 1 << 16;

impl Touch {
    /// `barriers` are what the threadgroup and the SIMD-group have passed.
    #[inline]
    pub(crate) fn new(group: u32, thread: u16, atomic: bool, barriers: [u32; 2]) -> Self {
        let atomic = if atomic { ATOMIC } else { 0 };
        Self {
            who: u64::from(group) << 32 | atomic | u64::from(thread),
            barriers: u64::from(barriers[0]) << 32 | u64::from(barriers[1]),
        }
    }

    /// The number of the threadgroup plus one.
    #[inline]
    pub(crate) fn group(&self) -> u32 {
        (self.who >> 32) as u32
    }

    #[inline]
    pub(crate) fn thread(&self) -> u16 {
        self.who as u16
    }

    /// Returns true if nothing orders this access before `now`.
    #[inline]
    fn races(&self, now: &Touch, across_groups: bool) -> bool {
        if self.who == 0 || self.who & now.who & ATOMIC != 0 {
            return false;
        }
        if self.group() != now.group() {
            return across_groups;
        }
        let (thread, now_thread) = (self.thread(), now.thread());
        thread != now_thread
            && self.barriers >> 32 == now.barriers >> 32
            && (thread / 32 != now_thread / 32 || self.barriers == now.barriers)
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
    /// Records an access; `found` becomes an earlier one that it races with, and stays as it is without one.
    #[inline]
    fn access(&mut self, write: bool, now: &Touch, across_groups: bool, found: &mut Option<Earlier>) {
        if self.write.races(now, across_groups) {
            *found = Some(Earlier { touch: self.write, wrote: true });
        }
        if write {
            if let Some(read) = self.reads.iter().find(|r| r.races(now, across_groups)) {
                *found = Some(Earlier { touch: *read, wrote: false });
            }
            self.write = *now;
        } else {
            if (self.reads[0].who ^ now.who) & !ATOMIC != 0 {
                self.reads[1] = self.reads[0];
            }
            self.reads[0] = *now;
        }
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

    #[inline]
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

    /// The granules of these bytes; none where races are not looked for.
    fn granules(&mut self, bytes: &Range<usize>) -> &mut [Granule] {
        if self.granules.is_empty() {
            return &mut [];
        }
        self.refine(bytes);
        &mut self.granules[bytes.start >> self.shift..bytes.end >> self.shift]
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
    /// True if accesses of different threadgroups race.
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

    #[inline]
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
            let page = self.page(at / PAGE);
            page.mark(&bytes, write);
            for granule in page.granules(&bytes) {
                granule.access(write, now, across_groups, &mut found);
            }
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
