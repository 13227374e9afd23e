//! `flashtile bench`: times relative to the limits of this machine, measured in the same run.

mod backward;
mod group;
mod measure;
mod options;
mod peers;
mod plot;
mod rows;
mod tile;

use crate::failure::{Failure, Result};
use crate::machine::{self, Bound, rate_name};
use crate::options::Kernels;
use crate::output::Destination;
use crate::progress::progress;
use crate::report::{self, Table};
use flashtile::plan::CpuFacts;
use flashtile::{Backend, Rate, Unit};
use group::Group;
use indicatif::ProgressBar;
use measure::{Measured, Planned, Planner, measure};
pub(crate) use options::BenchArgs;
use options::Group as Asked;
use peers::Peers;
use rows::Kind;
use serde_json::{Value, json};
use std::process::ExitCode;
use std::sync::Arc;

pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode> {
    rows::check_options(args)?;
    machine::on_threads(args.cpu.threads, || bench(args))
}

fn bench(args: &BenchArgs) -> Result<ExitCode> {
    let backend = backend(args)?;
    let peers = args.vs.as_deref().map(Peers::read).transpose()?.unwrap_or_default();
    let file = args.json_lines.as_deref().map(Destination::new).transpose()?;
    let picture = args.svg.as_deref().map(Destination::svg).transpose()?;
    for (destination, other) in [(&file, &args.vs), (&picture, &args.vs), (&picture, &args.json_lines)] {
        if let (Some(destination), Some(other)) = (destination, other) {
            destination.differs_from(other)?;
        }
    }
    let kinds = kinds(args);
    let planner = Planner { backend, options: machine::options(None, args.kernels.choice), tile: args.tile };
    let mut planned: Vec<(Kind, Unit, Vec<Planned>)> = Vec::new();
    let mut without = None;
    for &kind in &kinds {
        for row in rows::rows(args, kind)? {
            let row = match planner.plan(row) {
                // The other groups do not need a backward pass.
                Err(why) if kind == Kind::Backward && args.group == Asked::All => {
                    without = Some(why);
                    continue;
                }
                row => row?,
            };
            // Kernels on different units have different limits. Over codes a dtype may have another unit: such rows stay beside the others,
            // with which they are compared.
            let dtype = |of: &Planned| of.row.problem.dtype();
            let joins = |(k, u, rows): &&mut (Kind, Unit, Vec<Planned>)| {
                *k == kind && (*u == row.unit || rows.iter().any(|other| dtype(other) == dtype(&row)))
            };
            match planned.iter_mut().find(joins) {
                Some((_, _, rows)) => rows.push(row),
                None => planned.push((kind, row.unit.clone(), vec![row])),
            }
        }
    }
    if let Some(why) = without {
        report::note(format_args!("note: not all backward rows: {why}"));
    }
    peers.check_match(planned.iter().flat_map(|(_, _, rows)| rows).map(|planned| &planned.row))?;
    let bench = Bench {
        planner,
        min_time: args.min_time.unwrap_or(if args.quick { 0.05 } else { 0.3 }),
        progress: progress(planned.iter().map(|(_, _, rows)| rows.len()).sum::<usize>() as u64),
    };
    let mut lines = Vec::new();
    let mut groups = Vec::new();
    if !args.json {
        bench.print(|| report::line(described(&*bench.planner.backend)))?;
    }
    for (kind, unit, rows) in planned {
        let group = bench.group(kind, unit, &rows)?;
        lines.extend(group.rows.iter().map(|row| row_json(row, &group, &peers)));
        if !args.json {
            bench.print(|| report::text(format_args!("\n{}", table(&group, &peers))))?;
        }
        groups.push(group);
    }
    bench.progress.finish_and_clear();

    if args.json {
        lines.iter().try_for_each(report::json)?;
    }
    if let Some(file) = file {
        file.text(&report::json_lines(&lines))?;
    }
    if let Some(picture) = picture {
        plot::plot(&groups, &picture)?;
    }
    let unmatched = peers.unmatched(groups.iter().flat_map(|g| &g.rows).map(|m| &m.row));
    if unmatched > 0 {
        let rows = report::counted(unmatched, "peer row");
        report::note(format_args!("note: {rows} without a row of this run to compare with"));
    }
    Ok(ExitCode::SUCCESS)
}

/// The kinds of rows of a group.
fn kinds(args: &BenchArgs) -> Vec<Kind> {
    match args.group {
        Asked::Prefill => vec![Kind::Prefill],
        Asked::Decode => vec![Kind::Decode],
        Asked::Backward => vec![Kind::Backward],
        Asked::All => vec![Kind::Prefill, Kind::Decode, Kind::Backward],
    }
}

/// Opens the backend that --backend names, and refuses options that do not apply to it.
fn backend(args: &BenchArgs) -> Result<Arc<dyn Backend>> {
    let name = args.backend.backend();
    let of_cuda = [("--tile", args.tile.is_some()), ("--kernels", args.kernels.choice != Kernels::Auto)];
    if let Some((option, _)) = of_cuda.into_iter().find(|(_, given)| *given && name != "cuda") {
        return Err(Failure::at(option, "applies to the cuda backend only"));
    }
    if args.backend.is_auto() || name == "cpu" {
        return Ok(Arc::new(machine::cpu(args.cpu)?));
    }
    if args.cpu.isa.is_some() {
        return Err(Failure::at("--isa", "applies to the cpu backend only"));
    }
    Ok(args.backend.open()?)
}

/// Describes the device in the first line of the output.
fn described(backend: &dyn Backend) -> String {
    match backend.facts().of::<CpuFacts>() {
        Some(facts) => format!("{}, {}", facts.isa, report::counted(facts.threads, "thread")),
        None => backend.device(),
    }
}

/// The planner, the time and the progress bar of all measurements.
struct Bench {
    planner: Planner,
    min_time: f64,
    progress: ProgressBar,
}

impl Bench {
    /// Prints beside a progress bar.
    fn print(&self, print: impl FnOnce() -> Result<()>) -> Result<()> {
        self.progress.suspend(print)
    }

    fn measure(&self, rows: &[Planned]) -> Result<Vec<Measured>> {
        let row = &rows[0].row;
        let (kind, dtype, dims) = (row.kind.name(), row.problem.dtype(), row.problem.dims());
        self.progress.set_message(format!("{kind} {dtype} d{} {} keys", dims.head_dim, row.length()));
        let measured = match rows {
            [row @ Planned { backward: Some(plan), .. }] => {
                backward::measure(&*self.planner.backend, row, plan, self.min_time).map(|row| vec![row])
            }
            _ => measure(&self.planner, rows, self.min_time),
        };
        self.progress.inc(rows.len() as u64);
        measured
    }

    fn group(&self, kind: Kind, unit: Unit, rows: &[Planned]) -> Result<Group> {
        let rate = match kind {
            Kind::Prefill | Kind::Backward => Rate::Arithmetic,
            Kind::Decode => Rate::Bandwidth,
        };
        let bound = || Bound::measure(&*self.planner.backend, rate, &unit);
        let before = bound()?;
        // Rows that differ only in the cache's layout are compared with each other.
        let rows = rows.chunk_by(|a, b| a.row.differs_in_cache(&b.row)).map(|rows| self.measure(rows));
        let rows = rows.collect::<Result<Vec<_>>>()?.concat();
        let bound = before.max(bound()?);
        Ok(Group { kind, unit, bound, facts: self.planner.backend.facts(), rows })
    }
}

fn table(group: &Group, peers: &Peers) -> String {
    let rate_head = match group.bound.rate {
        Rate::Arithmetic => "GFLOP/s",
        Rate::Bandwidth => "GB/s",
    };
    let mut head: Vec<String> =
        ["dtype", "d", "heads", "batch", "keys", "cache", "sees", "time", "spread", rate_head, "of limit"]
            .map(str::to_owned)
            .to_vec();
    let has_shared = group.rows.iter().any(|measured| measured.apart.is_some());
    if has_shared {
        head.extend(["shared", "read by each", "ratio"].map(str::to_owned));
    }
    let names = peers.names();
    head.extend(names.iter().flat_map(|name| [(*name).to_owned(), "ratio".to_owned()]));
    let mut table = Table::new(head);
    let mut notes = Vec::new();
    for measured in &group.rows {
        let (row, dims) = (&measured.row, measured.row.problem.dims());
        let fraction = group.bound.fraction(&measured.work, measured.seconds());
        let mark = group.excess(measured).map_or_else(String::new, |why| mark(&mut notes, why.to_string()));
        let mut cells = vec![
            row.problem.dtype().to_string(),
            match dims.value_dim {
                value_dim if value_dim == dims.head_dim => value_dim.to_string(),
                value_dim => format!("{}x{value_dim}", dims.head_dim),
            },
            format!("{}/{}", dims.q_heads, dims.kv_heads),
            row.batch().to_string(),
            row.length().to_string(),
            row.layout(),
            row.problem.desc().visibility.to_string(),
            report::seconds(measured.seconds()),
            report::percent(measured.spread()),
            format!("{:.1}", fraction * group.bound.limit.per_second / 1e9),
            format!("{}{mark}", report::percent(fraction)),
        ];
        if has_shared {
            cells.push(row.shared().to_string());
            cells.push(measured.apart.map_or_else(|| "-".to_owned(), report::seconds));
            let ratio = measured.apart.map(|apart| format!("{:.2}x", apart / measured.seconds()));
            cells.push(ratio.unwrap_or_else(|| "-".to_owned()));
        }
        for name in &names {
            let seconds = peers.seconds(name, row);
            cells.push(seconds.map_or_else(|| "-".to_owned(), report::seconds));
            cells.push(seconds.map_or_else(|| "-".to_owned(), |s| format!("{:.2}x", s / measured.seconds())));
        }
        table.push(cells);
    }
    let ratio = if names.is_empty() { "" } else { "; a ratio above 1 is in favour of flashtile" };
    let notes = notes.iter().enumerate().map(|(at, why)| format!("[{}] above the limit: {why}\n", at + 1));
    let notes: String = notes.collect();
    format!("{}, {}: limit is the {}{ratio}\n{table}{notes}", group.kind.name(), group.unit.name, group.bound)
}

/// The mark of a note below a table, which is added unless it is there already.
fn mark(notes: &mut Vec<String>, why: String) -> String {
    let at = notes.iter().position(|note| *note == why).unwrap_or_else(|| {
        notes.push(why);
        notes.len() - 1
    });
    format!(" [{}]", at + 1)
}

/// A row as JSON, with the names that peer rows use.
fn row_json(measured: &Measured, group: &Group, peers: &Peers) -> Value {
    let (bound, row, seconds) = (group.bound, &measured.row, measured.seconds());
    let compared = |name: &str| {
        let theirs = peers.seconds(name, row)?;
        Some((name.to_owned(), json!({"seconds": theirs, "ratio": theirs / seconds})))
    };
    let peers: serde_json::Map<String, Value> = peers.names().into_iter().filter_map(compared).collect();
    let mut json = json!({
        "peer": "flashtile",
        "kernel": measured.kernel,
        "unit": measured.unit.name,
        "threads": measured.unit.threads,
        "host_seconds": measured.host,
        "prepare_seconds": measured.prepare,
        "seconds_apart": measured.apart,
        "seconds": seconds,
        "seconds_quartiles": measured.quartiles,
        "repetitions": measured.repetitions,
        "copies": measured.copies,
        "gflops": measured.work.flops / seconds / 1e9,
        "gbytes_per_s": measured.work.bytes / seconds / 1e9,
        "limit": rate_name(bound.rate),
        "limit_per_s": bound.limit.per_second,
        "fraction": bound.fraction(&measured.work, seconds),
        "fraction_note": group.excess(measured).map(|why| why.to_string()),
        "nrmse": measured.nrmse,
        "peers": peers,
    });
    if let (Some(all), Value::Object(problem)) = (json.as_object_mut(), row.json()) {
        all.extend(problem);
    }
    json
}
