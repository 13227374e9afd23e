// A block of threads of the prefill kernels for compute capability 9.0: the producer warpgroup, the shared
// part of the consumer warpgroups (teams), and the epilogue of a work tile.
//
// A block computes a list of work tiles, or takes them from a queue. Its last warpgroup, the producer, copies
// through rings: some warps copy descriptions of work tiles, tiles of keys and, by TMA, rows of q; others
// find the keys that each row sees and copy tiles of values. Without TMA for q, each team copies its own
// rows. The other warpgroups, the consumers or teams, multiply: prefill.cu and prefill_f32.cu have teams with
// rows of their own, prefill_wide.cu teams that share rows.
//
// Constants in addition to tile.cuh's, where WARPS_Q is four for each team with rows of its own, and MMA_M is 1:
//
//   PING_PONG           whether teams take turns
//   Q_STAGES            work tiles whose rows of q are in shared memory: 2 if the next one's are copied early, else 1
//   EXTRA_K_STAGES      1 if there is room for a stage of keys more than of values, else 0
//   TMA                 whether keys and values are copied by TMA, else by the threads of the last warpgroup

constexpr int TEAM_WARPS = 4, TEAMS = WARPS / TEAM_WARPS, TEAM_ROWS = WARPGROUP_ROWS;
// Parts of q, of a warpgroup's rows each.
constexpr int Q_PARTS = BLOCK_M / TEAM_ROWS;
static_assert(MMA_M == 1 && WARPS_K == VALUE_TEAMS && TEAMS == Q_PARTS * VALUE_TEAMS && WARP_KEYS % 16 == 0 && !(TMA && DTYPE == F32));
// True if a team of prefill.cu computes q k^T of a tile and p v of the tile before at the same time. With NVRTC 12.0 to 12.8 it does not: they move
// registers between the two products, so ptxas serializes every wgmma (it warns of this as C7513 if asked by `-v`). Four teams, and three teams with more than
// 64 columns, lack the registers to hold the scores of one tile and the probabilities of another.
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ < 9
constexpr bool OVERLAPS = false;
#else
constexpr bool OVERLAPS = TEAMS < 3 || (TEAMS == 3 && HEAD_DIM <= 64 && VALUE_DIM <= 64);
#endif
// Stages of keys that are used. Where products overlap, a step lets its keys go only after its probabilities, because a vote may want the scores
// again: one more stage gives their copies a step more of time.
constexpr int K_STAGES = OVERLAPS ? STAGES + EXTRA_K_STAGES : STAGES;
// Registers of a thread of the producer, and of a consumer, in multiples of 8. Their sum must not exceed the
// registers with which the block is launched, or setmaxnreg waits forever. A producer thread needs more
// registers to look up pages, to find tiles that a mask skips, to read the terms of a row's biases, and to
// split f32.
constexpr bool COPIES_MORE = Scoring::HAS_MASK || (Scoring::HAS_BIAS && VALUE_DIM <= 128);
constexpr int LAUNCH_REGISTERS = 65536 / (THREADS + WARPGROUP_THREADS) / 8 * 8;
constexpr bool COPIES_BY_TMA = TMA && !Scoring::HAS_BIAS, COPIES_LITTLE = COPIES_BY_TMA && !PAGED;
constexpr int COPY_REGISTERS = DTYPE == F32    ? 104
                               : TEAMS == 4    ? 32
                               : TEAMS == 3    ? (COPIES_BY_TMA ? 32 : 56)
                               : COPIES_MORE   ? 56
                               : COPIES_LITTLE ? 24
                                               : 40;
constexpr int MATH_REGISTERS = DTYPE == F32    ? (TEAMS == 1 ? 240 : 200)
                               : TEAMS == 4    ? 112
                               : TEAMS == 3    ? (COPIES_BY_TMA ? 160 : 152)
                               : COPIES_MORE   ? 224
                               : COPIES_LITTLE ? 240
                                               : 232;
static_assert(COPY_REGISTERS + TEAMS * MATH_REGISTERS <= (TEAMS + 1) * LAUNCH_REGISTERS);

// Descriptions of work tiles in shared memory: of the one that is computed, and the next. Each of WORK_TILE_LOADERS threads copies 16 bytes.
constexpr int LISTED = 2, WORK_TILE_LOADERS = sizeof(WorkTile) / 16;

// Barriers in shared memory: a tile is there, and all that read it are done.
struct Barriers {
    u64 q_full[Q_STAGES][Q_PARTS], q_empty[Q_PARTS];
    u64 k_full[STAGES + EXTRA_K_STAGES], k_empty[STAGES + EXTRA_K_STAGES], v_full[STAGES], v_empty[STAGES];
    u64 work_tile_full[LISTED], work_tile_empty[LISTED], rows_full[LISTED];
};

// Shared memory of two teams that share rows: the probabilities of a tile of 64 keys, and two values that each thread passes to the other team.
struct SharedRows {
    u8 probs[BLOCK_M * PANEL_ROW_BYTES];
    float exchange[TEAMS][WARPGROUP_THREADS][2];
};
static_assert(sizeof(SharedRows) % 1024 == 0);

struct OwnRows {};

// A work tile, and which keys its rows see.
struct ListedTile {
    WorkTile work_tile;
    Row rows[BLOCK_M];
};
static_assert(sizeof(ListedTile) % 16 == 0);

struct PrefillMemory : Select<(VALUE_TEAMS > 1), SharedRows, OwnRows>::Type {
    u8 q[Q_STAGES][TERMS * QTile::BYTES];
    u8 k[STAGES + EXTRA_K_STAGES][TERMS * KTile::BYTES];
    u8 v[STAGES][TERMS * VTile::BYTES];
    ListedTile listed[LISTED];
    Barriers barriers;
    // A team's rows of a merge, and the number of teams that share it: one thread of each team tells the others.
    u32 merge_messages[4];
    // The entry of the next work tile, for all threads that copy keys.
    u32 next_entry;
};
static_assert(sizeof(PrefillMemory) == SHARED_BYTES);

// Where a work tile's rows of q are, by its place in the ring of work tiles, and the parity of their barriers.
struct QStage {
    u32 stage, parity;

    DEVICE QStage(const RingStage<LISTED>& tile_at)
        : stage(Q_STAGES == 1 ? 0 : tile_at.stage()), parity(Q_STAGES == 1 ? tile_at.stage() : tile_at.parity()) {
        static_assert(LISTED == 2 && (Q_STAGES == 1 || Q_STAGES == LISTED));
    }
};

// Named barriers: a turn of each team, and the threads of each team.
constexpr int TURN_BARRIER = 1, TEAM_BARRIER = 4;
static_assert(!PING_PONG || TURN_BARRIER + TEAMS <= TEAM_BARRIER);

// The tiles of keys of a work tile that are computed: at least one, which may be hidden as a whole.
struct KeyBlocks {
    u32 first, end;

    DEVICE KeyBlocks(const ForwardParams& p, const WorkTile& work_tile) {
        end = end_block(work_tile);
        first = next_block(p, work_tile, work_tile.begin / BLOCK_N, end);
        if (first >= end) end = first + 1;
    }
};

// ---- the warpgroup that copies

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

    // Copies the tile from key `block` BLOCK_N on.
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
                const u32 first_column = VALUES ? work_tile.panel * (VALUE_TEAMS * VALUE_DIM) : 0;
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

// Copies rows of q by TMA. With one stage, each part waits until its teams have read that of the work tile before; with two, the work tile
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
                rows.load(shared_address(memory.q[to.stage]) + (panel * BLOCK_M + part * TEAM_ROWS) * PANEL_ROW_BYTES, &params.q, full, panel * PANEL_COLUMNS,
                          work_tile.kv_head * p.gqa_group.value, first_position + part * params.q_box_positions);
        }
    }
    __syncwarp();
}

// Synchronizes the threads that copy keys.
DEVICE void sync_loaders() {
    if (TMA) __syncwarp();
    else named_barrier_sync<LOADERS>(TEAM_BARRIER + TEAMS);
}

// The number of blocks in the grid, read where it is needed: otherwise the compiler keeps it in one of a copying thread's few registers.
DEVICE u32 num_blocks() {
    u32 n;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(n));
    return n;
}

// The entry after a work tile, NONE after the last: of this block's list, or the next in the queue of all blocks. A block asks the queue only
// when it has started all copies of keys, else it would keep work tiles from others that could begin them at once.
DEVICE u32 next_entry(const PrefillParams& params, PrefillMemory& memory, const WorkTile& work_tile) {
    if (!params.queued) return work_tile.next ? work_tile.next : NONE;
    if (threadIdx.x % LOADERS == 0) {
        u32* counter = (u32*)params.forward.counters;
        const u32 ticket = atomicAdd(counter, 1u), entry = ticket + num_blocks();
        // Every work tile but each block's first is taken by a ticket, and every block is told by one that there are no more.
        if (ticket + 1 == params.queued) *counter = 0;
        memory.next_entry = entry < params.queued ? entry : NONE;
    }
    sync_loaders();
    const u32 entry = memory.next_entry;
    sync_loaders();
    return entry;
}

// Copies descriptions, rows of q and keys of this block's work tiles, or, if VALUES, finds the keys that
// their rows see and copies their values.
template <typename T, bool VALUES>
DEVICE void produce(const PrefillParams& params, PrefillMemory& memory) {
    const ForwardParams& p = params.forward;
    const u32 thread = threadIdx.x % LOADERS;
    KvProducer<T, VALUES> kv = {params, memory};
    RingStage<LISTED> tile_at;
    u32 entry = blockIdx.x;
    for (;; tile_at.advance()) {
        ListedTile& listed = memory.listed[tile_at.stage()];
        WorkTile& work_tile = listed.work_tile;
        const u32 full = shared_address(memory.barriers.work_tile_full + tile_at.stage());
        // Addresses are computed when they are needed: a copying thread may have 24 registers.
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
            // Teams may wait for the last values of the work tile before.
            if (!TMA) kv.copies.template hand_over<0>();
#pragma unroll 1
            for (u32 row = thread; row < BLOCK_M; row += LOADERS) listed.rows[row] = row_of_tile(*opaque(&p), *opaque(&work_tile), row);
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

// The tiles of keys that every row of a work tile, or of a team, sees in full. Used if there is no materialised mask.
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

// ---- the teams

struct Team {
    const PrefillParams& params;
    PrefillMemory& memory;
    // The team's number, its part of q, the warp's first row of the tile, and the lane.
    u32 team, part, first_row, lane;
    // The stage of the work tile's rows of q.
    u32 q_stage = 0;

    DEVICE Team(const PrefillParams& params, PrefillMemory& memory)
        : params(params), memory(memory), team(uniform(threadIdx.x / WARPGROUP_THREADS)), part(team / VALUE_TEAMS),
          first_row(uniform((part * TEAM_WARPS + threadIdx.x / 32 % TEAM_WARPS) * WARP_ROWS)), lane(threadIdx.x % 32) {}

    // Waits for the team's rows of q, or copies the warp's. The teams that share these rows have finished all scores of earlier work tiles.
    DEVICE void wait_q(const WorkTile& work_tile, const QStage& at) {
        q_stage = uniform(at.stage);
        if (TMA && params.q_box_positions) {
            mbarrier_wait(shared_address(&memory.barriers.q_full[at.stage][part]), at.parity);
            return;
        }
        // A product reads the rows of all warps of a team, as far as its instruction says.
        named_barrier_sync<WARPGROUP_THREADS>(TEAM_BARRIER + team);
        if (value_team() == 0) {
            if constexpr (DTYPE == F32) {
                copy_split_warp_q(params.forward, work_tile, first_row, shared_address(memory.q[q_stage]));
            } else {
                copy_warp_q(params.forward, work_tile, first_row, shared_address(memory.q[q_stage]));
                cp_async_commit();
                cp_async_wait<0>();
            }
            fence_async_proxy();
        }
        if (VALUE_TEAMS > 1) named_barrier_sync<THREADS>(TURN_BARRIER);
        else named_barrier_sync<WARPGROUP_THREADS>(TEAM_BARRIER + team);
    }

    // Returns true if no work tile is listed after the one at `tile_at`.
    DEVICE bool is_last(const RingStage<LISTED>& tile_at) const {
        RingStage<LISTED> next = tile_at;
        next.advance();
        return next.test_full(shared_address(memory.barriers.work_tile_full)) && memory.listed[next.stage()].work_tile.sequence == NONE;
    }

    // Arrives once for the warp. Its products end for all lanes together, so one lane suffices.
    DEVICE void arrive(u64* barrier) const {
        if (lane == 0) mbarrier_arrive(shared_address(barrier));
    }

    // Narrows a work tile's key tiles to those that the team's rows see. No tile is left if the team has no rows, or none that sees a key. Rows are
    // ordered by position, so the first row has the first visible key and the last row the last. Two teams compute all tiles: passing some was not
    // faster. Teams without TMA do too: they have no registers to spare. `rows` are the tile's.
    DEVICE KeyBlocks seen_blocks(const WorkTile& work_tile, KeyBlocks blocks, const Row* rows) const {
        if (TEAMS < 3 || !TMA || params.forward.mask_every_tile) return blocks;
        const Row* own = rows + part * TEAM_ROWS;
        const u32 count = rows_of_tile(params.forward, work_tile, part * TEAM_ROWS, TEAM_ROWS);
        u32 first = blocks.end, end = blocks.end;
        if (count) first = own[0].begin / BLOCK_N, end = (own[count - 1].end + BLOCK_N - 1) / BLOCK_N;
        first = uniform(first), end = uniform(end);
        if (blocks.first < first) blocks.first = first < blocks.end ? first : blocks.end;
        if (blocks.end > end) blocks.end = end;
        return blocks;
    }

    // The tiles of keys that every row of the team sees in full. They include the work tile's full tiles and, under the conditions of `seen_blocks`,
    // tiles that only rows of other teams see in part. With a bias, keys between a row's first and last may be hidden. `rows` are the work tile's.
    DEVICE FullBlocks full_blocks(const WorkTile& work_tile, const Row* rows) const {
        FullBlocks full(params.forward, work_tile);
        if (TEAMS < 3 || !TMA || Scoring::HAS_BIAS || params.forward.mask_every_tile) return full;
        const Row* own = rows + part * TEAM_ROWS;
        const u32 count = rows_of_tile(params.forward, work_tile, part * TEAM_ROWS, TEAM_ROWS);
        if (count) full.begin = uniform((own[count - 1].begin + BLOCK_N - 1) / BLOCK_N), full.end = uniform(own[0].end / BLOCK_N);
        return full;
    }

    // The team has computed its last scores of a work tile.
    DEVICE void release_q() const {
        if (Q_STAGES == 1 && TMA && params.q_box_positions) arrive(memory.barriers.q_empty + part);
    }

    DEVICE void begin_turn() const {
        if (PING_PONG) named_barrier_sync<2 * WARPGROUP_THREADS>(TURN_BARRIER + team);
    }

    DEVICE void end_turn() const {
        if (PING_PONG) named_barrier_arrive<2 * WARPGROUP_THREADS>(TURN_BARRIER + (team + 1 == TEAMS ? 0 : team + 1));
    }

    // Starts scores = q k^T, of the team's keys.
    DEVICE void start_qk(Scores& scores, u32 stage) const {
        float(&c)[WARP_KEYS / 2] = (float(&)[WARP_KEYS / 2])scores;
        u32 q_at = shared_address(memory.q[q_stage]) + part * (TEAM_ROWS * PANEL_ROW_BYTES);
        // Else the compiler keeps the descriptors of all steps in registers, and spills.
        q_at = opaque(q_at);
        const u64 q = k_major_descriptor(q_at), k = k_major_descriptor(shared_address(memory.k) + stage * (TERMS * KTile::BYTES) + value_team() * (WARP_KEYS * PANEL_ROW_BYTES));
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

    // Waits until the scores are there, and lets their keys go.
    template <int PENDING>
    DEVICE void wait_qk(Scores& scores, u32 stage) const {
        wait_scores<PENDING>(scores);
        arrive(memory.barriers.k_empty + stage);
    }

    DEVICE void wait_pv(OnlineSoftmax& acc, u32 stage) const {
        wgmma_wait<0>();
        pin_registers((float(&)[VALUE_DIM / 2])acc.out);
        arrive(memory.barriers.v_empty + stage);
    }
};

// Ends a warp's rows, whose row_sum is of a lane's own columns.
DEVICE RowEnds reduce_and_end_rows(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const RowStats& stats) {
    RowStats reduced = stats;
    reduced.reduce_row_sum(p);
    return end_rows(p, work_tile, first_row, reduced);
}

// Stores a warp's rows. Returns false if a stored element is infinite or NaN: the rows may be wrong, and the caller stores them again.
DEVICE bool store_if_finite(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const OnlineSoftmax& acc, const RowEnds& ends) {
    // Without TMA there are too few registers to keep the address of the work tile. With TMA, finding it again was 1 % slower at D 64.
    store_lse(p, TMA ? work_tile : *opaque(&work_tile), first_row, ends);
    u32 nonfinite = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 sum = 0;
        const RowOut row = ends.rows[half];
        store_words(row, value_columns(p, work_tile), [&](int n) {
            const float(&o)[4] = acc.out[0][n];
            u32 word = pack<DTYPE>(o[2 * half] * row.factor, o[2 * half + 1] * row.factor);
            sum = add_zero_times<DTYPE>(sum, word);
            return word;
        });
        nonfinite |= sum & 0x7fff7fffu;
    }
    return !__any_sync(ALL_LANES, nonfinite != 0);
}

// Stores a warp's rows of 16 bits element by element: rows that `store_if_finite` does not take because an element is infinite or NaN, or because
// vectors of four columns do not fit them. A loop over fragments keeps the code short, which compiles faster.
DEVICE void store_elements(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const OnlineSoftmax& acc) {
    const RowEnds ends = end_rows(p, work_tile, first_row, acc);
    store_lse(p, work_tile, first_row, ends);
    const u32 t = opaque(threadIdx.x % 4), columns = value_columns(p, work_tile);
#pragma unroll 1
    for (int n = 0; n < PV_MMA_N; n++) {
        float out[4];
#pragma unroll
        for (int m = 0; m < PV_MMA_N; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (m == n) out[i] = acc.out[0][m][i];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const RowOut row = ends.rows[i / 2];
            const u32 column = 8 * n + 2 * t + i % 2;
            if (row.at && column < columns) store_element(row.at, column, finite_mean(out[i], row.factor, 1.f));
        }
    }
}

// Stores a warp's rows of a work tile, or of a split, whose team waits for the other splits if it has nothing else to do.
DEVICE void store(const Team& team, const RingStage<LISTED>& tile_at, const OnlineSoftmax& acc) {
    const ForwardParams& p = team.params.forward;
    const WorkTile& work_tile = team.memory.listed[tile_at.stage()].work_tile;
    if (work_tile.splits <= 1) {
        if (DTYPE == F32) store_rows(p, work_tile, team.first_row, acc);
        else store_elements(p, work_tile, team.first_row, acc);
        return;
    }
    store_split(p, work_tile, team.first_row, acc);
    u32 first_row = team.part * TEAM_ROWS, rows = rows_of_tile(p, work_tile, first_row, TEAM_ROWS);
    MergeTeam merge = {team.team, TEAMS, team.memory.merge_messages + team.team, TEAM_BARRIER + (int)team.team,
                       first_row, rows, threadIdx.x / 32 % TEAM_WARPS, TEAM_WARPS};
    merge_splits<WARPGROUP_THREADS>(p, work_tile, merge, team.is_last(tile_at));
}

// Returns false if no tile of the work tile is masked.
DEVICE bool may_mask(const ForwardParams& p, const WorkTile& work_tile) {
    if constexpr (Scoring::HAS_MASK) return true;
    const KeyBlocks blocks(p, work_tile);
    const FullBlocks full(p, work_tile);
    return blocks.first < full.begin || blocks.end > full.end;
}

// Ends the work tile at `tile_at`: stores a warp's rows.
template <typename Stream>
DEVICE void end_work_tile(const Team& team, const RingStage<LISTED>& tile_at, Stream& stream) {
    const ForwardParams& p = team.params.forward;
    const ListedTile& listed = team.memory.listed[tile_at.stage()];
    const WorkTile& work_tile = listed.work_tile;
    OnlineSoftmax& acc = stream.acc;
    auto row_ends = [&] {
        if constexpr (Stream::ENDS_EARLY) return stream.ends;
        else return reduce_and_end_rows(p, work_tile, team.first_row, acc);
    };
    if constexpr (DTYPE != F32)
        if (work_tile.splits <= 1 && has_vector_columns(p, work_tile) &&
            store_if_finite(p, work_tile, team.first_row, acc, row_ends()))
            return;
    const bool recompute = __any_sync(ALL_LANES, acc.needs_recompute(may_mask(p, work_tile)));
    if (recompute) recompute_out(p, work_tile, team.first_row, listed.rows + team.first_row, acc);
    acc.reduce_row_sum(p);
    if (CAN_OVERFLOW && recompute) acc.unshrink();
    store(team, tile_at, acc);
}

// Computes this block's work tiles.
//
// `Stream::compute(team, work_tile, blocks, rows)` computes the output of one, up to its scale; `rows` are the warp's. A stream that ENDS_EARLY also leaves
// the ends of the rows in `ends`.
//
// A stream that STARTS_EARLY starts the first scores of a work tile by `start(team)` before the rows of the one before are stored. After the last work
// tile it starts scores of whatever keys are in shared memory, and drops them: products that a branch starts are waited for at its end.
template <typename Stream>
DEVICE void compute_work_tiles(const PrefillParams& params, PrefillMemory& memory) {
    const ForwardParams& p = params.forward;
    Team team(params, memory);
    Stream stream;
    RingStage<LISTED> tile_at;
    // The first turn.
    if (PING_PONG && team.team == 0) named_barrier_arrive<2 * WARPGROUP_THREADS>(TURN_BARRIER);
    auto is_listed = [&](const RingStage<LISTED>& at) {
        at.wait_full(shared_address(memory.barriers.work_tile_full));
        return memory.listed[at.stage()].work_tile.sequence != NONE;
    };
    auto wait_q = [&](const RingStage<LISTED>& at) { team.wait_q(memory.listed[at.stage()].work_tile, QStage(at)); };
    if constexpr (Stream::STARTS_EARLY) {
        if (!is_listed(tile_at)) return;
        wait_q(tile_at);
        stream.wait_k(team);
        stream.start(team);
    }
    for (;; tile_at.advance()) {
        if constexpr (!Stream::STARTS_EARLY) {
            if (!is_listed(tile_at)) return;
        }
        const ListedTile& listed = memory.listed[tile_at.stage()];
        const KeyBlocks blocks(p, listed.work_tile);
        stream.acc.reset();
        if constexpr (!Stream::STARTS_EARLY) wait_q(tile_at);
        tile_at.wait_full(shared_address(memory.barriers.rows_full));
        stream.compute(team, listed.work_tile, blocks, listed.rows + team.first_row);
        bool more = true;
        if constexpr (Stream::STARTS_EARLY) {
            RingStage<LISTED> next = tile_at;
            next.advance();
            more = is_listed(next);
            if (more) wait_q(next), stream.wait_k(team);
            stream.start(team);
        }
        end_work_tile(team, tile_at, stream);
        mbarrier_arrive(shared_address(memory.barriers.work_tile_empty + tile_at.stage()));
        if (!more) break;
    }
    if constexpr (Stream::STARTS_EARLY) team.template wait_scores<0>(stream.scores);
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
        init(b.q_full[0], Q_STAGES * Q_PARTS, 1), init(b.q_empty, Q_PARTS, WARPS / Q_PARTS);
        init(b.k_full, K_STAGES, TMA ? 1 : LOADERS), init(b.k_empty, K_STAGES, WARPS);
        init(b.v_full, STAGES, TMA ? 1 : LOADERS), init(b.v_empty, STAGES, WARPS);
        init(b.work_tile_full, LISTED, WORK_TILE_LOADERS), init(b.work_tile_empty, LISTED, THREADS + LOADERS);
        init(b.rows_full, LISTED, LOADERS);
        mbarrier_publish();
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        release_registers<COPY_REGISTERS>();
        const u32 loaders = (threadIdx.x - THREADS) / LOADERS;
        if (loaders == 0) produce<KTile, false>(params, memory);
        else if (loaders == 1) produce<VTile, true>(params, memory);
    } else {
        take_registers<MATH_REGISTERS>();
        consume(params, memory);
    }
}
