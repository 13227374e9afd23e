//! Facts of Apple's GPUs.

use flashtile_gpu::facts::GpuFacts;
use flashtile_gpu::machines::{self, M1};
use std::ops::Deref;

/// The facts that the planner needs about one of Apple's GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct MetalFacts(pub GpuFacts);

impl Deref for MetalFacts {
    type Target = GpuFacts;

    fn deref(&self) -> &GpuFacts {
        &self.0
    }
}

/// Apple's GPUs by the names that they have in golden plans.
pub const ALL_APPLE: [(&str, MetalFacts); machines::ALL_APPLE.len()] = {
    let mut all = [("", MetalFacts(M1)); machines::ALL_APPLE.len()];
    let mut at = 0;
    while at < all.len() {
        all[at] = (machines::ALL_APPLE[at].0, MetalFacts(machines::ALL_APPLE[at].1));
        at += 1;
    }
    all
};

/// GPU cores of the chips with the most cores that are sold under a name, longest names first. Metal does not tell the number: chips
/// with fewer cores get more threadgroups than they hold at a time, which costs at most one of them.
///
/// Source: Apple newsroom and "Technical Specifications" of the computers, phones and tablets with the chips.
const CORES: [(&str, usize); 25] = [
    ("Apple M1 Ultra", 64),
    ("Apple M1 Max", 32),
    ("Apple M1 Pro", 16),
    ("Apple M1", 8),
    ("Apple M2 Ultra", 76),
    ("Apple M2 Max", 38),
    ("Apple M2 Pro", 19),
    ("Apple M2", 10),
    ("Apple M3 Ultra", 80),
    ("Apple M3 Max", 40),
    ("Apple M3 Pro", 18),
    ("Apple M3", 10),
    ("Apple M4 Max", 40),
    ("Apple M4 Pro", 20),
    ("Apple M4", 10),
    ("Apple M5 Max", 40),
    ("Apple M5 Pro", 20),
    ("Apple M5", 10),
    ("Apple A14", 4),
    ("Apple A15", 5),
    ("Apple A16", 5),
    ("Apple A17", 6),
    ("Apple A18", 6),
    ("Apple A19", 6),
    ("Apple", 8),
];

/// Facts of the device of a name, whose threadgroups may have `threads_per_group` threads and `shared_per_group` bytes of threadgroup
/// memory; `None` where it is not one of Apple's own GPUs, which the kernels' matrix operations need (family Apple7, the A14 and M1, and later).
///
/// ```
/// use flashtile_metal::facts_of;
/// assert_eq!(facts_of("Apple M3 Max", 1024, 32768).map(|facts| facts.cores), Some(40));
/// assert_eq!(facts_of("AMD Radeon Pro 5500M", 1024, 65536), None);
/// ```
#[must_use]
pub fn facts_of(name: &str, threads_per_group: usize, shared_per_group: usize) -> Option<MetalFacts> {
    let cores = CORES.iter().find(|(chip, _)| name.starts_with(chip)).map(|(_, cores)| *cores)?;
    Some(MetalFacts(GpuFacts { cores, threads_per_group, shared_per_group, ..M1 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_names_are_found_before_their_beginnings() {
        for (at, (chip, cores)) in CORES.iter().enumerate() {
            assert_eq!(facts_of(chip, 1024, 32 << 10).map(|facts| facts.cores), Some(*cores));
            assert!(CORES[..at].iter().all(|(longer, _)| !chip.starts_with(longer)), "{chip}");
        }
    }

    #[test]
    fn known_chips_have_the_facts_of_their_golden_plans() {
        for (name, chip) in [("m1", "Apple M1"), ("m3-max", "Apple M3 Max"), ("m5", "Apple M5")] {
            let known = ALL_APPLE.iter().find(|(of, _)| *of == name).map(|(_, facts)| *facts);
            assert_eq!(facts_of(chip, 1024, 32 << 10), known);
        }
    }
}
