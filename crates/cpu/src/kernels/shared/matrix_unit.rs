//! The state of a thread's matrix unit.

#![allow(unsafe_code)]

use std::marker::PhantomData;

/// Keeps the matrix unit of this thread configured until it is dropped. Without a unit, it does nothing.
///
/// A unit belongs to one thread, so the guard is neither `Send` nor `Sync`.
#[must_use]
pub(crate) struct MatrixUnitGuard {
    release: Option<unsafe fn()>,
    thread: PhantomData<*const ()>,
}

impl MatrixUnitGuard {
    /// The guard of products that use no matrix unit.
    pub(crate) const fn none() -> Self {
        Self { release: None, thread: PhantomData }
    }

    /// Calls `release` at the end.
    ///
    /// # Safety
    /// `release` may be called once on this thread.
    pub(crate) const unsafe fn new(release: unsafe fn()) -> Self {
        Self { release: Some(release), thread: PhantomData }
    }
}

impl Drop for MatrixUnitGuard {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: the contract of `new`; the guard never left its thread.
            unsafe { release() }
        }
    }
}
