// Types and instructions that the kernels share. There are no headers: what is used of the instruction set is declared here.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define F32 0
#define F16 1
#define BF16 2

#define DEVICE __device__ __forceinline__

#define INF __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

// ---- asynchronous copies to shared memory

// Copies `bytes` (0 to 16) bytes and fills the rest of the 16 with zeros.
DEVICE void copy16(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of the committed groups are on their way.
template <int N>
DEVICE void await() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Waits for all copies of this thread.
DEVICE void await_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Orders what this thread, and those that it has waited for, wrote and read before with what follows, for the whole device.
DEVICE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// ---- barriers of some of the threads of a block

template <int N>
DEVICE void named_sync(int barrier) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(N) : "memory"); }

template <int N>
DEVICE void named_arrive(int barrier) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(N) : "memory"); }

// Waits as well, and says whether `x` holds for any of the threads.
template <int N>
DEVICE bool named_any(int barrier, bool x) {
    u32 any;
    asm volatile("{ .reg .pred a, b; setp.ne.u32 a, %3, 0; bar.red.or.pred b, %1, %2, a; selp.u32 %0, 1, 0, b; }"
                 : "=r"(any) : "r"(barrier), "n"(N), "r"((u32)x) : "memory");
    return any;
}

// Asks for the line of an address in the second-level cache.
DEVICE void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// ---- shared memory

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void store16(u32 to, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

DEVICE uint4 load16(u32 from) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
    return x;
}

DEVICE void store4(u32 to, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }

DEVICE u32 load4(u32 from) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

// Four 8x8 matrices of 16-bit elements; lane l names a row of matrix l / 8.
DEVICE void matrices(u32 (&x)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
}

// The same, each transposed.
DEVICE void transposed(u32 (&x)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
}

// ---- arithmetic

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// f32 to the nearest tf32.
DEVICE u32 to_tf32(float x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

#if __CUDA_ARCH__ < 800
// f32 to the nearest bf16, as the instruction of later devices does it.
DEVICE u32 to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

DEVICE u32 to_f16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

template <int T>
DEVICE u32 pack(float low, float high) {
    return T == F16 ? to_f16(low) | to_f16(high) << 16 : to_bf16(low) | to_bf16(high) << 16;
}
#else
template <int T>
DEVICE u32 pack(float low, float high) {
    u32 y;
    if (T == F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
#endif

// An element in memory as f32.
DEVICE float f16_to_f32(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

DEVICE float bf16_to_f32(u16 x) { return __int_as_float((u32)x << 16); }

// c += a b: a is 16 rows of 16, b 16 rows of 8 columns.
template <int T>
DEVICE void mma16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (T == F16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void mma8(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An f32 as the sum of two tf32, 22 bits of it, and the higher one again where it is finite: of what is not, the lower is 0.
struct Halves {
    u32 high, low, finite;
};

DEVICE Halves halves(u32 x) {
    bool special = (x & 0x7f800000u) == 0x7f800000u;
    u32 high = to_tf32(__int_as_float(x));
    u32 low = to_tf32(__int_as_float(x) - __int_as_float(high));
    return {high, special ? 0 : low, special ? 0 : high};
}

// c += a b of f32 by three products of tf32. The matrix unit truncates where it adds, so that every product starts from 0 and
// joins c by an addition that rounds to nearest. An infinite factor is multiplied with the higher half of the other alone, which has
// its sign.
DEVICE void mma_f32(float (&c)[4], const u32 (&a_high)[4], const u32 (&a_low)[4], const u32 (&a_finite)[4], u32 b0, u32 b1) {
    Halves x0 = halves(b0), x1 = halves(b1);
    float x[4] = {0.f, 0.f, 0.f, 0.f};
    mma8(x, a_low, x0.finite, x1.finite);
    mma8(x, a_finite, x0.low, x1.low);
    mma8(x, a_high, x0.high, x1.high);
#pragma unroll
    for (int i = 0; i < 4; i++) c[i] += x[i];
}

// ---- integers

// A number of which the compiler knows nothing: what rarely runs computes its addresses from it when it does, instead of keeping
// them in registers.
DEVICE u32 afresh(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
