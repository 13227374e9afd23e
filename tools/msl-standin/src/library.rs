//! Compiled programs and their function constants.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use crate::error::Error;
use crate::kernel::Kernel;
use crate::loaded::Loaded;
use crate::reflection::ConstantInfo;
use crate::source::Program;
use crate::source::constants::DeclaredConstant;

/// The value of a function constant.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// A `bool`.
    Bool(bool),
    /// A `char`.
    I8(i8),
    /// A `uchar`.
    U8(u8),
    /// A `short`.
    I16(i16),
    /// A `ushort`.
    U16(u16),
    /// An `int`.
    I32(i32),
    /// A `uint`.
    U32(u32),
    /// A `long`.
    I64(i64),
    /// A `ulong`.
    U64(u64),
    /// A `float`.
    F32(f32),
    /// A `half`, by its bits.
    F16Bits(u16),
}

impl Value {
    /// The name of its type in Metal, and its bits.
    fn type_and_bits(self) -> (&'static str, u64) {
        match self {
            Self::Bool(v) => ("bool", u64::from(v)),
            Self::I8(v) => ("char", u64::from(v.cast_unsigned())),
            Self::U8(v) => ("uchar", u64::from(v)),
            Self::I16(v) => ("short", u64::from(v.cast_unsigned())),
            Self::U16(v) => ("ushort", u64::from(v)),
            Self::I32(v) => ("int", u64::from(v.cast_unsigned())),
            Self::U32(v) => ("uint", u64::from(v)),
            Self::I64(v) => ("long", v.cast_unsigned()),
            Self::U64(v) => ("ulong", v),
            Self::F32(v) => ("float", u64::from(v.to_bits())),
            Self::F16Bits(v) => ("half", u64::from(v)),
        }
    }
}

/// A function constant and its value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FunctionConstant {
    /// `n` of its `[[function_constant(n)]]`.
    pub index: u32,
    /// Its value.
    pub value: Value,
}

impl FunctionConstant {
    /// The constant with this index, and its value.
    pub fn new(index: u32, value: Value) -> Self {
        Self { index, value }
    }
}

/// A compiled program, which threads may share.
#[derive(Clone)]
pub struct Library {
    loaded: Arc<Loaded>,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("kernels", &self.kernels()).finish_non_exhaustive()
    }
}

impl Library {
    pub(crate) fn load(path: &Path, program: Program) -> Result<Self, String> {
        Ok(Self { loaded: Arc::new(Loaded::new(path, program)?) })
    }

    /// The names of its kernels, in the order of the program.
    pub fn kernels(&self) -> Vec<&str> {
        self.loaded.program.kernels.iter().map(|k| k.name.as_str()).collect()
    }

    /// The function constants that it declares, in the order of the program.
    pub fn constants(&self) -> Vec<ConstantInfo> {
        let info = |c: &DeclaredConstant| ConstantInfo {
            name: c.name.clone(),
            index: c.index,
            type_name: c.type_name.clone(),
            is_optional: c.is_optional,
        };
        self.loaded.program.constants.iter().map(info).collect()
    }

    /// The kernel of this name with these function constants, which may include constants that it does not use.
    ///
    /// # Errors
    /// - [`Error::NoKernel`] if the program has no such kernel.
    /// - [`Error::ConstantIndex`] if a constant is set twice or not declared.
    /// - [`Error::ConstantType`] if a constant is declared with another type.
    /// - [`Error::ConstantNotSet`] if a constant that the kernel uses has no value and the program does not ask
    ///   `is_function_constant_defined` of it.
    pub fn kernel(&self, name: &str, constants: &[FunctionConstant]) -> Result<Kernel, Error> {
        let program = &self.loaded.program;
        let Some(index) = program.kernels.iter().position(|k| k.name == name) else {
            let available = program.kernels.iter().map(|k| k.name.clone()).collect();
            return Err(Error::NoKernel { name: name.to_owned(), available });
        };
        let mut values: Vec<(DeclaredConstant, Option<u64>)> =
            program.constants.iter().map(|c| (c.clone(), None)).collect();
        for given in constants {
            let Some((c, bits_of)) = values.iter_mut().find(|(c, v)| c.index == given.index && v.is_none())
            else {
                return Err(Error::ConstantIndex(given.index));
            };
            let (type_name, bits) = given.value.type_and_bits();
            if type_name != c.type_name {
                return Err(Error::ConstantType {
                    name: c.name.clone(),
                    declared: c.type_name.clone(),
                    given: type_name,
                });
            }
            *bits_of = Some(bits);
        }
        let kernel = &program.kernels[index];
        for (c, value) in &values {
            if value.is_none() && !c.is_optional && kernel.constants.contains(&c.name) {
                return Err(Error::ConstantNotSet { name: c.name.clone(), index: c.index });
            }
        }
        let values = values.into_iter().map(|(c, v)| (c.index, v)).collect();
        Ok(Kernel { loaded: self.loaded.clone(), index, values, checks_races: true })
    }
}
