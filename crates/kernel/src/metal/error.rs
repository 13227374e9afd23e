//! Errors of devices, Metal's compiler and command buffers.

use crate::device::Span;
use crate::disk::DiskError;
use crate::scalar::ScalarType;
use objc2_foundation::NSError;
use std::path::PathBuf;

/// The reason why a device refused or failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// This machine has no Metal device.
    NoDevice,
    /// The device made no queue, command buffer, encoder or event.
    NoObject {
        /// The object that the device did not make.
        what: &'static str,
    },
    /// The device has no memory of this size.
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// The most bytes that one buffer of the device may have.
        max: usize,
    },
    /// The printed source of a kernel did not compile.
    Compile {
        /// The kernel.
        kernel: String,
        /// The compiler's log; its line numbers count in the printed source.
        log: String,
    },
    /// No pipeline could be made of a compiled kernel.
    Pipeline {
        /// The kernel.
        kernel: String,
        /// Metal's number of the error.
        code: isize,
        /// Metal's description.
        log: String,
    },
    /// A pipeline runs fewer threads a threadgroup than a launch has, as its registers do not suffice for more. Nothing was launched.
    ThreadLimit {
        /// The kernel.
        kernel: &'static str,
        /// `maxTotalThreadsPerThreadgroup` of the pipeline.
        limit: u32,
        /// Threads of the launch.
        threads: u32,
    },
    /// A command buffer failed.
    Execution {
        /// The kind of the failure.
        kind: CommandBufferError,
        /// Metal's number of the error.
        code: isize,
        /// Metal's description.
        message: String,
    },
    /// Memory that was given for a parameter is of another device. Nothing was launched.
    OtherDevice {
        /// The kernel.
        kernel: &'static str,
        /// The parameter.
        parameter: &'static str,
    },
    /// A parameter's elements are not inside its memory, or do not start at an element of it. Nothing was launched.
    Span {
        /// The kernel.
        kernel: &'static str,
        /// The parameter.
        parameter: &'static str,
        /// The elements.
        span: Span,
        /// Bytes of the memory.
        bytes: usize,
    },
    /// Memory holds elements of another type.
    Element {
        /// The type asked for.
        expected: ScalarType,
        /// The type in memory.
        found: ScalarType,
    },
    /// A range of a buffer does not lie inside of it, or does not start at an element.
    Range {
        /// Bytes before the range.
        offset: usize,
        /// Bytes of the range.
        bytes: usize,
        /// Bytes of the buffer.
        buffer: usize,
    },
    /// The host waits for launches that went to a command buffer or an encoder of the caller's, who alone can commit them and did not.
    NotCommitted,
    /// A launch after the encoder of the caller's that it goes to has ended.
    Ended,
    /// A command buffer does not keep its resources alive (`commandBufferWithUnretainedReferences`): memory
    /// of sessions may be gone before it has completed.
    Unretained,
    /// An argument has more bytes than an encoder takes. Nothing was launched.
    Bytes {
        /// The kernel.
        kernel: &'static str,
        /// Its bytes.
        bytes: usize,
        /// The most that are taken.
        max: usize,
    },
    /// A command buffer is of another queue than the device's.
    OtherQueue,
    /// The folder of compiled kernels cannot be used.
    KernelFolder {
        /// The folder or file.
        path: PathBuf,
        /// The system's description.
        error: String,
    },
    /// A binary archive could not be written or filled.
    Archive {
        /// The kernel.
        kernel: String,
        /// Metal's description.
        error: String,
    },
    /// A capture could not start.
    Capture {
        /// Metal's description, or the missing precondition.
        error: String,
    },
}

/// The kind of failure of a command buffer: `MTLCommandBufferError`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommandBufferError {
    /// The GPU's work took too long and was interrupted.
    Timeout,
    /// The GPU accessed memory that is not mapped.
    PageFault,
    /// The process may no longer use the GPU, after too many failures.
    AccessRevoked,
    /// The process may not use the GPU, such as an app in the background.
    NotPermitted,
    /// The device ran out of memory.
    OutOfMemory,
    /// The command buffer refers to a resource that is no longer valid.
    InvalidResource,
    /// The device was removed.
    DeviceRemoved,
    /// A kernel's stack overflowed.
    StackOverflow,
    /// An error inside of Metal.
    Internal,
    /// One that this version does not know.
    Other,
}

impl CommandBufferError {
    const fn of(code: isize) -> Self {
        // MTLCommandBufferError of MTLCommandBuffer.h.
        match code {
            1 => Self::Internal,
            2 => Self::Timeout,
            3 => Self::PageFault,
            4 => Self::AccessRevoked,
            7 => Self::NotPermitted,
            8 => Self::OutOfMemory,
            9 => Self::InvalidResource,
            11 => Self::DeviceRemoved,
            12 => Self::StackOverflow,
            _ => Self::Other,
        }
    }
}

impl Error {
    /// The failure of a command buffer, from its `error`.
    #[must_use]
    pub fn execution(error: &NSError) -> Self {
        let code = error.code();
        Self::Execution { kind: CommandBufferError::of(code), code, message: describe(error) }
    }

    /// A source that did not compile.
    pub(super) fn compile(kernel: &str, error: &NSError) -> Self {
        Self::Compile { kernel: kernel.to_owned(), log: describe(error) }
    }

    /// A kernel without a pipeline.
    pub(super) fn pipeline(kernel: &str, error: &NSError) -> Self {
        Self::Pipeline { kernel: kernel.to_owned(), code: error.code(), log: describe(error) }
    }

    /// An archive that was not kept.
    pub(super) fn archive(kernel: &str, error: &NSError) -> Self {
        Self::Archive { kernel: kernel.to_owned(), error: describe(error) }
    }
}

impl From<DiskError> for Error {
    fn from(DiskError { path, error }: DiskError) -> Self {
        Self::KernelFolder { path, error }
    }
}

pub(super) fn describe(error: &NSError) -> String {
    error.localizedDescription().to_string()
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoDevice => f.write_str("no Metal device on this machine"),
            Self::NoObject { what } => write!(f, "the Metal device made no {what}"),
            Self::Memory { bytes, max } => {
                write!(
                    f,
                    "the Metal device gave no memory of {bytes} bytes: a buffer may have {max}, and all memory may be in use"
                )
            }
            Self::Compile { kernel, log } => write!(f, "{kernel} does not compile: {log}"),
            Self::Pipeline { kernel, code, log } => write!(f, "{kernel} has no pipeline: {log} (error {code})"),
            Self::ThreadLimit { kernel, limit, threads } => {
                write!(f, "{kernel}: its pipeline runs at most {limit} threads a threadgroup, {threads} asked for")
            }
            Self::Execution { kind, code, message } => {
                write!(f, "a command buffer failed: {kind:?}, error {code}: {message}")
            }
            Self::OtherDevice { kernel, parameter } => {
                write!(f, "{kernel}: the memory given for {parameter} is of another device")
            }
            Self::Span { kernel, parameter, span: Span { element, offset, len }, bytes } => {
                write!(
                    f,
                    "{kernel}: {parameter} is given {len} {element} after the first {offset} of memory that has {bytes} bytes"
                )
            }
            Self::Element { expected, found } => {
                write!(f, "memory holds elements of {found}, asked for {expected}")
            }
            Self::Range { offset, bytes, buffer } => {
                write!(f, "{bytes} bytes at byte {offset} are no elements of a buffer of {buffer} bytes")
            }
            Self::NotCommitted => {
                f.write_str("launches went to a command buffer of the caller's that is not committed: results can be read once it is")
            }
            Self::Ended => f.write_str("the encoder that launches go to has ended"),
            Self::Unretained => f.write_str("the command buffer does not retain its references: memory of launches may be gone too early"),
            Self::Bytes { kernel, bytes, max } => {
                write!(f, "{kernel}: an argument has {bytes} bytes, an encoder takes at most {max}")
            }
            Self::OtherQueue => f.write_str("the command buffer is of another queue than the device's"),
            Self::KernelFolder { path, error } => {
                write!(f, "compiled kernels are kept in {}: {error}", path.display())
            }
            Self::Archive { kernel, error } => write!(f, "{kernel} is not kept in a binary archive: {error}"),
            Self::Capture { error } => write!(f, "no capture: {error}"),
        }
    }
}

impl std::error::Error for Error {}
