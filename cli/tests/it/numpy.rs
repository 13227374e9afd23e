//! Arrays of numpy as input.

use crate::files::{Folder, Tensor, Tensors, assert_refused, flashtile, qkv, read, stderr};
use safetensors::tensor::Dtype;
use std::path::Path;

/// An `.npy` file, as numpy writes it.
fn npy(tensor: &Tensor) -> Vec<u8> {
    let descr = match tensor.dtype {
        Dtype::F32 => "<f4",
        Dtype::F16 => "<f2",
        Dtype::BOOL => "|b1",
        Dtype::I64 => "<i8",
        Dtype::I32 => "<i4",
        other => panic!("{other:?}"),
    };
    let axes: String = tensor.shape.iter().map(|n| format!("{n}, ")).collect();
    let header =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}\n", axes.trim_end());
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), &tensor.bytes]
        .concat()
}

/// An archive as `numpy.savez` writes it, or, compressed, `numpy.savez_compressed`: sizes of members also stand behind
/// the header beside the data, in an extra field.
fn npz(members: &[(String, Vec<u8>)], compressed: bool) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for (name, plain) in members {
        let (method, data) = match compressed {
            true => (8u16, miniz_oxide::deflate::compress_to_vec(plain, 6)),
            false => (0u16, plain.clone()),
        };
        let [crc, packed, size, at] =
            [crc32(plain), data.len() as u32, plain.len() as u32, bytes.len() as u32].map(u32::to_le_bytes);
        let (method, length) = (method.to_le_bytes(), (name.len() as u16).to_le_bytes());
        let both = [&[20, 0, 0, 0][..], &method, &[0; 4], &crc, &packed, &size, &length].concat();
        bytes.extend([b"PK\x03\x04", &both[..], &[20, 0], name.as_bytes(), &[1; 20], &data].concat());
        directory.extend([b"PK\x01\x02\x14\x03", &both[..], &[0; 12], &at, name.as_bytes()].concat());
    }
    let (count, size, start) =
        ((members.len() as u16).to_le_bytes(), (directory.len() as u32).to_le_bytes(), bytes.len() as u32);
    let end = [b"PK\x05\x06\0\0\0\0", &count[..], &count, &size, &start.to_le_bytes(), &[0; 2]].concat();
    [bytes, directory, end].concat()
}

fn members(tensors: &Tensors) -> Vec<(String, Vec<u8>)> {
    tensors.iter().map(|(name, tensor)| (format!("{name}.npy"), npy(tensor))).collect()
}

/// An array of strings, a dtype that attention does not use.
fn note() -> Vec<u8> {
    let header = "{'descr': '<U7', 'fortran_order': False, 'shape': (), }\n";
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), &[108; 28]].concat()
}

/// The checksum of archives, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

fn tensors() -> Tensors {
    let mut tensors = qkv(Dtype::F16, &[2, 4, 9, 16], &[2, 2, 30, 16], &[2, 2, 30, 24]);
    tensors.insert("kv_lens".into(), Tensor::i64(&[30, 7]));
    tensors.insert("mask".into(), Tensor::bool(&[1, 1, 9, 30], (0..270).map(|n| n % 3 != 0)));
    tensors
}

fn run(input: &Path, output: &Path) -> std::process::Output {
    flashtile([
        "run".as_ref(),
        input.as_os_str(),
        "-o".as_ref(),
        output.as_os_str(),
        "--splits".as_ref(),
        "1".as_ref(),
    ])
}

#[test]
fn arrays_give_the_answer_of_safetensors() {
    let folder = Folder::with(&tensors());
    let expected = folder.run(&["--splits", "1"]);
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("plain.npz"), npz(&members(&tensors()), false)).unwrap();
    std::fs::write(path("compressed.npz"), npz(&members(&tensors()), true)).unwrap();
    std::fs::create_dir(path("arrays")).unwrap();
    for (name, tensor) in &tensors() {
        std::fs::write(path("arrays").join(format!("{name}.npy")), npy(tensor)).unwrap();
    }
    std::fs::write(path("arrays").join("notes.txt"), "not an array").unwrap();
    for name in ["plain.npz", "compressed.npz", "arrays"] {
        let output = run(&path(name), &folder.output);
        assert!(output.status.success() && output.stderr.is_empty(), "{name}: {}", stderr(&output));
        assert!(read(&folder.output) == expected, "{name}");
    }
    // `kv` and `plan` read the same arrays.
    let compressed = path("compressed.npz");
    for command in ["kv", "plan"] {
        let [arrays, file] = [&compressed, &folder.input].map(|input| {
            let output = flashtile([command.as_ref(), input.as_os_str(), "--json".as_ref()]);
            assert!(output.status.success(), "{command}: {}", stderr(&output));
            output.stdout
        });
        assert!(arrays == file, "{command}");
    }
}

#[test]
fn arrays_that_are_not_read_are_refused() {
    let folder = Folder::empty();
    let path = |name: &str| folder.path().join(name);
    let refuse = |name: &str, why: &str| {
        let before = folder.names();
        assert_refused(&run(&path(name), &folder.output), why, name);
        assert_eq!(folder.names(), before, "{name}");
    };
    let q = npy(&tensors()["q"]);
    std::fs::write(path("q.npy"), &q).unwrap();
    refuse(
        "q.npy",
        "q.npy: an .npy file holds one array, expected an .npz archive (numpy.savez), or a folder",
    );
    std::fs::create_dir(path("empty")).unwrap();
    refuse(
        "empty",
        "empty: not a regular file, expected a safetensors file, an .npz archive, or a folder with q.npy",
    );
    std::fs::write(path("empty").join("q.npy"), b"no array").unwrap();
    refuse("empty", "empty: array q: not an .npy file");
    std::fs::write(path("empty").join("q.npy"), &q).unwrap();
    refuse("empty", "empty: tensor k is missing");

    let all = members(&tensors());
    let whole = npz(&all, false);
    let place = |of: &[u8], what: &[u8]| of.windows(what.len()).rposition(|window| window == what).unwrap();
    let changed = |of: &[u8], at: usize, to: &[u8]| {
        let mut bytes = of.to_vec();
        bytes[at..at + to.len()].copy_from_slice(to);
        bytes
    };
    let in_v = |from: &str, to: &str| {
        let mut all = all.clone();
        let v = &mut all.iter_mut().find(|(name, _)| name == "v.npy").unwrap().1;
        *v = changed(v, place(v, from.as_bytes()), to.as_bytes());
        npz(&all, true)
    };
    let packed = npz(&all, true);
    let (end, entry) = (place(&whole, b"PK\x05\x06"), place(&whole, b"PK\x01\x02"));
    let packed_entry = place(&packed, b"PK\x01\x02");
    let twice = npz(&[&all[..], &all[..1]].concat(), false);
    // The directory claims 16 MiB, which the compressed bytes neither hold nor could hold.
    let claimed = changed(&packed, packed_entry + 24, &(1u32 << 24).to_le_bytes());
    for (bytes, why) in [
        (changed(&whole, end + 16, &[255; 4]), "damaged archive: "),
        (changed(&whole, end + 10, &[9, 0]), "damaged archive: 5 members in its directory, expected 9"),
        (changed(&whole, entry + 20, &[255; 4]), "damaged archive: member v.npy: Unexpected end of file"),
        (changed(&whole, entry + 10, &[12, 0]), "array v: compression method 12"),
        (changed(&whole, entry + 8, &[1, 0]), "array v: it is encrypted"),
        (changed(&whole, entry + 42, &[1, 0, 0, 0]), "damaged archive: member v.npy: Invalid signature"),
        (changed(&whole, entry + 42, &[0; 4]), "damaged archive: member v.npy: k.npy beside its data"),
        (changed(&whole, end, b"    "), "damaged archive: "),
        (changed(&whole, entry + 46, b"q"), "damaged archive: member q.npy: v.npy beside its data"),
        (twice, "array k: it is listed twice"),
        (changed(&whole, entry + 16, &[0; 4]), "array v: Invalid checksum: expected 0x00000000, got 0x"),
        (changed(&whole, entry + 24, &[1, 0, 0, 0]), "bytes are stored, expected 1"),
        (claimed, "compressed bytes cannot hold 16777216, expected at most 1032 from each"),
        (in_v("False", "True "), "array v: in Fortran order, expected C order: numpy.ascontiguousarray"),
        (in_v("<f2", ">f2"), "array v: dtype >f2 (big-endian), expected one of <f2"),
        (
            in_v("(2, 2, 30, 24,)", "(2, 2, 30, 25,)"),
            "array v: 5760 bytes of data do not fit shape [2, 2, 30, 25]",
        ),
        (
            in_v("'shape'", "'shave'"),
            "array v: the header is no dictionary of descr, fortran_order and shape: unknown field `shave`",
        ),
    ] {
        std::fs::write(path("in.npz"), bytes).unwrap();
        refuse("in.npz", why);
    }
    // Two members in one place: the second one's header lies in the first one's data.
    let inner = npz(&all[..1], false);
    let outer = npz(&[("x.npy".to_owned(), inner[..place(&inner, b"PK\x01\x02")].to_vec())], false);
    let directory = place(&outer, b"PK\x01\x02");
    let entry = &inner[place(&inner, b"PK\x01\x02")..place(&inner, b"PK\x05\x06")];
    let nested = changed(entry, 42, &(30 + 5 + 20u32).to_le_bytes());
    let end = changed(&outer[place(&outer, b"PK\x05\x06")..], 10, &[2, 0]);
    let both = [&outer[..place(&outer, b"PK\x05\x06")], &nested, &end].concat();
    assert!(directory < both.len());
    std::fs::write(path("in.npz"), both).unwrap();
    refuse("in.npz", "damaged archive: the member at byte 0 ends at ");
    // An archive that is cut off anywhere is refused, and never read past its end.
    for length in (4..whole.len()).step_by(whole.len() / 20) {
        std::fs::write(path("in.npz"), &whole[..length]).unwrap();
        refuse("in.npz", "in.npz: damaged archive");
    }
}

fn fixture(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/numpy").join(name)
}

#[test]
fn archives_that_numpy_wrote() {
    let folder = Folder::empty();
    let answers = ["savez.npz", "savez_compressed.npz", "zip64.npz", "members.npz"].map(|name| {
        let output = run(&fixture(name), &folder.output);
        assert!(output.status.success(), "{name}: {}", stderr(&output));
        // Other arrays are noted like other tensors, whatever they hold.
        let also =
            if name == "members.npz" { "big_endian, fortran, note, object and 2 more" } else { "note" };
        let note = format!("{name}: note: tensors not read: {also} (known are q, k, v, mask, ");
        assert!(stderr(&output).contains(&note), "{}", stderr(&output));
        let strict = flashtile(["plan".as_ref(), fixture(name).as_os_str(), "--strict".as_ref()]);
        assert_refused(&strict, &format!("unknown tensors: {also}"), name);
        read(&folder.output)
    });
    assert!(answers.iter().all(|answer| *answer == answers[0]));
}

#[test]
fn arrays_that_are_not_needed_are_not_read() {
    let folder = Folder::empty();
    let path = |name: &str| folder.path().join(name);
    // The checksum of a hundred megabytes of zeros is wrong, so whoever reads them refuses them.
    let mut all = members(&tensors());
    all.push(("unread.npy".to_owned(), vec![0; 100 << 20]));
    let mut bytes = npz(&all, true);
    let entry = bytes.windows(4).rposition(|window| window == b"PK\x01\x02").unwrap();
    bytes[entry + 16] ^= 1;
    std::fs::write(path("in.npz"), bytes).unwrap();
    std::fs::create_dir(path("arrays")).unwrap();
    for (name, bytes) in &members(&tensors()) {
        std::fs::write(path("arrays").join(name), bytes).unwrap();
    }
    std::fs::write(path("arrays").join("unread.npy"), note()).unwrap();
    std::fs::create_dir(path("arrays").join("folder.npy")).unwrap();
    for (name, also) in [("in.npz", "unread"), ("arrays", "folder, unread")] {
        let output = run(&path(name), &folder.output);
        assert!(output.status.success(), "{name}: {}", stderr(&output));
        assert!(
            stderr(&output).contains(&format!("{name}: note: tensors not read: {also} (known")),
            "{name}"
        );
    }
    // An array that is needed is refused because of its dtype.
    all.retain(|(name, _)| name != "unread.npy");
    all.iter_mut().find(|(name, _)| name == "mask.npy").unwrap().1 = note();
    std::fs::write(path("in.npz"), npz(&all, true)).unwrap();
    assert_refused(&run(&path("in.npz"), &folder.output), "array mask: dtype <U7, expected one of", "mask");
}

#[test]
fn changed_bytes_give_the_same_answer_or_an_error() {
    let folder = Folder::empty();
    let input = folder.path().join("in.npz");
    for name in ["savez.npz", "savez_compressed.npz", "zip64.npz"] {
        let whole = std::fs::read(fixture(name)).unwrap();
        assert!(run(&fixture(name), &folder.output).status.success());
        let answer = read(&folder.output);
        for at in (0..whole.len()).step_by(23) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x10;
            std::fs::write(&input, bytes).unwrap();
            std::fs::remove_file(&folder.output).unwrap_or_default();
            let output = run(&input, &folder.output);
            match output.status.code() {
                Some(0) => assert!(read(&folder.output) == answer, "{name}: byte {at}"),
                Some(2) => assert!(!folder.output.exists(), "{name}: byte {at}"),
                other => panic!("{name}: byte {at}: {other:?}, {}", stderr(&output)),
            }
        }
    }
}

#[test]
fn gradients_of_arrays() {
    let mut tensors = tensors();
    tensors.insert("d_out".into(), Tensor::random(Dtype::F16, &[2, 4, 9, 24], 5));
    let folder = Folder::with(&tensors);
    let expected = folder.run(&["--grad"]);
    let archive = folder.path().join("plain.npz");
    std::fs::write(&archive, npz(&members(&tensors), false)).unwrap();
    let line = ["run".as_ref(), archive.as_os_str(), "-o".as_ref(), folder.output.as_os_str()];
    let output = flashtile(line.into_iter().chain(["--grad".as_ref()]));
    assert!(output.status.success() && output.stderr.is_empty(), "{}", stderr(&output));
    assert_eq!(read(&folder.output), expected);
}
