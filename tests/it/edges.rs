//! The limits of the numeric range: what validation accepts is computed, whatever its magnitude, and the rest is
//! refused.

use crate::support::{answer, build, cuda_runners, fill, quantizing, row_bits, rows, runners};
use flashtile::cache::NO_PAGE;
use flashtile::codec::{CodePages, Side};
use flashtile::plan::Isa;
use flashtile::problem::{MAX_ALIBI_SLOPE, MAX_SCALE, MAX_SOFTCAP};
use flashtile::quality::{Tolerance, compare_lse, compare_out, integer_errors};
use flashtile::{
    AttentionState, Codec, Cpu, Dtype, KernelChoice, MaskKind, MergeError, Outputs, PlanOptions, QOffset,
    TensorView, TensorViewMut, Visibility, Workspace, merge, reference,
};
use flashtile_testkit::{
    Case, CaseData, Failure, GuardedMask, Keep, MaskFill, Prepared, Rng, Runner, SimulatorRunner, Tree,
    catalogue,
};
use std::time::{Duration, Instant};

/// Replaces tables by ones that name pages outside the pool wherever no kept token needs a page.
fn with_junk_pages(built: &CaseData) -> CaseData {
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
        let parts = [AttentionState { out: empty(shape), lse: &[] }];
        let merged = merge(&parts, &mut outputs);
        if shape.contains(&0) && shape[3] != 0 {
            assert_eq!(merged, Ok(()), "{shape:?}");
        } else {
            let expected = shape[0] * shape[1] * shape[2];
            assert_eq!(merged, Err(MergeError::Length { state: Some(0), expected, got: 0 }), "{shape:?}");
        }
    }
    // More rows than the kernel can count.
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
    let parts = [1.0, 2.0].map(|_| AttentionState { out: empty(shape), lse: &[1.0, -2.0] });
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

    // A run without workspace says how much it needs.
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

/// Every instruction set of this machine that computes elements differently, the portable kernels on their simulator,
/// and the CUDA device, if there is one, with native and with portable kernels.
fn elements() -> Vec<Box<dyn Runner>> {
    let mut portable = PlanOptions::default();
    portable.kernels = KernelChoice::Portable;
    let cuda = cuda_runners();
    let on_cuda = cuda.iter().cloned().map(|runner| runner.with(portable));
    let cuda = cuda.iter().cloned().chain(on_cuda).map(|runner| Box::new(runner) as Box<dyn Runner>);
    let cpu = runners().into_iter().map(|runner| Box::new(runner) as Box<dyn Runner>);
    cpu.chain([Box::new(SimulatorRunner::new()) as Box<dyn Runner>]).chain(cuda).collect()
}

#[test]
fn slopes_whose_biases_overflow_are_refused() {
    let case = Case::new("slopes", [1, 2, 2, 3, 5, 64, 64], Dtype::F32).alibi().at(QOffset::BottomRight);
    let mut built = build(&case);
    let refusals = [
        (1e38, "alibi_slopes[1] is 1e38, expected -7.7371252e25..=7.7371252e25: biases would overflow f32"),
        (
            -7.737_126e25,
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

/// Compares out and logsumexp with the oracle, with limits that large scores do not widen. Problems that a backend
/// refuses are skipped.
fn strictly(built: &CaseData, runner: &dyn Runner, what: &str) {
    let mut expected = reference::attention(&built.problem, &built.inputs()).unwrap();
    let answer = match built.run(runner) {
        Ok(answer) => answer,
        Err(Failure::Skipped(_)) => return,
        Err(failure) => panic!("{what} on {}: {failure}", runner.name()),
    };
    let keys = built.problem.sequences().iter().map(|s| s.kv_len).max().unwrap();
    let tolerance = Tolerance::of(built.problem.dtype(), keys, answer.ran.accumulation);
    let lse = compare_lse(answer.lse.slice(), &expected, &tolerance);
    assert!(lse.within(), "{what} on {}: lse: {lse}", runner.name());
    // A huge bias leaves nothing to round: it decides alone.
    expected = built.relative(&expected);
    expected.lse.iter_mut().filter(|lse| lse.abs() > 1e36).for_each(|lse| *lse = 0.0);
    let out = compare_out(&answer.out.values(), &expected, built.problem.dtype(), &tolerance);
    assert!(out.within(), "{what} on {}: out: {out}", runner.name());
}

/// Runs everything that computes elements on this machine; the CPU and the simulator accept all problems.
fn everywhere(built: &CaseData, what: &str) {
    for runner in elements() {
        strictly(built, &*runner, what);
    }
}

#[test]
fn the_largest_scales_softcaps_and_slopes_are_computed() {
    for sign in [1.0, -1.0] {
        let case = Case::new("largest scale", [1, 2, 1, 5, 40, 128, 128], Dtype::F16).scale(sign * MAX_SCALE);
        let mut built = build(&case);
        // The largest products of f16.
        fill(&mut built.q, |_| 65504.0);
        fill(&mut built.k, |[_, _, j, d]| if d < 3 * j { 65504.0 } else { -65504.0 });
        let mut alibi =
            Case::new("largest slope", [1, 2, 1, 5, 40, 64, 64], Dtype::F32).alibi().at(QOffset::At(7));
        alibi.desc.softcap = Some(MAX_SOFTCAP);
        let mut steep = build(&alibi);
        steep.alibi_slopes.as_mut().unwrap().slice_mut().fill(sign * MAX_ALIBI_SLOPE);
        everywhere(&built, &case.name);
        everywhere(&steep, &alibi.name);
    }
}

/// The bias of a query and a key: finite, but beyond f32 in units of log2.
type Bias = fn(usize, usize) -> f32;

#[test]
fn biases_beyond_f32_in_units_of_log2_are_ordered() {
    // As large as bf16 allows.
    const LARGEST: f32 = 3.389_531_4e38;
    let biases: [(&str, Bias); 8] = [
        ("one larger", |i, j| if j == 3 * i { 3e38 } else { 2.5e38 }),
        ("the same", |_, _| 2.75e38),
        ("the largest", |i, j| if (i + j) % 5 == 0 { LARGEST } else { 3.3e38 }),
        ("the smallest", |_, _| -LARGEST),
        ("above the smallest", |i, j| if (i + j) % 7 == 0 { -2.5e38 } else { -LARGEST }),
        ("of both signs", |i, j| [2.4e38, 1e38, 0.0, -3e38, f32::NEG_INFINITY][(i + j) % 5]),
        ("across the threshold", |i, j| [8.4e37, 8.6e37, 8.2e37][(i + j) % 3]),
        (
            "a few apart",
            |i, j| if (i + j) % 9 == 0 { 3.1e38 } else { 3.1e38 * (1.0 - 1.0 / (1 << 20) as f32) },
        ),
    ];
    for (what, bias) in biases {
        for (dtype, mask) in [(Dtype::F32, Dtype::F32), (Dtype::F16, Dtype::F32), (Dtype::BF16, Dtype::BF16)]
        {
            for sinks in [false, true] {
                let mut case = Case::new("huge", [1, 2, 1, 3, 270, 64, 64], dtype);
                case.desc.sinks = sinks;
                let mut built = build(&case.mask(MaskKind::Additive(mask), "bh", MaskFill::Open));
                let Some(GuardedMask::Additive(tensor)) = &mut built.mask else {
                    unreachable!("asked for an additive mask")
                };
                fill(tensor, |[_, _, i, j]| bias(i, j));
                everywhere(&built, what);
                if dtype == Dtype::F32 && sinks {
                    // The sink alone, with keys, and without effect.
                    built.sinks.as_mut().unwrap().slice_mut().copy_from_slice(&[3.2e38, -f32::MAX]);
                    everywhere(&built, what);
                }
            }
        }
    }
    // The limits of f32.
    for sign in [1.0, -1.0] {
        let case = Case::new("ends", [1, 2, 1, 3, 70, 64, 64], Dtype::F32);
        let mut built = build(&case.mask(MaskKind::Additive(Dtype::F32), "bh", MaskFill::Open));
        let Some(GuardedMask::Additive(tensor)) = &mut built.mask else { unreachable!("asked for one") };
        fill(tensor, |_| sign * f32::MAX);
        everywhere(&built, "ends");
    }
}

#[test]
fn alibi_far_from_every_key_keeps_its_digits() {
    let offsets = [100_000i64, 1_000_000, (1 << 30) - 2];
    let slopes: [f32; 3] = [1.0, 0.0625, 0.003_906_25];
    for offset in offsets.into_iter().flat_map(|offset| [offset, -offset]) {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            for (name, sinks, visibility, kv_lens) in [
                ("plain", false, Visibility::full(), None),
                ("sinks", true, Visibility::full(), Some(vec![90, 17])),
                // Among positions past every key, the ones within reach; before every key, none unless the right
                // side is unbounded.
                ("window", false, Visibility::window(Some(offset.unsigned_abs() as usize), None), None),
            ] {
                let mut case =
                    Case::new(format!("far {name} {offset} {dtype}"), [2, 3, 3, 2, 90, 64, 64], dtype)
                        .alibi()
                        .at(QOffset::At(offset))
                        .seeing(visibility);
                if let Some(lens) = &kv_lens {
                    case = case.kv_lens(lens);
                }
                case.desc.sinks = sinks;
                let mut built = build(&case);
                for negative in [false, true] {
                    let own = built.alibi_slopes.as_mut().unwrap().slice_mut();
                    own.copy_from_slice(&slopes);
                    if negative {
                        own.iter_mut().for_each(|slope| *slope = -*slope);
                    }
                    if let Some(sinks) = built.sinks.as_mut().filter(|_| offset.unsigned_abs() == 100_000) {
                        // Sinks as large as the biases, so that both matter.
                        let distance = if offset < 0 { 100_000.0 } else { 99_950.0 };
                        for (h, sink) in sinks.slice_mut().iter_mut().enumerate() {
                            *sink = slopes[h] * if negative { distance } else { -distance };
                        }
                    }
                    everywhere(&built, &format!("{} {negative}", case.name));
                }
            }
        }
    }
}

/// Values near the largest f32, whose means have any size.
fn near_the_largest(built: &mut CaseData, largest: f32) {
    let held = built.v.clone();
    fill(&mut built.v, |index @ [_, _, j, d]| match d % 8 {
        // Padding stays NaN.
        _ if held.get(index).is_nan() => f32::NAN,
        // All equal: their sum is as many times larger.
        0 => largest,
        1 => -largest,
        // Sums with both signs, which overflow before they become small, or at once.
        2 => [largest, -largest][j % 2],
        3 => [largest, largest, -largest][j % 3],
        4 => largest * (1.0 - (j * 7919 % 1000) as f32 / 1000.0),
        5 => held.get(index) * 5e37,
        _ => held.get(index),
    });
}

#[test]
fn means_of_values_near_the_largest_are_finite() {
    let shape = [1, 4, 2, 5, 300, 64, 64];
    let window = Visibility::window(Some(40), Some(3));
    for dtype in [Dtype::F32, Dtype::BF16] {
        let largest = if dtype == Dtype::F32 { f32::MAX } else { 3.389_531_4e38 };
        let of = |name: &str| Case::new(format!("largest values {name} {dtype}"), shape, dtype);
        let cases = [
            of("plain"),
            // Two keys, which may fall to different splits.
            Case::new(format!("largest values few {dtype}"), [1, 2, 1, 20, 40, 64, 64], dtype)
                .seeing(Visibility::window(Some(1), Some(0)))
                .at(QOffset::At(10)),
            of("scores").softcap(4.0).alibi().sinks().causal(QOffset::BottomRight),
            of("masked").mask(MaskKind::Additive(Dtype::F32), "", MaskFill::Random),
            of("window").seeing(window).at(QOffset::At(200)),
            of("packed").packed(&[(3, 70), (9, 300), (1, 1)]),
            of("cached")
                .cached(&[(1, 300), (2, 90), (40, 280)], 16, Keep::All)
                .causal(QOffset::BottomRight)
                .tree(Tree::Branches),
        ];
        for case in cases {
            let mut built = build(&case);
            let ordinary = built.clone();
            near_the_largest(&mut built, largest);
            everywhere(&built, &case.name);
            // Bits do not change without an overflow.
            for runner in runners() {
                let (got, want) = (answer(&built, &runner), answer(&ordinary, &runner));
                for index in got.out.indices().filter(|index| index[3] % 8 > 5) {
                    let same = got.out.get(index).to_bits() == want.out.get(index).to_bits();
                    assert!(same, "{} {index:?} on {}", case.name, runner.name());
                }
                assert_eq!(got.lse.slice(), want.lse.slice(), "{}", case.name);
            }
        }
    }
}

/// Probabilities in 16 bits may round up where their sum in f32 does not: means of the largest value must not become infinite.
#[test]
fn means_are_finite_where_probabilities_round_up() {
    // Twice exp(score) is a little more than half a unit in the last place above 1.
    for (dtype, largest, score) in
        [(Dtype::BF16, 3.389_531_4e38, -0.688_96), (Dtype::F16, 65504.0, -0.692_62)]
    {
        for (name, kv_len) in [("few tiles", 300), ("splits", 4000)] {
            let shape = [1, 4, 2, 40, kv_len, 64, 64];
            let mut built = build(&Case::new(format!("{name} {dtype}"), shape, dtype).scale(1.0));
            fill(&mut built.q, |[_, _, _, d]| if d < 2 { 1.0 } else { 0.0 });
            // Every tile has a key of score 0, its maximum. The other scores need two elements of 16 bits.
            fill(&mut built.k, |[_, _, j, d]| match d {
                _ if j % 32 == 0 => 0.0,
                0 => -0.6875,
                1 => score + 0.6875,
                _ => 0.0,
            });
            fill(&mut built.v, |_| largest);
            everywhere(&built, &format!("{name} {dtype}"));
            if kv_len < 1000 {
                strictly(&built, &SimulatorRunner::prefill(), &format!("{name} {dtype}"));
            }
        }
    }
}

#[test]
fn means_of_values_that_the_output_does_not_hold_are_infinite() {
    for (dtype, codec, value) in [
        (Dtype::F16, Codec::F32, 1e5),
        (Dtype::F16, Codec::BF16, -1e5),
        (Dtype::F16, Codec::F32, 65537.0),
        (Dtype::BF16, Codec::F32, 3.4028e38),
    ] {
        let case = Case::new(format!("{value} {codec} {dtype}"), [1, 4, 2, 0, 0, 64, 64], dtype)
            .cached(&[(1, 70), (40, 90)], 16, Keep::All)
            .stored(Codec::from(dtype), codec);
        let mut built = build(&case);
        let held = built.v.clone();
        fill(&mut built.v, |index| if held.get(index).is_nan() { f32::NAN } else { value });
        everywhere(&built, &case.name);
    }
}

#[test]
fn infinities_among_values_near_the_largest_reach_the_rows_that_see_them() {
    for dtype in [Dtype::F32, Dtype::BF16] {
        let case = Case::new("an infinity", [1, 2, 1, 6, 40, 64, 64], dtype).causal(QOffset::At(34));
        let mut built = build(&case);
        fill(&mut built.v, |[_, _, j, d]| match (j, d) {
            (38, 3) => f32::INFINITY,
            (39, 5) => f32::NAN,
            (37, 7) => f32::NEG_INFINITY,
            _ => 3e38,
        });
        everywhere(&built, &case.name);
    }
}

/// Re-encodes keys from these.
fn with_keys(built: &mut CaseData, key: impl Fn(f32) -> f32) {
    let held = built.k.clone();
    fill(&mut built.k, |index| key(held.get(index)));
    let mut pages = CodePages::new(built.problem.k_codec(), Side::Keys, built.k.view().shape()).unwrap();
    let [count, heads, rows, dim] = built.k.view().shape();
    for (page, row) in (0..count).flat_map(|page| (0..rows).map(move |row| (page, row))) {
        pages.poison(page, row);
        for head in 0..heads {
            let x: Vec<f32> = (0..dim).map(|d| built.k.get([page, head, row, d])).collect();
            if x.iter().all(|x| x.is_finite()) {
                pages.store([page, head, row], &x).unwrap();
            }
        }
    }
    built.k_codes = Some(std::sync::Arc::new(pages));
}

#[test]
fn scores_of_integers_are_as_far_off_as_queries_and_keys_say() {
    let machine: Vec<_> =
        quantizing(1).into_iter().filter(|r| r.cpu.facts().isa == Isa::Avx512Vnni).collect();
    let Some(runner) = machine.first() else {
        println!("SKIPPED, no queries become integers: this machine has no VNNI");
        return;
    };
    let mut worst = 0.0f64;
    for codec in [Codec::Int8, Codec::Tq6] {
        for dim in [64, 128, 512] {
            for (name, kv_len, gain, add, times) in [
                ("one key", 1, 4.0, 3.0, 1.0),
                ("few keys", 3, 4.0, 3.0, 1.0),
                ("long keys", 70, 1.0, 0.0, 20.0),
                ("keys with a constant", 70, 4.0, 3.0, 1.0),
                ("ordinary keys", 70, 1.0, 0.0, 1.0),
            ] {
                for softcap in [None, Some(20.0)] {
                    let lengths = [(1, kv_len), (1, kv_len), (1, kv_len)];
                    let mut case = Case::new(format!("{name} {dim}"), [1, 8, 2, 0, 0, dim, 64], Dtype::F32)
                        .cached(&lengths, 16, Keep::All)
                        .stored(codec, Codec::Int8)
                        .gain(gain);
                    if let Some(softcap) = softcap {
                        case = case.softcap(softcap).scale(0.3);
                    }
                    let mut built = build(&case);
                    with_keys(&mut built, |x| times * (x + add));
                    let expected = reference::attention(&built.problem, &built.inputs()).unwrap();
                    let prepared = Prepared::of(built, expected);
                    let answer = answer(&prepared.built, runner);
                    if let Err(failure) = prepared.check(&answer) {
                        panic!("{name} of {codec}, {dim}, {softcap:?}: {failure}");
                    }
                    let off = integer_errors(&prepared.built.problem, &prepared.built.inputs());
                    for ((got, want), off) in answer.lse.slice().iter().zip(&prepared.expected.lse).zip(off) {
                        let error = (f64::from(*got) - want).abs();
                        worst = worst.max(error / off);
                    }
                }
            }
        }
    }
    println!("the worst logsumexp is off by {worst:.3} of what its scores may be");
    // An error a few times larger is found.
    assert!(worst > 0.4 && worst < 1.0, "{worst}");
}

#[test]
fn edge_cases_of_the_catalogue_pass_on_the_simulator_too() {
    let cases: Vec<Case> = catalogue().into_iter().filter(|case| case.name.starts_with("edge_")).collect();
    assert!(cases.len() > 30);
    let simulator = SimulatorRunner::new();
    let runners = runners();
    for case in cases {
        let prepared = Prepared::new(&case).unwrap();
        let cpu = runners.iter().map(|runner| runner as &dyn Runner);
        for runner in cpu.chain([&simulator as &dyn Runner]) {
            match prepared.run(runner) {
                Ok(_) | Err(Failure::Skipped(_)) => {}
                Err(failure) => panic!("{} on {}: {failure}", case.name, runner.name()),
            }
        }
    }
}

/// A query and keys whose products with a large or a small scale are ordinary numbers.
struct Scaled {
    what: &'static str,
    dtypes: &'static [Dtype],
    scale: f32,
    head_dim: usize,
    /// Elements `d` of queries and of key `j`, from a number of a normal distribution.
    q: fn(usize, f32) -> f32,
    k: fn(usize, usize, f32) -> f32,
    /// True if devices compute it: they multiply the products alone, and may take subnormal numbers for zero.
    on_devices: bool,
}

#[test]
fn scales_that_overflow_a_query_or_take_its_digits_are_applied_to_its_products() {
    use Dtype::{BF16, F32};
    let cases = [
        Scaled {
            what: "an element that the scale makes infinite",
            dtypes: &[F32, BF16],
            scale: 1e9,
            head_dim: 64,
            q: |d, x| if d == 0 { 1e30 } else { 1e-9 * x },
            k: |_, d, x| if d == 0 { 0.0 } else { 0.1 * x },
            on_devices: true,
        },
        Scaled {
            what: "a row that a negative scale makes infinite",
            dtypes: &[F32],
            scale: -1e19,
            head_dim: 512,
            q: |_, x| 1e20 * x,
            k: |_, _, x| 1e-40 * x,
            on_devices: false,
        },
        Scaled {
            what: "the largest element times log2 e",
            dtypes: &[F32, BF16],
            scale: 1.0,
            head_dim: 128,
            q: |d, x| if d == 0 { -3e38 } else { x },
            k: |_, d, x| if d == 0 { 0.0 } else { 0.1 * x },
            on_devices: true,
        },
        Scaled {
            what: "a row that the scale makes subnormal",
            dtypes: &[F32],
            scale: 2e-7,
            head_dim: 512,
            q: |_, _| 1.2e-38,
            k: |j, _, x| if j % 2 == 0 { 3e38 } else { -2.5e38 } * (0.9 + 0.01 * x),
            on_devices: false,
        },
        Scaled {
            what: "a row that the scale makes 0",
            dtypes: &[F32, BF16],
            scale: 1e-20,
            head_dim: 64,
            q: |_, x| 1e-30 * x,
            k: |_, _, x| 1e30 * x,
            on_devices: true,
        },
        Scaled {
            what: "a row that the scale makes small, with products beyond f32",
            dtypes: &[F32],
            scale: 1e-38,
            head_dim: 512,
            q: |_, _| 30.0,
            k: |j, _, x| 3.3e34 * ((j % 7) as f32 / 3.5 - 1.0) + 1e33 * x,
            on_devices: false,
        },
    ];
    for Scaled { what, dtypes, scale, head_dim, q, k, on_devices } in cases {
        for &dtype in dtypes {
            for (q_len, softcap, alibi) in [(1, None, false), (5, Some(20.0), false), (40, None, true)] {
                let mut case = Case::new("scaled", [1, 2, 1, q_len, 270, head_dim, 64], dtype)
                    .scale(scale)
                    .at(QOffset::At(3));
                case.desc.softcap = softcap;
                if alibi {
                    case = case.alibi();
                }
                let mut built = build(&case);
                let (mut rng, mut other) = (Rng::new(1), Rng::new(2));
                for index in built.q.indices() {
                    // Every third row is ordinary.
                    let x = rng.normal();
                    let ordinary = index[2] % 3 == 1;
                    built.q.set(index, if ordinary { 0.0 } else { q(index[3], x) });
                }
                for index in built.k.indices() {
                    built.k.set(index, k(index[2], index[3], other.normal()));
                }
                let what = format!("{what}, {q_len} rows of {dtype}");
                if on_devices {
                    everywhere(&built, &what);
                } else {
                    runners().iter().for_each(|runner| strictly(&built, runner, &what));
                }
            }
        }
    }
}

/// The scale of one row says nothing of another: rows computed together with it keep their bits.
#[test]
fn rows_beside_one_that_its_scale_overflows_keep_their_bits() {
    for (q_len, kv_len) in [(2, 40), (50, 300)] {
        let case = Case::new("beside", [1, 4, 2, q_len, kv_len, 64, 64], Dtype::F32).scale(0.3);
        let ordinary = build(&case);
        let mut built = ordinary.clone();
        fill(&mut built.q, |index| match index {
            [_, _, 1, 0] => 3.3e38,
            [_, _, 1, _] => 0.0,
            _ => ordinary.q.get(index),
        });
        built.problem = case.clone().scale(1.5).desc.validate().unwrap();
        let mut alone = ordinary;
        alone.problem = built.problem.clone();
        for runner in runners() {
            let (with, without) = (answer(&built, &runner), answer(&alone, &runner));
            for row in rows(&built.problem).filter(|row| row[2] != 1) {
                let bits = |answer| row_bits(&built.problem, answer, row);
                assert_eq!(bits(&with), bits(&without), "{row:?} {runner:?}");
            }
        }
    }
}

/// Keys of which one is so far below the others that its probability underflows, with infinite values.
fn underflowing(dtype: Dtype, [q_len, kv_len, at]: [usize; 3], score: f32) -> CaseData {
    let case = Case::new("underflow", [1, 2, 1, q_len, kv_len, 64, 64], dtype).scale(1.0);
    let mut built = build(&case);
    fill(&mut built.q, |[.., d]| if d == 0 { 16.0 } else { 0.0 });
    fill(
        &mut built.k,
        |[_, _, j, d]| if d > 0 { 0.0 } else { score / 16.0 * if j == at { -1.0 } else { 1.0 } },
    );
    for (d, x) in [(3, f32::INFINITY), (5, f32::NEG_INFINITY), (7, f32::INFINITY), (9, f32::NAN)] {
        built.v.set([0, 0, at, d], x);
    }
    // Infinities of both signs, of which one has a probability.
    let other = if at == 0 { kv_len - 1 } else { 0 };
    built.v.set([0, 0, other, 7], f32::NEG_INFINITY);
    built
}

#[test]
fn an_infinite_value_whose_probability_underflows_stays_infinite() {
    // In native CUDA kernels they are NaN.
    let simulators = [SimulatorRunner::new(), SimulatorRunner::prefill()];
    let shapes =
        [[1, 2, 0], [1, 40, 3], [9, 40, 39], [1, 600, 3], [1, 600, 590], [40, 600, 3], [40, 600, 590]];
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        // Differences of 60, 400 and 4000: an ordinary probability, one below f32, and one below f64.
        for (score, shape) in
            [30.0, 200.0, 2000.0].into_iter().flat_map(|score| shapes.map(|shape| (score, shape)))
        {
            // Half precision differs in how values are read, not in their probabilities.
            if dtype != Dtype::F32 && score != 200.0 {
                continue;
            }
            let built = underflowing(dtype, shape, score);
            let expected = reference::attention(&built.problem, &built.inputs()).unwrap();
            for row in expected.out.chunks(64) {
                assert_eq!([row[3], row[5]], [f64::INFINITY, f64::NEG_INFINITY]);
                assert!(row[7].is_nan() && row[9].is_nan());
            }
            let what = format!("{dtype} {score} {shape:?}");
            for runner in runners() {
                strictly(&built, &runner, &what);
                for splits in if shape[1] == 600 { 2..4 } else { 0..0 } {
                    let mut split = PlanOptions::default();
                    split.splits = Some(splits);
                    strictly(&built, &runner.with(split), &what);
                }
            }
            for simulator in simulators.iter().filter(|_| shape[1] < 600) {
                strictly(&built, simulator, &what);
            }
        }
    }
}
