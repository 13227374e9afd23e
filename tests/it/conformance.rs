//! The whole catalogue on every instruction set of this machine.

use crate::support::threaded;
use flashtile::testkit::{CpuRunner, Failure, Runner, catalogue, conformance};

#[test]
fn the_catalogue_passes_with_one_thread_and_with_two() {
    let runners: Vec<CpuRunner> = threaded(1).into_iter().chain(threaded(2)).collect();
    let runners: Vec<&dyn Runner> = runners.iter().map(|r| r as &dyn Runner).collect();
    let cases = catalogue();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let (mut passed, mut failed, mut worst) = (0, Vec::new(), 0.0f64);
    pool.install(|| {
        conformance(&cases, &runners, |result| match &result.result {
            Ok(outcome) => {
                passed += 1;
                worst = worst.max(outcome.out.worst).max(outcome.lse.worst);
            }
            Err(Failure::Skipped(_)) => println!("{result}"),
            Err(_) => failed.push(result.to_string()),
        });
    });
    println!("{passed} passed, the worst element at {worst:.3} of its limit");
    assert!(
        failed.is_empty(),
        "{} of {} failed:\n{}",
        failed.len(),
        passed + failed.len(),
        failed.join("\n")
    );
    assert_eq!(passed, cases.len() * runners.len());
}
