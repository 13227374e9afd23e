//! Names: the C++ name of a Rust identifier.
//!
//! Rust allows shadowing; C++ refuses two declarations of one name in a scope, and in `auto x = x + 1;` the right `x` is the new one.
//! So a binding gets a name that no visible binding has: its own, or its own with a number.

use std::collections::{HashMap, HashSet};

/// Words that no name of a printed source may be: keywords of C++, MSL and CUDA, names the preludes'
/// languages predeclare, and macros of their headers.
const RESERVED: &str = "\
    FLT_MAX FLT_MIN HUGE_VALF INFINITY INT_MAX INT_MIN MAXFLOAT M_PI_F NAN NULL UINT_MAX alignas alignof and \
    and_eq asm assert atomic atomic_int atomic_uint auto bfloat bfloat16_t bitand bitor blockDim blockIdx \
    bool break buffer case catch char char16_t char32_t char8_t class co_await co_return co_yield compl \
    complex concept const const_cast constant consteval constexpr constinit continue cuda decltype default \
    delete device do double dynamic_cast else enum explicit export extern false final float for fragment \
    friend ft goto gridDim half if imaginary inline int int16_t int32_t int64_t int8_t kernel linux long \
    main metal module mutable namespace new noexcept not not_eq nullptr nvcuda object_data operator or or_eq \
    override packed patch pixel private protected ptrdiff_t public quad ray_data register reinterpret_cast \
    requires restrict return sampler schar short signed size_t sizeof static static_assert static_cast std \
    struct switch template texture this thread threadIdx thread_local threadgroup threadgroup_imageblock \
    throw true try typedef typeid typename uchar uint uint16_t uint32_t uint64_t uint8_t ulong union unix \
    unsigned ushort using vec vertex virtual visible void volatile warpSize wchar_t while xor xor_eq";

/// Functions that the languages' libraries declare: a function of the same name would join their
/// overloads. A local variable may have these names.
const LIBRARY: &str = "\
    abs acos acosh all any asin asinh atan atan2 atanh cbrt ceil clamp clock clz copysign cos cosh cross ctz \
    distance dot erf erfc exp exp10 exp2 fabs fast fdim floor fma fmax fmin fmod fract free frexp isfinite \
    isinf isnan labs ldexp length log log10 log2 mad24 mad_sat malloc max max3 median3 memcpy memset min \
    min3 mix modf mul24 mulhi normalize popcount pow powr precise printf reflect refract remainder \
    reverse_bits rint rotate round rsqrt saturate select sign signbit simd_all simd_any simd_ballot \
    simd_broadcast simd_max simd_min simd_shuffle simd_shuffle_xor simd_sum sin sincos sinh smoothstep sqrt \
    step tan tanh transpose trunc";

/// `float4`, `uint2x4` and their like: vector and matrix types of MSL and CUDA.
fn is_vector_type(name: &str) -> bool {
    let base = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == 'x');
    let tail = &name[base.len()..];
    tail.starts_with(|c: char| c.is_ascii_digit())
        && matches!(
            base.strip_prefix("packed_").unwrap_or(base),
            "bool"
                | "char"
                | "uchar"
                | "short"
                | "ushort"
                | "int"
                | "uint"
                | "long"
                | "ulong"
                | "longlong"
                | "ulonglong"
                | "half"
                | "bfloat"
                | "float"
                | "double"
                | "dim"
        )
}

fn is_word_of(list: &str, name: &str) -> bool {
    list.split(' ').any(|word| word == name)
}

fn is_reserved(name: &str) -> bool {
    is_word_of(RESERVED, name) || is_vector_type(name)
}

/// Why a name cannot be used: C++ reserves it, or the preludes do.
pub(crate) fn refused(name: &str) -> Option<&'static str> {
    if name.starts_with("ft_") || name.starts_with("FT_") {
        return Some("names that start with `ft_` belong to the preludes of printed source: choose another");
    }
    if name.contains("__")
        || (name.starts_with('_') && name[1..].starts_with(|c: char| c.is_ascii_uppercase()))
    {
        return Some(
            "C++ reserves names with `__`, and names that start with `_` and a capital: choose another",
        );
    }
    if !name.is_ascii() {
        return Some("names are ASCII in printed source: choose another");
    }
    None
}

/// As [`refused`], for names of functions, structs and constants.
pub(crate) fn refused_item(name: &str) -> Option<&'static str> {
    let ends = name
        .ends_with('_')
        .then_some("words of C++ get a `_` at their end in printed source: choose a name without it");
    refused(name).or(ends)
}

/// The name of a raw identifier: C++ has other words than Rust.
fn plain(name: &str) -> &str {
    name.strip_prefix("r#").unwrap_or(name)
}

/// The C++ name of a function, a struct or a constant: the same from every crate that uses it.
pub(crate) fn global(name: &str) -> String {
    let name = plain(name);
    if is_reserved(name) || is_word_of(LIBRARY, name) { format!("{name}_") } else { name.to_string() }
}

/// The C++ name of a field.
pub(crate) fn field(name: &str) -> String {
    let name = plain(name);
    if is_reserved(name) { format!("{name}_") } else { name.to_string() }
}

/// The scopes of a function: the meaning of its Rust names, and the C++ names that are visible.
#[derive(Debug)]
pub(crate) struct Scopes<T> {
    scopes: Vec<HashMap<String, T>>,
    visible: Vec<Vec<String>>,
    /// Names of functions, constants, structs and generic parameters that the body uses.
    globals: HashSet<String>,
}

impl<T> Scopes<T> {
    pub(crate) fn new(globals: HashSet<String>) -> Scopes<T> {
        Scopes { scopes: vec![HashMap::new()], visible: vec![Vec::new()], globals }
    }

    pub(crate) fn enter(&mut self) {
        self.scopes.push(HashMap::new());
        self.visible.push(Vec::new());
    }

    pub(crate) fn leave(&mut self) {
        self.scopes.pop();
        self.visible.pop();
    }

    /// The meaning of a Rust name, in the innermost scope that binds it.
    pub(crate) fn find(&self, name: &str) -> Option<&T> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name))
    }

    /// A C++ name that no visible binding has. It is visible from here on.
    pub(crate) fn fresh(&mut self, name: &str) -> String {
        let name = plain(name);
        let base = if is_reserved(name) { format!("{name}_") } else { name.to_string() };
        let mut fresh = base.clone();
        let mut number = 2;
        while self.globals.contains(&fresh) || self.visible.iter().flatten().any(|taken| *taken == fresh) {
            fresh = format!("{}_{number}", base.trim_end_matches('_'));
            number += 1;
        }
        if let Some(scope) = self.visible.last_mut() {
            scope.push(fresh.clone());
        }
        fresh
    }

    /// From here on the Rust name stands for `meaning`.
    pub(crate) fn bind(&mut self, name: &str, meaning: T) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name.to_string(), meaning);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_words_get_an_underscore() {
        assert_eq!(global("float"), "float_");
        assert_eq!(global("dot"), "dot_");
        assert_eq!(field("dot"), "dot");
        assert_eq!(field("float4x4"), "float4x4_");
        assert_eq!(global("x4"), "x4");
        assert_eq!(global("tile"), "tile");
        assert_eq!(field("r#type"), "type");
        assert_eq!(global("r#struct"), "struct_");
    }

    #[test]
    fn a_binding_takes_a_name_that_nothing_visible_has() {
        let mut scopes = Scopes::new(HashSet::from(["load".to_string()]));
        assert_eq!(scopes.fresh("x"), "x");
        scopes.bind("x", 1);
        assert_eq!(scopes.fresh("load"), "load_2");
        scopes.enter();
        assert_eq!(scopes.fresh("x"), "x_2");
        scopes.bind("x", 2);
        assert_eq!(scopes.find("x"), Some(&2));
        scopes.leave();
        assert_eq!(scopes.find("x"), Some(&1));
        assert_eq!(scopes.fresh("x"), "x_2");
        assert_eq!(scopes.fresh("x"), "x_3");
        assert_eq!(scopes.fresh("int"), "int_");
        assert_eq!(scopes.fresh("int"), "int_2");
    }
}
