// flashtile's kernel language on CUDA, for NVRTC, without headers.
typedef unsigned char uchar;
typedef signed char ft_i8;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef size_t ulong;
#ifdef _WIN64
typedef long long ft_i64;
#else
typedef long ft_i64;
#endif
// Stored floats: bits, converted by instructions.
struct ft_f16 { ushort bits; };
struct ft_bf16 { ushort bits; };
// A parameter that takes its type from the others.
template <typename T> struct ft_same { typedef T type; };

#define FT_DEVICE __device__ __forceinline__
#define FT_THREAD
#define FT_CONSTANT __constant__ const
#define FT_CONSTEXPR constexpr
#define FT_BUFFER(T) const T*
#define FT_BUFFER_MUT(T) T*
#define FT_SHARED(T) const T*
#define FT_SHARED_MUT(T) T*
#ifdef FT_DYNAMIC
// More shared memory than a device gives unasked: the launch brings it, one array after another.
extern __shared__ __align__(16) uchar ft_dynamic[];
#define FT_SHARED_ARRAY(T, name, n) \
    T* const name = reinterpret_cast<T*>(ft_dynamic + ft_taken); \
    ft_taken += ((n) * sizeof(T) + 15) / 16 * 16
#else
#define FT_SHARED_ARRAY(T, name, n) __shared__ __align__(16) T name[n]
#endif
#define FT_PARAMS(P) const P&
#define FT_REF(...) __VA_ARGS__&
// The compiler has no __builtin_offsetof.
#define FT_OFFSET(S, field) size_t(__INTADDR__(&((S*)0)->field))
#define FT_UNROLL _Pragma("unroll")
#define FT_F16(bits, value) ft_f16{bits}
#define FT_BF16(bits, value) ft_bf16{bits}
#define ft_infinity (__builtin_bit_cast(float, 0x7f800000u))
#define ft_nan (__builtin_bit_cast(float, 0x7fc00000u))

// Where a thread is: in registers of the device.
struct ft_context {};
#define FT_THREAD_CONTEXT const ft_context& ft
#ifdef FT_DYNAMIC
#define FT_CONTEXT {}; size_t ft_taken = 0
#else
#define FT_CONTEXT {}
#endif
FT_DEVICE uint ft_thread_index(FT_THREAD_CONTEXT) { return threadIdx.x; }
FT_DEVICE uint ft_threads(FT_THREAD_CONTEXT) { return blockDim.x; }
FT_DEVICE uint ft_simd_lane(FT_THREAD_CONTEXT) { return threadIdx.x % 32; }
FT_DEVICE uint ft_simd_index(FT_THREAD_CONTEXT) { return threadIdx.x / 32; }
FT_DEVICE uint ft_simd_groups(FT_THREAD_CONTEXT) { return blockDim.x / 32; }
FT_DEVICE uint ft_group_x(FT_THREAD_CONTEXT) { return blockIdx.x; }
FT_DEVICE uint ft_group_y(FT_THREAD_CONTEXT) { return blockIdx.y; }
FT_DEVICE uint ft_group_z(FT_THREAD_CONTEXT) { return blockIdx.z; }
FT_DEVICE uint ft_groups_x(FT_THREAD_CONTEXT) { return gridDim.x; }
FT_DEVICE uint ft_groups_y(FT_THREAD_CONTEXT) { return gridDim.y; }
FT_DEVICE uint ft_groups_z(FT_THREAD_CONTEXT) { return gridDim.z; }

FT_DEVICE void ft_barrier(FT_THREAD_CONTEXT) { __syncthreads(); }
FT_DEVICE void ft_simd_barrier(FT_THREAD_CONTEXT) { __syncwarp(); }

// Bits.
FT_DEVICE uint ft_to_bits(float x) { return __float_as_uint(x); }
FT_DEVICE ushort ft_to_bits(ft_f16 x) { return x.bits; }
FT_DEVICE ushort ft_to_bits(ft_bf16 x) { return x.bits; }
template <typename T> struct ft_float;
template <> struct ft_float<float> {
    static FT_DEVICE float from_bits(uint x) { return __uint_as_float(x); }
    static FT_DEVICE float from_f32(float x) { return x; }
};
template <> struct ft_float<ft_f16> {
    static FT_DEVICE ft_f16 from_bits(ushort x) { return {x}; }
    static FT_DEVICE ft_f16 from_f32(float x) {
        ft_f16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};
template <> struct ft_float<ft_bf16> {
    static FT_DEVICE ft_bf16 from_bits(ushort x) { return {x}; }
    static FT_DEVICE ft_bf16 from_f32(float x) {
        ft_bf16 y;
#if __CUDA_ARCH__ >= 800
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
        const uint bits = __float_as_uint(x);
        const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        y.bits = ushort((nan ? bits | 0x00400000u : bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
        return y;
    }
};
FT_DEVICE float ft_to_f32(float x) { return x; }
FT_DEVICE float ft_to_f32(ft_f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
FT_DEVICE float ft_to_f32(ft_bf16 x) { return __uint_as_float(uint(x.bits) << 16); }

// Floats.
#ifdef FT_EXACT
FT_DEVICE float ft_exp2(float x) { return exp2f(x); }
#else
FT_DEVICE float ft_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif
FT_DEVICE float ft_exp(float x) { return expf(x); }
FT_DEVICE float ft_log2(float x) { return log2f(x); }
FT_DEVICE float ft_ln(float x) { return logf(x); }
FT_DEVICE float ft_sqrt(float x) { return sqrtf(x); }
FT_DEVICE float ft_rsqrt(float x) { return rsqrtf(x); }
FT_DEVICE float ft_tanh(float x) { return tanhf(x); }
FT_DEVICE float ft_sin(float x) { return sinf(x); }
FT_DEVICE float ft_cos(float x) { return cosf(x); }
FT_DEVICE float ft_powf_of(float x, float y) { return powf(x, y); }
FT_DEVICE float ft_floor(float x) { return floorf(x); }
FT_DEVICE float ft_ceil(float x) { return ceilf(x); }
FT_DEVICE float ft_trunc(float x) { return truncf(x); }
FT_DEVICE float ft_round_ties_even(float x) { return rintf(x); }
FT_DEVICE float ft_fma(float a, float b, float c) { return fmaf(a, b, c); }
FT_DEVICE float ft_fmin(float a, float b) { return fminf(a, b); }
FT_DEVICE float ft_fmax(float a, float b) { return fmaxf(a, b); }
FT_DEVICE float ft_fmod(float a, float b) { return fmodf(a, b); }

// Words.
FT_DEVICE uint ft_popcount(uint x) { return uint(__popc(x)); }
FT_DEVICE uint ft_clz(uint x) { return uint(__clz(int(x))); }
FT_DEVICE uint ft_reverse(uint x) { return __brev(x); }
FT_DEVICE int ft_dot4(uint a, uint b, int c) {
    int d;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
FT_DEVICE int ft_dot4_unsigned(uint a, uint b, int c) {
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
FT_DEVICE uint ft_byte_permute(uint a, uint b, uint selector) {
    uint d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}
FT_DEVICE float ft_low_f16(uint word) { return ft_to_f32(ft_f16{ushort(word)}); }
FT_DEVICE float ft_high_f16(uint word) { return ft_to_f32(ft_f16{ushort(word >> 16)}); }
FT_DEVICE uint ft_f16x2_mul_add(uint a, uint b, uint c) {
    uint d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
FT_DEVICE uint ft_f16x2_from(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
#else
    return uint(ft_float<ft_f16>::from_f32(low).bits) | (uint(ft_float<ft_f16>::from_f32(high).bits) << 16);
#endif
}
FT_DEVICE uint ft_f16x2_from_e4m3(uint codes) {
#if __CUDA_ARCH__ >= 890
    uint numbers;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(numbers) : "h"(ushort(codes)));
    return numbers;
#else
    // Each code in the high byte of a half. The exponent has four bits, that of f16 five: 2^8 makes up for the difference of their biases.
    const uint halves = ((codes & 0xffu) << 8) | ((codes & 0xff00u) << 16);
    const uint numbers = ft_f16x2_mul_add((halves & 0x80008000u) | ((halves & 0x7f007f00u) >> 1), 0x5c005c00u, 0u);
    const uint nan = (((halves & 0x7f007f00u) + 0x01000100u) & 0x80008000u) >> 15;
    return numbers | nan * 0x7fffu;
#endif
}

// Lanes.
template <typename T> FT_DEVICE T ft_lane_xor(T x, uint mask) { return __shfl_xor_sync(0xffffffffu, x, int(mask)); }
template <typename T> FT_DEVICE T ft_lane_of(T x, uint lane) { return __shfl_sync(0xffffffffu, x, int(lane)); }
FT_DEVICE uint ft_simd_ballot(FT_THREAD_CONTEXT, bool x) { return __ballot_sync(0xffffffffu, x); }
FT_DEVICE bool ft_simd_any(FT_THREAD_CONTEXT, bool x) { return __any_sync(0xffffffffu, x) != 0; }
FT_DEVICE bool ft_simd_all(FT_THREAD_CONTEXT, bool x) { return __all_sync(0xffffffffu, x) != 0; }

// Atomics.
template <typename T> FT_DEVICE T ft_atomic_add(T* x, size_t i, typename ft_same<T>::type v) {
    return atomicAdd(x + i, v);
}
template <typename T> FT_DEVICE T ft_atomic_max(T* x, size_t i, typename ft_same<T>::type v) {
    return atomicMax(x + i, v);
}
template <typename T> FT_DEVICE T ft_atomic_min(T* x, size_t i, typename ft_same<T>::type v) {
    return atomicMin(x + i, v);
}
template <typename T> FT_DEVICE T ft_atomic_and(T* x, size_t i, typename ft_same<T>::type v) {
    return atomicAnd(x + i, v);
}
template <typename T> FT_DEVICE T ft_atomic_or(T* x, size_t i, typename ft_same<T>::type v) {
    return atomicOr(x + i, v);
}
template <typename T> FT_DEVICE T ft_atomic_xor(T* x, size_t i, typename ft_same<T>::type v) {
    return atomicXor(x + i, v);
}
template <typename T> FT_DEVICE T ft_atomic_exchange(T* x, size_t i, typename ft_same<T>::type v) {
    return atomicExch(x + i, v);
}
template <typename T> FT_DEVICE T ft_atomic_compare_exchange(
    T* x, size_t i, typename ft_same<T>::type expected, typename ft_same<T>::type v) {
    return atomicCAS(x + i, expected, v);
}

// Matrices of a SIMD group: two elements a lane, in Apple's layout.
template <typename T> struct ft_fragment { T elements[2]; };
FT_DEVICE uint ft_fragment_row() { return ((threadIdx.x >> 2) & 4) | ((threadIdx.x >> 1) & 3); }
FT_DEVICE uint ft_fragment_col() { return ((threadIdx.x >> 1) & 4) | ((threadIdx.x << 1) & 2); }
FT_DEVICE uint ft_fragment_lane(uint row, uint col) {
    return ((row & 4) << 2) | ((col & 4) << 1) | ((row & 3) << 1) | ((col & 2) >> 1);
}
template <typename T> FT_DEVICE T ft_fragment_element(const ft_fragment<T>& f, uint n) {
    return n == 0 ? f.elements[0] : f.elements[1];
}
template <typename T>
FT_DEVICE void ft_fragment_set_element(ft_fragment<T>& f, uint n, typename ft_same<T>::type x) {
    if (n == 0) { f.elements[0] = x; } else { f.elements[1] = x; }
}
#define FT_FRAGMENTS(SPACE) \
    template <typename T> FT_DEVICE ft_fragment<T> ft_fragment_load( \
        FT_THREAD_CONTEXT, const T* x, uint offset, uint stride) { \
        const T* from = x + offset + size_t(ft_fragment_row()) * stride + ft_fragment_col(); \
        return {{from[0], from[1]}}; \
    } \
    template <typename T> FT_DEVICE ft_fragment<T> ft_fragment_load_transposed( \
        FT_THREAD_CONTEXT, const T* x, uint offset, uint stride) { \
        const T* from = x + offset + size_t(ft_fragment_col()) * stride + ft_fragment_row(); \
        return {{from[0], from[stride]}}; \
    } \
    template <typename T> FT_DEVICE void ft_fragment_store( \
        FT_THREAD_CONTEXT, const ft_fragment<T>& f, T* x, uint offset, uint stride) { \
        T* to = x + offset + size_t(ft_fragment_row()) * stride + ft_fragment_col(); \
        to[0] = f.elements[0]; \
        to[1] = f.elements[1]; \
    }
template <typename T> FT_DEVICE ft_fragment<float> ft_fragment_multiply_accumulate(
    FT_THREAD_CONTEXT, const ft_fragment<T>& a, const ft_fragment<T>& b, ft_fragment<float> c) {
    const float left[2] = {ft_to_f32(a.elements[0]), ft_to_f32(a.elements[1])};
    const float right[2] = {ft_to_f32(b.elements[0]), ft_to_f32(b.elements[1])};
    const uint row = ft_fragment_row(), col = ft_fragment_col();
    FT_UNROLL
    for (uint k = 0; k < 8; k++) {
        const float x = ft_lane_of(left[k & 1], ft_fragment_lane(row, k));
        const uint lane = ft_fragment_lane(k, col);
        c.elements[0] = fmaf(x, ft_lane_of(right[0], lane), c.elements[0]);
        c.elements[1] = fmaf(x, ft_lane_of(right[1], lane), c.elements[1]);
    }
    return c;
}
