//! Gradients on the software device, by printed kernels: of both tiles of `backward_kv`, with the keys in threadgroup memory and in registers.

use super::support::metal;
use flashtile::plan::Facts;
use flashtile::{Dtype, MaskKind, QOffset, Visibility};
use flashtile_metal_standin::Profile;
use flashtile_testkit::{BackwardCase, Case, MaskFill};

fn cases() -> Vec<Case> {
    vec![
        Case::new("causal", [1, 4, 2, 40, 70, 64, 64], Dtype::BF16).causal(QOffset::BottomRight).sinks(),
        Case::new("window", [2, 2, 1, 33, 50, 128, 128], Dtype::F32)
            .seeing(Visibility::window(Some(9), Some(3)))
            .at(QOffset::At(10))
            .softcap(3.0)
            .alibi(),
        Case::new("lengths", [2, 2, 2, 30, 45, 96, 40], Dtype::F16).kv_lens(&[45, 7]).mask(
            MaskKind::Bool,
            "h",
            MaskFill::Random,
        ),
        Case::new("bias", [2, 4, 2, 30, 45, 64, 64], Dtype::BF16).mask(
            MaskKind::Additive(Dtype::F32),
            "bq",
            MaskFill::Random,
        ),
    ]
}

#[test]
fn gradients_match_the_oracle_and_have_the_same_bits_again() {
    let metal = metal(Profile::m3_max());
    let mut session = metal.session();
    for case in cases() {
        let prepared = BackwardCase::new(&case).unwrap().rounding_scores().unwrap();
        let desc = prepared.problem().desc().clone();
        let mut gradients = || {
            let answer = prepared.run_by("metal", |inputs, gradients| {
                session.compute_backward(&desc, inputs, gradients).map_err(|error| error.to_string())
            });
            answer.unwrap_or_else(|why| panic!("{}: {why}", case.name))
        };
        let answer = gradients();
        prepared.check(&answer).unwrap_or_else(|failure| panic!("{}: {failure}", case.name));
        assert_eq!(gradients().bits(), answer.bits(), "{}", case.name);
    }
}

/// Where a compiled kernel takes fewer threads than its plan has, the problem is planned anew.
#[test]
fn gradients_by_pipelines_of_fewer_threads() {
    let mut profile = Profile::m1();
    (profile.pipeline_threads, profile.compiles_for_declared_threads) = (200, false);
    profile.name = "Apple M1 of 200 threads".to_owned();
    let metal = metal(profile);
    let mut session = metal.session();
    let case = Case::new("bias", [1, 2, 2, 70, 80, 64, 64], Dtype::F16).mask(
        MaskKind::Additive(Dtype::F32),
        "b",
        MaskFill::Random,
    );
    let prepared = BackwardCase::new(&case).unwrap().rounding_scores().unwrap();
    let desc = prepared.problem().desc().clone();
    let whole = metal.facts().plan_backward(prepared.problem(), Default::default()).unwrap();
    assert!(whole.to_string().contains(" tiles 128x16 64x16 "), "{whole}");
    let answer = prepared.run_by("metal", |inputs, gradients| {
        session.compute_backward(&desc, inputs, gradients).map_err(|error| error.to_string())
    });
    prepared.check(&answer.unwrap()).unwrap();
}
