//! The floating-point environment of a thread.

#![allow(unsafe_code, reason = "reads and writes the control register of the thread")]

use std::marker::PhantomData;

/// The default floating-point environment on this thread, until this is dropped: round to nearest, keep subnormal numbers, trap nothing.
///
/// A caller, or whoever started a pool's threads, may have set another: `torch.set_flush_denormal`, `-ffast-math` libraries and
/// `fesetround` do. Bits must not depend on it. Creating and dropping one takes some nanoseconds where nothing has to be changed.
///
/// The environment is a thread's own, so that the guard is neither `Send` nor `Sync`. Compilers know nothing of it: they may move
/// arithmetic between registers across both ends. Operands must come from memory, or through a call that is not inlined.
#[must_use]
#[derive(Debug)]
pub struct FloatEnv {
    /// The value that the control register held before, if it was not the default.
    restore: Option<register::Control>,
    thread: PhantomData<*const ()>,
}

impl FloatEnv {
    /// Sets the default environment.
    #[inline]
    pub fn ieee() -> Self {
        let held = register::read();
        let differs = held & register::CONTROLS != register::IEEE;
        if differs {
            // SAFETY: the value is the register's at the start of a process.
            unsafe { register::write(register::IEEE) }
        }
        Self { restore: differs.then_some(held), thread: PhantomData }
    }
}

impl Drop for FloatEnv {
    #[inline]
    fn drop(&mut self) {
        if let Some(held) = self.restore {
            // SAFETY: the register held the value before.
            unsafe { register::write(held) }
        }
    }
}

/// MXCSR. The x87 unit computes nothing here.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod register {
    use std::arch::asm;

    pub(super) type Control = u32;
    /// All exceptions masked.
    pub(super) const IEEE: Control = 0x1f80;
    /// The other bits are flags of exceptions that have occurred.
    pub(super) const CONTROLS: Control = !0x3f;

    #[inline]
    pub(super) fn read() -> Control {
        let mut value: Control = 0;
        // SAFETY: every x86-64 processor has the instruction, which writes the 4 bytes.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) }
        value
    }

    /// # Safety
    /// The register has the bits that are set.
    #[inline]
    pub(super) unsafe fn write(value: Control) {
        // SAFETY: as above, with 4 bytes that are read; other bits would fault, and the caller excludes them.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack, preserves_flags)) }
    }
}

/// FPCR. The flags of exceptions are another register.
#[cfg(all(target_arch = "aarch64", not(miri)))]
mod register {
    use std::arch::asm;

    pub(super) type Control = u64;
    pub(super) const IEEE: Control = 0;
    pub(super) const CONTROLS: Control = !0;

    #[inline]
    pub(super) fn read() -> Control {
        let value: Control;
        // SAFETY: programs may read the register.
        unsafe { asm!("mrs {}, fpcr", out(reg) value, options(nostack, preserves_flags)) }
        value
    }

    /// # Safety
    /// The register has the bits that are set.
    #[inline]
    pub(super) unsafe fn write(value: Control) {
        // SAFETY: programs may write the register.
        unsafe { asm!("msr fpcr, {}", in(reg) value, options(nostack, preserves_flags)) }
    }
}

/// Other processors, and interpreters, keep the default environment.
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod register {
    pub(super) type Control = u32;
    pub(super) const IEEE: Control = 0;
    pub(super) const CONTROLS: Control = !0;

    pub(super) fn read() -> Control {
        IEEE
    }

    /// # Safety
    /// None: nothing is written.
    pub(super) unsafe fn write(_: Control) {}
}
