//! `flashtile info`: this machine and what it supports.

use crate::check::ticking;
use crate::failure::Result;
use crate::gpu;
use crate::machine::{self, Limit, LimitKind, Unit};
use crate::parse::threads;
use crate::report;
use crate::simulator;
use clap::Args;
use flashtile::Cpu;
use flashtile::plan::{CpuFacts, Isa};
use serde_json::json;
use std::process::ExitCode;

/// Show version, instruction sets, caches, backends and measured limits
///
/// Limits (multiply-adds per second, bytes read per second) come last, as measuring them takes a second or more.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  flashtile info\n  flashtile info --no-measure --json")]
pub(crate) struct InfoArgs {
    /// Threads whose limits are measured, at most as many as the machine has; default all
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Show what is known at once, without limits
    #[arg(long)]
    pub(crate) no_measure: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// A backend: its name, whether it is available, and a description or the reason.
type BackendState = (&'static str, bool, String);

fn backends() -> Vec<BackendState> {
    let state = |name, available, why: &str| (name, available, why.to_owned());
    let cuda = match gpu::device() {
        Ok(cuda) => {
            let facts = cuda.facts();
            let (major, minor) = facts.capability;
            let compiler = gpu::compiler(&cuda).unwrap_or_else(|why| why.to_string());
            let text = format!(
                "{}, compute capability {major}.{minor}, {} multiprocessors; {compiler}",
                cuda.name(),
                facts.multiprocessors
            );
            ("cuda", true, text)
        }
        Err(why) => ("cuda", false, why.to_string()),
    };
    vec![
        state("cpu", true, "embedded kernels"),
        state("reference", true, "scalar f64, one thread"),
        cuda,
        state("metal", false, "not part of this build"),
        match simulator::require() {
            Ok(()) => state("simulator", true, "GPU kernels on the host, every access checked"),
            Err(_) => state("simulator", false, "not part of this build, needs feature simulator"),
        },
    ]
}

/// Rates that are measured: multiply-adds with each instruction set, and reads from memory.
struct Limits {
    peaks: Vec<(Isa, Limit)>,
    bandwidth: Limit,
}

impl Limits {
    /// Takes about a second on an idle machine, and longer on a busy one.
    fn measure(facts: &CpuFacts) -> Result<Self> {
        let isas = Cpu::isas();
        let progress = ticking(isas.len() as u64 + 1);
        let measure = |kind, isa, what: String| {
            progress.set_message(format!("measuring {what}"));
            let limit = Limit::measure(kind, &Unit::Cpu { isa, threads: facts.threads });
            progress.inc(1);
            limit
        };
        let peak = |isa: Isa| Ok((isa, measure(LimitKind::Arithmetic, isa, isa.to_string())?));
        let peaks = isas.into_iter().map(peak).collect::<Result<_>>()?;
        let bandwidth = measure(LimitKind::Bandwidth, facts.isa, "memory".to_owned())?;
        progress.finish_and_clear();
        Ok(Self { peaks, bandwidth })
    }

    fn lines(&self) -> Vec<(String, String)> {
        let peaks = self.peaks.iter().map(|(isa, limit)| (isa.name().to_owned(), limit.to_string()));
        peaks.chain([("memory".to_owned(), self.bandwidth.to_string())]).collect()
    }
}

pub(crate) fn run(args: &InfoArgs) -> Result<ExitCode> {
    machine::on_threads(args.threads, || {
        let facts = *Cpu::new().facts();
        let measured = || (!args.no_measure).then(|| Limits::measure(&facts)).transpose();
        if args.json {
            return report::json(&as_json(&facts, measured()?.as_ref()));
        }
        // What is known at once does not wait for what is measured.
        report::text(text(&known(&facts)))?;
        measured()?.map_or(Ok(()), |limits| report::text(text(&limits.lines())))
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Names and values in two columns.
fn text(lines: &[(String, String)]) -> String {
    lines.iter().map(|(name, text)| format!("{name:<10} {text}\n")).collect()
}

/// What is not measured.
fn known(facts: &CpuFacts) -> Vec<(String, String)> {
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
    lines.extend(backends().iter().map(|(name, available, why)| {
        let state = if *available { "available" } else { "unavailable" };
        ((*name).to_owned(), format!("{state}: {why}"))
    }));
    lines
}

/// Limits are null if they are not measured.
fn as_json(facts: &CpuFacts, limits: Option<&Limits>) -> serde_json::Value {
    let fma = limits.map(|limits| -> serde_json::Map<_, _> {
        limits.peaks.iter().map(|(isa, limit)| (isa.name().to_owned(), json!(limit.rate))).collect()
    });
    let backends: Vec<_> = backends()
        .iter()
        .map(|(name, available, why)| json!({"name": name, "available": available, "reason": why}))
        .collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "arch": std::env::consts::ARCH,
        "isas": Cpu::isas().into_iter().map(Isa::name).collect::<Vec<_>>(),
        "threads": facts.threads,
        "l1d": facts.l1d,
        "l2": facts.l2,
        "l3": facts.l3,
        "fma_flops_per_s": fma,
        "read_bytes_per_s": limits.map(|limits| limits.bandwidth.rate),
        "backends": backends,
    })
}
