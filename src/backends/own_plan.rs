//! Plans of any backend, given to one.

use crate::error::{Error, Result};
use flashtile_core::inputs::RunError;
use flashtile_core::plan::{AnyPlan, Plan};

/// The plan inside, if it is one of this backend's.
pub(super) fn plan_of<P: Plan>(plan: &AnyPlan) -> Result<&P> {
    plan.of().ok_or_else(|| Error::Run(RunError::Machine { kernel: plan.kernel() }))
}
