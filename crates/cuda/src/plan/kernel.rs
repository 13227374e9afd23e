//! Kernels of plans, as data.

/// A kernel of a plan. [`Display`](std::fmt::Display) is its name.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaKernel {
    /// `cuda-{prefill|decode}-{dtype}-d{head_dim}-{variant}`, with `x{value_dim}` where that differs. The variant of a native kernel is
    /// `mma{rows}x{keys}` or `wgmma{rows}x{keys}`, then `-paged` where keys lie in pages, and `-bias` or `-mask` where scores are
    /// modified. The variant of a portable kernel is `portable`, then `-{codec}` or `-{k_codec}+{v_codec}` in place of the dtype where rows
    /// are stored so, and `-paged`, `-bias` or `-mask`.
    pub name: String,
    /// True if the kernel is written in the kernel language and printed as CUDA; otherwise it is CUDA C++.
    pub is_portable: bool,
    /// True if the kernel is for compute capability 9.0 alone, with products by `wgmma` and copies by TMA; other native kernels multiply by
    /// `mma.sync`.
    pub uses_wgmma: bool,
    /// Head dimension that the kernel is compiled for: of native kernels a multiple of 32, where zeros in shared memory fill what the
    /// problem has less.
    pub head_dim: usize,
    /// Columns of v that a block of threads computes.
    pub value_dim: usize,
    /// Query rows of a tile.
    pub rows: usize,
    /// Keys that a block of threads multiplies at a time.
    pub keys: usize,
    /// Threads of a block.
    pub threads: usize,
    /// Tiles of keys in shared memory; 0 where keys are read into registers.
    pub key_stages: usize,
    /// Tiles of values in shared memory; 0 where values are read into registers.
    pub stages: usize,
    /// Blocks of threads that a multiprocessor holds at a time.
    pub resident: usize,
    /// True if the warps of a block divide its keys, and not its rows.
    pub warps_split_keys: bool,
    /// Bytes of shared memory of a block of threads.
    pub shared_bytes: usize,
}

impl std::fmt::Display for CudaKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}
