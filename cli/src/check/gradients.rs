//! Cases of the backward pass: all of the catalogue that have gradients, on every instruction set of the CPU and on devices.

use flashtile::quality::Report;
use flashtile::{Backend, Cpu, Dims, PlanOptions, Sequences};
use flashtile_testkit::{BackwardCase, Case, Failure};
use rayon::prelude::*;
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Largest number of scores (query heads * queries * keys) of a case: the oracle in f64 and the limits of its gradients take many times as
/// long as the oracle of the forward pass.
pub(super) const MAX_SCORES: usize = 40_000;

/// Largest number of scores of a case on the simulator.
const MAX_SIMULATED_SCORES: usize = 3_000;

/// Before the name of the case of the forward pass.
const PREFIX: &str = "backward_";

/// True if the gradients of a case are checked: it has no cache, and few scores.
pub(super) fn has_gradients(case: &Case) -> bool {
    let plain = match case.desc.sequences {
        Sequences::Dense | Sequences::Padded { .. } | Sequences::Packed { .. } => true,
        Sequences::Cached { .. } => false,
    };
    plain && scores(&case.desc.dims) <= MAX_SCORES
}

/// Pairs of queries and keys of all heads.
const fn scores(d: &Dims) -> usize {
    d.batch * d.q_heads * d.q_len * d.kv_len
}

/// The name of the gradients of a case.
pub(super) fn name(case: &Case) -> String {
    format!("{PREFIX}{}", case.name)
}

/// A processor or a device that computes gradients.
pub(super) struct GradientRunner {
    name: String,
    computes: Computes,
    options: PlanOptions,
}

enum Computes {
    /// An instruction set, in a workspace of NaN.
    Cpu(Cpu),
    /// A device, whose kernels round probabilities and gradients of scores to the dtype.
    Device(Arc<dyn Backend>),
}

impl GradientRunner {
    pub(super) fn cpu(cpu: Cpu) -> Self {
        let name = format!("cpu {} x{}", cpu.facts().isa, cpu.facts().threads);
        Self { name, computes: Computes::Cpu(cpu), options: PlanOptions::default() }
    }

    pub(super) fn device(backend: Arc<dyn Backend>, options: PlanOptions) -> Self {
        let name = match backend.name() {
            name if name == "simulator" => name,
            name => format!("{name} {}", backend.device()),
        };
        Self { name, computes: Computes::Device(backend), options }
    }

    /// The name in reports.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    fn run(&self, prepared: &BackwardCase) -> Result<Gradients, Failure> {
        let (problem, options) = (prepared.problem(), self.options);
        let plan = match &self.computes {
            Computes::Cpu(cpu) => cpu.plan_backward(problem, options).map(|plan| plan.to_string()),
            Computes::Device(backend) => {
                if backend.name() == "simulator" && scores(problem.dims()) > MAX_SIMULATED_SCORES {
                    return Err(Failure::Skipped("too many scores for the simulator".to_owned()));
                }
                backend.plan_backward(problem, options).map(|plan| plan.to_string())
            }
        };
        let plan = plan.map_err(|why| Failure::Skipped(why.to_string()))?;
        let compute = |prepared: &BackwardCase| match &self.computes {
            Computes::Cpu(cpu) => prepared.run(cpu, options),
            Computes::Device(backend) => prepared.run_by(&plan, |inputs, gradients| {
                let session = backend.session(options);
                let done =
                    session.and_then(|mut session| session.backward(problem.desc(), inputs, gradients));
                done.map_err(|e| e.to_string())
            }),
        };
        let rounding = match &self.computes {
            Computes::Cpu(_) => None,
            Computes::Device(_) => Some(prepared.clone().rounding_scores()),
        };
        let rounding = rounding.transpose().map_err(|e| Failure::Error(e.to_string()))?;
        let prepared = rounding.as_ref().unwrap_or(prepared);
        // Kernels that panic fail the case, not the suite; their gradients are ignored.
        let answer = match catch_unwind(AssertUnwindSafe(|| compute(prepared))) {
            Ok(answer) => answer?,
            Err(_) => return Err(Failure::Error(format!("{plan} panicked"))),
        };
        let reports = prepared.reports(&answer);
        match reports.iter().find(|(_, report)| !report.within()) {
            Some(&(tensor, report)) => Err(Failure::Wrong { tensor, report, plan }),
            None => Ok(Gradients { plan, reports }),
        }
    }
}

/// Gradients of one case on one runner.
pub(super) struct GradientResult<'a> {
    pub(super) case: &'a Case,
    pub(super) runner: &'a str,
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

/// Runs cases on every runner, several cases at a time, and reports each in order.
pub(super) fn run<'a>(
    cases: &'a [Case],
    runners: &'a [GradientRunner],
    mut report: impl FnMut(&GradientResult<'a>),
) {
    // A batch has cases for every thread, as in the forward pass, and is small because it holds the tensors of all of them.
    const BATCH: usize = 32;
    for batch in cases.chunks(BATCH) {
        let of_case = |case| {
            let prepared = BackwardCase::new(case);
            let result = |runner: &'a GradientRunner| GradientResult {
                case,
                runner: runner.name(),
                result: prepared.as_ref().map_err(Clone::clone).and_then(|prepared| runner.run(prepared)),
            };
            runners.iter().map(result).collect()
        };
        let results: Vec<Vec<GradientResult<'_>>> = batch.par_iter().map(of_case).collect();
        results.iter().flatten().for_each(&mut report);
    }
}
