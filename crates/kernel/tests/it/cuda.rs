//! The CUDA device layer. Tests that need a device or the compiler say so where there is none, and pass.

#![allow(unsafe_code, reason = "launches of programs that no contract describes, borrowed memory")]

use crate::hosts::{compiler, gpu};
use flashtile_kernel::cuda::{Error, Function, Gpu, Grid, Memory, Program};
use flashtile_kernel::source::{
    Cpp, ElementType, GenericKind, GenericParameter, ItemKind, Parameter, ParameterKind, Threads,
};
use flashtile_kernel::{
    Argument, ContractError, ContractErrorKind, Device, Element, Generic, Instance, ItemSource, Kernel,
    Launch, LaunchError, Scalar, ScalarType, Span, Target, View, f16,
};

const fn parameter(name: &'static str, kind: ParameterKind) -> Parameter {
    Parameter { name, cpp: name, kind }
}

const fn body(name: &'static str, cpp: &'static str) -> ItemSource {
    let (kind, cpp) = (ItemKind::Kernel, Cpp::Printed(cpp));
    ItemSource {
        name,
        symbol: name,
        kind,
        cpp,
        rust: "",
        depends: &[],
        module: module_path!(),
        file: file!(),
        line: line!(),
    }
}

const T: ElementType = ElementType::Generic(0);

/// `out[i] = x[i] * factor + add[i]`, or `x[i]`: every kind of parameter except a struct.
macro_rules! multiply_add {
    ($exact:literal) => {
        Kernel {
            name: "multiply_add",
            cpp: "multiply_add",
            module: module_path!(),
            docs: " Multiplies and adds.",
            parameters: &[
                parameter("x", ParameterKind::Buffer { element: T, writable: false }),
                parameter(
                    "add",
                    ParameterKind::Buffer { element: ElementType::Scalar(ScalarType::F32), writable: false },
                ),
                parameter(
                    "out",
                    ParameterKind::Buffer { element: ElementType::Scalar(ScalarType::F32), writable: true },
                ),
                parameter("wide", ParameterKind::Constant(ScalarType::Bool)),
                parameter("n", ParameterKind::Scalar(ScalarType::U32)),
                parameter("factor", ParameterKind::Scalar(ScalarType::F32)),
            ],
            generics: &[GenericParameter { name: "T", cpp: "T", kind: GenericKind::Element }],
            derived: &[],
            requirements: &[],
            unmet: |_| None,
            threads: |_| Threads::UpTo(256),
            shared: &[],
            exact: $exact,
            resident: |_| 0,
            source: body(
                "multiply_add",
                "const uint i = ft_thread_position(ft);\n\
                 if (i < n) {\n    \
                     const float y = ft_to_f32(x[i]);\n    \
                     out[i] = wide ? y * factor + add[i] : y;\n\
                 }\n",
            ),
            bench: None,
        }
    };
}

static MULTIPLY_ADD: Kernel = multiply_add!(false);
static EXACTLY: Kernel = multiply_add!(true);

/// A kernel whose source is no C++.
static WRONG: Kernel = Kernel {
    name: "wrong",
    cpp: "wrong",
    module: module_path!(),
    docs: "",
    parameters: &[],
    generics: &[],
    derived: &[],
    requirements: &[],
    unmet: |_| None,
    threads: |_| Threads::Exactly(32),
    shared: &[],
    exact: false,
    resident: |_| 0,
    source: body("wrong", "const uint i = 0u;\nconst uint j = missing;\n"),
    bench: None,
};

fn instance<T: Element>(kernel: &'static Kernel) -> Instance {
    Instance::new(kernel, &[Generic::Type(T::TYPE)], None).unwrap()
}

/// Launches `multiply_add`, as a `Call` does.
fn launch(
    gpu: &Gpu,
    instance: &Instance,
    (x, add): (View<'_, Memory>, &Memory),
    out: &mut Memory,
    (wide, factor): (bool, f32),
) -> Result<(), LaunchError<Error>> {
    let n = x.len() as u32;
    let arguments = vec![
        Argument::Read(x),
        Argument::Read(add.view()),
        Argument::Write(out.view_mut()),
        Argument::constant(wide),
        Argument::plain(&n),
        Argument::plain(&factor),
    ];
    let groups = [n.div_ceil(64).max(1), 1, 1];
    let launch = Launch::new(instance, groups, 64, arguments, &gpu.limits())?;
    gpu.launch(launch).map_err(LaunchError::Device)
}

/// Values whose products are not exact in f32.
fn numbers(n: usize, seed: u32) -> Vec<f32> {
    (0..n as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / 8e6 - 1.0)
        .collect()
}

#[test]
fn a_missing_driver_and_missing_devices_are_told() {
    match Gpu::count() {
        Err(why) => {
            assert!(matches!(why, Error::Missing { library: "driver", .. } | Error::Driver { .. }), "{why}");
            assert!(why.to_string().contains("NVIDIA") || why.to_string().contains("driver"), "{why}");
            assert_eq!(Gpu::new(0).unwrap_err(), why);
        }
        Ok(count) => assert_eq!(Gpu::new(count).unwrap_err(), Error::NoDevice { ordinal: count, count }),
    }
}

#[test]
fn printed_kernels_compile() {
    let Some(compiler) = compiler() else { return };
    for kernel in [&MULTIPLY_ADD, &EXACTLY] {
        for instance in [instance::<f32>(kernel), instance::<f16>(kernel)] {
            let Argument::<()>::Constant(wide) = Argument::constant(true) else { panic!() };
            let program = Program::of(&instance, &[wide]);
            for capability in [(8, 0), (9, 0)] {
                compiler.compile(&program, &compiler.target(capability)).unwrap();
            }
        }
    }
}

#[test]
fn a_log_counts_the_lines_of_the_printed_text() {
    let Some(compiler) = compiler() else { return };
    let instance = Instance::new(&WRONG, &[], None).unwrap();
    let why = compiler.compile(&Program::of(&instance, &[]), &compiler.target((8, 0))).unwrap_err();
    let Error::Compile { kernel, log } = &why else { panic!("{why}") };
    assert_eq!(kernel, "wrong");
    let source = instance.source(Target::Cuda);
    let line = 1 + source.lines().position(|line| line.contains("missing")).unwrap();
    assert!(log.contains(&format!("wrong.cu({line}): error: identifier \"missing\"")), "{log}");
}

#[test]
fn memory_keeps_what_it_is_given() {
    fn check<T: Scalar>(gpu: &Gpu, values: &[T]) {
        let mut memory = gpu.buffer_from(values).unwrap();
        assert_eq!(memory.to_vec::<T>().unwrap(), values);
        assert_eq!((memory.element(), memory.len()), (T::TYPE, values.len()));
        assert!(memory.address().is_multiple_of(256));
        let mut reversed = values.to_vec();
        reversed.reverse();
        memory.copy_from(&reversed).unwrap();
        assert_eq!(memory.to_vec::<T>().unwrap(), reversed);
    }
    let Some(gpu) = gpu() else { return };
    check(&gpu, &[true, false, true]);
    check(&gpu, &[1u8, 255]);
    check(&gpu, &[f16::ONE, f16::MAX, f16::NEG_INFINITY]);
    check(&gpu, &[u64::MAX, 1]);
    check(&gpu, &[-1i32, i32::MIN, 7]);
    check(&gpu, &numbers(100_003, 1));
    check::<f32>(&gpu, &[]);
    let mut memory = gpu.buffer_from(&[1u32, 2]).unwrap();
    let refusal = memory.to_vec::<f32>().unwrap_err();
    assert_eq!(refusal, Error::Element { expected: ScalarType::F32, found: ScalarType::U32 });
    assert_eq!(memory.copy_from(&[1u32]).unwrap_err(), Error::Length { expected: 1, found: 2 });
    assert_eq!(memory.to_vec::<u32>().unwrap(), [1, 2]);
    assert!(matches!(gpu.uninit::<f32>(usize::MAX / 8).unwrap_err(), Error::Driver { .. }));
}

#[test]
fn launches_take_every_kind_of_argument() {
    fn check<T: Element>(gpu: &Gpu) {
        for n in [1, 63, 64, 1000] {
            let x: Vec<T> = numbers(n, 1).into_iter().map(T::from_f32).collect();
            let add = numbers(n, 2);
            let memory = (gpu.buffer_from(&x).unwrap(), gpu.buffer_from(&add).unwrap());
            for wide in [true, false] {
                let mut out = gpu.buffer_from(&vec![f32::NAN; n + 1]).unwrap();
                let given = (memory.0.view(), &memory.1);
                launch(gpu, &instance::<T>(&EXACTLY), given, &mut out, (wide, 1.7)).unwrap();
                let found = out.to_vec::<f32>().unwrap();
                for i in 0..n {
                    let x = x[i].to_f32();
                    assert_eq!(found[i], if wide { x * 1.7 + add[i] } else { x }, "{i}");
                }
                assert!(found[n].is_nan());
            }
        }
    }
    let Some(gpu) = gpu() else { return };
    check::<f32>(&gpu);
    check::<f16>(&gpu);
}

#[test]
fn only_an_exact_kernel_is_not_contracted() {
    let Some(gpu) = gpu() else { return };
    let (x, add) = (numbers(1000, 3), numbers(1000, 4));
    let memory = (gpu.buffer_from(&x).unwrap(), gpu.buffer_from(&add).unwrap());
    let run = |kernel| {
        let mut out = gpu.uninit::<f32>(1000).unwrap();
        let given = (memory.0.view(), &memory.1);
        launch(&gpu, &instance::<f32>(kernel), given, &mut out, (true, 1.7)).unwrap();
        out.to_vec::<f32>().unwrap()
    };
    let rounded: Vec<f32> = x.iter().zip(&add).map(|(x, add)| x * 1.7 + add).collect();
    let fused: Vec<f32> = x.iter().zip(&add).map(|(x, add)| x.mul_add(1.7, *add)).collect();
    assert_ne!(rounded, fused);
    assert_eq!(run(&EXACTLY), rounded);
    assert_eq!(run(&MULTIPLY_ADD), fused);
}

#[test]
fn launches_are_refused_before_the_device() {
    let Some(gpu) = gpu() else { return };
    let x = gpu.buffer_from(&numbers(64, 1)).unwrap();
    let add = gpu.buffer_from(&numbers(64, 2)).unwrap();
    let mut out = gpu.buffer_from(&vec![0.0f32; 64]).unwrap();
    let instance = instance::<f32>(&MULTIPLY_ADD);
    for (offset, len) in [(1, 64), (0, 65), (65, 0), (usize::MAX, 2), (2, usize::MAX / 2)] {
        let span = Span { element: ScalarType::F32, offset, len };
        let refusal =
            launch(&gpu, &instance, (View::new(&x, span), &add), &mut out, (true, 2.0)).unwrap_err();
        let expected = Error::Span { kernel: "multiply_add", parameter: "x", span, bytes: 256 };
        assert_eq!(refusal, LaunchError::Device(expected));
        assert!(refusal.to_string().contains("256 bytes"), "{refusal}");
    }
    // The launch refuses elements of another type than the instance's.
    let halves = gpu.buffer_from(&[f16::ONE; 64]).unwrap();
    let refusal = launch(&gpu, &instance, (halves.view(), &add), &mut out, (true, 2.0)).unwrap_err();
    let LaunchError::Contract(ContractError {
        what: ContractErrorKind::Element { parameter: "x", .. }, ..
    }) = refusal
    else {
        panic!("{refusal}")
    };
    assert_eq!(out.to_vec::<f32>().unwrap(), [0.0; 64]);
    // A part of a memory is an argument.
    let span = Span { element: ScalarType::F32, offset: 32, len: 32 };
    launch(&gpu, &instance, (View::new(&x, span), &add), &mut out, (false, 2.0)).unwrap();
    assert_eq!(out.to_vec::<f32>().unwrap()[..32], numbers(64, 1)[32..]);
}

#[test]
fn borrowed_memory_is_the_owners() {
    let Some(gpu) = gpu() else { return };
    let x = gpu.buffer_from(&numbers(64, 1)).unwrap();
    let add = gpu.buffer_from(&numbers(64, 2)).unwrap();
    let out = gpu.buffer_from(&vec![0.0f32; 64]).unwrap();
    {
        // SAFETY: elements 16 to 48 of `out`, which nothing accesses meanwhile.
        let mut part = unsafe { gpu.borrow(ScalarType::F32, out.address() + 64, 32) };
        let span = Span { element: ScalarType::F32, offset: 0, len: 32 };
        let instance = instance::<f32>(&MULTIPLY_ADD);
        launch(&gpu, &instance, (View::new(&x, span), &add), &mut part, (false, 2.0)).unwrap();
    }
    let found = out.to_vec::<f32>().unwrap();
    assert_eq!(found[16..48], numbers(64, 1)[..32]);
    assert_eq!((found[..16].to_vec(), found[48..].to_vec()), (vec![0.0; 16], vec![0.0; 16]));
}

#[test]
fn another_stream_shares_what_is_compiled() {
    let Some(gpu) = gpu() else { return };
    let other = gpu.on(&gpu.context().new_stream().unwrap());
    let instance = instance::<f16>(&MULTIPLY_ADD);
    let Argument::<()>::Constant(wide) = Argument::constant(true) else { panic!() };
    let function = gpu.function(&instance, &[wide]).unwrap();
    assert!(std::sync::Arc::ptr_eq(&function, &other.function(&instance, &[wide]).unwrap()));
    let resources = function.resources().unwrap();
    assert!(resources.registers > 0 && resources.registers <= 255, "{resources:?}");
    assert_eq!((resources.local, resources.shared), (0, 0));
    assert!(resources.threads >= 256, "{resources:?}");
    let x = gpu.buffer_from(&[f16::ONE; 64]).unwrap();
    let add = gpu.buffer_from(&[3.0f32; 64]).unwrap();
    let mut out = gpu.uninit::<f32>(64).unwrap();
    launch(&other, &instance, (x.view(), &add), &mut out, (true, 2.0)).unwrap();
    assert_eq!(out.to_vec::<f32>().unwrap(), [5.0; 64]);
}

#[test]
fn a_printed_kernel_that_does_not_compile_is_refused_by_the_device() {
    let Some(gpu) = gpu() else { return };
    let instance = Instance::new(&WRONG, &[], None).unwrap();
    let launch = Launch::new(&instance, [1, 1, 1], 32, Vec::new(), &gpu.limits()).unwrap();
    let why = gpu.launch(launch).unwrap_err();
    assert!(matches!(&why, Error::Compile { log, .. } if log.contains("missing")), "{why}");
}

/// Writes `index + shared[index]` of dynamic shared memory, which each thread has filled for the next.
const DYNAMIC: &str = r#"
extern __shared__ unsigned int memory[];
extern "C" __global__ void neighbours(unsigned int* out) {
    const unsigned int last = COUNT - 1;
    for (unsigned int i = threadIdx.x; i < COUNT; i += blockDim.x) memory[i == last ? 0 : i + 1] = i;
    __syncthreads();
    for (unsigned int i = threadIdx.x; i < COUNT; i += blockDim.x) out[i] = memory[i];
}
"#;

/// The program, and its words of shared memory.
fn dynamic(gpu: &Gpu, count: usize) -> Result<Function, Error> {
    let options = vec![format!("-DCOUNT={count}")];
    let program = Program { name: "dynamic".to_owned(), source: DYNAMIC.to_owned(), options };
    gpu.load(&program, "neighbours", count * 4).map(|(function, _)| function)
}

#[test]
fn programs_take_more_shared_memory_than_is_given_unasked() {
    let Some(gpu) = gpu() else { return };
    // 80 KiB: every device of compute capability 8.0 and later has 99 KiB.
    let count = 20 << 10;
    let function = dynamic(&gpu, count).unwrap();
    let out = gpu.uninit::<u32>(count).unwrap();
    let grid = Grid { blocks: [1, 1, 1], threads: 256, shared: count * 4 };
    // SAFETY: the program takes one address and writes `count` numbers there.
    unsafe { function.launch(gpu.stream(), grid, &out.address()) }.unwrap();
    let expected: Vec<u32> = (0..count as u32).map(|i| (i + count as u32 - 1) % count as u32).collect();
    assert_eq!(out.to_vec::<u32>().unwrap(), expected);
    assert!(matches!(dynamic(&gpu, 1 << 20).unwrap_err(), Error::Driver { .. }));
}

#[test]
fn work_is_timed_on_the_device() {
    let Some(gpu) = gpu() else { return };
    let x = gpu.buffer_from(&numbers(1 << 20, 1)).unwrap();
    let add = gpu.buffer_from(&numbers(1 << 20, 2)).unwrap();
    let mut out = gpu.uninit::<f32>(1 << 20).unwrap();
    let instance = instance::<f32>(&MULTIPLY_ADD);
    let mut runs = 0;
    let timing = gpu
        .time(9, || {
            runs += 1;
            launch(&gpu, &instance, (x.view(), &add), &mut out, (true, 2.0)).unwrap();
            Ok::<_, Error>(())
        })
        .unwrap();
    assert_eq!((runs, timing.seconds().len()), (10, 9));
    assert!(timing.least() > 0.0 && timing.median() < 1.0, "{timing:?}");
}
