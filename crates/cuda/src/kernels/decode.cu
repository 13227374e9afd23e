// Decode: warps over the keys of a tile of few rows.
//
// Each warp copies and waits for its own keys alone; the warps' results are merged at the end of a work tile.

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
        float prob = exp2_approx(stats[n * BM * 2] - shift);
        float4 o = *(const float4*)(values_at + n * BM * MERGE_ROW);
        sums.l = fmaf(stats[n * BM * 2 + 1], prob, sums.l);
        prob *= by;
        sums.o.x = fmaf(o.x, prob, sums.o.x);
        sums.o.y = fmaf(o.y, prob, sums.o.y);
        sums.o.z = fmaf(o.z, prob, sums.o.z);
        sums.o.w = fmaf(o.w, prob, sums.o.w);
    }
    return sums;
}

// All of a work tile at once: what is read of it later would wait once more.
DEVICE WorkTile load_item(const ForwardParams& p, u32 entry) {
    union {
        uint4 x[sizeof(WorkTile) / 16];
        WorkTile work_tile;
    } all;
    const uint4* from = (const uint4*)(p.work_tiles + (u64)entry * sizeof(WorkTile));
#pragma unroll
    for (int i = 0; i < sizeof(WorkTile) / 16; i++) all.x[i] = __ldg(from + i);
    return all.work_tile;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) forward(const __grid_constant__ ForwardParams p) {
    extern __shared__ __align__(1024) u8 memory[];
    Row* rows = (Row*)(memory + ROWS_AT);
    u32* flag = (u32*)(memory + FLAG_AT);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp_keys = warp * BN;
    u32 q_at = shared_address(memory), k_at = q_at + QLayout::SIZE + warp * (K_BYTES + V_BYTES), v_at = k_at + K_BYTES;
    u32 q_rows = q_at + q_fragment(0), k_rows = k_at + k_fragment();
    const Strided k_mine = strided<KLayout>(p.k), v_mine = strided<VLayout>(p.v);

    // A work tile again, where NaN of a key may have reached rows that do not see it, or sums overflowed.
    bool nonfinite = false;
    for (u32 entry = blockIdx.x;;) {
        const WorkTile work_tile = load_item(p, entry);
        if (work_tile.sequence == NONE) return;
        u32 rest = work_tile.q_len * p.group.value - work_tile.row, count = rest < BM ? rest : BM;
        const Source source(p, work_tile);
        u32 end = work_tile.end > work_tile.begin ? (work_tile.end + TILE - 1) / TILE : work_tile.begin / TILE;
        u32 block = skip(p, work_tile, work_tile.begin / TILE, end), fetched = block;
        auto fetch_k = [&](u32 slot) {
            if (fetched < end) copy_keys<KLayout, D>(p, p.k, source.keys, source.k, k_mine, k_at + slot * KLayout::SIZE, fetched * TILE + warp_keys, p.head_dim);
        };
        // Group n of the copies is the keys of tile n and the values of tile n - 1.
        auto fetch = [&](u32 v_slot, u32 k_slot) {
            if (fetched < end) {
                copy_keys<VLayout, DV>(p, p.v, source.keys, source.v, v_mine, v_at + v_slot * VLayout::SIZE, fetched * TILE + warp_keys, source.value_dim);
                fetched = skip(p, work_tile, fetched + 1, end);
                fetch_k(k_slot);
            }
            commit();
        };
        fetch_k(0);
        for (u32 index = threadIdx.x; index < BM * QLayout::ROW_CHUNKS; index += THREADS) {
            u32 row = index / QLayout::ROW_CHUNKS, chunk = index % QLayout::ROW_CHUNKS;
            bool exists = row < count;
            u64 from = exists ? row_of(p.q, work_tile, place(p, work_tile.kv_head, work_tile.row + row)) : p.q.at;
            copy_chunk(q_at + QLayout::chunk(row, chunk), from, chunk, p.head_dim, exists);
        }
        commit();
#pragma unroll
        for (int n = 1; n < ST; n++) fetch(n - 1, n);
        for (u32 n = threadIdx.x; n < BM; n += THREADS) rows[n] = row_of_tile(p, work_tile, n);

        State state;
        state.reset();
        await<ST - 1>();
        __syncthreads();
        Kept kept;
        kept.load(q_rows);
        Probs probs;
        // The tile whose probabilities these are, whether there is one, and whether its values may be infinite or NaN; the slots of the next tile and of the one before.
        u32 before = 0, slot = 0, last_slot = ST - 1;
        bool pending = false, probs_nonfinite = false, any_partial = false;
        for (;;) {
            await<ST - 1>();
            __syncwarp();
            if (pending) {
                u32 v = v_at + last_slot * VLayout::SIZE;
                if (probs_nonfinite) add_values_nonfinite(p, state, probs, rows, v, before * TILE + warp_keys, true);
                else add_values(state, probs, v);
            }
            if (block >= end) break;
            Scores scores;
            multiply_keys(scores, kept, q_rows, k_rows + slot * KLayout::SIZE);
            // Into the places of what this step has read.
            __syncwarp();
            fetch(last_slot, slot);
            bool partial = is_partial(p, work_tile, block);
            u32 j0 = block * TILE + warp_keys;
            if (partial) to_probs<true>(p, state, scores, probs, rows, j0);
            else to_probs<false>(p, state, scores, probs, rows, j0);
            any_partial |= partial;
            probs_nonfinite = (SHRINKS || partial) && nonfinite, before = block, pending = true;
            last_slot = slot;
            slot = slot + 1 == ST ? 0 : slot + 1;
            block = skip(p, work_tile, block + 1, end);
        }
        await<0>();

        bool was_nonfinite = nonfinite;
        nonfinite = __syncthreads_or(!nonfinite && state.is_spoiled(any_partial));
        if (nonfinite) continue;
        state.fold(p);
        if (SHRINKS && was_nonfinite) state.restore();

        // The warps' results, then for every row their sum.
        bool split = work_tile.splits > 1;
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
            if (split) leave_sums(p, work_tile.slot, row, column, sums);
            else write_sums(p, work_tile, row, column, sums, grows);
        }
        // Sums of the warps that overflow are left smaller, with probabilities that are.
        if (SHRINKS && split && __syncthreads_or(overflows)) {
            for (u32 index = threadIdx.x; index < count * QUADS; index += THREADS) {
                u32 row = index / QUADS, column = index % QUADS * 4;
                Sums sums = merged(merge + row * MERGE_ROW + column, stats + row * 2, SHRINK);
                sums.m -= SHRINK_LOG2, sums.l *= SHRINK;
                leave_sums(p, work_tile.slot, row, column, sums);
            }
        }
        if (split) end_part<THREADS, 32>(p, work_tile, Share{0, count, warp, WARPS}, 0, 1, flag, 0);
        if (!work_tile.next) return;
        entry = work_tile.next;
        __syncthreads();
    }
}
