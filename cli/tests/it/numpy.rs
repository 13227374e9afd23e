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
fn npz(tensors: &Tensors, compressed: bool) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for (name, tensor) in tensors {
        let (name, plain) = (format!("{name}.npy"), npy(tensor));
        let (method, data) = match compressed {
            true => (8u16, miniz_oxide::deflate::compress_to_vec(&plain, 6)),
            false => (0u16, plain.clone()),
        };
        let [crc, packed, size, at] =
            [crc32(&plain), data.len() as u32, plain.len() as u32, bytes.len() as u32].map(u32::to_le_bytes);
        let (method, length) = (method.to_le_bytes(), (name.len() as u16).to_le_bytes());
        let both = [&[20, 0, 0, 0][..], &method, &[0; 4], &crc, &packed, &size, &length].concat();
        bytes.extend([b"PK\x03\x04", &both[..], &[20, 0], name.as_bytes(), &[1; 20], &data].concat());
        directory.extend([b"PK\x01\x02\x14\x03", &both[..], &[0; 12], &at, name.as_bytes()].concat());
    }
    let (count, size, start) =
        ((tensors.len() as u16).to_le_bytes(), (directory.len() as u32).to_le_bytes(), bytes.len() as u32);
    let end = [b"PK\x05\x06\0\0\0\0", &count[..], &count, &size, &start.to_le_bytes(), &[0; 2]].concat();
    [bytes, directory, end].concat()
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
    std::fs::write(path("plain.npz"), npz(&tensors(), false)).unwrap();
    std::fs::write(path("compressed.npz"), npz(&tensors(), true)).unwrap();
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
    // The report of codecs and plans read the same.
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

    let whole = npz(&tensors(), false);
    let place = |of: &[u8], what: &[u8]| of.windows(what.len()).rposition(|window| window == what).unwrap();
    let changed = |at: usize, to: &[u8]| {
        let mut bytes = whole.clone();
        bytes[at..at + to.len()].copy_from_slice(to);
        bytes
    };
    let (end, entry) = (place(&whole, b"PK\x05\x06"), place(&whole, b"PK\x01\x02"));
    let fortran = {
        let at = place(&whole, b"False");
        changed(at, b"True ")
    };
    let packed = npz(&tensors(), true);
    let broken = {
        let mut bytes = packed.clone();
        let at = place(&packed, b"PK\x01\x02");
        bytes[at + 16] ^= 1;
        bytes
    };
    for (bytes, why) in [
        (changed(end + 16, &[255; 4]), "larger than 4 GiB, expected .npy files in a folder, or safetensors"),
        (changed(entry + 20, &[255; 4]), "array v lies beyond 4 GiB"),
        (changed(entry + 10, &[12, 0]), "array v: compression method 12, expected 0 or 8"),
        (changed(entry + 8, &[1, 0]), "array v is encrypted"),
        (changed(entry + 42, &[1, 0, 0, 0]), "damaged archive"),
        (changed(end, b"    "), "damaged archive"),
        (changed(entry + 46, b"q"), "array q: it is listed twice"),
        (fortran, "array v: in Fortran order, expected C order: numpy.ascontiguousarray"),
        (broken, "array v: the checksum differs"),
    ] {
        std::fs::write(path("in.npz"), bytes).unwrap();
        refuse("in.npz", why);
    }
    // An archive that is cut off anywhere is refused, and never read past its end.
    for length in (4..whole.len()).step_by(37) {
        std::fs::write(path("in.npz"), &whole[..length]).unwrap();
        refuse("in.npz", "in.npz: damaged archive");
    }
}
