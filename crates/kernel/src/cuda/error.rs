//! Errors of devices, the driver and the compiler.

use super::grid::Grid;
use crate::device::Span;
use crate::disk::DiskError;
use crate::scalar::ScalarType;
use cudarc::driver::DriverError;
use std::path::PathBuf;

/// The reason why a device refused or failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// A library of NVIDIA's software is not on this machine.
    Missing {
        /// The library: `driver` or `NVRTC`.
        library: &'static str,
        /// Names and places that were tried.
        tried: String,
    },
    /// The program is linked statically, with musl, and cannot load a library of NVIDIA's.
    Static {
        /// The library: `driver` or `NVRTC`.
        library: &'static str,
    },
    /// There is no such device.
    NoDevice {
        /// The index of the device.
        ordinal: usize,
        /// Devices of this machine.
        count: usize,
    },
    /// A call of the driver failed.
    Driver {
        /// The operation.
        what: String,
        /// The driver's name of the error and its description.
        error: String,
    },
    /// A kernel did not compile.
    Compile {
        /// Name of the kernel.
        kernel: String,
        /// The compiler's log; its line numbers count in the program's source.
        log: String,
    },
    /// The folder of compiled kernels cannot be used.
    KernelFolder {
        /// The folder or file.
        path: PathBuf,
        /// The system's description.
        error: String,
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
    /// A launch has more blocks, threads or bytes of shared memory than the driver's parameters can hold. Nothing was launched.
    Grid {
        /// The kernel.
        kernel: String,
        /// The launch's grid.
        grid: Grid,
    },
    /// Memory holds elements of another type.
    Element {
        /// The type asked for.
        expected: ScalarType,
        /// The type in memory.
        found: ScalarType,
    },
    /// Memory holds another number of elements.
    Length {
        /// Elements given.
        expected: usize,
        /// Elements of the memory.
        found: usize,
    },
}

impl Error {
    /// The error of a call of the driver that was to do `what`.
    pub fn driver(what: impl Into<String>) -> impl FnOnce(DriverError) -> Self {
        let what = what.into();
        move |error| Self::Driver { what, error: describe(error) }
    }
}

impl From<DiskError> for Error {
    fn from(DiskError { path, error }: DiskError) -> Self {
        Self::KernelFolder { path, error }
    }
}

fn describe(error: DriverError) -> String {
    let text = |s: Result<&std::ffi::CStr, _>| {
        s.map_or_else(|_: DriverError| String::new(), |s| s.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(error.error_name()), text(error.error_string()))
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing { library, tried } => {
                write!(f, "no NVIDIA {library} on this machine: tried {tried}")
            }
            Self::Static { library } => {
                write!(f, "no NVIDIA {library}: this program is linked statically and loads no libraries")
            }
            Self::NoDevice { ordinal, count } => {
                write!(f, "no CUDA device {ordinal}: this machine has {count}, counted from 0")
            }
            Self::Driver { what, error } => write!(f, "{what}: {error}"),
            Self::Compile { kernel, log } => write!(f, "{kernel} does not compile: {log}"),
            Self::KernelFolder { path, error } => {
                write!(f, "compiled kernels are kept in {}: {error}", path.display())
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
            Self::Grid { kernel, grid: Grid { blocks, threads, shared } } => {
                write!(
                    f,
                    "{kernel}: {blocks:?} blocks of {threads} threads with {shared} bytes of shared memory: each number is below 2^32"
                )
            }
            Self::Element { expected, found } => {
                write!(f, "memory holds elements of {found}, asked for {expected}")
            }
            Self::Length { expected, found } => {
                write!(f, "memory holds {found} elements, given {expected}")
            }
        }
    }
}

impl std::error::Error for Error {}
