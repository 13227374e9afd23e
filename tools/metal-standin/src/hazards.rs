//! The order that Metal guarantees, and bytes that unordered work touches.
//!
//! - "MTLDispatchType, concurrent" and "MTLComputeCommandEncoder, memoryBarrier(scope:)": dispatches of a
//!   concurrent encoder may overlap; a barrier orders the dispatches before it before the dispatches after
//!   it. Dispatches of a serial encoder run one after the other.
//! - "MTLHazardTrackingMode": Metal orders encoders of a queue that use a tracked resource. Untracked
//!   resources are the host's to order: "MTLFence" orders encoders of a queue, "MTLEvent" command buffers of
//!   any queue of a device. Memory that a kernel reaches by its address is tracked where
//!   "MTLComputeCommandEncoder, useResource(_:usage:)" declares it: Metal does not know which encoder uses
//!   memory that is merely resident.
//! - "MTLCommandBuffer, waitUntilCompleted()": work that completed before a command buffer was committed is
//!   ordered before it.
//!
//! Events and fences are read narrowly: they order the commands that are encoded before the signal or update
//! in the same command buffer or encoder, and all work that is ordered before these commands.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Bytes of a storage that were read and written.
#[derive(Clone, Debug, Default)]
struct Ranges {
    read: Vec<Range<usize>>,
    written: Vec<Range<usize>>,
}

/// Bytes that some work has touched, by the storage.
#[derive(Clone, Debug, Default)]
pub(crate) struct Touched(BTreeMap<u64, Ranges>);

/// The first bytes that are in both of two sorted lists of disjoint ranges.
fn overlap(a: &[Range<usize>], b: &[Range<usize>]) -> Option<Range<usize>> {
    let (mut i, mut k) = (0, 0);
    while let (Some(x), Some(y)) = (a.get(i), b.get(k)) {
        let common = x.start.max(y.start)..x.end.min(y.end);
        if !common.is_empty() {
            return Some(common);
        }
        if x.end <= y.end { i += 1 } else { k += 1 }
    }
    None
}

/// Adds ranges to a sorted list of disjoint ones.
pub(crate) fn merge(into: &mut Vec<Range<usize>>, more: impl IntoIterator<Item = Range<usize>>) {
    into.extend(more);
    into.sort_unstable_by_key(|r| r.start);
    into.dedup_by(|next, last| {
        let is_joined = next.start <= last.end;
        if is_joined {
            last.end = last.end.max(next.end);
        }
        is_joined
    });
}

impl Touched {
    pub(crate) fn read(&mut self, storage: u64, ranges: impl IntoIterator<Item = Range<usize>>) {
        merge(&mut self.0.entry(storage).or_default().read, ranges);
    }

    pub(crate) fn written(&mut self, storage: u64, ranges: impl IntoIterator<Item = Range<usize>>) {
        merge(&mut self.0.entry(storage).or_default().written, ranges);
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (&storage, ranges) in &other.0 {
            let own = self.0.entry(storage).or_default();
            merge(&mut own.read, ranges.read.iter().cloned());
            merge(&mut own.written, ranges.written.iter().cloned());
        }
    }

    pub(crate) fn forget(&mut self, storage: u64) {
        self.0.remove(&storage);
    }

    /// The storages that were written, and where.
    pub(crate) fn writes(&self) -> impl Iterator<Item = (u64, &[Range<usize>])> {
        self.0.iter().filter(|(_, r)| !r.written.is_empty()).map(|(&s, r)| (s, &*r.written))
    }

    /// The first of these bytes of a storage that were touched.
    pub(crate) fn overlaps(&self, storage: u64, bytes: &[Range<usize>]) -> Option<Range<usize>> {
        let own = self.0.get(&storage)?;
        overlap(&own.written, bytes).or_else(|| overlap(&own.read, bytes))
    }

    /// Bytes that both touch and one of them writes, in a storage that `counts`.
    pub(crate) fn conflict(&self, other: &Self, counts: impl Fn(u64) -> bool) -> Option<(u64, Range<usize>)> {
        self.0.iter().filter(|(s, _)| counts(**s)).find_map(|(&storage, own)| {
            let others = other.0.get(&storage)?;
            let common = overlap(&own.written, &others.written)
                .or_else(|| overlap(&own.written, &others.read))
                .or_else(|| overlap(&own.read, &others.written))?;
            Some((storage, common))
        })
    }
}

/// Work that is ordered before other work.
#[derive(Clone, Debug, Default)]
pub(crate) struct Before {
    /// Ids of nodes.
    nodes: BTreeSet<u64>,
    /// All that was complete when this many command buffers were.
    completed: u64,
}

impl Before {
    /// The work that was complete when this many command buffers were.
    pub(crate) fn completed(count: u64) -> Self {
        Self { nodes: BTreeSet::new(), completed: count }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.nodes.extend(&other.nodes);
        self.completed = self.completed.max(other.completed);
    }

    pub(crate) fn add_node(&mut self, node: u64) {
        self.nodes.insert(node);
    }

    fn has(&self, node: &Node) -> bool {
        self.nodes.contains(&node.id) || node.completed.is_some_and(|n| n <= self.completed)
    }
}

/// The commands of an encoder between fences.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) id: u64,
    pub(crate) queue: u64,
    pub(crate) pass: u64,
    /// `encoder "label"`.
    pub(crate) shown: String,
    pub(crate) touched: Touched,
    /// The storages that its encoder names, by a binding or by `useResource`: Metal tracks no others.
    pub(crate) declared: BTreeSet<u64>,
    pub(crate) before: Before,
    /// How many command buffers were complete when its own was.
    pub(crate) completed: Option<u64>,
}

/// Nodes that have run and that others may conflict with.
#[derive(Debug, Default)]
pub(crate) struct History(Vec<Node>);

impl History {
    /// Adds a node; the rule that it breaks, where it does.
    pub(crate) fn add(&mut self, node: Node, is_tracked: impl Fn(u64) -> bool) -> Option<String> {
        let unordered = |other: &&Node| other.pass != node.pass && !node.before.has(other);
        let broken = self.0.iter().filter(unordered).find_map(|other| {
            let is_same_queue = other.queue == node.queue;
            let are_ordered = |s| {
                is_same_queue && is_tracked(s) && node.declared.contains(&s) && other.declared.contains(&s)
            };
            let (storage, bytes) = node.touched.conflict(&other.touched, |s| !are_ordered(s))?;
            let (what, orders) = if is_same_queue && is_tracked(storage) {
                ("a resource that one of them does not declare", "fence or event")
            } else if is_same_queue {
                ("an untracked resource", "fence or event")
            } else {
                ("a resource", "event")
            };
            Some(format!(
                "{} and {} use bytes {}..{} of {what}, one of them writes, and no {orders} orders them",
                other.shown, node.shown, bytes.start, bytes.end
            ))
        });
        self.0.push(node);
        broken
    }

    /// The nodes of a command buffer are complete.
    pub(crate) fn complete(&mut self, ids: &BTreeSet<u64>, count: u64) {
        for node in self.0.iter_mut().filter(|n| ids.contains(&n.id)) {
            node.completed = Some(count);
        }
    }

    /// Forgets nodes that were complete when every command buffer in flight was committed.
    pub(crate) fn forget(&mut self, oldest: u64) {
        self.0.retain(|n| n.completed.is_none_or(|c| c > oldest));
    }
}

#[cfg(test)]
mod tests {
    use super::{Before, History, Node, Touched, merge, overlap};

    fn node(id: u64, queue: u64, write: bool, before: Before) -> Node {
        let mut touched = Touched::default();
        if write {
            touched.written(1, std::iter::once(0..4))
        } else {
            touched.read(1, std::iter::once(2..8))
        }
        let declared = [1].into();
        Node {
            id,
            queue,
            pass: id,
            shown: format!("encoder {id}"),
            touched,
            declared,
            before,
            completed: None,
        }
    }

    #[test]
    fn ranges_are_joined_and_compared() {
        let mut ranges = vec![0..4, 10..12];
        merge(&mut ranges, [4..6, 11..20, 30..31, 1..2]);
        assert_eq!(ranges, [0..6, 10..20, 30..31]);
        assert_eq!(overlap(&ranges, &[6..10, 19..40]), Some(19..20));
        assert_eq!(overlap(&ranges, &[6..10, 20..30, 31..40]), None);
        assert_eq!(overlap(&ranges, &[]), None);
    }

    #[test]
    fn order_is_asked_of_what_conflicts() {
        let after = |id| {
            let mut before = Before::default();
            before.add_node(id);
            before
        };
        let mut history = History::default();
        assert_eq!(history.add(node(1, 7, true, Before::default()), |_| false), None);
        let broken = history.add(node(2, 7, false, Before::default()), |_| false);
        assert!(broken.is_some_and(|b| b.contains("bytes 2..4 of an untracked resource")));
        assert_eq!(history.add(node(3, 7, false, Before::default()), |_| true), None, "tracked");
        assert_eq!(history.add(node(4, 7, false, after(1)), |_| false), None, "ordered");
        assert!(history.add(node(5, 8, false, Before::default()), |_| true).is_some(), "another queue");
        history.complete(&[1].into(), 1);
        assert_eq!(history.add(node(6, 8, false, Before::completed(1)), |_| true), None, "complete");
    }
}
