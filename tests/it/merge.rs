//! Merged partial results, compared with the oracle over all keys.

use crate::support::{build, runners};
use flashtile::quality::{Tolerance, compare_lse, compare_out};
use flashtile::{
    AttentionState, Dtype, MaskKind, MaskView, MergeError, Outputs, TensorView, TensorViewMut, merge,
    reference,
};
use flashtile_testkit::{Case, CaseData, CpuRunner, Guarded, GuardedList, Layout, Rng};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// The result over the keys that `shows` selects, in the problem's dtype.
fn part(
    whole: &CaseData,
    case: &Case,
    runner: &CpuRunner,
    shows: impl Fn(usize) -> bool,
    sinks: bool,
) -> (Guarded, GuardedList) {
    let dims = *whole.problem.dims();
    let mut desc = case.desc.clone();
    desc.mask = Some(MaskKind::Bool);
    desc.sinks &= sinks;
    let problem = desc.validate().unwrap();
    let mask: Vec<bool> = (0..dims.kv_len).map(shows).collect();
    let mut inputs = whole.inputs();
    inputs.mask = Some(MaskView::dense_bool(&mask, [1, 1, 1, dims.kv_len]).unwrap());
    inputs.sinks = inputs.sinks.filter(|_| sinks);
    let plan = runner.cpu.plan(&problem, runner.options).unwrap();
    let mut out = Guarded::new(problem.dtype(), dims.out_shape(), Layout::Padded);
    let mut lse = GuardedList::new(dims.lse_shape().iter().product());
    let mut outputs = Outputs::new(out.view_mut());
    outputs.lse = Some(lse.slice_mut());
    runner.cpu.run(&plan, &inputs, &mut outputs, &mut plan.workspace()).unwrap();
    // Rows to which a partial result adds nothing are not read, whatever they hold.
    for index in out.indices() {
        let [b, h, i, _] = index;
        if lse.slice()[(b * dims.q_heads + h) * dims.q_len + i] == f32::NEG_INFINITY {
            out.set(index, f32::NAN);
        }
    }
    (out, lse)
}

#[test]
fn splits_cut_anywhere_merge_to_the_whole() {
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let dtype = DTYPES[rng.below(3)];
        let (kv_heads, group) = (1 + rng.below(2), 1 + rng.below(4));
        let dims = [
            1 + rng.below(2),
            kv_heads * group,
            kv_heads,
            1 + rng.below(20),
            1 + rng.below(600),
            [16, 33, 64][rng.below(3)],
            [7, 64, 130][rng.below(3)],
        ];
        let mut case = Case::new(format!("merge {seed}"), dims, dtype);
        if rng.below(2) == 0 {
            case = case.causal(flashtile::QOffset::BottomRight);
        }
        if rng.below(2) == 0 {
            case = case.sinks();
        }
        if rng.below(3) == 0 {
            case = case.softcap(3.0);
        }
        let whole = build(&case);
        let expected = reference::attention(&whole.problem, &whole.inputs()).unwrap();
        let parts = 1 + rng.below(6);
        // Runs of keys, or individual keys at random.
        let scattered = rng.below(2) == 0;
        let mut cuts: Vec<usize> = (1..parts).map(|_| rng.below(dims[4] + 1)).collect();
        cuts.sort_unstable();
        let owner: Vec<usize> = (0..dims[4])
            .map(|j| if scattered { rng.below(parts) } else { cuts.iter().filter(|&&cut| cut <= j).count() })
            .collect();
        for runner in runners() {
            let results: Vec<_> =
                (0..parts).map(|n| part(&whole, &case, &runner, |j| owner[j] == n, n == parts - 1)).collect();
            let views: Vec<AttentionState<'_>> = results
                .iter()
                .map(|(out, lse)| AttentionState { out: out.view(), lse: lse.slice() })
                .collect();
            let dims = whole.problem.dims();
            for to in [Dtype::F32, dtype] {
                let mut out = Guarded::new(to, dims.out_shape(), Layout::Fused);
                let mut lse = GuardedList::new(dims.lse_shape().iter().product());
                let mut outputs = Outputs::new(out.view_mut());
                outputs.lse = Some(lse.slice_mut());
                merge(&views, &mut outputs).unwrap();
                assert_eq!([out.touched(), lse.touched()], [None, None]);
                let plan = runner.cpu.plan(&whole.problem, runner.options).unwrap();
                let mut tolerance = Tolerance::of(dtype, dims.kv_len, plan.accumulation());
                // Each partial result was rounded to its dtype before, and so is off by as much.
                tolerance.absolute += 2.0 * tolerance.relative;
                let out = compare_out(&out.values(), &expected, dtype, &tolerance);
                let lse = compare_lse(lse.slice(), &expected, &tolerance);
                assert!(out.within() && lse.within(), "{seed} {runner:?} to {to}: {out}\n{lse}");
            }
        }
    }
}

fn merged(parts: &[([f32; 2], f32)]) -> ([f32; 2], f32) {
    let shape = [1, 1, 1, 2];
    let lse: Vec<[f32; 1]> = parts.iter().map(|part| [part.1]).collect();
    let views: Vec<AttentionState<'_>> = parts
        .iter()
        .zip(&lse)
        .map(|((out, _), lse)| AttentionState { out: TensorView::bhsd(out, shape).unwrap(), lse })
        .collect();
    let (mut out, mut lse) = ([f32::NAN; 2], [f32::NAN]);
    let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, shape).unwrap());
    outputs.lse = Some(&mut lse);
    merge(&views, &mut outputs).unwrap();
    (out, lse[0])
}

#[test]
fn rows_without_keys_add_nothing() {
    let none = f32::NEG_INFINITY;
    assert_eq!(merged(&[]), ([0.0, 0.0], none));
    assert_eq!(merged(&[([f32::NAN, 1.0], none)]), ([0.0, 0.0], none));
    assert_eq!(merged(&[([f32::NAN, 1.0], none), ([3.0, -2.5], -7.25)]), ([3.0, -2.5], -7.25));
    assert_eq!(merged(&[([3.0, -2.5], 1e30)]), ([3.0, -2.5], 1e30));
    // Logsumexps whose exponentials overflow.
    assert_eq!(merged(&[([1.0, 0.0], 4000.0), ([5.0, 8.0], 4000.0)]).0, [3.0, 4.0]);
    assert_eq!(merged(&[([1.0, 0.0], -4000.0), ([5.0, 8.0], -4000.0)]).0, [3.0, 4.0]);
    let (out, lse) = merged(&[([1.0, 2.0], f32::NAN), ([1.0, 2.0], 0.0)]);
    assert!(out.iter().all(|x| x.is_nan()) && lse.is_nan());
    let (out, _) = merged(&[([f32::NAN, 2.0], 0.0), ([1.0, 2.0], 0.0)]);
    assert!(out[0].is_nan() && out[1] == 2.0);
}

#[test]
fn one_part_keeps_its_bits() {
    let mut rng = Rng::new(7);
    for dtype in DTYPES {
        for layout in Layout::ALL {
            let shape = [2, 3, 5, 67];
            let mut from = Guarded::new(dtype, shape, Layout::Padded);
            for index in from.indices() {
                from.set(index, rng.normal());
            }
            let lse: Vec<f32> = (0..30).map(|_| rng.normal()).collect();
            let mut out = Guarded::new(dtype, shape, layout);
            merge(&[AttentionState { out: from.view(), lse: &lse }], &mut Outputs::new(out.view_mut()))
                .unwrap();
            assert_eq!(out.bits(), from.bits());
            assert_eq!(out.touched(), None);
        }
    }
}

#[test]
fn refusals_write_nothing() {
    let (a, b) = (Guarded::new(Dtype::F32, [2, 3, 4, 5], Layout::Bhsd), [0.0f32; 24]);
    let other = Guarded::new(Dtype::F16, [2, 3, 4, 6], Layout::Bhsd);
    let mut out = Guarded::new(Dtype::F32, [2, 3, 4, 5], Layout::Bhsd);
    let before = out.bits();
    let refused = |parts: &[AttentionState<'_>], lse: Option<&mut [f32]>, out: &mut Guarded| {
        let mut outputs = Outputs::new(out.view_mut());
        outputs.lse = lse;
        merge(parts, &mut outputs).unwrap_err()
    };
    let good = AttentionState { out: a.view(), lse: &b };
    let error = refused(&[good, AttentionState { out: other.view(), lse: &b }], None, &mut out);
    assert_eq!(error, MergeError::Shape { state: 1, expected: [2, 3, 4, 5], got: [2, 3, 4, 6] });
    assert_eq!(error.to_string(), "out of state 1 has shape [2, 3, 4, 6], expected [2, 3, 4, 5]");
    let error = refused(&[good, AttentionState { out: a.view(), lse: &b[..23] }], None, &mut out);
    assert_eq!(error.to_string(), "lse of state 1 has 23 elements, expected 24");
    let mut short = [1.0; 25];
    let error = refused(&[good], Some(&mut short), &mut out);
    assert_eq!(error.to_string(), "lse has 25 elements, expected 24");
    assert_eq!(short, [1.0; 25]);
    assert_eq!(out.bits(), before);
}

#[test]
fn factors_add_up_to_1_at_any_magnitude() {
    // `f32::MIN` is the logsumexp of rows whose keys a mask hides by the smallest f32.
    for lse in [0.0, -60000.0, 1e12, 1e15, -1e15, 3e20, -3e20, 1e38, f32::MAX, f32::MIN] {
        for count in [1, 2, 3, 8] {
            let (out, of_all) = merged(&vec![([1.0, -2.0], lse); count]);
            assert_eq!(out, [1.0, -2.0], "{count} of {lse:e}");
            assert!(
                (of_all - lse).abs() <= 1e-6 * lse.abs() + (count as f32).ln(),
                "{count} of {lse:e}: {of_all:e}"
            );
        }
        // Factors of 3 to 1, where f32 has such neighbours.
        if lse.abs() < 1e5 {
            let (out, _) = merged(&[([1.0, 0.0], lse + 3f32.ln()), ([0.0, 1.0], lse)]);
            assert!((out[0] - 0.75).abs() < 2e-3 && (out[1] - 0.25).abs() < 2e-3, "{lse:e}: {out:?}");
        }
        // A larger one decides alone.
        assert_eq!(merged(&[([1.0, -2.0], lse), ([5.0, 8.0], f32::NEG_INFINITY)]).0, [1.0, -2.0]);
    }
}

/// Rows whose keys are hidden by the smallest f32, in both halves of the keys, are the mean of both halves as they are of the whole.
#[test]
fn rows_that_the_smallest_bias_hides_merge() {
    let case = Case::new("hidden", [1, 2, 1, 3, 40, 16, 16], Dtype::F32);
    let whole = build(&case);
    let mut desc = case.desc;
    desc.mask = Some(MaskKind::Additive(Dtype::F32));
    let problem = desc.validate().unwrap();
    for runner in runners() {
        let half = |keys: std::ops::Range<usize>| {
            let bias: Vec<f32> =
                (0..40).map(|j| if keys.contains(&j) { f32::MIN } else { f32::NEG_INFINITY }).collect();
            let mut inputs = whole.inputs();
            inputs.mask = Some(MaskView::dense_additive(&bias, [1, 1, 1, 40]).unwrap());
            let plan = runner.cpu.plan(&problem, runner.options).unwrap();
            let mut out = Guarded::new(Dtype::F32, [1, 2, 3, 16], Layout::Bhsd);
            let mut lse = GuardedList::new(6);
            let mut outputs = Outputs::new(out.view_mut());
            outputs.lse = Some(lse.slice_mut());
            runner.cpu.run(&plan, &inputs, &mut outputs, &mut plan.workspace()).unwrap();
            (out, lse)
        };
        let (all, halves) = (half(0..40), [half(0..20), half(20..40)]);
        let views = halves.each_ref().map(|(out, lse)| AttentionState { out: out.view(), lse: lse.slice() });
        let mut out = Guarded::new(Dtype::F32, [1, 2, 3, 16], Layout::Bhsd);
        merge(&views, &mut Outputs::new(out.view_mut())).unwrap();
        for (got, want) in out.values().iter().zip(all.0.values()) {
            assert!((got - want).abs() < 1e-6, "{got} {want}");
        }
    }
}
