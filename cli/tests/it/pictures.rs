//! Pictures, and bars of recorded rows.

use crate::commands::ok;
use crate::files::{Folder, assert_refused, flashtile, stderr};
use serde_json::{Value, json};

/// A row of flashtile: prefill of 1024 keys, 2 threads.
fn ours(dtype: &str, d: u64, gflops: f64) -> Value {
    json!({
        "peer": "flashtile", "kind": "prefill", "unit": "avx512", "threads": 2, "dtype": dtype, "d": d, "h": 8,
        "b": 1, "s": 1024, "causal": true, "seconds": 1.0, "gflops": gflops, "limit_per_s": 4e11,
    })
}

fn peer(name: &str, dtype: &str, d: u64, seconds: f64) -> Value {
    json!({
        "peer": name, "kind": "prefill", "dtype": dtype, "d": d, "h": 8, "b": 1, "s": 1024, "causal": true,
        "seconds": seconds,
    })
}

/// A folder whose `rows.jsonl` has these rows.
fn recorded(rows: &[Value]) -> Folder {
    let folder = Folder::empty();
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    std::fs::write(folder.path().join("rows.jsonl"), lines).unwrap();
    folder
}

fn draw(folder: &Folder, options: &[&str]) -> std::process::Output {
    let [rows, svg] =
        ["rows.jsonl", "rows.svg"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    flashtile([&["bench", "--from", &rows, "--svg", &svg][..], options].concat())
}

fn drawn(folder: &Folder, options: &[&str]) -> String {
    let output = draw(folder, options);
    assert!(output.status.success() && output.stdout.is_empty(), "{}", stderr(&output));
    std::fs::read_to_string(folder.path().join("rows.svg")).unwrap()
}

#[test]
fn recorded_rows_stand_beside_their_peers() {
    let compared = {
        let mut row = ours("f32", 64, 300.0);
        row["peers"] = json!({"torch 2.0": {"seconds": 1.5, "ratio": 1.5}});
        row
    };
    let rows = [
        peer("torch 2.0", "f32", 128, 2.0),
        peer("other", "f32", 128, 4.0),
        ours("f32", 128, 200.0),
        compared,
        // Measured alone, so that peers do not stand beside it.
        ours("f32", 64, 100.0),
        json!({"kind": "visibility", "name": "causal / full"}),
        ours("bf16", 64, 900.0),
    ];
    let folder = recorded(&rows);
    let picture = drawn(&folder, &["prefill", "--title", "An <example>"]);
    for words in [
        "<title>An &lt;example&gt;</title>",
        "head dim 128, causal, 1024 keys, 8 heads, avx512, 2 threads: flashtile 200 GFLOP/s, PyTorch 2.0 100 GFLOP/s, \
         other 50.0 GFLOP/s",
        "flashtile 300 GFLOP/s, PyTorch 2.0 200 GFLOP/s",
        ">200 (2.00x)<",
        ">300 (1.50x)<",
        ">head dim 64<",
        ">causal, 1024 keys, 8 heads, avx512, 2 threads; arithmetic limit 400 GFLOP/s<",
        ">GFLOP/s<",
        ">prefill, f32<",
        "measured limit",
    ] {
        assert!(picture.contains(words), "{words} in {picture}");
    }
    for absent in ["bf16", "900", ">100 ("] {
        assert!(!picture.contains(absent), "{absent} in {picture}");
    }
    assert!(picture.len() < 20_000, "{} bytes", picture.len());

    let picture = drawn(&folder, &["--head-dim", "128", "--dtype", "f32"]);
    assert!(picture.contains("flashtile 200 GFLOP/s") && !picture.contains("flashtile 300"), "{picture}");
    // Nothing that is selected has a peer, so that flashtile's rows are drawn alone.
    let picture = drawn(&folder, &["--dtype", "bf16"]);
    assert!(picture.contains("flashtile 900 GFLOP/s") && !picture.contains("PyTorch"), "{picture}");
    assert!(picture.contains("limit 400 GFLOP/s<"), "{picture}");
}

#[test]
fn peers_without_a_row_beside_are_noted() {
    let folder = recorded(&[
        peer("torch 2.0", "f32", 32, 1.0),
        peer("torch 2.0", "f32", 64, 2.0),
        ours("f32", 64, 5.0),
    ]);
    let output = draw(&folder, &[]);
    assert!(output.status.success());
    assert_eq!(stderr(&output), "note: 1 peer row without a row of flashtile beside, not drawn\n");
}

#[test]
fn rows_that_are_not_understood_are_refused() {
    let with = |name: &str, value: Value| {
        let mut row = ours("f32", 64, 100.0);
        row[name] = value;
        row
    };
    let good = ours("f32", 128, 100.0);
    let cases = [
        (with("kind", json!("training")), "rows.jsonl line 2: kind \"training\", expected prefill or decode"),
        (with("gflops", json!(null)), "rows.jsonl line 2: expected a positive number gflops"),
        (with("limit_per_s", json!(-1)), "rows.jsonl line 2: expected a positive number limit_per_s"),
        (with("unit", json!(7)), "rows.jsonl line 2: expected a text unit"),
        (with("threads", json!("two")), "rows.jsonl line 2: expected a whole number threads"),
        (with("peers", json!({"x": {}})), "rows.jsonl line 2: expected a positive number seconds of x"),
        (with("seconds", json!(0)), "rows.jsonl line 2: expected a positive number seconds"),
        (json!({"peer": "x"}), "rows.jsonl line 2: expected"),
        (with("causal", json!("yes")), "rows.jsonl line 2: expected true or false causal"),
    ];
    for (row, why) in cases {
        let folder = recorded(&[good.clone(), row]);
        assert_refused(&draw(&folder, &[]), why, why);
        assert_eq!(folder.names(), ["rows.jsonl"]);
    }
    let mut other = ours("f32", 128, 50.0);
    other["threads"] = json!(1);
    let folder = recorded(&[good.clone(), other]);
    let why = "rows.jsonl line 2: the problem of line 1 on another processor or with other threads";
    assert_refused(&draw(&folder, &[]), why, "two units");
    assert!(drawn(&folder, &["--threads", "1"]).contains("flashtile 50.0 GFLOP/s"));

    let folder = recorded(&[good]);
    for (options, why) in [
        (&["--head-dim", "32"][..], "no row of flashtile that these options select"),
        (&["visibility"], "--from: draws rows of prefill and decode"),
        (&["--quick"], "--quick: does not apply to recorded rows (--from)"),
        (&["--json"], "--json: does not apply to recorded rows (--from)"),
        (&["--min-time", "1"], "--min-time: does not apply to recorded rows (--from)"),
    ] {
        assert_refused(&draw(&folder, options), why, why);
    }
    let rows = folder.path().join("rows.jsonl");
    let rows = rows.to_str().unwrap();
    assert_refused(&flashtile(["bench", "--from", rows]), "--from: needs --svg FILE", "no picture");
    assert_refused(&flashtile(["bench", "--title", "x"]), "--from", "a title without rows");
}

#[test]
fn peers_are_selected_by_the_beginning_of_their_names() {
    let mut compared = ours("f32", 64, 300.0);
    compared["peers"] = json!({"torch 2.0": {"seconds": 1.5}, "candle flash 0.11": {"seconds": 2.0}});
    let rows = [
        peer("llama.cpp flash", "f32", 64, 2.0),
        peer("onnxruntime Attention 1.0", "f32", 64, 4.0),
        compared,
    ];
    let folder = recorded(&rows);
    let names = ["PyTorch 2.0", "candle flash 0.11", "llama.cpp flash", "ONNX Runtime Attention 1.0"];
    for (selection, shown) in
        [("torch,llama", [true, false, true, false]), ("onnx", [false, false, false, true])]
    {
        let picture = drawn(&folder, &["--peers", selection]);
        assert_eq!(names.map(|name| picture.contains(name)), shown, "{selection}");
    }
    let refusal = "--peers tensor: no peer name in";
    let why = "an unknown peer";
    assert_refused(&draw(&folder, &["--peers", "tensor"]), refusal, why);
    assert_refused(&draw(&folder, &["--peers", "torch,tensor"]), refusal, why);
    assert_refused(&draw(&folder, &["--peers", ""]), "--peers", "an empty name");
    let other = ["--peers", "llama", "--dtype", "bf16"];
    assert_refused(&draw(&folder, &other), "none that the other options select", "rows of another dtype");
    let rows = folder.path().join("rows.jsonl");
    let vs = ["bench", "prefill", "--peers", "tensor", "--vs", rows.to_str().unwrap()];
    assert_refused(&flashtile(vs), refusal, why);
    assert_refused(
        &flashtile(["bench", "--peers", "torch"]),
        "--peers: needs --vs FILE or --from",
        "no file",
    );
}

#[test]
fn the_recorded_rows_of_this_repository_are_drawn() {
    let folder = Folder::empty();
    let svg = folder.path().join("speed.svg");
    for (file, options, words) in [
        ("emerald-rapids-2core", &["--seq", "4096", "--dtype", "f32,bf16"][..], "PyTorch 2.11.0"),
        ("epyc-2core", &["decode", "--peers", "llama.cpp", "--threads", "2"], "llama.cpp flash"),
        ("h200", &["decode"], "FlashAttention-2"),
        ("emerald-rapids-2core-shared-prefix", &[], "8192 tokens shared"),
    ] {
        let rows = format!("{}/../benches/record/{file}.jsonl", env!("CARGO_MANIFEST_DIR"));
        let args = ["bench", "--from", &rows, "--svg", svg.to_str().unwrap()];
        assert_eq!(ok(&[&args[..], options].concat()), "");
        let picture = std::fs::read_to_string(&svg).unwrap();
        assert!(picture.contains(words), "{file}: {words}");
    }
}

#[test]
fn pictures_are_named_after_their_format() {
    let folder = Folder::empty();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for name in ["tiles.png", "tiles", "svg"] {
        let why = format!("{name}: --svg writes SVG, expected a name such as ");
        assert_refused(&flashtile(["plan", "--svg", &path(name)]), &why, name);
    }
    assert!(folder.names().is_empty());
    ok(&["plan", "--svg", &path("tiles.SVG")]);
    assert_eq!(folder.names(), ["tiles.SVG"]);
}

#[test]
fn tiles_are_drawn_in_words() {
    let folder = Folder::empty();
    let svg = folder.path().join("tiles.svg");
    let shape = ["plan", "--q-len", "4096", "--head-dim", "64", "--causal", "--window", "1023", "--svg"];
    let text = ok(&[&shape[..], &[svg.to_str().unwrap()]].concat());
    let counts = text.lines().find(|line| line.contains("partial")).unwrap();
    let picture = std::fs::read_to_string(&svg).unwrap();
    for words in [
        "<title>causal, window 1023, 4096 x 4096</title>",
        ">1024<",
        ">4096<",
        ">key<",
        ">query<",
        "crispEdges",
        "prefers-color-scheme:dark",
    ] {
        assert!(picture.contains(words), "{words} in {picture}");
    }
    for kind in ["skipped", "partial", "full"] {
        let words: Vec<&str> = counts.split_whitespace().collect();
        let at = words.iter().position(|word| *word == kind).unwrap();
        assert!(picture.contains(&format!(">{} {kind}<", words[at + 1])), "{counts}: {picture}");
    }
    assert!(picture.len() < 20_000, "{} bytes", picture.len());
}
