//! The conformance catalogue through `Metal`, against the oracle: on a device that is as late as it may be and on one that runs what nothing
//! orders in random order, on a queue, and in serial and concurrent encoders of the caller's.

use crate::support::{control_of, runners};
use flashtile_metal_standin::Profile;
use flashtile_testkit::{Case, Failure, MetalRunner, Prepared, Runner, catalogue, quantized, seeded_case};

/// Which cases run: every one where `FLASHTILE_METAL_CASES` is `all`, otherwise one of thirty-two.
fn reduced(cases: Vec<Case>) -> Vec<Case> {
    match std::env::var("FLASHTILE_METAL_CASES").as_deref() {
        Ok("all") => cases,
        _ => cases.into_iter().step_by(32).collect(),
    }
}

/// Runs cases on runners by turns: answers are within their limits, and no rule of use is broken.
fn run(cases: &[Case], runners: &[MetalRunner]) {
    let (mut passed, mut failed) = (0, Vec::new());
    for (n, case) in cases.iter().enumerate() {
        let prepared = Prepared::new(case).unwrap();
        let runner = &runners[n % runners.len()];
        match prepared.run(runner) {
            Ok(_) => passed += 1,
            // Positions beyond 2^30 are more than portable kernels count.
            Err(Failure::Skipped(why)) if why.contains("from the first key") => {}
            Err(failure) => failed.push(format!("{} on {}: {failure}", case.name, runner.name())),
        }
        let broken = control_of(&runner.metal).take_violations();
        failed.extend(broken.into_iter().map(|rule| format!("{} on {}: {rule}", case.name, runner.name())));
    }
    assert!(failed.is_empty(), "{} of {} failed:\n{}", failed.len(), cases.len(), failed.join("\n"));
    assert!(passed > 0);
}

#[test]
fn catalogue_of_dense_and_paged_problems() {
    run(&reduced(catalogue()), &runners(&Profile::m3_max()));
}

#[test]
fn catalogue_of_quantized_caches() {
    run(&reduced(quantized()), &runners(&Profile::m5()));
}

#[test]
fn random_problems() {
    run(&reduced((0..64).map(seeded_case).collect()), &runners(&Profile::m2()));
}
