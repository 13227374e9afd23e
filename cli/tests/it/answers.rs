//! `flashtile run` on files that hold the answer.

use crate::examples::data;
use crate::files::{Folder, Tensor, Tensors, qkv, read, stderr, stdout};
use safetensors::tensor::Dtype;
use serde_json::Value;

/// A problem in which causality matters, with the answer to its causal version.
fn causal(dtype: Dtype) -> Tensors {
    let mut tensors = qkv(dtype, &[2, 4, 9, 16], &[2, 2, 9, 16], &[2, 2, 9, 8]);
    tensors.extend(Folder::with(&tensors).run(&["--causal", "--backend", "reference"]));
    tensors
}

fn json(folder: &Folder, options: &[&str]) -> (Option<i32>, Value) {
    let output = folder.try_run(&[options, &["--json"]].concat());
    (output.status.code(), serde_json::from_str(&stdout(&output)).unwrap())
}

#[test]
fn answers_are_compared() {
    let mut folder = Folder::empty();
    folder.input = data("minilm_attention.safetensors");
    let line = stdout(&folder.try_run(&[]));
    assert!(
        line.contains("\nanswer     matches out and lse: nrmse ") && line.contains(" (limit 4.0e-6), lse "),
        "{line}"
    );
    let (status, found) = json(&folder, &[]);
    let compared = &found["compared"];
    assert_eq!((status, &compared["within"]), (Some(0), &true.into()), "{found}");
    let error = compared["out"]["nrmse"].as_f64().unwrap();
    assert!(error > 0.0 && error < compared["out"]["nrmse_limit"].as_f64().unwrap(), "{compared}");
    assert!(compared["lse"]["max_abs"].as_f64().unwrap() < 1e-5, "{compared}");
    assert!(compared["out"]["of_limit"].as_f64().unwrap() < 1.0, "{compared}");

    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        let mut tensors = causal(dtype);
        let all = Folder::with(&tensors);
        assert!(
            stdout(&all.try_run(&["--causal", "--strict"])).contains("\nanswer     matches out and lse: "),
            "{dtype:?}"
        );
        tensors.remove("lse");
        let line = stdout(&Folder::with(&tensors).try_run(&["--causal"]));
        assert!(line.contains("\nanswer     matches out: nrmse ") && !line.contains("lse"), "{line}");
    }
    let mut tensors = causal(Dtype::F32);
    tensors.remove("out");
    let line = stdout(&Folder::with(&tensors).try_run(&["--causal"]));
    assert!(line.contains("\nanswer     matches lse: lse "), "{line}");
    tensors.remove("lse");
    assert_eq!(json(&Folder::with(&tensors), &["--causal"]).1["compared"], Value::Null);
}

#[test]
fn an_answer_beyond_the_limit_is_status_1() {
    let tensors = causal(Dtype::F32);
    let folder = Folder::with(&tensors);
    let output = folder.try_run(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("\nanswer     differs from out and lse: nrmse "), "{}", stdout(&output));
    let why = stderr(&output);
    assert!(
        why.contains("in.safetensors: the answer differs from tensor out: out[") && why.lines().count() == 1,
        "{why}"
    );
    // The computed answer is written nevertheless.
    assert_eq!(read(&folder.output)["out"].shape, [2, 4, 9, 8]);
    assert_eq!(json(&folder, &[]).1["compared"]["within"], false);

    let changed = |name: &str, at: usize| {
        let mut tensors = tensors.clone();
        let bytes = &mut tensors.get_mut(name).unwrap().bytes[4 * at..][..4];
        bytes.copy_from_slice(&f32::NAN.to_le_bytes());
        Folder::with(&tensors)
    };
    let (folder, index) = (changed("out", ((4 + 3) * 9 + 2) * 8 + 5), "out[1, 3, 2, 5] is ");
    let output = folder.try_run(&["--causal"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("\nanswer     differs from out: nrmse "), "{}", stdout(&output));
    assert!(
        stderr(&output).contains(index) && stderr(&output).contains("the file has NaN;"),
        "{}",
        stderr(&output)
    );
    let (folder, index) = (changed("lse", (4 + 3) * 9 + 2), "tensor lse: lse[1, 3, 2] is ");
    let output = folder.try_run(&["--causal", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains(index), "{}", stderr(&output));
    let found: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!((&found["compared"]["lse"]["worst"]), &serde_json::json!([1, 3, 2]), "{found}");
}

#[test]
fn answers_have_the_order_of_the_file() {
    let mut tensors = causal(Dtype::F32);
    for name in ["q", "k", "v", "out"] {
        tensors.insert(name.into(), tensors[name].transposed());
    }
    let bshd = ["--causal", "--layout", "bshd"];
    assert_eq!(json(&Folder::with(&tensors), &bshd).1["compared"]["within"], true);
    let refused = "tensor out has shape [2, 9, 4, 8], expected [2, 4, 9, 8] to fit q, k and v";
    let mut mixed = causal(Dtype::F32);
    mixed.insert("out".into(), tensors["out"].clone());
    Folder::with(&mixed).refuse(&["--causal"], refused);

    let mut packed = qkv(Dtype::F32, &[5, 4, 8], &[7, 2, 8], &[7, 2, 8]);
    packed.insert("cu_seqlens_q".into(), Tensor::i64(&[0, 2, 5]));
    packed.insert("cu_seqlens_k".into(), Tensor::i64(&[0, 3, 7]));
    packed.extend(Folder::with(&packed).run(&["--backend", "reference"]));
    let (status, found) = json(&Folder::with(&packed), &[]);
    assert_eq!((status, &found["compared"]["within"]), (Some(0), &true.into()), "{found}");
    packed.get_mut("out").unwrap().bytes[4 * ((3 * 4 + 2) * 8 + 1)..][..4]
        .copy_from_slice(&9f32.to_le_bytes());
    let output = Folder::with(&packed).try_run(&[]);
    assert!(
        stderr(&output).contains("out[3, 2, 1] is ") && stderr(&output).contains("has 9 ("),
        "{}",
        stderr(&output)
    );
}

/// A run that rounds its inputs gives another answer, which no limit describes.
#[test]
fn rounded_inputs_have_no_limit() {
    let folder = Folder::with(&causal(Dtype::F32));
    for options in [&["--dtype", "bf16"][..], &["--k-codec", "tq2"], &["--v-codec", "int8"]] {
        let options = [&["--causal"], options].concat();
        let output = folder.try_run(&options);
        assert!(output.status.success(), "{options:?}: {}", stderr(&output));
        let line = stdout(&output);
        assert!(line.contains("\nanswer     compared with out and lse: nrmse "), "{line}");
        assert!(line.ends_with(" (no limit: inputs are rounded)\n"), "{line}");
        let found = json(&folder, &options).1;
        assert_eq!(
            (&found["compared"]["within"], &found["compared"]["out"]["nrmse_limit"]),
            (&Value::Null, &Value::Null)
        );
        assert!(found["compared"]["out"]["nrmse"].as_f64().unwrap() > 1e-4, "{found}");
    }
    // f32 holds every f16.
    let wide = json(&Folder::with(&causal(Dtype::F16)), &["--causal", "--dtype", "f32"]).1;
    assert_eq!(wide["compared"]["within"], true, "{wide}");
}

#[test]
fn answers_that_do_not_fit_are_refused() {
    let cases = [
        (
            "out",
            Tensor::f32(&[1], &[0.0]),
            "tensor out has shape [1], expected [2, 4, 9, 8] to fit q, k and v",
        ),
        (
            "lse",
            Tensor::random(Dtype::F32, &[2, 4, 8], 1),
            "tensor lse has shape [2, 4, 8], expected [2, 4, 9]",
        ),
        ("lse", Tensor::random(Dtype::F16, &[2, 4, 9], 1), "tensor lse is F16, expected F32"),
        (
            "out",
            Tensor { dtype: Dtype::I32, shape: vec![2, 4, 9, 8], bytes: vec![0; 2304] },
            "tensor out is I32, expected F32, F16 or BF16",
        ),
    ];
    for (name, tensor, why) in cases {
        let mut tensors = causal(Dtype::F32);
        tensors.insert(name.into(), tensor);
        Folder::with(&tensors).refuse(&["--causal"], why);
    }
}
