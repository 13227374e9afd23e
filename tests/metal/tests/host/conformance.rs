//! The conformance catalogue through `Metal`, against the oracle: on a device that is as late as it may be and on one that runs what nothing
//! orders in random order, on a queue, and in serial and concurrent encoders of the caller's.

use crate::support::metal;
use flashtile_metal::DispatchType;
use flashtile_metal_standin::{Order, Profile, Timing, control};
use flashtile_testkit::{
    Case, Failure, MetalPath, MetalRunner, Prepared, Runner, catalogue, quantized, seeded_case,
};
use std::collections::BTreeMap;

/// Which cases run: every one where `FLASHTILE_METAL_CASES` is `all`, otherwise one of eight.
fn reduced(cases: Vec<Case>) -> Vec<Case> {
    match std::env::var("FLASHTILE_METAL_CASES").as_deref() {
        Ok("all") => cases,
        _ => cases.into_iter().step_by(8).collect(),
    }
}

/// Runs cases on runners by turns, and every runner's rules.
fn run(cases: &[Case], runners: &[MetalRunner]) {
    let (mut passed, mut skipped, mut failed) = (0, BTreeMap::<String, usize>::new(), Vec::new());
    for (n, case) in cases.iter().enumerate() {
        let prepared = Prepared::new(case).unwrap();
        let runner = &runners[n % runners.len()];
        match prepared.run(runner) {
            Ok(_) => passed += 1,
            Err(Failure::Skipped(why)) => {
                *skipped.entry(why.split(':').next().unwrap_or_default().to_owned()).or_default() += 1;
            }
            Err(failure) => failed.push(format!("{} on {}: {failure}", case.name, runner.name())),
        }
        let broken = control(runner.metal.gpu().device()).take_violations();
        failed.extend(broken.into_iter().map(|rule| format!("{} on {}: {rule}", case.name, runner.name())));
    }
    assert!(skipped.is_empty(), "{skipped:?}");
    assert!(failed.is_empty(), "{} of {} failed:\n{}", failed.len(), cases.len(), failed.join("\n"));
    assert!(passed > 0);
}

/// Every place that launches can go to, on a late device and on one of random order.
fn runners(profile: &Profile) -> Vec<MetalRunner> {
    let late = MetalRunner::new(metal(profile.clone()));
    let random = metal(profile.clone());
    let control = control(random.gpu().device());
    control.set_timing(Timing::Immediate);
    control.set_order(Order::Random(1));
    let random = MetalRunner::new(random);
    vec![
        late.clone(),
        random.clone().odd().by(MetalPath::CommandBuffer(DispatchType::Concurrent)),
        late.clone().odd().by(MetalPath::CommandBuffer(DispatchType::Serial)),
        random.clone().by(MetalPath::Encoder(DispatchType::Concurrent)),
        late.by(MetalPath::Encoder(DispatchType::Serial)).odd(),
        random,
    ]
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
