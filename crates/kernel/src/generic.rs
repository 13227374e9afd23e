//! Generic parameters of kernels, and the arguments that instances give for them.

use crate::scalar::ScalarType;
use std::fmt;

/// The kind of a generic parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GenericKind {
    /// A type bounded by `Element`.
    Element,
    /// A type bounded by `Number`.
    Number,
    /// A type bounded by `Scalar`.
    Scalar,
    /// `const N: usize`, `u32`, `i32` or `bool`.
    Const(ScalarType),
}

/// The argument for a generic parameter in an [`Instance`](crate::source::Instance).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Generic {
    /// A type.
    Type(ScalarType),
    /// A `usize`.
    Usize(usize),
    /// A `u32`.
    U32(u32),
    /// An `i32`.
    I32(i32),
    /// A `bool`.
    Bool(bool),
}

impl Generic {
    /// The type, if it is one.
    pub const fn as_type(self) -> Option<ScalarType> {
        match self {
            Self::Type(scalar) => Some(scalar),
            _ => None,
        }
    }

    pub(crate) fn fits(self, kind: GenericKind) -> bool {
        match (self, kind) {
            (Self::Type(scalar), GenericKind::Element) => scalar.is_element(),
            (Self::Type(scalar), GenericKind::Number) => scalar.has_arithmetic(),
            (Self::Type(_), GenericKind::Scalar)
            | (Self::Usize(_), GenericKind::Const(ScalarType::Usize))
            | (Self::U32(_), GenericKind::Const(ScalarType::U32))
            | (Self::I32(_), GenericKind::Const(ScalarType::I32))
            | (Self::Bool(_), GenericKind::Const(ScalarType::Bool)) => true,
            _ => false,
        }
    }
}

impl fmt::Display for Generic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Type(scalar) => scalar.fmt(f),
            Self::Usize(x) => x.fmt(f),
            Self::U32(x) => x.fmt(f),
            Self::I32(x) => x.fmt(f),
            Self::Bool(x) => x.fmt(f),
        }
    }
}
