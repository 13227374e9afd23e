// The warpgroups that have keys: of 64 each, d_k and d_v in registers.
//
// Rows of their accumulators are keys, columns are query rows: probabilities and gradients of scores, rounded, are left operands of the
// products that make d_v and d_k. A step computes, with nothing in flight over the end of the loop:
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

// Two neighbouring columns of a list of rows.
DEVICE float2 ld_shared_pair(u32 from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
}

DEVICE void stmatrix_x4(u32 to, const u32 a, const u32 b, const u32 c, const u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Where a warp stores four matrices: its row of 16, and the chunk of 16 bytes after 2 `pair` of a row of 128 bytes.
DEVICE u32 matrix_row(const KeyLane& at) { return 16 * at.warp + at.lane % 16; }
DEVICE u32 matrix_chunk(const KeyLane& at, int pair) { return ((2 * pair + at.lane / 16) ^ (matrix_row(at) % 8)) * 16; }

// Hides the pairs of a tile that no query sees, where there may be some.
DEVICE void hide_scores(float (&s)[TILE_SCORES], const BackwardParams& p, const Work& work, u32 tile, u32 first_key, const KeyLane& at) {
    const BackwardSequence& sequence = work.sequence;
    const i32 first = sequence.offset + (i32)(tile * BLOCK_M), last = first + BLOCK_M - 1, low = (i32)first_key;
    const bool is_full = low + BLOCK_N <= (i32)sequence.kv_len && low >= last - p.left && low + BLOCK_N - 1 <= first + p.right;
    if (is_full) return;
    const i32 key = low + (i32)at.key(), distance = key - first - (i32)at.column();
#pragma unroll
    for (int i = 0; i < TILE_SCORES; i++) {
        const int below = 8 * (i / 2 % 2), column = 8 * (i / 4) + i % 2;
        const i32 away = distance + below - column;
        const bool sees = away <= p.right && away >= -p.left && key + below < (i32)sequence.kv_len;
        s[i] = sees ? s[i] : p.hidden;
    }
}

// PROB_SCALE exp2(scale s - lse) of a tile, rounded; lse is in units of log2.
DEVICE void probabilities(u32 (&probs)[TILE_WORDS], const float (&s)[TILE_SCORES], float scale, u32 neg_lse) {
#pragma unroll
    for (int j = 0; j < BLOCK_M / 8; j++) {
        const float2 lse = ld_shared_pair(neg_lse + 32 * j);
#pragma unroll
        for (int h = 0; h < 2; h++)
            probs[2 * j + h] = pack<DTYPE>(exp2_approx(fmaf(s[4 * j + 2 * h], scale, lse.x)),
                                           exp2_approx(fmaf(s[4 * j + 2 * h + 1], scale, lse.y)));
    }
}

// P (dP - delta) of a tile, times the factors that `d_scores` holds where there is a softcap, rounded. Probabilities have the factor PROB_SCALE, and
// deltas its inverse. `add_bias(gradient, j, h, n)` gets each gradient of a bias.
template <typename AddBias>
DEVICE void score_gradients(u32 (&d_scores)[TILE_WORDS], const u32 (&probs)[TILE_WORDS], const float (&d_probs)[TILE_SCORES], u32 deltas,
                            AddBias add_bias) {
#pragma unroll
    for (int j = 0; j < BLOCK_M / 8; j++) {
        const float2 delta = ld_shared_pair(deltas + 32 * j);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 pair = probs[2 * j + h];
            float x = unpack<DTYPE>(pair, 0) * fmaf(d_probs[4 * j + 2 * h], 1 / PROB_SCALE, -delta.x);
            float y = unpack<DTYPE>(pair, 1) * fmaf(d_probs[4 * j + 2 * h + 1], 1 / PROB_SCALE, -delta.y);
            add_bias(x, j, h, 0), add_bias(y, j, h, 1);
            if (HAS_SOFTCAP) x *= unpack<BF16>(d_scores[2 * j + h], 0), y *= unpack<BF16>(d_scores[2 * j + h], 1);
            d_scores[2 * j + h] = pack<DTYPE>(x, y);
        }
    }
}

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
    const BackwardParams& p;
    const Work& work;
    BackwardMemory& memory;
    const u32 rank;
    const KeyLane at;
    float d_k[COLUMNS / 2], d_v[COLUMNS / 2];

    DEVICE KeyGroup(const BackwardParams& p, const Work& work, BackwardMemory& memory, u32 rank)
        : p(p), work(work), memory(memory), rank(rank) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) d_k[i] = d_v[i] = 0;
    }

    DEVICE u32 own(const u8* tile) const { return shared_address(tile) + at.group * 64 * PANEL_ROW_BYTES; }

    DEVICE u32 terms(u32 slot, int which) const { return shared_address(memory.rows[slot][which]) + 4 * at.column(); }

    // Tells both blocks that this warp has read a stage.
    DEVICE void release(const u64* empty, u32 slot) const {
        if (at.lane < CLUSTER) mbarrier_arrive_in(shared_address(empty + slot), at.lane);
    }

    // Gives the gradients of scores to the d_q group of the block whose tile it is.
    DEVICE void give(u32 (&d_scores)[TILE_WORDS], bool is_own) const {
        const u32 to = shared_address(is_own ? memory.d_scores[0] : memory.to_peer) + (at.group * 64 + matrix_row(at)) * PANEL_ROW_BYTES;
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
        named_barrier_sync<WARPGROUP_THREADS>(2 + at.group);
        if (threadIdx.x % WARPGROUP_THREADS == 0) {
            for (int i = 0; i < BLOCK_M / 64; i++) {
                const u32 half = i * BLOCK_N * PANEL_ROW_BYTES + at.group * 64 * PANEL_ROW_BYTES;
                copy_to_block(address_in(shared_address(memory.d_scores[1]) + half, rank ^ 1), shared_address(memory.to_peer) + half,
                              64 * PANEL_ROW_BYTES, address_in(shared_address(&memory.d_scores_full), rank ^ 1));
            }
        }
        __syncwarp();
    }

    // Stores this warp's sum of gradients of a head's biases times distances, and begins the next head's.
    DEVICE void store_distance_sum(u32 head, float& sum) const {
        if (!p.distance_sums) return;
        for (u32 step = 16; step; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        const u32 unit = blockIdx.x / CLUSTER, warp = rank * UNIT_WARPS / CLUSTER + at.group * 4 + at.warp;
        if (at.lane == 0) ((float*)p.distance_sums)[(u64)(unit * p.group + head) * UNIT_WARPS + warp] = sum;
        sum = 0;
    }

    DEVICE void compute() {
        mbarrier_wait(shared_address(&memory.kv_full), 0);
        float s[TILE_SCORES];
        u32 probs[TILE_WORDS], d_scores[TILE_WORDS];
        const u32 first_key = work.first_key(rank);
        Step step(work);
        RingStage<STAGES> stage;
        u32 turn_parity = 1;
        float distance_sum = 0;
        auto add_bias = [&](float d_bias, int j, int h, int n) {
            if (!HAS_ALIBI) return;
            const i32 position = work.sequence.offset + (i32)(step.tile * BLOCK_M + at.column()) + 8 * j + n;
            distance_sum = fmaf(d_bias, alibi_distance(p, work.sequence, position, first_key + at.key() + 8 * h), distance_sum);
        };
        auto make_probs = [&](u32 slot) {
            if constexpr (HAS_SCORE_MOD) score_mod(s, d_scores, p, work, step, first_key, at);
            else hide_scores(s, p, work, step.tile, first_key, at);
            probabilities(probs, s, HAS_SCORE_MOD ? 1.f : p.scale_log2, terms(slot, 0));
        };
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
            if (HAS_ALIBI && step.tile == work.unit.first_tile) store_distance_sum(step.head, distance_sum);
            // Also: the last copy from here has arrived.
            mbarrier_wait(shared_address(is_own ? &memory.d_scores_empty : &memory.peer_empty), turn_parity);
            give(d_scores, is_own);
            add_gradient(d_k, d_scores, shared_address(memory.q[slot]));
            if (!is_own) send();
            if (n & 1) turn_parity ^= 1;
            wgmma_wait<0>();
            pin_registers(d_v), pin_registers(probs), pin_registers(d_k), pin_registers(d_scores);
            stage.advance();
            if (n + 1 < work.steps) stage.wait_full(shared_address(memory.q_full));
            // After the last step: of whatever is there, dropped.
            row_products(s, own(memory.k), shared_address(memory.q[stage.stage()]));
            release(memory.d_out_empty, slot);
            wgmma_wait<0>();
            pin_registers(s);
            release(memory.q_empty, slot);
            step.advance(p, work);
            make_probs(stage.stage());
        }
    }

    // Stores the gradients, in the place of the tiles of query rows, which both groups have read. Rows up to the sequence's last are written.
    DEVICE void store() const {
        named_barrier_sync<KEY_GROUPS * WARPGROUP_THREADS>(1);
        const u32 values = shared_address(memory.q[0]) + at.group * 64 * COLUMNS * 2, keys = values + 2 * 64 * COLUMNS * 2;
        stage_gradient(d_v, values, 1 / PROB_SCALE, at), stage_gradient(d_k, keys, p.scale, at);
        fence_async_proxy();
        named_barrier_sync<WARPGROUP_THREADS>(2 + at.group);
        if (threadIdx.x % WARPGROUP_THREADS != 0) return;
        const BackwardSequence& s = work.sequence;
        const ClusterRows d_k_rows(s.batch * p.d_k_batch_rows + s.kv_start, s.kv_rows), d_v_rows(s.batch * p.d_v_batch_rows + s.kv_start, s.kv_rows);
        const u32 row = work.first_key(rank) + at.group * 64;
        for (int i = 0; i < PANELS; i++) {
            const u32 panel = i * 64 * PANEL_ROW_BYTES;
            d_v_rows.store(&p.d_v, values + panel, i * PANEL_COLUMNS, work.unit.kv_head, row);
            d_k_rows.store(&p.d_k, keys + panel, i * PANEL_COLUMNS, work.unit.kv_head, row);
        }
        bulk_commit();
        bulk_wait();
    }
};
