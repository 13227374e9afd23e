//! Runs cases on backends and compares them with the oracle.

use super::cases::{Case, CaseData};
use super::poison::{Guarded, GuardedList};
#[cfg(feature = "gpu")]
use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::{Inputs, Outputs, alibi_stride};
use flashtile_core::plan::PlanOptions;
use flashtile_core::problem::Problem;
use flashtile_core::quality::{
    Accumulation, Report, Tolerance, compare_lse_off, compare_out_off, integer_errors, score_errors,
};
use flashtile_core::reference;
use flashtile_core::reference::Attention;
use flashtile_cpu::cpu::Cpu;
use rayon::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// How portable kernels accumulate for a problem.
#[cfg(feature = "gpu")]
pub(crate) fn accumulation_of_portable(problem: &Problem) -> Accumulation {
    if problem.is_quantized() {
        Accumulation::Operands
    } else if problem.dtype() == Dtype::F32 {
        Accumulation::F32
    } else {
        Accumulation::Probs
    }
}

/// Why a runner gave no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunnerError {
    /// The backend refused the problem, which is not a failure. Reports count the text before the first
    /// colon; the text after it is about this problem only.
    Unsupported(String),
    /// The backend accepted the problem and failed.
    Error(String),
}

/// A finished run.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RunReport {
    /// The plan of the run, printed.
    pub plan: String,
    /// Its accumulation.
    pub accumulation: Accumulation,
}

impl RunReport {
    /// A run of a plan that accumulates in f32.
    #[must_use]
    pub const fn new(plan: String) -> Self {
        Self { plan, accumulation: Accumulation::F32 }
    }

    /// With another accumulation.
    #[must_use]
    pub const fn accumulated(mut self, accumulation: Accumulation) -> Self {
        self.accumulation = accumulation;
        self
    }
}

/// A backend with its options: anything that computes a problem.
pub trait Runner: Sync {
    /// Name for reports.
    fn name(&self) -> String;

    /// Plans the problem and computes the outputs.
    ///
    /// # Errors
    /// [`RunnerError`] if nothing was computed.
    fn run(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<RunReport, RunnerError>;
}

/// The CPU backend with plan options; its workspace starts as NaN.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct CpuRunner {
    /// The CPU.
    pub cpu: Cpu,
    /// Options of every plan.
    pub options: PlanOptions,
}

impl CpuRunner {
    /// A runner with default options.
    #[must_use]
    pub fn new(cpu: Cpu) -> Self {
        Self { cpu, options: PlanOptions::default() }
    }

    /// With other plan options.
    #[must_use]
    pub fn with(mut self, options: PlanOptions) -> Self {
        self.options = options;
        self
    }
}

impl Runner for CpuRunner {
    fn name(&self) -> String {
        format!("cpu {} x{}", self.cpu.facts().isa, self.cpu.facts().threads)
    }

    fn run(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<RunReport, RunnerError> {
        let unsupported = |e: flashtile_core::plan::Unsupported| RunnerError::Unsupported(e.to_string());
        let plan = self.cpu.plan(problem, self.options).map_err(unsupported)?;
        let no_memory = |e: flashtile_cpu::workspace::WorkspaceError| RunnerError::Error(e.to_string());
        let mut workspace = plan.try_workspace().map_err(no_memory)?;
        workspace.bytes_mut().fill(0xFF);
        let error = |e: flashtile_core::inputs::RunError| RunnerError::Error(e.to_string());
        self.cpu.run(&plan, inputs, outputs, &mut workspace).map_err(error)?;
        Ok(RunReport { plan: plan.to_string(), accumulation: plan.accumulation() })
    }
}

/// Why a case did not pass.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Failure {
    /// The backend does not support the problem; the case counts as skipped.
    Skipped(String),
    /// The case is not a valid problem, its inputs do not match, or the backend failed.
    Error(String),
    /// Memory outside an output was written.
    Outside {
        /// `out` or `lse`.
        tensor: &'static str,
        /// Position, counted in elements from the first of the tensor.
        at: isize,
        /// The plan of the run, printed.
        plan: String,
    },
    /// The answer is too far from the oracle's.
    Wrong {
        /// `out` or `lse`.
        tensor: &'static str,
        /// The difference.
        report: Report,
        /// The plan of the run, printed.
        plan: String,
    },
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Skipped(why) => write!(f, "skipped: {why}"),
            Self::Error(why) => f.write_str(why),
            Self::Outside { tensor, at, plan } => {
                write!(f, "memory outside {tensor} was written, at element {at} ({plan})")
            }
            Self::Wrong { tensor, report, plan } => write!(f, "{tensor}: {report} ({plan})"),
        }
    }
}

impl std::error::Error for Failure {}

/// A case that passed.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// The plan of the run, printed.
    pub plan: String,
    /// Difference of out from the oracle's.
    pub out: Report,
    /// Difference of the logsumexps from the oracle's.
    pub lse: Report,
}

/// Outputs of a run in guarded memory.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Answer {
    /// The plan of the run, and its accumulation.
    pub ran: RunReport,
    /// `[batch, q_heads, q_len, value_dim]`.
    pub out: Guarded,
    /// `[batch, q_heads, q_len]`.
    pub lse: GuardedList,
}

impl Answer {
    /// The bits of out, then of the logsumexps.
    #[must_use]
    pub fn bits(&self) -> Vec<u32> {
        let mut bits = self.out.bits();
        bits.extend(self.lse.slice().iter().map(|x| x.to_bits()));
        bits
    }
}

impl CaseData {
    /// Runs on a backend with poisoned outputs, and checks that nothing outside them was written.
    ///
    /// # Errors
    /// [`Failure`], except [`Failure::Wrong`]: results are not compared.
    pub fn run(&self, runner: &dyn Runner) -> Result<Answer, Failure> {
        let dims = self.problem.dims();
        let mut out = Guarded::placed(self.problem.dtype(), dims.out_shape(), self.layout, self.placement);
        let mut lse = GuardedList::placed(dims.lse_shape().iter().product(), self.placement);
        let mut outputs = Outputs::new(out.view_mut());
        outputs.lse = Some(lse.slice_mut());
        // A backend that panics fails the case, not the suite; its outputs are ignored.
        let run = || runner.run(&self.problem, &self.inputs(), &mut outputs);
        let ran = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(ran)) => ran,
            Ok(Err(RunnerError::Unsupported(why))) => return Err(Failure::Skipped(why)),
            Ok(Err(RunnerError::Error(why))) => return Err(Failure::Error(why)),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
                return Err(Failure::Error(format!("{} panicked: {text}", runner.name())));
            }
        };
        for (tensor, touched) in [("out", out.touched()), ("lse", lse.touched())] {
            if let Some(at) = touched {
                return Err(Failure::Outside { tensor, at, plan: ran.plan });
            }
        }
        Ok(Answer { ran, out, lse })
    }
}

impl CaseData {
    /// The oracle's answer with logsumexps as kernels hold them, relative to the ALiBi bias of the nearest visible
    /// key: scores are rounded at that magnitude.
    #[must_use]
    pub fn relative(&self, expected: &Attention) -> Attention {
        let mut relative = expected.clone();
        let Some(slopes) = self.alibi_slopes.as_ref().map(GuardedList::slice) else { return relative };
        let (problem, dims) = (&self.problem, self.problem.dims());
        let stride = alibi_stride(slopes.len(), dims.q_heads);
        for (n, s) in problem.sequences().iter().enumerate() {
            for (h, i) in (0..dims.q_heads).flat_map(|h| (0..s.q_len).map(move |i| (h, i))) {
                let (position, keys) = (i as i64 + s.q_offset, problem.visible(s, i));
                if keys.is_empty() {
                    continue;
                }
                let distance = position.abs_diff(position.clamp(keys.start as i64, keys.end as i64 - 1));
                let lse = &mut relative.lse[(s.batch * dims.q_heads + h) * dims.q_len + s.q_start + i];
                let shifted = *lse + f64::from(slopes[n * stride + h]) * distance as f64;
                // A sink may be closer to 0 than every key.
                if shifted.abs() < lse.abs() {
                    *lse = shifted;
                }
            }
        }
        relative
    }
}

/// A case with its tensors and the oracle's answer: made once, run on many backends.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Prepared {
    /// The tensors.
    pub built: CaseData,
    /// The oracle's answer.
    pub expected: Attention,
}

impl Prepared {
    /// Makes the tensors and computes the oracle's answer.
    ///
    /// # Errors
    /// [`Failure::Error`] if the case is not a valid problem.
    pub fn new(case: &Case) -> Result<Self, Failure> {
        let built = case.build().map_err(|e| Failure::Error(e.to_string()))?;
        let expected = reference::attention(&built.problem, &built.inputs())
            .map_err(|e| Failure::Error(e.to_string()))?;
        Ok(Self { built, expected })
    }

    /// Tensors with a known answer.
    #[must_use]
    pub const fn of(built: CaseData, expected: Attention) -> Self {
        Self { built, expected }
    }

    /// Runs on a backend and compares.
    ///
    /// # Errors
    /// [`Failure`].
    pub fn run(&self, runner: &dyn Runner) -> Result<Outcome, Failure> {
        self.check(&self.built.run(runner)?)
    }

    /// Compares an answer with the oracle's.
    ///
    /// # Errors
    /// [`Failure::Wrong`].
    pub fn check(&self, answer: &Answer) -> Result<Outcome, Failure> {
        let problem = &self.built.problem;
        let keys = problem.sequences().iter().map(|s| s.kv_len).max().unwrap_or(0);
        let tolerance = Tolerance::of(problem.dtype(), keys, answer.ran.accumulation);
        let relative = self.built.relative(&self.expected);
        let off = match answer.ran.accumulation {
            Accumulation::Integers => integer_errors(problem, &self.built.inputs()),
            Accumulation::F32 | Accumulation::Half | Accumulation::Probs | Accumulation::Operands => {
                Vec::new()
            }
        };
        let compared = |off: &[f64]| {
            let out = compare_out_off(&answer.out.values(), &relative, problem.dtype(), &tolerance, off);
            (out, compare_lse_off(answer.lse.slice(), &self.expected, &tolerance, off))
        };
        let (mut out, mut lse) = compared(&off);
        if off.is_empty() && !(out.within() && lse.within()) {
            // This takes as long as the reference, and is done only where it can matter.
            (out, lse) = compared(&score_errors(problem, &self.built.inputs()));
        }
        let plan = answer.ran.plan.clone();
        for (tensor, report) in [("out", out), ("lse", lse)] {
            if !report.within() {
                return Err(Failure::Wrong { tensor, report, plan });
            }
        }
        Ok(Outcome { plan, out, lse })
    }
}

/// Runs one case on one backend with poisoned memory, and compares with the oracle.
///
/// # Errors
/// [`Failure`]; [`Failure::Skipped`] if the backend does not support the problem.
pub fn run_case(case: &Case, runner: &dyn Runner) -> Result<Outcome, Failure> {
    Prepared::new(case)?.run(runner)
}

/// One case on one backend.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CaseResult<'a> {
    /// The case.
    pub case: &'a Case,
    /// Name of the runner.
    pub runner: String,
    /// The outcome.
    pub result: Result<Outcome, Failure>,
}

impl CaseResult<'_> {
    /// Returns true if the backend accepted the problem and gave a wrong answer or none.
    #[must_use]
    pub fn failed(&self) -> bool {
        !matches!(self.result, Ok(_) | Err(Failure::Skipped(_)))
    }
}

impl std::fmt::Display for CaseResult<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on {}: ", self.case.name, self.runner)?;
        match &self.result {
            Ok(outcome) => write!(f, "nrmse {:.2e} ({})", outcome.out.nrmse, outcome.plan),
            Err(failure) => failure.fmt(f),
        }
    }
}

/// Runs cases on every runner, several cases at a time, and reports each in order. The oracle computes each case
/// once.
pub fn conformance(cases: &[Case], runners: &[&dyn Runner], mut report: impl FnMut(&CaseResult<'_>)) {
    // Cases in flight: enough for every thread, but few, so that their tensors stay small.
    const BATCH: usize = 32;
    for batch in cases.chunks(BATCH) {
        let results: Vec<Vec<CaseResult<'_>>> = batch
            .par_iter()
            .map(|case| {
                let prepared = Prepared::new(case);
                let result = |runner: &&dyn Runner| CaseResult {
                    case,
                    runner: runner.name(),
                    result: prepared.as_ref().map_err(Clone::clone).and_then(|p| p.run(*runner)),
                };
                runners.iter().map(result).collect()
            })
            .collect();
        results.iter().flatten().for_each(&mut report);
    }
}
