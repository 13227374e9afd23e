//! Runs the threads of a threadgroup, one at a time, from one meeting point to the next.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::io;

use crate::error::{Place, RunError};
use crate::fiber::{Stacks, switch};
use crate::memory::{Memory, Stamp, THREADGROUP_LIMIT, Wrong};

const LANES: usize = 32;
/// Bytes that a lane gives to a SIMD-group operation; `MSL_SLOT` of the header.
const SLOT: usize = 64;
/// Accesses to memory after which a thread that meets no other is taken to be in a loop without end.
const ENDLESS: u64 = 1 << 27;

/// What a thread knows of its place; `msl_context` of the header.
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

/// What compiled kernels call, in the order of the jumps of the header.
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

/// A compiled kernel: it takes the address of its context.
pub(crate) type Entry = unsafe extern "C" fn(*const ThreadContext);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stop {
    what: u32,
    line: u32,
    column: u32,
    key: u64,
}

const BARRIER: u32 = 6;
const SIMD_BARRIER: u32 = 7;

impl Stop {
    fn does(&self) -> String {
        let what = match self.what {
            0 => "a reduction or scan of the SIMD-group",
            1 => "a shuffle or broadcast",
            2 => "a vote",
            3 => "simdgroup_load",
            4 => "simdgroup_store",
            5 => "a multiplication of matrices",
            BARRIER => "threadgroup_barrier",
            _ => "simdgroup_barrier",
        };
        format!("is at {what} in line {}", self.line)
    }

    /// Whether lanes that have returned may be missing.
    fn needs_all(&self) -> bool {
        (3..=5).contains(&self.what)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    At(Stop),
    Done,
}

#[derive(Debug)]
struct Thread {
    stack: *mut u8,
    range: (u64, u64),
    state: State,
    context: ThreadContext,
}

/// One threadgroup at a time; the fibers find it by `CURRENT`.
#[derive(Debug)]
pub(crate) struct Group<'a> {
    entry: Entry,
    threads: Vec<Thread>,
    current: usize,
    scheduler: *mut u8,
    /// Two banks of slots: lanes may still read the one when others write the other.
    slots: Vec<u8>,
    bank: Vec<usize>,
    active: Vec<u32>,
    memory: &'a mut Memory,
    stacks: &'a Stacks,
    error: Option<RunError>,
    accesses: u64,
    /// Groups so far, and barriers of this one and of its SIMD-groups: device memory first, then threadgroup memory.
    number: u32,
    barriers: [u32; 2],
    simd_barriers: Vec<[u32; 2]>,
}

/// Counts a barrier for the memory that its flags name.
fn pass(barriers: &mut [u32; 2], flags: u64) {
    barriers[0] += u32::from(flags & 1 != 0);
    barriers[1] += u32::from(flags & 2 != 0);
}

thread_local! {
    static CURRENT: Cell<*mut Group<'static>> = const { Cell::new(std::ptr::null_mut()) };
    static STACKS: Cell<Option<(usize, Stacks)>> = const { Cell::new(None) };
}

/// The stacks of this thread, for as many fibers as are asked for; they are kept from run to run.
pub(crate) fn with_stacks<R>(count: usize, f: impl FnOnce(&Stacks) -> R) -> io::Result<R> {
    let (count, stacks) = match STACKS.take() {
        Some((had, stacks)) if had >= count => (had, stacks),
        _ => (count, Stacks::new(count)?),
    };
    let result = f(&stacks);
    STACKS.set(Some((count, stacks)));
    Ok(result)
}

impl<'a> Group<'a> {
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
            slots: vec![0; groups * 2 * LANES * SLOT],
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

    fn place(&self, thread: usize) -> Place {
        Place { group: self.threads[thread].context.threadgroup_position_in_grid, thread: thread as u32 }
    }

    fn diverged(&self, a: usize, b: usize) -> RunError {
        let does = |t: usize| match &self.threads[t].state {
            State::At(stop) => stop.does(),
            _ => "has returned".into(),
        };
        RunError::Diverged { at: self.place(a), does: does(a), other: b as u32, other_does: does(b) }
    }

    /// Runs the group at this position of the grid.
    pub(crate) fn run(&mut self, position: [u32; 3]) -> Result<(), RunError> {
        self.memory.group();
        self.number = self.number.wrapping_add(1);
        for i in 0..self.threads.len() {
            let c = &mut self.threads[i].context;
            c.threadgroup_position_in_grid = position;
            for d in 0..3 {
                c.thread_position_in_grid[d] =
                    position[d] * c.threads_per_threadgroup[d] + c.thread_position_in_threadgroup[d];
            }
            self.threads[i].state = State::Ready;
            // SAFETY: the fibers of the group before have ended or are given up, and `enter` does not return.
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
            // Every thread is at a barrier or has returned.
            let waiting = self.threads.iter().position(|t| t.state != State::Done);
            let Some(waiting) = waiting else { return Ok(()) };
            if let Some(other) = self.threads.iter().position(|t| t.state != self.threads[waiting].state) {
                return Err(self.diverged(waiting, other));
            }
            if let State::At(stop) = self.threads[waiting].state {
                pass(&mut self.barriers, stop.key);
            }
            for t in &mut self.threads {
                t.state = State::Ready;
            }
        }
    }

    /// Runs the lanes until all are at the threadgroup's barrier or have returned.
    fn simd_group(&mut self, first: usize, end: usize) -> Result<(), RunError> {
        loop {
            for i in first..end {
                if self.threads[i].state == State::Ready {
                    self.resume(i)?;
                }
            }
            let live = (first..end).find(|&i| self.threads[i].state != State::Done);
            let Some(live) = live else { return Ok(()) };
            let State::At(stop) = self.threads[live].state else { return Ok(()) };
            let mut active = 0u32;
            for i in first..end {
                let State::At(other) = self.threads[i].state else { continue };
                if (other.what, other.line, other.column) != (stop.what, stop.line, stop.column) {
                    return Err(self.diverged(live, i));
                }
                if other.key != stop.key {
                    return Err(RunError::Arguments { at: self.place(i), does: other.does() });
                }
                active |= 1 << (i - first);
            }
            if stop.what == BARRIER {
                return Ok(());
            }
            if stop.needs_all() && active != u32::MAX {
                let Some(gone) = (first..end).find(|&i| self.threads[i].state == State::Done) else {
                    let what = format!("{}, in a SIMD-group of {} threads", stop.does(), end - first);
                    return Err(RunError::Access { at: self.place(live), what });
                };
                return Err(self.diverged(live, gone));
            }
            let simd = first / LANES;
            self.active[simd] = active;
            if stop.what == SIMD_BARRIER {
                pass(&mut self.simd_barriers[simd], stop.key);
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
        // SAFETY: the fiber has been started or waits in `stop`; it comes back by `stop` or by its end.
        unsafe { switch(&mut self.scheduler, self.threads[index].stack) };
        match self.error.take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// What a fiber does with its group while it runs.
///
/// The scheduler waits in `resume` meanwhile, so the group is the fiber's alone; it is taken anew after each switch.
fn group<R>(f: impl FnOnce(&mut Group<'static>) -> R) -> R {
    // SAFETY: kernels run from `Group::run` alone, which sets it to a group that lives until all fibers are given up.
    f(unsafe { &mut *CURRENT.get() })
}

/// Goes back to the scheduler.
fn leave(state: State) {
    let (save, to) = group(|g| {
        let thread = &mut g.threads[g.current];
        thread.state = state;
        (&raw mut thread.stack, g.scheduler)
    });
    // SAFETY: the scheduler waits in `resume`; the place to save to lies in a vector that does not change its length.
    unsafe { switch(save, to) };
}

fn give_up(error: RunError) {
    group(|g| g.error = Some(error));
    leave(State::Done);
}

extern "C" fn enter() -> ! {
    let (entry, context) = group(|g| (g.entry, &raw const g.threads[g.current].context));
    // SAFETY: the entry is that of the library, which the caller of the run keeps, and takes such a context.
    unsafe { entry(context) };
    loop {
        leave(State::Done);
    }
}

extern "C" fn simd(
    what: u32,
    line: u32,
    column: u32,
    data: *const u8,
    size: u32,
    key: u64,
    active: *mut u64,
) -> u64 {
    let base = group(|g| {
        let (simd, lane) = (g.current / LANES, g.current % LANES);
        let at = ((simd * 2 + g.bank[simd]) * LANES + lane) * SLOT;
        let size = (size as usize).min(SLOT);
        // SAFETY: the header gives the address and the size of a value of its own.
        let value = unsafe { std::slice::from_raw_parts(data, size) };
        g.slots[at..at + size].copy_from_slice(value);
        g.slots[at - lane * SLOT..].as_ptr() as u64
    });
    leave(State::At(Stop { what, line, column, key }));
    let (mask, lane) = group(|g| (g.active[g.current / LANES], g.current % LANES));
    // SAFETY: the header gives the address of an integer of its own.
    unsafe { active.write(u64::from(mask) | (lane as u64) << 32) };
    base
}

extern "C" fn barrier(what: u32, line: u32, column: u32, flags: u32) {
    let what = if what == BARRIER { BARRIER } else { SIMD_BARRIER };
    leave(State::At(Stop { what, line, column, key: u64::from(flags) }));
}

extern "C" fn threadgroup(id: u32, bytes: u64, align: u64) -> u64 {
    let (found, _) = group(|g| (g.memory.variable(id as usize, bytes as usize, align as usize), 0));
    match found {
        Ok(at) => at,
        Err(bytes) => {
            give_up(RunError::ThreadgroupMemory { bytes, limit: THREADGROUP_LIMIT });
            0
        }
    }
}

extern "C" fn fail(_why: u32, line: u32, _column: u32, lane: u64, _b: u64) {
    let at = group(|g| g.place(g.current));
    give_up(RunError::Lane { at, line, lane });
}

/// Each access of a kernel to memory that others can see. The bits of `how` say whether it writes, whether it is made as
/// if it were aligned, and whether it is atomic.
extern "C" fn access(at: u64, size: u64, how: u32) {
    let wrong = group(|g| {
        let (low, high) = g.threads[g.current].range;
        if at >= low && at < high {
            return None;
        }
        g.accesses += 1;
        if g.accesses > ENDLESS {
            return Some(RunError::Endless { at: g.place(g.current) });
        }
        let (write, aligned) = (how & 1 != 0, how & 2 != 0);
        let slots = g.slots.as_ptr_range();
        if !write && at >= slots.start as u64 && at + size <= slots.end as u64 {
            return None;
        }
        let table = (&raw const g.threads[g.current].context) as u64;
        if !write && at >= table && at + size <= table + size_of::<ThreadContext>() as u64 {
            return None;
        }
        let place = g.place(g.current);
        let stamp = Stamp {
            group: g.number,
            thread: g.current as u16,
            atomic: how & 4 != 0,
            barriers: g.barriers,
            simd_barriers: g.simd_barriers[g.current / LANES],
        };
        match g.memory.check(at, size, write, &stamp) {
            Ok(()) => {}
            Err(Wrong::Access(what)) => return Some(RunError::Access { at: place, what }),
            Err(Wrong::Race { does, group, thread, wrote }) => {
                return Some(RunError::Race { at: place, does, other: (group, thread), wrote });
            }
        }
        if aligned && size.is_power_of_two() && !at.is_multiple_of(size) {
            let what = format!("accesses {size} bytes at an address that is no multiple of {size}");
            return Some(RunError::Access { at: place, what });
        }
        None
    });
    if let Some(error) = wrong {
        give_up(error);
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
