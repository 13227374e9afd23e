// The limits of a device, measured: reads of memory, and products of the matrix unit from registers.

// Reads `count` chunks of 16 bytes, and combines them so that the compiler keeps the reads.
extern "C" __global__ void __launch_bounds__(512) read(const __grid_constant__ ReadParams p) {
    const uint4* from = (const uint4*)p.from;
    u64 count = p.count;
    u32* sink = (u32*)p.sink;
    u64 step = (u64)gridDim.x * blockDim.x;
    u32 sum = 0;
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; at + 7 * step < count; at += 8 * step) {
        uint4 x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = __ldcs(from + at + i * step);
#pragma unroll
        for (int i = 0; i < 8; i++) sum ^= x[i].x ^ x[i].y ^ x[i].z ^ x[i].w;
    }
    if (sum == 0x12345678u) *sink = sum;
}

#if __CUDA_ARCH__ < 800
// A lane's share of a product, N multiply-adds for each of its four sums, where the matrix unit has no such product.
template <int N>
DEVICE void multiply_adds(float (&c)[4], u32 a, u32 b) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) c[i % 4] = __fmaf_rn(__uint_as_float(a), __uint_as_float(b), c[i % 4]);
}
#endif

// A product of 16x16 by 16x8.
template <Dtype T>
DEVICE void product(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    mma_m16n8k16<T>(c, a, b[0], b[1]);
#else
    if (T == F16) {
        for (int i = 0; i < 2; i++)
            asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                         : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(b[i]));
    } else multiply_adds<16>(c, a[0], b[0]);
#endif
}

// `rounds` times 64 products of 16x16 by 16x8, into 8 independent sums a warp. The operands are not zero: units that multiply zeros
// take less power and run faster.
template <Dtype T>
DEVICE void products(float* sink, u32 rounds) {
    float c[8][4] = {};
    u32 a[4], b[2];
    u32 seed = threadIdx.x * 0x9e3779b9u + blockIdx.x;
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = pack<T>((float)(int)(seed * (i + 1)) * 1e-10f, (float)(int)(seed * (i + 7)) * 1e-10f);
#pragma unroll
    for (int i = 0; i < 2; i++) b[i] = pack<T>((float)(int)(seed * (i + 3)) * 1e-10f, (float)(int)(seed * (i + 5)) * 1e-10f);
    for (u32 round = 0; round < rounds; round++) {
#pragma unroll
        for (int n = 0; n < 64; n++) product<T>(c[n % 8], a, b);
    }
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < 8; n++) sum += c[n][0] + c[n][1] + c[n][2] + c[n][3];
    if (sum == 1234.5f) *sink = sum;
}

extern "C" __global__ void __launch_bounds__(256) products_f16(const __grid_constant__ ProductParams p) { products<F16>((float*)p.sink, p.rounds); }

extern "C" __global__ void __launch_bounds__(256) products_bf16(const __grid_constant__ ProductParams p) { products<BF16>((float*)p.sink, p.rounds); }

// `products` for f32: three products of tf32 for each, as the kernels compute them.
extern "C" __global__ void __launch_bounds__(256) products_f32(const __grid_constant__ ProductParams p) {
    float c[8][4] = {};
    u32 seed = threadIdx.x * 0x9e3779b9u + blockIdx.x;
#if __CUDA_ARCH__ >= 800
    u32 high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        SplitTf32 split = split_tf32(__float_as_uint((float)(int)(seed * (i + 1)) * 1e-10f));
        high[i] = split.high, low[i] = split.low;
    }
    SplitTf32 b0 = split_tf32(__float_as_uint((float)(int)(seed * 3) * 1e-10f)), b1 = split_tf32(__float_as_uint((float)(int)(seed * 5) * 1e-10f));
    for (u32 round = 0; round < p.rounds; round++) {
#pragma unroll
        for (int n = 0; n < 64; n++) {
            // Into one sum, so that no two products are the same expression.
            mma_m16n8k8_tf32(c[n % 8], low, b0.high, b1.high);
            mma_m16n8k8_tf32(c[n % 8], high, b0.low, b1.low);
            mma_m16n8k8_tf32(c[n % 8], high, b0.high, b1.high);
        }
    }
#else
    u32 a = __float_as_uint((float)(int)seed * 1e-10f), b = __float_as_uint((float)(int)(seed * 3) * 1e-10f);
    for (u32 round = 0; round < p.rounds; round++) {
#pragma unroll
        for (int n = 0; n < 64; n++) multiply_adds<8>(c[n % 8], a, b);
    }
#endif
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < 8; n++) sum += c[n][0] + c[n][1] + c[n][2] + c[n][3];
    if (sum == 1234.5f) *(float*)p.sink = sum;
}
