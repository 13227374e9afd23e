// Merges the splits of a tile. A team with no further work tile waits for the last split; the team that stores it and those still waiting divide
// the tile's rows.
//
// A counter has the state of a tile's merge: STORED times the number of splits that are stored, WAITING << n where the team of split n waits or
// merges, and MERGED times the number of teams that have merged their rows. While splits are missing a team may stop waiting, and takes its bit
// back; once all are stored the bits no longer change. The last team to merge leaves 0 behind. Which teams share the rows changes nothing in
// the result: each row's partials are added in the order of their keys.

constexpr u32 MAX_SHARING = 16, STORED = 1, STORED_MASK = 0xff, WAITING = 1 << 8, MERGED = 1 << 24;
// Polls for the last split, and the sleep between them. A poll also waits for a load from the second-level cache, and __nanosleep may sleep up to
// twice as long.
constexpr u32 MERGE_POLLS = 128, POLL_NANOSECONDS = 100;

// The share of a merge: rows are divided among `count` teams, of which this one has number `rank`. Nothing if `count` is 0.
struct MergeShare {
    u32 rank, count;
};

// A merge of `count` partials from `first` on into the partial `to`, or into the output if `to` is NONE. `split` is the index of this team's
// partial among them; counter `counter` holds the state.
struct MergeStep {
    u32 first, count, to, split, counter;
};

// The merge of a split's group, or of all splits or groups.
DEVICE MergeStep merge_step(const WorkTile& work_tile, bool of_group) {
    const u32 first = work_tile.first_partial, count = num_splits(work_tile), split = work_tile.partial - first, group = split / MERGE_GROUP;
    if (of_group) {
        const u32 rest = count - group * MERGE_GROUP;
        return {first + group * MERGE_GROUP, rest < MERGE_GROUP ? rest : MERGE_GROUP, first + count + group, split % MERGE_GROUP, work_tile.counter + 1 + group};
    }
    if (work_tile.splits & SPLITS_GROUPED) return {first + count, (count + MERGE_GROUP - 1) / MERGE_GROUP, NONE, group, work_tile.counter};
    return {first, count, NONE, split, work_tile.counter};
}

// Records a split as stored; if `waits`, waits for the others. The last team alone merges a group, or more splits than the state has bits for.
DEVICE MergeShare join_merge(u32* state_at, const MergeStep& step, bool waits) {
    const u32 bit = step.to == NONE && step.count <= MAX_SHARING ? WAITING << step.split : 0;
    // Without bits there is nothing but the number of splits.
    const u32 mask = bit ? STORED_MASK : ~0u;
    u32 state = atomic_add_acq_rel(state_at, STORED + bit) + STORED + bit;
    for (u32 polls = waits && bit ? MERGE_POLLS : 0; (state & mask) != step.count;) {
        if (polls) {
            polls--;
            __nanosleep(POLL_NANOSECONDS);
        } else if (!bit || atomicCAS(state_at, state, state - bit) == state) {
            return {0, 0};
        }
        state = load_acquire(state_at);
    }
    if (!bit) return {0, 1};
    const u32 sharing = state / WAITING % (1 << MAX_SHARING);
    return {(u32)__popc(sharing & (bit / WAITING - 1)), (u32)__popc(sharing)};
}

// Records that a team has merged its rows. The last of `count` teams clears the state for the next launch.
DEVICE void leave_merge(u32* state_at, u32 count) {
    if (count == 1 || atomicAdd(state_at, MERGED) / MERGED + 1 == count) *state_at = 0;
}

// ---- the rows of a merge
//
// A merge runs once: its time is mostly waiting, for instructions and for memory. Loops that are not unrolled keep the code short, and all that a row
// needs is loaded at once.

// How many partials a lane loads at a time, and how many rows of each. Threads of three or four teams have few registers.
constexpr int MERGE_BATCH = WARPS > 8 ? 4 : 8, MERGE_ROWS = 2;

// A warp's rows of a merge, at most one for each lane, which has that row's row_max, row_sum, factor and address in the output.
struct MergeRows {
    const ForwardParams& p;
    const WorkTile& work_tile;
    u32 first, count;
    float row_max, row_sum, factor;
    u64 address;

    DEVICE MergeRows(const ForwardParams& p, const WorkTile& work_tile, const MergeTeam& team) : p(p), work_tile(work_tile) {
        const u32 share = (team.rows + team.warps - 1) / team.warps, before = team.warp * share;
        const u32 rest = before < team.rows ? team.rows - before : 0;
        first = team.first_row + before, count = rest < share ? rest : share;
        row_max = -INF, row_sum = 0.f, factor = 0.f, address = 0;
    }

    // Finds the end of each row, and stores its logsumexp.
    DEVICE void finish() {
        if (threadIdx.x % 32 >= count) return;
        const QRow at = q_row(p, work_tile.kv_head, work_tile.row + first + threadIdx.x % 32);
        const RowEnd end = finish_row(p, work_tile, at, row_max, row_sum);
        factor = end.factor, address = row_address(p.out, work_tile, at);
        store_lse(p, work_tile, at, end.lse);
    }

    // Adds `rest` partials, at most BATCH of them: to `sums`, a lane's four columns of MERGE_ROWS rows from the warp's row `from` on, and to row_max and
    // row_sum of the lane's own row. `out_at` and `row_max_at` are their places in the first of the partials. Outputs are multiplied by `by`.
    template <int BATCH>
    DEVICE void add(const float* out_at, const float* row_max_at, u32 rest, u32 from, float by, float4 (&sums)[MERGE_ROWS]) {
        // All loads are issued before any of them is used.
        const bool exists = threadIdx.x % 32 < count;
        float maxima[BATCH], row_sums[BATCH];
        float4 x[BATCH][MERGE_ROWS];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const u32 at = i * PARTIAL_STEP;
            maxima[i] = exists && i < rest ? __ldcg(row_max_at + at) : -INF;
            row_sums[i] = exists && i < rest ? __ldcg(row_max_at + at + BLOCK_M) : 0.f;
#pragma unroll
            for (int c = 0; c < MERGE_ROWS; c++)
                x[i][c] = i < rest && from + c < count ? __ldcg((const float4*)(out_at + at + c * VALUE_DIM)) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
        float max = row_max;
#pragma unroll
        for (int i = 0; i < BATCH; i++) max = fmaxf(max, maxima[i]);
        const float shift = max == -INF ? 0.f : max, rescale = exp2_approx(row_max - shift);
        row_max = max, row_sum *= rescale;
#pragma unroll
        for (int c = 0; c < MERGE_ROWS; c++) {
            const float row_rescale = __shfl_sync(ALL_LANES, rescale, from + c);
            sums[c] = make_float4(sums[c].x * row_rescale, sums[c].y * row_rescale, sums[c].z * row_rescale, sums[c].w * row_rescale);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float scale = exp2_approx(maxima[i] - shift);
            row_sum = fmaf(row_sums[i], scale, row_sum);
#pragma unroll
            for (int c = 0; c < MERGE_ROWS; c++) add_times(sums[c], x[i][c], __shfl_sync(ALL_LANES, scale * by, from + c));
        }
    }

    // The sums of MERGE_ROWS rows over `splits` partials from `partials` on, in their order: four columns a lane. Finds row_max and row_sum of all
    // the warp's rows too, again for every MERGE_ROWS rows: a pass of its own would wait for memory once more.
    template <int BATCH>
    DEVICE void sum(const float* partials, u32 splits, u32 from, u32 quad, float by, float4 (&sums)[MERGE_ROWS]) {
        const float* out_at = partials + (first + from) * VALUE_DIM + (quad < QUADS ? quad : 0) * 4;
        const float* row_max_at = partials + PARTIAL_ROW_MAX + first + threadIdx.x % 32;
        row_max = -INF, row_sum = 0.f;
#pragma unroll
        for (int c = 0; c < MERGE_ROWS; c++) sums[c] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (u32 n = 0; n < splits; n += BATCH, out_at += BATCH * PARTIAL_STEP, row_max_at += BATCH * PARTIAL_STEP)
            add<BATCH>(out_at, row_max_at, splits - n, from, by, sums);
    }

    // The means of sums, where one of the warp's exceeds MAX_VALUE or is NaN. Sums may overflow where means do not. Such rows are summed a second
    // time, scaled by SHRINK, from the splits themselves, since a group's sum may have overflowed too.
    DEVICE void careful_means(const float4 (&sums)[MERGE_ROWS], u32 from, u32 quad, float4 (&means)[MERGE_ROWS]) {
        float4 shrunk[MERGE_ROWS];
        if (CAN_OVERFLOW) sum<1>(partial_at(p, work_tile.first_partial), num_splits(work_tile), from, quad, SHRINK, shrunk);
#pragma unroll
        for (int c = 0; c < MERGE_ROWS; c++) {
            const float by = __shfl_sync(ALL_LANES, factor, from + c);
            const bool again = CAN_OVERFLOW && !is_finite(sums[c]);
            means[c] = again ? finite_means(shrunk[c], by, 1.f / SHRINK) : finite_means(sums[c], by, 1.f);
        }
    }

    // Stores MERGE_ROWS rows of sums, in the partial `to` or for NONE as means in the output.
    DEVICE void store(const float4 (&sums)[MERGE_ROWS], u32 from, u32 quad, u32 to) {
        if (to != NONE) {
#pragma unroll
            for (int c = 0; c < MERGE_ROWS; c++) {
                const PartialRow row = {__shfl_sync(ALL_LANES, row_max, from + c), __shfl_sync(ALL_LANES, row_sum, from + c), sums[c]};
                if (quad < QUADS && from + c < count) store_partial(p, to, first + from + c, quad * 4, row);
            }
            return;
        }
        float4 means[MERGE_ROWS];
        bool all_fit = true;
#pragma unroll
        for (int c = 0; c < MERGE_ROWS; c++) {
            const float by = __shfl_sync(ALL_LANES, factor, from + c);
            means[c] = make_float4(sums[c].x * by, sums[c].y * by, sums[c].z * by, sums[c].w * by);
            all_fit &= from + c >= count || is_within(means[c], MAX_VALUE);
        }
        if (__any_sync(ALL_LANES, !all_fit)) careful_means(sums, from, quad, means);
        const u32 column = value_panel(work_tile) * VALUE_DIM + quad * 4;
#pragma unroll
        for (int c = 0; c < MERGE_ROWS; c++) {
            const u32 low = __shfl_sync(ALL_LANES, (u32)address, from + c), high = __shfl_sync(ALL_LANES, (u32)(address >> 32), from + c);
            if (quad < QUADS && from + c < count && column < p.value_dim) store_columns4(p, (u64)high << 32 | low, column, means[c]);
        }
    }
};

// Merges a team's rows of a step's partials.
DEVICE void merge_rows(const ForwardParams& p, const WorkTile& work_tile, const MergeTeam& team, const MergeStep& step) {
    MergeRows rows(p, work_tile, team);
    const float* partials = partial_at(p, step.first);
#pragma unroll 1
    for (u32 from = 0; from < rows.count; from += MERGE_ROWS) {
#pragma unroll 1
        for (u32 quad = threadIdx.x % 32; quad < (QUADS + 31) / 32 * 32; quad += 32) {
            float4 sums[MERGE_ROWS];
            rows.sum<MERGE_BATCH>(partials, step.count, from, quad, 1.f, sums);
            if (step.to == NONE && from == 0 && quad < 32) rows.finish();
            rows.store(sums, from, quad, step.to);
        }
    }
}

// Called by the N threads of a team when they have stored a split of a tile. If `waits`, the team waits a while for the last split; it and the
// team that stores that split divide the merge. Where there are groups of splits, the last team of a group merges it first.
template <int N>
DEVICE void merge_splits(const ForwardParams& p, const WorkTile& work_tile, const MergeTeam& team, bool waits) {
    // One piece of code for both merges: it is a large part of the kernel.
#pragma unroll 1
    for (bool of_group = work_tile.splits & SPLITS_GROUPED;; of_group = false) {
        const MergeStep step = merge_step(work_tile, of_group);
        auto state_at = [&] { return (u32*)p.counters + step.counter * team.teams + team.team; };
        named_barrier_sync<N>(team.barrier);
        if (threadIdx.x % N == 0) {
            const MergeShare share = join_merge(state_at(), step, waits);
            // The team's rows, the first and the one behind the last, and how many teams share the merge.
            const u32 begin = share.count ? team.rows * share.rank / share.count : 0, end = share.count ? team.rows * (share.rank + 1) / share.count : 0;
            *team.message = begin | end << 10 | share.count << 20;
        }
        named_barrier_sync<N>(team.barrier);
        const u32 begin = *team.message % 1024, end = *team.message / 1024 % 1024;
        if (begin < end) {
            MergeTeam own = team;
            own.first_row += begin, own.rows = end - begin;
            merge_rows(p, work_tile, own, step);
        }
        // The team leaves only now, since the atomic addition would delay the merge. `opaque`: the thread's number does not occupy a register during
        // the merge.
        const u32 sharing = *team.message >> 20;
        if (opaque(threadIdx.x) % N == 0 && sharing) leave_merge(state_at(), sharing);
        if (!sharing || !of_group) return;
    }
}
