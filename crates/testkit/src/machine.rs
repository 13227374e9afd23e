//! Devices of the kernel language with memory that can be filled and read back.

use flashtile_core::dtype::Dtype;
#[cfg(feature = "simulator")]
use flashtile_kernel::simulator::{Memory, Simulator};
use flashtile_kernel::{Device, DeviceMemory, ScalarType, bf16, f16};

/// Initial contents of memory.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Values {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    U8(Vec<u8>),
    U32(Vec<u32>),
    I32(Vec<i32>),
}

/// Evaluates one expression for the values of any type.
macro_rules! each {
    ($values:expr, $list:ident => $expression:expr) => {
        match $values {
            Values::F32($list) => $expression,
            Values::F16($list) => $expression,
            Values::Bf16($list) => $expression,
            Values::U8($list) => $expression,
            Values::U32($list) => $expression,
            Values::I32($list) => $expression,
        }
    };
}

impl Values {
    /// Elements of a dtype, from their bytes.
    pub(crate) fn elements(dtype: Dtype, bytes: &[u8]) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
            Dtype::F16 => Self::F16(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b)).collect()),
            Dtype::BF16 => Self::Bf16(bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b)).collect()),
        }
    }

    /// Simulator memory with these values.
    #[cfg(feature = "simulator")]
    pub(crate) fn simulated(&self) -> Memory {
        each!(self, list => Memory::from_slice(list))
    }
}

/// Uninitialised simulator memory. Types that no output has are bytes.
#[cfg(feature = "simulator")]
pub(crate) fn blank(element: ScalarType, len: usize) -> Memory {
    match element {
        ScalarType::F32 => Memory::uninit::<f32>(len),
        ScalarType::F16 => Memory::uninit::<f16>(len),
        ScalarType::Bf16 => Memory::uninit::<bf16>(len),
        ScalarType::U32 => Memory::uninit::<u32>(len),
        ScalarType::I32 => Memory::uninit::<i32>(len),
        _ => Memory::uninit::<u8>(len),
    }
}

/// A device on which memory can be allocated and read back.
pub(crate) trait Machine: Device<Memory: DeviceMemory> {
    /// Memory with these values.
    fn hold(&self, values: &Values) -> Result<Self::Memory, String>;
    /// Uninitialised memory.
    fn blank(&self, element: ScalarType, len: usize) -> Result<Self::Memory, String>;
    /// The contents of memory after all launched work has ended.
    fn read(memory: &Self::Memory) -> Result<Vec<f64>, String>;
}

/// Contents as f64.
fn to_f64s<T: Into<f64>, E: std::fmt::Display>(read: Result<Vec<T>, E>) -> Result<Vec<f64>, String> {
    read.map(|list| list.into_iter().map(Into::into).collect()).map_err(|e| e.to_string())
}

/// The contents of memory as f64, by the type of its elements.
macro_rules! read {
    ($memory:ident) => {
        match $memory.element() {
            ScalarType::F32 => to_f64s($memory.to_vec::<f32>()),
            ScalarType::F16 => to_f64s($memory.to_vec::<f16>()),
            ScalarType::Bf16 => to_f64s($memory.to_vec::<bf16>()),
            ScalarType::U32 => to_f64s($memory.to_vec::<u32>()),
            ScalarType::I32 => to_f64s($memory.to_vec::<i32>()),
            _ => to_f64s($memory.to_vec::<u8>()),
        }
    };
}

#[cfg(feature = "simulator")]
impl Machine for Simulator {
    fn hold(&self, values: &Values) -> Result<Memory, String> {
        Ok(values.simulated())
    }

    fn blank(&self, element: ScalarType, len: usize) -> Result<Memory, String> {
        Ok(blank(element, len))
    }

    fn read(memory: &Memory) -> Result<Vec<f64>, String> {
        read!(memory)
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::{Machine, ScalarType, Values, bf16, f16, to_f64s};
    use flashtile_kernel::cuda::{Gpu, Memory};

    impl Machine for Gpu {
        fn hold(&self, values: &Values) -> Result<Memory, String> {
            each!(values, list => self.buffer_from(list)).map_err(|e| e.to_string())
        }

        fn blank(&self, element: ScalarType, len: usize) -> Result<Memory, String> {
            let made = match element {
                ScalarType::F32 => self.uninit::<f32>(len),
                ScalarType::F16 => self.uninit::<f16>(len),
                ScalarType::Bf16 => self.uninit::<bf16>(len),
                ScalarType::U32 => self.uninit::<u32>(len),
                ScalarType::I32 => self.uninit::<i32>(len),
                _ => self.uninit::<u8>(len),
            };
            made.map_err(|e| e.to_string())
        }

        fn read(memory: &Memory) -> Result<Vec<f64>, String> {
            read!(memory)
        }
    }
}
