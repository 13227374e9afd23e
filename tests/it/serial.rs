//! Descriptions come back from JSON as they went, and plans say what they are.

use flashtile::plan::{AnyFacts, machines};
use flashtile::{
    CacheDesc, CacheLayout, CacheShape, Codec, Cpu, Dims, Dtype, MaskKind, PlanOptions, ProblemDesc, QOffset,
    SeqLens, Sequences, SharedPrefix, Visibility,
};
use flashtile_testkit::catalogue;

fn back(desc: &ProblemDesc) -> ProblemDesc {
    serde_json::from_str(&serde_json::to_string(desc).unwrap()).unwrap()
}

#[test]
fn every_description_of_the_catalogue_comes_back() {
    for case in catalogue() {
        assert_eq!(back(&case.desc), case.desc, "{}", case.name);
    }
}

#[test]
fn a_description_is_what_a_user_would_write() {
    let text = r#"{
        "dims": {"batch": 1, "q_heads": 32, "kv_heads": 8, "q_len": 40, "kv_len": 48, "head_dim": 128, "value_dim": 128},
        "dtype": "bf16",
        "visibility": {"left": 1023, "right": 0},
        "q_offset": "bottom_right",
        "mask": {"additive": "f32"},
        "sequences": {"padded": {"kv_lens": [48]}}
    }"#;
    let dims =
        Dims { batch: 1, q_heads: 32, kv_heads: 8, q_len: 40, kv_len: 48, head_dim: 128, value_dim: 128 };
    let mut desc = ProblemDesc::new(dims, Dtype::BF16);
    desc.visibility = Visibility::window(Some(1023), Some(0));
    desc.q_offset = Some(QOffset::BottomRight);
    desc.mask = Some(MaskKind::Additive(Dtype::F32));
    desc.sequences = Sequences::Padded { kv_lens: vec![48] };
    assert_eq!(serde_json::from_str::<ProblemDesc>(text).unwrap(), desc);
    desc.q_offset = Some(QOffset::At(-3));
    desc.prefixes = vec![SharedPrefix { sequences: 0..2, len: 16 }];
    assert_eq!(back(&desc), desc);
    let misspelt = text.replace("q_offset", "q_ofset");
    let refused = serde_json::from_str::<ProblemDesc>(&misspelt).unwrap_err().to_string();
    assert!(refused.starts_with("unknown field `q_ofset`"), "{refused}");
    desc.scale = Some(f32::NAN);
    assert_eq!(serde_json::to_string(&desc).unwrap_err().to_string(), "NaN is not a finite number");
    let wrong = serde_json::from_str::<Dtype>("\"f64\"").unwrap_err().to_string();
    assert!(wrong.starts_with("f64 is not a dtype, expected f32, f16 or bf16"), "{wrong}");
}

#[test]
fn caches_and_plans() {
    let shape = CacheShape { layers: 2, kv_heads: 8, head_dim: 128, value_dim: 128 };
    let mut cache = CacheDesc::new(CacheLayout::Paged { pages: 64, page_size: 16 }, shape, Codec::Int8);
    cache.v = Codec::Tq5;
    let text = serde_json::to_string(&cache).unwrap();
    assert!(text.contains(r#""k":"int8","v":"tq5""#), "{text}");
    assert_eq!(serde_json::from_str::<CacheDesc>(&text).unwrap(), cache);
    // A cache takes no mean from what it stores: a description that asks for it is refused, not ignored.
    let learned = text.replace(r#""v":"tq5""#, r#""v":"tq5","key_mean":"learned""#);
    let refused = serde_json::from_str::<CacheDesc>(&learned).unwrap_err().to_string();
    assert!(refused.starts_with("unknown field `key_mean`"), "{refused}");

    let desc = ProblemDesc::over(&cache, 32, Dtype::BF16, &[SeqLens::decode(601)]);
    let facts = AnyFacts::new(*Cpu::new().facts());
    let plan = facts.plan(&desc.clone().validate().unwrap(), PlanOptions::default()).unwrap();
    let said = serde_json::to_value(&plan).unwrap();
    assert_eq!(said["kernel"], plan.kernel());
    assert_eq!(said["workspace_bytes"], plan.workspace_bytes());
    let of: ProblemDesc = serde_json::from_value(said["problem"].clone()).unwrap();
    let options: PlanOptions = serde_json::from_value(said["options"].clone()).unwrap();
    assert_eq!((of, options), (desc.clone(), PlanOptions::default()));

    let facts = AnyFacts::new(machines::H200);
    let plan = facts.plan(&desc.validate().unwrap(), PlanOptions::default()).unwrap();
    let said = serde_json::to_value(&plan).unwrap();
    assert_eq!((&said["kernel"], &said["kernels"][0]["kernel"]), (&plan.kernel().into(), &said["kernel"]));
    assert_eq!(said["workspace_bytes"], plan.workspace_bytes());
    assert_eq!(said["kernels"][0].get("stages"), None, "portable kernels have no stages");
}
