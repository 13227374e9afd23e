//! Measures the portable kernels one by one: on the simulator what small shapes read and write, on a CUDA device the time of larger
//! ones beside a copy. Every answer is checked.
//!
//! ```text
//! cargo run --release -p flashtile-kernel-bench -- [KERNEL..] [--cuda N] [--json-lines FILE]
//! ```

#![allow(clippy::print_stdout, clippy::print_stderr)]

use flashtile_kernel::cuda::Gpu;
use flashtile_kernel::source::Shape;
use flashtile_kernel_bench::{Simulated, Timed, WORKLOADS, Workload, copy_rate};
use serde_json::{Map, Value, json};
use std::process::ExitCode;

/// Timed launches of a kernel.
const RUNS: usize = 21;

/// Threads that take part in an operation of a SIMD group.
const SIMD_LANES: u64 = 32;

/// The options.
#[derive(Default)]
struct Options {
    /// All, where none is named.
    kernels: Vec<String>,
    cuda: Option<usize>,
    json_lines: Option<String>,
}

impl Options {
    fn read(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self::default();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
            match word.as_str() {
                "--cuda" => {
                    let number = value()?;
                    let device = number.parse().map_err(|_| format!("--cuda {number}: expected a number"))?;
                    options.cuda = Some(device);
                }
                "--json-lines" => options.json_lines = Some(value()?),
                name if WORKLOADS.iter().any(|of| of.kernel.name == name) => options.kernels.push(word),
                _ => {
                    let names: Vec<&str> = WORKLOADS.iter().map(|of| of.kernel.name).collect();
                    let names = names.join(", ");
                    return Err(format!(
                        "{word}: expected --cuda N, --json-lines FILE or a kernel of {names}"
                    ));
                }
            }
        }
        Ok(options)
    }
}

fn main() -> ExitCode {
    match Options::read(std::env::args().skip(1)).and_then(|options| run(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("flashtile-kernel-bench: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), String> {
    let chosen = |of: &&Workload| {
        options.kernels.is_empty() || options.kernels.iter().any(|name| *name == of.kernel.name)
    };
    let workloads: Vec<&Workload> = WORKLOADS.iter().filter(chosen).collect();
    let mut lines = simulate(&workloads)?;
    if let Some(device) = options.cuda {
        lines.extend(time(&Gpu::new(device).map_err(|e| e.to_string())?, &workloads)?);
    }
    if let Some(file) = &options.json_lines {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(file, text).map_err(|e| format!("{file}: {e}"))?;
    }
    Ok(())
}

/// Launches the small shapes on the simulator, and prints a table.
fn simulate(workloads: &[&Workload]) -> Result<Vec<Value>, String> {
    println!(
        "{:12}{:>9}{:>12}{:>12}{:>12}{:>7}{:>12}{:>13}{:>10}{:>9}  instance: shape",
        "kernel",
        "threads",
        "read",
        "written",
        "needed",
        "times",
        "shared",
        "simd/thread",
        "barriers",
        "error"
    );
    let mut lines = Vec::new();
    for workload in workloads {
        for shape in workload.small {
            let row = workload.simulate(shape).map_err(|why| named(workload, shape, &why))?;
            let Simulated { entry, threads, report: r, error, .. } = &row;
            let [bytes, _] = needed(workload, shape);
            check(workload, shape, *error)?;
            println!(
                "{:12}{threads:9}{:12}{:12}{bytes:12}{:7.2}{:12}{:13.1}{:10}{error:9.1e}  {entry}: {}",
                workload.kernel.name,
                r.device_read,
                r.device_written,
                (r.device_read + r.device_written) as f64 / bytes.max(1) as f64,
                r.shared_read + r.shared_written,
                (SIMD_LANES * r.simd_operations) as f64 / (*threads).max(1) as f64,
                r.barriers,
                sizes(shape)
            );
            let mut line = common(workload, "simulator", entry, shape, *error);
            let counts = [
                ("threads", *threads),
                ("device_read", r.device_read),
                ("device_written", r.device_written),
                ("shared_read", r.shared_read),
                ("shared_written", r.shared_written),
                ("atomics", r.atomics),
                ("simd_operations", r.simd_operations),
                ("barriers", r.barriers),
            ];
            line.extend(counts.map(|(name, n)| (name.to_owned(), json!(n))));
            lines.push(Value::Object(line));
        }
    }
    Ok(lines)
}

/// Times the shapes of the kernels on a device, and prints a table.
fn time(gpu: &Gpu, workloads: &[&Workload]) -> Result<Vec<Value>, String> {
    let mut rows: Vec<(&Workload, Timed)> = Vec::new();
    let before = copy_rate(gpu)?;
    for workload in workloads {
        let shapes = workload.bench().map_or(&[][..], |bench| bench.shapes);
        for shape in workload.small.iter().chain(shapes) {
            let row = workload.time(gpu, shape, RUNS).map_err(|why| named(workload, shape, &why))?;
            check(workload, shape, row.error)?;
            // The small shapes only check answers.
            if shapes.contains(shape) {
                rows.push((workload, row));
            }
        }
    }
    let copy = copy_rate(gpu)?.max(before);
    println!("\n{}, copies {:.0} GB/s", gpu.name(), copy / 1e9);
    println!(
        "{:12}{:>11}{:>8}{:>12}{:>9}{:>11}{:>9}  instance: shape",
        "kernel", "us", "spread", "GB/s", "of copy", "GFLOP/s", "error"
    );
    let mut lines = Vec::new();
    for (workload, Timed { entry, shape, seconds, spread, error, .. }) in &rows {
        let [bytes, flops] = needed(workload, shape).map(|n| n as f64 / seconds);
        println!(
            "{:12}{:11.2}{:7.1}%{:12.1}{:8.1}%{:11.1}{error:9.1e}  {entry}: {}",
            workload.kernel.name,
            seconds * 1e6,
            spread * 100.0,
            bytes / 1e9,
            bytes / copy * 100.0,
            flops / 1e9,
            sizes(shape)
        );
        let mut line = common(workload, "cuda", entry, shape, *error);
        line.insert("device".to_owned(), json!(gpu.name()));
        let numbers = [
            ("seconds", *seconds),
            ("spread", *spread),
            ("gbytes_per_s", bytes / 1e9),
            ("gflops", flops / 1e9),
            ("copy_gbytes_per_s", copy / 1e9),
            ("fraction", bytes / copy),
        ];
        line.extend(numbers.map(|(name, n)| (name.to_owned(), json!(n))));
        lines.push(Value::Object(line));
    }
    Ok(lines)
}

fn named(workload: &Workload, shape: &Shape, what: &str) -> String {
    format!("{} of {}: {what}", workload.kernel.name, sizes(shape))
}

/// A wrong answer ends the run: its time would mean nothing.
fn check(workload: &Workload, shape: &Shape, error: f64) -> Result<(), String> {
    let tolerance = workload.bench().map_or(0.0, |bench| bench.tolerance);
    if error <= tolerance {
        return Ok(());
    }
    let what = format!("wrong answer, off by {error:.1e}, allowed {tolerance:.1e}");
    Err(named(workload, shape, &what))
}

/// `rows 1024, dim 128`.
fn sizes(shape: &Shape) -> String {
    shape.sizes.iter().map(|(name, size)| format!("{name} {size}")).collect::<Vec<_>>().join(", ")
}

/// Bytes and operations of a shape, according to the kernel's metadata.
fn needed(workload: &Workload, shape: &Shape) -> [u64; 2] {
    workload.bench().map_or([0, 0], |bench| [(bench.bytes)(shape), (bench.flops)(shape)])
}

/// The fields of a simulated and of a timed row.
fn common(workload: &Workload, backend: &str, entry: &str, shape: &Shape, error: f64) -> Map<String, Value> {
    let [bytes, flops] = needed(workload, shape);
    let sizes: Map<String, Value> =
        shape.sizes.iter().map(|(name, n)| ((*name).to_owned(), json!(n))).collect();
    let values = [
        ("kernel", json!(workload.kernel.name)),
        ("backend", json!(backend)),
        ("instance", json!(entry)),
        ("shape", Value::Object(sizes)),
        ("bytes", json!(bytes)),
        ("flops", json!(flops)),
        ("error", json!(error)),
        ("tolerance", json!(workload.bench().map(|bench| bench.tolerance))),
    ];
    values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
