//! Plans of the kernels of the kernel language on CUDA devices.

use super::facts::{CudaFacts, NATIVE_CAPABILITY, RESERVED_SHARED};
use super::launch::MAX_GRID;
use flashtile_core::codec::Codec;
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::{PlanOptions, Unsupported};
use flashtile_core::problem::Problem;
use flashtile_gpu::facts::GpuFacts;
use flashtile_gpu::plan::Plan;
pub use flashtile_gpu::tile::PortableTile;

impl From<&CudaFacts> for GpuFacts {
    fn from(facts: &CudaFacts) -> Self {
        Self {
            cores: facts.multiprocessors,
            shared_per_group: facts.shared_per_block,
            shared_per_core: facts.shared_per_multiprocessor,
            reserved_shared: RESERVED_SHARED,
            registers_per_core: facts.registers_per_multiprocessor,
            multiplies_bf16: facts.capability >= NATIVE_CAPABILITY,
            max_groups: MAX_GRID,
        }
    }
}

/// The kernel of the kernel language on a CUDA device, specialised by these constants.
///
/// Its name is `cuda-prefill-{dtype}-d{head_dim}-portable`, or `cuda-decode-..` where keys are split and partial results merged, with `x{value_dim}` where that differs, `-{codec}` or
/// `-{k_codec}+{v_codec}` where keys and values are stored in others than the dtype, `-paged` where keys lie in pages, and `-bias` or `-mask`
/// where scores are modified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortableKernel {
    dtype: Dtype,
    head_dim: usize,
    value_dim: usize,
    codecs: [Codec; 2],
    tile: PortableTile,
    /// Whether keys lie in pages.
    pub(crate) paged: bool,
    /// Whether scores are modified: softcap, ALiBi, a tree mask, a mask.
    has_bias: bool,
    /// Whether there is a materialised mask.
    has_mask: bool,
}

impl PortableKernel {
    /// Head dimension.
    #[must_use]
    pub const fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Columns of v.
    #[must_use]
    pub const fn value_dim(&self) -> usize {
        self.value_dim
    }

    /// How a threadgroup divides its work.
    #[must_use]
    pub const fn tile(&self) -> &PortableTile {
        &self.tile
    }

    /// Bytes of shared memory of a threadgroup. Of decode: its queries or its outputs in f32, and what each row's scores need. Of prefill: a
    /// block of keys and one of values.
    #[must_use]
    pub const fn shared_bytes(&self) -> usize {
        self.tile.shared_bytes([self.head_dim, self.value_dim], self.dtype)
    }
}

impl std::fmt::Display for PortableKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let op = if self.tile.is_prefill() { "prefill" } else { "decode" };
        write!(f, "cuda-{op}-{}-d{}", self.dtype, self.head_dim)?;
        if self.value_dim != self.head_dim {
            write!(f, "x{}", self.value_dim)?;
        }
        match self.codecs {
            [k, v] if [k, v] == [Codec::of(self.dtype); 2] => {}
            [k, v] if k == v => write!(f, "-{k}")?,
            [k, v] => write!(f, "-{k}+{v}")?,
        }
        f.write_str("-portable")?;
        if self.paged {
            f.write_str("-paged")?;
        }
        f.write_str(match (self.has_mask, self.has_bias) {
            (true, _) => "-mask",
            (false, true) => "-bias",
            (false, false) => "",
        })
    }
}

/// A plan of the portable kernel.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Portable {
    pub(crate) kernel: PortableKernel,
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
        let (dims, desc) = (problem.dims(), problem.desc());
        let has_mask = desc.mask.is_some();
        let kernel = PortableKernel {
            dtype: problem.dtype(),
            head_dim: dims.head_dim,
            value_dim: dims.value_dim,
            codecs: [problem.k_codec(), problem.v_codec()],
            tile: *plan.tile(),
            paged: problem.is_cached(),
            has_bias: has_mask || desc.softcap.is_some() || desc.alibi || desc.tree,
            has_mask,
        };
        Ok(Self { kernel, plan })
    }
}

impl std::fmt::Display for Portable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (tile, groups, splits) = (&self.kernel.tile, self.plan.groups(), self.plan.splits());
        write!(f, "{} tile {}x{} groups {groups} splits {splits}", self.kernel, tile.rows(), tile.keys())
    }
}
