//! The files of `examples/data`: some have answers of other implementations, one is generated here.

use crate::files::{Folder, Tensors, max_abs, nrmse, qkv, read, stderr, stdout, write};
use safetensors::tensor::Dtype;
use serde_json::Value;
use std::path::PathBuf;

pub(crate) fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/data").join(name)
}

/// Options for a line of the manifest.
fn options(case: &Value) -> Vec<String> {
    let number = |name: &str| case[name].as_f64();
    let mut options = Vec::new();
    if case["causal"] == true {
        options.push("--causal".to_owned());
    }
    for (name, option) in [("scale", "--scale"), ("softcap", "--softcap")] {
        options.extend(number(name).map(|x| format!("{option}={x}")));
    }
    let side = |name: &str| number(name).map_or(-1, |x| x as i64);
    let (left, right) = (side("window_left"), side("window_right"));
    if (left, right) != (-1, -1) {
        options.push(format!("--window={left},{right}"));
    }
    match &case["q_offset"] {
        Value::String(_) => options.push("--q-offset=bottom-right".to_owned()),
        offset => options.push(format!("--q-offset={offset}")),
    }
    options
}

#[test]
fn onnx_attention() {
    let manifest = std::fs::read_to_string(data("onnx_attention/manifest.jsonl")).unwrap();
    let mut count = 0;
    for line in manifest.lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let name = case["name"].as_str().unwrap();
        let mut folder = Folder::empty();
        folder.input = data(&format!("onnx_attention/{name}.safetensors"));
        let options = options(&case);
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let got = folder.run(&options);
        assert!(stdout(&folder.try_run(&options)).contains("\nanswer     matches out: "), "{name}");
        let want = &read(&folder.input)["out"];
        assert_eq!((got["out"].dtype, &got["out"].shape), (want.dtype, &want.shape), "{name}");
        let limit = match want.dtype {
            Dtype::F16 => 4e-3,
            Dtype::BF16 => 2e-2,
            _ => 1e-5,
        };
        let error = max_abs(&got["out"].values(), &want.values());
        assert!(error <= limit, "{name}: {error}");
        count += 1;
    }
    assert_eq!(count, 62);
}

#[test]
fn minilm_attention() {
    let mut folder = Folder::empty();
    folder.input = data("minilm_attention.safetensors");
    let got = folder.run(&[]);
    let mut tensors = read(&folder.input);
    let error = nrmse(&got["out"].values(), &tensors["out"].values());
    assert!(error <= 2e-6, "{error}");
    let error = max_abs(&got["lse"].values(), &tensors["lse"].values());
    assert!(error <= 1e-5, "{error}");
    let bytes = std::fs::read(&folder.output).unwrap();

    let lengths: Vec<usize> = tensors["kv_lens"]
        .bytes
        .chunks(8)
        .map(|x| i64::from_le_bytes(x.try_into().unwrap()) as usize)
        .collect();
    for name in ["k", "v"] {
        let tensor = tensors.get_mut(name).unwrap();
        let [_, heads, rows, dim] = tensor.shape[..] else { panic!("rank 4") };
        for (index, row) in tensor.bytes.chunks_mut(dim * 4).enumerate() {
            if index % rows >= lengths[index / rows / heads] {
                row.copy_from_slice(&f32::NAN.to_le_bytes().repeat(dim));
            }
        }
    }
    assert!(tensors["k"].values().iter().any(|x| x.is_nan()));
    folder.input = folder.path().join("poisoned.safetensors");
    write(&folder.input, &tensors);
    folder.run(&[]);
    assert!(std::fs::read(&folder.output).unwrap() == bytes, "padding was read");
}

/// The tensors of `small_f16.safetensors`: three queries over a cache with GQA, small enough for the simulator.
fn small() -> Tensors {
    qkv(Dtype::F16, &[1, 4, 3, 64], &[1, 2, 12, 64], &[1, 2, 12, 64])
}

#[test]
#[ignore = "writes examples/data/small_f16.safetensors"]
fn small_f16_is_written() {
    write(&data("small_f16.safetensors"), &small());
}

#[test]
fn small_f16() {
    let mut folder = Folder::empty();
    folder.input = data("small_f16.safetensors");
    assert!(read(&folder.input) == small(), "the file is not what is written");
    let run = |backend| folder.run(&["--causal", "--q-offset", "bottom-right", "--backend", backend]);
    let (got, want) = (run("cpu"), run("reference"));
    let error = nrmse(&got["out"].values(), &want["out"].values());
    assert!(error <= 1e-3, "{error}");
}

/// The words of a command, with quotes around words that have spaces.
fn words(line: &str) -> Vec<String> {
    let quoted = |(n, part): (usize, &str)| match n % 2 {
        0 => part.split_whitespace().map(str::to_owned).collect(),
        _ => vec![part.to_owned()],
    };
    line.split('"').enumerate().flat_map(quoted).collect()
}

/// The commands of a page that run this program, as its arguments.
fn commands(page: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for block in page.split("```sh\n").skip(1) {
        let block = block.split("```").next().unwrap().replace("\\\n", " ");
        for line in block.lines().map(|line| line.split(" #").next().unwrap()) {
            let own = line.strip_prefix("flashtile ");
            // Examples are programs of their own.
            let built = line.strip_prefix("cargo run").filter(|rest| !rest.contains("--manifest-path"));
            let built = built.and_then(|rest| rest.split_once(" -- "));
            found.extend(own.or(built.map(|(_, args)| args)).map(words));
        }
    }
    found
}

/// Removes the numbers from a picture, since they depend on the machine if something is measured.
fn without_numbers(picture: &str) -> String {
    picture.split(|c: char| c.is_ascii_digit() || ".-".contains(c)).collect()
}

#[test]
fn commands_of_the_documentation_run_and_draw_its_pictures() {
    let folder = Folder::empty();
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let (mut count, mut pictures) = (0, 0);
    for page in ["README.md", "docs/cli.md", "docs/gallery.md"] {
        for mut args in commands(&std::fs::read_to_string(root.join(page)).unwrap()) {
            if args.contains(&"simulator".to_owned()) && !cfg!(feature = "simulator") {
                continue;
            }
            // Standard output in a file, which later commands read by its name.
            let redirected = args.iter().position(|arg| arg == ">").map(|at| args.split_off(at)[1].clone());
            let mut drawn = None;
            for at in 1..args.len() {
                let made = folder.path().join(&args[at]);
                if made.is_file() {
                    args[at] = made.to_str().unwrap().to_owned();
                }
                if ["-o", "--svg"].contains(&args[at - 1].as_str()) {
                    let documented = root.join(&args[at]);
                    let path = folder.path().join(documented.file_name().unwrap());
                    args[at] = path.to_str().unwrap().to_owned();
                    if args[at - 1] == "--svg" {
                        drawn = Some([documented, path]);
                    }
                }
            }
            let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_flashtile"));
            let output = program.args(&args).current_dir(&root).output().unwrap();
            assert!(output.status.success(), "{page}: {args:?}: {}", stderr(&output));
            redirected.into_iter().for_each(|name| {
                std::fs::write(folder.path().join(name), &output.stdout).unwrap();
            });
            count += 1;
            if let Some(paths) = drawn {
                let [mut documented, mut drawn] = paths.map(|path| std::fs::read_to_string(path).unwrap());
                if args[0] == "kv" {
                    [documented, drawn] = [&documented, &drawn].map(|picture| without_numbers(picture));
                }
                assert!(
                    documented == drawn,
                    "{page}: {args:?} draws another picture than the one that is shown"
                );
                pictures += 1;
            }
        }
    }
    assert!(count >= 7 && pictures >= 6, "{count} commands and {pictures} pictures were found");
}
