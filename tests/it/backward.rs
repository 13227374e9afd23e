//! Gradients: the oracle against finite differences, and the CPU against the oracle.
//!
//! `FLASHTILE_SEEDS=first..last` selects the seeds of random problems.

use crate::properties::seeds;
use crate::support::options;
use flashtile::plan::{CpuFacts, Isa, Unsupported, machines};
use flashtile::problem::{KvStorage, Sequences};
use flashtile::reference::{self, AttentionGradients};
use flashtile::{Cpu, CpuBackwardPlan, Dims, Dtype, MaskKind, PlanOptions, ProblemDesc, QOffset, Visibility};
use flashtile_testkit::{
    BackwardCase, Case, CaseData, GradientAnswer, Guarded, GuardedList, GuardedMask, MaskFill, Rng,
    random_case,
};
use rayon::prelude::*;

/// A random case of the features that have gradients: its sequences are not cached.
fn case_of(name: String, rng: &mut Rng) -> Case {
    loop {
        let case = random_case(name.clone(), &mut |n| rng.below(n));
        if !matches!(case.desc.sequences, Sequences::Cached { .. }) {
            return case;
        }
    }
}

/// Small cases with every feature that has a derivative.
fn small_cases() -> Vec<Case> {
    let case = |name: &str| Case::new(name, [2, 2, 1, 3, 4, 3, 2], Dtype::F32);
    let additive = MaskKind::Additive(Dtype::F32);
    vec![
        case("plain").at(QOffset::TopLeft),
        case("causal").causal(QOffset::BottomRight),
        case("rows_without_keys").causal(QOffset::At(-2)),
        case("window_softcap")
            .seeing(Visibility::window(Some(2), Some(0)))
            .at(QOffset::BottomRight)
            .softcap(0.7),
        case("alibi_sinks").alibi().sinks().at(QOffset::At(1)),
        case("alibi_per_sequence").alibi_per_sequence().at(QOffset::TopLeft),
        case("bias_everything").mask(additive, "", MaskFill::Random).softcap(1.5).sinks(),
        case("bias_of_heads").mask(additive, "bq", MaskFill::Random),
        case("bias_of_keys").mask(additive, "hk", MaskFill::HiddenRows),
        case("bias_of_queries").mask(additive, "bhk", MaskFill::Random).scale(-0.8),
        case("padded").kv_lens(&[4, 1]).sinks(),
        Case::new("packed", [1, 2, 1, 0, 0, 3, 2], Dtype::F32).packed(&[(2, 3), (0, 2), (3, 0), (1, 1)]),
    ]
}

/// `sum(d_out * out) + sum(d_lse * lse)`, a loss with the gradients of a case.
fn loss(case: &BackwardCase, built: &CaseData) -> f64 {
    let result = reference::attention(&built.problem, &built.inputs()).unwrap();
    let sum = |a: &[f32], b: &[f64]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * b).sum::<f64>();
    // Rows without keys have an lse of -inf, whose gradient is 0.
    let finite: Vec<f64> = result.lse.iter().map(|&x| if x.is_finite() { x } else { 0.0 }).collect();
    sum(&case.d_out.values(), &result.out)
        + case.d_lse.as_ref().map_or(0.0, |d_lse| sum(d_lse.slice(), &finite))
}

/// The quotient of central differences with respect to one number, which `set` replaces.
fn difference(case: &BackwardCase, x: f32, set: impl Fn(&mut CaseData, f32)) -> f64 {
    let at = |x: f32| {
        let mut built = case.data.clone();
        set(&mut built, x);
        loss(case, &built)
    };
    // The error is of the fourth order in the step.
    let quotient = |step: f32| {
        let (a, b) = (x - step, x + step);
        (at(b) - at(a)) / (f64::from(b) - f64::from(a))
    };
    (4.0 * quotient(1.0 / 256.0) - quotient(1.0 / 128.0)) / 3.0
}

/// Quotients of central differences with respect to the elements of a tensor; 0 for padding and hidden keys, which are not finite.
fn differences(case: &BackwardCase, tensor: fn(&mut CaseData) -> &mut Guarded) -> Vec<f64> {
    let of_case = tensor(&mut case.data.clone()).clone();
    let quotient = |at: [usize; 4]| match of_case.get(at) {
        x if x.is_finite() => difference(case, x, |built, x| tensor(built).set(at, x)),
        _ => 0.0,
    };
    of_case.indices().map(quotient).collect()
}

/// Quotients of central differences with respect to a list.
fn list_differences(case: &BackwardCase, list: fn(&mut CaseData) -> Option<&mut GuardedList>) -> Vec<f64> {
    let of_case = list(&mut case.data.clone()).map_or(Vec::new(), |list| list.slice().to_vec());
    let set = |index: usize| move |built: &mut CaseData, x: f32| list(built).unwrap().slice_mut()[index] = x;
    of_case.iter().enumerate().map(|(index, &x)| difference(case, x, set(index))).collect()
}

fn additive_mask(built: &mut CaseData) -> &mut Guarded {
    match &mut built.mask {
        Some(GuardedMask::Additive(tensor)) => tensor,
        _ => panic!("the case has an additive mask"),
    }
}

#[test]
fn the_oracle_agrees_with_central_differences() {
    for case in small_cases() {
        let prepared = BackwardCase::new(&case).unwrap();
        let check = |tensor: &str, want: &[f64], got: &[f64]| {
            assert_eq!(got.len(), want.len(), "{tensor} of {}", case.name);
            for (index, (&got, &want)) in got.iter().zip(want).enumerate() {
                let is_near = (got - want).abs() <= 1e-6 * (1.0 + want.abs());
                assert!(is_near, "{tensor}[{index}] of {}: {got}, oracle {want}", case.name);
            }
        };
        let AttentionGradients { d_q, d_k, d_v, d_sinks, d_bias, d_alibi_slopes, .. } = &prepared.want;
        check("d_q", d_q, &differences(&prepared, |built| &mut built.q));
        check("d_k", d_k, &differences(&prepared, |built| &mut built.k));
        check("d_v", d_v, &differences(&prepared, |built| &mut built.v));
        check("d_sinks", d_sinks, &list_differences(&prepared, |built| built.sinks.as_mut()));
        check(
            "d_alibi_slopes",
            d_alibi_slopes,
            &list_differences(&prepared, |built| built.alibi_slopes.as_mut()),
        );
        if !d_bias.is_empty() {
            check("d_bias", d_bias, &differences(&prepared, additive_mask));
        }
    }
}

#[test]
fn small_cases_match_the_oracle() {
    for case in small_cases() {
        let prepared = BackwardCase::new(&case).unwrap();
        for isa in Cpu::isas() {
            let answer = prepared.run(&Cpu::with_isa(isa).unwrap(), PlanOptions::default()).unwrap();
            prepared.check(&answer).unwrap_or_else(|failure| panic!("{} on {isa}: {failure}", case.name));
        }
    }
}

#[test]
fn random_problems_match_the_oracle() {
    let run = |seed: u64| -> Vec<String> {
        let mut rng = Rng::new(seed);
        let case = case_of(format!("seed {seed}"), &mut rng);
        let prepared = BackwardCase::new(&case).unwrap();
        let mut failures = Vec::new();
        for isa in Cpu::isas() {
            let cpu = Cpu::with_isa(isa).unwrap().with_threads(1 + rng.below(3));
            let options = options((rng.below(2) == 0).then(|| 1 + rng.below(2)), rng.below(4) > 0);
            let answer = prepared.run(&cpu, options);
            if let Err(failure) = answer.and_then(|answer| prepared.check(&answer)) {
                failures.push(format!(
                    "FLASHTILE_SEEDS={seed}..{} on {isa}, {options:?}: {failure}\n  {case:?}",
                    seed + 1
                ));
            }
        }
        failures
    };
    let failures: Vec<String> = seeds(0..400).into_par_iter().flat_map_iter(run).collect();
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn memory_beside_the_tensors_is_small() {
    for (q_heads, kv_heads, dtype) in [(8, 8, Dtype::F32), (8, 8, Dtype::BF16), (32, 8, Dtype::F16)] {
        for facts in [machines::AVX512_2, machines::AVX512BF16_8] {
            let facts = CpuFacts { threads: 2, ..facts };
            let (q_len, head_dim) = (8192, 128);
            let dims =
                Dims { batch: 1, q_heads, kv_heads, q_len, kv_len: q_len, head_dim, value_dim: head_dim };
            let problem = ProblemDesc::new(dims, dtype).validate().unwrap();
            let plan = CpuBackwardPlan::new(&problem, &facts, PlanOptions::default()).unwrap();
            println!("{plan}");
            assert!(plan.workspace_bytes() < 64 << 20, "{plan}");
        }
    }
}

#[test]
fn caches_and_values_inside_keys_have_no_gradients() {
    let refused = |case: Case| {
        let problem = case.build().unwrap().problem;
        Cpu::new().plan_backward(&problem, PlanOptions::default()).unwrap_err()
    };
    let cached = Case::new("cached", [1, 2, 1, 0, 0, 8, 8], Dtype::F32).cached(
        &[(1, 5)],
        4,
        flashtile_testkit::Keep::All,
    );
    assert!(matches!(refused(cached), Unsupported::Backward { .. }));
    let mut columns = Case::new("columns", [1, 2, 1, 3, 3, 8, 4], Dtype::F32);
    columns.desc.kv_storage = KvStorage::KeyColumns;
    assert!(matches!(refused(columns), Unsupported::Backward { .. }));
}

/// Cases whose keys are several chunks, which tasks and levels divide.
fn long_cases() -> Vec<Case> {
    let case = |name: &str, dims, dtype| Case::new(name, dims, dtype);
    let additive = MaskKind::Additive(Dtype::F32);
    vec![
        case("long_causal", [1, 2, 2, 230, 2300, 16, 16], Dtype::F32).causal(QOffset::BottomRight),
        case("long_gqa_window", [2, 4, 1, 70, 1500, 20, 12], Dtype::BF16)
            .seeing(Visibility::window(Some(700), Some(0)))
            .at(QOffset::At(1300))
            .softcap(5.0),
        case("long_padded", [2, 2, 1, 100, 1700, 8, 24], Dtype::F16)
            .kv_lens(&[1700, 1025])
            .alibi()
            .at(QOffset::BottomRight),
        case("long_bias", [2, 2, 2, 40, 1300, 8, 8], Dtype::F32)
            .mask(additive, "b", MaskFill::Blocks)
            .sinks(),
        case("long_bias_of_queries", [2, 2, 1, 600, 1100, 8, 8], Dtype::F32).mask(
            additive,
            "bhk",
            MaskFill::Random,
        ),
    ]
}

#[test]
fn long_problems_match_the_oracle_and_bits_do_not_depend_on_plans() {
    for case in long_cases() {
        let prepared = BackwardCase::new(&case).unwrap();
        for isa in Cpu::isas() {
            let cpu = |threads: usize| Cpu::with_isa(isa).unwrap().with_threads(threads);
            let answer = prepared.run(&cpu(1), PlanOptions::default()).unwrap();
            prepared.check(&answer).unwrap_or_else(|failure| panic!("{} on {isa}: {failure}", case.name));
            let plans = [
                (2, None, true),
                (1, Some(2), true),
                (5, Some(2), false),
                (64, None, true),
                (3, Some(1), false),
            ];
            for (threads, splits, skip_tiles) in plans {
                let other = prepared.run(&cpu(threads), options(splits, skip_tiles)).unwrap();
                assert_eq!(
                    other.bits(),
                    answer.bits(),
                    "{} on {isa}, {threads} threads, {splits:?}",
                    case.name
                );
            }
        }
    }
}

#[test]
fn partial_d_q_of_several_levels_are_added_up_in_order() {
    let mut case = Case::new("levels", [1, 1, 1, 20_000, 20_000, 32, 4], Dtype::F32);
    case.desc.visibility = Visibility::window(Some(6), Some(0));
    let prepared = BackwardCase::new(&case).unwrap();
    let [whole, cut] =
        [1, 2].map(|splits| prepared.run(&Cpu::new().with_threads(1), options(Some(splits), true)).unwrap());
    prepared.check(&whole).unwrap();
    assert_eq!(cut.bits(), whole.bits());
}

/// A case with a loss of its own rows, from which `change` takes tensors.
fn run(case: &Case, change: impl Fn(&mut BackwardCase)) -> Vec<(Isa, GradientAnswer)> {
    let mut prepared = BackwardCase::new(case).unwrap();
    change(&mut prepared);
    let cpus = Cpu::isas().into_iter().map(|isa| (isa, Cpu::with_isa(isa).unwrap()));
    cpus.map(|(isa, cpu)| (isa, prepared.run(&cpu, PlanOptions::default()).unwrap())).collect()
}

#[test]
fn bits_of_a_sequence_do_not_depend_on_its_batch_neighbors() {
    for dtype in [Dtype::F32, Dtype::BF16] {
        let lens = [(40, 1200), (3, 7), (0, 5), (64, 64)];
        let together =
            Case::new("together", [1, 2, 1, 0, 0, 16, 16], dtype).packed(&lens).causal(QOffset::BottomRight);
        let prepared = BackwardCase::new(&together).unwrap();
        let problem = prepared.problem();
        for isa in Cpu::isas() {
            let cpu = Cpu::with_isa(isa).unwrap();
            let all = prepared.run(&cpu, PlanOptions::default()).unwrap();
            for (n, &len) in lens.iter().enumerate() {
                let s = problem.sequences()[n];
                let alone = Case::new("alone", [1, 2, 1, 0, 0, 16, 16], dtype)
                    .packed(&[len])
                    .causal(QOffset::BottomRight);
                let mut alone = BackwardCase::new(&alone).unwrap();
                alone.copy_sequence(&prepared, &s);
                let one = alone.run(&cpu, PlanOptions::default()).unwrap();
                for (of_one, of_all, start) in [
                    (&one.d_q, &all.d_q, s.q_start),
                    (&one.d_k, &all.d_k, s.kv_start),
                    (&one.d_v, &all.d_v, s.kv_start),
                ] {
                    for [b, h, row, d] in of_one.indices() {
                        let other = of_all.get([b, h, start + row, d]);
                        assert_eq!(
                            of_one.get([b, h, row, d]).to_bits(),
                            other.to_bits(),
                            "{isa}, sequence {n}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn rows_that_see_no_key_have_gradients_of_zero_and_give_none() {
    // Queries 0 to 3 sit before the first key; keys 4 to 7 are seen by no query.
    let case = Case::new("unseen", [1, 2, 1, 6, 8, 16, 8], Dtype::F32).causal(QOffset::At(-4));
    for (isa, answer) in run(&case, |_| {}) {
        let zero = |of: &Guarded, rows: std::ops::Range<usize>| {
            let inside = of.indices().filter(|at| rows.contains(&at[2]));
            inside.map(|at| of.get(at)).all(|x| x.to_bits() == 0)
        };
        assert!(zero(&answer.d_q, 0..4) && zero(&answer.d_k, 2..8) && zero(&answer.d_v, 2..8), "{isa}");
        assert!(!zero(&answer.d_q, 5..6) && !zero(&answer.d_k, 0..2) && !zero(&answer.d_v, 0..2), "{isa}");
    }
}

#[test]
fn a_nan_reaches_the_gradients_of_the_pairs_that_it_belongs_to_and_no_others() {
    let plain = |dtype| Case::new("nan", [1, 1, 1, 130, 150, 24, 16], dtype).causal(QOffset::At(3));
    for case in
        [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().flat_map(|of| [plain(of), plain(of).softcap(5.0)])
    {
        let name = format!("{}, softcap {:?}", case.desc.dtype, case.desc.softcap);
        let clean = run(&case, |_| {});
        // Rows from 37 on see key 40, and row 100 sees keys 0 to 103.
        let (row, key) = (100, 40);
        for x in [f32::NAN, f32::INFINITY] {
            let of_value = run(&case, |case| case.data.v.set([0, 0, key, 3], x));
            let of_key = run(&case, |case| case.data.k.set([0, 0, key, 3], x));
            let of_query = run(&case, |case| case.data.q.set([0, 0, row, 3], x));
            let of_d_out = run(&case, |case| case.d_out.set([0, 0, row, 3], x));
            for (n, (isa, clean)) in clean.iter().enumerate() {
                // Elements of other rows keep their bits.
                let same = |of: &Guarded, same: &Guarded, rows: std::ops::Range<usize>| {
                    for at in of.indices().filter(|at| !rows.contains(&at[2])) {
                        assert_eq!(
                            of.get(at).to_bits(),
                            same.get(at).to_bits(),
                            "{isa}, {name}, {x}, {at:?}"
                        );
                    }
                };
                same(&of_value[n].1.d_q, &clean.d_q, key - 3..130);
                same(&of_key[n].1.d_q, &clean.d_q, key - 3..130);
                same(&of_query[n].1.d_q, &clean.d_q, row..row + 1);
                same(&of_query[n].1.d_k, &clean.d_k, 0..row + 4);
                same(&of_query[n].1.d_v, &clean.d_v, 0..row + 4);
                same(&of_d_out[n].1.d_q, &clean.d_q, row..row + 1);
                same(&of_d_out[n].1.d_k, &clean.d_k, 0..row + 4);
                same(&of_d_out[n].1.d_v, &clean.d_v, 0..row + 4);
                let nan = |of: &Guarded, rows: std::ops::Range<usize>| {
                    rows.clone().all(|row| !of.get([0, 0, row, 3]).is_finite())
                };
                assert!(nan(&of_value[n].1.d_q, key - 3..130), "{isa}, {name}, {x}");
                assert!(nan(&of_d_out[n].1.d_v, 0..row + 4), "{isa}, {name}, {x}");
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_skipped_tiles_of_a_mask() {
    let additive = MaskKind::Additive(Dtype::F32);
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        for fill in [MaskFill::Open, MaskFill::Blocks] {
            let case = Case::new("mask", [1, 2, 1, 96, 300, 32, 16], dtype).mask(additive, "bh", fill);
            let prepared = BackwardCase::new(&case).unwrap();
            for isa in Cpu::isas() {
                let cpu = Cpu::with_isa(isa).unwrap();
                let [skipped, all] =
                    [true, false].map(|skip| prepared.run(&cpu, options(None, skip)).unwrap());
                assert_eq!(skipped.bits(), all.bits(), "{isa}, {dtype}, {fill:?}");
            }
        }
    }
}

#[test]
fn slopes_of_queries_far_from_every_key_keep_their_digits() {
    let case = Case::new("far", [1, 2, 2, 5, 64, 16, 16], Dtype::F32).alibi().at(QOffset::At(100_000));
    let mut prepared = BackwardCase::new(&case).unwrap();
    // Small enough that distances from the nearest key matter, and all keys count.
    prepared.data.alibi_slopes.as_mut().unwrap().slice_mut().copy_from_slice(&[1.0 / 256.0, 1.0 / 64.0]);
    prepared.recompute_oracle().unwrap();
    for isa in Cpu::isas() {
        let answer = prepared.run(&Cpu::with_isa(isa).unwrap(), PlanOptions::default()).unwrap();
        for (got, want) in answer.d_alibi_slopes.slice().iter().zip(&prepared.want.d_alibi_slopes) {
            assert!(
                (f64::from(*got) - want).abs() <= 1e-4 * want.abs().max(1.0),
                "{isa}: {got}, oracle {want}"
            );
        }
    }
}

#[test]
fn a_probability_is_at_most_1_whatever_the_score() {
    let dims = [1, 1, 1, 1, 1, 1, 1];
    let mut prepared = BackwardCase::new(&Case::new("huge", dims, Dtype::F32).scale(1.0)).unwrap();
    prepared.data.q.set([0; 4], 1.1e5);
    prepared.data.k.set([0; 4], 1.3e5);
    prepared.recompute_oracle().unwrap();
    for isa in Cpu::isas() {
        let answer = prepared.run(&Cpu::with_isa(isa).unwrap(), PlanOptions::default()).unwrap();
        let (d_v, d_out) = (answer.d_v.get([0; 4]), prepared.d_out.get([0; 4]));
        assert!(d_v.abs() <= d_out.abs(), "{isa}: {d_v} of {d_out}");
    }
}

#[test]
fn keys_that_a_softcap_saturates_have_tiny_gradients() {
    let mut case = Case::new("saturated", [1, 1, 1, 20, 30, 16, 16], Dtype::F32).softcap(2.0).gain(8.0);
    case.desc.q_offset = Some(QOffset::TopLeft);
    let prepared = BackwardCase::new(&case).unwrap();
    for isa in Cpu::isas() {
        let answer = prepared.run(&Cpu::with_isa(isa).unwrap(), PlanOptions::default()).unwrap();
        prepared.check(&answer).unwrap_or_else(|failure| panic!("{isa}: {failure}"));
    }
}

#[test]
fn scores_of_large_magnitude_have_the_gradients_of_the_oracle() {
    // Every score of a row is near -120 * sqrt(d), far below the range of exp.
    let case = Case::new("large", [1, 1, 1, 40, 50, 64, 64], Dtype::F32).causal(QOffset::At(9));
    let mut prepared = BackwardCase::new(&case).unwrap();
    for (tensor, sign) in [(&mut prepared.data.q, -1.0), (&mut prepared.data.k, 1.0)] {
        for at in tensor.indices() {
            let x = tensor.get(at);
            tensor.set(at, if at[3] == 0 { sign * 88.0 } else { 0.3 * x });
        }
    }
    prepared.recompute_oracle().unwrap();
    for isa in Cpu::isas() {
        let answer = prepared.run(&Cpu::with_isa(isa).unwrap(), PlanOptions::default()).unwrap();
        prepared.check(&answer).unwrap_or_else(|failure| panic!("{isa}: {failure}"));
    }
}

#[test]
fn gradients_of_normal_data_are_near_the_oracle() {
    for dims in [[1, 4, 2, 200, 200, 64, 64], [1, 2, 2, 130, 390, 128, 128], [2, 2, 1, 96, 96, 80, 48]] {
        for (dtype, limit) in [(Dtype::F32, 5e-6), (Dtype::F16, 1e-3), (Dtype::BF16, 8e-3)] {
            let case = Case::new("normal", dims, dtype).causal(QOffset::BottomRight);
            let prepared = BackwardCase::new(&case).unwrap();
            for isa in Cpu::isas() {
                let answer = prepared.run(&Cpu::with_isa(isa).unwrap(), PlanOptions::default()).unwrap();
                for (tensor, report) in prepared.reports(&answer) {
                    assert!(report.within() && report.nrmse <= limit, "{tensor} on {isa}, {dtype}: {report}");
                    println!("{tensor} {isa} {dtype} {:.2e}", report.nrmse);
                }
            }
        }
    }
}
