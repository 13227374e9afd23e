use std::fmt;

/// Why there is no compiler.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Missing {
    /// The stand-in does not run on this machine.
    Machine(&'static str),
    /// No compiler was found; where it was looked for.
    Compiler(String),
    /// What was found does not compile or link the stand-in itself.
    Unfit {
        /// The program.
        program: String,
        /// What it said.
        said: String,
    },
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine(why) => write!(f, "the MSL stand-in does not run here: {why}"),
            Self::Compiler(tried) => write!(f, "no clang that has C++ for OpenCL: tried {tried}"),
            Self::Unfit { program, said } => write!(f, "{program} cannot compile the MSL stand-in: {said}"),
        }
    }
}

impl std::error::Error for Missing {}

/// Why a text is refused: all messages, with lines of the text.
#[derive(Clone, Debug)]
pub struct CompileError {
    pub(crate) messages: String,
}

impl CompileError {
    /// The messages, as the compiler gives them.
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

/// Why a kernel cannot be made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The library has no kernel of this name.
    NoKernel {
        /// The name asked for.
        name: String,
        /// The names there are.
        has: Vec<String>,
    },
    /// A function constant that the kernel reaches is not set.
    ConstantNotSet {
        /// Its name in the text.
        name: String,
        /// Its index.
        index: u32,
    },
    /// A function constant has another type.
    ConstantType {
        /// Its name in the text.
        name: String,
        /// Its type in the text.
        declared: String,
        /// The type given.
        given: &'static str,
    },
    /// The text has no function constant of this index, or it is set twice.
    ConstantIndex(u32),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoKernel { name, has } => write!(f, "no kernel `{name}`; there are {}", has.join(", ")),
            Self::ConstantNotSet { name, index } => {
                write!(f, "function constant {index} (`{name}`) is not set")
            }
            Self::ConstantType { name, declared, given } => {
                write!(f, "function constant `{name}` is a {declared}, and a {given} is given")
            }
            Self::ConstantIndex(index) => {
                write!(f, "function constant {index} is set twice or not in the text")
            }
        }
    }
}

impl std::error::Error for Error {}

/// A thread of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its threadgroup.
    pub group: [u32; 3],
    /// Its index in the threadgroup.
    pub thread: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.group;
        write!(f, "thread {} of threadgroup ({x}, {y}, {z})", self.thread)
    }
}

/// What went wrong in a run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunError {
    /// A launch that Metal would refuse.
    Launch(String),
    /// Threads wait at different places, or some have returned and others wait.
    Diverged {
        /// One of the threads.
        at: Place,
        /// What it does.
        does: String,
        /// Another thread of the group.
        other: u32,
        /// What that one does.
        other_does: String,
    },
    /// Lanes of one SIMD-group operation give different arguments where they must be the same.
    Arguments {
        /// One of the lanes.
        at: Place,
        /// The operation.
        does: String,
    },
    /// The value of a lane that takes no part, or that does not exist.
    Lane {
        /// Who reads it.
        at: Place,
        /// The line of the operation.
        line: u32,
        /// The lane.
        lane: u64,
    },
    /// An access to memory that is not there, is not aligned, or is not to be written.
    Access {
        /// Who accesses it.
        at: Place,
        /// What is wrong.
        what: String,
    },
    /// Two threads access the same memory with no barrier between, one of them writes, and not both are atomic.
    Race {
        /// The later of the two.
        at: Place,
        /// What it does.
        does: String,
        /// The earlier one's group, by its number in the grid's order, and thread.
        other: (u32, u32),
        /// Whether that one wrote.
        wrote: bool,
    },
    /// A thread does not come to an end.
    Endless {
        /// Which.
        at: Place,
    },
    /// More threadgroup memory than a group may have.
    ThreadgroupMemory {
        /// What the kernel and the launch ask for, in bytes.
        bytes: usize,
        /// What there is.
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
                write!(f, "{at} {does}, with other arguments than lanes before it")
            }
            Self::Lane { at, line, lane } => {
                write!(f, "{at} reads lane {lane} in line {line}, which takes no part")
            }
            Self::Access { at, what } => write!(f, "{at} {what}"),
            Self::Race { at, does, other: (group, thread), wrote } => {
                let how = if *wrote { "written" } else { "read" };
                write!(
                    f,
                    "{at} {does}, which thread {thread} of group {group} has {how} with no barrier between"
                )
            }
            Self::Endless { at } => write!(f, "{at} does not come to an end"),
            Self::ThreadgroupMemory { bytes, limit } => {
                write!(f, "{bytes} bytes of threadgroup memory, and a group may have {limit}")
            }
        }
    }
}

impl std::error::Error for RunError {}
