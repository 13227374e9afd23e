//! The reference: attention by definition, in f64 on one thread.

use super::own_plan::{first, kernel_name, plan_of};
use crate::backend::{Backend, HostSession, TimedRun};
use crate::error::{Error, Result};
use flashtile_core::gradients::{self, BackwardInputs, Gradients};
use flashtile_core::inputs::{self, Inputs, Outputs};
use flashtile_core::plan::{
    AnyBackwardPlan, AnyFacts, AnyPlan, BackwardPlan, Explanation, Facts, KernelChoice, Plan, PlanOptions,
    Rates, TileSize, Unsupported,
};
use flashtile_core::problem::{Problem, ProblemDesc, Sequence};
use flashtile_core::quality::Accumulation;
use flashtile_core::reference;
use std::fmt;
use std::sync::Arc;

pub(crate) fn open(_: usize) -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(Reference))
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Reference;

/// One loop over everything.
#[derive(Debug, Clone, PartialEq)]
struct ReferencePlan {
    problem: Problem,
    options: PlanOptions,
}

impl fmt::Display for ReferencePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} workspace 0", self.kernel())
    }
}

impl Plan for ReferencePlan {
    fn problem(&self) -> &Problem {
        &self.problem
    }

    fn options(&self) -> PlanOptions {
        self.options
    }

    fn kernel(&self) -> String {
        kernel_name("reference", &self.problem)
    }

    fn tile(&self, _: &Sequence) -> TileSize {
        TileSize { rows: 1, keys: 1 }
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::F32
    }
}

/// One loop over everything.
#[derive(Debug, Clone)]
struct ReferenceBackwardPlan {
    problem: Problem,
    options: PlanOptions,
}

impl fmt::Display for ReferenceBackwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} workspace 0", self.kernel())
    }
}

impl BackwardPlan for ReferenceBackwardPlan {
    fn problem(&self) -> &Problem {
        &self.problem
    }

    fn options(&self) -> PlanOptions {
        self.options
    }

    fn kernel(&self) -> String {
        kernel_name("reference-backward", &self.problem)
    }

    fn words(&self) -> String {
        "a loop over rows and keys".to_owned()
    }
}

/// Refuses options that the loop does not have.
fn check(options: PlanOptions) -> std::result::Result<(), Unsupported> {
    if options.kernels != KernelChoice::Auto {
        return Err(Unsupported::Kernels { asked: options.kernels });
    }
    match options.splits {
        Some(got) if got != 1 => Err(Unsupported::Splits { got, max: 1 }),
        _ => Ok(()),
    }
}

impl Facts for Reference {
    type Plan = ReferencePlan;

    const BACKEND: &'static str = "reference";

    fn plan(
        &self,
        problem: &Problem,
        options: PlanOptions,
    ) -> std::result::Result<ReferencePlan, Unsupported> {
        check(options)?;
        Ok(ReferencePlan { problem: problem.clone(), options })
    }

    fn plan_backward(
        &self,
        problem: &Problem,
        options: PlanOptions,
    ) -> std::result::Result<AnyBackwardPlan, Unsupported> {
        check(options)?;
        match problem.no_gradients() {
            Some(why) => Err(Unsupported::Backward { why }),
            None => Ok(AnyBackwardPlan::new(ReferenceBackwardPlan { problem: problem.clone(), options })),
        }
    }

    /// A multiply-add in f64 takes a nanosecond.
    fn rates(&self, _: &ReferencePlan) -> Rates {
        Rates { start: 0.0, copy: f64::INFINITY, flops: 2e9, bandwidth: f64::INFINITY }
    }

    fn explain(&self, plan: &ReferencePlan) -> Explanation {
        Explanation {
            machine: "f64, 1 thread".to_owned(),
            lines: vec![("kernel", format!("{}: a loop over rows and keys", plan.kernel()))],
            fields: Vec::new(),
        }
    }
}

impl Backend for Reference {
    fn name(&self) -> String {
        Self::BACKEND.to_owned()
    }

    fn describe(&self) -> String {
        "scalar f64, one thread".to_owned()
    }

    fn facts(&self) -> AnyFacts {
        AnyFacts::new(*self)
    }

    fn session(&self, options: PlanOptions) -> Result<Box<dyn HostSession>> {
        Ok(Box::new(ReferenceSession { options }))
    }

    fn timed<'t>(
        &'t self,
        plan: &'t AnyPlan,
        inputs: &[Inputs<'t>],
        outputs: &Outputs<'_>,
    ) -> Result<Box<dyn TimedRun + 't>> {
        let (plan, inputs) = (plan_of::<ReferencePlan>(plan)?, *first(inputs)?);
        inputs::check(&plan.problem, &inputs, outputs)?;
        Ok(Box::new(ReferenceRun { problem: &plan.problem, inputs }))
    }
}

#[derive(Debug)]
struct ReferenceSession {
    options: PlanOptions,
}

impl HostSession for ReferenceSession {
    fn compute(&mut self, desc: &ProblemDesc, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>) -> Result<()> {
        let plan = Facts::plan(&Reference, &desc.clone().validate()?, self.options)?;
        compute(&plan.problem, inputs, outputs)
    }

    fn backward(
        &mut self,
        desc: &ProblemDesc,
        inputs: &BackwardInputs<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result<()> {
        let problem = desc.clone().validate()?;
        Facts::plan_backward(&Reference, &problem, self.options)?;
        gradients::check(&problem, inputs, gradients)?;
        let result = reference::backward(&problem, &inputs.forward, &inputs.d_out, inputs.d_lse)?;
        for (tensor, of) in [
            (&mut gradients.d_q, &result.d_q),
            (&mut gradients.d_k, &result.d_k),
            (&mut gradients.d_v, &result.d_v),
        ] {
            let [_, heads, rows, dim] = tensor.shape();
            for (n, row) in of.chunks_exact(dim).enumerate() {
                tensor.write_row([n / rows / heads, n / rows % heads, n % rows], row);
            }
        }
        for (list, of) in [
            (&mut gradients.d_sinks, &result.d_sinks),
            (&mut gradients.d_bias, &result.d_bias),
            (&mut gradients.d_alibi_slopes, &result.d_alibi_slopes),
        ] {
            list.iter_mut().flat_map(|list| list.iter_mut()).zip(of).for_each(|(to, &x)| *to = x as f32);
        }
        Ok(())
    }
}

struct ReferenceRun<'t> {
    problem: &'t Problem,
    inputs: Inputs<'t>,
}

impl TimedRun for ReferenceRun<'_> {
    fn launch(&mut self, outputs: &mut Outputs<'_>) -> Result<()> {
        compute(self.problem, &self.inputs, outputs)
    }
}

/// Computes in f64 and rounds once.
fn compute(problem: &Problem, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>) -> Result<()> {
    inputs::check(problem, inputs, outputs)?;
    let answer = reference::attention(problem, inputs).map_err(Error::Run)?;
    let [batch, heads, rows, dim] = outputs.out.shape();
    if dim > 0 {
        let mut values = answer.out.chunks_exact(dim);
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            for (row, values) in (0..rows).zip(&mut values) {
                outputs.out.write_row([b, h, row], values);
            }
        }
    }
    if let Some(lse) = &mut outputs.lse {
        for (slot, &x) in lse.iter_mut().zip(&answer.lse) {
            *slot = x as f32;
        }
    }
    Ok(())
}
