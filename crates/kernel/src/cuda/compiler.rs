//! From CUDA C++ to machine code, by NVRTC.

#![allow(unsafe_code)]

use super::error::Error;
use super::library;
use crate::device::Constant;
use crate::source::{Instance, Target};
use libloading::Symbol;
use std::ffi::{CString, c_char, c_int, c_void};

/// One program for the compiler: header-free CUDA C++.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Program {
    /// The name of the program in errors.
    pub name: String,
    /// The C++ source; line numbers of the compiler's log count its lines.
    pub source: String,
    /// Options of this program, as `-DN=4`; the compiler also gets a device, the language (C++17) and
    /// execution on the device.
    pub options: Vec<String>,
}

impl Program {
    /// The printed source of an instance with the values of its `#[constant]` parameters, in order.
    #[must_use]
    pub fn of(instance: &Instance, constants: &[Constant]) -> Self {
        let options = instance.cuda_options(constants.iter().copied());
        Self { name: instance.entry(), source: instance.source(Target::Cuda), options }
    }
}

/// The target of a compilation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Architecture {
    /// The compiler's name of it: `sm_90a`.
    pub name: String,
    /// Machine code, or else PTX that the driver translates.
    pub machine_code: bool,
}

type Handle = *mut c_void;

/// NVRTC, loaded.
pub struct Compiler {
    library: &'static libloading::Library,
    version: (c_int, c_int),
    /// Architectures for which it makes machine code: 90 for 9.0.
    architectures: Vec<c_int>,
    place: String,
}

impl Compiler {
    /// Finds NVRTC: the file that [`NVRTC_VARIABLE`](super::NVRTC_VARIABLE) names, or else a file on
    /// the loader's search path or in the toolkit's folders.
    ///
    /// # Errors
    /// [`Error::Missing`].
    pub fn load() -> Result<Self, Error> {
        let (library, place) = library::nvrtc()?;
        let mut compiler = Self { library, version: (0, 0), architectures: Vec::new(), place: place.clone() };
        let failed = |code| compiler.failed("NVRTC", code);
        let mut version = (0, 0);
        // SAFETY: the function is NVRTC's of this name, whose signature this is; it writes two integers.
        let code = unsafe {
            let get: Symbol<'_, unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int> =
                compiler.symbol(b"nvrtcVersion\0")?;
            get(&mut version.0, &mut version.1)
        };
        if code != 0 {
            return Err(failed(code));
        }
        let mut architectures = Vec::new();
        // SAFETY: NVRTC's functions of these names; the second writes as many integers as the first said.
        unsafe {
            let count: Symbol<'_, unsafe extern "C" fn(*mut c_int) -> c_int> =
                compiler.symbol(b"nvrtcGetNumSupportedArchs\0")?;
            let list: Symbol<'_, unsafe extern "C" fn(*mut c_int) -> c_int> =
                compiler.symbol(b"nvrtcGetSupportedArchs\0")?;
            let mut n = 0;
            if count(&mut n) == 0 && n > 0 {
                architectures = vec![0; n as usize];
                if list(architectures.as_mut_ptr()) != 0 {
                    architectures.clear();
                }
            }
        }
        compiler.version = version;
        compiler.architectures = architectures;
        Ok(compiler)
    }

    /// Its version, as (12, 8).
    #[must_use]
    pub const fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Where it was found.
    #[must_use]
    pub fn place(&self) -> &str {
        &self.place
    }

    /// The target for a device of a compute capability: its machine code, or, for devices newer than the
    /// compiler, PTX for the newest architecture that the driver can translate.
    #[must_use]
    pub fn target(&self, (major, minor): (u32, u32)) -> Architecture {
        let wanted = (major * 10 + minor) as c_int;
        // Hopper's own instructions need the suffix, which compilers before 12.0 refuse.
        let suffix = if wanted == 90 && self.version.0 >= 12 { "a" } else { "" };
        if self.architectures.is_empty() || self.architectures.contains(&wanted) {
            return Architecture { name: format!("sm_{wanted}{suffix}"), machine_code: true };
        }
        let newest = self.architectures.iter().filter(|&&a| a <= wanted).max().copied().unwrap_or(wanted);
        Architecture { name: format!("compute_{newest}"), machine_code: false }
    }

    /// Compiles a program.
    ///
    /// # Errors
    /// [`Error::Compile`] with the log.
    pub fn compile(&self, program: &Program, target: &Architecture) -> Result<Vec<u8>, Error> {
        let invalid = |_| self.failed(&program.name, 3);
        let source = CString::new(program.source.as_str()).map_err(invalid)?;
        let name = CString::new(format!("{}.cu", program.name)).map_err(invalid)?;
        let options = options(program, target).into_iter().map(CString::new);
        let options: Vec<CString> = options.collect::<Result<_, _>>().map_err(invalid)?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        type Create = unsafe extern "C" fn(
            *mut Handle,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Run = unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int;
        type Destroy = unsafe extern "C" fn(*mut Handle) -> c_int;
        // SAFETY: NVRTC's functions of these names have these signatures. The strings end in 0 and outlive the program, which
        // is destroyed once.
        unsafe {
            let create: Symbol<'_, Create> = self.symbol(b"nvrtcCreateProgram\0")?;
            let compile: Symbol<'_, Run> = self.symbol(b"nvrtcCompileProgram\0")?;
            let destroy: Symbol<'_, Destroy> = self.symbol(b"nvrtcDestroyProgram\0")?;
            let mut handle: Handle = std::ptr::null_mut();
            let code =
                create(&mut handle, source.as_ptr(), name.as_ptr(), 0, std::ptr::null(), std::ptr::null());
            if code != 0 {
                return Err(self.failed(&program.name, code));
            }
            let code = compile(handle, pointers.len() as c_int, pointers.as_ptr());
            let result = if code == 0 {
                let (size, get): (&[u8], &[u8]) = if target.machine_code {
                    (b"nvrtcGetCUBINSize\0", b"nvrtcGetCUBIN\0")
                } else {
                    (b"nvrtcGetPTXSize\0", b"nvrtcGetPTX\0")
                };
                self.bytes(handle, size, get).map_err(|code| self.failed(&program.name, code))
            } else {
                let log = self.bytes(handle, b"nvrtcGetProgramLogSize\0", b"nvrtcGetProgramLog\0");
                let log = log.map_err(|code| self.failed(&program.name, code));
                log.and_then(|log| {
                    let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
                    Err(Error::Compile { kernel: program.name.clone(), log })
                })
            };
            destroy(&mut handle);
            result
        }
    }

    /// # Safety
    /// `T` is the type of NVRTC's function of this name.
    unsafe fn symbol<T>(&self, name: &[u8]) -> Result<Symbol<'static, T>, Error> {
        // SAFETY: the caller gives the type of the function.
        unsafe { self.library.get(name) }.map_err(|e| Error::Missing {
            library: "NVRTC",
            tried: format!("{}, which is too old: {e}", self.place),
        })
    }

    fn failed(&self, kernel: &str, code: c_int) -> Error {
        Error::Compile {
            kernel: kernel.to_owned(),
            log: format!("NVRTC {}.{} answers with error {code}", self.version.0, self.version.1),
        }
    }

    /// The output of a program, from a pair of functions: one for the size and one for the bytes.
    ///
    /// # Safety
    /// They are such a pair of NVRTC, and the program exists.
    unsafe fn bytes(&self, handle: Handle, size: &[u8], get: &[u8]) -> Result<Vec<u8>, c_int> {
        let missing = |_| 3;
        // SAFETY: the caller gives such a pair; the second function writes as many bytes as the first says.
        unsafe {
            let size: Symbol<'_, unsafe extern "C" fn(Handle, *mut usize) -> c_int> =
                self.symbol(size).map_err(missing)?;
            let get: Symbol<'_, unsafe extern "C" fn(Handle, *mut c_char) -> c_int> =
                self.symbol(get).map_err(missing)?;
            let mut n = 0;
            let code = size(handle, &mut n);
            if code != 0 {
                return Err(code);
            }
            let mut bytes = vec![0u8; n];
            let code = get(handle, bytes.as_mut_ptr().cast());
            if code == 0 { Ok(bytes) } else { Err(code) }
        }
    }
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiler").field("version", &self.version).field("place", &self.place).finish()
    }
}

/// All options of a compilation, in the order in which the compiler is given them.
pub(super) fn options(program: &Program, target: &Architecture) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={}", target.name),
        "--std=c++17".to_owned(),
        "-default-device".to_owned(),
    ];
    // Kernels share device functions, which not every kernel uses.
    options.push("-diag-suppress=177".to_owned());
    // The compiler refuses an option that is given twice.
    let own = program.options.iter().filter(|&option| !options.contains(option)).cloned().collect::<Vec<_>>();
    options.extend(own);
    options
}

#[cfg(test)]
#[allow(clippy::print_stdout, reason = "a test that does not run says so")]
mod tests {
    use super::*;

    /// The compiler, if there is one; says so where there is none.
    fn compiler() -> Option<Compiler> {
        Compiler::load().map_err(|why| println!("SKIPPED, nothing was compiled: {why}")).ok()
    }

    fn program(source: &str, options: &[&str]) -> Program {
        let options = options.iter().map(|&option| option.to_owned()).collect();
        Program { name: "a-kernel".to_owned(), source: source.to_owned(), options }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri cannot load NVIDIA's compiler")]
    fn a_program_compiles_to_machine_code_or_text() {
        let Some(compiler) = compiler() else { return };
        let empty = program("extern \"C\" __global__ void entry() {}", &[]);
        let code = compiler.compile(&empty, &compiler.target((8, 0))).unwrap();
        assert_eq!(&code[..4], b"\x7fELF");
        let ptx = Architecture { name: "compute_80".to_owned(), machine_code: false };
        let ptx = compiler.compile(&empty, &ptx).unwrap();
        assert!(String::from_utf8_lossy(&ptx).contains(".entry entry"));
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri cannot load NVIDIA's compiler")]
    fn options_are_the_programs_own() {
        let Some(compiler) = compiler() else { return };
        let source = "extern \"C\" __global__ void entry(float* x) { x[0] = x[1] * x[2] + x[3]; }";
        let target = Architecture { name: "compute_80".to_owned(), machine_code: false };
        let ptx = |options: &[&str]| {
            let code = compiler.compile(&program(source, options), &target).unwrap();
            String::from_utf8_lossy(&code).into_owned()
        };
        assert!(ptx(&[]).contains("fma.rn"));
        assert!(!ptx(&["--fmad=false"]).contains("fma.rn"));
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri cannot load NVIDIA's compiler")]
    fn a_program_that_does_not_compile_is_named_with_the_line() {
        let Some(compiler) = compiler() else { return };
        let wrong = program("// one\n// two\nstatic_assert(N == 2, \"N is two\");\n", &["-DN=1"]);
        match compiler.compile(&wrong, &compiler.target((8, 0))) {
            Err(Error::Compile { kernel, log }) => {
                assert_eq!(kernel, "a-kernel");
                assert!(log.contains("a-kernel.cu(3): error: static assertion failed"), "{log}");
            }
            other => panic!("{other:?}"),
        }
        // A source that no C string can hold.
        assert!(matches!(
            compiler.compile(&program("\0", &[]), &compiler.target((8, 0))),
            Err(Error::Compile { .. })
        ));
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri cannot load NVIDIA's compiler")]
    fn targets_of_devices() {
        let Some(compiler) = compiler() else { return };
        let target = |capability| compiler.target(capability);
        assert_eq!(target((9, 0)), Architecture { name: "sm_90a".to_owned(), machine_code: true });
        assert_eq!(target((8, 9)), Architecture { name: "sm_89".to_owned(), machine_code: true });
        // A device that the compiler does not know is given PTX for its driver.
        let Architecture { name, machine_code } = target((99, 0));
        assert!(name.starts_with("compute_") && !machine_code, "{name}");
        // Compilers before 12.0 know Hopper without its own instructions.
        let old =
            Compiler { version: (11, 8), architectures: vec![80, 90], place: String::new(), ..compiler };
        assert_eq!(old.target((9, 0)), Architecture { name: "sm_90".to_owned(), machine_code: true });
    }
}
