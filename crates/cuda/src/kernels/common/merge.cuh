// Splits of a tile: their partials in device memory, and the merge of them in the order of their keys.
//
// A partial is BLOCK_M rows of VALUE_DIM f32 of unnormalised output, then row_max and row_sum of each row. Teams that share rows have one
// each, next to each other.

constexpr int PARTIAL_FLOATS = BLOCK_M * (VALUE_DIM + 2), PARTIAL_ROW_MAX = BLOCK_M * VALUE_DIM, PARTIAL_ROW_SUM = PARTIAL_ROW_MAX + BLOCK_M;
// From one split's partial to the next split's.
constexpr int PARTIAL_STEP = VALUE_TEAMS * PARTIAL_FLOATS;
// Quads of four columns of a row.
constexpr int QUADS = VALUE_DIM / 4;

// A row over some keys: row_max, row_sum and four columns of its unnormalised output.
struct PartialRow {
    float row_max, row_sum;
    float4 out;

    DEVICE bool is_finite() const { return fabsf(out.x) < INF && fabsf(out.y) < INF && fabsf(out.z) < INF && fabsf(out.w) < INF; }
};

DEVICE float* partial_at(const ForwardParams& p, u32 partial) { return (float*)p.partials + (u64)partial * PARTIAL_STEP + value_team() * PARTIAL_FLOATS; }

// Stores four columns of a row of a tile in a partial.
DEVICE void store_partial(const ForwardParams& p, u32 partial, u32 row, u32 column, PartialRow x) {
    float* to = partial_at(p, partial);
    __stcg((float4*)(to + row * VALUE_DIM + column), x.out);
    if (column == 0) {
        __stcg(to + PARTIAL_ROW_MAX + row, x.row_max);
        __stcg(to + PARTIAL_ROW_SUM + row, x.row_sum);
    }
}

// Stores four columns of a row of a tile in the output, times `unshrink`.
DEVICE void store_merged(const ForwardParams& p, const WorkTile& work_tile, u32 row, u32 column, PartialRow x, float unshrink) {
    QRow at = q_row(p, work_tile.kv_head, work_tile.row + row);
    RowEnd end = finish_row(p, work_tile, at, x.row_max, x.row_sum);
    float factor = end.factor;
    u32 to_column = value_panel(work_tile) * VALUE_DIM + column;
    float4 o = x.out;
    if (to_column < p.value_dim)
        store_columns4(p, row_address(p.out, work_tile, at), to_column,
                       make_float4(finite_mean(o.x, factor, unshrink), finite_mean(o.y, factor, unshrink),
                                   finite_mean(o.z, factor, unshrink), finite_mean(o.w, factor, unshrink)));
    if (column == 0) store_lse(p, work_tile, at, end.lse);
}

// Threads of a block that end a tile together: they synchronize at a named barrier and share a flag.
struct MergeTeam {
    // Of several teams of a block, each with counters of its own.
    u32 team, teams;
    u32* is_last;
    int barrier;
    // Rows of the tile that the team merges.
    u32 first_row, rows;
    // This warp of the team's.
    u32 warp, warps;
};

// Whether the N threads of a team are the last of `splits` teams that have stored a partial; they see all partials then. The counter is
// 0 again afterwards.
template <int N>
DEVICE bool is_last_split(const ForwardParams& p, u32 counter, u32 splits, const MergeTeam& team) {
    named_barrier_sync<N>(team.barrier);
    if (threadIdx.x % N == 0) {
        // What the others have written before the barrier is published with this.
        u32* at = (u32*)p.counters + counter;
        fence_device();
        bool last = atomicAdd(at, 1) + 1 == splits;
        fence_device();
        if (last) *at = 0;
        *team.is_last = last;
    }
    named_barrier_sync<N>(team.barrier);
    return *team.is_last;
}

// A lane's four columns of a row that is merged, `quad` fours from the row's start. The row is NONE where there is none.
struct MergedQuad {
    u32 row, quad;

    DEVICE bool exists() const { return row != NONE && quad < QUADS; }
};

// Merges COUNT quads of `count` partials from `first` on, in the order of their keys; values times `by`, a power of two.
template <int BATCH, int COUNT>
DEVICE void merge_quads(const ForwardParams& p, u32 first, u32 count, const MergedQuad (&quads)[COUNT], float by, PartialRow (&sums)[COUNT]) {
    const float* partials = partial_at(p, first);
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (PartialRow& sum : sums) sum = {-INF, 0.f, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll 1
    for (u32 n = 0; n < count; n += BATCH) {
        // All loads of a batch are issued before any of them is used. A lane loads row_max and row_sum of one partial.
        const u32 rest = count - n;
        float4 out[COUNT][BATCH];
        float row_max[COUNT], row_sum[COUNT];
#pragma unroll
        for (int c = 0; c < COUNT; c++) {
            const MergedQuad at = quads[c];
            const float* row_max_at = partials + (u64)(n + lane) * PARTIAL_STEP + PARTIAL_ROW_MAX + at.row;
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                out[c][i] = make_float4(0.f, 0.f, 0.f, 0.f);
                if (i < rest && at.exists()) out[c][i] = __ldcg((const float4*)(partials + (u64)(n + i) * PARTIAL_STEP + at.row * VALUE_DIM + at.quad * 4));
            }
            const bool exists = at.row != NONE && lane < BATCH && lane < rest;
            row_max[c] = exists ? __ldcg(row_max_at) : -INF;
            row_sum[c] = exists ? __ldcg(row_max_at + BLOCK_M) : 0.f;
        }
#pragma unroll
        for (int c = 0; c < COUNT; c++) {
            PartialRow& sum = sums[c];
            float max = row_max[c], added = row_sum[c];
#pragma unroll
            for (int i = 16; i; i /= 2) max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, i));
            max = fmaxf(max, sum.row_max);
            const float shift = max == -INF ? 0.f : max, old_factor = exp2_approx(sum.row_max - shift), factor = exp2_approx(row_max[c] - shift);
            added *= factor;
#pragma unroll
            for (int i = 16; i; i /= 2) added += __shfl_xor_sync(ALL_LANES, added, i);
            sum.row_max = max;
            sum.row_sum = fmaf(sum.row_sum, old_factor, added);
            sum.out.x *= old_factor, sum.out.y *= old_factor, sum.out.z *= old_factor, sum.out.w *= old_factor;
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const float4 x = out[c][i];
                const float of_partial = __shfl_sync(ALL_LANES, factor * by, i);
                sum.out.x = fmaf(x.x, of_partial, sum.out.x);
                sum.out.y = fmaf(x.y, of_partial, sum.out.y);
                sum.out.z = fmaf(x.z, of_partial, sum.out.z);
                sum.out.w = fmaf(x.w, of_partial, sum.out.w);
            }
        }
    }
}

// Merges a team's rows of `count` partials from `first` on, into the partial `to`, or for NONE into the output. A lane merges COUNT quads at a
// time: the more, the more loads are under way.
template <int BATCH, int COUNT>
DEVICE void merge_partials(const ForwardParams& p, const WorkTile& work_tile, const MergeTeam& team, u32 first, u32 count, u32 to) {
    constexpr u32 ROW_UNITS = (QUADS + 31) / 32;
    const u32 lane = threadIdx.x % 32, units = team.rows * ROW_UNITS;
#pragma unroll 1
    for (u32 unit = team.warp; unit < units; unit += team.warps * COUNT) {
        MergedQuad quads[COUNT];
#pragma unroll
        for (int c = 0; c < COUNT; c++) {
            const u32 own = unit + c * team.warps;
            quads[c] = {own < units ? team.first_row + own / ROW_UNITS : NONE, own % ROW_UNITS * 32 + lane};
        }
        PartialRow sums[COUNT];
        merge_quads<BATCH>(p, first, count, quads, 1.f, sums);
#pragma unroll
        for (int c = 0; c < COUNT; c++) {
            const MergedQuad at = quads[c];
            PartialRow& sum = sums[c];
            float unshrink = 1.f;
            // Sums of groups may have overflowed as well: the splits themselves are merged.
            if (CAN_OVERFLOW && to == NONE && __any_sync(ALL_LANES, at.exists() && !sum.is_finite())) {
                PartialRow shrunk[1];
                const MergedQuad again[1] = {at};
                merge_quads<1>(p, work_tile.first_partial, num_splits(work_tile), again, SHRINK, shrunk);
                if (!sum.is_finite()) sum = shrunk[0], unshrink = 1.f / SHRINK;
            }
            if (!at.exists()) continue;
            if (to == NONE) store_merged(p, work_tile, at.row, at.quad * 4, sum, unshrink);
            else store_partial(p, to, at.row, at.quad * 4, sum);
        }
    }
}

// What the N threads of a team do when they have stored a partial: those that come last merge all of them.
template <int N, int BATCH, int COUNT = 1>
DEVICE void merge_if_last(const ForwardParams& p, const WorkTile& work_tile, const MergeTeam& team) {
    u32 first = work_tile.first_partial, count = num_splits(work_tile);
    if (work_tile.splits & SPLITS_GROUPED) {
        u32 group = (work_tile.partial - first) / MERGE_GROUP, rest = count - group * MERGE_GROUP, size = rest < MERGE_GROUP ? rest : MERGE_GROUP;
        if (!is_last_split<N>(p, (work_tile.counter + 1 + group) * team.teams + team.team, size, team)) return;
        merge_partials<(BATCH < MERGE_GROUP ? BATCH : MERGE_GROUP), COUNT>(p, work_tile, team, first + group * MERGE_GROUP, size, first + count + group);
        first += count;
        count = (count + MERGE_GROUP - 1) / MERGE_GROUP;
    }
    if (is_last_split<N>(p, work_tile.counter * team.teams + team.team, count, team)) merge_partials<BATCH, COUNT>(p, work_tile, team, first, count, NONE);
}
