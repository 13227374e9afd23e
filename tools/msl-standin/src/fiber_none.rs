//! Machines without coroutines: `Compiler::find` refuses them, so that no kernel is ever run.
#![allow(unsafe_code)]

use std::io;

/// An error, as coroutines are not supported.
pub(crate) const SUPPORTED: Result<(), &str> = Err("it needs x86-64 Linux");

#[derive(Debug)]
pub(crate) struct Stacks;

impl Stacks {
    pub(crate) fn new(_count: usize) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn range(&self, _index: usize) -> (u64, u64) {
        (0, 0)
    }

    /// # Safety
    /// Nothing is required.
    pub(crate) unsafe fn start(&self, _index: usize, _enter: extern "C" fn() -> !) -> *mut u8 {
        std::ptr::null_mut()
    }
}

/// # Safety
/// Nothing is required.
pub(crate) unsafe extern "C" fn switch(_save: *mut *mut u8, _to: *mut u8) {}
