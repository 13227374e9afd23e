use std::fmt;

/// Why no compiler can be used.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum FindError {
    /// This machine cannot run the stand-in, and why.
    Machine(&'static str),
    /// No compiler was found, and where it was searched for.
    Compiler(String),
    /// The compiler found cannot compile or link the stand-in itself.
    Unfit {
        /// The compiler.
        program: String,
        /// Its messages.
        output: String,
    },
}

impl fmt::Display for FindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine(why) => write!(f, "the MSL stand-in does not run here: {why}"),
            Self::Compiler(tried) => write!(f, "no clang with C++ for OpenCL found: tried {tried}"),
            Self::Unfit { program, output } => {
                write!(f, "{program} cannot compile the MSL stand-in: {output}")
            }
        }
    }
}

impl std::error::Error for FindError {}

/// Why a program is refused: all messages, with lines of the program.
#[derive(Clone, Debug)]
pub struct CompileError {
    pub(crate) messages: String,
}

impl CompileError {
    /// The messages of the compiler.
    pub fn messages(&self) -> &str {
        &self.messages
    }
}

impl fmt::Display for CompileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.messages.trim_end())
    }
}

impl std::error::Error for CompileError {}

/// Why a [`Kernel`](crate::Kernel) cannot be made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The library has no kernel of this name.
    NoKernel {
        /// The name given.
        name: String,
        /// The names of the library's kernels.
        available: Vec<String>,
    },
    /// A function constant that the kernel uses is not set.
    ConstantNotSet {
        /// Its name in the program.
        name: String,
        /// Its index.
        index: u32,
    },
    /// A function constant is declared with another type than that of its value.
    ConstantType {
        /// Its name in the program.
        name: String,
        /// The type declared.
        declared: String,
        /// The type of the value.
        given: &'static str,
    },
    /// The program has no function constant with this index, or it is set twice.
    ConstantIndex(u32),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoKernel { name, available } => {
                write!(f, "no kernel `{name}`: the kernels are {}", available.join(", "))
            }
            Self::ConstantNotSet { name, index } => {
                write!(f, "function constant {index} (`{name}`) is not set")
            }
            Self::ConstantType { name, declared, given } => {
                write!(f, "function constant `{name}` is declared {declared}, got a {given}")
            }
            Self::ConstantIndex(index) => {
                write!(f, "function constant {index} is set twice or not declared")
            }
        }
    }
}

impl std::error::Error for Error {}

/// A thread of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadId {
    /// The position of its threadgroup in the grid.
    pub threadgroup: [u32; 3],
    /// Its index in the threadgroup.
    pub thread: u32,
}

impl fmt::Display for ThreadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.threadgroup;
        write!(f, "thread {} of threadgroup ({x}, {y}, {z})", self.thread)
    }
}

/// Why a run fails.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunError {
    /// A launch that Metal would refuse.
    Launch(String),
    /// Threads wait at different places of the program, or some wait and others have returned.
    Diverged {
        /// One of the threads.
        at: ThreadId,
        /// The operation at which it waits, or that it has returned.
        does: String,
        /// The index of another thread of its threadgroup.
        other: u32,
        /// The operation at which the other waits, or that it has returned.
        other_does: String,
    },
    /// An argument that must be the same for all lanes of a SIMD-group operation differs.
    Arguments {
        /// One of the lanes.
        at: ThreadId,
        /// The operation.
        does: String,
    },
    /// A lane reads the value of a lane that is inactive or does not exist.
    Lane {
        /// The thread that reads.
        at: ThreadId,
        /// The line of the operation in the program.
        line: u32,
        /// The lane that is read.
        lane: u64,
    },
    /// An access out of bounds, a misaligned one, or a write to a buffer bound for reading.
    Access {
        /// The thread.
        at: ThreadId,
        /// The fault of the access.
        what: String,
    },
    /// Two threads access the same byte with no barrier between, at least one writes, and not both accesses are atomic.
    Race {
        /// The thread that accesses it later.
        at: ThreadId,
        /// The access.
        does: String,
        /// The number of the threadgroup of the earlier access, in the order of the grid, and the thread in it.
        other: (u32, u32),
        /// True if the earlier access is a write.
        wrote: bool,
    },
    /// A thread does not terminate.
    Endless {
        /// The thread.
        at: ThreadId,
    },
    /// More threadgroup memory than a threadgroup may have.
    ThreadgroupMemory {
        /// Bytes that the kernel and the launch ask for.
        bytes: usize,
        /// Bytes that a threadgroup may have.
        limit: usize,
    },
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Launch(what) => f.write_str(what),
            Self::Diverged { at, does, other, other_does } => {
                write!(f, "{at} {does}, but thread {other} {other_does}")
            }
            Self::Arguments { at, does } => {
                write!(f, "{at} {does}, with arguments that differ from the previous lanes'")
            }
            Self::Lane { at, line, lane } => {
                write!(f, "{at} reads lane {lane} in line {line}, and that lane is inactive")
            }
            Self::Access { at, what } => write!(f, "{at} {what}"),
            Self::Race { at, does, other: (group, thread), wrote } => {
                let how = if *wrote { "written" } else { "read" };
                write!(
                    f,
                    "{at} {does}, which thread {thread} of threadgroup {group} has {how} with no barrier between"
                )
            }
            Self::Endless { at } => write!(f, "{at} does not terminate"),
            Self::ThreadgroupMemory { bytes, limit } => {
                write!(
                    f,
                    "{bytes} bytes of threadgroup memory, more than the {limit} that a threadgroup may have"
                )
            }
        }
    }
}

impl std::error::Error for RunError {}
