// A test of the building blocks of kernels for compute capability 9.0: out = sum over tiles of keys of (q k^T / 8, rounded) v, for one head of one
// sequence. One warp of a warpgroup copies tiles by TMA through a ring; the other warpgroup multiplies them.

constexpr int Q_BYTES = WARPGROUP_ROWS * HEAD_DIM * 2, KV_BYTES = BLOCK_N * HEAD_DIM * 2, PANELS = HEAD_DIM / PANEL_COLUMNS;

// `MultiplyParams` of the host.
struct MultiplyParams {
    TensorMap q, k, v;
    u64 out;
    u32 q_start, q_len, kv_start, kv_len;
};
static_assert(sizeof(MultiplyParams) == 448);

extern "C" __global__ void __launch_bounds__(2 * WARPGROUP_THREADS, 1)
multiply(const __grid_constant__ MultiplyParams p) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ __align__(8) u64 barriers[1 + 4 * STAGES];
    const u32 q = shared_address(memory), k = q + Q_BYTES, v = k + STAGES * KV_BYTES;
    const u32 q_full = shared_address(barriers), k_full = q_full + 8, v_full = k_full + 8 * STAGES, k_empty = v_full + 8 * STAGES, v_empty = k_empty + 8 * STAGES;
    const TensorMap *q_map = &p.q, *k_map = &p.k, *v_map = &p.v;
    if (threadIdx.x == 0) {
        prefetch_map(q_map), prefetch_map(k_map), prefetch_map(v_map);
        mbarrier_init(q_full, 1);
        for (int n = 0; n < STAGES; n++) {
            mbarrier_init(k_full + 8 * n, 1), mbarrier_init(v_full + 8 * n, 1);
            mbarrier_init(k_empty + 8 * n, 4), mbarrier_init(v_empty + 8 * n, 4);
        }
        mbarrier_publish();
    }
    // Shared memory starts as NaN, so that a copy that wrote too little would show.
    for (u32 at = threadIdx.x * 4; at < Q_BYTES + 2 * STAGES * KV_BYTES; at += blockDim.x * 4) *(u32*)(memory + at) = 0xffffffffu;
    fence_async_proxy();
    __syncthreads();
    const RaggedRows q_rows(p.q_start, p.q_len), kv_rows(p.kv_start, p.kv_len);
    const u32 head = blockIdx.x, tiles = (p.kv_len + BLOCK_N - 1) / BLOCK_N;
    RingStage<STAGES> at;
    if (threadIdx.x >= WARPGROUP_THREADS) {
        release_registers<24>();
        if (threadIdx.x != WARPGROUP_THREADS) return;
        mbarrier_arrive_expect(q_full, Q_BYTES);
        for (int panel = 0; panel < PANELS; panel++)
            q_rows.load(q + panel * (WARPGROUP_ROWS * PANEL_ROW_BYTES), q_map, q_full, panel * PANEL_COLUMNS, head, 0);
        auto load = [&](u32 to, const TensorMap* map, u32 full, u32 row) {
            mbarrier_arrive_expect(full + 8 * at.stage(), KV_BYTES);
            for (int panel = 0; panel < PANELS; panel++)
                kv_rows.load(to + at.stage() * KV_BYTES + panel * (BLOCK_N * PANEL_ROW_BYTES), map, full + 8 * at.stage(), panel * PANEL_COLUMNS, head, row);
        };
        for (u32 tile = 0; tile < tiles; tile++, at.advance()) {
            at.wait_empty(k_empty);
            load(k, k_map, k_full, tile * BLOCK_N);
            at.wait_empty(v_empty);
            load(v, v_map, v_full, tile * BLOCK_N);
        }
        return;
    }
    take_registers<240>();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float out[HEAD_DIM / 2], scores[BLOCK_N / 2];
    u32 probs[BLOCK_N / 4];
    mbarrier_wait(q_full, 0);
    for (u32 tile = 0; tile < tiles; tile++, at.advance()) {
        at.wait_full(k_full);
        pin_registers(scores);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++)
            Wgmma<DTYPE, BLOCK_N>::shared(scores, k_major_descriptor(q + k_major_step<WARPGROUP_ROWS>(step)),
                                          k_major_descriptor(k + at.stage() * KV_BYTES + k_major_step<BLOCK_N>(step)), step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        pin_registers(scores);
        if (lane == 0) mbarrier_arrive(k_empty + 8 * at.stage());
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; i++) probs[i] = pack<DTYPE>(scores[2 * i] * .125f, scores[2 * i + 1] * .125f);
        at.wait_full(v_full);
        pin_registers(out), pin_registers(probs);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; step++)
            Wgmma<DTYPE, HEAD_DIM>::registers(out, probs[4 * step], probs[4 * step + 1], probs[4 * step + 2], probs[4 * step + 3],
                                              mn_major_descriptor<BLOCK_N>(v + at.stage() * KV_BYTES + mn_major_step(step)), tile > 0 || step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        pin_registers(out);
        if (lane == 0) mbarrier_arrive(v_empty + 8 * at.stage());
    }
    float* to = (float*)p.out + (u64)head * WARPGROUP_ROWS * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) {
        u32 row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        to[row * HEAD_DIM + column] = out[i];
    }
}
