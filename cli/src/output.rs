//! Output files: written whole or not at all.

use crate::failure::{Failure, Result};
use crate::temporary::{Named, Temporary};
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, TensorView};
use std::fs::{Metadata, Permissions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// A path that a file can be written to.
pub(crate) struct Destination {
    path: PathBuf,
    folder: PathBuf,
}

impl Destination {
    /// Checks that a file can be written there, before work begins.
    pub(crate) fn new(path: &Path) -> Result<Self> {
        let refuse = |what: &dyn std::fmt::Display| Failure::at(path.display(), what);
        if path == Path::new("-") {
            let hint = "standard output does not take files, expected a path (./- for a file of that name)";
            return Err(refuse(&hint));
        }
        let target = resolve(path)?;
        let folder = folder_of(&target).ok_or_else(|| refuse(&"names no file"))?.to_owned();
        check_writable(&target).map_err(|e| refuse(&format_args!("cannot be written: {e}")))?;
        Temporary::create(&folder, 0o600).map_err(|e| unwritable(path, &e))?;
        Ok(Self { path: target, folder })
    }

    /// Checks that tensors can be written there. A name of a format that is read but not written is refused.
    pub(crate) fn safetensors(path: &Path) -> Result<Self> {
        let suffix = path.extension().and_then(|suffix| suffix.to_str()).map(str::to_ascii_lowercase);
        if let Some(suffix @ ("npz" | "npy")) = suffix.as_deref() {
            let named = path.with_extension("safetensors");
            let what = format!(
                "the output is a safetensors file, not .{suffix}: expected a name such as {}",
                named.display()
            );
            return Err(Failure::at(path.display(), what));
        }
        Self::new(path)
    }

    /// Checks that a picture can be written there. Its name must end in `.svg`.
    pub(crate) fn svg(path: &Path) -> Result<Self> {
        let is_svg = path.extension().is_some_and(|suffix| suffix.eq_ignore_ascii_case("svg"));
        if !is_svg && path != Path::new("-") {
            let svg = path.with_extension("svg");
            let what = format!("--svg writes SVG, expected a name such as {}", svg.display());
            return Err(Failure::at(path.display(), what));
        }
        Self::new(path)
    }

    /// Refuses to replace `other`, a file that is read, or that is also written for another purpose.
    pub(crate) fn differs_from(&self, other: &Path) -> Result<()> {
        let same = match (std::fs::metadata(&self.path), std::fs::metadata(other)) {
            (Ok(mine), Ok(theirs)) => same_file((&self.path, &mine), (other, &theirs)),
            // A file that does not exist yet is identified by its path.
            _ => resolve(other).is_ok_and(|other| same_place(&self.path, &other)),
        };
        if same {
            let other = other.display();
            return Err(Failure::at(
                self.path.display(),
                format_args!("is the same file as {other}, expected another path to write to"),
            ));
        }
        Ok(())
    }

    /// Writes a file beside the destination and renames it in one step. It gets the permission bits of the file that
    /// it replaces, or the default ones of a new file.
    fn replace(&self, write: impl FnOnce(&Path) -> std::result::Result<(), String>) -> Result<()> {
        let refuse_io = |e: std::io::Error| unwritable(&self.path, &e);
        let replaced = match std::fs::metadata(&self.path) {
            Ok(replaced) => Some(replaced.permissions()),
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => return Err(refuse_io(e)),
        };
        // Until the file has its final permission bits, nobody else may read it: the file that it replaces may be
        // private.
        let mode = if replaced.is_some() { 0o600 } else { 0o666 };
        let temporary = Temporary::create(&self.folder, mode).map_err(refuse_io)?;
        let refuse = |what| Failure::at(self.path.display(), format_args!("cannot be written: {what}"));
        write(temporary.path()).map_err(refuse)?;
        if let Some(permissions) = replaced {
            permit(temporary.path(), permissions).map_err(refuse_io)?;
        }
        temporary.rename(&self.path).map_err(refuse_io)
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
        self.replace(|path| {
            safetensors::serialize_to_file(tensors, None, path).map_err(|e| match e {
                SafeTensorError::IoError(e) => cause(&e),
                other => other.to_string(),
            })
        })
    }
}

/// Refuses a file without write permission, which a rename would replace all the same. The file need not exist.
fn check_writable(path: &Path) -> std::result::Result<(), String> {
    match std::fs::metadata(path) {
        // The superuser may open it, but a file that nobody may write is meant to be kept.
        Ok(found) if found.permissions().readonly() => {
            Err("the file is read-only, expected one that may be replaced".to_owned())
        }
        Ok(_) => std::fs::File::options().write(true).open(path).map(drop).map_err(|e| cause(&e)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) => Err(cause(&e)),
    }
}

/// Sets the permission bits of a file, except setuid and setgid, which new contents must not inherit.
#[cfg(unix)]
fn permit(path: &Path, permissions: Permissions) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, Permissions::from_mode(permissions.mode() & 0o777))
}

/// Does nothing: on other systems, a read-only file cannot be renamed either.
#[cfg(not(unix))]
fn permit(_: &Path, _: Permissions) -> std::io::Result<()> {
    Ok(())
}

/// Creates a folder for files, if it does not exist.
pub(crate) fn folder(path: &Path) -> Result<()> {
    match std::fs::create_dir(path) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists || !path.is_dir() => {
            let what = format!("cannot be a folder for files: {}", cause(&e));
            Err(Failure::at(path.display(), what))
        }
        _ => Ok(()),
    }
}

/// A folder that is written whole or not at all.
pub(crate) struct NewFolder {
    path: PathBuf,
    /// The folder under its temporary name, beside the path.
    temporary: Named,
}

impl NewFolder {
    /// Checks that nothing exists at the path and that a folder can be written there.
    pub(crate) fn new(path: &Path) -> Result<Self> {
        let refuse = |what: &dyn std::fmt::Display| Failure::at(path.display(), what);
        if path.symlink_metadata().is_ok() {
            return Err(refuse(&"exists, expected a new folder"));
        }
        let parent = folder_of(path).ok_or_else(|| refuse(&"names no folder"))?;
        let temporary = Named::folder(parent).map_err(|e| unwritable(path, &e))?;
        Ok(Self { path: path.to_owned(), temporary })
    }

    /// Writes a file of this name.
    pub(crate) fn text(&self, name: &str, text: &str) -> Result<()> {
        self.temporary.write(name, text.as_bytes()).map_err(|e| unwritable(&self.path, &e))
    }

    /// Gives the folder its name, now that all files are written.
    pub(crate) fn finish(self) -> Result<()> {
        self.temporary.rename(&self.path).map_err(|e| unwritable(&self.path, &e))
    }
}

fn unwritable(path: &Path, e: &std::io::Error) -> Failure {
    Failure::at(path.display(), format_args!("cannot be written: {}", cause(e)))
}

/// Largest number of links that are followed, as in common operating systems.
const MAX_LINKS: usize = 40;

/// Follows links to the file that a path names: the target of a link is replaced, not the link. The file need not
/// exist, but if it does, it must be a regular file.
fn resolve(path: &Path) -> Result<PathBuf> {
    let refuse = |what: &dyn std::fmt::Display| Failure::at(path.display(), what);
    match std::fs::metadata(path) {
        Ok(named) if !named.is_file() => {
            Err(refuse(&"exists and is not a regular file, expected a path for a file"))
        }
        Ok(named) => {
            // A link to an open file may hold a name that the file no longer has.
            let target = std::fs::canonicalize(path).ok();
            let found =
                target.filter(|t| std::fs::metadata(t).is_ok_and(|m| same_file((path, &named), (t, &m))));
            found.ok_or_else(|| refuse(&"names a file without a path, expected a path to write a file to"))
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {
            let mut target = path.to_owned();
            for _ in 0..MAX_LINKS {
                match target.symlink_metadata() {
                    Ok(found) if found.is_symlink() => {
                        let named = std::fs::read_link(&target).map_err(|e| unwritable(path, &e))?;
                        target = target.parent().unwrap_or(Path::new("")).join(named);
                    }
                    _ => return Ok(target),
                }
            }
            Err(refuse(&"cannot be written: too many links"))
        }
        Err(e) => Err(unwritable(path, &e)),
    }
}

type Known<'a> = (&'a Path, &'a Metadata);

#[cfg(unix)]
fn same_file((_, a): Known<'_>, (_, b): Known<'_>) -> bool {
    use std::os::unix::fs::MetadataExt;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(not(unix))]
fn same_file((a, _): Known<'_>, (b, _): Known<'_>) -> bool {
    same_place(a, b)
}

/// The folder of the file that a path names; `None` if the last component of the path is not a name.
fn folder_of(path: &Path) -> Option<&Path> {
    path.file_name()?;
    path.parent().map(|parent| if parent.as_os_str().is_empty() { Path::new(".") } else { parent })
}

/// Returns true if two paths name the same entry of the same folder.
fn same_place(a: &Path, b: &Path) -> bool {
    let place =
        |path: &Path| Some((std::fs::canonicalize(folder_of(path)?).ok()?, path.file_name()?.to_owned()));
    matches!((place(a), place(b)), (Some(a), Some(b)) if a == b)
}

/// The reason without the path, since some errors have the path of a temporary file.
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
