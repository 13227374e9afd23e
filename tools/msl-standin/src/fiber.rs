//! Threads of a threadgroup, as coroutines with stacks of their own.
#![allow(unsafe_code)]

use std::arch::naked_asm;
use std::io;

/// Where fibers are. What the compiler is told to use is looked for when a compiler is looked for.
pub(crate) const SUPPORTED: Result<(), &str> = Ok(());

/// Kernels keep arrays on it; pages that are not touched take no memory.
const STACK: usize = 256 << 10;
const GUARD: usize = 4096;

/// Stacks, each with a page below it that cannot be touched.
#[derive(Debug)]
pub(crate) struct Stacks {
    base: *mut u8,
    bytes: usize,
}

impl Stacks {
    pub(crate) fn new(count: usize) -> io::Result<Self> {
        let bytes = count * (STACK + GUARD);
        let (access, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        );
        // SAFETY: a new mapping at a place of the system's choice takes nobody's memory.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let stacks = Self { base: base.cast(), bytes };
        for i in 0..count {
            // SAFETY: the page lies in the mapping made above.
            if unsafe { libc::mprotect(stacks.base.add(i * (STACK + GUARD)).cast(), GUARD, libc::PROT_NONE) }
                != 0
            {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(stacks)
    }

    /// Addresses of a stack.
    pub(crate) fn range(&self, index: usize) -> (u64, u64) {
        let low = self.base as u64 + (index * (STACK + GUARD) + GUARD) as u64;
        (low, low + STACK as u64)
    }

    /// A stack that runs `enter` when it is first switched to.
    ///
    /// # Safety
    /// `index` is less than the count, nothing runs on that stack, and `enter` never returns.
    pub(crate) unsafe fn start(&self, index: usize, enter: extern "C" fn() -> !) -> *mut u8 {
        let top = self.range(index).1 as *mut u64;
        // SAFETY: the words lie at the top of the stack, which the caller says is free.
        unsafe {
            // A function finds the stack 8 below a multiple of 16, where a call has put the way back.
            top.sub(2).write(enter as usize as u64);
            // Six registers that the first switch takes up.
            for i in 3..9 {
                top.sub(i).write(0);
            }
            top.sub(8).cast()
        }
    }
}

impl Drop for Stacks {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's alone, and no fiber runs when it goes.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

/// Saves the registers that a call keeps and the stack pointer, and goes on at another stack.
///
/// # Safety
/// `to` comes from `Stacks::start` or from an earlier `save` whose stack has not been switched to since.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn switch(save: *mut *mut u8, to: *mut u8) {
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov [rdi], rsp",
        "mov rsp, rsi",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
    )
}
