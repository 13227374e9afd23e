//! Bytes that the CPU writes while the GPU may use them.
//!
//! "MTLResource storage modes, shared" (MTLStorageMode.shared) and "Synchronizing CPU and GPU work": the CPU does not touch bytes that
//! committed work uses before that work has completed. Other bytes of the same buffer are its own.
//!
//! A copy of each buffer in use tells what has changed: what the GPU wrote is applied to the copy, so that the rest is the CPU's.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::hazards::{Touched, merge};
use crate::memory::Storage;

struct Shadow {
    storage: Arc<Storage>,
    bytes: Vec<u8>,
    /// Command buffers that use it, and the bytes that the CPU wrote since each was committed.
    users: HashMap<u64, Vec<Range<usize>>>,
}

/// Buffers that command buffers in flight use.
#[derive(Default)]
pub(crate) struct Watch(HashMap<u64, Shadow>);

/// Bytes that differ, as ranges.
fn differences(a: &[u8], b: &[u8]) -> Vec<Range<usize>> {
    // Words first: buffers are long and mostly the same.
    const STEP: usize = 4096;
    let mut found: Vec<Range<usize>> = Vec::new();
    for (n, (x, y)) in a.chunks(STEP).zip(b.chunks(STEP)).enumerate() {
        if x == y {
            continue;
        }
        for i in (0..x.len()).filter(|&i| x[i] != y[i]) {
            let at = n * STEP + i;
            match found.last_mut() {
                Some(last) if last.end == at => last.end += 1,
                _ => found.push(at..at + 1),
            }
        }
    }
    found
}

impl Shadow {
    /// Notes what the CPU has written since the last look.
    fn look(&mut self) {
        let now = self.storage.read(0..self.storage.bytes);
        let wrote = differences(&self.bytes, &now);
        if !wrote.is_empty() {
            for user in self.users.values_mut() {
                merge(user, wrote.iter().cloned());
            }
            self.bytes = now;
        }
    }
}

impl Watch {
    /// A command buffer is committed that uses these storages.
    pub(crate) fn commit(&mut self, user: u64, storages: &[Arc<Storage>]) {
        for storage in storages.iter().filter(|s| s.is_visible) {
            let shadow = self.0.entry(storage.id).or_insert_with(|| Shadow {
                storage: storage.clone(),
                bytes: storage.read(0..storage.bytes),
                users: HashMap::new(),
            });
            shadow.look();
            shadow.users.insert(user, Vec::new());
        }
    }

    /// Looks before the GPU writes.
    pub(crate) fn before(&mut self, storages: &[Arc<Storage>]) {
        for storage in storages {
            if let Some(shadow) = self.0.get_mut(&storage.id) {
                shadow.look();
            }
        }
    }

    /// Takes over the bytes that the GPU has written, so that they do not count as writes of the CPU.
    pub(crate) fn after(&mut self, touched: &Touched) {
        for (id, ranges) in touched.writes() {
            if let Some(shadow) = self.0.get_mut(&id) {
                for range in ranges {
                    let bytes = shadow.storage.read(range.clone());
                    shadow.bytes[range.clone()].copy_from_slice(&bytes);
                }
            }
        }
    }

    /// A command buffer has completed; the bytes that it touched and the CPU wrote meanwhile.
    pub(crate) fn complete(&mut self, user: u64, touched: &Touched) -> Option<Range<usize>> {
        let mut broken = None;
        self.0.retain(|&id, shadow| {
            if shadow.users.contains_key(&user) {
                shadow.look();
                let wrote = shadow.users.remove(&user).unwrap_or_default();
                broken = broken.take().or_else(|| touched.overlaps(id, &wrote));
            }
            !shadow.users.is_empty()
        });
        broken
    }
}
