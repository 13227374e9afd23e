//! The state of a launch, and the operations of the intrinsics on it.
#![allow(unsafe_code)]

use super::panics;
use super::report::Report;
use super::shadow::Access;
use super::{Fault, FaultKind};
use crate::region::Region;
use crate::source::{Kernel, SharedArray};
use corosensei::Yielder;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::Location;
use std::ptr;
use std::rc::Rc;

/// Lanes of a SIMD group.
pub(super) const LANES: usize = 32;

/// The position of a thread.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place {
    pub(crate) thread: u32,
    pub(crate) threads: u32,
    pub(crate) group: [u32; 3],
    pub(crate) groups: [u32; 3],
}

/// The operation that a thread waits in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    name: &'static str,
    location: &'static Location<'static>,
    /// The thread's [`path`](Thread::path).
    path: u64,
}

impl Wait {
    fn same(&self, other: &Self) -> bool {
        self.path == other.path && self.name == other.name && self.location == other.location
    }

    /// The message about a thread that waits here, where thread or lane `number` does not.
    fn apart(&self, who: &str, number: usize, other: Option<Self>) -> String {
        let name = self.name;
        match other {
            None => format!("waits in {name}, {who} {number} has returned"),
            Some(other) => {
                let same_place = other.name == name && other.location == self.location;
                let way = if same_place { ", in another iteration of a loop or by another call" } else { "" };
                format!("waits in {name}, {who} {number} in {other}{way}")
            }
        }
    }

    fn is_barrier(&self) -> bool {
        self.name == BARRIER
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}:{}", self.name, self.location.file(), self.location.line())
    }
}

const BARRIER: &str = "barrier";
const SIMD_BARRIER: &str = "simd_barrier";

/// The payload of the unwinding that ends a thread: not a panic, so no hook sees it.
pub(super) struct Stopped;

/// The values that a lane shows to the other lanes of its SIMD group.
type Shown = [u64; 2];

/// The state of a thread.
#[derive(Debug)]
struct Thread {
    /// Suspends the thread's coroutine; null outside of it.
    yielder: *const Yielder<(), ()>,
    wait: Option<Wait>,
    done: bool,
    shown: Shown,
    /// `shared` calls so far.
    arrays: usize,
    iterations: u64,
    /// A hash of the convergent loops, with their iterations, and of the convergent calls that the thread is in: two ways to one
    /// place of the source differ in it.
    path: u64,
}

impl Thread {
    const NEW: Self = Self {
        yielder: ptr::null(),
        wait: None,
        done: false,
        shown: [0; 2],
        arrays: 0,
        iterations: 0,
        path: 0,
    };
}

/// The finaliser of SplitMix64: a bijection in which every bit of `x` decides every bit of the result.
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The state of a SIMD group.
#[derive(Clone, Copy, Debug)]
struct Simd {
    waiting: usize,
    epoch: u32,
    /// The values that the lanes showed at the last operation.
    shown: [Shown; LANES],
}

/// The state of a threadgroup.
#[derive(Debug, Default)]
struct Group {
    number: u32,
    epoch: u32,
    waiting: usize,
    threads: Vec<Thread>,
    simds: Vec<Simd>,
    shared: Vec<Region>,
    /// Threads that can run.
    ready: Vec<u32>,
}

/// The state of a launch.
pub(crate) struct Machine {
    pub(super) kernel: &'static Kernel,
    iterations: u64,
    place: Cell<Place>,
    group: RefCell<Group>,
    random: Cell<u64>,
    stopping: Cell<bool>,
    fault: RefCell<Option<Fault>>,
    report: Cell<Report>,
    /// True if accesses are checked without being counted.
    uncounted: Cell<bool>,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine").field("kernel", &self.kernel.name).finish_non_exhaustive()
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<Machine>>> = const { RefCell::new(None) };
}

/// Runs `f` with `machine` as the machine that intrinsics work on.
pub(super) fn with_current<R>(machine: &Rc<Machine>, f: impl FnOnce() -> R) -> R {
    let before = CURRENT.with(|current| current.replace(Some(Rc::clone(machine))));
    let result = f();
    CURRENT.with(|current| current.replace(before));
    result
}

/// The launch that runs on this thread of the host.
#[track_caller]
pub(super) fn current() -> Rc<Machine> {
    match CURRENT.with(|current| current.borrow().clone()) {
        Some(machine) => machine,
        None => outside(format_args!("this intrinsic of the kernel language works in a launch only")),
    }
}

/// Native code of kernels can be called outside of launches, as in a test of a device function: it panics as Rust does.
#[track_caller]
#[expect(clippy::panic, reason = "there is no launch whose fault this could be")]
fn outside(message: fmt::Arguments<'_>) -> ! {
    panic!("{message}")
}

impl Machine {
    pub(super) fn new(
        kernel: &'static Kernel,
        groups: [u32; 3],
        threads: u32,
        seed: u64,
        iterations: u64,
    ) -> Self {
        Self {
            kernel,
            iterations,
            place: Cell::new(Place { thread: 0, threads, group: [0; 3], groups }),
            group: RefCell::default(),
            random: Cell::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            stopping: Cell::new(false),
            fault: RefCell::default(),
            report: Cell::default(),
            uncounted: Cell::new(false),
        }
    }

    /// A number below `n`, from the seed.
    pub(super) fn random(&self, n: usize) -> usize {
        let next = self.random.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.random.set(next);
        ((u128::from(mix(next)) * n as u128) >> 64) as usize
    }

    /// Starts threadgroup `number` at `position`, all its threads ready.
    pub(super) fn start_group(&self, number: u32, position: [u32; 3]) {
        let threads = self.place.get().threads;
        self.place.set(Place { group: position, ..self.place.get() });
        let mut group = self.group.borrow_mut();
        group.number = number;
        group.epoch = 0;
        group.waiting = 0;
        group.shared.clear();
        group.threads.clear();
        group.threads.resize_with(threads as usize, || Thread::NEW);
        group.simds.clear();
        group.simds.resize(threads as usize / LANES, Simd { waiting: 0, epoch: 0, shown: [[0; 2]; LANES] });
        group.ready = (0..threads).collect();
    }

    /// Drops the last threadgroup, whose shared arrays refer to the machine.
    pub(super) fn end(&self) {
        drop(self.group.take());
    }

    /// A ready thread, which becomes the current one.
    pub(super) fn pick(&self) -> Option<u32> {
        let mut group = self.group.borrow_mut();
        let ready = group.ready.len();
        let thread = match ready {
            0 => return None,
            n => group.ready.swap_remove(self.random(n)),
        };
        self.place.set(Place { thread, ..self.place.get() });
        Some(thread)
    }

    /// Makes `thread` the current one.
    pub(super) fn switch_to(&self, thread: u32) {
        self.place.set(Place { thread, ..self.place.get() });
    }

    /// Runs the current thread from its start, on the coroutine of `yielder`.
    pub(super) fn run_thread(&self, yielder: &Yielder<(), ()>, native: impl FnOnce()) {
        let thread = self.place.get().thread as usize;
        self.group.borrow_mut().threads[thread].yielder = yielder;
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(native));
        {
            let mut group = self.group.borrow_mut();
            group.threads[thread].yielder = ptr::null();
            group.threads[thread].done = true;
        }
        if let Err(payload) = result
            && !payload.is::<Stopped>()
        {
            let source = &self.kernel.source;
            let (file, line) = panics::take_place().unwrap_or_else(|| (source.file.to_owned(), source.line));
            self.set_fault(FaultKind::Panic, file, line, panics::message(&*payload));
        }
    }

    /// Returns true if the launch ends early.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    pub(super) fn take_fault(&self) -> Option<Fault> {
        self.fault.borrow_mut().take()
    }

    pub(super) fn report(&self) -> Report {
        self.report.get()
    }

    /// Reports the threads that wait forever, when no thread is ready. There is no fault where all have returned.
    pub(super) fn diagnose(&self) {
        if self.stopping.get() {
            return;
        }
        let group = self.group.borrow();
        let waiting = |barrier: bool| {
            let waits = group.threads.iter().enumerate().filter_map(|(n, thread)| Some((n, thread.wait?)));
            waits.into_iter().find(|(_, wait)| wait.is_barrier() == barrier)
        };
        // A divergent SIMD group keeps the others waiting at the barrier: it is reported first.
        let Some((n, wait)) = waiting(false).or_else(|| waiting(true)) else { return };
        let (kind, who, among) = match wait.is_barrier() {
            true => (FaultKind::DivergentBarrier, "thread", 0..group.threads.len()),
            false => (FaultKind::DivergentSimd, "lane", n / LANES * LANES..(n / LANES + 1) * LANES),
        };
        let apart = among.clone().find(|&m| match group.threads[m].wait {
            Some(other) => !other.same(&wait),
            None => true,
        });
        let Some(m) = apart else { return };
        let other = m - among.start;
        let message = wait.apart(who, other, group.threads[m].wait);
        self.switch_to(n as u32);
        self.set_fault(kind, wait.location.file().to_owned(), wait.location.line(), message);
    }

    fn set_fault(&self, kind: FaultKind, file: String, line: u32, message: String) {
        let Place { thread, group, .. } = self.place.get();
        let kernel = self.kernel.name;
        self.stopping.set(true);
        let lane = thread % LANES as u32;
        self.fault.borrow_mut().get_or_insert(Fault {
            kernel,
            kind,
            file,
            line,
            thread,
            lane,
            group,
            message,
        });
    }

    /// Ends the launch with a fault of the current thread.
    pub(super) fn fault(&self, kind: FaultKind, location: &Location<'_>, message: fmt::Arguments<'_>) -> ! {
        self.set_fault(kind, location.file().to_owned(), location.line(), message.to_string());
        std::panic::resume_unwind(Box::new(Stopped))
    }

    /// An access to memory by the current thread.
    pub(super) fn access(&self, location: &'static Location<'static>) -> Access {
        let thread = self.place.get().thread;
        let group = self.group.borrow();
        Access {
            location,
            group: group.number,
            thread,
            epoch: group.epoch,
            simd_epoch: group.simds[thread as usize / LANES].epoch,
        }
    }

    /// Counts an access to memory, and returns the bytes that count: none where accesses are [`uncounted`].
    pub(super) fn count(&self, shared: bool, write: bool, bytes: usize) -> u64 {
        if self.uncounted.get() {
            return 0;
        }
        let mut report = self.report.get();
        let counter = match (shared, write) {
            (false, false) => &mut report.device_read,
            (false, true) => &mut report.device_written,
            (true, false) => &mut report.shared_read,
            (true, true) => &mut report.shared_written,
        };
        *counter += bytes as u64;
        self.report.set(report);
        bytes as u64
    }

    fn count_in(&self, count: impl FnOnce(&mut Report)) {
        let mut report = self.report.get();
        count(&mut report);
        self.report.set(report);
    }

    pub(super) fn count_atomic(&self) {
        self.count_in(|report| report.atomics += 1);
    }

    /// Lets other threads run first, now and then: the order of atomics is not fixed.
    pub(super) fn before_atomic(&self) {
        if self.random(4) == 0 {
            self.give_way();
        }
    }

    /// Lets other threads run first.
    fn give_way(&self) {
        let thread = self.place.get().thread;
        self.group.borrow_mut().ready.push(thread);
        self.suspend();
    }

    /// Leaves the coroutine of the current thread, until the thread is picked again.
    fn suspend(&self) {
        let thread = self.place.get().thread as usize;
        let yielder = self.group.borrow().threads[thread].yielder;
        // SAFETY: `run_thread` stored the pointer on entering the current thread's coroutine, whose stack holds what it
        // points to, and clears it on leaving; the current thread is inside, since it is what runs this.
        if let Some(yielder) = unsafe { yielder.as_ref() } {
            yielder.suspend(());
        }
        if self.stopping.get() {
            std::panic::resume_unwind(Box::new(Stopped));
        }
    }

    /// The next shared array of the current thread: `new` makes it, from its name, where no thread of the threadgroup has made it.
    pub(super) fn next_shared(&self, new: impl FnOnce(&'static str) -> Region) -> Region {
        let thread = self.place.get().thread as usize;
        let mut group = self.group.borrow_mut();
        let n = group.threads[thread].arrays;
        group.threads[thread].arrays += 1;
        if n == group.shared.len() {
            let declared: Option<&SharedArray> = self.kernel.shared.get(n);
            group.shared.push(new(declared.map_or("shared", |array| array.name)));
        }
        group.shared[n].clone()
    }

    /// Waits for all threads of the threadgroup.
    fn barrier(&self, location: &'static Location<'static>) {
        let thread = self.place.get().thread as usize;
        let mut group = self.group.borrow_mut();
        let wait = Wait { name: BARRIER, location, path: group.threads[thread].path };
        group.threads[thread].wait = Some(wait);
        group.waiting += 1;
        if group.waiting < group.threads.len() {
            drop(group);
            return self.suspend();
        }
        if let Some(other) = group.threads.iter().position(|other| other.wait.is_none_or(|w| !w.same(&wait)))
        {
            let message = wait.apart("thread", other, group.threads[other].wait);
            drop(group);
            self.fault(FaultKind::DivergentBarrier, location, format_args!("{message}"));
        }
        group.waiting = 0;
        group.epoch += 1;
        let Group { threads, ready, .. } = &mut *group;
        threads.iter_mut().for_each(|thread| thread.wait = None);
        ready.extend((0..threads.len() as u32).filter(|&other| other != thread as u32));
        self.count_in(|report| report.barriers += 1);
    }

    /// Waits for the lanes of the SIMD group, and returns the values that they show. The last lane counts the operation.
    fn gather(
        &self,
        name: &'static str,
        shown: Shown,
        location: &'static Location<'static>,
        count: impl FnOnce(&mut Report),
    ) -> [Shown; LANES] {
        let thread = self.place.get().thread as usize;
        let simd = thread / LANES;
        let lanes = simd * LANES..(simd + 1) * LANES;
        let mut group = self.group.borrow_mut();
        let wait = Wait { name, location, path: group.threads[thread].path };
        group.threads[thread].wait = Some(wait);
        group.threads[thread].shown = shown;
        group.simds[simd].waiting += 1;
        if group.simds[simd].waiting < LANES {
            drop(group);
            self.suspend();
            return self.group.borrow().simds[simd].shown;
        }
        let Group { threads, simds, ready, .. } = &mut *group;
        let other = lanes.clone().find(|&n| threads[n].wait.is_none_or(|other| !other.same(&wait)));
        if let Some(other) = other {
            let message = wait.apart("lane", other - lanes.start, threads[other].wait);
            drop(group);
            self.fault(FaultKind::DivergentSimd, location, format_args!("{message}"));
        }
        let at = &mut simds[simd];
        at.waiting = 0;
        at.epoch += u32::from(name == SIMD_BARRIER);
        for (lane, n) in lanes.enumerate() {
            at.shown[lane] = threads[n].shown;
            threads[n].wait = None;
            if n != thread {
                ready.push(n as u32);
            }
        }
        let shown = at.shown;
        self.count_in(|report| {
            report.simd_operations += 1;
            count(report);
        });
        shown
    }
}

/// The position of the current thread.
#[track_caller]
pub(crate) fn place() -> Place {
    current().place.get()
}

/// Faults for an operation without a result.
#[track_caller]
#[cold]
pub(crate) fn fault_arithmetic(message: fmt::Arguments<'_>) -> ! {
    fault_or_panic(FaultKind::Arithmetic, message)
}

/// Faults for index `index` of a local array of `len` elements.
#[track_caller]
#[cold]
pub(crate) fn outside_array(index: u64, len: usize) -> ! {
    fault_or_panic(FaultKind::OutOfBounds, format_args!("index {index} of a local array of {len} elements"))
}

#[track_caller]
fn fault_or_panic(kind: FaultKind, message: fmt::Arguments<'_>) -> ! {
    match CURRENT.with(|current| current.borrow().clone()) {
        Some(machine) => machine.fault(kind, Location::caller(), message),
        None => outside(message),
    }
}

/// Counts an iteration of a loop of the current thread. Other threads run now and then, for the loop may wait for them.
#[track_caller]
pub(crate) fn count_iteration() {
    let Some(machine) = CURRENT.with(|current| current.borrow().clone()) else { return };
    let thread = machine.place.get().thread as usize;
    let iterations = {
        let mut group = machine.group.borrow_mut();
        group.threads[thread].iterations += 1;
        group.threads[thread].iterations
    };
    if iterations > machine.iterations {
        let message = format_args!("the thread has gone through {} iterations of loops", machine.iterations);
        machine.fault(FaultKind::Endless, Location::caller(), message);
    }
    if iterations.is_multiple_of(256) {
        machine.give_way();
    }
}

/// Changes the path of the current thread, and returns the previous one; 0 outside of launches.
fn replace_path(change: impl FnOnce(u64) -> u64) -> u64 {
    CURRENT.with(|current| {
        let current = current.borrow();
        let Some(machine) = &*current else { return 0 };
        let thread = machine.place.get().thread as usize;
        let path = &mut machine.group.borrow_mut().threads[thread].path;
        std::mem::replace(path, change(*path))
    })
}

/// The current thread enters a loop or the call that its function numbers `number`. Returns its path before.
pub(crate) fn scope_enter(number: u64) -> u64 {
    replace_path(|path| mix(path ^ number))
}

/// The current thread begins another iteration of the innermost loop it has entered.
pub(crate) fn loop_iter() {
    // A generator of period 2^64: no two iterations are alike.
    replace_path(|path| path.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f));
}

/// The current thread leaves the scope that it entered on `path`.
pub(crate) fn scope_leave(path: u64) {
    replace_path(|_| path);
}

#[track_caller]
pub(crate) fn barrier() {
    current().barrier(Location::caller());
}

#[track_caller]
pub(crate) fn simd_barrier() {
    current().gather(SIMD_BARRIER, [0; 2], Location::caller(), |report| report.simd_barriers += 1);
}

/// Waits for the lanes of the SIMD group at operation `name`.
#[track_caller]
pub(crate) fn simd_converge(name: &'static str) {
    current().gather(name, [0; 2], Location::caller(), |_| ());
}

/// Waits for the lanes of the SIMD group at operation `name`, which loads 8x8 matrices.
#[track_caller]
pub(crate) fn load_matrices(name: &'static str, count: u64) {
    current().gather(name, [0; 2], Location::caller(), |report| report.matrix_loads += count);
}

/// Waits for the lanes of the SIMD group at operation `name`, which stores 8x8 matrices.
#[track_caller]
pub(crate) fn store_matrices(name: &'static str, count: u64) {
    current().gather(name, [0; 2], Location::caller(), |report| report.matrix_stores += count);
}

/// Calls `check`, whose accesses to memory are checked but counted elsewhere; no thread waits in it.
#[track_caller]
pub(crate) fn uncounted<R>(check: impl FnOnce() -> R) -> R {
    let machine = current();
    machine.uncounted.set(true);
    let result = check();
    machine.uncounted.set(false);
    result
}

/// Counts an exponential of the current thread; native code outside of launches has none to count.
pub(crate) fn count_exponential() {
    CURRENT.with(|current| {
        if let Some(machine) = &*current.borrow() {
            machine.count_in(|report| report.exponentials += 1);
        }
    });
}

/// Counts an operation by which lanes see values of each other.
fn count_exchange(report: &mut Report) {
    report.exchanges += 1;
}

/// The `x` of all lanes.
#[track_caller]
pub(crate) fn gather(name: &'static str, x: u64) -> [u64; LANES] {
    current().gather(name, [x, 0], Location::caller(), count_exchange).map(|shown| shown[0])
}

/// The `x` of lane `lane`.
#[track_caller]
pub(crate) fn exchange(name: &'static str, x: u64, lane: u32) -> u64 {
    let machine = current();
    let shown = machine.gather(name, [x, 0], Location::caller(), count_exchange);
    match shown.get(lane as usize) {
        Some(shown) => shown[0],
        None => machine.fault(
            FaultKind::Lane,
            Location::caller(),
            format_args!("{name}: there is no lane {lane}"),
        ),
    }
}

/// The `x` of lane `lane`, which all lanes name.
#[track_caller]
pub(crate) fn broadcast(x: u64, lane: u32) -> u64 {
    let (machine, name) = (current(), "simd_broadcast");
    let shown = machine.gather(name, [x, u64::from(lane)], Location::caller(), count_exchange);
    if let Some(other) = shown.iter().position(|shown| shown[1] != u64::from(lane)) {
        let message = format_args!("{name} of lane {lane}, of lane {} in lane {other}", shown[other][1]);
        machine.fault(FaultKind::Lane, Location::caller(), message);
    }
    match shown.get(lane as usize) {
        Some(shown) => shown[0],
        None => machine.fault(
            FaultKind::Lane,
            Location::caller(),
            format_args!("{name}: there is no lane {lane}"),
        ),
    }
}

/// The current lane's elements of `a * b + c`, for its elements of `a` and `b`, and of `c`.
#[track_caller]
pub(crate) fn multiply_accumulate([a0, a1, b0, b1]: [f32; 4], c: [f32; 2]) -> [f32; 2] {
    let machine = current();
    let pack = |x: f32, y: f32| u64::from(x.to_bits()) | u64::from(y.to_bits()) << 32;
    let own = [pack(a0, a1), pack(b0, b1)];
    let shown = machine.gather("Fragment::multiply_accumulate", own, Location::caller(), |report| {
        report.matrix_products += 1;
    });
    let (mut a, mut b) = ([[0f32; 8]; 8], [[0f32; 8]; 8]);
    for (lane, [pair_a, pair_b]) in shown.into_iter().enumerate() {
        let (row, col) = crate::lanes::position_of(lane as u32);
        for (matrix, pair) in [(&mut a, pair_a), (&mut b, pair_b)] {
            let row = &mut matrix[row as usize];
            row[col as usize] = f32::from_bits(pair as u32);
            row[col as usize + 1] = f32::from_bits((pair >> 32) as u32);
        }
    }
    let (row, col) = crate::lanes::position_of(machine.place.get().thread % LANES as u32);
    let (row, col) = (row as usize, col as usize);
    // In the order of the printed CUDA.
    let dot = |c: f32, col: usize| (0..8).fold(c, |sum, k| a[row][k].mul_add(b[k][col], sum));
    [dot(c[0], col), dot(c[1], col + 1)]
}
