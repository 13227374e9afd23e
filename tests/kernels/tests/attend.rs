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

/// The catalogue, or the cases of it whose number leaves `part` when divided by two.
fn elements(part: Option<usize>) -> Vec<Case> {
    let numbered = catalogue().into_iter().enumerate();
    numbered.filter(|(n, _)| part.is_none_or(|part| n % 2 == part)).map(|(_, case)| case).collect()
}

#[test]
fn elements_agree_with_the_oracle() {
    assert!(run_all(elements(Some(0)), TILE) >= 200);
}

#[test]
fn codes_agree_with_the_oracle() {
    // Cases of kept tokens take a launch for each storage: every sixth one keeps the test short, and of others every second one.
    let mut counts = [0; 2];
    let cases = quantized().into_iter().filter(|case| {
        let kept = usize::from(case.desc.kept.is_some());
        counts[kept] += 1;
        counts[kept] % [2, 6][kept] == 0
    });
    assert!(run_all(cases.collect(), TILE) >= 45);
}

#[test]
fn elements_agree_with_the_oracle_by_prefill() {
    assert!(run_all(elements(Some(1)), PREFILL) >= 200);
}

#[test]
#[ignore = "takes minutes"]
fn every_case_agrees_with_the_oracle() {
    assert!(run_all(elements(None), TILE) >= 429);
    assert!(run_all(elements(None), PREFILL) >= 429);
    assert!(run_all(quantized(), TILE) >= 120);
}
