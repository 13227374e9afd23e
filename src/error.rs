//! One error for everything that the front door refuses.

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
use std::sync::Arc;

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
    /// A kernel has broken its contract on the simulator: a mistake of flashtile's, not of the caller's.
    Fault(Arc<dyn std::error::Error + Send + Sync>),
    /// A device, its driver or its compiler refused, for a reason that no CPU has. [`Error::of_device`] has the error of its
    /// backend.
    Device(Arc<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Returns true if the request is valid, but the device has no kernel for it: another device, or other
    /// options, may serve it.
    #[must_use]
    pub const fn is_unsupported(&self) -> bool {
        matches!(self, Self::Unsupported(_))
    }

    /// The error of a device, if it is of this type: `CudaError`, `MetalError`.
    #[must_use]
    pub fn of_device<E: std::error::Error + 'static>(&self) -> Option<&E> {
        match self {
            Self::Device(error) => error.downcast_ref(),
            _ => None,
        }
    }

    #[cfg(feature = "gpu")]
    pub(crate) fn device(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Device(Arc::new(error))
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
            Self::Device(error) | Self::Fault(error) => &**error,
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

/// Why a text names no backend.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackendNameError {
    /// `auto` names the backend that suits a problem, and there is no problem.
    Auto,
    /// There is no backend of this name.
    Unknown {
        /// The text.
        name: String,
        /// The names that there are, beside `auto`.
        known: Vec<String>,
    },
    /// The text after the colon is not the number of a device.
    Device {
        /// The backend.
        backend: &'static str,
        /// The text.
        name: String,
    },
}

impl std::fmt::Display for BackendNameError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto is chosen for a problem, expected the name of a backend"),
            Self::Unknown { name, known } => {
                let (last, others) = known.split_last().map_or(("auto", &[][..]), |(last, all)| (last, all));
                write!(f, "no backend is called '{name}', expected auto, {} or {last}", others.join(", "))
            }
            Self::Device { backend, name } => {
                write!(f, "'{name}', expected {backend}:N, where N is the number of a device, counted from 0")
            }
        }
    }
}

impl std::error::Error for BackendNameError {}
