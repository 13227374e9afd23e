//! Arguments of any backend, given to one.

use crate::error::{Error, Result};
use flashtile_core::inputs::{Inputs, RunError};
use flashtile_core::plan::{AnyPlan, Plan};

/// The plan inside, if it is one of this backend's.
pub(super) fn plan_of<P: Plan>(plan: &AnyPlan) -> Result<&P> {
    plan.of().ok_or_else(|| Error::Run(RunError::OtherBackend { kernel: plan.kernel() }))
}

/// The first of the inputs of a timed run.
pub(super) fn first<'a, 't>(inputs: &'a [Inputs<'t>]) -> Result<&'a Inputs<'t>> {
    inputs.first().ok_or(Error::Run(RunError::Length { tensor: "inputs", expected: 1, got: 0 }))
}
