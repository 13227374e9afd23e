//! `flashtile kv`, and runs over caches.

use crate::files::{
    Folder, Tensor, Tensors, assert_refused, flashtile, nrmse, qkv, read, stderr, stdout, write,
};
use flashtile_testkit::AttentionSet;
use safetensors::tensor::Dtype;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;

fn kv(path: &Path, options: &[&str]) -> Output {
    flashtile(["kv".as_ref(), path.as_os_str()].into_iter().chain(options.iter().map(|o| o.as_ref())))
}

fn text(path: &Path, options: &[&str]) -> String {
    let output = kv(path, options);
    assert!(output.status.success() && output.stderr.is_empty(), "{options:?}: {}", stderr(&output));
    stdout(&output)
}

fn json(path: &Path, options: &[&str]) -> Value {
    let text = text(path, &[options, &["--json"]].concat());
    assert_eq!(text.lines().count(), 1);
    serde_json::from_str(&text).unwrap()
}

fn minilm() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/data/minilm_all_layers_f16.safetensors")
}

/// Codes are the same bytes on every machine; sums differ in digits that are not printed.
#[test]
fn the_readme_shows_what_is_printed() {
    let printed = text(&minilm(), &[]);
    let readme = include_str!("../../../README.md");
    let (_, shown) =
        readme.split_once("$ flashtile kv examples/data/minilm_all_layers_f16.safetensors\n").unwrap();
    let (shown, _) = shown.split_once("\n```").unwrap();
    for line in shown.lines().filter(|line| *line != "...") {
        assert!(printed.lines().any(|of| of == line), "{line} in {printed}");
    }
}

/// Index of a codec of keys in a report.
fn key(report: &Value, codec: &str, centered: bool) -> usize {
    let keys = report["keys"].as_array().unwrap();
    let wanted =
        |key: &&Value| key["codec"] == codec && key["centered"] == centered && key["equalized"] == false;
    keys.iter().position(|key| wanted(&key)).unwrap()
}

fn value(report: &Value, codec: &str) -> usize {
    report["values"].as_array().unwrap().iter().position(|value| value == codec).unwrap()
}

/// Mean divergence for a codec of keys, from an object of errors.
fn kl(report: &Value, errors: &Value, codec: &str, centered: bool) -> f64 {
    errors["keys"][key(report, codec, centered)]["kl"].as_f64().unwrap()
}

/// q, k and v of one head with normal elements; keys have a bias.
fn normal(tokens: usize, dim: usize, bias: f32) -> Tensors {
    let set = AttentionSet::normal([tokens, 48, dim], bias, 6);
    Tensors::from([
        ("q".into(), Tensor::f32(&[1, 1, 48, dim], &set.q)),
        ("k".into(), Tensor::f32(&[1, 1, tokens, dim], &set.k)),
        ("v".into(), Tensor::f32(&[1, 1, tokens, dim], &set.v)),
    ])
}

/// Sets element `at` of a tensor of f32.
fn set(tensor: &mut Tensor, at: usize, x: f32) {
    tensor.bytes[4 * at..4 * at + 4].copy_from_slice(&x.to_le_bytes());
}

#[test]
fn layers_of_a_model() {
    let report = json(&minilm(), &[]);
    assert_eq!(report["pairs"].as_array().unwrap().len(), 6);
    let all = &report["all"];
    // Fewer bits give larger errors, and int8 much smaller ones than fp8 with as many bits.
    let order = ["int8", "tq6", "tq5", "tq4", "tq3", "tq2"];
    for centered in [false, true] {
        let kls = order.map(|codec| kl(&report, all, codec, centered));
        assert!(kls.windows(2).all(|pair| pair[0] < pair[1] / 2.0), "{kls:?}");
        assert!(kl(&report, all, "fp8", centered) > 5.0 * kls[0]);
        let errors = order.map(|codec| {
            all["nrmse"][key(&report, codec, centered)][value(&report, codec)].as_f64().unwrap()
        });
        assert!(errors.windows(2).all(|pair| pair[0] < pair[1]), "{errors:?}");
    }
    // The file is f16.
    let exact = key(&report, "f16", false);
    assert_eq!(all["keys"][exact]["kl"], 0.0);
    assert_eq!(all["nrmse"][exact][value(&report, "f16")], 0.0);
    // 32 codes of 8 bits and a scale of 16; 32 of 5 and a scale.
    assert_eq!(report["keys"][key(&report, "int8", false)]["bits"], 8.5);
    assert_eq!(report["keys"][key(&report, "tq5", true)]["bits"], 5.5);

    // The recommendation is the cheapest pair that meets the gate in every layer.
    let best = &report["recommended"];
    assert_eq!(
        (&report["meets_gate"], &best["k"], &best["v"]),
        (&true.into(), &"int8".into(), &"tq5".into())
    );
    let candidates = report["candidates"].as_array().unwrap();
    let bits = |c: &Value| c["bits"].as_f64().unwrap();
    assert!(candidates.iter().any(|c| c == best));
    assert!(candidates.iter().all(|c| c["meets_gate"] == false || bits(c) >= bits(best)));
    let chosen = key(&report, "int8", best["centered"].as_bool().unwrap());
    let worst = |of: &dyn Fn(&Value) -> f64| {
        report["pairs"].as_array().unwrap().iter().map(|pair| of(&pair["errors"])).fold(0.0, f64::max)
    };
    assert_eq!(best["kl"].as_f64().unwrap(), worst(&|errors| errors["keys"][chosen]["kl"].as_f64().unwrap()));
    let tq5 = value(&report, "tq5");
    assert_eq!(
        best["nrmse"].as_f64().unwrap(),
        worst(&|errors| errors["nrmse"][chosen][tq5].as_f64().unwrap())
    );
    assert!(
        bits(&report["nearest_cheaper"]) < bits(best) && report["nearest_cheaper"]["meets_gate"] == false
    );

    // Wider gates give cheaper pairs; with a gate that none meets, the nearest pair is reported.
    let few = |options: &[&'static str]| [&["--rows", "8"], options].concat();
    let wide = json(&minilm(), &few(&["--max-kl", "0.01", "--max-nrmse", "0.12"]));
    assert!(bits(&wide["recommended"]) < 5.0 && wide["meets_gate"] == true);
    let strict = json(&minilm(), &few(&["--max-kl", "1e-9", "--max-nrmse", "1e-9"]));
    assert_eq!((&strict["meets_gate"], &strict["recommended"]["k"]), (&false.into(), &"int8".into()));

    let table = text(&minilm(), &[]);
    assert!(table.lines().count() < 50 && table.lines().all(|line| line.chars().count() < 130), "{table}");
    for words in [
        "6 pairs",
        "64 evenly spaced of 256 rows",
        "recommended: keys int8",
        "layer.5",
        "centering is optional",
        "  options of run and plan: --k-codec int8 --v-codec tq5 --center-keys\n",
    ] {
        assert!(table.contains(words), "{words} in {table}");
    }
    assert!(text(&minilm(), &few(&["--max-kl", "1e-9"])).contains("recommended: keys f16, values tq5"));
    let neither = few(&["--max-kl", "1e-9", "--max-nrmse", "1e-9"]);
    assert!(text(&minilm(), &neither).contains("no pair of codecs meets the gate"));
    let long = text(&minilm(), &few(&["--per-layer"]));
    assert!(long.lines().count() > 6 * 18 && long.contains("\nlayer.3:\ncodec"), "{long}");
}

/// The errors reported over all query rows equal the errors of a run with the same codecs.
#[test]
fn reports_are_what_runs_do() {
    let mut tensors = qkv(Dtype::F32, &[2, 4, 40, 48], &[2, 2, 90, 48], &[2, 2, 90, 32]);
    tensors.insert("kv_lens".into(), Tensor::i64(&[90, 33]));
    let folder = Folder::with(&tensors);
    let semantics = ["--causal", "--q-offset", "bottom-right", "--scale", "0.4", "--softcap", "9"];
    let report = json(&folder.input, &[&semantics[..], &["--rows", "1000"]].concat());
    let want = folder.run(&semantics);
    for (k, v, centered) in
        [("int8", "tq5", false), ("tq4", "tq2", true), ("tq5", "f16", true), ("bf16", "tq3", false)]
    {
        let stored = ["--k-codec", k, "--v-codec", v, "--center-keys"];
        let stored = &stored[..if centered { 5 } else { 4 }];
        let got = folder.run(&[&semantics[..], stored].concat());
        let error = nrmse(&got["out"].values(), &want["out"].values());
        let said = report["all"]["nrmse"][key(&report, k, centered)][value(&report, v)].as_f64().unwrap();
        assert!((error - said).abs() < 2e-3 * said, "{k} {v} {centered}: run {error}, report {said}");
    }
    // The other layout gives the same report, except for the order of axes.
    let mut transposed = tensors.clone();
    for name in ["q", "k", "v"] {
        transposed.insert(name.into(), tensors[name].transposed());
    }
    let other = Folder::with(&transposed);
    let options = [&semantics[..], &["--rows", "1000", "--layout", "bshd"]].concat();
    assert_eq!(json(&other.input, &options), report);
}

#[test]
fn a_bias_of_keys_is_seen_and_subtracted() {
    let folder = Folder::with(&normal(512, 64, 23.0));
    let report = json(&folder.input, &[]);
    let pair = &report["pairs"][0];
    let bias = pair["diagnosis"]["bias"].as_f64().unwrap();
    assert!(bias > 15.0 && bias < 32.0 && pair["diagnosis"]["center"] == true, "{pair}");
    let all = &report["all"];
    assert!(kl(&report, all, "tq4", false) > 50.0 * kl(&report, all, "tq4", true));
    assert_eq!(report["recommended"]["centered"], true);
    let text = text(&folder.input, &[]);
    assert!(text.contains("bits): center them") && text.contains("centered, values"), "{text}");
    // Centering also reduces the error of a run.
    let want = folder.run(&[]);
    let error = |options: &[&str]| nrmse(&folder.run(options)["out"].values(), &want["out"].values());
    let (without, with) = (
        error(&["--k-codec", "tq4", "--v-codec", "int8"]),
        error(&["--k-codec", "tq4", "--v-codec", "int8", "--center-keys"]),
    );
    assert!(with < 0.15 && without > 5.0 * with, "{with} centered, {without} not");
}

#[test]
fn outlier_channels_are_named() {
    let mut tensors = normal(256, 32, 0.0);
    let k = tensors.get_mut("k").unwrap();
    let values = k.values();
    for row in 0..256 {
        set(k, row * 32 + 5, 20.0 * values[row * 32 + 5] as f32);
    }
    let report = json(&Folder::with(&tensors).input, &[]);
    let found = &report["pairs"][0]["diagnosis"];
    assert_eq!((&found["channel"], &found["outlier"]), (&5.into(), &true.into()), "{found}");
    let text = text(&Folder::with(&tensors).input, &[]);
    assert!(text.contains("channel 5") && text.contains("an outlier"), "{text}");
}

#[test]
fn files_without_queries() {
    let mut tensors = normal(128, 32, 0.0);
    tensors.remove("q");
    let folder = Folder::with(&tensors);
    let report = json(&folder.input, &[]);
    let int8 = key(&report, "int8", false);
    assert!(report["all"]["keys"][int8]["error"].as_f64().unwrap() > 0.0);
    assert!(report["all"]["keys"][int8]["kl"].is_null() && report["all"]["nrmse"][int8][0].is_null());
    assert!(report["recommended"].is_null() && report["meets_gate"].is_null());
    let without = text(&folder.input, &[]);
    assert!(
        without.contains("no queries: logit rmse, kl and nrmse, which need them, are missing"),
        "{without}"
    );
    assert!(!without.contains("recommended"), "{without}");
    let svg = folder.path().join("kv.svg");
    let svg = svg.to_str().unwrap();
    let output = kv(&folder.input, &["--svg", svg]);
    assert_refused(&output, "--svg: KL and NRMSE need queries", "no queries");

    let report = json(&folder.input, &["--keys-as-queries"]);
    assert_eq!(report["pairs"][0]["q"], "k");
    assert!(kl(&report, &report["all"], "tq4", false) > 0.0 && !report["recommended"].is_null());
    assert!(
        text(&folder.input, &["--keys-as-queries"]).contains("queries are the keys themselves, as asked")
    );
    // Only one of two pairs has queries, and decides.
    let mut mixed = Tensors::new();
    for (name, tensor) in &normal(128, 32, 0.0) {
        mixed.insert(format!("a.{name}"), tensor.clone());
        if name != "q" {
            mixed.insert(format!("b.{name}"), tensor.clone());
        }
    }
    let folder = Folder::with(&mixed);
    assert!(text(&folder.input, &[]).contains("no queries of b:"));
    assert!(!json(&folder.input, &[])["recommended"].is_null());
}

#[test]
fn pairs_that_have_no_answer_leave_the_others() {
    let good = normal(64, 16, 0.0);
    let mut tensors = Tensors::new();
    for layer in 0..4 {
        for (name, tensor) in &good {
            tensors.insert(format!("layers.{layer}.attn.{name}"), tensor.clone());
        }
    }
    set(tensors.get_mut("layers.1.attn.k").unwrap(), 3 * 16 + 2, f32::NAN);
    set(tensors.get_mut("layers.2.attn.v").unwrap(), 5 * 16, 1e5);
    set(tensors.get_mut("layers.3.attn.q").unwrap(), 47 * 16, f32::INFINITY);
    tensors.insert("layers.4.attn.k".into(), good["k"].clone());
    let folder = Folder::with(&tensors);
    let output = kv(&folder.input, &["--json"]);
    assert_eq!(output.status.code(), Some(2));
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let names = |list: &Value| -> Vec<String> {
        list.as_array().unwrap().iter().map(|of| of["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&report["pairs"]), ["layers.0.attn"]);
    let lines = stderr(&output);
    let lines: Vec<&str> = lines.lines().collect();
    let expected = [
        ("layers.4.attn", "tensor layers.4.attn.k has no values beside it"),
        ("layers.1.attn", "layers.1.attn: row 3 of head 0 of k holds a NaN or an infinity"),
        ("layers.2.attn", "layers.2.attn: row 5 of head 0 of v has a norm above 8192"),
        ("layers.3.attn", "layers.3.attn: row 47 of head 0 of q holds a NaN or an infinity"),
    ];
    assert_eq!(lines.len(), expected.len(), "{lines:?}");
    for ((line, (name, why)), refused) in
        lines.iter().zip(expected).zip(report["refused"].as_array().unwrap())
    {
        assert!(line.starts_with("flashtile: ") && line.ends_with(why), "{line}");
        assert!(refused["name"] == name && refused["reason"].as_str().unwrap().ends_with(why), "{refused}");
    }
    // If no pair is left, there is one line for each tensor and no report.
    for name in ["layers.0.attn", "layers.2.attn", "layers.3.attn", "layers.4.attn"] {
        tensors.retain(|tensor, _| !tensor.starts_with(name));
    }
    write(&folder.input, &tensors);
    assert_refused(&kv(&folder.input, &[]), "row 3 of head 0 of k holds a NaN", "one bad pair");
    // JSON output is still a document, and no picture is drawn.
    let svg = folder.path().join("kv.svg");
    let output = kv(&folder.input, &["--json", "--svg", svg.to_str().unwrap()]);
    assert_eq!((output.status.code(), stderr(&output).lines().count()), (Some(2), 1));
    assert!(!svg.exists());
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(names(&report["refused"]), ["layers.1.attn"]);
    assert!(report["refused"][0]["reason"].as_str().unwrap().ends_with("holds a NaN or an infinity"));
    for (field, nothing) in [
        ("pairs", serde_json::json!([])),
        ("candidates", serde_json::json!([])),
        ("all", Value::Null),
        ("recommended", Value::Null),
    ] {
        assert_eq!(report[field], nothing, "{field}");
    }
}

#[test]
fn keys_too_large_to_store_unless_centered() {
    let mut tensors = normal(64, 16, 0.0);
    let k = tensors.get_mut("k").unwrap();
    for (at, x) in k.values().iter().enumerate() {
        set(k, at, *x as f32 + 3000.0);
    }
    tensors.insert("q".into(), Tensor::f32(&[1, 1, 1, 16], &[0.01; 16]));
    let folder = Folder::with(&tensors);
    let report = json(&folder.input, &[]);
    let of = |centered| &report["all"]["keys"][key(&report, "int8", centered)];
    assert_eq!(of(false)["refused"], "row 0 of head 0 of k has a norm above 8192");
    assert!(of(true)["refused"].is_null() && of(true)["kl"].is_f64());
    assert_eq!(report["recommended"]["centered"], true);
    assert!(text(&folder.input, &[]).contains("cannot store it: row 0 of head 0 of k has a norm above 8192"));
    folder.refuse(&["--k-codec", "int8"], "row 0 of head 0 of k has a norm above 8192");
    folder.run(&["--k-codec", "int8", "--center-keys"]);
}

#[test]
fn padding_is_not_read() {
    let mut tensors = qkv(Dtype::F32, &[2, 2, 30, 16], &[2, 2, 30, 16], &[2, 2, 30, 16]);
    tensors.insert("kv_lens".into(), Tensor::i64(&[30, 12]));
    let folder = Folder::with(&tensors);
    let (report, want) = (json(&folder.input, &[]), folder.run(&["--k-codec", "tq5", "--v-codec", "tq4"]));
    assert_eq!(report["pairs"][0]["tokens"], 42);
    assert_eq!(report["pairs"][0]["query_rows"], serde_json::json!([42, 42]));
    for name in ["k", "v"] {
        let tensor = tensors.get_mut(name).unwrap();
        for row in (0..4 * 30).filter(|row| row / 60 == 1 && row % 30 >= 12) {
            (0..16).for_each(|d| set(tensor, row * 16 + d, f32::NAN));
        }
    }
    let q = tensors.get_mut("q").unwrap();
    set(q, (3 * 30 + 29) * 16, f32::NAN);
    let folder = Folder::with(&tensors);
    assert_eq!(json(&folder.input, &[]), report);
    tensors.insert("q".into(), qkv(Dtype::F32, &[2, 2, 30, 16], &[1], &[1])["q"].clone());
    let folder = Folder::with(&tensors);
    assert!(folder.run(&["--k-codec", "tq5", "--v-codec", "tq4"]) == want, "padding was read");
    // All rows are padding.
    tensors.insert("kv_lens".into(), Tensor::i64(&[0, 0]));
    let folder = Folder::with(&tensors);
    assert_refused(&kv(&folder.input, &[]), "kv_lens leave no rows of keys", "padding alone");
    let got = folder.run(&["--k-codec", "tq5"]);
    assert!(got["out"].bytes.iter().all(|byte| *byte == 0));
}

#[test]
fn zeros_are_reported_as_exact() {
    let zeros = Tensor::f32(&[1, 2, 9, 16], &[0.0; 288]);
    let tensors = Tensors::from(["q", "k", "v"].map(|name| (name.to_owned(), zeros.clone())));
    let folder = Folder::with(&tensors);
    let report = json(&folder.input, &[]);
    for of in report["all"]["keys"].as_array().unwrap() {
        assert_eq!((&of["error"], &of["kl"], &of["logit_rmse"]), (&0.0.into(), &0.0.into(), &0.0.into()));
    }
    assert!(report["meets_gate"] == true && report["recommended"]["k"] == "tq2", "{}", report["recommended"]);
    let got = folder.run(&["--k-codec", "tq3", "--v-codec", "fp8"]);
    assert!(got["out"].values().iter().all(|x| *x == 0.0));
}

#[test]
fn codecs_can_be_chosen() {
    let folder = Folder::with(&normal(40, 256, 0.0));
    let report = json(&folder.input, &["--codecs", "mlx-tq8,tq4,int8"]);
    assert_eq!(report["values"], serde_json::json!(["int8", "tq4", "mlx-tq8"]));
    // 256 codes of 8 bits and a norm of 32 bits.
    assert_eq!(report["keys"][key(&report, "mlx-tq8", true)]["bits"], 8.125);
    assert!(kl(&report, &report["all"], "int8", false) < kl(&report, &report["all"], "mlx-tq8", false));
    assert!(text(&folder.input, &[]).contains("\nint8 ") && !text(&folder.input, &[]).contains("mlx"));
    let small = Folder::with(&normal(40, 32, 0.0));
    assert!(
        text(&small.input, &["--codecs", "mlx-tq8,tq4"]).contains(
            "mlx-tq8 is left out: a key of k and v has 32 elements, expected 256 or 512 for mlx-tq8"
        )
    );
    let why = "--codecs: a key of k and v has 32 elements, expected 256 or 512 for mlx-tq8";
    assert_refused(&kv(&small.input, &["--codecs", "mlx-tq8"]), why, "no codec left");
    assert_refused(&kv(&small.input, &["--codecs", "tq7"]), "tq7 is not a codec", "unknown codec");
    let value = Folder::with(&qkv(Dtype::F32, &[1, 1, 9, 256], &[1, 1, 9, 256], &[1, 1, 9, 32]));
    let why = "a value of k and v has 32 elements, expected 256 or 512 for mlx-tq4";
    assert_eq!(json(&value.input, &["--codecs", "mlx-tq4,int8"])["left_out"][0]["reason"], why);
    let plain = text(&small.input, &["--codecs", "f32,bf16"]);
    assert!(plain.contains("\nbf16 ") && !plain.contains("recommended"), "{plain}");
    small.refuse(&["--k-codec", "mlx-tq8"], "k is mlx-tq8");
}

#[test]
fn pictures_of_errors() {
    let folder = Folder::with(&normal(128, 32, 0.0));
    let svg = folder.path().join("kv.svg");
    text(&folder.input, &["--svg", svg.to_str().unwrap()]);
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(picture.starts_with("<svg"));
    for words in [
        "keys centered (rings)",
        "keys as they are",
        "KL of attention probabilities vs bits per element",
        "mean KL divergence, nats",
        "NRMSE",
        "bits per element",
        "recommended: ",
        "tq4",
        "gate",
    ] {
        assert!(picture.contains(words), "{words}");
    }
    assert!(!picture.contains("worst pair"), "one pair is no worse than others");
    let named = folder.path().join("input.svg");
    std::fs::copy(&folder.input, &named).unwrap();
    assert_refused(&kv(&named, &["--svg", named.to_str().unwrap()]), "is the same file as", "svg");
    // Of several pairs, the picture marks the one that decides, with centered keys.
    let mut several = Tensors::new();
    for (layer, bias) in [(3, 0.5), (7, 23.0)] {
        let of_layer = normal(128, 32, bias).into_iter();
        several.extend(of_layer.map(|(name, tensor)| (format!("layer.{layer}.{name}"), tensor)));
    }
    let folder = Folder::with(&several);
    text(&folder.input, &["--svg", svg.to_str().unwrap()]);
    let picture = std::fs::read_to_string(&svg).unwrap();
    let report = json(&folder.input, &[]);
    let chosen = key(&report, report["recommended"]["k"].as_str().unwrap(), true);
    let kls = [0, 1].map(|pair| report["pairs"][pair]["errors"]["keys"][chosen]["kl"].as_f64().unwrap());
    let worst = if kls[0] > kls[1] { "worst pair: layer.3" } else { "worst pair: layer.7" };
    for words in [worst, "recommended: int8 centered for keys, ", "tq4 centered", "2 pairs of tensors"] {
        assert!(picture.contains(words), "{words} in {picture}");
    }
    // With nothing to draw, there is a refusal and no file.
    let svg = folder.path().join("none.svg");
    let options = ["--svg", svg.to_str().unwrap()];
    let plain = kv(&folder.input, &[&options[..], &["--codecs", "f16"]].concat());
    assert_refused(
        &plain,
        "--svg: only quantizing codecs are drawn, expected one in --codecs, such as int8",
        "plain codecs",
    );
    let zeros = Tensor::f32(&[1, 1, 9, 16], &[0.0; 144]);
    let folder = Folder::with(&Tensors::from(["q", "k", "v"].map(|name| (name.to_owned(), zeros.clone()))));
    assert_refused(&kv(&folder.input, &options), "--svg: nothing to draw", "zeros");
    assert!(!svg.exists());
}

#[test]
fn refusals_of_files_and_options() {
    let folder = Folder::with(&qkv(Dtype::F32, &[1, 3, 5, 8], &[1, 2, 7, 8], &[1, 2, 7, 6]));
    let refuse = |tensors: &Tensors, options: &[&str], why: &str| {
        write(&folder.input, tensors);
        assert_refused(&kv(&folder.input, options), why, &format!("{options:?}"));
    };
    let good = qkv(Dtype::F32, &[1, 4, 5, 8], &[1, 2, 7, 8], &[1, 2, 7, 6]);
    let with = |name: &str, tensor: Tensor| {
        let mut tensors = good.clone();
        tensors.insert(name.to_owned(), tensor);
        tensors
    };
    let random = |shape: &[usize]| Tensor::random(Dtype::F32, shape, 3);
    refuse(
        &with("q", random(&[1, 3, 5, 8])),
        &[],
        "k and v: q_heads 3 is not a positive multiple of kv_heads 2",
    );
    refuse(
        &with("q", random(&[1, 4, 5, 9])),
        &[],
        "tensor q has shape [1, 4, 5, 9], expected [1, 4, 5, 8] to fit k",
    );
    refuse(
        &with("v", random(&[1, 2, 6, 8])),
        &[],
        "tensor v has shape [1, 2, 6, 8], expected [1, 2, 7, 8] to fit k",
    );
    refuse(
        &with("k", random(&[2, 7, 8])),
        &[],
        "tensor k has shape [2, 7, 8], expected [batch, heads, rows, dim]",
    );
    let long = qkv(Dtype::F32, &[1, 1, 2, 513], &[1, 1, 2, 513], &[1, 1, 2, 8]);
    refuse(&long, &[], "head_dim 513 is outside 1..=512");
    let empty = qkv(Dtype::F32, &[1, 1, 0, 8], &[1, 1, 0, 8], &[1, 1, 0, 8]);
    refuse(&empty, &[], "tensor k has shape [1, 1, 0, 8], which has no rows");
    let integers = Tensor { dtype: Dtype::I64, shape: vec![1, 1, 1, 8], bytes: vec![0; 64] };
    refuse(&with("k", integers), &[], "tensor k is I64, expected F32, F16 or BF16");
    refuse(&with("kv_lens", Tensor::i64(&[8])), &[], "kv_lens[0] is 8, expected at most the 7 rows");
    refuse(&good, &["--causal"], "causal with q_len 5 and kv_len 7 needs q_offset");
    refuse(&good, &["--rows", "0"], "expected a whole number, 1 or more");
    refuse(&good, &["--max-kl", "0"], "expected a finite number above 0");
    refuse(&good, &["--max-nrmse", "nan"], "expected a finite number above 0");
    refuse(&good, &["--scale", "inf"], "scale inf is not finite");
    refuse(&with("mask", random(&[1])), &["--strict"], "unknown tensors: mask");
    refuse(&with("kv_len", Tensor::i64(&[1])), &[], "tensor kv_len is not known, did you mean kv_lens?");
    refuse(
        &with("cu_seqlens_k", Tensor::i64(&[0, 1])),
        &[],
        "cu_seqlens_k makes the tensors packed, expected [batch",
    );
    let nothing = Tensors::from([("weight".to_owned(), random(&[3]))]);
    refuse(
        &nothing,
        &[],
        "no keys and values, expected tensors such as layer.0.k and layer.0.v, or k and v (it has weight)",
    );
    let names = ["a", "b", "c", "d", "e", "f"].map(|name| (name.to_owned(), random(&[3])));
    refuse(&Tensors::from(names), &[], "or k and v (it has a, b, c, d and 2 more)");
    let alone = Tensors::from([("x.v".to_owned(), random(&[1, 1, 3, 8]))]);
    refuse(&alone, &[], "tensor x.v has no keys beside it");
    write(&folder.input, &with("mask", random(&[1])));
    let output = kv(&folder.input, &["--q-offset", "bottom-right"]);
    assert!(output.status.success());
    let note = "note: the report does not account for mask\n";
    assert!(stderr(&output).ends_with(note), "{}", stderr(&output));
}

/// Everything that runs over tensors also runs over a cache of them.
#[test]
fn keys_with_unequal_channels_are_equalized() {
    let mut tensors = normal(512, 64, 0.0);
    let scaled = |name: &str, scale: &dyn Fn(usize) -> f64| {
        let values = tensors[name].values().into_iter().enumerate();
        values.map(|(at, x)| (scale(at) * x) as f32).collect::<Vec<f32>>()
    };
    let k = scaled("k", &|at| if at % 64 == 5 { 16.0 } else { 1.0 });
    let q = scaled("q", &|_| 0.5);
    tensors.insert("k".into(), Tensor::f32(&[1, 1, 512, 64], &k));
    let shape = tensors["q"].shape.clone();
    tensors.insert("q".into(), Tensor::f32(&shape, &q));
    let folder = Folder::with(&tensors);
    let options = ["--codecs", "tq4,fp8", "--equalize", "0.5", "--max-kl", "0.1", "--max-nrmse", "0.5"];
    let report = json(&folder.input, &options);
    let keys = report["keys"].as_array().unwrap();
    let ways: Vec<_> = keys.iter().map(|key| (&key["codec"], &key["centered"], &key["equalized"])).collect();
    let fp8 = |centered| (Value::from("fp8"), Value::from(centered), Value::from(false));
    let tq4 = |centered, equalized| (Value::from("tq4"), Value::from(centered), Value::from(equalized));
    let want = [fp8(false), fp8(true), tq4(false, false), tq4(true, false), tq4(true, true)];
    assert!(
        ways.into_iter().eq(want.iter().map(|(codec, centered, equalized)| (codec, centered, equalized)))
    );
    let kls: Vec<f64> =
        report["all"]["keys"].as_array().unwrap().iter().map(|of| of["kl"].as_f64().unwrap()).collect();
    assert!(kls[4] < 0.5 * kls[3], "{kls:?}");
    let best = &report["recommended"];
    assert!(best["k"] == "tq4" && best["equalized"] == true, "{best}");
    let text = text(&folder.input, &options);
    let words =
        ["tq4, keys centered and equalized", "recommended: keys tq4 centered and equalized, values tq4"];
    assert!(words.iter().all(|words| text.contains(words)), "{text}");
    let run = ["--k-codec", "tq4", "--v-codec", "tq4", "--center-keys", "--equalize-keys", "0.5"];
    assert!(text.contains(&run.join(" ")), "{text}");
    // A run errs as the report says.
    let want = folder.run(&[]);
    let error = |options: &[&str]| nrmse(&folder.run(options)["out"].values(), &want["out"].values());
    let (with, without) = (error(&run), error(&run[..5]));
    assert!(with < 0.9 * without, "{with} equalized, {without} not");
    assert_eq!(error(&[&run[..6], &["0"]].concat()), without);
}

/// Windows of 100 keys that lie in 16 bits have no errors, whatever their codes; memory counts both.
#[test]
fn kept_tokens_are_read_in_16_bits() {
    let folder = Folder::with(&normal(512, 64, 0.0));
    let visible = ["--causal", "--q-offset", "464", "--codecs", "tq2,int8,fp8"];
    let of = |options: &[&str]| json(&folder.input, &[&visible[..], options].concat());
    let (none, some) = (of(&[]), of(&["--keep-first", "4", "--keep-last", "128"]));
    let kl_of = |report: &Value| kl(report, &report["all"], "tq2", false);
    assert!(kl_of(&some) < 0.95 * kl_of(&none) && kl_of(&some) > 0.0, "{} {}", kl_of(&some), kl_of(&none));
    let bits = |report: &Value| report["keys"][key(report, "tq2", false)]["bits"].as_f64().unwrap();
    // 4 rows, and 128 with room for a step of 64, of the 512 that have codes.
    assert!((bits(&some) - bits(&none) - 16.0 * 196.0 / 512.0).abs() < 1e-9);
    assert_eq!((&some["keep_first"], &some["keep_last"]), (&4.into(), &128.into()));
    assert_eq!(some["left_out"][0]["name"], "fp8");
    let all = of(&["--window", "99", "--keep-last", "100"]);
    assert_eq!((kl_of(&all), all["all"]["nrmse"][0][0].as_f64()), (0.0, Some(0.0)));
    let text = text(&folder.input, &[&visible[..], &["--keep-last", "128", "--max-kl", "1"]].concat());
    let words =
        ["in 16 bits beside codes: the first 0 tokens and the last 128", "keep_first 0, keep_last 128\n"];
    assert!(words.iter().all(|words| text.contains(words)), "{text}");
    let refused = kv(&folder.input, &["--codecs", "fp8", "--keep-last", "9"]);
    assert_refused(&refused, "--codecs: fp8: a cache keeps no rows of it in 16 bits", "--keep-last");
}

#[test]
fn runs_over_caches_are_those_of_the_reference() {
    let mut tensors = qkv(Dtype::F32, &[2, 4, 37, 24], &[2, 2, 301, 24], &[2, 2, 301, 40]);
    tensors.insert("mask".into(), Tensor::bool(&[1, 1, 37, 301], (0..37 * 301).map(|n| n % 7 != 3)));
    tensors.insert("alibi_slopes".into(), Tensor::f32(&[4], &[0.5, 0.25, 0.125, -0.01]));
    tensors.insert("sinks".into(), Tensor::f32(&[4], &[0.0, 1.0, -2.0, 3.0]));
    let options = ["--causal", "--q-offset", "bottom-right", "--window", "100", "--softcap=2.5"];
    // The longest sequence is shorter than the tensors, so that masks are narrowed.
    for kv_lens in [[301, 40], [290, 40]] {
        tensors.insert("kv_lens".into(), Tensor::i64(&kv_lens));
        let folder = Folder::with(&tensors);
        for stored in [
            &["--k-codec", "int8", "--v-codec", "tq5"][..],
            &["--k-codec", "tq4", "--center-keys"],
            &["--k-codec", "tq3", "--equalize-keys", "1"],
            &["--v-codec", "fp8"],
            &["--k-codec", "bf16", "--v-codec", "f16"],
        ] {
            let with = |more: &[&'static str]| [&options[..], stored, more].concat();
            let want = folder.run(&with(&["--backend", "reference"]));
            for isa in flashtile::Cpu::isas() {
                let got = folder.run(&with(&["--backend", "cpu", "--isa", isa.name()]));
                let error = nrmse(&got["out"].values(), &want["out"].values());
                assert!(error <= 2e-4, "{stored:?} {isa}: {error}");
                let error = crate::files::max_abs(&got["lse"].values(), &want["lse"].values());
                assert!(error <= 5e-4, "{stored:?} {isa}: {error}");
            }
            // The tensors themselves give another answer.
            let plain = folder.run(&options);
            assert!(nrmse(&plain["out"].values(), &want["out"].values()) > 1e-4, "{stored:?}");
        }
    }
    // A mask with another shape gives the error that it gives without a cache.
    tensors.insert("mask".into(), Tensor::bool(&[1, 1, 37, 290], (0..37 * 290).map(|_| true)));
    let refusal = "mask has shape [1, 1, 37, 290], expected [2, 4, 37, 301]";
    Folder::with(&tensors).refuse(&options, refusal);
    Folder::with(&tensors).refuse(&[&options[..], &["--k-codec", "int8"]].concat(), refusal);
}

#[test]
fn layouts_over_caches_are_the_same_problem() {
    let tensors = qkv(Dtype::F32, &[3, 4, 21, 32], &[3, 2, 50, 32], &[3, 2, 50, 16]);
    let mut transposed = tensors.clone();
    for name in ["q", "k", "v"] {
        transposed.insert(name.into(), tensors[name].transposed());
    }
    let stored = ["--k-codec", "int8", "--v-codec", "tq4", "--center-keys"];
    let want = Folder::with(&tensors).run(&stored);
    let got = Folder::with(&transposed).run(&[&stored[..], &["--layout", "bshd"]].concat());
    assert_eq!((got["out"].transposed(), &got["lse"]), (want["out"].clone(), &want["lse"]));
    // Packed: the same rows, one sequence after another.
    let mut packed = Tensors::new();
    for name in ["q", "k", "v"] {
        let Tensor { dtype, shape, bytes } = transposed[name].clone();
        packed.insert(
            name.into(),
            Tensor { dtype, shape: vec![shape[0] * shape[1], shape[2], shape[3]], bytes },
        );
    }
    packed.insert("cu_seqlens_q".into(), Tensor::i64(&[0, 21, 42, 63]));
    packed.insert("cu_seqlens_k".into(), Tensor::i64(&[0, 50, 100, 150]));
    let of_packed = Folder::with(&packed).run(&stored);
    assert_eq!(of_packed["out"].bytes, got["out"].bytes);
    let lse = of_packed["lse"].values();
    let want_lse = want["lse"].values();
    for (at, x) in want_lse.iter().enumerate() {
        let (b, h, i) = (at / 84, at / 21 % 4, at % 21);
        assert_eq!(*x, lse[h * 63 + b * 21 + i]);
    }
}

#[test]
fn lines_and_objects_say_how_caches_store() {
    let folder = Folder::with(&normal(64, 32, 0.0));
    let output = folder.try_run(&["--k-codec", "int8", "--v-codec", "tq5", "--center-keys"]);
    assert!(
        stdout(&output).contains("-int8+tq5-")
            && stdout(&output).contains("\ncache      k int8 centered, v tq5, 3.50 KiB\n")
    );
    let of = |options: &[&str]| -> Value { serde_json::from_str(&stdout(&folder.try_run(options))).unwrap() };
    let json = of(&["--k-codec", "int8", "--v-codec", "tq5", "--json"]);
    assert_eq!((&json["k_codec"], &json["v_codec"]), (&"int8".into(), &"tq5".into()));
    assert_eq!((&json["backend"], &json["centered"]), (&"cpu".into(), &false.into()));
    // 64 tokens with 34 bytes of key and 22 of value.
    assert_eq!((&json["cache_bytes"], json["kv_bytes"].as_f64()), (&3584.into(), Some(3584.0)));
    assert!(json["backend_reason"].as_str().unwrap().contains("no NVIDIA driver on this machine"), "{json}");
    let json = of(&["--json"]);
    assert_eq!((&json["k_codec"], &json["cache_bytes"]), (&"f32".into(), &Value::Null));
    let reference = folder.try_run(&["--k-codec", "int8", "--backend", "reference"]);
    assert!(stdout(&reference).contains("\ncache      k int8, v f32, "), "{}", stdout(&reference));
    let input = folder.input.to_str().unwrap();
    let plan = flashtile(["plan", input, "--k-codec", "tq4", "--v-codec", "tq4", "--json"]);
    let plan: Value = serde_json::from_str(&stdout(&plan)).unwrap();
    assert!(plan["kernel"].as_str().unwrap().contains("-tq4-"), "{plan}");
    assert_eq!((&plan["k_codec"], plan["kv_bytes"].as_f64()), (&"tq4".into(), Some(64.0 * 36.0)));
    // Centering does not change the plan, which mentions it.
    let codecs = ["--k-codec", "int8", "--v-codec", "tq5"];
    let plan = |more: &[&str]| stdout(&flashtile([&["plan", input][..], &codecs, more].concat()));
    let (without, with) = (plan(&[]), plan(&["--center-keys"]));
    assert_eq!(without, with.replace("cached as k int8 centered, v tq5", "cached as k int8, v tq5"));
    assert_ne!(without, with);
    let [without, with] = [&["--json"][..], &["--json", "--center-keys"]].map(plan);
    assert_eq!(without, with.replace("\"centered\":true", "\"centered\":false"));
    assert_ne!(without, with);
    let steps = flashtile(["plan", "--cached", "1:4096", "--head-dim", "64", "--v-codec", "tq5", "--causal"]);
    assert!(stdout(&steps).contains("cached as k f32, v tq5"), "{}", stdout(&steps));
}

#[test]
fn runs_that_caches_cannot_do_are_refused() {
    let mut tensors = qkv(Dtype::F32, &[2, 2, 5, 8], &[2, 2, 7, 8], &[2, 2, 7, 8]);
    let folder = Folder::with(&tensors);
    for (options, why) in [
        (&["--k-codec", "tq9"][..], "tq9 is not a codec, expected tq6, tq5, tq4, tq3, tq2, f32"),
        (
            &["--center-keys"],
            "--center-keys: keys are stored as f32, expected a --k-codec that quantizes, such as int8",
        ),
        (&["--center-keys", "--k-codec", "bf16"], "--center-keys: keys are stored as bf16"),
        (&["--k-codec", "tq4", "--grad"], "--grad"),
        (&["--k-codec", "tq4", "--causal"], "causal with q_len 5 and kv_len 7 needs q_offset"),
    ] {
        folder.refuse(options, why);
    }
    for (bad, why) in [(f32::NAN, "holds a NaN or an infinity"), (1e9, "has a norm above 8192")] {
        for (name, option) in [("k", "--k-codec"), ("v", "--v-codec")] {
            let mut changed = tensors.clone();
            set(changed.get_mut(name).unwrap(), (3 * 7 + 2) * 8, bad);
            let folder = Folder::with(&changed);
            let why = format!("in.safetensors: sequence 1: row 2 of head 1 of {name} {why}");
            folder.refuse(&[option, "tq5"], &why);
        }
    }
    tensors.insert("kv_lens".into(), Tensor::i64(&[7, 0]));
    let folder = Folder::with(&tensors);
    let lse = read_lse(&folder);
    assert!(lse[10..].iter().all(|x| *x == f64::NEG_INFINITY) && lse[..10].iter().all(|x| x.is_finite()));
    assert_refused(
        &flashtile(["plan", "--center-keys"]),
        "--center-keys: keys are stored as f32, expected a --k-codec that quantizes",
        "plan --center-keys",
    );
}

#[test]
fn plans_of_devices_take_codecs_by_portable_kernels() {
    let plan = ["plan", "--k-codec", "int8", "--v-codec", "tq4", "--dtype", "bf16", "--device", "h100"];
    let text = stdout(&flashtile(plan));
    assert!(
        text.contains("cuda-prefill-bf16-d128-int8+tq4-portable-paged: native kernels read bf16 only"),
        "{text}"
    );
    let native = plan.into_iter().chain(["--kernels", "native"]);
    let why =
        "--k-codec: native kernels read bf16 like the problem, not int8: expected --kernels auto or portable";
    assert_refused(&flashtile(native), why, "plan of native kernels");
}

fn read_lse(folder: &Folder) -> Vec<f64> {
    folder.run(&["--k-codec", "int8", "--v-codec", "tq2"]);
    read(&folder.output)["lse"].values()
}
