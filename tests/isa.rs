//! A forced instruction set applies to codecs too. A separate binary, since it reads counters of the whole process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use flashtile::plan::Isa;
use flashtile::{Cpu, PlanOptions};
use flashtile_core::isa::counts;
use flashtile_testkit::{CpuRunner, quantized};

#[test]
fn a_run_uses_its_instruction_set_alone() {
    let built: Vec<_> = quantized().iter().map(|case| (case.name.clone(), case.build().unwrap())).collect();
    assert!(built.len() > 20, "{} cases", built.len());
    for isa in Cpu::isas() {
        let cpu = Cpu::with_isa(isa).unwrap();
        let mut decoded = 0;
        for (name, built) in &built {
            let plan = cpu.plan(&built.problem, PlanOptions::default()).unwrap();
            let before = counts();
            built.run(&CpuRunner::new(cpu)).unwrap();
            let after = counts();
            for (other, (before, after)) in Isa::ALL.into_iter().zip(before.into_iter().zip(after)) {
                let calls = after - before;
                if other == plan.isa() {
                    assert!(calls > 0, "{name} on {isa}: nothing was counted");
                    decoded += calls - 1;
                } else {
                    assert_eq!(calls, 0, "{name} on {isa}: code for {other} was called");
                }
            }
        }
        assert!(decoded > 1000, "{isa}: codecs were called {decoded} times");
    }
}
