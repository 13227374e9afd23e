//! The constants of native kernels of every architecture beside their tiles, and what follows from them: names, the shared memory of a
//! row.

use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::Problem;

/// The largest scale that kernels fold into the exponential, `2^(x * scale - max * scale)`. The second product is rounded and the first is
/// not: scores above 2^31 leave a difference that overflows. Larger scales are multiplied before.
const MAX_FUSED_SCALE: f32 = 1024.0;

/// The constants of a native kernel beside its tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NativeVariant {
    pub(crate) dtype: Dtype,
    /// Head dimension, rounded up.
    pub(crate) head_dim: usize,
    /// Columns of v that a work tile computes, rounded up; wider values are cut into panels.
    pub(crate) value_dim: usize,
    /// True if keys lie in pages.
    pub(crate) paged: bool,
    /// True if the kernel modifies scores before the softmax: for softcap, ALiBi, a tree mask, a mask, or a scale that is not positive or
    /// exceeds 2^10.
    pub(crate) has_bias: bool,
    /// True if there is a materialised mask.
    pub(crate) has_mask: bool,
}

impl NativeVariant {
    /// The constants for a problem, with dimensions that its kernels are compiled for.
    pub(super) fn new(problem: &Problem, head_dim: usize, value_dim: usize) -> Self {
        let (desc, scale) = (problem.desc(), problem.scale());
        let has_mask = desc.mask.is_some();
        let fuses_scale = scale > 0.0 && scale <= MAX_FUSED_SCALE;
        let has_bias = has_mask || desc.softcap.is_some() || desc.alibi || desc.tree || !fuses_scale;
        Self { dtype: problem.dtype(), head_dim, value_dim, paged: problem.is_cached(), has_bias, has_mask }
    }

    /// The name of the kernel with a tile of `rows` and `keys`, which `products` multiply, as
    /// [`CudaKernel::name`](super::kernel::CudaKernel::name) says.
    pub(super) fn name(&self, op: &str, products: &str, rows: usize, keys: usize) -> String {
        let Self { dtype, head_dim, value_dim, paged, has_bias, has_mask } = *self;
        let columns = if value_dim == head_dim { String::new() } else { format!("x{value_dim}") };
        let pages = if paged { "-paged" } else { "" };
        let scores = match (has_mask, has_bias) {
            (true, _) => "-mask",
            (false, true) => "-bias",
            (false, false) => "",
        };
        format!("cuda-{op}-{dtype}-d{head_dim}{columns}-{products}{rows}x{keys}{pages}{scores}")
    }
}

/// Bytes of a row's mask in shared memory: of the keys that it sees, and of its bias.
pub(super) const fn row_mask_bytes(has_bias: bool) -> usize {
    if has_bias { 40 } else { 8 }
}

/// The first tile whose shared memory fits the device.
pub(super) fn first_that_fits<T: Copy>(
    tiles: &[T],
    shared_bytes: impl Fn(&T) -> usize,
    available: usize,
) -> Result<T, Unsupported> {
    let needed = tiles.iter().map(&shared_bytes).min().unwrap_or(0);
    let fits = tiles.iter().find(|tile| shared_bytes(tile) <= available);
    fits.copied().ok_or(Unsupported::SharedMemory { needed, available })
}
