// Splits of a tile: their partials in device memory, and the merge of them in the order of their keys.
//
// sm90 has partials and MergeTeam from here, and merges by sm90/shared_merge.cuh: it does not use store_merged, is_last_split, merge_row,
// merge_partials and merge_if_last.
//
// A partial is BLOCK_M rows of VALUE_DIM f32 of unnormalised output, then row_max and row_sum of each row. Teams that share rows have one
// each, next to each other.

constexpr int PARTIAL_FLOATS = BLOCK_M * (VALUE_DIM + 2), PARTIAL_ROW_MAX = BLOCK_M * VALUE_DIM, PARTIAL_ROW_SUM = PARTIAL_ROW_MAX + BLOCK_M;
// From one split's partial to the next split's.
constexpr int PARTIAL_STEP = VALUE_CONSUMERS * PARTIAL_FLOATS;
// Quads of four columns of a row.
constexpr int QUADS = VALUE_DIM / 4;

// A row over some keys: row_max, row_sum and four columns of its unnormalised output.
struct PartialRow {
    float row_max, row_sum;
    float4 out;
};

DEVICE bool is_within(float4 x, float limit) { return fabsf(x.x) <= limit && fabsf(x.y) <= limit && fabsf(x.z) <= limit && fabsf(x.w) <= limit; }

DEVICE bool is_finite(float4 x) { return is_within(x, MAX_F32); }

DEVICE void add_times(float4& sum, float4 x, float factor) {
    sum.x = fmaf(x.x, factor, sum.x), sum.y = fmaf(x.y, factor, sum.y), sum.z = fmaf(x.z, factor, sum.z), sum.w = fmaf(x.w, factor, sum.w);
}

DEVICE float* partial_at(const ForwardParams& p, u32 partial) { return (float*)p.partials + (u64)partial * PARTIAL_STEP + value_consumer() * PARTIAL_FLOATS; }

// Stores four columns of a row of a tile in a partial.
DEVICE void store_partial(const ForwardParams& p, u32 partial, u32 row, u32 column, PartialRow x) {
    float* to = partial_at(p, partial);
    __stcg((float4*)(to + row * VALUE_DIM + column), x.out);
    if (column == 0) {
        __stcg(to + PARTIAL_ROW_MAX + row, x.row_max);
        __stcg(to + PARTIAL_ROW_SUM + row, x.row_sum);
    }
}

// Four columns of sums times the factor of their row and `unshrink`.
DEVICE float4 finite_means(float4 x, float factor, float unshrink) {
    return make_float4(finite_mean(x.x, factor, unshrink), finite_mean(x.y, factor, unshrink), finite_mean(x.z, factor, unshrink), finite_mean(x.w, factor, unshrink));
}

// Stores four columns of a row of a tile in the output, times `unshrink`.
DEVICE void store_merged(const ForwardParams& p, const WorkTile& work_tile, u32 row, u32 column, PartialRow x, float unshrink) {
    QRow at = q_row(p, work_tile.kv_head, work_tile.row + row);
    RowEnd end = finish_row(p, work_tile, at, x.row_max, x.row_sum);
    const u32 to_column = value_panel(work_tile) * VALUE_DIM + column;
    if (to_column < p.value_dim) store_columns4(p, row_address(p.out, work_tile, at), to_column, finite_means(x.out, end.factor, unshrink));
    if (column == 0) store_lse(p, work_tile, at, end.lse);
}

// Threads of a block that end a tile together (sm90: a consumer): they synchronize at a named barrier and share a word.
struct MergeTeam {
    // Of several teams of a block, each with counters of its own.
    u32 team, teams;
    // A word in shared memory by which one thread tells the others: true if the team has stored the last split (`is_last_split`); on sm90 its share
    // of the merge (`merge_splits`).
    u32* message;
    int barrier;
    // Rows of the tile that the team merges.
    u32 first_row, rows;
    // This warp of the team's.
    u32 warp, warps;
};

// Returns true if the N threads of a team are the last of `splits` teams that have stored a partial; they see
// all partials then. The counter is 0 again afterwards.
template <int N>
DEVICE bool is_last_split(const ForwardParams& p, u32 counter, u32 splits, const MergeTeam& team) {
    named_barrier_sync<N>(team.barrier);
    if (threadIdx.x % N == 0) {
        // The first fence also publishes stores of the team's other threads before the barrier.
        u32* at = (u32*)p.counters + counter;
        fence_device();
        bool last = atomicAdd(at, 1) + 1 == splits;
        fence_device();
        if (last) *at = 0;
        *team.message = last;
    }
    named_barrier_sync<N>(team.barrier);
    return *team.message;
}

// Merges a row of `count` partials from `first` on in the order of their keys, four columns a lane; values times `by`, a power of two.
template <int BATCH>
DEVICE PartialRow merge_row(const ForwardParams& p, u32 first, u32 count, u32 row, u32 quad, float by) {
    const float* partials = partial_at(p, first);
    const float *out_at = partials + row * VALUE_DIM + quad * 4, *row_max_at = partials + PARTIAL_ROW_MAX + row;
    u32 lane = threadIdx.x % 32;
    PartialRow sum = {-INF, 0.f, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll 1
    for (u32 n = 0; n < count; n += BATCH) {
        // All loads of a batch are issued before any of them is used. A lane loads row_max and row_sum of one partial.
        u32 rest = count - n;
        float4 out[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            out[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (i < rest && quad < QUADS) out[i] = __ldcg((const float4*)(out_at + (u64)(n + i) * PARTIAL_STEP));
        }
        bool exists = lane < BATCH && lane < rest;
        float row_max = exists ? __ldcg(row_max_at + (u64)(n + lane) * PARTIAL_STEP) : -INF;
        float row_sum = exists ? __ldcg(row_max_at + (u64)(n + lane) * PARTIAL_STEP + BLOCK_M) : 0.f;
        float max = row_max;
#pragma unroll
        for (int i = 16; i; i /= 2) max = fmaxf(max, __shfl_xor_sync(ALL_LANES, max, i));
        max = fmaxf(max, sum.row_max);
        float shift = max == -INF ? 0.f : max, old_factor = exp2_approx(sum.row_max - shift), factor = exp2_approx(row_max - shift);
        row_sum *= factor;
#pragma unroll
        row_sum = warp_sum(row_sum);
        sum.row_max = max;
        sum.row_sum = fmaf(sum.row_sum, old_factor, row_sum);
        sum.out.x *= old_factor, sum.out.y *= old_factor, sum.out.z *= old_factor, sum.out.w *= old_factor;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            add_times(sum.out, out[i], __shfl_sync(ALL_LANES, factor * by, i));
        }
    }
    return sum;
}

// Merges a team's rows of `count` partials from `first` on, into the partial `to`, or for NONE into the output.
template <int BATCH>
DEVICE void merge_partials(const ForwardParams& p, const WorkTile& work_tile, const MergeTeam& team, u32 first, u32 count, u32 to) {
    constexpr u32 ROW_UNITS = (QUADS + 31) / 32;
    u32 lane = threadIdx.x % 32;
    for (u32 unit = team.warp; unit < team.rows * ROW_UNITS; unit += team.warps) {
        u32 row = team.first_row + unit / ROW_UNITS, quad = unit % ROW_UNITS * 32 + lane;
        PartialRow sum = merge_row<BATCH>(p, first, count, row, quad, 1.f);
        float unshrink = 1.f;
        // Sums of groups may have overflowed as well: the splits themselves are merged.
        if (CAN_OVERFLOW && to == NONE && __any_sync(ALL_LANES, quad < QUADS && !is_finite(sum.out))) {
            PartialRow shrunk = merge_row<1>(p, work_tile.first_partial, num_splits(work_tile), row, quad, SHRINK);
            if (!is_finite(sum.out)) sum = shrunk, unshrink = 1.f / SHRINK;
        }
        if (quad >= QUADS) continue;
        if (to == NONE) store_merged(p, work_tile, row, quad * 4, sum, unshrink);
        else store_partial(p, to, row, quad * 4, sum);
    }
}

// Called by the N threads of a team when they have stored a partial. The last team to store one merges all of them: it calls
// `merge(first, count, to)`, first for its group of splits if there are groups.
template <int N, typename Merge>
DEVICE void merge_if_last(const ForwardParams& p, const WorkTile& work_tile, const MergeTeam& team, Merge merge) {
    u32 first = work_tile.first_partial, count = num_splits(work_tile);
    if (work_tile.splits & SPLITS_GROUPED) {
        u32 group = (work_tile.partial - first) / MERGE_GROUP, rest = count - group * MERGE_GROUP, size = rest < MERGE_GROUP ? rest : MERGE_GROUP;
        if (!is_last_split<N>(p, (work_tile.counter + 1 + group) * team.teams + team.team, size, team)) return;
        merge(first + group * MERGE_GROUP, size, first + count + group);
        first += count;
        count = (count + MERGE_GROUP - 1) / MERGE_GROUP;
    }
    if (is_last_split<N>(p, work_tile.counter * team.teams + team.team, count, team)) merge(first, count, NONE);
}
