// The producer warpgroup, which copies.

// Copies of one tile after another by the threads of a warpgroup: a tile is handed over when the next one's copies have started.
struct LaggedCopies {
    // The barrier of the tile that was copied last, 0 where it was handed over.
    u32 full = 0;

    template <int PENDING>
    DEVICE void hand_over() {
        if (!full) return;
        cp_async_wait<PENDING>();
        fence_async_proxy();
        mbarrier_arrive(full);
        full = 0;
    }

    // The copies of a tile have started.
    DEVICE void started(u32 barrier) {
        cp_async_commit();
        hand_over<1>();
        full = barrier;
    }

    // Waits for a barrier. Others may wait meanwhile for the tile that is not handed over yet.
    DEVICE void wait(u32 barrier, u32 parity) {
        if (mbarrier_try_wait(barrier, parity)) return;
        hand_over<0>();
        mbarrier_wait(barrier, parity);
    }
};

// Copies tiles of keys, or of VALUES, through their ring.
template <typename T, bool VALUES>
struct KvProducer {
    const PrefillParams& params;
    PrefillMemory& memory;
    LaggedCopies copies;
    RingStage<VALUES ? STAGES : K_STAGES> at;

    // Copies tile number `block`: BLOCK_N keys or values, from key block * BLOCK_N on.
    DEVICE void load(const WorkTile& work_tile, u32 block) {
        const ForwardParams& p = params.forward;
        const Tensor& tensor = VALUES ? p.v : p.k;
        Barriers& barriers = memory.barriers;
        const u32 to = shared_address(VALUES ? memory.v[at.stage()] : memory.k[at.stage()]);
        const u32 full = shared_address((VALUES ? barriers.v_full : barriers.k_full) + at.stage());
        const u32 empty = shared_address((VALUES ? barriers.v_empty : barriers.k_empty) + at.stage());
        if constexpr (TMA) {
            // With pages, each lane copies a box of kv_box_rows rows; otherwise lane 0 copies the whole tile. The block table is read before
            // waiting for an empty stage.
            const u32 lane = threadIdx.x % 32, box_rows = PAGED ? params.kv_box_rows : BLOCK_N, row = lane * box_rows, j = block * BLOCK_N + row;
            const u32 batch_rows = VALUES ? params.v_batch_rows : params.k_batch_rows;
            u32 start = work_tile.batch * batch_rows + work_tile.kv_start, length = work_tile.kv_len, from = j;
            if constexpr (PAGED) {
                start = length = from = 0;
                if (row < BLOCK_N && j + box_rows > work_tile.begin && j < work_tile.end) {
                    PageRow page(p, p.block_table + (u64)work_tile.sequence * (p.block_table_width * 4), j);
                    u32 rest = work_tile.kv_len - j;
                    start = page.page * batch_rows + page.row, length = rest < box_rows ? rest : box_rows;
                }
            }
            mbarrier_wait(empty, at.parity() ^ 1);
            if (lane == 0) mbarrier_arrive_expect(full, T::BYTES);
            __syncwarp();
            if (row < BLOCK_N) {
                RaggedRows rows(start, length);
                const u32 first_column = VALUES ? work_tile.panel * (VALUE_CONSUMERS * VALUE_DIM) : 0;
#pragma unroll
                for (int panel = 0; panel < T::COLUMNS / PANEL_COLUMNS; panel++)
                    rows.load(to + (panel * BLOCK_N + row) * PANEL_ROW_BYTES, VALUES ? &params.v : &params.k, full, first_column + panel * PANEL_COLUMNS,
                              work_tile.kv_head, from);
            }
            __syncwarp();
        } else {
            copies.wait(empty, at.parity() ^ 1);
            KvSource source(p, work_tile);
            KvRows rows = {tensor, source.keys, VALUES ? source.v : source.k, VALUES ? source.value_dim : p.head_dim};
            if constexpr (DTYPE == F32) {
                copy_split_kv_tile<T>(p, rows, to, block * BLOCK_N);
                fence_async_proxy();
                mbarrier_arrive(full);
            } else {
                copy_kv_tile<T>(p, rows, copy_start<T>(tensor), to, block * BLOCK_N);
                copies.started(full);
            }
        }
        at.advance();
    }
};

// Copies rows of q by TMA. With one stage, each part waits until its consumers have read that of the work tile before; with two, the work tile
// that had the stage before has ended.
DEVICE void load_q(const PrefillParams& params, PrefillMemory& memory, const WorkTile& work_tile, const QStage& to) {
    if (!TMA || !params.q_box_positions) return;
    const ForwardParams& p = params.forward;
    RaggedRows rows(work_tile.batch * params.q_batch_rows + work_tile.q_start, work_tile.q_len);
    const u32 first_position = quotient(work_tile.row, p.gqa_group);
    for (int part = 0; part < Q_PARTS; part++) {
        const u32 full = shared_address(&memory.barriers.q_full[to.stage][part]);
        if (Q_STAGES == 1) mbarrier_wait(shared_address(memory.barriers.q_empty + part), to.parity ^ 1);
        if (threadIdx.x % 32 == 0) {
            mbarrier_arrive_expect(full, QTile::BYTES / Q_PARTS);
#pragma unroll
            for (int panel = 0; panel < QTile::COLUMNS / PANEL_COLUMNS; panel++)
                rows.load(shared_address(memory.q[to.stage]) + (panel * BLOCK_M + part * CONSUMER_ROWS) * PANEL_ROW_BYTES, &params.q, full, panel * PANEL_COLUMNS,
                          work_tile.kv_head * p.gqa_group.value, first_position + part * params.q_box_positions);
        }
    }
    __syncwarp();
}

// Copies descriptions, rows of q and keys of this block's work tiles, or, if VALUES, finds the keys that
// their rows see and copies their values.
template <typename T, bool VALUES>
DEVICE void produce(const PrefillParams& params, PrefillMemory& memory) {
    const ForwardParams& p = params.forward;
    const u32 thread = threadIdx.x % LOADERS;
    KvProducer<T, VALUES> kv = {params, memory};
    RingStage<WORK_TILE_STAGES> tile_at;
    u32 entry = blockIdx.x;
    for (;; tile_at.advance()) {
        StagedTile& staged = memory.staged[tile_at.stage()];
        WorkTile& work_tile = staged.work_tile;
        const u32 full = shared_address(memory.barriers.work_tile_full + tile_at.stage());
        // Addresses are computed when they are needed: a producer thread may have 24 registers.
        auto empty = [&] { return shared_address(memory.barriers.work_tile_empty + opaque(tile_at.stage())); };
        if (VALUES) {
            kv.copies.wait(full, tile_at.parity());
        } else {
            kv.copies.wait(empty(), tile_at.parity() ^ 1);
            if (thread < WORK_TILE_LOADERS) {
                ((uint4*)&work_tile)[thread] = entry == NONE ? make_uint4(NONE, 0, 0, 0) : __ldg((const uint4*)work_tile_at(p, entry) + thread);
                mbarrier_arrive(full);
            }
            sync_loaders();
        }
        if (work_tile.sequence == NONE) break;
        if (VALUES) {
            // Consumers may wait for the last values of the work tile before.
            if (!TMA) kv.copies.template hand_over<0>();
#pragma unroll 1
            for (u32 row = thread; row < BLOCK_M; row += LOADERS) staged.rows[row] = row_of_tile(*opaque(&p), *opaque(&work_tile), row);
            mbarrier_arrive(shared_address(memory.barriers.rows_full + opaque(tile_at.stage())));
        }
        const KeyBlocks blocks(p, work_tile);
        for (u32 block = blocks.first; block < blocks.end; block = next_block(p, work_tile, block + 1, blocks.end)) {
            kv.load(work_tile, block);
            if (!VALUES && block == blocks.first) load_q(params, memory, work_tile, QStage(tile_at));
        }
        if (VALUES) {
            mbarrier_arrive(empty());
        } else {
            entry = next_entry(params, memory, work_tile);
        }
    }
    if (!TMA) kv.copies.template hand_over<0>();
}
