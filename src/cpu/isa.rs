//! Detection of the machine.

use crate::plan::{CpuFacts, Isa};
use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
fn detect() -> Isa {
    if is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
    {
        Isa::Avx512
    } else if is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
    {
        Isa::Avx2
    } else {
        Isa::Portable
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Isa {
    Isa::Portable
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

/// Facts of this machine. Instruction set and caches are read once; threads are those of the current rayon pool.
pub(super) fn facts() -> CpuFacts {
    static FACTS: OnceLock<CpuFacts> = OnceLock::new();
    let facts = FACTS.get_or_init(|| CpuFacts {
        isa: detect(),
        threads: 1,
        l1d: cache_bytes(1).unwrap_or(32 << 10),
        l2: cache_bytes(2).unwrap_or(512 << 10),
        l3: cache_bytes(3).unwrap_or(8 << 20),
    });
    CpuFacts { threads: rayon::current_num_threads(), ..*facts }
}
