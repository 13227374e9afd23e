//! Runs on memory of the host: bounds, aliases, what was read and written, and orders of threadgroups.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use flashtile_msl_standin::{Accesses, Allocation, Binding, Kernel, Order, RunError};

use crate::support::{compiler, library};

const GAP: usize = 256;

/// Host memory with free bytes around it.
struct Memory {
    id: u64,
    words: Vec<u64>,
    bytes: usize,
}

impl Memory {
    /// Zeros.
    fn new(id: u64, bytes: usize) -> Self {
        Self { id, words: vec![0; (bytes + 2 * GAP).div_ceil(8)], bytes }
    }

    /// As a buffer that may be written, from a byte on.
    fn at(&mut self, index: usize, offset: usize) -> Binding {
        let start = self.words.as_mut_ptr().cast::<u8>().wrapping_add(GAP);
        let allocation = Allocation { id: self.id, start, bytes: self.bytes };
        Binding { index, allocation, offset, writable: true }
    }

    fn u32s(&self) -> Vec<u32> {
        let halves = self.words.iter().flat_map(|w| [*w as u32, (*w >> 32) as u32]);
        halves.skip(GAP / 4).take(self.bytes / 4).collect()
    }
}

fn read_only(binding: Binding) -> Binding {
    Binding { writable: false, ..binding }
}

/// Runs threadgroups in a row. Every binding must be of a [`Memory`] that lives and is not used meanwhile.
fn run_in(
    kernel: &Kernel,
    [groups, threads]: [u32; 2],
    bindings: &[Binding],
    order: Order,
) -> Result<Accesses, String> {
    // SAFETY: each memory is a vector of its own, which its test uses only before and after.
    let result = unsafe { kernel.run_on([groups, 1, 1], [threads, 1, 1], bindings, &[], order) };
    result.map_err(|e: RunError| e.to_string())
}

/// Runs one threadgroup.
fn run(kernel: &Kernel, threads: u32, bindings: &[Binding]) -> Result<Accesses, String> {
    run_in(kernel, [1, threads], bindings, Order::Forward)
}

fn fault(kernel: &Kernel, threads: u32, bindings: &[Binding]) -> String {
    run(kernel, threads, bindings).expect_err("a planted fault was not found")
}

/// The kernel `f` of a program; its parameters are `device uint* x [[buffer(0)]]`, `device uint* y [[buffer(1)]]` and `uint i`.
fn kernel(body: &str) -> Option<Kernel> {
    kernel_of(&format!(
        "kernel void f(device uint* x [[buffer(0)]], device uint* y [[buffer(1)]],
                       uint i [[thread_position_in_grid]]) {{ {body} }}"
    ))
}

fn kernel_of(source: &str) -> Option<Kernel> {
    Some(library(compiler()?, source).kernel("f", &[]).unwrap())
}

/// First and last byte plus one of each range.
fn ranges(of: &[Range<usize>]) -> Vec<(usize, usize)> {
    of.iter().map(|r| (r.start, r.end)).collect()
}

#[test]
fn kernels_run_on_the_memory_of_the_host() {
    let Some(k) = kernel("x[i] = y[i] + 10 * i;") else { return };
    let (mut a, mut b) = (Memory::new(7, 64), Memory::new(8, 32));
    b.words[GAP / 8] = 5 << 32 | 4;
    // An offset may be any multiple of an element.
    let accesses = run(&k, 3, &[a.at(0, 20), read_only(b.at(1, 4))]).unwrap();
    assert_eq!(a.u32s()[4..9], [0, 5, 10, 20, 0]);
    assert_eq!(accesses.touched().collect::<Vec<_>>(), [7, 8]);
    assert_eq!(ranges(accesses.written(7)), [(20, 32)]);
    assert_eq!(ranges(accesses.read(8)), [(4, 16)]);
    assert_eq!((ranges(accesses.read(7)), ranges(accesses.written(8))), (vec![], vec![]));
    assert_eq!(ranges(accesses.read(9)), []);
}

#[test]
fn bounds_start_at_the_smallest_offset() {
    let Some(k) = kernel("x[i] = y[-1];") else { return };
    let (mut a, mut b) = (Memory::new(1, 64), Memory::new(2, 128));
    let said = fault(&k, 1, &[a.at(0, 0), b.at(1, 64)]);
    assert!(said.contains("reads 4 bytes at byte -4 of buffer 1, which has 64"), "{said}");
    // The bytes before the offset belong to the memory as well, where another buffer has them.
    run(&k, 1, &[b.at(0, 16), b.at(1, 64)]).unwrap();
    let said = fault(&k, 1, &[b.at(0, 64), b.at(1, 64)]);
    assert!(said.contains("reads 4 bytes at byte -4 of the memory of buffers 0, 1, which has 64"), "{said}");
    let Some(k) = kernel("x[16 + i] = 1;") else { return };
    run(&k, 1, &[a.at(0, 0), b.at(1, 0)]).expect_err("past the end");
    let said = fault(&k, 1, &[b.at(0, 64), a.at(1, 0)]);
    assert!(said.contains("writes 4 bytes at byte 64 of buffer 0, which has 64"), "{said}");
    run(&k, 1, &[b.at(0, 60), a.at(1, 0)]).unwrap();
    let Some(k) = kernel("*(device uint2*)x = 1;") else { return };
    let said = fault(&k, 1, &[a.at(0, 4), b.at(1, 0)]);
    assert!(said.contains("not a multiple of 8"), "{said}");
}

#[test]
fn bindings_of_one_memory_race() {
    let Some(k) = kernel("x[i] = i; y[i + 1] = i;") else { return };
    let (mut a, mut b) = (Memory::new(1, 256), Memory::new(2, 256));
    run(&k, 8, &[a.at(0, 0), b.at(1, 0)]).unwrap();
    run(&k, 8, &[a.at(0, 0), a.at(1, 128)]).unwrap();
    let said = fault(&k, 8, &[a.at(0, 16), a.at(1, 16)]);
    assert!(
        said.contains(
            "thread 1 of threadgroup (0, 0, 0) writes 4 bytes at byte 4 of the memory of buffers 0, 1"
        ) && said.contains("thread 0 of threadgroup 0 has written"),
        "{said}"
    );
    // One thread's writes through two buffers are in its order.
    let said = fault(&k, 8, &[a.at(0, 4), a.at(1, 8)]);
    assert!(said.contains("thread 2") && said.contains("thread 0 of threadgroup 0 has written"), "{said}");
    run(&k, 8, &[a.at(0, 4), a.at(1, 0)]).unwrap();
    let Some(ordered) = kernel("x[i] = i; threadgroup_barrier(mem_flags::mem_device); y[i + 1] += i;") else {
        return;
    };
    run(&ordered, 8, &[a.at(0, 16), a.at(1, 16)]).unwrap();
    run(&k.with_races(), 8, &[a.at(0, 16), a.at(1, 16)]).unwrap();
}

#[test]
fn a_race_is_one_of_bytes() {
    let threads = |first: &str, second: &str| {
        kernel(&format!(
            "device uchar* c = (device uchar*)x; device ushort* s = (device ushort*)x;
             if (i == 0) {{ {first} }} else {{ {second} }}"
        ))
    };
    let mut a = Memory::new(1, 2048);
    for (first, second, races) in [
        ("c[1] = 1;", "c[2] = 2;", false),
        ("s[0] = 1;", "s[1] = 2;", false),
        ("x[0] = 1; c[4] = 2;", "c[5] = 2; x[2] = 1;", false),
        ("x[0] = 1;", "c[3] = 2;", true),
        ("c[3] = 1;", "x[0] = 2;", true),
        ("s[1] = 1;", "c[2] = 2;", true),
        ("y[2] = s[3];", "s[3] = 2;", true),
        ("y[2] = s[3];", "y[3] = s[3];", false),
        // A vector on both sides of a page of the shadow.
        ("*(device packed_uint4*)(x + 254) = uint4(1);", "x[257] = 2;", true),
        ("*(device packed_uint4*)(x + 254) = uint4(1);", "x[258] = 2;", false),
    ] {
        let Some(k) = threads(first, second) else { return };
        let mut b = Memory::new(2, 64);
        let result = run(&k, 2, &[a.at(0, 0), b.at(1, 0)]);
        assert_eq!(result.is_err(), races, "{first} {second}: {result:?}");
        assert!(result.err().is_none_or(|said| said.contains("with no barrier between")));
    }
}

#[test]
fn a_write_needs_a_binding_that_may_be_written() {
    let Some(k) = kernel("x[i] = 1;") else { return };
    let (mut a, mut b) = (Memory::new(1, 64), Memory::new(2, 64));
    let said = fault(&k, 1, &[read_only(a.at(0, 0)), b.at(1, 0)]);
    assert!(said.contains("writes buffer 0, which is bound for reading"), "{said}");
    run(&k, 4, &[read_only(a.at(0, 32)), a.at(1, 32)]).unwrap();
    run(&k, 4, &[read_only(a.at(0, 32)), a.at(1, 0)]).unwrap();
    // A buffer that starts later covers only what is behind it.
    let said = fault(&k, 4, &[read_only(a.at(0, 16)), a.at(1, 32)]);
    assert!(said.contains("writes the memory of buffers 0, 1, which is bound for reading"), "{said}");
    let said = fault(&k, 4, &[read_only(a.at(0, 16)), read_only(a.at(1, 16))]);
    assert!(said.contains("bound for reading"), "{said}");
    let reads = "kernel void f(device const uint* x [[buffer(0)]], device uint* y [[buffer(1)]],
                               constant uint& n [[buffer(2)]]) { y[0] = x[1] + n; }";
    let Some(k) = kernel_of(reads) else { return };
    let mut c = Memory::new(3, 4);
    c.words[GAP / 8] = 9;
    run(&k, 1, &[read_only(a.at(0, 32)), b.at(1, 0), read_only(c.at(2, 0))]).unwrap();
    assert_eq!(b.u32s()[0], 10);
}

#[test]
fn accesses_are_exact() {
    let Some(k) = kernel_of(
        "kernel void f(device uchar* x [[buffer(0)]], device const half4* y [[buffer(1)]],
                       device atomic_uint* count [[buffer(2)]], constant uint* unused [[buffer(3)]],
                       uint i [[thread_position_in_grid]]) {
             threadgroup uchar t[8];
             t[i] = x[3 * i];
             threadgroup_barrier(mem_flags::mem_threadgroup);
             x[1000 + i * 13] = t[i];
             if (i < 2) x[2001 + i] = uchar(y[5 * i].x + y[5 * i].w);
             if (i == 0) atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);
             if (i == 1) atomic_store_explicit(count + 2, 1u, memory_order_relaxed);
             if (i == 2) *(device uint*)(x + 1600) = atomic_load_explicit(count + 4, memory_order_relaxed);
         }",
    ) else {
        return;
    };
    for kernel in [k.clone(), k.with_races()] {
        let (mut x, mut y) = (Memory::new(30, 3000), Memory::new(20, 64));
        let (mut count, mut unused) = (Memory::new(10, 64), Memory::new(40, 4));
        let bindings = [x.at(0, 8), read_only(y.at(1, 16)), count.at(2, 4), read_only(unused.at(3, 0))];
        let accesses = run(&kernel, 4, &bindings).unwrap();
        assert_eq!(accesses.touched().collect::<Vec<_>>(), [10, 20, 30]);
        assert_eq!(ranges(accesses.read(30)), [(8, 9), (11, 12), (14, 15), (17, 18)]);
        // Zeros over zeros are writes.
        let written = [(1008, 1009), (1021, 1022), (1034, 1035), (1047, 1048), (1608, 1612), (2009, 2011)];
        assert_eq!(ranges(accesses.written(30)), written);
        assert_eq!(ranges(accesses.read(20)), [(16, 24), (56, 64)]);
        assert_eq!(ranges(accesses.read(10)), [(4, 8), (20, 24)]);
        assert_eq!(ranges(accesses.written(10)), [(4, 8), (12, 16)]);
    }
}

#[test]
fn dispatches_conflict_where_one_writes() {
    let Some(k) = kernel("x[i] = y[i];") else { return };
    let (mut a, mut b, mut c) = (Memory::new(1, 256), Memory::new(2, 256), Memory::new(3, 256));
    let copy = |from: Binding, to: Binding, count| {
        run(&k, count, &[Binding { index: 0, ..to }, read_only(Binding { index: 1, ..from })]).unwrap()
    };
    let first = copy(a.at(0, 0), b.at(0, 32), 8);
    let conflict = |other: &Accesses| {
        let both = first.conflicts(other);
        assert_eq!(both, other.conflicts(&first));
        both
    };
    // It reads bytes 0 to 32 of `a`, and writes bytes 32 to 64 of `b`.
    assert_eq!(conflict(&copy(b.at(0, 44), c.at(0, 0), 8)), Some((2, 44..64)));
    assert_eq!(conflict(&copy(b.at(0, 0), c.at(0, 0), 8)), None);
    assert_eq!(conflict(&copy(b.at(0, 64), c.at(0, 0), 8)), None);
    assert_eq!(conflict(&copy(a.at(0, 0), c.at(0, 0), 8)), None);
    assert_eq!(conflict(&copy(c.at(0, 0), a.at(0, 28), 8)), Some((1, 28..32)));
    assert_eq!(conflict(&copy(c.at(0, 0), b.at(0, 4), 8)), Some((2, 32..36)));
    assert_eq!(first.conflicts(&first), Some((2, 32..64)));
    assert_eq!(conflict(&Accesses::default()), None);
    // The read bytes and the written bytes of one allocation are adjacent.
    let both = copy(b.at(0, 32), b.at(0, 48), 4);
    assert_eq!(conflict(&both), Some((2, 32..64)));
    // Bytes between two ranges belong to neither.
    let Some(apart) = kernel("x[10 * i] = 1;") else { return };
    assert_eq!(conflict(&run(&apart, 2, &[b.at(0, 0), c.at(1, 0)]).unwrap()), Some((2, 40..44)));
    assert_eq!(conflict(&run(&apart, 2, &[b.at(0, 28), c.at(1, 0)]).unwrap()), None);
}

#[test]
fn adjacent_accesses_are_one_range() {
    let Some(k) = kernel("x[i] = y[i]; y[999 - i] = 1;") else { return };
    let (mut a, mut b) = (Memory::new(1, 4000), Memory::new(2, 4000));
    let accesses = run(&k, 400, &[a.at(0, 36), b.at(1, 0)]).unwrap();
    assert_eq!(ranges(accesses.written(1)), [(36, 1636)]);
    assert_eq!(ranges(accesses.read(2)), [(0, 1600)]);
    assert_eq!(ranges(accesses.written(2)), [(2400, 4000)]);
}

#[test]
fn threadgroups_run_in_a_random_order() {
    // Threadgroup `i` gets the number of threadgroups that ran before it.
    let ticket = "kernel void f(device uint* x [[buffer(0)]], device atomic_uint* next [[buffer(1)]],
                                uint3 at [[threadgroup_position_in_grid]], uint3 n [[threadgroups_per_grid]]) {
                      uint i = (at.z * n.y + at.y) * n.x + at.x;
                      x[i] = atomic_fetch_add_explicit(next, 1u, memory_order_relaxed);
                  }";
    let Some(k) = kernel_of(ticket) else { return };
    let order = |order| {
        let (mut a, mut b) = (Memory::new(1, 4 * 24), Memory::new(2, 4));
        let bindings = [a.at(0, 0), b.at(1, 0)];
        // SAFETY: both are vectors that nothing else uses.
        unsafe { k.run_on([4, 3, 2], [1, 1, 1], &bindings, &[], order) }.unwrap();
        a.u32s()
    };
    let forward: Vec<u32> = (0..24).collect();
    assert_eq!(order(Order::Forward), forward);
    let random = order(Order::Random(1));
    assert_ne!(random, forward);
    assert_eq!(order(Order::Random(1)), random);
    assert_ne!(order(Order::Random(2)), random);
    let mut sorted = random;
    sorted.sort_unstable();
    assert_eq!(sorted, forward);
    // A race names threadgroups by their place in the grid, whatever the order.
    let Some(k) = kernel("if (i == 5 || i == 9) x[0] = i;") else { return };
    let mut named = [false; 2];
    for seed in 0..20 {
        let (mut a, mut b) = (Memory::new(1, 4), Memory::new(2, 4));
        let said = run_in(&k, [16, 1], &[a.at(0, 0), b.at(1, 0)], Order::Random(seed)).unwrap_err();
        let is = [(5, 9), (9, 5)].map(|(later, earlier)| {
            said.contains(&format!("threadgroup ({later}, 0, 0)"))
                && said.contains(&format!("thread 0 of threadgroup {earlier} has written"))
        });
        assert!(is[0] || is[1], "{said}");
        named = [named[0] || is[0], named[1] || is[1]];
    }
    assert_eq!(named, [true, true]);
}

#[test]
fn bindings_that_contradict_each_other() {
    let Some(k) = kernel("x[i] = y[i];") else { return };
    let (mut a, mut b) = (Memory::new(1, 64), Memory::new(2, 64));
    let said = fault(&k, 1, &[a.at(0, 0), b.at(1, 68)]);
    assert!(said.contains("buffer 1 starts at byte 68 of an allocation of 64 bytes"), "{said}");
    let mut shorter = a.at(1, 0);
    shorter.allocation.bytes = 32;
    let said = fault(&k, 1, &[a.at(0, 0), shorter]);
    assert!(said.contains("buffer 1 gives allocation 1 another address or length"), "{said}");
    shorter.allocation.id = 3;
    let said = fault(&k, 1, &[a.at(0, 0), shorter]);
    assert!(said.contains("allocations 1 and 3 overlap"), "{said}");
    let said = fault(&k, 1, &[a.at(0, 0), b.at(0, 0)]);
    assert!(said.contains("buffer 0 is bound twice"), "{said}");
    let said = fault(&k, 1, &[a.at(0, 0)]);
    assert!(said.contains("buffer 1 of kernel `f` is not bound"), "{said}");
    // A buffer may be empty; an access to it is out of its bounds.
    let said = fault(&k, 1, &[a.at(0, 0), b.at(1, 64)]);
    assert!(said.contains("reads 4 bytes at byte 0 of buffer 1, which has 0"), "{said}");
}

#[test]
fn the_cost_is_that_of_what_is_touched() {
    let Some(k) = kernel("y[i] = x[i * 67000000]; x[i * 67000000 + 1] = 1;") else { return };
    // A shadow of all its bytes would not fit into any machine's memory.
    let (mut a, mut b) = (Memory::new(1, 1 << 30), Memory::new(2, 64));
    let accesses = run(&k, 4, &[a.at(0, 0), b.at(1, 0)]).unwrap();
    let at = |i: usize| i * 4 * 67_000_000;
    assert_eq!(ranges(accesses.read(1)), [0, 1, 2, 3].map(|i| (at(i), at(i) + 4)));
    assert_eq!(ranges(accesses.written(1)), [0, 1, 2, 3].map(|i| (at(i) + 4, at(i) + 8)));
}

#[test]
fn libraries_do_not_wait_for_each_other() {
    let Some(endless) = kernel("while (*(volatile device uint*)x < 1) {}") else { return };
    let Some(quick) = kernel("x[i] = 3;") else { return };
    let started = AtomicBool::new(false);
    let timed = |kernel: &Kernel, runs: &AtomicBool| {
        let (mut a, mut b) = (Memory::new(1, 4), Memory::new(2, 4));
        let start = Instant::now();
        runs.store(true, Ordering::SeqCst);
        let result = run(kernel, 1, &[a.at(0, 0), b.at(1, 0)]);
        (result, start.elapsed())
    };
    std::thread::scope(|scope| {
        // It takes seconds until it is stopped.
        let other = scope.spawn(|| timed(&endless, &started));
        while !started.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(100));
        let (result, quick_time) = timed(&quick, &AtomicBool::new(false));
        result.unwrap();
        let (result, endless_time) = other.join().unwrap();
        assert!(result.unwrap_err().contains("does not terminate"));
        assert!(4 * quick_time < endless_time, "{quick_time:?} and {endless_time:?}");
    });
}
