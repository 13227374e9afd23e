//! Kernels of the kernel language: listed and printed.

use crate::commands::ok;
use crate::files::{Folder, assert_refused, flashtile};
use serde_json::Value;

const KERNELS: [&str; 14] = [
    "decode",
    "merge",
    "encode",
    "append",
    "copy_rows",
    "read_codes",
    "read_elements",
    "hadamard",
    "mask_tiles",
    "row_terms",
    "backward_q",
    "backward_kv",
    "backward_bias",
    "sum_rows",
];

pub(crate) fn json_lines(args: &[&str]) -> Vec<Value> {
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
    assert_eq!(wide["generics"], serde_json::json!({"QElement": "bf16", "VALUE_DIM": "128", "ORDER": "0"}));
    assert_eq!((&wide["threads"], &wide["shared_bytes"]), (&128.into(), &2560.into()));
}

/// Sources have parameters and the fields of their structs where the list says.
#[test]
fn parameters_are_where_sources_have_them() {
    let kernels = json_lines(&["kernels", "list", "--json"]);
    for (name, instance) in
        [("merge", "merge_bf16_128_0"), ("prefill", "prefill_bf16_2_2_64_64_2_4_4_1_8_2_2")]
    {
        let kernel = kernels.iter().find(|kernel| kernel["kernel"] == name).unwrap();
        let source = ok(&["kernels", "print", instance, "--target", "msl"]);
        for parameter in kernel["parameters"].as_array().unwrap() {
            let name = parameter["name"].as_str().unwrap();
            let place = match (&parameter["buffer"], &parameter["constant"]) {
                (Value::Number(index), Value::Null) => format!("{name} [[buffer({index})]]"),
                (Value::Null, Value::Number(index)) => format!("{name} [[function_constant({index})]]"),
                _ => panic!("{parameter}"),
            };
            assert!(source.contains(&place), "{place}");
            let Some(fields) = parameter["fields"].as_array() else { continue };
            let of = parameter["type"].as_str().unwrap().trim_start_matches('&');
            let mut end = 0;
            for field in fields {
                let (name, offset) = (field["name"].as_str().unwrap(), field["offset"].as_u64().unwrap());
                assert!(
                    source.contains(&format!("FT_LAYOUT({of}, {name}, {offset});")),
                    "{of}.{name} at {offset}"
                );
                let bytes = if field["type"].as_str().unwrap().ends_with("64") { 8 } else { 4 };
                assert_eq!(offset, end, "{field}");
                end += bytes * field["len"].as_u64().unwrap();
            }
            assert_eq!(parameter["bytes"], end, "{parameter}");
        }
    }
}

/// An instance has the same source however it is selected.
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
            &["extern \"C\" __global__", "merge_bf16_128_0(", "FT_CONSTANT_has_sinks", "struct Merge {"],
        ),
        ("rust", &["use flashtile_kernel::prelude::*;", "fn merge<", "// VALUE_DIM = 128", "#[kernel("]),
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
    let options = ["--head-dim", "64", "--dtype", "f16", "--k-codec", "int8", "--v-codec", "tq5"];
    let other = ok(&[&["kernels", "print", "decode", "--target", "cuda"], &options[..]].concat());
    assert!(decode.contains("// decode_bf16_2_2_128_128_"), "{decode}");
    assert!(other.contains("// decode_f16_3_8_64_64_"), "{other}");
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
    // Again, over existing files.
    assert_eq!(ok(&print), shown);
    let one = one.to_str().unwrap();
    assert_eq!(ok(&["kernels", "print", "mask_tiles", "--target", "rust", "-o", one]), "");
    assert_eq!(
        std::fs::read_to_string(one).unwrap(),
        ok(&["kernels", "print", "mask_tiles", "--target", "rust"])
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
            "decod is not a kernel, expected decode, encode, merge, append, prefill, read_codes, hadamard, sum_rows, copy_rows, row_terms, backward_q, backward_kv, mask_tiles, read_elements, backward_bias",
        ),
        (
            print(&[]),
            "expected a kernel (decode, merge, prefill, encode, append, copy_rows, read_codes, read_elements, hadamard, mask_tiles, row_terms, backward_q, backward_kv, backward_bias, sum_rows), an instance or --all",
        ),
        (print(&["mask_tile"]), "mask_tile is neither a kernel nor an instance, expected mask_tiles"),
        (print(&["merge_bf16_128_1_0"]), "expected merge_bf16_128_0, "),
        (
            print(&["mask_tiles", "--head-dim", "64"]),
            "--head-dim: does not apply to mask_tiles, it has one instance",
        ),
        (print(&["merge", "--head-dim", "64"]), "expected --dtype, --value-dim, --v-codec"),
        (print(&["decode", "--head-dim", "513"]), "decode: head_dim is 513, expected 1 to 512"),
        (
            print(&["decode", "--k-codec", "mlx-tq4"]),
            "does not store 128 elements, expected a dimension such as 256",
        ),
        (print(&["decode", "--k-codec", "tq9"]), "tq9 is not a codec"),
        (
            print(&["merge_bf16_128_0", "--dtype", "f16"]),
            "--dtype: does not apply to merge_bf16_128_0, an instance, expected the kernel merge",
        ),
        (print(&["merg", "--dtype", "f16"]), "merg is neither a kernel nor an instance, expected merge, "),
        (
            print(&["merge_bf16_0128_0"]),
            "merge_bf16_0128_0 is neither a kernel nor an instance, expected merge_bf16_128_0, ",
        ),
        (print(&["merge_bf16_99999999999_0"]), "is neither a kernel nor an instance"),
        (print(&["merge_bf17_128_0"]), "is neither a kernel nor an instance"),
        (print(&["--all"]), "--all: expected -o DIR"),
        (print(&["--all", "--head-dim", "64", "-o", "x"]), "--head-dim: does not apply with --all"),
        (vec!["kernels", "print", "merge"], "--target"),
        (vec!["kernels", "print", "merge", "--target", "hlsl"], "msl, cuda, rust"),
    ];
    for (args, why) in cases {
        assert_refused(&flashtile(&args), why, &args.join(" "));
    }
}

/// The default build says what it lacks, and how to get it.
#[cfg(not(feature = "simulator"))]
#[test]
fn builds_without_the_simulator_say_so() {
    use crate::files::qkv;
    use safetensors::tensor::Dtype;
    let why = "--backend: this build is without the backend simulator, \
               cargo build --release -p flashtile-cli --features simulator makes one that has it";
    let folder = Folder::with(&qkv(Dtype::F16, &[1, 2, 3, 64], &[1, 2, 9, 64], &[1, 2, 9, 64]));
    folder.refuse(&["--backend", "simulator"], why);
    assert_refused(&flashtile(["check", "--backend", "simulator"]), why, "check");
}
