//! The process whose threads compute.
//!
//! A forked process has the memory of its parent, and one thread: work for a pool of the parent waits forever, and so does a lock that
//! another thread held.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::sync::OnceLock;

/// The process that has the threads, once there may be some.
static OWNER: OnceLock<u32> = OnceLock::new();

/// Returns true if this process was forked off the process that owns the threads.
pub(crate) fn is_forked() -> bool {
    OWNER.get().is_some_and(|owner| *owner != std::process::id())
}

/// Refuses a forked process.
pub(crate) fn check() -> PyResult<()> {
    match OWNER.get() {
        Some(owner) if is_forked() => Err(PyRuntimeError::new_err(format!(
            "process {} was forked off process {owner} after flashtile had computed or planned there, and has no threads: start it with spawn",
            std::process::id()
        ))),
        _ => Ok(()),
    }
}

/// Makes this process the owner, before a call that may start threads or keep a lock while others run; refuses a forked one.
pub(crate) fn compute() -> PyResult<()> {
    OWNER.get_or_init(std::process::id);
    check()
}
