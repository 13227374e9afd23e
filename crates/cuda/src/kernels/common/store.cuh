// Results of a warp: rows of the output and of logsumexp, or of a partial. `first_row` is the warp's first row of the tile.

// Stores a row of a warp's fragments: a lane has columns 8 n + 2 t and 8 n + 2 t + 1. WHOLE where the output has all of the columns, at
// addresses for vectors.
template <bool WHOLE>
DEVICE void store_row(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const OnlineSoftmax& acc, int m, int half) {
    u32 lane = opaque(threadIdx.x % 32), t = lane % 4, first_column = work_tile.panel * VALUE_DIM;
    u32 row = work_tile.row + first_row + m * 16 + half * 8 + lane / 4;
    bool exists = row < row_count(p, work_tile);
    QRow at = exists ? q_row(p, work_tile.kv_head, row) : QRow{0, 0};
    RowEnd end = finish_row(p, work_tile, at, acc.row_max[m][half], acc.row_sum[m][half]);
    float factor = end.factor;
    u64 to = row_address(p.out, work_tile, at) + first_column * ELEMENT_BYTES;
    if (t == 0 && exists) store_lse(p, work_tile, at, end.lse);
    if (WHOLE && DTYPE == F32) {
        to += 2 * t * ELEMENT_BYTES;
#pragma unroll
        for (int n = 0; n < PV_MMA_N; n++) {
            const float(&o)[4] = acc.out[m][n];
            if (exists) *(float2*)(to + n * 8 * ELEMENT_BYTES) = make_float2(finite_mean(o[2 * half], factor, 1.f), finite_mean(o[2 * half + 1], factor, 1.f));
        }
    } else if constexpr (WHOLE && DTYPE != F32) {
        // Lanes of even t store four columns of the first of two fragments, the others four of the second.
        to += (t % 2 * 8 + t / 2 * 4) * ELEMENT_BYTES;
#pragma unroll
        for (int n = 0; n < PV_MMA_N; n += 2) {
            const float(&o0)[4] = acc.out[m][n], (&o1)[4] = acc.out[m][n + 1];
            u32 x = pack<DTYPE>(finite_mean(o0[2 * half], factor, 1.f), finite_mean(o0[2 * half + 1], factor, 1.f));
            u32 y = pack<DTYPE>(finite_mean(o1[2 * half], factor, 1.f), finite_mean(o1[2 * half + 1], factor, 1.f));
            u32 received = __shfl_xor_sync(ALL_LANES, t % 2 ? x : y, 1);
            if (exists) *(uint2*)(to + n * 8 * ELEMENT_BYTES) = t % 2 ? make_uint2(received, y) : make_uint2(x, received);
        }
    } else {
        u32 columns = exists ? p.value_dim - first_column : 0;
#pragma unroll
        for (int n = 0; n < 2 * PV_MMA_N; n++) {
            u32 column = n / 2 * 8 + 2 * t + n % 2;
            if (column < columns) store_element(to, column, finite_mean(acc.out[m][n / 2][2 * half + n % 2], factor, 1.f));
        }
    }
}

DEVICE void store_rows(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const OnlineSoftmax& acc) {
    if (VECTOR_ROWS && (work_tile.panel + 1) * VALUE_DIM <= p.value_dim) {
#pragma unroll
        for (int n = 0; n < 2 * MMA_M; n++) store_row<true>(p, work_tile, first_row, acc, n / 2, n % 2);
    } else {
#pragma unroll
        for (int n = 0; n < 2 * MMA_M; n++) store_row<false>(p, work_tile, first_row, acc, n / 2, n % 2);
    }
}

// Stores a warp's rows of one split of a tile.
DEVICE void store_split(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const OnlineSoftmax& acc) {
    u32 lane = opaque(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    float* to = partial_at(p, work_tile.partial);
#pragma unroll
    for (int m = 0; m < MMA_M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = first_row + m * 16 + half * 8 + g;
            if (work_tile.row + row >= row_count(p, work_tile)) continue;
#pragma unroll
            for (int n = 0; n < PV_MMA_N; n++)
                __stcg((float2*)(to + row * VALUE_DIM + n * 8 + 2 * t), make_float2(acc.out[m][n][2 * half], acc.out[m][n][2 * half + 1]));
            if (t == 0) {
                __stcg(to + PARTIAL_ROW_MAX + row, acc.row_max[m][half]);
                __stcg(to + PARTIAL_ROW_SUM + row, acc.row_sum[m][half]);
            }
        }
    }
}
