//! Matrices in memory.

/// Row-major matrices, leading strides in elements.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a, E> {
    pub(super) a: *const f32,
    pub(super) lda: usize,
    pub(super) b: Source<'a, E>,
    pub(super) ldb: usize,
    pub(super) c: *mut f32,
    pub(super) ldc: usize,
    /// Whether the chains go on from what `c` holds: a product cut along its depth has the bits of the whole.
    pub(super) resume: bool,
}

/// Rows of `B`.
#[derive(Clone, Copy)]
pub(super) enum Source<'a, E> {
    /// In f32, one after another.
    Packed(*const E),
    /// Of any type, converted as they are loaded: runs of them and the first column. Memory is asked for meanwhile.
    Stream(&'a [Run], usize),
}

/// Neighbouring rows at a constant distance, and what is asked for while they are read.
#[derive(Clone, Copy)]
pub(super) struct Run {
    pub(super) start: *const u8,
    pub(super) rows: usize,
    /// Bytes from a row to the one that is asked for while it is read. The same for each row of the run.
    pub(super) ahead: usize,
}

impl Run {
    /// No rows.
    pub(super) const NONE: Self = Self { start: std::ptr::null(), rows: 0, ahead: 0 };
}
