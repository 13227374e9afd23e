// Prefill: warps over the rows of a tile.
//
// A block of threads computes its work tiles as one stream of tiles of keys: keys of the next work tile are copied while the last one's
// are multiplied, and a result is stored between two steps. A step multiplies the probabilities of one tile with its values and then q
// with the keys of the next: the matrix unit computes both products without a pause, and the probabilities that it waits for are computed
// between steps. Eight warps are two teams of four that take turns at the matrix unit: while one multiplies, the other computes
// probabilities. The first team copies keys for both, the second values.
//
// Work tiles where NaN of a key may have reached rows that do not see it, or whose sums overflowed, are recomputed at the end of the
// stream, one by one, by `pv_gemm_nonfinite`.

constexpr bool HAS_TEAMS = WARPS_Q == 8;
constexpr int TEAMS = HAS_TEAMS ? 2 : 1, TEAM_THREADS = THREADS / TEAMS, TEAM_WARPS = WARPS / TEAMS, TEAM_ROWS = BLOCK_M / TEAMS;
static_assert(!HAS_TEAMS || STAGES == 2);
// Ring of work tiles in shared memory: from the one that is multiplied to the one whose keys are copied, and the next one, whose
// description is copied. Its length is even, so that neighbours use different halves of `rows`, which `index % 2` selects.
constexpr int WORK_TILE_STAGES = (STAGES + 4) / 2 * 2;
// A bit of a word marks each of the first MAX_RECOMPUTED work tiles of a stream that is to be recomputed. Later ones have no bit and are
// computed by `pv_gemm_nonfinite` at once.
static_assert(MAX_RECOMPUTED < 32);

// Where a warp is in its stream. It is in shared memory since registers are for accumulators and scores.
struct WarpStream {
    KvSource source;     // keys and values of the work tile that is copied
    u32 fetched_index,   // its index in the ring
        fetched_end;     // the end of its key blocks
    u32 index,           // index in the ring of the work tile that is accumulated
        ordinal;         // its number in the stream
    u32 recompute,       // one bit for each work tile of the stream that is to be recomputed for this warp's rows
        is_recomputing,  // 1 in the second pass, which recomputes one of them
        nonfinite;       // 1 if values may be infinite or NaN: in the second pass, and from work tile MAX_RECOMPUTED on
    u32 probs_block,     // key block of the probabilities
        probs_index;     // index in the ring of its work tile
};

// Memory that the warps of a block share beside their streams.
struct BlockFlags {
    // The bits of all warps.
    u32 recompute;
    // 1 if a team is the last of the splits of a tile.
    u32 is_last_split[2];
    // The entry of the stream's second work tile: the others follow it.
    u32 second_entry;
};

struct PrefillMemory {
    u8 q[QTile::BYTES];
    u8 k[STAGES][KTile::BYTES];
    u8 v[STAGES][VTile::BYTES];
    Row rows[2][BLOCK_M];
    WorkTile work_tiles[WORK_TILE_STAGES];
    WarpStream streams[WARPS];
    BlockFlags flags;
};
static_assert(sizeof(PrefillMemory) == SHARED_BYTES);

// Named barriers: a turn of each team, the threads that copy, and the threads of each team.
constexpr int TURN_BARRIER = 1, LOAD_BARRIER = 3, TEAM_BARRIER = 4;

DEVICE u32 next_index(u32 index) { return index + 1 == WORK_TILE_STAGES ? 0 : index + 1; }

DEVICE u32 previous_stage(u32 stage) { return stage == 0 ? STAGES - 1 : stage - 1; }

// A warp of a block: its place in the tile and in shared memory.
struct Warp {
    const ForwardParams& p;
    PrefillMemory& memory;
    WarpStream& stream;
    u32 lane, team, first_row;
    // Shared addresses of the tiles.
    u32 q, k, v;

    DEVICE Warp(const ForwardParams& p, u8* bytes)
        : p(p), memory(*(PrefillMemory*)bytes), stream(memory.streams[threadIdx.x / 32]), lane(threadIdx.x % 32),
          team(HAS_TEAMS ? threadIdx.x / 128 : 0), first_row(threadIdx.x / 32 * WARP_ROWS), q(shared_address(bytes)),
          k(q + QTile::BYTES), v(k + STAGES * KTile::BYTES) {}

    DEVICE const Row* rows(u32 index) const { return memory.rows[index % 2] + first_row; }

    // The entry of the work tile that follows in the stream, 0 where there is none.
    DEVICE u32 next_entry(const WorkTile& work_tile) const { return stream.is_recomputing ? 0 : work_tile.next; }

    // Begins to copy a work tile's description.
    DEVICE void copy_description(u32 entry, u32 index) const {
        if (threadIdx.x < sizeof(WorkTile) / 16) {
            u64 from = (u64)work_tile_at(p, entry) + threadIdx.x * 16;
            cp_async16(shared_address(memory.work_tiles) + index * sizeof(WorkTile) + threadIdx.x * 16, (const u8*)from, 16);
        }
    }

    // A step begins when its operands are in shared memory and the stages that it overwrites were read.
    DEVICE void begin_turn() const {
        if (HAS_TEAMS) named_barrier_sync<THREADS>(TURN_BARRIER + team);
        else __syncthreads();
    }

    DEVICE void end_turn() const {
        if (HAS_TEAMS) named_barrier_arrive<THREADS>(TURN_BARRIER + 1 - team);
    }
};

// ---- q

// Fetches a warp's rows of q into the second-level cache, some steps before they are copied.
DEVICE void prefetch_q(const Warp& warp, const WorkTile& work_tile) {
    const ForwardParams& p = warp.p;
    u32 lane = opaque(threadIdx.x % 32), row = work_tile.row + warp.first_row + lane;
    if (lane >= WARP_ROWS || row >= row_count(p, work_tile)) return;
    u64 from = row_address(p.q, work_tile, q_row(p, work_tile.kv_head, row));
    for (u32 byte = 0; byte < p.head_dim * ELEMENT_BYTES; byte += 128) prefetch_l2((const void*)(from + byte));
}

// ---- the copies of keys and values, ahead of the products. With teams, copy group n holds keys and values of key block n; without, keys
// of block n and values of block n - 1.

struct KvProducer {
    const Warp& warp;
    // The tile of keys that was copied last, whose values may be to come; NONE where there are no more.
    u32 fetched;

    // Begins to copy the work tile at an index of the list; returns its first tile.
    DEVICE u32 enter(u32 index) {
        const WorkTile& work_tile = warp.memory.work_tiles[index];
        u32 end = end_block(work_tile), first = next_block(warp.p, work_tile, work_tile.begin / BLOCK_N, end);
        __syncwarp();
        if (warp.lane == 0) {
            warp.stream.source = KvSource(warp.p, work_tile), warp.stream.fetched_index = index;
            warp.stream.fetched_end = first < end ? end : first + 1;
        }
        u32 next = warp.next_entry(work_tile);
        if (next) warp.copy_description(next, next_index(index));
        __syncwarp();
        return first;
    }

    DEVICE void copy_k(u32 stage) {
        const KvSource& source = warp.stream.source;
        KvRows rows = {warp.p.k, source.keys, source.k, warp.p.head_dim};
        copy_kv_tile<KTile>(warp.p, rows, copy_start<KTile>(warp.p.k), warp.k + stage * KTile::BYTES, fetched * BLOCK_N);
    }

    DEVICE void copy_v(u32 stage) {
        const KvSource& source = warp.stream.source;
        KvRows rows = {warp.p.v, source.keys, source.v, source.value_dim};
        copy_kv_tile<VTile>(warp.p, rows, copy_start<VTile>(warp.p.v), warp.v + stage * VTile::BYTES, fetched * BLOCK_N);
    }

    // Begins to copy the next tile: its keys to `k_stage`; values of the tile before it to `v_stage`, or for teams its own to `k_stage`.
    DEVICE void fetch(u32 v_stage, u32 k_stage) {
        if (fetched != NONE) {
            u32 next = next_block(warp.p, warp.memory.work_tiles[warp.stream.fetched_index], fetched + 1, warp.stream.fetched_end);
            bool leaves = next == warp.stream.fetched_end;
            if (leaves && STAGES > 2) {
                // The next description may be in one of the groups that are in flight.
                cp_async_wait_all();
                named_barrier_sync<LOADERS>(LOAD_BARRIER);
            }
            if (!HAS_TEAMS) copy_v(v_stage);
            fetched = next;
            if (leaves) {
                u32 index = warp.stream.fetched_index;
                fetched = warp.next_entry(warp.memory.work_tiles[index]) ? enter(next_index(index)) : NONE;
            }
            if (fetched != NONE) copy_first(k_stage);
        }
        cp_async_commit();
    }

    // Starts the first copy of a tile for this warp: keys, or values for the second team.
    DEVICE void copy_first(u32 stage) {
        if (warp.team == 0) copy_k(stage);
        else copy_v(stage);
    }

    // Begins a stream at the first work tile of the list.
    DEVICE void start() {
        fetched = enter(0);
        copy_first(0);
        copy_warp_q(warp.p, warp.memory.work_tiles[0], warp.first_row, warp.q);
        cp_async_commit();
#pragma unroll
        for (int n = 1; n < STAGES - 1; n++) fetch(n - 1, n);
    }
};

// ---- results

// Stores a warp's rows of one split of a tile; the team that is the last of the splits merges them.
DEVICE void store_and_merge(const Warp& warp, const WorkTile& work_tile, const OnlineSoftmax& acc) {
    store_split(warp.p, work_tile, warp.first_row, acc);
    u32 first_row = warp.team * TEAM_ROWS, rows = tile_row_count(warp.p, work_tile, first_row, TEAM_ROWS);
    MergeTeam team = {warp.team, TEAMS, warp.memory.flags.is_last_split + warp.team, TEAM_BARRIER + (int)warp.team,
                      first_row, rows, threadIdx.x / 32 % TEAM_WARPS, TEAM_WARPS};
    merge_if_last<TEAM_THREADS>(warp.p, work_tile, team, [&](u32 first, u32 count, u32 to) { merge_partials<16>(warp.p, work_tile, team, first, count, to); });
}

// ---- the products

struct MmaConsumer {
    const Warp& warp;
    u32 index,         // index in the ring of the next tile's work tile
        block,         // key block of the next tile
        end;           // end of the key blocks of that work tile
    bool has_probs,    // whether there are probabilities, of the tile before, whose values are still to be multiplied
        nonfinite,     // whether those values may be infinite or NaN
        first,         // whether the next tile is the first of its work tile
        more,          // whether there is a next tile
        any_masked;    // whether a tile of the work tile that is accumulated was masked

    DEVICE void begin_work_tile(u32 at) {
        index = at;
        const WorkTile& work_tile = warp.memory.work_tiles[index];
        end = end_block(work_tile);
        block = next_block(warp.p, work_tile, work_tile.begin / BLOCK_N, end);
        if (block >= end) end = block + 1;
        if (warp.lane < WARP_ROWS) warp.memory.rows[index % 2][warp.first_row + warp.lane] = row_of_tile(warp.p, work_tile, warp.first_row + warp.lane);
    }

    // Ends the work tile that is accumulated.
    //
    // First pass: stores the rows, unless they may be wrong (`needs_recompute`); then it sets the work tile's bit for this warp. Warps decide
    // alone, except over a split, which is stored and merged by the whole team. Second pass: stores where the bit is set; the other warps'
    // rows are right already. Where values were multiplied as non-finite from the start (`stream.nonfinite`), results are not checked.
    DEVICE void end_work_tile(OnlineSoftmax& acc) {
        WarpStream& stream = warp.stream;
        const WorkTile& work_tile = warp.memory.work_tiles[stream.index];
        bool split = work_tile.splits > 1, recompute = !stream.nonfinite && acc.needs_recompute(any_masked);
        recompute = split ? named_barrier_any<TEAM_THREADS>(TEAM_BARRIER + warp.team, recompute) : __any_sync(ALL_LANES, recompute);
        u32 bit = 1u << stream.ordinal % 32;
        if (stream.is_recomputing ? stream.recompute & bit : !recompute) {
            acc.reduce_row_sum(warp.p);
            if (CAN_OVERFLOW && stream.is_recomputing) acc.unshrink();
            if (split) store_and_merge(warp, work_tile, acc);
            else store_rows(warp.p, work_tile, warp.first_row, acc);
        }
        __syncwarp();
        if (warp.lane == 0) {
            if (recompute) stream.recompute |= bit;
            stream.index = next_index(stream.index);
            if (!stream.is_recomputing) stream.ordinal++, stream.nonfinite = stream.ordinal >= MAX_RECOMPUTED;
        }
        __syncwarp();
        acc.reset();
        any_masked = false;
    }

    // Remembers what the values of the tile that was multiplied need, and goes on to the next tile.
    DEVICE void advance(bool masked) {
        any_masked |= masked;
        nonfinite = warp.stream.nonfinite && (masked || CAN_OVERFLOW && warp.stream.is_recomputing);
        if (nonfinite) {
            __syncwarp();
            if (warp.lane == 0) warp.stream.probs_block = block, warp.stream.probs_index = index;
        }
        block = next_block(warp.p, warp.memory.work_tiles[index], block + 1, end);
        first = block == end;
        if (!first) return;
        more = warp.next_entry(warp.memory.work_tiles[index]);
        if (!more) return;
        // The next work tile's rows of q replace those that this warp has read for the last time.
        u32 next = next_index(index);
        __syncwarp();
        copy_warp_q(warp.p, warp.memory.work_tiles[next], warp.first_row, warp.q);
        begin_work_tile(next);
    }

    // out += probs v for the values of the tile before.
    DEVICE void multiply_values(OnlineSoftmax& acc, const Probs& probs, u32 v) const {
        if (nonfinite) {
            const WarpStream& stream = warp.stream;
            TileRows tile = {warp.rows(stream.probs_index), stream.probs_block * BLOCK_N};
            pv_gemm_nonfinite(warp.p, acc, probs, tile, v, stream.is_recomputing);
        } else {
            pv_gemm(acc, probs, v);
        }
    }
};

// Computes the stream of work tiles whose first tiles are being copied.
DEVICE void compute_stream(const Warp& warp, KvProducer& kv) {
    MmaConsumer mma = {warp, 0, 0, 0, false, false, true, true, false};
    mma.begin_work_tile(0);
    if (warp.lane == 0) warp.stream.index = 0;
    const u32 q_rows = warp.q + q_fragment(warp.first_row), k_rows = warp.k + k_fragment();
    OnlineSoftmax acc;
    acc.reset();
    Probs probs;
    WarpQ warp_q;
    u32 stage = 0;
    if (HAS_TEAMS && warp.team == 1) warp.end_turn();
    for (;;) {
        bool masked = mma.more && is_masked(warp.p, warp.memory.work_tiles[mma.index], mma.block);
        // The first tile of a work tile waits for its rows of q too.
        if (mma.first) cp_async_wait_all();
        else cp_async_wait<STAGES - 2>();
        warp.begin_turn();
        // Copies overwrite the stage that the step before has read.
        u32 last_stage = previous_stage(stage), v_stage = previous_stage(last_stage);
        if (!HAS_TEAMS) kv.fetch(v_stage, last_stage);
        if (mma.has_probs) mma.multiply_values(acc, probs, warp.v + last_stage * VTile::BYTES);
        if (!mma.more) break;
        if (mma.first) warp_q.load(q_rows);
        Scores scores;
        qk_gemm(scores, warp_q, q_rows, k_rows + stage * KTile::BYTES);
        warp.end_turn();
        if (HAS_TEAMS) {
            // The second team's other warps may read the values that it overwrites until their turn ends.
            if (warp.team == 1) named_barrier_sync<LOADERS>(LOAD_BARRIER);
            kv.fetch(v_stage, last_stage);
        }
        if (mma.first) {
            if (mma.has_probs) mma.end_work_tile(acc);
            // Rows of q that all blocks of threads read at about the same time, when this work tile ends.
            const WorkTile& work_tile = warp.memory.work_tiles[mma.index];
            if (warp.next_entry(work_tile)) prefetch_q(warp, warp.memory.work_tiles[next_index(mma.index)]);
        }
        TileRows tile = {warp.rows(mma.index), mma.block * BLOCK_N};
        mma.advance(masked);
        if (masked) online_softmax<true>(warp.p, acc, scores, probs, tile);
        else online_softmax<false>(warp.p, acc, scores, probs, tile);
        mma.has_probs = true;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    if (HAS_TEAMS && warp.team == 0) warp.end_turn();
    mma.end_work_tile(acc);
}

// Copies the description of a stream's first work tile; returns whether it exists.
DEVICE bool begin_stream(const Warp& warp, u32 entry) {
    warp.copy_description(entry, 0);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    PrefillMemory& memory = warp.memory;
    if (memory.work_tiles[0].sequence == NONE) return false;
    if (threadIdx.x == 0 && !warp.stream.is_recomputing) memory.flags.recompute = 0, memory.flags.second_entry = memory.work_tiles[0].next;
    return true;
}

// Finds the next work tile to recompute, in the order of the stream; returns whether there is one, and its entry.
DEVICE bool begin_recompute(const Warp& warp, u32& entry) {
    WarpStream& stream = warp.stream;
    BlockFlags& flags = warp.memory.flags;
    if (!stream.is_recomputing) {
        if (warp.lane == 0 && stream.recompute) atomicOr(&flags.recompute, stream.recompute);
        __syncthreads();
    }
    u32 done = stream.is_recomputing ? (2u << stream.ordinal) - 1 : 0, rest = flags.recompute & ~done;
    if (!rest) return false;
    u32 ordinal = __ffs(rest) - 1;
    entry = ordinal ? flags.second_entry + ordinal - 1 : blockIdx.x;
    __syncthreads();
    if (warp.lane == 0) stream.ordinal = ordinal, stream.is_recomputing = stream.nonfinite = 1;
    __syncwarp();
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) forward(const __grid_constant__ ForwardParams p) {
    extern __shared__ __align__(1024) u8 memory[];
    const Warp warp(p, memory);
    if (warp.lane == 0) warp.stream.ordinal = warp.stream.recompute = warp.stream.is_recomputing = warp.stream.nonfinite = 0;
    u32 entry = blockIdx.x;
    do {
        if (!begin_stream(warp, entry)) return;
        KvProducer kv = {warp};
        kv.start();
        compute_stream(warp, kv);
    } while (begin_recompute(warp, entry));
}
