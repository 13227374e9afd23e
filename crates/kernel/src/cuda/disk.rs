//! Machine code, from disk or from the compiler.

use super::compiler::{Compiler, Program, options};
use super::error::Error;
use crate::disk::{DiskCache, key};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Files of machine code.
const EXTENSION: &str = "cubin";

/// The compiler, loaded when it is first needed, and the kernels that it has compiled before.
#[derive(Debug)]
pub(super) struct Kernels {
    disk: DiskCache,
    compiler: Mutex<Option<Arc<Compiler>>>,
}

impl Kernels {
    pub(super) fn new() -> Self {
        Self { disk: DiskCache::new(EXTENSION), compiler: Mutex::new(None) }
    }

    pub(super) fn folder(&self) -> Option<&Path> {
        self.disk.folder()
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
        let (options, version) = (options(program, &target), format!("{:?}", compiler.version()));
        let texts = [program.source.as_str(), &version];
        let key = key(texts.into_iter().chain(options.iter().map(String::as_str)));
        if let Some(code) = self.disk.read(&key) {
            return Ok((code, Ok(())));
        }
        let code = compiler.compile(program, &target)?;
        let kept = self.disk.write(&key, &code).map_err(Error::from);
        Ok((code, kept))
    }
}

#[cfg(test)]
#[allow(clippy::print_stdout, reason = "a test that does not run says so")]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn program(source: &str, options: &[&str]) -> Program {
        let options = options.iter().map(|&option| option.to_owned()).collect();
        Program { name: "a-kernel".to_owned(), source: source.to_owned(), options }
    }

    /// Compiled kernels in a folder; none where there is no compiler, which is said.
    fn kernels(folder: PathBuf) -> Option<Kernels> {
        let kernels =
            Kernels { disk: DiskCache::in_folder(Some(folder), EXTENSION), compiler: Mutex::new(None) };
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
