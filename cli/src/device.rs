//! Machines to plan for: known by a name, or described by a file.

use crate::failure::{Failure, Result};
use crate::input;
use crate::nearest;
use crate::parse::ByName;
use flashtile::plan::{AnyFacts, CpuFacts, CudaFacts, GpuFacts, Isa, MetalFacts, known_machines};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::io::Read;
use std::path::Path;

/// A machine that flashtile knows.
#[derive(Debug, Clone)]
pub(crate) struct Known {
    pub(crate) name: &'static str,
    pub(crate) facts: AnyFacts,
}

/// Parses names of known machines, in any case.
pub(crate) fn known() -> ByName<Known> {
    ByName::new(known_machines().into_iter().map(|(name, _)| name), |text| {
        let all = known_machines();
        let names = || all.iter().map(|(name, _)| *name);
        let lower = text.to_lowercase();
        let found = all.iter().find(|(name, _)| *name == lower);
        let found = found.map(|(name, facts)| Known { name, facts: facts.clone() });
        found.ok_or_else(|| format!("{text} is not known, {}", nearest::expected(&lower, names())))
    })
}

/// The facts of a machine as a file has them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "backend", rename_all = "lowercase")]
enum Described {
    Cpu(#[serde(with = "Cpu")] CpuFacts),
    Cuda(#[serde(with = "Cuda")] CudaFacts),
    Metal(#[serde(with = "Gpu")] GpuFacts),
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "CpuFacts", deny_unknown_fields)]
struct Cpu {
    #[serde(serialize_with = "write_isa", deserialize_with = "read_isa")]
    isa: Isa,
    threads: usize,
    l1d: usize,
    l2: usize,
    l3: usize,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "CudaFacts", deny_unknown_fields)]
struct Cuda {
    capability: (u32, u32),
    multiprocessors: usize,
    threads_per_multiprocessor: usize,
    shared_per_block: usize,
    shared_per_multiprocessor: usize,
    registers_per_multiprocessor: usize,
    l2: usize,
    wgmma: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "GpuFacts", deny_unknown_fields)]
struct Gpu {
    cores: usize,
    simds_per_core: usize,
    threads_per_group: usize,
    shared_per_group: usize,
    shared_per_core: usize,
    reserved_shared: usize,
    registers_per_core: usize,
    registers_per_thread: usize,
    multiplies_f32: bool,
    multiplies_bf16: bool,
    rereads_in_cache: bool,
    max_groups: usize,
}

fn write_isa<S: Serializer>(isa: &Isa, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_str(isa.name())
}

fn read_isa<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Isa, D::Error> {
    let name = String::deserialize(deserializer)?;
    Isa::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| {
        let expected = nearest::expected(&name, Isa::ALL.map(Isa::name));
        D::Error::custom(format_args!("{name} is not an instruction set, {expected}"))
    })
}

/// Largest number of cores or threads, and of bytes, registers or threadgroups, of a described machine: no product of
/// these in a plan overflows.
const MAX_CORES: usize = 1 << 16;
const MAX_SIZE: usize = 1 << 40;

/// Bounds of a number.
struct Range {
    name: &'static str,
    got: usize,
    min: usize,
    max: usize,
}

impl Range {
    const fn cores(name: &'static str, got: usize) -> Self {
        Self { name, got, min: 1, max: MAX_CORES }
    }

    const fn size(name: &'static str, got: usize) -> Self {
        Self { name, got, min: 1, max: MAX_SIZE }
    }

    /// A size that a machine may lack or not tell.
    const fn or_none(name: &'static str, got: usize) -> Self {
        Self { name, got, min: 0, max: MAX_SIZE }
    }
}

impl Described {
    fn of(facts: &AnyFacts) -> Option<Self> {
        let cpu = facts.of().map(|facts| Self::Cpu(*facts));
        let cuda = || facts.of().map(|facts| Self::Cuda(*facts));
        let metal = || facts.of().map(|MetalFacts(facts)| Self::Metal(*facts));
        cpu.or_else(cuda).or_else(metal)
    }

    fn facts(self) -> AnyFacts {
        match self {
            Self::Cpu(facts) => AnyFacts::new(facts),
            Self::Cuda(facts) => AnyFacts::new(facts),
            Self::Metal(facts) => AnyFacts::new(MetalFacts(facts)),
        }
    }

    fn ranges(&self) -> Vec<Range> {
        match self {
            Self::Cpu(cpu) => vec![
                Range::cores("threads", cpu.threads),
                Range::size("l1d", cpu.l1d),
                Range::size("l2", cpu.l2),
                Range::or_none("l3", cpu.l3),
            ],
            Self::Cuda(cuda) => vec![
                Range::cores("multiprocessors", cuda.multiprocessors),
                Range::cores("threads_per_multiprocessor", cuda.threads_per_multiprocessor),
                Range::size("shared_per_block", cuda.shared_per_block),
                Range {
                    max: MAX_SIZE,
                    min: cuda.shared_per_block,
                    name: "shared_per_multiprocessor",
                    got: cuda.shared_per_multiprocessor,
                },
                Range::size("registers_per_multiprocessor", cuda.registers_per_multiprocessor),
                Range::or_none("l2", cuda.l2),
            ],
            Self::Metal(gpu) => vec![
                Range::cores("cores", gpu.cores),
                Range::cores("simds_per_core", gpu.simds_per_core),
                Range { min: 32, ..Range::cores("threads_per_group", gpu.threads_per_group) },
                Range::size("shared_per_group", gpu.shared_per_group),
                Range {
                    max: MAX_SIZE,
                    min: gpu.shared_per_group,
                    name: "shared_per_core",
                    got: gpu.shared_per_core,
                },
                Range::or_none("reserved_shared", gpu.reserved_shared),
                Range::size("registers_per_core", gpu.registers_per_core),
                Range::size("registers_per_thread", gpu.registers_per_thread),
                Range::size("max_groups", gpu.max_groups),
            ],
        }
    }

    fn check(&self) -> std::result::Result<(), String> {
        match self.ranges().into_iter().find(|of| !(of.min..=of.max).contains(&of.got)) {
            Some(Range { name, got, min, max }) => Err(format!("{name} is {got}, expected {min} to {max}")),
            None => Ok(()),
        }
    }
}

/// Facts of a machine as the text of a file that [`read`] takes.
pub(crate) fn text(known: &Known) -> Result<String> {
    let described = Described::of(&known.facts);
    let described = described.ok_or_else(|| Failure::at("--device", "this backend has no facts to print"))?;
    serde_json::to_string_pretty(&described).map(|text| text + "\n").map_err(Failure::new)
}

/// Length of the longest file that is read.
const MAX_FILE: u64 = 1 << 16;

/// Reads the facts of a machine from a file.
pub(crate) fn read(path: &Path) -> Result<AnyFacts> {
    let refuse = |what: &dyn std::fmt::Display| Failure::at(path.display(), what);
    let mut text = String::new();
    let file = input::open(path, "a JSON file")?;
    file.take(MAX_FILE).read_to_string(&mut text).map_err(|e| refuse(&e))?;
    let hint = "`flashtile info --device NAME` prints such a file";
    let described: Described = serde_json::from_str(&text)
        .map_err(|e| refuse(&format_args!("not the facts of a machine: {e} ({hint})")))?;
    described.check().map_err(|what| refuse(&what))?;
    Ok(described.facts())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtile::{Codec, Dims, Dtype, HeadShape, PlanOptions, ProblemDesc, SeqLens};

    #[test]
    fn known_machines_are_files() {
        for (name, facts) in known_machines() {
            let text = text(&Known { name, facts: facts.clone() }).unwrap();
            let read: Described = serde_json::from_str(&text).unwrap();
            // `max_groups` of Apple is that of 32 bits, which is a valid size.
            assert_eq!(read.check(), Ok(()), "{name}");
            assert!(read.facts() == facts, "{text}");
        }
    }

    /// Planners are pure functions of facts: no accepted facts may make one fail.
    #[test]
    fn accepted_facts_of_any_size_are_planned_for() {
        let dims = |q_len, head_dim| Dims {
            batch: 2,
            q_heads: 8,
            kv_heads: 2,
            q_len,
            kv_len: 4096,
            head_dim,
            value_dim: head_dim,
        };
        let mut descs = Vec::new();
        for dtype in Dtype::ALL {
            descs.extend(
                [(1, 64), (4096, 128), (70, 512)]
                    .map(|(q_len, dim)| ProblemDesc::new(dims(q_len, dim), dtype)),
            );
            let shape = HeadShape { q_heads: 32, kv_heads: 8, head_dim: 128, value_dim: 128 };
            let mut cached = ProblemDesc::cached(shape, dtype, &[SeqLens::decode(9000); 5]);
            cached.k_codec = Some(Codec::Int8);
            descs.push(cached);
        }
        let problems: Vec<_> = descs.into_iter().map(|desc| desc.validate().unwrap()).collect();
        let mut planned = 0;
        for name in ["avx512-64core", "h200", "a100", "t4", "m3-max"] {
            let (_, facts) = known_machines().into_iter().find(|(known, _)| *known == name).unwrap();
            let json = serde_json::to_value(Described::of(&facts).unwrap()).unwrap();
            for range in Described::of(&facts).unwrap().ranges() {
                for extreme in [range.min, range.max] {
                    let mut json = json.clone();
                    json[range.name] = extreme.into();
                    let described: Described = serde_json::from_value(json).unwrap();
                    if described.check().is_err() {
                        continue;
                    }
                    for problem in &problems {
                        planned +=
                            usize::from(described.facts().plan(problem, PlanOptions::default()).is_ok());
                    }
                }
            }
        }
        assert!(planned > 200, "{planned}");
    }
}
