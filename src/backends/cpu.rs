//! The processor.

use super::own_plan::plan_of;
use crate::backend::{Backend, HostSession, Limit, Rate, TimedRun, Unit};
use crate::error::{Error, Result};
use crate::runner::Runner;
use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::{Inputs, Outputs, RunError};
use flashtile_core::plan::{AnyFacts, AnyPlan, PlanOptions};
use flashtile_core::problem::ProblemDesc;
use flashtile_cpu::cpu::Cpu;
use flashtile_cpu::limits;
use flashtile_cpu::plan::{CpuPlan, machines};
use flashtile_cpu::workspace::Workspace;
use std::sync::Arc;

pub(crate) fn open(_: usize) -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(Cpu::new()))
}

pub(crate) fn known() -> Vec<(&'static str, AnyFacts)> {
    machines::ALL.map(|(name, facts)| (name, AnyFacts::new(facts))).to_vec()
}

/// Largest number of copies of inputs.
const MAX_COPIES: usize = 256;

impl Backend for Cpu {
    fn name(&self) -> String {
        "cpu".to_owned()
    }

    fn describe(&self) -> String {
        "embedded kernels".to_owned()
    }

    fn facts(&self) -> AnyFacts {
        AnyFacts::new(*self.facts())
    }

    fn session(&self, options: PlanOptions) -> Result<Box<dyn HostSession>> {
        Ok(Box::new(Runner::with_cpu(*self).with_options(options)))
    }

    fn timed<'t>(
        &'t self,
        plan: &'t AnyPlan,
        inputs: &[Inputs<'t>],
        _: &Outputs<'_>,
    ) -> Result<Box<dyn TimedRun + 't>> {
        let plan: &CpuPlan = plan_of(plan)?;
        Ok(Box::new(CpuRun {
            cpu: self,
            plan,
            inputs: inputs.to_vec(),
            next: 0,
            workspace: plan.try_workspace()?,
        }))
    }

    /// Twice the last-level cache.
    fn cold_copies(&self, bytes: f64) -> usize {
        (2 * self.facts().l3).div_ceil((bytes as usize).max(1)).clamp(1, MAX_COPIES)
    }

    fn unit(&self, dtype: Dtype) -> Option<Unit> {
        let facts = self.facts();
        let name = facts.isa.for_dtype(dtype).name().to_owned();
        Some(Unit { name, threads: Some(facts.threads), dtype: None, max_intensity: 64.0 })
    }

    fn limit(&self, rate: Rate, dtype: Dtype) -> Result<Limit> {
        let facts = self.facts();
        Ok(match rate {
            Rate::Arithmetic => {
                let isa = facts.isa.for_dtype(dtype);
                Limit { per_second: limits::fma_peak(isa, facts.threads), by: "FMA" }
            }
            Rate::Bandwidth => Limit { per_second: limits::read_bandwidth(facts.threads), by: "read" },
        })
    }
}

impl HostSession for Runner {
    fn compute(&mut self, desc: &ProblemDesc, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>) -> Result<()> {
        self.run(desc, inputs, outputs)
    }
}

/// A plan with its workspace.
struct CpuRun<'t> {
    cpu: &'t Cpu,
    plan: &'t CpuPlan,
    inputs: Vec<Inputs<'t>>,
    /// The inputs of the next run.
    next: usize,
    workspace: Workspace,
}

impl TimedRun for CpuRun<'_> {
    fn launch(&mut self, outputs: &mut Outputs<'_>) -> Result<()> {
        let missing = RunError::Length { tensor: "inputs", expected: 1, got: 0 };
        let inputs = self.inputs.get(self.next).ok_or(missing)?;
        self.cpu.run(self.plan, inputs, outputs, &mut self.workspace).map_err(Error::Run)?;
        self.next = (self.next + 1) % self.inputs.len();
        Ok(())
    }
}
