//! Kernels written as their expansion, with the parts that a test needs.

use flashtile_kernel::simulator::{Arguments, Fault, FaultKind, Memory, Report, Simulator};
use flashtile_kernel::source::{
    Cpp, ElementType, GenericKind, GenericParameter, ItemKind, Parameter, ParameterKind, Threads,
};
use flashtile_kernel::{Argument, Device, Instance, ItemSource, Kernel, Launch, ScalarType};

pub(crate) const fn source(name: &'static str, body: &'static str) -> ItemSource {
    ItemSource {
        name,
        symbol: name,
        kind: ItemKind::Kernel,
        cpp: Cpp::Printed(body),
        rust: "",
        depends: &[],
        module: module_path!(),
        file: file!(),
        line: 1,
    }
}

pub(crate) const fn buffer(name: &'static str, element: ElementType) -> Parameter {
    Parameter { name, cpp: name, kind: ParameterKind::Buffer { element, writable: true } }
}

pub(crate) const fn generic(name: &'static str, kind: GenericKind) -> GenericParameter {
    GenericParameter { name, cpp: name, kind }
}

pub(crate) const fn kernel(
    name: &'static str,
    parameters: &'static [Parameter],
    generics: &'static [GenericParameter],
    body: &'static str,
) -> Kernel {
    Kernel {
        name,
        cpp: name,
        module: "",
        docs: "",
        parameters,
        generics,
        derived: &[],
        requirements: &[],
        unmet: |_| None,
        threads: |_| Threads::UpTo(1024),
        shared: &[],
        exact: false,
        resident: |_| 0,
        source: source(name, body),
        bench: None,
    }
}

const WORDS: ElementType = ElementType::Scalar(ScalarType::U32);

/// A kernel of one buffer of words; every run has its own native code.
pub(crate) static WORDS_KERNEL: Kernel = kernel("words", &[buffer("x", WORDS)], &[], "");

/// Runs native code on a buffer of words.
pub(crate) fn run_on(
    simulator: &Simulator,
    memory: &mut Memory,
    (groups, threads): (u32, u32),
    native: fn(&Arguments),
) -> Result<(), Fault> {
    let instance = Instance::new(&WORDS_KERNEL, &[], Some(native)).unwrap();
    let launch = Launch::new(
        &instance,
        [groups, 1, 1],
        threads,
        vec![Argument::Write(memory.view_mut())],
        &simulator.limits(),
    )
    .unwrap();
    simulator.launch(launch)
}

/// The words after native code has run in groups of threads, with the counts of the launch: the same for several seeds.
pub(crate) fn run(
    words: &[u32],
    shape: (u32, u32),
    native: fn(&Arguments),
) -> Result<(Vec<u32>, Report), Fault> {
    let mut results = (0..4).map(|seed| {
        let simulator = Simulator::new().seed(seed);
        let mut memory = Memory::from_slice(words);
        run_on(&simulator, &mut memory, shape, native)?;
        Ok::<_, Fault>((memory.to_vec::<u32>().unwrap(), simulator.report()))
    });
    let first = results.next().unwrap();
    for other in results {
        match (&first, other) {
            (Ok(a), Ok(b)) => assert_eq!(*a, b, "the result depends on the order"),
            (Err(a), Err(b)) => assert_eq!((a.kind, &a.file), (b.kind, &b.file)),
            (a, b) => panic!("for one order {a:?}, for another {b:?}"),
        }
    }
    first
}

/// The fault of native code on 64 words in groups of threads, which must be of this kind for every seed.
pub(crate) fn fault(kind: FaultKind, shape: (u32, u32), native: fn(&Arguments)) -> Fault {
    let fault = run(&[0; 64], shape, native).unwrap_err();
    assert_eq!(fault.kind, kind, "{fault}");
    assert_eq!((fault.kernel, fault.lane), ("words", fault.thread % 32));
    fault
}
