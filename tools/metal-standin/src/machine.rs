//! The state that the objects of one device share: its profile, the demands of tests, and records of its
//! work.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use objc2_metal::MTLCommandBufferError;

use crate::profile::{Order, Profile, Timing};

/// Locks, also after a panic of another holder: validation panics are what tests look for.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Panics with a rule of use that a host breaks.
macro_rules! invalid {
    ($($what:tt)*) => {
        panic!("Metal API validation: {}", format_args!($($what)*))
    };
}
pub(crate) use invalid;

/// Counts of the work that a device has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Sources that were compiled to libraries.
    pub libraries: usize,
    /// Pipelines that were compiled: those that no binary archive had.
    pub pipelines: usize,
    /// Pipelines that a binary archive had.
    pub archive_hits: usize,
    /// Buffers that were made, by the device and by heaps.
    pub buffers: usize,
    /// Bytes of buffers and heaps that are alive.
    pub bytes: usize,
    /// The most bytes that were alive at once.
    pub peak_bytes: usize,
    /// Command buffers that were committed.
    pub command_buffers: usize,
    /// Encoders that were made.
    pub encoders: usize,
    /// Dispatches that have run.
    pub dispatches: usize,
    /// Calls of `memoryBarrier...` that were encoded.
    pub barriers: usize,
    /// Fences that were updated or waited for.
    pub fences: usize,
}

/// Information of hosts for tools: labels, debug groups and captures, in the order of the calls.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Entry {
    /// `setLabel:`, with the kind of the object.
    Label(&'static str, String),
    /// `pushDebugGroup:`.
    Push(String),
    /// `popDebugGroup`.
    Pop,
    /// `insertDebugSignpost:`.
    Signpost(String),
    /// A dispatch was encoded, with the name of its kernel.
    Dispatch(String),
    /// A command buffer was committed, with its label.
    Commit(Option<String>),
    /// A capture was started, with what it captures and the file that it goes to.
    CaptureStart(String, Option<String>),
    /// A capture was stopped.
    CaptureStop,
    /// `beginScope` of a capture scope, with its label.
    ScopeBegin(Option<String>),
    /// `endScope` of a capture scope, with its label.
    ScopeEnd(Option<String>),
}

/// Faults that tests ask for, each of them once.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Messages of compilations that fail.
    pub(crate) compilations: VecDeque<String>,
    /// Pipelines that fail, with their messages.
    pub(crate) pipelines: VecDeque<String>,
    /// How many buffers are still made before one is nil.
    pub(crate) buffers: VecDeque<usize>,
    /// Errors by which command buffers fail, and their descriptions where the code has others.
    pub(crate) command_buffers: VecDeque<(MTLCommandBufferError, Option<&'static str>)>,
    /// Archives that are refused.
    pub(crate) archives: usize,
}

/// How the device behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Behavior {
    pub(crate) timing: Timing,
    pub(crate) order: Order,
}

pub(crate) struct Machine {
    pub(crate) id: u64,
    pub(crate) profile: Profile,
    pub(crate) behavior: Mutex<Behavior>,
    pub(crate) faults: Mutex<Faults>,
    counters: Mutex<Counters>,
    log: Mutex<Vec<Entry>>,
    /// Rules that were broken where no caller could be told: in work that ran.
    violations: Mutex<Vec<String>>,
    random: AtomicU64,
    /// Command buffers that have completed.
    completed: AtomicU64,
    demands: Mutex<Vec<(u64, Demand)>>,
    /// How often something has changed that work may wait for.
    changes: Mutex<u64>,
    changed: Condvar,
}

/// A condition that a thread waits for.
#[derive(Clone)]
pub(crate) struct Demand {
    /// The queue whose work brings it about, where that is known.
    pub(crate) queue: Option<u64>,
    pub(crate) is_met: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("id", &self.id)
            .field("profile", &self.profile)
            .finish_non_exhaustive()
    }
}

/// A number that nothing else in the process has.
pub(crate) fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, SeqCst)
}

impl Machine {
    pub(crate) fn new(profile: Profile) -> Arc<Self> {
        Arc::new(Self {
            id: unique(),
            profile,
            behavior: Mutex::new(Behavior { timing: Timing::LATE, order: Order::Encoded }),
            faults: Mutex::default(),
            counters: Mutex::default(),
            log: Mutex::default(),
            violations: Mutex::default(),
            random: AtomicU64::new(1),
            completed: AtomicU64::new(0),
            demands: Mutex::default(),
            changes: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    pub(crate) fn count(&self, f: impl FnOnce(&mut Counters)) {
        f(&mut lock(&self.counters));
    }

    pub(crate) fn counters(&self) -> Counters {
        *lock(&self.counters)
    }

    pub(crate) fn write(&self, entry: Entry) {
        lock(&self.log).push(entry);
    }

    pub(crate) fn log(&self) -> Vec<Entry> {
        lock(&self.log).clone()
    }

    pub(crate) fn violation(&self, what: String) {
        lock(&self.violations).push(what);
    }

    pub(crate) fn take_violations(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.violations))
    }

    pub(crate) fn behavior(&self) -> Behavior {
        *lock(&self.behavior)
    }

    pub(crate) fn seed(&self, seed: u64) {
        self.random.store(seed | 1, SeqCst);
    }

    /// The next number of a xorshift generator.
    pub(crate) fn random(&self) -> u64 {
        let next = |mut x: u64| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^ (x << 17)
        };
        let before = self.random.fetch_update(SeqCst, SeqCst, |x| Some(next(x)));
        next(before.unwrap_or(1)).wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    /// Shuffles where the device runs unordered work in random order.
    pub(crate) fn shuffle<T>(&self, all: &mut [T]) {
        if let Order::Random(_) = self.behavior().order {
            for i in (1..all.len()).rev() {
                all.swap(i, (self.random() % (i as u64 + 1)) as usize);
            }
        }
    }

    /// Wakes whoever waits for a change.
    pub(crate) fn ring(&self) {
        *lock(&self.changes) += 1;
        self.changed.notify_all();
    }

    /// How often something has changed.
    pub(crate) fn changes(&self) -> u64 {
        *lock(&self.changes)
    }

    /// Waits until there are other changes than these, for some time at most.
    pub(crate) fn wait_for_change(&self, seen: u64, most: Option<Duration>) {
        let changes = lock(&self.changes);
        match most {
            Some(most) => drop(self.changed.wait_timeout_while(changes, most, |c| *c == seen)),
            None => drop(self.changed.wait_while(changes, |c| *c == seen)),
        }
    }

    /// Has the device work towards what somebody waits for, while `wait` runs.
    pub(crate) fn demanded<T>(&self, demand: Demand, wait: impl FnOnce() -> T) -> T {
        let id = unique();
        lock(&self.demands).push((id, demand));
        self.ring();
        let result = wait();
        lock(&self.demands).retain(|d| d.0 != id);
        result
    }

    /// The conditions that threads still wait for.
    pub(crate) fn demands(&self) -> Vec<Demand> {
        let all: Vec<Demand> = lock(&self.demands).iter().map(|d| d.1.clone()).collect();
        all.into_iter().filter(|d| !(d.is_met)()).collect()
    }

    /// A command buffer more has completed; how many have.
    pub(crate) fn complete(&self) -> u64 {
        self.completed.fetch_add(1, SeqCst) + 1
    }

    /// How many command buffers have completed.
    pub(crate) fn completed(&self) -> u64 {
        self.completed.load(SeqCst)
    }

    /// Adds to the bytes that are alive, or says that the memory does not hold them.
    pub(crate) fn allocate(&self, bytes: usize) -> bool {
        let mut counters = lock(&self.counters);
        if counters.bytes.checked_add(bytes).is_none_or(|all| all > self.profile.memory) {
            return false;
        }
        counters.bytes += bytes;
        counters.peak_bytes = counters.peak_bytes.max(counters.bytes);
        true
    }

    pub(crate) fn free(&self, bytes: usize) {
        lock(&self.counters).bytes -= bytes;
    }

    /// Returns true if a test wants the next buffer to be nil.
    pub(crate) fn fails_buffer(&self) -> bool {
        let mut faults = lock(&self.faults);
        match faults.buffers.front_mut() {
            Some(0) => {
                faults.buffers.pop_front();
                true
            }
            Some(n) => {
                *n -= 1;
                false
            }
            None => false,
        }
    }
}

/// A label, which every object of Metal may have.
#[derive(Debug, Default)]
pub(crate) struct Label(Mutex<Option<String>>);

impl Label {
    pub(crate) fn get(&self) -> Option<String> {
        lock(&self.0).clone()
    }

    pub(crate) fn set(&self, machine: &Machine, kind: &'static str, label: Option<String>) {
        if let Some(text) = &label {
            machine.write(Entry::Label(kind, text.clone()));
        }
        *lock(&self.0) = label;
    }

    /// ` "label"`, or nothing.
    pub(crate) fn shown(&self) -> String {
        self.get().map_or_else(String::new, |l| format!(" {l:?}"))
    }
}
