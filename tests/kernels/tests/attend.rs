//! The catalogue of cases on the simulator.

use crate::support::{PREFILL, TILE, runner};
use flashtile_gpu::tile::Tiling;
use flashtile_testkit::{Case, Failure, catalogue, quantized, run_case};
use std::collections::BTreeMap;

/// Cases with more scores than this are skipped.
const MAX_SCORES: u64 = 12_000;

fn small(case: &Case) -> bool {
    case.desc.clone().validate().is_ok_and(|problem| {
        let pairs: usize = problem.sequences().iter().map(|s| s.q_len * s.kv_len).sum();
        (pairs * problem.dims().q_heads) as u64 <= MAX_SCORES
    })
}

/// Runs small cases, each of which must be refused by planning or have native code; prints how many passed.
fn run_all(cases: Vec<Case>, tile: impl Into<Tiling>) -> usize {
    let runner = runner(tile).with_shared_bytes(99 << 10);
    let (mut passed, mut refused, mut failed) = (0, BTreeMap::<String, usize>::new(), Vec::new());
    for case in cases.into_iter().filter(small) {
        match run_case(&case, &runner) {
            Ok(_) => passed += 1,
            Err(Failure::Skipped(why)) if !why.contains("native code") => {
                *refused.entry(why).or_default() += 1
            }
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

#[test]
fn elements_agree_with_the_oracle() {
    assert!(run_all(catalogue(), TILE) >= 429);
}

#[test]
fn codes_agree_with_the_oracle() {
    // Cases of kept tokens take a launch for each storage: every third one keeps the test short. The CPU and GPUs run all of them.
    let mut kept = 0;
    let cases = quantized().into_iter().filter(|case| {
        kept += usize::from(case.desc.kept.is_some());
        case.desc.kept.is_none() || kept % 3 == 0
    });
    assert!(run_all(cases.collect(), TILE) >= 90);
}

#[test]
fn elements_agree_with_the_oracle_by_prefill() {
    assert!(run_all(catalogue(), PREFILL) >= 429);
}
