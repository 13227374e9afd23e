use flashtile_msl_standin::Buffer;

use crate::support::{compiler, refusal};

/// Programs, and what the refusal of each must contain. The program starts in line 3.
fn all_refused(cases: &[(&str, &str)]) {
    let Some(c) = compiler() else { return };
    let mut wrong = Vec::new();
    for (source, expected) in cases {
        let message = match c.compile(&format!("#include <metal_stdlib>\nusing namespace metal;\n{source}")) {
            Ok(_) => "accepted".to_owned(),
            Err(e) => e.to_string(),
        };
        if !message.contains(expected) {
            wrong.push(format!("{source}\n  expected: {expected}\n  got: {message}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn address_spaces() {
    all_refused(&[
        (
            "float f(threadgroup float* x);\nvoid g(device float* x) { f(x); }",
            "cannot pass pointer to address space 'device' as a pointer to address space 'threadgroup'",
        ),
        (
            "void f(device float* x) { threadgroup float* y = x; }",
            "'threadgroup float *thread' with an lvalue of type 'device",
        ),
        (
            "void f(constant float* x) { device float* y = x; }",
            "'device float *thread' with an lvalue of type 'constant",
        ),
        ("void f(constant float* x) { device float* y = (device float*)x; }", "mismatching address spaces"),
        ("void f(constant float* x) { x[0] = 1; }", "read-only variable is not assignable"),
        ("void f(device const float* x) { x[0] = 1; }", "read-only variable is not assignable"),
        (
            "void f(device float* x) { thread float* y = x; }",
            "cannot initialize a variable of type 'thread float",
        ),
        ("void f(device float& x) {}\nvoid g() { float y = 0; f(y); }", "address space"),
        (
            "constant float t[2] = {1, 2};\nvoid f(device float* x) {}\nvoid g() { f(t); }",
            "no known conversion from 'constant float[2]' to 'device float",
        ),
        ("float f(float* x) { return x[0]; }", "a pointer to `float` has no address space"),
        ("float f(const float& x) { return x; }", "a reference to `float` has no address space"),
        ("void f(device float4* x) {\n\n float4* y = x; }", "kernel.metal:5: error: a pointer to `float4`"),
        ("template <typename T> T f(T* x) { return x[0]; }", "a pointer to `T` has no address space"),
        (
            "struct P { float a; };\nfloat f(const P& p) { return p.a; }",
            "a reference to `P` has no address space",
        ),
        ("void f(vec<float, 4>* x) {}", "a pointer to `vec` has no address space"),
        ("void f(device float** x) {}", "the address space of both"),
        ("struct P { float* a; };", "a pointer to `float` has no address space"),
        ("using F = float*;", "a pointer to `float` has no address space"),
        ("void f(device uint* x) { float y = *(float*)x; }", "a pointer to `float` has no address space"),
        ("float x = 1;", "write `constant`"),
        ("void f() { threadgroup float x[4]; }", "a threadgroup variable outside of a kernel"),
        ("kernel void f() { threadgroup float x = 1; }", "a threadgroup variable has no initializer"),
        ("kernel void f() { device float x; }", "address space"),
        ("kernel void f() { static float x; }", "`static` in a function"),
    ]);
}

#[test]
fn kernels_and_their_parameters() {
    all_refused(&[
        ("kernel void f(device float* x) {}", "parameter 1 (`x`) of kernel `f` has no attribute"),
        (
            "kernel void f(device float* x [[buffer(0)]], uint i) {}",
            "parameter 2 (`i`) of kernel `f` has no attribute",
        ),
        ("kernel void f(device float* x [[bufer(0)]]) {}", "`[[bufer]]`: unknown attribute"),
        ("kernel void f(device float* x [[buffer(31)]]) {}", "`[[buffer(n)]]` needs a number from 0 to 30"),
        ("kernel void f(device float* x [[buffer]]) {}", "`[[buffer(n)]]` needs a number from 0 to 30"),
        (
            "kernel void f(device float* x [[buffer(0)]], device float* y [[buffer(0)]]) {}",
            "parameter 2 (`y`) of kernel `f` has the same attribute as another",
        ),
        (
            "kernel void f(uint x [[thread_position_in_grid]], uint y [[thread_position_in_grid]]) {}",
            "has the same attribute as another",
        ),
        ("kernel void f(uint x [[thread_position_in_grid, buffer(1)]]) {}", "two attributes"),
        (
            "kernel void f(threadgroup float* x [[buffer(0)]]) {}",
            "[[buffer]] needs a pointer or reference to device",
        ),
        ("kernel void f(uint x [[buffer(0)]]) {}", "[[buffer]] needs a pointer or reference to device"),
        (
            "kernel void f(device float* x [[threadgroup(0)]]) {}",
            "[[threadgroup]] needs a pointer or reference",
        ),
        ("kernel void f(float i [[thread_position_in_grid]]) {}", "a position or a size is a uint"),
        ("kernel void f(uint4 i [[thread_position_in_grid]]) {}", "a position or a size is a uint"),
        ("kernel void f(uint2 i [[thread_index_in_simdgroup]]) {}", "an index is a uint or a ushort"),
        ("kernel void f(int i [[simdgroup_index_in_threadgroup]]) {}", "an index is a uint or a ushort"),
        (
            "kernel void f(uint3 i [[thread_position_in_grid]], uint j [[threads_per_threadgroup]]) {}",
            "all scalars or all vectors",
        ),
        ("kernel uint f() { return 1; }", "kernel `f` has to return void"),
        ("[[max_total_threads_per_threadgroup(2048)]] kernel void f() {}", "a number from 1 to 1024"),
        ("[[max_total_threads_per_threadgroup(32)]] void f() {}", "function `f` is not a kernel"),
        ("[[kernel, fast]] void f() {}", "`[[fast]]`: unknown attribute"),
        ("void f(device float* x [[buffer(0)]]) {}", "`[[buffer]]`: function `f` is not a kernel"),
        ("struct P { device float* x [[id(0)]]; };", "`[[id]]`: unknown attribute"),
        (
            "template <typename T> [[kernel]] void f(device T* x [[buffer(0)]]) {}\ntemplate [[kernel]] decltype(f<float>) f<float>;",
            "lacks `[[host_name",
        ),
        (
            "template <typename T> [[kernel]] void f(device T* x [[buffer(0)]]) {}\ntemplate [[host_name(\"a\")]] decltype(f<float>) f<float>;",
            "lacks `[[kernel]]`",
        ),
        (
            "template <typename T> [[kernel]] void f(device T* x [[buffer(0)]]) {}
             template [[host_name(\"a\")]] [[kernel]] decltype(f<float>) f<float>;
             template [[host_name(\"a\")]] [[kernel]] decltype(f<half>) f<half>;",
            "two kernels are called `a`",
        ),
        (
            "template <typename T> [[kernel]] void f(device T* x [[buffer(0)]]) {}
             template [[host_name(\"a\")]] [[kernel]] void f<float>(device half* x [[buffer(0)]]);",
            "explicit instantiation of 'f' does not refer to a function template",
        ),
        ("kernel void f() {}\nkernel void f() {}", "two kernels are called `f`"),
    ]);
}

#[test]
fn function_constants() {
    all_refused(&[
        ("constant int x;", "has neither a value nor `[[function_constant(n)]]`"),
        ("constant int x [[function_constant(0)]] = 3;", "has an initializer"),
        ("constant int x [[function_constant(a)]];", "needs a number"),
        (
            "constant int x [[function_constant(0)]];\nconstant int y [[function_constant(0)]];",
            "0 is declared twice",
        ),
        (
            "constant int x [[function_constant(0)]];\nvoid f() { float y[x]; }",
            "array size is not a constant expression",
        ),
        ("constant float4 x [[function_constant(0)]];", "must be a scalar"),
        (
            "constant int x = 3;\nkernel void f() { bool b = is_function_constant_defined(x); }",
            "not a function constant",
        ),
        (
            "kernel void f(device int* x [[buffer(0), function_constant(on)]]) {}",
            "`on` is not a bool constant",
        ),
    ]);
}

#[test]
fn types_and_conversions() {
    all_refused(&[
        ("double f(float x) { return x; }", "Metal has no double"),
        ("long long f(float x) { return 1; }", "Metal has no such type"),
        ("constant long x = 1ll;", "`1ll`: Metal has no long long"),
        ("float4 f(half4 x) { return x; }", "cannot initialize return object"),
        ("float4 f(int4 x) { float4 y = x; return y; }", "cannot initialize"),
        ("float4 f(int4 x) { return (float4)x; }", "a C-style cast to `float4`"),
        ("float4 f(int4 x) { return static_cast<float4>(x); }", "static_cast to `float4`"),
        ("float4 f(float2 x) { return float4(x); }", "one scalar or as many components"),
        ("float4 f(float2 x) { return float4(x, x, 1); }", "one scalar or as many components"),
        ("float2 f(float2 x) { return x.xz; }", "vector component access exceeds"),
        ("ushort f(float x) { return as_type<ushort>(x); }", "types of the same size"),
        ("half f(bfloat x) { return x; }", "cannot initialize return object"),
        ("float4 f(float4 a, half4 b) { return a + b; }", "implicit conversions between vector types"),
        (
            "kernel void f(device float* x [[buffer(0)]]) { float3 y = x[0]; y.w = 2; }",
            "vector component access exceeds",
        ),
        ("uint f(uint x) { return x.y; }", "not a structure or union"),
        ("bool f(int a, uint b) { return a < b; }", "comparison of integers of different signs"),
        ("uint f(uint x) { if (x = 3) return 1; return 0; }", "using the result of an assignment"),
        ("float f(uint x) { if (x > 3) return 1; }", "non-void function does not return"),
        ("float f() { float x; return x; }", "uninitialized"),
    ]);
}

#[test]
fn the_language() {
    all_refused(&[
        ("void f() { a: goto a; }", "`goto`: Metal has no goto"),
        ("void f() { thread int* x = new int; }", "`new`: Metal has no dynamic allocation"),
        ("int f(int x) { return x < 2 ? 1 : x * f(x - 1); }", "`f` calls itself"),
        ("int g(int x);\nint f(int x) { return g(x); }\nint g(int x) { return f(x); }", "calls itself"),
        ("float f(float x) { return std::exp(x); }", "`std::`"),
        ("#include <cmath>", "#include cmath: the stand-in has no such header"),
        ("void f() { auto g = [](int x) { return x; }; }", "a lambda: Metal has none"),
        ("struct A { virtual void f(); };", "`virtual`"),
        ("void f() { throw 1; }", "`throw`"),
        ("void f() { printf(\"x\"); }", "a string"),
        ("void f() { static_assert(2 > 3, \"no such case\"); }", "no such case"),
        ("void f() { asm(\"nop\"); }", "`asm`"),
        ("void f(__global float* x) {}", "two underscores"),
        ("void f() { int msl_x = 1; }", "reserved for the stand-in"),
        ("void f() { #error no\n }", "error"),
        ("#pragma OPENCL EXTENSION all : enable", "`#pragma OPENCL` is not Metal"),
        ("fragment void f() {}", "compute kernels only"),
        ("void f() { undeclared(1); }", "undeclared identifier 'undeclared'"),
        ("void f() {", "is never closed"),
        ("void f(global float* x) {}", "a pointer to `float` has no address space"),
        ("void f() { global float x; }", "unknown type name 'user_global'"),
        ("void f() { int x = 1 }", "expected ';'"),
    ]);
    let Some(c) = compiler() else { return };
    let said = c.compile("kernel void f() {}").unwrap_err().to_string();
    assert!(said.contains("does not #include <metal_stdlib>"), "{said}");
    let said =
        c.compile("#include <metal_stdlib>\nfloat f(float x) { return exp(x); }").unwrap_err().to_string();
    assert!(said.contains("undeclared identifier 'exp'"), "{said}");
}

#[test]
fn functions_of_the_library() {
    all_refused(&[
        ("float f(int x) { return exp(x); }", "no matching function for call to 'exp'"),
        ("float f(bfloat x) { return exp(x); }", "no matching function for call to 'exp'"),
        ("uint f(uint x) { return min(x, 3); }", "no matching function for call to 'min'"),
        ("float f(float x, half y) { return max(x, y); }", "no matching function for call to 'max'"),
        ("half f(half x) { return fast::exp(x); }", "no matching function for call to 'exp'"),
        ("bfloat f(bfloat x) { return simd_sum(x); }", "no matching function for call to 'simd_sum'"),
        (
            "ulong f(ulong x) { return simd_shuffle(x, 1); }",
            "no matching function for call to 'simd_shuffle'",
        ),
        ("float f(float x) { return simd_or(x); }", "no matching function for call to 'simd_or'"),
        ("void f() { threadgroup_barrier(); }", "no matching function for call to 'threadgroup_barrier'"),
        ("void f() { threadgroup_barrier(3); }", "no matching function for call to 'threadgroup_barrier'"),
        (
            "void f(device uint* x) { atomic_fetch_add_explicit(x, 1u, memory_order_relaxed); }",
            "no matching function",
        ),
        (
            "void f(device atomic_uint* x) { atomic_fetch_add_explicit(x, 1u, memory_order_seq_cst); }",
            "undeclared identifier 'memory_order_seq_cst'",
        ),
        ("void f(device atomic_uint* x) { *x = 1u; }", "no viable overloaded '='"),
        (
            "void f(threadgroup atomic<float>* x) { atomic_fetch_add_explicit(x, 1.0f, memory_order_relaxed); }",
            "has no such type in this address space",
        ),
        ("void f() { simdgroup_matrix<float, 8, 4> m; }", "simdgroup_matrix is 8 by 8"),
        ("void f() { simdgroup_matrix<int, 8, 8> m; }", "simdgroup_matrix is of float, half or bfloat"),
        ("void f(device half* x) { simdgroup_float8x8 m; simdgroup_load(m, x, 8); }", "no matching function"),
        (
            "void f(constant float* x) { simdgroup_float8x8 m; simdgroup_load(m, x, 8); }",
            "no matching function",
        ),
        (
            "void f(simdgroup_float8x8 a, simdgroup_half8x8 b) { simdgroup_multiply(a, a, b); }",
            "both factors have the same type",
        ),
        (
            "void f(simdgroup_float8x8 a, simdgroup_half8x8 b) { simdgroup_multiply_accumulate(b, a, a, a); }",
            "the sum has the type",
        ),
    ]);
}

/// Runs a kernel with one threadgroup.
fn run(threads: u32, source: &str) -> Option<Result<(), String>> {
    let c = compiler()?;
    let l = crate::support::library(c, source);
    let mut x = vec![0; 1024];
    let read = [0; 64];
    let mut buffers = [Buffer::write(0, &mut x), Buffer::read(1, &read)];
    let kernel = l.kernel("f", &[]).unwrap();
    Some(kernel.run([1, 1, 1], [threads, 1, 1], &mut buffers, &[64]).map_err(|e| e.to_string()))
}

fn runs(threads: u32, source: &str) {
    assert_eq!(run(threads, source).unwrap_or(Ok(())), Ok(()));
}

fn fails_with(threads: u32, source: &str, expected: &str) {
    if let Some(result) = run(threads, source) {
        let said = result.unwrap_err();
        assert!(said.contains(expected), "{said}");
    }
}

const X: &str = "kernel void f(device float* x [[buffer(0)]], device float* y [[buffer(1)]], \
     threadgroup float* t [[threadgroup(0)]], \
     uint i [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {";

#[test]
fn divergent_barriers_and_simd_operations() {
    fails_with(
        64,
        &format!("{X} if (i == 40) return;\n threadgroup_barrier(mem_flags::mem_none); }}"),
        "thread 0 of threadgroup (0, 0, 0) is at threadgroup_barrier in line 4, but thread 40 has returned",
    );
    fails_with(
        64,
        &format!(
            "{X} if (i < 32)\n threadgroup_barrier(mem_flags::mem_none);\n else threadgroup_barrier(mem_flags::mem_none); }}"
        ),
        "thread 0 of threadgroup (0, 0, 0) is at threadgroup_barrier in line 4, but thread 32 is at threadgroup_barrier in line 5",
    );
    fails_with(
        32,
        &format!("{X} if (i & 1)\n x[i] = simd_sum(x[i]);\n threadgroup_barrier(mem_flags::mem_none); }}"),
        "thread 0 of threadgroup (0, 0, 0) is at threadgroup_barrier in line 5, but thread 1 is at a reduction or scan",
    );
    fails_with(
        32,
        &format!("{X} if (i & 1) x[i] = simd_max(x[i]);\n else x[i] = simd_sum(x[i]); }}"),
        "but thread 1 is at",
    );
    fails_with(32, &format!("{X} if (i < 31) x[i] = simd_shuffle(x[i], 31); }}"), "reads lane 31 in line 3");
    fails_with(32, &format!("{X} x[i] = simd_shuffle(x[i], i + 1); }}"), "reads lane 32 in line 3");
    fails_with(32, &format!("{X} x[i] = simd_broadcast(x[i], i / 16); }}"), "with arguments that differ");
    fails_with(
        32,
        &format!("{X} simdgroup_float8x8 m; simdgroup_load(m, x + lane, 8); simdgroup_store(m, x, 8); }}"),
        "thread 1 of threadgroup (0, 0, 0) is at simdgroup_load in line 3, with arguments that differ",
    );
    fails_with(
        33,
        &format!("{X} simdgroup_float8x8 m; simdgroup_load(m, x, 8); simdgroup_store(m, x, 8); }}"),
        "in a SIMD-group of 1 threads",
    );
    fails_with(
        32,
        &format!(
            "{X} if (i == 7) return; simdgroup_float8x8 m; simdgroup_load(m, x, 8); simdgroup_store(m, x, 8); }}"
        ),
        "but thread 7 has returned",
    );
}

#[test]
fn accesses_out_of_bounds() {
    fails_with(
        32,
        &format!("{X} x[i * 9] = 1; }}"),
        "thread 29 of threadgroup (0, 0, 0) writes 4 bytes at byte 1044 of buffer 0, which has 1024",
    );
    fails_with(1, &format!("{X} x[0] = y[-1]; }}"), "reads 4 bytes at byte -4 of buffer 1, which has 64");
    fails_with(
        1,
        &format!("{X} ((device float4*)(x + 252))[1] = float4(1); }}"),
        "writes 16 bytes at byte 1024 of buffer 0, which has 1024",
    );
    fails_with(1, &format!("{X} y[0] = 1; }}"), "writes buffer 1, which is bound for reading");
    fails_with(
        32,
        &format!("{X} t[i] = 1; }}"),
        "writes 4 bytes at byte 64 of threadgroup memory 0, which has 64",
    );
    fails_with(
        2,
        &format!("{X} threadgroup float v[3]; v[i * 3] = 1; x[i] = v[0]; }}"),
        "writes 4 bytes at byte 12 of threadgroup variable 0, which has 12",
    );
    fails_with(1, &format!("{X} *(device float4*)(x + 1) = float4(1); }}"), "not a multiple of 16");
    fails_with(1, &format!("{X} *(device float2*)(x + 1) = float2(1, 2); }}"), "not a multiple of 8");
    fails_with(
        1,
        &format!("{X} threadgroup float v[8192]; v[i] = 1; x[0] = v[0]; }}"),
        "32832 bytes of threadgroup memory, more than the 32768",
    );
    fails_with(1, &format!("{X} while (*(volatile device float*)x < 1) {{}} }}"), "does not terminate");
}

#[test]
fn races() {
    let body = |between: &str| {
        format!("{X} threadgroup float v[64]; v[i] = i; {between} x[i] = v[i ^ 1] + v[i & 32]; }}")
    };
    fails_with(
        64,
        &body(""),
        "thread 1 of threadgroup (0, 0, 0) writes 4 bytes at byte 4 of threadgroup variable 0, \
         which thread 0 of threadgroup 0 has read with no barrier between",
    );
    fails_with(64, &body("threadgroup_barrier(mem_flags::mem_device);"), "with no barrier between");
    fails_with(64, &body("x[i] = simd_sum(x[i]);"), "with no barrier between");
    runs(64, &body("threadgroup_barrier(mem_flags::mem_threadgroup);"));
    runs(64, &body("simdgroup_barrier(mem_flags::mem_threadgroup);"));
    let across = |between: &str| {
        format!("{X} t[i / 32] = i; {between} x[i] = t[0]; }}")
            .replace("t[i / 32] = i", "if (lane == 0) t[i / 32] = i")
    };
    fails_with(
        64,
        &across("simdgroup_barrier(mem_flags::mem_threadgroup);")
            .replace("x[i] = t[0]", "x[i] = t[1 - i / 32]"),
        "with no barrier between",
    );
    runs(64, &across("threadgroup_barrier(mem_flags::mem_threadgroup);"));
    fails_with(2, &format!("{X} x[0] = i; }}"), "thread 0 of threadgroup 0 has written");
    fails_with(
        2,
        "kernel void f(device atomic_uint* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
             if (i == 0) atomic_store_explicit(x, 1u, memory_order_relaxed);
             else *(device uint*)x = 2;
         }",
        "with no barrier between",
    );
    let Some(c) = compiler() else { return };
    let l = crate::support::library(c, "kernel void f(device float* x [[buffer(0)]]) { x[0] = 1; }");
    let k = l.kernel("f", &[]).unwrap();
    let mut x = vec![0; 4];
    let said = k.run([2, 1, 1], [1, 1, 1], &mut [Buffer::write(0, &mut x)], &[]).unwrap_err().to_string();
    assert!(
        said.contains("threadgroup (1, 0, 0)") && said.contains("thread 0 of threadgroup 0 has written"),
        "{said}"
    );
    k.with_races().run([2, 1, 1], [1, 1, 1], &mut [Buffer::write(0, &mut x)], &[]).unwrap();
}

#[test]
fn launches() {
    let Some(c) = compiler() else { return };
    let l = crate::support::library(
        c,
        "[[max_total_threads_per_threadgroup(64)]] kernel void f(device float* x [[buffer(2)]],
             uint i [[thread_position_in_grid]],
             threadgroup float* t [[threadgroup(0)]]) { if (i == 0) { t[0] = 1; x[0] = t[0]; } }",
    );
    let k = l.kernel("f", &[]).unwrap();
    let mut x = vec![0; 4];
    let mut run = |groups, threads, index, bytes: &[usize]| {
        k.run(groups, threads, &mut [Buffer::write(index, &mut x)], bytes).map_err(|e| e.to_string())
    };
    assert_eq!(run([1, 1, 1], [64, 1, 1], 2, &[4]), Ok(()));
    for (result, expected) in [
        (run([1, 1, 1], [65, 1, 1], 2, &[4]), "whose maximum is 64"),
        (run([1, 0, 1], [1, 1, 1], 2, &[4]), "nothing to run"),
        (run([1, 1, 1], [1, 1, 1], 1, &[4]), "buffer 2 of kernel `f` is not bound"),
        (run([1, 1, 1], [1, 1, 1], 2, &[]), "threadgroup memory 0 of kernel `f` has no size"),
        (run([1, 1, 1], [1, 1, 1], 2, &[40000]), "40000 bytes of threadgroup memory"),
        (run([u32::MAX, 1, 1], [2, 1, 1], 2, &[4]), "the grid is too large"),
    ] {
        let said = result.unwrap_err();
        assert!(said.contains(expected), "{said}");
    }
    assert!(l.kernel("g", &[]).unwrap_err().to_string().contains("no kernel `g`: the kernels are f"));
    let said = refusal(c, "kernel void f() { undeclared(); }");
    assert!(said.contains("kernel.metal:3"), "{said}");
}

#[test]
fn elements_of_matrices_are_set_one_at_a_time() {
    all_refused(&[
        (
            "void f() { simdgroup_float8x8 m; m.thread_elements() = float2(1, 2); }",
            "no viable overloaded '='",
        ),
        (
            "void f() { simdgroup_float8x8 a, b; a.thread_elements() = b.thread_elements(); }",
            "deleted operator",
        ),
    ]);
}
