//! One kind of device for tests: the simulator, printed Metal on the CPU, printed CUDA on a GPU, or its compiler alone.

use flashtile_kernel::simulator::Memory;
use flashtile_kernel::{
    Argument, Device, Element, Launch, Limits, Scalar, ScalarType, Simulator, Target, bf16, f16,
};
use flashtile_msl_standin::{Buffer, CLANG_VARIABLE, Compiler, FunctionConstant, Library, Value};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};

/// A device that runs a kernel of a test. Arguments are in the simulator's memory, and are copied to the device's.
#[derive(Debug)]
pub(crate) enum Anywhere {
    /// Native code.
    Simulator(Box<Simulator>),
    /// Printed Metal, by the stand-in for its library.
    Metal(&'static Compiler),
    /// The compiler of printed CUDA: nothing runs, and buffers stay as they are.
    #[cfg(feature = "cuda")]
    Compiled(flashtile_kernel::cuda::Compiler),
    /// Printed CUDA.
    #[cfg(feature = "cuda")]
    Cuda(Box<flashtile_kernel::cuda::Gpu>),
}

/// Why a launch failed.
#[derive(Debug)]
pub(crate) struct Failure(String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

/// The compiler of printed Metal; a message where there is none. Where the variable names one, it must exist.
fn metal() -> Option<&'static Compiler> {
    static FOUND: OnceLock<Option<Compiler>> = OnceLock::new();
    FOUND
        .get_or_init(|| match Compiler::find() {
            Ok(compiler) => Some(compiler),
            Err(why) if std::env::var_os(CLANG_VARIABLE).is_some() => {
                panic!("{CLANG_VARIABLE} is set, but {why}")
            }
            Err(why) => {
                println!("SKIPPED, printed Metal was not run: {why}");
                None
            }
        })
        .as_ref()
}

/// Every device of this machine.
pub(crate) fn devices() -> Vec<Anywhere> {
    let mut all: Vec<_> =
        (0..2).map(|seed| Anywhere::Simulator(Box::new(Simulator::new().seed(seed)))).collect();
    all.extend(metal().map(Anywhere::Metal));
    #[cfg(feature = "cuda")]
    {
        use flashtile_kernel::cuda;
        match cuda::Gpu::new(0) {
            Ok(gpu) => all.push(Anywhere::Cuda(Box::new(gpu))),
            Err(why) => println!("SKIPPED, no GPU ran printed CUDA: {why}"),
        }
        match cuda::Compiler::load() {
            Ok(compiler) => all.push(Anywhere::Compiled(compiler)),
            Err(why) => println!("SKIPPED, printed CUDA was not compiled: {why}"),
        }
    }
    all
}

/// Runs `f` on every device; the result must be `expected` on all of them.
pub(crate) fn everywhere<R: PartialEq + fmt::Debug>(expected: &R, f: impl Fn(&Anywhere) -> R) {
    for device in devices() {
        let found = f(&device);
        if device.runs() {
            assert!(found == *expected, "{device}: found\n{found:?}\nexpected\n{expected:?}");
        }
    }
}

impl Anywhere {
    /// Returns true if launches write anything.
    pub(crate) fn runs(&self) -> bool {
        #[cfg(feature = "cuda")]
        return !matches!(self, Self::Compiled(_));
        #[cfg(not(feature = "cuda"))]
        true
    }
}

impl fmt::Display for Anywhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Simulator(_) => "simulator",
            Self::Metal(_) => "printed Metal",
            #[cfg(feature = "cuda")]
            Self::Compiled(_) => "compiler of printed CUDA",
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => "printed CUDA",
        })
    }
}

impl Device for Anywhere {
    type Memory = Memory;
    type Error = Failure;

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn launch(&self, launch: Launch<'_, Memory>) -> Result<(), Failure> {
        match self {
            Self::Simulator(simulator) => simulator.launch(launch).map_err(|why| Failure(why.to_string())),
            Self::Metal(compiler) => on_metal(compiler, launch),
            #[cfg(feature = "cuda")]
            Self::Compiled(compiler) => {
                use flashtile_kernel::cuda::Program;
                let constants: Vec<_> = launch.constants().collect();
                let program = Program::of(launch.instance(), &constants);
                compiler
                    .compile(&program, &compiler.target((8, 0)))
                    .map(drop)
                    .map_err(|why| Failure(why.to_string()))
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => on_cuda(gpu, launch),
        }
    }
}

/// Calls a function generic in the type of a memory's elements.
macro_rules! typed {
    ($element:expr, $f:ident($($argument:expr),*)) => {
        match $element {
            ScalarType::Bool => $f::<bool>($($argument),*),
            ScalarType::U8 => $f::<u8>($($argument),*),
            ScalarType::I8 => $f::<i8>($($argument),*),
            ScalarType::U16 => $f::<u16>($($argument),*),
            ScalarType::I16 => $f::<i16>($($argument),*),
            ScalarType::U32 => $f::<u32>($($argument),*),
            ScalarType::I32 => $f::<i32>($($argument),*),
            ScalarType::U64 => $f::<u64>($($argument),*),
            ScalarType::I64 => $f::<i64>($($argument),*),
            ScalarType::Usize => $f::<usize>($($argument),*),
            ScalarType::F32 => $f::<f32>($($argument),*),
            ScalarType::F16 => $f::<f16>($($argument),*),
            ScalarType::Bf16 => $f::<bf16>($($argument),*),
        }
    };
}

fn bytes<T: Scalar>(memory: &Memory) -> Vec<u8> {
    let mut bytes = Vec::new();
    // Uninitialised bytes are all ones: NaN, and no valid index.
    let values = memory.to_vec_or(T::from_raw(u64::MAX)).unwrap();
    values.into_iter().for_each(|x| bytes.extend_from_slice(&x.to_raw().to_le_bytes()[..T::TYPE.bytes()]));
    bytes
}

fn memory<T: Scalar>(bytes: &[u8]) -> Memory {
    let raw = |bytes: &[u8]| {
        let mut raw = [0; 8];
        raw[..bytes.len()].copy_from_slice(bytes);
        T::from_raw(u64::from_le_bytes(raw))
    };
    Memory::from_slice(&bytes.chunks_exact(T::TYPE.bytes()).map(raw).collect::<Vec<T>>())
}

fn on_metal(compiler: &Compiler, mut launch: Launch<'_, Memory>) -> Result<(), Failure> {
    static LIBRARIES: Mutex<Option<HashMap<String, Library>>> = Mutex::new(None);
    let instance = launch.instance();
    let source = instance.source(Target::Metal);
    let libraries = || LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
    let known = libraries().get_or_insert_default().get(&source).cloned();
    let library = match known {
        Some(library) => library,
        None => compiler.compile(&source).map_err(|why| Failure(quoted(&why.to_string(), &source)))?,
    };
    libraries().get_or_insert_default().insert(source, library.clone());
    let constants: Vec<_> = launch
        .constants()
        .enumerate()
        .map(|(n, constant)| {
            let raw = constant.raw();
            let value = match constant.scalar() {
                ScalarType::Bool => Value::Bool(raw != 0),
                ScalarType::U32 => Value::U32(raw as u32),
                ScalarType::I32 => Value::I32(raw as i32),
                ScalarType::F32 => Value::F32(f32::from_raw(raw)),
                other => panic!("a constant of {other}"),
            };
            FunctionConstant::new(n as u32, value)
        })
        .collect();
    let kernel = library.kernel(&instance.entry(), &constants).map_err(|why| Failure(why.to_string()))?;
    let (groups, threads) = (launch.groups(), launch.threads());
    let mut passed: Vec<(bool, Vec<u8>)> = Vec::new();
    for argument in launch.arguments() {
        let (view, span, written) = match argument {
            Argument::Read(view) => (view.memory(), view.span(), false),
            Argument::Write(view) => (view.memory(), view.span(), true),
            Argument::Bytes(bytes) => {
                passed.push((false, bytes.clone()));
                continue;
            }
            Argument::Constant(_) => continue,
        };
        let size = span.element.bytes();
        let all = typed!(view.element(), bytes(view));
        passed.push((written, all[span.offset * size..][..span.len * size].to_vec()));
    }
    let mut buffers: Vec<_> = passed
        .iter_mut()
        .enumerate()
        .map(|(n, (written, bytes))| if *written { Buffer::write(n, bytes) } else { Buffer::read(n, bytes) })
        .collect();
    let result = kernel.run(groups, [threads, 1, 1], &mut buffers, &[]);
    drop(buffers);
    let mut passed = passed.into_iter();
    for argument in launch.arguments_mut() {
        if matches!(argument, Argument::Constant(_)) {
            continue;
        }
        let Some((_, new)) = passed.next() else { continue };
        if let Argument::Write(view) = argument {
            let (span, element) = (view.span(), view.memory().element());
            let mut all = typed!(element, bytes(view.memory()));
            all[span.offset * span.element.bytes()..][..new.len()].copy_from_slice(&new);
            *view.memory_mut() = typed!(element, memory(&all));
        }
    }
    result.map_err(|why| Failure(why.to_string()))
}

/// A compiler's message about a source, with the lines that it names.
fn quoted(why: &str, source: &str) -> String {
    let lines: Vec<&str> = source.lines().collect();
    let mut out = String::new();
    for complaint in why.lines() {
        out.push_str(&format!("{complaint}\n"));
        let number = complaint
            .strip_prefix("kernel.metal:")
            .and_then(|rest| rest.split(':').next()?.parse::<usize>().ok());
        let line = number.and_then(|number| lines.get(number.checked_sub(1)?));
        out.extend(line.map(|line| format!("    {line}\n")));
    }
    out
}

#[cfg(feature = "cuda")]
fn on_cuda(gpu: &flashtile_kernel::cuda::Gpu, mut launch: Launch<'_, Memory>) -> Result<(), Failure> {
    use flashtile_kernel::cuda::{Gpu, Memory as OnGpu};
    use flashtile_kernel::{View, ViewMut};
    fn up<T: Scalar>(gpu: &Gpu, memory: &Memory) -> OnGpu {
        gpu.buffer_from(&memory.to_vec_or(T::from_raw(u64::MAX)).unwrap()).unwrap()
    }
    fn down<T: Scalar>(memory: &OnGpu) -> Memory {
        Memory::from_slice(&memory.to_vec::<T>().unwrap())
    }
    let mut copies: Vec<_> = launch
        .arguments()
        .iter()
        .map(|argument| match argument {
            Argument::Read(view) => Some(typed!(view.memory().element(), up(gpu, view.memory()))),
            Argument::Write(view) => Some(typed!(view.memory().element(), up(gpu, view.memory()))),
            _ => None,
        })
        .collect();
    let arguments = launch
        .arguments()
        .iter()
        .zip(&mut copies)
        .map(|(argument, copy)| match (argument, copy) {
            (Argument::Read(view), Some(copy)) => Argument::Read(View::new(copy, view.span())),
            (Argument::Write(view), Some(copy)) => Argument::Write(ViewMut::new(copy, view.span())),
            (Argument::Bytes(bytes), _) => Argument::Bytes(bytes.clone()),
            (Argument::Constant(constant), _) => Argument::Constant(*constant),
            _ => panic!("a buffer without a copy"),
        })
        .collect();
    let copied = Launch::new(launch.instance(), launch.groups(), launch.threads(), arguments, &gpu.limits());
    gpu.launch(copied.unwrap()).and_then(|()| gpu.synchronize()).map_err(|why| Failure(why.to_string()))?;
    for (argument, copy) in launch.arguments_mut().iter_mut().zip(copies) {
        if let (Argument::Write(view), Some(copy)) = (argument, copy) {
            *view.memory_mut() = typed!(copy.element(), down(&copy));
        }
    }
    Ok(())
}

/// Values that are exact in every element type: eighths between -4 and 4.
pub(crate) fn eighths<T: Element>(n: usize, seed: u32) -> Vec<T> {
    let mix = |i: u32| (i.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503)) >> 11) % 65;
    (0..n as u32).map(|i| T::from_f32((mix(i) as f32 - 32.0) / 8.0)).collect()
}
