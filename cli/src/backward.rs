//! The plan of a backward pass: that of the kernels which compute it, or the reference's loop.

use crate::failure::{Failure, Result};
use crate::machine::Work;
use crate::report;
use flashtile::plan::CpuFacts;
use flashtile::{AnyPlan, Backend, CpuBackwardPlan, Problem, Unit};
use serde_json::{Value, json};

/// The plan of the backward pass of a problem.
pub(crate) struct BackwardPlan {
    problem: Problem,
    kernel: String,
    /// `None` for the reference, which computes all in one loop.
    cpu: Option<CpuBackwardPlan>,
}

impl BackwardPlan {
    /// The backward pass of a problem with a plan of the forward pass, for the same machine and options. `asked` is the option or the
    /// group of rows that needs it.
    ///
    /// # Errors
    /// If the problem or the backend has none.
    pub(crate) fn new(asked: &str, forward: &AnyPlan) -> Result<Self> {
        let problem = forward.problem().clone();
        if let Some(why) = problem.no_gradients() {
            return Err(Failure::at(asked, why));
        }
        if let Some(facts) = forward.facts().of::<CpuFacts>() {
            let plan = CpuBackwardPlan::new(&problem, facts, forward.options());
            let plan = plan.map_err(|why| Failure::at(asked, why))?;
            return Ok(Self { problem, kernel: plan.kernel(), cpu: Some(plan) });
        }
        match forward.backend() {
            "reference" => {
                let kernel = forward.kernel().replacen("reference", "reference-backward", 1);
                Ok(Self { problem, kernel, cpu: None })
            }
            backend => Err(Failure::at(asked, without(backend))),
        }
    }

    /// Name of the kernel.
    pub(crate) fn kernel(&self) -> &str {
        &self.kernel
    }

    /// The unit that computes the products, if it is compared with the hardware; `forward` is the plan of the forward pass.
    pub(crate) fn unit(&self, backend: &dyn Backend, forward: &AnyPlan) -> Option<Unit> {
        let plan = self.cpu.as_ref()?;
        let (name, threads) = (plan.isa().name().to_owned(), Some(plan.threads()));
        Some(Unit { name, threads, ..backend.unit(forward)? })
    }

    /// The operations, and the bytes of keys and values, which are read at least once.
    pub(crate) fn work(&self, forward: &AnyPlan) -> Work {
        Work { flops: self.problem.backward_flops(), bytes: forward.kv_bytes() }
    }

    /// The plan in one line.
    pub(crate) fn words(&self) -> String {
        let (kernel, flops) = (self.kernel(), report::flops(self.problem.backward_flops()));
        let Some(plan) = &self.cpu else {
            return format!("{kernel}: a loop over rows and keys, {flops}");
        };
        format!(
            "{kernel}: {} in tiles of {} rows by {} keys, {}, {}, workspace {}, {flops}",
            report::counted(plan.task_count(), "task"),
            plan.tile_rows(),
            plan.block_k(),
            report::counted(plan.level_count(), "level"),
            report::counted(plan.workers(), "worker"),
            report::bytes(plan.workspace_bytes() as f64),
        )
    }

    /// The fields of the plan.
    pub(crate) fn json(&self) -> Value {
        let cpu = self.cpu.as_ref();
        json!({
            "kernel": self.kernel(),
            "tasks": cpu.map_or(1, CpuBackwardPlan::task_count),
            "levels": cpu.map_or(1, CpuBackwardPlan::level_count),
            "threads": cpu.map_or(1, CpuBackwardPlan::workers),
            "tile_rows": cpu.map(CpuBackwardPlan::tile_rows),
            "block_k": cpu.map(CpuBackwardPlan::block_k),
            "workspace_bytes": cpu.map_or(0, CpuBackwardPlan::workspace_bytes),
            "flops": self.problem.backward_flops(),
        })
    }
}

/// Why a backend computes no gradients.
pub(crate) fn without(backend: &str) -> String {
    format!("the {backend} backend has no backward kernels, expected --backend auto, cpu or reference")
}
