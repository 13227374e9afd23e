//! Properties of native kernels of every architecture: when they modify scores, the shared memory of a row,
//! and their names.

use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::Problem;

/// The largest scale that kernels fold into the exponential, `2^(x * scale - max * scale)`. The second product is rounded and the first is
/// not: scores above 2^31 leave a difference that overflows. Larger scales are multiplied before.
const MAX_FUSED_SCALE: f32 = 1024.0;

/// True if kernels modify scores before the softmax: for softcap, ALiBi, a tree mask, a mask, or a scale that is not positive or exceeds
/// 2^10.
pub(super) fn has_bias(problem: &Problem) -> bool {
    let desc = problem.desc();
    desc.mask.is_some()
        || desc.softcap.is_some()
        || desc.alibi
        || desc.tree
        || !(0.0..=MAX_FUSED_SCALE).contains(&problem.scale())
        || problem.scale() == 0.0
}

/// Bytes of a row's mask in shared memory: of the keys that it sees, and of its bias.
pub(super) const fn row_mask_bytes(has_bias: bool) -> usize {
    if has_bias { 40 } else { 8 }
}

/// The first kernel whose shared memory fits the device.
pub(super) fn first_that_fits<K>(
    kernels: impl Iterator<Item = K> + Clone,
    shared_bytes: impl Fn(&K) -> usize,
    available: usize,
) -> Result<K, Unsupported> {
    let needed = kernels.clone().map(|kernel| shared_bytes(&kernel)).min().unwrap_or(0);
    let mut kernels = kernels;
    kernels
        .find(|kernel| shared_bytes(kernel) <= available)
        .ok_or(Unsupported::SharedMemory { needed, available })
}

/// The name of a native kernel by [`Display`](std::fmt::Display): `cuda-{op}-{dtype}-d{head_dim}-{variant}`, with `x{value_dim}` where
/// that differs. The variant is `{products}{rows}x{keys}`, then `-paged` where keys lie in pages, and `-bias` or `-mask` where scores
/// are modified.
pub(super) struct NativeName {
    pub(super) op: &'static str,
    pub(super) dtype: Dtype,
    pub(super) head_dim: usize,
    pub(super) value_dim: usize,
    /// The instructions that multiply.
    pub(super) products: &'static str,
    pub(super) rows: usize,
    pub(super) keys: usize,
    pub(super) paged: bool,
    pub(super) has_bias: bool,
    pub(super) has_mask: bool,
}

impl std::fmt::Display for NativeName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda-{}-{}-d{}", self.op, self.dtype, self.head_dim)?;
        if self.value_dim != self.head_dim {
            write!(f, "x{}", self.value_dim)?;
        }
        write!(f, "-{}{}x{}", self.products, self.rows, self.keys)?;
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
