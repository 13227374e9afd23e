//! `flashtile check`: the conformance catalogue on this machine.

use crate::failure::{Failure, Result, WRONG};
use crate::machine;
use crate::nearest;
use crate::options::{CpuArgs, Kernels, KernelsArg, backend};
use crate::parse::{isa, threads};
use crate::progress::progress;
use crate::report::{self, Table};
use crate::run::dims_json;
use clap::Args;
use flashtile::plan::Isa;
use flashtile::quality::Report;
use flashtile::{BackendName, Cpu, Dtype};
use flashtile_testkit::{
    Case, CaseResult, CpuRunner, Failure as CaseFailure, Runner, RunnerOptions, catalogue, conformance,
    quantized, seeded_case,
};
use serde_json::json;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::process::ExitCode;

/// Run the conformance catalogue on every backend and instruction set of this machine
///
/// Every case is compared with the f64 oracle. The table shows the worst errors, relative to the limits of their own
/// cases: limits are wider for large scores and many keys. Exit status 1 if a case fails.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashtile check --isa avx2\n  flashtile check --list --filter gqa\n  flashtile check --backend cuda --filter decode\n  \
    flashtile check --backend cuda --kernels portable"
)]
pub(crate) struct CheckArgs {
    /// Run only this backend
    #[arg(long, value_parser = backend("Every backend of this machine but the simulator; of CUDA the first device", &["reference"]), default_value = "auto")]
    pub(crate) backend: BackendName,
    #[command(flatten)]
    pub(crate) kernels: KernelsArg,
    /// Run only this instruction set; default all of this machine
    #[arg(long, value_name = "ISA", value_parser = isa())]
    pub(crate) isa: Option<Isa>,
    /// Threads of the cpu backend, at most as many as the machine has; default all
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Run only cases whose name contains one of these
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) filter: Vec<String>,
    /// List the selected cases instead of running them
    #[arg(long)]
    pub(crate) list: bool,
    /// Print JSON lines, one for each case and instruction set; with --list one for each case
    #[arg(long)]
    pub(crate) json: bool,
    /// Also run the random cases of these seeds
    #[arg(long, value_name = "FIRST..END", value_parser = seeds, help_heading = DEVELOPERS)]
    pub(crate) seeds: Option<Range<u64>>,
    /// Run only one of N equal subsets of the cases, to divide them among processes: 0/N to N-1/N
    #[arg(long, value_name = "I/N", value_parser = shard, help_heading = DEVELOPERS)]
    pub(crate) shard: Option<Shard>,
    /// End each tensor's allocation with the tensor, so that a memory checker sees reads past it; by default tensors
    /// lie between guard bands
    #[arg(long, help_heading = DEVELOPERS)]
    pub(crate) exact_memory: bool,
}

/// Heading of the options for tests of flashtile itself.
const DEVELOPERS: &str = "Options for developers of flashtile";

/// Largest number of random cases: they are all described before the first one runs.
const MAX_SEEDS: u64 = 100_000;

fn seeds(text: &str) -> std::result::Result<Range<u64>, String> {
    let range = text.split_once("..").and_then(|(first, end)| Some(first.parse().ok()?..end.parse().ok()?));
    range
        .filter(|r: &Range<u64>| r.start < r.end && r.end - r.start <= MAX_SEEDS)
        .ok_or_else(|| format!("expected FIRST..END, two whole numbers, at most {MAX_SEEDS} seeds"))
}

/// Every `of`-th case, starting with case `index`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shard {
    pub(crate) index: usize,
    pub(crate) of: usize,
}

fn shard(text: &str) -> std::result::Result<Shard, String> {
    let numbers = text.split_once('/').and_then(|(index, of)| Some((index.parse().ok()?, of.parse().ok()?)));
    let shard = numbers.map(|(index, of)| Shard { index, of }).filter(|shard| shard.index < shard.of);
    shard.ok_or_else(|| "expected I/N, two whole numbers, I less than N".to_owned())
}

/// Largest number of scores of a case on the simulator.
const MAX_SCORES: u64 = 12_000;

pub(crate) fn run(args: &CheckArgs) -> Result<ExitCode> {
    if args.list {
        list(&cases(args)?, args.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let failed = machine::on_threads(args.threads, || check(args))?;
    Ok(if failed { ExitCode::from(WRONG) } else { ExitCode::SUCCESS })
}

/// Runs the cases. Returns true if one failed.
fn check(args: &CheckArgs) -> Result<bool> {
    let runners = runners(args)?;
    let runners: Vec<&dyn Runner> = runners.iter().map(|r| &**r as &dyn Runner).collect();

    let cases = cases(args)?;

    let progress = progress((cases.len() * runners.len()) as u64);
    let mut summaries: Vec<Summary> =
        runners.iter().map(|r| Summary { runner: r.name(), ..Summary::default() }).collect();
    let mut lines = Vec::new();
    let mut failures = Vec::new();
    conformance(&cases, &runners, |result| {
        progress.inc(1);
        if let Some(summary) = summaries.iter_mut().find(|t| t.runner == result.runner) {
            summary.add(result);
        }
        if args.json {
            lines.push(as_json(result));
        } else if result.failed() {
            failures.push(format!("FAILED {result}"));
        }
    });
    progress.finish_and_clear();
    if args.json {
        lines.iter().try_for_each(report::json)?;
    } else {
        report::text(table(&summaries))?;
        summaries.iter().flat_map(Summary::skips).try_for_each(report::line)?;
        failures.iter().try_for_each(report::line)?;
    }
    Ok(summaries.iter().any(|t| t.failed > 0))
}

/// Prints the names, dtypes and dimensions of cases.
fn list(cases: &[Case], json: bool) -> Result<()> {
    if json {
        let line = |case: &Case| {
            let dtype = case.desc.dtype.name();
            report::json(&json!({ "case": case.name, "dtype": dtype, "dims": dims_json(&case.desc.dims) }))
        };
        return cases.iter().try_for_each(line);
    }
    let mut table = Table::new(["case", "dtype", "batch", "heads", "queries", "keys", "dim"]);
    for case in cases {
        let d = &case.desc.dims;
        let dim = if d.value_dim == d.head_dim {
            d.head_dim.to_string()
        } else {
            format!("{}x{}", d.head_dim, d.value_dim)
        };
        table.push(vec![
            case.name.clone(),
            case.desc.dtype.name().to_owned(),
            d.batch.to_string(),
            format!("{}/{}", d.q_heads, d.kv_heads),
            d.q_len.to_string(),
            d.kv_len.to_string(),
            dim,
        ]);
    }
    report::text(table)?;
    report::line(report::counted(cases.len(), "case"))
}

/// The backends selected by the options.
fn runners(args: &CheckArgs) -> Result<Vec<Box<dyn Runner>>> {
    let name = args.backend.backend();
    if args.kernels.choice != Kernels::Auto && name != "cuda" {
        return Err(Failure::at("--kernels", "needs --backend cuda"));
    }
    let mut runners: Vec<Box<dyn Runner>> = Vec::new();
    if args.backend.is_auto() || name == "cpu" {
        let isas = match args.isa {
            None => Cpu::isas(),
            Some(isa) => vec![isa],
        };
        for isa in isas {
            let cpu = machine::cpu(CpuArgs { isa: Some(isa), threads: args.threads })?;
            runners.push(Box::new(CpuRunner::new(cpu)));
        }
    } else if args.isa.is_some() {
        return Err(Failure::at("--isa", "applies to the cpu backend only"));
    }
    let others = match args.backend.is_auto() {
        // `flashtile info` says why a device is missing.
        true if args.isa.is_none() => every_device(),
        true => Vec::new(),
        false => {
            args.backend.open()?;
            vec![args.backend]
        }
    };
    let plan = machine::options(None, args.kernels.choice);
    let options = RunnerOptions { plan, exact: args.exact_memory, max_scores: MAX_SCORES };
    for other in others.into_iter().filter(|other| other.backend() != "cpu") {
        match flashtile_testkit::runners(other.backend(), other.device(), &options) {
            Some(found) => runners.extend(found.map_err(Failure::new)?),
            None => {
                let what = format_args!("the {other} is what others are compared with");
                return Err(Failure::at("--backend", what));
            }
        }
    }
    Ok(runners)
}

/// Every backend of this machine but the simulator, with its first device.
fn every_device() -> Vec<BackendName> {
    let names = BackendName::list().filter(|(name, _)| !["reference", "simulator"].contains(name));
    let names = names.filter_map(|(name, _)| name.parse::<BackendName>().ok());
    names.filter(|name| name.open().is_ok()).collect()
}

/// The cases selected by the options.
fn cases(args: &CheckArgs) -> Result<Vec<Case>> {
    let mut cases: Vec<Case> = catalogue().into_iter().chain(quantized()).collect();
    if let Some(text) = args.filter.iter().find(|&text| !cases.iter().any(|c| c.name.contains(text))) {
        let words = cases.iter().flat_map(|case| case.name.split('_').chain([case.name.as_str()]));
        let expected = nearest::expected_some(text, words.collect::<BTreeSet<_>>());
        let what = format_args!("no case has a name with {text}, {expected} (--list shows all)");
        return Err(Failure::at("--filter", what));
    }
    if !args.filter.is_empty() {
        cases.retain(|case| args.filter.iter().any(|text| case.name.contains(text)));
    }
    // Seeds give the names and random choices of the property tests, so that their failures can be replayed here.
    cases.extend(args.seeds.iter().cloned().flatten().map(seeded_case));
    if let Some(shard) = args.shard {
        cases = cases.into_iter().skip(shard.index).step_by(shard.of).collect();
    }
    if args.exact_memory {
        cases = cases.into_iter().map(Case::exact).collect();
    }
    Ok(cases)
}

/// Outcomes of the cases on one runner.
#[derive(Default)]
struct Summary {
    runner: String,
    passed: usize,
    failed: usize,
    skipped: usize,
    /// Number of cases that each reason skipped, with the details of the first.
    reasons: BTreeMap<String, (usize, String)>,
    /// Largest error of a passed case for each dtype, relative to the limit of that case.
    nrmse: [f64; Dtype::ALL.len()],
    /// The passed case that came closest to its limit.
    closest: Option<(f64, String)>,
}

impl Summary {
    fn add(&mut self, result: &CaseResult<'_>) {
        match &result.result {
            Ok(outcome) => {
                self.passed += 1;
                let out = outcome.out;
                for (dtype, nrmse) in Dtype::ALL.iter().zip(&mut self.nrmse) {
                    if *dtype == result.case.desc.dtype {
                        *nrmse = nrmse.max(of_limit(&out));
                    }
                }
                let ratio = out.worst.max(outcome.lse.worst).max(of_limit(&out));
                if self.closest.as_ref().is_none_or(|(worst, _)| ratio > *worst) {
                    self.closest = Some((ratio, result.case.name.clone()));
                }
            }
            Err(CaseFailure::Skipped(why)) => {
                self.skipped += 1;
                let (reason, of_case) = why.split_once(": ").unwrap_or((why, ""));
                let entry = self.reasons.entry(reason.to_owned());
                entry.or_insert_with(|| (0, of_case.to_owned())).0 += 1;
            }
            Err(_) => self.failed += 1,
        }
    }

    /// Reasons why cases were skipped, one line each, the most frequent first.
    fn skips(&self) -> Vec<String> {
        let mut reasons: Vec<_> = self.reasons.iter().collect();
        reasons.sort_by_key(|(_, (count, _))| Reverse(*count));
        let line = |(reason, (count, first)): (&String, &(usize, String))| {
            let first = if first.is_empty() { String::new() } else { format!(", such as {first}") };
            format!("{}: {count} skipped, {reason}{first}", self.runner)
        };
        reasons.into_iter().map(line).collect()
    }
}

/// Error of a whole tensor relative to its limit. Errors alone are not comparable, because limits are wider for large
/// scores and many keys.
fn of_limit(out: &Report) -> f64 {
    if out.nrmse == 0.0 { 0.0 } else { out.nrmse / out.limit }
}

fn table(summaries: &[Summary]) -> Table {
    let mut head: Vec<String> = ["runner", "passed", "failed", "skipped"].map(str::to_owned).to_vec();
    head.extend(Dtype::ALL.map(|dtype| format!("{dtype} nrmse/limit")));
    head.push("closest to a limit".to_owned());
    head.push("case".to_owned());
    let mut table = Table::new(head);
    for summary in summaries {
        let mut row = vec![summary.runner.clone()];
        row.extend([summary.passed, summary.failed, summary.skipped].map(|n| n.to_string()));
        row.extend(summary.nrmse.map(report::percent));
        let (worst, case) = summary.closest.clone().unwrap_or_default();
        row.extend([report::percent(worst), case]);
        table.push(row);
    }
    table
}

fn as_json(result: &CaseResult<'_>) -> serde_json::Value {
    let outcome = result.result.as_ref().ok();
    let failure = result.result.as_ref().err();
    json!({
        "case": result.case.name,
        "runner": result.runner,
        "dtype": result.case.desc.dtype.name(),
        "result": match failure {
            None => "passed",
            Some(CaseFailure::Skipped(_)) => "skipped",
            Some(_) => "failed",
        },
        "plan": outcome.map(|o| &o.plan),
        "nrmse": outcome.map(|o| o.out.nrmse),
        "nrmse_limit": outcome.map(|o| o.out.limit),
        "max_abs": outcome.map(|o| o.out.max_abs),
        "lse_max_abs": outcome.map(|o| o.lse.max_abs),
        "reason": failure.map(ToString::to_string),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_seeds() {
        assert_eq!(seeds("3..8").unwrap(), 3..8);
        assert!(
            ["", "3", "3..", "..3", "8..3", "3..3", "-1..3", "0..100001"].iter().all(|t| seeds(t).is_err())
        );
    }

    #[test]
    fn shards() {
        assert_eq!(shard("0/1").unwrap(), Shard { index: 0, of: 1 });
        assert_eq!(shard("2/3").unwrap(), Shard { index: 2, of: 3 });
        assert!(["", "1", "1/", "/2", "1/1", "3/2", "0/0", "-1/2"].iter().all(|t| shard(t).is_err()));
    }
}
