//! A copy, with which the bandwidth of other kernels is compared.

use flashtile_kernel::prelude::*;

/// Copies `n` vectors of 4 numbers.
#[kernel(
    threads = 256,
    requires(x.len() >= 4 * n as usize && out.len() >= 4 * n as usize, "x and out hold the vectors"),
    requires(u64::from(groups[0]) * 256 >= u64::from(n), "every vector has a thread"),
)]
pub fn copy(x: &Buffer<f32>, out: &mut Buffer<f32>, n: u32) {
    let at = thread_position();
    if at < n {
        let vector = x.load::<4>(4 * at as u64);
        out.store(4 * at as u64, vector);
    }
}
