// The warpgroup that copies: one thread of it fills the stages, another adds tiles of d_q to memory.

// Fills the stages. Each block copies one half of a tile's rows to both.
DEVICE void copy_tiles(const Sm90BackwardParams& params, const Work& work, BackwardMemory& memory, u32 rank) {
    const BackwardParams& p = params.backward;
    const BackwardSequence& s = work.sequence;
    const u32 kv_head = work.unit.kv_head, half = rank * (BLOCK_M / 2);
    const ClusterRows keys(s.batch * params.k_batch_rows + s.kv_start, s.kv_len), values(s.batch * params.v_batch_rows + s.kv_start, s.kv_len);
    const ClusterRows queries(s.batch * params.q_batch_rows + s.q_start, s.q_len), d_outs(s.batch * params.d_out_batch_rows + s.q_start, s.q_len);
    const u32 kv_full = shared_address(&memory.kv_full);
    mbarrier_arrive_expect(kv_full, 3 * KV_BYTES);
    for (int i = 0; i < PANELS; i++) {
        const u32 panel = i * BLOCK_N * PANEL_ROW_BYTES, column = i * PANEL_COLUMNS;
        keys.load(shared_address(memory.k) + panel, &params.k, kv_full, column, kv_head, work.first_key(rank));
        values.load(shared_address(memory.v) + panel, &params.v, kv_full, column, kv_head, work.first_key(rank));
        keys.load(shared_address(memory.peer_k) + panel, &params.k, kv_full, column, kv_head, work.first_key(rank ^ 1));
    }
    Step at(work);
    RingStage<STAGES> stage;
    for (u32 n = 0; n < work.steps; n++, at.advance(p, work), stage.advance()) {
        const u32 row = at.tile * BLOCK_M, head = at.query_head(p, work), slot = stage.stage();
        const float* terms = (const float*)p.neg_lse + at.index(p, work) * BLOCK_M;
        const float* deltas = (const float*)p.delta + at.index(p, work) * BLOCK_M;
        auto fill = [&](const ClusterRows& rows, const TensorMap* map, u8* to, u64* full, u64* empty, const float* list, int which) {
            const u32 barrier = shared_address(full + slot);
            stage.wait_empty(shared_address(empty));
            mbarrier_arrive_expect(barrier, Q_BYTES + BLOCK_M * 4);
            for (int i = 0; i < PANELS; i++) {
                const u32 at_panel = shared_address(to) + i * BLOCK_M * PANEL_ROW_BYTES + half * PANEL_ROW_BYTES;
                rows.load_both(at_panel, map, barrier, i * PANEL_COLUMNS, head, row + half);
            }
            copy_from_device(shared_address(memory.rows[slot][which]), list, BLOCK_M * 4, barrier);
        };
        fill(queries, &params.q, memory.q[slot], memory.q_full, memory.q_empty, terms, 0);
        fill(d_outs, &params.d_out, memory.d_out[slot], memory.d_out_full, memory.d_out_empty, deltas, 1);
    }
}

// Adds tiles of d_q to memory, each when it is this unit's turn: the first unit stores, so that nothing has to be cleared. For the last it
// brings the sum of the others, and the d_q group converts.
DEVICE void add_tiles(const BackwardParams& p, const Work& work, BackwardMemory& memory, u32 rank) {
    const u32 staged = shared_address(memory.d_q), full = shared_address(&memory.d_q_full), sum = shared_address(&memory.d_q_sum);
    Step at(work);
    u32 parity = 0;
    for (u32 n = 0; n < work.steps; n++, at.advance(p, work)) {
        if (n % CLUSTER != rank) continue;
        const Turn turn(p, work, at);
        if (turn.is_last() && turn.place == 0) continue;
        const u64 tile = at.index(p, work);
        u32* turns = (u32*)p.turns + tile;
        for (int half = 0; half < 2; half++, parity ^= 1) {
            u8* to = (u8*)p.d_q_sums + (2 * tile + half) * HALF_BYTES;
            if (!turn.is_last()) mbarrier_wait(full, parity);
            if (half == 0) wait_turn(turns, turn.place), fence_async_proxy_of_all();
            if (turn.is_last()) {
                mbarrier_arrive_expect(sum, HALF_BYTES);
                copy_from_device(staged, to, HALF_BYTES, sum);
                mbarrier_wait(full, parity);
            } else if (turn.place == 0) {
                copy_to_device(to, staged, HALF_BYTES);
            } else {
                add_to_device(to, staged, HALF_BYTES);
            }
            bulk_commit();
            bulk_wait_read();
            mbarrier_arrive(shared_address(&memory.d_q_empty));
        }
        if (!turn.is_last()) {
            bulk_wait();
            store_release(turns, turn.place + 1);
        }
    }
    bulk_wait();
}
