//! Writes of the host that follow the launches before them.

use crate::prelude::*;

/// Copies the first `n` bytes of `from`: a write of the host to memory that earlier launches may still use.
#[kernel(
    threads = 256,
    requires(from.len() >= n as usize && to.len() >= n as usize, "from and to hold n bytes"),
    requires(u64::from(groups[0]) * 256 >= u64::from(n), "every byte has a thread"),
)]
pub(super) fn write_bytes(from: &Buffer<u8>, to: &mut Buffer<u8>, n: u32) {
    let i = thread_position();
    if i < n {
        to[i] = from[i];
    }
}
