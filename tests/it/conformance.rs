//! The whole catalogue on every instruction set of this machine.

use crate::support::{all_pass, threaded};
use flashtile_testkit::{CpuRunner, catalogue};

#[test]
fn the_catalogue_passes_with_one_thread_and_with_two() {
    let runners: Vec<CpuRunner> = threaded(1).into_iter().chain(threaded(2)).collect();
    all_pass(&catalogue(), &runners);
}
