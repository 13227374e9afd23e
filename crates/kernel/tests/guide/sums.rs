//! Threads that work together.

use flashtile_kernel::prelude::*;

/// The sum of a row of `n` numbers, a row a group.
#[kernel(
    threads = 128,
    requires(x.len() >= groups[0] as usize * n as usize, "x holds a row a group"),
    requires(out.len() >= groups[0] as usize, "out holds a number a group"),
)]
pub fn row_sums<T: Element>(x: &Buffer<T>, out: &mut Buffer<f32>, n: u32) {
    let mut parts: Shared<f32> = shared(4);
    let start = group_x() * n;
    let mut sum = 0.0;
    for i in (thread_index()..n).step_by(128) {
        sum += x[start + i].to_f32();
    }
    let sum = simd_sum(sum);
    if simd_lane() == 0 {
        parts[simd_index()] = sum;
    }
    barrier();
    if thread_index() == 0 {
        out[group_x()] = parts[0] + parts[1] + parts[2] + parts[3];
    }
}

/// `row_sums` without its barrier: a race.
#[kernel(
    threads = 128,
    requires(x.len() >= groups[0] as usize * n as usize, "x holds a row a group"),
    requires(out.len() >= groups[0] as usize, "out holds a number a group"),
)]
pub fn racing(x: &Buffer<f32>, out: &mut Buffer<f32>, n: u32) {
    let mut parts: Shared<f32> = shared(4);
    let start = group_x() * n;
    let mut sum = 0.0;
    for i in (thread_index()..n).step_by(128) {
        sum += x[start + i];
    }
    let sum = simd_sum(sum);
    if simd_lane() == 0 {
        parts[simd_index()] = sum;
    }
    if thread_index() == 0 {
        out[group_x()] = parts[0] + parts[1] + parts[2] + parts[3];
    }
}

fn run<T: Element>(device: &crate::anywhere::Anywhere) -> Vec<f32> {
    use flashtile_kernel::simulator::Memory;
    let x = Memory::from_slice(&crate::anywhere::eighths::<T>(3 * 1000, 1));
    let mut out = Memory::from_slice(&[0f32; 3]);
    row_sums::Call { x: x.view(), out: out.view_mut(), n: 1000, groups: [3, 1, 1] }
        .launch::<T>(device)
        .unwrap();
    out.to_vec().unwrap()
}

#[test]
fn rows_add_up_everywhere() {
    let x = crate::anywhere::eighths::<f32>(3 * 1000, 1);
    let sums: Vec<f32> = x.chunks(1000).map(|row| row.iter().sum()).collect();
    crate::anywhere::everywhere(&sums, run::<f32>);
    crate::anywhere::everywhere(&sums, run::<f16>);
    crate::anywhere::everywhere(&sums, run::<bf16>);
}

#[test]
fn a_missing_barrier_is_a_fault() {
    use flashtile_kernel::LaunchError;
    use flashtile_kernel::simulator::{FaultKind, Memory, Simulator};

    let x = Memory::from_slice(&[1f32; 256]);
    for seed in 0..4 {
        let mut out = Memory::uninit::<f32>(1);
        let simulator = Simulator::new().seed(seed);
        let result =
            racing::Call { x: x.view(), out: out.view_mut(), n: 256, groups: [1, 1, 1] }.launch(&simulator);
        let Err(LaunchError::Device(fault)) = result else { panic!("{result:?}") };
        // Where the reader comes first there is nothing to race with yet, and nothing to read.
        assert!(matches!(fault.kind, FaultKind::Race | FaultKind::Uninitialised), "{fault}");
        if seed == 0 {
            crate::document::says(&fault.to_string());
        }
    }
}
