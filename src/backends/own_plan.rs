//! Plans and arguments of any backend, given to one, and names of kernels.

use crate::error::{Error, Result};
use flashtile_core::inputs::{Inputs, RunError};
use flashtile_core::plan::{AnyBackwardPlan, AnyPlan, BackwardPlan, Plan};
use flashtile_core::problem::Problem;

/// The plan inside, if it is one of this backend's.
pub(super) fn plan_of<P: Plan>(plan: &AnyPlan) -> Result<&P> {
    plan.of().ok_or_else(|| Error::Run(RunError::OtherBackend { kernel: plan.kernel() }))
}

/// The backward plan inside, if it is one of this backend's.
pub(super) fn backward_plan_of<P: BackwardPlan>(plan: &AnyBackwardPlan) -> Result<&P> {
    plan.of().ok_or_else(|| Error::Run(RunError::OtherBackend { kernel: plan.kernel() }))
}

/// The first of the inputs of a timed run.
pub(super) fn first<'a, 't>(inputs: &'a [Inputs<'t>]) -> Result<&'a Inputs<'t>> {
    inputs.first().ok_or(Error::Run(RunError::Length { tensor: "inputs", expected: 1, got: 0 }))
}

/// The name of an implementation that every machine has: `reference-f32-d64`, with `x{value_dim}` where that differs.
pub(super) fn kernel_name(implementation: &str, problem: &Problem) -> String {
    let (dtype, dims) = (problem.dtype(), problem.dims());
    let value = if dims.value_dim == dims.head_dim { String::new() } else { format!("x{}", dims.value_dim) };
    format!("{implementation}-{dtype}-d{}{value}", dims.head_dim)
}
