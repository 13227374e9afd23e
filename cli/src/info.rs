//! `flashtile info`: this machine and what it supports.

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

/// Show version, instruction sets, caches, measured limits and backends
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  flashtile info --json")]
pub(crate) struct InfoArgs {
    /// Threads whose limits are measured, at most as many as the machine has; default all
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
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

pub(crate) fn run(args: &InfoArgs) -> Result<ExitCode> {
    machine::on_threads(args.threads, || {
        let facts = *Cpu::new().facts();
        let measure = |kind, isa| Limit::measure(kind, &Unit::Cpu { isa, threads: facts.threads });
        let peak = |isa| Ok((isa, measure(LimitKind::Arithmetic, isa)?));
        let peaks: Vec<(Isa, Limit)> = Cpu::isas().into_iter().map(peak).collect::<Result<_>>()?;
        let bandwidth = measure(LimitKind::Bandwidth, facts.isa)?;
        if args.json {
            report::line(as_json(&facts, &peaks, bandwidth))
        } else {
            report::text(as_text(&facts, &peaks, bandwidth))
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

fn as_text(facts: &CpuFacts, peaks: &[(Isa, Limit)], bandwidth: Limit) -> String {
    let isas: Vec<&str> = peaks.iter().map(|(isa, _)| isa.name()).collect();
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
    lines.extend(peaks.iter().map(|(isa, limit)| (isa.name().to_owned(), limit.to_string())));
    lines.push(("memory".to_owned(), bandwidth.to_string()));
    lines.extend(backends().iter().map(|(name, available, why)| {
        let state = if *available { "available" } else { "unavailable" };
        ((*name).to_owned(), format!("{state}: {why}"))
    }));
    lines.iter().map(|(name, text)| format!("{name:<10} {text}\n")).collect()
}

fn as_json(facts: &CpuFacts, peaks: &[(Isa, Limit)], bandwidth: Limit) -> serde_json::Value {
    let fma: serde_json::Map<_, _> =
        peaks.iter().map(|(isa, l)| (isa.name().to_owned(), json!(l.rate))).collect();
    let backends: Vec<_> = backends()
        .iter()
        .map(|(name, available, why)| json!({"name": name, "available": available, "reason": why}))
        .collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "arch": std::env::consts::ARCH,
        "threads": facts.threads,
        "l1d": facts.l1d,
        "l2": facts.l2,
        "l3": facts.l3,
        "fma_flops_per_s": fma,
        "read_bytes_per_s": bandwidth.rate,
        "backends": backends,
    })
}
