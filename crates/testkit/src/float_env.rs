//! A floating-point environment that callers may have set.

#![allow(unsafe_code, reason = "reads and writes the control register of the thread")]

use std::marker::PhantomData;

/// Subnormal numbers count as zero and results are rounded up on this thread, until this is dropped. Threads that it starts meanwhile keep
/// that.
#[must_use]
#[derive(Debug)]
pub struct HostileFloats {
    held: u64,
    thread: PhantomData<*const ()>,
}

impl HostileFloats {
    /// Sets the environment. On processors other than x86-64 and aarch64, nothing.
    pub fn set() -> Self {
        let held = read();
        // SAFETY: the register has these bits, and nothing here depends on how results are rounded.
        unsafe { write(held | HOSTILE) }
        Self { held, thread: PhantomData }
    }

    /// Returns true if this thread has the hostile environment.
    #[must_use]
    pub fn are_set() -> bool {
        read() & HOSTILE == HOSTILE
    }
}

impl Drop for HostileFloats {
    fn drop(&mut self) {
        // SAFETY: the register held the value before.
        unsafe { write(self.held) }
    }
}

/// Flush to zero, round up, denormals are zero.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const HOSTILE: u64 = 0x8000 | 0x4000 | 0x40;
/// Flush to zero, round up.
#[cfg(all(target_arch = "aarch64", not(miri)))]
const HOSTILE: u64 = 1 << 24 | 1 << 22;
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
const HOSTILE: u64 = 0;

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn read() -> u64 {
    let mut value = 0u32;
    // SAFETY: every x86-64 processor has the instruction, which writes the 4 bytes.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) }
    u64::from(value)
}

/// # Safety
/// The register has the bits, and code that runs until it is restored may round so.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn write(value: u64) {
    let value = value as u32;
    // SAFETY: as above, with 4 bytes that are read.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack, preserves_flags)) }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
fn read() -> u64 {
    let value: u64;
    // SAFETY: programs may read the register.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) value, options(nostack, preserves_flags)) }
    value
}

/// # Safety
/// The register has the bits, and code that runs until it is restored may round so.
#[cfg(all(target_arch = "aarch64", not(miri)))]
unsafe fn write(value: u64) {
    // SAFETY: programs may write the register.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) value, options(nostack, preserves_flags)) }
}

#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
fn read() -> u64 {
    0
}

/// # Safety
/// None: nothing is written.
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
unsafe fn write(_: u64) {}
