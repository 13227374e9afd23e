//! Launches, and the contract that each is checked against before a device sees it.

use crate::facts::Fact;
pub use crate::facts::{Constant, Facts, Span, View, ViewMut};
use crate::generic::Generic;
use crate::literal::number;
use crate::scalar::{Plain, Scalar, ScalarType};
use crate::source::{Instance, Kernel, ParameterKind, Threads};
use std::fmt;

/// A device that runs kernels: the simulator or a GPU.
pub trait Device {
    /// The memory of the device.
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
    /// The error that the device reports; the contract has been checked.
    fn launch(&self, launch: Launch<'_, Self::Memory>) -> Result<(), Self::Error>;

    /// Sends launches to the device, where they are gathered before. A session calls it once a run.
    fn submit(&self) {}

    /// The kernel and the threads that a threadgroup of it may have, where an error says that a launch has more than the compiled kernel
    /// takes. That kernel was not launched, and one of fewer threads may do.
    #[must_use]
    fn thread_limit(_error: &Self::Error) -> Option<(&'static str, u32)> {
        None
    }

    /// A number that changes when work that was launched, and writes of the host that follow it, may not have been executed.
    fn failures(&self) -> u64 {
        0
    }

    /// Returns true if launches go to a graph that is launched later. Host writes cannot be a part of it.
    ///
    /// # Errors
    /// The error that the device reports.
    fn captures(&self) -> Result<bool, Self::Error> {
        Ok(false)
    }
}

/// Memory of a device whose elements are of one type.
pub trait DeviceMemory: Sized {
    /// All of it, to be read.
    fn view(&self) -> View<'_, Self>;

    /// All of it, to be read and written.
    fn view_mut(&mut self) -> ViewMut<'_, Self>;

    /// The address of the first element, or its distance in bytes from one that is a multiple of 16: how rows are aligned follows from it.
    fn address(&self) -> u64 {
        0
    }
}

/// A device whose memory the host allocates, writes and reads. Writes, launches and reads of one device follow each other.
pub trait HostAccess: Device<Memory: DeviceMemory> {
    /// Memory for `len` elements whose bytes are zero.
    ///
    /// # Errors
    /// The error that the device reports, such as a lack of memory.
    fn zeroed(&self, element: ScalarType, len: usize) -> Result<Self::Memory, Self::Error>;

    /// Memory for `len` elements whose bytes may be any: a device that tells bytes that nothing has written refuses kernels that read them.
    ///
    /// # Errors
    /// As [`HostAccess::zeroed`].
    fn uninit(&self, element: ScalarType, len: usize) -> Result<Self::Memory, Self::Error> {
        self.zeroed(element, len)
    }

    /// Copies `bytes` into a memory, from byte `at` on. It may return before the device has them, but not before `bytes` has been read.
    ///
    /// # Errors
    /// The error that the device reports.
    ///
    /// # Panics
    /// If the memory has fewer bytes.
    fn write(&self, memory: &mut Self::Memory, at: usize, bytes: &[u8]) -> Result<(), Self::Error>;

    /// Copies bytes of a memory from byte `at` on, after all work before has ended. Bytes that nothing has written may be any.
    ///
    /// # Errors
    /// The error that the device reports, also of work that failed.
    ///
    /// # Panics
    /// If the memory has fewer bytes.
    fn read(&self, memory: &Self::Memory, at: usize, bytes: &mut [u8]) -> Result<(), Self::Error>;
}

/// The bounds of a device's launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most threads of a threadgroup.
    pub threads: u32,
    /// Most bytes of shared memory of a threadgroup.
    pub shared_bytes: usize,
    /// Most threadgroups along each coordinate.
    pub groups: [u32; 3],
}

impl Default for Limits {
    /// The limits that every device has: 1024 threads, 32 KiB, 2^31 - 1 by 65535 by 65535 threadgroups.
    fn default() -> Self {
        Self { threads: 1024, shared_bytes: 32 << 10, groups: [i32::MAX as u32, 65535, 65535] }
    }
}

/// The argument of a launch for a parameter.
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

/// The values that a condition mentions, without fields of `#[params]`.
fn numbers(facts: &Facts<'_>, kernel: &Kernel, condition: &str) -> String {
    let words = condition.split(|c: char| !c.is_alphanumeric() && c != '_');
    let mentioned = |name: &str| words.clone().any(|word| word == name);
    let generics = kernel.generics.iter().zip(facts.generics).map(|(of, value)| match value {
        Generic::Type(_) => None,
        value => Some((of.name, format!("{} = {value}", of.name))),
    });
    let parameters = kernel.parameters.iter().zip(facts.arguments).map(|(of, argument)| {
        let name = of.name;
        let value = match (argument, of.kind) {
            (Fact::Buffer(span), _) => return Some((name, format!("{name}.len() = {}", span.len))),
            (Fact::Bytes(bytes), ParameterKind::Scalar(scalar)) => {
                let mut raw = [0; 8];
                raw[..bytes.len()].copy_from_slice(bytes);
                number(scalar, u64::from_le_bytes(raw))
            }
            (Fact::Constant(constant), _) => number(constant.scalar, constant.raw),
            (Fact::Bytes(_), _) => return None,
        };
        Some((name, format!("{name} = {value}")))
    });
    let launch = [
        ("groups", format!("groups = {:?}", facts.groups)),
        ("threads", format!("threads = {}", facts.threads)),
    ];
    let all = generics.chain(parameters).flatten().chain(launch);
    let found: Vec<String> = all.filter(|(name, _)| mentioned(name)).map(|(_, number)| number).collect();
    found.join(", ")
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
    /// Checks a launch of `groups` threadgroups of `threads` threads against the instance, the limits and the kernel's `requires`, in
    /// this order.
    ///
    /// # Errors
    /// [`ContractError`]: the first part of the contract that does not hold.
    pub fn new(
        instance: &'a Instance,
        groups: [u32; 3],
        threads: u32,
        arguments: Vec<Argument<'a, M>>,
        limits: &Limits,
    ) -> Result<Self, ContractError> {
        let kernel = instance.kernel();
        let broken = |what| ContractError { kernel: kernel.name, what };
        if !instance.threads().admits(threads) {
            return Err(broken(ContractErrorKind::Threads { expected: instance.threads(), found: threads }));
        }
        if threads > limits.threads {
            return Err(broken(ContractErrorKind::DeviceThreads { limit: limits.threads, found: threads }));
        }
        if groups.iter().zip(limits.groups).any(|(&n, limit)| n == 0 || n > limit) {
            return Err(broken(ContractErrorKind::Groups { limit: limits.groups, found: groups }));
        }
        let bytes = instance.shared_bytes();
        if bytes > limits.shared_bytes {
            return Err(broken(ContractErrorKind::SharedBytes { limit: limits.shared_bytes, found: bytes }));
        }
        if arguments.len() != kernel.parameters.len() {
            let (expected, found) = (kernel.parameters.len(), arguments.len());
            return Err(broken(ContractErrorKind::Arguments { expected, found }));
        }
        for (argument, parameter) in arguments.iter().zip(kernel.parameters) {
            let name = parameter.name;
            let element = |expected: Option<ScalarType>, found| match expected == Some(found) {
                true => Ok(()),
                false => Err(broken(ContractErrorKind::Element { parameter: name, expected, found })),
            };
            match (argument, parameter.kind) {
                (Argument::Read(view), ParameterKind::Buffer { element: expected, writable: false }) => {
                    element(expected.of(instance.all_generics()), view.element())?;
                }
                (Argument::Write(view), ParameterKind::Buffer { element: expected, writable: true }) => {
                    element(expected.of(instance.all_generics()), view.element())?;
                }
                (Argument::Bytes(found), ParameterKind::Params { bytes, .. }) if found.len() == bytes => {}
                (Argument::Bytes(found), ParameterKind::Scalar(scalar)) if found.len() == scalar.bytes() => {}
                (Argument::Constant(found), ParameterKind::Constant(scalar)) if found.scalar == scalar => {}
                _ => return Err(broken(ContractErrorKind::Argument { parameter: name })),
            }
        }
        let facts: Vec<Fact<'_>> = arguments.iter().map(Argument::fact).collect();
        let facts = Facts { generics: instance.all_generics(), arguments: &facts, groups, threads };
        if let Some(n) = (kernel.unmet)(&facts) {
            let (condition, message) =
                kernel.requirements.get(n).map_or(("", ""), |r| (r.condition, r.message));
            let numbers = numbers(&facts, kernel, condition);
            return Err(broken(ContractErrorKind::Requirement { condition, message, numbers }));
        }
        Ok(Self { instance, groups, threads, arguments })
    }

    /// The kernel with its generics.
    pub fn instance(&self) -> &'a Instance {
        self.instance
    }

    /// Threadgroups along each coordinate, each at least 1.
    pub fn groups(&self) -> [u32; 3] {
        self.groups
    }

    /// Threads of a threadgroup, a multiple of 32.
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

    /// The options of NVRTC beside the architecture: [`Instance::cuda_options`] of the launch's constants.
    pub fn cuda_options(&self) -> Vec<String> {
        self.instance.cuda_options(self.constants())
    }
}

/// A launch that does not keep a contract.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContractError {
    /// The kernel.
    pub kernel: &'static str,
    /// The part of the contract that does not hold.
    pub what: ContractErrorKind,
}

impl ContractError {
    /// An instance of another kernel.
    #[doc(hidden)]
    pub fn instance(kernel: &'static Kernel, instance: &Instance) -> Self {
        Self { kernel: kernel.name, what: ContractErrorKind::Instance { found: instance.kernel().name } }
    }
}

/// The part of a contract a launch does not keep.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ContractErrorKind {
    /// The instance is of another kernel.
    Instance {
        /// That kernel.
        found: &'static str,
    },
    /// A condition of `requires` is false.
    Requirement {
        /// The condition as written.
        condition: &'static str,
        /// The meaning of the condition.
        message: &'static str,
        /// The values that it mentions: `x.len() = 128, groups = [2, 1, 1]`.
        numbers: String,
    },
    /// The kernel is not written for threadgroups of this many threads.
    Threads {
        /// The numbers of threads that it is written for.
        expected: Threads,
        /// Threads of the launch.
        found: u32,
    },
    /// The device has no threadgroups of this many threads.
    DeviceThreads {
        /// The device's limit.
        limit: u32,
        /// Threads of the launch.
        found: u32,
    },
    /// There is no threadgroup along a coordinate, or more than the device can have.
    Groups {
        /// The device's limit.
        limit: [u32; 3],
        /// Threadgroups of the launch.
        found: [u32; 3],
    },
    /// A threadgroup needs more shared memory than the device has.
    SharedBytes {
        /// The device's limit.
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

impl fmt::Display for ContractError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.kernel)?;
        match &self.what {
            ContractErrorKind::Instance { found } => write!(f, "the instance is of {found}"),
            ContractErrorKind::Requirement { condition, message, numbers } => {
                write!(f, "{message}: `{condition}` does not hold")?;
                if numbers.is_empty() { Ok(()) } else { write!(f, " where {numbers}") }
            }
            ContractErrorKind::Threads { expected, .. }
                if !expected.most().is_multiple_of(32) || expected.most() == 0 =>
            {
                write!(f, "a group of {} threads: threads come in SIMD groups of 32", expected.most())
            }
            ContractErrorKind::Threads { expected, found } => {
                write!(f, "a group has {expected} threads, {found} asked for")
            }
            ContractErrorKind::DeviceThreads { limit, found } => {
                write!(f, "a group of the device has at most {limit} threads, {found} asked for")
            }
            ContractErrorKind::Groups { limit, found } => {
                write!(f, "{found:?} groups: the device takes 1 to {limit:?}")
            }
            ContractErrorKind::SharedBytes { limit, found } => {
                write!(f, "a group needs {found} bytes of shared memory, the device has {limit}")
            }
            ContractErrorKind::Arguments { expected, found } => {
                write!(f, "{expected} parameters, {found} arguments")
            }
            ContractErrorKind::Element { parameter, expected: Some(expected), found } => {
                write!(f, "{parameter} has elements of {expected}, given {found}")
            }
            ContractErrorKind::Element { parameter, expected: None, found } => {
                write!(f, "{parameter} has elements of no type, given {found}")
            }
            ContractErrorKind::Argument { parameter } => {
                write!(f, "the argument for {parameter} is of another kind")
            }
        }
    }
}

impl std::error::Error for ContractError {}

/// Why a `Call` failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LaunchError<E> {
    /// The launch does not keep the kernel's contract or the device's limits; nothing ran.
    Contract(ContractError),
    /// The device failed.
    Device(E),
}

impl<E> From<ContractError> for LaunchError<E> {
    fn from(broken: ContractError) -> Self {
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
