// Decode: warps over the keys of a tile of few rows.
//
// Each warp copies its own keys and waits for them alone; the warps' results are merged at the end of a work tile. A work tile where NaN of
// a key may have reached rows that do not see it, or whose sums overflowed, is recomputed by `pv_gemm_nonfinite`.

constexpr int K_RING = STAGES * KTile::BYTES, V_RING = STAGES * VTile::BYTES, RINGS = WARPS_K * (K_RING + V_RING);

// The warps' results of a work tile, in the place of their keys and values. Rows are padded against bank conflicts.
constexpr int MERGE_ROW = VALUE_DIM + 8;

struct WarpResults {
    float out[WARPS_K][BLOCK_M][MERGE_ROW];
    // row_max and row_sum.
    float max_sum[WARPS_K][BLOCK_M][2];
};

struct DecodeMemory {
    u8 q[QTile::BYTES];
    union {
        u8 rings[RINGS];
        WarpResults results;
    };
    Row rows[BLOCK_M];
    // 1 if the block is the last of the splits of a tile.
    u32 is_last_split[4];
};
static_assert(sizeof(DecodeMemory) == SHARED_BYTES);

// Loads all of a work tile at once: each load of a field that comes later would wait for memory again.
DEVICE WorkTile load_work_tile(const ForwardParams& p, u32 entry) {
    union {
        uint4 x[sizeof(WorkTile) / 16];
        WorkTile work_tile;
    } all;
    const uint4* from = (const uint4*)work_tile_at(p, entry);
#pragma unroll
    for (int i = 0; i < sizeof(WorkTile) / 16; i++) all.x[i] = __ldg(from + i);
    return all.work_tile;
}

// ---- copies

// The copies of a warp's keys and values: group n is the keys of tile n and the values of tile n - 1.
struct KvProducer {
    const ForwardParams& p;
    const WorkTile& work_tile;
    const KvSource& source;
    const CopyStart &k_start, &v_start;
    // Shared addresses of the warp's rings, and the first of its keys in a tile.
    u32 k, v, warp_keys;
    // The tile of keys that was copied last, and the end of the tiles.
    u32 fetched, end;

    DEVICE void copy_k(u32 stage) {
        KvRows rows = {p.k, source.keys, source.k, p.head_dim};
        if (fetched < end) copy_kv_tile<KTile>(p, rows, k_start, k + stage * KTile::BYTES, fetched * BLOCK_N + warp_keys);
    }

    DEVICE void fetch(u32 v_stage, u32 k_stage) {
        if (fetched < end) {
            KvRows rows = {p.v, source.keys, source.v, source.value_dim};
            copy_kv_tile<VTile>(p, rows, v_start, v + v_stage * VTile::BYTES, fetched * BLOCK_N + warp_keys);
            fetched = next_block(p, work_tile, fetched + 1, end);
            copy_k(k_stage);
        }
        cp_async_commit();
    }
};

// Copies the rows of q of a tile; those from `rows` on are 0.
DEVICE void copy_q(const ForwardParams& p, const WorkTile& work_tile, u32 q, u32 rows) {
    for (u32 index = threadIdx.x; index < BLOCK_M * QTile::ROW_CHUNKS; index += THREADS) {
        u32 row = index / QTile::ROW_CHUNKS, chunk = index % QTile::ROW_CHUNKS;
        bool exists = row < rows;
        u64 from = exists ? row_address(p.q, work_tile, q_row(p, work_tile.kv_head, work_tile.row + row)) : p.q.at;
        copy_chunk(q + QTile::chunk(row, chunk), from, chunk, p.head_dim, exists);
    }
}

// ---- products

// Accumulates the tiles of a warp's keys; returns whether any of them was masked. `nonfinite` where values may be infinite or NaN.
DEVICE bool accumulate(KvProducer& kv, OnlineSoftmax& acc, const Row* rows, u32 q_rows, u32 block, bool nonfinite) {
    const ForwardParams& p = kv.p;
    const u32 k_rows = kv.k + k_fragment();
    WarpQ warp_q;
    warp_q.load(q_rows);
    Probs probs;
    // The tile of the probabilities, if there are some; the stages of the next tile and of the one before.
    u32 probs_block = 0, stage = 0, last_stage = STAGES - 1;
    bool has_probs = false, probs_nonfinite = false, any_masked = false;
    for (;;) {
        cp_async_wait<STAGES - 1>();
        __syncwarp();
        if (has_probs) {
            u32 v = kv.v + last_stage * VTile::BYTES;
            if (probs_nonfinite) pv_gemm_nonfinite(p, acc, probs, {rows, probs_block * BLOCK_N + kv.warp_keys}, v, true);
            else pv_gemm(acc, probs, v);
        }
        if (block >= kv.end) break;
        Scores scores;
        qk_gemm(scores, warp_q, q_rows, k_rows + stage * KTile::BYTES);
        // Copies overwrite the stage that this step has read.
        __syncwarp();
        kv.fetch(last_stage, stage);
        bool masked = is_masked(p, kv.work_tile, block);
        TileRows tile = {rows, block * BLOCK_N + kv.warp_keys};
        if (masked) online_softmax<true>(p, acc, scores, probs, tile);
        else online_softmax<false>(p, acc, scores, probs, tile);
        any_masked |= masked;
        probs_nonfinite = (CAN_OVERFLOW || masked) && nonfinite, probs_block = block, has_probs = true;
        last_stage = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        block = next_block(p, kv.work_tile, block + 1, kv.end);
    }
    cp_async_wait<0>();
    return any_masked;
}

// ---- results

// Stores a warp's rows for the merge of the warps.
DEVICE void store_results(WarpResults& results, const OnlineSoftmax& acc, u32 warp, u32 rows) {
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < MMA_M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = m * 16 + half * 8 + g;
            if (row >= rows) continue;
            float* to = results.out[warp][row] + 2 * t;
#pragma unroll
            for (int n = 0; n < PV_MMA_N; n++) *(float2*)(to + n * 8) = make_float2(acc.out[m][n][2 * half], acc.out[m][n][2 * half + 1]);
            if (t == 0) {
                results.max_sum[warp][row][0] = acc.row_max[m][half];
                results.max_sum[warp][row][1] = acc.row_sum[m][half];
            }
        }
    }
}

// Merges four columns of a row of the warps' results; values times `by`, a power of two.
DEVICE PartialRow merge_warps(const WarpResults& results, u32 row, u32 column, float by) {
    const float *out_at = results.out[0][row] + column, *max_sum = results.max_sum[0][row];
    PartialRow sum = {-INF, 0.f, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll
    for (int n = 0; n < WARPS_K; n++) sum.row_max = fmaxf(sum.row_max, max_sum[n * BLOCK_M * 2]);
    float shift = sum.row_max == -INF ? 0.f : sum.row_max;
#pragma unroll
    for (int n = 0; n < WARPS_K; n++) {
        float factor = exp2_approx(max_sum[n * BLOCK_M * 2] - shift);
        float4 o = *(const float4*)(out_at + n * BLOCK_M * MERGE_ROW);
        sum.row_sum = fmaf(max_sum[n * BLOCK_M * 2 + 1], factor, sum.row_sum);
        factor *= by;
        sum.out.x = fmaf(o.x, factor, sum.out.x);
        sum.out.y = fmaf(o.y, factor, sum.out.y);
        sum.out.z = fmaf(o.z, factor, sum.out.z);
        sum.out.w = fmaf(o.w, factor, sum.out.w);
    }
    return sum;
}

// Merges the warps' results and stores the rows of a work tile: in the output, or in its partial where its tile has splits.
DEVICE void epilogue(const ForwardParams& p, const WorkTile& work_tile, const WarpResults& results, u32 rows) {
    bool split = work_tile.splits > 1, overflows = false;
    for (u32 index = threadIdx.x; index < rows * QUADS; index += THREADS) {
        u32 row = index / QUADS, column = index % QUADS * 4;
        PartialRow sum = merge_warps(results, row, column, 1.f);
        float unshrink = 1.f;
        if (CAN_OVERFLOW && !is_finite(sum.out)) {
            PartialRow shrunk = merge_warps(results, row, column, SHRINK);
            overflows |= is_finite(shrunk.out);
            if (!split) sum = shrunk, unshrink = 1.f / SHRINK;
        }
        if (split) store_partial(p, work_tile.partial, row, column, sum);
        else store_merged(p, work_tile, row, column, sum, unshrink);
    }
    // Where the merge overflows the partial is of smaller values, with smaller probabilities.
    if (CAN_OVERFLOW && split && __syncthreads_or(overflows)) {
        for (u32 index = threadIdx.x; index < rows * QUADS; index += THREADS) {
            u32 row = index / QUADS, column = index % QUADS * 4;
            PartialRow sum = merge_warps(results, row, column, SHRINK);
            sum.row_max -= SHRINK_LOG2, sum.row_sum *= SHRINK;
            store_partial(p, work_tile.partial, row, column, sum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) forward(const __grid_constant__ ForwardParams p) {
    extern __shared__ __align__(1024) u8 bytes[];
    DecodeMemory& memory = *(DecodeMemory*)bytes;
    const u32 warp = threadIdx.x / 32, q = shared_address(bytes), k = q + QTile::BYTES + warp * (K_RING + V_RING);
    const u32 q_rows = q + q_fragment(0);
    const CopyStart k_start = copy_start<KTile>(p.k), v_start = copy_start<VTile>(p.v);
    bool nonfinite = false;
    for (u32 entry = blockIdx.x;;) {
        const WorkTile work_tile = load_work_tile(p, entry);
        if (work_tile.sequence == NONE) return;
        const u32 rows = tile_row_count(p, work_tile, 0, BLOCK_M);
        const KvSource source(p, work_tile);
        const u32 end = work_tile.end > work_tile.begin ? end_block(work_tile) : work_tile.begin / BLOCK_N;
        const u32 block = next_block(p, work_tile, work_tile.begin / BLOCK_N, end);
        KvProducer kv = {p, work_tile, source, k_start, v_start, k, k + K_RING, warp * WARP_KEYS, block, end};
        kv.copy_k(0);
        copy_q(p, work_tile, q, rows);
        cp_async_commit();
#pragma unroll
        for (int n = 1; n < STAGES; n++) kv.fetch(n - 1, n);
        for (u32 n = threadIdx.x; n < BLOCK_M; n += THREADS) memory.rows[n] = row_of_tile(p, work_tile, n);
        OnlineSoftmax acc;
        acc.reset();
        cp_async_wait<STAGES - 1>();
        __syncthreads();
        bool any_masked = accumulate(kv, acc, memory.rows, q_rows, block, nonfinite);
        bool was_nonfinite = nonfinite;
        nonfinite = __syncthreads_or(!nonfinite && acc.needs_recompute(any_masked));
        if (nonfinite) continue;
        acc.reduce_row_sum(p);
        if (CAN_OVERFLOW && was_nonfinite) acc.unshrink();
        store_results(memory.results, acc, warp, rows);
        __syncthreads();
        epilogue(p, work_tile, memory.results, rows);
        if (work_tile.splits > 1) {
            MergeTeam team = {0, 1, memory.is_last_split, 0, 0, rows, warp, WARPS};
            merge_if_last<THREADS>(p, work_tile, team, [&](u32 first, u32 count, u32 to) { merge_partials<32>(p, work_tile, team, first, count, to); });
        }
        if (!work_tile.next) return;
        entry = work_tile.next;
        __syncthreads();
    }
}
