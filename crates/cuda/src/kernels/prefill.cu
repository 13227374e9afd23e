// Prefill: warps over the rows of a tile.
//
// A block of threads computes its work tiles as one stream of tiles: keys of the next work tile are on their way while the last one's are
// multiplied, and a result is written between two steps. Eight warps are two teams of four that take turns at the matrix unit:
// while one multiplies, the other makes probabilities. The first team copies keys for both, the second values.

constexpr bool TEAMS = WQ == 8;
constexpr int TEAM_THREADS = TEAMS ? THREADS / 2 : THREADS;
static_assert(!TEAMS || ST == 2);
// Work tiles that the copies have reached and the sums have not left, and one more of which the description is on its way; an even
// number, so that rows of neighbours are in different halves.
constexpr int LISTED = (ST + 4) / 2 * 2;
// Work tiles of a block of threads past AGAIN are computed with care at once.
static_assert(AGAIN < 32);

// Where a warp is in its stream. It is in shared memory since registers are for sums and scores.
struct Stream {
    // The work tile of which tiles are copied, its place and its end; the place of the work tile that is computed.
    Source source;
    u32 ahead, fetched_end, at;
    // Of the work tiles of the block: that which is computed, and one bit for each of those to be computed again for this warp's rows;
    // whether a work tile is computed again now, and whether with care.
    u32 ordinal, own, alone, nonfinite;
    // The tile of which the probabilities are, and the place of its work tile.
    u32 before, before_at;
};

constexpr int ROWS_AT = QLayout::SIZE + K_BYTES + V_BYTES;
constexpr int WORK_TILES_AT = ROWS_AT + 2 * BM * (int)sizeof(Row);
constexpr int STREAMS_AT = WORK_TILES_AT + LISTED * (int)sizeof(WorkTile);
constexpr int FLAGS_AT = STREAMS_AT + WARPS * STREAM;
static_assert(FLAGS_AT + 16 == SHARED && sizeof(Stream) <= STREAM);

// Named barriers: turns of the teams, threads that copy, and each team.
constexpr int TURN = 1, LOAD = 3, TEAM = 4;

// A step begins when what it reads is in shared memory and what it overwrites was read.
DEVICE void begin_turn(u32 team) {
    if (TEAMS) named_sync<THREADS>(TURN + team);
    else __syncthreads();
}

DEVICE void end_turn(u32 team) {
    if (TEAMS) named_arrive<THREADS>(TURN + 1 - team);
}

// Copies a warp's rows of q, of which those past the last are 0.
DEVICE void copy_q(const ForwardParams& p, const WorkTile& work_tile, u32 q_at, u32 warp_row) {
    constexpr int CHUNKS = QLayout::ROW_CHUNKS;
    u32 lane = afresh(threadIdx.x % 32);
    // Every lane finds a row, and hands it to those that copy it.
    u32 mine = warp_row + lane % ROWS;
    bool mine_exists = work_tile.row + mine < work_tile.q_len * p.group.value;
    u64 mine_at = mine_exists ? row_of(p.q, work_tile, place(p, work_tile.kv_head, work_tile.row + mine)) : p.q.at;
    // Few at a time: the registers are those of the sums.
#pragma unroll 2
    for (int n = 0; n < ROWS * CHUNKS / 32; n++) {
        u32 index = n * 32 + lane, row = index / CHUNKS, chunk = index % CHUNKS;
        u64 from = __shfl_sync(0xffffffffu, mine_at, row);
        bool exists = __shfl_sync(0xffffffffu, mine_exists, row);
        copy_chunk(q_at + QLayout::chunk(warp_row + row, chunk), from, chunk, p.head_dim, exists);
    }
}

// Asks for a warp's rows of q, so that they are in the second-level cache when they are copied.
DEVICE void prefetch_q(const ForwardParams& p, const WorkTile& work_tile, u32 warp_row) {
    u32 lane = afresh(threadIdx.x % 32), row = work_tile.row + warp_row + lane;
    if (lane >= ROWS || row >= work_tile.q_len * p.group.value) return;
    u64 from = row_of(p.q, work_tile, place(p, work_tile.kv_head, row));
    for (u32 byte = 0; byte < p.head_dim * E; byte += 128) prefetch((const void*)(from + byte));
}

// Writes a row of a warp's fragments: a lane has columns 8 n + 2 t and the next of fragment n. `whole` where the output has all of
// the columns, at places for vectors.
template <bool WHOLE>
DEVICE void write_row(const ForwardParams& p, const WorkTile& work_tile, const State& state, u32 warp_row, int mf, int half) {
    u32 lane = afresh(threadIdx.x % 32), t = lane % 4, first_column = work_tile.panel * DV;
    u32 row = work_tile.row + warp_row + mf * 16 + half * 8 + lane / 4;
    bool exists = row < work_tile.q_len * p.group.value;
    Place at = exists ? place(p, work_tile.kv_head, row) : Place{0, 0};
    Ended ended = finish(p, work_tile, at, state.m[mf][half], state.l[mf][half]);
    float factor = ended.factor;
    u64 to = row_of(p.out, work_tile, at) + first_column * E;
    if (t == 0 && exists) write_lse(p, work_tile, at, ended.lse);
    if (WHOLE && DTYPE == F32) {
        to += 2 * t * E;
#pragma unroll
        for (int nf = 0; nf < OF; nf++) {
            const float(&o)[4] = state.o[mf][nf];
            if (exists) *(float2*)(to + nf * 8 * E) = make_float2(mean(o[2 * half], factor, 1.f), mean(o[2 * half + 1], factor, 1.f));
        }
    } else if (WHOLE) {
        // Lanes of even t take four columns of the first of two fragments, the others four of the second.
        to += (t % 2 * 8 + t / 2 * 4) * E;
#pragma unroll
        for (int nf = 0; nf < OF; nf += 2) {
            const float(&o0)[4] = state.o[mf][nf], (&o1)[4] = state.o[mf][nf + 1];
            u32 x = pack<DTYPE>(mean(o0[2 * half], factor, 1.f), mean(o0[2 * half + 1], factor, 1.f));
            u32 y = pack<DTYPE>(mean(o1[2 * half], factor, 1.f), mean(o1[2 * half + 1], factor, 1.f));
            u32 got = __shfl_xor_sync(0xffffffffu, t % 2 ? x : y, 1);
            if (exists) *(uint2*)(to + nf * 8 * E) = t % 2 ? make_uint2(got, y) : make_uint2(x, got);
        }
    } else {
        // Through memory of the thread, for a loop that is not unrolled: this is not to stand in the way of what is frequent.
        float copy[2 * OF];
#pragma unroll
        for (int n = 0; n < 2 * OF; n++) copy[n] = mean(state.o[mf][n / 2][2 * half + n % 2], factor, 1.f);
        u32 columns = exists ? p.value_dim - first_column : 0;
#pragma unroll 1
        for (u32 n = 0; n < 2 * OF; n++) {
            u32 column = n / 2 * 8 + 2 * t + n % 2;
            if (column >= columns) continue;
            if (DTYPE == F32) ((float*)to)[column] = copy[n];
            else ((u16*)to)[column] = (u16)pack<DTYPE>(copy[n], 0.f);
        }
    }
}

DEVICE void write_rows(const ForwardParams& p, const WorkTile& work_tile, const State& state, u32 warp_row) {
    if (VECTOR && (work_tile.panel + 1) * DV <= p.value_dim) {
#pragma unroll
        for (int n = 0; n < 2 * MF; n++) write_row<true>(p, work_tile, state, warp_row, n / 2, n % 2);
    } else {
#pragma unroll
        for (int n = 0; n < 2 * MF; n++) write_row<false>(p, work_tile, state, warp_row, n / 2, n % 2);
    }
}

// Leaves a warp's part of a tile that several work tiles share.
DEVICE void leave_part(const ForwardParams& p, const WorkTile& work_tile, const State& state, u32 warp_row) {
    u32 lane = afresh(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    float* part = (float*)p.partials + (u64)work_tile.slot * SLOT;
#pragma unroll
    for (int mf = 0; mf < MF; mf++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = warp_row + mf * 16 + half * 8 + g;
            if (work_tile.row + row >= work_tile.q_len * p.group.value) continue;
#pragma unroll
            for (int nf = 0; nf < OF; nf++)
                __stcg((float2*)(part + row * DV + nf * 8 + 2 * t), make_float2(state.o[mf][nf][2 * half], state.o[mf][nf][2 * half + 1]));
            if (t == 0) {
                __stcg(part + BM * DV + row, state.m[mf][half]);
                __stcg(part + BM * DV + BM + row, state.l[mf][half]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) forward(const __grid_constant__ ForwardParams p) {
    extern __shared__ __align__(1024) u8 memory[];
    Row* all_rows = (Row*)(memory + ROWS_AT);
    const WorkTile* work_tiles = (const WorkTile*)(memory + WORK_TILES_AT);
    // Work tiles that are to be computed again, whether each team is the last at a tile, and the entry of the second work tile.
    u32* flags = (u32*)(memory + FLAGS_AT);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = TEAMS ? warp / 4 : 0, warp_row = warp * ROWS;
    Stream& my = *(Stream*)(memory + STREAMS_AT + warp * STREAM);
    u32 q_at = shared_address(memory), k_at = q_at + QLayout::SIZE, v_at = k_at + K_BYTES;
    u32 q_rows = q_at + q_fragment(warp_row), k_rows = k_at + k_fragment();

    auto describe = [&](u32 entry, u32 place) {
        if (threadIdx.x < sizeof(WorkTile) / 16) {
            u64 from = p.work_tiles + (u64)entry * sizeof(WorkTile) + threadIdx.x * 16;
            copy16(q_at + WORK_TILES_AT + place * sizeof(WorkTile) + threadIdx.x * 16, (const u8*)from, 16);
        }
    };
    auto after = [](u32 place) { return place + 1 == LISTED ? 0 : place + 1; };

    // Work tiles where NaN of a key may have reached rows that do not see it, or sums overflowed, are computed again, one by one and with
    // care; `again` has a bit for each.
    u32 again = 0, entry = blockIdx.x;
    if (lane == 0) my.ordinal = my.own = my.alone = my.nonfinite = 0;
    for (;;) {
        describe(entry, 0);
        commit();
        await<0>();
        __syncthreads();
        if (work_tiles[0].sequence == NONE) return;
        if (threadIdx.x == 0 && !my.alone) flags[0] = 0, flags[3] = work_tiles[0].next;

        // ---- the copies: of teams, group n is tile n, and otherwise the keys of tile n and the values of tile n - 1

        // Begins to copy the work tile at a place; returns its first tile.
        auto enter = [&](u32 place) {
            const WorkTile& work_tile = work_tiles[place];
            u32 end = (work_tile.end + TILE - 1) / TILE, first = skip(p, work_tile, work_tile.begin / TILE, end);
            __syncwarp();
            if (lane == 0) my.source = Source(p, work_tile), my.ahead = place, my.fetched_end = first < end ? end : first + 1;
            if (work_tile.next && !my.alone) describe(work_tile.next, after(place));
            __syncwarp();
            return first;
        };
        // The tile that was copied last, of which values may be left; NONE where there are no more.
        u32 fetched = enter(0);
        auto copy_k = [&](u32 slot) {
            copy_keys<KLayout, D>(p, p.k, my.source.keys, my.source.k, strided<KLayout>(p.k), k_at + slot * KLayout::SIZE, fetched * TILE, p.head_dim);
        };
        auto copy_v = [&](u32 slot) {
            copy_keys<VLayout, DV>(p, p.v, my.source.keys, my.source.v, strided<VLayout>(p.v), v_at + slot * VLayout::SIZE, fetched * TILE, my.source.value_dim);
        };
        auto fetch = [&](u32 v_slot, u32 k_slot) {
            if (fetched != NONE) {
                u32 next = skip(p, work_tiles[my.ahead], fetched + 1, my.fetched_end);
                bool leaves = next == my.fetched_end;
                if (leaves && ST > 2) {
                    // The next description may have been asked for in one of the groups that are still on their way.
                    await_all();
                    named_sync<LOADERS>(LOAD);
                }
                if (!TEAMS) copy_v(v_slot);
                fetched = next;
                if (leaves) fetched = work_tiles[my.ahead].next && !my.alone ? enter(after(my.ahead)) : NONE;
                if (fetched != NONE) {
                    if (team == 0) copy_k(k_slot);
                    else copy_v(k_slot);
                }
            }
            commit();
        };
        if (team == 0) copy_k(0);
        else copy_v(0);
        copy_q(p, work_tiles[0], q_at, warp_row);
        commit();
#pragma unroll
        for (int n = 1; n < ST - 1; n++) fetch(n - 1, n);

        // ---- the sums
        u32 at = 0, block, end;
        auto begin_item = [&](const WorkTile& work_tile) {
            end = (work_tile.end + TILE - 1) / TILE;
            block = skip(p, work_tile, work_tile.begin / TILE, end);
            if (block >= end) end = block + 1;
            if (lane < ROWS) all_rows[at % 2 * BM + warp_row + lane] = row_of_tile(p, work_tile, warp_row + lane);
        };
        begin_item(work_tiles[0]);
        if (lane == 0) my.at = 0;
        State state;
        state.reset();
        Probs probs;
        Kept kept;
        bool any_partial = false;

        // Ends the work tile that is computed.
        auto end_item = [&] {
            const WorkTile& work_tile = work_tiles[my.at];
            bool split = work_tile.splits > 1;
            bool leaked = !my.nonfinite && state.is_spoiled(any_partial);
            leaked = split ? named_any<TEAM_THREADS>(TEAM + team, leaked) : __any_sync(0xffffffffu, leaked);
            u32 bit = 1u << my.ordinal % 32;
            if (my.alone ? my.own & bit : !leaked) {
                state.fold(p);
                if (SHRINKS && my.alone) state.restore();
                if (!split) {
                    write_rows(p, work_tile, state, warp_row);
                } else {
                    leave_part(p, work_tile, state, warp_row);
                    constexpr u32 TEAM_ROWS = BM * TEAM_THREADS / THREADS, TEAM_WARPS = TEAM_THREADS / 32;
                    u32 rest = work_tile.q_len * p.group.value - work_tile.row, first = team * TEAM_ROWS;
                    u32 count = rest <= first ? 0 : rest - first < TEAM_ROWS ? rest - first : TEAM_ROWS;
                    Share share = {first, count, warp % TEAM_WARPS, TEAM_WARPS};
                    end_part<TEAM_THREADS, 16>(p, work_tile, share, team, THREADS / TEAM_THREADS, flags + 1 + team, TEAM + team);
                }
            }
            __syncwarp();
            if (lane == 0) {
                if (leaked) my.own |= bit;
                my.at = after(my.at);
                if (!my.alone) my.ordinal++, my.nonfinite = my.ordinal >= AGAIN;
            }
            __syncwarp();
            state.reset();
            any_partial = false;
        };

        if (TEAMS && team == 1) end_turn(1);
        // Of the next tile.
        u32 slot = 0;
        // Whether there are probabilities, and are to be multiplied with care; whether the next tile is the first of a work tile, and exists.
        bool pending = false, nonfinite = false, first = true, more = true;
        for (;;) {
            bool partial = more && is_partial(p, work_tiles[at], block);
            // The rows of q of a new work tile too.
            if (first) await_all();
            else await<ST - 2>();
            begin_turn(team);
            // Into the places of what the step before has read.
            auto previous = [](u32 slot) { return slot == 0 ? ST - 1 : slot - 1; };
            u32 last_slot = previous(slot), v_slot = previous(last_slot);
            if (!TEAMS) fetch(v_slot, last_slot);
            if (pending) {
                u32 v = v_at + last_slot * VLayout::SIZE;
                if (nonfinite) add_values_nonfinite(p, state, probs, all_rows + my.before_at % 2 * BM + warp_row, v, my.before * TILE, my.alone);
                else add_values(state, probs, v);
            }
            if (!more) break;
            if (first) kept.load(q_rows);
            Scores scores;
            multiply_keys(scores, kept, q_rows, k_rows + slot * KLayout::SIZE);
            end_turn(team);
            if (TEAMS) {
                // The second team's other warps may read the values that it overwrites until their turn ends.
                if (team == 1) named_sync<LOADERS>(LOAD);
                fetch(v_slot, last_slot);
            }
            if (first) {
                if (pending) end_item();
                // Rows of q that are read when this work tile ends, by all blocks of threads at about the same time.
                if (work_tiles[at].next && !my.alone) prefetch_q(p, work_tiles[after(at)], warp_row);
            }
            u32 tile = block;
            const Row* rows = all_rows + at % 2 * BM + warp_row;
            any_partial |= partial;
            nonfinite = my.nonfinite && (partial || SHRINKS && my.alone);
            if (nonfinite) {
                __syncwarp();
                if (lane == 0) my.before = tile, my.before_at = at;
            }
            block = skip(p, work_tiles[at], block + 1, end);
            first = block == end;
            if (first) {
                more = work_tiles[at].next && !my.alone;
                if (more) {
                    // The next work tile's rows of q take the place of those that this warp has read for the last time.
                    at = after(at);
                    __syncwarp();
                    copy_q(p, work_tiles[at], q_at, warp_row);
                    begin_item(work_tiles[at]);
                }
            }
            if (partial) to_probs<true>(p, state, scores, probs, rows, tile * TILE);
            else to_probs<false>(p, state, scores, probs, rows, tile * TILE);
            pending = true;
            slot = slot + 1 == ST ? 0 : slot + 1;
        }

        if (TEAMS && team == 0) end_turn(0);
        end_item();

        if (!my.alone) {
            if (lane == 0 && my.own) atomicOr(flags, my.own);
            __syncthreads();
            again = flags[0];
        }
        if (!again) return;
        // The entries of work tiles after the first lie side by side.
        u32 ordinal = __ffs(again) - 1;
        again &= again - 1;
        entry = ordinal ? flags[3] + ordinal - 1 : blockIdx.x;
        __syncthreads();
        if (lane == 0) my.ordinal = ordinal, my.alone = my.nonfinite = 1;
        __syncwarp();
    }
}
