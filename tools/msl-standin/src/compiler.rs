//! Finds clang, and compiles texts with it.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::error::{CompileError, Missing};
use crate::fiber;
use crate::library::Library;
use crate::text::{self, Complaint, Parsed, Source};

/// The environment variable that names the compiler: a `clang++`, or a `zig`, which holds one.
pub const CLANG_VARIABLE: &str = "FLASHTILE_CLANG";

const HEADER: &str = include_str!("../include/metal_stdlib");
const FILE: &str = "kernel.metal";

/// A clang that compiles the stand-in.
#[derive(Clone, Debug)]
pub struct Compiler {
    program: PathBuf,
    is_zig: bool,
}

/// What both steps of the compiler are told.
const LANGUAGE: &[&str] = &[
    "--target=x86_64-linux-gnu",
    "-x",
    "clcpp",
    "-cl-std=clc++1.0",
    "-cl-no-stdinc",
    "-cl-single-precision-constant",
    "-Xclang",
    "-cl-ext=-all,+cl_khr_fp16,+__cl_clang_function_pointers",
    "-D__METAL_VERSION__=310",
    "-D__HAVE_BFLOAT__=1",
    "-fno-color-diagnostics",
    "-fno-caret-diagnostics",
];

const FLAGS: &[&str] = &[
    "-O2",
    "-fPIC",
    // What a clang for this machine takes, whatever machine this is.
    "-march=x86-64-v3",
    // Each operation on half and bfloat rounds, and nothing else does.
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    "-ffp-contract=off",
    "-fno-math-errno",
    // An overflow does what it does on a GPU, and the compiler draws no conclusions from it.
    "-fwrapv",
    // Accesses are told to the runner, of which those of more than 16 bytes are not.
    "-fsanitize=thread",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-mllvm",
    "-tsan-instrument-atomics=0",
    "-fno-stack-protector",
    "-fno-exceptions",
    "-fno-asynchronous-unwind-tables",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wconversion",
    "-Wno-unused",
    "-Wno-unused-parameter",
    "-Wno-sign-conversion",
    "-Wno-implicit-int-conversion",
    "-Wno-implicit-float-conversion",
    "-Wno-implicit-int-float-conversion",
    "-Wno-float-conversion",
    "-Wno-shorten-64-to-32",
    "-Wno-duplicate-decl-specifier",
    "-Wno-missing-braces",
    "-Wno-pass-failed",
    "-Wno-cast-function-type",
    "-ferror-limit=20",
];

impl Compiler {
    /// Looks for a compiler: the one that [`CLANG_VARIABLE`] names and no other where it is set, else `clang++` and
    /// `zig` on the path, else the Python package `ziglang`.
    ///
    /// # Errors
    /// Where there is none, where it cannot compile the stand-in, and where kernels cannot run.
    pub fn find() -> Result<Self, Missing> {
        fiber::SUPPORTED.map_err(Missing::Machine)?;
        has_instructions().map_err(Missing::Machine)?;
        if let Some(program) = std::env::var_os(CLANG_VARIABLE) {
            let program = PathBuf::from(program);
            // It is started in another folder; a bare name is looked for on the path.
            let bare = program.components().count() == 1;
            return Self::at(if bare { program } else { std::path::absolute(&program).unwrap_or(program) });
        }
        let mut unfit = None;
        let on_path = std::env::var_os("PATH");
        let folders: Vec<PathBuf> = on_path.iter().flat_map(std::env::split_paths).collect();
        let newest = (14..40).rev().map(|v| format!("clang++-{v}"));
        for name in ["clang++".to_owned()].into_iter().chain(newest).chain(["zig".to_owned()]) {
            for program in folders.iter().map(|f| f.join(&name)).filter(|p| p.is_file()) {
                match Self::at(program) {
                    Ok(found) => return Ok(found),
                    Err(why) => unfit = Some(why),
                }
            }
        }
        let ask = "import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), 'zig'))";
        let said = Command::new("python3").args(["-c", ask]).stdin(Stdio::null()).output();
        if let Ok(Output { status, stdout, .. }) = said
            && status.success()
        {
            return Self::at(PathBuf::from(String::from_utf8_lossy(&stdout).trim()));
        }
        let tried = format!("{CLANG_VARIABLE}, clang++ and zig on the path, and ziglang of python3");
        Err(unfit.unwrap_or(Missing::Compiler(tried)))
    }

    /// The compiler at a path, once it has compiled a kernel.
    fn at(program: PathBuf) -> Result<Self, Missing> {
        let is_zig = program.file_stem() == Some(OsStr::new("zig"));
        let compiler = Self { program, is_zig };
        let unfit = |said: String| Missing::Unfit { program: compiler.program.display().to_string(), said };
        let probe =
            "#include <metal_stdlib>\nkernel void probe(device half* x [[buffer(0)]]) { x[0] *= x[1]; }\n";
        compiler.compile(probe).map_err(|e| unfit(e.messages))?;
        Ok(compiler)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        if self.is_zig {
            command.arg("clang");
        }
        command.stdin(Stdio::null());
        command
    }

    /// Compiles a text.
    ///
    /// # Errors
    /// What is wrong with the text, line by line.
    pub fn compile(&self, text: &str) -> Result<Library, CompileError> {
        let folder = folder()?;
        let parsed = self.read(folder.path(), text)?;
        self.clang(folder.path(), &["-c", FILE, "-o", "kernel.o"])?;
        let mut linker = Command::new(&self.program);
        linker.current_dir(folder.path()).stdin(Stdio::null());
        if self.is_zig {
            linker.args(["ld.lld", "-shared", "-o", "kernel.so", "kernel.o"]);
        } else {
            linker.args(["-shared", "-nostdlib", "-o", "kernel.so", "kernel.o"]);
        }
        done(&linker.output(), "the linker")?;
        Library::load(&folder.path().join("kernel.so"), parsed).map_err(|e| broken(&e))
    }

    /// Checks a text as [`compile`](Self::compile) does, in less time: nothing that could run is made of it.
    ///
    /// # Errors
    /// What is wrong with the text, line by line.
    pub fn check(&self, text: &str) -> Result<(), CompileError> {
        let folder = folder()?;
        self.read(folder.path(), text)?;
        self.clang(folder.path(), &["-fsyntax-only", FILE])
    }

    /// Reads a text and leaves what clang shall compile in the folder.
    fn read(&self, folder: &Path, text: &str) -> Result<Parsed, CompileError> {
        let text = text::take_includes(text).map_err(complain)?;
        let text = if text::needs_preprocessor(&text) { self.preprocess(folder, &text)? } else { text };
        let parsed = text::parse(&text).map_err(complain)?;
        let write = |name: &str, what: &str| {
            fs::write(folder.join(name), what).map_err(|e| broken(&format!("cannot write {name}: {e}")))
        };
        write("metal_stdlib", HEADER)?;
        write(FILE, &assemble(&parsed))?;
        Ok(parsed)
    }

    fn clang(&self, folder: &Path, arguments: &[&str]) -> Result<(), CompileError> {
        let mut clang = self.command();
        clang.current_dir(folder).args(LANGUAGE).args(FLAGS).args(["-isystem", "."]).args(arguments);
        done(&clang.output(), "clang").map(|_| ())
    }

    fn preprocess(&self, folder: &Path, text: &str) -> Result<String, CompileError> {
        fs::write(folder.join(FILE), text).map_err(|e| broken(&format!("cannot write {FILE}: {e}")))?;
        let mut clang = self.command();
        clang.current_dir(folder).args(LANGUAGE).args(["-Werror", "-E", FILE]);
        done(&clang.output(), "clang")
    }
}

#[cfg(target_arch = "x86_64")]
fn has_instructions() -> Result<(), &'static str> {
    let has = std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("f16c")
        && std::arch::is_x86_feature_detected!("fma")
        && std::arch::is_x86_feature_detected!("bmi2");
    if has { Ok(()) } else { Err("it needs a processor with AVX2, F16C, FMA and BMI2") }
}

#[cfg(not(target_arch = "x86_64"))]
fn has_instructions() -> Result<(), &'static str> {
    Err("it needs x86-64")
}

fn folder() -> Result<tempfile::TempDir, CompileError> {
    tempfile::tempdir().map_err(|e| broken(&format!("no folder to compile in: {e}")))
}

fn broken(what: &str) -> CompileError {
    CompileError { messages: what.to_owned() }
}

fn complain(c: Complaint) -> CompileError {
    CompileError { messages: format!("{FILE}:{}: error: {}", c.line, c.what) }
}

/// What a program wrote; its complaints, in the words of Metal, if it failed.
fn done(output: &std::io::Result<Output>, what: &str) -> Result<String, CompileError> {
    match output {
        Ok(o) if o.status.success() => Ok(String::from_utf8_lossy(&o.stdout).into_owned()),
        Ok(o) => {
            let mut said = String::from_utf8_lossy(&o.stderr).into_owned();
            for (theirs, ours) in [
                ("const __global_host", "constant"),
                ("__global_host", "constant"),
                ("__global_device", "device"),
                ("__local", "threadgroup"),
                ("__private", "thread"),
                ("__generic", "(no address space)"),
                ("__bf16", "bfloat"),
            ] {
                said = said.replace(theirs, ours);
            }
            Err(broken(&format!("{what}: {}\n{said}", o.status)))
        }
        Err(e) => Err(broken(&format!("{what} does not start: {e}"))),
    }
}

/// The header, the text, and one function for each kernel that takes its arguments out of the context.
fn assemble(parsed: &Parsed) -> String {
    let mut out = format!("#include \"metal_stdlib\"\n# 1 \"{FILE}\"\n{}\n", parsed.text);
    // The type of a kernel is asked for by its name, which counts as a pointer to a function.
    out.push_str("#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable\n");
    for (k, kernel) in parsed.kernels.iter().enumerate() {
        // Where an argument does not fit, the message names the line of the kernel.
        out.push_str(&format!("# {} \"{FILE}\"\n", kernel.line));
        let call = &kernel.call;
        let mut arguments = Vec::new();
        let mut positions = Vec::new();
        for (i, source) in kernel.parameters.iter().enumerate() {
            let ty = format!("metal::msl_param<{i}, decltype({call})>");
            arguments.push(match source {
                Source::Buffer(n, None) => format!("metal::msl_buffer_argument<{ty}>(msl_c->buffers[{n}])"),
                Source::Buffer(n, Some(on)) => {
                    format!("metal::msl_buffer_argument<{ty}>({on} ? msl_c->buffers[{n}] : 0)")
                }
                Source::Threadgroup(n) => {
                    format!("metal::msl_threadgroup_argument<{ty}>(msl_c->threadgroups[{n}])")
                }
                Source::Vector(name) => {
                    positions.push(ty.clone());
                    format!("metal::msl_vector_argument<{ty}>(msl_c->{name})")
                }
                Source::Scalar(name) => format!("metal::msl_scalar_argument<{ty}>(msl_c->{name})"),
            });
        }
        out.push_str(&format!(
            "static_assert(metal::msl_one_kind<{}>(), \"positions and sizes of a kernel are all scalars or all vectors\"); \
             extern \"C\" void msl_entry_{k}(const __global msl_context* msl_c) {{ {call}({}); }}\n",
            positions.join(", "),
            arguments.join(", ")
        ));
    }
    let mut data = String::new();
    for c in &parsed.constants {
        for name in [format!("msl_fc_{}", c.index), format!("msl_fcd_{}", c.index)] {
            data.push_str(&format!(".globl {name}\\n.protected {name}\\n{name}: .zero 8\\n"));
        }
    }
    if !data.is_empty() {
        out.push_str(&format!("__asm__(\".data\\n.p2align 3\\n{data}.text\\n\");\n"));
    }
    out
}
