//! Output files: whole or not at all.

use crate::failure::{Failure, Result};
use safetensors::tensor::{Dtype, TensorView};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A place where a file can be put.
pub(crate) struct Destination {
    path: PathBuf,
    folder: PathBuf,
}

impl Destination {
    /// Finds out whether a file can be put there, before work begins.
    pub(crate) fn new(path: &Path) -> Result<Self> {
        let refuse = |what: &dyn std::fmt::Display| Failure::at(path.display(), what);
        // A link is followed: what it names is replaced, not the link.
        let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if target.symlink_metadata().is_ok_and(|m| !m.is_file() && !m.is_symlink()) {
            return Err(refuse(&"exists and is not a regular file, expected a path to write a file to"));
        }
        let folder = match target.parent() {
            Some(parent) if parent.as_os_str().is_empty() => PathBuf::from("."),
            Some(parent) => parent.to_owned(),
            None => return Err(refuse(&"names no file")),
        };
        if target.file_name().is_none() {
            return Err(refuse(&"names no file"));
        }
        tempfile::tempfile_in(&folder)
            .map_err(|e| refuse(&format_args!("cannot be written: {}", cause(&e))))?;
        Ok(Self { path: target, folder })
    }

    /// Writes a file beside the destination and moves it there in one step.
    fn replace(&self, write: impl FnOnce(&Path) -> std::result::Result<(), String>) -> Result<()> {
        let refuse = |what: &str| Failure::at(self.path.display(), format_args!("cannot be written: {what}"));
        let mut builder = tempfile::Builder::new();
        builder.prefix(".flashtile-");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // What any new file gets: the process's umask decides.
            builder.permissions(std::fs::Permissions::from_mode(0o666));
        }
        let temporary = builder.tempfile_in(&self.folder).map_err(|e| refuse(&cause(&e)))?.into_temp_path();
        write(&temporary).map_err(|e| refuse(&e))?;
        temporary.persist(&self.path).map_err(|e| refuse(&cause(&e.error)))
    }

    /// Writes text.
    pub(crate) fn text(&self, text: &str) -> Result<()> {
        self.replace(|path| {
            let mut file = std::fs::File::create(path).map_err(|e| cause(&e))?;
            file.write_all(text.as_bytes()).map_err(|e| cause(&e))
        })
    }

    /// Writes tensors straight from their memory.
    pub(crate) fn tensors(&self, tensors: Vec<(&str, TensorView<'_>)>) -> Result<()> {
        self.replace(|path| safetensors::serialize_to_file(tensors, None, path).map_err(|e| e.to_string()))
    }
}

/// The reason alone: the paths that some errors carry are those of temporary files.
fn cause(error: &std::io::Error) -> String {
    match error.raw_os_error() {
        Some(code) => std::io::Error::from_raw_os_error(code).to_string(),
        None => error.kind().to_string(),
    }
}

/// A tensor of the output file.
pub(crate) fn tensor<'a>(
    dtype: flashtile::Dtype,
    shape: &[usize],
    bytes: &'a [u8],
) -> Result<TensorView<'a>> {
    let dtype = match dtype {
        flashtile::Dtype::F32 => Dtype::F32,
        flashtile::Dtype::F16 => Dtype::F16,
        flashtile::Dtype::BF16 => Dtype::BF16,
    };
    TensorView::new(dtype, shape.to_vec(), bytes).map_err(Failure::new)
}
