//! Bad input: exit status 2, one line, no file.

use crate::files::{
    Folder, Tensor, Tensors, assert_refused, flashtile, qkv, stderr, stdout, threads, write, write_raw,
};
use safetensors::tensor::Dtype;

/// Two sequences of 5 queries and 7 keys, 4 query heads, 2 key/value heads.
fn good() -> Tensors {
    qkv(Dtype::F32, &[2, 4, 5, 8], &[2, 2, 7, 8], &[2, 2, 7, 6])
}

fn packed() -> Tensors {
    let mut tensors = qkv(Dtype::F32, &[5, 4, 8], &[7, 2, 8], &[7, 2, 8]);
    tensors.insert("cu_seqlens_q".into(), Tensor::i64(&[0, 2, 5]));
    tensors.insert("cu_seqlens_k".into(), Tensor::i64(&[0, 3, 7]));
    tensors
}

#[test]
fn tensors_that_do_not_fit() {
    let f32 = |shape: &[usize]| Tensor::random(Dtype::F32, shape, 9);
    let cases: Vec<(&str, Tensor, &str)> = vec![
        ("q", f32(&[2, 4, 5]), "tensor q has shape [2, 4, 5], expected [batch, heads, rows, dim]"),
        ("k", f32(&[2, 2, 7, 9]), "tensor k has shape [2, 2, 7, 9], expected [2, 2, 7, 8] to fit q"),
        ("k", f32(&[3, 2, 7, 8]), "tensor k has shape [3, 2, 7, 8], expected [2, 2, 7, 8]"),
        ("v", f32(&[2, 2, 6, 6]), "tensor v has shape [2, 2, 6, 6], expected [2, 2, 7, 6] to fit k"),
        ("v", f32(&[2, 2, 7, 0]), "value_dim 0"),
        ("v", f32(&[2, 2, 7, 513]), "value_dim 513"),
        ("q", f32(&[2, 3, 5, 8]), "q_heads 3 is not a positive multiple of kv_heads 2"),
        ("k", Tensor::random(Dtype::F16, &[2, 2, 7, 8], 1), "tensor k is f16, expected f32 as q"),
        ("q", Tensor { dtype: Dtype::F64, shape: vec![0, 4, 5, 8], bytes: vec![] }, "tensor q is F64"),
        ("mask", f32(&[7]), "tensor mask has shape [7], expected [queries, keys], [batch, queries, keys]"),
        ("mask", f32(&[5, 8]), "mask has shape [1, 1, 5, 8], expected [2, 4, 5, 7] with any axis 1"),
        ("mask", f32(&[2, 4, 5, 6]), "mask has shape [2, 4, 5, 6], expected [2, 4, 5, 7] with any axis 1"),
        ("mask", f32(&[2, 2, 5, 7]), "mask has shape [2, 2, 5, 7]"),
        (
            "mask",
            Tensor { dtype: Dtype::I64, shape: vec![1, 1, 1, 1], bytes: vec![0; 8] },
            "tensor mask is I64",
        ),
        ("alibi_slopes", f32(&[3]), "alibi_slopes"),
        ("alibi_slopes", f32(&[4, 1]), "tensor alibi_slopes has shape [4, 1], expected one axis"),
        ("sinks", f32(&[2]), "sinks has 2 elements, expected 4"),
        ("sinks", Tensor::random(Dtype::F16, &[4], 1), "tensor sinks is F16, expected F32"),
        ("kv_lens", Tensor::i64(&[7, -1]), "kv_lens[1] is -1, expected 0 or more"),
        ("kv_lens", Tensor::i64(&[7, i64::MIN]), "kv_lens[1]"),
        ("kv_lens", Tensor::i32(&[7, -1]), "kv_lens[1] is -1, expected 0 or more"),
        ("kv_lens", Tensor::i64(&[8, 7]), "kv_lens[0] is 8, expected at most the 7 rows"),
        ("kv_lens", Tensor::i64(&[7]), "kv_lens has 1 entries"),
        ("kv_lens", f32(&[2]), "tensor kv_lens is F32, expected I64 or I32"),
        (
            "cu_seqlens_q",
            Tensor::i64(&[0, 2, 5]),
            "tensor q has shape [2, 4, 5, 8], expected [total, heads, dim]",
        ),
        ("attn_bias", f32(&[1]), "tensor attn_bias is not known, did you mean mask?"),
        ("alibi", f32(&[4]), "did you mean alibi_slopes?"),
        ("sink", f32(&[4]), "did you mean sinks?"),
        ("kv_len", Tensor::i64(&[7, 7]), "did you mean kv_lens?"),
        ("cu_seqlens", Tensor::i64(&[0, 5]), "did you mean cu_seqlens_q or cu_seqlens_k?"),
    ];
    for (name, tensor, why) in cases {
        let mut tensors = good();
        tensors.insert(name.into(), tensor);
        Folder::with(&tensors).refuse(&["--q-offset", "bottom-right"], why);
    }
}

#[test]
fn missing_tensors() {
    for name in ["q", "k", "v"] {
        let mut tensors = good();
        tensors.remove(name);
        Folder::with(&tensors).refuse(&[], &format!("tensor {name} is missing"));
    }
    for name in ["cu_seqlens_q", "cu_seqlens_k"] {
        let mut tensors = packed();
        tensors.remove(name);
        Folder::with(&tensors).refuse(&[], &format!("tensor {name} is missing"));
    }
}

#[test]
fn cumulative_lengths() {
    let cases: [(&str, &[i64], &str); 7] = [
        ("cu_seqlens_q", &[0, 4, 3, 5], "cu_seqlens"),
        ("cu_seqlens_k", &[0, 8, 7], "cu_seqlens_k[2] is 7 after 8, expected at least 8"),
        ("cu_seqlens_k", &[0, 3, 6], "cu_seqlens_k ends at 6, expected the 7 rows"),
        ("cu_seqlens_q", &[1, 2, 5], "cu_seqlens_q starts at 1, expected 0"),
        ("cu_seqlens_q", &[], "cu_seqlens"),
        ("cu_seqlens_q", &[0, -2, 5], "cu_seqlens_q[1] is -2, expected 0 or more"),
        ("cu_seqlens_q", &[0, 5], "cu_seqlens_q has 2 entries and cu_seqlens_k has 3"),
    ];
    for (name, lengths, why) in cases {
        let mut tensors = packed();
        tensors.insert(name.into(), Tensor::i64(lengths));
        Folder::with(&tensors).refuse(&[], why);
    }
    let mut both = packed();
    both.insert("kv_lens".into(), Tensor::i64(&[7]));
    Folder::with(&both).refuse(&[], "kv_lens and cu_seqlens");
    for layout in ["bhsd", "bshd"] {
        Folder::with(&packed()).refuse(&["--layout", layout], "packed tensors [total, heads, dim]");
    }
}

#[test]
fn options() {
    let folder = Folder::with(&good());
    let available = threads();
    let (too_many, range) = ((available + 1).to_string(), format!("1 to {available}, the threads"));
    let cases: &[(&[&str], &str)] = &[
        (&["--scale", "nan"], "scale NaN is not finite"),
        (&["--scale", "1e99"], "scale inf is not finite"),
        (&["--scale", "x"], "--scale"),
        (&["--softcap", "0"], "softcap 0 is not a positive"),
        (&["--softcap", "-3"], "softcap -3"),
        (&["--causal"], "causal with q_len 5 and kv_len 7 needs q_offset"),
        (&["--window", "3"], "needs q_offset"),
        (&["--window", "3;4", "--q-offset", "0"], "expected LEFT or LEFT,RIGHT"),
        (&["--window", "-2"], "--window"),
        (&["--q-offset", "middle"], "expected top-left, bottom-right or a whole number"),
        (&["--q-offset", "9223372036854775807"], "q_offset 9223372036854775807"),
        (&["--q-offset", "-9223372036854775808"], "q_offset -9223372036854775808"),
        (&["--dtype", "f64"], "expected f32, f16 or bf16"),
        (&["--layout", "sbhd"], "bhsd, bshd"),
        (&["--backend", "tpu"], "reference"),
        (&["--backend", "cuda", "--threads", "1"], "--threads: does not apply to the cuda backend"),
        (&["--backend", "cuda"], "no NVIDIA driver on this machine: tried libcuda.so"),
        (&["--backend", "cuda:1"], "no NVIDIA driver on this machine: tried libcuda.so"),
        (&["--backend", "cuda:x"], "expected cuda:N, where N is the number of a device, counted from 0"),
        (&["--backend", "cuda:1", "--isa", "avx2"], "--isa: does not apply to the cuda backend"),
        (
            &["--kernels", "portable"],
            "--kernels: applies to the cuda backend, and auto is the cpu: no NVIDIA driver",
        ),
        #[cfg(not(target_vendor = "apple"))]
        (&["--backend", "metal"], "--backend: metal needs a system of Apple's, this is "),
        (&["--backend", "metal", "--isa", "avx2"], "--isa: does not apply to the metal backend"),
        (&["--backend", "metal", "--kernels", "native"], "--kernels: does not apply to the metal backend"),
        (&["--backend", "reference", "--threads", "2"], "--threads: does not apply to the reference backend"),
        (&["--backend", "reference", "--splits", "2"], "--splits"),
        (&["--k-codec", "tq44"], "tq44 is not a codec"),
        (&["--center"], "--center-keys: keys are stored as f32"),
        (&["--grad"], "tensor d_out is missing, expected the gradient of out, f32 [2, 4, 5, 6]"),
        (&["--splits", "0"], "expected a whole number, 1 or more"),
        (&["--splits", "9"], "1 to 1: a split holds at least one block of 256 keys"),
        (&["--threads", "0"], &range),
        (&["--threads", &too_many], &range),
        (&["--threads", "99999999999"], &range),
        (&["--isa", "sse2"], "expected one of portable, avx2, avx512"),
        (&["--layout", "bshd"], "q_heads 5 is not a positive multiple of kv_heads 7"),
        (&["--colour"], "unexpected argument"),
        (&["--k-codec", "it8n"], "it8n is not a codec, expected int8, fp8, "),
        (&["--dtype"], "value is required"),
        (&["--causal", "--causal"], "cannot be used multiple times"),
        (&["one\n\ntoo many"], "unexpected argument"),
    ];
    for (options, why) in cases {
        folder.refuse(options, why);
    }
}

#[test]
fn layouts_that_were_not_meant() {
    let bshd = qkv(Dtype::F32, &[1, 50, 4, 8], &[1, 300, 2, 8], &[1, 300, 2, 8]);
    let why = "q_heads 50 is not a positive multiple of kv_heads 300 (is the file --layout bshd?)";
    Folder::with(&bshd).refuse(&[], why);
    let bhsd = qkv(Dtype::F32, &[1, 4, 50, 8], &[1, 2, 300, 8], &[1, 2, 300, 8]);
    Folder::with(&bhsd).refuse(&["--layout", "bshd"], "(is the file --layout bhsd?)");
    let neither = qkv(Dtype::F32, &[1, 3, 50, 8], &[1, 2, 300, 8], &[1, 2, 300, 8]);
    Folder::with(&neither).refuse(&[], "multiple of kv_heads 2\n");
}

#[test]
fn strict_reading() {
    let mut tensors = good();
    Folder::with(&tensors).run(&["--strict"]);
    tensors.insert("notes".into(), Tensor::f32(&[1], &[0.0]));
    let folder = Folder::with(&tensors);
    folder.refuse(&["--strict"], "unknown tensors: notes, expected names among q, k, v");
    let input = folder.input.to_str().unwrap();
    assert_refused(&flashtile(["plan", input, "--strict"]), "unknown tensors: notes", "plan");
    assert_refused(&flashtile(["plan", "--strict"]), "--strict: does not apply", "plan of a shape");
}

/// Headers that are no flat list of tensors of known dtypes.
#[test]
fn headers_name_the_tensor_that_is_wrong() {
    let folder = Folder::empty();
    let (q, k, v) = (tensor_at("F32", 0), tensor_at("F32", 32), tensor_at("F32", 64));
    let header = |rest: &str| format!(r#"{{"__metadata__":{{"a":"b"}},"q":{q},"k":{k},"v":{v}{rest}}}"#);
    let refuse = |rest: &str, data: usize, why: &str| {
        write_raw(&folder.input, &header(rest), &vec![0; data]);
        folder.refuse(&[], why);
    };
    let nested = format!(r#","layer":{{"k":{k}}}"#);
    let why = "header: layer holds tensors, such as k; names are not nested, expected one such as layer.k\n";
    refuse(&nested, 96, why);
    refuse(r#","x":{"dtype":"F32","shape":[1]}"#, 96, "header: tensor x: missing field `data_offsets`\n");
    refuse(r#","x":3"#, 96, "header: tensor x: invalid type: integer `3`");

    // Nothing needs the tensor, so that its dtype does not matter.
    let other = r#","notes":{"dtype":"U3","shape":[8],"data_offsets":[96,99]}"#;
    write_raw(&folder.input, &header(other), &[0; 99]);
    let output = folder.try_run(&[]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("note: tensors not read: notes ("), "{}", stderr(&output));
    folder.refuse(&["--strict"], "unknown tensors: notes");
    let mask = other.replace("notes", "mask");
    refuse(&mask, 99, "tensor mask is U3, which is not known, expected F32, F16 or BF16\n");
    refuse(other, 98, "98 bytes of data, the header expects 99\n");
}

/// A tensor of 8 elements of 4 bytes in the header of a file.
fn tensor_at(dtype: &str, start: usize) -> String {
    let end = start + 32;
    format!(r#"{{"dtype":"{dtype}","shape":[1,1,1,8],"data_offsets":[{start},{end}]}}"#)
}

#[test]
fn padded_causal_problems_must_say_where_queries_sit() {
    let mut tensors = qkv(Dtype::F32, &[1, 1, 4, 8], &[1, 1, 4, 8], &[1, 1, 4, 8]);
    tensors.insert("kv_lens".into(), Tensor::i64(&[3]));
    Folder::with(&tensors).refuse(&["--causal"], "causal with kv_lens needs q_offset");
}

#[test]
fn output_paths() {
    let folder = Folder::with(&good());
    let before = folder.names();
    let cases = [
        (folder.path().join("missing/out.safetensors"), "cannot be written: No such file"),
        (folder.path().to_owned(), "exists and is not a regular file"),
        (folder.input.join("out"), "cannot be written"),
        ("".into(), "output"),
        ("..".into(), "exists and is not a regular file"),
        ("-".into(), "-: standard output does not take files, expected a path (./- for"),
        (folder.input.clone(), "is the same file as"),
        (folder.path().join(".").join("in.safetensors"), "is the same file as"),
    ];
    for (path, why) in cases {
        let output = flashtile(["run".as_ref(), folder.input.as_os_str(), "-o".as_ref(), path.as_os_str()]);
        assert_refused(&output, why, &path.display().to_string());
        assert_eq!(folder.names(), before);
    }
}

/// Links are followed or refused, never replaced.
#[test]
#[cfg(unix)]
fn output_links() {
    use std::os::unix::fs::symlink;
    let mut folder = Folder::with(&good());
    let inside = |name: &str| folder.path().join(name);
    let hard = inside("hard");
    std::fs::hard_link(&folder.input, &hard).unwrap();
    let (inner, links) =
        (inside("inner"), ["device", "pipe", "loop", "nowhere", "same", "chain"].map(inside));
    std::fs::create_dir(&inner).unwrap();
    let [device, pipe, ring, nowhere, same, chain] = &links;
    symlink("/dev/null", device).unwrap();
    symlink("/proc/self/fd/1", pipe).unwrap();
    symlink("loop", ring).unwrap();
    symlink("missing/out", nowhere).unwrap();
    symlink("in.safetensors", same).unwrap();
    symlink("inner/link", chain).unwrap();
    symlink("../made", inner.join("link")).unwrap();
    let cases = [
        (device, "exists and is not a regular file"),
        (pipe, "exists and is not a regular file"),
        (ring, "cannot be written"),
        (nowhere, "cannot be written: No such file"),
        (same, "is the same file as"),
        (&hard, "is the same file as"),
    ];
    let (chain, made) = (chain.clone(), inside("made"));
    for (path, why) in cases {
        folder.output = path.clone();
        folder.refuse(&[], why);
    }
    for path in &links {
        assert!(path.is_symlink(), "{}", path.display());
    }
    folder.output = chain;
    folder.run(&[]);
    assert!(folder.output.is_symlink() && !made.is_symlink() && made.is_file());
    assert_eq!(std::fs::read_link(inner.join("link")).unwrap(), std::path::Path::new("../made"));
}

#[test]
fn input_paths() {
    let folder = Folder::empty();
    folder.refuse(&[], "in.safetensors: No such file");
    std::fs::create_dir(&folder.input).unwrap();
    folder.refuse(&[], "not a regular file");
}

/// Headers that do not match the data after them.
#[test]
fn hostile_headers() {
    let tensor = |shape: &str, offsets: &str| {
        format!(r#"{{"q":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let mut headers = vec![
        String::new(),
        "{".into(),
        "[]".into(),
        "null".into(),
        "\u{fffd}".into(),
        "[".repeat(100_000),
        r#"{"q":1}"#.into(),
        r#"{"q":{"dtype":"F99","shape":[4],"data_offsets":[0,17]}}"#.into(),
        r#"{"__metadata__":{"a":1}}"#.into(),
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#.into(),
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#.into(),
        tensor("[4]", "[0,17]"),
        tensor("[4]", "[0,12]"),
        tensor("[4]", "[16,0]"),
        tensor("[4]", "[-1,15]"),
        tensor("[4]", "[0.0,16.0]"),
        tensor("[4]", "[0]"),
        tensor("[-4]", "[0,16]"),
        tensor("[1000000]", "[0,4000000]"),
        tensor("[9223372036854775807,9223372036854775807]", "[0,16]"),
        tensor("[18446744073709551615]", "[0,18446744073709551612]"),
        tensor("[4294967296,4294967296,0]", "[0,0]"),
        tensor("[99999999999999999999]", "[0,16]"),
    ];
    // Offsets that cover the whole address space and, modulo its size, end with the file.
    let eighth = 1u64 << 61;
    let mut wrapping = Vec::new();
    let mut start = 0u64;
    for index in 0..8 {
        let end = if index == 7 { u64::MAX - 7 } else { start + (eighth - 8) };
        let length = end - start;
        wrapping.push(format!(
            r#""t{index}":{{"dtype":"U8","shape":[{length}],"data_offsets":[{start},{end}]}}"#
        ));
        start = end;
    }
    headers.push(format!("{{{}}}", wrapping.join(",")));
    let folder = Folder::empty();
    for header in headers {
        write_raw(&folder.input, &header, &[0; 16]);
        folder.refuse(&[], "not a safetensors file");
    }
}

#[test]
fn damaged_files() {
    let folder = Folder::with(&good());
    let whole = std::fs::read(&folder.input).unwrap();
    let cuts = [0, 1, 7, 8, 9, 100, whole.len() / 2, whole.len() - 1];
    for cut in cuts {
        std::fs::write(&folder.input, &whole[..cut]).unwrap();
        folder.refuse(&[], "not a safetensors file");
    }
    std::fs::write(&folder.input, "# Notes on attention\n\nNo tensors.\n").unwrap();
    folder.refuse(&[], "not a safetensors file: begins with text (\"# Notes \")");
    for length in [u64::MAX, u64::MAX - 7, 1 << 62, whole.len() as u64, 100_000_001, 0] {
        let mut damaged = whole.clone();
        damaged[..8].copy_from_slice(&length.to_le_bytes());
        std::fs::write(&folder.input, &damaged).unwrap();
        folder.refuse(&[], "not a safetensors file");
    }
    let mut longer = whole.clone();
    longer.push(0);
    std::fs::write(&folder.input, &longer).unwrap();
    folder.refuse(&[], "bytes of data, the header expects");
}

/// Changes a good header one byte at a time. Every result is a success or a refusal.
#[test]
fn changed_bytes() {
    let folder = Folder::with(&good());
    let whole = std::fs::read(&folder.input).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for at in 0..8 + header {
        for byte in [b'9', b'"'] {
            if whole[at] == byte {
                continue;
            }
            let mut damaged = whole.clone();
            damaged[at] = byte;
            std::fs::write(&folder.input, &damaged).unwrap();
            let output = folder.try_run(&["--backend", "reference"]);
            if output.status.success() {
                std::fs::remove_file(&folder.output).unwrap();
            } else {
                assert_refused(&output, "", &format!("byte {at}"));
            }
            assert_eq!(folder.names(), ["in.safetensors"]);
        }
    }
}

#[test]
fn names_that_are_listed_twice() {
    let folder = Folder::empty();
    let tensor = |name: &str, shape: &str| {
        format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[0,16]}}"#)
    };
    for other in ["q", "\\u0071"] {
        write_raw(
            &folder.input,
            &format!("{{{},{}}}", tensor("q", "[1,1,1,4]"), tensor(other, "[1,1,2,2]")),
            &[0; 16],
        );
        folder.refuse(&[], "not a safetensors file: header: tensor q is listed twice");
    }
}

#[test]
fn many_empty_sequences() {
    let folder = Folder::empty();
    let tensor =
        |name: &str| format!(r#""{name}":{{"dtype":"F32","shape":[2147483647,1,0,1],"data_offsets":[0,0]}}"#);
    write_raw(&folder.input, &format!("{{{},{},{}}}", tensor("q"), tensor("k"), tensor("v")), &[]);
    folder.refuse(&[], "2147483647 batch entries without rows");
}

#[test]
fn names_with_line_breaks_stay_on_one_line() {
    let folder = Folder::empty();
    let header = r#"{"a\nb":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}"#;
    write_raw(&folder.input, header, &[0; 8]);
    folder.refuse(&[], "not a safetensors file");
}

#[test]
fn names_cannot_disturb_a_terminal() {
    let folder = Folder::empty();
    let other = r#"{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[0,4]}"#;
    let at = |start: usize| other.replace("[0,4]", &format!("[{start},{}]", start + 4));
    let name = "x\\u001b[2J\u{202e}\u{2066}";
    let header = format!(
        r#"{{"{name}.k":{},"{name}.v":{},"{name}":{},"q":{},"k":{},"v":{}}}"#,
        at(0),
        at(4),
        at(8),
        at(12),
        at(16),
        at(20)
    );
    write_raw(&folder.input, &header, &[0; 24]);
    let input = folder.input.to_str().unwrap();
    let output = folder.output.to_str().unwrap();
    for args in [
        &["run", input, "-o", output][..],
        &["plan", input],
        &["kv", input],
        &["kv", input, "--json"],
        &["run", input, "-o", output, "--prefix", "nothing"],
    ] {
        let shown = flashtile(args);
        let text = format!("{}{}", stdout(&shown), stderr(&shown));
        assert!(text.contains("x\\u001b[2J\\u202e\\u2066"), "{args:?}: {text:?}");
        assert!(!text.contains(['\u{1b}', '\u{202e}', '\u{2066}']), "{args:?}: {text:?}");
    }
}

#[test]
fn a_refused_run_leaves_an_existing_output_alone() {
    let folder = Folder::with(&good());
    std::fs::write(&folder.output, b"kept").unwrap();
    folder.refuse(&["--scale", "nan"], "scale");
    assert_eq!(std::fs::read(&folder.output).unwrap(), b"kept");
}

#[test]
fn other_commands() {
    let folder = Folder::with(&good());
    let input = folder.input.to_str().unwrap();
    let missing = folder.path().join("missing/file.svg");
    let missing = missing.to_str().unwrap();
    let peers = folder.path().join("peers.jsonl");
    std::fs::write(&peers, "{\"peer\":\"x\"}\n").unwrap();
    let peers = peers.to_str().unwrap();
    let fresh = folder.path().join("fresh.svg");
    let fresh = fresh.to_str().unwrap();
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["jump"], "unrecognized subcommand"),
        (vec!["run"], "missing arguments: --output <OUT>, <IN>; see --help"),
        (vec!["pln"], "did you mean 'plan'?"),
        (vec!["plan", "--qlen", "4"], "did you mean '--q-len'?"),
        (vec!["plan", "--q-len", "x"], "--q-len"),
        (vec!["plan", "--heads", "6", "--kv-heads", "4"], "q_heads 6"),
        (vec!["plan", "--heads", "0"], "q_heads 0"),
        (vec!["plan", "--head-dim", "1000"], "head_dim 1000 is outside 1..=512"),
        (vec!["plan", "--q-len", "5", "--kv-len", "7", "--causal"], "needs q_offset"),
        (vec!["plan", "--device", "abacus"], "abacus is not known, expected "),
        (vec!["plan", "--device", "h20"], "h20 is not known, expected h200, "),
        (
            vec!["plan", "--cached", "5:3"],
            "5 queries in 3 tokens, expected at most as many queries as tokens",
        ),
        (vec!["plan", "--cached", "1:8,2:1x3"], "2 queries in 1 token, expected"),
        (vec!["plan", "--device", "h100", "--backend", "cuda"], "cannot be used with"),
        (
            vec!["plan", "--backend", "reference", "--splits", "2"],
            "--splits: 2 splits asked for, expected 1 to 1",
        ),
        #[cfg(not(target_vendor = "apple"))]
        (vec!["plan", "--backend", "metal"], "--backend: metal needs a system of Apple's"),
        (vec!["plan", "--backend", "metal", "--threads", "1"], "metal has neither --isa nor --threads"),
        (vec!["plan", "--device", "m3-max", "--kernels", "native"], "on Metal all kernels are portable ones"),
        #[cfg(not(target_vendor = "apple"))]
        (vec!["check", "--backend", "metal", "--filter", "gqa"], "metal needs a system of Apple's"),
        #[cfg(not(target_vendor = "apple"))]
        (vec!["bench", "decode", "--backend", "metal"], "metal needs a system of Apple's"),
        (vec!["plan", "--backend", "cuda:1"], "no NVIDIA driver on this machine"),
        (vec!["plan", "--backend", "cuda:1", "--threads", "1"], "cuda has neither --isa nor --threads"),
        (vec!["check", "--backend", "cuda:1", "--filter", "gqa"], "no NVIDIA driver on this machine"),
        (vec!["bench", "decode", "--backend", "cuda:1"], "no NVIDIA driver on this machine"),
        (vec!["bench", "--backend", "cuda:-1"], "expected cuda:N, where N is the number of a device"),
        (
            vec!["plan", "--kernels", "native", "--backend", "cpu"],
            "--kernels: applies to the cuda backend only",
        ),
        (vec!["plan", "--prefix", "layer.3"], "--prefix: does not apply to a shape, expected a file"),
        (vec!["plan", input, "--prefix", "layer.3"], "--prefix layer.3: "),
        (vec!["plan", "--device", "h100", "--splits", "65"], "65 splits asked for, expected 1 to 64"),
        (vec!["check", "--backend", "cuda", "--isa", "avx2"], "--isa: applies to the cpu backend only"),
        (vec!["bench", "--tile", "1,1,1,16,2,1,1"], "--tile: applies to the cuda backend only"),
        (vec!["bench", "--tile", "wgmma:2,128,2,1"], "--tile: applies to the cuda backend only"),
        (vec!["bench", "--tile", "wgmma:2,128"], "expected four whole numbers after wgmma"),
        (vec!["bench", "--backend", "reference"], "other backends are not measured"),
        (vec!["plan", "--device", "avx2-8core", "--threads", "2"], "cannot be used with"),
        (
            vec!["plan", "--sequence", "1"],
            "1 is out of range, there is a total of 1 sequence, counted from 0",
        ),
        (vec!["plan", "--kv-lens", "1,2"], "kv_lens has 2 entries"),
        (vec!["plan", "--cached", "5"], "expected QUERIES:LENGTH"),
        (vec!["plan", "--cached", "1:8x4", "--q-len", "3"], "cannot be used with"),
        (vec!["plan", "--cached", "0:1x99999999999"], "99999999999 sequences, expected at most 1048576"),
        (vec!["plan", "--shared", "5"], "--cached"),
        (
            vec!["plan", "--cached", "1:8,1:4", "--shared", "5"],
            "--shared 5: prefixes[0] has 5 tokens, sequence 1 has 4",
        ),
        (vec!["plan", "--batch", "99999999999999999999"], "--batch"),
        (vec!["plan", "--q-len", "2147483647", "--heads", "4"], "tasks, expected at most 4194304"),
        (
            vec!["plan", "--q-len", "1", "--kv-len", "2147483647", "--splits", "8388608"],
            "tasks, expected at most 4194304",
        ),
        (vec!["plan", "--batch", "2147483647", "--q-len", "0"], "--batch: 2147483647"),
        (vec!["plan", "--layout", "bhsd"], "--layout"),
        (vec!["plan", "--svg", missing], "cannot be written"),
        (vec!["plan", "--svg", "-"], "standard output does not take files"),
        (vec!["plan", input, "--svg", input], "--svg writes SVG"),
        (vec!["plan", "--splits", "9"], "expected 1 to 8: a split holds at least one block of 256 keys"),
        (vec!["plan", input, "--batch", "2"], "cannot be used with"),
        (vec!["plan", input, "--scale", "inf"], "scale inf"),
        (vec!["plan", missing], "No such file"),
        (vec!["info", "--threads", "0"], "--threads"),
        (vec!["check", "--filter", "no such case"], "no case has a name with"),
        (vec!["check", "--filter", "gqaa"], "no case has a name with gqaa, expected gqa"),
        (vec!["check", "--filter", "gqa,no such case"], "no case has a name with no such case"),
        (vec!["check", "--seeds", "5..5"], "expected FIRST..END"),
        (vec!["bench", "sideways"], "prefill, decode, backward, all"),
        (vec!["bench", "--dtype", "f32,f8"], "expected f32, f16 or bf16"),
        (vec!["bench", "--min-time", "nan"], "expected seconds"),
        (vec!["bench", "--seq", "0"], "expected a whole number"),
        (vec!["bench", "--head-dim", "513"], "head_dim 513"),
        (vec!["bench", "decode", "--seq", "9..3"], "or LOW..HIGH"),
        (vec!["bench", "prefill", "--seq", "3..9"], "--seq: 3..9 needs a --batch of 2 or more"),
        (
            vec!["bench", "decode", "--cache", "paged", "--seq", "3..9"],
            "--seq: 3..9 needs a --batch of 2 or more",
        ),
        (
            vec!["bench", "decode", "--seq", "3..9"],
            "--seq: 3..9 needs a --cache, whose sequences may differ in length",
        ),
        (vec!["bench", "--cache", "paged"], "--cache: needs the group decode"),
        (
            vec!["bench", "decode", "--cache", "paged", "--codec", "f16+mlx-tq8", "--head-dim", "128"],
            "v is mlx-tq8 with 128 elements a row, expected 256 or 512",
        ),
        (
            vec!["bench", "decode", "--cache", "paged", "--codec", "mlx-tq7"],
            "mlx-tq7 is not a codec, expected",
        ),
        (vec!["bench", "decode", "--cache", "heap"], "contiguous, paged, ring"),
        (vec!["bench", "decode", "--cache", "ring", "--shared", "9"], "--shared: needs --cache paged"),
        (
            vec!["bench", "decode", "--cache", "paged", "--shared", "9"],
            "--shared: 9 is less than a page of 16 tokens",
        ),
        (
            vec!["bench", "decode", "--cache", "paged", "--shared", "9999"],
            "--shared 9999: prefixes[0] has 9984",
        ),
        (vec!["bench", "decode", "--cache", "dense,ring", "--page", "8"], "--page: needs --cache paged"),
        (vec!["bench", "--vs", peers], "peers.jsonl line 1: expected"),
        (vec!["bench", "--vs", missing], "No such file"),
        (vec!["bench", "--json-lines", missing], "cannot be written"),
        (vec!["bench", "--svg", missing], "cannot be written"),
        (vec!["bench", "--svg", fresh, "--json-lines", fresh], "is the same file as"),
    ];
    for (args, why) in cases {
        assert_refused(&flashtile(&args), why, &format!("{args:?}"));
    }
    for (args, names) in [(&[][..], "run, check, plan, "), (&["kernels"], "list, print")] {
        let output = flashtile(args);
        let shown = stderr(&output);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{shown}");
        assert!(shown.contains("\nUsage: flashtile ") && shown.contains("\nExample"), "{shown}");
        let last = shown.lines().last().unwrap();
        assert!(last.starts_with(&format!("flashtile: a subcommand is needed, expected {names}")), "{last}");
    }
    write(&folder.input, &packed());
    assert_refused(
        &flashtile(["plan", input, "--sequence", "2"]),
        "2 is out of range, there is a total of 2 sequences",
        "packed plan",
    );
}
