//! Defects found in attention kernels that are in use, each with a test that detects it.

use crate::support::{MASK_KINDS, answer, build, fill, options, row_bits, rows, runners, seers};
use flashtile::{Dtype, MaskKind, MaskView, Outputs, ProblemError, QOffset, Visibility};
use flashtile_testkit::{Case, CaseData, CpuRunner, Guarded, Layout, MaskFill, Prepared, run_case};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

fn pass(case: &Case) {
    let prepared = Prepared::new(case).unwrap();
    for runner in runners() {
        if let Err(failure) = prepared.run(&runner) {
            panic!("{}: {failure}", case.name);
        }
    }
}

/// Checks every (row, key) pair: makes each value NaN in turn and compares which rows become NaN.
fn no_pair_leaks(case: &Case, runner: &CpuRunner) {
    let clean = build(case);
    let problem = &clean.problem;
    let dims = problem.dims();
    for s in problem.sequences() {
        for key in s.kv_start..s.kv_start + s.kv_len {
            let mut spoiled = clean.clone();
            for kv_head in 0..dims.kv_heads {
                for d in 0..dims.value_dim {
                    spoiled.v.set([s.batch, kv_head, key, d], f32::NAN);
                }
            }
            let out = answer(&spoiled, runner).out;
            let seen: Vec<_> = (0..dims.kv_heads).flat_map(|h| seers(&clean, [s.batch, h, key])).collect();
            for [b, h, row] in rows(problem) {
                let nan = out.get([b, h, row, 0]).is_nan();
                let sees = seen.contains(&[b, h, row]);
                assert_eq!(nan, sees, "{}: row {:?} and key {key}, {:?}", case.name, [b, h, row], runner);
            }
        }
    }
}

#[test]
fn a_causal_offset_that_is_not_a_multiple_of_a_tile_leaks_no_pair() {
    for runner in runners() {
        for dtype in DTYPES {
            let case = Case::new("leak", [1, 1, 1, 40, 48, 64, 64], dtype).causal(QOffset::At(8));
            no_pair_leaks(&case, &runner);
        }
        for (q_len, offset) in
            [(34, 14), (35, 13), (47, 17), (50, 30), (64, 8), (33, 31), (40, -8), (70, 250)]
        {
            let kv_len = usize::try_from(q_len + offset).unwrap().next_multiple_of(16);
            let dims = [1, 2, 1, usize::try_from(q_len).unwrap(), kv_len, 8, 4];
            no_pair_leaks(&Case::new("leak", dims, Dtype::F32).causal(QOffset::At(offset)), &runner);
        }
    }
}

#[test]
fn keys_past_the_length_are_never_read() {
    for dtype in DTYPES {
        for kv_len in [1, 31, 33, 63, 255, 257] {
            let case = Case::new("past", [2, 4, 2, 3, 320, 64, 64], dtype).kv_lens(&[kv_len, 320 - kv_len]);
            // Padding is NaN; with zeros there, the bits must be the same.
            let poisoned = build(&case);
            let mut zeroed = poisoned.clone();
            for tensor in [&mut zeroed.k, &mut zeroed.v] {
                for index in tensor.indices() {
                    if index[2] >= poisoned.problem.sequences()[index[0]].kv_len {
                        tensor.set(index, 0.0);
                    }
                }
            }
            for runner in runners() {
                let (a, b) = (answer(&poisoned, &runner), answer(&zeroed, &runner));
                assert!(a.out.values().iter().all(|x| x.is_finite()), "{kv_len} {runner:?}");
                assert_eq!(a.bits(), b.bits(), "{kv_len} {runner:?}");
            }
        }
    }
}

#[test]
fn finite_f16_biases_at_head_dim_512_are_added_as_f16() {
    for kv_len in [64, 65, 301] {
        for fill in [MaskFill::Random, MaskFill::Extreme] {
            let case = Case::new("bias", [1, 2, 1, 24, kv_len, 512, 512], Dtype::F16);
            pass(&case.mask(MaskKind::Additive(Dtype::F16), "", fill));
        }
    }
}

#[test]
fn a_bias_beyond_f16_does_not_saturate() {
    // Two keys, one 70000 above the other: beyond f16, exact in f32 and bf16.
    for mask_dtype in [Dtype::F32, Dtype::BF16] {
        let case = Case::new("huge bias", [1, 1, 1, 4, 300, 512, 512], Dtype::F16);
        let mut built = build(&case.mask(MaskKind::Additive(mask_dtype), "bh", MaskFill::Open));
        let Some(flashtile_testkit::GuardedMask::Additive(mask)) = &mut built.mask else {
            unreachable!("asked for an additive mask")
        };
        fill(mask, |[_, _, i, j]| if j == i { 140_000.0 } else { 70_000.0 });
        for runner in runners() {
            let out = answer(&built, &runner).out;
            for index in out.indices() {
                assert_eq!(out.get(index), built.v.get([0, 0, index[2], index[3]]), "{index:?} {runner:?}");
            }
        }
    }
}

/// With every score 0, the logsumexp is the logarithm of the number of keys seen.
fn counts(case: &Case, runner: &CpuRunner) -> Vec<f64> {
    let mut built = build(case);
    fill(&mut built.q, |_| 0.0);
    answer(&built, runner).lse.slice().iter().map(|&lse| f64::from(lse).exp()).collect()
}

#[test]
fn a_window_holds_the_same_number_of_keys_everywhere() {
    for runner in runners() {
        for (left, right) in [(0, 0), (1, 0), (7, 0), (31, 0), (32, 0), (5, 3), (255, 0), (256, 1)] {
            for (q_len, kv_len, offset) in
                [(1, 600, 599), (5, 600, 400), (40, 600, 300), (300, 300, 0), (64, 33, 0)]
            {
                for dtype in DTYPES {
                    let case = Case::new("window", [1, 2, 1, q_len, kv_len, 16, 16], dtype)
                        .seeing(Visibility::window(Some(left), Some(right)))
                        .at(QOffset::At(offset));
                    for (row, count) in counts(&case, &runner).into_iter().enumerate() {
                        let p = (row % q_len) as i64 + offset;
                        let seen = (0..kv_len as i64)
                            .filter(|j| p - left as i64 <= *j && *j <= p + right as i64)
                            .count();
                        let close = (count - seen as f64).abs() < 1e-3 * seen as f64 + 1e-9;
                        assert!(close, "({left}, {right}) {dtype} row {row}: {count} keys, expected {seen}");
                    }
                }
            }
        }
    }
}

#[test]
fn causal_alignment_is_asked_for_and_obeyed() {
    let case = |q_len, kv_len| Case::new("alignment", [1, 1, 1, q_len, kv_len, 16, 16], Dtype::F32);
    for (q_len, kv_len) in [(7, 20), (20, 7), (1, 20), (40, 48)] {
        let unsaid = case(q_len, kv_len).seeing(Visibility::causal()).desc.validate();
        assert!(matches!(unsaid, Err(ProblemError::OffsetUnsaid { .. })), "{unsaid:?}");
        for (offset, position) in [
            (QOffset::TopLeft, 0),
            (QOffset::BottomRight, kv_len as i64 - q_len as i64),
            (QOffset::At(3), 3),
            (QOffset::At(-3), -3),
        ] {
            for runner in runners() {
                for (i, count) in counts(&case(q_len, kv_len).causal(offset), &runner).into_iter().enumerate()
                {
                    let seen = (i as i64 + position + 1).clamp(0, kv_len as i64);
                    assert_eq!(count.round() as i64, seen, "{offset:?} row {i} of {q_len} over {kv_len}");
                }
            }
        }
    }
}

#[test]
fn causality_is_obeyed_only_where_it_was_asked_for() {
    for dtype in DTYPES {
        for q_len in [1, 4, 40] {
            let case = Case::new("not causal", [1, 2, 2, q_len, 40, 32, 32], dtype);
            for runner in runners() {
                no_pair_leaks(&case, &runner);
                assert!(counts(&case, &runner).iter().all(|count| count.round() == 40.0), "{dtype} {q_len}");
            }
        }
    }
}

#[test]
fn more_queries_than_keys_is_an_ordinary_problem() {
    for dtype in DTYPES {
        for (q_len, kv_len) in [(2, 1), (65, 64), (300, 17), (513, 257)] {
            let case = Case::new("more queries", [1, 2, 1, q_len, kv_len, 32, 32], dtype);
            pass(&case);
            pass(&case.clone().causal(QOffset::TopLeft));
            pass(&case.clone().causal(QOffset::BottomRight));
            pass(&case.seeing(Visibility::window(Some(9), Some(0))).at(QOffset::TopLeft));
        }
    }
}

#[test]
fn a_softcap_is_applied_by_every_kernel() {
    // Equal keys: every score is scale * q.k, so lse = softcap(scale * q.k) + ln(n).
    for dtype in DTYPES {
        for q_len in [1, 3, 40] {
            for head_dim in [16, 256, 512] {
                let case =
                    Case::new("softcap", [1, 2, 1, q_len, 290, head_dim, 16], dtype).softcap(2.0).scale(1.0);
                let mut built = build(&case);
                fill(&mut built.q, |[_, _, _, d]| if d == 0 { 3.0 } else { 0.0 });
                fill(&mut built.k, |_| 1.0);
                let want = 2.0 * (3.0f64 / 2.0).tanh() + 290f64.ln();
                for runner in runners() {
                    for &lse in answer(&built, &runner).lse.slice() {
                        assert!((f64::from(lse) - want).abs() < 2e-6 * want, "{lse} {want} {runner:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_scale_is_applied_once_in_natural_units() {
    // lse of n equal scores x is x + ln(n): a missing or extra factor log2(e) shows at once.
    for dtype in DTYPES {
        for (q_len, head_dim) in [(1, 64), (40, 64), (1, 512), (40, 512)] {
            for scale in [None, Some(0.25)] {
                let mut case = Case::new("scale", [1, 1, 1, q_len, 70, head_dim, 8], dtype);
                case.desc.scale = scale;
                let mut built = build(&case);
                // Two terms, which are exact in any order: the rounding of the sum is not tested here.
                let ends = |d: usize| if d == 0 || d + 1 == head_dim { 2.0 } else { 0.0 };
                fill(&mut built.q, |[_, _, _, d]| ends(d));
                fill(&mut built.k, |_| 1.5);
                let scale = scale.map_or(1.0 / (head_dim as f64).sqrt(), f64::from);
                let want = scale * 6.0 + 70f64.ln();
                for runner in runners() {
                    for &lse in answer(&built, &runner).lse.slice() {
                        assert!((f64::from(lse) - want).abs() < 2e-6 * want, "{lse} {want} {runner:?}");
                    }
                }
            }
        }
    }
}

/// Checks that rows without a visible key are exactly 0 with a logsumexp of -inf, and that there are such rows.
fn hidden_rows_are_zero(case: &Case) {
    let built = build(case);
    let (problem, inputs) = (&built.problem, built.inputs());
    for options in [options(None, true), options(None, false)] {
        for runner in runners() {
            let answer = answer(&built, &runner.with(options));
            let mut hidden = 0;
            for [b, h, i] in rows(problem) {
                let s = problem.sequences()[b];
                let sees = |j: usize| inputs.mask.is_none_or(|m| m.bias([b, h, i, j]) != f32::NEG_INFINITY);
                if !problem.visible(&s, i).any(sees) {
                    hidden += 1;
                    let mut want = vec![0.0f32.to_bits(); problem.dims().value_dim];
                    want.push(f32::NEG_INFINITY.to_bits());
                    assert_eq!(row_bits(problem, &answer, [b, h, i]), want, "{} row {i}", case.name);
                }
            }
            assert!(hidden > 0, "{}", case.name);
        }
    }
}

#[test]
fn a_row_that_sees_no_key_is_zero() {
    for dtype in DTYPES {
        let of = |name: &str, q_len| Case::new(name, [1, 2, 1, q_len, 300, 24, 24], dtype);
        for q_len in [1, 2, 40] {
            hidden_rows_are_zero(&of("before all keys", q_len).causal(QOffset::At(-40)));
            hidden_rows_are_zero(
                &of("past the window", q_len)
                    .seeing(Visibility::window(Some(5), Some(5)))
                    .at(QOffset::At(400)),
            );
            for kind in MASK_KINDS {
                hidden_rows_are_zero(&of("closed", q_len).mask(kind, "", MaskFill::Closed));
                hidden_rows_are_zero(&of("closed row", q_len.max(2)).mask(kind, "h", MaskFill::HiddenRows));
            }
        }
        // Some rows of one tile see keys and others do not.
        hidden_rows_are_zero(&of("partly before", 40).causal(QOffset::At(-20)));
        let masked = of("mask and causality", 40).causal(QOffset::At(-3));
        hidden_rows_are_zero(&masked.mask(MaskKind::Bool, "", MaskFill::HiddenRows));
        hidden_rows_are_zero(&Case::new("no keys", [2, 2, 1, 9, 0, 8, 8], dtype));
        hidden_rows_are_zero(&of("length 0", 9).kv_lens(&[0]));
    }
}

#[test]
fn a_row_that_sees_no_key_has_its_sink_as_logsumexp() {
    for q_len in [1, 40] {
        let case = Case::new("sink", [1, 3, 1, q_len, 300, 8, 8], Dtype::F32);
        let built = build(&case.sinks().mask(MaskKind::Bool, "", MaskFill::Closed));
        let sinks = built.inputs().sinks.unwrap().to_vec();
        for runner in runners() {
            let answer = answer(&built, &runner);
            assert!(answer.out.values().iter().all(|&x| x == 0.0));
            for [b, h, i] in rows(&built.problem) {
                let lse = f32::from_bits(row_bits(&built.problem, &answer, [b, h, i])[8]);
                assert!((lse - sinks[h]).abs() <= 1e-6 * sinks[h].abs(), "{lse} {}", sinks[h]);
            }
        }
    }
}

#[test]
fn every_plane_of_a_mask_has_its_own_tiles() {
    // Each head and batch entry hides other tiles: mask tiles of one plane would be wrong for the others.
    for kind in MASK_KINDS {
        for broadcast in ["", "b", "h"] {
            let case = Case::new("planes", [3, 4, 2, 130, 900, 8, 8], Dtype::F32);
            let case = case.mask(kind, broadcast, MaskFill::Blocks);
            pass(&case);
            let built = build(&case);
            for runner in runners() {
                let skipping = answer(&built, &runner).bits();
                assert_eq!(skipping, answer(&built, &runner.with(options(None, false))).bits());
            }
        }
    }
}

#[test]
fn a_single_open_key_anywhere_in_a_tile_is_seen() {
    // A pre-pass that reads only part of a tile would take it for hidden.
    let case = Case::new("single", [1, 1, 1, 33, 530, 8, 8], Dtype::F32).mask(
        MaskKind::Bool,
        "bh",
        MaskFill::Closed,
    );
    let built = build(&case);
    let dims = *built.problem.dims();
    for (i, j) in [(0, 0), (0, 255), (0, 529), (15, 31), (15, 256), (16, 511), (31, 512), (32, 63), (32, 529)]
    {
        let mut mask = vec![false; dims.q_len * dims.kv_len];
        mask[i * dims.kv_len + j] = true;
        let mut inputs = built.inputs();
        inputs.mask = Some(MaskView::dense_bool(&mask, [1, 1, dims.q_len, dims.kv_len]).unwrap());
        for runner in runners() {
            let plan = runner.cpu.plan(&built.problem, runner.options).unwrap();
            let mut out = Guarded::new(Dtype::F32, dims.out_shape(), Layout::Bhsd);
            runner.cpu.run(&plan, &inputs, &mut Outputs::new(out.view_mut()), &mut plan.workspace()).unwrap();
            for index @ [_, _, row, d] in out.indices() {
                let want = if row == i { built.v.get([0, 0, j, d]) } else { 0.0 };
                assert_eq!(out.get(index), want, "({i}, {j}) {index:?} {runner:?}");
            }
        }
    }
}

#[test]
fn a_single_hidden_key_anywhere_in_a_tile_is_hidden() {
    let case = Case::new("hole", [1, 1, 1, 33, 530, 8, 8], Dtype::F32).mask(
        MaskKind::Additive(Dtype::F32),
        "bh",
        MaskFill::Open,
    );
    let clean = build(&case);
    for (i, j) in [(0, 0), (0, 255), (0, 529), (15, 31), (15, 256), (16, 511), (31, 512), (32, 63), (32, 529)]
    {
        let mut built: CaseData = clean.clone();
        let Some(flashtile_testkit::GuardedMask::Additive(mask)) = &mut built.mask else {
            unreachable!("asked for an additive mask")
        };
        mask.set([0, 0, i, j], f32::NEG_INFINITY);
        for d in 0..8 {
            built.v.set([0, 0, j, d], f32::NAN);
        }
        for runner in runners() {
            let out = answer(&built, &runner).out;
            for index in out.indices() {
                assert_eq!(out.get(index).is_nan(), index[2] != i, "({i}, {j}) {index:?} {runner:?}");
            }
        }
    }
}

#[test]
fn several_query_rows_are_written_where_the_output_has_them() {
    for layout in Layout::ALL {
        for q_len in [1, 2, 7] {
            pass(&Case::new("rows", [2, 4, 2, q_len, 50, 32, 16], Dtype::F32).layout(layout));
        }
    }
}

#[test]
fn sinks_work_at_every_head_dim_and_length() {
    for dtype in DTYPES {
        for head_dim in [8, 64, 128, 256, 512] {
            for q_len in [1, 20] {
                let case = Case::new("sinks", [1, 4, 2, q_len, 270, head_dim, head_dim], dtype).sinks();
                pass(&case.clone().causal(QOffset::BottomRight));
                pass(&case);
            }
        }
    }
}

#[test]
fn a_head_dim_beyond_the_limit_is_refused() {
    let case = Case::new("wide", [1, 1, 1, 1, 1, 513, 1], Dtype::F32);
    assert_eq!(case.desc.validate().unwrap_err().to_string(), "head_dim 513 is outside 1..=512");
}

#[test]
fn an_oversized_buffer_is_a_view_not_a_length() {
    // A decode cache with room for more keys than it holds: keys past the view are poison.
    for runner in runners() {
        for layout in Layout::ALL {
            let case = Case::new("capacity", [1, 8, 2, 1, 1024, 64, 64], Dtype::BF16);
            let outcome = run_case(&case.layout(layout).kv_lens(&[77]).causal(QOffset::BottomRight), &runner);
            assert!(outcome.is_ok(), "{}", outcome.unwrap_err());
        }
    }
}
