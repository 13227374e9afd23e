//! [`Plan`] and [`Facts`] of CUDA devices: rates that they reach, and their plans in words.

use super::backward::CudaBackwardPlan;
use super::cuda_plan::CudaPlan;
use super::facts::{CudaFacts, NATIVE_CAPABILITY};
use super::kernel::CudaKernel;
use flashtile_core::dtype::Dtype;
use flashtile_core::human::{bytes, counted};
use flashtile_core::plan::{
    AnyBackwardPlan, Explanation, Facts, Field, KernelChoice, Plan, PlanOptions, Rates, TileSize, Unsupported,
};
use flashtile_core::problem::{Problem, Sequence};
use flashtile_core::quality::Accumulation;
use flashtile_gpu::plan::prefix_line;

impl Plan for CudaPlan {
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

    /// Of several kernels, the tile of the one with the smallest tile that holds all rows of a GQA group, or with the largest
    /// tile.
    fn tile(&self, sequence: &Sequence) -> TileSize {
        let rows = sequence.q_len.saturating_mul(self.problem().dims().gqa_group());
        let size = |kernel: &CudaKernel| (kernel.rows, kernel.keys);
        let mut tiles: Vec<_> = self.kernels().map(size).collect();
        tiles.sort_unstable();
        let holds = tiles.iter().find(|tile| tile.0 >= rows);
        // A plan without query rows launches no kernel.
        let (rows, keys) = holds.or(tiles.last()).copied().unwrap_or((16, 64));
        TileSize { rows, keys }
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::of_cuda(self.problem().dtype())
    }

    fn kernel_choice(&self) -> Option<KernelChoice> {
        Some(if is_portable(self) { KernelChoice::Portable } else { KernelChoice::Native })
    }
}

fn is_portable(plan: &CudaPlan) -> bool {
    plan.kernels().any(|kernel| kernel.is_portable)
}

/// [`Rates::start`]: launches, copies and the wait for the result.
const START: f64 = 50e-6;

/// Bytes per second between pageable host memory and a device, over PCIe.
const PCIE_BANDWIDTH: f64 = 10e9;

/// Bytes per second that a multiprocessor reads from the memory of its device.
const MULTIPROCESSOR_BANDWIDTH: f64 = 8e9;

/// Floating-point operations per second of one multiprocessor in prefill.
const fn multiprocessor_flops(dtype: Dtype, portable: bool) -> f64 {
    match (dtype, portable) {
        (Dtype::F16 | Dtype::BF16, false) => 1e12,
        (Dtype::F16 | Dtype::BF16, true) => 0.3e12,
        (Dtype::F32, false) => 0.15e12,
        (Dtype::F32, true) => 0.03e12,
    }
}

impl Facts for CudaFacts {
    type Plan = CudaPlan;

    const BACKEND: &'static str = "cuda";

    fn plan(&self, problem: &Problem, options: PlanOptions) -> Result<CudaPlan, Unsupported> {
        CudaPlan::new(problem, self, options)
    }

    fn plan_backward(&self, problem: &Problem, options: PlanOptions) -> Result<AnyBackwardPlan, Unsupported> {
        CudaBackwardPlan::new(problem, self, options).map(AnyBackwardPlan::new)
    }

    fn rates(&self, plan: &CudaPlan) -> Rates {
        let multiprocessors = self.multiprocessors.max(1) as f64;
        Rates {
            start: START,
            copy: PCIE_BANDWIDTH,
            flops: multiprocessors * multiprocessor_flops(plan.problem().dtype(), is_portable(plan)),
            bandwidth: multiprocessors * MULTIPROCESSOR_BANDWIDTH,
        }
    }

    fn explain(&self, plan: &CudaPlan) -> Explanation {
        let (major, minor) = self.capability;
        let machine = format!(
            "compute capability {major}.{minor}, {} multiprocessors, {} of shared memory per block, L2 {}",
            self.multiprocessors,
            bytes(self.shared_per_block as f64),
            bytes(self.l2 as f64)
        );
        let of_kernel = |kernel| {
            [("kernel", format!("{kernel}: {}", reason(self, plan, kernel))), ("tiles", tiles(kernel))]
        };
        let mut lines: Vec<_> = plan.kernels().flat_map(of_kernel).collect();
        lines.push(("work tiles", plan.task_count().to_string()));
        lines.push(("splits", format!("{} at most: {}", plan.splits(), splits_reason(plan))));
        lines.extend(prefix_line(plan.problem()));
        let fields = vec![
            ("capability", Field::from_iter([major as usize, minor as usize])),
            ("multiprocessors", self.multiprocessors.into()),
            ("l2", self.l2.into()),
            ("kernels", plan.kernels().map(fields).collect()),
        ];
        Explanation { machine, lines, fields }
    }
}

/// Why a plan has a kernel.
fn reason(facts: &CudaFacts, plan: &CudaPlan, kernel: &CudaKernel) -> String {
    if kernel.is_portable {
        if plan.options().kernels == KernelChoice::Portable {
            "asked for".to_owned()
        } else if facts.capability < NATIVE_CAPABILITY {
            "native kernels are for compute capability 8.0 and later".to_owned()
        } else {
            format!("native kernels read {} only", plan.problem().dtype())
        }
    } else if kernel.warps_split_keys {
        let heads = counted(plan.problem().dims().gqa_group(), "query head");
        format!("sequences with at most 16 rows ({heads} per GQA group)")
    } else if kernel.uses_wgmma {
        "sequences with more than 16 rows, and some with more than the 64 of a warpgroup".to_owned()
    } else {
        "sequences with more rows than a fragment of the matrix unit has".to_owned()
    }
}

/// The tile of a kernel, and what a block of threads takes.
fn tiles(kernel: &CudaKernel) -> String {
    let CudaKernel { rows, keys, threads, key_stages, stages, resident, is_portable, .. } = *kernel;
    let size = bytes(kernel.shared_bytes as f64);
    let shared = if is_portable {
        format!("{size} of shared memory")
    } else if key_stages != stages {
        format!("{key_stages} of keys and {stages} of values in shared memory at a time ({size})")
    } else {
        format!("{stages} in shared memory at a time ({size})")
    };
    let blocks = counted(resident, if is_portable { "threadgroup" } else { "block" });
    format!("{rows} rows x {keys} keys, {shared}, {threads} threads, {blocks} per multiprocessor")
}

fn splits_reason(plan: &CudaPlan) -> &'static str {
    if plan.options().splits.is_some() {
        "asked for"
    } else if is_portable(plan) && plan.splits() > 1 {
        "as many threadgroups as the device runs at once"
    } else if plan.splits() == 1 {
        "tiles fill the device without splits, or see one block of keys each"
    } else {
        "tiles, or the last ones of a queue, are cut along their keys so that no thread block waits long"
    }
}

fn fields(kernel: &CudaKernel) -> Field {
    let mut fields: Vec<(&'static str, Field)> = vec![
        ("kernel", kernel.name.clone().into()),
        ("tile_rows", kernel.rows.into()),
        ("block_k", kernel.keys.into()),
        ("threads", kernel.threads.into()),
        ("resident", kernel.resident.into()),
        ("shared_bytes", kernel.shared_bytes.into()),
    ];
    fields.extend((kernel.stages > 0).then(|| ("stages", kernel.stages.into())));
    fields.into()
}
