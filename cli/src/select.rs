//! The backend that a command computes or plans with, and why.

use crate::cached;
use crate::failure::{Failure, Result};
use crate::gpu;
use crate::machine;
use crate::metal;
use crate::options::{Backend, CpuArgs};
use flashtile::plan::AnyFacts;
use flashtile::{PlanOptions, Problem, Unsupported};

/// A backend, and why it was taken.
pub(crate) struct Selected {
    pub(crate) backend: flashtile::Backend,
    pub(crate) reason: String,
}

/// Selects the backend that is asked for; auto is the library's choice, unless options restrict the cpu.
pub(crate) fn select(
    asked: Backend,
    cpu: CpuArgs,
    problem: &Problem,
    options: PlanOptions,
) -> Result<Selected> {
    let asked_for = || "asked for".to_owned();
    let restricts = [("--isa", cpu.isa.is_some()), ("--threads", cpu.threads.is_some())];
    let restricts: Vec<&str> =
        restricts.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect();
    match asked {
        Backend::Cpu => Ok(Selected { backend: this_cpu(cpu)?, reason: asked_for() }),
        Backend::Cuda(device) => {
            let backend = flashtile::Backend::Cuda(gpu::device(device)?);
            Ok(Selected { backend, reason: asked_for() })
        }
        Backend::Auto if restricts.is_empty() => {
            let choice = flashtile::Backend::auto_with(problem, options);
            Ok(Selected { backend: choice.backend, reason: choice.reason })
        }
        Backend::Auto => {
            let verb = if restricts.len() == 1 { "asks" } else { "ask" };
            let reason = format!("{} {verb} for it", restricts.join(" and "));
            Ok(Selected { backend: this_cpu(cpu)?, reason })
        }
        Backend::Reference => {
            let what = "the reference has no plans: it is a single loop; expected auto, cpu, cuda or metal";
            Err(Failure::at("--backend", what))
        }
        Backend::Simulator => {
            let what = "no command plans for the simulator, expected auto, cpu, cuda or metal";
            Err(Failure::at("--backend", what))
        }
        Backend::Metal => Ok(Selected { backend: metal::backend()?, reason: asked_for() }),
    }
}

fn this_cpu(cpu: CpuArgs) -> Result<flashtile::Backend> {
    Ok(flashtile::Backend::Cpu(machine::cpu(cpu)?))
}

impl Selected {
    /// The failure for a problem that the backend has no plan for.
    pub(crate) fn unplanned(&self, problem: &Problem, asked: Backend, error: &Unsupported) -> Failure {
        if asked == Backend::Auto && matches!(error, Unsupported::Kernels { .. }) {
            let why = &self.reason;
            return Failure::at(
                "--kernels",
                format_args!("applies to the cuda backend, and auto is the cpu: {why}"),
            );
        }
        unplanned(problem, &self.backend.facts(), error)
    }
}

/// Why there is no plan, in terms of the options.
pub(crate) fn unplanned(problem: &Problem, facts: &AnyFacts, error: &Unsupported) -> Failure {
    match facts.as_cpu() {
        Some(facts) => machine::unplanned(problem, facts, error),
        None => cached::unplanned(error).unwrap_or_else(|| Failure::new(error)),
    }
}
