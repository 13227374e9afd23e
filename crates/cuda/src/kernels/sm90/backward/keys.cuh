// The warpgroups that have keys: of 64 each, d_k and d_v in registers.
//
// A step computes, with nothing in flight over the end of the loop:
//
//   dP = V dO^T, dV += P dO          of the tile
//   dS = P (dP - delta)              to registers, and to shared memory for d_q
//   dK += dS Q
//   S = K Q^T                        of the next tile
//   P = exp(scale S - lse)

// c = a b^T over the columns of rows in shared memory.
DEVICE void row_products(float (&c)[TILE_SCORES], u32 a, u32 b) {
    pin_registers(c);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; i++) {
        const u64 left = k_major_descriptor(operand_address(a) + k_major_step<BLOCK_N>(i));
        Wgmma<DTYPE, BLOCK_M>::shared(c, left, k_major_descriptor(operand_address(b) + k_major_step<BLOCK_M>(i)), i > 0);
    }
    wgmma_commit();
}

// c += a b over the query rows of a tile.
DEVICE void add_gradient(float (&c)[COLUMNS / 2], u32 (&a)[TILE_WORDS], u32 b) {
    pin_registers(c), pin_registers(a);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_M / 16; i++)
        Wgmma<DTYPE, COLUMNS>::registers(c, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3],
                                         mn_major_descriptor<BLOCK_M>(operand_address(b) + mn_major_step(i)), true);
    wgmma_commit();
}

DEVICE void stmatrix_x4(u32 to, const u32 a, const u32 b, const u32 c, const u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Where a warp stores four matrices: its row of 16, and the chunk of 16 bytes after 2 `pair` of a row of 128 bytes.
DEVICE u32 matrix_row(const KeyLane& at) { return 16 * (at.warp % 4) + at.lane % 16; }
DEVICE u32 matrix_chunk(const KeyLane& at, int pair) { return ((2 * pair + at.lane / 16) ^ (matrix_row(at) % 8)) * 16; }

// Stores the gradient of 64 keys, times `factor`, in shared memory as panels, and from there in memory.
DEVICE void stage_gradient(const float (&c)[COLUMNS / 2], u32 to, float factor, const KeyLane& at) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; j++) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = pack<DTYPE>(c[8 * j + 2 * i] * factor, c[8 * j + 2 * i + 1] * factor);
        stmatrix_x4(to + j / 4 * 64 * PANEL_ROW_BYTES + matrix_row(at) * PANEL_ROW_BYTES + matrix_chunk(at, j % 4), x[0], x[1], x[2], x[3]);
    }
}

struct KeyGroup {
    const Sm90BackwardParams& params;
    const BackwardParams& p;
    const Work& work;
    BackwardMemory& memory;
    const u32 rank;
    const KeyLane at;
    // The warpgroup's number.
    const u32 group;
    float d_k[COLUMNS / 2], d_v[COLUMNS / 2];

    DEVICE KeyGroup(const Sm90BackwardParams& params, const Work& work, BackwardMemory& memory, u32 rank)
        : params(params), p(params.backward), work(work), memory(memory), rank(rank), group(at.warp / 4) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) d_k[i] = d_v[i] = 0;
    }

    DEVICE u32 own(const u8* tile) const { return shared_address(tile) + group * 64 * PANEL_ROW_BYTES; }

    DEVICE u32 terms(u32 slot, int which) const { return shared_address(memory.rows[slot][which]) + 4 * at.column(); }

    // Tells both blocks that this warp has read a stage.
    DEVICE void release(const u64* empty, u32 slot) const {
        if (at.lane < CLUSTER) mbarrier_arrive_in(shared_address(empty + slot), at.lane);
    }

    // Gives the gradients of scores to the d_q group of the block whose tile it is.
    DEVICE void give(u32 (&d_scores)[TILE_WORDS], bool is_own) const {
        const u32 to = shared_address(is_own ? memory.d_scores[0] : memory.to_peer) + (group * 64 + matrix_row(at)) * PANEL_ROW_BYTES;
#pragma unroll
        for (int j = 0; j < BLOCK_M / 16; j++) {
            const u32 place = to + j / 4 * BLOCK_N * PANEL_ROW_BYTES + matrix_chunk(at, j % 4);
            stmatrix_x4(place, d_scores[4 * j], d_scores[4 * j + 1], d_scores[4 * j + 2], d_scores[4 * j + 3]);
        }
        fence_async_proxy();
        __syncwarp();
        if (is_own && at.lane == 0) mbarrier_arrive(shared_address(&memory.d_scores_full));
    }

    // Copies the gradients of scores to the peer.
    DEVICE void send() const {
        named_barrier_sync<WARPGROUP_THREADS>(2 + group);
        if (threadIdx.x % WARPGROUP_THREADS == 0) {
            for (int i = 0; i < BLOCK_M / 64; i++) {
                const u32 half = i * BLOCK_N * PANEL_ROW_BYTES + group * 64 * PANEL_ROW_BYTES;
                copy_to_block(address_in(shared_address(memory.d_scores[1]) + half, rank ^ 1), shared_address(memory.to_peer) + half,
                              64 * PANEL_ROW_BYTES, address_in(shared_address(&memory.d_scores_full), rank ^ 1));
            }
        }
        __syncwarp();
    }

    DEVICE void compute() {
        mbarrier_wait(shared_address(&memory.kv_full), 0);
        float s[TILE_SCORES];
        u32 probs[TILE_WORDS], d_scores[TILE_WORDS];
        const u32 first_key = work.first_key(rank);
        Step step(work);
        RingStage<STAGES> stage;
        u32 turn_parity = 1;
        DistanceSum distances;
        auto add_bias = [&](float d_bias, int j, int h, int n) { distances.add(d_bias, p, work, step, first_key, at, j, h, n); };
        auto make_probs = [&](u32 slot) { score_probabilities(probs, s, d_scores, p, work, step, first_key, at, terms(slot, 0)); };
        stage.wait_full(shared_address(memory.q_full));
        row_products(s, own(memory.k), shared_address(memory.q[0]));
        wgmma_wait<0>();
        pin_registers(s);
        make_probs(0);
        for (u32 n = 0; n < work.steps; n++) {
            const u32 slot = stage.stage();
            const bool is_own = n % CLUSTER == rank;
            stage.wait_full(shared_address(memory.d_out_full));
            row_products(s, own(memory.v), shared_address(memory.d_out[slot]));
            add_gradient(d_v, probs, shared_address(memory.d_out[slot]));
            wgmma_wait<1>();
            pin_registers(s);
            score_gradients(d_scores, probs, s, terms(slot, 1), add_bias);
            if (HAS_ALIBI && step.tile == work.unit.first_tile) distances.store(p, step.head, rank * BLOCK_N / 16 + at.warp);
            // Also: the last copy from here has arrived.
            mbarrier_wait(shared_address(is_own ? &memory.d_scores_empty : &memory.peer_empty), turn_parity);
            give(d_scores, is_own);
            add_gradient(d_k, d_scores, shared_address(memory.q[slot]));
            if (!is_own) send();
            if (n & 1) turn_parity ^= 1;
            wgmma_wait<0>();
            pin_registers(d_v), pin_registers(probs), pin_registers(d_k), pin_registers(d_scores);
            stage.advance();
            // After the last step: of that step and whatever is there, dropped.
            if (n + 1 < work.steps) stage.wait_full(shared_address(memory.q_full)), step.advance(p, work);
            row_products(s, own(memory.k), shared_address(memory.q[stage.stage()]));
            release(memory.d_out_empty, slot);
            wgmma_wait<0>();
            pin_registers(s);
            release(memory.q_empty, slot);
            make_probs(stage.stage());
        }
    }

    // Stores the gradients, in the place of the tiles of query rows, which both groups have read. Rows up to the sequence's last are written.
    DEVICE void store() const {
        named_barrier_sync<KEY_GROUPS * WARPGROUP_THREADS>(1);
        const u32 values = shared_address(memory.q[0]) + group * 64 * COLUMNS * 2, keys = values + 2 * 64 * COLUMNS * 2;
        stage_gradient(d_v, values, 1 / PROB_SCALE, at), stage_gradient(d_k, keys, p.scale, at);
        fence_async_proxy();
        named_barrier_sync<WARPGROUP_THREADS>(2 + group);
        if (threadIdx.x % WARPGROUP_THREADS != 0) return;
        const BackwardSequence& s = work.sequence;
        const ClusterRows d_k_rows(s.batch * params.d_k_batch_rows + s.kv_start, s.kv_rows), d_v_rows(s.batch * params.d_v_batch_rows + s.kv_start, s.kv_rows);
        const u32 row = work.first_key(rank) + group * 64;
        for (int i = 0; i < PANELS; i++) {
            const u32 panel = i * 64 * PANEL_ROW_BYTES;
            d_v_rows.store(&params.d_v, values + panel, i * PANEL_COLUMNS, work.unit.kv_head, row);
            d_k_rows.store(&params.d_k, keys + panel, i * PANEL_COLUMNS, work.unit.kv_head, row);
        }
        bulk_commit();
        bulk_wait();
    }
};
