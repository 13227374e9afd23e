//! Kernels as text, compiled at run time and kept on disk.

#![allow(unsafe_code)]

use super::error::CudaError;
use super::library;
use crate::Dtype;
use crate::plan::{AGAIN, CLASS_ROWS, CudaKernel, GROUP, Item, STREAM_BYTES};
use etcetera::base_strategy::{BaseStrategy, choose_base_strategy};
use libloading::Symbol;
use sha2::{Digest, Sha256};
use std::ffi::{CString, c_char, c_int, c_void};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

const PRELUDE: &str = include_str!("kernels/prelude.cu");
const ATTENTION: &str = include_str!("kernels/attention.cu");
const PREFILL: &str = include_str!("kernels/prefill.cu");
const DECODE: &str = include_str!("kernels/decode.cu");
const CLASSIFY: &str = include_str!("kernels/classify.cu");
const ROWS: &str = include_str!("kernels/rows.cu");
const LIMITS: &str = include_str!("kernels/limits.cu");

/// Names the folder of compiled kernels.
pub const CACHE_VARIABLE: &str = "FLASHTILE_CACHE_DIR";

/// One program for the compiler: what it is called in errors, its text and its constants.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Source {
    pub(super) name: String,
    parts: &'static [&'static str],
    constants: Vec<(&'static str, String)>,
}

/// Bytes of the parameters of the kernels, which assert them.
pub(super) const FORWARD_PARAMS: usize = 360;
pub(super) const CLASSIFY_PARAMS: usize = 72;
pub(super) const ROWS_PARAMS: usize = 184 + 20 * ROWS_RUNS;

/// Runs of rows that one launch moves: parameters of a kernel are at most 4 KiB.
pub(super) const ROWS_RUNS: usize = 194;

/// Whether rows of tensors start on 16 bytes, so that they are copied as vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Access {
    Vector,
    Element,
}

impl Source {
    pub(super) fn forward(kernel: &CudaKernel, access: Access) -> Self {
        let CudaKernel { dtype, head_dim, value_dim, tile, paged, biased, masked, .. } = *kernel;
        let number = |n: usize| n.to_string();
        let flag = |on: bool| u8::from(on).to_string();
        let constants = vec![
            ("DTYPE", dtype_number(dtype).to_string()),
            ("D", number(head_dim)),
            ("DV", number(value_dim)),
            ("WQ", number(tile.warps_q)),
            ("WKV", number(tile.warps_k)),
            ("MF", number(tile.fragments)),
            ("BN", number(tile.warp_keys)),
            ("ST", number(tile.stages)),
            ("CTAS", number(tile.resident)),
            ("QREG", flag(tile.q_in_registers)),
            ("PAGED", flag(paged)),
            ("VECTOR", flag(access == Access::Vector)),
            ("BIAS", flag(biased)),
            ("MASK", flag(masked)),
            ("SHARED", number(kernel.shared_bytes())),
            ("PARAMS", number(FORWARD_PARAMS)),
            ("ITEM", number(size_of::<Item>())),
            ("CLASS_ROWS", number(CLASS_ROWS)),
            ("STREAM", number(STREAM_BYTES)),
            ("GROUP", number(GROUP)),
            ("AGAIN", number(AGAIN)),
        ];
        let suffix = if access == Access::Element { "-elements" } else { "" };
        let parts: &[&str] =
            if tile.divides_keys() { &[PRELUDE, ATTENTION, DECODE] } else { &[PRELUDE, ATTENTION, PREFILL] };
        Self { name: format!("{kernel}{suffix}"), parts, constants }
    }

    pub(super) fn classify() -> Self {
        let constants = vec![("PARAMS", CLASSIFY_PARAMS.to_string()), ("CLASS_ROWS", CLASS_ROWS.to_string())];
        Self { name: "cuda-classify-mask".to_owned(), parts: &[PRELUDE, CLASSIFY], constants }
    }

    pub(super) fn rows() -> Self {
        let constants = vec![("PARAMS", ROWS_PARAMS.to_string()), ("RUNS", ROWS_RUNS.to_string())];
        Self { name: "cuda-move-rows".to_owned(), parts: &[PRELUDE, ROWS], constants }
    }

    pub(super) fn limits() -> Self {
        Self { name: "cuda-limits".to_owned(), parts: &[PRELUDE, LIMITS], constants: Vec::new() }
    }

    fn text(&self) -> String {
        self.parts.join("\n")
    }
}

/// The number of a dtype in the kernels.
pub(super) const fn dtype_number(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::BF16 => 2,
    }
}

type Program = *mut c_void;

/// NVRTC: header-free CUDA C++ to machine code.
pub(super) struct Compiler {
    library: &'static libloading::Library,
    version: (c_int, c_int),
    /// Architectures for which it makes machine code: 90 for 9.0.
    architectures: Vec<c_int>,
    /// Where it was found.
    pub(super) place: String,
}

impl Compiler {
    pub(super) fn load() -> Result<Self, CudaError> {
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

    /// # Safety
    /// `T` is the type of NVRTC's function of this name.
    unsafe fn symbol<T>(&self, name: &[u8]) -> Result<Symbol<'static, T>, CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.library.get(name) }.map_err(|e| CudaError::Missing {
            library: "NVRTC",
            tried: format!("{}, which is too old: {e}", self.place),
        })
    }

    fn failed(&self, kernel: &str, code: c_int) -> CudaError {
        CudaError::Compile {
            kernel: kernel.to_owned(),
            log: format!("NVRTC {}.{} answers with error {code}", self.version.0, self.version.1),
        }
    }

    /// The compiler's name of a device's architecture, and whether it is machine code. For devices newer than the compiler it
    /// is the newest that the driver can translate.
    pub(super) fn target(&self, (major, minor): (u32, u32)) -> (String, bool) {
        let wanted = (major * 10 + minor) as c_int;
        // Hopper's own instructions need the suffix.
        let suffix = if wanted == 90 { "a" } else { "" };
        if self.architectures.is_empty() || self.architectures.contains(&wanted) {
            return (format!("sm_{wanted}{suffix}"), true);
        }
        let newest = self.architectures.iter().filter(|&&a| a <= wanted).max().copied().unwrap_or(wanted);
        (format!("compute_{newest}"), false)
    }

    pub(super) const fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles to machine code, or to text for the driver where the target asks for that.
    fn compile(&self, source: &Source, target: &str, machine_code: bool) -> Result<Vec<u8>, CudaError> {
        let invalid = |_| self.failed(&source.name, 3);
        let text = CString::new(source.text()).map_err(invalid)?;
        let name = CString::new(format!("{}.cu", source.name)).map_err(invalid)?;
        let options = options(source, target).into_iter().map(CString::new);
        let options: Vec<CString> = options.collect::<Result<_, _>>().map_err(invalid)?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Run = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
        // SAFETY: NVRTC's functions of these names have these signatures. The texts end in 0 and outlive the program, which
        // is destroyed once.
        unsafe {
            let create: Symbol<'_, Create> = self.symbol(b"nvrtcCreateProgram\0")?;
            let compile: Symbol<'_, Run> = self.symbol(b"nvrtcCompileProgram\0")?;
            let destroy: Symbol<'_, Destroy> = self.symbol(b"nvrtcDestroyProgram\0")?;
            let mut program: Program = std::ptr::null_mut();
            let code =
                create(&mut program, text.as_ptr(), name.as_ptr(), 0, std::ptr::null(), std::ptr::null());
            if code != 0 {
                return Err(self.failed(&source.name, code));
            }
            let code = compile(program, pointers.len() as c_int, pointers.as_ptr());
            let result = if code == 0 {
                let (size, get): (&[u8], &[u8]) = if machine_code {
                    (b"nvrtcGetCUBINSize\0", b"nvrtcGetCUBIN\0")
                } else {
                    (b"nvrtcGetPTXSize\0", b"nvrtcGetPTX\0")
                };
                self.bytes(program, size, get).map_err(|code| self.failed(&source.name, code))
            } else {
                let log = self.bytes(program, b"nvrtcGetProgramLogSize\0", b"nvrtcGetProgramLog\0");
                let log = log.map_err(|code| self.failed(&source.name, code));
                log.and_then(|log| {
                    let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
                    Err(CudaError::Compile { kernel: source.name.clone(), log })
                })
            };
            destroy(&mut program);
            result
        }
    }

    /// What a pair of functions, one for the size and one for the bytes, gives of a program.
    ///
    /// # Safety
    /// They are such a pair of NVRTC, and the program exists.
    unsafe fn bytes(&self, program: Program, size: &[u8], get: &[u8]) -> Result<Vec<u8>, c_int> {
        let missing = |_| 3;
        // SAFETY: the caller's promise; the second function writes as many bytes as the first said.
        unsafe {
            let size: Symbol<'_, unsafe extern "C" fn(Program, *mut usize) -> c_int> =
                self.symbol(size).map_err(missing)?;
            let get: Symbol<'_, unsafe extern "C" fn(Program, *mut c_char) -> c_int> =
                self.symbol(get).map_err(missing)?;
            let mut n = 0;
            let code = size(program, &mut n);
            if code != 0 {
                return Err(code);
            }
            let mut bytes = vec![0u8; n];
            let code = get(program, bytes.as_mut_ptr().cast());
            if code == 0 { Ok(bytes) } else { Err(code) }
        }
    }
}

fn options(source: &Source, target: &str) -> Vec<String> {
    let mut options =
        vec![format!("--gpu-architecture={target}"), "--std=c++17".to_owned(), "-default-device".to_owned()];
    // Functions that a kernel has no use for are part of what kernels share.
    options.push("-diag-suppress=177".to_owned());
    options.extend(source.constants.iter().map(|(name, value)| format!("-D{name}={value}")));
    options
}

/// Compiled kernels on disk. Each is a file named by a digest of its text, options, architecture and compiler; it starts with
/// a digest of the rest, and one that is not whole is compiled again.
#[derive(Debug)]
pub(super) struct DiskCache {
    folder: Option<PathBuf>,
}

impl DiskCache {
    /// The folder that [`CACHE_VARIABLE`] names, or `flashtile` in the user's folder of caches; none where there is no such.
    pub(super) fn new() -> Self {
        let folder = match std::env::var_os(CACHE_VARIABLE) {
            Some(folder) if folder.is_empty() => None,
            Some(folder) => Some(folder.into()),
            None => choose_base_strategy().ok().map(|user| user.cache_dir().join("flashtile")),
        };
        Self { folder }
    }

    pub(super) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
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
    fn write(&self, key: &str, code: &[u8]) -> Result<(), CudaError> {
        let (Some(folder), Some(path)) = (&self.folder, self.path(key)) else { return Ok(()) };
        let failed = |error: std::io::Error| CudaError::KernelFolder {
            path: folder.clone(),
            error: error.to_string(),
        };
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
    pub(super) disk: DiskCache,
    /// Of the compiler that made the files: known without loading it.
    compiler: Mutex<Option<std::sync::Arc<Compiler>>>,
}

impl Kernels {
    pub(super) fn new() -> Self {
        Self { disk: DiskCache::new(), compiler: Mutex::new(None) }
    }

    pub(super) fn compiler(&self) -> Result<std::sync::Arc<Compiler>, CudaError> {
        let mut slot = self.compiler.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if slot.is_none() {
            *slot = Some(std::sync::Arc::new(Compiler::load()?));
        }
        slot.clone().ok_or(CudaError::Missing { library: "NVRTC", tried: String::new() })
    }

    /// Machine code of a kernel, from disk or from the compiler. A folder that cannot be written to is no obstacle to
    /// running; [`Cuda::prewarm`](super::Cuda::prewarm) reports it.
    pub(super) fn code(
        &self,
        source: &Source,
        capability: (u32, u32),
    ) -> Result<(Vec<u8>, Result<(), CudaError>), CudaError> {
        let compiler = self.compiler()?;
        let (target, machine_code) = compiler.target(capability);
        let mut digest = Sha256::new();
        digest.update(source.text());
        for option in options(source, &target) {
            digest.update(option);
            digest.update([0]);
        }
        digest.update(format!("{:?}", compiler.version));
        let key = hex(&digest.finalize());
        if let Some(code) = self.disk.read(&key) {
            return Ok((code, Ok(())));
        }
        let code = compiler.compile(source, &target, machine_code)?;
        let kept = self.disk.write(&key, &code);
        Ok((code, kept))
    }
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiler").field("version", &self.version).field("place", &self.place).finish()
    }
}

#[cfg(test)]
#[allow(clippy::print_stdout, reason = "a test that does not run says so")]
mod tests {
    use super::*;
    use crate::plan::{CudaPlan, PlanOptions, devices};
    use crate::{Dims, MaskKind, ProblemDesc, QOffset, Visibility};
    use rayon::prelude::*;
    use std::collections::HashMap;

    /// The compiler, if there is one; says so where there is none.
    fn compiler() -> Option<Compiler> {
        Compiler::load().map_err(|why| println!("SKIPPED, no kernel was compiled: {why}")).ok()
    }

    /// Kernels of every kind: dtypes, widths, tiles, pages, masks.
    fn problems() -> Vec<ProblemDesc> {
        let dims = |q_len: usize, dim: usize, value_dim: usize| Dims {
            batch: 1,
            q_heads: 8,
            kv_heads: 8,
            q_len,
            kv_len: 4096,
            head_dim: dim,
            value_dim,
        };
        let mut all = Vec::new();
        for (dtype, q_len, dim, value_dim) in [
            (Dtype::BF16, 4096, 64, 64),
            (Dtype::BF16, 1, 128, 128),
            (Dtype::F16, 100, 96, 96),
            (Dtype::BF16, 8192, 128, 128),
            (Dtype::F16, 300, 256, 256),
            (Dtype::BF16, 200, 512, 512),
            (Dtype::F32, 50, 192, 128),
        ] {
            all.push(ProblemDesc::new(dims(q_len, dim, value_dim), dtype));
        }
        let mut masked = ProblemDesc::new(dims(70, 64, 64), Dtype::F16);
        masked.mask = Some(MaskKind::Bool);
        let mut cached = ProblemDesc::cached([8, 2], [80, 80], Dtype::F32, &[(3, 500), (90, 900)]);
        cached.tree = true;
        cached.visibility = Visibility::causal();
        let mut capped = ProblemDesc::new(dims(1, 64, 64), Dtype::BF16);
        capped.softcap = Some(30.0);
        for desc in [&mut masked, &mut capped] {
            desc.q_offset = Some(QOffset::BottomRight);
        }
        all.extend([masked, cached, capped]);
        all
    }

    #[test]
    fn kernels_compile_for_every_capability() {
        let Some(compiler) = compiler() else { return };
        let mut wanted: HashMap<(String, Source), bool> = HashMap::new();
        for facts in [devices::A100, devices::RTX_4090, devices::H100] {
            let (target, machine_code) = compiler.target(facts.capability);
            let mut add = |source| wanted.insert((target.clone(), source), machine_code);
            for (n, desc) in problems().into_iter().enumerate() {
                let plan = CudaPlan::new(&desc.validate().unwrap(), &facts, PlanOptions::default()).unwrap();
                for kernel in plan.kernels() {
                    let access = if n % 3 == 2 { Access::Element } else { Access::Vector };
                    add(Source::forward(kernel, access));
                }
            }
            for source in [Source::classify(), Source::rows(), Source::limits()] {
                add(source);
            }
        }
        println!("{} programs", wanted.len());
        let failed: Vec<String> = wanted
            .into_par_iter()
            .filter_map(|((target, source), machine_code)| {
                let code = compiler.compile(&source, &target, machine_code);
                code.err().map(|why| format!("{target}: {why}"))
            })
            .collect();
        assert!(failed.is_empty(), "{}", failed.join("\n"));
    }

    #[test]
    fn a_kernel_that_does_not_compile_is_named_with_the_log() {
        let Some(compiler) = compiler() else { return };
        let mut source = Source::classify();
        source.constants[0] = ("PARAMS", "1".to_owned());
        let (target, machine_code) = compiler.target((8, 0));
        match compiler.compile(&source, &target, machine_code) {
            Err(CudaError::Compile { kernel, log }) => {
                assert_eq!(kernel, "cuda-classify-mask");
                assert!(log.contains("static assertion failed"), "{log}");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn targets_of_devices() {
        let Some(compiler) = compiler() else { return };
        assert_eq!(compiler.target((9, 0)), ("sm_90a".to_owned(), true));
        assert_eq!(compiler.target((8, 9)), ("sm_89".to_owned(), true));
        // A device that the compiler does not know is given text for its driver.
        let (target, machine_code) = compiler.target((99, 0));
        assert!(target.starts_with("compute_") && !machine_code, "{target}");
    }

    #[test]
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
}
