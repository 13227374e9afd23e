//! Scratch memory of a run.

#![allow(unsafe_code)]

/// One cache line, so that every region can start on one.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Scratch memory of a run, aligned to cache lines. Reusable by any plan that needs no more than its bytes; what it holds
/// between runs is never read.
#[derive(Debug, Clone)]
pub struct Workspace {
    lines: Vec<Line>,
}

impl Workspace {
    /// At least `bytes` bytes of scratch memory.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self { lines: vec![Line([0; 64]); bytes.div_ceil(64)] }
    }

    /// Its size in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lines.len() * 64
    }

    /// Whether it holds no memory.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// The memory itself: to fill it with a pattern in a test, say.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: a Line is 64 plain bytes without padding, so the vector's elements are that many initialised bytes.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.lines.len() * 64) }
    }
}

impl crate::CpuPlan {
    /// Allocates the workspace that a run of this plan needs.
    #[must_use]
    pub fn workspace(&self) -> Workspace {
        Workspace::new(self.workspace_bytes())
    }
}
