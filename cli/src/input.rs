//! Memory-mapped files of tensors: safetensors, and arrays of numpy.

use crate::buffer::Bytes;
use crate::failure::{Failure, Result};
use crate::numpy::{self, Array, Member};
use crate::report;
use memmap2::Mmap;
use rawzip::{ZipArchive, ZipSliceArchive};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

#[cfg(target_endian = "big")]
compile_error!("tensors are read in place, and files hold them in little-endian order");

/// Length of the longest header that is parsed, which is the format's own limit.
const MAX_HEADER: usize = 100_000_000;

/// Length of the longest header that is parsed tensor by tensor, which takes many times its memory.
const MAX_EXPLAINED: usize = 1 << 24;

/// A mapped file or folder of tensors.
pub(crate) struct Mapped<'p> {
    path: &'p Path,
    content: Content,
}

enum Content {
    Safetensors(Mmap),
    Npz(ZipSliceArchive<Mmap>),
    Folder(Vec<NpyFile>),
}

/// An `.npy` file.
struct NpyFile {
    /// The file name without its suffix.
    name: String,
    path: PathBuf,
    /// Empty until the array is needed.
    map: OnceLock<Mmap>,
}

impl NpyFile {
    fn bytes(&self) -> Result<&[u8]> {
        match self.map.get() {
            Some(map) => Ok(map),
            None => {
                let map = map(&self.path, "an .npy file")?;
                Ok(self.map.get_or_init(|| map))
            }
        }
    }
}

/// Opens a regular file for reading. Anything else, such as a pipe, is refused, because opening or reading it might
/// block or have side effects.
pub(crate) fn open(path: &Path, expected: &str) -> Result<File> {
    let refuse = |what: &dyn std::fmt::Display| Failure::at(path.display(), what);
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => File::open(path).map_err(|e| refuse(&e)),
        Ok(_) => Err(refuse(&format_args!("not a regular file, expected {expected}"))),
        Err(e) => Err(refuse(&e)),
    }
}

/// Maps a file.
fn map(path: &Path, expected: &str) -> Result<Mmap> {
    let file = open(path, expected)?;
    // SAFETY: the map is private and read-only, and any bytes are valid. A process that truncates the file while it is
    // read ends this one with a signal, which is the contract of mapped input.
    #[allow(unsafe_code)]
    let map = unsafe { Mmap::map(&file) };
    map.map_err(|e| Failure::at(path.display(), e))
}

/// Finds the `.npy` files of a folder.
fn folder(path: &Path) -> Result<Content> {
    let refuse = |what: &dyn std::fmt::Display| Failure::at(path.display(), what);
    let mut arrays = Vec::new();
    for entry in std::fs::read_dir(path).map_err(|e| refuse(&e))? {
        let file = entry.map_err(|e| refuse(&e))?.path();
        if let (Some(name), Some("npy")) = (file.file_stem(), file.extension().and_then(OsStr::to_str)) {
            let name = name.to_string_lossy().into_owned();
            arrays.push(NpyFile { name, path: file, map: OnceLock::new() });
        }
    }
    if arrays.is_empty() {
        let what = "not a regular file, expected a safetensors file, an .npz archive, or a folder with q.npy, k.npy \
                    and v.npy";
        return Err(refuse(&what));
    }
    Ok(Content::Folder(arrays))
}

impl<'p> Mapped<'p> {
    /// Opens a safetensors file, an `.npz` archive or a folder of `.npy` files.
    pub(crate) fn open(path: &'p Path) -> Result<Self> {
        if path.is_dir() {
            return Ok(Self { path, content: folder(path)? });
        }
        let refuse = |what: &dyn std::fmt::Display| Failure::at(path.display(), what);
        let map = map(path, "a safetensors file")?;
        let content = if numpy::is_npz(&map) {
            let archive = ZipArchive::from_slice(map);
            Content::Npz(archive.map_err(|why| refuse(&numpy::damaged(why)))?)
        } else if numpy::is_npy(&map) {
            let what = "an .npy file holds one array, expected an .npz archive (numpy.savez), or a folder with q.npy, \
                        k.npy and v.npy";
            return Err(refuse(&what));
        } else {
            Content::Safetensors(map)
        };
        Ok(Self { path, content })
    }

    /// Finds every tensor.
    pub(crate) fn archive(&self) -> Result<Archive<'_>> {
        let refuse = |what| Failure::at(self.path.display(), what);
        let sources = match &self.content {
            Content::Safetensors(map) => self.safetensors(map)?,
            Content::Npz(archive) => {
                let members = numpy::members(archive).map_err(refuse)?;
                members.into_iter().map(|(name, member)| (name, Source::Member(member))).collect()
            }
            Content::Folder(files) => {
                let mut sources = BTreeMap::new();
                for file in files {
                    let name = &file.name;
                    if sources.insert(name.clone(), Source::File(file)).is_some() {
                        return Err(refuse(format!("array {name}: it is listed twice")));
                    }
                }
                sources
            }
        };
        Ok(Archive { path: self.path, layer: None, sources, called: BTreeMap::new() })
    }

    /// Parses the header. Offsets that overlap, leave gaps or exceed the file are refused.
    fn safetensors<'a>(&self, bytes: &'a [u8]) -> Result<BTreeMap<String, Source<'a>>> {
        let refuse = |what: &dyn std::fmt::Display| {
            Failure::at(self.path.display(), format_args!("not a safetensors file: {what}"))
        };
        let (first, rest) = bytes.split_first_chunk::<8>().ok_or_else(|| {
            let bytes = report::counted(bytes.len(), "byte");
            refuse(&format_args!("{bytes}, expected 8 of header length first"))
        })?;
        // Eight characters of text, read as a length, exceed any memory.
        if let Ok(text) = std::str::from_utf8(first)
            && text.chars().all(|c| !c.is_control() || c.is_whitespace())
        {
            return Err(refuse(&format_args!(
                "begins with text ({text:?}), expected the length of a header"
            )));
        }
        let length = u64::from_le_bytes(*first);
        let header = usize::try_from(length).ok().filter(|&n| n <= MAX_HEADER && n <= rest.len());
        let (header, data) = rest.split_at(header.ok_or_else(|| {
            refuse(&format_args!(
                "header of {length} bytes, {} follow, at most {MAX_HEADER} allowed",
                rest.len()
            ))
        })?);
        let Header { metadata, unknown } =
            Header::parse(header).map_err(|why| refuse(&format_args!("header: {why}")))?;
        // The parser keeps the last of several tensors with one name, so repeated names are looked for separately.
        let mut parser = serde_json::Deserializer::from_slice(header);
        parser.deserialize_map(DistinctNames).map_err(|e| refuse(&format_args!("header: {e}")))?;
        if metadata.data_len() != data.len() {
            let (expected, got) = (metadata.data_len(), data.len());
            let got = report::counted(got, "byte");
            return Err(refuse(&format_args!("{got} of data, the header expects {expected}")));
        }
        let mut tensors = BTreeMap::new();
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            let bytes = data.get(start..end).ok_or_else(|| {
                refuse(&format_args!("tensor {name} lies at {start}..{end} of {}", data.len()))
            })?;
            let (dtype, shape) = (info.dtype, info.shape.clone());
            let source = match unknown.get(&name) {
                Some(dtype) => Source::Unknown(dtype.clone()),
                None => Source::Tensor { dtype, shape, bytes },
            };
            tensors.insert(name, source);
        }
        Ok(tensors)
    }
}

/// The parsed header of a safetensors file.
struct Header {
    metadata: Metadata,
    /// Tensors of dtypes that the parser does not know, by name, each with its dtype. They are bytes in `metadata`.
    unknown: BTreeMap<String, String>,
}

impl Header {
    fn parse(text: &[u8]) -> std::result::Result<Self, String> {
        match serde_json::from_slice(text) {
            Ok(metadata) => Ok(Self { metadata, unknown: BTreeMap::new() }),
            Err(error) if text.len() > MAX_EXPLAINED => Err(error.to_string()),
            Err(error) => match serde_json::from_slice(text) {
                Ok(Value::Object(tensors)) => Self::by_tensor(tensors),
                _ => Err(error.to_string()),
            },
        }
    }

    /// Parses one tensor after another, for errors that name the tensor, and so that a dtype that nothing needs is no error.
    fn by_tensor(mut tensors: serde_json::Map<String, Value>) -> std::result::Result<Self, String> {
        let mut unknown = BTreeMap::new();
        for (name, tensor) in tensors.iter_mut().filter(|(name, _)| *name != "__metadata__") {
            if let Some(inner) =
                tensor.as_object().and_then(|of| of.iter().find(|(_, value)| value.is_object()))
            {
                let inner = inner.0;
                return Err(format!(
                    "{name} holds tensors, such as {inner}; names are not nested, expected one such as {name}.{inner}"
                ));
            }
            let Some(dtype) = tensor["dtype"].as_str().map(str::to_owned) else { continue };
            if serde_json::from_value::<Dtype>(dtype.clone().into()).is_err() {
                let [start, end] = [0, 1].map(|at| tensor["data_offsets"][at].as_u64().unwrap_or_default());
                tensor["dtype"] = "U8".into();
                tensor["shape"] = vec![end.saturating_sub(start)].into();
                unknown.insert(name.clone(), dtype);
            }
        }
        for (name, tensor) in tensors.iter().filter(|(name, _)| *name != "__metadata__") {
            TensorInfo::deserialize(tensor).map_err(|why| format!("tensor {name}: {why}"))?;
        }
        let metadata = serde_json::from_value(Value::Object(tensors)).map_err(|why| why.to_string())?;
        Ok(Self { metadata, unknown })
    }
}

/// A visitor that refuses a header with a repeated name.
struct DistinctNames;

impl<'de> Visitor<'de> for DistinctNames {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object with a member for each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> std::result::Result<(), A::Error> {
        let mut names = BTreeSet::new();
        while let Some((name, _)) = members.next_entry::<String, IgnoredAny>()? {
            if let Some(name) = names.replace(name) {
                return Err(A::Error::custom(format_args!("tensor {name} is listed twice")));
            }
        }
        Ok(())
    }
}

/// The tensors of a file.
pub(crate) struct Archive<'a> {
    path: &'a Path,
    /// The layer of these tensors, if they belong to one.
    layer: Option<String>,
    sources: BTreeMap<String, Source<'a>>,
    /// The file's own names of tensors that it calls by an alias.
    called: BTreeMap<String, String>,
}

/// The place of a tensor. Arrays of numpy are read only when they are needed, since others may have any dtype.
#[derive(Clone)]
enum Source<'a> {
    Tensor {
        dtype: Dtype,
        shape: Vec<usize>,
        bytes: &'a [u8],
    },
    /// A tensor of a dtype that is not known.
    Unknown(String),
    Member(Member<'a>),
    File(&'a NpyFile),
}

/// A tensor as the file stores it.
#[derive(Debug)]
pub(crate) struct Stored<'a> {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Bytes<'a>,
}

impl<'a> Archive<'a> {
    /// Reads a tensor, if the file has it.
    ///
    /// # Errors
    /// If it is an array of numpy that cannot be read, or has a dtype that is not known.
    pub(crate) fn get(&self, name: &str) -> Result<Option<Stored<'a>>> {
        let array = match self.sources.get(name) {
            None => return Ok(None),
            Some(Source::Tensor { dtype, shape, bytes }) => {
                let (dtype, shape) = (*dtype, shape.clone());
                return Ok(Some(Stored { dtype, shape, bytes: Bytes::Borrowed(bytes) }));
            }
            Some(Source::Unknown(dtype)) => {
                let name = self.called(name);
                let what =
                    format_args!("tensor {name} is {dtype}, which is not known, expected F32, F16 or BF16");
                return Err(self.refuse(what));
            }
            Some(Source::Member(member)) => member.read(),
            Some(Source::File(file)) => numpy::array(file.bytes()?),
        };
        let refuse = |why| self.refuse(format_args!("array {}: {why}", self.called(name)));
        let Array { dtype, shape, bytes } = array.map_err(refuse)?;
        Ok(Some(Stored { dtype, shape, bytes }))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.sources.contains_key(name)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.sources.keys().map(String::as_str)
    }

    /// The tensors of the whole file or of a layer under new names; `names` maps new names to old ones.
    pub(crate) fn part(&self, layer: Option<String>, names: &BTreeMap<String, &str>) -> Self {
        let source = |(name, of): (&String, &&str)| Some((name.clone(), self.sources.get(*of)?.clone()));
        // In a layer, every name lacks the prefix, so a changed name need not be an alias.
        let renamed = names.iter().filter(|(name, of)| layer.is_none() && name.as_str() != **of);
        let called = renamed.map(|(name, of)| (name.clone(), (*of).to_owned())).collect();
        Self { path: self.path, layer, sources: names.iter().filter_map(source).collect(), called }
    }

    /// The name of a tensor in the file, for messages.
    pub(crate) fn called<'n>(&'n self, name: &'n str) -> &'n str {
        self.called.get(name).map_or(name, String::as_str)
    }

    /// A failure caused by this file, or by the layer.
    pub(crate) fn refuse(&self, what: impl std::fmt::Display) -> Failure {
        match &self.layer {
            None => Failure::at(self.path.display(), what),
            Some(layer) => Failure::at(format_args!("{}: {layer}", self.path.display()), what),
        }
    }
}
