//! The edges of the numbers: what validation accepts is computed, whatever its magnitude; what cannot be is refused.

use crate::support::{answer, build, fill, quantizing, runners};
use flashtile::cache::NO_PAGE;
use flashtile::problem::{MAX_ALIBI_SLOPE, MAX_SCALE, MAX_SOFTCAP};
use flashtile::testkit::{
    Built, Case, Failure, Keep, Runner, SimulatorRunner, Tolerance, compare_lse, compare_out,
};
use flashtile::{
    Codec, Cpu, Dtype, MergeError, Outputs, Part, PlanOptions, QOffset, TensorView, TensorViewMut,
    Visibility, Workspace, merge, reference,
};
use std::time::{Duration, Instant};

/// The same tensors with tables that name pages beyond the pool wherever no kept token needs one.
fn with_junk_pages(built: &Built) -> Built {
    let mut junk = built.clone();
    let mut count = 0;
    if let Some(tables) = &mut junk.tables {
        for page in tables.table.iter_mut().filter(|page| **page == NO_PAGE) {
            *page = [NO_PAGE - 1, 1 << 20, 1 << 31][count % 3];
            count += 1;
        }
    }
    assert!(count > 0, "every entry is of a kept token");
    junk
}

#[test]
fn table_entries_that_no_kept_token_uses_may_hold_anything() {
    let stored = [
        (Codec::Int8, Codec::Int8),
        (Codec::Tq6, Codec::Tq5),
        (Codec::Fp8, Codec::Fp8),
        (Codec::F32, Codec::Tq3),
        (Codec::Int8, Codec::F32),
        (Codec::F32, Codec::F32),
    ];
    let window = Visibility::window(Some(99), Some(0));
    for (k, v) in stored {
        for (page, q_len, keep) in
            [(8, 1, Keep::Seen), (16, 1, Keep::Seen), (48, 3, Keep::Seen), (16, 20, Keep::Seen)]
        {
            let case = Case::new(format!("junk_{k}_{v}"), [1, 4, 2, 0, 0, 64, 64], Dtype::F32)
                .cached(&[(q_len, 300), (q_len, 900), (q_len, q_len), (q_len, 513)], page, keep)
                .seeing(window)
                .at(QOffset::BottomRight)
                .stored(k, v);
            let built = build(&case);
            let junk = with_junk_pages(&built);
            for runner in quantizing(1) {
                let same = answer(&built, &runner).bits() == answer(&junk, &runner).bits();
                assert!(same, "{} in pages of {page} on {}", case.name, runner.name());
            }
        }
    }
}

#[test]
fn merging_rows_without_elements_returns_at_once() {
    let begun = Instant::now();
    let long = 1usize << 31;
    let empty = |shape| TensorView::bhsd::<f32>(&[], shape).unwrap();
    for shape in [[long, long, 1, 0], [long, 1, long, 0], [1 << 40, 1 << 40, 0, 64], [1, 0, usize::MAX, 4]] {
        let mut memory = [0.0f32; 0];
        let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut memory, shape).unwrap());
        assert_eq!(merge(&[], &mut outputs), Ok(()), "{shape:?}");
        let parts = [Part { out: empty(shape), lse: &[] }];
        let merged = merge(&parts, &mut outputs);
        if shape.contains(&0) && shape[3] != 0 {
            assert_eq!(merged, Ok(()), "{shape:?}");
        } else {
            let expected = shape[0] * shape[1] * shape[2];
            assert_eq!(merged, Err(MergeError::Length { part: Some(0), expected, got: 0 }), "{shape:?}");
        }
    }
    // More rows than can be counted.
    let shape = [1 << 40, 1 << 40, 1, 0];
    let mut memory = [0.0f32; 0];
    let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut memory, shape).unwrap());
    let refusal = merge(&[], &mut outputs).unwrap_err();
    assert_eq!(refusal, MergeError::TooLong { shape });
    assert_eq!(
        refusal.to_string(),
        "out of shape [1099511627776, 1099511627776, 1, 0] has more rows than can be counted"
    );
    assert!(begun.elapsed() < Duration::from_secs(1));
    // Rows without elements have logsumexps.
    let (mut memory, mut lse) = ([0.0f32; 0], [0.0f32; 2]);
    let shape = [1, 2, 1, 0];
    let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut memory, shape).unwrap());
    outputs.lse = Some(&mut lse);
    let parts = [1.0, 2.0].map(|_| Part { out: empty(shape), lse: &[1.0, -2.0] });
    merge(&parts, &mut outputs).unwrap();
    assert_eq!(lse, [1.0 + 2f32.ln(), -2.0 + 2f32.ln()]);
}

#[test]
fn a_workspace_that_there_is_no_memory_for_is_refused() {
    for bytes in [usize::MAX, usize::MAX / 2, isize::MAX as usize - 63] {
        let refusal = Workspace::try_new(bytes).unwrap_err();
        assert_eq!(refusal.bytes, bytes);
        assert_eq!(refusal.to_string(), format!("no memory for {bytes} bytes of workspace"));
        assert_eq!(Workspace::new(bytes).len(), 0);
    }
    assert_eq!(Workspace::try_new(65).unwrap().len(), 128);
    assert!(Workspace::try_new(0).unwrap().is_empty());

    // A run without memory says how much it needs.
    let built = build(&Case::new("memory", [1, 1, 1, 2, 3, 4, 4], Dtype::F32));
    let cpu = Cpu::new();
    let plan = cpu.plan(&built.problem, PlanOptions::default()).unwrap();
    assert_eq!(plan.try_workspace().unwrap().len(), plan.workspace().len());
    let mut out = [0.0f32; 8];
    let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, [1, 1, 2, 4]).unwrap());
    let refusal = cpu.run(&plan, &built.inputs(), &mut outputs, &mut Workspace::new(usize::MAX)).unwrap_err();
    let needed = plan.workspace_bytes();
    assert_eq!(refusal.to_string(), format!("workspace has 0 bytes, the plan needs {needed}"));
}

/// Every instruction set of this machine that elements make a difference to, and the portable kernels on their simulator.
fn elements() -> Vec<Box<dyn Runner>> {
    let cpu = runners().into_iter().map(|runner| Box::new(runner) as Box<dyn Runner>);
    cpu.chain([Box::new(SimulatorRunner::new()) as Box<dyn Runner>]).collect()
}

#[test]
fn slopes_whose_biases_overflow_are_refused() {
    let case = Case::new("slopes", [1, 2, 2, 3, 5, 64, 64], Dtype::F32).alibi().at(QOffset::BottomRight);
    let mut built = build(&case);
    let refusals = [
        (1e38, "alibi_slopes[1] is 1e38, expected -7.7371252e25..=7.7371252e25: biases would overflow f32"),
        (
            -7.7371262e25,
            "alibi_slopes[1] is -7.737126e25, expected -7.7371252e25..=7.7371252e25: biases would overflow f32",
        ),
        (
            f32::INFINITY,
            "alibi_slopes[1] is inf, expected -7.7371252e25..=7.7371252e25: biases would overflow f32",
        ),
        (
            f32::NAN,
            "alibi_slopes[1] is NaN, expected -7.7371252e25..=7.7371252e25: biases would overflow f32",
        ),
    ];
    for (slope, message) in refusals {
        built.alibi_slopes.as_mut().unwrap().slice_mut()[1] = slope;
        let refusal = reference::attention(&built.problem, &built.inputs()).unwrap_err();
        assert_eq!(refusal.to_string(), message);
        for runner in elements() {
            assert_eq!(
                built.run(&*runner).unwrap_err(),
                Failure::Error(message.to_owned()),
                "{}",
                runner.name()
            );
        }
    }
}

/// Compares out and logsumexp with the oracle, with limits that large scores do not widen.
fn strictly(built: &Built, runner: &dyn Runner) {
    let mut expected = reference::attention(&built.problem, &built.inputs()).unwrap();
    let answer = answer(built, runner);
    let keys = built.problem.sequences().iter().map(|s| s.kv_len).max().unwrap();
    let tolerance = Tolerance::of(built.problem.dtype(), keys, answer.ran.accumulation);
    let lse = compare_lse(answer.lse.slice(), &expected, &tolerance);
    assert!(lse.within(), "{}: lse: {lse}", runner.name());
    expected.lse.fill(0.0);
    let out = compare_out(&answer.out.values(), &expected, built.problem.dtype(), &tolerance);
    assert!(out.within(), "{}: out: {out}", runner.name());
}

#[test]
fn the_largest_scales_softcaps_and_slopes_are_computed() {
    for sign in [1.0, -1.0] {
        let case = Case::new("largest scale", [1, 2, 1, 5, 40, 128, 128], Dtype::F16).scale(sign * MAX_SCALE);
        let mut built = build(&case);
        // The largest products that f16 has.
        fill(&mut built.q, |_| 65504.0);
        fill(&mut built.k, |[_, _, j, d]| if d < 3 * j { 65504.0 } else { -65504.0 });
        let mut alibi =
            Case::new("largest slope", [1, 2, 1, 5, 40, 64, 64], Dtype::F32).alibi().at(QOffset::At(7));
        alibi.desc.softcap = Some(MAX_SOFTCAP);
        let mut sloped = build(&alibi);
        sloped.alibi_slopes.as_mut().unwrap().slice_mut().fill(sign * MAX_ALIBI_SLOPE);
        for runner in elements() {
            strictly(&built, &*runner);
            strictly(&sloped, &*runner);
        }
    }
}
