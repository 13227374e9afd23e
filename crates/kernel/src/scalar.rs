//! The scalars of the kernel language, and the operations on them.
//!
//! All traits here are sealed except [`Value`], which `#[device]` implements for structs.

use half::{bf16, f16};
use std::fmt;

mod sealed {
    pub trait Sealed {}
}
use sealed::Sealed;

/// The name of a scalar type, as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScalarType {
    /// `bool`, one byte, 0 or 1.
    Bool,
    /// `u8`: storage only.
    U8,
    /// `i8`: storage only.
    I8,
    /// `u16`: storage only.
    U16,
    /// `i16`: storage only.
    I16,
    /// `u32`.
    U32,
    /// `i32`.
    I32,
    /// `u64`.
    U64,
    /// `i64`.
    I64,
    /// `usize`: 64 bits on every target.
    Usize,
    /// `f32`.
    F32,
    /// IEEE binary16: storage only.
    F16,
    /// bfloat16: storage only.
    Bf16,
}

impl ScalarType {
    /// Bytes of one value in memory.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::Usize => 8,
        }
    }

    /// The name in Rust.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::Usize => "usize",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// The name in printed C++: the spelling of Metal where CUDA can be given the same one, `ft_` names elsewhere.
    pub const fn cpp(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::U8 => "uchar",
            Self::I8 => "ft_i8",
            Self::U16 => "ushort",
            Self::I16 => "short",
            Self::U32 => "uint",
            Self::I32 => "int",
            Self::U64 => "ulong",
            Self::I64 => "ft_i64",
            Self::Usize => "size_t",
            Self::F32 => "float",
            Self::F16 => "ft_f16",
            Self::Bf16 => "ft_bf16",
        }
    }

    /// Returns true if this is `f32`, `f16` or `bf16`: the types that an [`Element`] may be.
    pub const fn is_element(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    /// Returns true if it has arithmetic: the types that a [`Number`] may be.
    pub const fn has_arithmetic(self) -> bool {
        matches!(self, Self::U32 | Self::I32 | Self::U64 | Self::I64 | Self::Usize | Self::F32)
    }
}

impl fmt::Display for ScalarType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A scalar of the kernel language.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a scalar of the kernel language",
    label = "not a scalar",
    note = "scalars are bool, u8, i8, u16, i16, u32, i32, u64, i64, usize, f32, f16 and bf16"
)]
pub trait Scalar: Sealed + Value + Copy + Default + fmt::Debug + PartialEq + Send + Sync + 'static {
    /// The type as data.
    const TYPE: ScalarType;

    /// The bits of the value, zero-extended.
    fn to_raw(self) -> u64;

    /// The value of the low bits of `raw`.
    fn from_raw(raw: u64) -> Self;
}

/// Operands of `==` and `!=`: numbers and `bool`.
#[diagnostic::on_unimplemented(
    message = "the kernel language does not compare `{Self}`",
    label = "not bool, u32, i32, u64, i64, usize or f32",
    note = "convert with `as`, or with `.to_f32()` for f16 and bf16"
)]
pub trait Comparable: Scalar {}
impl Comparable for bool {}
impl Comparable for u32 {}
impl Comparable for i32 {}
impl Comparable for u64 {}
impl Comparable for i64 {}
impl Comparable for usize {}
impl Comparable for f32 {}

/// A scalar with arithmetic: `u32`, `i32`, `u64`, `i64`, `usize`, `f32`.
#[diagnostic::on_unimplemented(
    message = "the kernel language has no arithmetic on `{Self}`",
    label = "not u32, i32, u64, i64, usize or f32",
    note = "8- and 16-bit types are storage: convert with `as`, or with `.to_f32()` for f16 and bf16"
)]
pub trait Number: Scalar + PartialOrd + Comparable {
    /// `self + other`, or `None` where an integer would wrap.
    #[doc(hidden)]
    fn checked_add(self, other: Self) -> Option<Self>;
    /// `self - other`, or `None` where an integer would wrap.
    #[doc(hidden)]
    fn checked_sub(self, other: Self) -> Option<Self>;
    /// `self * other`, or `None` where an integer would wrap.
    #[doc(hidden)]
    fn checked_mul(self, other: Self) -> Option<Self>;
    /// `self / other`, or `None` where an integer has no quotient.
    #[doc(hidden)]
    fn checked_div(self, other: Self) -> Option<Self>;
    /// `self % other`, or `None` where an integer has no remainder.
    #[doc(hidden)]
    fn checked_rem(self, other: Self) -> Option<Self>;
    /// `self + other`, wrapping for integers.
    #[doc(hidden)]
    fn plus(self, other: Self) -> Self;
    /// The greater; of a NaN and a number, the number.
    #[doc(hidden)]
    fn greater(self, other: Self) -> Self;
    /// The lesser; of a NaN and a number, the number.
    #[doc(hidden)]
    fn lesser(self, other: Self) -> Self;
}

/// A number with a sign: `i32`, `i64`, `f32`.
#[diagnostic::on_unimplemented(message = "`{Self}` has no sign", label = "not i32, i64 or f32")]
pub trait Signed: Number {
    /// `-self`, or `None` for the least integer.
    #[doc(hidden)]
    fn checked_neg(self) -> Option<Self>;
    /// The magnitude, or `None` for the least integer.
    #[doc(hidden)]
    fn checked_abs(self) -> Option<Self>;
}

/// A number that is an integer: `u32`, `i32`, `u64`, `i64`, `usize`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an integer the kernel language computes with",
    label = "not u32, i32, u64, i64 or usize",
    note = "convert with `as` first"
)]
pub trait Integer: Number {
    /// Width in bits.
    #[doc(hidden)]
    const WIDTH: u32;
    /// `self << by`, or `None` where `by` is not below the width.
    #[doc(hidden)]
    fn checked_shl(self, by: u32) -> Option<Self>;
    /// `self >> by`, or `None` where `by` is not below the width.
    #[doc(hidden)]
    fn checked_shr(self, by: u32) -> Option<Self>;
    /// The value as a shift: `u32::MAX` where it is negative or greater.
    #[doc(hidden)]
    fn as_shift(self) -> u32;
    /// `self` to the power of `exponent`, or `None` where it would wrap.
    #[doc(hidden)]
    fn checked_pow(self, exponent: u32) -> Option<Self>;
}

/// An integer that C++ does not widen to `int`.
#[diagnostic::on_unimplemented(
    message = "C++ would take the literal beside this `{Self}` for an `int`",
    label = "not u32, i32, u64, i64 or usize",
    note = "give the literal a suffix: `if c {{ x }} else {{ 0u8 }}`"
)]
pub trait Unwidened: Integer {}

/// Operands of `& | ^ !`: integers and `bool`.
#[diagnostic::on_unimplemented(
    message = "the kernel language has no bit operations on `{Self}`",
    label = "not bool, u32, i32, u64, i64 or usize",
    note = "convert with `as` first"
)]
pub trait Bits: Scalar {}

/// Indices of memory and arrays: `u32`, `u64`, `usize`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not index memory",
    label = "not u32, u64 or usize",
    note = "convert with `as u32`"
)]
pub trait Index: Integer {
    /// The index, widened.
    #[doc(hidden)]
    fn position(self) -> u64;
}

/// A type of stored floats: `f32`, `f16`, `bf16`. Generic kernels convert to `f32`, compute, and convert back.
#[diagnostic::on_unimplemented(message = "`{Self}` is not an element type", label = "not f32, f16 or bf16")]
pub trait Element: Scalar {
    /// The value, exactly.
    fn to_f32(self) -> f32;

    /// The nearest value, ties to even; overflow gives infinity.
    fn from_f32(x: f32) -> Self;
}

/// Values that a variable of a kernel may hold: scalars, arrays of values, `#[device]` structs, fragments,
/// handles of shared memory.
#[diagnostic::on_unimplemented(
    message = "a variable of a kernel cannot hold `{Self}`",
    label = "not a value of the kernel language",
    note = "values are scalars, arrays of values, #[device] structs, `Fragment` and `Shared`"
)]
pub trait Value {}

/// A field of a `#[params]` struct, as host and device lay it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamsField {
    /// Its name.
    pub name: &'static str,
    /// The type of its numbers.
    pub element: ScalarType,
    /// How many numbers it has: 1, or the product of the lengths of its arrays.
    pub len: usize,
    /// Bytes before it.
    pub offset: usize,
}

/// Host data a launch copies to the kernel: scalars, arrays of them, `#[params]` structs.
///
/// Implemented by `#[params]`, which also asserts that the layout has no padding.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a parameter of a kernel",
    label = "not a scalar and not a #[params] struct"
)]
pub trait Plain: Copy + 'static {
    /// Bytes of one value, the same on host and device.
    const BYTES: usize;

    /// The fields of a `#[params]` struct; none of scalars and arrays.
    const FIELDS: &'static [ParamsField] = &[];

    /// Appends the bytes, little-endian.
    fn write(&self, bytes: &mut Vec<u8>);

    /// The value at the front of `bytes`, and the rest; zeros where bytes are missing.
    fn read(bytes: &mut &[u8]) -> Self;
}

impl<T: Scalar> Plain for T {
    const BYTES: usize = T::TYPE.bytes();

    fn write(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.to_raw().to_le_bytes()[..Self::BYTES]);
    }

    fn read(bytes: &mut &[u8]) -> Self {
        let (mut raw, taken) = ([0; 8], Self::BYTES.min(bytes.len()));
        raw[..taken].copy_from_slice(&bytes[..taken]);
        *bytes = &bytes[taken..];
        T::from_raw(u64::from_le_bytes(raw))
    }
}

impl<T: Plain, const N: usize> Plain for [T; N] {
    const BYTES: usize = N * T::BYTES;

    fn write(&self, bytes: &mut Vec<u8>) {
        self.iter().for_each(|x| x.write(bytes));
    }

    fn read(bytes: &mut &[u8]) -> Self {
        std::array::from_fn(|_| T::read(bytes))
    }
}

/// The type of a field of a `#[params]` struct: elements of one type, which the device reads as words.
#[doc(hidden)]
pub trait Words: Plain {
    const ELEMENT: ScalarType;
    const LEN: usize;
}

impl<T: Scalar> Words for T {
    const ELEMENT: ScalarType = T::TYPE;
    const LEN: usize = 1;
}

impl<T: Words, const N: usize> Words for [T; N] {
    const ELEMENT: ScalarType = T::ELEMENT;
    const LEN: usize = N * T::LEN;
}

impl Value for () {}
impl<T: Value, const N: usize> Value for [T; N] {}

macro_rules! scalar {
    ($($T:ident $name:ident |$x:ident| $to:expr, |$raw:ident| $from:expr;)*) => {$(
        impl Sealed for $T {}
        impl Value for $T {}
        impl Scalar for $T {
            const TYPE: ScalarType = ScalarType::$name;
            #[inline]
            fn to_raw(self) -> u64 {
                let $x = self;
                $to
            }
            #[inline]
            fn from_raw($raw: u64) -> Self {
                $from
            }
        }
    )*};
}
scalar! {
    bool Bool |x| u64::from(x), |raw| raw & 1 != 0;
    u8 U8 |x| u64::from(x), |raw| raw as u8;
    i8 I8 |x| u64::from(x as u8), |raw| raw as i8;
    u16 U16 |x| u64::from(x), |raw| raw as u16;
    i16 I16 |x| u64::from(x as u16), |raw| raw as i16;
    u32 U32 |x| u64::from(x), |raw| raw as u32;
    i32 I32 |x| u64::from(x as u32), |raw| raw as i32;
    u64 U64 |x| x, |raw| raw;
    i64 I64 |x| x as u64, |raw| raw as i64;
    usize Usize |x| x as u64, |raw| raw as usize;
    f32 F32 |x| u64::from(x.to_bits()), |raw| f32::from_bits(raw as u32);
    f16 F16 |x| u64::from(x.to_bits()), |raw| f16::from_bits(raw as u16);
    bf16 Bf16 |x| u64::from(x.to_bits()), |raw| bf16::from_bits(raw as u16);
}

macro_rules! integer {
    ($($T:ident)*) => {$(
        impl Number for $T {
            #[inline]
            fn checked_add(self, other: Self) -> Option<Self> {
                <$T>::checked_add(self, other)
            }
            #[inline]
            fn checked_sub(self, other: Self) -> Option<Self> {
                <$T>::checked_sub(self, other)
            }
            #[inline]
            fn checked_mul(self, other: Self) -> Option<Self> {
                <$T>::checked_mul(self, other)
            }
            #[inline]
            fn checked_div(self, other: Self) -> Option<Self> {
                <$T>::checked_div(self, other)
            }
            #[inline]
            fn checked_rem(self, other: Self) -> Option<Self> {
                <$T>::checked_rem(self, other)
            }
            #[inline]
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline]
            fn greater(self, other: Self) -> Self {
                Ord::max(self, other)
            }
            #[inline]
            fn lesser(self, other: Self) -> Self {
                Ord::min(self, other)
            }
        }
        impl Bits for $T {}
        impl Unwidened for $T {}
        impl Integer for $T {
            const WIDTH: u32 = <$T>::BITS;
            #[inline]
            fn checked_shl(self, by: u32) -> Option<Self> {
                <$T>::checked_shl(self, by)
            }
            #[inline]
            fn checked_shr(self, by: u32) -> Option<Self> {
                <$T>::checked_shr(self, by)
            }
            #[inline]
            fn as_shift(self) -> u32 {
                u32::try_from(self).unwrap_or(u32::MAX)
            }
            #[inline]
            fn checked_pow(self, exponent: u32) -> Option<Self> {
                <$T>::checked_pow(self, exponent)
            }
        }
    )*};
}
integer!(u32 i32 u64 i64 usize);

impl Bits for bool {}

impl Number for f32 {
    #[inline]
    fn checked_add(self, other: Self) -> Option<Self> {
        Some(self + other)
    }
    #[inline]
    fn checked_sub(self, other: Self) -> Option<Self> {
        Some(self - other)
    }
    #[inline]
    fn checked_mul(self, other: Self) -> Option<Self> {
        Some(self * other)
    }
    #[inline]
    fn checked_div(self, other: Self) -> Option<Self> {
        Some(self / other)
    }
    #[inline]
    fn checked_rem(self, other: Self) -> Option<Self> {
        Some(self % other)
    }
    #[inline]
    fn plus(self, other: Self) -> Self {
        self + other
    }
    #[inline]
    fn greater(self, other: Self) -> Self {
        self.max(other)
    }
    #[inline]
    fn lesser(self, other: Self) -> Self {
        self.min(other)
    }
}

impl Signed for f32 {
    #[inline]
    fn checked_neg(self) -> Option<Self> {
        Some(-self)
    }
    #[inline]
    fn checked_abs(self) -> Option<Self> {
        Some(self.abs())
    }
}

macro_rules! signed {
    ($($T:ident)*) => {$(
        impl Signed for $T {
            #[inline]
            fn checked_neg(self) -> Option<Self> {
                <$T>::checked_neg(self)
            }
            #[inline]
            fn checked_abs(self) -> Option<Self> {
                <$T>::checked_abs(self)
            }
        }
    )*};
}
signed!(i32 i64);

macro_rules! index {
    ($($T:ident)*) => {$(
        impl Index for $T {
            #[inline]
            fn position(self) -> u64 {
                self as u64
            }
        }
    )*};
}
index!(u32 u64 usize);

impl Element for f32 {
    #[inline]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline]
    fn from_f32(x: f32) -> Self {
        x
    }
}

macro_rules! element {
    ($($T:ident)*) => {$(
        impl Element for $T {
            #[inline]
            fn to_f32(self) -> f32 {
                <$T>::to_f32(self)
            }
            #[inline]
            fn from_f32(x: f32) -> Self {
                <$T>::from_f32(x)
            }
        }
    )*};
}
element!(f16 bf16);
