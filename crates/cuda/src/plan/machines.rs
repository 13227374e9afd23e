//! Facts of machines, as data: for planning without them.
//!
//! Source of threads, shared memory and registers: CUDA Programming Guide, "technical specifications per compute capability".

use super::facts::CudaFacts;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// NVIDIA A100 (SXM).
pub const A100: CudaFacts = CudaFacts {
    capability: (8, 0),
    multiprocessors: 108,
    threads_per_multiprocessor: 2048,
    shared_per_block: 163 * KIB,
    shared_per_multiprocessor: 164 * KIB,
    registers_per_multiprocessor: 65_536,
    l2: 40 * MIB,
    wgmma: false,
};

/// NVIDIA GeForce RTX 4090.
pub const RTX_4090: CudaFacts = CudaFacts {
    capability: (8, 9),
    multiprocessors: 128,
    threads_per_multiprocessor: 1536,
    shared_per_block: 99 * KIB,
    shared_per_multiprocessor: 100 * KIB,
    registers_per_multiprocessor: 65_536,
    l2: 72 * MIB,
    wgmma: false,
};

/// NVIDIA H100 (SXM).
pub const H100: CudaFacts = CudaFacts {
    capability: (9, 0),
    multiprocessors: 132,
    threads_per_multiprocessor: 2048,
    shared_per_block: 227 * KIB,
    shared_per_multiprocessor: 228 * KIB,
    registers_per_multiprocessor: 65_536,
    l2: 50 * MIB,
    wgmma: true,
};

/// NVIDIA H200 (SXM).
pub const H200: CudaFacts = CudaFacts { l2: 60 * MIB, ..H100 };

/// NVIDIA GH200, the GPU of a Grace Hopper superchip.
pub const GH200: CudaFacts = CudaFacts { l2: 60 * MIB, ..H100 };

/// NVIDIA T4.
pub const T4: CudaFacts = CudaFacts {
    capability: (7, 5),
    multiprocessors: 40,
    threads_per_multiprocessor: 1024,
    shared_per_block: 64 * KIB,
    shared_per_multiprocessor: 64 * KIB,
    registers_per_multiprocessor: 65_536,
    l2: 4 * MIB,
    wgmma: false,
};

/// Every CUDA device of this module with its name in golden plans.
pub const ALL_CUDA: [(&str, CudaFacts); 6] =
    [("h100", H100), ("h200", H200), ("gh200", GH200), ("a100", A100), ("rtx4090", RTX_4090), ("t4", T4)];
