// The warpgroup that computes d_q of every second tile, over the keys of both blocks.

// d_score of a half of a tile times the keys of the cluster: rows, or columns, from 64 `half` on.
DEVICE void d_q_product(float (&d_q)[32], BackwardMemory& memory, int half) {
    const u32 d_scores = operand_address(shared_address(memory.d_scores)) + (COLUMNS == 64 ? half * BLOCK_N * PANEL_ROW_BYTES : 0);
    const u32 columns = COLUMNS == 128 ? half * BLOCK_N * PANEL_ROW_BYTES : 0;
    pin_registers(d_q);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < CLUSTER_N / 16; i++) {
        const u32 step = mn_major_step(i % (BLOCK_N / 16)), keys = operand_address(shared_address(i < BLOCK_N / 16 ? memory.k : memory.peer_k));
        const u64 a = mn_major_descriptor<BLOCK_N>(d_scores + i / (BLOCK_N / 16) * D_SCORE_BYTES + step);
        Wgmma<DTYPE, 64>::shared_both_mn_major(d_q, a, mn_major_descriptor<BLOCK_N>(keys + columns + step), i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(d_q);
}

// Adds the sum of the other units, scales, and writes a half of a tile.
DEVICE void store_d_q(const BackwardParams& p, const Work& work, const Step& at, const float (&d_q)[32], u32 sum, bool has_sum, int half) {
    const u32 thread = threadIdx.x % WARPGROUP_THREADS, warp = thread / 32, lane = thread % 32;
    const u32 row = at.tile * BLOCK_M + (COLUMNS == 64 ? half * 64 : 0) + 16 * warp + lane / 4;
    const u32 column = (COLUMNS == 128 ? half * 64 : 0) + 2 * (lane % 4);
    const BackwardSequence& s = work.sequence;
    u8* to = (u8*)p.d_q.at + s.batch * p.d_q.batch + at.query_head(p, work) * p.d_q.head + (s.q_start + row) * p.d_q.row + 2 * column;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint4 words = make_uint4(0, 0, 0, 0);
        if (has_sum) words = ld_shared16(sum + i * WARPGROUP_THREADS * 16 + thread * 16);
        const float x[4] = {__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z), __uint_as_float(words.w)};
        if (column + 8 * i >= p.head_dim) continue;
        for (int h = 0; h < 2; h++) {
            if (row + 8 * h >= s.q_len) continue;
            *(u32*)(to + 16 * i + 8 * h * p.d_q.row) =
                pack<DTYPE>((d_q[4 * i + 2 * h] + x[2 * h]) * p.scale, (d_q[4 * i + 2 * h + 1] + x[2 * h + 1]) * p.scale);
        }
    }
}

DEVICE void compute_d_q(const BackwardParams& p, const Work& work, BackwardMemory& memory, u32 rank) {
    const u32 thread = threadIdx.x % WARPGROUP_THREADS, lane = thread % 32;
    const u32 staged = shared_address(memory.d_q), d_scores_full = shared_address(&memory.d_scores_full);
    u32 parity = 0, empty_parity = 1, sum_parity = 0;
    if (thread == 0) mbarrier_arrive_expect(d_scores_full, D_SCORE_BYTES);
    mbarrier_wait(shared_address(&memory.kv_full), 0);
    Step at(work);
    for (u32 n = 0; n < work.steps; n++, at.advance(p, work)) {
        if (n % CLUSTER != rank) continue;
        const Turn turn(p, work, at);
        mbarrier_wait(d_scores_full, parity);
        parity ^= 1;
        if (thread == 0) mbarrier_arrive_expect(d_scores_full, D_SCORE_BYTES);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float d_q[32];
            d_q_product(d_q, memory, half);
            if (half == 1 && lane == 0) mbarrier_arrive(shared_address(&memory.d_scores_empty));
            if (half == 1 && lane == 1) mbarrier_arrive_in(shared_address(&memory.peer_empty), rank ^ 1);
            if (turn.is_last()) {
                const bool has_sum = turn.place > 0;
                if (has_sum) mbarrier_wait(shared_address(&memory.d_q_sum), sum_parity), sum_parity ^= 1, empty_parity ^= 1;
                store_d_q(p, work, at, d_q, staged, has_sum, half);
                if (!has_sum) continue;
            } else {
                mbarrier_wait(shared_address(&memory.d_q_empty), empty_parity);
                empty_parity ^= 1;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const uint4 words = make_uint4(__float_as_uint(d_q[4 * i]), __float_as_uint(d_q[4 * i + 1]),
                                                   __float_as_uint(d_q[4 * i + 2]), __float_as_uint(d_q[4 * i + 3]));
                    st_shared16(staged + i * WARPGROUP_THREADS * 16 + thread * 16, words);
                }
            }
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(shared_address(&memory.d_q_full));
        }
    }
}
