// Terms of each query row for the backward pass, by tiles: -lse in units of log2, and delta = sum(d_out * out) - d_lse. Clears the turns of
// tiles, and d_q of tiles that see no key.

// Lanes of a row: 16 bytes each.
constexpr u32 ROW_LANES = COLUMNS / 8, PREPARE_THREADS = 256;
// log2 of PROB_SCALE of memory.cuh.
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

extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) prepare(const __grid_constant__ PrepareParams more) {
    const BackwardParams& p = more.backward;
    const u32 tile = blockIdx.x, head = blockIdx.y;
    const BackwardSequence s = ((const BackwardSequence*)p.sequences)[blockIdx.z];
    const u32 tiles = (s.q_len + BLOCK_M - 1) / BLOCK_M;
    if (tile >= tiles) return;
    const u64 index = (u64)s.tiles_before * p.q_heads + head * tiles + tile;
    const u32 units = ((const BackwardTileUnits*)p.tile_units)[s.tiles_before + tile].count;
    if (threadIdx.x == 0) ((u32*)p.turns)[index] = 0;
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
        // No key of a row without any is seen, and rows behind the last have probabilities of 0.
        ((float*)p.neg_lse)[to] = lse == -INF ? -INF : fmaf(-lse, LOG2E, LOG2_PROB_SCALE);
        if (is_row && more.d_lse) sum -= ((const float*)more.d_lse)[of_row];
        ((float*)p.delta)[to] = is_row ? sum * INVERSE_PROB_SCALE : 0;
    }
}
