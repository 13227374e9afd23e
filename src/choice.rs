//! The choice of the backend that computes a problem.
//!
//! A device is chosen where it is present, has a plan, and its estimated time is below the processor's, start and copies
//! included.

use crate::backend::Backend;
use crate::backends::BACKENDS;
use crate::presence::{Candidate, Presence};
use flashtile_core::plan::{AnyFacts, AnyPlan, PlanOptions, Unsupported};
use flashtile_core::problem::Problem;
use flashtile_cpu::cpu::Cpu;
use flashtile_cpu::plan::CpuFacts;
use std::sync::Arc;

/// A backend, its plan for a problem, and why it was chosen. [`Display`](std::fmt::Display) is `{backend}: {reason}`.
///
/// ```
/// use flashtile::{Choice, Dims, Dtype, ProblemDesc};
/// let dims = Dims { batch: 1, q_heads: 8, kv_heads: 2, q_len: 64, kv_len: 64, head_dim: 64, value_dim: 64 };
/// let problem = ProblemDesc::new(dims, Dtype::F32).validate()?;
/// let choice = Choice::auto(&problem);
/// println!("{choice}"); // cpu: no NVIDIA driver on this machine: tried libcuda.so, libcuda.so.1
/// println!("{}", choice.plan?); // kernel, tiles, tasks, splits, workspace
/// # Ok::<(), flashtile::Error>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Choice {
    /// The backend.
    pub backend: Arc<dyn Backend>,
    /// Its plan for the problem, or why it has none. [`Choice::auto`] chooses a backend without a plan only where no other has
    /// one.
    pub plan: std::result::Result<AnyPlan, Unsupported>,
    /// Why this backend, in one sentence.
    pub reason: String,
}

impl Choice {
    /// The fastest backend of this machine for a problem whose tensors are in host memory, and why: [`choose`] with the facts
    /// of this machine. A CUDA device counts as present if it starts and NVRTC is found. Of several CUDA devices the first is
    /// considered; `CUDA_VISIBLE_DEVICES` makes another one the first. The Metal device counts as present if it computes two small
    /// problems as the reference does ([`Metal::self_check`](https://docs.rs/flashtile-metal)).
    ///
    /// The first call in a process starts the driver, which may take a second where there is a CUDA device, or checks the Metal device,
    /// which takes as long where that was not done on this system before. Every call plans: keep the choice and use [`Backend::plan`] for
    /// further problems of the same size.
    #[must_use]
    pub fn auto(problem: &Problem) -> Self {
        Self::auto_with(problem, PlanOptions::default())
    }

    /// [`Choice::auto`] with options of the planner.
    #[must_use]
    pub fn auto_with(problem: &Problem, options: PlanOptions) -> Self {
        let cpu = Cpu::new();
        let candidates: Vec<Candidate> = BACKENDS.iter().filter_map(|of| (of.candidate)()).collect();
        let presence = |candidate: &Candidate| match candidate {
            Ok(of) => Presence::Present { name: of.device(), facts: of.facts() },
            Err(why) => why.clone(),
        };
        let machine = Machine { cpu: *cpu.facts(), devices: candidates.iter().map(presence).collect() };
        let Chosen { backend, plan, reason } = choose(problem, options, &machine);
        let opened = candidates.into_iter().flatten().find(|of| of.facts().backend() == backend);
        Self { backend: opened.unwrap_or_else(|| Arc::new(cpu)), plan, reason }
    }

    /// A backend of the caller's, with its plan for a problem and the reason for it.
    #[must_use]
    pub fn of(
        backend: Arc<dyn Backend>,
        problem: &Problem,
        options: PlanOptions,
        reason: impl Into<String>,
    ) -> Self {
        Self { plan: backend.plan(problem, options), backend, reason: reason.into() }
    }
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.backend.name(), self.reason)
    }
}

/// The facts of a machine, which may be absent: a processor, and the devices beside it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Machine {
    /// The processor.
    pub cpu: CpuFacts,
    /// Devices, or why they are not there.
    pub devices: Vec<Presence>,
}

impl Machine {
    /// A machine without devices.
    #[must_use]
    pub const fn new(cpu: CpuFacts) -> Self {
        Self { cpu, devices: Vec::new() }
    }

    /// Adds a device, or the reason why it is not there.
    #[must_use]
    pub fn with(mut self, device: Presence) -> Self {
        self.devices.push(device);
        self
    }
}

/// The result of [`choose`]. [`Display`](std::fmt::Display) is the backend and the reason: `cpu: this build lacks the cargo feature cuda`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Chosen {
    /// Name of the backend.
    pub backend: &'static str,
    /// Its plan; where no backend has one, the refusal of the CPU.
    pub plan: std::result::Result<AnyPlan, Unsupported>,
    /// Why this backend, in one sentence.
    pub reason: String,
}

impl std::fmt::Display for Chosen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.backend, self.reason)
    }
}

/// Chooses a backend for a problem whose tensors are in host memory. For cached problems the cache is already on the
/// backend: only queries, new rows of keys and values, and results are copied.
///
/// Of the devices with a plan, the one with the least estimated time, start and copies included, is chosen where that is below the time of the
/// CPU, or where the CPU has no plan. Masks are not counted, since a problem does not say how large a broadcast one is; nor is the compilation
/// of kernels, which happens once and is kept on disk. Pure; costs a plan for each device, and one more where the CPU is estimated to be faster.
///
/// ```
/// use flashtile::plan::{Machine, Presence, choose, machines};
/// use flashtile::{Dims, Dtype, PlanOptions, ProblemDesc};
/// let dims = Dims { batch: 1, q_heads: 8, kv_heads: 2, q_len: 64, kv_len: 64, head_dim: 64, value_dim: 64 };
/// let problem = ProblemDesc::new(dims, Dtype::F32).validate()?;
/// let machine = Machine::new(machines::AVX2_8).with(Presence::NotBuilt { feature: "cuda" });
/// let chosen = choose(&problem, PlanOptions::default(), &machine);
/// assert_eq!(chosen.to_string(), "cpu: this build lacks the cargo feature cuda");
/// # Ok::<(), flashtile::Error>(())
/// ```
#[must_use]
pub fn choose(problem: &Problem, options: PlanOptions, machine: &Machine) -> Chosen {
    let on_cpu = |reason: String| {
        let plan = AnyFacts::new(machine.cpu).plan(problem, options);
        Chosen { backend: "cpu", plan, reason }
    };
    let mut why_not = None;
    let mut fastest: Option<(f64, &str, AnyPlan)> = None;
    for device in &machine.devices {
        let why = match device {
            Presence::NotBuilt { feature } => format!("this build lacks the cargo feature {feature}"),
            Presence::Absent { why } => why.clone(),
            Presence::Present { name, facts } => match facts.plan(problem, options) {
                Ok(plan) => {
                    let seconds = plan.rates().seconds(problem);
                    if fastest.as_ref().is_none_or(|(least, ..)| seconds < *least) {
                        fastest = Some((seconds, name, plan));
                    }
                    continue;
                }
                Err(why) => format!("{name} has no plan: {why}"),
            },
        };
        why_not.get_or_insert(why);
    }
    match fastest {
        Some((_, name, plan)) => compare(&machine.cpu, plan, name),
        None => on_cpu(why_not.unwrap_or_else(|| "no other backend is for this machine".to_owned())),
    }
}

/// Chooses between the CPU and a device that has a plan.
fn compare(cpu: &CpuFacts, plan: AnyPlan, name: &str) -> Chosen {
    let (problem, rates) = (plan.problem(), plan.rates());
    let (cpu_seconds, seconds) = (cpu.rates_for(problem).seconds(problem), rates.seconds(problem));
    let [on_cpu, on_device, overhead] = [cpu_seconds, seconds, rates.overhead(problem)].map(time);
    let kernels = plan.kernel_choice().map_or(String::new(), |kind| format!("{kind} "));
    let device = format!("{name}; {kernels}{}", op(problem));
    let on_the_device = |why: String| Chosen {
        backend: plan.backend(),
        plan: Ok(plan.clone()),
        reason: format!("{device}, {why}"),
    };
    if seconds < cpu_seconds {
        return on_the_device(format!("about {on_device} with start and copies, {on_cpu} on the cpu"));
    }
    match AnyFacts::new(*cpu).plan(problem, plan.options()) {
        Err(why) => on_the_device(format!("as the cpu has no plan: {why}")),
        Ok(plan) => {
            let reason =
                format!("about {on_cpu}, on {name} {on_device}, of which start and copies take {overhead}");
            Chosen { backend: "cpu", plan: Ok(plan), reason }
        }
    }
}

/// Packed rows of a sequence up to which kernels on every backend stream keys: decode.
const DECODE_ROWS: usize = 16;

fn op(problem: &Problem) -> &'static str {
    let gqa_group = problem.dims().gqa_group();
    let is_decode = problem.sequences().iter().all(|s| s.q_len.saturating_mul(gqa_group) <= DECODE_ROWS);
    if is_decode { "decode" } else { "prefill" }
}

/// A time with two significant digits: `26 us`, `1.5 ms`.
fn time(seconds: f64) -> String {
    let units = [(1e-6, "us"), (1e-3, "ms"), (1.0, "s")];
    // 995 us are 1.0 ms.
    let fits = |&&(unit, _): &&(f64, &str)| seconds < 995.0 * unit;
    let (unit, name) = units.iter().find(fits).unwrap_or(&units[2]);
    let x = seconds / unit;
    match x {
        ..9.95 => format!("{x:.1} {name}"),
        ..99.5 => format!("{x:.0} {name}"),
        _ => format!("{:.0} {name}", (x / 10.0).round() * 10.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_two_digits() {
        let shown = [5e-6, 26.4e-6, 994e-6, 996e-6, 1.53e-3, 0.5312, 1.0, 123.0, 9.96e-6].map(time);
        let want = ["5.0 us", "26 us", "990 us", "1.0 ms", "1.5 ms", "530 ms", "1.0 s", "120 s", "10 us"];
        assert_eq!(shown, want);
    }
}
