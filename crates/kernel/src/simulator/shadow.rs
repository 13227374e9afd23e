//! Race detection: the uses of every element of a memory during a launch.

use std::collections::HashMap;
use std::panic::Location;

/// One use of an element.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    /// The place in the source.
    pub(super) location: &'static Location<'static>,
    /// The number of the threadgroup.
    pub(super) group: u32,
    /// The number of the thread in it.
    pub(super) thread: u32,
    /// Barriers the threadgroup has passed.
    pub(super) epoch: u32,
    /// SIMD barriers the SIMD group has passed.
    pub(super) simd_epoch: u32,
}

impl Access {
    fn same_simd(&self, other: &Self) -> bool {
        self.group == other.group && self.thread / 32 == other.thread / 32
    }

    fn same_thread(&self, other: &Self) -> bool {
        self.group == other.group && self.thread == other.thread
    }

    /// Returns true if `self`, which ran before, is before `now` in every order of threads.
    fn before(&self, now: &Self) -> bool {
        self.same_thread(now)
            || self.group == now.group
                && (self.epoch < now.epoch || self.same_simd(now) && self.simd_epoch < now.simd_epoch)
    }

    /// Returns true if `self` and `now` are ordered alike with respect to all other accesses.
    fn repeats(&self, now: &Self) -> bool {
        self.same_thread(now) && self.epoch == now.epoch && self.simd_epoch == now.simd_epoch
    }
}

/// The uses of one kind that decide whether any earlier use races with a later one.
///
/// Threadgroups run one after another, so all uses by other threadgroups than the last user's are ordered
/// alike with respect to later uses, and one of them is enough. Likewise one use by another SIMD group of the
/// threadgroup is enough, the latest, and one by another lane of the SIMD group.
#[derive(Clone, Copy, Debug, Default)]
struct Uses {
    last: Option<Access>,
    other_lane: Option<Access>,
    other_simd: Option<Access>,
    other_group: Option<Access>,
}

impl Uses {
    fn add(&mut self, now: Access) {
        if let Some(last) = self.last {
            if last.repeats(&now) {
                return;
            }
            if last.group != now.group {
                *self = Self { other_group: self.last, ..Self::default() };
            } else if !last.same_simd(&now) {
                self.other_simd = self.last;
                self.other_lane = None;
            } else if !last.same_thread(&now) {
                self.other_lane = self.last;
            }
        }
        self.last = Some(now);
    }

    fn racing(&self, now: &Access) -> Option<Access> {
        let uses = [self.last, self.other_lane, self.other_simd, self.other_group];
        uses.into_iter().flatten().find(|use_| !use_.before(now))
    }
}

/// How an element is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Read,
    Write,
    Atomic,
}

#[derive(Clone, Copy, Debug, Default)]
struct Element {
    written: Option<Access>,
    read: Uses,
}

const PAGE: usize = 64;

/// The uses of the elements of one memory in one launch.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    pages: Vec<Option<Box<[Element; PAGE]>>>,
    /// Few elements are used by atomics.
    atomic: HashMap<usize, Uses>,
}

impl Shadow {
    /// Elements that were read.
    pub(super) fn elements_read(&self) -> usize {
        let read = |page: &[Element; PAGE]| page.iter().filter(|element| element.read.last.is_some()).count();
        self.pages.iter().flatten().map(|page| read(page)).sum()
    }

    /// Records a use of element `index`.
    ///
    /// # Errors
    /// The other use, and an earlier access it races with.
    pub(super) fn note(&mut self, index: usize, how: Use, now: Access) -> Result<(), (Use, Access)> {
        let page = index / PAGE;
        if page >= self.pages.len() {
            self.pages.resize_with(page + 1, || None);
        }
        let page = self.pages[page].get_or_insert_with(|| Box::new([Element::default(); PAGE]));
        let element = &mut page[index % PAGE];
        if let Some(written) = element.written.filter(|written| !written.before(&now)) {
            return Err((Use::Write, written));
        }
        if how != Use::Read
            && let Some(read) = element.read.racing(&now)
        {
            return Err((Use::Read, read));
        }
        if how != Use::Atomic
            && !self.atomic.is_empty()
            && let Some(atomic) = self.atomic.get(&index).and_then(|uses| uses.racing(&now))
        {
            return Err((Use::Atomic, atomic));
        }
        match how {
            Use::Read => element.read.add(now),
            Use::Write => element.written = Some(now),
            Use::Atomic => self.atomic.entry(index).or_default().add(now),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(group: u32, thread: u32, epoch: u32, simd_epoch: u32) -> Access {
        Access { location: Location::caller(), group, thread, epoch, simd_epoch }
    }

    /// Every use of an element, each compared with each.
    #[derive(Default)]
    struct Everything(Vec<(Use, Access)>);

    impl Everything {
        fn note(&mut self, how: Use, now: Access) -> bool {
            let racing = self.0.iter().any(|(other, access)| {
                let conflict = match (how, *other) {
                    (Use::Read, Use::Read) | (Use::Atomic, Use::Atomic) => false,
                    (a, b) => a != Use::Read || b != Use::Read,
                };
                conflict && !access.before(&now)
            });
            self.0.push((how, now));
            racing
        }
    }

    #[test]
    fn four_uses_know_as_much_as_all() {
        let mut state = 1u64;
        let mut random = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        // An interpreter takes a thousand times as long.
        for _ in 0..if cfg!(miri) { 100 } else { 20_000 } {
            let (mut shadow, mut everything) = (Shadow::default(), Everything::default());
            let (mut group, mut epoch, mut simd_epochs) = (0, 0, [0; 2]);
            for _ in 0..12 {
                match random(8) {
                    0 => epoch += 1,
                    1 => simd_epochs[random(2) as usize] += 1,
                    2 if random(4) == 0 => (group, epoch, simd_epochs) = (group + 1, 0, [0; 2]),
                    _ => {}
                }
                let thread = [0, 1, 2, 32, 33][random(5) as usize];
                let now = access(group, thread, epoch, simd_epochs[thread as usize / 32]);
                let how = [Use::Read, Use::Read, Use::Write, Use::Atomic][random(4) as usize];
                let racing = everything.note(how, now);
                assert_eq!(shadow.note(0, how, now).is_err(), racing, "{:?}", everything.0);
                if racing {
                    break;
                }
            }
        }
    }
}
