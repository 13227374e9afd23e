//! The first kernel.

use flashtile_kernel::prelude::*;
use flashtile_kernel::simulator::{Memory, Simulator};

/// Adds two vectors.
#[kernel(
    threads = 256,
    requires(a.len() >= n as usize && b.len() >= n as usize, "a and b hold n numbers"),
    requires(out.len() >= n as usize, "out holds n numbers"),
    requires(groups[0] as usize * 256 >= n as usize, "every number has a thread"),
)]
pub fn add(a: &Buffer<f32>, b: &Buffer<f32>, out: &mut Buffer<f32>, n: u32) {
    let i = thread_position();
    if i < n {
        out[i] = a[i] + b[i];
    }
}

#[test]
fn the_first_kernel_runs() {
    let a: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let (x, y) = (Memory::from_slice(&a), Memory::from_slice(&a));
    let mut out = Memory::uninit::<f32>(1000);
    add::Call { a: x.view(), b: y.view(), out: out.view_mut(), n: 1000, groups: [4, 1, 1] }
        .launch(&Simulator::new())
        .unwrap();
    assert_eq!(out.to_vec::<f32>().unwrap()[999], 1998.0);
}

#[test]
fn the_first_kernel_runs_everywhere() {
    let a: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let sums: Vec<f32> = a.iter().map(|x| x + x).collect();
    crate::anywhere::everywhere(&sums, |device| {
        let (x, y) = (Memory::from_slice(&a), Memory::from_slice(&a));
        let mut out = Memory::from_slice(&[0f32; 1000]);
        add::Call { a: x.view(), b: y.view(), out: out.view_mut(), n: 1000, groups: [4, 1, 1] }
            .launch(device)
            .unwrap();
        out.to_vec().unwrap()
    });
}

#[test]
fn a_broken_contract_is_told() {
    let x = Memory::from_slice(&[0f32; 10]);
    let mut out = Memory::from_slice(&[0f32; 10]);
    let why = add::Call { a: x.view(), b: x.view(), out: out.view_mut(), n: 11, groups: [1, 1, 1] }
        .launch(&Simulator::new())
        .unwrap_err();
    crate::document::says(&why.to_string());
}
