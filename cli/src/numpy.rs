//! Arrays of numpy: the members of an `.npz` archive, and `.npy` files.
//!
//! Formats: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>, and PKWARE's `APPNOTE.TXT` for
//! the archive.

use crate::buffer::{Buffer, Bytes};
use crate::report;
use miniz_oxide::inflate::decompress_to_vec_with_limit;
use rawzip::{CompressionMethod, ZipSliceArchive, ZipSliceEntry};
use safetensors::tensor::Dtype;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;

/// The first bytes of an `.npy` file.
const NPY: &[u8] = b"\x93NUMPY";

/// The first bytes of an archive, which begins with its first member, or with its directory if it has no members.
const ZIP: [&[u8]; 2] = [b"PK\x03\x04", b"PK\x05\x06"];

pub(crate) fn is_npy(bytes: &[u8]) -> bool {
    bytes.starts_with(NPY)
}

pub(crate) fn is_npz(bytes: &[u8]) -> bool {
    ZIP.iter().any(|first| bytes.starts_with(first))
}

/// Dtypes of numpy, each with the dtype of safetensors that has the same values.
const DTYPES: [(&str, Dtype); 11] = [
    ("<f2", Dtype::F16),
    ("<f4", Dtype::F32),
    ("<f8", Dtype::F64),
    ("|b1", Dtype::BOOL),
    ("|i1", Dtype::I8),
    ("|u1", Dtype::U8),
    ("<i2", Dtype::I16),
    ("<i4", Dtype::I32),
    ("<i8", Dtype::I64),
    ("<u4", Dtype::U32),
    ("<u8", Dtype::U64),
];

fn unknown(descr: &str) -> String {
    let hint = match descr {
        "|V2" | "<V2" => " (numpy has no name for bfloat16: save float32 and give --dtype bf16)",
        _ if descr.starts_with('>') => " (big-endian)",
        _ => "",
    };
    let known = DTYPES.map(|(name, _)| name).join(", ");
    format!("dtype {descr}{hint}, expected one of {known}")
}

/// An array in a file.
#[derive(Debug)]
pub(crate) struct Array<'a> {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Bytes<'a>,
}

/// Reads the array in the bytes of an `.npy` file, in place.
///
/// # Errors
/// If it has another format, Fortran order of more than one axis, a dtype that attention does not use, or a size that
/// does not fit its shape.
pub(crate) fn array(bytes: &[u8]) -> Result<Array<'_>, String> {
    let Some(([major, minor], rest)) = bytes.strip_prefix(NPY).and_then(|rest| rest.split_first_chunk())
    else {
        return Err("not an .npy file".to_owned());
    };
    // The length takes two bytes in version 1.0, and four in later ones.
    let width = match (major, minor) {
        (1, 0) => 2,
        (2 | 3, 0) => 4,
        _ => return Err(format!(".npy format {major}.{minor}, expected 1.0, 2.0 or 3.0")),
    };
    let cut = "the file ends in the header of the array";
    let (stored, rest) = rest.split_at_checked(width).ok_or(cut)?;
    let mut length = [0; 4];
    length[..width].copy_from_slice(stored);
    let length = u32::from_le_bytes(length);
    if length > MAX_HEADER {
        return Err(format!("header of {length} bytes, expected at most {MAX_HEADER}"));
    }
    let (text, data) = rest.split_at_checked(length as usize).ok_or(cut)?;
    let (dtype, shape) = header(std::str::from_utf8(text).map_err(|_| "the header is not text")?)?;
    let size = shape.iter().try_fold(dtype.bitsize() / 8, |n, axis| n.checked_mul(*axis));
    if size != Some(data.len()) {
        let (bytes, shape) = (data.len(), report::shape(&shape));
        return Err(format!("{bytes} bytes of data do not fit shape {shape} of {dtype:?}"));
    }
    Ok(Array { dtype, shape, bytes: Bytes::Borrowed(data) })
}

/// Length of the longest header that is parsed. Headers of arrays of numbers have about a hundred bytes.
const MAX_HEADER: u32 = 1 << 16;

/// Parses the dictionary of a header, which has three keys and nothing else.
fn header(text: &str) -> Result<(Dtype, Vec<usize>), String> {
    let keys = "the header is no dictionary of descr, fortran_order and shape";
    let dict: Dict = serde_json::from_str(&json(text)).map_err(|e| format!("{keys}: {e}"))?;
    let Dict { descr, fortran_order, shape } = dict;
    let Descr::Number(descr) = descr else {
        return Err("its elements are records of several fields, expected numbers".to_owned());
    };
    let dtype = DTYPES.iter().find(|(name, _)| *name == descr).map(|(_, dtype)| *dtype);
    let dtype = dtype.ok_or_else(|| unknown(&descr))?;
    // Both orders agree if at most one axis is longer than 1.
    if fortran_order && shape.iter().filter(|n| **n > 1).count() > 1 {
        return Err("in Fortran order, expected C order: numpy.ascontiguousarray".to_owned());
    }
    Ok((dtype, shape))
}

/// The fields of a header.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Dict {
    descr: Descr,
    fortran_order: bool,
    shape: Vec<usize>,
}

/// The dtype of an array: a text, or for records a list of the fields.
#[derive(Deserialize)]
#[serde(untagged)]
enum Descr {
    Number(String),
    Records(#[allow(dead_code, reason = "records are refused")] Vec<IgnoredAny>),
}

/// Translates a dictionary from Python's syntax to JSON, which has other quotes, brackets and booleans, and no trailing
/// comma.
fn json(dict: &str) -> String {
    let mut json = String::with_capacity(dict.len());
    for c in dict.replace("True", "true").replace("False", "false").chars() {
        if c == ')' || c == '}' {
            json.truncate(json.trim_end().trim_end_matches(',').len());
        }
        json.push(match c {
            '\'' => '"',
            '(' => '[',
            ')' => ']',
            other => other,
        });
    }
    json
}

/// An array in an archive, read on demand.
#[derive(Debug, Clone)]
pub(crate) struct Member<'a> {
    entry: ZipSliceEntry<'a>,
    method: CompressionMethod,
    is_encrypted: bool,
}

/// Finds the arrays of an archive, by name without `.npy`. Folders are left out.
///
/// # Errors
/// If the directory of the archive is damaged, or lists a name twice.
pub(crate) fn members(
    archive: &ZipSliceArchive<impl AsRef<[u8]>>,
) -> Result<BTreeMap<String, Member<'_>>, String> {
    let mut members = BTreeMap::new();
    let mut places = Vec::new();
    for header in archive.entries() {
        let header = header.map_err(damaged)?;
        let path = header.file_path();
        let full = String::from_utf8_lossy(path.as_ref());
        let named = |what: &dyn std::fmt::Display| damaged(format_args!("member {full}: {what}"));
        let entry = archive.get_entry(header.wayfinder()).map_err(|e| named(&e))?;
        // Names have no checksum, so both copies must agree: a damaged name would hide its array.
        let beside = entry.local_header().file_path();
        if beside != path {
            let beside = String::from_utf8_lossy(beside.as_ref());
            return Err(named(&format_args!("{beside} beside its data")));
        }
        places.push((header.local_header_offset(), entry.compressed_data_range().1));
        if header.is_dir() {
            continue;
        }
        let name = full.strip_suffix(".npy").unwrap_or(&full);
        let (method, is_encrypted) = (header.compression_method(), header.flags().is_encrypted());
        if members.insert(name.to_owned(), Member { entry, method, is_encrypted }).is_some() {
            return Err(format!("array {name}: it is listed twice"));
        }
    }
    let (count, expected) = (places.len() as u64, archive.entries_hint());
    if count != expected {
        return Err(damaged(format_args!("{count} members in its directory, expected {expected}")));
    }
    // Members must not overlap: a small archive could otherwise hold any number of arrays.
    places.sort_unstable();
    if let Some(&[(at, end), (next, _)]) = places.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        return Err(damaged(format_args!("the member at byte {at} ends at {end}, another begins at {next}")));
    }
    Ok(members)
}

pub(crate) fn damaged(what: impl std::fmt::Display) -> String {
    format!("damaged archive: {what}")
}

/// Largest number of bytes that one compressed byte stands for: two bits repeat 258 bytes.
const MAX_INFLATED: u64 = 4 * 258;

impl<'a> Member<'a> {
    /// Reads the array, and checks its size and its checksum against the archive's.
    ///
    /// # Errors
    /// If it is encrypted or compressed in an unknown way, a check fails, or [`array`] refuses it.
    pub(crate) fn read(&self) -> Result<Array<'a>, String> {
        if self.is_encrypted {
            return Err("it is encrypted".to_owned());
        }
        let (data, size) = (self.entry.data(), self.entry.claim_verifier().uncompressed_size);
        let stored = data.len() as u64;
        let verify = |bytes: &[u8]| {
            let read = std::io::copy(&mut self.entry.verifying_reader(bytes), &mut std::io::sink());
            read.map(drop).map_err(|e| e.to_string())
        };
        match self.method {
            CompressionMethod::STORE if size != stored => {
                Err(format!("{stored} bytes are stored, expected {size}"))
            }
            CompressionMethod::STORE => {
                verify(data)?;
                array(data)
            }
            CompressionMethod::DEFLATE if size > stored.saturating_mul(MAX_INFLATED) => Err(format!(
                "{stored} compressed bytes cannot hold {size}, expected at most {MAX_INFLATED} from each"
            )),
            CompressionMethod::DEFLATE => {
                let inflated = decompress_to_vec_with_limit(data, size as usize);
                let inflated = inflated.map_err(|_| "it cannot be decompressed")?;
                verify(&inflated)?;
                let Array { dtype, shape, bytes } = array(&inflated)?;
                let bytes = Buffer::copy_of(bytes.get()).map_err(|e| e.to_string())?;
                Ok(Array { dtype, shape, bytes: Bytes::Owned(bytes) })
            }
            other => Err(format!("compression method {other}, expected 0 or 8 (DEFLATE)")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rawzip::ZipArchive;

    /// An `.npy` file as numpy writes it: the data begins at a multiple of 64 bytes.
    fn npy(header: &str, data: &[u8]) -> Vec<u8> {
        let header =
            format!("{header:<width$}\n", width = (10 + header.len()).next_multiple_of(64) + 64 - 11);
        let length = (header.len() as u16).to_le_bytes();
        [NPY, &[1, 0], &length, header.as_bytes(), data].concat()
    }

    fn refused(bytes: &[u8]) -> String {
        array(bytes).err().unwrap_or_else(|| panic!("{bytes:?} is an array"))
    }

    #[test]
    fn headers_say_dtype_order_and_shape() {
        for header in [
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }",
            "{\"shape\":(2,3,),'fortran_order':False , 'descr':'<f4'}",
        ] {
            let bytes = npy(header, &[7; 24]);
            let array = array(&bytes).unwrap();
            assert_eq!((array.dtype, &array.shape[..]), (Dtype::F32, &[2, 3][..]));
            assert_eq!(array.bytes.get(), [7; 24]);
            assert_eq!((bytes.len() - 24) % 64, 0);
        }
    }

    #[test]
    fn versions_of_the_format() {
        let text = b"{'descr': '|b1', 'fortran_order': False, 'shape': (2,)}";
        let of = |version: [u8; 2], length: &[u8]| [NPY, &version, length, text, &[1, 0]].concat();
        let (two, four) = ((text.len() as u16).to_le_bytes(), (text.len() as u32).to_le_bytes());
        for bytes in [of([1, 0], &two), of([2, 0], &four), of([3, 0], &four)] {
            assert_eq!(array(&bytes).unwrap().bytes.get(), [1, 0]);
        }
        for (version, why) in [([0, 1], "0.1"), ([1, 1], "1.1"), ([4, 0], "4.0")] {
            let expected = format!(".npy format {why}, expected 1.0, 2.0 or 3.0");
            assert_eq!(refused(&of(version, &four)), expected);
        }
        let why = "header of 4294967295 bytes, expected at most 65536";
        assert_eq!(refused(&of([2, 0], &[255; 4])), why);
    }

    #[test]
    fn arrays_of_one_axis_have_no_order() {
        let of = |shape: &str, data: &[u8]| {
            array(&npy(&format!("{{'descr': '|b1', 'fortran_order': True, 'shape': ({shape})}}"), data))
                .map(|array| array.shape)
        };
        assert_eq!(
            (of("3,", &[1; 3]), of("", &[1]), of("1, 0", &[])),
            (Ok(vec![3]), Ok(vec![]), Ok(vec![1, 0]))
        );
        assert!(of("2, 2", &[1; 4]).unwrap_err().contains("Fortran order"));
    }

    #[test]
    fn what_is_not_read_is_named() {
        let of = |descr: &str, shape: &str, data: usize| {
            let header = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': ({shape})}}");
            refused(&npy(&header, &vec![0; data]))
        };
        assert!(of("'<c8'", "1,", 8).starts_with("dtype <c8, expected one of <f2, <f4"));
        assert!(of("'|O'", "1,", 8).starts_with("dtype |O, expected"));
        assert!(of("'|V2'", "1,", 2).contains("save float32 and give --dtype bf16"));
        assert!(of("'>f4'", "1,", 4).contains("big-endian"));
        assert!(of("[('a', '<f4')]", "1,", 4).contains("records of several fields, expected numbers"));
        assert_eq!(of("'<f4'", "2, 3", 23), "23 bytes of data do not fit shape [2, 3] of F32");
        assert!(of("'<f4'", "99999999999, 99999999999", 4).contains("do not fit shape"));
        for shape in ["-1,", "1.5,", "1, , 2", "99999999999999999999,", "1 2"] {
            let why = of("'<f4'", shape, 4);
            assert!(why.starts_with("the header is no dictionary"), "{shape}: {why}");
        }
        assert_eq!(refused(b"\x93NUMPY\x01\x00\xff\xff"), "the file ends in the header of the array");
        assert_eq!(refused(b"\x93NUMPX\x01\x00\x00\x00"), "not an .npy file");
    }

    /// A header is a dictionary and nothing else, as numpy reads it. No part of it is searched for text that looks like
    /// a key.
    #[test]
    fn headers_that_are_no_dictionaries() {
        let whole = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }";
        for (header, why) in [
            (&whole[1..], "invalid type"),
            (&whole[..whole.len() - 1], "EOF"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} x", "trailing characters"),
            ("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}", "expected a boolean"),
            ("{'descr': '<f4', 'fortran_order': False}", "missing field `shape`"),
            (
                "{'descr': '<f4', 'x': \"'shape': (2,)\", 'shape': (1,)}",
                "unknown field `x`, expected one of `descr`",
            ),
            ("{'descr': '<f4', 'descr': '<f4', 'shape': (1,)}", "duplicate field `descr`"),
            ("{'descr': '<\\x664', 'fortran_order': False, 'shape': (1,)}", "invalid escape"),
            ("{'descr': '<f4' 'fortran_order': False, 'shape': (1,)}", "expected `,` or `}`"),
        ] {
            let found = refused(&npy(header, &[0; 4]));
            assert!(found.contains(why), "{header}: {found}");
        }
    }

    /// Arrays by name: dtype, shape and bytes.
    type Arrays = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

    fn arrays(bytes: &[u8], names: &[&str]) -> Result<Arrays, String> {
        if !is_npz(bytes) {
            return Err("not an archive".to_owned());
        }
        let archive = ZipArchive::from_slice(bytes).map_err(damaged)?;
        let mut members = members(&archive)?;
        members.retain(|name, _| names.contains(&&name[..]));
        let read = members.into_iter().map(|(name, member)| {
            let Array { dtype, shape, bytes } = member.read()?;
            Ok((name, (dtype, shape, bytes.get().to_vec())))
        });
        read.collect()
    }

    const ARCHIVES: [&[u8]; 4] = [
        include_bytes!("../tests/numpy/savez.npz"),
        include_bytes!("../tests/numpy/savez_compressed.npz"),
        include_bytes!("../tests/numpy/members.npz"),
        include_bytes!("../tests/numpy/zip64.npz"),
    ];

    const NAMES: [&str; 4] = ["q", "k", "v", "mask"];

    #[test]
    fn every_changed_byte_is_an_error_or_changes_nothing() {
        let whole = arrays(ARCHIVES[0], &NAMES).unwrap();
        assert_eq!(whole.len(), NAMES.len());
        for archive in ARCHIVES {
            assert_eq!(arrays(archive, &NAMES).unwrap(), whole);
            let mut refused = 0;
            for (at, flip) in (0..archive.len()).flat_map(|at| [1, 2, 4, 0x80, 0xff].map(|flip| (at, flip))) {
                let mut bytes = archive.to_vec();
                bytes[at] ^= flip;
                match arrays(&bytes, &NAMES) {
                    Ok(found) => assert!(found == whole, "byte {at} ^ {flip}: another answer"),
                    Err(_) => refused += 1,
                }
            }
            assert!(refused > archive.len(), "{refused} changes of {} bytes were found", archive.len());
        }
    }

    #[test]
    fn every_shorter_archive_is_refused() {
        for archive in ARCHIVES {
            for length in 0..archive.len() {
                assert!(arrays(&archive[..length], &NAMES).is_err(), "{length} of {}", archive.len());
            }
        }
    }
}
