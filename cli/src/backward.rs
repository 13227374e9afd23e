//! The plan of a backward pass, in words and as JSON.

use crate::failure::{Failure, Result};
use crate::machine::Work;
use crate::report;
use flashtile::{AnyBackwardPlan, AnyPlan};
use serde_json::{Value, json};

/// Plans the backward pass of a problem with a plan of the forward pass, for the same machine and options. `asked` is the option or the
/// group of rows that needs it.
///
/// # Errors
/// If the problem or the backend has none.
pub(crate) fn plan(asked: &str, forward: &AnyPlan) -> Result<AnyBackwardPlan> {
    let plan = forward.facts().plan_backward(forward.problem(), forward.options());
    plan.map_err(|why| Failure::at(asked, why))
}

/// The operations, and the bytes of keys and values, which are read at least once; `forward` is the plan of the forward pass.
pub(crate) fn work(forward: &AnyPlan) -> Work {
    Work { flops: forward.problem().backward_flops(), bytes: forward.kv_bytes() }
}

/// A plan in one line.
pub(crate) fn words(plan: &AnyBackwardPlan) -> String {
    let workspace = report::bytes(plan.workspace_bytes() as f64);
    let flops = report::flops(plan.problem().backward_flops());
    format!("{}: {}, workspace {workspace}, {flops}", plan.kernel(), plan.words())
}

/// The fields of a plan.
pub(crate) fn json(plan: &AnyBackwardPlan) -> Value {
    let mut json = report::fields(&plan.fields());
    let common = json!({
        "kernel": plan.kernel(),
        "tasks": plan.task_count(),
        "workspace_bytes": plan.workspace_bytes(),
        "flops": plan.problem().backward_flops(),
    });
    if let (Some(json), Value::Object(common)) = (json.as_object_mut(), common) {
        json.extend(common);
    }
    json
}
