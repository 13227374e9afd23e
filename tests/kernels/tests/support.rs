//! Shared by tests of cases.

use crate::natives;
use flashtile_gpu::tile::{PortableTile, Tiling};
use flashtile_testkit::{Case, SimulatorRunner, conformance};

/// Two SIMD groups in each of two splits.
pub(crate) const TILE: Tiling = PortableTile::new(8, 16, 2, 1).with_splits(2);

/// Two SIMD groups of 16 rows, blocks of 16 keys.
pub(crate) const PREFILL: PortableTile = PortableTile::prefill(32, 16, 2, 1);

/// Runs problems with native code of this crate; rows and pages are aligned as they happen to be.
pub(crate) fn runner(tile: impl Into<Tiling>) -> SimulatorRunner {
    SimulatorRunner::with_tile(tile, natives::find)
}

/// Runs cases, each of which must have native code and pass.
pub(crate) fn all_pass(cases: &[Case], runner: &SimulatorRunner) {
    let mut failed = Vec::new();
    conformance(cases, &[runner], |result| {
        if result.result.is_err() {
            failed.push(result.to_string());
        }
    });
    assert!(failed.is_empty(), "{} of {} failed:\n{}", failed.len(), cases.len(), failed.join("\n"));
}
