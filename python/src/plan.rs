//! Plans as JSON.

use crate::failure::{described_wrong, refused};
use crate::process;
use flashtile::plan::{AnyFacts, known_machines};
use flashtile::{AnyPlan, BackendName, PlanOptions, ProblemDesc};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::{Value, json};

/// Plans a problem, described as JSON, for a backend of this machine or for a machine of a list. Returns the
/// plan as JSON.
#[pyfunction]
pub(crate) fn plan(
    py: Python<'_>,
    desc: &str,
    machine: Option<&str>,
    backend: &str,
    splits: Option<usize>,
) -> PyResult<String> {
    let wrong = |error: serde_json::Error| described_wrong(&error);
    let desc: ProblemDesc = serde_json::from_str(desc).map_err(wrong)?;
    let known = machine.map(known).transpose()?;
    if known.is_none() {
        // Counting the threads of this machine starts them.
        process::compute()?;
    }
    let mut options = PlanOptions::default();
    options.splits = splits;
    let planned = py.detach(|| match known {
        Some((name, facts)) => Planned::on(name, facts, &desc, options),
        None => Planned::here(backend.parse()?, &desc, options),
    });
    let Planned { machine, reason, plan } = planned.map_err(refused)?;
    let mut described = serde_json::to_value(&plan).map_err(wrong)?;
    let common = json!({
        "summary": plan.to_string(),
        "backend_reason": reason,
        "machine": machine,
        "visible_pairs": plan.problem().visible_pairs(),
        "flops": plan.problem().flops(),
    });
    if let (Some(fields), Value::Object(more)) = (described.as_object_mut(), common) {
        fields.extend(more);
    }
    Ok(described.to_string())
}

/// A plan, where it would run, and why there.
struct Planned {
    machine: String,
    reason: String,
    plan: AnyPlan,
}

impl Planned {
    /// On a machine that may be absent.
    fn on(name: &str, facts: AnyFacts, desc: &ProblemDesc, options: PlanOptions) -> flashtile::Result<Self> {
        let plan = facts.plan(&desc.clone().validate()?, options)?;
        Ok(Self { machine: name.to_owned(), reason: "machine asks for it".to_owned(), plan })
    }

    /// On a backend of this machine.
    fn here(name: BackendName, desc: &ProblemDesc, options: PlanOptions) -> flashtile::Result<Self> {
        let choice = name.choose(&desc.clone().validate()?, options)?;
        Ok(Self { machine: choice.backend.device(), reason: choice.reason, plan: choice.plan? })
    }
}

fn known(name: &str) -> PyResult<(&str, AnyFacts)> {
    let all = known_machines();
    let found = all.iter().find(|(known, _)| *known == name);
    found.map(|(_, facts)| (name, facts.clone())).ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
        PyValueError::new_err(format!("machine is '{name}', expected {}", names.join(", ")))
    })
}
