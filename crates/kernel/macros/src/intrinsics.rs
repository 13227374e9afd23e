//! The intrinsics: names, arguments and results, as far as C++ needs to know them.
//!
//! rustc checks calls against the functions of flashtile-kernel; these tables say which names are intrinsics,
//! which of them take the thread's context, and which type a literal argument has.

use crate::ir::Scalar;

/// What an argument of an intrinsic is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takes {
    /// The type that the intrinsic is generic in: that of the receiver or of the other arguments.
    Same,
    U32,
    I32,
    F32,
    Bool,
    /// An index of memory, of any unsigned type.
    Index,
    /// Memory that is written.
    MemoryMut,
    /// Memory that is read.
    Memory,
    /// A value of the type that the memory holds.
    Element,
    /// Any value.
    Any,
}

/// What an intrinsic returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gives {
    Nothing,
    /// The type that the intrinsic is generic in.
    Same,
    /// Its unsigned twin.
    Unsigned,
    U32,
    I32,
    F32,
    Bool,
    /// `[f32; 2]`.
    Pair,
    /// The type that the memory holds.
    Element,
    /// Not known here.
    Other,
}

/// Whether threads meet in an intrinsic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meets {
    Never,
    /// At an operation of a SIMD group, which orders no memory.
    Operation,
    /// At a barrier.
    Barrier,
}

/// An intrinsic function.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function {
    pub(crate) takes: &'static [Takes],
    pub(crate) gives: Gives,
    /// It reads where the thread is, or works together with other threads.
    pub(crate) context: bool,
    pub(crate) meets: Meets,
}

const fn alone(takes: &'static [Takes], gives: Gives) -> Option<Function> {
    Some(Function { takes, gives, context: false, meets: Meets::Never })
}

const fn place() -> Option<Function> {
    Some(Function { takes: &[], gives: Gives::U32, context: true, meets: Meets::Never })
}

const fn barrier() -> Option<Function> {
    Some(Function { takes: &[], gives: Gives::Nothing, context: true, meets: Meets::Barrier })
}

const fn together(takes: &'static [Takes], gives: Gives) -> Option<Function> {
    Some(Function { takes, gives, context: true, meets: Meets::Operation })
}

/// The intrinsic function of a name.
pub(crate) fn find(name: &str) -> Option<Function> {
    use Takes::{Bool, Element, F32, I32, Index, MemoryMut, Same, U32};
    match name {
        "thread_index" | "threads" | "thread_position" | "simd_lane" | "simd_index" | "simd_groups"
        | "group_x" | "group_y" | "group_z" | "groups_x" | "groups_y" | "groups_z" => place(),
        "barrier" | "simd_barrier" => barrier(),
        "simd_sum" | "simd_max" | "simd_min" | "simd_prefix_sum" | "simd_prefix_sum_inclusive" => {
            together(&[Same], Gives::Same)
        }
        "simd_shuffle" | "simd_shuffle_xor" | "simd_broadcast" => together(&[Same, U32], Gives::Same),
        "simd_ballot" => together(&[Bool], Gives::U32),
        "simd_any" | "simd_all" => together(&[Bool], Gives::Bool),
        "atomic_add" | "atomic_max" | "atomic_min" | "atomic_and" | "atomic_or" | "atomic_xor"
        | "atomic_exchange" => alone(&[MemoryMut, Index, Element], Gives::Element),
        "atomic_compare_exchange" => alone(&[MemoryMut, Index, Element, Element], Gives::Element),
        "dot4" | "dot4_unsigned" => alone(&[U32, U32, I32], Gives::I32),
        "byte_permute" => alone(&[U32, U32, U32], Gives::U32),
        "pair_f16" | "pair_bf16" => alone(&[U32], Gives::Pair),
        "f16x2_mul_add" => alone(&[U32, U32, U32], Gives::U32),
        "f16x2_from" => alone(&[F32, F32], Gives::U32),
        "select" => alone(&[Bool, Same, Same], Gives::Same),
        _ => None,
    }
}

/// A method of a number, printed as a function of its receiver and its arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Method {
    pub(crate) takes: &'static [Takes],
    pub(crate) gives: Gives,
}

/// The method of a name.
pub(crate) fn method(name: &str) -> Option<Method> {
    use Takes::{F32, Same, U32};
    let (takes, gives): (&'static [Takes], Gives) = match name {
        "exp2" | "exp" | "log2" | "ln" | "sqrt" | "rsqrt" | "abs" | "floor" | "ceil" | "trunc"
        | "round_ties_even" | "tanh" | "sin" | "cos" | "wrapping_neg" | "reverse_bits" => (&[], Gives::Same),
        "min" | "max" | "copysign" | "powf" | "div_ceil" | "wrapping_add" | "wrapping_sub"
        | "wrapping_mul" | "saturating_add" | "saturating_sub" => (&[Same], Gives::Same),
        "clamp" | "mul_add" => (&[Same, Same], Gives::Same),
        "wrapping_shl" | "wrapping_shr" | "rotate_left" | "rotate_right" | "pow" => (&[U32], Gives::Same),
        "abs_diff" => (&[Same], Gives::Unsigned),
        "unsigned_abs" => (&[], Gives::Unsigned),
        "count_ones" | "leading_zeros" | "trailing_zeros" => (&[], Gives::U32),
        "is_multiple_of" => (&[Same], Gives::Bool),
        "is_nan" | "is_finite" | "is_infinite" => (&[], Gives::Bool),
        "to_bits" => (&[], Gives::Other),
        "to_f32" => (&[], Gives::F32),
        "element" => (&[U32], Gives::Other),
        "set_element" => (&[U32, F32], Gives::Nothing),
        _ => return None,
    };
    Some(Method { takes, gives })
}

/// Whether a method is one of f32 alone.
pub(crate) fn is_of_floats(name: &str) -> bool {
    matches!(
        name,
        "exp2"
            | "exp"
            | "log2"
            | "ln"
            | "sqrt"
            | "rsqrt"
            | "floor"
            | "ceil"
            | "trunc"
            | "round_ties_even"
            | "mul_add"
            | "tanh"
            | "sin"
            | "cos"
            | "powf"
            | "copysign"
            | "is_nan"
            | "is_finite"
            | "is_infinite"
    )
}

/// What to write instead of a method that the language does not have.
pub(crate) fn instead_of(method: &str) -> &'static str {
    match method {
        "iter" | "iter_mut" | "into_iter" | "map" | "zip" | "enumerate" | "fold" | "for_each" => {
            "iterators do not exist on GPUs: loop with `for i in 0..n` and index"
        }
        "len" => "memory does not know its length on GPUs: pass it as a parameter",
        "clone" | "to_owned" | "cloned" | "copied" => "values are copied by using them: leave it out",
        "unwrap" | "expect" | "ok" | "ok_or" => "there is no `Option` and no `Result` on GPUs",
        "round" => "Rust and GPUs round halves differently here: write `round_ties_even`",
        "powi" => "write the products, or `powf`",
        "signum" => "write `1f32.copysign(x)`",
        "recip" => "write `1.0 / x`",
        "rem_euclid" | "div_euclid" | "checked_add" | "checked_sub" | "checked_mul" | "overflowing_add" => {
            "write the arithmetic, or a `wrapping_` or `saturating_` method"
        }
        "cast" | "into" | "try_into" | "from" => "write `x as T`, `x.to_f32()` or `T::from_f32(x)`",
        "swap" | "fill" | "copy_from_slice" => "write the loop",
        "log10" => "write `x.log2() * LOG10_OF_2`, or `ln`",
        _ => "it is not a method of the kernel language",
    }
}

/// Constants of scalar types: `f32::INFINITY`, `u32::MAX`.
pub(crate) fn limit(name: &str) -> Option<Option<Scalar>> {
    match name {
        "MAX" | "MIN" | "INFINITY" | "NEG_INFINITY" | "NAN" | "MIN_POSITIVE" | "EPSILON" => Some(None),
        "BITS" => Some(Some(Scalar::U32)),
        _ => None,
    }
}
