//! The operators of native functions: `#[kernel]` and `#[device]` write them in place of Rust's.
//!
//! The identities refuse operands that the kernel language does not have, with rustc's error at the operand. The operators
//! behave the same in every build profile: an operation without a result is a fault with its line, and nothing wraps silently. No
//! reference into memory that threads share ever exists: elements are copied in and out.
//!
//! | written | in the native function |
//! |---|---|
//! | `a[i]` | `a.ft_get(i)`, of buffers, shared arrays and local arrays alike |
//! | `a[i][j]`, `a[i].f` | `a.ft_at(i).ft_get(j)`, `a.ft_at(i).f`: local arrays only |
//! | `a[i] = v` | `a.ft_set(i, v)`, after `v` and then `i` have been evaluated |
//! | `a[i] += v` | `a.ft_set(i, add(a.ft_get(i), v))` |
//! | `a + b`, `- * / % << >>`, `-a` | [`add`] [`sub`] [`mul`] [`div`] [`rem`] [`shl`] [`shr`] [`neg`] |
//! | `x.abs()`, `pow`, `div_ceil`, `clamp` | [`abs`] [`pow`] [`div_ceil`] [`clamp`], which may have no result |
//! | `a < b` | `number(a) < number(b)` |
//! | `a == b` | `equatable(a) == equatable(b)` |
//! | `a & b`, `!a` | `bits(a) & bits(b)`, `!bits(a)` |
//! | `if c`, `a && b` | `if condition(c)`, `condition(a) && condition(b)` |
//! | `x as T` | `scalar(x) as T` |
//! | `let x = e` | `let x = value(e)` |
//! | `while` and `loop` | [`count_iteration`] at the head of the body |
//! | a loop that may be convergent | [`scope_enter`] before it, [`loop_iter`] at the head of the body, [`scope_leave`] after it |
//! | `f(x)` of a device function | `scope_return(scope_enter(1, f::IS_CONVERGENT), f(x), f::IS_CONVERGENT)` |

use crate::scalar::{Bits, Element, Index, Integer, Number, Plain, Scalar, Signed, Unwidened, Value};
use crate::simulator::fault_arithmetic;

pub use crate::arrays::Elements;
pub use crate::memory::Place;
pub use crate::scalar::Comparable;

macro_rules! identities {
    ($($(#[$doc:meta])* $name:ident: $Bound:path;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub const fn $name<T: $Bound>(x: T) -> T {
            x
        }
    )*};
}
identities! {
    /// An operand of a comparison or the receiver of a numeric method.
    number: Number;
    /// The receiver of a method of integers.
    integer: Integer;
    /// An operand of `&`, `|` or `^`, or of `!`.
    bits: Bits;
    /// The operand of `as`.
    scalar: Scalar;
    /// The receiver of a conversion of floats.
    element: Element;
    /// The value of `let`, an assignment, an argument or `return`.
    value: Value;
    /// A value of `if`, of a type that the printer does not know, whose other value is a literal without a suffix.
    beside_literal: Unwidened;
    /// A parameter copied from the host.
    plain: Plain;
}

/// A type that is `T`.
#[diagnostic::on_unimplemented(
    message = "the printed source has `{T}` for this name, which stands for `{Self}` here",
    label = "another item has a name of the language: rename it"
)]
pub trait Is<T: ?Sized> {}
impl<T: ?Sized> Is<T> for T {}

/// Compiles where a name of the language stands for the language's own type.
pub const fn own<Users: Is<Ours> + ?Sized, Ours: ?Sized>() {}

/// The condition of `if` and `while`, and an operand of `&&` and `||`.
#[inline(always)]
pub const fn condition(x: bool) -> bool {
    x
}

/// An operand of `==` and `!=`: a number or `bool`.
#[inline(always)]
pub const fn equatable<T: Comparable>(x: T) -> T {
    x
}

/// A float: the receiver of `log2` and its kind.
#[inline(always)]
pub const fn float(x: f32) -> f32 {
    x
}

/// The receiver of `exp2` and `exp`, which a launch counts.
#[inline(always)]
pub fn exponent(x: f32) -> f32 {
    crate::simulator::count_exponential();
    x
}

macro_rules! operators {
    ($($(#[$doc:meta])* $name:ident, $checked:ident, $symbol:literal;)*) => {$(
        $(#[$doc])*
        ///
        /// # Faults
        /// Where the result does not fit the integer type, or there is none.
        #[inline]
        #[track_caller]
        pub fn $name<T: Number>(a: T, b: T) -> T {
            match a.$checked(b) {
                Some(x) => x,
                None => fault_arithmetic(format_args!("{a:?} {} {b:?} has no value in {}", $symbol, T::TYPE)),
            }
        }
    )*};
}
operators! {
    /// `a + b`.
    add, checked_add, "+";
    /// `a - b`.
    sub, checked_sub, "-";
    /// `a * b`.
    mul, checked_mul, "*";
    /// `a / b`.
    div, checked_div, "/";
    /// `a % b`.
    rem, checked_rem, "%";
}

/// `-a`.
///
/// # Faults
/// For the least value of an integer type.
#[inline]
#[track_caller]
pub fn neg<T: Signed>(a: T) -> T {
    match a.checked_neg() {
        Some(x) => x,
        None => fault_arithmetic(format_args!("-({a:?}) has no value in {}", T::TYPE)),
    }
}

/// `a.abs()`.
///
/// # Faults
/// For the least value of an integer type.
#[inline]
#[track_caller]
pub fn abs<T: Signed>(a: T) -> T {
    match a.checked_abs() {
        Some(x) => x,
        None => fault_arithmetic(format_args!("({a:?}).abs() has no value in {}", T::TYPE)),
    }
}

/// `a.pow(exponent)`.
///
/// # Faults
/// Where the value does not fit `T`.
#[inline]
#[track_caller]
pub fn pow<T: Integer>(a: T, exponent: u32) -> T {
    match a.checked_pow(exponent) {
        Some(x) => x,
        None => fault_arithmetic(format_args!("({a:?}).pow({exponent}) has no value in {}", T::TYPE)),
    }
}

/// `a.div_ceil(b)`, of an unsigned type.
///
/// # Faults
/// Where `b` is zero.
#[inline]
#[track_caller]
pub fn div_ceil<T: Index>(a: T, b: T) -> T {
    let zero = T::default();
    let one = if rem(a, b) > zero { T::from_raw(1) } else { zero };
    add(div(a, b), one)
}

/// `a.clamp(low, high)`: for floats, NaN stays NaN.
///
/// # Faults
/// Where `low > high`, or one of them is NaN.
#[inline]
#[track_caller]
pub fn clamp<T: Number>(a: T, low: T, high: T) -> T {
    if low <= high {
        match a {
            a if a < low => low,
            a if a > high => high,
            a => a,
        }
    } else {
        fault_arithmetic(format_args!("clamp to {low:?}..={high:?}: there is nothing between"))
    }
}

/// `a << by`.
///
/// # Faults
/// Where `by` is negative or not below the width of `T`.
#[inline]
#[track_caller]
pub fn shl<T: Integer, S: Integer>(a: T, by: S) -> T {
    match a.checked_shl(by.as_shift()) {
        Some(x) => x,
        None => fault_arithmetic(format_args!("{a:?} << {by:?}: {} has {} bits", T::TYPE, T::WIDTH)),
    }
}

/// `a >> by`.
///
/// # Faults
/// Where `by` is negative or not below the width of `T`.
#[inline]
#[track_caller]
pub fn shr<T: Integer, S: Integer>(a: T, by: S) -> T {
    match a.checked_shr(by.as_shift()) {
        Some(x) => x,
        None => fault_arithmetic(format_args!("{a:?} >> {by:?}: {} has {} bits", T::TYPE, T::WIDTH)),
    }
}

/// Counts an iteration of a loop, at the head of its body: a loop without end becomes a fault.
///
/// # Faults
/// Where a thread has gone through more iterations than the simulator's limit.
#[inline]
#[track_caller]
pub fn count_iteration() {
    crate::simulator::count_iteration();
}

/// Begins a scope: a loop, or the call of a device function that the calling function numbers `number`.
/// Returns the argument for [`scope_leave`] and [`scope_return`].
///
/// Threads that reach a convergent operation in the scope must have reached it by the same calls and in the same iterations of loops.
/// A scope without convergent operations is not recorded.
#[inline(always)]
pub fn scope_enter(number: u64, is_convergent: bool) -> u64 {
    if is_convergent { crate::simulator::scope_enter(number) } else { 0 }
}

/// Begins an iteration of the innermost loop.
#[inline(always)]
pub fn loop_iter(is_convergent: bool) {
    if is_convergent {
        crate::simulator::loop_iter();
    }
}

/// Ends the scope that [`scope_enter`] began.
#[inline(always)]
pub fn scope_leave(entered: u64, is_convergent: bool) {
    if is_convergent {
        crate::simulator::scope_leave(entered);
    }
}

/// Ends the call that [`scope_enter`] began, which returned `value`.
#[inline(always)]
pub fn scope_return<T>(entered: u64, value: T, is_convergent: bool) -> T {
    scope_leave(entered, is_convergent);
    value
}
