//! [`Plan`] and [`Facts`] of Metal devices: rates that they reach, and their plans in words.

use crate::facts::MetalFacts;
use crate::plan::MetalPlan;
use flashtile_core::dtype::Dtype;
use flashtile_core::human::bytes;
use flashtile_core::plan::{
    AnyBackwardPlan, Explanation, Facts, Plan, PlanOptions, Rates, TileSize, Unsupported,
};
use flashtile_core::problem::{Problem, Sequence};
use flashtile_core::quality::Accumulation;
use flashtile_gpu::backward::planner::GpuBackwardPlan;
use flashtile_gpu::plan::prefix_line;

impl Plan for MetalPlan {
    fn problem(&self) -> &Problem {
        self.problem()
    }

    fn options(&self) -> PlanOptions {
        self.options()
    }

    fn kernel(&self) -> String {
        self.kernel()
    }

    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes()
    }

    fn splits(&self) -> usize {
        self.splits()
    }

    fn task_count(&self) -> usize {
        self.task_count()
    }

    fn tile(&self, _: &Sequence) -> TileSize {
        TileSize { rows: self.tile().rows(), keys: self.tile().keys() }
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::of_cuda(self.problem().dtype())
    }
}

/// [`Rates::start`]: a command buffer from its commit to the end of the wait takes 0.1 to 0.2 ms. None of the numbers of these devices was
/// measured by flashtile.
const START: f64 = 200e-6;

/// Bytes per second of a copy inside of unified memory by one core of the processor.
const COPY_BANDWIDTH: f64 = 20e9;

/// Bytes per second that a GPU core reads: an M1 of 8 cores has 68 GB/s, an M3 Max of 40 cores 400 GB/s (Apple newsroom).
const CORE_BANDWIDTH: f64 = 8e9;

/// Floating-point operations per second of one GPU core in prefill: a third to a half of an M1's, of 2.6e12 in f32 by 8 cores (Apple
/// newsroom).
const fn core_flops(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 | Dtype::BF16 => 0.15e12,
        Dtype::F32 => 0.1e12,
    }
}

impl Facts for MetalFacts {
    type Plan = MetalPlan;

    const BACKEND: &'static str = "metal";

    fn plan(&self, problem: &Problem, options: PlanOptions) -> Result<MetalPlan, Unsupported> {
        MetalPlan::new(problem, self, options)
    }

    fn plan_backward(&self, problem: &Problem, options: PlanOptions) -> Result<AnyBackwardPlan, Unsupported> {
        GpuBackwardPlan::new(Self::BACKEND, problem, self, options).map(AnyBackwardPlan::new)
    }

    fn rates(&self, plan: &MetalPlan) -> Rates {
        let cores = self.cores.max(1) as f64;
        Rates {
            start: START,
            copy: COPY_BANDWIDTH,
            flops: cores * core_flops(plan.problem().dtype()),
            bandwidth: cores * CORE_BANDWIDTH,
        }
    }

    fn explain(&self, plan: &MetalPlan) -> Explanation {
        let size = |n: usize| bytes(n as f64);
        let (tile, shared) = (plan.tile(), plan.threadgroup_bytes());
        let (rows, keys, threads) = (tile.rows(), tile.keys(), 32 * tile.simds());
        let reason = match (plan.options().splits, plan.splits()) {
            (Some(_), _) => "asked for",
            (None, 1) => "threadgroups fill the device without splits",
            (None, _) => "as many threadgroups as the device runs at once",
        };
        Explanation {
            machine: format!(
                "{} GPU cores, {} threads and {} of memory a threadgroup",
                self.cores,
                self.threads_per_group,
                size(self.shared_per_group)
            ),
            lines: [
                ("kernel", plan.kernel()),
                (
                    "tiles",
                    format!(
                        "{rows} rows x {keys} keys, {} of threadgroup memory, {threads} threads",
                        size(shared)
                    ),
                ),
                ("groups", format!("{} threadgroups", plan.task_count())),
                ("splits", format!("{}: {reason}", plan.splits())),
            ]
            .into_iter()
            .chain(prefix_line(plan.problem()))
            .collect(),
            fields: vec![
                ("cores", self.cores.into()),
                ("threads_per_group", self.threads_per_group.into()),
                ("tile_rows", rows.into()),
                ("block_k", keys.into()),
                ("threads", threads.into()),
                ("shared_bytes", shared.into()),
            ],
        }
    }
}
