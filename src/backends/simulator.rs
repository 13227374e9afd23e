//! The portable kernels on the simulator of the kernel language, which checks every access.

use super::own_plan::plan_of;
use crate::backend::{Backend, HostSession, TimedRun};
use crate::error::Result;
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::plan::{
    AnyFacts, AnyPlan, Explanation, Facts, KernelChoice, Plan, PlanOptions, Rates, TileSize, Unsupported,
};
use flashtile_core::problem::{Problem, ProblemDesc, Sequence};
use flashtile_core::quality::Accumulation;
use flashtile_gpu::plan::Plan as PortablePlan;
use flashtile_gpu::simulator::{DECODE_TILE, find, no_native, session};
use std::fmt;
use std::sync::Arc;

pub(crate) fn open(_: usize) -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(Simulator))
}

/// Largest number of scores (query heads x queries x keys), about a minute's work for single queries.
const MAX_SCORES: usize = 600_000;

#[derive(Debug, Clone, Copy, PartialEq)]
struct Simulator;

/// The decode kernel with a tile of two SIMD groups and two splits.
#[derive(Debug, Clone, PartialEq)]
struct SimulatorPlan {
    problem: Problem,
    options: PlanOptions,
}

impl fmt::Display for SimulatorPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} splits {} workspace 0", self.kernel(), self.splits())
    }
}

impl Plan for SimulatorPlan {
    fn problem(&self) -> &Problem {
        &self.problem
    }

    fn options(&self) -> PlanOptions {
        self.options
    }

    fn kernel(&self) -> String {
        let (dtype, dims) = (self.problem.dtype(), self.problem.dims());
        let value =
            if dims.value_dim == dims.head_dim { String::new() } else { format!("x{}", dims.value_dim) };
        format!("simulator-decode-{dtype}-d{}{value}", dims.head_dim)
    }

    fn workspace_bytes(&self) -> usize {
        0
    }

    fn splits(&self) -> usize {
        DECODE_TILE.splits
    }

    fn task_count(&self) -> usize {
        self.problem.sequences().len() * self.problem.dims().kv_heads
    }

    fn tile(&self, _: &Sequence) -> TileSize {
        TileSize { rows: DECODE_TILE.tile.rows(), keys: DECODE_TILE.tile.keys() }
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::of_cuda(self.problem.dtype())
    }
}

impl Facts for Simulator {
    type Plan = SimulatorPlan;

    const BACKEND: &'static str = "simulator";

    fn plan(
        &self,
        problem: &Problem,
        options: PlanOptions,
    ) -> std::result::Result<SimulatorPlan, Unsupported> {
        if options.kernels == KernelChoice::Native {
            return Err(Unsupported::Kernels { asked: options.kernels });
        }
        if let Some(got) = options.splits.filter(|&got| got != DECODE_TILE.splits) {
            return Err(Unsupported::Splits { got, max: DECODE_TILE.splits });
        }
        let heads = problem.dims().q_heads;
        let scores = problem.sequences().iter().map(|s| s.q_len.saturating_mul(s.kv_len));
        let scores = scores.fold(0, usize::saturating_add).saturating_mul(heads);
        if scores > MAX_SCORES {
            return Err(Unsupported::Size { what: "scores on the simulator", got: scores, max: MAX_SCORES });
        }
        let plan = PortablePlan::with_tiling(problem, DECODE_TILE)?;
        match plan.with_native(find) {
            Some(_) => Ok(SimulatorPlan { problem: problem.clone(), options }),
            None => Err(Unsupported::Instance { why: no_native(problem) }),
        }
    }

    /// Ten to a hundred thousand scores a second.
    fn rates(&self, plan: &SimulatorPlan) -> Rates {
        let dims = plan.problem.dims();
        let flops = 5e4 * 2.0 * (dims.head_dim + dims.value_dim) as f64;
        Rates { start: 0.0, copy: f64::INFINITY, flops, bandwidth: f64::INFINITY }
    }

    fn explain(&self, plan: &SimulatorPlan) -> Explanation {
        let TileSize { rows, keys } =
            TileSize { rows: DECODE_TILE.tile.rows(), keys: DECODE_TILE.tile.keys() };
        Explanation {
            machine: "GPU kernels on the host, every access checked".to_owned(),
            lines: vec![("kernel", plan.kernel()), ("tiles", format!("{rows} rows x {keys} keys"))],
            fields: vec![("tile_rows", rows.into()), ("block_k", keys.into())],
        }
    }
}

impl Backend for Simulator {
    fn name(&self) -> String {
        Self::BACKEND.to_owned()
    }

    fn describe(&self) -> String {
        "GPU kernels on the host, every access checked".to_owned()
    }

    fn facts(&self) -> AnyFacts {
        AnyFacts::new(*self)
    }

    fn session(&self, options: PlanOptions) -> Result<Box<dyn HostSession>> {
        Ok(Box::new(SimulatorSession { options }))
    }

    fn timed<'t>(
        &'t self,
        plan: &'t AnyPlan,
        inputs: &[Inputs<'t>],
        _: &Outputs<'_>,
    ) -> Result<Box<dyn TimedRun + 't>> {
        let plan: &SimulatorPlan = plan_of(plan)?;
        Ok(Box::new(SimulatorRun { desc: plan.problem.desc(), inputs: inputs.to_vec() }))
    }
}

#[derive(Debug)]
struct SimulatorSession {
    options: PlanOptions,
}

impl HostSession for SimulatorSession {
    fn compute(&mut self, desc: &ProblemDesc, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>) -> Result<()> {
        Facts::plan(&Simulator, &desc.clone().validate()?, self.options)?;
        Ok(session(DECODE_TILE).compute(desc, inputs, outputs)?)
    }
}

struct SimulatorRun<'t> {
    desc: &'t ProblemDesc,
    inputs: Vec<Inputs<'t>>,
}

impl TimedRun for SimulatorRun<'_> {
    fn launch(&mut self, outputs: &mut Outputs<'_>) -> Result<()> {
        let inputs = self.inputs.first();
        inputs.map_or(Ok(()), |inputs| Ok(session(DECODE_TILE).compute(self.desc, inputs, outputs)?))
    }
}
