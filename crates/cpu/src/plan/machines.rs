//! Facts about machines, for planning without having them.

use super::facts::CpuFacts;
use flashtile_core::isa::Isa;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Two cores of a server with AVX-512 (48 KiB L1d, 2 MiB L2).
pub const AVX512_2: CpuFacts =
    CpuFacts { isa: Isa::Avx512, threads: 2, l1d: 48 * KIB, l2: 2 * MIB, l3: 32 * MIB };

/// A 64-core server with AVX-512 (48 KiB L1d, 2 MiB L2).
pub const AVX512_64: CpuFacts =
    CpuFacts { isa: Isa::Avx512, threads: 64, l1d: 48 * KIB, l2: 2 * MIB, l3: 256 * MIB };

/// An 8-core desktop whose AVX-512 multiplies pairs of bf16 (48 KiB L1d, 1 MiB L2).
pub const AVX512BF16_8: CpuFacts =
    CpuFacts { isa: Isa::Avx512Bf16, threads: 8, l1d: 48 * KIB, l2: MIB, l3: 32 * MIB };

/// A 64-core server with AMX (48 KiB L1d, 2 MiB L2).
pub const AMX_64: CpuFacts =
    CpuFacts { isa: Isa::Amx, threads: 64, l1d: 48 * KIB, l2: 2 * MIB, l3: 256 * MIB };

/// An 8-core desktop with AVX2 (32 KiB L1d, 512 KiB L2).
pub const AVX2_8: CpuFacts =
    CpuFacts { isa: Isa::Avx2, threads: 8, l1d: 32 * KIB, l2: 512 * KIB, l3: 32 * MIB };

/// A 4-core machine for which only the portable kernels exist (plain aarch64: 64 KiB L1d, 1 MiB L2).
pub const PORTABLE_4: CpuFacts =
    CpuFacts { isa: Isa::Portable, threads: 4, l1d: 64 * KIB, l2: MIB, l3: 8 * MIB };

/// Every machine of this module with its name in golden plans.
pub const ALL: [(&str, CpuFacts); 6] = [
    ("avx512-2core", AVX512_2),
    ("avx512-64core", AVX512_64),
    ("avx512bf16-8core", AVX512BF16_8),
    ("amx-64core", AMX_64),
    ("avx2-8core", AVX2_8),
    ("portable-4core", PORTABLE_4),
];
