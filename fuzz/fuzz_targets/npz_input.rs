//! Archives of numpy as the input file of `flashtile run`: any bytes, and any arrays in an archive without a fault.

#![no_main]
#![allow(dead_code)]

mod reading;

use libfuzzer_sys::arbitrary::Unstructured;
use libfuzzer_sys::fuzz_target;
use rawzip::{CompressionMethod, ZipArchiveWriter};
use reading::*;
use std::io::Write;

/// Names of members: of tensors, of none, and of what is no array.
const NAMES: [&str; 8] =
    ["q.npy", "k.npy", "v.npy", "mask.npy", "kv_lens.npy", "a.q.npy", "folder/", "note.txt"];

/// Texts that dtypes and shapes are made of.
const DTYPES: [&str; 6] = ["<f4", "<f2", "|b1", "<i8", ">f4", "|O"];

/// An `.npy` file: a header that is nearly one, with the data that belong to it, or any bytes.
fn npy(u: &mut Unstructured<'_>) -> libfuzzer_sys::arbitrary::Result<Vec<u8>> {
    if u.ratio(1, 8)? {
        return Ok(u.arbitrary::<&[u8]>()?.to_vec());
    }
    let dtype = u.choose(&DTYPES)?;
    let axes = u.int_in_range(0..=4)?;
    let shape = (0..axes).map(|_| u.int_in_range(0..=9usize)).collect::<Result<Vec<_>, _>>()?;
    let mut size = shape.iter().product::<usize>() * dtype[2..].parse::<usize>().unwrap_or(8);
    if u.ratio(1, 16)? {
        size += 1;
    }
    let shape: String = shape.iter().map(|axis| format!("{axis}, ")).collect();
    let order = if u.ratio(1, 8)? { "True" } else { "False" };
    let mut header =
        format!("{{'descr': '{dtype}', 'fortran_order': {order}, 'shape': ({shape}), }}\n").into_bytes();
    if u.ratio(1, 8)? {
        let at = u.choose_index(header.len())?;
        header[at] = u.arbitrary()?;
    }
    let (version, length) = match u.int_in_range(0..=2u8)? {
        0 => (1, (header.len() as u16).to_le_bytes().to_vec()),
        n => (n + 1, (header.len() as u32).to_le_bytes().to_vec()),
    };
    let mut data = u.bytes(size.min(u.len()))?.to_vec();
    data.resize(size, 0);
    Ok([b"\x93NUMPY", &[version, 0][..], &length, &header, &data].concat())
}

fn archive(u: &mut Unstructured<'_>) -> libfuzzer_sys::arbitrary::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut archive = ZipArchiveWriter::new(&mut bytes);
    for _ in 0..u.int_in_range(0..=6u8)? {
        let (name, content) = (*u.choose(&NAMES)?, npy(u)?);
        let is_deflated: bool = u.arbitrary()?;
        let method = if is_deflated { CompressionMethod::DEFLATE } else { CompressionMethod::STORE };
        let stored =
            if is_deflated { miniz_oxide::deflate::compress_to_vec(&content, 6) } else { content.clone() };
        if name.ends_with('/') {
            archive.new_dir(name).create().unwrap_or_else(|e| panic!("{e}"));
            continue;
        }
        let file = archive.new_file(name).compression_method(method).start();
        let (mut entry, config) = file.unwrap_or_else(|e| panic!("{e}"));
        let mut writer = config.wrap(std::io::sink());
        writer.write_all(&content).unwrap_or_else(|e| panic!("{e}"));
        let (_, described) = writer.finish().unwrap_or_else(|e| panic!("{e}"));
        entry.write_all(&stored).unwrap_or_else(|e| panic!("{e}"));
        entry.finish(described).unwrap_or_else(|e| panic!("{e}"));
    }
    archive.finish().unwrap_or_else(|e| panic!("{e}"));
    Ok(bytes)
}

fuzz_target!(|data: &[u8]| {
    // Bytes of a file begin as one: mutations of the corpus come here.
    if data.starts_with(b"PK") {
        return read(data);
    }
    if let Ok(archive) = archive(&mut Unstructured::new(data)) {
        read(&archive);
    }
});
