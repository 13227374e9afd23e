//! `flashtile check`: the conformance catalogue on this machine.

mod gradients;

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
use flashtile::{Backend, BackendName, Cpu, Dtype};
use flashtile_testkit::{
    Case, CaseResult, CpuRunner, Failure as CaseFailure, Runner, RunnerOptions, catalogue, conformance,
    quantized, seeded_case,
};
use gradients::{GradientResult, GradientRunner};
use serde_json::json;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::process::ExitCode;
use std::sync::Arc;

/// Run the conformance catalogue on every backend and instruction set of this machine
///
/// Every case is compared with the f64 oracle. The table shows the worst errors, relative to the limits of their own
/// cases: limits are wider for large scores and many keys. Exit status 1 if a case fails.
///
/// After the cases of the forward pass, cases of the backward pass run on the same devices, named backward_CASE: the
/// cases without a cache that have at most 40000 scores (batch * query heads * queries * keys), on the simulator 3000.
/// Their table shows the largest error of an element, relative to its own limit.
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
    /// Run only cases whose name contains one of these; backward_ selects the cases of the backward pass
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
        list(&Cases::selected(args)?, args.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let failed = machine::on_threads(args.threads, || check(args))?;
    Ok(if failed { ExitCode::from(WRONG) } else { ExitCode::SUCCESS })
}

/// Runs the cases. Returns true if one failed.
fn check(args: &CheckArgs) -> Result<bool> {
    let (runners, gradient_runners) = runners(args)?;
    let runners: Vec<&dyn Runner> = runners.iter().map(|r| &**r as &dyn Runner).collect();

    let Cases { forward, backward } = Cases::selected(args)?;

    let progress = progress((forward.len() * runners.len() + backward.len() * gradient_runners.len()) as u64);
    let mut report = Reported::new(args.json, runners.iter().map(|runner| runner.name()), &gradient_runners);
    conformance(&forward, &runners, |result| {
        progress.inc(1);
        report.forward(result);
    });
    gradients::run(&backward, &gradient_runners, |result| {
        progress.inc(1);
        report.backward(result);
    });
    progress.finish_and_clear();
    report.print(!forward.is_empty(), !backward.is_empty())
}

/// The report about all cases.
struct Reported {
    forward: Vec<Summary>,
    backward: Vec<Summary>,
    /// True for JSON lines instead of tables.
    is_json: bool,
    lines: Vec<serde_json::Value>,
    failures: Vec<String>,
}

impl Reported {
    fn new(is_json: bool, runners: impl Iterator<Item = String>, gradients: &[GradientRunner]) -> Self {
        let summary = |runner| Summary { runner, ..Summary::default() };
        Self {
            forward: runners.map(summary).collect(),
            backward: gradients.iter().map(|of| of.name().to_owned()).map(summary).collect(),
            is_json,
            lines: Vec::new(),
            failures: Vec::new(),
        }
    }

    fn forward(&mut self, result: &CaseResult<'_>) {
        let errors = result.result.as_ref().map(|outcome| {
            let nrmse = of_limit(&outcome.out);
            Errors { of_limit: nrmse, closest: outcome.out.worst.max(outcome.lse.worst).max(nrmse) }
        });
        if let Some(summary) = self.forward.iter_mut().find(|of| of.runner == result.runner) {
            summary.add(&result.case.name, result.case.desc.dtype, errors);
        }
        if self.is_json {
            self.lines.push(as_json(result));
        } else if result.failed() {
            self.failures.push(format!("FAILED {result}"));
        }
    }

    fn backward(&mut self, result: &GradientResult<'_>) {
        let (name, dtype) = (gradients::name(result.case), result.case.desc.dtype);
        let errors = result.result.as_ref().map(|found| found.worst());
        let errors = errors.map(|worst| Errors { of_limit: worst, closest: worst });
        if let Some(summary) = self.backward.iter_mut().find(|of| of.runner == result.runner) {
            summary.add(&name, dtype, errors);
        }
        if self.is_json {
            self.lines.push(gradients_json(result));
        } else if let Err(why) = &result.result
            && !matches!(why, CaseFailure::Skipped(_))
        {
            self.failures.push(format!("FAILED {name} on {}: {why}", result.runner));
        }
    }

    /// Prints everything about the passes that have cases. Returns true if a case failed.
    fn print(&self, has_forward: bool, has_backward: bool) -> Result<bool> {
        let Self { forward, backward, is_json, lines, failures } = self;
        let summaries = || forward.iter().chain(backward);
        if *is_json {
            lines.iter().try_for_each(report::json)?;
        } else {
            if has_forward || !has_backward {
                report::text(table(forward, "nrmse/limit"))?;
            }
            if has_backward {
                let between = if has_forward { "\n" } else { "" };
                report::text(format_args!("{between}backward pass:\n{}", table(backward, "error/limit")))?;
            }
            summaries().flat_map(Summary::skips).try_for_each(report::line)?;
            failures.iter().try_for_each(report::line)?;
        }
        Ok(summaries().any(|of| of.failed > 0))
    }
}

/// Prints the names, dtypes and dimensions of cases.
fn list(cases: &Cases, json: bool) -> Result<()> {
    if json {
        let line = |(name, case): (String, &Case)| {
            let dtype = case.desc.dtype.name();
            report::json(&json!({ "case": name, "dtype": dtype, "dims": dims_json(&case.desc.dims) }))
        };
        return cases.named().try_for_each(line);
    }
    let mut table = Table::new(["case", "dtype", "batch", "heads", "queries", "keys", "dim"]);
    for (name, case) in cases.named() {
        let d = &case.desc.dims;
        let dim = if d.value_dim == d.head_dim {
            d.head_dim.to_string()
        } else {
            format!("{}x{}", d.head_dim, d.value_dim)
        };
        table.push(vec![
            name,
            case.desc.dtype.name().to_owned(),
            d.batch.to_string(),
            format!("{}/{}", d.q_heads, d.kv_heads),
            d.q_len.to_string(),
            d.kv_len.to_string(),
            dim,
        ]);
    }
    report::text(table)?;
    report::line(report::counted(cases.named().count(), "case"))
}

/// True if the options select the CPU.
fn has_cpu(args: &CheckArgs) -> bool {
    args.backend.is_auto() || args.backend.backend() == "cpu"
}

/// The CPU with each selected instruction set.
fn cpus(args: &CheckArgs) -> Result<Vec<Cpu>> {
    let isas = match args.isa {
        Some(_) if !has_cpu(args) => {
            return Err(Failure::at("--isa", "applies to the cpu backend only"));
        }
        None if !has_cpu(args) => Vec::new(),
        None => Cpu::isas(),
        Some(isa) => vec![isa],
    };
    let cpu = |isa| machine::cpu(CpuArgs { isa: Some(isa), threads: args.threads });
    isas.into_iter().map(cpu).collect()
}

/// Runners of the cases of the forward pass.
type Runners = Vec<Box<dyn Runner>>;

/// The backends selected by the options, for both passes.
fn runners(args: &CheckArgs) -> Result<(Runners, Vec<GradientRunner>)> {
    let name = args.backend.backend();
    if args.kernels.choice != Kernels::Auto && name != "cuda" {
        return Err(Failure::at("--kernels", "needs --backend cuda"));
    }
    let cpus = cpus(args)?;
    let mut gradients: Vec<GradientRunner> = cpus.iter().copied().map(GradientRunner::cpu).collect();
    let cpus = cpus.into_iter().map(CpuRunner::new);
    let mut runners: Runners = cpus.map(|runner| Box::new(runner) as Box<dyn Runner>).collect();
    let others = match args.backend.is_auto() {
        // `flashtile info` says why a device is missing.
        true if args.isa.is_none() => every_device(),
        true => Vec::new(),
        false => vec![(args.backend, args.backend.open()?)],
    };
    let plan = machine::options(None, args.kernels.choice);
    let options = RunnerOptions { plan, exact: args.exact_memory, max_scores: MAX_SCORES };
    for (other, backend) in others.into_iter().filter(|(other, _)| other.backend() != "cpu") {
        match flashtile_testkit::runners(other.backend(), other.device(), &options) {
            Some(found) => runners.extend(found.map_err(Failure::new)?),
            None => {
                let what = format_args!("the {other} is what others are compared with");
                return Err(Failure::at("--backend", what));
            }
        }
        gradients.push(GradientRunner::device(backend, plan));
    }
    Ok((runners, gradients))
}

/// Every backend of this machine but the simulator, with its first device.
fn every_device() -> Vec<(BackendName, Arc<dyn Backend>)> {
    let names = BackendName::list().filter(|(name, _)| !["reference", "simulator"].contains(name));
    let names = names.filter_map(|(name, _)| name.parse::<BackendName>().ok());
    names.filter_map(|name| Some((name, name.open().ok()?))).collect()
}

/// The cases selected by the options.
struct Cases {
    forward: Vec<Case>,
    /// Cases whose gradients are checked, under their names in the forward pass.
    backward: Vec<Case>,
}

impl Cases {
    fn selected(args: &CheckArgs) -> Result<Self> {
        let all: Vec<Case> = catalogue().into_iter().chain(quantized()).collect();
        let has_gradients = |case: &&Case| gradients::has_gradients(case);
        let backward = all.iter().filter(has_gradients).cloned().collect();
        let mut cases = Self { forward: all, backward };
        cases.filter(&args.filter)?;
        // Seeds give the names and random choices of the property tests, so that their failures can be replayed here.
        let seeds: Vec<Case> = args.seeds.iter().cloned().flatten().map(seeded_case).collect();
        cases.backward.extend(seeds.iter().filter(has_gradients).cloned());
        cases.forward.extend(seeds);
        for of in [&mut cases.forward, &mut cases.backward] {
            let mut chosen = std::mem::take(of);
            if let Some(shard) = args.shard {
                chosen = chosen.into_iter().skip(shard.index).step_by(shard.of).collect();
            }
            if args.exact_memory {
                chosen = chosen.into_iter().map(Case::exact).collect();
            }
            *of = chosen;
        }
        Ok(cases)
    }

    /// Keeps the cases whose name contains one of the texts.
    fn filter(&mut self, texts: &[String]) -> Result<()> {
        let names: Vec<String> = self.named().map(|(name, _)| name).collect();
        if let Some(text) = texts.iter().find(|&text| !names.iter().any(|name| name.contains(text))) {
            let words = names.iter().flat_map(|name| name.split('_').chain([name.as_str()]));
            let expected = nearest::expected_some(text, words.collect::<BTreeSet<_>>());
            let what = format_args!("no case has a name with {text}, {expected} (--list shows all)");
            return Err(Failure::at("--filter", what));
        }
        let keeps = |name: &str| texts.is_empty() || texts.iter().any(|text| name.contains(text));
        self.forward.retain(|case| keeps(&case.name));
        self.backward.retain(|case| keeps(&gradients::name(case)));
        Ok(())
    }

    /// All cases with the names that reports have.
    fn named(&self) -> impl Iterator<Item = (String, &Case)> {
        let forward = self.forward.iter().map(|case| (case.name.clone(), case));
        forward.chain(self.backward.iter().map(|case| (gradients::name(case), case)))
    }
}

/// Errors of a case that passed.
struct Errors {
    /// Relative to the limit.
    of_limit: f64,
    /// The largest ratio of any error to its limit.
    closest: f64,
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
    of_limit: [f64; Dtype::ALL.len()],
    /// The passed case that came closest to its limit.
    closest: Option<(f64, String)>,
}

impl Summary {
    fn add(&mut self, case: &str, dtype: Dtype, result: std::result::Result<Errors, &CaseFailure>) {
        match result {
            Ok(errors) => {
                self.passed += 1;
                for (of, worst) in Dtype::ALL.iter().zip(&mut self.of_limit) {
                    if *of == dtype {
                        *worst = worst.max(errors.of_limit);
                    }
                }
                if self.closest.as_ref().is_none_or(|(worst, _)| errors.closest > *worst) {
                    self.closest = Some((errors.closest, case.to_owned()));
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

/// A table of runners. `errors` says what the errors of a dtype are.
fn table(summaries: &[Summary], errors: &str) -> Table {
    let mut head: Vec<String> = ["runner", "passed", "failed", "skipped"].map(str::to_owned).to_vec();
    head.extend(Dtype::ALL.map(|dtype| format!("{dtype} {errors}")));
    head.push("closest to a limit".to_owned());
    head.push("case".to_owned());
    let mut table = Table::new(head);
    for summary in summaries {
        let mut row = vec![summary.runner.clone()];
        row.extend([summary.passed, summary.failed, summary.skipped].map(|n| n.to_string()));
        row.extend(summary.of_limit.map(report::percent));
        let (worst, case) = summary.closest.clone().unwrap_or_default();
        row.extend([report::percent(worst), case]);
        table.push(row);
    }
    table
}

/// `passed`, `skipped` or `failed`.
const fn outcome_name(failure: Option<&CaseFailure>) -> &'static str {
    match failure {
        None => "passed",
        Some(CaseFailure::Skipped(_)) => "skipped",
        Some(_) => "failed",
    }
}

fn as_json(result: &CaseResult<'_>) -> serde_json::Value {
    let outcome = result.result.as_ref().ok();
    let failure = result.result.as_ref().err();
    json!({
        "case": result.case.name,
        "runner": result.runner,
        "dtype": result.case.desc.dtype.name(),
        "result": outcome_name(failure),
        "plan": outcome.map(|o| &o.plan),
        "nrmse": outcome.map(|o| o.out.nrmse),
        "nrmse_limit": outcome.map(|o| o.out.limit),
        "max_abs": outcome.map(|o| o.out.max_abs),
        "lse_max_abs": outcome.map(|o| o.lse.max_abs),
        "reason": failure.map(ToString::to_string),
    })
}

fn gradients_json(result: &GradientResult<'_>) -> serde_json::Value {
    let failure = result.result.as_ref().err();
    let (plan, errors) = result.result.as_ref().ok().map(|found| found.json()).unzip();
    json!({
        "case": gradients::name(result.case),
        "runner": result.runner,
        "dtype": result.case.desc.dtype.name(),
        "result": outcome_name(failure),
        "plan": plan,
        "gradients": errors,
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
