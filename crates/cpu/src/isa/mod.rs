//! One file for each instruction set, and the choice between them.

#![allow(unsafe_code)]
// The tests of this crate only run emulated kernels: see `of_isa`.
#![cfg_attr(test, allow(dead_code, unused_imports))]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod byte_codes;
mod entry;
mod portable;
#[cfg(target_arch = "x86_64")]
mod vnni;

use crate::kernels::backward::state::BackwardKernels;
use crate::kernels::forward::state::{Kernels, Storage};
use crate::kernels::shared::loops::Loops;
use crate::plan::CpuFacts;
use crate::pool;
use flashtile_core::dtype::Dtype;
use flashtile_core::isa::{Isa, IsaToken};
use std::sync::OnceLock;

/// `$name` in the file of an instruction set that the machine is known to have.
#[cfg(not(test))]
macro_rules! of_isa {
    ($isa:expr, $name:ident $($arguments:tt)?) => {
        match $isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => avx512::amx_products::$name $($arguments)?,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => avx512::bf16_products::$name $($arguments)?,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => avx512::vnni_products::$name $($arguments)?,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::f32_products::$name $($arguments)?,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::$name $($arguments)?,
            #[cfg(target_arch = "x86_64")]
            Isa::Portable => portable::$name $($arguments)?,
            // Other architectures only have the portable kernels.
            #[cfg(not(target_arch = "x86_64"))]
            _ => portable::$name $($arguments)?,
        }
    };
}

/// `$name` of kernels that emulate an instruction set. The tests of this crate only run these, on any machine, and so compile no others:
/// the conformance suite runs the kernels of the library.
#[cfg(test)]
macro_rules! of_isa {
    ($isa:expr, $name:ident $($arguments:tt)?) => {
        match $isa {
            Isa::Avx512Bf16 => portable::emulated_pairs::$name $($arguments)?,
            Isa::Amx => portable::emulated_tiles::$name $($arguments)?,
            isa @ (Isa::Portable | Isa::Avx2 | Isa::Avx512 | Isa::Avx512Vnni) => panic!("{isa} is not emulated"),
        }
    };
}

/// The kernels of an instruction set that the machine is known to have, for the storage of keys and of values.
pub(super) fn kernels(isa: Isa, k: Storage, v: Storage) -> Kernels {
    of_isa!(isa, kernels(k, v))
}

/// The backward kernels of an instruction set that the machine is known to have, for a dtype.
pub(super) fn backward_kernels(isa: Isa, dtype: Dtype) -> BackwardKernels {
    of_isa!(isa, backward_kernels(dtype))
}

/// The measuring loops of an instruction set that the machine is known to have.
pub(super) fn loops(isa: Isa) -> Loops {
    of_isa!(isa, LOOPS)
}

/// Returns true if `vdpbf16ps` multiplies faster than an f32 multiply-add on converted operands. AMD's cores issue equally many of both per
/// cycle. Intel's cores, which have a matrix unit for bf16, issue a quarter as many `vdpbf16ps`.
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
    IsaToken::best().isa()
}

/// The fastest instruction set of this machine.
fn preferred() -> Isa {
    match best() {
        Isa::Avx512Bf16 if !pairs_are_fast() => Isa::Avx512Vnni,
        isa => isa,
    }
}

/// Size in bytes of a cache of core 0 as Linux reports it; `None` if it does not.
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

/// Facts about this machine with its fastest instruction set. Instruction set and caches are read once. The number of threads is that of
/// the current rayon pool or, if its threads cannot start, the number that the system reports.
pub(super) fn facts() -> CpuFacts {
    static FACTS: OnceLock<CpuFacts> = OnceLock::new();
    let facts = FACTS.get_or_init(|| CpuFacts {
        isa: preferred(),
        threads: 1,
        l1d: cache_bytes(1).unwrap_or(32 << 10),
        l2: cache_bytes(2).unwrap_or(512 << 10),
        l3: cache_bytes(3).unwrap_or(8 << 20),
    });
    let available = || std::thread::available_parallelism().map_or(1, usize::from);
    CpuFacts { threads: pool::threads().unwrap_or_else(|_| available()), ..*facts }
}
