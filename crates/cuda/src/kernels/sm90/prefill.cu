// Prefill for compute capability 9.0 by teams with 64 rows each.
//
// A team multiplies in one of two ways. Where products overlap (OverlappedStream), a step starts two, q with the next tile of keys and the
// probabilities of the tile before with its values, and computes the next probabilities while the second runs. Where they do not (SerialStream), a
// step computes the scores of a tile, then their probabilities, then the product with its values; other teams multiply meanwhile.
//
// A tile that every row sees in full uses row_max from earlier tiles and checks by its sums that it was large enough. If not, which is rare, the
// team recomputes the scores and raises row_max to their maxima. First tiles, masked tiles and tiles with a bias find their maxima first.
//
// With PING_PONG the teams start their products in turn (a SerialStream only q k^T), so that one team multiplies while another computes
// probabilities. With three or four teams and TMA, a team passes tiles that none of its rows sees.

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
    const float scale = Scoring::HAS_BIAS ? 1.f : p.scale;
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

// Passes a tile that none of the team's rows sees: waits and arrives as if it computed it, since the copying warps and other teams' turns count
// every team.
template <typename KeyStage>
DEVICE void pass_tile(const Team& team, const KeyStage& k_at, const RingStage<STAGES>& v_at) {
    Barriers& barriers = team.memory.barriers;
    k_at.wait_full(shared_address(barriers.k_full));
    team.begin_turn();
    team.end_turn();
    team.arrive(barriers.k_empty + k_at.stage());
    v_at.wait_full(shared_address(barriers.v_full));
    team.arrive(barriers.v_empty + v_at.stage());
}

// The state of a team whose products overlap: its place in the rings, and its registers.
struct OverlappedStream {
    // Two teams compute every tile, so that no branch decides whether they start products: the compiler waits at its end for products of a branch.
    static constexpr bool COMPUTES_ALL = TEAMS < 3;
    // Registers are left beside the output and the probabilities for a work tile to begin and end with less waiting: at D 256 with 64 keys,
    // but not with 80, where threads would spill.
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

    DEVICE void wait_k(const Team& team) const { k_at.wait_full(shared_address(team.memory.barriers.k_full)); }

    DEVICE void wait_v(const Team& team) const { v_at.wait_full(shared_address(team.memory.barriers.v_full)); }

    DEVICE bool has_k(const Team& team) const { return k_at.test_full(shared_address(team.memory.barriers.k_full)); }

    DEVICE bool has_v(const Team& team) const { return v_at.test_full(shared_address(team.memory.barriers.v_full)); }

    // Starts the scores of a tile, whose keys are there, and the values of the tile before.
    DEVICE void start_qk_and_pv(const Team& team) {
        const bool v_is_there = has_v(team);
        const u32 k_stage = uniform(k_at.stage()), v_stage = uniform(v_at.stage());
        team.begin_turn();
        team.start_qk(scores, k_stage);
        if (!v_is_there) wait_v(team);
        start_pv(team.memory, acc, probs, v_stage);
        team.end_turn();
    }

    // Starts the scores of a work tile's first tile, whose keys are there.
    DEVICE void start(const Team& team) {
        const u32 k_stage = uniform(k_at.stage());
        team.begin_turn();
        team.start_qk(scores, k_stage);
        team.end_turn();
    }

    // The scores and the probabilities of a work tile's first tile. The mask tile is looked up while the
    // scores are computed. There is nothing to rescale yet.
    DEVICE void begin(const Team& team, const WorkTile& work_tile, const Row* rows, u32 block) {
        const ForwardParams& p = team.params.forward;
        if (!STARTS_EARLY) {
            wait_k(team);
            start(team);
        }
        const bool masked = FullBlocks(p, *opaque(&work_tile)).is_masked_tile(p, work_tile, block);
        team.wait_qk<0>(scores, k_at.stage());
        k_at.advance();
        Rescale rescale;
        float sums[1][2] = {};
        mask_scores(p, scores, rows, block * BLOCK_N, masked);
        begin_softmax(p, acc, scores, RESCALE_THRESHOLD, rescale, sums);
        acc.add_to_row_sum(sums);
        probs.set(scores);
    }

    // The scores of a tile, and the values of the tile before.
    DEVICE void multiply(const Team& team) {
        wait_k(team);
        start_qk_and_pv(team);
        team.wait_pv(acc, v_at.stage());
        team.wait_qk<0>(scores, k_at.stage());
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
    DEVICE void multiply_and_softmax(const Team& team, TileRows tile, u32 count) {
        const ForwardParams& p = team.params.forward;
        wait_k(team);
#pragma unroll 1
        for (; count; count--) {
            start_qk_and_pv(team);
            const u32 stage = k_at.stage();
            team.wait_scores<1>(scores);
            if (MASKED) team.arrive(team.memory.barriers.k_empty + stage);
            k_at.advance();
            // Asked for early: the answer takes a while.
            const bool waits_k = count > 1 && !has_k(team);
            float sums[1][2] = {};
            if constexpr (MASKED) {
                mask_scores<true>(p, scores, tile.rows, tile.key0);
                tile.key0 += BLOCK_N;
                Rescale rescale;
                begin_softmax(p, acc, scores, RESCALE_THRESHOLD, rescale, sums);
                // No sum is negative, but the compiler does not know that: probabilities stay before the branch, and the wait for products
                // behind it.
                if (waits_k || sums[0][0] + sums[0][1] < 0.f) wait_k(team);
                team.wait_pv(acc, v_at.stage());
                end_softmax(acc, scores, probs, rescale, sums);
            } else {
                exponentiate(acc, scores, p.scale, sums);
                pin_registers((float(&)[BLOCK_N / 2])scores);
                // The whole team votes: it computes scores together.
                if (named_barrier_any<WARPGROUP_THREADS>(TEAM_BARRIER + team.team, row_max_is_unfit(acc, sums))) {
                    team.wait_pv(acc, v_at.stage());
                    team.start_qk(scores, uniform(stage));
                    team.wait_qk<0>(scores, stage);
                    softmax(p, tile, false, 0.f);
                } else {
                    team.arrive(team.memory.barriers.k_empty + stage);
                    team.wait_pv(acc, v_at.stage());
                    acc.begin_at_zero();
                    acc.add_to_row_sum(sums);
                    probs.set(scores);
                }
                if (waits_k) wait_k(team);
            }
            v_at.advance();
        }
    }

    DEVICE void pass(const Team& team) {
        pass_tile(team, k_at, v_at);
        k_at.advance();
        v_at.advance();
    }

    DEVICE void compute(const Team& team, const WorkTile& work_tile, const KeyBlocks& blocks, const Row* rows) {
        const ForwardParams& p = team.params.forward;
        const KeyBlocks seen = team.seen_blocks(work_tile, blocks, rows - team.first_row);
        u32 block = blocks.first;
        for (; block < seen.first; block = next_block(p, work_tile, block + 1, blocks.end)) pass(team);
        const u32 first = block;
        // In the loop the first tile takes fewer registers, and more time.
        if constexpr (HAS_REGISTERS) {
            begin(team, work_tile, rows, first);
            block = next_block(p, work_tile, first + 1, blocks.end);
        }
        while (block < seen.end) {
            if (!HAS_REGISTERS && block == first) {
                begin(team, work_tile, rows, first);
                block = next_block(p, work_tile, first + 1, blocks.end);
                continue;
            }
            // Recomputed for each tile, so that it occupies no registers during products.
            const FullBlocks full(p, *opaque(&work_tile));
            const bool masked = full.is_masked_tile(p, work_tile, block);
            const TileRows tile = {rows, block * BLOCK_N};
            // Biases branch between products and their wait.
            if constexpr (Scoring::HAS_BIAS) {
                multiply(team);
                softmax(p, tile, masked, RESCALE_THRESHOLD);
                block = next_block(p, work_tile, block + 1, blocks.end);
            } else {
                const u32 end = !masked ? full.end : block < full.begin && full.begin < full.end ? full.begin : seen.end;
                if (masked) multiply_and_softmax<true>(team, tile, end - block);
                else multiply_and_softmax<false>(team, tile, end - block);
                block = end;
            }
        }
        team.release_q();
        if (COMPUTES_ALL || first < seen.end) {
            wait_v(team);
            start_pv(team.memory, acc, probs, uniform(v_at.stage()));
            if constexpr (ENDS_EARLY) ends = reduce_and_end_rows(p, work_tile, team.first_row, acc);
            team.wait_pv(acc, v_at.stage());
            v_at.advance();
        }
        for (; block < blocks.end; block = next_block(p, work_tile, block + 1, blocks.end)) pass(team);
    }
};

// A team that finishes each product before it starts the next. Keys and values of a tile have the same stage.
struct SerialStream {
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
    DEVICE void step(const Team& team, const TileRows& tile, bool masked, bool finds_maxima) {
        const ForwardParams& p = team.params.forward;
        Barriers& barriers = team.memory.barriers;
        const float scale = Scoring::HAS_BIAS ? 1.f : p.scale;
        float sums[1][2];
        at.wait_full(shared_address(barriers.k_full));
        team.begin_turn();
#pragma unroll 1
        for (bool again = false;;) {
            team.start_qk(scores, stage);
            if (!again) team.end_turn();
            team.wait_scores<0>(scores);
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
            // The whole team votes: it computes scores together.
            if (!named_barrier_any<WARPGROUP_THREADS>(TEAM_BARRIER + team.team, row_max_is_unfit(acc, sums))) {
                acc.begin_at_zero();
                break;
            }
            again = finds_maxima = true;
        }
        team.arrive(barriers.k_empty + stage);
        acc.add_to_row_sum(sums);
        Probs probs;
        probs.set(scores);
        at.wait_full(shared_address(barriers.v_full));
        start_pv(team.memory, acc, probs, stage);
        const u32 v_stage = stage;
        advance();
        team.wait_pv(acc, v_stage);
    }

    DEVICE void pass(const Team& team) {
        pass_tile(team, at, at);
        advance();
    }

    DEVICE void compute(const Team& team, const WorkTile& work_tile, const KeyBlocks& blocks, const Row* rows) {
        const ForwardParams& p = team.params.forward;
        const KeyBlocks seen = team.seen_blocks(work_tile, blocks, rows - team.first_row);
        const FullBlocks full = team.full_blocks(work_tile, rows - team.first_row);
        auto next = [&](u32 block) { return next_block(p, work_tile, block + 1, blocks.end); };
        u32 block = blocks.first;
        for (; block < seen.first; block = next(block)) pass(team);
        for (const u32 first = block; block < seen.end; block = next(block)) {
            const bool masked = full.is_masked_tile(p, work_tile, block);
            step(team, {rows, block * BLOCK_N}, masked, Scoring::HAS_BIAS || masked || block == first);
        }
        team.release_q();
        for (; block < blocks.end; block = next(block)) pass(team);
    }
};

DEVICE void consume(const PrefillParams& params, PrefillMemory& memory) {
    compute_work_tiles<Select<OVERLAPS, OverlappedStream, SerialStream>::Type>(params, memory);
}
