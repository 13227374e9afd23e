//! The portable kernels on the simulator of the kernel language, which checks every access.

use super::own_plan::{first, kernel_name, plan_of};
use crate::backend::{Backend, HostSession, TimedRun};
use crate::error::{Error, Result};
use flashtile_core::gradients::{BackwardInputs, Gradients};
use flashtile_core::inputs::{self, Inputs, Outputs};
use flashtile_core::plan::{
    AnyBackwardPlan, AnyFacts, AnyPlan, Explanation, Facts, KernelChoice, Plan, PlanOptions, Rates, TileSize,
    Unsupported,
};
use flashtile_core::problem::{Problem, ProblemDesc, Sequence};
use flashtile_core::quality::Accumulation;
use flashtile_gpu::SessionError;
use flashtile_gpu::backward::planner::GpuBackwardPlan;
use flashtile_gpu::engine::{Engine, PortableEngine};
use flashtile_gpu::plan::Plan as PortablePlan;
use flashtile_gpu::session::Session;
use flashtile_gpu::simulator::{DECODE_TILE, engine, find, no_native, session};
use flashtile_gpu::tile::Tiling;
use flashtile_kernel::simulator::{Fault, Simulator as Device};
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
        kernel_name("simulator-decode", &self.problem)
    }

    fn splits(&self) -> usize {
        tiling(self.options).splits
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

/// The tile that has native code, with as many splits as the options allow.
fn tiling(options: PlanOptions) -> Tiling {
    DECODE_TILE
        .tile
        .with_splits(options.splits.map_or(DECODE_TILE.splits, |splits| splits.min(DECODE_TILE.splits)))
}

/// Refuses options that the kernels do not have, and problems that would take too long.
fn check(problem: &Problem, options: PlanOptions) -> std::result::Result<(), Unsupported> {
    if options.kernels == KernelChoice::Native {
        return Err(Unsupported::Kernels { asked: options.kernels });
    }
    if options.splits == Some(0) {
        return Err(Unsupported::Splits { got: 0, max: DECODE_TILE.splits });
    }
    let heads = problem.dims().q_heads;
    let scores = problem.sequences().iter().map(|s| s.q_len.saturating_mul(s.kv_len));
    let got = scores.fold(0, usize::saturating_add).saturating_mul(heads);
    let max = MAX_SCORES;
    if got > max { Err(Unsupported::Size { what: "scores on the simulator", got, max }) } else { Ok(()) }
}

impl Facts for Simulator {
    type Plan = SimulatorPlan;

    const BACKEND: &'static str = "simulator";

    fn plan(
        &self,
        problem: &Problem,
        options: PlanOptions,
    ) -> std::result::Result<SimulatorPlan, Unsupported> {
        check(problem, options)?;
        let plan = PortablePlan::with_tiling(problem, tiling(options))?;
        match plan.with_native(find) {
            Some(_) => Ok(SimulatorPlan { problem: problem.clone(), options }),
            None => Err(Unsupported::Instance { why: no_native(problem) }),
        }
    }

    fn plan_backward(
        &self,
        problem: &Problem,
        options: PlanOptions,
    ) -> std::result::Result<AnyBackwardPlan, Unsupported> {
        check(problem, options)?;
        let plan = engine(tiling(options)).plan_backward(problem)?;
        Ok(AnyBackwardPlan::new(GpuBackwardPlan::of(Self::BACKEND, options, plan)))
    }

    /// Ten to a hundred thousand scores a second.
    fn rates(&self, plan: &SimulatorPlan) -> Rates {
        let dims = plan.problem.dims();
        let flops = 5e4 * 2.0 * (dims.head_dim + dims.value_dim) as f64;
        Rates { start: 0.0, copy: f64::INFINITY, flops, bandwidth: f64::INFINITY }
    }

    fn explain(&self, plan: &SimulatorPlan) -> Explanation {
        let (rows, keys) = (DECODE_TILE.tile.rows(), DECODE_TILE.tile.keys());
        Explanation {
            machine: self.describe(),
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
        Ok(Box::new(SimulatorSession { options, session: session(tiling(options)) }))
    }

    fn timed<'t>(
        &'t self,
        plan: &'t AnyPlan,
        inputs: &[Inputs<'t>],
        outputs: &Outputs<'_>,
    ) -> Result<Box<dyn TimedRun + 't>> {
        let (plan, inputs) = (plan_of::<SimulatorPlan>(plan)?, *first(inputs)?);
        inputs::check(&plan.problem, &inputs, outputs)?;
        let session = session(tiling(plan.options));
        Ok(Box::new(SimulatorRun { desc: plan.problem.desc(), inputs, session }))
    }
}

type PortableSession = Session<PortableEngine<Device>>;

#[derive(Debug)]
struct SimulatorSession {
    options: PlanOptions,
    session: PortableSession,
}

impl HostSession for SimulatorSession {
    fn compute(&mut self, desc: &ProblemDesc, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>) -> Result<()> {
        // Refuses problems that would take too long.
        Facts::plan(&Simulator, &desc.clone().validate()?, self.options)?;
        self.session.compute(desc, inputs, outputs).map_err(fault)
    }

    fn backward(
        &mut self,
        desc: &ProblemDesc,
        inputs: &BackwardInputs<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result<()> {
        check(&desc.clone().validate()?, self.options)?;
        self.session.compute_backward(desc, inputs, gradients).map_err(fault)
    }
}

struct SimulatorRun<'t> {
    desc: &'t ProblemDesc,
    inputs: Inputs<'t>,
    session: PortableSession,
}

impl TimedRun for SimulatorRun<'_> {
    fn launch(&mut self, outputs: &mut Outputs<'_>) -> Result<()> {
        self.session.compute(self.desc, &self.inputs, outputs).map_err(fault)
    }
}

/// A launch fails on the simulator where a kernel breaks its contract.
fn fault(error: SessionError<Fault>) -> Error {
    match error {
        SessionError::Launch(error) => Error::Fault(Arc::new(SessionError::Launch(error))),
        error => error.into(),
    }
}
