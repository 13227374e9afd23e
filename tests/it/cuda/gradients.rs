//! Gradients by native kernels, on the device.

use super::shard;
use crate::support::{cuda, cuda_with_wgmma};
use flashtile::cuda::Cuda;
use flashtile::plan::{Facts, NATIVE_CAPABILITY};
use flashtile::{Dtype, PlanOptions, QOffset, Visibility};
use flashtile_testkit::{BackwardCase, Case, Failure, GradientAnswer, Rng, catalogue, random_case};

/// Shapes in which many units add to a tile, and what the catalogue's few rows do not reach.
fn large() -> Vec<Case> {
    let case = |name: &str, dims, dtype| Case::new(name, dims, dtype);
    vec![
        case("many_units", [1, 4, 2, 300, 1500, 128, 128], Dtype::BF16),
        case("many_tiles", [1, 2, 2, 1100, 600, 64, 64], Dtype::F16),
        case("causal", [2, 4, 1, 1000, 1000, 128, 128], Dtype::BF16).causal(QOffset::TopLeft),
        case("causal_later", [1, 2, 1, 400, 1300, 64, 64], Dtype::BF16).causal(QOffset::BottomRight).sinks(),
        case("window", [1, 4, 2, 900, 900, 128, 128], Dtype::F16)
            .seeing(Visibility::window(Some(255), Some(0)))
            .at(QOffset::At(0)),
        case("window_past_the_keys", [1, 2, 2, 700, 300, 96, 40], Dtype::BF16)
            .seeing(Visibility::window(Some(20), Some(10)))
            .at(QOffset::At(-150)),
        case("lengths", [3, 2, 1, 300, 700, 128, 64], Dtype::BF16)
            .kv_lens(&[700, 0, 257])
            .causal(QOffset::BottomRight),
        case("packed", [1, 4, 2, 1100, 1100, 128, 128], Dtype::BF16)
            .packed(&[(500, 500), (0, 0), (1, 300), (599, 300)])
            .causal(QOffset::BottomRight),
        case("negative_scale", [1, 2, 2, 300, 600, 64, 64], Dtype::BF16)
            .causal(QOffset::BottomRight)
            .scale(-0.2),
        case("softcap", [1, 4, 2, 300, 900, 128, 128], Dtype::BF16)
            .softcap(20.0)
            .causal(QOffset::BottomRight),
        case("saturated_softcap", [1, 2, 2, 300, 400, 64, 64], Dtype::F16).softcap(0.5),
        case("large_softcap", [1, 2, 2, 200, 300, 64, 64], Dtype::BF16).softcap(1e5),
        case("alibi", [2, 4, 2, 500, 700, 128, 128], Dtype::F16).alibi().causal(QOffset::BottomRight),
        case("alibi_far_from_the_keys", [1, 4, 4, 300, 500, 64, 64], Dtype::BF16)
            .alibi()
            .sinks()
            .at(QOffset::At(2000)),
        case("wide", [1, 4, 2, 300, 500, 256, 256], Dtype::BF16).softcap(20.0).causal(QOffset::BottomRight),
        case("wide_alibi", [1, 4, 4, 200, 300, 256, 200], Dtype::F16).alibi().sinks(),
        case("like_mla", [1, 2, 2, 400, 400, 192, 128], Dtype::BF16).causal(QOffset::TopLeft),
        case("chunks", [1, 4, 2, 900, 900, 128, 128], Dtype::BF16).seeing(Visibility::causal().chunked(300)),
    ]
}

#[test]
fn native_gradients_match_the_oracle_and_have_the_same_bits_again() {
    let Some(cuda) = cuda_with_wgmma() else { return };
    assert!(native_gradients(&cuda, "-wgmma") > 200);
}

#[test]
fn native_gradients_by_mma_match_the_oracle_and_have_the_same_bits_again() {
    let Some(cuda) = cuda().filter(|cuda| cuda.facts().capability >= NATIVE_CAPABILITY) else { return };
    assert!(native_gradients(&cuda.with_facts(|facts| facts.wgmma = false), "-mma") > 200);
}

/// Checks the cases whose kernel has a name with `by`, and returns how many there are, in all shards about.
fn native_gradients(cuda: &Cuda, by: &str) -> usize {
    let mut session = cuda.session(&cuda.context().new_stream().unwrap());
    let random = (0..200).map(|seed| {
        let mut rng = Rng::new(seed);
        random_case(format!("seed {seed}"), &mut |n| rng.below(n))
    });
    let [part, parts] = shard();
    let cases = large().into_iter().chain(catalogue()).chain(random).enumerate();
    let (mut failures, mut checked) = (Vec::new(), 0);
    for (_, case) in cases.filter(|(n, _)| n % parts == part) {
        let Ok(prepared) = BackwardCase::new(&case) else { continue };
        let desc = prepared.problem().desc().clone();
        let plan = cuda.facts().plan_backward(prepared.problem(), PlanOptions::default());
        if !plan.is_ok_and(|plan| plan.kernel().contains(by)) {
            continue;
        }
        let prepared = prepared.rounding_scores().unwrap();
        let mut gradients = || -> Result<GradientAnswer, Failure> {
            prepared.run_by("native", |inputs, gradients| {
                session.compute_backward(&desc, inputs, gradients).map_err(|error| error.to_string())
            })
        };
        let result = gradients().and_then(|answer| {
            prepared.check(&answer)?;
            match gradients()?.bits() == answer.bits() {
                true => Ok(()),
                false => Err(Failure::Error("other bits in a second run".to_owned())),
            }
        });
        checked += 1;
        if let Err(why) = result {
            failures.push(format!("{}: {why}", case.name));
        }
    }
    println!("{checked} cases, {} failures", failures.len());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    checked * parts
}
