//! The intrinsics without feature `simulator`: there are no launches on the host, so no handle of memory
//! exists. Intrinsics that work only in a launch panic, as they do outside of launches with the feature; the
//! others work.

pub use crate::arguments::Arguments;
use crate::region::Region;
use crate::scalar::ScalarType;
use std::fmt;

/// The native code of every instance: code of its own would be compiled and never run.
pub fn no_native(arguments: &Arguments) {
    match *arguments {}
}

/// The position of a thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) thread: u32,
    pub(crate) threads: u32,
    pub(crate) group: [u32; 3],
    pub(crate) groups: [u32; 3],
}

#[track_caller]
#[cold]
#[expect(clippy::panic, reason = "there is no launch whose fault this could be")]
fn outside(message: fmt::Arguments<'_>) -> ! {
    panic!("{message}")
}

#[track_caller]
fn in_launches_only() -> ! {
    outside(format_args!("this intrinsic of the kernel language works in a launch only"))
}

#[track_caller]
pub(crate) fn place() -> Place {
    in_launches_only()
}

#[track_caller]
pub(crate) fn fault_arithmetic(message: fmt::Arguments<'_>) -> ! {
    outside(message)
}

#[track_caller]
pub(crate) fn outside_array(index: u64, len: usize) -> ! {
    outside(format_args!("index {index} of a local array of {len} elements"))
}

pub(crate) fn count_iteration() {}

pub(crate) fn scope_enter(_number: u64) -> u64 {
    0
}

pub(crate) fn loop_iter() {}

pub(crate) fn scope_leave(_path: u64) {}

#[track_caller]
pub(crate) fn barrier() {
    in_launches_only()
}

#[track_caller]
pub(crate) fn simd_barrier() {
    in_launches_only()
}

#[track_caller]
pub(crate) fn simd_converge(_name: &'static str) {
    in_launches_only()
}

#[track_caller]
pub(crate) fn load_matrices(_name: &'static str, _count: u64) {
    in_launches_only()
}

#[track_caller]
pub(crate) fn store_matrices(_name: &'static str, _count: u64) {
    in_launches_only()
}

pub(crate) fn uncounted<R>(check: impl FnOnce() -> R) -> R {
    check()
}

pub(crate) fn count_exponential() {}

#[track_caller]
pub(crate) fn gather(_name: &'static str, _x: u64) -> [u64; 32] {
    in_launches_only()
}

#[track_caller]
pub(crate) fn exchange(_name: &'static str, _x: u64, _lane: u32) -> u64 {
    in_launches_only()
}

#[track_caller]
pub(crate) fn broadcast(_x: u64, _lane: u32) -> u64 {
    in_launches_only()
}

#[track_caller]
pub(crate) fn multiply_accumulate(_elements: [f32; 4], _c: [f32; 2]) -> [f32; 2] {
    in_launches_only()
}

#[track_caller]
pub(crate) fn shared(_element: ScalarType, _len: usize) -> Region {
    in_launches_only()
}
