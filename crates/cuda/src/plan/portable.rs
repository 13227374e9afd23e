//! Plans of the kernels of the kernel language on CUDA devices.

use super::facts::{CudaFacts, NATIVE_CAPABILITY, RESERVED_SHARED};
use super::kernel::CudaKernel;
use super::launch::{MAX_BLOCK_THREADS, MAX_GRID};
use flashtile_core::plan::{PlanOptions, Unsupported};
use flashtile_core::problem::Problem;
use flashtile_gpu::facts::GpuFacts;
use flashtile_gpu::plan::Plan;
use flashtile_gpu::portable_kernel::PortableKernel;
pub use flashtile_gpu::tile::PortableTile;

/// Registers of a thread, 255, as they are allocated (CUDA Programming Guide, "technical specifications per compute capability").
const MAX_THREAD_REGISTERS: usize = 256;

impl From<&CudaFacts> for GpuFacts {
    fn from(facts: &CudaFacts) -> Self {
        Self {
            cores: facts.multiprocessors,
            simds_per_core: facts.threads_per_multiprocessor / 32,
            threads_per_group: MAX_BLOCK_THREADS,
            shared_per_group: facts.shared_per_block,
            shared_per_core: facts.shared_per_multiprocessor,
            reserved_shared: RESERVED_SHARED,
            registers_per_core: facts.registers_per_multiprocessor,
            registers_per_thread: MAX_THREAD_REGISTERS,
            multiplies_f32: false,
            multiplies_bf16: facts.capability >= NATIVE_CAPABILITY,
            rereads_in_cache: true,
            max_groups: MAX_GRID,
        }
    }
}

/// A plan of the portable kernel.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Portable {
    pub(crate) kernel: CudaKernel,
    pub(crate) plan: Plan,
}

impl Portable {
    pub(super) fn new(
        problem: &Problem,
        facts: &CudaFacts,
        options: PlanOptions,
        asked: Option<PortableTile>,
    ) -> Result<Self, Unsupported> {
        let plan = Plan::new(problem, &facts.into(), options, asked)?;
        let (tile, dims) = (plan.tile(), problem.dims());
        let kernel = PortableKernel::new("cuda", problem, *tile);
        let kernel = CudaKernel {
            name: kernel.to_string(),
            is_portable: true,
            uses_wgmma: false,
            head_dim: dims.head_dim,
            value_dim: dims.value_dim,
            rows: tile.rows(),
            keys: tile.keys(),
            threads: tile.threads(),
            key_stages: 0,
            stages: 0,
            resident: tile.resident(),
            warps_split_keys: !tile.is_prefill(),
            shared_bytes: kernel.shared_bytes(),
        };
        Ok(Self { kernel, plan })
    }
}
