// Terms of each query row for the backward pass, by tiles: -lse in units of log2, and delta = sum(d_out * out) - d_lse. Clears the turns of
// tiles, and d_q of tiles that see no key. Sums over rows, for gradients of sinks and of ALiBi slopes: of each tile, and of all.

// Lanes of a row, for 16 bytes each of the wider of q and out: a power of two.
constexpr u32 ROW_LANES = COLUMNS > 128 ? 32 : COLUMNS > 64 ? 16 : 8, PREPARE_THREADS = 256;
// log2 of PROB_SCALE of scores.cuh.
constexpr float LOG2_PROB_SCALE = DTYPE == F16 ? 14 : 0, INVERSE_PROB_SCALE = DTYPE == F16 ? 1 / 16384.f : 1;

// Elements `8 lane` to `8 lane + 7` of a row, zeros behind its end.
DEVICE uint4 row_chunk(const Tensor& tensor, u64 offset, u32 lane, u32 columns) {
    if (8 * lane >= columns) return make_uint4(0, 0, 0, 0);
    return *(const uint4*)(tensor.at + offset + 16 * lane);
}

DEVICE u64 row_offset(const Tensor& tensor, u32 batch, u32 head, u32 row) { return batch * tensor.batch + head * tensor.head + row * tensor.row; }

DEVICE float products(uint4 a, uint4 b) {
    float sum = 0;
    const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++) sum += unpack<DTYPE>(x[i], 0) * unpack<DTYPE>(y[i], 0) + unpack<DTYPE>(x[i], 1) * unpack<DTYPE>(y[i], 1);
    return sum;
}

// exp(sink - lse) delta; 0 where the sink has a probability of 0.
DEVICE float sink_term(float sink, float lse, float delta) {
    const float prob = exp2f(fminf((sink - lse) * LOG2E, 0));
    return prob == 0 || lse == -INF ? 0 : prob * delta;
}

// The sum of a value of each thread of a block, in one order; for thread 0.
DEVICE float block_sum(float x) {
    __shared__ float sums[PREPARE_THREADS / 32];
    x = warp_sum(x);
    // All threads have read the sums of an earlier call.
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
    for (u32 i = 0; i < PREPARE_THREADS / 32; i++) sum += sums[i];
    return sum;
}

// The sum of a list's tiles of a head and sequence, of which this thread takes some.
DEVICE float tile_sum(const BackwardParams& p, u64 list, u32 sequence, u32 head) {
    const BackwardSequence s = ((const BackwardSequence*)p.sequences)[sequence];
    float sum = 0;
    for (u32 tile = threadIdx.x; tile < tile_count(s); tile += PREPARE_THREADS) sum += ((const float*)list)[tile_index(p, s, head, tile)];
    return sum;
}

// d_sinks[h] = -sum exp(sink - lse) delta over the rows of a head: a block for each.
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) sum_sinks(const __grid_constant__ PrepareParams p) {
    float sum = 0;
    for (u32 n = 0; n < p.sequences; n++) sum += tile_sum(p.backward, p.sink_terms, n, blockIdx.x);
    sum = block_sum(sum);
    if (threadIdx.x == 0) ((float*)p.d_sinks)[blockIdx.x] = -sum;
}

// d_alibi_slopes[h] = -sum d_score distance over the pairs of a head, or of a head and sequence: a block for each.
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) sum_slopes(const __grid_constant__ PrepareParams p) {
    const BackwardParams& of = p.backward;
    const u32 head = blockIdx.x;
    auto counts = [&](u32 sequence) { return of.alibi_stride == 0 || sequence == blockIdx.y; };
    float sum = 0;
    for (u32 n = 0; n < p.sequences; n++)
        if (counts(n)) sum += tile_sum(of, p.shift_terms, n, head);
    for (u32 n = threadIdx.x; n < p.units; n += PREPARE_THREADS) {
        const BackwardUnit unit = ((const BackwardUnit*)of.units)[n];
        if (unit.kv_head != head / of.group || unit.first_tile == unit.end_tile || !counts(unit.sequence)) continue;
        const float* sums = (const float*)of.distance_sums + (u64)(n * of.group + head % of.group) * UNIT_WARPS;
        for (u32 warp = 0; warp < UNIT_WARPS; warp++) sum += sums[warp];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) ((float*)p.d_alibi_slopes)[(u64)blockIdx.y * of.alibi_stride + head] = -sum;
}

extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) prepare(const __grid_constant__ PrepareParams more) {
    const BackwardParams& p = more.backward;
    const u32 tile = blockIdx.x, head = blockIdx.y;
    const BackwardSequence s = ((const BackwardSequence*)p.sequences)[blockIdx.z];
    if (tile >= tile_count(s)) return;
    const u64 index = tile_index(p, s, head, tile);
    const u32 units = ((const BackwardTileUnits*)p.tile_units)[s.tiles_before + tile].count;
    if (threadIdx.x == 0) ((u32*)p.turns)[index] = 0;
    float sinks = 0, shifts = 0;
    for (u32 at = threadIdx.x; at < BLOCK_M * ROW_LANES; at += PREPARE_THREADS) {
        const u32 in_tile = at / ROW_LANES, lane = at % ROW_LANES, i = tile * BLOCK_M + in_tile, row = s.q_start + i;
        const bool is_row = i < s.q_len;
        float sum = 0;
        if (is_row)
            sum = products(row_chunk(more.out, row_offset(more.out, s.batch, head, row), lane, more.value_dim),
                           row_chunk(more.d_out, row_offset(more.d_out, s.batch, head, row), lane, more.value_dim));
#pragma unroll
        for (u32 step = ROW_LANES / 2; step; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        if (is_row && units == 0 && 8 * lane < p.head_dim)
            *(uint4*)(p.d_q.at + row_offset(p.d_q, s.batch, head, row) + 16 * lane) = make_uint4(0, 0, 0, 0);
        if (lane) continue;
        const u64 of_row = ((u64)s.batch * p.q_heads + head) * more.q_len + row, to = index * BLOCK_M + in_tile;
        const float lse = is_row ? ((const float*)more.lse)[of_row] : -INF;
        float distance = 0, slope = 0;
        if (HAS_ALIBI && is_row) {
            const i32 position = s.offset + (i32)i;
            distance = alibi_distance(p, s, position, position);
            slope = alibi_slope(p, blockIdx.z, head);
        }
        // No key of a row without any is seen, and rows behind the last have probabilities of 0.
        ((float*)p.neg_lse)[to] = lse == -INF ? -INF : fmaf(-fmaf(slope, distance, lse), LOG2E, LOG2_PROB_SCALE);
        const float d_lse = is_row && more.d_lse ? ((const float*)more.d_lse)[of_row] : 0;
        sum -= d_lse;
        ((float*)p.delta)[to] = is_row ? sum * INVERSE_PROB_SCALE : 0;
        if (!is_row) continue;
        const float sink = more.sinks ? sink_term(((const float*)more.sinks)[head], lse, sum) : 0;
        sinks += sink;
        // The gradients of a row's scores add up to the gradient of its logsumexp and the term of its sink.
        if (distance > 0 && lse != -INF) shifts += distance * (sink + d_lse);
    }
    if (more.d_sinks) {
        sinks = block_sum(sinks);
        if (threadIdx.x == 0) ((float*)more.sink_terms)[index] = sinks;
    }
    if (more.d_alibi_slopes) {
        shifts = block_sum(shifts);
        if (threadIdx.x == 0) ((float*)more.shift_terms)[index] = shifts;
    }
}
