//! Names of backends, as users write them.

use std::str::FromStr;

/// A backend as a user names it: `auto`, `cpu`, `cuda`, `cuda:1` or `metal`. Every build knows every name;
/// [`BackendName::open`] refuses backends that the build or the machine lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum BackendName {
    /// The fastest backend of this machine for the problem.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// A CUDA device.
    Cuda {
        /// Its number, counted from 0 as the driver counts.
        device: usize,
    },
    /// The system's default Metal device.
    Metal,
}

impl std::fmt::Display for BackendName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda { device: 0 } => f.write_str("cuda"),
            Self::Cuda { device } => write!(f, "cuda:{device}"),
            Self::Metal => f.write_str("metal"),
        }
    }
}

impl FromStr for BackendName {
    type Err = BackendNameError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "auto" => return Ok(Self::Auto),
            "cpu" => return Ok(Self::Cpu),
            "cuda" => return Ok(Self::Cuda { device: 0 }),
            "metal" => return Ok(Self::Metal),
            _ => {}
        }
        let Some(number) = name.strip_prefix("cuda:") else {
            return Err(BackendNameError::Unknown { name: name.to_owned() });
        };
        // `parse` alone would take a plus sign.
        let device = number.bytes().all(|byte| byte.is_ascii_digit()).then(|| number.parse().ok()).flatten();
        let device = device.ok_or_else(|| BackendNameError::Device { name: name.to_owned() })?;
        Ok(Self::Cuda { device })
    }
}

/// Why a text names no backend.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackendNameError {
    /// There is no backend of this name.
    Unknown {
        /// The text.
        name: String,
    },
    /// The text after `cuda:` is not the number of a device.
    Device {
        /// The text.
        name: String,
    },
}

impl std::fmt::Display for BackendNameError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unknown { name } => {
                write!(f, "no backend is called '{name}', expected auto, cpu, cuda, cuda:N or metal")
            }
            Self::Device { name } => {
                write!(f, "'{name}', expected cuda:N, where N is the number of a device, counted from 0")
            }
        }
    }
}

impl std::error::Error for BackendNameError {}
