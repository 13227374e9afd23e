//! Plans of the backward pass as every backend of a GPU reports them.

use super::plan::PortableBackwardPlan;
use super::tile::TileShape;
use crate::facts::GpuFacts;
use flashtile_core::plan::{BackwardPlan, Field, PlanOptions, Unsupported};
use flashtile_core::problem::Problem;
use std::fmt;

/// A plan of the backward pass for a backend, by the portable kernels.
///
/// The name of its kernels is `{backend}-backward-{dtype}-d{head_dim}-portable`, with `x{value_dim}` where that differs.
#[derive(Debug, Clone)]
pub struct GpuBackwardPlan {
    /// The prefix of kernel names, such as `cuda`.
    backend: &'static str,
    options: PlanOptions,
    plan: PortableBackwardPlan,
}

impl GpuBackwardPlan {
    /// Plans the backward pass of a problem for a device of a backend. Pure; cost `O(sequences)`.
    ///
    /// # Errors
    /// The errors of [`PortableBackwardPlan::new`].
    pub fn new(
        backend: &'static str,
        problem: &Problem,
        facts: &GpuFacts,
        options: PlanOptions,
    ) -> Result<Self, Unsupported> {
        Ok(Self { backend, options, plan: PortableBackwardPlan::new(problem, facts, options)? })
    }

    /// A plan of a backend's, however it was made.
    #[must_use]
    pub const fn of(backend: &'static str, options: PlanOptions, plan: PortableBackwardPlan) -> Self {
        Self { backend, options, plan }
    }

    /// The plan as one of other options, which a backend with further kernels has.
    #[must_use]
    pub fn with_options(self, options: PlanOptions) -> Self {
        Self { options, ..self }
    }

    /// The tile of the gradient of a mask, where the problem has an additive one.
    fn bias(&self) -> Option<TileShape> {
        self.plan.bias.as_ref().and(self.plan.tile().bias)
    }

    /// The plan of the portable kernels.
    #[must_use]
    pub const fn portable(&self) -> &PortableBackwardPlan {
        &self.plan
    }
}

impl BackwardPlan for GpuBackwardPlan {
    fn problem(&self) -> &Problem {
        self.plan.problem()
    }

    fn options(&self) -> PlanOptions {
        self.options
    }

    fn kernel(&self) -> String {
        let problem = self.plan.problem();
        let (dtype, d) = (problem.dtype(), problem.dims());
        let value = if d.value_dim == d.head_dim { String::new() } else { format!("x{}", d.value_dim) };
        format!("{}-backward-{dtype}-d{}{value}-portable", self.backend, d.head_dim)
    }

    fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes()
    }

    fn task_count(&self) -> usize {
        self.plan.task_count()
    }

    fn words(&self) -> String {
        let (q, kv) = (self.plan.tile().q, self.plan.tile().kv);
        let mut words = format!(
            "{} threadgroups in tiles of {} rows by {} keys for d_q, of {} keys by {} rows for d_k and d_v",
            self.task_count(),
            q.rows(),
            q.block_rows(),
            kv.rows(),
            kv.block_rows()
        );
        if let Some(bias) = self.bias() {
            words += &format!(", of {} rows by {} keys of a mask for d_bias", bias.rows(), bias.block_rows());
        }
        words
    }

    fn fields(&self) -> Vec<(&'static str, Field)> {
        let (q, kv) = (self.plan.tile().q, self.plan.tile().kv);
        let mut fields = vec![
            ("d_q_tile_rows", q.rows().into()),
            ("d_q_block_k", q.block_rows().into()),
            ("d_q_threads", (32 * q.simds).into()),
            ("d_kv_tile_keys", kv.rows().into()),
            ("d_kv_block_rows", kv.block_rows().into()),
            ("d_kv_threads", (32 * kv.simds).into()),
        ];
        if let Some(bias) = self.bias() {
            fields.push(("d_bias_tile_rows", bias.rows().into()));
            fields.push(("d_bias_block_k", bias.block_rows().into()));
            fields.push(("d_bias_threads", (32 * bias.simds).into()));
        }
        fields
    }
}

impl fmt::Display for GpuBackwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (q, kv) = (self.plan.tile().q, self.plan.tile().kv);
        write!(
            f,
            "{} tiles {}x{} {}x{}",
            self.kernel(),
            q.rows(),
            q.block_rows(),
            kv.rows(),
            kv.block_rows()
        )?;
        if let Some(bias) = self.bias() {
            write!(f, " bias {}x{}", bias.rows(), bias.block_rows())?;
        }
        write!(f, " groups {} workspace {}", self.task_count(), self.workspace_bytes())
    }
}
