// Prefill for compute capability 9.0 of wide heads, by two consumers that share 64 rows: the output of one consumer would not fit its registers.
// sources.rs concatenates the files of the program; its entry point is in forward.cuh.
//
// A step is a tile of 64 keys. Each consumer computes the scores and the probabilities of 32 keys, hands the probabilities over through shared
// memory, and multiplies all of them with its half of the values' columns. Both have the same row_max; row_sum is of a consumer's own keys until
// the work tile ends.

static_assert(CONSUMERS == 2 && VALUE_CONSUMERS == 2 && BLOCK_M == CONSUMER_ROWS && BLOCK_N == PANEL_COLUMNS);

// The barrier of both consumers. It is `wait_q`'s too.
constexpr int ROWS_BARRIER = TURN_BARRIER;

// A consumer's state: its place in the rings, and its registers.
struct WideMainloop {
    static constexpr bool STARTS_EARLY = false, ENDS_EARLY = false;

    RingStage<K_STAGES> k_at;
    RingStage<STAGES> v_at;
    OnlineSoftmax acc;
    Scores scores;

    // Swaps two values, one for each of a thread's rows, with the same thread of the other consumer. Both consumers pass another barrier before the
    // next exchange.
    DEVICE void exchange(const Consumer& consumer, float (&x)[2]) const {
        float(&to)[2] = consumer.memory.exchange[consumer.index][threadIdx.x % WARPGROUP_THREADS];
        to[0] = x[0], to[1] = x[1];
        named_barrier_sync<THREADS>(ROWS_BARRIER);
        const float(&from)[2] = consumer.memory.exchange[1 - consumer.index][threadIdx.x % WARPGROUP_THREADS];
        x[0] = from[0], x[1] = from[1];
    }

    // `update_row_max` over the keys of both consumers.
    DEVICE void update_shared_row_max(const Consumer& consumer, float scale, Rescale& rescale) {
        float tile_max[1][2];
        lane_row_max(scores, tile_max);
        bool exceeds = false;
#pragma unroll
        for (int half = 0; half < 2; half++) exceeds |= (tile_max[0][half] - acc.row_max[0][half]) * scale > RESCALE_THRESHOLD;
        rescale.any = named_barrier_any<THREADS>(ROWS_BARRIER, exceeds);
        if (!rescale.any) return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float& x = tile_max[0][half];
            x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
            x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
        }
        float other[2] = {tile_max[0][0], tile_max[0][1]};
        exchange(consumer, other);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float max = fmaxf(tile_max[0][half], other[half]);
            rescale.factor[0][half] = raise_row_max(acc.row_max[0][half], max, scale, RESCALE_THRESHOLD);
        }
    }

    // Writes the consumer's probabilities to shared memory, and waits for the other consumer's.
    DEVICE void share_probs(const Consumer& consumer) const {
        Probs probs;
        probs.set(scores);
        const u32 t = consumer.lane % 4, g = consumer.lane / 4;
        const u32 rows = shared_address(consumer.memory.probs) + (threadIdx.x / 32 % CONSUMER_WARPS * WARP_ROWS + g) * PANEL_ROW_BYTES;
#pragma unroll
        for (int n = 0; n < QK_MMA_N; n++) {
            // Eight keys are a chunk of 16 bytes; the swizzle permutes the chunks of a row by the row's number.
            const u32 chunk = consumer.index * QK_MMA_N + n;
#pragma unroll
            for (int half = 0; half < 2; half++)
                st_shared4(rows + half * 8 * PANEL_ROW_BYTES + ((chunk ^ g) << 4) + t * 4, probs.x[0][n / 2][n % 2 * 2 + half]);
        }
        fence_async_proxy();
        named_barrier_sync<THREADS>(ROWS_BARRIER);
    }

    // out += probs v, of the consumer's columns.
    DEVICE void multiply_values(const Consumer& consumer) {
        v_at.wait_full(shared_address(consumer.memory.barriers.v_full));
        float(&c)[VALUE_DIM / 2] = (float(&)[VALUE_DIM / 2])acc.out;
        const u64 probs = k_major_descriptor(shared_address(consumer.memory.probs));
        const u32 columns = consumer.index * (VALUE_DIM / PANEL_COLUMNS * BLOCK_N * PANEL_ROW_BYTES);
        const u64 v = mn_major_descriptor<BLOCK_N>(shared_address(consumer.memory.v) + uniform(v_at.stage()) * VTile::BYTES + columns);
        pin_registers(c);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; step++)
            Wgmma<DTYPE, VALUE_DIM>::shared_mn_major(c, advance_descriptor(probs, k_major_step<BLOCK_M>(step)), advance_descriptor(v, mn_major_step(step)), true);
        wgmma_commit();
        consumer.wait_pv(acc, v_at.stage());
        v_at.advance();
    }

    // A tile of keys.
    DEVICE void step(const Consumer& consumer, const Row* rows, u32 block, bool masked) {
        const ForwardParams& p = consumer.params.forward;
        const float scale = score_scale(p);
        k_at.wait_full(shared_address(consumer.memory.barriers.k_full));
        consumer.start_qk(scores, uniform(k_at.stage()));
        consumer.wait_qk<0>(scores, k_at.stage());
        k_at.advance();
        const u32 key0 = block * BLOCK_N + consumer.index * WARP_KEYS;
        mask_scores(p, scores, rows, key0, masked);
        Rescale rescale;
        update_shared_row_max(consumer, scale, rescale);
        exponentiate_and_rescale(acc, scores, scale, rescale);
        share_probs(consumer);
        multiply_values(consumer);
    }

    DEVICE void compute(const Consumer& consumer, const WorkTile& work_tile, const KeyBlocks& blocks, const Row* rows) {
        const ForwardParams& p = consumer.params.forward;
        for (u32 block = blocks.first; block < blocks.end; block = next_block(p, work_tile, block + 1, blocks.end)) {
            const FullBlocks full(p, *opaque(&work_tile));
            const bool masked = full.is_masked_tile(p, work_tile, block);
            step(consumer, rows, block, masked);
        }
        consumer.release_q();
        // Sums over the keys of both consumers.
        float(&sums)[2] = acc.row_sum[0];
        float other[2] = {sums[0], sums[1]};
        exchange(consumer, other);
        sums[0] += other[0], sums[1] += other[1];
    }
};

DEVICE void consume(const PrefillParams& params, PrefillMemory& memory) {
    compute_work_tiles<WideMainloop>(params, memory);
}
