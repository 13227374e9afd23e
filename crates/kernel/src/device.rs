//! Launches, and the contract every one of them is checked against before a device sees it.

use crate::scalar::{Plain, Scalar, ScalarType};
use crate::text::{Generic, Instance, ParameterKind, Threads};
use std::fmt;

/// What runs kernels: the simulator, a GPU.
pub trait Device {
    /// Its memory.
    type Memory;
    /// Why a launch failed.
    type Error: std::error::Error;

    /// The bounds of its launches.
    fn limits(&self) -> Limits {
        Limits::default()
    }

    /// Runs a kernel, or enqueues it.
    ///
    /// # Errors
    /// What the device reports; the contract has been checked.
    fn launch(&self, launch: Launch<'_, Self::Memory>) -> Result<(), Self::Error>;
}

/// The bounds of a device's launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most threads of a group.
    pub threads: u32,
    /// Most bytes of shared memory of a group.
    pub shared_bytes: usize,
    /// Most groups along each coordinate.
    pub groups: [u32; 3],
}

impl Default for Limits {
    /// What every device has: 1024 threads, 32 KiB, 2^31 - 1 by 65535 by 65535 groups.
    fn default() -> Self {
        Self { threads: 1024, shared_bytes: 32 << 10, groups: [i32::MAX as u32, 65535, 65535] }
    }
}

/// Elements of a device's memory that a kernel reads.
#[derive(Debug)]
pub struct View<'a, M> {
    memory: &'a M,
    span: Span,
}

/// Elements of a device's memory that a kernel reads and writes; nothing else refers to the memory meanwhile.
#[derive(Debug)]
pub struct ViewMut<'a, M> {
    memory: &'a mut M,
    span: Span,
}

/// A run of elements of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The type of the elements.
    pub element: ScalarType,
    /// Elements before the first.
    pub offset: usize,
    /// Elements.
    pub len: usize,
}

impl<M> Clone for View<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for View<'_, M> {}

impl<'a, M> View<'a, M> {
    /// Elements `span` of `memory`. That they are inside is for the maker of the memory, or its device, to check.
    pub fn new(memory: &'a M, span: Span) -> Self {
        Self { memory, span }
    }

    /// The memory.
    pub fn memory(&self) -> &'a M {
        self.memory
    }
}

impl<'a, M> ViewMut<'a, M> {
    /// Elements `span` of `memory`. That they are inside is for the maker of the memory, or its device, to check.
    pub fn new(memory: &'a mut M, span: Span) -> Self {
        Self { memory, span }
    }

    /// The memory.
    pub fn memory(&self) -> &M {
        self.memory
    }

    /// The memory, to be written.
    pub fn memory_mut(&mut self) -> &mut M {
        self.memory
    }
}

macro_rules! spans {
    ($($View:ident)*) => {$(
        impl<M> $View<'_, M> {
            /// Which elements.
            pub fn span(&self) -> Span {
                self.span
            }

            /// The type of the elements.
            pub fn element(&self) -> ScalarType {
                self.span.element
            }

            /// Elements.
            pub fn len(&self) -> usize {
                self.span.len
            }

            /// Whether there is no element.
            pub fn is_empty(&self) -> bool {
                self.span.len == 0
            }
        }
    )*};
}
spans!(View ViewMut);

/// What a launch passes for a parameter.
#[derive(Debug)]
pub enum Argument<'a, M> {
    /// For `&Buffer<T>`.
    Read(View<'a, M>),
    /// For `&mut Buffer<T>`.
    Write(ViewMut<'a, M>),
    /// For a scalar or a `#[params]` struct: its bytes as the device lays them out.
    Bytes(Vec<u8>),
    /// For a `#[constant]` parameter.
    Constant(Constant),
}

impl<M> Argument<'_, M> {
    /// The bytes of a scalar or a `#[params]` struct.
    pub fn plain(value: &impl Plain) -> Self {
        let mut bytes = Vec::new();
        value.write(&mut bytes);
        Self::Bytes(bytes)
    }

    /// The value of a `#[constant]` parameter.
    pub fn constant<T: Scalar>(value: T) -> Self {
        Self::Constant(Constant::of(value))
    }

    fn fact(&self) -> Fact<'_> {
        match self {
            Self::Read(view) => Fact::Buffer(view.span()),
            Self::Write(view) => Fact::Buffer(view.span()),
            Self::Bytes(bytes) => Fact::Bytes(bytes),
            Self::Constant(constant) => Fact::Constant(*constant),
        }
    }
}

/// The value of a `#[constant]` parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Constant {
    scalar: ScalarType,
    raw: u64,
}

impl Constant {
    /// A value.
    pub fn of<T: Scalar>(value: T) -> Self {
        Self { scalar: T::TYPE, raw: value.to_raw() }
    }

    /// Its type.
    pub fn scalar(self) -> ScalarType {
        self.scalar
    }

    /// Its bits, zero-extended.
    pub fn raw(self) -> u64 {
        self.raw
    }

    /// The value in C++.
    pub fn cpp(self) -> String {
        crate::text::literal(self.scalar, self.raw)
    }
}

/// What a kernel's conditions see of a launch, whose arguments are of the kinds of the parameters.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    generics: &'a [Generic],
    /// One a parameter, in order.
    arguments: &'a [Fact<'a>],
    groups: [u32; 3],
    threads: u32,
}

/// What conditions see of an argument.
#[derive(Clone, Copy, Debug)]
enum Fact<'a> {
    Buffer(Span),
    Bytes(&'a [u8]),
    Constant(Constant),
}

impl Facts<'_> {
    /// The generics of the instance.
    pub fn generics(&self) -> &[Generic] {
        self.generics
    }

    /// Groups along each coordinate.
    pub fn groups(&self) -> [u32; 3] {
        self.groups
    }

    /// Threads of a group.
    pub fn threads(&self) -> u32 {
        self.threads
    }

    /// What a condition mentions, less the fields of `#[params]`.
    fn numbers(&self, kernel: &crate::text::Kernel, condition: &str) -> String {
        let words = condition.split(|c: char| !c.is_alphanumeric() && c != '_');
        let mentioned = |name: &str| words.clone().any(|word| word == name);
        let generics = kernel.generics.iter().zip(self.generics).map(|(of, value)| match value {
            Generic::Type(_) => None,
            value => Some((of.name, format!("{} = {value}", of.name))),
        });
        let parameters = kernel.parameters.iter().zip(self.arguments).map(|(of, argument)| {
            let name = of.name;
            let value = match (argument, of.kind) {
                (Fact::Buffer(span), _) => return Some((name, format!("{name}.len() = {}", span.len))),
                (Fact::Bytes(bytes), ParameterKind::Scalar(scalar)) => {
                    let mut raw = [0; 8];
                    raw[..bytes.len()].copy_from_slice(bytes);
                    crate::text::number(scalar, u64::from_le_bytes(raw))
                }
                (Fact::Constant(constant), _) => crate::text::number(constant.scalar, constant.raw),
                (Fact::Bytes(_), _) => return None,
            };
            Some((name, format!("{name} = {value}")))
        });
        let launch = [
            ("groups", format!("groups = {:?}", self.groups)),
            ("threads", format!("threads = {}", self.threads)),
        ];
        let all = generics.chain(parameters).flatten().chain(launch);
        let found: Vec<String> = all.filter(|(name, _)| mentioned(name)).map(|(_, number)| number).collect();
        found.join(", ")
    }

    /// The elements given for parameter `n`; none where it is no buffer.
    pub fn buffer(&self, n: usize) -> View<'static, ()> {
        let span = match self.arguments.get(n) {
            Some(Fact::Buffer(span)) => *span,
            _ => Span { element: ScalarType::U8, offset: 0, len: 0 },
        };
        View::new(&(), span)
    }

    /// The value of scalar or `#[params]` parameter `n`; of zeros where it is neither.
    pub fn plain<P: Plain>(&self, n: usize) -> P {
        match self.arguments.get(n) {
            Some(Fact::Bytes(bytes)) if bytes.len() == P::BYTES => P::read(&mut &**bytes),
            _ => P::read(&mut &*vec![0; P::BYTES]),
        }
    }

    /// The value of `#[constant]` parameter `n`; zero where it is none.
    pub fn constant<T: Scalar>(&self, n: usize) -> T {
        match self.arguments.get(n) {
            Some(Fact::Constant(constant)) => T::from_raw(constant.raw()),
            _ => T::from_raw(0),
        }
    }
}

/// A launch that keeps the kernel's contract and the device's limits: holding one is the proof.
#[derive(Debug)]
pub struct Launch<'a, M> {
    instance: &'a Instance,
    groups: [u32; 3],
    threads: u32,
    arguments: Vec<Argument<'a, M>>,
}

impl<'a, M> Launch<'a, M> {
    /// Checks a launch of `groups` groups of `threads` threads against the instance, the limits and the kernel's `requires`, in
    /// this order.
    ///
    /// # Errors
    /// The first [`Broken`] part of the contract.
    pub fn new(
        instance: &'a Instance,
        groups: [u32; 3],
        threads: u32,
        arguments: Vec<Argument<'a, M>>,
        limits: &Limits,
    ) -> Result<Self, Broken> {
        let kernel = instance.kernel();
        let broken = |what| Broken { kernel: kernel.name, what };
        if !instance.threads().admits(threads) {
            return Err(broken(BrokenKind::Threads { expected: instance.threads(), found: threads }));
        }
        if threads > limits.threads {
            return Err(broken(BrokenKind::DeviceThreads { limit: limits.threads, found: threads }));
        }
        if groups.iter().zip(limits.groups).any(|(&n, limit)| n == 0 || n > limit) {
            return Err(broken(BrokenKind::Groups { limit: limits.groups, found: groups }));
        }
        let bytes = instance.shared_bytes();
        if bytes > limits.shared_bytes {
            return Err(broken(BrokenKind::SharedBytes { limit: limits.shared_bytes, found: bytes }));
        }
        if arguments.len() != kernel.parameters.len() {
            let (expected, found) = (kernel.parameters.len(), arguments.len());
            return Err(broken(BrokenKind::Arguments { expected, found }));
        }
        for (argument, parameter) in arguments.iter().zip(kernel.parameters) {
            let name = parameter.name;
            let element = |expected: Option<ScalarType>, found| match expected == Some(found) {
                true => Ok(()),
                false => Err(broken(BrokenKind::Element { parameter: name, expected, found })),
            };
            match (argument, parameter.kind) {
                (Argument::Read(view), ParameterKind::Buffer { element: expected, writable: false }) => {
                    element(expected.of(instance.generics()), view.element())?;
                }
                (Argument::Write(view), ParameterKind::Buffer { element: expected, writable: true }) => {
                    element(expected.of(instance.generics()), view.element())?;
                }
                (Argument::Bytes(found), ParameterKind::Params { bytes, .. }) if found.len() == bytes => {}
                (Argument::Bytes(found), ParameterKind::Scalar(scalar)) if found.len() == scalar.bytes() => {}
                (Argument::Constant(found), ParameterKind::Constant(scalar)) if found.scalar == scalar => {}
                _ => return Err(broken(BrokenKind::Argument { parameter: name })),
            }
        }
        let facts: Vec<Fact<'_>> = arguments.iter().map(Argument::fact).collect();
        let facts = Facts { generics: instance.generics(), arguments: &facts, groups, threads };
        if let Some(n) = (kernel.unmet)(&facts) {
            let (condition, message) =
                kernel.requirements.get(n).map_or(("", ""), |r| (r.condition, r.message));
            let numbers = facts.numbers(kernel, condition);
            return Err(broken(BrokenKind::Requirement { condition, message, numbers }));
        }
        Ok(Self { instance, groups, threads, arguments })
    }

    /// The kernel with its generics.
    pub fn instance(&self) -> &'a Instance {
        self.instance
    }

    /// Groups along each coordinate, each at least 1.
    pub fn groups(&self) -> [u32; 3] {
        self.groups
    }

    /// Threads of a group, a multiple of 32.
    pub fn threads(&self) -> u32 {
        self.threads
    }

    /// One argument a parameter, in order.
    pub fn arguments(&self) -> &[Argument<'a, M>] {
        &self.arguments
    }

    /// One argument a parameter, in order, with memories to be written.
    pub fn arguments_mut(&mut self) -> &mut [Argument<'a, M>] {
        &mut self.arguments
    }

    /// The values of the `#[constant]` parameters, in order.
    pub fn constants(&self) -> impl Iterator<Item = Constant> + '_ {
        self.arguments.iter().filter_map(|argument| match argument {
            Argument::Constant(constant) => Some(*constant),
            _ => None,
        })
    }

    /// What NVRTC must be given beside the text and the architecture: [`Instance::cuda_options`] of its constants.
    pub fn cuda_options(&self) -> Vec<String> {
        self.instance.cuda_options(self.constants())
    }
}

/// A launch that does not keep a contract.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// The kernel.
    pub kernel: &'static str,
    /// What does not hold.
    pub what: BrokenKind,
}

impl Broken {
    /// An instance of another kernel.
    #[doc(hidden)]
    pub fn instance(kernel: &'static crate::text::Kernel, instance: &Instance) -> Self {
        Self { kernel: kernel.name, what: BrokenKind::Instance { found: instance.kernel().name } }
    }
}

/// The part of a contract a launch does not keep.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BrokenKind {
    /// The instance is of another kernel.
    Instance {
        /// That kernel.
        found: &'static str,
    },
    /// A condition of `requires` is false.
    Requirement {
        /// The condition as written.
        condition: &'static str,
        /// What it means.
        message: &'static str,
        /// What it mentions, as it is: `x.len() = 128, groups = [2, 1, 1]`.
        numbers: String,
    },
    /// The kernel is not written for groups of this many threads.
    Threads {
        /// What it is written for.
        expected: Threads,
        /// Threads of the launch.
        found: u32,
    },
    /// The device has no groups of this many threads.
    DeviceThreads {
        /// Its most.
        limit: u32,
        /// Threads of the launch.
        found: u32,
    },
    /// There is no group along a coordinate, or more than the device can have.
    Groups {
        /// Its most.
        limit: [u32; 3],
        /// Groups of the launch.
        found: [u32; 3],
    },
    /// A group needs more shared memory than the device has.
    SharedBytes {
        /// Its most.
        limit: usize,
        /// Bytes of the kernel.
        found: usize,
    },
    /// There are more or fewer arguments than parameters.
    Arguments {
        /// Parameters.
        expected: usize,
        /// Arguments.
        found: usize,
    },
    /// A buffer's elements are of another type.
    Element {
        /// The parameter.
        parameter: &'static str,
        /// Its type.
        expected: Option<ScalarType>,
        /// The type of the view.
        found: ScalarType,
    },
    /// An argument is of another kind than its parameter.
    Argument {
        /// The parameter.
        parameter: &'static str,
    },
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.kernel)?;
        match &self.what {
            BrokenKind::Instance { found } => write!(f, "the instance is of {found}"),
            BrokenKind::Requirement { condition, message, numbers } => {
                write!(f, "{message}: `{condition}` does not hold")?;
                if numbers.is_empty() { Ok(()) } else { write!(f, " where {numbers}") }
            }
            BrokenKind::Threads { expected, .. }
                if !expected.most().is_multiple_of(32) || expected.most() == 0 =>
            {
                write!(f, "a group of {} threads: threads come in SIMD groups of 32", expected.most())
            }
            BrokenKind::Threads { expected, found } => {
                write!(f, "a group has {expected} threads, {found} asked for")
            }
            BrokenKind::DeviceThreads { limit, found } => {
                write!(f, "a group of the device has at most {limit} threads, {found} asked for")
            }
            BrokenKind::Groups { limit, found } => {
                write!(f, "{found:?} groups: the device takes 1 to {limit:?}")
            }
            BrokenKind::SharedBytes { limit, found } => {
                write!(f, "a group needs {found} bytes of shared memory, the device has {limit}")
            }
            BrokenKind::Arguments { expected, found } => {
                write!(f, "{expected} parameters, {found} arguments")
            }
            BrokenKind::Element { parameter, expected: Some(expected), found } => {
                write!(f, "{parameter} has elements of {expected}, given {found}")
            }
            BrokenKind::Element { parameter, expected: None, found } => {
                write!(f, "{parameter} has elements of no type, given {found}")
            }
            BrokenKind::Argument { parameter } => {
                write!(f, "what was given for {parameter} is of another kind")
            }
        }
    }
}

impl std::error::Error for Broken {}

/// Why a `Call` failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LaunchError<E> {
    /// The launch does not keep the kernel's contract or the device's limits; nothing ran.
    Contract(Broken),
    /// The device failed.
    Device(E),
}

impl<E> From<Broken> for LaunchError<E> {
    fn from(broken: Broken) -> Self {
        Self::Contract(broken)
    }
}

impl<E: fmt::Display> fmt::Display for LaunchError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Contract(broken) => broken.fmt(f),
            Self::Device(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for LaunchError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Contract(broken) => Some(broken),
            Self::Device(error) => Some(error),
        }
    }
}
