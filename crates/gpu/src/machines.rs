//! Facts of Apple's GPUs, as data: for planning without them.
//!
//! | fact | source |
//! |---|---|
//! | cores | Apple newsroom: "Apple unleashes M1", "Apple unveils M3, M3 Pro, and M3 Max", "Apple unleashes M5"; chips with fewer cores are sold under the same names |
//! | 1024 threads, 32 KiB of threadgroup memory | Apple, Metal feature set tables: maximum threads per threadgroup, maximum total threadgroup memory allocation; Apple7 to Apple10 |
//! | threads of a pipeline, registers | Mesa, `src/asahi/compiler/agx_performance.c`, `occupancies`: with up to 208 registers of 16 bits a thread, a threadgroup has 512 threads, with 232 it has 448, with 256, the most, 384 |
//! | SIMD groups and threadgroup memory of a core | measured for Apple7 and Apple8: <https://github.com/philipturner/metal-benchmarks>, "on-chip memory": 3072 threads, about 60 KB |
//! | products of f32 and bf16 | Apple, Metal Shading Language Specification: `simdgroup_float8x8`, and from 3.1 on `simdgroup_bfloat8x8` |
//!
//! A core's registers are 512 threads of 104 registers of 32 bits: 208 KiB. From Apple9 on (M3) a core hands out one memory as registers
//! and threadgroup memory while threads run (Apple, "Explore GPU advancements in M3 and A17 Pro"), and its size is not published: the
//! numbers of Apple7 are estimates there. The neural accelerators of M5 are not counted: the portable kernels multiply by
//! `simdgroup_multiply_accumulate`.

use crate::facts::GpuFacts;

const KIB: usize = 1024;

/// What the chips have in common.
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
    max_groups: u32::MAX as usize,
};

/// Apple M1, of the family Apple7.
pub const M1: GpuFacts = GpuFacts { cores: 8, ..APPLE };

/// A pipeline of [`M1`] whose threads have 105 to 116 registers of 32 bits.
pub const M1_PIPELINE_448: GpuFacts = M1.with_threads_per_group(448);

/// Apple M3 Max, of the family Apple9.
pub const M3_MAX: GpuFacts = GpuFacts { cores: 40, ..APPLE };

/// Apple M5, of the family Apple10.
pub const M5: GpuFacts = GpuFacts { cores: 10, ..APPLE };

/// Every device of this module with its name in golden plans.
pub const ALL_APPLE: [(&str, GpuFacts); 4] =
    [("m1", M1), ("m1-pipeline-448", M1_PIPELINE_448), ("m3-max", M3_MAX), ("m5", M5)];
