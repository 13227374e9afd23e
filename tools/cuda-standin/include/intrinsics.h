// CUDA's own types and functions, for a thread of the stand-in.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using std::isinf;
using std::isnan;

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __CUDA_ARCH__ 900

struct Index3 {
    unsigned x, y, z;
};

// Where a box that TMA copies is in a tensor (`RaggedRows`).
struct TmaBox {
    int column, head, row, end;
};

extern "C" {
// The block that runs, and its shared memory.
extern unsigned char* standin_shared;
extern Index3 standin_block, standin_block_dim, standin_grid;
// Blocks of a cluster.
extern unsigned standin_cluster;
unsigned standin_thread();
void standin_yield();
// Hands a value to the other lanes of the warp; `all` has the value of each.
void standin_gather(unsigned long long value, unsigned long long* all);
void standin_barrier(int barrier, int threads, int waits);
int standin_barrier_any(int barrier, int threads, int x);
void standin_mbarrier_init(unsigned at, unsigned arrivals);
void standin_mbarrier_arrive(unsigned at, unsigned bytes);
int standin_mbarrier_ended(unsigned at, unsigned parity);
// Copies a box to this block, or to the same place of each of the first `blocks` of the cluster.
void standin_tma(unsigned to, unsigned barrier, TmaBox box, const unsigned long long* map, unsigned blocks);
void standin_tma_store(unsigned from, TmaBox box, const unsigned long long* map);
unsigned standin_cluster_rank();
void standin_cluster_barrier();
// Copies from shared or device memory to shared memory of a block, and from shared memory to device memory, which it is added to as f32.
void standin_copy_shared(unsigned to, unsigned from, unsigned bytes, unsigned barrier);
void standin_copy_in(unsigned to, const void* from, unsigned bytes, unsigned barrier);
void standin_copy_out(void* to, unsigned from, unsigned bytes, int add);
// Waits for this thread's copies to device memory.
void standin_wait_copies();
// Copies 16 bytes, of which those behind `bytes` are 0, when this thread waits for its group.
void standin_cp_async(unsigned to, const void* from, unsigned bytes);
void standin_cp_async_commit();
void standin_cp_async_wait(int pending);
}

#define threadIdx (Index3{standin_thread(), 0, 0})
#define blockIdx standin_block
#define blockDim standin_block_dim
#define gridDim standin_grid

struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <typename To, typename From>
inline To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }

template <typename T>
inline T __ldg(const T* at) { return *at; }
template <typename T>
inline T __ldcg(const T* at) { return *at; }
template <typename T>
inline void __stcg(T* at, T x) { *at = x; }

// Threads of a block run in turn, and blocks one after another.
inline unsigned atomicAdd(unsigned* at, unsigned x) {
    unsigned before = *at;
    *at += x;
    return before;
}
inline unsigned atomicOr(unsigned* at, unsigned x) {
    unsigned before = *at;
    *at |= x;
    return before;
}
inline unsigned atomicCAS(unsigned* at, unsigned expected, unsigned x) {
    unsigned before = *at;
    if (before == expected) *at = x;
    return before;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline void __nanosleep(unsigned) {}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }

template <typename T>
inline T __shfl_sync(unsigned, T x, int lane) {
    unsigned long long value = 0, all[32];
    memcpy(&value, &x, sizeof x);
    standin_gather(value, all);
    memcpy(&x, &all[lane & 31], sizeof x);
    return x;
}
template <typename T>
inline T __shfl_xor_sync(unsigned lanes, T x, int mask) { return __shfl_sync(lanes, x, (standin_thread() % 32) ^ mask); }
inline int __any_sync(unsigned, int x) {
    unsigned long long all[32], any = 0;
    standin_gather(x != 0, all);
    for (auto value : all) any |= value;
    return any != 0;
}
inline void __syncwarp() {
    unsigned long long all[32];
    standin_gather(0, all);
}
inline void __syncthreads() { standin_barrier(0, standin_block_dim.x, 1); }
inline int __syncthreads_or(int x) { return standin_barrier_any(0, standin_block_dim.x, x); }

inline unsigned long long __cvta_generic_to_shared(const void* p) { return (const unsigned char*)p - standin_shared; }
