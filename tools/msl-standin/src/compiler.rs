//! Finds clang, and compiles programs with it.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::error::{CompileError, FindError};
use crate::fiber;
use crate::library::Library;
use crate::source::diagnostic::Diagnostic;
use crate::source::kernels::Argument;
use crate::source::{Program, includes, parse};

/// The environment variable that names the compiler: a `clang++`, or a `zig`, which contains one.
pub const CLANG_VARIABLE: &str = "FLASHTILE_CLANG";

const HEADER: &str = include_str!("../include/metal_stdlib");
const FILE: &str = "kernel.metal";

/// A clang that can compile the stand-in.
#[derive(Clone, Debug)]
pub struct Compiler {
    program: PathBuf,
    is_zig: bool,
}

/// Options of the preprocessor and of the compiler.
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
    // Compiled kernels do not depend on the machine that compiles them.
    "-march=x86-64-v3",
    // Each operation on half and bfloat rounds once.
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    "-ffp-contract=off",
    "-fno-math-errno",
    // Signed overflow wraps, as on a GPU.
    "-fwrapv",
    // Accesses of up to 16 bytes are reported to the runner; vectorised loops would make larger ones.
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
    /// Looks for a compiler: the one that [`CLANG_VARIABLE`] names, if it is set; otherwise `clang++` and `zig` on the path,
    /// then the Python package `ziglang`.
    ///
    /// # Errors
    /// [`FindError`] if none is found, if it cannot compile the stand-in, or if this machine cannot run kernels.
    pub fn find() -> Result<Self, FindError> {
        fiber::SUPPORTED.map_err(FindError::Machine)?;
        has_instructions().map_err(FindError::Machine)?;
        if let Some(program) = std::env::var_os(CLANG_VARIABLE) {
            let program = PathBuf::from(program);
            // The compiler is started in another folder; a bare name is searched for on the path.
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
        let script = "import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), 'zig'))";
        let answer = Command::new("python3").args(["-c", script]).stdin(Stdio::null()).output();
        if let Ok(Output { status, stdout, .. }) = answer
            && status.success()
        {
            return Self::at(PathBuf::from(String::from_utf8_lossy(&stdout).trim()));
        }
        let tried = format!("{CLANG_VARIABLE}, clang++ and zig on the path, and ziglang of python3");
        Err(unfit.unwrap_or(FindError::Compiler(tried)))
    }

    /// The compiler at a path, if it compiles a kernel.
    fn at(program: PathBuf) -> Result<Self, FindError> {
        let is_zig = program.file_stem() == Some(OsStr::new("zig"));
        let compiler = Self { program, is_zig };
        let unfit =
            |output: String| FindError::Unfit { program: compiler.program.display().to_string(), output };
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

    /// Compiles a program.
    ///
    /// # Errors
    /// [`CompileError`] with the line of each error.
    pub fn compile(&self, source: &str) -> Result<Library, CompileError> {
        let folder = folder()?;
        let program = self.read(folder.path(), source)?;
        self.clang(folder.path(), &["-c", FILE, "-o", "kernel.o"])?;
        let mut linker = Command::new(&self.program);
        linker.current_dir(folder.path()).stdin(Stdio::null());
        if self.is_zig {
            linker.args(["ld.lld", "-shared", "-o", "kernel.so", "kernel.o"]);
        } else {
            linker.args(["-shared", "-nostdlib", "-o", "kernel.so", "kernel.o"]);
        }
        finished(&linker.output(), "the linker")?;
        Library::load(&folder.path().join("kernel.so"), program).map_err(|e| failed(&e))
    }

    /// Checks a program as [`compile`](Self::compile) does, in less time: no code is generated.
    ///
    /// # Errors
    /// [`CompileError`] with the line of each error.
    pub fn check(&self, source: &str) -> Result<(), CompileError> {
        let folder = folder()?;
        self.read(folder.path(), source)?;
        self.clang(folder.path(), &["-fsyntax-only", FILE])
    }

    /// Reads a program, and writes what clang compiles into the folder.
    fn read(&self, folder: &Path, source: &str) -> Result<Program, CompileError> {
        let source = includes::strip_includes(source).map_err(located)?;
        let source =
            if includes::needs_preprocessor(&source) { self.preprocess(folder, &source)? } else { source };
        let program = parse(&source).map_err(located)?;
        write(folder, "metal_stdlib", HEADER)?;
        write(folder, FILE, &assemble(&program))?;
        Ok(program)
    }

    fn clang(&self, folder: &Path, arguments: &[&str]) -> Result<(), CompileError> {
        let mut clang = self.command();
        clang.current_dir(folder).args(LANGUAGE).args(FLAGS).args(["-isystem", "."]).args(arguments);
        finished(&clang.output(), "clang").map(|_| ())
    }

    fn preprocess(&self, folder: &Path, source: &str) -> Result<String, CompileError> {
        write(folder, FILE, source)?;
        let mut clang = self.command();
        clang.current_dir(folder).args(LANGUAGE).args(["-Werror", "-E", FILE]);
        finished(&clang.output(), "clang")
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
    tempfile::tempdir().map_err(|e| failed(&format!("cannot create a temporary folder: {e}")))
}

fn write(folder: &Path, name: &str, content: &str) -> Result<(), CompileError> {
    fs::write(folder.join(name), content).map_err(|e| failed(&format!("cannot write {name}: {e}")))
}

fn failed(message: &str) -> CompileError {
    CompileError { messages: message.to_owned() }
}

fn located(diagnostic: Diagnostic) -> CompileError {
    CompileError { messages: format!("{FILE}:{}: error: {}", diagnostic.line, diagnostic.message) }
}

/// The standard output of a command that succeeded, or its error messages with address spaces and types named as in Metal.
fn finished(output: &std::io::Result<Output>, command: &str) -> Result<String, CompileError> {
    match output {
        Ok(o) if o.status.success() => Ok(String::from_utf8_lossy(&o.stdout).into_owned()),
        Ok(o) => {
            let mut messages = String::from_utf8_lossy(&o.stderr).into_owned();
            for (opencl, metal) in [
                ("const __global_host", "constant"),
                ("__global_host", "constant"),
                ("__global_device", "device"),
                ("__local", "threadgroup"),
                ("__private", "thread"),
                ("__generic", "(no address space)"),
                ("__bf16", "bfloat"),
            ] {
                messages = messages.replace(opencl, metal);
            }
            Err(failed(&format!("{command}: {}\n{messages}", o.status)))
        }
        Err(e) => Err(failed(&format!("cannot start {command}: {e}"))),
    }
}

/// The header, the program, and an entry point for each kernel, which takes the kernel's arguments from the context.
fn assemble(program: &Program) -> String {
    let mut out = format!("#include \"metal_stdlib\"\n# 1 \"{FILE}\"\n{}\n", program.source);
    // `decltype` of a kernel's name counts as a use of a function pointer.
    out.push_str("#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable\n");
    for (k, kernel) in program.kernels.iter().enumerate() {
        // Errors about an argument name the line of the kernel.
        out.push_str(&format!("# {} \"{FILE}\"\n", kernel.line));
        let call = &kernel.call;
        let mut arguments = Vec::new();
        let mut positions = Vec::new();
        let mut reflected = Vec::new();
        for (i, parameter) in kernel.parameters.iter().enumerate() {
            let ty = format!("metal::msl_param<{i}, decltype({call})>");
            if let Argument::Buffer { .. } | Argument::Threadgroup(_) = parameter.argument {
                reflected.push(format!("MSL_REFLECT(({ty}))"));
            }
            arguments.push(match &parameter.argument {
                Argument::Buffer { index, condition: None } => {
                    format!("metal::msl_buffer_argument<{ty}>(msl_c->buffers[{index}])")
                }
                Argument::Buffer { index, condition: Some(on) } => {
                    format!("metal::msl_buffer_argument<{ty}>({on} ? msl_c->buffers[{index}] : 0)")
                }
                Argument::Threadgroup(n) => {
                    format!("metal::msl_threadgroup_argument<{ty}>(msl_c->threadgroups[{n}])")
                }
                Argument::VectorBuiltin(name) => {
                    positions.push(ty.clone());
                    format!("metal::msl_vector_argument<{ty}>(msl_c->{name})")
                }
                Argument::ScalarBuiltin(name) => format!("metal::msl_scalar_argument<{ty}>(msl_c->{name})"),
            });
        }
        out.push_str(&format!(
            "static_assert(metal::msl_one_kind<{}>(), \"positions and sizes of a kernel are all scalars or all vectors\"); \
             extern \"C\" void msl_entry_{k}(const __global msl_context* msl_c) {{ {call}({}); }}\n",
            positions.join(", "),
            arguments.join(", ")
        ));
        // For reflection: where the kernel's code starts, and a row of facts for each buffer and threadgroup parameter.
        reflected.push("0, 0, 0, 0".to_owned());
        out.push_str(&format!(
            "extern \"C\" ulong msl_address_{k}() {{ return (ulong)&{call}; }} \
             extern \"C\" const __global ulong msl_arguments_{k}[] = {{ {} }};\n",
            reflected.join(", ")
        ));
    }
    let mut data = String::new();
    for c in &program.constants {
        for name in [format!("msl_fc_{}", c.index), format!("msl_fcd_{}", c.index)] {
            data.push_str(&format!(".globl {name}\\n.protected {name}\\n{name}: .zero 8\\n"));
        }
    }
    if !data.is_empty() {
        out.push_str(&format!("__asm__(\".data\\n.p2align 3\\n{data}.text\\n\");\n"));
    }
    out
}
