//! Faults: errors of a simulated kernel, and their places.

use std::fmt;

/// A fault of a simulated kernel: the launch ended there, with its memory as it was then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kernel.
    pub kernel: &'static str,
    /// The kind of fault.
    pub kind: FaultKind,
    /// The source file.
    pub file: String,
    /// The line.
    pub line: u32,
    /// The number of the thread in its threadgroup.
    pub thread: u32,
    /// The lane of the thread in its SIMD group.
    pub lane: u32,
    /// The position of the threadgroup.
    pub group: [u32; 3],
    /// The description of the fault, with the values.
    pub message: String,
}

/// The kinds of [`Fault`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultKind {
    /// An index outside a buffer, a shared array or a local array.
    OutOfBounds,
    /// A read of memory before anything was written to it.
    Uninitialised,
    /// Two threads use an element, one of them writes, and nothing orders them.
    Race,
    /// Threads of a threadgroup wait at different barriers, in different iterations of a loop or by different calls of a device
    /// function, or some have returned.
    DivergentBarrier,
    /// Lanes of a SIMD group are at different SIMD operations, in different iterations of a loop or by different calls of a
    /// device function, or some have returned.
    DivergentSimd,
    /// A lane number above 31, or one that differs between lanes where it must not.
    Lane,
    /// A vector access whose address or size is not aligned.
    Misaligned,
    /// An operation without a result: overflow, division by zero, a shift by the width or more.
    Arithmetic,
    /// A panic of the native code.
    Panic,
    /// A thread that does not end.
    Endless,
    /// A launch that the simulator cannot run: no native code, a view beyond its memory, no stacks.
    Launch,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, file, line, thread, lane, group: [x, y, z], message, kind } = self;
        if *kind == FaultKind::Launch {
            return write!(f, "{kernel}, {file}:{line}: {message}");
        }
        write!(
            f,
            "{kernel}, {file}:{line}, thread {thread} (lane {lane}) of group [{x}, {y}, {z}]: {message}"
        )
    }
}

impl std::error::Error for Fault {}
