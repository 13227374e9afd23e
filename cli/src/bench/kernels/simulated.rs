//! Bytes, barriers and instructions of kernels, as the simulator counts them.

use super::common::{check, common_json, named, needed, sizes};
use crate::failure::{Failure, Result};
use crate::report::{self, Table};
use flashtile_bench::{Simulated, Workload};
use serde_json::{Value, json};

pub(super) type Row<'w> = (&'w Workload, Simulated);

/// Launches the small shapes of a kernel.
pub(super) fn rows(workload: &Workload) -> Result<Vec<Row<'_>>> {
    let row = |shape| {
        let row = workload.simulate(shape).map_err(|e| Failure::wrong(named(workload, shape, &e)))?;
        check(workload, &row.entry, shape, row.error)?;
        Ok((workload, row))
    };
    workload.small.iter().map(row).collect()
}

/// Threads that take part in an operation of a SIMD group.
const SIMD_LANES: u64 = 32;

fn per_thread(row: &Simulated, n: u64) -> f64 {
    n as f64 / row.threads.max(1) as f64
}

/// The counts of all rows, followed by their shapes.
pub(super) fn table(rows: &[Row<'_>]) -> String {
    let mut table = Table::new([
        "kernel",
        "threads",
        "read",
        "written",
        "needed",
        "times",
        "shared",
        "simd/thread",
        "barriers",
        "error",
    ]);
    let mut shapes = String::new();
    for (n, (workload, row)) in rows.iter().enumerate() {
        let [bytes, _] = needed(workload, &row.shape);
        let r = &row.report;
        let moved = r.device_read + r.device_written;
        table.push(vec![
            format!("{} {}", n + 1, workload.kernel.name),
            row.threads.to_string(),
            report::bytes(r.device_read as f64),
            report::bytes(r.device_written as f64),
            report::bytes(bytes as f64),
            format!("{:.2}", moved as f64 / bytes.max(1) as f64),
            report::bytes((r.shared_read + r.shared_written) as f64),
            format!("{:.1}", per_thread(row, SIMD_LANES * r.simd_operations)),
            r.barriers.to_string(),
            format!("{:.1e}", row.error),
        ]);
        shapes.push_str(&format!("{} {}: {}\n", n + 1, row.entry, sizes(&row.shape)));
    }
    format!("simulator\n{table}\n{shapes}")
}

pub(super) fn json((workload, row): &Row<'_>) -> Value {
    let mut all = common_json(workload, "simulator", &row.entry, &row.shape, row.error);
    let r = &row.report;
    let counts = [
        ("device_read", r.device_read),
        ("device_written", r.device_written),
        ("shared_read", r.shared_read),
        ("shared_written", r.shared_written),
        ("atomics", r.atomics),
        ("simd_operations", r.simd_operations),
    ];
    all.insert("threads".to_owned(), json!(row.threads));
    all.extend(counts.map(|(name, n)| (name.to_owned(), json!(n))));
    all.insert("barriers".to_owned(), json!(r.barriers));
    let each = counts.map(|(name, n)| {
        let n = if name == "simd_operations" { SIMD_LANES * n } else { n };
        (name.to_owned(), json!(per_thread(row, n)))
    });
    all.insert("per_thread".to_owned(), Value::Object(each.into_iter().collect()));
    Value::Object(all)
}
