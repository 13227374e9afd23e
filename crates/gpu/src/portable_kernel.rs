//! Names of the portable kernels in plans and reports.

use crate::tile::PortableTile;
use crate::variant::Variant;
use flashtile_core::codec::Codec;
use flashtile_core::problem::Problem;

/// The kernel of the kernel language that a plan starts with, specialised by these constants.
///
/// Its name is `{backend}-prefill-{dtype}-d{head_dim}-portable` or `{backend}-decode-..`, with `x{value_dim}` where that differs, `-{codec}` or
/// `-{k_codec}+{v_codec}` where keys and values are stored in others than the dtype, `-paged` where keys lie in pages, and `-bias` or `-mask`
/// where scores are modified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortableKernel {
    /// The prefix of kernel names, such as `cuda`.
    backend: &'static str,
    variant: Variant,
    tile: PortableTile,
    /// True if keys lie in pages.
    paged: bool,
    /// True if scores are modified: softcap, ALiBi, a tree mask, a mask.
    has_bias: bool,
    /// True if there is a materialised mask.
    has_mask: bool,
}

impl PortableKernel {
    /// The kernel of a problem on a backend, with a tile.
    #[must_use]
    pub fn new(backend: &'static str, problem: &Problem, tile: PortableTile) -> Self {
        let desc = problem.desc();
        let has_mask = desc.mask.is_some();
        Self {
            backend,
            variant: Variant::of(problem),
            tile,
            paged: problem.is_cached(),
            has_bias: has_mask || desc.softcap.is_some() || desc.alibi || desc.tree,
            has_mask,
        }
    }

    /// Bytes of shared memory of a threadgroup.
    #[must_use]
    pub fn shared_bytes(&self) -> usize {
        self.tile.instance(&self.variant).map_or(0, |instance| instance.shared_bytes())
    }
}

impl std::fmt::Display for PortableKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Variant { dtype, head_dim, value_dim, k_codec, v_codec } = self.variant;
        let op = if self.tile.is_prefill() { "prefill" } else { "decode" };
        write!(f, "{}-{op}-{dtype}-d{head_dim}", self.backend)?;
        if value_dim != head_dim {
            write!(f, "x{value_dim}")?;
        }
        match [k_codec, v_codec] {
            [k, v] if [k, v] == [Codec::of(dtype); 2] => {}
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
