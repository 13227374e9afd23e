//! The catalogue of cases on the simulator.

use crate::natives;
use flashtile::kernels::plan::Tile;
use flashtile::testkit::{Case, Failure, SimulatorRunner, catalogue, quantized, run_case};
use std::collections::BTreeMap;

/// Scores of the largest cases that are run.
const MOST_SCORES: u64 = 12_000;

fn small(case: &Case) -> bool {
    case.build().is_ok_and(|built| {
        let dims = built.problem.dims();
        let keys: usize = built.problem.sequences().iter().map(|s| s.q_len * s.kv_len).sum();
        (keys * dims.q_heads) as u64 <= MOST_SCORES
    })
}

/// Runs the small ones of some cases; tells how many passed.
fn run_all(cases: Vec<Case>, tile: Tile) -> usize {
    let runner = SimulatorRunner::of(tile, natives::find);
    let (mut passed, mut refused, mut failed) = (0, BTreeMap::<String, usize>::new(), Vec::new());
    for case in cases.into_iter().filter(small) {
        match run_case(&case, &runner) {
            Ok(_) => passed += 1,
            Err(Failure::Skipped(why)) => *refused.entry(why).or_default() += 1,
            Err(failure) => failed.push(format!("{}: {failure}", case.name)),
        }
    }
    for (why, count) in &refused {
        eprintln!("{count} refused: {why}");
    }
    eprintln!("{passed} passed");
    assert!(failed.is_empty(), "{passed} passed, {} failed:\n{}", failed.len(), failed.join("\n"));
    passed
}

const TILE: Tile = Tile { rows: 1, keys: 1, simds: 2, parts: 2 };

#[test]
fn elements_agree_with_the_oracle() {
    assert!(run_all(catalogue(), TILE) >= 271);
}

#[test]
fn codes_agree_with_the_oracle() {
    assert!(run_all(quantized(), TILE) >= 1);
}
