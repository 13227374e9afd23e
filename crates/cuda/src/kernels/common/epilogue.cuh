// The end of a row: its sink, its logsumexp, its output.

// A score in units of log2.
DEVICE float to_log2(float score) {
    float core = fminf(fmaxf(score, -HUGE_BIAS), HUGE_BIAS);
    // The rest of an infinity or a NaN is that itself.
    return core * LOG2E + (score - core) * HUGE_RATE;
}

DEVICE float logsumexp(float row_max, float row_sum) {
    if (row_sum == 0.f) return -INF;
    float magnitude = fabsf(row_max);
    if (magnitude <= HUGE_SCORE || magnitude == INF) return (row_max + log2f(row_sum)) * LN2;
    // The inverse of `to_log2` for row_max; where a bias was added to a score, up to the rounding of their
    // sum.
    return copysignf(fminf(HUGE_BIAS + (magnitude - HUGE_SCORE) / HUGE_RATE, MAX_F32), row_max);
}

// The factor of a row's unnormalised output, and its logsumexp.
struct RowEnd {
    float factor, lse;
};

// Ends a row of row_max, in units of log2, and row_sum; its head's sink joins the sum.
DEVICE RowEnd finish_row(const ForwardParams& p, const WorkTile& work_tile, QRow at, float row_max, float row_sum) {
    float shift = 0.f, factor = 1.f, sink = -INF, sink_log2 = -INF, max = row_max;
    if constexpr (Scoring::HAS_BIAS) shift = alibi_shift(p, work_tile, at);
    if (p.sinks) {
        sink = ((const float*)p.sinks)[at.head];
        sink_log2 = to_log2(sink - shift);
        max = fmaxf(row_max, sink_log2);
        if (max != -INF) {
            factor = exp2f(row_max - max);
            row_sum = row_sum * factor + exp2f(sink_log2 - max);
        }
    }
    RowEnd end = {row_sum == 0.f ? 0.f : factor / row_sum, logsumexp(max, row_sum)};
    // A sink that is the maximum keeps digits that it would lose to the shift.
    if (shift != 0.f) end.lse = p.sinks && sink_log2 >= row_max ? (row_sum == 0.f ? -INF : sink + log2f(row_sum) * LN2) : end.lse + shift;
    return end;
}

DEVICE void store_lse(const ForwardParams& p, const WorkTile& work_tile, QRow at, float lse) {
    if (!p.lse || value_panel(work_tile)) return;
    u64 index = ((u64)work_tile.batch * p.q_heads + at.head) * p.q_len + work_tile.q_start + at.position;
    ((float*)p.lse)[index] = lse;
}

// Stores an element of a row of the output.
DEVICE void store_element(u64 row, u32 column, float x) {
    if (DTYPE == F32) ((float*)row)[column] = x;
    else ((u16*)row)[column] = (u16)pack<DTYPE>(x, 0.f);
}

// Stores columns `column..column + 4` of a row of the output.
DEVICE void store_columns4(const ForwardParams& p, u64 row, u32 column, float4 x) {
    float values[4] = {x.x, x.y, x.z, x.w};
    if (VECTOR_ROWS && column + 4 <= p.value_dim) {
        if constexpr (DTYPE == F32) *(float4*)(row + column * ELEMENT_BYTES) = x;
        else *(uint2*)(row + column * ELEMENT_BYTES) = make_uint2(pack<DTYPE>(x.x, x.y), pack<DTYPE>(x.z, x.w));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (column + i >= p.value_dim) break;
        store_element(row, column + i, values[i]);
    }
}
