//! `flashtile bench kernels`: kernels of the kernel language, each by itself.

mod common;
#[cfg(feature = "simulator")]
mod simulated;

use super::options::BenchArgs;
use crate::failure::{Failure, Result};
use crate::kernels::select::kernel;
use crate::options::Backend;
use crate::output::Destination;
use crate::progress::progress;
use crate::report::{self, Table};
use crate::simulator;
use common::{check, common_json, named, needed, sizes};
use flashtile::kernel::cuda::Gpu;
use flashtile_bench::{Timed, WORKLOADS, Workload, copy_rate};
use serde_json::{Value, json};
use std::process::ExitCode;

/// Timed launches of a kernel.
const RUNS: usize = 21;

/// The device, and the bytes per second that it copies: the larger of two measurements, before and after the kernels.
struct Cuda {
    gpu: Gpu,
    copy: f64,
}

pub(super) fn run(args: &BenchArgs) -> Result<ExitCode> {
    let one = args.kernel.as_deref().map(|name| kernel("--kernel", name)).transpose()?;
    let chosen = |workload: &&Workload| one.is_none_or(|one| one.name == workload.kernel.name);
    let workloads: Vec<&Workload> = WORKLOADS.iter().filter(chosen).collect();
    let file = args.json_lines.as_deref().map(Destination::new).transpose()?;
    let cuda = match args.backend {
        Backend::Auto | Backend::Simulator => {
            simulator::require()?;
            None
        }
        Backend::Cuda(device) => {
            let gpu = Gpu::new(device).map_err(Failure::new)?;
            let copy = copy_rate(&gpu).map_err(|e| Failure::at("copy", e))?;
            Some(Cuda { gpu, copy })
        }
        Backend::Cpu | Backend::Reference | Backend::Metal => {
            return Err(Failure::at("--backend", "kernels run on simulator or cuda, expected one of them"));
        }
    };

    let bar = progress(workloads.len() as u64);
    let mut timed = Vec::new();
    #[cfg(feature = "simulator")]
    let mut simulated = Vec::new();
    for workload in workloads {
        bar.set_message(workload.kernel.name);
        #[cfg(feature = "simulator")]
        simulated.extend(simulated::rows(workload)?);
        if let (Some(cuda), Some(bench)) = (&cuda, workload.bench()) {
            for shape in workload.small.iter().chain(bench.shapes) {
                let row = workload.time(&cuda.gpu, shape, RUNS);
                let row = row.map_err(|e| Failure::wrong(named(workload, shape, &e)))?;
                check(workload, &row.entry, shape, row.error)?;
                // The small shapes only check answers.
                if bench.shapes.contains(shape) {
                    timed.push((workload, row));
                }
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let cuda = match cuda {
        Some(Cuda { gpu, copy }) => {
            let again = copy_rate(&gpu).map_err(|e| Failure::at("copy", e))?;
            Some(Cuda { gpu, copy: copy.max(again) })
        }
        None => None,
    };

    let mut lines: Vec<Value> = Vec::new();
    #[cfg(feature = "simulator")]
    lines.extend(simulated.iter().map(simulated::json));
    if let Some(cuda) = &cuda {
        lines.extend(timed.iter().map(|(workload, row)| timed_json(workload, row, cuda)));
    }
    if args.json {
        lines.iter().try_for_each(report::json)?;
    } else {
        #[cfg(feature = "simulator")]
        report::text(simulated::table(&simulated))?;
        if let Some(cuda) = &cuda {
            let copy = report::byte_rate(cuda.copy);
            let gap = if cfg!(feature = "simulator") { "\n" } else { "" };
            let table = timed_table(&timed, cuda);
            let head = format_args!("{gap}{}, copies {copy}\n{table}", cuda.gpu.name());
            report::text(head)?;
        }
    }
    if let Some(file) = file {
        file.text(&report::json_lines(&lines))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn timed_table(rows: &[(&Workload, Timed)], cuda: &Cuda) -> String {
    let mut table =
        Table::new(["kernel", "time", "spread", "needed", "bandwidth", "of copy", "rate", "error", "shape"]);
    for (workload, row) in rows {
        let [bytes, flops] = needed(workload, &row.shape).map(|n| n as f64);
        table.push(vec![
            workload.kernel.name.to_owned(),
            report::seconds(row.seconds),
            report::percent(row.spread),
            report::bytes(bytes),
            report::byte_rate(bytes / row.seconds),
            report::percent(bytes / row.seconds / cuda.copy),
            if flops > 0.0 { report::flop_rate(flops / row.seconds) } else { "-".to_owned() },
            format!("{:.1e}", row.error),
            sizes(&row.shape),
        ]);
    }
    table.to_string()
}

fn timed_json(workload: &Workload, row: &Timed, cuda: &Cuda) -> Value {
    let mut all = common_json(workload, "cuda", &row.entry, &row.shape, row.error);
    let [bytes, flops] = needed(workload, &row.shape).map(|n| n as f64);
    let more = [
        ("device", json!(cuda.gpu.name())),
        ("seconds", json!(row.seconds)),
        ("spread", json!(row.spread)),
        ("gbytes_per_s", json!(bytes / row.seconds / 1e9)),
        ("gflops", json!(flops / row.seconds / 1e9)),
        ("copy_gbytes_per_s", json!(cuda.copy / 1e9)),
        ("fraction", json!(bytes / row.seconds / cuda.copy)),
    ];
    all.extend(more.map(|(name, value)| (name.to_owned(), value)));
    Value::Object(all)
}
