// flashtile's kernel language on Metal.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using metal::uint;
#ifdef FT_EXACT
#pragma METAL fp contract(off)
#endif

typedef char ft_i8;
typedef long ft_i64;
typedef half ft_f16;
typedef bfloat ft_bf16;

// A parameter that takes its type from the others.
template <typename T> struct ft_same { typedef T type; };

#define FT_METAL 1
#define FT_DEVICE inline
#define FT_THREAD thread
#define FT_CONSTANT constant
#define FT_CONSTEXPR constant constexpr
#define FT_BUFFER(T) const device T*
#define FT_BUFFER_MUT(T) device T*
#define FT_SHARED(T) const threadgroup T*
#define FT_SHARED_MUT(T) threadgroup T*
#define FT_SHARED_ARRAY(T, name, n) \
    threadgroup metal::uint4 ft_##name[((n) * sizeof(T) + 15) / 16]; \
    threadgroup T* const name = reinterpret_cast<threadgroup T*>(ft_##name)
#define FT_PARAMS(P) constant P&
#define FT_REF(...) thread __VA_ARGS__&
#define FT_UNROLL _Pragma("unroll")
#define FT_F16(bits, value) half(value)
#define FT_BF16(bits, value) bfloat(value)
#define ft_infinity INFINITY
#define ft_nan NAN

// Where a thread is.
struct ft_context {
    uint index, threads, lane, simd, simds;
    metal::uint3 group, groups;
};
#define FT_THREAD_CONTEXT const thread ft_context& ft
// No function has the name of a parameter.
#define FT_POSITIONS \
    metal::uint3 ft_at_thread [[thread_position_in_threadgroup]], \
    metal::uint3 ft_at_threads [[threads_per_threadgroup]], \
    uint ft_at_lane [[thread_index_in_simdgroup]], \
    uint ft_at_simd [[simdgroup_index_in_threadgroup]], \
    uint ft_at_simds [[simdgroups_per_threadgroup]], \
    metal::uint3 ft_at_group [[threadgroup_position_in_grid]], \
    metal::uint3 ft_at_groups [[threadgroups_per_grid]]
#define FT_CONTEXT {ft_at_thread.x, ft_at_threads.x, ft_at_lane, ft_at_simd, ft_at_simds, ft_at_group, ft_at_groups}
FT_DEVICE uint ft_thread_index(FT_THREAD_CONTEXT) { return ft.index; }
FT_DEVICE uint ft_threads(FT_THREAD_CONTEXT) { return ft.threads; }
FT_DEVICE uint ft_simd_lane(FT_THREAD_CONTEXT) { return ft.lane; }
FT_DEVICE uint ft_simd_index(FT_THREAD_CONTEXT) { return ft.simd; }
FT_DEVICE uint ft_simd_groups(FT_THREAD_CONTEXT) { return ft.simds; }
FT_DEVICE uint ft_group_x(FT_THREAD_CONTEXT) { return ft.group.x; }
FT_DEVICE uint ft_group_y(FT_THREAD_CONTEXT) { return ft.group.y; }
FT_DEVICE uint ft_group_z(FT_THREAD_CONTEXT) { return ft.group.z; }
FT_DEVICE uint ft_groups_x(FT_THREAD_CONTEXT) { return ft.groups.x; }
FT_DEVICE uint ft_groups_y(FT_THREAD_CONTEXT) { return ft.groups.y; }
FT_DEVICE uint ft_groups_z(FT_THREAD_CONTEXT) { return ft.groups.z; }

FT_DEVICE void ft_barrier(FT_THREAD_CONTEXT) {
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup | metal::mem_flags::mem_device);
}
FT_DEVICE void ft_simd_barrier(FT_THREAD_CONTEXT) {
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup | metal::mem_flags::mem_device);
}

// Bits.
FT_DEVICE uint ft_to_bits(float x) { return as_type<uint>(x); }
FT_DEVICE ushort ft_to_bits(half x) { return as_type<ushort>(x); }
FT_DEVICE ushort ft_to_bits(bfloat x) { return as_type<ushort>(x); }
template <typename T> struct ft_float;
template <> struct ft_float<float> {
    static float from_bits(uint x) { return as_type<float>(x); }
    static float from_f32(float x) { return x; }
};
template <> struct ft_float<half> {
    static half from_bits(ushort x) { return as_type<half>(x); }
    static half from_f32(float x) { return half(x); }
};
template <> struct ft_float<bfloat> {
    static bfloat from_bits(ushort x) { return as_type<bfloat>(x); }
    static bfloat from_f32(float x) { return bfloat(x); }
};
FT_DEVICE float ft_to_f32(float x) { return x; }
FT_DEVICE float ft_to_f32(half x) { return float(x); }
FT_DEVICE float ft_to_f32(bfloat x) { return float(x); }

// Floats.
#ifdef FT_EXACT
FT_DEVICE float ft_exp2(float x) { return metal::precise::exp2(x); }
#else
FT_DEVICE float ft_exp2(float x) { return metal::fast::exp2(x); }
#endif
FT_DEVICE float ft_exp(float x) { return metal::precise::exp(x); }
FT_DEVICE float ft_log2(float x) { return metal::precise::log2(x); }
FT_DEVICE float ft_ln(float x) { return metal::precise::log(x); }
FT_DEVICE float ft_sqrt(float x) { return metal::precise::sqrt(x); }
FT_DEVICE float ft_rsqrt(float x) { return metal::precise::rsqrt(x); }
FT_DEVICE float ft_tanh(float x) { return metal::precise::tanh(x); }
FT_DEVICE float ft_sin(float x) { return metal::precise::sin(x); }
FT_DEVICE float ft_cos(float x) { return metal::precise::cos(x); }
FT_DEVICE float ft_powf_of(float x, float y) { return metal::precise::pow(x, y); }
FT_DEVICE float ft_floor(float x) { return metal::floor(x); }
FT_DEVICE float ft_ceil(float x) { return metal::ceil(x); }
FT_DEVICE float ft_trunc(float x) { return metal::trunc(x); }
FT_DEVICE float ft_round_ties_even(float x) { return metal::rint(x); }
FT_DEVICE float ft_fma(float a, float b, float c) { return metal::fma(a, b, c); }
FT_DEVICE float ft_fmin(float a, float b) { return metal::fmin(a, b); }
FT_DEVICE float ft_fmax(float a, float b) { return metal::fmax(a, b); }
FT_DEVICE float ft_fmod(float a, float b) { return metal::precise::fmod(a, b); }

// Words.
FT_DEVICE uint ft_popcount(uint x) { return metal::popcount(x); }
FT_DEVICE uint ft_clz(uint x) { return metal::clz(x); }
FT_DEVICE uint ft_reverse(uint x) { return metal::reverse_bits(x); }
FT_DEVICE int ft_dot4(uint a, uint b, int c) {
    const metal::char4 x = as_type<metal::char4>(a), y = as_type<metal::char4>(b);
    return int(uint(c) + uint(int(x.x) * int(y.x) + int(x.y) * int(y.y) + int(x.z) * int(y.z) + int(x.w) * int(y.w)));
}
FT_DEVICE int ft_dot4_unsigned(uint a, uint b, int c) {
    const metal::uchar4 x = as_type<metal::uchar4>(a);
    const metal::char4 y = as_type<metal::char4>(b);
    return int(uint(c) + uint(int(x.x) * int(y.x) + int(x.y) * int(y.y) + int(x.z) * int(y.z) + int(x.w) * int(y.w)));
}
FT_DEVICE uint ft_byte_permute(uint a, uint b, uint selector) {
    const ulong bytes = ulong(a) | (ulong(b) << 32);
    uint word = 0;
    for (uint n = 0; n < 4; n++) {
        word |= uint((bytes >> (((selector >> (4 * n)) & 7) * 8)) & 0xff) << (8 * n);
    }
    return word;
}
FT_DEVICE float ft_low_f16(uint word) { return float(as_type<metal::half2>(word).x); }
FT_DEVICE float ft_high_f16(uint word) { return float(as_type<metal::half2>(word).y); }
FT_DEVICE uint ft_f16x2_mul_add(uint a, uint b, uint c) {
    return as_type<uint>(
        metal::fma(as_type<metal::half2>(a), as_type<metal::half2>(b), as_type<metal::half2>(c)));
}
FT_DEVICE uint ft_f16x2_from(float low, float high) { return as_type<uint>(metal::half2(half(low), half(high))); }
FT_DEVICE uint ft_f16x2_from_e4m3(uint codes) {
    // Each code in the high byte of a half. The exponent has four bits, that of f16 five: 2^8 makes up for the difference of their biases.
    const uint halves = ((codes & 0xffu) << 8) | ((codes & 0xff00u) << 16);
    const uint numbers = ft_f16x2_mul_add((halves & 0x80008000u) | ((halves & 0x7f007f00u) >> 1), 0x5c005c00u, 0u);
    const uint nan = (((halves & 0x7f007f00u) + 0x01000100u) & 0x80008000u) >> 15;
    return numbers | nan * 0x7fffu;
}

// Lanes: of 32 bits each, and in pairs.
template <typename T> FT_DEVICE T ft_lane_xor(T x, uint mask) { return metal::simd_shuffle_xor(x, ushort(mask)); }
template <typename T> FT_DEVICE T ft_lane_of(T x, uint lane) { return metal::simd_shuffle(x, ushort(lane)); }
FT_DEVICE ulong ft_lane_xor(ulong x, uint mask) {
    return as_type<ulong>(metal::simd_shuffle_xor(as_type<metal::uint2>(x), ushort(mask)));
}
FT_DEVICE ft_i64 ft_lane_xor(ft_i64 x, uint mask) { return ft_i64(ft_lane_xor(ulong(x), mask)); }
FT_DEVICE ulong ft_lane_of(ulong x, uint lane) {
    return as_type<ulong>(metal::simd_shuffle(as_type<metal::uint2>(x), ushort(lane)));
}
FT_DEVICE ft_i64 ft_lane_of(ft_i64 x, uint lane) { return ft_i64(ft_lane_of(ulong(x), lane)); }
FT_DEVICE uint ft_simd_ballot(FT_THREAD_CONTEXT, bool x) {
    return uint(static_cast<metal::simd_vote::vote_t>(metal::simd_ballot(x)));
}
FT_DEVICE bool ft_simd_any(FT_THREAD_CONTEXT, bool x) { return metal::simd_any(x); }
FT_DEVICE bool ft_simd_all(FT_THREAD_CONTEXT, bool x) { return metal::simd_all(x); }
#define FT_REDUCTIONS(T) \
    FT_DEVICE T ft_simd_sum(FT_THREAD_CONTEXT, T x) { return metal::simd_sum(x); } \
    FT_DEVICE T ft_simd_max(FT_THREAD_CONTEXT, T x) { return metal::simd_max(x); } \
    FT_DEVICE T ft_simd_min(FT_THREAD_CONTEXT, T x) { return metal::simd_min(x); } \
    FT_DEVICE T ft_simd_prefix_sum(FT_THREAD_CONTEXT, T x) { return metal::simd_prefix_exclusive_sum(x); } \
    FT_DEVICE T ft_simd_prefix_sum_inclusive(FT_THREAD_CONTEXT, T x) { return metal::simd_prefix_inclusive_sum(x); }
FT_REDUCTIONS(uint)
FT_REDUCTIONS(int)
FT_REDUCTIONS(float)

// Atomics.
template <typename T> struct ft_atomic;
template <> struct ft_atomic<uint> { typedef metal::atomic_uint type; };
template <> struct ft_atomic<int> { typedef metal::atomic_int type; };
#define FT_ATOMIC(SPACE, name, call) \
    template <typename T> FT_DEVICE T ft_atomic_##name(SPACE T* x, size_t i, typename ft_same<T>::type v) { \
        return metal::call( \
            reinterpret_cast<SPACE typename ft_atomic<T>::type*>(x + i), v, metal::memory_order_relaxed); \
    }
// Addition of floats by compare and exchange: threadgroup memory has no other.
#define FT_ATOMICS(SPACE) \
    FT_ATOMIC(SPACE, add, atomic_fetch_add_explicit) \
    FT_ATOMIC(SPACE, max, atomic_fetch_max_explicit) \
    FT_ATOMIC(SPACE, min, atomic_fetch_min_explicit) \
    FT_ATOMIC(SPACE, and, atomic_fetch_and_explicit) \
    FT_ATOMIC(SPACE, or, atomic_fetch_or_explicit) \
    FT_ATOMIC(SPACE, xor, atomic_fetch_xor_explicit) \
    FT_ATOMIC(SPACE, exchange, atomic_exchange_explicit) \
    template <typename T> \
    FT_DEVICE T ft_atomic_compare_exchange( \
        SPACE T* x, size_t i, typename ft_same<T>::type expected, typename ft_same<T>::type value) { \
        const T wanted = expected; \
        SPACE typename ft_atomic<T>::type* at = reinterpret_cast<SPACE typename ft_atomic<T>::type*>(x + i); \
        while (!metal::atomic_compare_exchange_weak_explicit( \
            at, &expected, value, metal::memory_order_relaxed, metal::memory_order_relaxed)) { \
            if (expected != wanted) { return expected; } \
        } \
        return wanted; \
    } \
    FT_DEVICE float ft_atomic_add(SPACE float* x, size_t i, float v) { \
        SPACE metal::atomic_uint* at = reinterpret_cast<SPACE metal::atomic_uint*>(x + i); \
        uint old = metal::atomic_load_explicit(at, metal::memory_order_relaxed); \
        while (!metal::atomic_compare_exchange_weak_explicit( \
            at, &old, as_type<uint>(as_type<float>(old) + v), metal::memory_order_relaxed, \
            metal::memory_order_relaxed)) { \
        } \
        return as_type<float>(old); \
    }

// Matrices of a SIMD group.
template <typename T> struct ft_fragment { metal::simdgroup_matrix<T, 8, 8> matrix; };
template <typename T> FT_DEVICE T ft_fragment_element(ft_fragment<T> f, uint n) {
    return f.matrix.thread_elements()[n];
}
template <typename T>
FT_DEVICE void ft_fragment_set_element(thread ft_fragment<T>& f, uint n, typename ft_same<T>::type x) {
    f.matrix.thread_elements()[n] = x;
}
#define FT_FRAGMENTS(SPACE) \
    template <typename T> FT_DEVICE ft_fragment<T> ft_fragment_load( \
        FT_THREAD_CONTEXT, const SPACE T* x, uint offset, uint stride) { \
        ft_fragment<T> f; \
        metal::simdgroup_load(f.matrix, x + offset, stride); \
        return f; \
    } \
    template <typename T> FT_DEVICE ft_fragment<T> ft_fragment_load_transposed( \
        FT_THREAD_CONTEXT, const SPACE T* x, uint offset, uint stride) { \
        ft_fragment<T> f; \
        metal::simdgroup_load(f.matrix, x + offset, stride, metal::ulong2(0), true); \
        return f; \
    } \
    template <typename T> FT_DEVICE void ft_fragment_store( \
        FT_THREAD_CONTEXT, ft_fragment<T> f, SPACE T* x, uint offset, uint stride) { \
        metal::simdgroup_store(f.matrix, x + offset, stride); \
    }
template <typename T> FT_DEVICE ft_fragment<float> ft_fragment_multiply_accumulate(
    FT_THREAD_CONTEXT, ft_fragment<T> a, ft_fragment<T> b, ft_fragment<float> c) {
    ft_fragment<float> d;
    metal::simdgroup_multiply_accumulate(d.matrix, a.matrix, b.matrix, c.matrix);
    return d;
}
