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

use super::kernels::{Fold, Products, TaskState, Tile};
use crate::plan::CpuFacts;
use flashtile_core::dtype::Dtype;
use flashtile_core::isa::Isa;
use std::ops::Range;
use std::sync::OnceLock;

/// Packs some columns of a block of keys.
type PackKeys = unsafe fn(&TaskState<'_>, usize, &Range<usize>);
/// Packs the values of some keys, counted from a first one, to memory.
type PackValues = unsafe fn(&TaskState<'_>, usize, &Range<usize>, *mut f32);

/// How the keys or values of a problem are stored: elements of a dtype, or codes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Storage {
    Elements(Dtype),
    Codes,
}

/// The phases of a task for one instruction set and the storage of one problem: the only functions that are compiled with the
/// target features of the set.
///
/// Each is called once a task, block or tile, which costs nothing beside its work, and is a function of its own: the time that
/// optimisation takes grows faster than the size of a function.
///
/// Safety of each: the machine has the instruction set, and the rest is the contract of the kernel of the same name.
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    /// How products take keys.
    pub(super) products: Products,
    /// Products with codes in integers, where the instruction set has them.
    pub(super) integer_products: Option<CodeProducts>,
    /// Products with codes of a byte in f32, where the instruction set has them.
    pub(super) byte_products: Option<CodeProducts>,
    /// Configures the thread's matrix unit, where the instruction set has one.
    pub(super) begin_tiles: unsafe fn(),
    /// Releases it.
    pub(super) end_tiles: unsafe fn(),
    pub(super) pack_queries: unsafe fn(&TaskState<'_>),
    pub(super) pack_keys: PackKeys,
    pub(super) packed_scores: unsafe fn(&TaskState<'_>, &Tile),
    pub(super) stream_scores: unsafe fn(&TaskState<'_>, &Tile),
    pub(super) probs: unsafe fn(&TaskState<'_>, &Tile),
    pub(super) pack_values: PackValues,
    pub(super) packed_values: unsafe fn(&TaskState<'_>, &Tile, &Range<usize>, *const f32),
    pub(super) stream_values: unsafe fn(&TaskState<'_>, &Tile, &Range<usize>),
    pub(super) repair_nonfinite: unsafe fn(&TaskState<'_>, &Tile),
    pub(super) fold: unsafe fn(usize, &Fold),
    pub(super) finish: unsafe fn(&TaskState<'_>, usize, usize),
}

/// The phases of a tile that multiply codes where they lie.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "other targets have none"))]
pub(super) struct CodeProducts {
    pub(super) scores: unsafe fn(&TaskState<'_>, &Tile),
    pub(super) values: unsafe fn(&TaskState<'_>, &Tile),
}

/// The loops that measure the limits of an instruction set.
#[derive(Clone, Copy)]
pub(super) struct Loops {
    pub(super) fma: unsafe fn(u64) -> f32,
    pub(super) read: unsafe fn(*const f32, usize) -> f32,
}

/// Writes functions that are compiled with target features.
macro_rules! entry {
    ($features:tt) => {};
    ($features:tt
        fn $name:ident($($argument:ident: $T:ty),*) $(-> $R:ty)? { $call:expr }
        $($others:tt)*
    ) => {
        crate::isa::entry! { @one $features fn $name($($argument: $T),*) $(-> $R)? { $call } }
        crate::isa::entry! { $features $($others)* }
    };
    (@one [$($features:literal)?]
        fn $name:ident($($argument:ident: $T:ty),*) $(-> $R:ty)? { $call:expr }
    ) => {
        $(#[target_feature(enable = $features)])?
        #[inline(never)]
        unsafe fn $name($($argument: $T),*) $(-> $R)? {
            // SAFETY: the caller's promise.
            unsafe { $call }
        }
    };
}
use entry;

/// Writes the module `$module` with the phases that depend on how elements are stored.
macro_rules! element_entries {
    ($module:ident, $S:ty, $features:tt, $E:ty, $R:ty) => {
        mod $module {
            use super::*;
            use crate::kernels::phases;
            crate::isa::entry! { $features
                fn pack_keys(work: &TaskState<'_>, block: usize, columns: &Range<usize>) {
                    phases::pack_keys::<$S, $R>(work, block, columns)
                }
                fn stream_scores(work: &TaskState<'_>, tile: &Tile) {
                    phases::stream_scores::<$S, $R>(work, tile)
                }
                fn pack_values(work: &TaskState<'_>, first: usize, rows: &Range<usize>, dst: *mut f32) {
                    phases::pack_values::<$S, $E>(work, first, rows, dst)
                }
                fn stream_values(work: &TaskState<'_>, tile: &Tile, columns: &Range<usize>) {
                    phases::stream_values::<$S, $E>(work, tile, columns)
                }
            }
            pub(super) const SCORES: ScoresOf = ScoresOf { pack: pack_keys, stream: stream_scores };
            pub(super) const VALUES: ValuesOf = ValuesOf { pack: pack_values, stream: stream_values };
        }
    };
}
use element_entries;

/// The phases of scores that depend on how keys are stored.
#[derive(Clone, Copy)]
struct ScoresOf {
    pack: PackKeys,
    stream: unsafe fn(&TaskState<'_>, &Tile),
}

/// The phases of values that depend on how values are stored.
#[derive(Clone, Copy)]
struct ValuesOf {
    pack: PackValues,
    stream: unsafe fn(&TaskState<'_>, &Tile, &Range<usize>),
}

/// Defines `kernels` and `LOOPS` of an ISA file: for `any` storage, or for elements that are `pairs` of bf16.
macro_rules! entry_points {
    (any, $S:ty $(, $features:literal)?) => {
        crate::isa::entry_points!(@common $S, [$($features)?]);
        crate::isa::element_entries!(f32_elements, $S, [$($features)?], f32, Single<f32>);
        crate::isa::element_entries!(f16_elements, $S, [$($features)?], F16, Single<F16>);
        crate::isa::element_entries!(bf16_elements, $S, [$($features)?], Bf16, Double);
        crate::isa::entry! { [$($features)?]
            fn pack_key_codes(work: &TaskState<'_>, block: usize, columns: &Range<usize>) {
                phases::pack_key_codes::<$S>(work, block, columns)
            }
        }

        /// The kernels of this instruction set for keys and values that are stored so.
        pub(in crate::isa) fn kernels(k: Storage, v: Storage) -> Kernels {
            let scores = match k {
                Storage::Elements(Dtype::F32) => f32_elements::SCORES,
                Storage::Elements(Dtype::F16) => f16_elements::SCORES,
                Storage::Elements(Dtype::BF16) => bf16_elements::SCORES,
                // Codes are not streamed.
                Storage::Codes => ScoresOf { pack: pack_key_codes, ..f32_elements::SCORES },
            };
            let values = match v {
                Storage::Elements(Dtype::F32) => f32_elements::VALUES,
                Storage::Elements(Dtype::F16) => f16_elements::VALUES,
                Storage::Elements(Dtype::BF16) => bf16_elements::VALUES,
                Storage::Codes => ValuesOf { pack: phases::pack_value_codes, ..f32_elements::VALUES },
            };
            with_elements(scores, values)
        }
    };
    (pairs, $S:ty $(, $features:literal)?) => {
        crate::isa::entry_points!(@common $S, [$($features)?]);
        // A pair of keys takes the place of an f32.
        crate::isa::element_entries!(bf16_elements, $S, [$($features)?], Bf16, Single<f32>);

        /// The kernels of this instruction set, of bf16 keys and values.
        pub(in crate::isa) fn kernels(k: Storage, v: Storage) -> Kernels {
            debug_assert!([k, v] == [Storage::Elements(Dtype::BF16); 2], "plans choose pairs for bf16 alone");
            with_elements(bf16_elements::SCORES, bf16_elements::VALUES)
        }
    };
    (@common $S:ty, $features:tt) => {
        #[allow(clippy::wildcard_imports, reason = "what every instruction set's phases name")]
        use crate::isa::entry_imports::*;

        crate::isa::entry! { $features
            fn begin_tiles() { <$S as crate::simd::Simd>::begin_tiles() }
            fn end_tiles() { <$S as crate::simd::Simd>::end_tiles() }
            fn pack_queries(work: &TaskState<'_>) { phases::pack_queries::<$S>(work) }
            fn packed_scores(work: &TaskState<'_>, tile: &Tile) { phases::packed_scores::<$S>(work, tile) }
            fn probs(work: &TaskState<'_>, tile: &Tile) { phases::probs::<$S>(work, tile) }
            fn packed_values(work: &TaskState<'_>, tile: &Tile, columns: &Range<usize>, rows: *const f32) {
                phases::packed_values::<$S>(work, tile, columns, rows)
            }
            fn repair_nonfinite(work: &TaskState<'_>, tile: &Tile) { phases::repair_nonfinite::<$S>(work, tile) }
            fn fold(rows: usize, fold: &Fold) { phases::fold::<$S>(rows, fold) }
            fn finish(work: &TaskState<'_>, first: usize, rows: usize) { phases::finish::<$S>(work, first, rows) }
            fn fma_loop(rounds: u64) -> f32 { crate::limits::fma_loop::<$S>(rounds) }
            fn read_loop(p: *const f32, len: usize) -> f32 { crate::limits::read_loop::<$S>(p, len) }
        }

        /// The loops that measure the limits of this instruction set.
        pub(in crate::isa) const LOOPS: Loops = Loops { fma: fma_loop, read: read_loop };

        fn with_elements(scores: ScoresOf, values: ValuesOf) -> Kernels {
            Kernels {
                products: Products::of::<$S>(),
                integer_products: None,
                byte_products: None,
                begin_tiles,
                end_tiles,
                pack_queries,
                pack_keys: scores.pack,
                packed_scores,
                stream_scores: scores.stream,
                probs,
                pack_values: values.pack,
                packed_values,
                stream_values: values.stream,
                repair_nonfinite,
                fold,
                finish,
            }
        }
    };
}
use entry_points;

/// The names that [`entry_points`] uses.
mod entry_imports {
    pub(super) use super::{Kernels, Loops, ScoresOf, Storage, ValuesOf};
    pub(super) use crate::kernels::{Fold, Products, TaskState, Tile, phases};
    pub(super) use crate::simd::{Bf16, Double, F16, Single};
    pub(super) use flashtile_core::dtype::Dtype;
    pub(super) use std::ops::Range;
}

/// Calls `$f` of the file of an instruction set that the machine is known to have.
macro_rules! of_isa {
    ($isa:expr, $item:ident $($arguments:tt)?) => {
        match $isa {
            #[cfg(test)]
            Isa::Avx512Bf16 if best() < Isa::Avx512Bf16 => portable::emulated_pairs::$item $($arguments)?,
            #[cfg(test)]
            Isa::Amx if best() < Isa::Amx => portable::emulated_tiles::$item $($arguments)?,
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => avx512::amx_products::$item $($arguments)?,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => avx512::bf16_products::$item $($arguments)?,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Vnni => avx512::f32_products::$item $($arguments)?,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::$item $($arguments)?,
            _ => portable::$item $($arguments)?,
        }
    };
}

/// The kernels of an instruction set that the machine is known to have, for keys and values that are stored so.
pub(super) fn kernels(isa: Isa, k: Storage, v: Storage) -> Kernels {
    of_isa!(isa, kernels(k, v))
}

/// The measuring loops of an instruction set that the machine is known to have.
pub(super) fn loops(isa: Isa) -> Loops {
    of_isa!(isa, LOOPS)
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
