// Prefill for compute capability 9.0 by consumers with 64 rows each. sources.rs concatenates the files of the program; its entry point is in
// forward.cuh.
//
// A consumer multiplies in one of two ways. Where products overlap (OverlappedMainloop), a step starts two, q with the next tile of keys and the
// probabilities of the tile before with its values, and computes the next probabilities while the second runs. Where they do not (SerialMainloop), a
// step computes the scores of a tile, then their probabilities, then the product with its values; other consumers multiply meanwhile.
//
// A tile that every row sees in full uses row_max from earlier tiles and checks by its sums that it was large enough. If not, which is rare, the
// consumer recomputes the scores and raises row_max to their maxima. First tiles, masked tiles and tiles with a bias find their maxima first.
//
// With PING_PONG the consumers start their products in turn (a SerialMainloop only q k^T), so that one consumer multiplies while another computes
// probabilities. With three or four consumers and TMA, a consumer passes tiles that none of its rows sees.

// Starts out += probs v.
DEVICE void start_pv(const PrefillMemory& memory, OnlineSoftmax& acc, Probs& probs, u32 stage) {
    float(&c)[VALUE_DIM / 2] = (float(&)[VALUE_DIM / 2])acc.out;
    const u64 v = mn_major_descriptor<BLOCK_N>(shared_address(memory.v) + stage * VTile::BYTES);
    pin_registers(c);
    pin_registers((u32(&)[BLOCK_N / 4])probs.x);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; step++) {
        const u32(&a)[4] = probs.x[0][step];
        Wgmma<DTYPE, VALUE_DIM>::registers(c, a[0], a[1], a[2], a[3], advance_descriptor(v, mn_major_step(step)), true);
    }
    wgmma_commit();
}

// Scores to probabilities, in place; row_max grows where a tile's maximum exceeds it by more than `threshold`. The output is to be scaled when
// the products that change it have ended.
DEVICE void begin_softmax(const ForwardParams& p, OnlineSoftmax& acc, Scores& scores, float threshold, Rescale& rescale, float (&sums)[1][2]) {
    const float scale = score_scale(p);
    update_row_max(acc, scores, scale, threshold, rescale);
    exponentiate(acc, scores, scale, sums);
    // Else the compiler would move this arithmetic past the wait for the products, which run meanwhile.
    pin_registers((float(&)[BLOCK_N / 2])scores);
}

DEVICE void end_softmax(OnlineSoftmax& acc, const Scores& scores, Probs& probs, const Rescale& rescale, const float (&sums)[1][2]) {
    rescale_o(acc, rescale);
    acc.add_to_row_sum(sums);
    probs.set(scores);
}

// Passes a tile that none of the consumer's rows sees: waits and arrives as if it computed it, since the copying warps and other consumers' turns count
// every consumer.
template <typename KeyStage>
DEVICE void pass_tile(const Consumer& consumer, const KeyStage& k_at, const RingStage<STAGES>& v_at) {
    Barriers& barriers = consumer.memory.barriers;
    k_at.wait_full(shared_address(barriers.k_full));
    consumer.begin_turn();
    consumer.end_turn();
    consumer.arrive(barriers.k_empty + k_at.stage());
    v_at.wait_full(shared_address(barriers.v_full));
    consumer.arrive(barriers.v_empty + v_at.stage());
}

// The state of a consumer whose products overlap: its place in the rings, and its registers.
struct OverlappedMainloop {
    // One or two consumers compute every tile, even one that none of their rows sees: the compiler waits at the end of a branch for products that the branch
    // starts. Three pass such tiles.
    static constexpr bool COMPUTES_ALL = CONSUMERS < 3;
    // True if registers are left beside the output and the probabilities for a work tile to begin and end with less waiting: with one or two consumers up to
    // D 192, and at D 256 with at most 64 keys. With 80 keys threads would spill.
    static constexpr bool HAS_REGISTERS = COMPUTES_ALL && VALUE_DIM / 2 + BLOCK_N / 4 <= 144;
    // Rows of q of the next work tile are there early if there is room for them.
    static constexpr bool STARTS_EARLY = HAS_REGISTERS && Q_STAGES == 2;
    static constexpr bool ENDS_EARLY = HAS_REGISTERS;

    RingStage<K_STAGES> k_at;
    RingStage<STAGES> v_at;
    OnlineSoftmax acc;
    Scores scores;
    Probs probs;
    RowEnds ends;

    DEVICE void wait_k(const Consumer& consumer) const { k_at.wait_full(shared_address(consumer.memory.barriers.k_full)); }

    DEVICE void wait_v(const Consumer& consumer) const { v_at.wait_full(shared_address(consumer.memory.barriers.v_full)); }

    DEVICE bool has_k(const Consumer& consumer) const { return k_at.test_full(shared_address(consumer.memory.barriers.k_full)); }

    DEVICE bool has_v(const Consumer& consumer) const { return v_at.test_full(shared_address(consumer.memory.barriers.v_full)); }

    // Starts the scores of a tile, whose keys are there, and the values of the tile before.
    DEVICE void start_qk_and_pv(const Consumer& consumer) {
        const bool v_is_there = has_v(consumer);
        const u32 k_stage = uniform(k_at.stage()), v_stage = uniform(v_at.stage());
        consumer.begin_turn();
        consumer.start_qk(scores, k_stage);
        if (!v_is_there) wait_v(consumer);
        start_pv(consumer.memory, acc, probs, v_stage);
        consumer.end_turn();
    }

    // Starts the scores of a work tile's first tile, whose keys are there.
    DEVICE void start(const Consumer& consumer) {
        const u32 k_stage = uniform(k_at.stage());
        consumer.begin_turn();
        consumer.start_qk(scores, k_stage);
        consumer.end_turn();
    }

    // The scores and the probabilities of a work tile's first tile. The mask tile is looked up while the
    // scores are computed. There is nothing to rescale yet.
    DEVICE void begin(const Consumer& consumer, const WorkTile& work_tile, const Row* rows, u32 block) {
        const ForwardParams& p = consumer.params.forward;
        if (!STARTS_EARLY) {
            wait_k(consumer);
            start(consumer);
        }
        const bool masked = FullBlocks(p, *opaque(&work_tile)).is_masked_tile(p, work_tile, block);
        consumer.wait_qk<0>(scores, k_at.stage());
        k_at.advance();
        Rescale rescale;
        float sums[1][2] = {};
        mask_scores(p, scores, rows, block * BLOCK_N, masked);
        begin_softmax(p, acc, scores, RESCALE_THRESHOLD, rescale, sums);
        acc.add_to_row_sum(sums);
        probs.set(scores);
    }

    // The scores of a tile, and the values of the tile before.
    DEVICE void multiply(const Consumer& consumer) {
        wait_k(consumer);
        start_qk_and_pv(consumer);
        consumer.wait_pv(acc, v_at.stage());
        consumer.wait_qk<0>(scores, k_at.stage());
        k_at.advance();
        v_at.advance();
    }

    // Scores to probabilities. A threshold of 0 gives every row the maximum of its scores so far as row_max.
    DEVICE void softmax(const ForwardParams& p, const TileRows& tile, bool masked, float threshold) {
        Rescale rescale;
        float sums[1][2] = {};
        mask_scores(p, scores, tile.rows, tile.key0, masked);
        begin_softmax(p, acc, scores, threshold, rescale, sums);
        end_softmax(acc, scores, probs, rescale, sums);
    }

    // `multiply` and `softmax` of `count` tiles without biases, the first of them `tile`. Probabilities are computed while the values of the
    // tile before, of the same work tile, are multiplied. Tiles that are not MASKED do not look for their maxima first.
    template <bool MASKED>
    DEVICE void multiply_and_softmax(const Consumer& consumer, TileRows tile, u32 count) {
        const ForwardParams& p = consumer.params.forward;
        wait_k(consumer);
#pragma unroll 1
        for (; count; count--) {
            start_qk_and_pv(consumer);
            const u32 stage = k_at.stage();
            consumer.wait_scores<1>(scores);
            if (MASKED) consumer.arrive(consumer.memory.barriers.k_empty + stage);
            k_at.advance();
            // Asked for early: the answer takes a while.
            const bool waits_k = count > 1 && !has_k(consumer);
            float sums[1][2] = {};
            if constexpr (MASKED) {
                mask_scores<true>(p, scores, tile.rows, tile.key0);
                tile.key0 += BLOCK_N;
                Rescale rescale;
                begin_softmax(p, acc, scores, RESCALE_THRESHOLD, rescale, sums);
                // No sum is negative, but the compiler does not know that: probabilities stay before the branch, and the wait for products
                // behind it.
                if (waits_k || sums[0][0] + sums[0][1] < 0.f) wait_k(consumer);
                consumer.wait_pv(acc, v_at.stage());
                end_softmax(acc, scores, probs, rescale, sums);
            } else {
                exponentiate(acc, scores, p.scale, sums);
                pin_registers((float(&)[BLOCK_N / 2])scores);
                // The whole consumer votes: it computes scores together.
                if (named_barrier_any<WARPGROUP_THREADS>(CONSUMER_BARRIER + consumer.index, row_max_is_unfit(acc, sums))) {
                    consumer.wait_pv(acc, v_at.stage());
                    consumer.start_qk(scores, uniform(stage));
                    consumer.wait_qk<0>(scores, stage);
                    softmax(p, tile, false, 0.f);
                } else {
                    consumer.arrive(consumer.memory.barriers.k_empty + stage);
                    consumer.wait_pv(acc, v_at.stage());
                    acc.begin_at_zero();
                    acc.add_to_row_sum(sums);
                    probs.set(scores);
                }
                if (waits_k) wait_k(consumer);
            }
            v_at.advance();
        }
    }

    DEVICE void pass(const Consumer& consumer) {
        pass_tile(consumer, k_at, v_at);
        k_at.advance();
        v_at.advance();
    }

    // The tiles of a work tile. Without a bias they are three runs: masked tiles, then tiles that every row sees in full, then masked tiles again. Any
    // may be empty, and without full tiles all are one masked run. With a bias each tile is a run of its own.
    //
    // The first tile is not in a run: there are no values of a tile before, with which its scores would be multiplied together. With HAS_REGISTERS its
    // code stands before the loop.
    //
    // A full tile is one that all rows of the work tile see. A SerialMainloop masks by its own consumer's rows (`Consumer::full_blocks`); that was slower
    // here with three consumers, and with two it gives the same tiles.
    DEVICE void compute(const Consumer& consumer, const WorkTile& work_tile, const KeyBlocks& blocks, const Row* rows) {
        const ForwardParams& p = consumer.params.forward;
        const KeyBlocks seen = consumer.seen_blocks(work_tile, blocks, rows - consumer.first_row);
        u32 block = blocks.first;
        for (; block < seen.first; block = next_block(p, work_tile, block + 1, blocks.end)) pass(consumer);
        const u32 first = block;
        // In the loop the first tile takes fewer registers, and more time.
        if constexpr (HAS_REGISTERS) {
            begin(consumer, work_tile, rows, first);
            block = next_block(p, work_tile, first + 1, blocks.end);
        }
        while (block < seen.end) {
            if (!HAS_REGISTERS && block == first) {
                begin(consumer, work_tile, rows, first);
                block = next_block(p, work_tile, first + 1, blocks.end);
                continue;
            }
            // Recomputed for each tile, so that it occupies no registers during products.
            const FullBlocks full(p, *opaque(&work_tile));
            const bool masked = full.is_masked_tile(p, work_tile, block);
            const TileRows tile = {rows, block * BLOCK_N};
            // Biases branch between products and their wait.
            if constexpr (Scoring::HAS_BIAS) {
                multiply(consumer);
                softmax(p, tile, masked, RESCALE_THRESHOLD);
                block = next_block(p, work_tile, block + 1, blocks.end);
            } else {
                const u32 end = !masked ? full.end : block < full.begin && full.begin < full.end ? full.begin : seen.end;
                if (masked) multiply_and_softmax<true>(consumer, tile, end - block);
                else multiply_and_softmax<false>(consumer, tile, end - block);
                block = end;
            }
        }
        consumer.release_q();
        if (COMPUTES_ALL || first < seen.end) {
            wait_v(consumer);
            start_pv(consumer.memory, acc, probs, uniform(v_at.stage()));
            if constexpr (ENDS_EARLY) ends = reduce_and_end_rows(p, work_tile, consumer.first_row, acc);
            consumer.wait_pv(acc, v_at.stage());
            v_at.advance();
        }
        for (; block < blocks.end; block = next_block(p, work_tile, block + 1, blocks.end)) pass(consumer);
    }
};

// A consumer that finishes each product before it starts the next. Keys and values of a tile have the same stage.
struct SerialMainloop {
    // Ends of rows found beside the last product made this 3 % slower.
    static constexpr bool STARTS_EARLY = false, ENDS_EARLY = false;

    RingStage<STAGES> at;
    // at.stage(), the same in all lanes. A step finds the next while its last product runs, since lanes take a while to agree on it.
    u32 stage = 0;
    OnlineSoftmax acc;
    Scores scores;

    DEVICE void advance() {
        at.advance();
        stage = uniform(at.stage());
    }

    // Computes a tile. One that does not find its maxima first starts again, and finds them, if row_max turns out not to fit. Both use the same code:
    // copies of it for tiles with and without maxima were slower.
    DEVICE void step(const Consumer& consumer, const TileRows& tile, bool masked, bool finds_maxima) {
        const ForwardParams& p = consumer.params.forward;
        Barriers& barriers = consumer.memory.barriers;
        const float scale = score_scale(p);
        float sums[1][2];
        at.wait_full(shared_address(barriers.k_full));
        consumer.begin_turn();
#pragma unroll 1
        for (bool again = false;;) {
            consumer.start_qk(scores, stage);
            if (!again) consumer.end_turn();
            consumer.wait_scores<0>(scores);
            if (finds_maxima) {
                Rescale rescale;
                mask_scores(p, scores, tile.rows, tile.key0, masked);
                // After a vote, every row takes the maximum of its scores so far.
                update_row_max(acc, scores, scale, again ? 0.f : RESCALE_THRESHOLD, rescale);
                rescale_o(acc, rescale);
            }
            sums[0][0] = sums[0][1] = 0.f;
            exponentiate(acc, scores, scale, sums);
            if (finds_maxima) break;
            // The whole consumer votes: it computes scores together.
            if (!named_barrier_any<WARPGROUP_THREADS>(CONSUMER_BARRIER + consumer.index, row_max_is_unfit(acc, sums))) {
                acc.begin_at_zero();
                break;
            }
            again = finds_maxima = true;
        }
        consumer.arrive(barriers.k_empty + stage);
        acc.add_to_row_sum(sums);
        Probs probs;
        probs.set(scores);
        at.wait_full(shared_address(barriers.v_full));
        start_pv(consumer.memory, acc, probs, stage);
        const u32 v_stage = stage;
        advance();
        consumer.wait_pv(acc, v_stage);
    }

    DEVICE void pass(const Consumer& consumer) {
        pass_tile(consumer, at, at);
        advance();
    }

    DEVICE void compute(const Consumer& consumer, const WorkTile& work_tile, const KeyBlocks& blocks, const Row* rows) {
        const ForwardParams& p = consumer.params.forward;
        const KeyBlocks seen = consumer.seen_blocks(work_tile, blocks, rows - consumer.first_row);
        const FullBlocks full = consumer.full_blocks(work_tile, rows - consumer.first_row);
        auto next = [&](u32 block) { return next_block(p, work_tile, block + 1, blocks.end); };
        u32 block = blocks.first;
        for (; block < seen.first; block = next(block)) pass(consumer);
        for (const u32 first = block; block < seen.end; block = next(block)) {
            const bool masked = full.is_masked_tile(p, work_tile, block);
            step(consumer, {rows, block * BLOCK_N}, masked, Scoring::HAS_BIAS || masked || block == first);
        }
        consumer.release_q();
        for (; block < blocks.end; block = next(block)) pass(consumer);
    }
};

DEVICE void consume(const PrefillParams& params, PrefillMemory& memory) {
    compute_work_tiles<Select<OVERLAPS, OverlappedMainloop, SerialMainloop>::Type>(params, memory);
}
