// The entry point: the producer copies, and consumers compute one work tile after another.

// Computes this block's work tiles.
//
// `Mainloop::compute(consumer, work_tile, blocks, rows)` computes the output of one, up to its scale; `rows` are the warp's. A mainloop that ENDS_EARLY also leaves
// the ends of the rows in `ends`.
//
// A mainloop that STARTS_EARLY starts the first scores of a work tile by `start(consumer)` before the rows of the one before are stored. After the last work
// tile it starts scores of whatever keys are in shared memory, and drops them: products that a branch starts are waited for at its end.
template <typename Mainloop>
DEVICE void compute_work_tiles(const PrefillParams& params, PrefillMemory& memory) {
    const ForwardParams& p = params.forward;
    Consumer consumer(params, memory);
    Mainloop mainloop;
    RingStage<WORK_TILE_STAGES> tile_at;
    // The first turn.
    if (PING_PONG && consumer.index == 0) named_barrier_arrive<2 * WARPGROUP_THREADS>(TURN_BARRIER);
    // Waits for the work tile of a stage; returns false after the last.
    auto wait_work_tile = [&](const RingStage<WORK_TILE_STAGES>& at) {
        at.wait_full(shared_address(memory.barriers.work_tile_full));
        return memory.staged[at.stage()].work_tile.sequence != NONE;
    };
    auto wait_q = [&](const RingStage<WORK_TILE_STAGES>& at) { consumer.wait_q(memory.staged[at.stage()].work_tile, QStage(at)); };
    if constexpr (Mainloop::STARTS_EARLY) {
        if (!wait_work_tile(tile_at)) return;
        wait_q(tile_at);
        mainloop.wait_k(consumer);
        mainloop.start(consumer);
    }
    for (;; tile_at.advance()) {
        if constexpr (!Mainloop::STARTS_EARLY) {
            if (!wait_work_tile(tile_at)) return;
        }
        const StagedTile& staged = memory.staged[tile_at.stage()];
        const KeyBlocks blocks(p, staged.work_tile);
        mainloop.acc.reset();
        if constexpr (!Mainloop::STARTS_EARLY) wait_q(tile_at);
        tile_at.wait_full(shared_address(memory.barriers.rows_full));
        mainloop.compute(consumer, staged.work_tile, blocks, staged.rows + consumer.first_row);
        bool more = true;
        if constexpr (Mainloop::STARTS_EARLY) {
            RingStage<WORK_TILE_STAGES> next = tile_at;
            next.advance();
            more = wait_work_tile(next);
            if (more) wait_q(next), mainloop.wait_k(consumer);
            mainloop.start(consumer);
        }
        end_work_tile(consumer, tile_at, mainloop);
        mbarrier_arrive(shared_address(memory.barriers.work_tile_empty + tile_at.stage()));
        if (!more) break;
    }
    if constexpr (Mainloop::STARTS_EARLY) consumer.template wait_scores<0>(mainloop.scores);
}

// The entry point of the warpgroups that multiply, which prefill.cu, prefill_wide.cu and prefill_f32.cu define.
DEVICE void consume(const PrefillParams& params, PrefillMemory& memory);

extern "C" __global__ void __launch_bounds__(THREADS + WARPGROUP_THREADS, 1) forward(const __grid_constant__ PrefillParams params) {
    extern __shared__ __align__(1024) u8 bytes[];
    PrefillMemory& memory = *(PrefillMemory*)bytes;
    if (threadIdx.x == THREADS) {
        const u8* first = (const u8*)work_tile_at(params.forward, blockIdx.x);
        prefetch_l1(first), prefetch_l1(first + sizeof(WorkTile) - 1);
        if (TMA) prefetch_map(&params.k), prefetch_map(&params.v);
        if (TMA && params.q_box_positions) prefetch_map(&params.q);
    }
    if (threadIdx.x == 0) {
        auto init = [](u64* barriers, int count, u32 arrivals) {
            for (int n = 0; n < count; n++) mbarrier_init(shared_address(barriers + n), arrivals);
        };
        Barriers& b = memory.barriers;
        init(b.q_full[0], Q_STAGES * Q_PARTS, 1);                           // TMA of a part of q, whose bytes one producer thread announces
        init(b.q_empty, Q_PARTS, WARPS / Q_PARTS);                          // every consumer warp that reads the part (Q_STAGES == 1)
        init(b.k_full, K_STAGES, TMA ? 1 : LOADERS);                        // TMA, announced by one producer thread; else each thread that copied keys
        init(b.k_empty, K_STAGES, WARPS);                                   // every consumer warp
        init(b.v_full, STAGES, TMA ? 1 : LOADERS);                          // as k_full, by the threads that copy values
        init(b.v_empty, STAGES, WARPS);                                     // every consumer warp
        init(b.work_tile_full, WORK_TILE_STAGES, WORK_TILE_LOADERS);        // each producer thread that copied 16 bytes of the description
        init(b.work_tile_empty, WORK_TILE_STAGES, THREADS + LOADERS);       // every consumer thread, and every thread that copies values
        init(b.rows_full, WORK_TILE_STAGES, LOADERS);                       // every thread that copies values, once its rows' visible keys are found
        mbarrier_publish();
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        release_registers<PRODUCER_REGISTERS>();
        const u32 loaders = (threadIdx.x - THREADS) / LOADERS;
        if (loaders == 0) produce<KTile, false>(params, memory);
        else if (loaders == 1) produce<VTile, true>(params, memory);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        consume(params, memory);
    }
}
