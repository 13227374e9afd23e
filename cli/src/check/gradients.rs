//! Cases of the backward pass: all of the catalogue that have gradients, on every instruction set of the CPU.

use flashtile::quality::Report;
use flashtile::{Cpu, PlanOptions, Sequences};
use flashtile_testkit::{BackwardCase, Case, Failure};
use rayon::prelude::*;
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Largest number of scores (query heads * queries * keys) of a case: the oracle in f64 and the limits of its gradients take many times as
/// long as the oracle of the forward pass.
pub(super) const MAX_SCORES: usize = 40_000;

/// Before the name of the case of the forward pass.
const PREFIX: &str = "backward_";

/// True if the gradients of a case are checked: it has no cache, and few scores.
pub(super) fn has_gradients(case: &Case) -> bool {
    let d = &case.desc.dims;
    let plain = match case.desc.sequences {
        Sequences::Dense | Sequences::Padded { .. } | Sequences::Packed { .. } => true,
        Sequences::Cached { .. } => false,
    };
    plain && d.batch * d.q_heads * d.q_len * d.kv_len <= MAX_SCORES
}

/// The name of the gradients of a case.
pub(super) fn name(case: &Case) -> String {
    format!("{PREFIX}{}", case.name)
}

/// Gradients of one case on one instruction set.
pub(super) struct GradientResult<'a> {
    pub(super) case: &'a Case,
    pub(super) runner: String,
    pub(super) result: Result<Gradients, Failure>,
}

/// Gradients that are within their limits.
pub(super) struct Gradients {
    plan: String,
    reports: Vec<(&'static str, Report)>,
}

impl Gradients {
    /// The largest error, relative to the limit of its element.
    pub(super) fn worst(&self) -> f64 {
        self.reports.iter().map(|(_, report)| report.worst).fold(0.0, f64::max)
    }

    /// The plan, and the errors of each gradient.
    pub(super) fn json(&self) -> (&str, Value) {
        let report = |(name, report): &(&'static str, Report)| {
            let errors = json!({"nrmse": report.nrmse, "max_abs": report.max_abs, "of_limit": report.worst});
            ((*name).to_owned(), errors)
        };
        let given = self.reports.iter().filter(|(_, report)| report.count > 0);
        (&self.plan, Value::Object(given.map(report).collect()))
    }
}

/// Runs cases on every processor, several cases at a time, and reports each in order.
pub(super) fn run(cases: &[Case], cpus: &[Cpu], mut report: impl FnMut(&GradientResult<'_>)) {
    // A batch has cases for every thread, as in the forward pass, and is small because it holds the tensors of all of them.
    const BATCH: usize = 32;
    for batch in cases.chunks(BATCH) {
        let of_case = |case| {
            let prepared = BackwardCase::new(case);
            let result = |cpu: &Cpu| GradientResult {
                case,
                runner: runner(cpu),
                result: prepared.as_ref().map_err(Clone::clone).and_then(|prepared| run_case(prepared, cpu)),
            };
            cpus.iter().map(result).collect()
        };
        let results: Vec<Vec<GradientResult<'_>>> = batch.par_iter().map(of_case).collect();
        results.iter().flatten().for_each(&mut report);
    }
}

/// The name in reports.
pub(super) fn runner(cpu: &Cpu) -> String {
    format!("cpu {} x{}", cpu.facts().isa, cpu.facts().threads)
}

fn run_case(prepared: &BackwardCase, cpu: &Cpu) -> Result<Gradients, Failure> {
    let options = PlanOptions::default();
    let plan = cpu.plan_backward(prepared.problem(), options);
    let plan = plan.map_err(|why| Failure::Skipped(why.to_string()))?.to_string();
    // Kernels that panic fail the case, not the suite; their gradients are ignored.
    let answer = match catch_unwind(AssertUnwindSafe(|| prepared.run(cpu, options))) {
        Ok(answer) => answer?,
        Err(_) => return Err(Failure::Error(format!("{plan} panicked"))),
    };
    let reports = prepared.reports(&answer);
    match reports.iter().find(|(_, report)| !report.within()) {
        Some(&(tensor, report)) => Err(Failure::Wrong { tensor, report, plan }),
        None => Ok(Gradients { plan, reports }),
    }
}
