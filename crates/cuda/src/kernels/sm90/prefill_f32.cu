// Prefill of f32 for compute capability 9.0, by consumers with 64 rows each. sources.rs concatenates the files of the program; its entry point is in
// forward.cuh.
//
// q, k, v and probabilities are sums of three bf16. Of the nine products of their terms the six largest are computed: the others are less than
// 2^-21 of a product, and 2^-24 of it on average. The matrix unit truncates where it adds: small products come first, and the product of a tile's
// probabilities and values starts from 0 and joins the output by an addition that rounds to nearest. A step's products take six times as long as
// in bf16, so a consumer does not overlap them with its own softmax. Where there are two consumers, one multiplies while the other computes
// probabilities, with PING_PONG or without.

static_assert(DTYPE == F32 && TERMS == 3 && VALUE_CONSUMERS == 1);

// A consumer's state: its place in the rings, and its registers.
struct F32Mainloop {
    static constexpr bool STARTS_EARLY = false, ENDS_EARLY = false;

    RingStage<K_STAGES> k_at;
    RingStage<STAGES> v_at;
    OnlineSoftmax acc;
    Scores scores;

    // scores = q k^T.
    DEVICE void multiply_keys(const Consumer& consumer) {
        k_at.wait_full(shared_address(consumer.memory.barriers.k_full));
        const u32 stage = uniform(k_at.stage());
        consumer.begin_turn();
        consumer.start_qk(scores, stage);
        consumer.end_turn();
        consumer.wait_qk<0>(scores, k_at.stage());
        k_at.advance();
    }

    // out += probs v, where the scores have become probabilities.
    DEVICE void multiply_values(const Consumer& consumer) {
        u32 probs[TERMS][BLOCK_N / 16][4];
#pragma unroll
        for (int n = 0; n < QK_MMA_N; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 terms[TERMS];
                split_pair(scores[0][n][2 * half], scores[0][n][2 * half + 1], terms);
#pragma unroll
                for (int term = 0; term < TERMS; term++) probs[term][n / 2][n % 2 * 2 + half] = terms[term];
            }
        float product[VALUE_DIM / 2] = {};
        v_at.wait_full(shared_address(consumer.memory.barriers.v_full));
        const u64 v = mn_major_descriptor<BLOCK_N>(shared_address(consumer.memory.v) + uniform(v_at.stage()) * (TERMS * VTile::BYTES));
        consumer.begin_turn();
        pin_registers(product);
        pin_registers((u32(&)[TERMS * BLOCK_N / 4])probs);
        wgmma_fence();
#pragma unroll
        for (int n = 0; n < TERM_PRODUCTS; n++)
#pragma unroll
            for (int step = 0; step < BLOCK_N / 16; step++) {
                const u32(&a)[4] = probs[left_term(n)][step];
                Wgmma<TERM_DTYPE, VALUE_DIM>::registers(product, a[0], a[1], a[2], a[3],
                                                  advance_descriptor(v, right_term(n) * VTile::BYTES + mn_major_step(step)), n + step > 0);
            }
        wgmma_commit();
        consumer.end_turn();
        wgmma_wait<0>();
        pin_registers(product);
        pin_registers((u32(&)[TERMS * BLOCK_N / 4])probs);
        consumer.arrive(consumer.memory.barriers.v_empty + v_at.stage());
        v_at.advance();
        float(&out)[VALUE_DIM / 2] = (float(&)[VALUE_DIM / 2])acc.out;
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 2; i++) out[i] += product[i];
    }

    // Returns true if a score of the warp is infinite or NaN. Products with an infinity are NaN here, since its second term is.
    DEVICE bool has_nonfinite_score() const {
        float zero[2] = {};
#pragma unroll
        for (int n = 0; n < QK_MMA_N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) zero[i % 2] = fmaf(scores[0][n][i], 0.f, zero[i % 2]);
        return __any_sync(ALL_LANES, !(zero[0] + zero[1] == 0.f));
    }

    // Recomputes a tile's infinite and NaN scores by mma.sync, for the warp's rows. The others keep their bits: an infinity or NaN of a key changes no
    // bit of rows that do not see it.
    DEVICE void recompute_scores(const Consumer& consumer, const WorkTile& work_tile, u32 key0) {
        const ForwardParams& p = consumer.params.forward;
        const KvSource source(p, work_tile);
#pragma unroll 1
        for (int n = 0; n < QK_MMA_N; n++) {
            float products[1][4];
            recompute_products(p, work_tile, consumer.first_row, source, key0 + 8 * n, products);
#pragma unroll
            for (int m = 0; m < QK_MMA_N; m++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (m == n && !(fabsf(scores[0][m][i]) < INF)) scores[0][m][i] = products[0][i];
        }
    }

    DEVICE void softmax(const ForwardParams& p, const Row* rows, u32 key0, bool masked) {
        const float scale = score_scale(p);
        mask_scores(p, scores, rows, key0, masked);
        Rescale rescale;
        update_row_max(acc, scores, scale, RESCALE_THRESHOLD, rescale);
        exponentiate_and_rescale(acc, scores, scale, rescale);
    }

    DEVICE void compute(const Consumer& consumer, const WorkTile& work_tile, const KeyBlocks& blocks, const Row* rows) {
        const ForwardParams& p = consumer.params.forward;
        for (u32 block = blocks.first; block < blocks.end; block = next_block(p, work_tile, block + 1, blocks.end)) {
            const FullBlocks full(p, *opaque(&work_tile));
            const bool masked = full.is_masked_tile(p, work_tile, block);
            multiply_keys(consumer);
            if (has_nonfinite_score()) recompute_scores(consumer, work_tile, block * BLOCK_N);
            softmax(p, rows, block * BLOCK_N, masked);
            multiply_values(consumer);
        }
    }
};

DEVICE void consume(const PrefillParams& params, PrefillMemory& memory) {
    compute_work_tiles<F32Mainloop>(params, memory);
}
