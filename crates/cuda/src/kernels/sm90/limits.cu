// The limit of the matrix unit by products of warpgroups, both operands in shared memory. sources.rs prints copy.cuh and
// wgmma.cuh before this file.

// Columns of a product, its steps of 16, and warpgroups of a block: two keep the unit busy while one starts a group.
constexpr int PEAK_N = 256, PEAK_STEPS = 4, PEAK_WARPGROUPS = 2;
constexpr int PEAK_A_BYTES = PEAK_WARPGROUPS * WARPGROUP_ROWS * PANEL_ROW_BYTES, PEAK_B_BYTES = PEAK_N * PANEL_ROW_BYTES;

// `rounds` times PEAK_STEPS products of 64 x 16 by 16 x PEAK_N a warpgroup. The operands are not zero: units that multiply zeros take less
// power and run faster.
template <Dtype T>
DEVICE void wgmma_products(float* sink, u32 rounds) {
    __shared__ __align__(1024) u8 memory[PEAK_A_BYTES + PEAK_B_BYTES];
    u32 base = shared_address(memory), seed = blockIdx.x;
    for (u32 at = threadIdx.x * 4; at < sizeof(memory); at += blockDim.x * 4) {
        u32 x = (at + seed) * 0x9e3779b9u, y = x * 0x85ebca6bu;
        *(u32*)(memory + at) = pack<T>((float)(int)x * 1e-10f, (float)(int)y * 1e-10f);
    }
    fence_async_proxy();
    __syncthreads();
    u32 a = base + threadIdx.x / WARPGROUP_THREADS * (WARPGROUP_ROWS * PANEL_ROW_BYTES), b = base + PEAK_A_BYTES;
    float c[PEAK_N / 2];
#pragma unroll
    for (int i = 0; i < PEAK_N / 2; i++) c[i] = 0.f;
    pin_registers(c);
    for (u32 round = 0; round < rounds; round++) {
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < PEAK_STEPS; step++) {
            u32 offset = k_major_step<PEAK_N>(step);
            Wgmma<T, PEAK_N>::shared(c, k_major_descriptor(a + offset), k_major_descriptor(b + offset), true);
        }
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    pin_registers(c);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PEAK_N / 2; i++) sum += c[i];
    if (sum == 1234.5f) *sink = sum;
}

extern "C" __global__ void __launch_bounds__(PEAK_WARPGROUPS * WARPGROUP_THREADS, 1) wgmma_f16(const __grid_constant__ ProductParams p) {
    wgmma_products<F16>((float*)p.sink, p.rounds);
}

extern "C" __global__ void __launch_bounds__(PEAK_WARPGROUPS * WARPGROUP_THREADS, 1) wgmma_bf16(const __grid_constant__ ProductParams p) {
    wgmma_products<BF16>((float*)p.sink, p.rounds);
}
