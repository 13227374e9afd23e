//! Errors of the CUDA backend.

use flashtile_core::cache::CacheError;
use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::RunError;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::ProblemError;
use flashtile_core::tensor::ViewError;
use flashtile_gpu::SessionError;
use flashtile_gpu::cache::StoreError;
use flashtile_kernel::LaunchError;
pub use flashtile_kernel::cuda::Error as DeviceError;
use flashtile_kernel::cuda::cudarc::driver::DriverError;

/// The reason why the CUDA backend refused or failed.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum CudaError {
    /// A failure of the driver, the compiler or the folder of compiled kernels, or a part that the machine
    /// lacks.
    Device(DeviceError),
    /// The problem is not well formed.
    Problem(ProblemError),
    /// A valid problem has no plan on the device.
    Unsupported(Unsupported),
    /// The tensors do not fit the plan's problem. Nothing was launched.
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
        /// The difference between the plans.
        what: String,
    },
    /// A plan was made for a device of another kind.
    OtherDevice {
        /// Kernel of the plan.
        kernel: String,
    },
    /// An array and the tensor that it is copied to differ in dtype or shape.
    Array {
        /// Dtype and shape of the array.
        expected: (Dtype, [usize; 4]),
        /// Dtype and shape of the tensor.
        got: (Dtype, [usize; 4]),
    },
    /// A launch that does not keep the contract of its kernel: a mistake of the planner's. Nothing was launched.
    Contract {
        /// The condition.
        what: String,
    },
}

impl CudaError {
    /// Makes errors of calls of the driver; `what` names the operation.
    pub fn driver(what: impl Into<String>) -> impl FnOnce(DriverError) -> Self {
        let failed = DeviceError::driver(what);
        move |error| Self::Device(failed(error))
    }
}

impl std::fmt::Display for CudaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Device(why) => why.fmt(f),
            Self::Problem(why) => why.fmt(f),
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
            Self::Array { expected, got } => {
                write!(f, "a tensor of {} {:?} for an array of {} {:?}", got.0, got.1, expected.0, expected.1)
            }
            Self::Contract { what } => f.write_str(what),
        }
    }
}

impl std::error::Error for CudaError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Device(why) => Some(why),
            Self::Problem(why) => Some(why),
            Self::Unsupported(why) => Some(why),
            Self::Inputs(why) => Some(why),
            Self::View(why) => Some(why),
            Self::KvCache(why) => Some(why),
            Self::Scratch { .. }
            | Self::ScratchAlignment { .. }
            | Self::Update { .. }
            | Self::OtherDevice { .. }
            | Self::Array { .. }
            | Self::Contract { .. } => None,
        }
    }
}

impl From<DeviceError> for CudaError {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

impl From<ProblemError> for CudaError {
    fn from(error: ProblemError) -> Self {
        Self::Problem(error)
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

impl From<LaunchError<DeviceError>> for CudaError {
    fn from(error: LaunchError<DeviceError>) -> Self {
        match error {
            LaunchError::Device(error) => error.into(),
            other => Self::Contract { what: other.to_string() },
        }
    }
}

impl From<SessionError<DeviceError>> for CudaError {
    fn from(error: SessionError<DeviceError>) -> Self {
        match error {
            SessionError::Problem(error) => error.into(),
            SessionError::Unsupported(error) => error.into(),
            SessionError::Inputs(error) => error.into(),
            SessionError::View(error) => error.into(),
            SessionError::Array { expected, got } => Self::Array { expected, got },
            SessionError::Launch(error) => error.into(),
            SessionError::Captures { what } => {
                let error = "the stream captures a graph: call it once on this stream before the capture";
                DeviceError::Driver { what: what.to_owned(), error: error.to_owned() }.into()
            }
            other => Self::Contract { what: other.to_string() },
        }
    }
}

impl From<StoreError<DeviceError>> for CudaError {
    fn from(error: StoreError<DeviceError>) -> Self {
        match error {
            StoreError::Cache(error) => Self::KvCache(error),
            StoreError::Unsupported(error) => Self::Unsupported(error),
            StoreError::Launch(error) => error.into(),
            other => Self::Contract { what: other.to_string() },
        }
    }
}

impl From<CacheError> for CudaError {
    fn from(error: CacheError) -> Self {
        Self::KvCache(error)
    }
}
