//! The processor.

use super::own_plan::{backward_plan_of, first, plan_of};
use crate::backend::{Backend, HostSession, Limit, Rate, TimedBackward, TimedRun, Unit};
use crate::error::{Error, Result};
use crate::runner::Runner;
use flashtile_core::gradients::{self, BackwardInputs, Gradients};
use flashtile_core::inputs::{self, Inputs, Outputs};
use flashtile_core::isa::Isa;
use flashtile_core::plan::{AnyBackwardPlan, AnyFacts, AnyPlan, PlanOptions};
use flashtile_core::problem::ProblemDesc;
use flashtile_cpu::cpu::Cpu;
use flashtile_cpu::limits;
use flashtile_cpu::plan::{CpuBackwardPlan, CpuPlan, machines};
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
        outputs: &Outputs<'_>,
    ) -> Result<Box<dyn TimedRun + 't>> {
        let plan: &CpuPlan = plan_of(plan)?;
        inputs::check(plan.problem(), first(inputs)?, outputs)?;
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

    fn timed_backward<'t>(
        &'t self,
        plan: &'t AnyBackwardPlan,
        inputs: &BackwardInputs<'t>,
        gradients: &Gradients<'_>,
    ) -> Result<Box<dyn TimedBackward + 't>> {
        let plan: &CpuBackwardPlan = backward_plan_of(plan)?;
        gradients::check(plan.problem(), inputs, gradients)?;
        Ok(Box::new(CpuBackward { cpu: self, plan, inputs: *inputs, workspace: plan.try_workspace()? }))
    }

    fn unit(&self, plan: &AnyPlan) -> Option<Unit> {
        let plan: &CpuPlan = plan.of()?;
        Some(unit(plan.isa(), plan.threads()))
    }

    fn backward_unit(&self, plan: &AnyBackwardPlan) -> Option<Unit> {
        let plan: &CpuBackwardPlan = plan.of()?;
        Some(unit(plan.isa(), plan.threads()))
    }

    fn limit(&self, rate: Rate, unit: &Unit) -> Result<Limit> {
        let threads = unit.threads.unwrap_or(self.facts().threads);
        Ok(match rate {
            Rate::Arithmetic => {
                let isa = Isa::ALL.into_iter().find(|isa| isa.name() == unit.name);
                let isa = isa.unwrap_or(self.facts().isa);
                Limit { per_second: limits::fma_peak(isa, threads), by: "FMA" }
            }
            Rate::Bandwidth => Limit { per_second: limits::read_bandwidth(threads), by: "read" },
        })
    }
}

/// The unit of an instruction set.
fn unit(isa: Isa, threads: usize) -> Unit {
    Unit { name: isa.name().to_owned(), threads: Some(threads), dtype: None, max_intensity: 64.0 }
}

impl HostSession for Runner {
    fn compute(&mut self, desc: &ProblemDesc, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>) -> Result<()> {
        self.run(desc, inputs, outputs)
    }

    fn backward(
        &mut self,
        desc: &ProblemDesc,
        inputs: &BackwardInputs<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result<()> {
        self.run_backward(desc, inputs, gradients)
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
        let inputs = &self.inputs[self.next];
        self.cpu.run(self.plan, inputs, outputs, &mut self.workspace).map_err(Error::Run)?;
        self.next = (self.next + 1) % self.inputs.len();
        Ok(())
    }
}

/// A backward plan with its workspace.
struct CpuBackward<'t> {
    cpu: &'t Cpu,
    plan: &'t CpuBackwardPlan,
    inputs: BackwardInputs<'t>,
    workspace: Workspace,
}

impl TimedBackward for CpuBackward<'_> {
    fn launch(&mut self, gradients: &mut Gradients<'_>) -> Result<()> {
        self.cpu.run_backward(self.plan, &self.inputs, gradients, &mut self.workspace).map_err(Error::Run)
    }
}
