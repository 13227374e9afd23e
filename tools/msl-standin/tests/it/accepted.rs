use flashtile_msl_standin::{Buffer, FunctionConstant, Value};

use half::{bf16, f16};

use crate::support::{bytes, compiler, f32s, library, one_group, u32s};

#[test]
fn vectors_are_added() {
    let Some(c) = compiler() else { return };
    let l = library(
        c,
        "kernel void add(device float* out [[buffer(0)]], device const float* a [[buffer(1)]],
                         const device float* b [[buffer(2)]], constant uint& n [[buffer(3)]],
                         uint i [[thread_position_in_grid]]) {
             if (i < n) out[i] = a[i] + b[i] * 0.5;
         }",
    );
    assert_eq!(l.kernels(), ["add"]);
    let a: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let a = bytes(&a, f32::to_ne_bytes);
    let count = 1000u32.to_ne_bytes();
    let mut out = vec![0xff; 4000];
    let mut buffers =
        [Buffer::write(0, &mut out), Buffer::read(1, &a), Buffer::read(2, &a), Buffer::read(3, &count)];
    l.kernel("add", &[]).unwrap().run([4, 1, 1], [256, 1, 1], &mut buffers, &[]).unwrap();
    assert!(f32s(&out).iter().enumerate().all(|(i, &v)| v == i as f32 * 1.5));
}

#[test]
fn a_group_reduces_through_threadgroup_memory() {
    let Some(c) = compiler() else { return };
    let l = library(
        c,
        "[[kernel]] void sum(device float* out [[buffer(0)]], device const float* a [[buffer(1)]],
                         threadgroup float* dynamic [[threadgroup(0)]],
                         uint3 gid [[threadgroup_position_in_grid]], uint3 i [[thread_position_in_grid]],
                         uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]],
                         uint sgs [[simdgroups_per_threadgroup]]) {
             alignas(16) threadgroup float part[32];
             float s = simd_sum(a[i.x]);
             if (lane == 0) { part[sg] = s; dynamic[sg] = s; }
             threadgroup_barrier(mem_flags::mem_threadgroup);
             if (sg == 0) {
                 s = simd_sum(lane < sgs ? part[lane] : 0.0f);
                 if (lane == 0) out[gid.x] = s + dynamic[0];
             }
         }",
    );
    let a: Vec<f32> = (0..2048).map(|i| (i % 7) as f32).collect();
    let input = bytes(&a, f32::to_ne_bytes);
    let mut out = vec![0xff; 8];
    let mut buffers = [Buffer::write(0, &mut out), Buffer::read(1, &input)];
    l.kernel("sum", &[]).unwrap().run([2, 1, 1], [1024, 1, 1], &mut buffers, &[128]).unwrap();
    for (g, &v) in f32s(&out).iter().enumerate() {
        let part = &a[g * 1024..][..1024];
        assert_eq!(v, part.iter().sum::<f32>() + part[..32].iter().sum::<f32>());
    }
}

#[test]
fn templates_have_names_for_the_host() {
    let Some(c) = compiler() else { return };
    let l = library(
        c,
        "template <typename T, int N>
         [[kernel]] void fill(device T* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
             vec<T, 4> v = vec<T, 4>(N, 2 * N, T(3) * N, i);
             out[i] = v[i % 4] + v.xy.y;
         }
         template [[host_name(\"fill_f4\")]] [[kernel]] decltype(fill<float, 4>) fill<float, 4>;
         template [[host_name(\"fill_u5\")]] [[kernel]] void fill<uint, 5>(
             device uint* out [[buffer(0)]], uint i [[thread_position_in_grid]]);",
    );
    assert_eq!(l.kernels(), ["fill_f4", "fill_u5"]);
    let out = one_group(&l.kernel("fill_f4", &[]).unwrap(), 4, &[], 16).unwrap();
    assert_eq!(f32s(&out), [12.0, 16.0, 20.0, 11.0]);
    let out = one_group(&l.kernel("fill_u5", &[]).unwrap(), 4, &[], 16).unwrap();
    assert_eq!(u32s(&out), [15, 20, 25, 13]);
}

#[test]
fn function_constants_are_set_when_the_kernel_is_made() {
    let Some(c) = compiler() else { return };
    let l = library(
        c,
        "constant int factor [[function_constant(0)]];
         constant float shift [[function_constant(7)]];
         constant bool has_shift = is_function_constant_defined(shift);
         constant int twice = factor * 2;
         constant int table[3] = {1, 10, 100};
         kernel void f(device int* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
             out[i] = table[i] * twice + (has_shift ? int(shift) : 0);
         }
         kernel void g(device int* out [[buffer(0)]]) { out[0] = 3; }",
    );
    let f = |cs: &[FunctionConstant]| l.kernel("f", cs);
    let five = FunctionConstant::new(0, Value::I32(5));
    let run = |cs: &[FunctionConstant]| u32s(&one_group(&f(cs).unwrap(), 3, &[], 12).unwrap());
    assert_eq!(run(&[five]), [10, 100, 1000]);
    assert_eq!(run(&[five, FunctionConstant::new(7, Value::F32(2.0))]), [12, 102, 1002]);
    assert_eq!(f(&[]).unwrap_err().to_string(), "function constant 0 (`factor`) is not set");
    let wrong = f(&[FunctionConstant::new(0, Value::U32(5))]).unwrap_err().to_string();
    assert_eq!(wrong, "function constant `factor` is declared int, got a uint");
    assert!(f(&[five, five]).is_err());
    assert!(l.kernel("g", &[]).is_ok());
}

/// Runs `out[i] = EXPRESSION` over one SIMD-group, where `x` and `y` are the values of the lane.
fn lanes(types: (&str, &str), expression: &str, x: &[u8], y: &[u8], size: usize) -> Option<Vec<u8>> {
    let (of, to) = types;
    let l = library(
        compiler()?,
        &format!(
            "kernel void f(device {to}* out [[buffer(0)]], device const {of}* a [[buffer(1)]],
                           device const {of}* b [[buffer(2)]], ushort i [[thread_index_in_simdgroup]]) {{
                 {of} x = a[i], y = b[i];
                 out[i] = {expression};
             }}"
        ),
    );
    Some(one_group(&l.kernel("f", &[]).unwrap(), 32, &[x, y], 32 * size).unwrap())
}

fn floats(expression: &str, f: impl Fn(usize, &[f32], &[f32]) -> f32) {
    let x: Vec<f32> = (0..32).map(|i| i as f32 * 0.37 - 4.0).collect();
    let y: Vec<f32> = (0..32).map(|i| 3.0 - i as f32 * 0.21).collect();
    let (xb, yb) = (bytes(&x, f32::to_ne_bytes), bytes(&y, f32::to_ne_bytes));
    let Some(out) = lanes(("float", "float"), expression, &xb, &yb, 4) else { return };
    for (i, v) in f32s(&out).into_iter().enumerate() {
        let expected = f(i, &x, &y);
        let near = (v - expected).abs() <= 1e-5 * expected.abs().max(1.0);
        assert!(
            near || v.to_bits() == expected.to_bits() || (v.is_nan() && expected.is_nan()),
            "{expression}, lane {i}: {v}, not {expected}"
        );
    }
}

fn uints(expression: &str, f: impl Fn(usize, &[u32], &[u32]) -> u32) {
    let x: Vec<u32> = (0..32).map(|i| 0x9e37_79b9u32.wrapping_mul(i)).collect();
    let y: Vec<u32> = (0..32).map(|i| 31 - i).collect();
    let (xb, yb) = (bytes(&x, u32::to_ne_bytes), bytes(&y, u32::to_ne_bytes));
    let Some(out) = lanes(("uint", "uint"), expression, &xb, &yb, 4) else { return };
    for (i, v) in u32s(&out).into_iter().enumerate() {
        assert_eq!(v, f(i, &x, &y), "{expression}, lane {i}");
    }
}

#[test]
fn mathematics() {
    floats("exp(x) + fast::exp2(y) + precise::tanh(x)", |i, x, y| x[i].exp() + y[i].exp2() + x[i].tanh());
    floats("log(y + 4) + log2(y + 4) + sqrt(y + 4) + rsqrt(y + 4)", |i, _, y| {
        let v = y[i] + 4.0;
        v.ln() + v.log2() + v.sqrt() + 1.0 / v.sqrt()
    });
    floats("sin(x) * cos(y) + pow(y + 5, 1.5f) + fmod(x, 0.7f)", |i, x, y| {
        x[i].sin() * y[i].cos() + (y[i] + 5.0).powf(1.5) + x[i] % 0.7
    });
    floats("floor(x) + 10 * ceil(x) + 100 * rint(x) + 1000 * trunc(x) + round(y)", |i, x, y| {
        let v = x[i];
        v.floor() + 10.0 * v.ceil() + 100.0 * v.round_ties_even() + 1000.0 * v.trunc() + y[i].round()
    });
    floats("fma(x, y, 1.0f) + abs(x) + fabs(y) + sign(x) + copysign(2.0f, x)", |i, x, y| {
        x[i].mul_add(y[i], 1.0) + x[i].abs() + y[i].abs() + x[i].signum() + 2f32.copysign(x[i])
    });
    floats("min(x, y) + 3 * max(x, y) + clamp(x, -1.0f, 1.0f) + mix(x, y, 0.25f)", |i, x, y| {
        x[i].min(y[i]) + 3.0 * x[i].max(y[i]) + x[i].clamp(-1.0, 1.0) + x[i] + (y[i] - x[i]) * 0.25
    });
    floats("max(NAN, x) + min(y, NAN)", |i, x, y| x[i] + y[i]);
    floats(
        "(isnan(x / 0 * 0) ? 1 : 0) + (isinf(-INFINITY) ? 2 : 0) + (isfinite(x) ? 4 : 0) + select(x, y, x < y)",
        |i, x, y| 7.0 + x[i].max(y[i]),
    );
    floats("dot(float2(x, y), float2(y, 2)) + length(float2(3, 4))", |i, x, y| {
        x[i] * y[i] + 2.0 * y[i] + 5.0
    });
    floats("as_type<float>(as_type<uint>(x) ^ 0x80000000u)", |i, x, _| -x[i]);
    floats(
        "numeric_limits<float>::lowest() < x && x < FLT_MAX && half(x) < HALF_MAX ? -INFINITY : 0",
        |_, _, _| f32::NEG_INFINITY,
    );
    uints("popcount(x) + 100 * clz(x) + 10000 * ctz(x)", |i, x, _| {
        x[i].count_ones() + 100 * x[i].leading_zeros() + 10000 * x[i].trailing_zeros()
    });
    uints("reverse_bits(x) ^ mulhi(x, y) ^ rotate(x, y) ^ extract_bits(x, 3, 5)", |i, x, y| {
        x[i].reverse_bits()
            ^ (((u64::from(x[i]) * u64::from(y[i])) >> 32) as u32)
            ^ x[i].rotate_left(y[i])
            ^ ((x[i] >> 3) % 32)
    });
    uints(
        "popcount(uchar(x)) + clz(ushort(x)) + uint(long(1) << 40 >> 38) + sizeof(long) + sizeof(float3)",
        |i, x, _| (x[i] as u8).count_ones() + (x[i] as u16).leading_zeros() + 4 + 8 + 16,
    );
}

#[test]
fn lanes_of_a_simd_group() {
    floats("simd_sum(x) + simd_max(y) + simd_min(x)", |_, x, y| {
        x.iter().sum::<f32>() + y.iter().fold(f32::MIN, |a, &b| a.max(b)) + x[0]
    });
    floats("simd_product(x < 0 ? -1.0f : 1.5f)", |_, x, _| {
        x.iter().map(|&v| if v < 0.0 { -1.0 } else { 1.5 }).product()
    });
    floats(
        "simd_shuffle(x, 31 - i) + simd_shuffle_xor(y, 5) + simd_broadcast(x, 7) + simd_broadcast_first(y)",
        |i, x, y| x[31 - i] + y[i ^ 5] + x[7] + y[0],
    );
    floats("simd_shuffle_up(x, 3) + simd_shuffle_down(y, 4) + simd_shuffle_rotate_down(x, 1)", |i, x, y| {
        x[if i < 3 { i } else { i - 3 }] + y[if i > 27 { i } else { i + 4 }] + x[(i + 1) % 32]
    });
    floats("simd_prefix_inclusive_sum(x) + simd_prefix_exclusive_sum(y)", |i, x, y| {
        x[..=i].iter().sum::<f32>() + y[..i].iter().sum::<f32>()
    });
    floats("simd_sum(half(i)) + simd_sum(float2(x, 1)).y + simd_shuffle(half4(i), 3).w", |_, _, _| {
        496.0 + 32.0 + 3.0
    });
    uints("simd_or(x) ^ simd_and(x | 7) ^ simd_xor(x)", |_, x, _| {
        x.iter().fold(0, |a, b| a | b)
            ^ x.iter().fold(!0, |a, b| a & (b | 7))
            ^ x.iter().fold(0, |a, b| a ^ b)
    });
    uints(
        "uint(simd_vote::vote_t(simd_ballot(x & 1))) + simd_any(y == 3) + 2 * simd_all(y < 31)",
        |_, x, _| x.iter().enumerate().map(|(i, v)| (v & 1) << i).sum::<u32>() + 1,
    );
    uints("(simd_is_first() ? 1 : 0) + (simd_ballot(true).all() ? 2 : 0)", |i, _, _| 2 + u32::from(i == 0));
}

#[test]
fn lanes_that_have_returned_are_inactive() {
    let Some(c) = compiler() else { return };
    let l = library(
        c,
        "kernel void f(device uint* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
             if (i < 3 || i > 36) return;
             out[i] = simd_sum(1) + 100 * simd_min(i) + 10000 * (simd_is_first() ? 1 : 0) + 100000 * simd_all(i > 2);
         }",
    );
    let out = u32s(&one_group(&l.kernel("f", &[]).unwrap(), 40, &[], 160).unwrap());
    assert_eq!(out[2..6], [u32::MAX, 110329, 100329, 100329]);
    assert_eq!(out[31..38], [100329, 113205, 103205, 103205, 103205, 103205, u32::MAX]);
}

#[test]
fn half_and_bfloat_round_after_each_operation() {
    // 2049 lies between two halves, and 257 between two bfloats: both round to even.
    for (ty, expression, expected) in [
        ("half", "half(2048) + half(1)", 2048.0),
        ("half", "half(2048) + half(3)", 2052.0),
        ("half", "half(2048) + half(1) + half(1)", 2048.0),
        ("half", "2048.0h + 1", 2048.0),
        ("half", "half(2048) + 1.0f", 2048.0),
        ("float", "half(2048) + 1.0f", 2049.0),
        ("float", "half(65504) + half(16)", f32::INFINITY),
        ("float", "half(65519.0f)", 65504.0),
        ("float", "half(1e-8f)", 0.0),
        ("float", "half(3e-8f)", 2f32.powi(-24)),
        ("float", "fma(half(2048), half(1), half(1))", 2048.0),
        ("float", "fma(half(1.0029296875f), half(1.0029296875f), half(-1))", 0.0058670044),
        ("bfloat", "bfloat(256) + bfloat(1)", 256.0),
        ("bfloat", "bfloat(256) + bfloat(3)", 260.0),
        ("bfloat", "bfloat(256) + bfloat(1) + bfloat(1)", 256.0),
        ("float", "bfloat(256) + 1.0f", 257.0),
        ("float", "bfloat(1.00390625f)", 1.0),
        ("float", "bfloat(1.01171875f)", 1.015625),
        ("float", "bfloat(3.4e38f)", f32::INFINITY),
        ("float", "bfloat(1e-40f)", bf16::from_f32(1e-40).to_f32()),
        ("float", "isnan(bfloat(NAN)) + isnan(half(NAN))", 2.0),
        ("float", "2.5bf * bfloat4(1, 2, 3, 4).w", 10.0),
        ("float", "half4(half2(1, 2), 3, 4).zyx.x + half3(0.1).y", 3.1),
        ("float", "as_type<half>(ushort(0x3c01))", 1.0009766),
        ("half", "1 / 3.0", 1.0 / 3.0),
    ] {
        let expression = expression.replace("isnan(bfloat(NAN))", "isnan(float(bfloat(NAN)))");
        let Some(out) = lanes(("uint", ty), &expression, &[0; 128], &[0; 128], 4) else { return };
        let v = match ty {
            "half" => f16::from_ne_bytes([out[0], out[1]]).to_f32(),
            "bfloat" => bf16::from_ne_bytes([out[0], out[1]]).to_f32(),
            _ => f32s(&out)[0],
        };
        let expected = match expression.contains("0.1") || expression.contains("1 / 3.0") {
            true if ty == "half" => f16::from_f32(expected).to_f32(),
            true => (f16::from_f32(3.0) + f16::from_f32(0.1)).to_f32(),
            false => expected,
        };
        assert_eq!(v, expected, "{ty} {expression}");
    }
}

#[test]
fn matrices_are_products() {
    let Some(c) = compiler() else { return };
    let source = "
        template <typename T>
        [[kernel]] void product(device float* out [[buffer(0)]], device const T* a [[buffer(1)]],
                                device const T* b [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {
            threadgroup T tile[8 * 12];
            for (uint i = lane; i < 64; i += 32) tile[i / 8 * 12 + i % 8] = b[i];
            simdgroup_barrier(mem_flags::mem_threadgroup);
            simdgroup_matrix<T, 8, 8> x, y, z;
            simdgroup_load(x, a, 8);
            simdgroup_load(y, tile, 12);
            simdgroup_load(z, tile, 12, ulong2(0, 0), true);
            simdgroup_float8x8 s = make_filled_simdgroup_matrix<float, 8>(1.0f);
            simdgroup_multiply_accumulate(s, x, y, s);
            simdgroup_store(s, out, 8);
            simdgroup_multiply(s, x, z);
            s.thread_elements()[0] += lane;
            s.thread_elements()[1] -= lane;
            simdgroup_store(s, out + 64, 8, ulong2(0, 0), true);
            simdgroup_matrix<T, 8, 8> unit(T(3.0f));
            simdgroup_multiply(s, unit, y);
            simdgroup_store(s, out + 120, 8, ulong2(0, 1));
        }
        template [[host_name(\"f32\")]] [[kernel]] decltype(product<float>) product<float>;
        template [[host_name(\"f16\")]] [[kernel]] decltype(product<half>) product<half>;
        template [[host_name(\"bf16\")]] [[kernel]] decltype(product<bfloat>) product<bfloat>;";
    let l = library(c, source);
    let a: Vec<f32> = (0..64).map(|i| ((i * 37) % 11) as f32 - 5.0).collect();
    let b: Vec<f32> = (0..64).map(|i| ((i * 23) % 13) as f32 * 0.5 - 3.0).collect();
    let dot = |r: usize, f: &dyn Fn(usize) -> f32| (0..8).map(|k| a[r * 8 + k] * f(k)).sum::<f32>();
    for name in ["f32", "f16", "bf16"] {
        let encode = |v: &[f32]| match name {
            "f32" => bytes(v, f32::to_ne_bytes),
            "f16" => bytes(v, |x| f16::from_f32(x).to_ne_bytes()),
            _ => bytes(v, |x| bf16::from_f32(x).to_ne_bytes()),
        };
        let kernel = l.kernel(name, &[]).unwrap();
        let out = f32s(&one_group(&kernel, 32, &[&encode(&a), &encode(&b)], 768).unwrap());
        for r in 0..8 {
            for col in 0..8 {
                assert_eq!(out[r * 8 + col], 1.0 + dot(r, &|k| b[k * 8 + col]), "{name} {r} {col}");
                // Apple's layout: a quad of lanes holds two rows of four columns.
                let lane = (r / 4) * 16 + (col / 4) * 8 + (r % 4) * 2 + (col % 4) / 2;
                let shift = if col % 2 == 0 { lane as f32 } else { -(lane as f32) };
                assert_eq!(out[64 + col * 8 + r], dot(r, &|k| b[col * 8 + k]) + shift, "{name} {r} {col}");
                assert_eq!(out[128 + r * 8 + col], 3.0 * b[r * 8 + col]);
            }
        }
    }
}

#[test]
fn atomics_count() {
    let Some(c) = compiler() else { return };
    let l = library(
        c,
        "kernel void f(device atomic_uint* out [[buffer(0)]], device atomic<float>* sum [[buffer(1)]],
                       uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
             threadgroup atomic_int count;
             if (t == 0) atomic_store_explicit(&count, 0, memory_order_relaxed);
             threadgroup_barrier(mem_flags::mem_threadgroup);
             atomic_fetch_add_explicit(&count, 2, memory_order_relaxed);
             threadgroup_barrier(mem_flags::mem_threadgroup);
             if (t == 0)
                 atomic_fetch_add_explicit(&out[0], uint(atomic_load_explicit(&count, memory_order_relaxed)), memory_order_relaxed);
             atomic_fetch_max_explicit(out + 1, i, memory_order_relaxed);
             uint old = atomic_load_explicit(out + 2, memory_order_relaxed);
             while (!atomic_compare_exchange_weak_explicit(out + 2, &old, old + 3, memory_order_relaxed, memory_order_relaxed)) {
             }
             atomic_fetch_add_explicit(sum, 0.5f, memory_order_relaxed);
         }",
    );
    let (mut out, mut sum) = (vec![0; 12], vec![0; 4]);
    let mut buffers = [Buffer::write(0, &mut out), Buffer::write(1, &mut sum)];
    l.kernel("f", &[]).unwrap().run([5, 1, 1], [48, 1, 1], &mut buffers, &[]).unwrap();
    assert_eq!(u32s(&out), [480, 239, 720]);
    assert_eq!(f32s(&sum), [120.0]);
}

#[test]
fn positions_in_three_dimensions() {
    let Some(c) = compiler() else { return };
    let l = library(
        c,
        "kernel void f(device uint* out [[buffer(0)]], uint3 p [[thread_position_in_grid]],
                       uint3 t [[thread_position_in_threadgroup]], uint3 g [[threadgroup_position_in_grid]],
                       uint3 n [[threads_per_threadgroup]], uint3 m [[threadgroups_per_grid]],
                       uint3 size [[threads_per_grid]], ushort i [[thread_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]],
                       uint lanes [[threads_per_simdgroup]]) {
             bool ok = all(p == g * n + t) && i == (t.z * n.y + t.y) * n.x + t.x && lane == i % lanes && sg == i / lanes
                 && size.x == n.x * m.x && size.z == n.z * m.z;
             out[(p.z * size.y + p.y) * size.x + p.x] = ok ? p.x + 100 * p.y + 10000 * p.z : 0;
         }",
    );
    let mut out = vec![0xff; 6 * 6 * 10 * 4];
    l.kernel("f", &[]).unwrap().run([2, 2, 2], [3, 3, 5], &mut [Buffer::write(0, &mut out)], &[]).unwrap();
    for (i, v) in u32s(&out).into_iter().enumerate() {
        assert_eq!(v as usize, i % 6 + 100 * (i / 6 % 6) + 10000 * (i / 36));
    }
}

#[test]
fn structs_tables_macros_and_helpers() {
    let Some(c) = compiler() else { return };
    let l = library(
        c,
        "#include <metal_simdgroup_matrix>
         #define SQUARE(x) ((x) * (x))
         #if __METAL_VERSION__ >= 310
         #define EXTRA 1
         #else
         #error old
         #endif
         // A comment with device float* x [[nonsense]] and \"quotes\".
         struct Params { uint n; float scale; float4 bias; packed_float3 odd; };
         enum class Mode : uint { plain = 0, squared = 1 };
         struct Sizes { static constant constexpr uint rows = 3; };
         constant constexpr uint WIDTH = 4;
         constant float4 TABLE[2] = {float4(1, 2, 3, 4), float4(5)};
         constant bool has_mask [[function_constant(0)]];
         constant uint2 PAIR = uint2(7, 9);
         using F4 = vec<float, 4>;
         inline float scaled(constant Params& p, float x) { return x * p.scale; }
         METAL_FUNC void store(device float* to, thread const float* from, uint n) {
             #pragma unroll
             for (uint i = 0; i < n; i++) to[i] = from[i];
         }
         template <typename T, int N> struct Tile {
             T v[N];
             T total() const { T s = 0; for (int i = 0; i < N; i++) s += v[i]; return s; }
         };
         static float pick(constant float4* t, uint i) { return t[i].w; }
         kernel void f(device float* out [[buffer(0)]], constant Params& p [[buffer(1)]],
                       device const float* mask [[buffer(2), function_constant(has_mask)]]) {
             Params q = p;
             const Params r = p;
             Tile<float, WIDTH> tile;
             for (uint i = 0; i < WIDTH; ++i) tile.v[i] = q.bias[i];
             thread float local[4] = {scaled(p, 3), tile.total(), pick(TABLE, 1), SQUARE(float(Sizes::rows))};
             store(out, local, 4);
             float4 v = TABLE[0];
             v.xy = v.wz;
             v.w += 10;
             out[4] = dot(v, F4{1, 10, 100, 1000}) + EXTRA;
             out[5] = has_mask ? mask[1] : -1;
             float3 odd = p.odd;
             Mode m = Mode(q.n);
             switch (m) { case Mode::plain: out[6] = 0; break; case Mode::squared: out[6] = odd.z; break; }
             out[7] = any(v < 0.0f) ? 1 : r.scale + PAIR.y;
         }",
    );
    let mut params = bytes(&[0u32; 12], u32::to_ne_bytes);
    params[..4].copy_from_slice(&1u32.to_ne_bytes());
    for (at, v) in [(4, 2.0f32), (16, 1.0), (20, 2.0), (24, 3.0), (28, 4.0), (40, 8.5)] {
        params[at..at + 4].copy_from_slice(&v.to_ne_bytes());
    }
    let mask = bytes(&[0.0f32, 6.0], f32::to_ne_bytes);
    let with = l.kernel("f", &[FunctionConstant::new(0, Value::Bool(true))]).unwrap();
    let without = l.kernel("f", &[FunctionConstant::new(0, Value::Bool(false))]).unwrap();
    // The last member ends at byte 44, and the struct at 48.
    let out = f32s(&one_group(&with, 1, &[&params, &mask], 32).unwrap());
    assert_eq!(out, [6.0, 10.0, 5.0, 9.0, 4.0 + 30.0 + 300.0 + 14000.0 + 1.0, 6.0, 8.5, 11.0]);
    let out = f32s(&one_group(&without, 1, &[&params], 32).unwrap());
    assert_eq!(out[5], -1.0);
}

#[test]
fn threadgroup_memory_is_nan_before_it_is_written() {
    let Some(c) = compiler() else { return };
    let l = library(
        c,
        "kernel void f(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
             threadgroup float a[4], b;
             out[i] = i == 0 ? a[3] : b;
             a[3] = 1;
             b = 2;
         }",
    );
    let mut out = vec![0; 8];
    let mut buffers = [Buffer::write(0, &mut out)];
    l.kernel("f", &[]).unwrap().run([2, 1, 1], [1, 1, 1], &mut buffers, &[]).unwrap();
    assert!(f32s(&out).iter().all(|v| v.is_nan()));
}

#[test]
fn many_groups_and_barriers_are_quick() {
    let Some(c) = compiler() else { return };
    let l = library(
        c,
        "kernel void f(device uint* out [[buffer(0)]], uint i [[thread_position_in_grid]],
                       uint t [[thread_index_in_threadgroup]], uint n [[threads_per_threadgroup]]) {
             threadgroup uint x[128];
             x[t] = t;
             for (uint d = n / 2; d > 0; d /= 2) {
                 threadgroup_barrier(mem_flags::mem_threadgroup);
                 if (t < d) x[t] += x[t + d];
             }
             threadgroup_barrier(mem_flags::mem_threadgroup);
             out[i] = x[0];
         }",
    );
    let mut out = vec![0; 4 * 128 * 2000];
    let start = std::time::Instant::now();
    let mut buffers = [Buffer::write(0, &mut out)];
    l.kernel("f", &[]).unwrap().run([2000, 1, 1], [128, 1, 1], &mut buffers, &[]).unwrap();
    assert!(u32s(&out).iter().all(|&v| v == 127 * 64));
    // Two million waits; a hang of the host is the one thing that this is to catch.
    assert!(start.elapsed().as_secs() < 60);
    eprintln!("2000 groups of 128 threads with 8 barriers: {:?}", start.elapsed());
}

#[test]
fn one_program_holds_many_kernels() {
    let Some(c) = compiler() else { return };
    let mut source = String::from(
        "template <typename T, int ROWS, int DIM>
         [[kernel]] void f(device float* out [[buffer(0)]], device const T* q [[buffer(1)]],
                           device const T* k [[buffer(2)]], constant uint& n [[buffer(3)]],
                           uint group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
             threadgroup T tile[ROWS * DIM];
             simdgroup_matrix<T, 8, 8> a[DIM / 8], b;
             for (int d = 0; d < DIM / 8; d++) simdgroup_load(a[d], q + group * 8 * DIM + d * 8, DIM);
             float best = -INFINITY, sum = 0;
             for (uint j = 0; j < n; j += ROWS) {
                 threadgroup_barrier(mem_flags::mem_threadgroup);
                 for (uint i = sg * 32 + lane; i < ROWS * DIM; i += 64) tile[i] = k[j * DIM + i];
                 threadgroup_barrier(mem_flags::mem_threadgroup);
                 for (int r = 0; r < ROWS / 8; r++) {
                     simdgroup_float8x8 s = make_filled_simdgroup_matrix<float, 8>(0);
                     for (int d = 0; d < DIM / 8; d++) {
                         simdgroup_load(b, tile + r * 8 * DIM + d * 8, DIM, 0, true);
                         simdgroup_multiply_accumulate(s, a[d], b, s);
                     }
                     float m = simd_max(max(s.thread_elements()[0], s.thread_elements()[1]));
                     float now = max(best, m);
                     sum = sum * fast::exp2(best - now) + simd_sum(fast::exp2(s.thread_elements()[0] - now));
                     best = now;
                 }
             }
             if (lane == 0 && sg == 0) out[group] = best + log2(sum);
         }\n",
    );
    let mut names = Vec::new();
    for ty in ["float", "half", "bfloat"] {
        for dim in [32, 64, 96, 128] {
            let name = format!("f_{ty}_{dim}");
            source += &format!(
                "template [[host_name(\"{name}\")]] [[kernel]] decltype(f<{ty}, 16, {dim}>) f<{ty}, 16, {dim}>;\n"
            );
            names.push(name);
        }
    }
    let start = std::time::Instant::now();
    let l = library(c, &source);
    eprintln!("{} kernels compiled: {:?}", names.len(), start.elapsed());
    assert_eq!(l.kernels(), names);
    let (q, k, n) = (vec![0; 128 * 8 * 4], vec![0; 128 * 64 * 4], 64u32.to_ne_bytes());
    let start = std::time::Instant::now();
    for name in &names {
        let mut out = vec![0xff; 4];
        let mut buffers =
            [Buffer::write(0, &mut out), Buffer::read(1, &q), Buffer::read(2, &k), Buffer::read(3, &n)];
        l.kernel(name, &[]).unwrap().run([1, 1, 1], [64, 1, 1], &mut buffers, &[]).unwrap();
        assert_eq!(f32s(&out), [8.0]);
    }
    eprintln!("and run: {:?}", start.elapsed());
}

#[test]
fn the_styles_of_written_kernels() {
    let Some(c) = compiler() else { return };
    let l = library(
        c,
        "#define CONSTANT static constant constexpr const
         #define UNROLLED _Pragma(\"clang loop unroll(full)\")
         struct AttnParams { int B; int H; float scale; int64_t strides[3]; };
         struct Limits { CONSTANT short kRows = 4; CONSTANT int kAll = kRows * 2; };
         struct Max { template <typename T> METAL_FUNC static constexpr T apply(T x, T y) { return metal::max(x, y); } };
         template <typename T, short N> struct Loader {
             const device T* src;
             threadgroup T* dst;
             const short lane;
             METAL_FUNC Loader(const device T* s, threadgroup T* d, ushort l) : src(s), dst(d), lane(l) {}
             METAL_FUNC void load() const {
                 UNROLLED
                 for (short i = 0; i < N; i += 32) dst[i + lane] = src[i + lane];
             }
         };
         template <typename Op, typename T, int N>
         METAL_FUNC T fold(thread const T (&x)[N]) {
             T r = x[0];
             for (int i = 1; i < N; i++) r = Op::apply(r, x[i]);
             return r;
         }
         static inline float2 unpack(threadgroup const half2& x) { return float2(x); }
         inline uint nibble(device const uchar* codes, uint i) { return (codes[i >> 1] >> ((i & 1) << 2)) & 0xfu; }
         struct Pair { float v; uint i; };
         Pair operator+(Pair a, Pair b) { return {a.v + b.v, a.i > b.i ? a.i : b.i}; }
         kernel void f(device float* out [[buffer(0)]], device const half* q [[buffer(1)]],
                       const constant AttnParams* params [[buffer(2)]], threadgroup char* shared [[threadgroup(0)]],
                       uint3 tid [[threadgroup_position_in_grid]], ushort tiisg [[thread_index_in_simdgroup]]) {
             q += params->strides[1] * tid.x;
             threadgroup half* tile = (threadgroup half*)(shared + 16);
             const Loader<half, 64> loader(q, tile, tiisg);
             loader.load();
             simdgroup_barrier(mem_flags::mem_threadgroup);
             float acc[Limits::kAll] = {};
             for (ushort i = 0; i < Limits::kAll; ++i) acc[i] = (float)tile[i] * params->scale;
             threadgroup half2* pairs = reinterpret_cast<threadgroup half2*>(tile);
             const auto p = unpack(pairs[1]);
             simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8>(2.f);
             thread vec<float, 2>& mine = reinterpret_cast<thread vec<float, 2>&>(m.thread_elements());
             mine[1] = tiisg;
             const bool odd = (tiisg & 1) == 1;
             float x = odd ? 0.5f : m.thread_elements()[0];
             Pair both = Pair{1.0f, 2u} + Pair{x, tiisg};
             out[tiisg] = fold<Max>(acc) + p.y * 100 + both.v * 1000 + float(int(both.i)) * 1e4f
                 + nibble((device const uchar*)q, 3) * 1e-2f + (1 << 2) * ((tiisg > 3) && !odd);
         }",
    );
    let q = bytes(&(0..64).map(|i| f16::from_f32(i as f32)).collect::<Vec<_>>(), f16::to_ne_bytes);
    let mut params = vec![0; 40];
    params[8..12].copy_from_slice(&0.5f32.to_ne_bytes());
    let mut out = vec![0xff; 128];
    let mut buffers = [Buffer::write(0, &mut out), Buffer::read(1, &q), Buffer::read(2, &params)];
    l.kernel("f", &[]).unwrap().run([1, 1, 1], [32, 1, 1], &mut buffers, &[256]).unwrap();
    for (i, v) in f32s(&out).into_iter().enumerate() {
        let odd = i % 2 == 1;
        let code = q[1] >> 4;
        let both = if odd { 1.5 } else { 3.0 };
        let expected = 3.5 + 300.0 + both * 1000.0 + i.max(2) as f32 * 1e4 + f32::from(code) * 1e-2;
        assert_eq!(v, expected + if i > 3 && !odd { 4.0 } else { 0.0 });
    }
}

#[test]
fn names_without_the_namespace_and_arrays_in_params() {
    let Some(c) = compiler() else { return };
    let source = "#include <metal_stdlib>
         using metal::uint;
         template <typename T, size_t N> struct list {
             T at[N];
             thread T& operator[](size_t i) thread { return at[i]; }
             const thread T& operator[](size_t i) const thread { return at[i]; }
             const constant T& operator[](size_t i) const constant { return at[i]; }
         };
         struct params { list<ulong, 3> strides; list<uint, 2> words; };
         static_assert(sizeof(params) == 32, \"size of \" \"params\");
         constant bool wide [[function_constant(0)]];
         template <typename T> inline T twice(T x, const bool wide) { return wide ? x * T(2) : x; }
         constant constexpr size_t T = 2;
         kernel void f(device uint* out [[buffer(0)]], constant params& p [[buffer(1)]],
                       metal::uint3 i [[thread_position_in_grid]]) {
             list<uint, 2> words = p.words;
             words[0] += uint(p.strides[2]);
             uint sum = 0;
             _Pragma(\"unroll\")
             for (size_t n = 0; n < T; n++) sum += twice(words[n], wide);
             out[i.x] = sum + as_type<uint>(1.0f) + T * T;
         }";
    let library = c.compile(source).unwrap_or_else(|e| panic!("{e}"));
    let mut params = bytes(&[1u64, 2, 30], u64::to_ne_bytes);
    params.extend(bytes(&[400u32, 5000], u32::to_ne_bytes));
    let mut out = vec![0xff; 4];
    let mut buffers = [Buffer::write(0, &mut out), Buffer::read(1, &params)];
    let constants = [FunctionConstant::new(0, Value::Bool(true))];
    library.kernel("f", &constants).unwrap().run([1, 1, 1], [1, 1, 1], &mut buffers, &[]).unwrap();
    assert_eq!(u32s(&out), [2 * 5430 + 1f32.to_bits() + 4]);
}
