//! The library's front door: the backend that is asked for, the automatic choice, and the self-check.

use flashtile::{Choice, Dims, Dtype, PlanOptions, Problem, ProblemDesc, Visibility};
use flashtile_metal_standin::{Profile, set_default_device};

fn prefill(q_len: usize) -> Problem {
    let dims =
        Dims { batch: 1, q_heads: 32, kv_heads: 8, q_len, kv_len: q_len, head_dim: 128, value_dim: 128 };
    let mut desc = ProblemDesc::new(dims, Dtype::F16);
    desc.visibility = Visibility::causal();
    desc.validate().unwrap()
}

#[test]
fn auto_takes_the_device_after_its_self_check_and_says_so() {
    set_default_device(Some(Profile::m3_max()));
    let choice = Choice::auto(&prefill(4096));
    let said = choice.to_string();
    assert!(said.starts_with("metal: Apple M3 Max; prefill, about "), "{said}");
    let plan = choice.plan.unwrap();
    assert_eq!(plan.kernel(), "metal-prefill-f16-d128-portable");
    assert_eq!((choice.backend.name().as_str(), choice.backend.device().as_str()), ("metal", "Apple M3 Max"));
    let described = choice.backend.describe();
    assert!(described.contains("; passes the self-check; "), "{described}");
    // A problem that the processor has finished before a command buffer starts.
    let small = Choice::auto(&prefill(8)).to_string();
    assert!(small.starts_with("cpu: about ") && small.contains("on Apple M3 Max"), "{small}");
    let asked = Choice::named("metal", &prefill(8)).unwrap();
    assert_eq!(asked.to_string(), "metal: asked for");
    assert_eq!(asked.plan.unwrap(), asked.backend.plan(&prefill(8), PlanOptions::default()).unwrap());
}
