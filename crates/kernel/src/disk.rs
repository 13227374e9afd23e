//! Compiled kernels on disk.

use etcetera::base_strategy::{BaseStrategy, choose_base_strategy};
use sha2::{Digest, Sha256};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Names the folder of compiled kernels; empty for none.
pub const CACHE_VARIABLE: &str = "FLASHTILE_CACHE_DIR";

/// Compiled kernels on disk. Each is a file named by a digest of everything that the machine code depends on; it starts with a digest of
/// the code, and a damaged file is as good as none.
#[derive(Debug)]
pub(crate) struct DiskCache {
    folder: Option<PathBuf>,
    /// Of the names of files.
    extension: &'static str,
}

/// A folder or file of the cache that cannot be written.
#[derive(Debug)]
pub(crate) struct DiskError {
    /// The folder.
    pub(crate) path: PathBuf,
    /// The system's description.
    pub(crate) error: String,
}

impl DiskCache {
    /// The folder that [`CACHE_VARIABLE`] names, or `flashtile` in the user's folder of caches; no files are kept where there is neither.
    pub(crate) fn new(extension: &'static str) -> Self {
        let folder = match std::env::var_os(CACHE_VARIABLE) {
            Some(folder) if folder.is_empty() => None,
            Some(folder) => Some(folder.into()),
            None => choose_base_strategy().ok().map(|user| user.cache_dir().join("flashtile")),
        };
        Self::in_folder(folder, extension)
    }

    /// Files in this folder, or nowhere.
    pub(crate) const fn in_folder(folder: Option<PathBuf>, extension: &'static str) -> Self {
        Self { folder, extension }
    }

    /// The folder, if files are kept.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    fn path(&self, key: &str) -> Option<PathBuf> {
        let extension = self.extension;
        self.folder.as_ref().map(|folder| folder.join(format!("{key}.{extension}")))
    }

    /// The code of a key, if it is there and undamaged.
    pub(crate) fn read(&self, key: &str) -> Option<Vec<u8>> {
        let bytes = std::fs::read(self.path(key)?).ok()?;
        let (digest, code) = bytes.split_at_checked(32)?;
        (Sha256::digest(code).as_slice() == digest).then(|| code.to_vec())
    }

    /// Keeps the code of a key; readers see all of the file or none.
    pub(crate) fn write(&self, key: &str, code: &[u8]) -> Result<(), DiskError> {
        let (Some(folder), Some(path)) = (&self.folder, self.path(key)) else { return Ok(()) };
        let failed = |error: std::io::Error| DiskError { path: folder.clone(), error: error.to_string() };
        std::fs::create_dir_all(folder).map_err(failed)?;
        let mut file = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
        file.write_all(&Sha256::digest(code)).map_err(failed)?;
        file.write_all(code).map_err(failed)?;
        file.persist(path).map_err(|e| failed(e.error))?;
        Ok(())
    }
}

/// The key of a file that depends on these texts, in order.
pub(crate) fn key<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let mut digest = Sha256::new();
    for text in texts {
        digest.update((text.len() as u64).to_le_bytes());
        digest.update(text);
    }
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "files are outside of what Miri runs")]
    fn compiled_kernels_on_disk_are_whole_or_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::in_folder(Some(folder.path().join("new")), "cubin");
        assert_eq!(cache.read("key"), None);
        cache.write("key", b"machine code").unwrap();
        assert_eq!(cache.read("key").as_deref(), Some(&b"machine code"[..]));
        let path = cache.path("key").unwrap();
        let whole = std::fs::read(&path).unwrap();
        for spoiled in [&whole[..10], &whole[..whole.len() - 1], &[&whole[..], b"x"].concat()[..], b""] {
            std::fs::write(&path, spoiled).unwrap();
            assert_eq!(cache.read("key"), None);
        }
        cache.write("key", b"again").unwrap();
        assert_eq!(cache.read("key").as_deref(), Some(&b"again"[..]));
        // A folder that cannot be is an error that names it.
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let refusal =
            DiskCache::in_folder(Some(file.join("folder")), "cubin").write("key", b"code").unwrap_err();
        assert!(refusal.path.ends_with("file/folder") && !refusal.error.is_empty(), "{refusal:?}");
        assert!(DiskCache::in_folder(None, "cubin").write("key", b"code").is_ok());
    }

    #[test]
    fn keys_tell_lists_of_texts_apart() {
        assert_eq!(key(["a", "b"]), key(["a", "b"]));
        assert_ne!(key(["a", "b"]), key(["ab", ""]));
        assert_ne!(key(["a", "b"]), key(["b", "a"]));
        assert_eq!(key([]).len(), 64);
    }
}
