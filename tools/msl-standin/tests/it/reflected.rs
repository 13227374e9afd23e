//! Questions of the host about a program.

use flashtile_msl_standin::{
    AddressSpace, ArgumentInfo, Compiler, ConstantInfo, FunctionConstant, Kernel, Library, Value,
};

use crate::support::{compiler, library};

#[test]
fn arguments_of_kernels() {
    let Some(c) = compiler() else { return };
    let l = library(
        c,
        "struct Params { float scale; uint n; half h; };
         using Floats = device const float*;
         constant bool on [[function_constant(3)]];
         template <typename T>
         [[kernel]] void f(device const T* q [[buffer(0)]], device vec<T, 3>* [[buffer(4)]],
                           constant Params& params [[buffer(2)]], threadgroup T* tile [[threadgroup(1)]],
                           device void* raw [[buffer(1), function_constant(on)]], Floats mask [[buffer(5)]],
                           constant uint* table [[buffer(7)]], uint i [[thread_position_in_grid]],
                           device atomic_uint& count [[buffer(6)]], const device T (&rows)[8] [[buffer(8)]]) {}
         template [[host_name(\"f32\")]] [[kernel]] decltype(f<float>) f<float>;
         template [[host_name(\"f16\")]] [[kernel]] decltype(f<half>) f<half>;
         kernel void nothing(uint i [[thread_position_in_grid]]) {}",
    );
    let at = |name: &str, index, address_space, bytes| ArgumentInfo {
        name: name.into(),
        index,
        address_space,
        is_const: address_space == AddressSpace::Constant,
        bytes,
        is_reference: false,
        condition: None,
    };
    let (device, constant) = (AddressSpace::Device, AddressSpace::Constant);
    let expected = |element: usize| {
        vec![
            ArgumentInfo { is_const: true, ..at("q", 0, device, Some(element)) },
            at("", 4, device, Some(4 * element)),
            ArgumentInfo { is_reference: true, ..at("params", 2, constant, Some(12)) },
            at("tile", 1, AddressSpace::Threadgroup, Some(element)),
            ArgumentInfo { condition: Some("on".into()), ..at("raw", 1, device, None) },
            ArgumentInfo { is_const: true, ..at("mask", 5, device, Some(4)) },
            at("table", 7, constant, Some(4)),
            ArgumentInfo { is_reference: true, ..at("count", 6, device, Some(4)) },
            ArgumentInfo { is_const: true, is_reference: true, ..at("rows", 8, device, Some(8 * element)) },
        ]
    };
    let constants = [FunctionConstant::new(3, Value::Bool(false))];
    assert_eq!(l.kernel("f32", &constants).unwrap().arguments(), expected(4));
    assert_eq!(l.kernel("f16", &constants).unwrap().arguments(), expected(2));
    assert_eq!(l.kernel("nothing", &[]).unwrap().arguments(), []);
}

#[test]
fn threads_and_threadgroup_variables_of_kernels() {
    let Some(c) = compiler() else { return };
    let l = library(
        c,
        "constant bool on [[function_constant(0)]];
         template <typename T, int N>
         [[max_total_threads_per_threadgroup(256)]] [[kernel]]
         void f(device T* x [[buffer(0)]], threadgroup T* t [[threadgroup(0)]],
                uint i [[thread_position_in_threadgroup]]) {
             constexpr int M = 2 * N + 1;
             threadgroup T a[M], b;
             alignas(16) threadgroup T c[2];
             a[i] = x[i]; b = a[0]; c[0] = b; t[0] = c[0];
             if (N > 8) { threadgroup T large[64]; large[i] = t[0]; x[i] = large[0]; }
             threadgroup_barrier(mem_flags::mem_threadgroup);
             x[i] = c[0];
         }
         template [[host_name(\"small\")]] [[kernel]] decltype(f<float, 4>) f<float, 4>;
         template [[host_name(\"half\")]] [[kernel]] decltype(f<half, 4>) f<half, 4>;
         template [[host_name(\"large\")]] [[kernel]] decltype(f<float, 9>) f<float, 9>;
         kernel void chosen(device float* x [[buffer(0)]]) {
             if (on) { threadgroup float a[5]; a[0] = x[0]; x[1] = a[0]; }
         }
         kernel void none(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]]) { t[0] = x[0]; }",
    );
    let kernel = |name: &str| l.kernel(name, &[FunctionConstant::new(0, Value::Bool(false))]).unwrap();
    // `a`, `b`, then `c` at a multiple of 16.
    assert_eq!(kernel("small").static_threadgroup_bytes(), (9 * 4 + 4usize).next_multiple_of(16) + 8);
    assert_eq!(kernel("half").static_threadgroup_bytes(), (9 * 2 + 2usize).next_multiple_of(16) + 4);
    // The template's argument decides about the branch.
    assert_eq!(
        kernel("large").static_threadgroup_bytes(),
        (19 * 4 + 4usize).next_multiple_of(16) + 8 + 64 * 4
    );
    // A function constant decides only when a kernel runs: the bound holds for any value.
    assert_eq!(kernel("chosen").static_threadgroup_bytes(), 20);
    assert_eq!(kernel("none").static_threadgroup_bytes(), 0);
    assert_eq!(kernel("small").max_threads(), 256);
    assert_eq!(kernel("none").max_threads(), 1024);
}

#[test]
fn constants_of_programs() {
    let Some(c) = compiler() else { return };
    let l = library(
        c,
        "constant uint rows [[function_constant(5)]];
         constant bool has_mask [[function_constant(1)]];
         constant uint twice = rows * 2;
         constant half scale [[function_constant(2)]];
         kernel void f(device uint* x [[buffer(0)]]) {
             x[0] = twice + (has_mask ? 1 : 0) + (is_function_constant_defined(scale) ? uint(scale) : 0);
         }",
    );
    let constant = |name: &str, index, type_name: &str, is_optional| ConstantInfo {
        name: name.into(),
        index,
        type_name: type_name.into(),
        is_optional,
    };
    let expected = [
        constant("rows", 5, "uint", false),
        constant("has_mask", 1, "bool", false),
        constant("scale", 2, "half", true),
    ];
    assert_eq!(l.constants(), expected);
}

/// Threads compile and run on their own.
const _: () = {
    const fn can_be_shared<T: Send + Sync>() {}
    can_be_shared::<Compiler>();
    can_be_shared::<Library>();
    can_be_shared::<Kernel>();
};
