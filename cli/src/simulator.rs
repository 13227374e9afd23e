//! The simulator of the kernel language, and native code of the kernels: in builds with the feature `simulator`.

use crate::failure::{Failure, Result};
use flashtile_testkit::Runner;

/// Refuses to continue in builds without the simulator.
pub(crate) fn require() -> Result<()> {
    if cfg!(feature = "simulator") { Ok(()) } else { Err(absent()) }
}

fn absent() -> Failure {
    let what = "this build is without the simulator, \
        cargo build --release -p flashtile-cli --features simulator makes one that has it";
    Failure::at("--backend", what)
}

/// A runner that refuses problems with more than `max_scores` scores, since the simulator is slow.
#[cfg(feature = "simulator")]
pub(crate) fn runner(max_scores: u64) -> Result<Box<dyn Runner>> {
    Ok(Box::new(flashtile_testkit::SimulatorRunner::new().at_most(max_scores)))
}

/// Refuses, since this build has no simulator.
#[cfg(not(feature = "simulator"))]
pub(crate) fn runner(_: u64) -> Result<Box<dyn Runner>> {
    Err(absent())
}
