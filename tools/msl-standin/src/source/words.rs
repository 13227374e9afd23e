//! The words of Metal Shading Language, and those that it lacks.

pub(super) const ADDRESS_SPACES: [&str; 4] = ["device", "constant", "threadgroup", "thread"];

/// Types of a function constant.
pub(super) const FUNCTION_CONSTANT_TYPES: [&str; 12] =
    ["bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float"];

const SCALARS: [&str; 27] = [
    "bool",
    "char",
    "uchar",
    "short",
    "ushort",
    "int",
    "uint",
    "long",
    "ulong",
    "half",
    "bfloat",
    "float",
    "size_t",
    "ptrdiff_t",
    "int8_t",
    "uint8_t",
    "int16_t",
    "uint16_t",
    "int32_t",
    "uint32_t",
    "int64_t",
    "uint64_t",
    "void",
    "unsigned",
    "signed",
    "uintptr_t",
    "intptr_t",
];

const VECTOR_ELEMENTS: [&str; 11] =
    ["char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float"];

const LIBRARY_TYPES: [&str; 12] = [
    "atomic_int",
    "atomic_uint",
    "atomic_bool",
    "atomic_float",
    "atomic_ulong",
    "simdgroup_float8x8",
    "simdgroup_half8x8",
    "simdgroup_bfloat8x8",
    "mem_flags",
    "simd_vote",
    "memory_order",
    "true_type",
];

const LIBRARY_TEMPLATES: [&str; 5] = ["vec", "simdgroup_matrix", "atomic", "array", "packed_vec"];

/// Headers of Metal; the stand-in is one header for all of them.
pub(super) const HEADERS: [&str; 14] = [
    "metal_stdlib",
    "metal_simdgroup",
    "metal_simdgroup_matrix",
    "metal_atomic",
    "metal_math",
    "metal_common",
    "metal_integer",
    "metal_compute",
    "metal_types",
    "metal_relational",
    "metal_geometric",
    "metal_type_traits",
    "metal_limits",
    "metal_array",
];

/// Attributes of builtins that have up to three components.
pub(super) const VECTOR_BUILTINS: [&str; 6] = [
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
];

/// Attributes of builtins that have one component.
pub(super) const SCALAR_BUILTINS: [&str; 5] = [
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "threads_per_simdgroup",
];

const OTHER_ATTRIBUTES: [&str; 11] = [
    "kernel",
    "host_name",
    "max_total_threads_per_threadgroup",
    "function_constant",
    "buffer",
    "threadgroup",
    "maybe_unused",
    "unused",
    "always_inline",
    "noinline",
    "fallthrough",
];

/// Words that OpenCL C++, as which clang reads the program, reserves and Metal does not.
const OPENCL_WORDS: [&str; 12] = [
    "global",
    "local",
    "generic",
    "pipe",
    "event_t",
    "vec_step",
    "queue_t",
    "clk_event_t",
    "ndrange_t",
    "reserve_id_t",
    "read_only",
    "write_only",
];

pub(super) fn is_scalar(word: &str) -> bool {
    SCALARS.contains(&word)
}

/// Returns true if a word names a vector type, such as `float4`.
pub(super) fn is_vector(word: &str) -> bool {
    word.strip_suffix(['2', '3', '4']).is_some_and(|element| VECTOR_ELEMENTS.contains(&element))
}

/// Returns true if a word names a type of the language or its library.
pub(super) fn is_type(word: &str) -> bool {
    is_scalar(word)
        || LIBRARY_TYPES.contains(&word)
        || is_vector(word.strip_prefix("packed_").unwrap_or(word))
}

pub(super) fn is_type_template(word: &str) -> bool {
    LIBRARY_TEMPLATES.contains(&word)
}

pub(super) fn is_attribute(word: &str) -> bool {
    OTHER_ATTRIBUTES.contains(&word) || VECTOR_BUILTINS.contains(&word) || SCALAR_BUILTINS.contains(&word)
}

pub(super) fn is_opencl(word: &str) -> bool {
    OPENCL_WORDS.contains(&word) || word.starts_with("convert_")
}

/// Why kernels may not use a word, if they may not.
pub(super) fn banned(word: &str) -> Option<&'static str> {
    Some(match word {
        "double" => "Metal has no double",
        "goto" => "Metal has no goto",
        "new" | "delete" => "Metal has no dynamic allocation",
        "throw" | "try" | "catch" => "Metal has no exceptions",
        "virtual" => "Metal has no virtual functions",
        "typeid" | "dynamic_cast" => "Metal has no run-time type information",
        "thread_local" => "Metal has no thread_local",
        "asm" => "Metal has no inline assembly",
        "vertex" | "fragment" | "mesh" => {
            "the word is reserved, and the stand-in supports compute kernels only"
        }
        "co_await" | "co_yield" | "co_return" => "Metal has no coroutines",
        _ if word.starts_with("msl_") || word.starts_with("MSL_") => {
            "names that start with `msl_` are reserved for the stand-in"
        }
        _ if word.starts_with("opencl_") => "the word belongs to OpenCL, not to Metal",
        _ if word.contains("__")
            && !["__METAL_VERSION__", "__HAVE_BFLOAT__", "__FILE__", "__LINE__"].contains(&word) =>
        {
            "names with two underscores are reserved"
        }
        _ => return None,
    })
}
