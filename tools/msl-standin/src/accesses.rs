//! The bytes that a run read and wrote.

use std::collections::BTreeMap;
use std::ops::Range;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Ranges {
    read: Vec<Range<usize>>,
    written: Vec<Range<usize>>,
}

/// The bytes of allocations that a run read and wrote, exactly: an access to a byte counts even where it changes nothing.
///
/// Ranges are counted from the start of the allocation, sorted, disjoint, and merged where they are adjacent. An atomic
/// load reads, an atomic store writes, and the other atomic operations do both, except for a comparison that fails, which reads.
/// Threadgroup memory is not among them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accesses {
    by_id: BTreeMap<u64, Ranges>,
}

impl Accesses {
    /// Adds what was read and written of an allocation, once for each.
    pub(crate) fn insert(&mut self, id: u64, [read, written]: [Vec<Range<usize>>; 2]) {
        if !read.is_empty() || !written.is_empty() {
            self.by_id.insert(id, Ranges { read, written });
        }
    }

    /// The ids of the allocations of which at least one byte was accessed, in increasing order.
    pub fn touched(&self) -> impl Iterator<Item = u64> + '_ {
        self.by_id.keys().copied()
    }

    /// The bytes of an allocation that were read.
    pub fn read(&self, id: u64) -> &[Range<usize>] {
        self.by_id.get(&id).map_or(&[], |ranges| &ranges.read)
    }

    /// The bytes of an allocation that were written.
    pub fn written(&self, id: u64) -> &[Range<usize>] {
        self.by_id.get(&id).map_or(&[], |ranges| &ranges.written)
    }

    /// The first bytes that both runs touch and at least one of them writes, and the id of their allocation: the lowest id, and
    /// of it the first run of such bytes. Runs that conflict give the same result in any order or at the same time only if the
    /// accesses are atomic and commute.
    pub fn conflicts(&self, other: &Self) -> Option<(u64, Range<usize>)> {
        self.by_id.iter().find_map(|(&id, own)| {
            let others = other.by_id.get(&id)?;
            let mut common = overlaps(&own.written, &others.written);
            common.extend(overlaps(&own.written, &others.read));
            common.extend(overlaps(&own.read, &others.written));
            common.sort_unstable_by_key(|range| range.start);
            let mut first = common.first()?.clone();
            for next in &common {
                if next.start > first.end {
                    break;
                }
                first.end = first.end.max(next.end);
            }
            Some((id, first))
        })
    }
}

/// The bytes that are in both of two sorted lists.
fn overlaps(a: &[Range<usize>], b: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let (mut i, mut k) = (0, 0);
    while let (Some(x), Some(y)) = (a.get(i), b.get(k)) {
        let common = x.start.max(y.start)..x.end.min(y.end);
        if !common.is_empty() {
            found.push(common);
        }
        if x.end <= y.end { i += 1 } else { k += 1 }
    }
    found
}
