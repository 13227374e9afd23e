//! What tests of cases share.

use crate::natives;
use flashtile_gpu::plan::Tile;
use flashtile_testkit::{Case, SimulatorRunner, conformance};

/// Two SIMD groups of each of two parts of the keys.
pub(crate) const TILE: Tile = Tile { rows: 1, keys: 1, simds: 2, splits: 2 };

/// Runs problems with native code of this crate, for rows and pages as they lie.
pub(crate) fn runner(tile: Tile) -> SimulatorRunner {
    SimulatorRunner::of(tile, natives::find)
}

/// Runs cases; each has to be one that there is native code for, and pass.
pub(crate) fn all_pass(cases: &[Case], runner: &SimulatorRunner) {
    let mut failed = Vec::new();
    conformance(cases, &[runner], |result| {
        if result.result.is_err() {
            failed.push(result.to_string());
        }
    });
    assert!(failed.is_empty(), "{} of {} failed:\n{}", failed.len(), cases.len(), failed.join("\n"));
}
