// A consumer warpgroup, which multiplies: the operations that the mainloops of prefill.cu, prefill_wide.cu and
// prefill_f32.cu have in common.

// The tiles of keys that every row of a work tile, or of a consumer, sees in full. Used if there is no materialised mask.
struct FullBlocks {
    u32 begin, end;

    DEVICE FullBlocks(const ForwardParams& p, const WorkTile& work_tile) {
        begin = (work_tile.full_begin + BLOCK_N - 1) / BLOCK_N, end = work_tile.full_end / BLOCK_N;
        const u32 blocks = end_block(work_tile);
        if (end > blocks) end = blocks;
        if (p.mask_every_tile) end = 0;
    }

    // Returns true if a tile is to be masked. A materialised mask has its own answer.
    DEVICE bool is_masked_tile(const ForwardParams& p, const WorkTile& work_tile, u32 block) const {
        return Scoring::HAS_MASK ? is_masked(p, work_tile, block) : block < begin || block >= end;
    }
};

struct Consumer {
    const PrefillParams& params;
    PrefillMemory& memory;
    // The index of the warpgroup, its part of q, the warp's first row of the tile, and the lane.
    u32 index, part, first_row, lane;
    // The stage of the work tile's rows of q.
    u32 q_stage = 0;

    DEVICE Consumer(const PrefillParams& params, PrefillMemory& memory)
        : params(params), memory(memory), index(uniform(threadIdx.x / WARPGROUP_THREADS)), part(index / VALUE_CONSUMERS),
          first_row(uniform((part * CONSUMER_WARPS + threadIdx.x / 32 % CONSUMER_WARPS) * WARP_ROWS)), lane(threadIdx.x % 32) {}

    // Waits until TMA has copied the consumer's rows of q. Without TMA for q the warps copy them, each its own rows; of consumers that share rows, the first
    // one's warps. A caller has finished all scores of earlier work tiles, and so have the consumers that share its rows.
    DEVICE void wait_q(const WorkTile& work_tile, const QStage& at) {
        q_stage = uniform(at.stage);
        if (TMA && params.q_box_positions) {
            mbarrier_wait(shared_address(&memory.barriers.q_full[at.stage][part]), at.parity);
            return;
        }
        // A product reads the rows of all warps of a consumer, as far as its instruction says.
        named_barrier_sync<WARPGROUP_THREADS>(CONSUMER_BARRIER + index);
        if (value_consumer() == 0) {
            if constexpr (DTYPE == F32) {
                copy_split_warp_q(params.forward, work_tile, first_row, shared_address(memory.q[q_stage]));
            } else {
                copy_warp_q(params.forward, work_tile, first_row, shared_address(memory.q[q_stage]));
                cp_async_commit();
                cp_async_wait<0>();
            }
            fence_async_proxy();
        }
        if (VALUE_CONSUMERS > 1) named_barrier_sync<THREADS>(TURN_BARRIER);
        else named_barrier_sync<WARPGROUP_THREADS>(CONSUMER_BARRIER + index);
    }

    // Returns true if no work tile follows the one at `tile_at`.
    DEVICE bool is_last(const RingStage<WORK_TILE_STAGES>& tile_at) const {
        RingStage<WORK_TILE_STAGES> next = tile_at;
        next.advance();
        return next.test_full(shared_address(memory.barriers.work_tile_full)) && memory.staged[next.stage()].work_tile.sequence == NONE;
    }

    // Arrives once for the warp. Its products end for all lanes together, so one lane suffices.
    DEVICE void arrive(u64* barrier) const {
        if (lane == 0) mbarrier_arrive(shared_address(barrier));
    }

    // Narrows a work tile's key tiles to those that the consumer's rows see. No tile is left if the consumer has no rows, or none that sees a key. Rows are
    // ordered by position, so the first row has the first visible key and the last row the last. One or two consumers compute all tiles: passing some was not
    // faster. Consumers without TMA do too: they have no registers to spare. `rows` are the tile's.
    DEVICE KeyBlocks seen_blocks(const WorkTile& work_tile, KeyBlocks blocks, const Row* rows) const {
        if (CONSUMERS < 3 || !TMA || params.forward.mask_every_tile) return blocks;
        const Row* own = rows + part * CONSUMER_ROWS;
        const u32 count = tile_row_count(params.forward, work_tile, part * CONSUMER_ROWS, CONSUMER_ROWS);
        u32 first = blocks.end, end = blocks.end;
        if (count) first = own[0].begin / BLOCK_N, end = (own[count - 1].end + BLOCK_N - 1) / BLOCK_N;
        first = uniform(first), end = uniform(end);
        if (blocks.first < first) blocks.first = first < blocks.end ? first : blocks.end;
        if (blocks.end > end) blocks.end = end;
        return blocks;
    }

    // The tiles of keys that every row of the consumer sees in full. They include the work tile's full tiles and, under the conditions of `seen_blocks`,
    // tiles that only rows of other consumers see in part. With a bias, keys between a row's first and last may be hidden. `rows` are the work tile's.
    DEVICE FullBlocks full_blocks(const WorkTile& work_tile, const Row* rows) const {
        FullBlocks full(params.forward, work_tile);
        if (CONSUMERS < 3 || !TMA || Scoring::HAS_BIAS || params.forward.mask_every_tile) return full;
        const Row* own = rows + part * CONSUMER_ROWS;
        const u32 count = tile_row_count(params.forward, work_tile, part * CONSUMER_ROWS, CONSUMER_ROWS);
        if (count) full.begin = uniform((own[count - 1].begin + BLOCK_N - 1) / BLOCK_N), full.end = uniform(own[0].end / BLOCK_N);
        return full;
    }

    // Releases the consumer's rows of q, after its last scores of a work tile. With two stages work_tile_empty does.
    DEVICE void release_q() const {
        if (Q_STAGES == 1 && TMA && params.q_box_positions) arrive(memory.barriers.q_empty + part);
    }

    DEVICE void begin_turn() const {
        if (PING_PONG) named_barrier_sync<2 * WARPGROUP_THREADS>(TURN_BARRIER + index);
    }

    DEVICE void end_turn() const {
        if (PING_PONG) named_barrier_arrive<2 * WARPGROUP_THREADS>(TURN_BARRIER + (index + 1 == CONSUMERS ? 0 : index + 1));
    }

    // Starts scores = q k^T, of the consumer's keys.
    DEVICE void start_qk(Scores& scores, u32 stage) const {
        float(&c)[WARP_KEYS / 2] = (float(&)[WARP_KEYS / 2])scores;
        u32 q_at = shared_address(memory.q[q_stage]) + part * (CONSUMER_ROWS * PANEL_ROW_BYTES);
        // Else the compiler keeps the descriptors of all steps in registers, and spills.
        q_at = opaque(q_at);
        const u64 q = k_major_descriptor(q_at), k = k_major_descriptor(shared_address(memory.k) + stage * (TERMS * KTile::BYTES) + value_consumer() * (WARP_KEYS * PANEL_ROW_BYTES));
        pin_registers(c);
        wgmma_fence();
#pragma unroll
        for (int n = 0; n < TERM_PRODUCTS; n++)
#pragma unroll
            for (int step = 0; step < HEAD_DIM / 16; step++)
                Wgmma<TERM_DTYPE, WARP_KEYS>::shared(c, advance_descriptor(q, left_term(n) * QTile::BYTES + k_major_step<BLOCK_M>(step)),
                                                     advance_descriptor(k, right_term(n) * KTile::BYTES + k_major_step<BLOCK_N>(step)), n + step > 0);
        wgmma_commit();
    }

    // Waits until the scores are there: all products but PENDING groups of later ones.
    template <int PENDING>
    DEVICE void wait_scores(Scores& scores) const {
        wgmma_wait<PENDING>();
        pin_registers((float(&)[WARP_KEYS / 2])scores);
    }

    // `wait_scores`, then releases the stage of their keys: arrives at its k_empty.
    template <int PENDING>
    DEVICE void wait_qk(Scores& scores, u32 stage) const {
        wait_scores<PENDING>(scores);
        arrive(memory.barriers.k_empty + stage);
    }

    // Waits until the output is there, then releases the stage of the values: arrives at its v_empty.
    DEVICE void wait_pv(OnlineSoftmax& acc, u32 stage) const {
        wgmma_wait<0>();
        pin_registers((float(&)[VALUE_DIM / 2])acc.out);
        arrive(memory.barriers.v_empty + stage);
    }
};

// Returns false if no tile of the work tile is masked.
DEVICE bool may_mask(const ForwardParams& p, const WorkTile& work_tile) {
    if constexpr (Scoring::HAS_MASK) return true;
    const KeyBlocks blocks(p, work_tile);
    const FullBlocks full(p, work_tile);
    return blocks.first < full.begin || blocks.end > full.end;
}
