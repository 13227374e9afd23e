//! Kernels exported for programs in other languages.
//!
//! With `FLASHTILE_BLESS=1` the tests write the files of `tests/exports` anew; review the difference before committing it.

use crate::commands::ok;
use crate::files::{Folder, assert_refused, flashtile};
use flashtile_msl_standin::{Buffer, CLANG_VARIABLE, Compiler, FunctionConstant, Value as Constant};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Arguments of an export into a folder of `folder`.
fn export(folder: &Folder, rest: &[&str]) -> (PathBuf, Vec<String>) {
    let to = folder.path().join("kernels");
    let args = ["kernels", "export", to.to_str().unwrap(), "--target", "metal"];
    let args = args.iter().chain(rest).map(|arg| (*arg).to_owned()).collect();
    (to, args)
}

/// The files of an export, by name.
fn exported(rest: &[&str]) -> BTreeMap<String, String> {
    let folder = Folder::empty();
    let (to, args) = export(&folder, rest);
    let shown = ok(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let files = files(&to);
    let (count, plural) = (files.len() - 1, if files.len() == 2 { "" } else { "s" });
    assert_eq!(shown, format!("{count} kernel{plural} and manifest.json in {}\n", to.display()));
    files
}

fn files(folder: &Path) -> BTreeMap<String, String> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let name = |entry: &std::fs::DirEntry| entry.file_name().into_string().unwrap();
    entries.map(|entry| (name(&entry), std::fs::read_to_string(entry.path()).unwrap())).collect()
}

fn manifest(files: &BTreeMap<String, String>) -> Value {
    serde_json::from_str(&files["manifest.json"]).unwrap()
}

fn rows<'a>(of: &'a Value, list: &str) -> &'a [Value] {
    of[list].as_array().unwrap()
}

fn text<'a>(of: &'a Value, field: &str) -> &'a str {
    of[field].as_str().unwrap_or_else(|| panic!("{field} of {of}"))
}

#[test]
fn goldens() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exports");
    let files = exported(&["merge", "hadamard", "mask_tiles"]);
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    let expected = ["hadamard_128.metal", "manifest.json", "mask_tiles.metal", "merge_bf16_128_0.metal"];
    assert_eq!(names, expected);
    // A release does not change the golden file.
    let found = files["manifest.json"].replace(env!("CARGO_PKG_VERSION"), "VERSION");
    let path = folder.join("manifest.json");
    if std::env::var_os("FLASHTILE_BLESS").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap();
    let line = found.lines().zip(golden.lines()).position(|(found, golden)| found != golden);
    let (path, line) = (path.display(), line.map(|line| line + 1));
    assert!(found == golden, "{path} differs at line {line:?}: FLASHTILE_BLESS=1 rewrites it");
    for instance in rows(&manifest(&files), "instances") {
        let name = text(instance, "name");
        assert_eq!(files[text(instance, "source")], ok(&["kernels", "print", name, "--target", "msl"]));
    }
}

/// The type of a number as printed Metal spells it.
fn metal(of: &str) -> &str {
    match of {
        "bool" => "bool",
        "u8" => "uchar",
        "u32" => "uint",
        "i32" => "int",
        "u64" => "ulong",
        "f32" => "float",
        "f16" => "ft_f16",
        "bf16" => "ft_bf16",
        of => of,
    }
}

/// The part of a source between the first `start` and the next `end`.
fn between<'a>(source: &'a str, start: &str, end: &str) -> &'a str {
    let from = source.find(start).unwrap_or_else(|| panic!("{start}")) + start.len();
    &source[from..from + source[from..].find(end).unwrap()]
}

#[test]
fn manifests_say_what_sources_say() {
    let files = exported(&[]);
    let manifest = manifest(&files);
    let instances = rows(&manifest, "instances");
    assert!(instances.len() > 500 && files.len() == instances.len() + 1, "{}", instances.len());
    let listed = crate::kernels::json_lines(&["kernels", "list", "--json"]);
    assert_eq!(rows(&manifest, "kernels").len(), listed.len());
    for (kernel, listed) in rows(&manifest, "kernels").iter().zip(&listed) {
        for field in ["kernel", "does", "parameters", "exact"] {
            assert_eq!(kernel[field], listed[field], "{kernel}");
        }
        let messages: Vec<&Value> = rows(kernel, "requires").iter().map(|of| &of["message"]).collect();
        assert_eq!(messages, listed["requires"].as_array().unwrap().iter().collect::<Vec<_>>());
    }
    for instance in instances {
        let (name, entry) = (text(instance, "name"), text(instance, "entry"));
        let source = &files[text(instance, "source")];
        let parameters = between(source, &format!("void {entry}("), ") {");
        let mut lines: Vec<&str> = parameters.lines().map(|line| line.trim().trim_end_matches(',')).collect();
        assert_eq!((lines.pop(), lines.remove(0)), (Some("FT_POSITIONS"), ""), "{name}");
        let binding = |of: &Value| {
            let (name, ty) = (text(of, "name"), metal(text(of, "type")));
            let memory = match (text(of, "kind"), text(of, "access")) {
                ("buffer", "read") => format!("const device {ty}*"),
                ("buffer", "read_write") => format!("device {ty}*"),
                ("struct" | "scalar", "read") => format!("constant {ty}&"),
                _ => panic!("{of}"),
            };
            format!("{memory} {name} [[buffer({})]]", of["index"])
        };
        assert_eq!(lines, rows(instance, "bindings").iter().map(binding).collect::<Vec<_>>(), "{name}");
        let constant = |of: &Value| {
            let (name, ty) = (text(of, "name"), metal(text(of, "type")));
            format!("constant {ty} {name} [[function_constant({})]];", of["index"])
        };
        let constants: Vec<&str> =
            source.lines().filter(|line| line.contains("[[function_constant(")).collect();
        assert_eq!(constants, rows(instance, "function_constants").iter().map(constant).collect::<Vec<_>>());
        let threads = between(source, "[[max_total_threads_per_threadgroup(", ")");
        assert_eq!(threads, instance["threads"].to_string(), "{name}");
        assert_eq!(instance["simd_groups"].as_u64().unwrap() * 32, instance["threads"].as_u64().unwrap());
        assert!(instance["threadgroup_bytes"].as_u64().unwrap() <= 32 << 10, "{name}");
        layouts(&manifest, instance, source);
    }
}

/// Checks that the structs of an instance have the layout that its source asserts.
fn layouts(manifest: &Value, instance: &Value, source: &str) {
    for binding in rows(instance, "bindings").iter().filter(|of| of["kind"] == "struct") {
        let of = rows(manifest, "structs").iter().find(|of| of["name"] == binding["type"]).unwrap();
        assert_eq!(of["bytes"], binding["bytes"]);
        let prefix = format!("FT_LAYOUT({}, ", text(of, "name"));
        let asserted: BTreeSet<&str> = source.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let field = |field: &Value| format!("{}, {});", text(field, "name"), field["offset"]);
        let fields: BTreeSet<String> = rows(of, "fields").iter().map(field).collect();
        assert_eq!(asserted, fields.iter().map(String::as_str).collect(), "{of}");
    }
}

/// One instance of each kernel compiles with the constants of the manifest, and with assertions of its layouts.
#[test]
fn sources_compile_with_what_the_manifest_says() {
    let Some(compiler) = compiler() else { return };
    let plain =
        ["decode", "merge", "prefill", "append", "copy_rows", "read_elements", "hadamard", "mask_tiles"];
    let small = ["--head-dim", "64", "--dtype", "f16"];
    let codes = ["encode", "read_codes", "--k-codec", "tq4"];
    let mut compiled = 0;
    for rest in [[&plain[..], &small].concat(), codes.to_vec()] {
        let files = exported(&rest);
        let manifest = manifest(&files);
        for instance in rows(&manifest, "instances") {
            let mut source = files[text(instance, "source")].clone();
            for of in rows(&manifest, "structs") {
                let (name, bytes, alignment) = (text(of, "name"), &of["bytes"], &of["alignment"]);
                if !source.contains(&format!("FT_LAYOUT({name}, ")) {
                    continue;
                }
                source.push_str(&format!(
                    "static_assert(sizeof({name}) == {bytes} && alignof({name}) == {alignment}, \"\");\n"
                ));
                for field in rows(of, "fields") {
                    let (field, bytes) = (text(field, "name"), &field["bytes"]);
                    source.push_str(&format!("static_assert(sizeof({name}::{field}) == {bytes}, \"\");\n"));
                }
            }
            let library = compiler.compile(&source).unwrap_or_else(|why| panic!("{instance}: {why}"));
            assert_eq!(library.kernels(), [text(instance, "entry")]);
            let constant = |of: &Value| {
                let value = match text(of, "type") {
                    "bool" => Constant::Bool(true),
                    "u32" => Constant::U32(1),
                    other => panic!("{other}"),
                };
                FunctionConstant::new(of["index"].as_u64().unwrap() as u32, value)
            };
            let constants: Vec<_> = rows(instance, "function_constants").iter().map(constant).collect();
            library.kernel(text(instance, "entry"), &constants).unwrap();
            compiled += 1;
        }
    }
    assert_eq!(compiled, 10);
}

/// The compiler of exported Metal; `None`, with a note, if there is none and none is demanded.
fn compiler() -> Option<Compiler> {
    let why = match Compiler::find() {
        Ok(compiler) => return Some(compiler),
        Err(why) => why,
    };
    assert!(std::env::var_os(CLANG_VARIABLE).is_none(), "{CLANG_VARIABLE} is set, but {why}");
    eprintln!("SKIPPED, exported Metal is not compiled: {why}");
    None
}

/// A host that knows nothing but the manifest computes causal attention, by the launch of `examples/metal.swift`.
#[test]
fn prefill_is_launched_by_the_manifest() {
    let Some(compiler) = compiler() else { return };
    let (heads, len, dim) = (2, 70, 64);
    let files = exported(&["prefill", "--head-dim", "64", "--dtype", "f32"]);
    let manifest = manifest(&files);
    let instance = &rows(&manifest, "instances")[0];
    let number = |name: &str| instance["generics"][name].as_u64().unwrap() as usize;
    let tile = 16 * number("ROW_TILES") * number("SIMD_GROUPS") / number("TEAM_SIMDS");
    let tiles = usize::div_ceil(len, tile);

    // Parameters at the offsets of the manifest; the others are 0.
    let structure = |name: &str, values: &[(&str, &[u64])]| {
        let of = rows(&manifest, "structs").iter().find(|of| of["name"] == name).unwrap();
        let mut bytes = vec![0u8; of["bytes"].as_u64().unwrap() as usize];
        for (name, values) in values {
            let field = rows(of, "fields").iter().find(|of| of["name"] == *name).unwrap();
            let size = if text(field, "type") == "u64" { 8 } else { 4 };
            let chunks = bytes[field["offset"].as_u64().unwrap() as usize..].chunks_exact_mut(size);
            chunks.zip(*values).for_each(|(to, value)| to.copy_from_slice(&value.to_le_bytes()[..size]));
        }
        bytes
    };
    let strides = [heads * len * dim, len * dim, dim].map(|n| n as u64);
    let in_bytes = strides.map(|n| 4 * n);
    let scale = u64::from((std::f32::consts::LOG2_E / (dim as f32).sqrt()).to_bits());
    let (count, sizes) = ([len as u64], [heads as u64]);
    let params: [(&str, &[u64]); 14] = [
        ("q", &strides),
        ("k", &in_bytes),
        ("v", &in_bytes),
        ("q_heads", &sizes),
        ("group", &[1]),
        ("page", &count),
        ("width", &[1]),
        ("tiles", &[tiles as u64]),
        ("queries", &count),
        ("batches", &[1]),
        ("left", &[i32::MAX as u64]),
        ("right", &[0]),
        ("scale", &[scale]),
        ("cap", &[0]),
    ];
    let output: [(&str, &[u64]); 5] =
        [("out", &strides), ("q_heads", &sizes), ("queries", &count), ("splits", &[1]), ("simds", &[1])];

    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / f32::from_bits(0x4b00_0000) - 1.0
    };
    let [q, k, v] = [(); 3].map(|()| (0..heads * len * dim).map(|_| random()).collect::<Vec<f32>>());
    let bytes = |of: &[f32]| of.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let sequence = [0, 0, len as i32, 0, 0, len as i32, 0, 0, 0].map(i32::to_le_bytes).concat();
    let mut memory: Vec<Vec<u8>> = rows(instance, "bindings")
        .iter()
        .map(|binding| match text(binding, "name") {
            "q" => bytes(&q),
            "k" => bytes(&k),
            "v" => bytes(&v),
            "out" => vec![0xff; 4 * q.len()],
            "sequences" => sequence.clone(),
            "params" => structure("Attend", &params),
            "output" => structure("Merge", &output),
            // The problem does not use the others.
            _ => vec![0; 16],
        })
        .collect();
    let constants = rows(instance, "function_constants").iter().map(|of| {
        let value = match text(of, "name") {
            "row_align" => Constant::U32(16),
            "paging" => Constant::U32(0),
            _ => Constant::Bool(false),
        };
        FunctionConstant::new(of["index"].as_u64().unwrap() as u32, value)
    });
    let library = compiler.compile(&files[text(instance, "source")]).unwrap();
    let kernel = library.kernel(text(instance, "entry"), &constants.collect::<Vec<_>>()).unwrap();
    let at = |name: &str| rows(instance, "bindings").iter().position(|of| of["name"] == name).unwrap();
    let mut buffers: Vec<Buffer<'_>> = rows(instance, "bindings")
        .iter()
        .zip(&mut memory)
        .map(|(of, bytes)| match (of["index"].as_u64().unwrap() as usize, text(of, "access")) {
            (index, "read_write") => Buffer::write(index, bytes),
            (index, _) => Buffer::read(index, bytes),
        })
        .collect();
    let threads = instance["threads"].as_u64().unwrap() as u32;
    kernel.run([(heads * tiles) as u32, 1, 1], [threads, 1, 1], &mut buffers, &[]).unwrap();
    drop(buffers);

    let out: Vec<f32> =
        memory[at("out")].chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect();
    for (index, got) in out.iter().enumerate() {
        let (head, row, column) = (index / (len * dim), index / dim % len, index % dim);
        let element =
            |of: &[f32], row: usize, column: usize| f64::from(of[(head * len + row) * dim + column]);
        let score = |key: usize| -> f64 {
            (0..dim).map(|d| element(&q, row, d) * element(&k, key, d)).sum::<f64>() / (dim as f64).sqrt()
        };
        let probs: Vec<f64> = (0..=row).map(|key| score(key).exp()).collect();
        let sum: f64 = probs.iter().zip(0..).map(|(p, key)| p * element(&v, key, column)).sum();
        let expected = sum / probs.iter().sum::<f64>();
        assert!((f64::from(*got) - expected).abs() < 1e-5, "{head} {row} {column}: {got}, not {expected}");
    }
}

#[test]
fn exports_are_equal() {
    let names = ["merge", "encode_bf16_4_128", "--dtype", "f16"];
    let (once, again) = (exported(&names), exported(&names));
    assert_eq!(once, again);
    // The order of names does not matter, nor do repeated names.
    let reversed = ["encode_bf16_4_128", "merge", "merge_f16_128_0", "--dtype", "f16"];
    assert_eq!(exported(&reversed), once);
}

#[test]
fn refusals() {
    let folder = Folder::empty();
    let (to, _) = export(&folder, &[]);
    let file = folder.path().join("file");
    std::fs::write(&file, b"kept").unwrap();
    let (to, file) = (to.to_str().unwrap(), file.to_str().unwrap());
    let below = format!("{file}/kernels");
    let absent = folder.path().join("absent/kernels");
    let absent = absent.to_str().unwrap();
    let wide = "prefill_bf16_2_2_128_128_1_4_8_1_8_1_2";
    let cases: &[(&[&str], &str)] = &[
        (
            &[to, "merg", "--target", "metal"],
            "kernels export: merg is neither a kernel nor an instance, expected merge",
        ),
        (&[to, "merg", "--all", "--target", "metal"], "merg is not a kernel, expected merge"),
        (&[to, "merge"], "missing argument: --target"),
        (
            &[to, "merge", "--target", "cuda"],
            "--target cuda: kernels are exported for metal only; flashtile kernels print --all --target cuda -o DIR",
        ),
        (&[to, "merge", "--target", "rust"], "--target rust: kernels are exported for metal only"),
        (
            &[to, wide, "--target", "metal"],
            "needs 40048 bytes of threadgroup memory, expected at most the 32768",
        ),
        (
            &[to, "prefill", "--head-dim", "512", "--k-codec", "mlx-tq8", "--target", "metal"],
            "prefill: no tile of prefill fits Apple's GPUs",
        ),
        (
            &[to, "merge", "--head-dim", "64", "--target", "metal"],
            "--head-dim: does not apply to merge, expected --dtype",
        ),
        (
            &[to, "--head-dim", "64", "--target", "metal"],
            "--head-dim: does not apply where every listed instance",
        ),
        (
            &[to, "merge", "--all", "--dtype", "f16", "--target", "metal"],
            "--dtype: does not apply where every listed",
        ),
        (&[file, "merge", "--target", "metal"], "file: exists, expected a new folder"),
        (&[&below, "merge", "--target", "metal"], "cannot be written: "),
        (&[absent, "merge", "--target", "metal"], "cannot be written: "),
        (&["/", "merge", "--target", "metal"], "/: exists, expected a new folder"),
    ];
    for (args, why) in cases {
        assert_refused(&flashtile([&["kernels", "export"], *args].concat()), why, &args.join(" "));
        assert_eq!(folder.names(), ["file"], "{args:?}");
    }
    assert_eq!(std::fs::read(file).unwrap(), b"kept");
}

/// Anything that exists is kept.
#[cfg(unix)]
#[test]
fn other_folders_are_kept() {
    use std::process::Command;
    let folder = Folder::empty();
    let here = folder.path();
    std::fs::create_dir(here.join("empty")).unwrap();
    std::os::unix::fs::symlink("nowhere", here.join("link")).unwrap();
    let program = env!("CARGO_BIN_EXE_flashtile");
    let before = folder.names();
    for (to, why) in [
        ("empty", "empty: exists, expected a new folder"),
        ("link", "link: exists, expected a new folder"),
        (".", ".: exists, expected a new folder"),
        ("absent/..", "absent/..: names no folder"),
    ] {
        let args = ["kernels", "export", to, "merge", "--target", "metal"];
        let output = Command::new(program).args(args).current_dir(here).output().unwrap();
        assert_refused(&output, why, to);
        assert_eq!(folder.names(), before, "{to}");
    }
    // A write that fails in the middle leaves nothing.
    let limited =
        format!("ulimit -f 20; exec '{program}' kernels export limited merge decode --target metal");
    let output = Command::new("sh").args(["-c", &limited]).current_dir(here).output().unwrap();
    assert_refused(&output, "limited: cannot be written: File too large", "ulimit");
    assert_eq!(folder.names(), before);
}
