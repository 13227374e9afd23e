//! Threads of a run: the scratch memory of each, and units of work handed out to them.

#![allow(unsafe_code)]

use flashtile_core::isa::FloatEnv;
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The scratch memory of all threads, `len` floats each.
#[derive(Clone, Copy)]
pub(crate) struct Scratch {
    base: *mut f32,
    len: usize,
}

// SAFETY: threads use disjoint parts, one each.
unsafe impl Sync for Scratch {}

impl Scratch {
    pub(crate) fn new(base: *mut f32, len: usize) -> Self {
        Self { base, len }
    }

    /// Start of the memory of a worker.
    pub(crate) fn of(&self, worker: usize) -> *mut f32 {
        self.base.wrapping_add(worker * self.len)
    }
}

/// Calls `f(unit, worker)` for every unit of work. Each worker runs on one thread, which has called `enter` and is in the default
/// floating-point environment. Units are handed out in order.
pub(crate) fn for_each<T: Sync, G>(
    units: &[T],
    workers: usize,
    enter: impl Fn() -> G + Sync,
    f: impl Fn(&T, usize) + Sync,
) {
    let workers = workers.min(units.len());
    if workers <= 1 {
        let _entered = (FloatEnv::ieee(), enter());
        units.iter().for_each(|unit| f(unit, 0));
        return;
    }
    let next = AtomicUsize::new(0);
    (0..workers).into_par_iter().with_max_len(1).for_each(|worker| {
        // This is not around the parallel loop: a thread that waits for the loop may run work that others have queued.
        let _entered = (FloatEnv::ieee(), enter());
        while let Some(unit) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
            f(unit, worker);
        }
    });
}
