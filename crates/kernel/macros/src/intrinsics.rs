//! The intrinsics, as tables: the types of their arguments and results, and their names in C++.
//!
//! rustc checks calls against the functions of flashtile-kernel. The tables say which names are intrinsics, which of them take the
//! context of the thread, which are convergent, and which type a literal argument has.

use crate::ir::{Scalar, Type};

/// The type of an argument of an intrinsic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takes {
    /// The type that the intrinsic is generic in, which is the type of the receiver or of the other
    /// arguments.
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

impl Takes {
    /// The type of the argument, where it is one type.
    pub(crate) fn ty(self) -> Option<Type> {
        match self {
            Takes::U32 => Some(Type::U32),
            Takes::I32 => Some(Type::I32),
            Takes::F32 => Some(Type::F32),
            Takes::Bool => Some(Type::BOOL),
            Takes::Same | Takes::Index | Takes::MemoryMut | Takes::Memory | Takes::Element | Takes::Any => {
                None
            }
        }
    }
}

/// The type that an intrinsic returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gives {
    Nothing,
    /// The type that the intrinsic is generic in.
    Same,
    /// The unsigned type of the same width.
    Unsigned,
    /// The unsigned type of a float's width.
    Bits,
    U32,
    I32,
    F32,
    Bool,
    /// `[f32; 2]`.
    Pair,
    /// The type that the memory or the fragment holds.
    Element,
}

/// The threads that must call an intrinsic together: none, a SIMD group, or a threadgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Convergent {
    No,
    /// An operation of a SIMD group, which orders no memory.
    Simd,
    /// A barrier.
    Barrier,
}

/// An intrinsic function.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function {
    name: &'static str,
    /// The name in C++.
    pub(crate) cpp: &'static str,
    pub(crate) takes: &'static [Takes],
    pub(crate) gives: Gives,
    /// The function reads the position of the thread, or works together with other threads.
    pub(crate) context: bool,
    pub(crate) convergent: Convergent,
}

macro_rules! takes {
    ($($takes:ident),*) => {
        &[$(Takes::$takes),*]
    };
}

/// A pair: true if a kind of intrinsic takes the context of the thread, and its convergence.
macro_rules! kind {
    (plain) => {
        (false, Convergent::No)
    };
    (position) => {
        (true, Convergent::No)
    };
    (simd) => {
        (true, Convergent::Simd)
    };
    (barrier) => {
        (true, Convergent::Barrier)
    };
}

macro_rules! functions {
    ($($kind:ident [$($name:ident)*] $takes:tt -> $gives:ident;)*) => {
        const FUNCTIONS: &[Function] = &[$($(Function {
            name: stringify!($name),
            cpp: concat!("ft_", stringify!($name)),
            takes: takes! $takes,
            gives: Gives::$gives,
            context: kind!($kind).0,
            convergent: kind!($kind).1,
        }),*),*];
    };
}
functions! {
    position [thread_index threads thread_position simd_lane simd_index simd_groups] () -> U32;
    position [group_x group_y group_z groups_x groups_y groups_z] () -> U32;
    barrier [barrier simd_barrier] () -> Nothing;
    simd [simd_sum simd_max simd_min simd_prefix_sum simd_prefix_sum_inclusive] (Same) -> Same;
    simd [simd_shuffle simd_shuffle_xor simd_broadcast] (Same, U32) -> Same;
    simd [simd_ballot] (Bool) -> U32;
    simd [simd_any simd_all] (Bool) -> Bool;
    plain [atomic_add atomic_max atomic_min atomic_and atomic_or atomic_xor] (MemoryMut, Index, Element) -> Element;
    plain [atomic_exchange] (MemoryMut, Index, Element) -> Element;
    plain [atomic_compare_exchange] (MemoryMut, Index, Element, Element) -> Element;
    plain [dot4 dot4_unsigned] (U32, U32, I32) -> I32;
    plain [byte_permute f16x2_mul_add] (U32, U32, U32) -> U32;
    plain [pair_f16 pair_bf16] (U32) -> Pair;
    plain [f16x2_from] (F32, F32) -> U32;
    plain [f16x2_from_e4m3] (U32) -> U32;
    plain [select] (Bool, Same, Same) -> Same;
}

/// The intrinsic function of a name.
pub(crate) fn function(name: &str) -> Option<&'static Function> {
    FUNCTIONS.iter().find(|function| function.name == name)
}

/// The type of the receiver of a method: rustc refuses others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receiver {
    Number,
    Integer,
    Float,
    /// Any scalar.
    Scalar,
    /// A float as it is stored.
    Element,
    Fragment,
    FragmentMut,
}

/// A method of a value, printed as a function of its receiver and its arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Method {
    name: &'static str,
    /// The name in C++.
    pub(crate) cpp: &'static str,
    pub(crate) receiver: Receiver,
    pub(crate) takes: &'static [Takes],
    pub(crate) gives: Gives,
}

macro_rules! method_prefix {
    (Fragment) => {
        "ft_fragment_"
    };
    (FragmentMut) => {
        "ft_fragment_"
    };
    ($other:ident) => {
        "ft_"
    };
}

macro_rules! methods {
    ($($receiver:ident [$($name:ident)*] $takes:tt -> $gives:ident;)*) => {
        const METHODS: &[Method] = &[$($(Method {
            name: stringify!($name),
            cpp: concat!(method_prefix!($receiver), stringify!($name)),
            receiver: Receiver::$receiver,
            takes: takes! $takes,
            gives: Gives::$gives,
        }),*),*];
    };
}
methods! {
    Number [abs] () -> Same;
    Number [min max] (Same) -> Same;
    Number [clamp] (Same, Same) -> Same;
    Float [exp2 exp log2 ln sqrt rsqrt floor ceil trunc round_ties_even tanh sin cos] () -> Same;
    Float [copysign powf] (Same) -> Same;
    Float [mul_add] (Same, Same) -> Same;
    Float [is_nan is_finite is_infinite] () -> Bool;
    Integer [wrapping_neg reverse_bits] () -> Same;
    Integer [div_ceil wrapping_add wrapping_sub wrapping_mul saturating_add saturating_sub] (Same) -> Same;
    Integer [wrapping_shl wrapping_shr rotate_left rotate_right pow] (U32) -> Same;
    Integer [abs_diff] (Same) -> Unsigned;
    Integer [unsigned_abs] () -> Unsigned;
    Integer [count_ones leading_zeros trailing_zeros] () -> U32;
    Integer [is_multiple_of] (Same) -> Bool;
    Scalar [to_bits] () -> Bits;
    Element [to_f32] () -> F32;
    Fragment [element] (U32) -> Element;
    FragmentMut [set_element] (U32, F32) -> Nothing;
}

/// The method of a name.
pub(crate) fn method(name: &str) -> Option<&'static Method> {
    METHODS.iter().find(|method| method.name == name)
}

/// Returns true if a method of a float is an exponential.
pub(crate) fn is_exponential(name: &str) -> bool {
    matches!(name, "exp2" | "exp")
}

/// A method of `Buffer` and `Shared`, which reads or writes neighbouring elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryMethod {
    name: &'static str,
    /// The name in C++.
    pub(crate) cpp: &'static str,
    /// How many generic arguments a call writes.
    pub(crate) generics: &'static [usize],
    pub(crate) writes: bool,
    /// A call with all that C++ cannot deduce.
    pub(crate) usage: &'static str,
}

macro_rules! memory_methods {
    ($($name:ident generics $generics:tt writes $writes:literal usage $usage:literal;)*) => {
        const MEMORY_METHODS: &[MemoryMethod] = &[$(MemoryMethod {
            name: stringify!($name),
            cpp: concat!("ft_", stringify!($name)),
            generics: &$generics,
            writes: $writes,
            usage: $usage,
        }),*];
    };
}
memory_methods! {
    load generics [1] writes false usage "x.load::<4>(i)";
    store generics [0, 1] writes true usage "x.store(i, [a, b])";
    load_as generics [2] writes false usage "x.load_as::<u32, 4>(i)";
    store_as generics [2] writes true usage "x.store_as::<u32, 4>(i, words)";
}

/// The method of memory of a name.
pub(crate) fn memory_method(name: &str) -> Option<&'static MemoryMethod> {
    MEMORY_METHODS.iter().find(|method| method.name == name)
}

/// An associated function of `Fragment`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FragmentFunction {
    name: &'static str,
    /// The name in C++.
    pub(crate) cpp: &'static str,
    pub(crate) takes: &'static [Takes],
    /// All lanes of the SIMD group take part.
    pub(crate) convergent: bool,
    /// C++ deduces the type of the elements from the arguments.
    pub(crate) deduced: bool,
}

macro_rules! fragment_functions {
    ($($name:ident $takes:tt convergent $convergent:literal deduced $deduced:literal;)*) => {
        const FRAGMENT_FUNCTIONS: &[FragmentFunction] = &[$(FragmentFunction {
            name: stringify!($name),
            cpp: concat!("ft_fragment_", stringify!($name)),
            takes: takes! $takes,
            convergent: $convergent,
            deduced: $deduced,
        }),*];
    };
}
fragment_functions! {
    zero () convergent false deduced false;
    filled (Any) convergent false deduced false;
    load (Memory, U32, U32) convergent true deduced false;
    load_transposed (Memory, U32, U32) convergent true deduced false;
    multiply_accumulate (Any, Any, Any) convergent true deduced true;
}

/// The associated function of `Fragment` of a name.
pub(crate) fn fragment_function(name: &str) -> Option<&'static FragmentFunction> {
    FRAGMENT_FUNCTIONS.iter().find(|function| function.name == name)
}

/// `Fragment::store` in C++.
pub(crate) const FRAGMENT_STORE: &str = "ft_fragment_store";
/// `T::from_f32` in C++.
pub(crate) const FROM_F32: &str = "ft_from_f32";
/// `T::from_bits` in C++.
pub(crate) const FROM_BITS: &str = "ft_from_bits";

/// The advice for a method that the language does not have: the code to write instead.
pub(crate) fn instead_of(method: &str) -> &'static str {
    match method {
        "iter" | "iter_mut" | "into_iter" | "map" | "zip" | "enumerate" | "fold" | "for_each" => {
            "iterators do not exist on GPUs: loop with `for i in 0..n` and index"
        }
        "len" => "memory does not know its length on GPUs: pass it as a parameter",
        "clone" | "to_owned" | "cloned" | "copied" => "every use of a value copies it: leave the call out",
        "unwrap" | "expect" | "ok" | "ok_or" => "GPUs have no `Option` and no `Result`",
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
        _ => "the kernel language has no such method",
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
