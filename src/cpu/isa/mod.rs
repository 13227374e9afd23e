//! Detection of the machine, and one file per instruction set.

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod numbers;
mod portable;
#[cfg(target_arch = "x86_64")]
mod vnni;

use super::kernels::Context;
use crate::plan::{CpuFacts, Isa, Reduction, Task};
use std::sync::OnceLock;

/// The functions of one instruction set: the only ones that are compiled with its target features.
///
/// Safety of each: the machine has the instruction set, and the rest is the contract of the kernel of the same name.
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    pub(super) task: unsafe fn(&Context<'_>, &Task, *mut f32),
    pub(super) reduce: unsafe fn(&Context<'_>, &Reduction, *mut f32),
    pub(super) fma_loop: unsafe fn(u64) -> f32,
    pub(super) read_loop: unsafe fn(*const f32, usize) -> f32,
}

/// Defines `KERNELS` of an ISA file.
macro_rules! entry_points {
    ($S:ident $(, $features:literal)?) => {
        /// The kernels, compiled for this instruction set.
        pub(in crate::cpu::isa) const KERNELS: crate::cpu::isa::Kernels = crate::cpu::isa::Kernels { task, reduce, fma_loop, read_loop };

        $(#[target_feature(enable = $features)])?
        unsafe fn task(cx: &crate::cpu::kernels::Context<'_>, task: &crate::plan::Task, scratch: *mut f32) {
            // SAFETY: the caller's promise.
            unsafe { crate::cpu::kernels::forward::task::<$S>(cx, task, scratch) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn reduce(
            cx: &crate::cpu::kernels::Context<'_>,
            task: &crate::plan::Reduction,
            scratch: *mut f32,
        ) {
            // SAFETY: the caller's promise.
            unsafe { crate::cpu::kernels::forward::reduce::<$S>(cx, task, scratch) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn fma_loop(rounds: u64) -> f32 {
            // SAFETY: the caller's promise.
            unsafe { crate::cpu::limits::fma_loop::<$S>(rounds) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn read_loop(p: *const f32, len: usize) -> f32 {
            // SAFETY: the caller's promise.
            unsafe { crate::cpu::limits::read_loop::<$S>(p, len) }
        }
    };
}
use entry_points;

/// The kernels of an instruction set that the machine is known to have.
pub(super) fn kernels(isa: Isa) -> Kernels {
    match isa {
        #[cfg(test)]
        Isa::Avx512Bf16 if best() < isa => portable::emulated_pairs::KERNELS,
        #[cfg(test)]
        Isa::Amx if best() < isa => portable::emulated_tiles::KERNELS,
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => avx512::amx_products::KERNELS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => avx512::bf16_products::KERNELS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Vnni => avx512::f32_products::KERNELS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::KERNELS,
        _ => portable::KERNELS,
    }
}

/// The most capable instruction set of this machine.
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

/// Whether `vdpbf16ps` multiplies faster than an f32 multiply-add on converted operands. AMD's cores issue as many of either
/// per cycle; Intel's issue a quarter as many, having a matrix unit for bf16.
#[cfg(target_arch = "x86_64")]
fn pairs_are_fast() -> bool {
    // SAFETY: every x86-64 processor has the instruction and this leaf.
    #[allow(unused_unsafe, reason = "a safe function in newer toolchains")]
    let vendor = unsafe { std::arch::x86_64::__cpuid(0) };
    let bytes = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
    bytes.as_flattened() == b"AuthenticAMD"
}

#[cfg(not(target_arch = "x86_64"))]
fn pairs_are_fast() -> bool {
    false
}

/// The most capable instruction set of this machine.
pub(super) fn best() -> Isa {
    static BEST: OnceLock<Isa> = OnceLock::new();
    *BEST.get_or_init(detect)
}

/// The fastest instruction set of this machine.
fn preferred() -> Isa {
    match best() {
        Isa::Avx512Bf16 if !pairs_are_fast() => Isa::Avx512Vnni,
        isa => isa,
    }
}

/// Size in bytes of a cache of core 0 as Linux reports it, `None` where it does not.
fn cache_bytes(level: u32) -> Option<usize> {
    (0..8).find_map(|index| {
        let read = |name: &str| {
            std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{name}")).ok()
        };
        let wanted = read("level")?.trim().parse() == Ok(level) && read("type")?.trim() != "Instruction";
        let size = read("size")?;
        let kib: usize = size.trim().strip_suffix('K')?.parse().ok()?;
        wanted.then_some(kib * 1024)
    })
}

/// Facts of this machine with its fastest instruction set. Instruction set and caches are read once; threads are
/// those of the current rayon pool.
pub(super) fn facts() -> CpuFacts {
    static FACTS: OnceLock<CpuFacts> = OnceLock::new();
    let facts = FACTS.get_or_init(|| CpuFacts {
        isa: preferred(),
        threads: 1,
        l1d: cache_bytes(1).unwrap_or(32 << 10),
        l2: cache_bytes(2).unwrap_or(512 << 10),
        l3: cache_bytes(3).unwrap_or(8 << 20),
    });
    CpuFacts { threads: rayon::current_num_threads(), ..*facts }
}
