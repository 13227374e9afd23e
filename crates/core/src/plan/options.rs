//! Options of planners.

/// Which kernels run on a device that has native and portable ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum KernelChoice {
    /// Native kernels if the device and the problem have any, otherwise portable ones.
    #[default]
    Auto,
    /// Kernels written for the device.
    Native,
    /// Kernels in the kernel language.
    Portable,
}

impl KernelChoice {
    /// `auto`, `native` or `portable`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Native => "native",
            Self::Portable => "portable",
        }
    }
}

impl std::fmt::Display for KernelChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Choices of the planner that a caller may override.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[cfg_attr(feature = "serde", serde(default))]
#[non_exhaustive]
pub struct PlanOptions {
    /// Upper bound of the splits of the keys of each task (CPU) or tile (CUDA), at least 1; with `None` the planner
    /// chooses. Portable kernels use exactly this number. On the CPU results keep their bits; on CUDA they may differ
    /// by rounding.
    pub splits: Option<usize>,
    /// True if tiles that no row sees are skipped. Otherwise every tile is computed and masked, with the same
    /// bits: for tests, and to measure what skipping saves.
    pub skip_tiles: bool,
    /// Which kernels a CUDA device runs. The CPU backend refuses anything but [`KernelChoice::Auto`].
    pub kernels: KernelChoice,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self { splits: None, skip_tiles: true, kernels: KernelChoice::Auto }
    }
}
