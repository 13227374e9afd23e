//! Threads of a threadgroup, as coroutines with stacks of their own.
#![allow(unsafe_code)]

use std::arch::naked_asm;
use std::io;

/// `Ok` if coroutines are supported. `Compiler` checks the instruction set that kernels are compiled for.
pub(crate) const SUPPORTED: Result<(), &str> = Ok(());

/// Bytes of a stack, which holds arrays of kernels; untouched pages take no memory.
const STACK: usize = 256 << 10;
const GUARD: usize = 4096;

/// Stacks, each above a guard page.
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
        // SAFETY: a new mapping at an address that the system chooses overlaps no other.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let stacks = Self { base: base.cast(), bytes };
        for i in 0..count {
            // SAFETY: the page is part of the mapping made above.
            if unsafe { libc::mprotect(stacks.base.add(i * (STACK + GUARD)).cast(), GUARD, libc::PROT_NONE) }
                != 0
            {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(stacks)
    }

    /// The lowest address of a stack, and the address after its end.
    pub(crate) fn range(&self, index: usize) -> (u64, u64) {
        let low = self.base as u64 + (index * (STACK + GUARD) + GUARD) as u64;
        (low, low + STACK as u64)
    }

    /// A stack that runs `enter` when it is first switched to.
    ///
    /// # Safety
    /// - `index` is less than the count given to [`Stacks::new`].
    /// - Nothing runs on that stack.
    /// - `enter` never returns.
    pub(crate) unsafe fn start(&self, index: usize, enter: extern "C" fn() -> !) -> *mut u8 {
        let end = self.range(index).1 as *mut u64;
        // SAFETY: the words are the last of the stack, on which nothing runs as the caller guarantees.
        unsafe {
            // On entry to a function, the stack pointer is 8 below a multiple of 16: a call has pushed the return address.
            end.sub(2).write(enter as usize as u64);
            // Six registers that the first switch pops.
            for i in 3..9 {
                end.sub(i).write(0);
            }
            end.sub(8).cast()
        }
    }
}

impl Drop for Stacks {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no coroutine outlives it.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

/// Saves the callee-saved registers and the stack pointer, and continues on another stack.
///
/// # Safety
/// `to` is the result of `Stacks::start`, or was saved by an earlier switch, and is used once.
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
