//! Plans as JSON.

use crate::failure::refused;
use flashtile::plan::{CpuFacts, machines};
use flashtile::{Cpu, CpuPlan, PlanOptions, ProblemDesc};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::{Value, json};

/// What would run for a problem, which is described as JSON, on this machine or on one of a list.
#[pyfunction]
pub(crate) fn plan(
    py: Python<'_>,
    desc: &str,
    machine: Option<&str>,
    splits: Option<usize>,
) -> PyResult<String> {
    let wrong = |error: serde_json::Error| PyValueError::new_err(error.to_string());
    let desc: ProblemDesc = serde_json::from_str(desc).map_err(wrong)?;
    let facts = machine.map_or_else(|| Ok(*Cpu::new().facts()), facts)?;
    let mut options = PlanOptions::default();
    options.splits = splits;
    let plan =
        py.detach(|| -> flashtile::Result<CpuPlan> { Ok(CpuPlan::new(&desc.validate()?, &facts, options)?) });
    let plan = plan.map_err(refused)?;
    let mut described = serde_json::to_value(&plan).map_err(wrong)?;
    if let Value::Object(fields) = &mut described {
        fields.insert("tasks".to_owned(), json!(plan.task_count()));
        fields.insert("splits".to_owned(), json!(plan.splits()));
        fields.insert("sequence_splits".to_owned(), json!(plan.sequence_splits()));
        fields.insert("idle".to_owned(), json!(plan.idle()));
        fields.insert("visible_pairs".to_owned(), json!(plan.problem().visible_pairs()));
        fields.insert("flops".to_owned(), json!(plan.problem().flops()));
        fields.insert("machine".to_owned(), json!(machine.unwrap_or("this machine")));
        fields.insert("l1d".to_owned(), json!(facts.l1d));
        fields.insert("l2".to_owned(), json!(facts.l2));
        fields.insert("l3".to_owned(), json!(facts.l3));
    }
    Ok(described.to_string())
}

fn facts(name: &str) -> PyResult<CpuFacts> {
    let found = machines::ALL.iter().find(|(known, _)| *known == name);
    found.map(|(_, facts)| *facts).ok_or_else(|| {
        let names: Vec<&str> = machines::ALL.iter().map(|(name, _)| *name).collect();
        PyValueError::new_err(format!("machine is '{name}', expected {}", names.join(", ")))
    })
}
