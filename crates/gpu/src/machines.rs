//! Facts of Apple's GPUs, as data: for planning without them.
//!
//! | fact | source |
//! |---|---|
//! | cores | Apple newsroom: "Apple unleashes M1", "Apple unveils M2", "Apple unveils M3, M3 Pro, and M3 Max", "Apple introduces M4 chip", "Apple unleashes M5", "Apple unveils iPhone 15 Pro and iPhone 15 Pro Max" (A17 Pro); chips with fewer cores are sold under the same names |
//! | families | Apple, Metal feature set tables: M1 is of Apple7, M2 of Apple8, A17 Pro, M3 and M4 of Apple9, M5 of Apple10 |
//! | 1024 threads, 32 KiB of threadgroup memory | Apple, Metal feature set tables: maximum threads per threadgroup, maximum total threadgroup memory allocation; Apple7 to Apple10 |
//! | threads of a pipeline, registers | Mesa, `src/asahi/compiler/agx_performance.c`, `occupancies`: with up to 208 registers of 16 bits a thread, a threadgroup has 512 threads, with 232 it has 448, with 256, the most, 384 |
//! | SIMD groups and threadgroup memory of a core | measured for Apple7 and Apple8: <https://github.com/philipturner/metal-benchmarks>, "on-chip memory": 3072 threads, about 60 KB |
//! | products of f32 and bf16 | Apple, Metal Shading Language Specification: `simdgroup_float8x8`, and from 3.1 on `simdgroup_bfloat8x8` |
//!
//! A core's registers are 512 threads of 104 registers of 32 bits: 208 KiB. From Apple9 on (M3) a core hands out one memory as registers
//! and threadgroup memory while threads run (Apple, "Explore GPU advancements in M3 and A17 Pro"), and its size is not published: the
//! numbers of Apple7 are estimates there, for A17 Pro too. How much faster than memory the caches are that cores share is not published
//! either: plans do not count on them (`rereads_in_cache`). The neural accelerators of M5 are not counted: the portable kernels multiply by
//! `simdgroup_multiply_accumulate`.

use crate::facts::GpuFacts;

const KIB: usize = 1024;

/// The facts that the chips have in common.
const APPLE: GpuFacts = GpuFacts {
    cores: 0,
    simds_per_core: 3072 / 32,
    threads_per_group: 1024,
    shared_per_group: 32 * KIB,
    shared_per_core: 60 * KIB,
    reserved_shared: 0,
    registers_per_core: 512 * 104,
    registers_per_thread: 128,
    multiplies_f32: true,
    multiplies_bf16: true,
    rereads_in_cache: false,
    max_groups: u32::MAX as usize,
};

/// Apple M1, of the family Apple7.
pub const M1: GpuFacts = GpuFacts { cores: 8, ..APPLE };

/// A pipeline of [`M1`] whose threads have 105 to 116 registers of 32 bits.
pub const M1_PIPELINE_448: GpuFacts = M1.with_threads_per_group(448);

/// Apple M2, of the family Apple8.
pub const M2: GpuFacts = GpuFacts { cores: 10, ..APPLE };

/// Apple A17 Pro of the iPhone 15 Pro, of the family Apple9.
pub const A17_PRO: GpuFacts = GpuFacts { cores: 6, ..APPLE };

/// Apple M3 Max, of the family Apple9.
pub const M3_MAX: GpuFacts = GpuFacts { cores: 40, ..APPLE };

/// Apple M4, of the family Apple9.
pub const M4: GpuFacts = GpuFacts { cores: 10, ..APPLE };

/// Apple M5, of the family Apple10.
pub const M5: GpuFacts = GpuFacts { cores: 10, ..APPLE };

/// Every device of this module with its name in golden plans.
pub const ALL_APPLE: [(&str, GpuFacts); 7] = [
    ("m1", M1),
    ("m1-pipeline-448", M1_PIPELINE_448),
    ("m2", M2),
    ("a17-pro", A17_PRO),
    ("m3-max", M3_MAX),
    ("m4", M4),
    ("m5", M5),
];
