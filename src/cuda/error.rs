//! What can go wrong on a device.

use crate::{CacheError, RunError, Unsupported, ViewError};
use cudarc::driver::DriverError;
use std::path::PathBuf;

/// Why the CUDA backend did not do what was asked.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum CudaError {
    /// A library of NVIDIA's software is not on this machine.
    Missing {
        /// What it is: `driver` or `NVRTC`.
        library: &'static str,
        /// Names and places that were tried.
        tried: String,
    },
    /// There is no such device.
    NoDevice {
        /// The number asked for.
        ordinal: usize,
        /// Devices of this machine.
        count: usize,
    },
    /// A call of the driver failed.
    Driver {
        /// What was being done.
        what: String,
        /// The driver's name of the error and its description.
        error: String,
    },
    /// A kernel did not compile.
    Compile {
        /// Name of the kernel.
        kernel: String,
        /// The compiler's log.
        log: String,
    },
    /// The folder of compiled kernels cannot be used.
    KernelFolder {
        /// The folder or file.
        path: PathBuf,
        /// The system's description.
        error: String,
    },
    /// A valid problem has no plan on the device.
    Unsupported(Unsupported),
    /// The tensors are not those of the plan's problem. Nothing was launched.
    Inputs(RunError),
    /// A view of device memory was refused.
    View(ViewError),
    /// An operation on a cache was refused; the cache is as it was before.
    KvCache(CacheError),
    /// Scratch memory is too small for a plan.
    Scratch {
        /// Bytes needed.
        needed: usize,
        /// Bytes there are.
        got: usize,
    },
    /// Scratch memory that is not aligned to 256 bytes.
    ScratchAlignment {
        /// Its address.
        at: u64,
    },
    /// A plan of another shape than the one that scratch memory was prepared for.
    Update {
        /// What differs.
        what: String,
    },
    /// A plan was made for a device of another kind.
    OtherDevice {
        /// Kernel of the plan.
        kernel: String,
    },
}

impl CudaError {
    pub(crate) fn driver(what: impl Into<String>) -> impl FnOnce(DriverError) -> Self {
        let what = what.into();
        move |error| Self::Driver { what, error: describe(error) }
    }
}

fn describe(error: DriverError) -> String {
    let text = |s: Result<&std::ffi::CStr, _>| {
        s.map_or_else(|_: DriverError| String::new(), |s| s.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(error.error_name()), text(error.error_string()))
}

impl std::fmt::Display for CudaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing { library, tried } => {
                write!(f, "no NVIDIA {library} on this machine: tried {tried}")
            }
            Self::NoDevice { ordinal, count } => {
                write!(f, "no CUDA device {ordinal}: this machine has {count}, counted from 0")
            }
            Self::Driver { what, error } => write!(f, "{what}: {error}"),
            Self::Compile { kernel, log } => write!(f, "{kernel} does not compile: {log}"),
            Self::KernelFolder { path, error } => {
                write!(f, "compiled kernels are kept in {}: {error}", path.display())
            }
            Self::Unsupported(why) => why.fmt(f),
            Self::Inputs(why) => why.fmt(f),
            Self::View(why) => why.fmt(f),
            Self::KvCache(why) => why.fmt(f),
            Self::Scratch { needed, got } => {
                write!(f, "scratch memory has {got} bytes, the plan needs {needed}")
            }
            Self::ScratchAlignment { at } => {
                write!(f, "scratch memory at {at:#x}, expected a multiple of 256")
            }
            Self::Update { what } => write!(f, "the plan does not fit what was prepared: {what}"),
            Self::OtherDevice { kernel } => write!(f, "{kernel} was planned for another kind of device"),
        }
    }
}

impl std::error::Error for CudaError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unsupported(why) => Some(why),
            Self::Inputs(why) => Some(why),
            Self::View(why) => Some(why),
            Self::KvCache(why) => Some(why),
            _ => None,
        }
    }
}

impl From<RunError> for CudaError {
    fn from(error: RunError) -> Self {
        Self::Inputs(error)
    }
}

impl From<Unsupported> for CudaError {
    fn from(error: Unsupported) -> Self {
        Self::Unsupported(error)
    }
}

impl From<ViewError> for CudaError {
    fn from(error: ViewError) -> Self {
        Self::View(error)
    }
}

impl From<CacheError> for CudaError {
    fn from(error: CacheError) -> Self {
        Self::KvCache(error)
    }
}
