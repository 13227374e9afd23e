//! Plans of the backward pass of any backend.

use super::explanation::Field;
use super::options::PlanOptions;
use crate::problem::Problem;
use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// Kernels, tiles and memory sizes that compute the gradients of one problem on one kind of device.
/// [`Display`](fmt::Display) is one line: kernel, tiles, units of work and workspace.
pub trait BackwardPlan: Any + fmt::Debug + fmt::Display + Send + Sync {
    /// The problem whose gradients the plan computes.
    fn problem(&self) -> &Problem;

    /// The options that it was made with.
    fn options(&self) -> PlanOptions;

    /// Name of the kernels: `cpu-backward-f32-d64-avx2`.
    fn kernel(&self) -> String;

    /// Bytes of memory that a run needs beside its tensors: host memory on the CPU, device memory on a device.
    fn workspace_bytes(&self) -> usize {
        0
    }

    /// Units of work: tasks of the CPU, threadgroups of a device.
    fn task_count(&self) -> usize {
        1
    }

    /// How the work is divided, for people: `8 tasks in tiles of 64 rows by 128 keys, 1 level, 2 workers`.
    fn words(&self) -> String;

    /// Sizes of the plan beside those that every plan has.
    fn fields(&self) -> Vec<(&'static str, Field)> {
        Vec::new()
    }
}

/// A [`BackwardPlan`] of any backend. A clone refers to the same plan.
///
/// ```
/// use flashtile::plan::{AnyFacts, machines};
/// use flashtile::{CpuBackwardPlan, Dims, Dtype, PlanOptions, ProblemDesc};
/// let dims = Dims { batch: 1, q_heads: 8, kv_heads: 2, q_len: 64, kv_len: 64, head_dim: 64, value_dim: 64 };
/// let problem = ProblemDesc::new(dims, Dtype::F32).validate()?;
/// let plan = AnyFacts::new(machines::AVX2_8).plan_backward(&problem, PlanOptions::default())?;
/// assert_eq!(plan.kernel(), "cpu-backward-f32-d64-avx2");
/// assert!(plan.of::<CpuBackwardPlan>().is_some_and(|plan| plan.threads() == 8));
/// # Ok::<(), flashtile::Error>(())
/// ```
#[derive(Clone)]
pub struct AnyBackwardPlan(Arc<dyn BackwardPlan>);

impl AnyBackwardPlan {
    /// A plan of any backend.
    #[must_use]
    pub fn new(plan: impl BackwardPlan) -> Self {
        Self(Arc::new(plan))
    }

    /// The plan, if it is of this type.
    #[must_use]
    pub fn of<P: BackwardPlan>(&self) -> Option<&P> {
        let plan: &dyn Any = &*self.0;
        plan.downcast_ref()
    }
}

impl Deref for AnyBackwardPlan {
    type Target = dyn BackwardPlan;

    fn deref(&self) -> &dyn BackwardPlan {
        &*self.0
    }
}

impl fmt::Debug for AnyBackwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

impl fmt::Display for AnyBackwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&*self.0, f)
    }
}
