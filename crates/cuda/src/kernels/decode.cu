// Decode: warps over the keys of a tile of few rows.
//
// Each warp copies and waits for its own keys alone; the warps' results are merged at the end of an item.

constexpr int RING = WKV * (K_BYTES + V_BYTES);
constexpr int MERGE_ROW = DV + 8;
constexpr int MERGE = WKV * BM * (MERGE_ROW + 2) * 4;
constexpr int ROWS_AT = QLayout::SIZE + (RING > MERGE ? RING : MERGE);
constexpr int FLAG_AT = ROWS_AT + BM * (int)sizeof(Row);
static_assert(FLAG_AT + 16 == SHARED);

// Four columns of a row, from the warps' parts in shared memory; values times `by`, a power of two.
DEVICE Sums merged(const float* values_at, const float* stats, float by) {
    Sums sums = {-INF, 0.f, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll
    for (int n = 0; n < WKV; n++) sums.m = fmaxf(sums.m, stats[n * BM * 2]);
    float shift = sums.m == -INF ? 0.f : sums.m;
#pragma unroll
    for (int n = 0; n < WKV; n++) {
        float weight = exp2_approx(stats[n * BM * 2] - shift);
        float4 o = *(const float4*)(values_at + n * BM * MERGE_ROW);
        sums.l = fmaf(stats[n * BM * 2 + 1], weight, sums.l);
        weight *= by;
        sums.o.x = fmaf(o.x, weight, sums.o.x);
        sums.o.y = fmaf(o.y, weight, sums.o.y);
        sums.o.z = fmaf(o.z, weight, sums.o.z);
        sums.o.w = fmaf(o.w, weight, sums.o.w);
    }
    return sums;
}

// All of an item at once: what is read of it later would wait once more.
DEVICE WorkTile load_item(const ForwardParams& p, u32 entry) {
    union {
        uint4 x[sizeof(WorkTile) / 16];
        WorkTile item;
    } all;
    const uint4* from = (const uint4*)(p.work_tiles + (u64)entry * sizeof(WorkTile));
#pragma unroll
    for (int i = 0; i < sizeof(WorkTile) / 16; i++) all.x[i] = __ldg(from + i);
    return all.item;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) forward(const __grid_constant__ ForwardParams p) {
    extern __shared__ __align__(1024) u8 memory[];
    Row* rows = (Row*)(memory + ROWS_AT);
    u32* flag = (u32*)(memory + FLAG_AT);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp_keys = warp * BN;
    u32 q_at = shared_address(memory), k_at = q_at + QLayout::SIZE + warp * (K_BYTES + V_BYTES), v_at = k_at + K_BYTES;
    u32 q_rows = q_at + q_fragment(0), k_rows = k_at + k_fragment();
    const Strided k_mine = strided<KLayout>(p.k), v_mine = strided<VLayout>(p.v);

    // An item again, where NaN of a key may have reached rows that do not see it, or sums overflowed.
    bool careful = false;
    for (u32 entry = blockIdx.x;;) {
        const WorkTile item = load_item(p, entry);
        if (item.sequence == NONE) return;
        u32 rest = item.q_len * p.group.value - item.row, count = rest < BM ? rest : BM;
        const Source source(p, item);
        u32 end = item.end > item.begin ? (item.end + TILE - 1) / TILE : item.begin / TILE;
        u32 block = skip(p, item, item.begin / TILE, end), fetched = block;
        auto fetch_k = [&](u32 slot) {
            if (fetched < end) copy_keys<KLayout, D>(p, p.k, source.keys, source.k, k_mine, k_at + slot * KLayout::SIZE, fetched * TILE + warp_keys, p.head_dim);
        };
        // Group n of the copies is the keys of tile n and the values of tile n - 1.
        auto fetch = [&](u32 v_slot, u32 k_slot) {
            if (fetched < end) {
                copy_keys<VLayout, DV>(p, p.v, source.keys, source.v, v_mine, v_at + v_slot * VLayout::SIZE, fetched * TILE + warp_keys, source.value_dim);
                fetched = skip(p, item, fetched + 1, end);
                fetch_k(k_slot);
            }
            commit();
        };
        fetch_k(0);
        for (u32 index = threadIdx.x; index < BM * QLayout::ROW_CHUNKS; index += THREADS) {
            u32 row = index / QLayout::ROW_CHUNKS, chunk = index % QLayout::ROW_CHUNKS;
            bool exists = row < count;
            u64 from = exists ? row_of(p.q, item, place(p, item.kv_head, item.row + row)) : p.q.at;
            copy_chunk(q_at + QLayout::chunk(row, chunk), from, chunk, p.head_dim, exists);
        }
        commit();
#pragma unroll
        for (int n = 1; n < ST; n++) fetch(n - 1, n);
        for (u32 n = threadIdx.x; n < BM; n += THREADS) rows[n] = row_of_tile(p, item, n);

        State state;
        state.reset();
        await<ST - 1>();
        __syncthreads();
        Kept kept;
        kept.load(q_rows);
        Weights weights;
        // The tile whose weights these are, and whether there is one; the slots of the next tile and of the one before.
        u32 before = 0, slot = 0, last_slot = ST - 1;
        bool pending = false, with_care = false, any_partial = false;
        for (;;) {
            await<ST - 1>();
            __syncwarp();
            if (pending) {
                u32 v = v_at + last_slot * VLayout::SIZE;
                if (with_care) add_values_with_care(p, state, weights, rows, v, before * TILE + warp_keys, true);
                else add_values(state, weights, v);
            }
            if (block >= end) break;
            Scores scores;
            multiply_keys(scores, kept, q_rows, k_rows + slot * KLayout::SIZE);
            // Into the places of what this step has read.
            __syncwarp();
            fetch(last_slot, slot);
            bool partial = is_partial(p, item, block);
            u32 j0 = block * TILE + warp_keys;
            if (partial) to_weights<true>(p, state, scores, weights, rows, j0);
            else to_weights<false>(p, state, scores, weights, rows, j0);
            any_partial |= partial;
            with_care = (SHRINKS || partial) && careful, before = block, pending = true;
            last_slot = slot;
            slot = slot + 1 == ST ? 0 : slot + 1;
            block = skip(p, item, block + 1, end);
        }
        await<0>();

        bool was_careful = careful;
        careful = __syncthreads_or(!careful && state.is_spoiled(any_partial));
        if (careful) continue;
        state.fold(p);
        if (SHRINKS && was_careful) state.restore();

        // The warps' results, then for every row their sum.
        bool split = item.splits > 1;
        float* merge = (float*)(memory + QLayout::SIZE);
        float* stats = merge + WKV * BM * MERGE_ROW;
#pragma unroll
        for (int mf = 0; mf < MF; mf++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 row = mf * 16 + half * 8 + g;
                if (row >= count) continue;
                float* to = merge + (warp * BM + row) * MERGE_ROW + 2 * t;
#pragma unroll
                for (int nf = 0; nf < OF; nf++)
                    *(float2*)(to + nf * 8) = make_float2(state.o[mf][nf][2 * half], state.o[mf][nf][2 * half + 1]);
                if (t == 0) {
                    stats[(warp * BM + row) * 2] = state.m[mf][half];
                    stats[(warp * BM + row) * 2 + 1] = state.l[mf][half];
                }
            }
        }
        __syncthreads();
        bool overflows = false;
        for (u32 index = threadIdx.x; index < count * QUADS; index += THREADS) {
            u32 row = index / QUADS, column = index % QUADS * 4;
            const float *values_at = merge + row * MERGE_ROW + column, *stats_at = stats + row * 2;
            Sums sums = merged(values_at, stats_at, 1.f);
            float grows = 1.f;
            if (SHRINKS && !sums.finite()) {
                Sums smaller = merged(values_at, stats_at, SHRINK);
                overflows |= smaller.finite();
                if (!split) sums = smaller, grows = 1.f / SHRINK;
            }
            if (split) leave_sums(p, item.slot, row, column, sums);
            else write_sums(p, item, row, column, sums, grows);
        }
        // Sums of the warps that overflow are left smaller, with weights that are.
        if (SHRINKS && split && __syncthreads_or(overflows)) {
            for (u32 index = threadIdx.x; index < count * QUADS; index += THREADS) {
                u32 row = index / QUADS, column = index % QUADS * 4;
                Sums sums = merged(merge + row * MERGE_ROW + column, stats + row * 2, SHRINK);
                sums.m -= SHRINK_LOG2, sums.l *= SHRINK;
                leave_sums(p, item.slot, row, column, sums);
            }
        }
        if (split) end_part<THREADS, 32>(p, item, Share{0, count, warp, WARPS}, 0, 1, flag, 0);
        if (!item.next) return;
        entry = item.next;
        __syncthreads();
    }
}
