//! Machine code, from disk or from the compiler.

use super::compiler::{Compiler, Program, options};
use super::error::Error;
use etcetera::base_strategy::{BaseStrategy, choose_base_strategy};
use sha2::{Digest, Sha256};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Names the folder of compiled kernels; empty for none.
pub const CACHE_VARIABLE: &str = "FLASHTILE_CACHE_DIR";

/// Compiled kernels on disk. Each is a file named by a digest of its source, options, architecture and compiler; it starts with
/// a digest of the rest, and a damaged file is compiled again.
#[derive(Debug)]
struct DiskCache {
    folder: Option<PathBuf>,
}

impl DiskCache {
    /// The folder that [`CACHE_VARIABLE`] names, or `flashtile` in the user's folder of caches; `None` where there is neither.
    fn new() -> Self {
        let folder = match std::env::var_os(CACHE_VARIABLE) {
            Some(folder) if folder.is_empty() => None,
            Some(folder) => Some(folder.into()),
            None => choose_base_strategy().ok().map(|user| user.cache_dir().join("flashtile")),
        };
        Self { folder }
    }

    fn path(&self, key: &str) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.join(format!("{key}.cubin")))
    }

    fn read(&self, key: &str) -> Option<Vec<u8>> {
        let bytes = std::fs::read(self.path(key)?).ok()?;
        let (digest, code) = bytes.split_at_checked(32)?;
        (Sha256::digest(code).as_slice() == digest).then(|| code.to_vec())
    }

    /// Keeps a file; readers see all of it or none.
    fn write(&self, key: &str, code: &[u8]) -> Result<(), Error> {
        let (Some(folder), Some(path)) = (&self.folder, self.path(key)) else { return Ok(()) };
        let failed =
            |error: std::io::Error| Error::KernelFolder { path: folder.clone(), error: error.to_string() };
        std::fs::create_dir_all(folder).map_err(failed)?;
        let mut file = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
        file.write_all(&Sha256::digest(code)).map_err(failed)?;
        file.write_all(code).map_err(failed)?;
        file.persist(path).map_err(|e| failed(e.error))?;
        Ok(())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The compiler, loaded when it is first needed, and what it made before.
#[derive(Debug)]
pub(super) struct Kernels {
    disk: DiskCache,
    compiler: Mutex<Option<Arc<Compiler>>>,
}

impl Kernels {
    pub(super) fn new() -> Self {
        Self { disk: DiskCache::new(), compiler: Mutex::new(None) }
    }

    pub(super) fn folder(&self) -> Option<&Path> {
        self.disk.folder.as_deref()
    }

    pub(super) fn compiler(&self) -> Result<Arc<Compiler>, Error> {
        let mut slot = self.compiler.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(compiler) = &*slot {
            return Ok(compiler.clone());
        }
        Ok(slot.insert(Arc::new(Compiler::load()?)).clone())
    }

    /// Machine code of a program for a device of a compute capability, and whether it was kept on disk: running does not need a folder
    /// that can be written.
    pub(super) fn code(
        &self,
        program: &Program,
        capability: (u32, u32),
    ) -> Result<(Vec<u8>, Result<(), Error>), Error> {
        let compiler = self.compiler()?;
        let target = compiler.target(capability);
        let mut digest = Sha256::new();
        digest.update(&program.source);
        for option in options(program, &target) {
            digest.update([0]);
            digest.update(option);
        }
        digest.update([0]);
        digest.update(format!("{:?}", compiler.version()));
        let key = hex(&digest.finalize());
        if let Some(code) = self.disk.read(&key) {
            return Ok((code, Ok(())));
        }
        let code = compiler.compile(program, &target)?;
        let kept = self.disk.write(&key, &code);
        Ok((code, kept))
    }
}

#[cfg(test)]
#[allow(clippy::print_stdout, reason = "a test that does not run says so")]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "files are outside of what Miri runs")]
    fn compiled_kernels_on_disk_are_whole_or_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache { folder: Some(folder.path().join("new")) };
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
        let refusal = DiskCache { folder: Some(file.join("folder")) }.write("key", b"code").unwrap_err();
        assert!(refusal.to_string().contains("file"), "{refusal}");
        assert!(DiskCache { folder: None }.write("key", b"code").is_ok());
    }

    fn program(source: &str, options: &[&str]) -> Program {
        let options = options.iter().map(|&option| option.to_owned()).collect();
        Program { name: "a-kernel".to_owned(), source: source.to_owned(), options }
    }

    /// Compiled kernels in a folder; none where there is no compiler, which is said.
    fn kernels(folder: PathBuf) -> Option<Kernels> {
        let kernels = Kernels { disk: DiskCache { folder: Some(folder) }, compiler: Mutex::new(None) };
        match kernels.compiler() {
            Ok(_) => Some(kernels),
            Err(why) => {
                println!("SKIPPED, nothing was compiled: {why}");
                None
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri cannot load NVIDIA's compiler")]
    fn a_program_is_compiled_once_for_each_text_option_and_device() {
        let folder = tempfile::tempdir().unwrap();
        let Some(kernels) = kernels(folder.path().to_owned()) else { return };
        let files = || std::fs::read_dir(folder.path()).unwrap().count();
        let source = "extern \"C\" __global__ void entry(int* x) { x[0] = N; }";
        let one = program(source, &["-DN=1"]);
        let (code, kept) = kernels.code(&one, (8, 0)).unwrap();
        kept.unwrap();
        assert_eq!(files(), 1);
        // Found again by its contents, not by its name.
        let mut renamed = one.clone();
        renamed.name = "another-name".to_owned();
        assert!(kernels.code(&renamed, (8, 0)).unwrap().0 == code);
        assert_eq!(files(), 1);
        for (program, capability) in [
            (program(source, &["-DN=2"]), (8, 0)),
            (program(source, &["-DN=1"]), (9, 0)),
            (program(&format!("{source}\n"), &["-DN=1"]), (8, 0)),
        ] {
            let before = files();
            kernels.code(&program, capability).unwrap().1.unwrap();
            assert_eq!(files(), before + 1);
        }
        // A damaged file is compiled again.
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            std::fs::write(entry.unwrap().path(), "spoiled").unwrap();
        }
        assert!(kernels.code(&one, (8, 0)).unwrap().0 == code);
        // A program that does not compile leaves no file.
        let before = files();
        assert!(kernels.code(&program("?", &[]), (8, 0)).is_err());
        assert_eq!(files(), before);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri cannot load NVIDIA's compiler")]
    fn a_folder_that_cannot_be_written_to_is_told_beside_the_code() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let Some(kernels) = kernels(file.join("folder")) else { return };
        let (code, kept) = kernels.code(&program("__global__ void entry() {}", &[]), (8, 0)).unwrap();
        assert!(!code.is_empty());
        assert!(matches!(kept, Err(Error::KernelFolder { .. })), "{kept:?}");
    }
}
