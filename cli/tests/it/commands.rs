//! Plan, info, check and bench.

use crate::files::{Folder, Tensor, assert_refused, flashtile, qkv, stderr, stdout};
use safetensors::tensor::Dtype;
use serde_json::Value;

/// Standard output of a command that succeeds and prints nothing on standard error.
pub(crate) fn ok(args: &[&str]) -> String {
    let output = flashtile(args);
    assert!(output.status.success() && output.stderr.is_empty(), "{args:?}: {}", stderr(&output));
    stdout(&output)
}

fn json(args: &[&str]) -> Value {
    let text = ok(args);
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(&text).unwrap()
}

#[test]
fn help_and_version() {
    for args in [
        &["--help"][..],
        &["kv", "--help"],
        &["run", "--help"],
        &["plan", "-h"],
        &["bench", "--help"],
        &["check", "--help"],
        &["kernels", "--help"],
        &["kernels", "list", "--help"],
        &["kernels", "print", "--help"],
        &["kernels", "export", "--help"],
        &["completions", "--help"],
    ] {
        let text = ok(args);
        assert!(text.contains("Usage: flashtile") && text.contains("Example"), "{args:?}: {text}");
        assert!(text.lines().all(|line| line.chars().count() <= 110), "{args:?}");
    }
    let run = ok(&["run", "--help"]);
    let phrases = [
        "true",
        "- slope[h] * |p - j|",
        "denominator of the softmax only",
        "--strict",
        "--k-codec",
        "--grad",
    ];
    for phrase in phrases {
        assert!(run.contains(phrase), "{phrase} in {run}");
    }
    assert!(run.contains("cuda") && run.contains("simulator"), "{run}");
    let backends = |command| {
        ok(&[command, "--help"])
            .lines()
            .filter(|line| {
                let line = line.trim_start();
                ["- reference:", "- simulator:", "- metal:"].iter().any(|name| line.starts_with(name))
            })
            .count()
    };
    assert_eq!(["run", "check", "bench", "plan"].map(backends), [3, 2, 1, 3]);
    let check = ok(&["check", "--help"]).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(check.contains("default all of this machine"), "{check}");
    let (users, developers) = check.split_once(" Options for developers of flashtile: ").unwrap();
    for (option, expected) in [("--filter <", users), ("--list List", users), ("--seeds <", developers)] {
        assert!(expected.contains(option), "{option} in {expected}");
    }
    assert_eq!(ok(&["--version"]), format!("flashtile {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn plans_of_shapes() {
    let shape =
        ["plan", "--q-len", "1024", "--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--causal"];
    let plan = json(&[&shape[..], &["--device", "avx2-8core", "--json"]].concat());
    assert_eq!(plan["kernel"], "cpu-prefill-f32-d64-avx2");
    assert_eq!((&plan["device"], &plan["threads"]), (&"avx2-8core".into(), &8.into()));
    let visible = plan["visible_fraction"].as_f64().unwrap();
    assert!((visible - 0.5).abs() < 1e-3, "{visible}");
    assert_eq!(plan["flops"].as_f64().unwrap(), 8.0 * 256.0 * (1024.0 * 1025.0 / 2.0));
    let tiles = |kind: &str| plan["tiles"][kind].as_u64().unwrap();
    let (rows, keys) = (plan["tile_rows"].as_u64().unwrap(), plan["block_k"].as_u64().unwrap());
    let all = (4096u64.div_ceil(rows)) * 1024u64.div_ceil(keys);
    assert_eq!(tiles("skip") + tiles("partial") + tiles("full"), all);
    assert!(tiles("skip") > 0 && tiles("partial") > 0 && tiles("full") > 0);

    let cuda = json(&[&shape[..], &["--dtype", "bf16", "--device", "h200", "--json"]].concat());
    assert_eq!(cuda["kernel"], "cuda-prefill-bf16-d64-wgmma128x128", "{cuda}");
    assert_eq!(cuda["flops"], plan["flops"]);
    let kernel = &cuda["kernels"][0];
    assert_eq!((&kernel["tile_rows"], &kernel["block_k"]), (&128.into(), &128.into()), "{cuda}");
    let text = ok(&[&shape[..], &["--device", "rtx4090"]].concat());
    for word in ["rtx4090", "capability 8.9", "128 multiprocessors", "splits", "workspace", "partial"] {
        assert!(text.contains(word), "{word} in {text}");
    }

    assert!(plan["splits_reason"].as_str().is_some_and(|why| !why.contains(" or ")), "{plan}");
    let text = ok(&shape);
    for word in ["kernel", "cpu-prefill-f32-d64", "workspace", "skipped", "partial", "full", "causal"] {
        assert!(text.contains(word), "{word} in {text}");
    }
}

#[test]
fn plans_of_steps_over_a_cache() {
    let shape = ["plan", "--heads", "32", "--kv-heads", "8", "--dtype", "bf16", "--causal"];
    let machine = ["--device", "amx-64core"];
    let long = [&shape[..], &machine, &["--cached", "1:131072,1:1024x15"]].concat();
    let plan = json(&[&long[..], &["--json"]].concat());
    let splits: Vec<u64> =
        plan["sequence_splits"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
    assert!(splits[0] > 8 && splits[1..] == [1; 15], "{plan}");
    assert!(plan["idle"].as_f64().unwrap() < 0.1, "{plan}");
    let text = ok(&long);
    assert!(text.contains("1 of 15 sequences") && text.contains("threads wait for"), "{text}");

    let shared = [&shape[..], &machine, &["--cached", "1:8700x32", "--shared", "8192"]].concat();
    let plan = json(&[&shared[..], &["--json"]].concat());
    let [prefix] = &plan["prefixes"].as_array().unwrap()[..] else { panic!("{plan}") };
    assert_eq!(
        (&prefix["tokens"], &prefix["rows"]),
        (&serde_json::json!([0, 8192]), &serde_json::json!(128))
    );
    assert_eq!(plan["kv_bytes"].as_f64().unwrap(), f64::from(8192 + 32 * 508) * 8.0 * 256.0 * 2.0);
    for device in ["h200", "m3-max"] {
        let on_gpu =
            [&shape[..], &["--device", device, "--cached", "1:8700x32", "--shared", "8192"]].concat();
        let text = ok(&on_gpu);
        assert!(text.contains("1 shared prefix is read by each sequence"), "{text}");
    }
    // A window with which the first sequence sees no key of the prefix, and a sequence without queries.
    for (cached, window, keys) in [
        ("1:8192,1:4096,1:4096", &["--window", "255"][..], 2 * 256),
        ("0:4096,1:4200x3", &[], 4096 + 3 * 104),
    ] {
        let args = ["--cached", cached, "--shared", "4096", "--json"];
        let plan = json(&[&shape[..], &args, window].concat());
        assert_eq!(plan["kv_bytes"].as_f64().unwrap(), f64::from(keys) * 8.0 * 256.0 * 2.0, "{cached}");
    }
    assert!(ok(&shared).contains("tokens 0..8192 of sequences 0..32 read once, by 128 rows"));
}

#[test]
fn plans_of_files_and_pictures() {
    let mut tensors = qkv(Dtype::BF16, &[2, 2, 300, 32], &[2, 1, 700, 32], &[2, 1, 700, 16]);
    tensors.insert("kv_lens".into(), Tensor::i64(&[700, 0]));
    let folder = Folder::with(&tensors);
    let (input, svg) = (folder.input.to_str().unwrap(), folder.path().join("tiles.svg"));
    let args = [
        "plan",
        input,
        "--window",
        "50,0",
        "--q-offset",
        "bottom-right",
        "--svg",
        svg.to_str().unwrap(),
        "--json",
    ];
    let plan = json(&args);
    assert_eq!(
        (&plan["dtype"], &plan["dims"]["kv_len"], &plan["sequences"]),
        (&"bf16".into(), &700.into(), &2.into())
    );
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains(">700<") && picture.contains("skipped"));
    let empty = ["plan", input, "--sequence", "1", "--svg", svg.to_str().unwrap()];
    assert!(ok(&empty).contains("skipped 0"));
    assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg"));
    assert_eq!(folder.names(), ["in.safetensors", "tiles.svg"]);
}

#[test]
fn plans_without_anything_to_do() {
    for shape in [["--batch", "0"], ["--q-len", "0"], ["--kv-len", "0"]] {
        let args = [&["plan"][..], &shape].concat();
        assert!(ok(&args).contains("kernel"), "{shape:?}");
        assert_eq!(json(&[&args[..], &["--json"]].concat())["flops"], 0.0);
    }
}

#[test]
fn large_plans_take_little() {
    let args = [
        "plan",
        "--q-len",
        "1048576",
        "--heads",
        "1",
        "--causal",
        "--window",
        "4095",
        "--device",
        "avx512-64core",
    ];
    let text = ok(&args);
    assert!(text.lines().count() < 60 && text.lines().all(|line| line.chars().count() < 200), "{text}");
}

#[test]
fn info_measures_the_machine() {
    let info = json(&["info", "--threads", "1", "--json"]);
    assert_eq!(info["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(info["threads"], 1);
    for isa in flashtile::Cpu::isas() {
        assert!(info["fma_flops_per_s"][isa.name()].as_f64().unwrap() > 1e8, "{info}");
    }
    assert!(info["read_bytes_per_s"].as_f64().unwrap() > 1e8);
    let backends = info["backends"].as_array().unwrap();
    let available =
        |name: &str| backends.iter().find(|b| b["name"] == name).unwrap()["available"].as_bool().unwrap();
    assert!(available("cpu") && available("reference"));
    assert_eq!(available("simulator"), cfg!(feature = "simulator"));
    assert!(!available("cuda"));
    assert_eq!(available("metal"), cfg!(target_vendor = "apple"));
}

#[test]
fn the_choice_of_a_backend_is_said() {
    let no_driver = "no NVIDIA driver on this machine: tried libcuda.so";
    let info = json(&["info", "--no-measure", "--json"]);
    let autos = info["auto"].as_array().unwrap();
    assert_eq!(
        autos.iter().map(|auto| auto["name"].as_str().unwrap()).collect::<Vec<_>>(),
        ["prefill", "decode"]
    );
    for auto in autos {
        assert_eq!(auto["backend"], "cpu", "{auto}");
        assert!(auto["backend_reason"].as_str().unwrap().starts_with(no_driver), "{auto}");
        assert!(auto["problem"].as_str().unwrap().contains("32/8 heads of 128"), "{auto}");
    }
    let text = ok(&["info", "--no-measure"]);
    for name in ["prefill", "decode"] {
        assert!(text.contains(&format!("\n{name:<10} auto takes cpu: {no_driver}")), "{text}");
    }

    let cases: [(&[&str], &str, &str); 6] = [
        (&[], "cpu", no_driver),
        (&["--k-codec", "int8"], "cpu", no_driver),
        (&["--backend", "cpu"], "cpu", "asked for"),
        (&["--isa", "portable"], "cpu", "--isa asks for it"),
        (&["--isa", "portable", "--threads", "1"], "cpu", "--isa and --threads ask for it"),
        (&["--device", "t4"], "cuda", "--device asks for it"),
    ];
    for (options, backend, reason) in cases {
        let plan = [&["plan", "--q-len", "64", "--no-tiles"], options].concat();
        let text = ok(&plan);
        assert!(text.contains(&format!("\nbackend    {backend}: {reason}")), "{text}");
        let plan = json(&[&plan[..], &["--json"]].concat());
        assert_eq!(plan["backend"], backend, "{plan}");
        assert!(plan["backend_reason"].as_str().unwrap().starts_with(reason), "{plan}");
    }
}

#[test]
fn help_names_other_devices() {
    let chosen =
        "auto: The backend with the least estimated time for the problem, copies to a device included";
    let autos = [
        ("run", chosen),
        ("plan", chosen),
        ("check", "auto: Every backend of this machine but the simulator; of CUDA the first device"),
        ("bench", "auto: The cpu"),
    ];
    for (command, auto) in autos {
        let help = ok(&[command, "--help"]).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            help.contains("cuda: Kernels of the first CUDA device; cuda:1 is the second"),
            "{command}: {help}"
        );
        assert!(help.contains(auto), "{command}: {help}");
    }
}

#[test]
fn equal_rows_of_tiles_are_one_line() {
    let shape = ["plan", "--q-len", "4096", "--device", "avx2-8core"];
    let tiles = |more: &[&str]| -> Vec<String> {
        let text = ok(&[&shape[..], more].concat());
        let (_, tiles) = text.split_once("each key/value head:\n").unwrap();
        tiles.lines().map(str::to_owned).collect()
    };
    let whole = tiles(&[]);
    assert_eq!((whole.len(), whole[0].as_str()), (3, &*format!("  {} x 32", "█".repeat(64))), "{whole:?}");
    let causal = tiles(&["--causal"]);
    assert!(causal.len() == 34 && causal[..30].iter().all(|line| !line.contains('x')), "{causal:?}");
    let without = ok(&[&shape[..], &["--no-tiles"]].concat());
    assert!(without.contains("workspace") && !without.contains("tiles of sequence"), "{without}");
}

#[test]
fn rows_of_a_plan_are_not_more_than_there_are() {
    // At head dimension 32, the rows of 256 queries fit one packed block even with a small L2 cache.
    let rows =
        |q_len: &str| ok(&["plan", "--q-len", q_len, "--heads", "1", "--head-dim", "32", "--threads", "1"]);
    for (q_len, shown) in [("256", "; 256 rows ("), ("1", "; 1 row ("), ("7", "; 7 rows (")] {
        assert!(rows(q_len).contains(shown), "{}", rows(q_len));
    }
}

#[test]
fn cases_are_listed() {
    let all = ok(&["check", "--list"]);
    let some = ok(&["check", "--list", "--filter", "gqa", "--seeds", "3..5"]);
    for case in flashtile_testkit::catalogue() {
        let listed = |text: &str| text.lines().any(|line| line.split("  ").next() == Some(&case.name));
        assert!(listed(&all), "{}", case.name);
        assert_eq!(listed(&some), case.name.contains("gqa"), "{}", case.name);
    }
    assert!(some.contains("\nseed 3 ") && some.contains("\nseed 4 "), "{some}");
    assert!(some.ends_with(&format!("\n{} cases\n", some.lines().count() - 2)), "{some}");
    let json = ok(&["check", "--list", "--filter", "gqa", "--json"]);
    for line in json.lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        assert!(
            case["case"].as_str().unwrap().contains("gqa") && case["dims"]["head_dim"].is_u64(),
            "{case}"
        );
    }
}

#[test]
fn scripts_of_shells() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = ok(&["completions", shell]);
        assert!(script.contains("flashtile") && script.contains("center-keys"), "{shell}");
        assert!(script.contains("grad") && script.contains("backward"), "{shell}");
    }
    assert_refused(&flashtile(["completions", "cmd"]), "[possible values: bash, ", "cmd");
}

#[test]
fn info_prints_what_it_knows_before_it_measures() {
    let text = ok(&["info", "--threads", "1"]);
    let line = |name: &str| text.lines().position(|line| line.starts_with(name)).unwrap();
    assert!(line("threads") < line("cuda") && line("cuda") < line("memory"), "{text}");
    assert!(text.contains("GFLOP/s") && text.contains("read bandwidth"), "{text}");
    let known = ok(&["info", "--threads", "1", "--no-measure"]);
    assert!(text.starts_with(&known) && !known.contains("FLOP/s"), "{known}");
    let info = json(&["info", "--no-measure", "--json"]);
    assert!(info["fma_flops_per_s"].is_null() && info["read_bytes_per_s"].is_null(), "{info}");
    assert_eq!(info["isas"].as_array().unwrap().len(), flashtile::Cpu::isas().len());
}

#[test]
fn every_object_has_a_schema() {
    let folder = Folder::with(&qkv(Dtype::F32, &[1, 1, 4, 16], &[1, 1, 4, 16], &[1, 1, 4, 16]));
    let (input, output) = (folder.input.to_str().unwrap(), folder.output.to_str().unwrap());
    let rows = folder.path().join("rows.jsonl");
    let rows = rows.to_str().unwrap();
    let bench =
        ["bench", "prefill", "--seq", "32", "--dtype", "f32", "--head-dim", "16", "--min-time", "0.001"];
    for args in [
        &["run", input, "-o", output][..],
        &["plan", input],
        &["plan", "--cached", "1:64", "--device", "h200"],
        &["kv", input],
        &["info", "--no-measure"],
        &["check", "--filter", "gqa", "--isa", "portable"],
        &["kernels", "list"],
        &["kernels", "list", "merge", "--instances"],
        &[&bench[..], &["--json-lines", rows]].concat(),
    ] {
        let text = ok(&[args, &["--json"]].concat());
        assert!(
            !text.is_empty() && text.lines().all(|line| line.starts_with("{\"schema\":1,")),
            "{args:?}: {text}"
        );
    }
    assert!(std::fs::read_to_string(rows).unwrap().starts_with("{\"schema\":1,"));
}

#[test]
fn check_runs_the_catalogue() {
    let text = ok(&["check", "--filter", "gqa"]);
    for isa in flashtile::Cpu::isas() {
        assert!(text.contains(isa.name()), "{text}");
    }
    assert!(text.contains("f32 nrmse/limit") && text.contains('%'), "{text}");
    let text = ok(&["check", "--filter", "gqa", "--isa", "portable", "--json"]);
    let cases = flashtile_testkit::catalogue();
    let is_forward = |line: &&str| !line.contains("\"case\":\"backward_");
    let lines = text.lines().filter(is_forward);
    assert_eq!(lines.clone().count(), cases.iter().filter(|case| case.name.contains("gqa")).count());
    for line in lines {
        let row: Value = serde_json::from_str(line).unwrap();
        assert_eq!(row["result"], "passed", "{row}");
        assert!(row["nrmse"].as_f64().unwrap() <= row["nrmse_limit"].as_f64().unwrap(), "{row}");
    }
    let chosen =
        ["check", "--filter", "keys_1,mask_bool_decode", "--seeds", "3..5", "--isa", "portable", "--json"];
    let [guarded, exact] = [&[][..], &["--exact-memory"]].map(|with| ok(&[&chosen[..], with].concat()));
    let names = ["keys_1", "mask_bool_decode", "seed 3", "seed 4"];
    for name in names {
        assert!(guarded.contains(&format!("\"{name}\"")), "{name} in {guarded}");
    }
    assert_eq!(guarded, exact, "where tensors lie changes no answer");
}

#[test]
fn bench_measures_and_compares() {
    let folder = Folder::empty();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (rows, svg) = (path("rows.jsonl"), path("rows.svg"));
    let few = [
        "--seq",
        "64,300",
        "--head-dim",
        "32",
        "--dtype",
        "f32,bf16",
        "--min-time",
        "0.001",
        "--threads",
        "1",
    ];
    let args =
        [&["bench", "prefill"][..], &few, &["--window", "40", "--json-lines", &rows, "--svg", &svg]].concat();
    let table = ok(&args);
    assert!(
        table.contains("of limit") && table.contains("bf16") && table.contains("causal, window 40"),
        "{table}"
    );
    let text = std::fs::read_to_string(&rows).unwrap();
    assert_eq!(text.lines().count(), 8);
    for line in text.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        assert!(row["seconds"].as_f64().unwrap() > 0.0 && row["fraction"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["nrmse"].as_f64().unwrap() < 8e-3, "{row}");
    }
    assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg"));

    let args = [&["bench", "prefill"][..], &few, &["--window", "40", "--json", "--vs", &rows]].concat();
    for line in ok(&args).lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        assert!(row["peers"]["flashtile"]["ratio"].as_f64().unwrap() > 0.0, "{row}");
    }

    let caches = ["--cache", "dense,contiguous,paged,ring", "--page", "8", "--batch", "1,3", "--json"];
    let args = [&["bench", "decode"][..], &few, &["--heads", "4", "--kv-heads", "4,1"], &caches].concat();
    let rows_of_caches = ok(&args);
    let layouts = ["dense", "contiguous", "paged(8)", "ring"];
    assert_eq!(rows_of_caches.lines().count(), 2 * 2 * 2 * 2 * layouts.len());
    for layout in layouts {
        assert!(rows_of_caches.contains(&format!("\"layout\":\"{layout}\"")), "{layout}");
    }
    let codecs = ["--cache", "contiguous,ring", "--codec", "f32,int8,tq4+tq3", "--batch", "2", "--json"];
    let args = [&["bench", "decode"][..], &few, &["--heads", "4", "--kv-heads", "2"], &codecs].concat();
    let rows_of_codecs = ok(&args);
    assert_eq!(rows_of_codecs.lines().count(), 2 * 2 * 2 * 3);
    for layout in ["ring int8", "contiguous tq4+tq3"] {
        assert!(rows_of_codecs.contains(&format!("\"layout\":\"{layout}\"")), "{layout}");
    }
    let uneven =
        ["bench", "decode", "--cache", "ring,paged", "--batch", "3", "--seq", "100..900", "--head-dim", "32"];
    let rest = ["--dtype", "f32", "--min-time", "0.001", "--threads", "1", "--json"];
    assert_eq!(ok(&[&uneven[..], &rest].concat()).lines().count(), 2);
    let packed = ["bench", "prefill", "--batch", "3", "--seq", "20..60", "--head-dim", "32", "--causal"];
    let row = json(&[&packed[..], &rest].concat());
    assert_eq!((&row["lens"], &row["layout"]), (&serde_json::json!([20, 40, 60]), &"packed".into()), "{row}");
    let args =
        ["bench", "decode", "--cache", "paged", "--batch", "3", "--seq", "400..600", "--shared", "300"];
    let rest = ["--head-dim", "32", "--dtype", "f32", "--min-time", "0.001", "--threads", "1"];
    let row = json(&[&args[..], &rest, &["--json"]].concat());
    assert_eq!((&row["lens"], &row["shared"]), (&serde_json::json!([400, 500, 600]), &288.into()), "{row}");
    assert!(row["seconds_apart"].as_f64().unwrap() > 0.0, "{row}");
    assert!(ok(&[&args[..], &rest].concat()).contains("read by each"));

    let without = flashtile([&["bench", "prefill"][..], &few, &["--seq", "63", "--vs", &rows]].concat());
    assert_refused(
        &without,
        "rows.jsonl: no row matches a row of this run (8 rows in the file), expected",
        "--vs",
    );

    let peer = r#"{"peer":"x","kind":"decode","dtype":"f32","d":32,"h":4,"hkv":2,"b":2,"s":300,"causal":false,"seconds":1.0}"#;
    std::fs::write(&rows, format!("{peer}\n\n{}\n", peer.replace("300", "301"))).unwrap();
    let heads = ["--heads", "4", "--kv-heads", "2", "--batch", "2", "--vs", &rows];
    let output = flashtile([&["bench", "decode"][..], &few, &heads].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("1.00 s"), "{}", stdout(&output));
    assert_eq!(stderr(&output), "note: 1 peer row without a row of this run to compare with\n");
}

#[test]
fn a_reader_that_went_away_is_no_failure() {
    use std::process::{Command, Stdio};
    let mut child = Command::new(env!("CARGO_BIN_EXE_flashtile"))
        .args(["plan", "--q-len", "4096"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", stderr(&output));
}

#[test]
fn plans_for_machines_of_files() {
    let folder = Folder::empty();
    let file = folder.path().join("mine.json");
    let path = file.to_str().unwrap();
    let shape = ["plan", "--q-len", "4096", "--causal", "--dtype", "bf16", "--no-tiles", "--json"];
    let json = |more: &[&str]| -> serde_json::Value {
        serde_json::from_str(&ok(&[&shape[..], more].concat())).unwrap()
    };
    for device in ["h200", "H200", "M3-Max", "AVX2-8core"] {
        let facts = ok(&["info", "--device", device]);
        std::fs::write(&file, &facts).unwrap();
        let (mut of_file, mut known) = (json(&["--device-file", path]), json(&["--device", device]));
        assert_eq!(known["device"], device.to_lowercase());
        assert_eq!(of_file["device"], path);
        assert_eq!(of_file["backend_reason"], "--device-file asks for it");
        for plan in [&mut of_file, &mut known] {
            plan["device"].take();
            plan["backend_reason"].take();
        }
        assert_eq!(of_file, known, "{device}");
    }

    // A device with fewer multiprocessors takes longer.
    let h200 = ok(&["info", "--device", "h200"]);
    std::fs::write(&file, h200.replace("\"multiprocessors\": 132", "\"multiprocessors\": 66")).unwrap();
    let seconds = |plan: serde_json::Value| plan["estimated_seconds"].as_f64().unwrap();
    let ratio = seconds(json(&["--device-file", path])) / seconds(json(&["--device", "h200"]));
    assert!((ratio - 2.0).abs() < 1e-9, "{ratio}");

    let cases = [
        (h200.replace("132", "0"), "multiprocessors is 0, expected 1 to 65536"),
        (h200.replace("\"l2\"", "\"l5\""), "not the facts of a machine: unknown field `l5`"),
        (
            h200.replace("\"cuda\"", "\"vulkan\""),
            "unknown variant `vulkan`, expected one of `cpu`, `cuda`, `metal`",
        ),
        (
            ok(&["info", "--device", "avx2-8core"]).replace("avx2", "sse2"),
            "sse2 is not an instruction set, expected avx2",
        ),
        (String::new(), "(`flashtile info --device NAME` prints such a file)"),
    ];
    for (text, why) in cases {
        std::fs::write(&file, text).unwrap();
        assert_refused(&flashtile(["plan", "--device-file", path]), why, why);
    }
    let both = flashtile(["plan", "--device-file", path, "--device", "h200"]);
    assert_refused(&both, "cannot be used with", "two machines");
}

#[test]
fn plans_have_an_estimated_time() {
    let of =
        |more: &[&str]| ok(&[&["plan", "--device", "h200", "--dtype", "bf16", "--no-tiles"], more].concat());
    let line = |text: &str| text.lines().find(|line| line.starts_with("estimate ")).unwrap().to_owned();
    let prefill = line(&of(&["--q-len", "4096"]));
    assert!(prefill.contains(" GFLOP at ") || prefill.contains(" TFLOP at "), "{prefill}");
    assert!(prefill.contains("not a measurement or a promise"), "{prefill}");
    let decode = line(&of(&["--cached", "1:8192x16", "--heads", "32", "--kv-heads", "8"]));
    assert!(
        decode.contains(" MiB of K and V at ")
            && decode.contains("B/s, the rate by which auto compares machines"),
        "{decode}"
    );
    let json: serde_json::Value = serde_json::from_str(&of(&["--q-len", "4096", "--json"])).unwrap();
    let seconds = json["estimated_seconds"].as_f64().unwrap();
    // 68.7 GFLOP, at less than the 989 TFLOP/s of the device and more than a tenth of them.
    assert!(seconds > 69e-6 && seconds < 690e-6, "{seconds}");
    assert!(json["estimated_overhead_seconds"].as_f64().unwrap() > 0.0, "{json}");
}
