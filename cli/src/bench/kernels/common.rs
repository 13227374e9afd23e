//! Shared by simulated and timed rows.

use crate::failure::{Failure, Result};
use flashtile::kernel::Bench;
use flashtile::kernel::source::Shape;
use flashtile_bench::Workload;
use serde_json::{Map, Value, json};

pub(super) fn named(workload: &Workload, shape: &Shape, what: &str) -> String {
    format!("{} of {}: {what}", workload.kernel.name, sizes(shape))
}

/// A wrong answer ends the run, since its time would mean nothing.
pub(super) fn check(workload: &Workload, entry: &str, shape: &Shape, error: f64) -> Result<()> {
    let tolerance = workload.bench().map_or(0.0, |bench| bench.tolerance);
    if error <= tolerance {
        return Ok(());
    }
    let shape = sizes(shape);
    Err(Failure::wrong(format_args!(
        "{entry} of {shape}: wrong answer, off by {error:.1e}, allowed {tolerance:.1e}"
    )))
}

/// `rows 1024, dim 128`.
pub(super) fn sizes(shape: &Shape) -> String {
    shape.sizes.iter().map(|(name, size)| format!("{name} {size}")).collect::<Vec<_>>().join(", ")
}

/// Bytes and operations of a shape, according to the kernel's metadata.
pub(super) fn needed(workload: &Workload, shape: &Shape) -> [u64; 2] {
    let of = |bench: &Bench| [(bench.bytes)(shape), (bench.flops)(shape)];
    workload.bench().map_or([0, 0], of)
}

pub(super) fn common_json(
    workload: &Workload,
    backend: &str,
    entry: &str,
    shape: &Shape,
    error: f64,
) -> Map<String, Value> {
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
