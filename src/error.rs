//! One error for everything that the front door refuses.

use crate::backend_name::BackendNameError;
use flashtile_core::block_tables::TableError;
use flashtile_core::cache::CacheError;
use flashtile_core::codec::{EncodeError, PagesError};
use flashtile_core::inputs::RunError;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::ProblemError;
use flashtile_core::quality::QualityError;
use flashtile_core::tensor::ViewError;
use flashtile_cpu::merge::MergeError;
use flashtile_cpu::workspace::WorkspaceError;

/// The result of flashtile's functions, whose error is [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Any reason for which flashtile refuses to compute. The errors of views, descriptions, plans, runs, caches, codecs and merging
/// convert into it, so that `?` works on all of them.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Error {
    /// Memory cannot be viewed with a shape.
    View(ViewError),
    /// The problem is not well formed.
    Problem(ProblemError),
    /// The problem is well formed, and the device has no plan for it.
    Unsupported(Unsupported),
    /// The tensors do not fit the problem.
    Run(RunError),
    /// Block tables do not describe sequences in a pool.
    Table(TableError),
    /// A cache refused an operation, and is unchanged.
    Cache(CacheError),
    /// States do not merge.
    Merge(MergeError),
    /// Pages of codes do not have the form of their codec.
    Pages(PagesError),
    /// A row cannot be encoded.
    Encode(EncodeError),
    /// Lists of a report on quality do not fit each other.
    Quality(QualityError),
    /// There is no memory for a workspace or a result.
    Memory {
        /// Bytes that were needed.
        bytes: usize,
    },
    /// A text names no backend.
    BackendName(BackendNameError),
    /// The build lacks the cargo feature of the requested backend.
    Feature {
        /// The requested backend.
        asked: String,
        /// The cargo feature.
        feature: &'static str,
    },
    /// The operating system of this machine does not support the requested backend.
    System {
        /// The requested backend.
        asked: String,
        /// The operating systems that support it.
        systems: &'static str,
    },
    /// A CUDA device refused, for a reason that no CPU has.
    #[cfg(feature = "cuda")]
    Cuda(flashtile_cuda::CudaError),
    /// A Metal device refused, for a reason that no CPU has.
    #[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
    Metal(flashtile_metal::MetalError),
}

impl Error {
    /// Returns true if the request is valid, but the device has no kernel for it: another device, or other
    /// options, may serve it.
    #[must_use]
    pub const fn is_unsupported(&self) -> bool {
        matches!(self, Self::Unsupported(_))
    }

    /// The error inside, if any.
    fn inner(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(match self {
            Self::View(error) => error,
            Self::Problem(error) => error,
            Self::Unsupported(error) => error,
            Self::Run(error) => error,
            Self::Table(error) => error,
            Self::Cache(error) => error,
            Self::Merge(error) => error,
            Self::Pages(error) => error,
            Self::Encode(error) => error,
            Self::Quality(error) => error,
            Self::BackendName(error) => error,
            Self::Memory { .. } | Self::Feature { .. } | Self::System { .. } => return None,
            #[cfg(feature = "cuda")]
            Self::Cuda(error) => error,
            #[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
            Self::Metal(error) => error,
        })
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Memory { bytes } => write!(f, "no memory for {bytes} bytes"),
            Self::Feature { asked, feature } => {
                write!(f, "{asked} needs the cargo feature {feature}, which this build lacks")
            }
            Self::System { asked, systems } => {
                write!(f, "{asked} needs {systems}, this is {}", std::env::consts::OS)
            }
            other => other.inner().map_or(Ok(()), |inner| std::fmt::Display::fmt(inner, f)),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.inner()?.source()
    }
}

macro_rules! from {
    ($($name:ident($error:ty)),* $(,)?) => {
        $(impl From<$error> for Error {
            fn from(error: $error) -> Self {
                Self::$name(error)
            }
        })*
    };
}

from! {
    Problem(ProblemError),
    Unsupported(Unsupported),
    Run(RunError),
    Table(TableError),
    Cache(CacheError),
    Merge(MergeError),
    Pages(PagesError),
    Encode(EncodeError),
    Quality(QualityError),
    BackendName(BackendNameError),
}

impl From<ViewError> for Error {
    fn from(error: ViewError) -> Self {
        match error {
            ViewError::Memory { bytes } => Self::Memory { bytes },
            other => Self::View(other),
        }
    }
}

impl From<WorkspaceError> for Error {
    fn from(error: WorkspaceError) -> Self {
        Self::Memory { bytes: error.bytes }
    }
}

#[cfg(feature = "cuda")]
impl From<flashtile_cuda::CudaError> for Error {
    fn from(error: flashtile_cuda::CudaError) -> Self {
        use flashtile_cuda::CudaError;
        match error {
            CudaError::Problem(error) => Self::Problem(error),
            CudaError::Unsupported(error) => Self::Unsupported(error),
            CudaError::Inputs(error) => Self::Run(error),
            CudaError::View(error) => error.into(),
            CudaError::KvCache(error) => Self::Cache(error),
            error => Self::Cuda(error),
        }
    }
}

#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
impl From<flashtile_metal::MetalError> for Error {
    fn from(error: flashtile_metal::MetalError) -> Self {
        use flashtile_metal::SessionError;
        match error {
            SessionError::Problem(error) => Self::Problem(error),
            SessionError::Unsupported(error) => Self::Unsupported(error),
            SessionError::Inputs(error) => Self::Run(error),
            error => Self::Metal(error),
        }
    }
}

#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
impl From<flashtile_metal::DeviceError> for Error {
    fn from(error: flashtile_metal::DeviceError) -> Self {
        Self::Metal(flashtile_metal::SessionError::device(error))
    }
}

#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
impl From<flashtile_metal::StoreError<flashtile_metal::DeviceError>> for Error {
    fn from(error: flashtile_metal::StoreError<flashtile_metal::DeviceError>) -> Self {
        match error.into_session() {
            Ok(error) => error.into(),
            Err(error) => Self::Cache(error),
        }
    }
}
