// Types, constants and conversions of all kernels. NVRTC is given no headers: these files declare all names
// that kernels use.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define DEVICE __device__ __forceinline__

// Element types, with the numbers that the host has for them (`dtype_id`).
enum Dtype : u32 { F32 = 0, F16 = 1, BF16 = 2 };

#define INF __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

constexpr float MAX_F32 = 3.40282346638528859812e+38f;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

constexpr u32 ALL_LANES = 0xffffffffu;

// One of two types.
template <bool CONDITION, typename Then, typename Else>
struct Select {
    typedef Then Type;
};

template <typename Then, typename Else>
struct Select<false, Then, Else> {
    typedef Else Type;
};

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#if __CUDA_ARCH__ < 800
// f32 to the nearest bf16, as the instruction of later devices rounds.
DEVICE u32 to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

DEVICE u32 to_f16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// Two f32, rounded to nearest, in the halves of a word.
template <Dtype T>
DEVICE u32 pack(float low, float high) {
    return T == F16 ? to_f16(low) | to_f16(high) << 16 : to_bf16(low) | to_bf16(high) << 16;
}
#else
// Two f32, rounded to nearest, in the halves of a word.
template <Dtype T>
DEVICE u32 pack(float low, float high) {
    u32 y;
    if (T == F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
#endif

DEVICE float f16_to_f32(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

DEVICE float bf16_to_f32(u16 x) { return __int_as_float((u32)x << 16); }

// Element `half` of a word: of f32 the word itself.
template <Dtype T>
DEVICE float unpack(u32 word, int half) {
    if (T == F32) return __int_as_float(word);
    u16 x = (u16)(half ? word >> 16 : word);
    return T == F16 ? f16_to_f32(x) : bf16_to_f32(x);
}

// Effect of a materialised mask on a tile. SKIP: no query position sees any key. FULL: every position sees every key, and nothing is
// added to a score. PARTIAL: anything else.
enum MaskTile : u32 { SKIP = 0, PARTIAL = 1, FULL = 2 };

// The value of a mask at an element of a row, as a bias in units of e; `kind` is a Dtype, or 3 for bool.
DEVICE float mask_value(u32 kind, u64 row, u64 element) {
    switch (kind) {
        case F32: return *(const float*)(row + 4 * element);
        case F16: return f16_to_f32(*(const u16*)(row + 2 * element));
        case BF16: return bf16_to_f32(*(const u16*)(row + 2 * element));
        default: return *(const u8*)(row + element) ? 0.f : -INF;
    }
}

// Bits of an exponent of all ones, which infinities and NaN have.
template <Dtype T>
constexpr u32 EXPONENT_BITS = T == F32 ? 0x7f800000u : T == F16 ? 0x7c00u : 0x7f80u;

// Returns true if an element of a word is infinite or NaN.
template <Dtype T>
DEVICE bool has_nonfinite(u32 x) {
    constexpr u32 ONES = EXPONENT_BITS<T>;
    if (T == F32) return (x & ONES) == ONES;
    return (x & ONES) == ONES || (x >> 16 & ONES) == ONES;
}

// sum + 0 x of two 16-bit elements: NaN once an x was infinite or NaN. For compute capability 8.0.
template <Dtype T>
DEVICE u32 add_zero_times(u32 sum, u32 x) {
    if (T == F16) asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x), "r"(0));
    else asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(x), "r"(0));
    return sum;
}

// A word whose infinities and NaN are replaced by 0.
template <Dtype T>
DEVICE u32 zero_nonfinite(u32 x) {
    constexpr u32 ONES = EXPONENT_BITS<T>;
    if (T == F32) return has_nonfinite<T>(x) ? 0 : x;
    if ((x & ONES) == ONES) x &= 0xffff0000u;
    if ((x >> 16 & ONES) == ONES) x &= 0xffffu;
    return x;
}

// A value that is the same in all lanes. The compiler keeps it, and values computed from it, in registers of
// the warp.
DEVICE u32 uniform(u32 x) { return __shfl_sync(ALL_LANES, x, 0); }

// The sum of a value of each lane, in all lanes, in one order.
DEVICE float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// Hides the value of `x` from the compiler: code that rarely runs computes its addresses from the result when
// it runs, and keeps no address in registers before.
DEVICE u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

template <typename T>
DEVICE const T* opaque(const T* x) {
    asm volatile("" : "+l"(x));
    return x;
}
