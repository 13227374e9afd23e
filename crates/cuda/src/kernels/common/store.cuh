// Results of a warp: rows of the output and of logsumexp, or of a partial. `first_row` is the warp's first row of the tile.

// Where a row of a warp's fragments is stored, 0 if it does not exist, and the factor of its elements.
struct RowOut {
    u64 at;
    float factor;
};

// The rows of a lane's fragments.
constexpr int LANE_ROWS = 2 * MMA_M;

// The ends of the rows of a lane's fragments, and the logsumexp of the lane's own row (`own_row`).
struct RowEnds {
    RowOut rows[LANE_ROWS];
    float lse;
};

// The row of a work tile that a lane ends: the four lanes that have the same rows end one each.
DEVICE u32 own_row(const WorkTile& work_tile, u32 first_row) {
    static_assert(LANE_ROWS == 2 || LANE_ROWS == 4);
    u32 lane = opaque(threadIdx.x % 32);
    return work_tile.row + first_row + lane % LANE_ROWS * 8 + lane / 4;
}

// Ends a warp's rows, of row_max in units of log2 and whole row_sum.
DEVICE RowEnds end_rows(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const RowStats& stats) {
    u32 lane = opaque(threadIdx.x % 32), own = lane % LANE_ROWS;
    float row_max = stats.row_max[0][0], row_sum = stats.row_sum[0][0];
#pragma unroll
    for (int n = 1; n < LANE_ROWS; n++)
        if (own == n) row_max = stats.row_max[n / 2][n % 2], row_sum = stats.row_sum[n / 2][n % 2];
    u32 row = own_row(work_tile, first_row);
    bool exists = row < row_count(p, work_tile);
    QRow at = exists ? q_row(p, work_tile.kv_head, row) : QRow{0, 0};
    RowEnd end = finish_row(p, work_tile, at, row_max, row_sum);
    u64 to = exists ? row_address(p.out, work_tile, at) + value_panel(work_tile) * (VALUE_DIM * ELEMENT_BYTES) : 0;
    RowEnds ends;
#pragma unroll
    for (int n = 0; n < LANE_ROWS; n++) {
        u32 source = lane / 4 * 4 + n;
        u32 low = __shfl_sync(ALL_LANES, (u32)to, source), high = __shfl_sync(ALL_LANES, (u32)(to >> 32), source);
        ends.rows[n] = {(u64)high << 32 | low, __shfl_sync(ALL_LANES, end.factor, source)};
    }
    ends.lse = end.lse;
    return ends;
}

// Stores the logsumexp of a warp's rows.
DEVICE void store_lse(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const RowEnds& ends) {
    if (!p.lse) return;
    u32 row = own_row(work_tile, first_row);
    if (threadIdx.x % 4 < LANE_ROWS && row < row_count(p, work_tile)) store_lse(p, work_tile, q_row(p, work_tile.kv_head, row), ends.lse);
}

// Returns true if lanes can store the tile's columns of a row four at a time.
DEVICE bool has_vector_columns(const ForwardParams& p, const WorkTile& work_tile) {
    const u32 columns = value_columns(p, work_tile);
    return VECTOR_ROWS && (columns >= VALUE_DIM || columns % 4 == 0);
}

// Lanes that have two columns of each of two fragments exchange them, and then have four columns of one:
// lanes of even t of the first fragment, lanes of odd t of the second. `quad_column` is the first of the
// four; `exchange` takes a lane's columns of both fragments, and returns the columns of its neighbour.
DEVICE u32 quad_column(u32 t) { return t % 2 * 8 + t / 2 * 4; }

template <typename T>
DEVICE T exchange(u32 t, T x, T y) { return __shfl_xor_sync(ALL_LANES, t % 2 ? x : y, 1); }

// Stores `columns` 16-bit elements of a row, four at a time. `words` makes the words of one fragment, before lanes exchange them.
template <typename Words>
DEVICE void store_words(RowOut row, u32 columns, Words words) {
    const u32 t = opaque(threadIdx.x % 4), first = quad_column(t), end = row.at ? columns : 0;
    const u64 to = row.at + first * ELEMENT_BYTES;
#pragma unroll
    for (int n = 0; n < PV_MMA_N; n += 2) {
        u32 x = words(n), y = words(n + 1);
        u32 received = exchange(t, x, y);
        if (first + n * 8 < end) *(uint2*)(to + n * 8 * ELEMENT_BYTES) = t % 2 ? make_uint2(received, y) : make_uint2(x, received);
    }
}

// Stores a row of a warp's fragments: a lane has columns 8 n + 2 t and 8 n + 2 t + 1.
template <bool VECTORS>
DEVICE void store_row(const ForwardParams& p, const WorkTile& work_tile, const OnlineSoftmax& acc, RowOut row, int m, int half) {
    const u32 t = opaque(threadIdx.x % 4), columns = row.at ? value_columns(p, work_tile) : 0;
    auto element = [&](int n, int i) { return finite_mean(acc.out[m][n][2 * half + i], row.factor, 1.f); };
    if constexpr (VECTORS && DTYPE == F32) {
        const u64 to = row.at + 2 * t * ELEMENT_BYTES;
#pragma unroll
        for (int n = 0; n < PV_MMA_N; n++)
            if (n * 8 + 2 * t < columns) *(float2*)(to + n * 8 * ELEMENT_BYTES) = make_float2(element(n, 0), element(n, 1));
    } else if constexpr (VECTORS) {
        store_words(row, columns, [&](int n) { return pack<DTYPE>(element(n, 0), element(n, 1)); });
    } else {
#pragma unroll
        for (int n = 0; n < 2 * PV_MMA_N; n++) {
            const u32 column = n / 2 * 8 + 2 * t + n % 2;
            if (column < columns) store_element(row.at, column, element(n / 2, n % 2));
        }
    }
}

// Stores a warp's rows, of row_max in units of log2 and whole row_sum.
DEVICE void store_rows(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const OnlineSoftmax& acc) {
    const RowEnds ends = end_rows(p, work_tile, first_row, acc);
    store_lse(p, work_tile, first_row, ends);
    if (has_vector_columns(p, work_tile)) {
#pragma unroll
        for (int n = 0; n < LANE_ROWS; n++) store_row<true>(p, work_tile, acc, ends.rows[n], n / 2, n % 2);
    } else {
#pragma unroll
        for (int n = 0; n < LANE_ROWS; n++) store_row<false>(p, work_tile, acc, ends.rows[n], n / 2, n % 2);
    }
}

// Stores a warp's rows of one split of a tile.
DEVICE void store_split(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const OnlineSoftmax& acc) {
    const u32 lane = opaque(threadIdx.x % 32), t = lane % 4, first = quad_column(t);
    float* to = partial_at(p, work_tile.partial);
#pragma unroll
    for (int m = 0; m < MMA_M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 row = first_row + m * 16 + half * 8 + lane / 4;
            const bool exists = work_tile.row + row < row_count(p, work_tile);
#pragma unroll
            for (int n = 0; n < PV_MMA_N; n += 2) {
                const float x0 = acc.out[m][n][2 * half], x1 = acc.out[m][n][2 * half + 1];
                const float y0 = acc.out[m][n + 1][2 * half], y1 = acc.out[m][n + 1][2 * half + 1];
                const float r0 = exchange(t, x0, y0), r1 = exchange(t, x1, y1);
                if (exists) __stcg((float4*)(to + row * VALUE_DIM + n * 8 + first), t % 2 ? make_float4(r0, r1, y0, y1) : make_float4(x0, x1, r0, r1));
            }
            if (exists && t == 0) {
                __stcg(to + PARTIAL_ROW_MAX + row, acc.row_max[m][half]);
                __stcg(to + PARTIAL_ROW_SUM + row, acc.row_sum[m][half]);
            }
        }
    }
}
