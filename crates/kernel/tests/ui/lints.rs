//! Literals that rustc's lints would let pass, and that mean something else in printed source.

#![allow(overflowing_literals)]

use flashtile_kernel_macros::{device, kernel};

#[device]
pub struct Signed {
    pub x: i32,
}

#[device]
#[allow(overflowing_literals)]
pub fn literals_that_wrap(a: Signed) -> i32 {
    let b: i32 = 0xffff_ffff;
    (a.x ^ 0x8000_0000) >> b
}

#[kernel(threads = 32)]
pub fn bytes_that_wrap(out: &mut flashtile_kernel::prelude::Buffer<u8>) {
    out[0] = 256;
}

fn main() {}
