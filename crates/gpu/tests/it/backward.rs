//! Gradients by the portable kernels against the oracle: on the simulator, and the whole catalogue on a CUDA device where there is one.

use super::session::on_cuda;
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::problem::{QOffset, Visibility};
use flashtile_gpu::engine::Engine;
use flashtile_gpu::session::Session;
use flashtile_gpu::simulator::{DECODE_TILE, session};
use flashtile_testkit::{BackwardCase, Case, Failure, GradientAnswer, MaskFill, catalogue};

/// All gradients, by a session.
fn gradients<E: Engine>(session: &mut Session<E>, case: &BackwardCase) -> Result<GradientAnswer, Failure>
where
    E::Error: std::fmt::Display,
{
    let desc = case.problem().desc().clone();
    case.run_by("portable", |inputs, gradients| {
        session.compute_backward(&desc, inputs, gradients).map_err(|error| error.to_string())
    })
}

fn cases() -> Vec<Case> {
    let case = |name: &str, dims, dtype| Case::new(name, dims, dtype);
    vec![
        case("dense", [1, 2, 1, 20, 37, 64, 64], Dtype::F32),
        case("causal", [2, 2, 2, 33, 40, 64, 64], Dtype::F16).causal(QOffset::BottomRight),
        case("window", [1, 4, 2, 21, 70, 128, 128], Dtype::BF16)
            .seeing(Visibility::window(Some(9), Some(3)))
            .at(QOffset::At(30))
            .softcap(3.0)
            .sinks(),
        case("rows_without_keys", [1, 2, 1, 40, 20, 64, 64], Dtype::F32).causal(QOffset::BottomRight).sinks(),
        case("alibi", [2, 4, 2, 17, 35, 64, 64], Dtype::F32)
            .causal(QOffset::BottomRight)
            .alibi_per_sequence()
            .kv_lens(&[35, 5])
            .sinks(),
        case("packed", [1, 2, 1, 30, 44, 64, 64], Dtype::BF16)
            .packed(&[(5, 9), (0, 3), (17, 0), (8, 32)])
            .causal(QOffset::BottomRight)
            .alibi(),
        case("mask", [2, 2, 1, 18, 33, 64, 64], Dtype::F16)
            .mask(MaskKind::Bool, "h", MaskFill::Random)
            .scale(-0.2),
        case("bias", [1, 2, 2, 18, 33, 128, 128], Dtype::F32).mask(
            MaskKind::Additive(Dtype::F32),
            "b",
            MaskFill::Blocks,
        ),
        case("bias_of_keys", [2, 4, 2, 35, 50, 64, 64], Dtype::F32)
            .mask(MaskKind::Additive(Dtype::F32), "hq", MaskFill::Random)
            .causal(QOffset::BottomRight)
            .kv_lens(&[50, 21]),
        case("bias_of_rows", [2, 2, 1, 35, 40, 64, 64], Dtype::BF16)
            .mask(MaskKind::Additive(Dtype::F32), "bk", MaskFill::Random)
            .seeing(Visibility::window(Some(9), Some(3)))
            .at(QOffset::At(5))
            .sinks(),
        case("bias_of_heads", [1, 4, 2, 35, 40, 64, 64], Dtype::F16)
            .mask(MaskKind::Additive(Dtype::F16), "bqk", MaskFill::Random)
            .softcap(3.0)
            .at(QOffset::At(5))
            .alibi(),
        case("packed_bias", [1, 2, 1, 30, 44, 64, 64], Dtype::F32)
            .packed(&[(5, 9), (0, 3), (17, 0), (8, 32)])
            .mask(MaskKind::Additive(Dtype::F32), "h", MaskFill::Random),
    ]
}

#[test]
fn gradients_on_the_simulator_match_the_oracle() {
    let mut session = session(DECODE_TILE);
    for case in cases() {
        let prepared = BackwardCase::new(&case).unwrap().rounding_scores().unwrap();
        let answer = gradients(&mut session, &prepared).unwrap_or_else(|why| panic!("{}: {why}", case.name));
        prepared.check(&answer).unwrap_or_else(|failure| panic!("{}: {failure}", case.name));
        let again = gradients(&mut session, &prepared).unwrap();
        assert_eq!(again.bits(), answer.bits(), "{}", case.name);
    }
}

#[test]
fn rows_and_keys_that_are_nan_reach_their_own_pairs_alone() {
    let case = Case::new("nan", [1, 2, 1, 40, 40, 64, 64], Dtype::BF16).causal(QOffset::BottomRight);
    let mut prepared = BackwardCase::new(&case).unwrap();
    prepared.data.k.set([0, 0, 35, 3], f32::NAN);
    prepared.data.v.set([0, 0, 36, 7], f32::INFINITY);
    prepared.data.q.set([0, 1, 4, 5], f32::NAN);
    prepared.d_out.set([0, 0, 2, 9], f32::NAN);
    prepared.recompute_oracle().unwrap();
    let answer = gradients(&mut session(DECODE_TILE), &prepared).unwrap();
    let check = |name: &str, got: Vec<f32>, want: &[f64]| {
        for (n, (got, want)) in got.iter().zip(want).enumerate() {
            assert_eq!(got.is_finite(), want.is_finite(), "{name}[{n}]: {got}, oracle {want}");
        }
    };
    check("d_q", answer.d_q.values(), &prepared.want.d_q);
    check("d_k", answer.d_k.values(), &prepared.want.d_k);
    check("d_v", answer.d_v.values(), &prepared.want.d_v);
}

#[test]
fn gradients_on_cuda_match_the_oracle() {
    let Some(mut session) = on_cuda() else { return };
    let (mut failures, mut checked) = (Vec::new(), 0);
    for case in cases().into_iter().chain(catalogue()) {
        let Ok(prepared) = BackwardCase::new(&case) else { continue };
        if let Err(why) = session.engine().plan_backward(prepared.problem()) {
            println!("SKIPPED {}: {why}", case.name);
            continue;
        }
        let prepared = prepared.rounding_scores().unwrap();
        let result = gradients(&mut session, &prepared).and_then(|answer| {
            prepared.check(&answer)?;
            let again = gradients(&mut session, &prepared)?;
            if again.bits() == answer.bits() {
                Ok(())
            } else {
                Err(Failure::Error("other bits in a second run".to_owned()))
            }
        });
        checked += 1;
        if let Err(why) = result {
            failures.push(format!("{}: {why}", case.name));
        }
    }
    println!("{checked} cases, {} failures", failures.len());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
