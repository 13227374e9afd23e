//! Arrays of numpy: the members of an `.npz` archive, and the header of an `.npy` file.
//!
//! Formats: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>, and PKWARE's `APPNOTE.TXT` for the archive.

use crate::report;
use safetensors::tensor::Dtype;
use std::ops::Range;

/// The first bytes of an `.npy` file.
const NPY: &[u8] = b"\x93NUMPY";

/// The first bytes of an archive: of its first member, or of the directory of an archive without members.
const ZIP: [&[u8]; 2] = [b"PK\x03\x04", b"PK\x05\x06"];

pub(crate) fn is_npy(bytes: &[u8]) -> bool {
    bytes.starts_with(NPY)
}

pub(crate) fn is_npz(bytes: &[u8]) -> bool {
    ZIP.iter().any(|first| bytes.starts_with(first))
}

/// Dtypes of numpy, and the ones with the same values.
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

/// An array in a file.
#[derive(Debug)]
pub(crate) struct Array<'a> {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: &'a [u8],
}

/// The array in the bytes of an `.npy` file, in place.
///
/// # Errors
/// Says what is wrong with it: another format, Fortran order of more than one axis, a dtype that attention has no use
/// for, a size that does not fit the shape.
pub(crate) fn array(bytes: &[u8]) -> Result<Array<'_>, String> {
    let (header, data) = split(bytes).ok_or("not an .npy file")?;
    let text = std::str::from_utf8(header).map_err(|_| "the header is not text")?;
    let descr = field(text, "descr").ok_or("the header lacks descr")?;
    let descr = descr.strip_prefix('\'').and_then(|rest| rest.split_once('\''));
    let (descr, _) = descr.ok_or("records with fields, expected an array of numbers")?;
    let dtype = DTYPES.iter().find(|(name, _)| *name == descr).map(|(_, dtype)| *dtype);
    let dtype = dtype.ok_or_else(|| unknown(descr))?;
    let shape = field(text, "shape").and_then(|rest| rest.strip_prefix('(')?.split_once(')'));
    let (shape, _) = shape.ok_or("the header lacks shape")?;
    let axes = shape.split(',').map(str::trim).filter(|axis| !axis.is_empty());
    let shape: Vec<usize> = axes
        .map(|axis| axis.parse().map_err(|_| format!("shape ({shape}), expected whole numbers")))
        .collect::<Result<_, _>>()?;
    let order = field(text, "fortran_order").ok_or("the header lacks fortran_order")?;
    // With one axis longer than 1, both orders are the same.
    let is_fortran = order.starts_with("True") && shape.iter().filter(|n| **n > 1).count() > 1;
    if is_fortran {
        return Err("in Fortran order, expected C order: numpy.ascontiguousarray".to_owned());
    }
    let size = shape.iter().try_fold(dtype.bitsize() / 8, |n, axis| n.checked_mul(*axis));
    if size != Some(data.len()) {
        let shape = report::shape(&shape);
        return Err(format!("{} bytes of data do not fit shape {shape} of {dtype:?}", data.len()));
    }
    Ok(Array { dtype, shape, bytes: data })
}

fn unknown(descr: &str) -> String {
    let hint = match descr {
        "|V2" | "<V2" => " (numpy has no name for bfloat16: save float32 and give --dtype bf16)",
        _ if descr.starts_with('>') => " (big-endian)",
        _ => "",
    };
    let known = DTYPES.map(|(name, _)| name).join(", ");
    format!("dtype {descr}{hint}, expected one of {known}")
}

/// The header, a dictionary in Python's syntax, and the data behind it.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let rest = bytes.strip_prefix(NPY)?;
    let (version, rest) = rest.split_first_chunk::<2>()?;
    // Version 1.0 has a length of two bytes, later ones of four.
    let (length, rest) = if version[0] == 1 {
        let (length, rest) = rest.split_first_chunk::<2>()?;
        (u32::from(u16::from_le_bytes(*length)), rest)
    } else {
        let (length, rest) = rest.split_first_chunk::<4>()?;
        (u32::from_le_bytes(*length), rest)
    };
    rest.split_at_checked(length as usize)
}

/// The text that follows a key of the dictionary.
fn field<'t>(text: &'t str, key: &str) -> Option<&'t str> {
    let (_, rest) = text.split_once(&format!("'{key}'"))?;
    Some(rest.trim_start().strip_prefix(':')?.trim_start())
}

/// An array in an archive.
pub(crate) enum Member {
    /// In place.
    At(Range<usize>),
    Inflated(Vec<u8>),
}

impl Member {
    pub(crate) fn bytes<'a>(&'a self, archive: &'a [u8]) -> &'a [u8] {
        match self {
            Self::At(range) => &archive[range.clone()],
            Self::Inflated(bytes) => bytes,
        }
    }
}

/// Bytes of the record at the end of an archive and of its longest comment.
const MAX_END: usize = 22 + 0xffff;

/// What stands for a number that only the extensions for large archives can hold.
const LARGE: u32 = u32::MAX;

/// The arrays of an archive, by name without `.npy`.
///
/// # Errors
/// Says what is wrong with the archive, or which extension of the format it needs.
pub(crate) fn members(bytes: &[u8]) -> Result<Vec<(String, Member)>, String> {
    let damaged = || "damaged archive".to_owned();
    let last = &bytes[bytes.len().saturating_sub(MAX_END)..];
    let end = last.windows(4).rposition(|window| window == ZIP[1]).ok_or_else(damaged)?;
    let end = &last[end..];
    let (count, start) = (u16_at(end, 10).ok_or_else(damaged)?, u32_at(end, 16).ok_or_else(damaged)?);
    if start == LARGE {
        return Err("larger than 4 GiB, expected .npy files in a folder, or safetensors".to_owned());
    }
    let mut entry = bytes.get(start as usize..).ok_or_else(damaged)?;
    let mut members = Vec::new();
    for _ in 0..count {
        let (name, member, rest) = member(bytes, entry)?;
        members.push((name, member));
        entry = rest;
    }
    Ok(members)
}

/// The member that an entry of the directory describes, and the entries behind it.
fn member<'a>(archive: &[u8], entry: &'a [u8]) -> Result<(String, Member, &'a [u8]), String> {
    let damaged = || "damaged archive".to_owned();
    let long = |at| u32_at(entry, at).ok_or_else(damaged);
    let short = |at| u16_at(entry, at).map(usize::from).ok_or_else(damaged);
    if !entry.starts_with(b"PK\x01\x02") {
        return Err(damaged());
    }
    let name_end = 46 + short(28)?;
    let name = entry.get(46..name_end).ok_or_else(damaged)?;
    let name = String::from_utf8_lossy(name);
    let name =
        name.strip_suffix(".npy").ok_or_else(|| format!("member {name} is not an .npy file"))?.to_owned();
    let rest = entry.get(name_end + short(30)? + short(32)?..).ok_or_else(damaged)?;
    let (packed, size, local) = (long(20)?, long(24)?, long(42)?);
    if [packed, size, local].contains(&LARGE) {
        return Err(format!(
            "array {name} lies beyond 4 GiB, expected .npy files in a folder, or safetensors"
        ));
    }
    // The header beside the data repeats the name, with extra fields of its own.
    let header =
        archive.get(local as usize..).filter(|header| header.starts_with(ZIP[0])).ok_or_else(damaged)?;
    let (name_len, extra) =
        (u16_at(header, 26).ok_or_else(damaged)?, u16_at(header, 28).ok_or_else(damaged)?);
    let first = local as usize + 30 + usize::from(name_len) + usize::from(extra);
    let range = first..first + packed as usize;
    let data = archive.get(range.clone()).ok_or_else(damaged)?;
    match (short(8)? & 1, short(10)?) {
        (0, 0) if packed == size => Ok((name, Member::At(range), rest)),
        (0, 8) => {
            let inflated = inflate(data, size as usize).map_err(|why| format!("array {name}: {why}"))?;
            if crc32(&inflated) != long(16)? {
                return Err(format!("array {name}: the checksum differs"));
            }
            Ok((name, Member::Inflated(inflated), rest))
        }
        (0, method) => Err(format!("array {name}: compression method {method}, expected 0 or 8")),
        _ => Err(format!("array {name} is encrypted")),
    }
}

fn inflate(data: &[u8], size: usize) -> Result<Vec<u8>, String> {
    let inflated = miniz_oxide::inflate::decompress_to_vec_with_limit(data, size);
    let inflated = inflated.map_err(|e| format!("cannot be decompressed: {e}"))?;
    if inflated.len() == size {
        Ok(inflated)
    } else {
        Err(format!("{} bytes, expected {size}", inflated.len()))
    }
}

/// The checksum of archives: the remainder by the polynomial 0x04c11db7, with bits in reverse order.
fn crc32(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            let (mut crc, mut bit) = (byte as u32, 0);
            while bit < 8 {
                crc = if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
                bit += 1;
            }
            table[byte] = crc;
            byte += 1;
        }
        table
    };
    !bytes.iter().fold(!0u32, |crc, byte| (crc >> 8) ^ TABLE[usize::from(crc as u8 ^ byte)])
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk::<2>().map(|two| u16::from_le_bytes(*two))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk::<4>().map(|four| u32::from_le_bytes(*four))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An `.npy` file as numpy writes it: the data begins at a multiple of 64 bytes.
    fn npy(header: &str, data: &[u8]) -> Vec<u8> {
        let header =
            format!("{header:<width$}\n", width = (10 + header.len()).next_multiple_of(64) + 64 - 11);
        let length = (header.len() as u16).to_le_bytes();
        [NPY, &[1, 0], &length, header.as_bytes(), data].concat()
    }

    #[test]
    fn headers_say_dtype_order_and_shape() {
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
        let bytes = npy(header, &[7; 24]);
        let array = array(&bytes).unwrap();
        assert_eq!((array.dtype, &array.shape[..], array.bytes), (Dtype::F32, &[2, 3][..], &[7; 24][..]));
        assert_eq!((bytes.len() - 24) % 64, 0);
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
            array(&npy(&header, &vec![0; data])).unwrap_err()
        };
        assert!(of("'<c8'", "1,", 8).starts_with("dtype <c8, expected one of <f2, <f4"));
        assert!(of("'|V2'", "1,", 2).contains("save float32 and give --dtype bf16"));
        assert!(of("'>f4'", "1,", 4).contains("big-endian"));
        assert!(of("[('a', '<f4')]", "1,", 4).contains("records with fields"));
        assert_eq!(of("'<f4'", "2, 3", 23), "23 bytes of data do not fit shape [2, 3] of F32");
        assert!(of("'<f4'", "99999999999, 99999999999", 4).contains("do not fit shape"));
        assert!(of("'<f4'", "-1,", 4).contains("expected whole numbers"));
        assert_eq!(array(b"\x93NUMPY\x01\x00\xff\xff").unwrap_err(), "not an .npy file");
    }

    #[test]
    fn checksums_of_known_text() {
        assert_eq!((crc32(b""), crc32(b"123456789")), (0, 0xcbf4_3926));
    }
}
