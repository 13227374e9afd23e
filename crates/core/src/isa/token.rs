//! Detection of instruction sets.

#![allow(unsafe_code, reason = "asks the processor and the operating system")]

use super::Isa;
use std::sync::OnceLock;

/// Proof that this machine has an instruction set. Functions compiled for one take a token, and are therefore safe to
/// call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IsaToken(Isa);

impl IsaToken {
    /// The token of an instruction set, or `None` if the machine lacks it. Detection runs once.
    #[must_use]
    pub fn new(isa: Isa) -> Option<Self> {
        Self::best().0.contains(isa).then_some(Self(isa))
    }

    /// The token of the most capable instruction set of this machine.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        Self(*BEST.get_or_init(detect))
    }

    /// The token of an instruction set, or of the most capable one of this machine where it lacks that.
    #[must_use]
    pub fn at_most(isa: Isa) -> Self {
        Self::new(isa).unwrap_or_else(Self::best)
    }

    /// The instruction set.
    #[must_use]
    pub const fn isa(self) -> Isa {
        self.0
    }

    /// Counts, in builds with the feature `counters`, that code of this instruction set is about to run.
    #[inline]
    pub fn count(self) {
        #[cfg(feature = "counters")]
        counters::COUNTS[self.0 as usize].fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
}

#[cfg(feature = "counters")]
mod counters {
    use super::Isa;
    use std::sync::atomic::{AtomicU64, Ordering};

    pub(super) static COUNTS: [AtomicU64; Isa::ALL.len()] = [const { AtomicU64::new(0) }; Isa::ALL.len()];

    /// How often code of each instruction set was called in this process, in the order of [`Isa::ALL`].
    pub fn counts() -> [u64; Isa::ALL.len()] {
        COUNTS.each_ref().map(|count| count.load(Ordering::Relaxed))
    }
}
#[cfg(feature = "counters")]
pub use counters::counts;

#[cfg(target_arch = "x86_64")]
fn detect() -> Isa {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let integers = is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512vbmi");
    match (avx2, avx512) {
        (true, true) if integers && is_x86_feature_detected!("avx512bf16") => {
            if amx::available() {
                Isa::Amx
            } else {
                Isa::Avx512Bf16
            }
        }
        (true, true) if integers => Isa::Avx512Vnni,
        (true, true) => Isa::Avx512,
        (true, false) => Isa::Avx2,
        (false, _) => Isa::Portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Isa {
    Isa::Portable
}

/// Detection of AMX.
#[cfg(target_arch = "x86_64")]
mod amx {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

    /// Returns true if the processor has bf16 tiles and the operating system lets this process use them.
    pub(super) fn available() -> bool {
        #[target_feature(enable = "xsave")]
        fn enabled_state() -> u64 {
            // SAFETY: called only after checking that the operating system has enabled the instruction.
            unsafe { _xgetbv(0) }
        }
        const OSXSAVE: u32 = 1 << 27;
        const TILE_AND_BF16: u32 = 1 << 24 | 1 << 22;
        const TILE_STATE: u64 = 3 << 17;
        // SAFETY: every x86-64 processor has CPUID. A leaf is read only if it exists, XGETBV is executed only if
        // OSXSAVE is set.
        #[allow(unused_unsafe, reason = "safe functions in newer toolchains")]
        let enabled = unsafe {
            __cpuid(0).eax >= 7
                && __cpuid(1).ecx & OSXSAVE != 0
                && __cpuid_count(7, 0).edx & TILE_AND_BF16 == TILE_AND_BF16
                && enabled_state() & TILE_STATE == TILE_STATE
        };
        enabled && permitted()
    }

    /// Asks Linux for permission to use the tile state.
    #[cfg(target_os = "linux")]
    fn permitted() -> bool {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        // SAFETY: the call only changes the permission.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }

    #[cfg(not(target_os = "linux"))]
    fn permitted() -> bool {
        false
    }
}
