//! `flashtile info`: this machine and what it supports.

use crate::device::{self, Known};
use crate::failure::{Failure, Result};
use crate::machine::{self, Bound};
use crate::parse::threads;
use crate::progress::ticking;
use crate::report;
use clap::Args;
use flashtile::cpu::limits;
use flashtile::plan::{CpuFacts, Isa};
use flashtile::{BackendName, Choice, Cpu, Dtype, HeadShape, Limit, ProblemDesc, Rate, SeqLens, Visibility};
use serde_json::json;
use std::process::ExitCode;

/// Show version, instruction sets, caches, backends, what auto takes and why, and measured limits
///
/// Limits (multiply-adds per second, bytes read per second) come last, as measuring them takes a second or more.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashtile info\n  flashtile info --no-measure --json\n  flashtile info --device h200 > mine.json"
)]
pub(crate) struct InfoArgs {
    /// Threads to measure limits with, at most as many as the machine has; default all
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Print the facts of this machine, which need not be here, as the JSON file of `flashtile plan --device-file`
    #[arg(long, value_name = "NAME", value_parser = device::known(), conflicts_with_all = ["threads", "no_measure", "json"])]
    pub(crate) device: Option<Known>,
    /// Show what is known at once, without limits
    #[arg(long)]
    pub(crate) no_measure: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// A backend: its name, whether it is available, and a description or the reason.
type BackendState = (String, bool, String);

fn backends() -> Vec<BackendState> {
    let all = BackendName::all().into_iter().map(|(name, found)| match found {
        Ok(backend) => (name.to_string(), true, backend.describe()),
        Err(why) => (name.to_string(), false, why.to_string()),
    });
    all.collect()
}

/// The choice of `--backend auto` for a typical problem, and why.
struct Auto {
    name: &'static str,
    problem: &'static str,
    choice: Choice,
}

/// Choices for a prompt and for a step of decoding, with the heads of a model of 8 billion parameters.
fn autos() -> Result<[Auto; 2]> {
    let shape = HeadShape { q_heads: 32, kv_heads: 8, head_dim: 128, value_dim: 128 };
    let choice = |steps: &[SeqLens]| {
        let mut desc = ProblemDesc::cached(shape, Dtype::BF16, steps);
        desc.visibility = Visibility::causal();
        Ok::<Choice, Failure>(Choice::auto(&desc.validate().map_err(Failure::new)?))
    };
    Ok([
        Auto {
            name: "prefill",
            problem: "causal bf16 prefill of 4096 tokens, 32/8 heads of 128",
            choice: choice(&[SeqLens { q_len: 4096, kv_len: 4096 }])?,
        },
        Auto {
            name: "decode",
            problem: "bf16 decode of 16 sequences of 8192 tokens in a cache, 32/8 heads of 128",
            choice: choice(&[SeqLens::decode(8192); 16])?,
        },
    ])
}

/// Measured rates: multiply-adds with each instruction set, and reads from memory.
struct Limits {
    peaks: Vec<(Isa, Bound)>,
    bandwidth: Bound,
}

impl Limits {
    /// Measures all rates, which takes about a second on an idle machine, and longer on a busy one.
    fn measure(facts: &CpuFacts) -> Self {
        let isas = Cpu::isas();
        let progress = ticking(isas.len() as u64 + 1);
        let measure = |rate, what: String, measure: &dyn Fn() -> f64, by| {
            progress.set_message(format!("measuring {what}"));
            let limit = Limit { per_second: measure(), by };
            progress.inc(1);
            Bound { rate, limit }
        };
        let peak = |isa: Isa| {
            let peak = || limits::fma_peak(isa, facts.threads);
            (isa, measure(Rate::Arithmetic, isa.to_string(), &peak, "FMA"))
        };
        let peaks = isas.into_iter().map(peak).collect();
        let read = || limits::read_bandwidth(facts.threads);
        let bandwidth = measure(Rate::Bandwidth, "memory".to_owned(), &read, "read");
        progress.finish_and_clear();
        Self { peaks, bandwidth }
    }

    fn lines(&self) -> Vec<(String, String)> {
        let peaks = self.peaks.iter().map(|(isa, limit)| (isa.name().to_owned(), limit.to_string()));
        peaks.chain([("memory".to_owned(), self.bandwidth.to_string())]).collect()
    }
}

pub(crate) fn run(args: &InfoArgs) -> Result<ExitCode> {
    if let Some(known) = &args.device {
        report::text(device::text(known)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    machine::on_threads(args.threads, || {
        let facts = *Cpu::new().facts();
        let measured = || (!args.no_measure).then(|| Limits::measure(&facts));
        if args.json {
            return report::json(&as_json(&facts, measured().as_ref())?);
        }
        // Facts are printed before the measurements, which take a second or more.
        report::text(report::facts(&known(&facts)?))?;
        measured().map_or(Ok(()), |limits| report::text(report::facts(&limits.lines())))
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Facts that need no measurement, as names and values.
fn known(facts: &CpuFacts) -> Result<Vec<(String, String)>> {
    let isas: Vec<&str> = Cpu::isas().into_iter().map(Isa::name).collect();
    let size = |n: usize| report::bytes(n as f64);
    let mut lines = vec![
        ("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("cpu".to_owned(), format!("{}, {}", std::env::consts::ARCH, isas.join(", "))),
        (
            "caches".to_owned(),
            format!("L1d {}, L2 {}, L3 {}", size(facts.l1d), size(facts.l2), size(facts.l3)),
        ),
        ("threads".to_owned(), facts.threads.to_string()),
    ];
    lines.extend(backends().into_iter().map(|(name, available, why)| {
        let state = if available { "available" } else { "unavailable" };
        (name, format!("{state}: {why}"))
    }));
    lines.extend(autos()?.map(|auto| {
        let Auto { name, problem, choice } = auto;
        (name.to_owned(), format!("auto takes {choice} ({problem})"))
    }));
    Ok(lines)
}

/// All output as JSON. Limits are null if they are not measured.
fn as_json(facts: &CpuFacts, limits: Option<&Limits>) -> Result<serde_json::Value> {
    let fma = limits.map(|limits| -> serde_json::Map<_, _> {
        limits
            .peaks
            .iter()
            .map(|(isa, limit)| (isa.name().to_owned(), json!(limit.limit.per_second)))
            .collect()
    });
    let backends: Vec<_> = backends()
        .iter()
        .map(|(name, available, why)| json!({"name": name, "available": available, "reason": why}))
        .collect();
    let autos: Vec<_> = autos()?
        .iter()
        .map(|Auto { name, problem, choice }| {
            json!({
                "name": name,
                "problem": problem,
                "backend": choice.backend.name(),
                "backend_reason": choice.reason,
            })
        })
        .collect();
    Ok(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "arch": std::env::consts::ARCH,
        "isas": Cpu::isas().into_iter().map(Isa::name).collect::<Vec<_>>(),
        "threads": facts.threads,
        "l1d": facts.l1d,
        "l2": facts.l2,
        "l3": facts.l3,
        "fma_flops_per_s": fma,
        "read_bytes_per_s": limits.map(|limits| limits.bandwidth.limit.per_second),
        "backends": backends,
        "auto": autos,
    }))
}
