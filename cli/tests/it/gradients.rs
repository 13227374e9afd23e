//! `flashtile run --grad`, and plans, cases and rows of the backward pass.

use crate::files::{Folder, Tensor, Tensors, assert_refused, flashtile, nrmse, qkv, read, stderr, stdout};
use safetensors::tensor::Dtype;
use serde_json::Value;

/// GQA, another value dim, padding, and every input that has a gradient.
fn everything(dtype: Dtype) -> Tensors {
    let mut tensors = qkv(dtype, &[2, 4, 37, 24], &[2, 2, 301, 24], &[2, 2, 301, 40]);
    tensors.insert("mask".into(), Tensor::random(Dtype::F32, &[4, 37, 1], 4).with_shape(&[1, 4, 37, 1]));
    tensors.insert("alibi_slopes".into(), Tensor::f32(&[4], &[0.5, 0.25, 0.125, -0.01]));
    tensors.insert("sinks".into(), Tensor::f32(&[4], &[0.0, 1.0, -2.0, 3.0]));
    tensors.insert("kv_lens".into(), Tensor::i64(&[301, 40]));
    tensors.insert("d_out".into(), Tensor::random(dtype, &[2, 4, 37, 40], 5));
    tensors.insert("d_lse".into(), Tensor::random(Dtype::F32, &[2, 4, 37], 6));
    tensors
}

const OPTIONS: [&str; 7] =
    ["--grad", "--causal", "--q-offset", "bottom-right", "--window", "100", "--softcap=2.5"];

const GRADIENTS: [&str; 6] = ["d_q", "d_k", "d_v", "d_sinks", "d_bias", "d_alibi_slopes"];

fn with<'a>(options: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    options.iter().chain(more).copied().collect()
}

fn object(folder: &Folder, options: &[&str]) -> Value {
    let output = folder.try_run(&with(options, &["--json"]));
    serde_json::from_str(&stdout(&output)).unwrap_or_else(|_| panic!("{}", stderr(&output)))
}

/// A file of small tensors.
fn small() -> Tensors {
    let mut tensors = qkv(Dtype::F32, &[1, 2, 3, 8], &[1, 1, 5, 8], &[1, 1, 5, 4]);
    tensors.insert("d_out".into(), Tensor::random(Dtype::F32, &[1, 2, 3, 4], 5));
    tensors
}

#[test]
fn every_instruction_set_agrees_with_the_reference() {
    for (dtype, limit) in [(Dtype::F32, 5e-6), (Dtype::F16, 2e-3), (Dtype::BF16, 1.6e-2)] {
        let folder = Folder::with(&everything(dtype));
        let want = folder.run(&with(&OPTIONS, &["--backend", "reference"]));
        let forward = folder.run(&with(&OPTIONS[1..], &["--backend", "reference"]));
        assert_eq!((&want["out"], &want["lse"]), (&forward["out"], &forward["lse"]));
        let shape = |name: &str| (want[name].dtype, &want[name].shape[..]);
        assert_eq!(shape("d_q"), (dtype, &[2, 4, 37, 24][..]));
        assert_eq!(shape("d_k"), (dtype, &[2, 2, 301, 24][..]));
        assert_eq!(shape("d_v"), (dtype, &[2, 2, 301, 40][..]));
        assert_eq!(shape("d_sinks"), (Dtype::F32, &[4][..]));
        assert_eq!(shape("d_bias"), (Dtype::F32, &[1, 4, 37, 1][..]));
        assert_eq!(shape("d_alibi_slopes"), (Dtype::F32, &[4][..]));
        assert_eq!(want.len(), 8);
        for isa in flashtile::Cpu::isas() {
            let got = folder.run(&with(&OPTIONS, &["--isa", isa.name()]));
            for name in GRADIENTS {
                let error = nrmse(&got[name].values(), &want[name].values());
                assert!(error <= limit, "{name} of {dtype:?} by {isa}: {error}");
            }
        }
    }
}

#[test]
fn threads_and_splits_do_not_change_a_bit() {
    let mut tensors = qkv(Dtype::F32, &[1, 1, 9, 8], &[1, 1, 2100, 8], &[1, 1, 2100, 8]);
    tensors.insert("d_out".into(), Tensor::random(Dtype::F32, &[1, 1, 9, 8], 5));
    let folder = Folder::with(&tensors);
    let want = folder.run(&["--grad"]);
    for more in [["--threads", "1"], ["--splits", "1"], ["--splits", "3"], ["--backend", "cpu"]] {
        assert_eq!(folder.run(&with(&["--grad"], &more)), want, "{more:?}");
    }
}

#[test]
fn layouts_are_the_same_problem() {
    let tensors = everything(Dtype::F32);
    let mut transposed = tensors.clone();
    for name in ["q", "k", "v", "d_out"] {
        transposed.insert(name.into(), tensors[name].transposed());
    }
    let want = Folder::with(&tensors).run(&OPTIONS);
    // Answers in the order of the file.
    let mut folder = Folder::with(&transposed);
    let got = folder.run(&with(&OPTIONS, &["--layout", "bshd"]));
    for name in ["d_q", "d_k", "d_v"] {
        assert_eq!(got[name].transposed(), want[name], "{name}");
        transposed.insert(name.into(), got[name].clone());
    }
    assert_eq!((&got["d_sinks"], &got["d_bias"]), (&want["d_sinks"], &want["d_bias"]));
    folder = Folder::with(&transposed);
    let json = object(&folder, &with(&OPTIONS, &["--layout", "bshd"]));
    assert_eq!(json["gradients_compared"]["d_k"]["nrmse"], 0.0, "{json}");

    let mut packed = qkv(Dtype::F32, &[5, 2, 8], &[7, 1, 8], &[7, 1, 4]);
    packed.insert("d_out".into(), Tensor::random(Dtype::F32, &[5, 2, 4], 5));
    packed.insert("d_lse".into(), Tensor::random(Dtype::F32, &[2, 5], 6));
    packed.insert("cu_seqlens_q".into(), Tensor::i64(&[0, 2, 5]));
    packed.insert("cu_seqlens_k".into(), Tensor::i64(&[0, 3, 7]));
    let folder = Folder::with(&packed);
    let want = folder.run(&["--grad", "--backend", "reference"]);
    let got = folder.run(&["--grad"]);
    assert_eq!((&got["d_q"].shape[..], &got["d_v"].shape[..]), (&[5, 2, 8][..], &[7, 1, 4][..]));
    for name in ["d_q", "d_k", "d_v"] {
        assert!(nrmse(&got[name].values(), &want[name].values()) <= 5e-6, "{name}");
    }
}

#[test]
fn dtype_converts_the_gradient_too() {
    let folder = Folder::with(&everything(Dtype::F32));
    let converted = Folder::with(&everything(Dtype::BF16));
    assert_eq!(folder.run(&with(&OPTIONS, &["--dtype", "bf16"])), converted.run(&OPTIONS));
}

#[test]
fn masks_keep_the_shape_of_the_file() {
    for shape in [&[1, 1, 3, 5][..], &[1, 3, 5], &[3, 5]] {
        let mut tensors = small();
        tensors.insert("mask".into(), Tensor::random(Dtype::F16, &[15], 7).with_shape(shape));
        let got = Folder::with(&tensors).run(&["--grad"]);
        assert_eq!((got["d_bias"].dtype, &got["d_bias"].shape[..]), (Dtype::F32, shape));
        tensors.insert("mask".into(), Tensor::bool(shape, (0..15).map(|n| n % 4 != 1)));
        let got = Folder::with(&tensors).run(&["--grad"]);
        assert!(!got.contains_key("d_bias"), "boolean masks have no gradient");
    }
}

#[test]
fn expected_gradients_of_absent_inputs_are_refused() {
    for (name, input) in
        [("d_sinks", "sinks"), ("d_bias", "an additive mask"), ("d_alibi_slopes", "alibi_slopes")]
    {
        let mut tensors = small();
        tensors.insert(name.into(), Tensor::f32(&[2], &[1.0, 2.0]));
        Folder::with(&tensors).refuse(&["--grad"], &format!("tensor {name} is there without {input}"));
        // Without a backward pass they are answers that nothing reads.
        Folder::with(&tensors).run(&[]);
    }
}

#[test]
fn a_line_for_the_backward_pass() {
    let mut tensors = everything(Dtype::F32);
    let folder = Folder::with(&tensors);
    let want = folder.run(&OPTIONS);
    let report = stdout(&folder.try_run(&OPTIONS));
    let lines: Vec<&str> = report.lines().filter(|line| line.starts_with("backward ")).collect();
    let shapes = "d_q [2, 4, 37, 24] d_k [2, 2, 301, 24] d_v [2, 2, 301, 40] d_sinks [4] d_bias [1, 4, 37, 1] d_alibi_slopes [4]: ";
    assert!(lines.len() == 1 && lines[0].contains(shapes), "{report}");
    assert!(lines[0].starts_with("backward   cpu-backward-f32-d24x40-"), "{report}");
    assert!(lines[0].contains("FLOP/s, ") && !report.contains("gradients "), "{report}");

    // The file's own gradients, one of them changed, and in any floating-point type.
    for name in GRADIENTS {
        tensors.insert(name.into(), want[name].clone());
    }
    tensors.insert("d_v".into(), want["d_q"].with_shape(&want["d_q"].shape));
    let wrong = "tensor d_v has shape [2, 4, 37, 24], expected [2, 2, 301, 40]";
    Folder::with(&tensors).refuse(&OPTIONS, wrong);
    let mut changed = want["d_v"].values();
    changed.iter_mut().for_each(|x| *x *= 1.1);
    let doubles = changed.iter().flat_map(|x| x.to_le_bytes()).collect();
    tensors.insert("d_v".into(), Tensor { dtype: Dtype::F64, bytes: doubles, ..want["d_v"].clone() });
    let folder = Folder::with(&tensors);
    let report = stdout(&folder.try_run(&OPTIONS));
    let line = "\ngradients  nrmse of d_q 0.0e0, d_k 0.0e0, d_v 9.1e-2, d_sinks 0.0e0, d_bias 0.0e0, d_alibi_slopes 0.0e0 (no limit)\n";
    assert!(report.contains(line), "{report}");

    let json = object(&folder, &OPTIONS);
    let backward = &json["backward"];
    assert!(backward["kernel"].as_str().unwrap().starts_with("cpu-backward-"), "{json}");
    assert!(backward["seconds"].as_f64().unwrap() > 0.0 && backward["gflops"].as_f64().unwrap() > 0.0);
    let ratio = backward["flops"].as_f64().unwrap() / json["flops"].as_f64().unwrap();
    // 2 (3 D + 2 Dv) of a pair, beside 2 (D + Dv).
    assert!((ratio - (3.0 * 24.0 + 2.0 * 40.0) / 64.0).abs() < 1e-9, "{ratio}");
    assert_eq!(backward["shapes"]["d_bias"], serde_json::json!([1, 4, 37, 1]), "{json}");
    assert_eq!(json["gradients_compared"]["d_q"]["nrmse"], 0.0, "{json}");
    let json = object(&folder, &OPTIONS[1..]);
    assert!(json["backward"].is_null() && json["gradients_compared"].is_null(), "{json}");
}

#[test]
fn large_runs_are_compared_with_a_limit() {
    let shape = [1, 4, 512, 64];
    let mut tensors = qkv(Dtype::F32, &shape, &shape, &shape);
    tensors.insert("d_out".into(), Tensor::random(Dtype::F32, &shape, 5));
    let folder = Folder::with(&tensors);
    let json = object(&folder, &["--grad", "--threads", "1"]);
    let fraction = json["backward"]["fraction"].as_f64().unwrap();
    assert!(fraction > 0.0 && fraction < 2.0, "{json}");
    let reference = object(&folder, &["--grad", "--backend", "reference"]);
    assert_eq!(reference["backward"]["kernel"], "reference-backward-f32-d64");
    assert!(reference["backward"]["fraction"].is_null(), "{reference}");
}

#[test]
fn gradients_that_are_not_finite_are_reported() {
    let mut tensors = small();
    tensors.get_mut("d_out").unwrap().bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let folder = Folder::with(&tensors);
    let report = stdout(&folder.try_run(&["--grad"]));
    assert!(report.contains("\nnon-finite d_q has 8 NaN and 0 infinite, d_k has 40 NaN"), "{report}");
    let json = object(&folder, &["--grad"]);
    assert_eq!(json["backward"]["non_finite"]["d_q"]["nan"], 8, "{json}");
}

#[test]
fn what_has_no_gradients_is_refused() {
    let missing = "--grad: ";
    let mut tensors = small();
    tensors.remove("d_out");
    Folder::with(&tensors).refuse(&["--grad"], missing);
    Folder::with(&tensors).refuse(
        &["--grad"],
        "in.safetensors: tensor d_out is missing, expected the gradient of out, f32 [1, 2, 3, 4], and optionally d_lse",
    );
    let folder = Folder::with(&small());
    folder.refuse(
        &["--grad", "--k-codec", "tq4"],
        "--grad: keys and values in a cache (k tq4, v f32) have no gradients, expected no codecs",
    );
    // Codecs of the dtype are no cache.
    folder.run(&["--grad", "--k-codec", "f32"]);
    let random = |dtype, shape: &[usize]| Tensor::random(dtype, shape, 1);
    let cases = [
        (
            "d_out",
            random(Dtype::F32, &[1, 2, 3, 8]),
            "tensor d_out has shape [1, 2, 3, 8], expected [1, 2, 3, 4] to fit q and v",
        ),
        (
            "d_out",
            random(Dtype::F32, &[2, 3, 4]),
            "tensor d_out has shape [2, 3, 4], expected [batch, heads, rows, dim]",
        ),
        (
            "d_out",
            random(Dtype::F16, &[1, 2, 3, 4]),
            "tensor d_out is f16, expected f32 as q (--dtype converts it too)",
        ),
        ("d_out", Tensor::i64(&[1]), "tensor d_out is I64, expected F32, F16 or BF16"),
        ("d_lse", random(Dtype::F32, &[1, 3, 2]), "tensor d_lse has shape [1, 3, 2], expected [1, 2, 3]"),
        ("d_lse", random(Dtype::F16, &[1, 2, 3]), "tensor d_lse is F16, expected F32"),
        (
            "d_k",
            random(Dtype::F32, &[1, 2, 5, 8]),
            "tensor d_k has shape [1, 2, 5, 8], expected [1, 1, 5, 8]",
        ),
        (
            "d_q",
            Tensor { dtype: Dtype::U32, ..random(Dtype::F32, &[1, 2, 3, 8]) },
            "tensor d_q is U32, expected F64, F32, F16 or BF16",
        ),
        ("d_outs", random(Dtype::F32, &[1]), "tensor d_outs is not known, did you mean d_out?"),
    ];
    for (name, tensor, why) in cases {
        let mut tensors = small();
        tensors.insert(name.into(), tensor);
        Folder::with(&tensors).refuse(&["--grad"], why);
    }
}

#[test]
fn gradients_are_noted_where_none_are_asked_for() {
    let mut tensors = small();
    let folder = Folder::with(&tensors);
    let output = folder.try_run(&["--strict"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).ends_with("note: tensors not read: d_out (--grad computes gradients)\n"));
    assert_eq!(read(&folder.output).len(), 2);
    tensors.remove("d_out");
    assert_eq!(Folder::with(&tensors).run(&[]), read(&folder.output));
}

#[test]
fn gradients_of_a_layer() {
    let mut tensors = small();
    let want = Folder::with(&tensors).run(&["--grad"]);
    for name in ["d_q", "d_k", "d_v"] {
        tensors.insert(name.into(), want[name].clone());
    }
    let layer = tensors.into_iter().map(|(name, tensor)| (format!("layer.3.{name}"), tensor)).collect();
    let folder = Folder::with(&layer);
    let options = ["--grad", "--prefix", "layer.3"];
    assert_eq!(folder.run(&options), want);
    assert!(
        stdout(&folder.try_run(&options)).contains("\ngradients  nrmse of d_q 0.0e0, d_k 0.0e0, d_v 0.0e0")
    );
    folder.refuse(&["--grad"], "tensor q is missing, expected q, k and v, or --prefix for layer.3\n");
}

#[test]
fn plans_of_the_backward_pass() {
    let shape =
        ["plan", "--q-len", "1000", "--heads", "8", "--head-dim", "64", "--causal", "--grad", "--no-tiles"];
    let text = stdout(&flashtile(with(&shape, &["--device", "avx2-8core"])));
    let line = text.lines().find(|line| line.starts_with("backward ")).unwrap();
    assert!(
        line.starts_with(
            "backward   cpu-backward-f32-d64-avx2: 8 tasks in tiles of 96 rows by 128 keys, 1 level, "
        ),
        "{line}"
    );
    assert!(line.contains("8 workers, workspace ") && line.ends_with(" GFLOP"), "{line}");
    for (device, kernel) in
        [("h200", "cuda-backward-f32-d64-portable"), ("m3-max", "metal-backward-f32-d64-portable")]
    {
        let text = stdout(&flashtile(with(&shape, &["--device", device])));
        let line = format!("\nbackward   {kernel}: ");
        assert!(text.contains(&line) && text.contains(" keys for d_q, of "), "{text}");
    }
    let of_h200 = |more: &[&str]| {
        let text = stdout(&flashtile(with(&with(&shape, &["--device", "h200", "--dtype", "bf16"]), more)));
        text.lines().find(|line| line.starts_with("backward ")).unwrap().to_owned()
    };
    assert!(of_h200(&[]).starts_with("backward   cuda-backward-bf16-d64-wgmma128x256: "), "{}", of_h200(&[]));
    let softcap = of_h200(&["--softcap", "30"]);
    assert!(softcap.starts_with("backward   cuda-backward-bf16-d64-wgmma128x256-softcap: "), "{softcap}");
    let (scale, why) = (of_h200(&["--scale", "0"]), "(native backward kernels have no scale of 0)");
    assert!(scale.contains(why), "{scale}");
    let native = flashtile(with(&shape, &["--device", "h200", "--kernels", "native"]));
    assert_refused(
        &native,
        "--grad: no backward pass: native backward kernels multiply f16 and bf16 only",
        "native",
    );
    let plan: Value =
        serde_json::from_str(&stdout(&flashtile(with(&shape, &["--device", "avx2-8core", "--json"]))))
            .unwrap();
    let backward = &plan["backward"];
    assert_eq!(
        (&backward["tasks"], &backward["levels"], &backward["threads"]),
        (&8.into(), &1.into(), &8.into())
    );
    assert_eq!(backward["flops"].as_f64().unwrap(), 2.5 * plan["flops"].as_f64().unwrap());
    assert!(backward["workspace_bytes"].as_u64().unwrap() > 0, "{plan}");
    let cached = flashtile(["plan", "--cached", "1:64", "--causal", "--grad"]);
    assert_refused(
        &cached,
        "--grad: no backward pass: keys and values in the pages of a cache have no gradients",
        "--cached",
    );
    let without = stdout(&flashtile(["plan", "--q-len", "30", "--no-tiles"]));
    assert!(!without.contains("backward"), "{without}");
}

#[test]
fn rows_of_the_backward_pass() {
    let folder = Folder::empty();
    let rows = folder.path().join("rows.jsonl");
    let rows = rows.to_str().unwrap();
    let few = ["bench", "backward", "--head-dim", "32", "--min-time", "0.001", "--threads", "1"];
    let output =
        flashtile(with(&few, &["--seq", "64,1200", "--heads", "4", "--kv-heads", "2", "--json-lines", rows]));
    let table = stdout(&output);
    assert!(
        output.status.success() && table.contains("\nbackward, ") && table.contains("of limit"),
        "{table}"
    );
    assert!(table.contains("bf16") && table.contains("causal"), "{table}");
    let text = std::fs::read_to_string(rows).unwrap();
    assert_eq!(text.lines().count(), 3 * 2 * 2);
    for line in text.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        assert!(row["kernel"].as_str().unwrap().starts_with("cpu-backward-"), "{row}");
        assert_eq!((&row["kind"], &row["limit"]), (&"backward".into(), &"fma".into()), "{row}");
        assert!(row["seconds"].as_f64().unwrap() > 0.0 && row["fraction"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["nrmse"].as_f64().unwrap() < 1.6e-2, "{row}");
    }
    let packed =
        ["--batch", "3", "--seq", "20..60", "--dtype", "f32", "--window", "30", "--causal", "--json"];
    let row: Value = serde_json::from_str(&stdout(&flashtile(with(&few, &packed)))).unwrap();
    assert_eq!((&row["layout"], &row["lens"]), (&"packed".into(), &serde_json::json!([20, 40, 60])));

    let peer = r#"{"peer":"x","kind":"backward","dtype":"f32","d":32,"h":8,"b":1,"s":64,"causal":true,"seconds":1.0}"#;
    std::fs::write(rows, peer).unwrap();
    let versus = flashtile(with(&few, &["--seq", "64", "--dtype", "f32", "--causal", "--vs", rows]));
    assert!(stdout(&versus).contains("1.00 s"), "{}", stderr(&versus));
    // Rows of the forward pass are other rows.
    let forward = flashtile(with(&["bench", "prefill"], &with(&few[2..], &["--seq", "64", "--vs", rows])));
    assert_refused(&forward, "no row matches a row of this run (1 row in the file)", "--vs");
    let cached = flashtile(with(&few, &["--cache", "paged"]));
    assert_refused(&cached, "--cache: needs the group decode", "--cache");
}

#[test]
fn cases_of_the_backward_pass() {
    let run = |more: &[&str]| {
        let output = flashtile(with(&["check", "--isa", "portable"], more));
        assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
        stdout(&output)
    };
    let text = run(&["--filter", "backward_gqa"]);
    assert!(text.starts_with("backward pass:\nrunner ") && text.contains("f32 error/limit"), "{text}");
    let both = run(&["--filter", "gqa_4"]);
    assert!(both.contains("f32 nrmse/limit") && both.contains("\n\nbackward pass:\n"), "{both}");
    let json = run(&["--filter", "backward_gqa", "--seeds", "3..9", "--json"]);
    let rows: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let backward = |row: &&Value| row["case"].as_str().unwrap().starts_with("backward_");
    assert_eq!(rows.iter().filter(|row| !backward(row)).count(), 6, "{json}");
    assert!(rows.iter().filter(backward).count() > 6 && json.contains("\"backward_seed "), "{json}");
    for row in rows.iter().filter(backward) {
        assert_eq!(row["result"], "passed", "{row}");
        assert!(row["plan"].as_str().unwrap().starts_with("cpu-backward-"), "{row}");
        assert!(row["gradients"]["d_q"]["of_limit"].as_f64().unwrap() <= 1.0, "{row}");
    }
    // Caches have no gradients.
    let list = run(&["--list"]);
    assert!(list.contains("\nbackward_gqa") && !list.contains("\nbackward_quantized"), "{list}");
}
