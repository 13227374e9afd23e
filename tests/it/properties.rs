//! Random problems against the oracle.
//!
//! `FLASHTILE_SEEDS=first..last` selects the seeds: one to replay a failure, many for a long run.

use crate::support::options;
use flashtile::{Cpu, PlanOptions};
use flashtile_testkit::{CpuRunner, Prepared, Rng, Runner, random_case};
use rayon::prelude::*;
use std::ops::Range;

/// The seeds of `FLASHTILE_SEEDS`, else the default.
pub(crate) fn seeds(default: Range<u64>) -> Range<u64> {
    match std::env::var("FLASHTILE_SEEDS") {
        Err(_) => default,
        Ok(text) => {
            let (first, last) = text.split_once("..").expect("FLASHTILE_SEEDS=first..last");
            first.parse().unwrap()..last.parse().unwrap()
        }
    }
}

fn random_options(rng: &mut Rng, keys: usize, block_k: usize) -> PlanOptions {
    let splits = (rng.below(2) == 0).then(|| 1 + rng.below(keys.div_ceil(block_k).max(1)));
    options(splits, rng.below(4) > 0)
}

/// The failures of one seed.
fn run(seed: u64) -> Vec<String> {
    let mut rng = Rng::new(seed);
    let case = random_case(format!("seed {seed}"), &mut |n| rng.below(n));
    let prepared = Prepared::new(&case).unwrap();
    let problem = &prepared.built.problem;
    let keys = problem.sequences().iter().map(|s| s.kv_len).max().unwrap_or(0);
    let mut failures = Vec::new();
    for isa in Cpu::isas() {
        let cpu = Cpu::with_isa(isa).unwrap().with_threads(1 + rng.below(4));
        let block_k = cpu.plan(problem, PlanOptions::default()).unwrap().block_k();
        let runner = CpuRunner::new(cpu).with(random_options(&mut rng, keys, block_k));
        if let Err(failure) = prepared.run(&runner) {
            failures.push(format!(
                "FLASHTILE_SEEDS={seed}..{} on {}, {:?}: {failure}\n  {case:?}",
                seed + 1,
                runner.name(),
                runner.options
            ));
        }
    }
    failures
}

#[test]
fn random_problems_match_the_oracle() {
    let failures: Vec<String> = seeds(0..600).into_par_iter().flat_map_iter(run).collect();
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}
