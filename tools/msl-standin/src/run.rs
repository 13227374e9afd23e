//! Runs the threads of a threadgroup as coroutines, one at a time, each up to its next barrier or SIMD-group operation.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::io;

use crate::error::{RunError, ThreadId};
use crate::fiber::{Stacks, switch};
use crate::memory::{Fault, Memory, Stamp, THREADGROUP_LIMIT};

const LANES: usize = 32;
/// Bytes that a lane passes to a SIMD-group operation; `MSL_SLOT` of the header.
const LANE_BYTES: usize = 64;
/// Memory accesses between two barriers or SIMD-group operations after which a thread counts as not terminating.
const MAX_ACCESSES: u64 = 1 << 27;

/// The builtins and arguments of a thread; `msl_context` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadContext {
    pub(crate) thread_position_in_grid: [u32; 3],
    pub(crate) thread_position_in_threadgroup: [u32; 3],
    pub(crate) threadgroup_position_in_grid: [u32; 3],
    pub(crate) threads_per_threadgroup: [u32; 3],
    pub(crate) threadgroups_per_grid: [u32; 3],
    pub(crate) threads_per_grid: [u32; 3],
    pub(crate) thread_index_in_threadgroup: u32,
    pub(crate) thread_index_in_simdgroup: u32,
    pub(crate) simdgroup_index_in_threadgroup: u32,
    pub(crate) simdgroups_per_threadgroup: u32,
    pub(crate) threads_per_simdgroup: u32,
    pub(crate) padding: u32,
    pub(crate) buffers: [u64; 31],
    pub(crate) threadgroups: [u64; 31],
}

/// The functions that compiled kernels call, in the order of the header's jump table.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Host {
    simd: extern "C" fn(u32, u32, u32, *const u8, u32, u64, *mut u64) -> u64,
    barrier: extern "C" fn(u32, u32, u32, u32),
    threadgroup: extern "C" fn(u32, u64, u64) -> u64,
    fail: extern "C" fn(u32, u32, u32, u64, u64),
    math1: extern "C" fn(u32, f32) -> f32,
    math2: extern "C" fn(u32, f32, f32) -> f32,
    access: extern "C" fn(u64, u64, u32),
}

pub(crate) static HOST: Host = Host { simd, barrier, threadgroup, fail, math1, math2, access };

/// The entry point of a compiled kernel, which takes the address of its context.
pub(crate) type Entry = unsafe extern "C" fn(*const ThreadContext);

/// A barrier or a SIMD-group operation at which a thread waits for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SyncPoint {
    /// `MSL_*` of the header.
    operation: u32,
    line: u32,
    column: u32,
    /// A value that must be equal in all lanes: flags of a barrier, a hash of uniform arguments.
    key: u64,
}

const BARRIER: u32 = 6;
const SIMD_BARRIER: u32 = 7;

impl SyncPoint {
    fn describe(&self) -> String {
        let operation = match self.operation {
            0 => "a reduction or scan of the SIMD-group",
            1 => "a shuffle or broadcast",
            2 => "a vote",
            3 => "simdgroup_load",
            4 => "simdgroup_store",
            5 => "a multiplication of matrices",
            BARRIER => "threadgroup_barrier",
            _ => "simdgroup_barrier",
        };
        format!("is at {operation} in line {}", self.line)
    }

    /// Returns true if all 32 lanes have to take part.
    fn needs_all(&self) -> bool {
        (3..=5).contains(&self.operation)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    At(SyncPoint),
    Done,
}

#[derive(Debug)]
struct Thread {
    stack: *mut u8,
    range: (u64, u64),
    state: State,
    context: ThreadContext,
}

/// The threadgroup that is running; its coroutines find it through `CURRENT`.
#[derive(Debug)]
pub(crate) struct Threadgroup<'a> {
    entry: Entry,
    threads: Vec<Thread>,
    current: usize,
    scheduler: *mut u8,
    /// The values that lanes exchange, in two banks: lanes may still read one while others write the other.
    lane_values: Vec<u8>,
    bank: Vec<usize>,
    active: Vec<u32>,
    memory: &'a mut Memory,
    stacks: &'a Stacks,
    error: Option<RunError>,
    accesses: u64,
    /// The number of the threadgroup in the grid, plus one.
    number: u32,
    /// Barriers passed, for device and for threadgroup memory: by the threadgroup, and by each SIMD-group.
    barriers: [u32; 2],
    simd_barriers: Vec<[u32; 2]>,
}

/// Counts a barrier for each kind of memory that its flags name.
fn count_barrier(barriers: &mut [u32; 2], flags: u64) {
    barriers[0] += u32::from(flags & 1 != 0);
    barriers[1] += u32::from(flags & 2 != 0);
}

thread_local! {
    static CURRENT: Cell<*mut Threadgroup<'static>> = const { Cell::new(std::ptr::null_mut()) };
    static STACKS: Cell<Option<(usize, Stacks)>> = const { Cell::new(None) };
}

/// Calls `f` with stacks for at least `count` coroutines; the stacks are kept for the next run of this host thread.
pub(crate) fn with_stacks<R>(count: usize, f: impl FnOnce(&Stacks) -> R) -> io::Result<R> {
    let (count, stacks) = match STACKS.take() {
        Some((had, stacks)) if had >= count => (had, stacks),
        _ => (count, Stacks::new(count)?),
    };
    let result = f(&stacks);
    STACKS.set(Some((count, stacks)));
    Ok(result)
}

impl<'a> Threadgroup<'a> {
    pub(crate) fn new(
        entry: Entry,
        contexts: Vec<ThreadContext>,
        memory: &'a mut Memory,
        stacks: &'a Stacks,
    ) -> Self {
        let count = contexts.len();
        let groups = count.div_ceil(LANES);
        let threads = contexts
            .into_iter()
            .enumerate()
            .map(|(i, context)| Thread {
                stack: std::ptr::null_mut(),
                range: stacks.range(i),
                state: State::Ready,
                context,
            })
            .collect();
        Self {
            entry,
            threads,
            current: 0,
            scheduler: std::ptr::null_mut(),
            lane_values: vec![0; groups * 2 * LANES * LANE_BYTES],
            bank: vec![0; groups],
            active: vec![0; groups],
            memory,
            stacks,
            error: None,
            accesses: 0,
            number: 0,
            barriers: [0; 2],
            simd_barriers: vec![[0; 2]; groups],
        }
    }

    fn id(&self, thread: usize) -> ThreadId {
        ThreadId {
            threadgroup: self.threads[thread].context.threadgroup_position_in_grid,
            thread: thread as u32,
        }
    }

    fn diverged(&self, a: usize, b: usize) -> RunError {
        let does = |t: usize| match &self.threads[t].state {
            State::At(sync) => sync.describe(),
            _ => "has returned".into(),
        };
        RunError::Diverged { at: self.id(a), does: does(a), other: b as u32, other_does: does(b) }
    }

    /// Runs the threadgroup at this position of the grid, which is the one with this number in it.
    pub(crate) fn run(&mut self, position: [u32; 3], number: u32) -> Result<(), RunError> {
        self.memory.group();
        self.number = number + 1;
        for i in 0..self.threads.len() {
            let c = &mut self.threads[i].context;
            c.threadgroup_position_in_grid = position;
            for d in 0..3 {
                c.thread_position_in_grid[d] =
                    position[d] * c.threads_per_threadgroup[d] + c.thread_position_in_threadgroup[d];
            }
            self.threads[i].state = State::Ready;
            // SAFETY: the coroutines of the previous threadgroup have ended or been abandoned, and `enter` does not return.
            self.threads[i].stack = unsafe { self.stacks.start(i, enter) };
        }
        let before = CURRENT.replace((self as *mut Self).cast());
        let result = self.schedule();
        CURRENT.set(before);
        result
    }

    fn schedule(&mut self) -> Result<(), RunError> {
        let count = self.threads.len();
        loop {
            for first in (0..count).step_by(LANES) {
                self.simd_group(first, (first + LANES).min(count))?;
            }
            // Each thread is at a threadgroup barrier or has returned.
            let waiting = self.threads.iter().position(|t| t.state != State::Done);
            let Some(waiting) = waiting else { return Ok(()) };
            if let Some(other) = self.threads.iter().position(|t| t.state != self.threads[waiting].state) {
                return Err(self.diverged(waiting, other));
            }
            if let State::At(sync) = self.threads[waiting].state {
                count_barrier(&mut self.barriers, sync.key);
            }
            for t in &mut self.threads {
                t.state = State::Ready;
            }
        }
    }

    /// Runs the lanes of a SIMD-group until each is at a threadgroup barrier or has returned.
    fn simd_group(&mut self, first: usize, end: usize) -> Result<(), RunError> {
        loop {
            for i in first..end {
                if self.threads[i].state == State::Ready {
                    self.resume(i)?;
                }
            }
            let live = (first..end).find(|&i| self.threads[i].state != State::Done);
            let Some(live) = live else { return Ok(()) };
            let State::At(sync) = self.threads[live].state else { return Ok(()) };
            let mut active = 0u32;
            for i in first..end {
                let State::At(other) = self.threads[i].state else { continue };
                if (other.operation, other.line, other.column) != (sync.operation, sync.line, sync.column) {
                    return Err(self.diverged(live, i));
                }
                if other.key != sync.key {
                    return Err(RunError::Arguments { at: self.id(i), does: other.describe() });
                }
                active |= 1 << (i - first);
            }
            if sync.operation == BARRIER {
                return Ok(());
            }
            if sync.needs_all() && active != u32::MAX {
                let Some(gone) = (first..end).find(|&i| self.threads[i].state == State::Done) else {
                    let what = format!("{}, in a SIMD-group of {} threads", sync.describe(), end - first);
                    return Err(RunError::Access { at: self.id(live), what });
                };
                return Err(self.diverged(live, gone));
            }
            let simd = first / LANES;
            self.active[simd] = active;
            if sync.operation == SIMD_BARRIER {
                count_barrier(&mut self.simd_barriers[simd], sync.key);
            }
            self.bank[simd] ^= 1;
            for t in &mut self.threads[first..end] {
                if t.state != State::Done {
                    t.state = State::Ready;
                }
            }
        }
    }

    fn resume(&mut self, index: usize) -> Result<(), RunError> {
        self.current = index;
        self.accesses = 0;
        // SAFETY: the coroutine has been started or waits in `leave`, and switches back in `leave`.
        unsafe { switch(&mut self.scheduler, self.threads[index].stack) };
        match self.error.take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// Calls `f` with the running threadgroup. Only coroutines call this.
///
/// The scheduler waits in `resume` while a coroutine runs, so that the coroutine has exclusive access. No reference is kept
/// across a switch.
fn current<R>(f: impl FnOnce(&mut Threadgroup<'static>) -> R) -> R {
    // SAFETY: coroutines run only inside `Threadgroup::run`, which sets `CURRENT` to a threadgroup that outlives them.
    f(unsafe { &mut *CURRENT.get() })
}

/// Switches to the scheduler.
fn leave(state: State) {
    let (save, to) = current(|g| {
        let thread = &mut g.threads[g.current];
        thread.state = state;
        (&raw mut thread.stack, g.scheduler)
    });
    // SAFETY: the scheduler waits in `resume`; `save` points into a vector whose length does not change.
    unsafe { switch(save, to) };
}

fn abort(error: RunError) {
    current(|g| g.error = Some(error));
    leave(State::Done);
}

extern "C" fn enter() -> ! {
    let (entry, context) = current(|g| (g.entry, &raw const g.threads[g.current].context));
    // SAFETY: the entry point belongs to a library that outlives the run, and takes this type of context.
    unsafe { entry(context) };
    loop {
        leave(State::Done);
    }
}

extern "C" fn simd(
    operation: u32,
    line: u32,
    column: u32,
    data: *const u8,
    size: u32,
    key: u64,
    active: *mut u64,
) -> u64 {
    let base = current(|g| {
        let (simd, lane) = (g.current / LANES, g.current % LANES);
        let at = ((simd * 2 + g.bank[simd]) * LANES + lane) * LANE_BYTES;
        let size = (size as usize).min(LANE_BYTES);
        // SAFETY: the header passes the address and the size of a live variable.
        let value = unsafe { std::slice::from_raw_parts(data, size) };
        g.lane_values[at..at + size].copy_from_slice(value);
        g.lane_values[at - lane * LANE_BYTES..].as_ptr() as u64
    });
    leave(State::At(SyncPoint { operation, line, column, key }));
    let (mask, lane) = current(|g| (g.active[g.current / LANES], g.current % LANES));
    // SAFETY: the header passes the address of a live 64-bit variable.
    unsafe { active.write(u64::from(mask) | (lane as u64) << 32) };
    base
}

extern "C" fn barrier(operation: u32, line: u32, column: u32, flags: u32) {
    let operation = if operation == BARRIER { BARRIER } else { SIMD_BARRIER };
    leave(State::At(SyncPoint { operation, line, column, key: u64::from(flags) }));
}

extern "C" fn threadgroup(id: u32, bytes: u64, align: u64) -> u64 {
    let (found, _) = current(|g| (g.memory.variable(id as usize, bytes as usize, align as usize), 0));
    match found {
        Ok(at) => at,
        Err(bytes) => {
            abort(RunError::ThreadgroupMemory { bytes, limit: THREADGROUP_LIMIT });
            0
        }
    }
}

extern "C" fn fail(_why: u32, line: u32, _column: u32, lane: u64, _b: u64) {
    let at = current(|g| g.id(g.current));
    abort(RunError::Lane { at, line, lane });
}

/// Checks an access of a kernel to memory that other threads can see. Bits of `how`: 1 for a write, 2 for an access that must be
/// aligned to its size, 4 for an atomic.
extern "C" fn access(at: u64, size: u64, how: u32) {
    let error = current(|g| {
        let (low, high) = g.threads[g.current].range;
        if at >= low && at < high {
            return None;
        }
        g.accesses += 1;
        if g.accesses > MAX_ACCESSES {
            return Some(RunError::Endless { at: g.id(g.current) });
        }
        let (write, aligned) = (how & 1 != 0, how & 2 != 0);
        let lane_values = g.lane_values.as_ptr_range();
        if !write && at >= lane_values.start as u64 && at + size <= lane_values.end as u64 {
            return None;
        }
        let table = (&raw const g.threads[g.current].context) as u64;
        if !write && at >= table && at + size <= table + size_of::<ThreadContext>() as u64 {
            return None;
        }
        let place = g.id(g.current);
        let stamp = Stamp {
            group: g.number,
            thread: g.current as u16,
            atomic: how & 4 != 0,
            barriers: g.barriers,
            simd_barriers: g.simd_barriers[g.current / LANES],
        };
        match g.memory.check(at, size, write, &stamp) {
            Ok(()) => {}
            Err(Fault::Access(what)) => return Some(RunError::Access { at: place, what }),
            Err(Fault::Race { does, group, thread, wrote }) => {
                return Some(RunError::Race { at: place, does, other: (group, thread), wrote });
            }
        }
        if aligned && size.is_power_of_two() && !at.is_multiple_of(size) {
            let what = format!("accesses {size} bytes at an address that is not a multiple of {size}");
            return Some(RunError::Access { at: place, what });
        }
        None
    });
    if let Some(error) = error {
        abort(error);
    }
}

extern "C" fn math1(function: u32, x: f32) -> f32 {
    match function {
        0 => x.exp(),
        1 => x.exp2(),
        2 => 10f32.powf(x),
        3 => x.ln(),
        4 => x.log2(),
        5 => x.log10(),
        6 => x.sin(),
        7 => x.cos(),
        8 => x.tan(),
        9 => x.asin(),
        10 => x.acos(),
        11 => x.atan(),
        12 => x.sinh(),
        13 => x.cosh(),
        14 => x.tanh(),
        15 => x.asinh(),
        16 => x.acosh(),
        17 => x.atanh(),
        18 => x.round(),
        _ => f32::NAN,
    }
}

extern "C" fn math2(function: u32, x: f32, y: f32) -> f32 {
    match function {
        0 => x.powf(y),
        1 => x % y,
        2 => x.atan2(y),
        _ => f32::NAN,
    }
}
