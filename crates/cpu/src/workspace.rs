//! Scratch memory of a run.

#![allow(unsafe_code)]

/// One cache line, so that every region can start on one.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// There is no memory for a workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkspaceError {
    /// Bytes that were requested.
    pub bytes: usize,
}

impl std::fmt::Display for WorkspaceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "no memory for {} bytes of workspace", self.bytes)
    }
}

impl std::error::Error for WorkspaceError {}

/// Scratch memory of a run, aligned to cache lines. Any plan that needs no more than its bytes can reuse it; its contents
/// between runs are never read.
#[derive(Debug, Clone)]
pub struct Workspace {
    lines: Vec<Line>,
}

impl Workspace {
    /// At least `bytes` bytes of scratch memory, or an empty workspace if there is no memory for them: [`Cpu::run`](crate::cpu::Cpu::run)
    /// refuses an empty one with the bytes that its plan needs.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self::try_new(bytes).unwrap_or(Self { lines: Vec::new() })
    }

    /// At least `bytes` bytes of scratch memory.
    ///
    /// # Errors
    /// [`WorkspaceError`] if there is no memory for them.
    pub fn try_new(bytes: usize) -> Result<Self, WorkspaceError> {
        let (mut lines, count) = (Vec::new(), bytes.div_ceil(size_of::<Line>()));
        lines.try_reserve_exact(count).map_err(|_| WorkspaceError { bytes })?;
        lines.resize(count, Line([0; 64]));
        Ok(Self { lines })
    }

    /// Size in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lines.len() * 64
    }

    /// Returns true if it holds no memory.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// The memory itself, for example to fill it with a pattern in a test.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: a Line is 64 plain bytes without padding, so the vector's elements are that many initialised bytes.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.lines.len() * 64) }
    }
}

impl crate::plan::CpuBackwardPlan {
    /// Allocates the workspace that a run of this plan needs, as [`Workspace::new`] does.
    #[must_use]
    pub fn workspace(&self) -> Workspace {
        Workspace::new(self.workspace_bytes())
    }

    /// Allocates the workspace that a run of this plan needs.
    ///
    /// # Errors
    /// [`WorkspaceError`] if there is no memory for it.
    pub fn try_workspace(&self) -> Result<Workspace, WorkspaceError> {
        Workspace::try_new(self.workspace_bytes())
    }
}

impl crate::plan::CpuPlan {
    /// Allocates the workspace that a run of this plan needs, as [`Workspace::new`] does.
    #[must_use]
    pub fn workspace(&self) -> Workspace {
        Workspace::new(self.workspace_bytes())
    }

    /// Allocates the workspace that a run of this plan needs.
    ///
    /// # Errors
    /// [`WorkspaceError`] if there is no memory for it.
    pub fn try_workspace(&self) -> Result<Workspace, WorkspaceError> {
        Workspace::try_new(self.workspace_bytes())
    }
}
