//! Small problems and their gradients on every instruction set against the oracle, on guarded memory.

#![no_main]

use flashtile::{Cpu, PlanOptions};
use flashtile_testkit::{BackwardCase, CpuRunner, Failure, Prepared, random_case};
use libfuzzer_sys::arbitrary::Unstructured;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut u = Unstructured::new(data);
    let mut choose = |n: usize| u.int_in_range(0..=n.saturating_sub(1)).unwrap_or(0);
    // Data depends on the name; a few names suffice.
    let name = format!("fuzz {}", choose(8));
    let case = random_case(name, &mut choose);
    let prepared = Prepared::new(&case).unwrap_or_else(|failure| panic!("{case:?}: {failure}"));
    for isa in Cpu::isas() {
        let cpu = Cpu::with_isa(isa).unwrap_or_default().with_threads(1 + choose(3));
        let mut options = PlanOptions::default();
        options.skip_tiles = choose(4) > 0;
        options.splits = (choose(2) == 0).then(|| 1 + choose(4));
        match prepared.run(&CpuRunner::new(cpu).with(options)) {
            // More splits than the problem has blocks.
            Ok(_) | Err(Failure::Skipped(_)) => {}
            Err(failure) => panic!("{isa} {options:?} {case:?}: {failure}"),
        }
    }
    // Cached sequences have no gradients.
    let Ok(backward) = BackwardCase::new(&case) else { return };
    for isa in Cpu::isas() {
        let cpu = Cpu::with_isa(isa).unwrap_or_default().with_threads(1 + choose(3));
        let mut options = PlanOptions::default();
        options.skip_tiles = choose(4) > 0;
        options.splits = (choose(2) == 0).then(|| 1 + choose(2));
        let checked = backward.run(&cpu, options).and_then(|answer| backward.check(&answer));
        checked.unwrap_or_else(|failure| panic!("{isa} {options:?} {case:?}: {failure}"));
    }
});
