//! Selection of the backend that a command computes or plans with.

use crate::failure::{Failure, Result};
use crate::machine;
use crate::options::CpuArgs;
use flashtile::{AnyPlan, BackendName, Choice, KernelChoice, PlanOptions, Problem, Unsupported};
use std::sync::Arc;

/// Selects the backend that is asked for, and plans. The library chooses for auto, unless options restrict the cpu, or ask for gradients
/// (`grad`) that its choice does not plan.
pub(crate) fn select(
    asked: BackendName,
    cpu: CpuArgs,
    grad: bool,
    problem: &Problem,
    options: PlanOptions,
) -> Result<Choice> {
    let given = cpu.given();
    let name = asked.backend();
    if !(asked.is_auto() || name == "cpu" || given.is_empty()) {
        return Err(Failure::at("--backend", format_args!("{name} has neither --isa nor --threads")));
    }
    if given.is_empty() && name != "cpu" {
        let choice = asked.choose(problem, options)?;
        let lacks = (asked.is_auto() && grad).then(|| choice.backend.plan_backward(problem, options).err());
        return Ok(match lacks.flatten() {
            Some(why) if options.kernels == KernelChoice::Auto => {
                let reason = format!("{} does not compute the gradients: {why}", choice.backend.name());
                Choice::of(Arc::new(machine::cpu(cpu)?), problem, options, reason)
            }
            _ => choice,
        });
    }
    let verb = if given.len() == 1 { "asks" } else { "ask" };
    let reason = match asked.is_auto() {
        true => format!("{} {verb} for it", given.join(" and ")),
        false => "asked for".to_owned(),
    };
    Ok(Choice::of(Arc::new(machine::cpu(cpu)?), problem, options, reason))
}

/// The plan of a choice.
///
/// # Errors
/// If there is none. The failure names the option that asks for it.
pub(crate) fn planned(choice: &Choice, asked: BackendName, problem: &Problem) -> Result<AnyPlan> {
    choice.plan.clone().map_err(|error| match error {
        Unsupported::Kernels { .. } if asked.is_auto() => {
            let why = &choice.reason;
            let what = format_args!("applies to the cuda backend, and auto is the cpu: {why}");
            Failure::at("--kernels", what)
        }
        error => unplanned(problem, |options| choice.backend.plan(problem, options), &error),
    })
}

/// The failure of a problem without a plan, in terms of the options.
pub(crate) fn unplanned(
    problem: &Problem,
    plan: impl Fn(PlanOptions) -> std::result::Result<AnyPlan, Unsupported>,
    error: &Unsupported,
) -> Failure {
    match error {
        Unsupported::Splits { .. } => {
            let plan = plan(PlanOptions::default()).ok();
            let tile = plan.zip(problem.sequences().first()).map(|(plan, sequence)| plan.tile(sequence));
            let hint = tile.filter(|tile| tile.keys > 1).map_or_else(String::new, |tile| {
                format!(": a split holds at least one block of {} keys", tile.keys)
            });
            Failure::at("--splits", format_args!("{error}{hint}"))
        }
        Unsupported::Kernels { .. } => Failure::at("--kernels", "applies to the cuda backend only"),
        Unsupported::Codec { tensor, codec, expected } => {
            let what = format_args!(
                "native kernels read {expected} like the problem, not {codec}: expected --kernels auto or portable"
            );
            Failure::at(format_args!("--{tensor}-codec"), what)
        }
        error => Failure::new(error),
    }
}
