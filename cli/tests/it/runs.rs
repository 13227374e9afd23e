//! `flashtile run` on good input.

use crate::files::{
    Folder, Tensor, Tensors, assert_refused, max_abs, nrmse, qkv, stderr, stdout, threads, write_raw,
};
use safetensors::tensor::Dtype;

/// Rows with every optional tensor: GQA, D != Dv, a mask that hides keys, slopes, sinks, padding.
fn everything(dtype: Dtype) -> Tensors {
    let mut tensors = qkv(dtype, &[2, 4, 37, 24], &[2, 2, 301, 24], &[2, 2, 301, 40]);
    let hidden = (0..37 * 301).map(|n| n % 7 != 3);
    tensors.insert("mask".into(), Tensor::bool(&[1, 1, 37, 301], hidden));
    tensors.insert("alibi_slopes".into(), Tensor::f32(&[4], &[0.5, 0.25, 0.125, -0.01]));
    tensors.insert("sinks".into(), Tensor::f32(&[4], &[0.0, 1.0, -2.0, 3.0]));
    tensors.insert("kv_lens".into(), Tensor::i64(&[301, 40]));
    tensors
}

const OPTIONS: [&str; 6] = ["--causal", "--q-offset", "bottom-right", "--window", "100", "--softcap=2.5"];

fn with<'a>(options: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    options.iter().chain(more).copied().collect()
}

#[test]
fn every_instruction_set_agrees_with_the_reference() {
    for (dtype, limit) in [(Dtype::F32, 2e-6), (Dtype::F16, 1e-3), (Dtype::BF16, 8e-3)] {
        let folder = Folder::with(&everything(dtype));
        let want = folder.run(&with(&OPTIONS, &["--backend", "reference"]));
        assert_eq!((want["out"].dtype, &want["out"].shape[..]), (dtype, &[2, 4, 37, 40][..]));
        assert_eq!((want["lse"].dtype, &want["lse"].shape[..]), (Dtype::F32, &[2, 4, 37][..]));
        for isa in flashtile::Cpu::isas() {
            let got = folder.run(&with(&OPTIONS, &["--backend", "cpu", "--isa", isa.name()]));
            let error = nrmse(&got["out"].values(), &want["out"].values());
            assert!(error <= limit, "{dtype:?} {isa}: {error}");
            let error = max_abs(&got["lse"].values(), &want["lse"].values());
            assert!(error <= 1e-5, "{dtype:?} {isa}: {error}");
        }
    }
}

#[test]
fn threads_and_splits_do_not_change_a_bit() {
    let folder = Folder::with(&everything(Dtype::F32));
    let want = folder.run(&OPTIONS);
    let all = threads().to_string();
    for more in
        [["--threads", "1"], ["--threads", &all], ["--splits", "1"], ["--splits", "2"], ["--backend", "cpu"]]
    {
        assert_eq!(folder.run(&with(&OPTIONS, &more)), want, "{more:?}");
    }
}

#[test]
fn layouts_are_the_same_problem() {
    let tensors = everything(Dtype::F32);
    let mut transposed = tensors.clone();
    for name in ["q", "k", "v"] {
        transposed.insert(name.into(), tensors[name].transposed());
    }
    let (bhsd, bshd) = (Folder::with(&tensors), Folder::with(&transposed));
    for backend in ["cpu", "reference"] {
        let want = bhsd.run(&with(&OPTIONS, &["--layout", "bhsd", "--backend", backend]));
        let got = bshd.run(&with(&OPTIONS, &["--layout", "bshd", "--backend", backend]));
        assert_eq!(got["out"].shape, [2, 37, 4, 40]);
        assert_eq!(got["out"].transposed(), want["out"], "{backend}");
        assert_eq!(got["lse"], want["lse"], "{backend}");
    }
}

#[test]
fn lengths_may_be_narrow() {
    let mut tensors = everything(Dtype::F32);
    let want = Folder::with(&tensors).run(&OPTIONS);
    tensors.insert("kv_lens".into(), Tensor::i32(&[301, 40]));
    assert_eq!(Folder::with(&tensors).run(&OPTIONS), want);
}

#[test]
fn packed_sequences_are_dense_ones() {
    let lengths = [(3usize, 5usize), (0, 4), (70, 300), (1, 0)];
    let (heads, kv_heads, dim) = (4, 2, 16);
    let mut packed = Tensors::new();
    let mut parts = vec![Tensors::new(); lengths.len()];
    for (name, seed) in [("q", 1), ("k", 2), ("v", 3)] {
        let mut bytes = Vec::new();
        for (part, &(q_len, kv_len)) in parts.iter_mut().zip(&lengths) {
            let (rows, h) = if name == "q" { (q_len, heads) } else { (kv_len, kv_heads) };
            let tensor = Tensor::random(Dtype::F32, &[1, rows, h, dim], seed * 100 + rows as u64);
            bytes.extend(&tensor.bytes);
            part.insert(name.into(), tensor);
        }
        let h = if name == "q" { heads } else { kv_heads };
        let shape = vec![bytes.len() / (h * dim * 4), h, dim];
        packed.insert(name.into(), Tensor { dtype: Dtype::F32, shape, bytes });
    }
    packed.insert("cu_seqlens_q".into(), Tensor::i64(&[0, 3, 3, 73, 74]));
    packed.insert("cu_seqlens_k".into(), Tensor::i64(&[0, 5, 9, 309, 309]));
    let options = ["--causal", "--q-offset", "bottom-right"];
    let got = Folder::with(&packed).run(&options);
    assert_eq!((&got["out"].shape[..], &got["lse"].shape[..]), (&[74, 4, 16][..], &[4, 74][..]));
    let mut narrow = packed.clone();
    narrow.insert("cu_seqlens_k".into(), Tensor::i32(&[0, 5, 9, 309, 309]));
    assert_eq!(Folder::with(&narrow).run(&options), got);

    let folder = Folder::with(&packed);
    let shapes = "q [74, 4, 16] k [309, 2, 16] v [309, 2, 16]";
    let plan = crate::files::flashtile([&["plan", folder.input.to_str().unwrap()], &options[..]].concat());
    assert!(stdout(&plan).contains(shapes), "{}", stdout(&plan));
    assert!(stdout(&folder.try_run(&options)).contains(shapes));

    let (mut out, mut lse) = (Vec::<u8>::new(), vec![Vec::<u8>::new(); heads]);
    for part in &parts {
        let want = Folder::with(part).run(&with(&options, &["--layout", "bshd"]));
        out.extend(&want["out"].bytes);
        let rows = want["lse"].bytes.len() / heads;
        for (h, lse) in lse.iter_mut().enumerate() {
            lse.extend(&want["lse"].bytes[h * rows..][..rows]);
        }
    }
    assert_eq!(got["out"].bytes, out);
    assert_eq!(got["lse"].bytes, lse.concat());
}

#[test]
fn dtype_converts_first() {
    let tensors = everything(Dtype::F32);
    let folder = Folder::with(&tensors);
    for (name, dtype) in [("f16", Dtype::F16), ("bf16", Dtype::BF16)] {
        let got = folder.run(&with(&OPTIONS, &["--dtype", name]));
        let converted =
            Folder::with(&everything(dtype)).run(&with(&OPTIONS, &["--k-codec", name, "--v-codec", name]));
        assert_eq!(got, converted, "{name}");
    }
    let mut mixed = tensors.clone();
    mixed.insert("k".into(), everything(Dtype::F16)["k"].clone());
    assert_eq!(Folder::with(&mixed).run(&with(&OPTIONS, &["--dtype", "f32"]))["out"].dtype, Dtype::F32);
}

#[test]
fn additive_masks_hide_as_boolean_ones() {
    let mut tensors = everything(Dtype::F32);
    let want = Folder::with(&tensors).run(&OPTIONS);
    let bias: Vec<f32> =
        tensors["mask"].bytes.iter().map(|&shown| if shown == 1 { 0.0 } else { f32::NEG_INFINITY }).collect();
    // With four axes, and with the two or three that are not broadcast.
    for shape in [&[1, 1, 37, 301][..], &[1, 37, 301], &[37, 301]] {
        tensors.insert("mask".into(), Tensor::f32(shape, &bias));
        assert_eq!(Folder::with(&tensors).run(&OPTIONS), want, "{shape:?}");
    }
}

/// Headings of the lines of a report.
fn headings(report: &str) -> Vec<&str> {
    report.lines().map(|line| line.split("  ").next().unwrap()).collect()
}

#[test]
fn one_fact_a_line_and_one_object() {
    let folder = Folder::with(&everything(Dtype::F32));
    let output = folder.try_run(&OPTIONS);
    let report = stdout(&output);
    assert_eq!(headings(&report), ["kernel", "problem", "time", "rate", "limit"], "{report}");
    assert_eq!(stderr(&output), "");
    assert!(report.starts_with("kernel     cpu-prefill-f32-d24"), "{report}");
    assert!(report.contains("\nlimit      too small to compare with a limit\n"), "{report}");
    // Nobody asked for a GPU, so that its absence is no fact of this run.
    assert!(!report.contains("NVIDIA") && !report.contains("auto"), "{report}");
    let output = folder.try_run(&with(&OPTIONS, &["--backend", "reference"]));
    let report = stdout(&output);
    assert!(report.starts_with("kernel     reference-f32-d24x40\n"), "{report}");
    assert!(report.contains("\ntime ") && report.contains(", one run\n"), "{report}");
    let output = folder.try_run(&with(&OPTIONS, &["--json", "--threads", "1"]));
    let json: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(stdout(&output).lines().count(), 1);
    assert_eq!(
        (&json["backend"], &json["dtype"], &json["threads"]),
        (&"cpu".into(), &"f32".into(), &1.into())
    );
    assert_eq!((&json["dims"]["kv_len"], &json["dims"]["value_dim"]), (&301.into(), &40.into()));
    assert!(json["seconds"].as_f64().unwrap() > 0.0 && json["gflops"].as_f64().unwrap() > 0.0);
    assert!(json["fraction"].is_null() && json["repetitions"].as_u64().unwrap() > 0, "{json}");
    assert_eq!(json["backend_reason"], "--threads asks for it");
}

#[test]
fn large_runs_are_compared_with_a_limit() {
    let shape = [1, 4, 512, 64];
    let folder = Folder::with(&qkv(Dtype::F32, &shape, &shape, &shape));
    let output = folder.try_run(&["--json", "--threads", "1"]);
    let json: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    let fraction = json["fraction"].as_f64().unwrap();
    assert!(fraction > 0.0 && fraction < 2.0, "{fraction}");
    let output = folder.try_run(&["--threads", "1"]);
    let report = stdout(&output);
    let limit = report.lines().find(|line| line.starts_with("limit      ")).unwrap();
    // Beyond the limit, its cause follows.
    assert!(
        limit.ends_with("(1 thread)") || limit.contains("(1 thread): the machine was faster"),
        "{report}"
    );
}

#[test]
fn results_that_are_not_finite_are_reported() {
    let json = |folder: &Folder, options: &[&str]| -> serde_json::Value {
        serde_json::from_str(&stdout(&folder.try_run(&with(options, &["--json"])))).unwrap()
    };
    let none = serde_json::json!({"nan": 0, "infinite": 0});
    let mut tensors = qkv(Dtype::F32, &[1, 2, 3, 8], &[1, 2, 5, 8], &[1, 2, 5, 8]);
    // The third query sees no key: its logsumexp of -inf is no fault.
    let shown = (0..15).map(|n| n < 10);
    tensors.insert("mask".into(), Tensor::bool(&[3, 5], shown));
    let found = json(&Folder::with(&tensors), &[]);
    let finite = serde_json::json!({"out": none, "lse": none, "inputs": null});
    assert_eq!(found["non_finite"], finite, "{found}");

    let mut set = |name: &str, element: usize, value: f32| {
        tensors.get_mut(name).unwrap().bytes[4 * element..][..4].copy_from_slice(&value.to_le_bytes());
        Folder::with(&tensors)
    };
    // A value of the first head is in one column of two rows, a key in all columns.
    let folder = set("v", 3, f32::INFINITY);
    let report = stdout(&folder.try_run(&[]));
    let why = "\nnon-finite out has 2 infinite; of the inputs, 1 of v is NaN or infinite, padding included\n";
    assert!(report.contains(why), "{report}");
    let folder = set("k", 0, f32::NAN);
    let found = json(&folder, &[]);
    let expected = serde_json::json!({
        "out": {"nan": 16, "infinite": 0},
        "lse": {"nan": 2, "infinite": 0},
        "inputs": {"q": 0, "k": 1, "v": 1},
    });
    assert_eq!(found["non_finite"], expected, "{found}");
    let report = stdout(&folder.try_run(&["--backend", "reference"]));
    let why = "\nnon-finite out has 16 NaN, lse has 2 NaN; of the inputs, 1 of k, 1 of v are NaN or infinite";
    assert!(report.contains(why), "{report}");
}

/// Products of finite elements may exceed the range of f32.
#[test]
fn results_beyond_the_range_of_the_dtype_are_reported() {
    let mut tensors = Tensors::new();
    for (name, value) in [("q", 3e30), ("k", 3e30), ("v", 1.0)] {
        tensors.insert(name.into(), Tensor::f32(&[1, 1, 2, 8], &[value; 16]));
    }
    let output = Folder::with(&tensors).try_run(&[]);
    let why = "; q, k and v are finite: a score, a bias or a result exceeds the range of its dtype\n";
    assert!(stdout(&output).contains(why), "{}{}", stdout(&output), stderr(&output));
}

#[test]
fn arrays_of_numpy_are_not_written() {
    let mut folder = Folder::with(&qkv(Dtype::F32, &[1, 1, 2, 8], &[1, 1, 2, 8], &[1, 1, 2, 8]));
    for name in ["x.npz", "x.NPZ", "x.npy"] {
        folder.output = folder.path().join(name);
        let suffix = name.to_ascii_lowercase();
        let suffix = suffix.trim_start_matches("x.");
        let why = format!("the output is a safetensors file, not .{suffix}: expected a name such as ");
        folder.refuse(&[], &why);
        assert!(stderr(&folder.try_run(&[])).ends_with("x.safetensors\n"));
    }
    folder.output = folder.path().join("x.npz.safetensors");
    folder.run(&[]);
}

#[test]
fn tensors_that_are_not_read_are_named() {
    let mut tensors = everything(Dtype::F32);
    let want = Folder::with(&tensors).run(&OPTIONS);
    for name in ["d_q", "d_k", "d_v"] {
        tensors.insert(name.into(), Tensor::f32(&[1], &[0.0]));
    }
    assert_eq!(stderr(&Folder::with(&tensors).try_run(&with(&OPTIONS, &["--strict"]))), "");
    tensors.insert("notes".into(), Tensor::f32(&[1], &[0.0]));
    let folder = Folder::with(&tensors);
    let output = folder.try_run(&OPTIONS);
    assert!(output.status.success() && stderr(&output).contains("not read: notes"), "{}", stderr(&output));
    assert_eq!(folder.run(&OPTIONS), want);
}

#[test]
fn empty_tensors() {
    let shapes: [[[usize; 4]; 3]; 4] = [
        [[1, 2, 0, 8], [1, 2, 5, 8], [1, 2, 5, 8]],
        [[1, 2, 3, 8], [1, 2, 0, 8], [1, 2, 0, 8]],
        [[0, 2, 3, 8], [0, 2, 5, 8], [0, 2, 5, 8]],
        [[1, 2, 0, 8], [1, 2, 0, 8], [1, 2, 0, 8]],
    ];
    for [q, k, v] in shapes {
        let folder = Folder::with(&qkv(Dtype::F16, &q, &k, &v));
        for backend in ["cpu", "reference"] {
            let got = folder.run(&["--backend", backend, "--causal", "--q-offset", "bottom-right"]);
            assert_eq!((&got["out"].shape[..], &got["lse"].shape[..]), (&q[..], &q[..3]));
            assert!(got["out"].bytes.iter().all(|&byte| byte == 0));
            assert!(got["lse"].values().iter().all(|&l| l == f64::NEG_INFINITY));
        }
    }
    let mut packed = qkv(Dtype::F32, &[0, 2, 8], &[0, 1, 8], &[0, 1, 8]);
    packed.insert("cu_seqlens_q".into(), Tensor::i64(&[0]));
    packed.insert("cu_seqlens_k".into(), Tensor::i64(&[0]));
    assert_eq!(Folder::with(&packed).run(&[])["lse"].shape, [2, 0]);
}

/// Tensors at addresses that are misaligned for their element type.
#[test]
fn misaligned_tensors() {
    let mut tensors = everything(Dtype::F32);
    tensors.remove("mask");
    let want = Folder::with(&tensors).run(&OPTIONS);
    let mut data = vec![0u8];
    let mut header = r#"{"odd":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#.to_owned();
    for (name, tensor) in &tensors {
        let (dtype, shape) = (tensor.dtype, &tensor.shape);
        let (start, end) = (data.len(), data.len() + tensor.bytes.len());
        header +=
            &format!(r#","{name}":{{"dtype":"{dtype:?}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#);
        data.extend(&tensor.bytes);
    }
    let folder = Folder::empty();
    write_raw(&folder.input, &(header + "}"), &data);
    assert_eq!(folder.run(&OPTIONS), want);
}

#[test]
fn outputs_replace_files() {
    let tensors = everything(Dtype::F32);
    let mut folder = Folder::with(&tensors);
    let want = folder.run(&OPTIONS);
    std::fs::write(&folder.output, b"old").unwrap();
    assert_eq!(folder.run(&OPTIONS), want);
    folder.output = folder.path().join("./out.safetensors");
    assert_eq!(folder.run(&OPTIONS), want);
    assert_eq!(folder.names(), ["in.safetensors", "out.safetensors"]);
}

#[test]
#[cfg(unix)]
fn outputs_have_the_mode_of_new_files_and_follow_links() {
    use std::os::unix::fs::PermissionsExt;
    let mut folder = Folder::with(&everything(Dtype::F32));
    let want = folder.run(&OPTIONS);
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode();
    let usual = folder.path().join("usual");
    std::fs::write(&usual, b"").unwrap();
    assert_eq!(mode(&folder.output), mode(&usual));

    let link = folder.path().join("link");
    let target = std::mem::replace(&mut folder.output, link);
    std::fs::write(&target, b"old").unwrap();
    std::os::unix::fs::symlink(&target, &folder.output).unwrap();
    assert_eq!(folder.run(&OPTIONS), want);
    assert!(folder.output.is_symlink());
    assert_eq!(crate::files::read(&target), want);
}

#[test]
fn tensors_have_aliases() {
    let tensors = everything(Dtype::F32);
    let want = Folder::with(&tensors).run(&OPTIONS);
    let called = |aliases: [&str; 4]| -> Tensors {
        let mut called = tensors.clone();
        for (name, alias) in ["q", "k", "v", "mask"].into_iter().zip(aliases) {
            let tensor = called.remove(name).unwrap();
            called.insert(alias.into(), tensor);
        }
        called
    };
    for aliases in [
        ["query", "key", "value", "attn_mask"],
        ["queries", "keys", "values", "attention_mask"],
        ["q", "key", "v", "mask"],
    ] {
        let tensors = called(aliases);
        let folder = Folder::with(&tensors);
        assert_eq!(folder.run(&with(&OPTIONS, &["--strict"])), want, "{aliases:?}");
        let input = folder.input.to_str().unwrap();
        let plan = crate::files::flashtile(with(&["plan", input, "--strict"], &OPTIONS));
        assert!(stdout(&plan).contains("bool mask"), "{aliases:?}: {}", stderr(&plan));
        // A layer gives the same answer.
        let layer =
            tensors.iter().map(|(name, tensor)| (format!("layer.3.{name}"), tensor.clone())).collect();
        assert_eq!(Folder::with(&layer).run(&with(&OPTIONS, &["--prefix", "layer.3"])), want, "{aliases:?}");
    }
    // A layer's own mask takes precedence over a mask for all layers, whatever their names are.
    let mut layer: Tensors = called(["q", "key", "v", "attn_mask"])
        .into_iter()
        .map(|(name, tensor)| (format!("a.{name}"), tensor))
        .collect();
    layer.insert("mask".into(), Tensor::f32(&[1, 1, 1, 1], &[1.0]));
    assert_eq!(Folder::with(&layer).run(&with(&OPTIONS, &["--prefix", "a"])), want);

    for (name, alias) in [("q", "query"), ("k", "keys"), ("mask", "attention_mask")] {
        let mut both = tensors.clone();
        both.insert(alias.into(), tensors[name].clone());
        let folder = Folder::with(&both);
        let mut names = [name, alias];
        names.sort_unstable();
        let why = format!("tensors {} and {} are the same input under two names", names[0], names[1]);
        folder.refuse(&OPTIONS, &why);
        let input = folder.input.to_str().unwrap();
        assert_refused(&crate::files::flashtile(["plan", input]), &why, alias);
        if name != "mask" {
            assert_refused(&crate::files::flashtile(["kv", input]), &why, alias);
        }
    }
    // Messages name tensors as the file does.
    let mut wrong = called(["query", "key", "value", "attn_mask"]);
    wrong.insert("key".into(), Tensor::f32(&[1, 2, 3], &[0.0; 6]));
    Folder::with(&wrong)
        .refuse(&OPTIONS, "tensor key has shape [1, 2, 3], expected [batch, heads, rows, dim]");
}

/// A file of two layers; one has its own mask, and lengths apply to both.
fn layers() -> (Tensors, Tensors) {
    let mut one = everything(Dtype::F32);
    let kv_lens = one.remove("kv_lens").unwrap();
    let mut other = qkv(Dtype::F16, &[2, 4, 3, 8], &[2, 2, 301, 8], &[2, 2, 301, 8]);
    other.insert("out".into(), Tensor::f32(&[1], &[0.0]));
    let mut all = Tensors::from([("kv_lens".to_owned(), kv_lens.clone())]);
    all.extend(one.iter().map(|(name, tensor)| (format!("model.layers.3.attn.{name}"), tensor.clone())));
    all.extend(other.into_iter().map(|(name, tensor)| (format!("model.layers.3.attn.cross.{name}"), tensor)));
    for (name, called) in [("q", "query"), ("k", "key"), ("v", "value")] {
        all.insert(format!("model.layers.11.attn_{called}"), one[name].clone());
    }
    one.insert("kv_lens".into(), kv_lens);
    (all, one)
}

#[test]
fn one_layer_of_many_is_chosen_by_its_prefix() {
    let (all, one) = layers();
    let folder = Folder::with(&all);
    let want = Folder::with(&one).run(&OPTIONS);
    for prefix in ["model.layers.3.attn", "model.layers.3.attn."] {
        let output = folder.try_run(&with(&OPTIONS, &["--strict", "--prefix", prefix]));
        assert!(output.status.success() && output.stderr.is_empty(), "{}", stderr(&output));
        assert_eq!(crate::files::read(&folder.output), want, "{prefix}");
    }
    // This layer has other names, and the other layer's tensors do not apply to it.
    let lengths = Tensors::from_iter(["q", "k", "v", "kv_lens"].map(|name| (name.into(), one[name].clone())));
    let want = Folder::with(&lengths).run(&OPTIONS);
    assert_eq!(folder.run(&with(&OPTIONS, &["--prefix", "model.layers.11.attn"])), want);
    let json = folder.try_run(&with(&OPTIONS, &["--prefix", "model.layers.11.attn", "--json"]));
    assert!(stdout(&json).contains("\"prefix\":\"model.layers.11.attn\""), "{}", stdout(&json));
    let input = folder.input.to_str().unwrap();
    let plan = crate::files::flashtile(["plan", input, "--prefix", "model.layers.3.attn.cross"]);
    assert!(stdout(&plan).contains("f16 q [2, 4, 3, 8]"), "{}", stdout(&plan));

    let has = "model.layers.3.attn, model.layers.3.attn.cross, model.layers.11.attn";
    for prefix in ["model.layers.4.attn", "model.layers.3", "model", "q"] {
        let why = format!("--prefix {prefix}: {input}: no q, k and v with that prefix (the file has {has})");
        folder.refuse(&["--prefix", prefix], &why);
    }
    let why = format!("tensor q is missing, expected q, k and v, or --prefix for {has}");
    folder.refuse(&[], &why);
    folder.refuse(&["--prefix", ""], "expected the part of names before q, k and v, such as layer.3");
    // Refusals name the layer.
    let mut changed = all.clone();
    changed.remove("model.layers.3.attn.q");
    let missing = "model.layers.3.attn: tensor q is missing, expected q [batch, heads, rows, dim]\n";
    Folder::with(&changed).refuse(&["--prefix", "model.layers.3.attn"], missing);
    changed.insert("model.layers.3.attn.attn_bias".into(), Tensor::f32(&[1], &[0.0]));
    let misspelt = "model.layers.3.attn: tensor attn_bias is not known, did you mean mask?";
    Folder::with(&changed).refuse(&["--prefix", "model.layers.3.attn"], misspelt);
    let twice = Tensors::from_iter(["a.k", "a_k"].map(|name| (name.to_owned(), one["k"].clone())));
    Folder::with(&twice)
        .refuse(&["--prefix", "a"], "a.k, a_k belong to different layers, expected a prefix of one");
    let plain = Folder::with(&qkv(Dtype::F32, &[1], &[1], &[1]));
    plain.refuse(&["--prefix", "layer.3"], "no q, k and v with that prefix (the file has k, q, v)");
}
