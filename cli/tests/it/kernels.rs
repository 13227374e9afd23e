//! Kernels of the kernel language: as a list, as text.

use crate::commands::ok;
use crate::files::{Folder, Tensor, assert_refused, flashtile, max_abs, nrmse, qkv};
use safetensors::tensor::Dtype;
use serde_json::Value;

const KERNELS: [&str; 6] = ["decode", "merge", "encode", "append", "hadamard", "classify"];

fn json_lines(args: &[&str]) -> Vec<Value> {
    ok(args).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn lists() {
    let text = ok(&["kernels", "list"]);
    let kernels = json_lines(&["kernels", "list", "--json"]);
    let instances = json_lines(&["kernels", "list", "--instances", "--json"]);
    for name in KERNELS {
        assert!(
            text.lines().filter(|line| line.split(' ').next() == Some(name)).count() == 2,
            "{name} in {text}"
        );
        let kernel = kernels.iter().find(|kernel| kernel["kernel"] == name).unwrap();
        let count = instances.iter().filter(|instance| instance["kernel"] == name).count();
        assert_eq!(kernel["instances"].as_u64(), Some(count as u64), "{kernel}");
        assert!(kernel["file"].as_str().unwrap().ends_with(".rs") && kernel["does"] != "", "{kernel}");
        let details = ok(&["kernels", "list", name]);
        for parameter in kernel["parameters"].as_array().unwrap() {
            let (name, of) = (parameter["name"].as_str().unwrap(), parameter["type"].as_str().unwrap());
            assert!(details.contains(&format!("  {name}: {of}\n")), "{name}: {of} in {details}");
        }
    }
    let merges = ok(&["kernels", "list", "merge", "--instances"]);
    assert!(merges.contains("\nmerge_bf16_128_0 ") && !merges.contains("decode"), "{merges}");
    let wide = instances.iter().find(|instance| instance["instance"] == "merge_bf16_128_0").unwrap();
    assert_eq!(wide["generics"], serde_json::json!({"Q": "bf16", "DV": "128", "ORDER": "0"}));
    assert_eq!((&wide["threads"], &wide["shared_bytes"]), (&128.into(), &2560.into()));
}

/// An instance is the same program however it is chosen.
#[test]
fn texts() {
    let by_options = ["kernels", "print", "merge", "--dtype", "bf16", "--value-dim", "128", "--target"];
    let by_name = ["kernels", "print", "merge_bf16_128_0", "--target"];
    let words = [
        (
            "msl",
            &["#include <metal_stdlib>", "[[kernel]]", "void merge_bf16_128_0(", "[[function_constant(0)]]"]
                [..],
        ),
        (
            "cuda",
            &["extern \"C\" __global__", "merge_bf16_128_0(", "FT_CONSTANT_with_sinks", "struct Merge {"],
        ),
        ("rust", &["use flashtile_kernel::prelude::*;", "fn merge<", "// DV = 128", "#[kernel("]),
    ];
    for (target, words) in words {
        let text = ok(&[&by_options[..], &[target]].concat());
        assert_eq!(text, ok(&[&by_name[..], &[target]].concat()));
        for word in words {
            assert!(text.contains(word), "{word} in {text}");
        }
        assert!(text.contains("unrotate"), "{target}");
    }
    let decode = ok(&["kernels", "print", "decode", "--target", "cuda"]);
    let paged = ["--head-dim", "64", "--dtype", "f16", "--k-codec", "int8", "--v-codec", "tq5", "--paged"];
    let other = ok(&[&["kernels", "print", "decode", "--target", "cuda"], &paged[..]].concat());
    assert!(decode.contains("// decode_bf16_bf16_bf16_2_2_128_128_"), "{decode}");
    assert!(other.contains("// decode_f16_f16_f16_3_8_64_64_") && other.contains("PAGED = true;"), "{other}");
}

#[test]
fn texts_as_files() {
    let folder = Folder::empty();
    let (texts, one) = (folder.path().join("texts"), folder.path().join("one.rs"));
    let to = texts.to_str().unwrap();
    let print = ["kernels", "print", "hadamard", "--all", "--target", "msl", "-o", to];
    let shown = ok(&print);
    let names: Vec<String> = std::fs::read_dir(&texts)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let instances = json_lines(&["kernels", "list", "hadamard", "--instances", "--json"]);
    assert_eq!(names.len(), instances.len());
    assert_eq!(shown, format!("{} files in {to}\n", names.len()));
    for instance in instances {
        let name = instance["instance"].as_str().unwrap();
        let file = std::fs::read_to_string(texts.join(format!("{name}.metal"))).unwrap();
        assert_eq!(file, ok(&["kernels", "print", name, "--target", "msl"]));
    }
    // Again, over what is there.
    assert_eq!(ok(&print), shown);
    let one = one.to_str().unwrap();
    assert_eq!(ok(&["kernels", "print", "classify", "--target", "rust", "-o", one]), "");
    assert_eq!(
        std::fs::read_to_string(one).unwrap(),
        ok(&["kernels", "print", "classify", "--target", "rust"])
    );
    assert_refused(
        &flashtile(["kernels", "print", "--all", "--target", "msl", "-o", one]),
        "cannot be a folder for files",
        "a file for a folder",
    );
}

#[test]
fn refusals() {
    let print = |rest: &[&'static str]| [&["kernels", "print", "--target", "cuda"], rest].concat();
    let cases = [
        (
            vec!["kernels", "list", "decod"],
            "decod is no kernel, expected decode, encode, merge, append, hadamard, classify",
        ),
        (
            print(&[]),
            "expected a kernel (decode, merge, encode, append, hadamard, classify), an instance or --all",
        ),
        (print(&["clasify"]), "clasify is no kernel and no instance of one, expected classify"),
        (print(&["merge_bf16_128_1_0"]), "expected merge_bf16_128_0, "),
        (print(&["classify", "--paged"]), "--paged: has no meaning for classify, it has one instance"),
        (print(&["merge", "--head-dim", "64"]), "expected --dtype, --value-dim, --v-codec"),
        (
            print(&["decode", "--head-dim", "72"]),
            "decode: head_dim is 72, expected a multiple of 16 up to 512",
        ),
        (
            print(&["decode", "--k-codec", "mlx-tq4"]),
            "does not store 128 elements, expected a dimension such as 256",
        ),
        (print(&["decode", "--k-codec", "tq9"]), "tq9 is no codec"),
        (
            print(&["merge_bf16_128_0", "--dtype", "f16"]),
            "--dtype: has no meaning for merge_bf16_128_0, an instance, expected the kernel merge",
        ),
        (print(&["merg", "--dtype", "f16"]), "merg is no kernel and no instance of one, expected merge, "),
        (
            print(&["merge_bf16_0128_0"]),
            "merge_bf16_0128_0 is no kernel and no instance of one, expected merge_bf16_128_0, ",
        ),
        (print(&["merge_bf16_99999999999_0"]), "is no kernel and no instance of one"),
        (print(&["merge_bf17_128_0"]), "is no kernel and no instance of one"),
        (print(&["--all"]), "--all: expected -o DIR"),
        (print(&["--all", "--paged", "-o", "x"]), "--paged: has no meaning with --all"),
        (vec!["kernels", "print", "merge"], "--target"),
        (vec!["kernels", "print", "merge", "--target", "hlsl"], "msl, cuda, rust"),
    ];
    for (args, why) in cases {
        assert_refused(&flashtile(&args), why, &args.join(" "));
    }
}

/// Every feature on the simulator, from elements and from codes, against the CPU's kernels.
#[test]
fn the_simulator_agrees_with_the_cpu() {
    for (dtype, dim, limit) in [(Dtype::F32, 64, 2e-6), (Dtype::F16, 128, 1e-3), (Dtype::BF16, 64, 8e-3)] {
        let mut tensors = qkv(dtype, &[2, 4, 3, dim], &[2, 2, 37, dim], &[2, 2, 37, dim]);
        let hidden = (0..3 * 37).map(|n| n % 7 != 3);
        tensors.insert("mask".into(), Tensor::bool(&[1, 1, 3, 37], hidden));
        tensors.insert("alibi_slopes".into(), Tensor::f32(&[4], &[0.5, 0.25, 0.125, -0.01]));
        tensors.insert("sinks".into(), Tensor::f32(&[4], &[0.0, 1.0, -2.0, 3.0]));
        tensors.insert("kv_lens".into(), Tensor::i64(&[37, 11]));
        let folder = Folder::with(&tensors);
        let all = ["--causal", "--q-offset", "bottom-right", "--window", "20", "--softcap=2.5"];
        let codes = ["--k-codec", "int8", "--v-codec", "tq5", "--centre"];
        for (storage, limit) in [(&[][..], limit), (&codes[..], 8e-3)] {
            let run = |backend| folder.run(&[&all[..], storage, &["--backend", backend]].concat());
            let (got, want) = (run("simulator"), run("cpu"));
            assert_eq!((&got["out"].shape, &got["lse"].shape), (&want["out"].shape, &want["lse"].shape));
            let error = nrmse(&got["out"].values(), &want["out"].values());
            assert!(error <= limit, "{dtype:?} {storage:?}: {error}");
            let error = max_abs(&got["lse"].values(), &want["lse"].values());
            assert!(error <= 5e-3, "{dtype:?} {storage:?}: {error}");
        }
    }
}

#[test]
fn the_simulator_has_native_code_of_some_problems() {
    let folder = Folder::with(&qkv(Dtype::F16, &[1, 2, 3, 64], &[1, 2, 9, 64], &[1, 2, 9, 64]));
    let refuse = |options: &[&str], why| folder.refuse(&[options, &["--backend", "simulator"]].concat(), why);
    let why = "the simulator has no native code: q f16, keys tq3 of 64 and values f16 of 64, \
               expected elements of the dtype of q or int8, tq4, int8+tq5, of 64 or 128";
    refuse(&["--k-codec", "tq3"], why);
    let folder = Folder::with(&qkv(Dtype::F32, &[1, 2, 3, 80], &[1, 2, 9, 80], &[1, 2, 9, 80]));
    folder.refuse(&["--backend", "simulator"], "keys f32 of 80 and values f32 of 80, expected elements");
}

#[test]
fn the_simulator_is_checked() {
    let results = json_lines(&[
        "check",
        "--backend",
        "simulator",
        "--filter",
        "decode_mask_f16,decode_batch_f16,softcap_50_f16",
        "--json",
    ]);
    let of = |what: &str| results.iter().filter(|result| result["result"] == what).collect::<Vec<_>>();
    assert!(of("failed").is_empty() && !of("passed").is_empty(), "{:?}", of("failed"));
    let why = of("skipped").iter().map(|result| result["reason"].to_string()).collect::<String>();
    assert!(why.contains("no native code") && why.contains("scores"), "{why}");

    let text = ok(&["check", "--backend", "simulator", "--filter", "decode_batch_f16,head_dim_8"]);
    for line in [
        " 4 skipped, the simulator has no native code, such as q f32, keys f32 of 80",
        " 3 skipped, no kernel takes the problem, such as head_dim is 8, expected a multiple",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}

#[test]
fn the_simulator_refuses_what_would_take_long() {
    let folder = Folder::with(&qkv(Dtype::F16, &[1, 2, 600, 64], &[1, 2, 600, 64], &[1, 2, 600, 64]));
    let why = "more scores than the 600000 that the simulator is given: 720000; \
               --backend auto, cpu or reference takes this problem";
    folder.refuse(&["--backend", "simulator"], why);
}

#[test]
fn kernels_are_measured() {
    let folder = Folder::empty();
    let file = folder.path().join("rows.jsonl");
    let lines = ["--json", "--json-lines", file.to_str().unwrap()];
    let rows = json_lines(&[&["bench", "kernels", "--kernel", "hadamard"], &lines[..]].concat());
    let [row] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!((&row["kernel"], &row["backend"]), (&"hadamard".into(), &"simulator".into()));
    let of = |name: &str| row[name].as_u64().unwrap();
    let numbers = row["shape"]["rows"].as_u64().unwrap() * 128;
    assert_eq!((of("bytes"), of("device_written")), (8 * numbers, 4 * numbers), "{row}");
    assert!(of("device_read") >= 4 * numbers && of("barriers") == 0, "{row}");
    assert!(row["error"].as_f64().unwrap() <= row["tolerance"].as_f64().unwrap(), "{row}");
    let each = |name: &str| row["per_thread"][name].as_f64().unwrap();
    assert_eq!(each("device_written"), of("device_written") as f64 / of("threads") as f64);
    assert_eq!(each("simd_operations"), (32 * of("simd_operations")) as f64 / of("threads") as f64);
    let table = ok(&["bench", "kernels", "--kernel", "hadamard"]);
    assert!(table.contains(&format!(" {:.1} ", each("simd_operations"))), "{table}");
    let written = std::fs::read_to_string(&file).unwrap();
    assert_eq!(written, format!("{row}\n"));

    // What it names can be printed, listed or not.
    for row in json_lines(&["bench", "kernels", "--kernel", "decode", "--json"]) {
        let name = row["instance"].as_str().unwrap();
        let text = ok(&["kernels", "print", name, "--target", "cuda"]);
        assert!(text.contains(&format!("\n{name}(")), "{name} in {text}");
    }
    let table = ok(&["bench", "kernels", "--kernel", "append"]);
    assert!(
        table.contains("\n1 append") && table.contains("\n1 append_bf16_2: rows 40, dim 128\n"),
        "{table}"
    );
    let cases = [
        (&["--kernel", "haddamard"][..], "haddamard is no kernel, expected hadamard"),
        (&["--backend", "cpu"], "kernels run on simulator or cuda"),
        (&["--head-dim", "64"], "--head-dim: has no meaning for kernels"),
        (&["--page", "64"], "--page: has no meaning for kernels"),
    ];
    for (options, why) in cases {
        assert_refused(&flashtile([&["bench", "kernels"], options].concat()), why, &options.join(" "));
    }
    assert_refused(&flashtile(["bench", "decode", "--kernel", "merge"]), "needs the group kernels", "decode");
}
