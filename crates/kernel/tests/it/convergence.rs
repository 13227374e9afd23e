//! Threads must reach a convergent operation by one way: in the same iterations of loops, by the same calls.

use flashtile_kernel::prelude::*;
use flashtile_kernel::simulator::{Fault, FaultKind, Memory, Simulator};
use flashtile_kernel::{Argument, Device as _, Instance, Launch};

#[device]
pub fn sum_of_lanes(x: u32) -> u32 {
    simd_sum(x)
}

#[device]
pub fn sum_and_one(x: u32) -> u32 {
    let sum = sum_of_lanes(x);
    sum + 1
}

/// Sums in each iteration until `n` is reached, and returns out of the loop.
#[device]
pub fn first_from(n: u32) -> u32 {
    let mut sum = 0u32;
    loop {
        sum += sum_of_lanes(1);
        if sum >= n {
            return sum;
        }
    }
}

/// Loops without a convergent operation.
#[device]
pub fn alone(n: u32) -> u32 {
    let mut x = 0u32;
    for i in 0..n {
        if i == 5 {
            continue;
        }
        x += i;
    }
    while x > 3 {
        x -= 3;
    }
    x
}

/// Half of the lanes in each iteration.
#[kernel(threads = 32)]
pub fn halves(x: &mut Buffer<u32>) {
    let mut s = 0u32;
    for i in 0..2u32 {
        if simd_lane() % 2 == i {
            s = simd_sum(1u32);
        }
    }
    x[thread_index()] = s;
}

/// Half of the threads at the barrier in each iteration.
#[kernel(threads = 64)]
pub fn half_barriers(x: &mut Buffer<u32>) {
    let mut i = 0u32;
    while i < 2 {
        if thread_index() / 32 == i {
            barrier();
        }
        i += 1;
    }
    x[thread_index()] = i;
}

/// Lanes after equally many iterations, of different loops.
#[kernel(threads = 32)]
pub fn transposed(x: &mut Buffer<u32>) {
    let mut s = 0u32;
    for i in 0..2u32 {
        for j in 0..2u32 {
            if i + j == 1 && i == simd_lane() % 2 {
                s = simd_sum(1u32);
            }
        }
    }
    x[thread_index()] = s;
}

/// A function that half of the lanes call elsewhere.
#[kernel(threads = 32)]
pub fn other_calls(x: &mut Buffer<u32>) {
    let s = if simd_lane() < 16 { sum_of_lanes(1) } else { sum_of_lanes(2) };
    x[thread_index()] = s;
}

/// `other_calls`, one function further in.
#[kernel(threads = 32)]
pub fn other_calls_within(x: &mut Buffer<u32>) {
    let s = if simd_lane() < 16 { sum_and_one(1) } else { sum_of_lanes(1) };
    x[thread_index()] = s;
}

/// A function called in another iteration.
#[kernel(threads = 32)]
pub fn calls_of_other_iterations(x: &mut Buffer<u32>) {
    let mut s = 0u32;
    let mut i = 0u32;
    loop {
        if simd_lane() % 2 == i {
            s += sum_and_one(1);
        }
        i += 1;
        if i == 2 {
            break;
        }
    }
    x[thread_index()] = s;
}

/// Lanes may diverge between convergent operations, and every way out of a loop leaves its scope.
#[kernel(threads = 64)]
pub fn together(x: &mut Buffer<u32>) {
    let mut s = 0u32;
    for i in 0..3u32 {
        let n = alone(thread_index() + i);
        s += simd_sum(n - n + 1);
        if i == 1 {
            continue;
        }
        for j in 0..thread_index() / 32 + 2 {
            s += sum_and_one(j) - sum_of_lanes(j);
            if j == 1 {
                break;
            }
        }
        barrier();
    }
    s += first_from(64) + first_from(96);
    let mut left = 4 + thread_index() / 32;
    while simd_any(left > 0) {
        left -= 1;
    }
    barrier();
    x[thread_index()] = s;
}

fn run(instance: &Instance, threads: u32) -> Result<Vec<u32>, Fault> {
    let mut memory = Memory::from_slice(&vec![0u32; threads as usize]);
    let simulator = Simulator::new();
    let arguments = vec![Argument::Write(memory.view_mut())];
    let launch = Launch::new(instance, [1, 1, 1], threads, arguments, &simulator.limits()).unwrap();
    simulator.launch(launch)?;
    Ok(memory.to_vec().unwrap())
}

fn assert_apart(instance: &Instance, threads: u32, kind: FaultKind) {
    let fault = run(instance, threads).unwrap_err();
    assert_eq!(fault.kind, kind, "{fault}");
    assert!(fault.message.ends_with(", in another iteration of a loop or by another call"), "{fault}");
}

#[test]
fn other_iterations_are_other_places() {
    assert_apart(&halves::instance(), 32, FaultKind::DivergentSimd);
    assert_apart(&half_barriers::instance(), 64, FaultKind::DivergentBarrier);
    assert_apart(&transposed::instance(), 32, FaultKind::DivergentSimd);
}

#[test]
fn other_calls_are_other_places() {
    assert_apart(&other_calls::instance(), 32, FaultKind::DivergentSimd);
    assert_apart(&other_calls_within::instance(), 32, FaultKind::DivergentSimd);
    assert_apart(&calls_of_other_iterations::instance(), 32, FaultKind::DivergentSimd);
}

#[test]
fn one_way_is_one_place() {
    // Three sums of 32 lanes, four differences of 1, and the two that first reach 64 and 96.
    assert_eq!(run(&together::instance(), 64).unwrap(), [3 * 32 + 4 + 64 + 96; 64]);
}

/// Waits for a value that no thread writes.
#[kernel(threads = 32)]
pub fn endless(x: &mut Buffer<u32>) {
    let mut rounds = 0u32;
    while x[thread_index()] == 0 {
        rounds += 1;
    }
    x[thread_index()] = rounds;
}

#[test]
fn a_loop_without_end_is_told_at_the_loop() {
    let fault = run(&endless::instance(), 32).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Endless, "{fault}");
    let line = include_str!("convergence.rs")
        .lines()
        .position(|line| line.trim().starts_with("while x[thread"))
        .unwrap();
    assert_eq!(fault.line as usize, line + 1);
}
